//! What the system tells this process of itself. In another mount namespace somebody else may have put anything by the name of `/proc`:
//! whoever goes to one keeps his own directory of it before.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use ubtrfs_rt::Mutex;

const OWN: &str = "/proc/self";

static KEPT: OnceLock<OwnedFd> = OnceLock::new();
/// Who has the working directory of the process.
static AT_WORK: Mutex<()> = Mutex::new(());

/// Keeps the directory of this process in `/proc`, from which all goes that is asked of it later. To be called before another mount
/// namespace is entered; from then on nothing may go by the working directory, which is that namespace's root.
///
/// # Errors
/// The system's.
pub fn keep_own_proc() -> io::Result<()> {
    if KEPT.get().is_none() {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // Where another thread was first it is the same.
        let _ = KEPT.set(rustix::fs::open(OWN, flags, Mode::empty())?);
    }
    Ok(())
}

/// Opens a file of this process in `/proc` to be read.
///
/// # Errors
/// The system's.
pub fn open_own_proc(name: &str) -> io::Result<File> {
    Ok(File::from(open_own(Path::new(name), OFlags::empty())?))
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
