//! Snapshots of the subvolume that the files job made: the engine's, and the kernel's by its ioctl.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use ubtrfs_engine::{NewInode, Reservation, SnapshotOptions};
use ubtrfs_rt::Time;

use super::files::SUBVOLUME;
use super::{Args, Outcome, Timing, reopen_with, timed};
use crate::error::{Error, Result};

/// Makes `count` snapshots, some files in the subvolume before each, and times each apart.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let timings = if args.system { by_kernel(args)? } else { by_engine(args)? };
    Ok(Outcome { timings, ..Outcome::default() })
}

fn by_engine(args: &Args) -> Result<Vec<Timing>> {
    let fs = reopen_with(args)?;
    let (top, mut timings) = (fs.top_level(), Vec::new());
    let source = fs.lookup(top, SUBVOLUME)?;
    let new = NewInode::new(0o100_644, Time { sec: 1_600_000_000, nsec: 0 });
    for at in 0..args.count {
        let name = format!("{}-{at}", args.tag);
        for file in 0..args.dirty {
            let name = file_name(&name, file);
            fs.begin(Reservation::create(0))?.create(source, name.as_bytes(), &new)?;
        }
        let (made, _) = timed(|| {
            Ok(fs.snapshot(source.root, top, name.as_bytes(), &SnapshotOptions::default())?)
        })?;
        let (committed, ()) = timed(|| Ok(fs.commit()?))?;
        timings.push(Timing::new("snapshot", 1, made));
        timings.push(Timing::new("commit", 1, committed));
    }
    Ok(timings)
}

fn file_name(snapshot: &str, file: u64) -> String {
    format!("{snapshot}-{file:06}")
}

fn by_kernel(args: &Args) -> Result<Vec<Timing>> {
    let open = |path: &Path| File::open(path).map_err(Error::io("open the mount"));
    let subvolume = args.path.join(str::from_utf8(SUBVOLUME).expect("letters"));
    let (top, source) = (open(&args.path)?, open(&subvolume)?);
    let mut timings = Vec::new();
    for at in 0..args.count {
        let name = format!("{}-{at}", args.tag);
        for file in 0..args.dirty {
            let path = subvolume.join(file_name(&name, file));
            File::create_new(path).map_err(Error::io("create a file"))?;
        }
        let (made, ()) = timed(|| snapshot(&top, &source, &name))?;
        timings.push(Timing::new("snapshot and commit", 1, made));
    }
    Ok(timings)
}

/// The argument of `BTRFS_IOC_SNAP_CREATE_V2` (include/uapi/linux/btrfs.h).
#[repr(C)]
struct SnapCreate {
    source_fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

const _: () = assert!(size_of::<SnapCreate>() == 4096);

/// `_IOW(0x94, 23, 4096 bytes)`.
const SNAP_CREATE_V2: libc::c_ulong = 0x5000_9417;

fn snapshot(top: &File, source: &File, name: &str) -> Result<()> {
    let mut argument = SnapCreate {
        source_fd: source.as_raw_fd().into(),
        transid: 0,
        flags: 0,
        unused: [0; 4],
        name: [0; 4040],
    };
    argument.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the argument is of the layout and size that the number names, and outlives the call;
    // both descriptors are open.
    let answer = unsafe { libc::ioctl(top.as_raw_fd(), SNAP_CREATE_V2, &raw const argument) };
    if answer == 0 {
        return Ok(());
    }
    Err(Error::io("make a snapshot by ioctl")(std::io::Error::last_os_error()))
}
