//! Making names: files, directories, nodes, symbolic links, hard links; setting attributes.

use ubtrfs_ondisk::dir::{DirEntries, DirItem, FileType, NAME_LEN_MAX, check_name};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::hash::{extref_hash, name_hash};
use ubtrfs_ondisk::inode::{InodeExtref, InodeItem, InodeRef, flags};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{DiskKey, InodeNo, Key, KeyType};
use ubtrfs_rt::Time;
use zerocopy::IntoBytes;

use super::acl::ACCESS_XATTR;
use super::entry::check_flags;
use super::fixed_csums::CsumsLock;
use super::inode::{Inode, InodeId};
use super::remove::orphan_key;
use super::state::{Names, timespec, touch};
use super::watch::tell_entered;
use super::xattr::{COMPRESSION_XATTR, inheritable};
use crate::data::append::{self, Target};
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, Handle};
use crate::txn::{self, Core};

/// Most names of one inode, as in Linux.
const LINK_COUNT_MAX: u32 = 65_535;
/// Longest target of a symbolic link, as in Linux.
const SYMLINK_BYTES_MAX: usize = 4095;
const MODE_TYPE_MASK: u32 = 0o170_000;
const MODE_PERMISSIONS_MASK: u32 = 0o7777;

/// What a new inode begins with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewInode {
    /// Type and permissions, as in `st_mode`. Where the call says the type, its bits are ignored.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, see [`super::device_number`].
    pub rdev: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Birth.
    pub otime: Time,
    /// What it takes over from its directory.
    pub inherit: Inherit,
}

/// What a new inode takes over from its directory. How its content is kept, inode flags and
/// compression, it takes over in any case, as in Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Inherit {
    /// No more: mode and owner are as they are given, as who copies a tree wants them.
    #[default]
    Nothing,
    /// What Linux lets a process's new file take over: the group and the bit of a set-group-id
    /// directory, and its default access control list.
    AsProcess {
        /// Permissions that a new inode does not get where its directory has no such list.
        umask: u32,
    },
}

impl NewInode {
    /// An inode of root's, with all times `now`.
    pub fn new(mode: u32, now: Time) -> Self {
        Self {
            mode,
            uid: 0,
            gid: 0,
            rdev: 0,
            atime: now,
            mtime: now,
            ctime: now,
            otime: now,
            inherit: Inherit::Nothing,
        }
    }
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttributes {
    /// Permissions; the type bits are ignored.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last access.
    pub atime: Option<Time>,
    /// Last change of the content.
    pub mtime: Option<Time>,
    /// Last change of the inode; unless given, now.
    pub ctime: Option<Time>,
    /// Birth.
    pub otime: Option<Time>,
    /// Bits of [`ubtrfs_ondisk::inode::flags`], all of them but PREALLOC: that says what space the file has,
    /// and stays as it is.
    pub flags: Option<u64>,
}

/// A directory entry as it is stored, name included.
pub(super) struct EntryBytes {
    bytes: [u8; size_of::<DirItem>() + NAME_LEN_MAX],
    len: usize,
}

impl EntryBytes {
    /// An entry of a name that was checked.
    pub(super) fn new(location: Key, transid: u64, ty: FileType, name: &[u8]) -> Self {
        let item = DirItem {
            location: DiskKey::new(location),
            transid: transid.into(),
            data_len: 0.into(),
            name_len: u16::try_from(name.len()).expect("a checked name is short").into(),
            ty: ty.to_disk(),
        };
        let mut bytes = [0; size_of::<DirItem>() + NAME_LEN_MAX];
        bytes[..size_of::<DirItem>()].copy_from_slice(item.as_bytes());
        let len = size_of::<DirItem>() + name.len();
        bytes[size_of::<DirItem>()..len].copy_from_slice(name);
        Self { bytes, len }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Refuses what no directory holds.
///
/// # Errors
/// `TooLong` or `InvalidArgument`.
pub(super) fn checked_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_LEN_MAX {
        return Err(Error::TooLong {
            what: format!("name {:?}", String::from_utf8_lossy(name)),
            have_bytes: name.len(),
            max_bytes: NAME_LEN_MAX,
        });
    }
    check_name(name).map_err(|_| Error::InvalidArgument {
        what: format!("name {:?}", String::from_utf8_lossy(name)),
    })
}

/// Refuses a name that the directory has, or whose hash has no room for another.
///
/// # Errors
/// As [`checked_name`]; `Exists`, `HashFull`.
pub(super) fn check_new_name(
    fs: &Filesystem,
    core: &Core,
    dir: InodeId,
    name: &[u8],
) -> Result<()> {
    checked_name(name)?;
    if fs.find_entry(dir, name)?.is_some() {
        let what = format!("{:?} in {dir}", String::from_utf8_lossy(name));
        return Err(Error::Exists { what });
    }
    let have = core.roots.tree(dir.root)?.lookup(&dir.key(KeyType::DIR_ITEM, name_hash(name)))?;
    let have_bytes = have.map_or(0, |item| item.len());
    if have_bytes + size_of::<DirItem>() + name.len() > item_bytes_max(core) {
        return Err(Error::HashFull { what: format!("names of one hash in {dir}") });
    }
    Ok(())
}

/// Enters a name by hash. Several names of one hash share an item.
///
/// # Errors
/// `Exists` when the directory has the name, `HashFull` when its hash has no room for another; with
/// nothing changed.
fn insert_by_hash(
    handle: &mut txn::Handle<'_>,
    dir: InodeId,
    name: &[u8],
    entry: &EntryBytes,
) -> Result<()> {
    let key = dir.key(KeyType::DIR_ITEM, name_hash(name));
    match handle.insert(dir.root, key, entry.as_slice()) {
        Err(Error::Exists { .. }) => {}
        other => return other,
    }
    let core = handle.core();
    let have = core.roots.tree(dir.root)?.lookup(&key)?.ok_or_else(|| Error::not_found(key))?;
    for other in DirEntries::new(&have) {
        let other = other.map_err(|error| error.in_root(dir.root))?;
        if other.name == name {
            let what = format!("{:?} in {dir}", String::from_utf8_lossy(name));
            return Err(Error::Exists { what });
        }
    }
    let longer = [&have[..], entry.as_slice()].concat();
    if longer.len() > item_bytes_max(handle.core()) {
        return Err(Error::HashFull { what: format!("names of one hash in {dir}") });
    }
    handle.replace(dir.root, key, &longer)
}

/// Longest item that a leaf holds.
pub(super) fn item_bytes_max(core: &Core) -> usize {
    use ubtrfs_ondisk::block::{HEADER_BYTES, ITEM_BYTES};
    core.roots.store.geometry().nodesize_bytes - HEADER_BYTES - ITEM_BYTES
}

/// Enters a name in both orders of its directory, which the caller then counts.
///
/// # Errors
/// As [`insert_by_hash`]; later ones abort the transaction.
pub(super) fn insert_name(
    handle: &mut txn::Handle<'_>,
    dir: InodeId,
    name: &[u8],
    index: u64,
    entry: &EntryBytes,
) -> Result<()> {
    insert_by_hash(handle, dir, name, entry)?;
    tell_entered(handle, dir, name);
    handle
        .insert(dir.root, dir.key(KeyType::DIR_INDEX, index), entry.as_slice())
        .map_err(|error| handle.abort(error))
}

/// The reference from an inode to the first name that it gets in a directory.
pub(super) fn insert_first_ref(
    handle: &mut txn::Handle<'_>,
    id: InodeId,
    parent: InodeNo,
    index: u64,
    name: &[u8],
) -> Result<()> {
    let len = size_of::<InodeRef>() + name.len();
    let item = InodeRef {
        index: index.into(),
        name_len: u16::try_from(name.len()).expect("a checked name is short").into(),
    };
    handle.insert_with(id.root, id.key(KeyType::INODE_REF, parent.0), len, |bytes| {
        bytes[..size_of::<InodeRef>()].copy_from_slice(item.as_bytes());
        bytes[size_of::<InodeRef>()..].copy_from_slice(name);
    })
}

impl Handle<'_> {
    /// Makes an inode named `name` in `dir`: a file, directory, device node, fifo or socket, as
    /// its mode says.
    ///
    /// # Errors
    /// `Exists`, `NotFound`, `NotDirectory`, `TooLong`, `ReadOnly`, and `InvalidArgument` for
    /// another type: a symbolic link has [`Handle::symlink`].
    pub fn create(&mut self, dir: InodeId, name: &[u8], new: &NewInode) -> Result<InodeId> {
        match FileType::from_mode(new.mode) {
            FileType::Symlink | FileType::Unknown | FileType::Xattr => {
                Err(Error::InvalidArgument { what: format!("mode {:o}", new.mode) })
            }
            _ => self.make(dir, name, new, None),
        }
    }

    /// Makes a symbolic link to `target`.
    ///
    /// # Errors
    /// As [`Handle::create`]; `TooLong` for a target that does not fit, `InvalidArgument` for an
    /// empty one.
    pub fn symlink(
        &mut self,
        dir: InodeId,
        name: &[u8],
        target: &[u8],
        new: &NewInode,
    ) -> Result<InodeId> {
        let nodesize = self.txn.core().roots.store.geometry().nodesize_bytes;
        let max_bytes = SYMLINK_BYTES_MAX.min(append::inline_bytes_max(nodesize));
        if target.len() > max_bytes {
            return Err(Error::TooLong {
                what: "target of a symbolic link".to_owned(),
                have_bytes: target.len(),
                max_bytes,
            });
        }
        if target.is_empty() || target.contains(&0) {
            return Err(Error::InvalidArgument { what: "target of a symbolic link".to_owned() });
        }
        let new = NewInode { mode: 0o120_000 | new.mode & MODE_PERMISSIONS_MASK, ..*new };
        self.make(dir, name, &new, Some(target))
    }

    fn make(
        &mut self,
        dir: InodeId,
        name: &[u8],
        new: &NewInode,
        target: Option<&[u8]>,
    ) -> Result<InodeId> {
        let fs = self.fs;
        self.make_under(&mut fs.inner.files.names(), dir, name, new, target)
    }

    /// As [`Handle::create`] and [`Handle::symlink`], for who holds the names.
    pub(super) fn make_under(
        &mut self,
        names: &mut Names,
        dir: InodeId,
        name: &[u8],
        new: &NewInode,
        target: Option<&[u8]>,
    ) -> Result<InodeId> {
        checked_name(name)?;
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        names.check_writable(core, dir.root)?;
        let id = InodeId { root: dir.root, inode: InodeNo(names.next_inode(core, dir.root)?) };
        let parent = names.hold(core, dir)?;
        check_directory(dir, &parent.item)?;
        check_flags(dir, parent.item.flags.get(), true)?;
        let index = parent.next_index(core, dir)?;
        let parent_flags = parent.item.flags.get();
        let of_parent = (parent.item.mode.get(), parent.item.gid.get());
        let (new, inherited) = self.inherit_from(dir, of_parent, new)?;
        let property = self.inherited_property(dir, parent_flags, new.mode)?;
        let mut item = inode_item(&new, transid);
        item.flags = inherited_flags(parent_flags, new.mode).into();
        if let Some(target) = target {
            item.size = (target.len() as u64).into();
            item.nbytes = item.size;
        }

        let location = id.key(KeyType::INODE_ITEM, 0);
        let txn = &mut self.txn;
        txn.insert(id.root, location, item.as_bytes()).map_err(|error| txn.abort(error))?;
        insert_first_ref(txn, id, dir.inode, index, name).map_err(|error| txn.abort(error))?;
        self.put_inherited(id, &inherited)?;
        self.put_property(id, property.as_deref())?;
        if let Some(target) = target {
            let file = Target { root: id.root, inode: id.inode, has_csums: false };
            let len = target.len() as u64;
            append::put_inline(&mut self.txn, &file, len, Compression::None, target)?;
        }
        // Who finds the name finds all of the inode. That there is such a name already shows only now.
        let entry = EntryBytes::new(location, transid, FileType::from_mode(new.mode), name);
        if let Err(error) = insert_name(&mut self.txn, dir, name, index, &entry) {
            self.unmake(id).map_err(|error| self.txn.abort(error))?;
            return Err(error);
        }

        let parent = names.hold(core, dir)?;
        parent.count_name(name.len(), transid, now);
        files.mark_dirty(&mut self.txn, dir, parent)?;
        names.take_inode(dir.root);
        if FileType::from_mode(new.mode) == FileType::Directory {
            names.hold_new_directory(id, item);
        }
        files.bound(names, &mut self.txn)?;
        Ok(id)
    }

    /// As [`Handle::make`], without a name.
    pub(super) fn make_unlinked(&mut self, dir: InodeId, new: &NewInode) -> Result<InodeId> {
        match FileType::from_mode(new.mode) {
            FileType::Directory | FileType::Symlink | FileType::Unknown | FileType::Xattr => {
                return Err(Error::InvalidArgument { what: format!("mode {:o}", new.mode) });
            }
            _ => {}
        }
        let core = self.txn.core();
        let mut names = self.fs.inner.files.names();
        names.check_writable(core, dir.root)?;
        let id = InodeId { root: dir.root, inode: InodeNo(names.next_inode(core, dir.root)?) };
        let parent = names.hold(core, dir)?.item;
        check_directory(dir, &parent)?;
        check_flags(dir, parent.flags.get(), true)?;
        let of_parent = (parent.mode.get(), parent.gid.get());
        let (new, inherited) = self.inherit_from(dir, of_parent, new)?;
        let property = self.inherited_property(dir, parent.flags.get(), new.mode)?;
        let mut item = inode_item(&new, self.txn.generation().0);
        item.nlink = 0.into();
        item.flags = inherited_flags(parent.flags.get(), new.mode).into();
        let txn = &mut self.txn;
        txn.insert(id.root, id.key(KeyType::INODE_ITEM, 0), item.as_bytes())
            .map_err(|error| txn.abort(error))?;
        self.put_inherited(id, &inherited)?;
        self.put_property(id, property.as_deref())?;
        let txn = &mut self.txn;
        txn.insert(id.root, orphan_key(id), &[]).map_err(|error| txn.abort(error))?;
        names.take_inode(dir.root);
        // Under the same lock as the item: no clean-up sees that without this.
        names.add_live_orphan(id);
        Ok(id)
    }

    /// Gives the inode `id`, which is no directory, another name; one of
    /// [`Handle::create_unlinked`] its first.
    ///
    /// # Errors
    /// As [`Handle::create`]; `TooManyLinks` when the inode has as many names as it can have,
    /// `OtherSubvolume` when it is in another subvolume than `dir`, `NotPermitted`.
    pub fn link(&mut self, dir: InodeId, name: &[u8], id: InodeId) -> Result<()> {
        checked_name(name)?;
        if dir.root != id.root {
            return Err(Error::OtherSubvolume { what: id.to_string() });
        }
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let core = self.txn.core();
        let files = &self.fs.inner.files;
        let mut names = files.names();
        names.check_writable(core, dir.root)?;
        let item = names.hold(core, id)?.item;
        let file_type = FileType::from_mode(item.mode.get());
        if file_type == FileType::Directory {
            return Err(Error::IsDirectory { what: id.to_string() });
        }
        let is_first = item.nlink.get() == 0;
        names.check_not_going(id, item.nlink.get())?;
        check_flags(id, item.flags.get(), false)?;
        if item.nlink.get() >= LINK_COUNT_MAX {
            return Err(Error::TooManyLinks { what: format!("names of {id}") });
        }
        let parent = names.hold(core, dir)?;
        check_directory(dir, &parent.item)?;
        check_flags(dir, parent.item.flags.get(), true)?;
        let index = parent.next_index(core, dir)?;
        let extended = self.has_extended_refs();
        let reference = plan_ref(&self.txn, id, dir.inode, index, name, extended)?;
        check_new_name(self.fs, core, dir, name)?;

        let txn = &mut self.txn;
        match &reference {
            RefPlan::Insert(key, bytes) => txn.insert(id.root, *key, bytes),
            RefPlan::Replace(key, bytes) => txn.replace(id.root, *key, bytes),
        }
        .map_err(|error| txn.abort(error))?;

        let held = names.hold(core, id)?;
        held.item.nlink += 1;
        held.touch(transid, now);
        files.mark_dirty(&mut self.txn, id, held)?;
        if is_first {
            let txn = &mut self.txn;
            txn.remove(id.root, orphan_key(id)).map_err(|error| txn.abort(error))?;
            names.remove_live_orphan(id);
        }
        // Who finds the name finds what says of it.
        let entry = EntryBytes::new(id.key(KeyType::INODE_ITEM, 0), transid, file_type, name);
        let txn = &mut self.txn;
        insert_name(txn, dir, name, index, &entry).map_err(|error| txn.abort(error))?;
        let parent = names.hold(core, dir)?;
        parent.count_name(name.len(), transid, now);
        files.mark_dirty(&mut self.txn, dir, parent)?;
        files.bound(&mut names, &mut self.txn)
    }

    /// Changes attributes of an inode. Of one that is immutable or can only be appended to, only
    /// together with its flags. An access control list follows the permissions, as in Linux.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`, `NotPermitted`; `InvalidArgument` for flags that are not known, that
    /// would say of data that is there, or is just written or shared, that it has checksums, or none, or
    /// that a symbolic link cannot have: IMMUTABLE and APPEND.
    pub fn set_attributes(&mut self, id: InodeId, attributes: &SetAttributes) -> Result<()> {
        let (transid, now) = (self.txn.generation().0, self.txn.now());
        let inode = self.fs.inode(id)?;
        match attributes.flags {
            Some(flags) => check_new_flags(&inode, flags)?,
            None => check_flags(id, inode.flags, false)?,
        }
        let fs = self.fs;
        // Held throughout: nobody else gives the inode another access list meanwhile.
        let mut names = fs.inner.files.names();
        names.check_writable(self.txn.core(), id.root)?;
        if inode.nlink == 0 {
            self.check_not_going(&mut names, id)?;
        }
        let _csums = match attributes.flags {
            Some(flags) => lock_csums(fs, &mut names, &inode, flags)?,
            None => None,
        };
        let acl = match attributes.mode {
            Some(mode) => self.acl_with_mode(id, mode)?,
            None => None,
        };
        if let Some(acl) = &acl {
            self.put_xattr(id, ACCESS_XATTR, acl)?;
        }
        let mut flags_now = None;
        let changed = self.change_inode_under(&mut names, id, |item| {
            touch(item, transid, now);
            if let Some(mode) = attributes.mode {
                let kept = item.mode.get() & MODE_TYPE_MASK;
                item.mode = (kept | mode & MODE_PERMISSIONS_MASK).into();
            }
            if let Some(uid) = attributes.uid {
                item.uid = uid.into();
            }
            if let Some(gid) = attributes.gid {
                item.gid = gid.into();
            }
            if let Some(new) = attributes.flags {
                // Who read the flags before may not have seen what was allocated since.
                let flags = new & !flags::PREALLOC | item.flags.get() & flags::PREALLOC;
                item.flags = flags.into();
                flags_now = Some(flags);
            }
            let times = [
                (attributes.atime, &mut item.atime),
                (attributes.mtime, &mut item.mtime),
                (attributes.ctime, &mut item.ctime),
                (attributes.otime, &mut item.otime),
            ];
            for (time, place) in times {
                if let Some(time) = time {
                    *place = timespec(time);
                }
            }
        });
        changed.map_err(|error| if acl.is_some() { self.txn.abort(error) } else { error })?;
        if let Some(flags) = flags_now {
            fs.note_flags(id, flags);
        }
        if attributes.mtime.is_some() {
            fs.forget_write_time(id);
        }
        Ok(())
    }

    /// Notes that an inode was read; nothing else of it changes, its times of change neither.
    ///
    /// # Errors
    /// `NotFound`, `ReadOnly`.
    pub fn set_access_time(&mut self, id: InodeId, time: Time) -> Result<()> {
        let fs = self.fs;
        let mut names = fs.inner.files.names();
        names.check_writable(self.txn.core(), id.root)?;
        self.check_not_going(&mut names, id)?;
        self.change_inode_under(&mut names, id, |item| item.atime = timespec(time))
    }

    /// As [`Names::check_not_going`], of what it is now.
    fn check_not_going(&self, names: &mut Names, id: InodeId) -> Result<()> {
        let link_count = match names.held_mut(id) {
            Some(held) => held.item.nlink.get(),
            None => self.fs.tree_inode(id)?.nlink,
        };
        names.check_not_going(id, link_count)
    }

    /// Changes an inode where it is: in memory if it is held, else in the tree.
    pub(super) fn change_inode(
        &mut self,
        id: InodeId,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let fs = self.fs;
        self.change_inode_under(&mut fs.inner.files.names(), id, change)
    }

    /// As [`Handle::change_inode`], for who holds the names.
    pub(super) fn change_inode_under(
        &mut self,
        names: &mut Names,
        id: InodeId,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        names.check_writable(self.txn.core(), id.root)?;
        self.change_checked_inode(names, id, change)
    }

    /// As [`Handle::change_inode_under`], also in a subvolume that is read-only by now.
    pub(super) fn change_checked_inode(
        &mut self,
        names: &mut Names,
        id: InodeId,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let files = &self.fs.inner.files;
        if let Some(held) = names.held_mut(id) {
            files.mark_dirty(&mut self.txn, id, held)?;
            change(&mut held.item);
            return Ok(());
        }
        let key = id.key(KeyType::INODE_ITEM, 0);
        let changed = self.txn.update(id.root, key, |bytes| {
            let item = InodeItem::peek_mut(bytes)?;
            change(item);
            Ok(())
        });
        match changed {
            Err(Error::NotFound { .. }) => Err(Error::not_found(id)),
            Err(error) => Err(error),
            Ok(Err(corruption)) => {
                let corruption: Box<ubtrfs_ondisk::Corruption> = corruption;
                Err(corruption.in_root(id.root).into())
            }
            Ok(Ok(())) => Ok(()),
        }
    }
}

fn check_new_flags(inode: &Inode, new: u64) -> Result<()> {
    let invalid = |what: String| Err(Error::InvalidArgument { what });
    let unknown = new & !flags::KNOWN;
    if unknown != 0 {
        return invalid(format!("unknown inode flags {unknown:#x}"));
    }
    // Nobody could remove it by Linux's calls, and its checker takes the inode for damaged.
    let pinned = new & (flags::IMMUTABLE | flags::APPEND);
    if inode.file_type() == FileType::Symlink && pinned != 0 {
        return invalid(format!("the flags {pinned:#x} of {}, a symbolic link", inode.id));
    }
    Ok(())
}

/// Keeps data from a file as long as its flags are changed, if that changes whether it has checksums.
///
/// # Errors
/// `InvalidArgument` where it has data, or somebody is just giving it some.
fn lock_csums<'a>(
    fs: &'a Filesystem,
    names: &mut Names,
    inode: &Inode,
    new_flags: u64,
) -> Result<Option<CsumsLock<'a>>> {
    if inode.file_type() != FileType::Regular {
        return Ok(None);
    }
    let id = inode.id;
    let (size, old_flags) = match names.held_mut(id) {
        Some(held) => (held.item.size.get(), held.item.flags.get()),
        None => fs.tree_inode(id).map(|inode| (inode.size_bytes, inode.flags))?,
    };
    if (old_flags ^ new_flags) & (flags::NODATASUM | flags::NODATACOW) == 0 {
        return Ok(None);
    }
    let locked = fs.inner.files.fixed_csums.lock(id);
    // Memory has more than the medium before that is written, and less while it is cut off there, which may fail.
    let in_memory = fs.inner.open_files.find(id).map_or(0, |space| space.size().bytes());
    match locked.filter(|_| size == 0 && in_memory == 0) {
        None => {
            let what = format!("whether {id} has checksums, as it has data");
            Err(Error::InvalidArgument { what })
        }
        locked => Ok(locked),
    }
}

pub(super) fn check_directory(id: InodeId, item: &InodeItem) -> Result<()> {
    if FileType::from_mode(item.mode.get()) != FileType::Directory {
        return Err(Error::NotDirectory { what: id.to_string() });
    }
    if item.nlink.get() == 0 {
        return Err(Error::not_found(id));
    }
    Ok(())
}

/// The item of an inode that was just made.
pub(super) fn inode_item(new: &NewInode, transid: u64) -> InodeItem {
    InodeItem {
        generation: transid.into(),
        transid: transid.into(),
        nlink: 1.into(),
        uid: new.uid.into(),
        gid: new.gid.into(),
        // Linux refuses other bits.
        mode: (new.mode & (MODE_TYPE_MASK | MODE_PERMISSIONS_MASK)).into(),
        rdev: match FileType::from_mode(new.mode) {
            FileType::CharDevice | FileType::BlockDevice => new.rdev.into(),
            _ => 0.into(),
        },
        atime: timespec(new.atime),
        ctime: timespec(new.ctime),
        mtime: timespec(new.mtime),
        otime: timespec(new.otime),
        ..InodeItem::default()
    }
}

/// Flags that a new inode takes over from its directory, as in Linux.
fn inherited_flags(parent: u64, mode: u32) -> u64 {
    let mut inherited = match parent & (flags::COMPRESS | flags::NOCOMPRESS) {
        both if both & flags::NOCOMPRESS != 0 => flags::NOCOMPRESS,
        one => one,
    };
    if parent & flags::NODATACOW != 0 {
        inherited |= flags::NODATACOW;
        if FileType::from_mode(mode) == FileType::Regular {
            inherited |= flags::NODATASUM;
        }
    }
    inherited
}

impl Handle<'_> {
    /// The compression that was set for a directory by name, where a new inode in it takes it over.
    fn inherited_property(
        &self,
        dir: InodeId,
        parent_flags: u64,
        mode: u32,
    ) -> Result<Option<Vec<u8>>> {
        let file_type = FileType::from_mode(mode);
        let is_inheriting = matches!(file_type, FileType::Regular | FileType::Directory);
        // A directory that has one has a flag.
        if !is_inheriting || parent_flags & (flags::COMPRESS | flags::NOCOMPRESS) == 0 {
            return Ok(None);
        }
        Ok(self.fs.xattr(dir, COMPRESSION_XATTR)?.and_then(|value| inheritable(&value)))
    }

    fn put_property(&mut self, id: InodeId, value: Option<&[u8]>) -> Result<()> {
        match value {
            Some(value) => {
                self.put_xattr(id, COMPRESSION_XATTR, value).map_err(|error| self.txn.abort(error))
            }
            None => Ok(()),
        }
    }
}

/// How an inode's reference to a further name is entered.
pub(super) enum RefPlan {
    Insert(Key, Vec<u8>),
    Replace(Key, Vec<u8>),
}

/// Puts the reference into the item of the same directory, or, when that is full, into an
/// extended one.
pub(super) fn plan_ref(
    handle: &txn::Handle<'_>,
    id: InodeId,
    parent: InodeNo,
    index: u64,
    name: &[u8],
    extended: bool,
) -> Result<RefPlan> {
    let name_len = u16::try_from(name.len()).expect("a checked name is short");
    let max_bytes = item_bytes_max(handle.core());
    let tree = handle.core().roots.tree(id.root)?;
    let plan = |key: Key, reference: &[u8]| -> Result<Option<RefPlan>> {
        let Some(have) = tree.lookup(&key)? else {
            return Ok(Some(RefPlan::Insert(key, [reference, name].concat())));
        };
        let longer = [&have[..], reference, name].concat();
        Ok((longer.len() <= max_bytes).then_some(RefPlan::Replace(key, longer)))
    };
    let reference = InodeRef { index: index.into(), name_len: name_len.into() };
    let key = id.key(KeyType::INODE_REF, parent.0);
    if let Some(plan) = plan(key, reference.as_bytes())? {
        return Ok(plan);
    }
    if extended {
        let reference = InodeExtref {
            parent_objectid: parent.0.into(),
            index: index.into(),
            name_len: name_len.into(),
        };
        let key = id.key(KeyType::INODE_EXTREF, extref_hash(parent, name));
        if let Some(plan) = plan(key, reference.as_bytes())? {
            return Ok(plan);
        }
    }
    Err(Error::TooManyLinks { what: format!("names of {id} in one directory") })
}

/// Makes the root directory of a subvolume that is empty yet: it names itself.
///
/// # Errors
/// What stops an edit; the transaction is then aborted.
pub(crate) fn insert_root_directory(
    handle: &mut txn::Handle<'_>,
    root: ubtrfs_ondisk::RootId,
    new: &NewInode,
) -> Result<InodeItem> {
    let id = InodeId::root_of(root);
    let mode = 0o040_000 | new.mode & MODE_PERMISSIONS_MASK;
    let item = inode_item(&NewInode { mode, ..*new }, handle.generation().0);
    handle
        .insert(root, id.key(KeyType::INODE_ITEM, 0), item.as_bytes())
        .map_err(|error| handle.abort(error))?;
    insert_first_ref(handle, id, id.inode, 0, b"..").map_err(|error| handle.abort(error))?;
    Ok(item)
}
