//! A tree that is there: the attributes of each file, the entries of each directory; through system calls.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::{Args, Outcome, Phase, Timing, timed};
use crate::error::{Error, Result};

/// `count` times over all of the tree, after once that is not counted, so that what can be cached is; or one sync of its
/// filesystem.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    let timing = match args.phase {
        Phase::Sync => sync(&args.path)?,
        Phase::Stat => stat(&args.path, args.count)?,
        Phase::List => list(&args.path, args.count)?,
        _ => return Err(Error::Input { what: "no such phase of walk".to_owned() }),
    };
    Ok(Outcome { timings: vec![timing], ..Outcome::default() })
}

fn sync(top: &Path) -> Result<Timing> {
    let directory = rustix::fs::open(top, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let directory = directory.map_err(|errno| Error::io("open the mount")(errno.into()))?;
    let synced = || {
        rustix::fs::syncfs(&directory).map_err(|errno| Error::io("syncfs")(errno.into()))?;
        // The kernel does not hand syncfs on to FUSE servers; of the top directory some take it for the whole.
        rustix::fs::fsync(&directory).map_err(|errno| Error::io("fsync of the top")(errno.into()))
    };
    let (spent, ()) = timed(synced)?;
    Ok(Timing::new("sync", 1, spent))
}

fn stat(top: &Path, count: u64) -> Result<Timing> {
    let mut tree = Tree::default();
    tree.find(top)?;
    let paths: Result<Vec<CString>, _> =
        tree.all.iter().map(|path| CString::new(path.as_os_str().as_bytes())).collect();
    let paths = paths.map_err(|error| Error::Input { what: error.to_string() })?;
    let once = || -> Result<()> {
        for path in &paths {
            let found = rustix::fs::statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
            found.map_err(|errno| Error::io("stat")(errno.into()))?;
        }
        Ok(())
    };
    once()?;
    let (spent, ()) = timed(|| (0..count).try_for_each(|_| once()))?;
    Ok(Timing::new("stat", count * paths.len() as u64, spent))
}

/// Counts entries.
fn list(top: &Path, count: u64) -> Result<Timing> {
    let mut tree = Tree::default();
    tree.find(top)?;
    let once = || -> Result<u64> {
        let mut entries = 0;
        for directory in &tree.directories {
            for entry in fs::read_dir(directory).map_err(Error::io("list a directory"))? {
                entry.map_err(Error::io("list a directory"))?;
                entries += 1;
            }
        }
        Ok(entries)
    };
    once()?;
    let (spent, entries) =
        timed(|| (0..count).try_fold(0, |entries, _| Ok::<_, Error>(entries + once()?)))?;
    super::require(entries == count * tree.all.len() as u64)?;
    Ok(Timing::new("list", entries, spent))
}

/// What there is, directories among all.
#[derive(Default)]
struct Tree {
    all: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Tree {
    fn find(&mut self, top: &Path) -> Result<()> {
        let fail = || Error::io(format!("list {}", top.display()));
        self.directories.push(top.to_owned());
        let mut below = Vec::new();
        for entry in fs::read_dir(top).map_err(fail())? {
            let entry = entry.map_err(fail())?;
            if entry.file_type().map_err(fail())?.is_dir() {
                below.push(entry.path());
            }
            self.all.push(entry.path());
        }
        below.iter().try_for_each(|directory| self.find(directory))
    }
}
