//! Descriptors that a process has from whoever started it.
#![allow(unsafe_code)]

use std::io;

/// Those behind the standard ones.
const FIRST: u32 = 3;

/// Closes all descriptors but the standard ones, and those in `kept`, in programs that this process starts from now on. In this
/// process they stay open.
///
/// # Errors
/// The system's; of Linux before 5.11.
pub fn keep_from_programs_but(kept: &[u32]) -> io::Result<()> {
    let mut kept = kept.to_vec();
    kept.sort_unstable();
    let mut first = FIRST;
    for kept in kept {
        if first < kept {
            mark(first, kept - 1)?;
        }
        first = first.max(kept.saturating_add(1));
    }
    mark(first, u32::MAX)
}

/// Marks `first` to `last` to be closed by execve(2).
fn mark(first: u32, last: u32) -> io::Result<()> {
    // By its number, as not every C library has it.
    // SAFETY: it takes no pointers, and with this flag closes nothing: each descriptor stays its owner's.
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

    use super::*;

    #[test]
    fn programs_have_what_is_kept_for_them_and_nothing_else() {
        let files = [(); 3].map(|()| File::open("/dev/null").unwrap());
        for file in &files {
            fcntl_setfd(file, FdFlags::empty()).unwrap();
        }
        let kept = u32::try_from(files[1].as_raw_fd()).unwrap();
        keep_from_programs_but(&[0, kept, kept, u32::MAX]).unwrap();
        let is_marked = files.each_ref().map(|file| fcntl_getfd(file).unwrap() == FdFlags::CLOEXEC);
        assert_eq!(is_marked, [true, false, true]);
        let script = "for fd; do test -e /proc/self/fd/$fd && echo $fd; done; true";
        let numbers = files.each_ref().map(|file| file.as_raw_fd().to_string());
        let output = Command::new("sh").args(["-c", script, "sh"]).args(&numbers).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{kept}\n"));
    }
}
