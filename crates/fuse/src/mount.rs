//! Mounting and unmounting.

use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxAttributes, StatxFlags, statx};
use rustix::io::{Errno, FdFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::{control, own};

/// How a filesystem is mounted.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    /// What `mount` and `/proc/mounts` show as the device. Any bytes but zero.
    pub source: OsString,
    /// Nothing can be written.
    pub read_only: bool,
    /// Other users see it, too.
    pub allow_other: bool,
    /// The kernel checks no permissions: who mounts it may do anything, and nobody else. Not with [`MountOptions::allow_other`].
    pub fake_root: bool,
    /// What is read is noted: the mount does not say `noatime`.
    pub notes_access: bool,
    /// But not of directories. Shown where root mounts.
    pub leaves_directories: bool,
    /// What is not allowed in it.
    pub restrictions: Vec<Restriction>,
    /// The source is a block device, which the kernel is to hold: see [`may_hold_block_devices`].
    pub holds_source: bool,
}

/// What is not allowed in a mount, as of mount(8). Who is not root mounts with the first two in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restriction {
    /// Device nodes lead to no device.
    NoDev,
    /// Programs run with their caller's rights.
    NoSuid,
    /// Programs do not run.
    NoExec,
    /// Symbolic links lead nowhere.
    NoSymFollow,
}

impl Restriction {
    /// Each.
    pub const ALL: [Self; 4] = [Self::NoDev, Self::NoSuid, Self::NoExec, Self::NoSymFollow];

    /// What it is called in the system's table, and by mount(8).
    pub fn name(self) -> &'static str {
        match self {
            Self::NoDev => "nodev",
            Self::NoSuid => "nosuid",
            Self::NoExec => "noexec",
            Self::NoSymFollow => "nosymfollow",
        }
    }

    fn flag(self) -> MountFlags {
        match self {
            Self::NoDev => MountFlags::NODEV,
            Self::NoSuid => MountFlags::NOSUID,
            Self::NoExec => MountFlags::NOEXEC,
            Self::NoSymFollow => MountFlags::NOSYMFOLLOW,
        }
    }
}

impl MountOptions {
    /// What the kernel is told of users and permissions, each with a comma in front.
    fn access(&self) -> &'static str {
        match (self.fake_root, self.allow_other) {
            (true, _) => "",
            (false, true) => ",default_permissions,allow_other",
            (false, false) => ",default_permissions",
        }
    }
}

/// The device of a mount, from which requests come.
#[derive(Debug)]
pub struct MountedDevice {
    pub(crate) device: OwnedFd,
    pub(crate) directory: PathBuf,
}

/// Why a directory could not be mounted on.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {errno}")]
pub struct MountError {
    /// What was tried.
    pub what: &'static str,
    /// What the system said.
    pub errno: Errno,
}

fn failed(what: &'static str) -> impl Fn(Errno) -> MountError {
    move |errno| MountError { what, errno }
}

/// Whether the kernel takes a mount of a block device from this process (`fuseblk`). It holds the device then, as with any other
/// filesystem; whoever unmounts waits until all is durable; and sync(1) and syncfs(2) reach the mount (from Linux 6.18 on).
pub fn may_hold_block_devices() -> bool {
    // Root of another user namespace may not.
    let is_root = own::user().is_root() && control::is_first_user_namespace();
    // Opening it loads what offers that.
    let _ = open_fuse();
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    is_root && known.lines().any(|line| line.trim() == "fuseblk")
}

/// Mounts on a directory; returns the device from which requests come. As root by a system call, otherwise by `fusermount3`.
///
/// # Errors
/// The system's; `NOTDIR` for what is no directory, which the kernel would take for the kind of the filesystem's top.
pub fn mount(directory: &Path, options: &MountOptions) -> Result<MountedDevice, MountError> {
    const LOOKING: &str = "looking at the directory";
    let about = rustix::fs::stat(directory).map_err(failed(LOOKING))?;
    if !FileType::from_raw_mode(about.st_mode).is_dir() {
        return Err(failed(LOOKING)(Errno::NOTDIR));
    }
    let device = if own::user().is_root() {
        mount_as_root(directory, options)?
    } else {
        mount_as_user(directory, options)?
    };
    Ok(MountedDevice { device, directory: directory.to_owned() })
}

/// Opens the device of all connections; reading it does not wait. In another namespace something else may have its name, which is neither used nor
/// waited for.
///
/// # Errors
/// The system's; `NODEV` for anything else.
pub(crate) fn open_fuse() -> Result<OwnedFd, Errno> {
    /// Source: `FUSE_MINOR` of `linux/miscdevice.h`, of the major number for all such devices.
    const NUMBER: (u32, u32) = (10, 229);
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open("/dev/fuse", flags, Mode::empty())?;
    let about = rustix::fs::fstat(&opened)?;
    let is_device = FileType::from_raw_mode(about.st_mode) == FileType::CharacterDevice;
    let is_it = is_device && about.st_rdev == rustix::fs::makedev(NUMBER.0, NUMBER.1);
    if is_it { Ok(opened) } else { Err(Errno::NODEV) }
}

fn mount_as_root(directory: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let device = open_fuse().map_err(failed("opening /dev/fuse"))?;
    let (kind, block) = match options.holds_source {
        true => ("fuseblk.ubtrfs", ",blksize=4096"),
        false => ("fuse.ubtrfs", ""),
    };
    let data = format!(
        "fd={},rootmode={:o},user_id={},group_id={}{}{block}",
        device.as_raw_fd(),
        FileType::Directory.as_raw_mode(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
        options.access(),
    );
    let data = CString::new(data).expect("no zero in it");
    let mut flags = MountFlags::empty();
    if !options.notes_access {
        flags |= MountFlags::NOATIME;
    } else if options.leaves_directories {
        flags |= MountFlags::NODIRATIME;
    }
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    flags.extend(options.restrictions.iter().map(|restriction| restriction.flag()));
    rustix::mount::mount(options.source.as_os_str(), directory, kind, flags, Some(data.as_c_str()))
        .map_err(failed("mounting"))?;
    Ok(device)
}

/// `fusermount3`, which may mount, opens the device and hands it over through a socket whose number it is told.
fn mount_as_user(directory: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    const WHAT: &str = "mounting with fusermount3";
    let io_failed = |error: std::io::Error| {
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
        failed(match errno {
            Errno::NOENT => "looking for fusermount3, which mounts for who is not root",
            _ => WHAT,
        })(errno)
    };
    let (ours, theirs) = UnixStream::pair().map_err(io_failed)?;
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty()).map_err(failed(WHAT))?;
    let writable = if options.read_only { "ro" } else { "rw" };
    let access = options.access();
    let noatime = if options.notes_access { "" } else { ",noatime" };
    let restrictions: String =
        options.restrictions.iter().flat_map(|restriction| [",", restriction.name()]).collect();
    let mut words = b"fsname=".to_vec();
    for byte in options.source.as_bytes() {
        if matches!(byte, b'\\' | b',') {
            words.push(b'\\');
        }
        words.push(*byte);
    }
    let rest = format!(",subtype=ubtrfs,{writable}{noatime}{restrictions}{access}");
    words.extend_from_slice(rest.as_bytes());
    let status = Command::new("fusermount3")
        .arg("-o")
        .arg(OsString::from_vec(words))
        .arg("--")
        .arg(directory)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .status()
        .map_err(io_failed)?;
    drop(theirs);
    if !status.success() {
        // It has said why.
        return Err(failed(WHAT)(Errno::PERM));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let into = &mut [IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::net::recvmsg(&ours, into, &mut control, flags).map_err(failed(WHAT))?;
    let mut received = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut devices) => devices.next(),
        _ => None,
    });
    received.next().ok_or_else(|| failed(WHAT)(Errno::NODEV))
}

/// The mounts that a process sees, in its directory of `/proc`.
const TABLE: &str = "mountinfo";

/// Whether a filesystem with this device number, as `/proc/self/mountinfo` shows it, may be written nowhere where this process sees it.
pub(crate) fn is_read_only(device: &str) -> bool {
    is_read_only_in(&own_table(), device)
}

/// [`is_read_only`] for who asks often: the table, of which reading takes as long as it is, is read when it has changed.
#[derive(Debug, Default)]
pub(crate) struct ReadOnlyWatch {
    table: Option<File>,
    is_read_only: bool,
}

impl ReadOnlyWatch {
    /// As [`is_read_only`].
    pub(crate) fn is_read_only(&mut self, device: &str) -> bool {
        let has_changed = match &self.table {
            Some(table) => {
                // So it says of each change once, proc_pid_mounts(5); also where nothing is wrong.
                let mut table = [PollFd::new(table, PollFlags::PRI)];
                poll(&mut table, Some(&Timespec::default())).map_or(true, |ready| ready > 0)
            }
            None => {
                // Changes count from here on. Without it each look is a new one.
                self.table = own::open_own_proc(TABLE).ok();
                true
            }
        };
        if has_changed {
            self.is_read_only = is_read_only(device);
        }
        self.is_read_only
    }
}

/// As [`is_read_only`], for a process: in the mount of this number, or, where that is not told, wherever the process sees the filesystem.
pub(crate) fn is_read_only_to(pid: u32, device: &str, mount: Option<&str>) -> bool {
    let tables = tables_for(pid);
    let its = mount.and_then(|mount| {
        tables.iter().flat_map(|table| places(table, device)).find(|(id, _)| *id == mount)
    });
    match its {
        Some((_, is_read_only)) => is_read_only,
        None => tables.iter().any(|table| is_read_only_in(table, device)),
    }
}

/// The device number of a mount by which a process has something open.
pub(crate) fn device_of(pid: u32, mount: &str) -> Option<String> {
    tables_for(pid).iter().find_map(|table| {
        let mut lines = table.lines().map(|line| line.split(' '));
        lines
            .find_map(|mut fields| (fields.next()? == mount).then(|| fields.nth(1)).flatten())
            .map(str::to_owned)
    })
}

/// The mounts that a process sees, and those that this one does: what it has open may be from where it was before. The numbers are of the
/// whole machine.
fn tables_for(pid: u32) -> [String; 2] {
    let its = std::fs::read(format!("/proc/{pid}/{TABLE}"));
    [text_of(its), own_table()]
}

/// The mounts that this process sees.
fn own_table() -> String {
    let mut table = Vec::new();
    let read = own::open_own_proc(TABLE).and_then(|mut file| file.read_to_end(&mut table));
    text_of(read.map(|_| table))
}

/// Empty where it cannot be read.
fn text_of(table: io::Result<Vec<u8>>) -> String {
    // A place's name may be any bytes.
    String::from_utf8_lossy(&table.unwrap_or_default()).into_owned()
}

fn is_read_only_in(table: &str, device: &str) -> bool {
    let mut places = places(table, device).map(|(_, is_read_only)| is_read_only);
    let Some(first) = places.next() else { return false };
    first && places.all(|place| place)
}

/// The mounts of a filesystem, each with its number and whether it is read-only.
///
/// Source: `ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS FIELD… - TYPE SOURCE OPTIONS`, proc_pid_mountinfo(5): the options of a place, and
/// those of the filesystem.
fn places<'a>(table: &'a str, device: &str) -> impl Iterator<Item = (&'a str, bool)> {
    let says_ro = |options: &str| options.split(',').any(|word| word == "ro");
    let lines = table.lines().filter(move |line| line.split(' ').nth(2) == Some(device));
    lines.map(move |line| {
        let id = line.split(' ').next().unwrap_or_default();
        let mut front = line.split(' ').skip(5);
        let here = front.next().is_some_and(says_ro);
        (id, here || front.skip_while(|word| *word != "-").nth(3).is_some_and(says_ro))
    })
}

/// The number of a mount in the system's table of them, as long as it is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MountId(pub u64);

/// What a name leads to, whoever serves that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reached {
    /// The mount that it lies in.
    pub mount: MountId,
    /// It is what that mount shows at its place, and not something inside of it.
    pub is_top: bool,
}

/// What a path leads to. Who serves it is not asked, and may be dead. `None` where the system does not tell: before Linux 5.8, or where the
/// way there leads through what this process is not let into.
///
/// # Errors
/// The system's.
pub fn reached(path: &Path) -> io::Result<Option<Reached>> {
    match reached_from(CWD, path, AtFlags::empty()) {
        // As glibc says it where the system has no such call.
        Err(Errno::NOSYS | Errno::INVAL | Errno::PERM | Errno::ACCESS) => Ok(None),
        found => Ok(found?),
    }
}

fn reached_from(from: impl AsFd, path: &Path, flags: AtFlags) -> Result<Option<Reached>, Errno> {
    let flags = flags | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    // Nothing is asked for: a filesystem that does not let this process in refuses all else, also what the kernel alone knows, which it
    // tells unasked.
    let about = statx(from, path, flags, StatxFlags::empty())?;
    let is_told = about.stx_mask & StatxFlags::MNT_ID.bits() != 0
        && about.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
    Ok(is_told.then(|| Reached {
        mount: MountId(about.stx_mnt_id),
        is_top: about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
    }))
}

const LOOKING: &str = "looking what is mounted there";
const ANOTHER: &str = "something else is mounted there by now, or nothing";

/// Refuses what is not this mount by now, and what may not be. A link at the end of `path` is not followed; nothing is `from` itself.
fn check(mount: MountId, from: BorrowedFd<'_>, path: &Path) -> Result<(), MountError> {
    let is_itself = path.as_os_str().is_empty();
    let flags = if is_itself { AtFlags::EMPTY_PATH } else { AtFlags::SYMLINK_NOFOLLOW };
    let checked = check_reached(mount, reached_from(from, path, flags));
    match checked.map_err(|error| (error.errno, error)) {
        Err((Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::PERM | Errno::ACCESS, _)) => {
            match mount_of(from, path).map_err(failed(LOOKING))? {
                number if number == mount => Ok(()),
                _ => Err(failed(ANOTHER)(Errno::STALE)),
            }
        }
        checked => checked.map_err(|(_, error)| error),
    }
}

/// The mount that a name leads to, where statx(2) does not tell: before Linux 5.8, or where a sandbox does not know it. Whether that is the top
/// of it the kernel looks itself: it takes nothing else off, nor mounts it again. For this it is opened, though by its name only.
///
/// Source: proc_pid_fdinfo(5), from Linux 3.15 on.
fn mount_of(from: BorrowedFd<'_>, path: &Path) -> Result<MountId, Errno> {
    let opened = match path.as_os_str().is_empty() {
        true => None,
        false => {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            Some(rustix::fs::openat(from, path, flags, Mode::empty())?)
        }
    };
    let place = opened.as_ref().map_or(from, AsFd::as_fd);
    let about = own::open_own_proc(&format!("fdinfo/{}", place.as_raw_fd()))
        .and_then(io::read_to_string)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let number = about.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    let number = number.and_then(|number| number.trim().parse().ok());
    number.map(MountId).ok_or(Errno::OPNOTSUPP)
}

/// As [`check`], by what statx(2) says.
fn check_reached(mount: MountId, found: Result<Option<Reached>, Errno>) -> Result<(), MountError> {
    match found.map_err(failed(LOOKING))? {
        Some(reached) if reached == (Reached { mount, is_top: true }) => Ok(()),
        Some(_) => Err(failed(ANOTHER)(Errno::STALE)),
        None => Err(failed(LOOKING)(Errno::OPNOTSUPP)),
    }
}

/// Takes a mount off a directory. What is in use stays, and so does anything but this mount.
///
/// # Errors
/// The system's; `STALE` where something else is mounted there by now.
pub fn unmount(directory: &Path, mount: MountId) -> Result<(), MountError> {
    unmount_with(directory, mount, UnmountFlags::empty(), "-u", BUSY_MAX)
}

/// Takes a mount away from all who do not use it yet; it ends when nobody uses it any more.
///
/// # Errors
/// As [`unmount`].
pub fn unmount_when_unused(directory: &Path, mount: MountId) -> Result<(), MountError> {
    unmount_with(directory, mount, UnmountFlags::DETACH, "-uz", Duration::ZERO)
}

/// Takes a mount off, though requests wait for an answer: they fail, and so does all that comes.
///
/// # Errors
/// As [`unmount`].
pub fn unmount_by_force(directory: &Path, mount: MountId) -> Result<(), MountError> {
    unmount_with(directory, mount, UnmountFlags::FORCE, "-u", BUSY_BY_FORCE_MAX)
}

/// As [`unmount_by_force`], of what `directory` shows, if that has this device number: all who wait for an answer hear that there is none.
pub(crate) fn end_by_force(directory: &Path, device: &str) -> Result<(), MountError> {
    let mount = mount_of(CWD, directory).map_err(failed(LOOKING))?;
    let id = mount.0.to_string();
    match places(&own_table(), device).any(|(other, _)| other == id) {
        true => unmount_by_force(directory, mount),
        false => Err(failed(ANOTHER)(Errno::STALE)),
    }
}

/// What is allowed in a mount.
#[derive(Clone, Debug)]
pub struct Remount {
    /// Nothing can be written.
    pub read_only: bool,
    /// What else is not allowed.
    pub restrictions: Vec<Restriction>,
    /// In this place alone, not in others where the same is mounted.
    pub only_here: bool,
}

/// Changes what is allowed in a mount to `options`. How the time of access is noted stays.
///
/// # Errors
/// The system's; `STALE` where something else is mounted there by now.
pub fn remount(directory: &Path, mount: MountId, options: &Remount) -> Result<(), MountError> {
    const WHAT: &str = "mounting again";
    let mut flags = MountFlags::empty();
    flags.set(MountFlags::RDONLY, options.read_only);
    flags.set(MountFlags::BIND, options.only_here);
    flags.extend(options.restrictions.iter().map(|restriction| restriction.flag()));
    let pinned = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let place = rustix::fs::open(directory, pinned, Mode::empty()).map_err(failed(WHAT))?;
    check(mount, place.as_fd(), Path::new(""))?;
    own::with_path_of(&place, |path| rustix::mount::mount_remount(path, flags, c""))
        .map_err(failed(WHAT))
}

/// For so long a mount may be busy with who looks at it just now.
const BUSY_MAX: Duration = Duration::from_millis(100);
/// And with those who waited for an answer, and hear now that none comes.
const BUSY_BY_FORCE_MAX: Duration = Duration::from_secs(2);
const BUSY_LOOK_EVERY: Duration = Duration::from_millis(10);

fn unmount_with(
    directory: &Path,
    mount: MountId,
    flags: UnmountFlags,
    option: &str,
    busy_max: Duration,
) -> Result<(), MountError> {
    if !own::user().is_root() {
        let parent = directory.parent().and_then(|parent| pinned(parent).ok());
        let _lock = parent.as_ref().and_then(lock_place);
        check(mount, CWD, directory)?;
        return unmount_as_user(directory, option);
    }
    let begun = Instant::now();
    loop {
        match unmount_as_root(directory, mount, flags) {
            Err(error) if error.errno == Errno::BUSY && begun.elapsed() < busy_max => {
                std::thread::sleep(BUSY_LOOK_EVERY);
            }
            result => return result,
        }
    }
}

const UNMOUNTING: &str = "unmounting";

/// Looks right before, and by a path that nobody can lead elsewhere meanwhile: whose directory it lies in may put a link there.
fn unmount_as_root(
    directory: &Path,
    mount: MountId,
    flags: UnmountFlags,
) -> Result<(), MountError> {
    let flags = flags | UnmountFlags::NOFOLLOW;
    let (Some(parent), Some(name)) = (directory.parent(), directory.file_name()) else {
        check(mount, CWD, directory)?;
        return rustix::mount::unmount(directory, flags).map_err(failed(UNMOUNTING));
    };
    let parent = pinned(parent).map_err(failed(UNMOUNTING))?;
    let _lock = lock_place(&parent);
    check(mount, parent.as_fd(), Path::new(name))?;
    own::with_path_of(&parent, |path| rustix::mount::unmount(path.join(name), flags))
        .map_err(failed(UNMOUNTING))
}

fn pinned(directory: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// For so long who unmounts in the same directory is waited for.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(2);
const LOCK_LOOK_EVERY: Duration = Duration::from_millis(2);

/// Keeps others of this command from unmounting what lies in `parent` between the look at what is there and the call: of two at once, the second
/// one would take off what lies below.
///
/// It is the name of a socket, which needs no file, asks nobody who serves a directory, and ends with the process. Anybody may take that name, so
/// it is not waited for without end; without it the look alone has to do.
fn lock_place(parent: &OwnedFd) -> Option<OwnedFd> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let about = statx(parent, c"", flags, StatxFlags::INO).ok()?;
    let (major, minor) = (about.stx_dev_major, about.stx_dev_minor);
    let name = format!("ubtrfs umount {major}:{minor}:{}", about.stx_ino);
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()?;
    let begun = Instant::now();
    loop {
        match rustix::net::bind(&socket, &address) {
            Ok(()) => return Some(socket),
            Err(Errno::ADDRINUSE) if begun.elapsed() < LOCK_WAIT_MAX => {
                std::thread::sleep(LOCK_LOOK_EVERY);
            }
            Err(_) => return None,
        }
    }
}

/// `fusermount3` takes off what its caller mounted, and follows no link.
fn unmount_as_user(directory: &Path, option: &str) -> Result<(), MountError> {
    let status = Command::new("fusermount3").arg(option).arg("--").arg(directory).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(failed(UNMOUNTING)(Errno::BUSY)),
        Err(error) => Err(failed(UNMOUNTING)(Errno::from_io_error(&error).unwrap_or(Errno::IO))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_only_everywhere_is_read_only() {
        let table = "\
            1 0 0:5 / /a rw,noatime shared:1 - fuse.ubtrfs /i ro,user_id=1\n\
            2 0 0:6 / /b ro,noatime - fuse.ubtrfs /ro rw,user_id=1\n\
            3 0 0:7 / /c ro - fuse.ubtrfs /i rw\n\
            4 0 0:7 / /d rw - fuse.ubtrfs ro rw\n\
            5 0 0:8 / /ro rw - fuse.ubtrfs ro rw\n";
        let found =
            ["0:5", "0:6", "0:7", "0:8", "0:9"].map(|device| is_read_only_in(table, device));
        assert_eq!(found, [true, true, false, false, false]);
    }

    #[test]
    fn place_is_one_process_s_at_a_time_and_nobody_is_waited_for_without_end() {
        let scratch = tempfile::tempdir().unwrap();
        let parent = pinned(scratch.path()).unwrap();
        let lock = lock_place(&parent).unwrap();
        let other = pinned(&scratch.path().join("..")).unwrap();
        assert!(lock_place(&other).is_some(), "another directory");
        let begun = Instant::now();
        assert!(lock_place(&parent).is_none());
        assert!(begun.elapsed() >= LOCK_WAIT_MAX);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| lock_place(&parent));
            drop(lock);
            assert!(waiting.join().unwrap().is_some());
        });
    }

    #[test]
    fn mount_has_the_same_number_however_it_is_asked_for() {
        let scratch = tempfile::tempdir().unwrap();
        for path in [Path::new("/"), Path::new("/proc"), Path::new("/proc/self"), scratch.path()] {
            let Some(reached) = reached(path).unwrap() else { return };
            let opened = File::open(path).unwrap();
            // A link itself lies where its target need not.
            let found = [
                mount_of(CWD, path).unwrap(),
                mount_of(opened.as_fd(), Path::new("")).unwrap(),
                mount_of(opened.as_fd(), Path::new(".")).unwrap(),
            ];
            assert_eq!(found, [reached.mount; 3], "{path:?}");
        }
        assert_eq!(mount_of(CWD, &scratch.path().join("missing")), Err(Errno::NOENT));
    }

    /// Root was told nothing of another user's mount, and took that for the one that was meant.
    #[test]
    fn what_the_system_does_not_tell_is_not_taken_for_the_mount_that_is_meant() {
        let mount = MountId(7);
        let top = Reached { mount, is_top: true };
        check_reached(mount, Ok(Some(top))).unwrap();
        let refused = |found| check_reached(mount, found).unwrap_err().errno;
        assert_eq!(refused(Ok(None)), Errno::OPNOTSUPP);
        assert_eq!(refused(Ok(Some(Reached { is_top: false, ..top }))), Errno::STALE);
        assert_eq!(refused(Ok(Some(Reached { mount: MountId(8), ..top }))), Errno::STALE);
        for errno in [Errno::ACCESS, Errno::PERM, Errno::NOSYS, Errno::NOENT] {
            assert_eq!(refused(Err(errno)), errno);
        }
    }
}
