//! What the system tells this process of itself, and is told of its connections. In another mount namespace somebody else may have put anything
//! by the names of `/proc` and `/sys`: whoever goes to one keeps his own directories of them before.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use ubtrfs_rt::Mutex;

const OWN: &str = "/proc/self";

/// Where the kernel has a directory for each connection, in which its owner may end it.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";
/// Source: `FUSE_CTL_SUPER_MAGIC` of `fs/fuse/control.c`.
const FUSECTL_MAGIC: u32 = 0x6573_5543;

static KEPT: OnceLock<OwnedFd> = OnceLock::new();
/// `None` where there was nothing by that name.
static KEPT_CONNECTIONS: OnceLock<Option<OwnedFd>> = OnceLock::new();
/// Who has the working directory of the process.
static AT_WORK: Mutex<()> = Mutex::new(());

/// Keeps the directory of this process in `/proc`, from which all goes that is asked of it later, and that of connections in `/sys`. To be
/// called before another mount namespace is entered; from then on nothing may go by the working directory, which is that namespace's root.
///
/// # Errors
/// The system's.
pub fn keep_own_proc() -> io::Result<()> {
    if KEPT.get().is_none() {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Where another thread was first it is the same.
        let _ = KEPT.set(rustix::fs::open(OWN, flags, Mode::empty())?);
        let _ = KEPT_CONNECTIONS.set(open_connections().ok());
    }
    Ok(())
}

/// The user that this process acts as, as the kernel has it: what the C library tells is another's where it is run by fakeroot(1), and here it is about
/// what the kernel lets it do.
#[expect(unsafe_code, reason = "the C library has no call that fakeroot does not answer")]
pub fn user() -> Uid {
    // SAFETY: the call takes nothing, touches no memory, and cannot fail.
    Uid::from_raw(id(unsafe { libc::syscall(libc::SYS_geteuid) }))
}

/// Its group, likewise.
#[expect(unsafe_code, reason = "as above")]
pub fn group() -> Gid {
    // SAFETY: as above.
    Gid::from_raw(id(unsafe { libc::syscall(libc::SYS_getegid) }))
}

/// The type and permissions, and the owner, of an open file, as the kernel has them.
///
/// # Errors
/// The system's.
#[expect(unsafe_code, reason = "as above")]
pub(crate) fn mode_and_owner(file: &OwnedFd) -> rustix::io::Result<(u32, u32)> {
    let mut about = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let wanted = libc::STATX_TYPE | libc::STATX_MODE | libc::STATX_UID;
    // SAFETY: the path ends with a zero and lives as long as the call, and `about` is what it fills.
    let result = unsafe {
        libc::syscall(
            libc::SYS_statx,
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            wanted,
            about.as_mut_ptr(),
        )
    };
    if result != 0 {
        // Not every sandbox knows it.
        let about = rustix::fs::fstat(file)?;
        return Ok((about.st_mode, about.st_uid));
    }
    // SAFETY: all zeros are a value of that type, and the call has filled it.
    let about = unsafe { about.assume_init() };
    Ok((about.stx_mode.into(), about.stx_uid))
}

fn id(answer: libc::c_long) -> u32 {
    u32::try_from(answer).expect("the kernel's numbers of users have 32 bits")
}

/// Opens a file of this process in `/proc` to be read.
///
/// # Errors
/// The system's.
pub fn open_own_proc(name: &str) -> io::Result<File> {
    Ok(File::from(open_own(Path::new(name), OFlags::empty())?))
}

/// What a link of this process in `/proc` says.
///
/// # Errors
/// The system's.
pub(crate) fn read_own_link(name: &str) -> io::Result<PathBuf> {
    match KEPT.get() {
        Some(own) => {
            let target = rustix::fs::readlinkat(own, name, Vec::new())?;
            Ok(OsString::from_vec(target.into_bytes()).into())
        }
        None => std::fs::read_link(Path::new(OWN).join(name)),
    }
}

/// Opens again, to be read, what is open by its name only ([`OFlags::PATH`]).
///
/// # Errors
/// The system's.
pub fn open_again(file: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(open_own(&name_of(file), OFlags::NONBLOCK | OFlags::NOCTTY)?)
}

fn open_own(name: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC;
    match KEPT.get() {
        Some(own) => rustix::fs::openat(own, name, flags, Mode::empty()),
        None => rustix::fs::open(Path::new(OWN).join(name), flags, Mode::empty()),
    }
}

fn open_connections() -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(CONNECTIONS, flags, Mode::empty())
}

/// Has the kernel end the connection of this number.
///
/// # Errors
/// The system's; `NOTSUP` where something else is there than what the kernel tells of connections, to which nothing is written.
pub(crate) fn end_connection(number: u32) -> Result<(), Errno> {
    match KEPT_CONNECTIONS.get() {
        Some(kept) => end_connection_in(kept.as_ref().ok_or(Errno::NOENT)?, number),
        None => end_connection_in(&open_connections()?, number),
    }
}

fn end_connection_in(connections: &OwnedFd, number: u32) -> Result<(), Errno> {
    // Whatever else has the name stays as it is.
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(connections, format!("{number}/abort"), flags, Mode::empty())?;
    if u32::try_from(rustix::fs::fstatfs(&file)?.f_type) != Ok(FUSECTL_MAGIC) {
        return Err(Errno::NOTSUP);
    }
    rustix::io::write(&file, b"1").map(drop)
}

/// In the directory of this process.
fn name_of(file: &OwnedFd) -> PathBuf {
    Path::new("fd").join(file.as_raw_fd().to_string())
}

/// Calls `work` with a path that leads to what is open, whatever its name leads to by now.
pub(crate) fn with_path_of<T>(
    file: &OwnedFd,
    work: impl FnOnce(PathBuf) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let path = name_of(file);
    let Some(own) = KEPT.get() else { return work(Path::new(OWN).join(path)) };
    // No name leads to what was kept.
    let at_work = AT_WORK.lock();
    rustix::process::fchdir(own)?;
    let result = work(path);
    let back = rustix::process::chdir("/");
    drop(at_work);
    result.and_then(|value| back.map(|()| value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever had the name was emptied and written to, be it by a link.
    #[test]
    fn what_is_no_connection_of_the_kernels_is_not_written_to() {
        let scratch = tempfile::tempdir().unwrap();
        let canary = scratch.path().join("canary");
        std::fs::write(&canary, "untouched").unwrap();
        for number in 1..=3 {
            std::fs::create_dir(scratch.path().join(number.to_string())).unwrap();
        }
        std::fs::hard_link(&canary, scratch.path().join("1/abort")).unwrap();
        std::os::unix::fs::symlink(&canary, scratch.path().join("2/abort")).unwrap();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let connections = rustix::fs::open(scratch.path(), flags, Mode::empty()).unwrap();
        let refused = [1, 2, 3, 4].map(|number| end_connection_in(&connections, number));
        let expected = [Errno::NOTSUP, Errno::LOOP, Errno::NOENT, Errno::NOENT].map(Err);
        assert_eq!(refused, expected);
        assert_eq!(std::fs::read(&canary).unwrap(), b"untouched");
        assert!(!scratch.path().join("3/abort").exists());
    }
}
