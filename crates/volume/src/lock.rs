//! Keeping a second program out of an image or device.
//!
//! A lock (`flock`) on the open file: one writer alone, or any number of readers. It ends with
//! the file. The kernel's mounts do not take it; those are [`crate::kernel`]'s matter.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use ubtrfs_ondisk::PhysicalAddr;

use crate::error::{Error, Op, Result};

/// How often a block device's lock is tried: udev holds it for moments while it looks at what
/// has changed.
const TRY_COUNT_MAX: u32 = 20;
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
    let holder = file.metadata().ok().and_then(|metadata| holder(&metadata));
    Err(Error::Busy {
        device: path.display().to_string(),
        holder: holder.unwrap_or_else(|| "another program has it open".to_owned()),
    })
}

/// Who holds a lock on the file, from `/proc/locks`, whose lines read
/// `1: FLOCK ADVISORY WRITE 3885 fe:00:5439685 0 EOF`.
fn holder(metadata: &Metadata) -> Option<String> {
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let device = metadata.dev();
    let file = format!(
        "{:02x}:{:02x}:{}",
        rustix::fs::major(device),
        rustix::fs::minor(device),
        metadata.ino()
    );
    let line = locks.lines().find(|line| {
        let mut fields = line.split_whitespace().skip(1);
        fields.next() == Some("FLOCK") && fields.nth(3) == Some(&*file)
    })?;
    let mut fields = line.split_whitespace().skip(3);
    let what = match fields.next()? {
        "WRITE" => "writing",
        _ => "reading",
    };
    let pid: u32 = fields.next()?.parse().ok()?;
    let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("process {pid} ({}) has it open for {what}", command.trim_end()))
}
