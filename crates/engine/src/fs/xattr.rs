//! Extended attributes. ACLs and capabilities are some of them.

use ubtrfs_ondisk::KeyType;
use ubtrfs_ondisk::dir::{DirEntries, DirItem, FileType};
use ubtrfs_ondisk::hash::name_hash;
use ubtrfs_ondisk::inode::{InodeItem, flags};
use zerocopy::IntoBytes;

use super::acl::SetAcl;
use super::entry::check_flags;
use super::inode::InodeId;
use super::make::item_bytes_max;
use super::state::{Names, touch};
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;
use crate::filesystem::Handle;
use crate::txn::Core;

impl Filesystem {
    /// The value of an extended attribute, named with its namespace (`user.x`), or `None`.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn xattr(&self, id: InodeId, name: &[u8]) -> Result<Option<Vec<u8>>> {
        if id.is_stand_in() {
            return Ok(None);
        }
        let key = id.key(KeyType::XATTR_ITEM, name_hash(name));
        let Some(item) = self.tree(id.root)?.lookup(&key)? else {
            return Ok(None);
        };
        for entry in DirEntries::new(&item) {
            let entry = entry.map_err(|error| error.in_root(id.root))?;
            if entry.name == name {
                return Ok(Some(entry.data.to_vec()));
            }
        }
        Ok(None)
    }

    /// All extended attributes with their values, in the order of the tree.
    ///
    /// # Errors
    /// Damaged items, or the device's error.
    pub fn xattrs(&self, id: InodeId) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut xattrs = Vec::new();
        if id.is_stand_in() {
            return Ok(xattrs);
        }
        let mut cursor = self.tree(id.root)?.cursor();
        cursor.seek(&id.key(KeyType::XATTR_ITEM, 0))?;
        while let Some((key, data)) = cursor.current()? {
            if key.objectid != id.inode.object_id() || key.ty != KeyType::XATTR_ITEM {
                break;
            }
            for entry in DirEntries::new(data) {
                let entry = entry.map_err(|error| error.in_root(id.root))?;
                xattrs.push((entry.name.to_vec(), entry.data.to_vec()));
            }
            cursor.next()?;
        }
        Ok(xattrs)
    }
}

/// Longest name, as in Linux.
const NAME_BYTES_MAX: usize = 255;

/// The property that names a file's or directory's compression.
pub(super) const COMPRESSION_XATTR: &[u8] = b"btrfs.compression";

/// What a new inode takes over of that property, as in Linux: the method, without a level, and nothing where there is to be none.
pub(super) fn inheritable(value: &[u8]) -> Option<Vec<u8>> {
    let methods = [&b"zlib"[..], b"lzo", b"zstd"];
    methods.into_iter().find(|method| value.starts_with(method)).map(<[u8]>::to_vec)
}

/// What a file gives who runs it.
const CAPABILITY_XATTR: &[u8] = b"security.capability";

impl Handle<'_> {
    /// Sets an extended attribute, named with its namespace, in place of the value that it has. An
    /// access control list sets the inode's permissions; one that says no more than they do, or
    /// nothing, is not kept. `btrfs.compression` sets the inode's flags; without a value it is none.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`; `InvalidArgument` for an access control list that is
    /// malformed, or that such an inode cannot have, and a compression that there is not, or of a file whose data has no checksums or
    /// no copy-on-write; `TooLong`
    /// when name and value do not fit a leaf,
    /// `Limit` when they do not beside others whose names have the same hash.
    pub fn set_xattr(&mut self, id: InodeId, name: &[u8], value: &[u8]) -> Result<()> {
        check_lengths(name, value, item_bytes_max(self.txn.core()) - size_of::<DirItem>())?;
        // Held throughout: nobody else changes the inode's attributes meanwhile, or removes it.
        let fs = self.fs;
        let mut names = fs.inner.files.names();
        let (mode, inode_flags) = self.check_xattrs(&mut names, id)?;
        // A property without a value is none.
        let kept = (name != COMPRESSION_XATTR || !value.is_empty()).then_some(value);
        let bits = compression_bits(id, mode, inode_flags, name, kept)?;
        match SetAcl::of(mode, name, value)? {
            SetAcl::No if kept.is_none() => self.put_or_remove(id, name, None)?,
            SetAcl::No => self.put_xattr(id, name, value)?,
            SetAcl::Default(stored) => self.put_or_remove(id, name, stored.as_deref())?,
            SetAcl::Access(stored, permissions) => {
                self.put_or_remove(id, name, stored.as_deref())?;
                if let Some(permissions) = permissions {
                    let mode = mode & !0o777 | permissions;
                    self.change_inode_under(&mut names, id, |item| item.mode = mode.into())
                        .map_err(|error| self.txn.abort(error))?;
                }
            }
        }
        self.set_compression_flags(&mut names, id, bits)?;
        self.touch_for_xattr(&mut names, id)
    }

    fn put_or_remove(&mut self, id: InodeId, name: &[u8], value: Option<&[u8]>) -> Result<()> {
        match value {
            Some(value) => self.put_xattr(id, name, value),
            None if self.fs.xattr(id, name)?.is_some() => {
                self.remove_part(id, id.key(KeyType::XATTR_ITEM, name_hash(name)), name)
            }
            None => Ok(()),
        }
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `NotFound` when there is no such inode or attribute, `ReadOnly`, `NotPermitted`.
    pub fn remove_xattr(&mut self, id: InodeId, name: &[u8]) -> Result<()> {
        let fs = self.fs;
        let mut names = fs.inner.files.names();
        let (mode, inode_flags) = self.check_xattrs(&mut names, id)?;
        self.check_has_xattr(id, name)?;
        let bits = compression_bits(id, mode, inode_flags, name, None)?;
        self.remove_part(id, id.key(KeyType::XATTR_ITEM, name_hash(name)), name)?;
        self.set_compression_flags(&mut names, id, bits)?;
        self.touch_for_xattr(&mut names, id)
    }

    /// Takes from a file the capabilities that it gives who runs it, as whoever writes to it does. As in Linux that is no change which the
    /// inode's flags forbid: who may write takes them away, and who may append.
    ///
    /// # Errors
    /// `NotFound` when there is no such inode, or it has none; `ReadOnly`.
    pub fn remove_capabilities(&mut self, id: InodeId) -> Result<()> {
        let fs = self.fs;
        let mut names = fs.inner.files.names();
        self.check_changeable(&mut names, id)?;
        self.check_has_xattr(id, CAPABILITY_XATTR)?;
        let key = id.key(KeyType::XATTR_ITEM, name_hash(CAPABILITY_XATTR));
        self.remove_part(id, key, CAPABILITY_XATTR)?;
        self.touch_for_xattr(&mut names, id)
    }

    fn check_has_xattr(&self, id: InodeId, name: &[u8]) -> Result<()> {
        if self.fs.xattr(id, name)?.is_some() {
            return Ok(());
        }
        let what = format!("attribute {:?} of {id}", String::from_utf8_lossy(name));
        Err(Error::not_found(what))
    }

    /// Sets the flags that go with the property that names an inode's compression, as Linux does, if that was changed.
    ///
    /// # Errors
    /// Any aborts the transaction: the property is another by now.
    fn set_compression_flags(
        &mut self,
        names: &mut Names,
        id: InodeId,
        bits: Option<u64>,
    ) -> Result<()> {
        let Some(bits) = bits else { return Ok(()) };
        let mut now = 0;
        let changed = self.change_inode_under(names, id, |item| {
            now = item.flags.get() & !(flags::COMPRESS | flags::NOCOMPRESS) | bits;
            item.flags = now.into();
        });
        changed.map_err(|error| self.txn.abort(error))?;
        self.fs.note_flags(id, now);
        Ok(())
    }

    /// Returns the inode's mode and flags.
    fn check_xattrs(&self, names: &mut Names, id: InodeId) -> Result<(u32, u64)> {
        let (mode, flags) = self.check_changeable(names, id)?;
        check_flags(id, flags, false)?;
        Ok((mode, flags))
    }

    /// As [`Handle::check_xattrs`], whatever the flags forbid.
    fn check_changeable(&self, names: &mut Names, id: InodeId) -> Result<(u32, u64)> {
        names.check_writable(self.txn.core(), id.root)?;
        let (flags, mode, link_count) = match names.held_mut(id) {
            Some(held) => (held.item.flags.get(), held.item.mode.get(), held.item.nlink.get()),
            None => {
                let inode = self.fs.tree_inode(id)?;
                (inode.flags, inode.mode, inode.nlink)
            }
        };
        names.check_not_going(id, link_count)?;
        Ok((mode, flags))
    }

    fn touch_for_xattr(&mut self, names: &mut Names, id: InodeId) -> Result<()> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        self.change_inode_under(names, id, |item| touch(item, transid, now))
            .map_err(|error| self.txn.abort(error))
    }

    /// Enters an attribute whose lengths were checked.
    ///
    /// # Errors
    /// `Limit`, with nothing changed.
    pub(super) fn put_xattr(&mut self, id: InodeId, name: &[u8], value: &[u8]) -> Result<()> {
        let entry = entry_bytes(self.txn.generation().0, name, value);
        let key = id.key(KeyType::XATTR_ITEM, name_hash(name));
        match self.txn.insert(id.root, key, &entry) {
            Err(Error::Exists { .. }) => {}
            other => return other,
        }
        let tree = self.txn.core().roots.tree(id.root)?;
        let have = tree.lookup(&key)?.ok_or_else(|| Error::not_found(key))?;
        let mut changed = Vec::with_capacity(have.len() + entry.len());
        for other in DirEntries::new(&have) {
            let other = other.map_err(|error| error.in_root(id.root))?;
            if other.name != name {
                changed.extend_from_slice(other.item.as_bytes());
                changed.extend_from_slice(other.name);
                changed.extend_from_slice(other.data);
            }
        }
        changed.extend_from_slice(&entry);
        if changed.len() > item_bytes_max(self.txn.core()) {
            return Err(Error::Limit { what: format!("attributes of one hash of {id}") });
        }
        self.txn.replace(id.root, key, &changed)
    }
}

/// The flags that go with a property of compression, or with none any more; `None` for other attributes.
fn compression_bits(
    id: InodeId,
    mode: u32,
    inode_flags: u64,
    name: &[u8],
    value: Option<&[u8]>,
) -> Result<Option<u64>> {
    if name != COMPRESSION_XATTR {
        return Ok(None);
    }
    let what = || format!("compression of {id}");
    let has_property = matches!(FileType::from_mode(mode), FileType::Regular | FileType::Directory);
    if !has_property || inode_flags & (flags::NODATACOW | flags::NODATASUM) != 0 {
        return Err(Error::InvalidArgument { what: what() });
    }
    match value {
        None => Ok(Some(0)),
        Some(b"none" | b"no") => Ok(Some(flags::NOCOMPRESS)),
        Some(value) if is_compression(value) => Ok(Some(flags::COMPRESS)),
        Some(value) => {
            let value = String::from_utf8_lossy(value);
            Err(Error::InvalidArgument { what: format!("{} {value:?}", what()) })
        }
    }
}

/// Flags that the root directory of a subvolume has by its property alone. Linux gives a new subvolume
/// the property of the one that it is made in, and the flags that go with it only in memory; it takes
/// them from the property again whenever it reads the inode.
///
/// # Errors
/// Damaged items, or the device's error.
pub(super) fn flags_unsaid(core: &Core, id: InodeId, item: &InodeItem) -> Result<u64> {
    let said = item.flags.get() & (flags::COMPRESS | flags::NOCOMPRESS);
    if said != 0 || id != InodeId::root_of(id.root) {
        return Ok(0);
    }
    let key = id.key(KeyType::XATTR_ITEM, name_hash(COMPRESSION_XATTR));
    let Some(item) = core.roots.tree(id.root)?.lookup(&key)? else { return Ok(0) };
    for entry in DirEntries::new(&item) {
        let entry = entry.map_err(|error| error.in_root(id.root))?;
        if entry.name == COMPRESSION_XATTR {
            return Ok(match entry.data {
                b"" | b"none" | b"no" => flags::NOCOMPRESS,
                _ => flags::COMPRESS,
            });
        }
    }
    Ok(0)
}

/// Whether the value names a way to compress, as Linux understands it: the beginning counts, a level
/// may follow.
fn is_compression(value: &[u8]) -> bool {
    [&b"zlib"[..], b"lzo", b"zstd"].iter().any(|name| value.starts_with(name))
}

fn check_lengths(name: &[u8], value: &[u8], max_bytes: usize) -> Result<()> {
    if name.is_empty() || name.contains(&0) {
        return Err(Error::InvalidArgument {
            what: format!("attribute name {:?}", String::from_utf8_lossy(name)),
        });
    }
    for (what, have_bytes, max_bytes) in [
        ("name of", name.len(), NAME_BYTES_MAX),
        ("name and value of", name.len() + value.len(), max_bytes.min(usize::from(u16::MAX))),
    ] {
        if have_bytes > max_bytes {
            let what = format!("{what} attribute {:?}", String::from_utf8_lossy(name));
            return Err(Error::TooLong { what, have_bytes, max_bytes });
        }
    }
    Ok(())
}

/// The entry of an attribute whose lengths were checked.
fn entry_bytes(transid: u64, name: &[u8], value: &[u8]) -> Vec<u8> {
    let len = |bytes: &[u8]| u16::try_from(bytes.len()).expect("lengths were checked").into();
    let item = DirItem {
        transid: transid.into(),
        data_len: len(value),
        name_len: len(name),
        ty: FileType::Xattr.to_disk(),
        ..DirItem::default()
    };
    [item.as_bytes(), name, value].concat()
}
