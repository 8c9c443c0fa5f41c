//! Making many files, the same loop on the engine and through system calls on a mounted
//! filesystem.

use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use ubtrfs_engine::{
    DelayedRefTimes, Filesystem, InodeId, NewInode, PreparedData, Reservation, WriteOptions,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_rt::{Executor, Time};

use super::{Args, EngineCounts, Outcome, Phase, RefTimes, Timing, make_with, timed};
use crate::error::{Error, Result};

/// The subvolume that takes the files when one is asked for.
pub(super) const SUBVOLUME: &[u8] = b"source";

/// Where files are made.
trait Target: Sync {
    type Directory: Send + Sync;

    /// A directory in `parent`, or at the top.
    fn directory(&self, parent: Option<&Self::Directory>, name: &str) -> Result<Self::Directory>;

    /// A file with `contents`.
    fn file(&self, directory: &Self::Directory, name: &str, contents: &[u8]) -> Result<()>;

    /// Makes all of it durable.
    fn sync(&self) -> Result<()>;
}

/// The engine.
struct Engine {
    fs: Filesystem,
    top: InodeId,
    directory: NewInode,
    file: NewInode,
    options: WriteOptions,
}

impl Engine {
    fn new(fs: Filesystem, in_subvolume: bool) -> Result<Self> {
        let now = Time { sec: 1_600_000_000, nsec: 0 };
        let directory = NewInode::new(0o040_755, now);
        let mut top = fs.top_level();
        if in_subvolume {
            let mut handle = fs.begin(Reservation::create_subvolume())?;
            top = handle.create_subvolume(top, SUBVOLUME, &directory)?;
        }
        let options = fs.write_options(None);
        Ok(Self { top, directory, file: NewInode::new(0o100_644, now), options, fs })
    }
}

impl Target for Engine {
    type Directory = InodeId;

    fn directory(&self, parent: Option<&InodeId>, name: &str) -> Result<InodeId> {
        let parent = parent.copied().unwrap_or(self.top);
        let mut handle = self.fs.begin(Reservation::create(0))?;
        Ok(handle.create(parent, name.as_bytes(), &self.directory)?)
    }

    fn file(&self, directory: &InodeId, name: &str, contents: &[u8]) -> Result<()> {
        if contents.is_empty() {
            let mut handle = self.fs.begin(Reservation::create(0))?;
            handle.create(*directory, name.as_bytes(), &self.file)?;
            return Ok(());
        }
        let data = PreparedData::new(contents.to_vec(), &self.options);
        let reservation = Reservation::create(0).and(Reservation::extents(1));
        let mut handle = self.fs.begin(reservation)?;
        let id = handle.create(*directory, name.as_bytes(), &self.file)?;
        handle.write_file(id, vec![(FileOffset(0), data)], contents.len() as u64)?;
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(self.fs.commit()?)
    }
}

/// What the kernel has mounted.
struct System {
    top: OwnedFd,
}

impl System {
    fn new(top: &Path) -> Result<Self> {
        let top = open_directory(CWD, top).map_err(failed("open the mount"))?;
        Ok(Self { top })
    }
}

impl Target for System {
    type Directory = OwnedFd;

    fn directory(&self, parent: Option<&OwnedFd>, name: &str) -> Result<OwnedFd> {
        let parent = parent.unwrap_or(&self.top);
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)).map_err(failed("mkdir"))?;
        open_directory(parent, name).map_err(failed("open a directory"))
    }

    fn file(&self, directory: &OwnedFd, name: &str, contents: &[u8]) -> Result<()> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        let file = rustix::fs::openat(directory, name, flags, mode).map_err(failed("create"))?;
        if !contents.is_empty() {
            let written = rustix::io::write(&file, contents).map_err(failed("write"))?;
            super::require(written == contents.len())?;
        }
        // Closed by its drop.
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        rustix::fs::syncfs(&self.top).map_err(failed("syncfs"))
    }
}

fn open_directory(
    parent: impl rustix::fd::AsFd,
    path: impl rustix::path::Arg,
) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(parent, path, flags, Mode::empty())
}

fn failed(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Error {
    move |errno| Error::io(what)(errno.into())
}

/// Makes the files that `args` ask for, on the engine in a new image, or where something is
/// mounted. With [`Phase::Remove`] those of a mount that has them all in one directory a thread are removed.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if args.phase == Phase::Remove {
        let timings = remove(&System::new(&args.path)?, args)?;
        return Ok(Outcome { timings, ..Outcome::default() });
    }
    if args.system {
        return Ok(Outcome {
            timings: fill(&System::new(&args.path)?, args)?,
            ..Outcome::default()
        });
    }
    let engine = Engine::new(make_with(args)?, args.subvolume)?;
    let timings = fill(&engine, args)?;
    let counts = EngineCounts {
        delayed_refs: ref_times(&engine.fs.delayed_ref_times()),
        free_space_form_searches: engine.fs.free_space_form_searches(),
        commits: engine.fs.superblock().generation.get(),
        blocks_read: engine.fs.blocks_read(),
    };
    Ok(Outcome { timings, engine: Some(counts), ..Outcome::default() })
}

fn ref_times(times: &DelayedRefTimes) -> RefTimes {
    RefTimes {
        count: times.count,
        mean_ns: times.mean_ns,
        median_ns: times.median_ns,
        p90_ns: times.p90_ns,
        p99_ns: times.p99_ns,
        max_ns: times.max_ns,
        buckets: times.buckets.clone(),
    }
}

/// A thread's place: it goes on there in each loop.
struct Seat<D> {
    thread: usize,
    made: u64,
    top: D,
    directory: Option<D>,
}

fn fill<T: Target>(target: &T, args: &Args) -> Result<Vec<Timing>> {
    let contents = vec![b'x'; args.bytes];
    let mut seats = Vec::new();
    for thread in 0..args.threads {
        let top = target.directory(None, &format!("t{thread}"))?;
        seats.push(Seat { thread, made: 0, top, directory: None });
    }
    let executor = Executor::Threads(args.threads);
    let (created, ()) = timed(|| {
        for _ in 0..args.loops {
            executor.for_each_part(&mut seats, |part| -> Result<()> {
                part.iter_mut().try_for_each(|seat| fill_seat(target, seat, args, &contents))
            })?;
        }
        Ok(())
    })?;
    let (committed, ()) = timed(|| target.sync())?;
    let count = seats.iter().map(|seat| seat.made).sum();
    Ok(vec![Timing::new("create", count, created), Timing::new("commit", count, committed)])
}

/// A loop's files of one thread.
fn fill_seat<T: Target>(
    target: &T,
    seat: &mut Seat<T::Directory>,
    args: &Args,
    contents: &[u8],
) -> Result<()> {
    for _ in 0..args.count {
        if let Some(per_directory) = args.per_directory
            && seat.made.is_multiple_of(per_directory)
        {
            let name = format!("d{:05}", seat.made / per_directory);
            seat.directory = Some(target.directory(Some(&seat.top), &name)?);
        }
        let directory = seat.directory.as_ref().unwrap_or(&seat.top);
        target.file(directory, &name(seat.thread, seat.made, args.name_bytes), contents)?;
        seat.made += 1;
    }
    Ok(())
}

/// In the order in which they were made, each thread its own.
fn remove(target: &System, args: &Args) -> Result<Vec<Timing>> {
    let mut tops = Vec::new();
    for thread in 0..args.threads {
        let top = open_directory(&target.top, format!("t{thread}"));
        tops.push((thread, top.map_err(failed("open a directory"))?));
    }
    let count = args.loops * args.count;
    let (removed, ()) = timed(|| {
        Executor::Threads(args.threads).for_each_part(&mut tops, |part| {
            for (thread, top) in part {
                for number in 0..count {
                    let name = name(*thread, number, args.name_bytes);
                    let done = rustix::fs::unlinkat(&*top, name, AtFlags::empty());
                    done.map_err(failed("unlink"))?;
                }
            }
            Ok(())
        })
    })?;
    let (committed, ()) = timed(|| target.sync())?;
    let all = args.threads as u64 * count;
    Ok(vec![Timing::new("remove", all, removed), Timing::new("commit", all, committed)])
}

/// The number, and as many letters as are missing, which differ from name to name.
fn name(thread: usize, number: u64, len_bytes: usize) -> String {
    let mut name = format!("{number:09}");
    let mut state = (number ^ ((thread as u64) << 48)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    while name.len() < len_bytes {
        state = (state ^ (state >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        name.push(char::from(b'a' + (state >> 60) as u8));
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_has_its_length_and_differs_by_number_and_thread() {
        let names = [name(0, 1, 40), name(1, 1, 40), name(0, 2, 40)];
        assert!(names.iter().all(|name| name.len() == 40));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2]);
        assert_eq!(name(3, 7, 5), "000000007");
    }
}
