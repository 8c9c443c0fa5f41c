//! Subvolumes and the label, by the requests of `linux/btrfs.h` whose size is fixed: others do not reach a FUSE server. For who
//! mounted, and root: the kernel asks nobody's permission for an ioctl.

use rustix::io::Errno;
use ubtrfs_engine::{Error, InodeId, Reservation, SnapshotOptions, SubvolumeInfo, Transfer};
use ubtrfs_ondisk::{Generation, InodeNo, ObjectId, RootId, Uuid};
use ubtrfs_rt::Time;

use crate::abi::{self, InHeader};
use crate::asker::{may_administer, umask_of};
use crate::errno::errno;
use crate::message::{Answer, Request, Result};
use crate::server::Server;

const GET_LABEL: u32 = 0x8100_9431;
const SET_LABEL: u32 = 0x4100_9432;
const SNAPSHOT: u32 = 0x5000_9401;
const CREATE: u32 = 0x5000_940e;
const DELETE: u32 = 0x5000_940f;
const LOOK_UP: u32 = 0xd000_9412;
const SET_DEFAULT: u32 = 0x4008_9413;
const SNAPSHOT_V2: u32 = 0x5000_9417;
const CREATE_V2: u32 = 0x5000_9418;
const GET_FLAGS: u32 = 0x8008_9419;
const SET_FLAGS: u32 = 0x4008_941a;
const GET_INFO: u32 = 0x81f8_943c;
const GET_CHILDREN: u32 = 0xd000_943d;
const LOOK_UP_CHILD: u32 = 0xd000_943e;
const SET_RECEIVED: u32 = 0xc0c8_9425;
const DELETE_V2: u32 = 0x5000_943f;

/// Of `BTRFS_IOC_SUBVOL_GETFLAGS` and `BTRFS_IOC_SNAP_CREATE_V2`.
const READ_ONLY: u64 = 1 << 1;
/// Of `BTRFS_IOC_SNAP_DESTROY_V2`: what is to be deleted is named by its number.
const BY_ID: u64 = 1 << 4;
const LABEL_BYTES: usize = 256;
/// `struct btrfs_ioctl_ino_lookup_args`.
const LOOK_UP_BYTES: usize = 4096;
/// Words of `struct btrfs_ioctl_vol_args_v2` that say nothing here.
const UNUSED_WORDS: usize = 4;
const NAME_BYTES_MAX: usize = 255;
/// Entries of `struct btrfs_ioctl_get_subvol_rootref_args`.
const CHILD_COUNT_MAX: usize = 255;
/// `path` in `struct btrfs_ioctl_ino_lookup_user_args`.
const CHILD_PATH_BYTES: usize = 3824;
const UUID_BYTES: usize = 16;
/// Flags, of which there are none, and words of `struct btrfs_ioctl_received_subvol_args` that say nothing yet.
const RECEIVED_UNUSED_WORDS: usize = 17;
/// Words of `struct btrfs_ioctl_get_subvol_info_args` that say nothing yet.
const INFO_UNUSED_WORDS: usize = 8;

impl Server {
    /// Answers a request about subvolumes, or says that it is none.
    pub(crate) fn subvolume_ioctl(
        &self,
        id: InodeId,
        command: u32,
        mut request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        let (header, patience) = (request.header, answer.patience());
        // What is unknown is said to be so to anybody: `isatty` asks in this way.
        let is_change = is_commit(command) || matches!(command, DELETE | DELETE_V2);
        if is_change && !may_change(&header, command) {
            return Err(Errno::PERM);
        }
        // The kernel does not look at it for an ioctl.
        if is_change && self.is_read_only_to(&header, command) {
            return Err(Errno::ROFS);
        }
        if command == GET_CHILDREN {
            return self.put_children(id, request.take()?, answer);
        }
        answer.put(&abi::IoctlOut::default());
        match command {
            GET_LABEL => {
                let label = self.fs.superblock().label;
                answer.put_bytes(&label[..LABEL_BYTES.min(label.len())]);
            }
            SET_LABEL => {
                let bytes = request.take_bytes(LABEL_BYTES as u32)?;
                let label = until_zero(bytes).ok_or(Errno::INVAL)?;
                self.fs.set_label(label).map_err(|error| errno(&error))?;
            }
            CREATE | CREATE_V2 => {
                let name = match command {
                    CREATE => vol_args(&mut request)?.1,
                    _ => vol_args_v2(&mut request, 0)?.2,
                };
                check_new_name(name)?;
                let mut new = self.new_inode(&header, 0o040_777, umask_of(header.pid));
                (new.uid, new.gid) = self.owner(&header);
                let made = self.fs.begin(Reservation::create_subvolume());
                made.and_then(|mut handle| handle.create_subvolume(id, name, &new))
                    .map_err(|error| errno(&error))?;
                self.forget_name(id, name, patience);
            }
            DELETE | DELETE_V2 => {
                let (dir, name) = match to_delete(command, &mut request)? {
                    ToDelete::Named(name) => {
                        let named = self.fs.lookup(id, name).map_err(|error| errno(&error))?;
                        if !self.inode(named)?.is_dir() {
                            return Err(Errno::NOTDIR);
                        }
                        if named == self.root && named.root != id.root {
                            return Err(Errno::BUSY);
                        }
                        let deleted = self.fs.delete_subvolume(id, name);
                        deleted.map_err(|error| self.errno_of_delete(named, &error))?;
                        (id, name.to_owned())
                    }
                    // That may be anywhere, also outside of what is mounted.
                    ToDelete::Numbered(root) => {
                        if root == self.root.root {
                            return Err(Errno::BUSY);
                        }
                        let top = InodeId { root, inode: InodeNo::SUBVOLUME_ROOT };
                        let deleted = self.fs.delete_subvolume_numbered(root);
                        let place = deleted.map_err(|error| self.errno_of_delete(top, &error))?;
                        (place.parent, place.name)
                    }
                };
                // Its space is freed in the background.
                self.forget_name(dir, &name, patience);
            }
            SNAPSHOT | SNAPSHOT_V2 => {
                let (file, flags, name) = match command {
                    SNAPSHOT => vol_args(&mut request).map(|(file, name)| (file, 0, name))?,
                    _ => vol_args_v2(&mut request, READ_ONLY)?,
                };
                check_new_name(name)?;
                let source = self.subvolume_of_open_file(&header, file)?;
                // What was stored to a map is with the kernel.
                self.bring_back_subvolume(source, patience)?;
                let options = SnapshotOptions { read_only: flags & READ_ONLY != 0 };
                let made = self.fs.snapshot(source, id, name, &options);
                made.map_err(|error| errno(&error))?;
                self.forget_name(id, name, patience);
            }
            LOOK_UP => {
                let [_, object]: [u64; 2] = request.take()?;
                // Only who asks for the subvolume of the file itself is answered, as of anybody but root in Linux.
                if object != InodeNo::SUBVOLUME_ROOT.0 {
                    return Err(Errno::OPNOTSUPP);
                }
                let mut bytes = [0; LOOK_UP_BYTES];
                bytes[..8].copy_from_slice(&id.root.0.to_ne_bytes());
                bytes[8..16].copy_from_slice(&object.to_ne_bytes());
                answer.put_bytes(&bytes);
            }
            GET_FLAGS => {
                let info = self.fs.subvolume(subvolume(id)?).map_err(|error| errno(&error))?;
                let flags = if info.read_only { READ_ONLY } else { 0 };
                answer.put_bytes(&flags.to_ne_bytes());
            }
            SET_FLAGS => {
                let flags: u64 = request.take()?;
                if flags & !READ_ONLY != 0 {
                    return Err(Errno::OPNOTSUPP);
                }
                let root = subvolume(id)?;
                if flags & READ_ONLY != 0 {
                    // Nothing can be brought to it then.
                    self.bring_back_subvolume(root, patience)?;
                }
                self.fs
                    .set_subvolume_read_only(root, flags & READ_ONLY != 0)
                    .map_err(|error| errno(&error))?;
            }
            SET_DEFAULT => {
                let root: u64 = request.take()?;
                let root = if root == 0 { RootId::FS_TREE } else { RootId(root) };
                self.fs.set_default_subvolume(root).map_err(|error| errno(&error))?;
            }
            SET_RECEIVED => {
                let root = subvolume(id)?;
                let from: [u8; UUID_BYTES] = request.take()?;
                let [stransid, _rtransid]: [u64; 2] = request.take()?;
                let stime: [u64; 2] = request.take()?;
                let _rtime: [u64; 2] = request.take()?;
                let rest: [u64; RECEIVED_UNUSED_WORDS] = request.take()?;
                let received = self
                    .fs
                    .set_received(root, Uuid(from), transfer(stransid, stime))
                    .map_err(|error| errno(&error))?;
                answer.put(&from);
                answer.put(&[stransid, received.transid.0]);
                answer.put(&stime);
                answer.put(&received.time.sec);
                answer.put(&[received.time.nsec, 0]);
                answer.put(&rest);
            }
            GET_INFO => {
                if self.nodes.is_deleted(id.root) {
                    return Err(Errno::NOENT);
                }
                let info = self.fs.subvolume(id.root).map_err(|error| errno(&error))?;
                put_info(&info, answer);
            }
            LOOK_UP_CHILD => {
                let [dir, child]: [u64; 2] = request.take()?;
                let (name, path) = self.place_of_child(id, &header, dir, child)?;
                answer.put(&[dir, child]);
                put_padded(&name, NAME_BYTES_MAX + 1, answer);
                put_padded(&path, CHILD_PATH_BYTES, answer);
            }
            _ => return Err(Errno::NOTTY),
        }
        if is_commit(command) {
            // Linux commits these, too.
            self.fs.commit().map_err(|error| errno(&error))?;
        }
        Ok(())
    }

    /// Why a subvolume is not deleted: Linux has a number of its own for the default one.
    pub(crate) fn errno_of_delete(&self, subvolume: InodeId, error: &Error) -> Errno {
        let is_default = || self.fs.default_subvolume().is_ok_and(|root| root == subvolume);
        match error {
            Error::InvalidArgument { .. } if is_default() => Errno::PERM,
            _ => errno(error),
        }
    }

    /// The subvolumes in that of `id`, from `first` on, each with the directory that it is in. Where there are more than fit, who asks goes on
    /// behind the last one, as with Linux.
    fn put_children(&self, id: InodeId, first: u64, answer: &mut Answer) -> Result {
        let infos = self.fs.subvolumes().map_err(|error| errno(&error))?;
        let children = infos.iter().filter_map(|info| {
            let dir = info.parent.filter(|dir| dir.root == id.root && info.id.0 >= first)?;
            Some([info.id.0, dir.inode.0])
        });
        let mut children: Vec<_> = children.take(CHILD_COUNT_MAX + 1).collect();
        let are_more = children.len() > CHILD_COUNT_MAX;
        children.truncate(CHILD_COUNT_MAX);
        let next = children.last().map_or(first, |[child, _]| child.saturating_add(1));
        let result = if are_more { -Errno::OVERFLOW.raw_os_error() } else { 0 };
        answer.put(&abi::IoctlOut { result, ..abi::IoctlOut::default() });
        answer.put(&next);
        children.iter().for_each(|child| answer.put(child));
        answer.put_bytes(&vec![0; (CHILD_COUNT_MAX - children.len()) * size_of::<[u64; 2]>()]);
        answer.put_bytes(&[u8::try_from(children.len()).unwrap_or(0), 0, 0, 0, 0, 0, 0, 0]);
        Ok(())
    }

    /// The name of a subvolume in the directory `dir`, and the way there from `top`, in the same subvolume, each name followed by `/`.
    fn place_of_child(
        &self,
        top: InodeId,
        header: &InHeader,
        dir: u64,
        child: u64,
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let info = self.fs.subvolume(RootId(child)).map_err(|error| errno(&error))?;
        let parent = info.parent.filter(|parent| parent.root == top.root).ok_or(Errno::NOENT)?;
        if parent.inode.0 != dir {
            return Err(Errno::INVAL);
        }
        let (mut here, mut path) = (parent, Vec::new());
        while here != top {
            // Not below the top, or not for who asks to know.
            if here.inode == InodeNo::SUBVOLUME_ROOT || !self.may_list(here, header)? {
                return Err(Errno::ACCESS);
            }
            let whole = self.fs.path_of(here).map_err(|error| errno(&error))?;
            path = [last_name(&whole), b"/", &path].concat();
            if path.len() >= CHILD_PATH_BYTES {
                return Err(Errno::NAMETOOLONG);
            }
            here = self.fs.parent(here).map_err(|error| errno(&error))?;
        }
        Ok((last_name(info.path.as_deref().unwrap_or_default()).to_owned(), path))
    }

    /// Whether who asks may list a directory, for certain: in which groups he is the kernel does not say.
    fn may_list(&self, dir: InodeId, header: &InHeader) -> Result<bool> {
        let inode = self.inode(dir)?;
        let needed = if header.uid == inode.uid { 0o500 } else { 0o055 };
        let is_mounter = header.uid == 0 || header.uid == crate::own::user().as_raw();
        Ok(is_mounter || inode.mode & needed == needed)
    }

    /// The subvolume whose top the calling process has open as `file`.
    fn subvolume_of_open_file(&self, header: &InHeader, file: i64) -> Result<RootId> {
        let number = self.number_of_open_file(header.pid, file)?;
        let infos = self.fs.subvolumes().map_err(|error| errno(&error))?;
        let mut roots = infos.iter().map(|info| info.id);
        roots.find(|root| self.shown_number(InodeId::root_of(*root)) == number).ok_or(Errno::INVAL)
    }
}

/// Whether the kernel has to write first what it holds of files, or to forget a name.
pub(crate) fn waits_for_kernel(command: u32) -> bool {
    const NAMES: [u32; 4] = [CREATE, CREATE_V2, DELETE, DELETE_V2];
    matches!(command, SNAPSHOT | SNAPSHOT_V2 | SET_FLAGS) || NAMES.contains(&command)
}

/// Whether it is durable when it is answered.
fn is_commit(command: u32) -> bool {
    matches!(
        command,
        SET_LABEL
            | CREATE
            | CREATE_V2
            | SNAPSHOT
            | SNAPSHOT_V2
            | SET_FLAGS
            | SET_DEFAULT
            | SET_RECEIVED
    )
}

/// When something was sent, of a `struct btrfs_ioctl_timespec`: seconds, and 32 bits of nanoseconds in front of as many that say nothing.
fn transfer(transid: u64, [sec, nsec]: [u64; 2]) -> Transfer {
    let [nsec @ .., _, _, _, _] = nsec.to_ne_bytes();
    let time = Time { sec: sec.cast_signed(), nsec: u32::from_ne_bytes(nsec) };
    Transfer { transid: Generation(transid), time }
}

/// `struct btrfs_ioctl_get_subvol_info_args`.
fn put_info(info: &SubvolumeInfo, answer: &mut Answer) {
    let (parent, dir) = info.parent.map_or((0, 0), |dir| (dir.root.0, dir.inode.0));
    answer.put(&info.id.0);
    put_padded(last_name(info.path.as_deref().unwrap_or_default()), NAME_BYTES_MAX + 1, answer);
    answer.put(&[parent, dir, info.generation.0, u64::from(info.read_only)]);
    for uuid in [info.uuid, info.parent_uuid, info.received_uuid] {
        answer.put_bytes(&uuid.0);
    }
    answer.put(&[info.ctransid.0, info.otransid.0, info.stransid.0, info.rtransid.0]);
    for time in [info.ctime, info.otime, info.stime, info.rtime] {
        answer.put(&time.sec);
        answer.put(&[time.nsec, 0]);
    }
    answer.put(&[0_u64; INFO_UNUSED_WORDS]);
}

fn last_name(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// Bytes in an array of so many, of which the last is a zero.
fn put_padded(bytes: &[u8], len: usize, answer: &mut Answer) {
    let bytes = &bytes[..bytes.len().min(len - 1)];
    answer.put_bytes(bytes);
    answer.put_bytes(&vec![0; len - bytes.len()]);
}

/// The number of the subvolume whose top this is.
fn subvolume(id: InodeId) -> Result<RootId> {
    if id.inode == InodeNo::SUBVOLUME_ROOT { Ok(id.root) } else { Err(Errno::INVAL) }
}

/// `struct btrfs_ioctl_vol_args`.
fn vol_args<'a>(request: &mut Request<'a>) -> Result<(i64, &'a [u8])> {
    let file: i64 = request.take()?;
    Ok((file, entry_name(request)?))
}

/// Whether who asks may change anything here: root, and who mounted it. What Linux leaves to who may administer the machine takes more than being
/// root, unless who mounted it is somebody else, whose own all of this is.
fn may_change(header: &InHeader, command: u32) -> bool {
    let mounter = crate::own::user().as_raw();
    match header.uid {
        0 if mounter == 0 => !is_for_administrator(command) || may_administer(header.pid),
        uid => uid == 0 || uid == mounter,
    }
}

fn is_for_administrator(command: u32) -> bool {
    matches!(command, SET_LABEL | SET_DEFAULT | DELETE | DELETE_V2)
}

/// What is to be deleted.
enum ToDelete<'a> {
    /// By its name in the directory that is asked.
    Named(&'a [u8]),
    Numbered(RootId),
}

fn to_delete<'a>(command: u32, request: &mut Request<'a>) -> Result<ToDelete<'a>> {
    let flags = match command {
        DELETE => request.take::<i64>().map(|_file| 0)?,
        _ => front_of_v2(request, BY_ID)?.1,
    };
    if flags & BY_ID != 0 {
        let root = RootId(request.take()?);
        // Trees that are no subvolumes, and the top level.
        return if root.0 < ObjectId::FIRST_FREE.0 {
            Err(Errno::INVAL)
        } else {
            Ok(ToDelete::Numbered(root))
        };
    }
    match entry_name(request)? {
        b"." => Err(Errno::ACCESS),
        b".." => Err(Errno::INVAL),
        name => Ok(ToDelete::Named(name)),
    }
}

/// `struct btrfs_ioctl_vol_args_v2`: the file, the flags, of which `known` are taken, and the name.
fn vol_args_v2<'a>(request: &mut Request<'a>, known: u64) -> Result<(i64, u64, &'a [u8])> {
    let (file, flags) = front_of_v2(request, known)?;
    Ok((file, flags, entry_name(request)?))
}

/// What is in front of the name there.
fn front_of_v2(request: &mut Request<'_>, known: u64) -> Result<(i64, u64)> {
    let file: i64 = request.take()?;
    let [_transid, flags]: [u64; 2] = request.take()?;
    let _: [u64; UNUSED_WORDS] = request.take()?;
    if flags & !known != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok((file, flags))
}

fn entry_name<'a>(request: &mut Request<'a>) -> Result<&'a [u8]> {
    let name = request.take_name()?;
    if name.is_empty() {
        return Err(Errno::ACCESS);
    }
    if name.contains(&b'/') {
        return Err(Errno::INVAL);
    }
    if name.len() > NAME_BYTES_MAX { Err(Errno::NAMETOOLONG) } else { Ok(name) }
}

/// Refuses the names that each directory has.
fn check_new_name(name: &[u8]) -> Result {
    if matches!(name, b"." | b"..") { Err(Errno::EXIST) } else { Ok(()) }
}

fn until_zero(bytes: &[u8]) -> Option<&[u8]> {
    bytes.iter().position(|byte| *byte == 0).map(|len| &bytes[..len])
}
