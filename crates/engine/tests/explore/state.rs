//! What is seen of a filesystem of two files and a snapshot.

use std::fmt;

use shuttle::rand::RngCore;
use ubtrfs_engine::{Error, Filesystem, InodeId, Result};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;

/// What the names lead to.
#[derive(Clone, PartialEq, Eq)]
pub struct State {
    pub one: Option<Vec<u8>>,
    pub other: Option<Vec<u8>>,
    /// What the two were when the snapshot was taken, if it was.
    pub snapshot: Option<[Option<Vec<u8>>; 2]>,
}

impl State {
    pub fn of(fs: &Filesystem) -> Self {
        let [one, other] = files(fs, fs.top_level());
        let snapshot = fs.lookup(fs.top_level(), b"snapshot").ok();
        Self { one, other, snapshot: snapshot.map(|root| files(fs, root)) }
    }

    fn files(&self) -> [Option<&Vec<u8>>; 2] {
        [self.one.as_ref(), self.other.as_ref()]
    }

    /// Which of them there are; where there is a snapshot, of it too.
    pub fn names(&self) -> [bool; 4] {
        let is_there = |files: [Option<&Vec<u8>>; 2]| files.map(|file| file.is_some());
        let [one, other] = is_there(self.files());
        let snapshot = self.snapshot.as_ref();
        let [its_one, its_other] =
            snapshot.map_or([false; 2], |files| is_there(files.each_ref().map(Option::as_ref)));
        [one, other, its_one, its_other]
    }

    /// Those that there are, in the snapshot too, each with its number.
    pub fn all_files(&self) -> impl Iterator<Item = (usize, &Vec<u8>)> {
        let snapshot = self.snapshot.iter().flat_map(|files| files.each_ref().map(Option::as_ref));
        let numbered = self.files().into_iter().chain(snapshot).enumerate();
        numbered.filter_map(|(number, file)| Some((number % 2, file?)))
    }

    /// Whether all is the same but for what the snapshot has.
    pub fn has_same_files(&self, other: &Self) -> bool {
        self.files() == other.files() && self.snapshot.is_some() == other.snapshot.is_some()
    }

    pub fn of_one(fs: &Filesystem) -> Option<Vec<u8>> {
        contents(fs, fs.top_level(), b"one")
    }
}

fn files(fs: &Filesystem, dir: InodeId) -> [Option<Vec<u8>>; 2] {
    [contents(fs, dir, b"one"), contents(fs, dir, b"other")]
}

/// `None` if there is no such file.
fn contents(fs: &Filesystem, dir: InodeId, name: &[u8]) -> Option<Vec<u8>> {
    loop {
        let id = fs.lookup(dir, name).ok()?;
        match read(fs, id) {
            Ok(bytes) => return Some(bytes),
            // It lost its name, and is no more: then another may have it.
            Err(Error::NotFound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Of an open file, or by its number, as chance says.
fn read(fs: &Filesystem, id: InodeId) -> Result<Vec<u8>> {
    let mut bytes = vec![9; 1 << 16];
    let len = match shuttle::rand::thread_rng().next_u64().is_multiple_of(2) {
        true => fs.open_data(id)?.read(FileOffset::ZERO, &mut bytes)?,
        false => fs.read(id, DiskOffset(0), &mut bytes)?,
    };
    bytes.truncate(len);
    // Of what went meanwhile memory may have a part.
    fs.inode(id)?;
    Ok(bytes)
}

/// Bytes, and how many of each.
pub fn shown(bytes: Option<&Vec<u8>>) -> Option<Vec<(u8, usize)>> {
    let runs = |bytes: &Vec<u8>| {
        bytes.chunk_by(|one, other| one == other).map(|run| (run[0], run.len())).collect()
    };
    bytes.map(runs)
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files = |[one, other]: [&Option<Vec<u8>>; 2]| {
            format!("one {:?}, other {:?}", shown(one.as_ref()), shown(other.as_ref()))
        };
        f.write_str(&files([&self.one, &self.other]))?;
        match &self.snapshot {
            Some(snapshot) => write!(f, ", snapshot: {}", files(snapshot.each_ref())),
            None => Ok(()),
        }
    }
}
