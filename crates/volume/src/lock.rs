//! Keeping a second program out of an image or device.
//!
//! A lock (`flock`) on the open file: one writer alone, or any number of readers. It ends with
//! the file. The kernel's mounts do not take it; those are [`crate::kernel`]'s matter.

use std::fmt;
use std::fs::{File, Metadata, TryLockError};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use ubtrfs_ondisk::PhysicalAddr;

use crate::error::{Error, Op, Result};

/// How often a block device's lock is tried: udev holds it for moments while it looks at what
/// has changed.
const TRY_COUNT_MAX: u32 = 20;
/// How often the table of locks is looked through for the holder.
const LOOK_COUNT_MAX: u32 = 50;
const TRY_PAUSE: Duration = Duration::from_millis(50);

/// Locks the file, for writing alone or for reading with others.
///
/// # Errors
/// `Busy` naming the holder where it can be found; `Io` where the file cannot be locked.
pub(crate) fn lock(file: &File, path: &Path, exclusive: bool, is_block_device: bool) -> Result<()> {
    let attempts = if is_block_device { TRY_COUNT_MAX } else { 1 };
    for attempt in 1..=attempts {
        let result = if exclusive { file.try_lock() } else { file.try_lock_shared() };
        match result {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if attempt < attempts => std::thread::sleep(TRY_PAUSE),
            Err(TryLockError::WouldBlock) => break,
            // Some network filesystems have no locks; refusing to work there helps nobody.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                return Ok(());
            }
            Err(TryLockError::Error(source)) => {
                let device = path.display().to_string();
                return Err(Error::Io { device, op: Op::Lock, offset: PhysicalAddr(0), source });
            }
        }
    }
    let holder = file
        .metadata()
        .ok()
        .and_then(|metadata| holder(&metadata, mount_of(file, Path::new(""), AtFlags::EMPTY_PATH)));
    Err(Error::Busy {
        device: path.display().to_string(),
        holder: holder
            .map_or_else(|| "another program has it open".to_owned(), |holder| holder.to_string()),
    })
}

/// The process that has an image or device open, with the lock that keeps others out.
pub fn lock_holder(path: &Path) -> Option<u32> {
    let mount = mount_of(CWD, path, AtFlags::empty());
    holder(&std::fs::metadata(path).ok()?, mount).map(|holder| holder.pid)
}

/// Who holds a lock.
struct Holder {
    pid: u32,
    is_writing: bool,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, is_writing } = self;
        let what = if *is_writing { "writing" } else { "reading" };
        let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        write!(f, "process {pid} ({}) has it open for {what}", command.trim_end())
    }
}

/// Who holds a lock on the file, which lies in a mount of this number.
///
/// The table is read a page at a time, and the kernel counts lines to find where the next page
/// begins: where locks come and go meanwhile, a line can be passed over. So it is read again.
fn holder(metadata: &Metadata, mount: Option<u64>) -> Option<Holder> {
    let told = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    let (major, minor) = mount.and_then(device_of).unwrap_or(told);
    let file = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    (0..LOOK_COUNT_MAX).find_map(|_| holder_in(&read_locks()?, &file))
}

/// The number of the mount that a file lies in; nothing where the system does not tell, as before Linux 5.8.
fn mount_of(from: impl AsFd, path: &Path, flags: AtFlags) -> Option<u64> {
    let about = statx(from, path, flags, StatxFlags::MNT_ID).ok()?;
    (about.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(about.stx_mnt_id)
}

/// The device number, major and minor, of the filesystem that is mounted there. The table of locks has that one; what stat(2) tells of a file
/// is another one where a filesystem has one for each of its subvolumes, as btrfs.
fn device_of(mount: u64) -> Option<(u32, u32)> {
    device_in(&std::fs::read("/proc/self/mountinfo").ok()?, mount)
}

/// By the lines of `/proc/PID/mountinfo`, which begin with `NUMBER PARENT MAJOR:MINOR`. What follows may be any bytes.
fn device_in(table: &[u8], mount: u64) -> Option<(u32, u32)> {
    let mut lines = table.split(|byte| *byte == b'\n').map(|line| line.split(|byte| *byte == b' '));
    let mut words = lines.find_map(|mut words| {
        let number: u64 = str::from_utf8(words.next()?).ok()?.parse().ok()?;
        (number == mount).then_some(words)
    })?;
    let (major, minor) = str::from_utf8(words.nth(1)?).ok()?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The table of locks in as few calls as can be: `read_to_string` would begin with a few bytes.
fn read_locks() -> Option<String> {
    let mut table = File::open("/proc/locks").ok()?;
    let mut bytes = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        match table.read(&mut piece) {
            Ok(0) => return String::from_utf8(bytes).ok(),
            Ok(len) => bytes.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
}

/// The holder by the lines of `/proc/locks`, which read
/// `1: FLOCK ADVISORY WRITE 3885 fe:00:5439685 0 EOF`.
fn holder_in(locks: &str, file: &str) -> Option<Holder> {
    let line = locks.lines().find(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next() == Some("FLOCK") && fields.nth(3) == Some(file)
    })?;
    let mut fields = line.split_whitespace().skip(3);
    let is_writing = fields.next()? == "WRITE";
    Some(Holder { pid: fields.next()?.parse().ok()?, is_writing })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_of_a_mount_is_found_beside_names_of_any_bytes() {
        let table =
            b"21 22 8:2 / /caf\xe9 rw - ext4 /dev/root rw\n22 1 0:300 / / rw - btrfs none rw\n";
        let found = [21, 22, 1].map(|mount| device_in(table, mount));
        assert_eq!(found, [Some((8, 2)), Some((0, 300)), None]);
    }
}
