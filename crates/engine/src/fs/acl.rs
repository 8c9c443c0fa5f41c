//! POSIX access control lists: what a new inode takes over from its directory, and how a list and
//! the permissions of its inode follow each other.
//!
//! A list is stored as the attribute of its name, in the form of `linux/posix_acl_xattr.h`,
//! version 2. Its meaning is that of POSIX.1e, draft 17, chapter 23: the permissions of the owner
//! and of others are the list's entries for them; those of the group are the mask, where there is
//! one, else the entry of the owning group.

use ubtrfs_ondisk::dir::FileType;

use super::inode::InodeId;
use super::make::{Inherit, NewInode};
use crate::error::{Error, Result};
use crate::filesystem::Handle;

/// The list that decides who may do what with an inode.
pub(super) const ACCESS_XATTR: &[u8] = b"system.posix_acl_access";
/// The list that new inodes in a directory begin with.
pub(super) const DEFAULT_XATTR: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const UNDEFINED_ID: u32 = u32::MAX;
const ENTRY_BYTES: usize = 8;
const SET_GID: u32 = 0o2000;
const PERMISSIONS: u32 = 0o777;

/// Whom an entry is for, in the order in which a list has them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Tag {
    UserObj = 0x01,
    User = 0x02,
    GroupObj = 0x04,
    Group = 0x08,
    Mask = 0x10,
    Other = 0x20,
}

impl Tag {
    fn of(value: u16) -> Option<Self> {
        Some(match value {
            0x01 => Self::UserObj,
            0x02 => Self::User,
            0x04 => Self::GroupObj,
            0x08 => Self::Group,
            0x10 => Self::Mask,
            0x20 => Self::Other,
            _ => return None,
        })
    }

    fn is_named(self) -> bool {
        matches!(self, Self::User | Self::Group)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    tag: Tag,
    permissions: u16,
    id: u32,
}

/// A list that is whole: one entry each for owner, owning group and others, a mask where anybody is
/// named.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Acl {
    entries: Vec<Entry>,
}

impl Acl {
    /// The list in a stored value; `None` for an empty one, which means that there is none.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(value: &[u8]) -> std::result::Result<Option<Self>, &'static str> {
        let Some((version, rest)) = value.split_first_chunk::<4>() else {
            return if value.is_empty() { Ok(None) } else { Err("it is cut off") };
        };
        if u32::from_le_bytes(*version) != VERSION {
            return Err("its version is not 2");
        }
        let (entries, odd) = rest.as_chunks::<ENTRY_BYTES>();
        if !odd.is_empty() {
            return Err("it is cut off");
        }
        let entries = entries
            .iter()
            .map(|&[t0, t1, p0, p1, i0, i1, i2, i3]| {
                let tag = Tag::of(u16::from_le_bytes([t0, t1])).ok_or("an unknown tag")?;
                let permissions = u16::from_le_bytes([p0, p1]);
                if permissions > 0o7 {
                    return Err("permissions beyond rwx");
                }
                let id = u32::from_le_bytes([i0, i1, i2, i3]);
                if tag.is_named() && id == UNDEFINED_ID {
                    return Err("a named entry without a number");
                }
                let id = if tag.is_named() { id } else { UNDEFINED_ID };
                Ok(Entry { tag, permissions, id })
            })
            .collect::<std::result::Result<Vec<_>, _>>()?;
        if entries.is_empty() {
            return Ok(None);
        }
        let this = Self { entries };
        this.check().map(|()| Some(this))
    }

    fn check(&self) -> std::result::Result<(), &'static str> {
        if !self.entries.is_sorted_by_key(|entry| entry.tag) {
            return Err("its entries are out of order");
        }
        let count = |tag| self.entries.iter().filter(|entry| entry.tag == tag).count();
        let is_base = |tag| count(tag) == 1;
        if !is_base(Tag::UserObj) || !is_base(Tag::GroupObj) || !is_base(Tag::Other) {
            return Err("it has not one entry each for owner, owning group and others");
        }
        let is_named = self.entries.iter().any(|entry| entry.tag.is_named());
        match count(Tag::Mask) {
            0 if is_named => Err("it names somebody and has no mask"),
            0 | 1 => Ok(()),
            _ => Err("it has two masks"),
        }
    }

    /// The stored form.
    pub(super) fn to_value(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            value.extend_from_slice(&(entry.tag as u16).to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    /// Whether it says no more than permissions can.
    pub(super) fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// The permissions that an inode with this list shows, nine bits.
    pub(super) fn mode(&self) -> u32 {
        [(Tag::UserObj, 6), (self.group_tag(), 3), (Tag::Other, 0)]
            .into_iter()
            .map(|(tag, shift)| u32::from(self.permissions(tag)) << shift)
            .sum()
    }

    /// The list after the inode's permissions were set to `mode`.
    pub(super) fn with_mode(mut self, mode: u32) -> Self {
        let group = self.group_tag();
        for (tag, shift) in [(Tag::UserObj, 6), (group, 3), (Tag::Other, 0)] {
            self.set(tag, u16::try_from(mode >> shift & 0o7).unwrap_or(0));
        }
        self
    }

    fn group_tag(&self) -> Tag {
        let has_mask = self.entries.iter().any(|entry| entry.tag == Tag::Mask);
        if has_mask { Tag::Mask } else { Tag::GroupObj }
    }

    fn permissions(&self, tag: Tag) -> u16 {
        self.entries.iter().find(|entry| entry.tag == tag).map_or(0, |entry| entry.permissions)
    }

    fn set(&mut self, tag: Tag, permissions: u16) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.tag == tag) {
            entry.permissions = permissions;
        }
    }
}

/// What a new inode begins with, beside what was asked for.
#[derive(Debug, Default)]
pub(super) struct Inherited {
    access: Option<Vec<u8>>,
    default: Option<Vec<u8>>,
}

impl Handle<'_> {
    /// Lets a new inode take over what its directory gives it: group, set-group-id bit and lists.
    ///
    /// # Errors
    /// `NotFound`; damage in the tree.
    pub(super) fn inherit_from(
        &self,
        dir: InodeId,
        (dir_mode, dir_gid): (u32, u32),
        new: &NewInode,
    ) -> Result<(NewInode, Inherited)> {
        let mut new = *new;
        let Inherit::AsProcess { umask } = new.inherit else {
            return Ok((new, Inherited::default()));
        };
        let file_type = FileType::from_mode(new.mode);
        if dir_mode & SET_GID != 0 {
            new.gid = dir_gid;
            if file_type == FileType::Directory {
                new.mode |= SET_GID;
            }
        }
        let mut inherited = Inherited::default();
        if file_type == FileType::Symlink {
            return Ok((new, inherited));
        }
        let Some(default) = self.default_acl(dir)? else {
            new.mode &= !(umask & PERMISSIONS);
            return Ok((new, inherited));
        };
        if file_type == FileType::Directory {
            inherited.default = Some(default.to_value());
        }
        let mode = new.mode & default.mode();
        let access = default.with_mode(mode);
        if !access.is_minimal() {
            inherited.access = Some(access.to_value());
        }
        new.mode = new.mode & !PERMISSIONS | mode & PERMISSIONS;
        Ok((new, inherited))
    }

    /// As [`Handle::inherit_from`], for a subvolume: in Linux it gets neither group nor lists, and
    /// is limited by both umask and default list.
    ///
    /// # Errors
    /// Damage in the tree.
    pub(super) fn permissions_of_subvolume(
        &self,
        dir: InodeId,
        new: &NewInode,
    ) -> Result<NewInode> {
        let Inherit::AsProcess { umask } = new.inherit else { return Ok(*new) };
        let limit = self.default_acl(dir)?.map_or(PERMISSIONS, |default| default.mode());
        Ok(NewInode { mode: new.mode & !(umask & PERMISSIONS) & (!PERMISSIONS | limit), ..*new })
    }

    /// A directory's list for new inodes. What cannot be understood is as none, as for Linux.
    fn default_acl(&self, dir: InodeId) -> Result<Option<Acl>> {
        let value = self.fs.xattr(dir, DEFAULT_XATTR)?;
        Ok(value.and_then(|value| Acl::parse(&value).ok().flatten()))
    }

    /// Enters what was inherited.
    ///
    /// # Errors
    /// What stops an edit; the transaction is then aborted.
    pub(super) fn put_inherited(&mut self, id: InodeId, inherited: &Inherited) -> Result<()> {
        for (name, value) in
            [(ACCESS_XATTR, &inherited.access), (DEFAULT_XATTR, &inherited.default)]
        {
            if let Some(value) = value {
                self.put_xattr(id, name, value).map_err(|error| self.txn.abort(error))?;
            }
        }
        Ok(())
    }

    /// The access list of an inode after its permissions were set to `mode`; `None` where it has
    /// none.
    ///
    /// # Errors
    /// Damage in the tree.
    pub(super) fn acl_with_mode(&self, id: InodeId, mode: u32) -> Result<Option<Vec<u8>>> {
        let value = self.fs.xattr(id, ACCESS_XATTR)?;
        let acl = value.and_then(|value| Acl::parse(&value).ok().flatten());
        Ok(acl.map(|acl| acl.with_mode(mode).to_value()))
    }
}

/// What setting an attribute means, where it is a list.
#[derive(Debug)]
pub(super) enum SetAcl {
    /// It is none.
    No,
    /// The list as it is to be stored, `None` for not at all, and the permissions that it gives.
    Access(Option<Vec<u8>>, Option<u32>),
    /// The list for new inodes, `None` for no more.
    Default(Option<Vec<u8>>),
}

impl SetAcl {
    /// What it means to give an inode of that mode the attribute.
    ///
    /// # Errors
    /// `InvalidArgument` for a list that is not whole, or that such an inode cannot have.
    pub(super) fn of(mode: u32, name: &[u8], value: &[u8]) -> Result<Self> {
        if name != ACCESS_XATTR && name != DEFAULT_XATTR {
            return Ok(Self::No);
        }
        let invalid = |what: &str| Error::InvalidArgument {
            what: format!("access control list {}: {what}", String::from_utf8_lossy(name)),
        };
        let file_type = FileType::from_mode(mode);
        if file_type == FileType::Symlink {
            return Err(invalid("a symbolic link has none"));
        }
        let acl = Acl::parse(value).map_err(invalid)?;
        if name == DEFAULT_XATTR {
            if file_type != FileType::Directory && acl.is_some() {
                return Err(invalid("only a directory has one for new files"));
            }
            return Ok(Self::Default(acl.map(|acl| acl.to_value())));
        }
        let mode = acl.as_ref().map(Acl::mode);
        let stored = acl.filter(|acl| !acl.is_minimal()).map(|acl| acl.to_value());
        Ok(Self::Access(stored, mode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    const NONE: u32 = UNDEFINED_ID;

    #[test]
    fn parse_what_is_not_whole_is_refused() {
        let refused: &[&[(u16, u16, u32)]] = &[
            &[(1, 7, NONE), (4, 5, NONE)],
            &[(1, 7, NONE), (2, 7, 10), (4, 5, NONE), (0x20, 5, NONE)],
            &[(4, 5, NONE), (1, 7, NONE), (0x20, 5, NONE)],
            &[(1, 8, NONE), (4, 5, NONE), (0x20, 5, NONE)],
            &[(1, 7, NONE), (4, 5, NONE), (0x20, 5, NONE), (0x40, 5, NONE)],
            &[(1, 7, NONE), (2, 7, NONE), (4, 5, NONE), (0x10, 7, NONE), (0x20, 5, NONE)],
            &[(1, 7, NONE), (4, 5, NONE), (0x10, 7, NONE), (0x10, 7, NONE), (0x20, 5, NONE)],
        ];
        for entries in refused {
            assert!(Acl::parse(&value(entries)).is_err(), "{entries:?}");
        }
        assert!(Acl::parse(&[2, 0, 0]).is_err());
        assert!(Acl::parse(&[3, 0, 0, 0]).is_err());
        assert!(Acl::parse(&value(&[(1, 7, NONE)])[..9]).is_err());
        assert_eq!(Acl::parse(&[]), Ok(None));
        assert_eq!(Acl::parse(&value(&[])), Ok(None));
    }

    #[test]
    fn mode_is_the_masks_where_there_is_one() {
        let bytes = value(&[
            (1, 6, NONE),
            (2, 7, 10),
            (4, 5, NONE),
            (8, 7, 20),
            (0x10, 4, NONE),
            (0x20, 1, NONE),
        ]);
        let acl = Acl::parse(&bytes).unwrap().unwrap();
        assert_eq!(acl.mode(), 0o641);
        assert_eq!(acl.to_value(), bytes);
        let changed = acl.with_mode(0o750);
        assert_eq!(changed.mode(), 0o750);
        assert_eq!(changed.permissions(Tag::GroupObj), 5);
        assert_eq!(changed.permissions(Tag::Mask), 5);
    }
}
