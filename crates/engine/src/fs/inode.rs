//! Inodes: what `stat` tells, and the names of each.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::{InodeExtref, InodeItem, InodeRef, flags};
use ubtrfs_ondisk::misc::{OnDisk, Timespec};
use ubtrfs_ondisk::{Corruption, Generation, InodeNo, Key, KeyType, Reason, RootId};
use ubtrfs_rt::Time;

use super::xattr;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// An inode of the filesystem: its subvolume and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct InodeId {
    /// The subvolume.
    pub root: RootId,
    /// The number in it.
    pub inode: InodeNo,
}

impl InodeId {
    /// The root directory of a subvolume.
    pub fn root_of(root: RootId) -> Self {
        Self { root, inode: InodeNo::SUBVOLUME_ROOT }
    }

    /// The empty directory that holds the place of a subvolume nested in what `root` is a
    /// snapshot of.
    pub fn stand_in(root: RootId) -> Self {
        Self { root, inode: InodeNo::EMPTY_SUBVOL_DIR }
    }

    /// Whether this is such an empty directory, which is not in the tree.
    pub fn is_stand_in(self) -> bool {
        self.inode == InodeNo::EMPTY_SUBVOL_DIR
    }

    pub(crate) fn key(self, ty: KeyType, offset: u64) -> Key {
        Key::new(self.inode.object_id(), ty, offset)
    }
}

impl std::fmt::Display for InodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "inode {} of subvolume {}", self.inode, self.root)
    }
}

/// The device number that [`Inode::rdev`] holds for a device node.
pub fn device_number(major: u32, minor: u32) -> u64 {
    u64::from(major) << 20 | u64::from(minor & 0xf_ffff)
}

/// An inode's attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Inode {
    /// Which it is.
    pub id: InodeId,
    /// Transaction of its making: what keeps a reused number apart.
    pub generation: Generation,
    /// Transaction of its last change.
    pub transid: Generation,
    /// Size in bytes; of a directory, twice the length of its entries' names.
    pub size_bytes: u64,
    /// Bytes that its extents take: holes out, preallocation in, inline data by length.
    pub nbytes: u64,
    /// Number of names; 1 for a directory.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Type and permissions, as in `st_mode`.
    pub mode: u32,
    /// Device number of a device node, see [`device_number`].
    pub rdev: u64,
    /// Bits of [`ubtrfs_ondisk::inode::flags`].
    pub flags: u64,
    /// Counts changes, for NFS.
    pub sequence: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Birth.
    pub otime: Time,
}

pub(super) fn time_of(time: &Timespec) -> Time {
    Time { sec: time.sec.get(), nsec: time.nsec.get().min(999_999_999) }
}

impl Inode {
    /// The attributes that an INODE_ITEM holds.
    pub(crate) fn from_item(id: InodeId, item: &InodeItem) -> Self {
        Self {
            id,
            generation: Generation(item.generation.get()),
            transid: Generation(item.transid.get()),
            size_bytes: item.size.get(),
            nbytes: item.nbytes.get(),
            nlink: item.nlink.get(),
            uid: item.uid.get(),
            gid: item.gid.get(),
            mode: item.mode.get(),
            rdev: item.rdev.get(),
            flags: item.flags.get(),
            sequence: item.sequence.get(),
            atime: time_of(&item.atime),
            ctime: time_of(&item.ctime),
            mtime: time_of(&item.mtime),
            otime: time_of(&item.otime),
        }
    }

    /// What it is, from its mode.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode)
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type() == FileType::Directory
    }

    /// Whether its data has checksums.
    pub fn has_csums(&self) -> bool {
        self.flags & flags::NODATASUM == 0
    }

    /// Major and minor number of a device node.
    pub fn device(&self) -> (u32, u32) {
        // Linux keeps 12 and 20 bits.
        let major = u32::try_from(self.rdev >> 20 & 0xfff).unwrap_or(0);
        let minor = u32::try_from(self.rdev & 0xf_ffff).unwrap_or(0);
        (major, minor)
    }
}

/// A name of an inode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Link {
    /// The directory that holds it.
    pub parent: InodeId,
    /// Its index in the directory.
    pub index: u64,
    /// The name.
    pub name: Vec<u8>,
}

impl Filesystem {
    /// The attributes of an inode.
    ///
    /// # Errors
    /// `NotFound` when there is no such inode or subvolume.
    pub fn inode(&self, id: InodeId) -> Result<Inode> {
        loop {
            let (mut inode, count) = self.counted_inode(id)?;
            let mut is_overlaid = false;
            if let Some(space) = self.inner.open_files.find(id) {
                // In this order, as who writes notes the time first.
                inode.size_bytes = space.size().bytes();
                if let Some(written) = *space.inode().written.lock() {
                    inode.mtime = written;
                    // Other attributes may have been changed since.
                    inode.ctime = inode.ctime.max(written);
                    is_overlaid = true;
                }
            }
            // Else what memory said may have gone to the tree since that was looked at.
            if is_overlaid || self.inner.files.any_data_count(id) == count {
                return Ok(inode);
            }
        }
    }

    /// What the trees say of an inode, of a file that is being cut with the end that it will have, and the count of its data's changes at
    /// which that was so, odd while one is under way.
    pub(super) fn counted_inode(&self, id: InodeId) -> Result<(Inode, u64)> {
        let files = &self.inner.files;
        loop {
            let count = files.any_data_count(id);
            let mut inode = self.disk_inode(id)?;
            inode.size_bytes = files.cuts.end_of(id, inode.size_bytes);
            if files.any_data_count(id) == count {
                return Ok((inode, count));
            }
        }
    }

    /// As [`Filesystem::inode`], without what memory knows of an open file's data.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn disk_inode(&self, id: InodeId) -> Result<Inode> {
        if id.is_stand_in() {
            return self.stand_in_inode(id);
        }
        if let Some(item) = self.inner.files.held_item(id) {
            return Ok(Inode::from_item(id, &item));
        }
        self.tree_inode(id)
    }

    /// The attributes of an inode that is not held in memory.
    ///
    /// # Errors
    /// As [`Filesystem::inode`].
    pub(crate) fn tree_inode(&self, id: InodeId) -> Result<Inode> {
        let item = self
            .tree(id.root)?
            .lookup(&id.key(KeyType::INODE_ITEM, 0))?
            .ok_or_else(|| Error::not_found(id))?;
        let item = InodeItem::peek(&item).map_err(|error| error.in_root(id.root))?;
        let inode = Inode::from_item(id, item);
        let unsaid = xattr::flags_unsaid(&self.inner.core, id, item)?;
        Ok(Inode { flags: inode.flags | unsaid, ..inode })
    }

    /// A stand-in looks like Linux's: an empty directory, of the subvolume that it stands in.
    fn stand_in_inode(&self, id: InodeId) -> Result<Inode> {
        let root = self.inode(InodeId::root_of(id.root))?;
        Ok(Inode {
            id,
            size_bytes: 0,
            nbytes: 0,
            nlink: 1,
            uid: 0,
            gid: 0,
            mode: 0o040_755,
            rdev: 0,
            flags: 0,
            sequence: 0,
            ..root
        })
    }

    /// The attributes of a directory.
    ///
    /// # Errors
    /// `NotDirectory` for another kind of inode.
    pub(crate) fn directory(&self, id: InodeId) -> Result<Inode> {
        let inode = self.inode(id)?;
        if !inode.is_dir() {
            return Err(Error::NotDirectory { what: id.to_string() });
        }
        Ok(inode)
    }

    /// All names of an inode: one for each hard link. A subvolume's root directory has none here.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn links(&self, id: InodeId) -> Result<Vec<Link>> {
        self.inner.files.settled(|| self.find_links(id), |_| false)
    }

    pub(super) fn find_links(&self, id: InodeId) -> Result<Vec<Link>> {
        let mut links = Vec::new();
        if id.is_stand_in() {
            return Ok(links);
        }
        let mut cursor = self.tree(id.root)?.cursor();
        cursor.seek(&id.key(KeyType::INODE_REF, 0))?;
        while let Some((key, data)) = cursor.current()? {
            if key.objectid != id.inode.object_id() || key.ty > KeyType::INODE_EXTREF {
                break;
            }
            let parsed = match key.ty {
                KeyType::INODE_REF => links_of_ref(id.root, InodeNo(key.offset), data, &mut links),
                KeyType::INODE_EXTREF => links_of_extref(id.root, data, &mut links),
                _ => Ok(()),
            };
            parsed.map_err(|error| error.in_root(id.root))?;
            cursor.next()?;
        }
        // The root directory names itself, "..".
        links.retain(|link| link.parent != id);
        Ok(links)
    }
}

fn name_of(rest: &[u8], len: usize) -> Result<(&[u8], &[u8]), Box<Corruption>> {
    rest.split_at_checked(len).ok_or_else(|| {
        Corruption::new(Reason::Truncated)
            .have(format!("{} bytes", rest.len()))
            .expect(format!("a name of {len} bytes"))
    })
}

fn links_of_ref(
    root: RootId,
    parent: InodeNo,
    mut data: &[u8],
    links: &mut Vec<Link>,
) -> Result<(), Box<Corruption>> {
    while !data.is_empty() {
        let (item, rest) = InodeRef::split(data)?;
        let (name, rest) = name_of(rest, usize::from(item.name_len.get()))?;
        let parent = InodeId { root, inode: parent };
        links.push(Link { parent, index: item.index.get(), name: name.to_vec() });
        data = rest;
    }
    Ok(())
}

fn links_of_extref(
    root: RootId,
    mut data: &[u8],
    links: &mut Vec<Link>,
) -> Result<(), Box<Corruption>> {
    while !data.is_empty() {
        let (item, rest) = InodeExtref::split(data)?;
        let (name, rest) = name_of(rest, usize::from(item.name_len.get()))?;
        let parent = InodeId { root, inode: InodeNo(item.parent_objectid.get()) };
        links.push(Link { parent, index: item.index.get(), name: name.to_vec() });
        data = rest;
    }
    Ok(())
}
