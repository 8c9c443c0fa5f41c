//! Several files are dirty at once, and the device fails in the midst of their writeback, by whomever: each that lost something says so
//! once to each who has it open, and to a sync; the others say nothing, and have all that was written.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::failing::{DataFaults, FailingDevice, Lasting};
use crate::common::full::{create, make, read};
use crate::common::judge;
use ubtrfs_engine::{DataFile, Error, Filesystem, InodeId, OpenOptions};
use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

const BLOCK: usize = 4096;
/// Dirty runs of each file, of a block each, over a hole, preallocated space and data by turns, with a block between them.
const RUNS: usize = 90;
const FILE_BYTES: usize = 2 * RUNS * BLOCK;
/// Failing writes that are tried of each who writes back; `UBTRFS_WRITE_FAILURES` asks for more.
const TRIED: u64 = 16;
const KINDS: [(&str, u64); 3] =
    [("plain", 0), ("in place", flags::NODATACOW | flags::NODATASUM), ("packed", flags::COMPRESS)];

/// Who brings what is dirty to the medium.
#[derive(Clone, Copy, Debug)]
enum By {
    /// As the background does with what is old.
    Background,
    Sync,
    /// Two of the files, by a thread each, beside the background.
    Threads,
}

fn at(offset: usize) -> FileOffset {
    FileOffset::new(offset as u64)
}

fn open(image: &Path, faults: &Arc<DataFaults>) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let device = FailingDevice::new(device, Arc::clone(faults));
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

fn contents(file: &DataFile) -> Vec<u8> {
    let mut bytes = vec![0xEE; usize::try_from(file.size().bytes()).unwrap()];
    assert_eq!(file.read(FileOffset::ZERO, &mut bytes).unwrap(), bytes.len());
    bytes
}

/// What a version of a file has in a run; no two are the same.
fn bytes_of(file: usize, version: u64, run: usize) -> Vec<u8> {
    let mut bytes = format!("{file} {version:7} {run:8} ").into_bytes();
    let seed = (version << 32) | (file * RUNS + run) as u64;
    bytes.extend(Prng::new(seed).bytes(if run.is_multiple_of(2) { 200 } else { BLOCK }));
    bytes.resize(BLOCK, b'x');
    bytes
}

/// A file that two have open.
struct Subject {
    number: usize,
    handles: [DataFile; 2],
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Subject {
    fn write(&self, version: u64, run: usize) {
        let bytes = bytes_of(self.number, version, run);
        assert_eq!(self.handles[0].write(at(2 * run * BLOCK), &bytes).unwrap(), BLOCK);
    }

    /// Each run lies over what it is to.
    fn prepare(&mut self, version: u64) {
        let file = &self.handles[0];
        file.truncate(at(FILE_BYTES)).unwrap();
        for run in 0..RUNS {
            let start = at(2 * run * BLOCK);
            file.punch_hole(start, BLOCK as u64).unwrap();
            match run % 3 {
                0 => {}
                1 => file.allocate(start, BLOCK as u64, Reach::Stays).unwrap(),
                _ => self.write(version, run),
            }
        }
        self.old = contents(file);
    }

    fn make_dirty(&mut self, version: u64) {
        (0..RUNS).for_each(|run| self.write(version, run));
        self.new = contents(&self.handles[0]);
    }

    /// How many blocks are what they were before; all others are new.
    fn lost_blocks(&self, what: &str) -> usize {
        let shown = contents(&self.handles[0]);
        assert_eq!(shown.len(), self.new.len(), "{what}");
        let blocks =
            |bytes: &'_ [u8]| -> Vec<Vec<u8>> { bytes.chunks(BLOCK).map(<[u8]>::to_vec).collect() };
        let all = blocks(&shown).into_iter().zip(blocks(&self.old)).zip(blocks(&self.new));
        let mut lost = 0;
        for (number, ((have, old), new)) in all.enumerate() {
            assert!(have == new || have == old, "{what}: block {number} is neither");
            lost += usize::from(have != new);
        }
        lost
    }
}

struct Run {
    image: PathBuf,
    fs: Filesystem,
    faults: Arc<DataFaults>,
    ids: Vec<InodeId>,
    version: u64,
}

/// What came of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Outcome {
    writes: u64,
    failures: u64,
    /// Files that told of an error.
    struck: usize,
}

impl Run {
    fn subjects(&self) -> Vec<Subject> {
        let open = |id| self.fs.open_data(id).unwrap();
        let subject = |(number, id): (usize, &InodeId)| Subject {
            number,
            handles: [open(*id), open(*id)],
            old: Vec::new(),
            new: Vec::new(),
        };
        self.ids.iter().enumerate().map(subject).collect()
    }

    fn write_back(&self, by: By, subjects: &[Subject]) -> Result<(), Error> {
        match by {
            By::Sync => return self.fs.sync(),
            By::Background => self.fs.write_back_due(u64::MAX),
            By::Threads => std::thread::scope(|scope| {
                let all = FileRange::from(FileOffset::ZERO);
                for subject in &subjects[..2] {
                    // Tells nobody.
                    scope.spawn(move || subject.handles[0].space().flush(all).unwrap());
                }
                scope.spawn(|| self.fs.write_back_due(u64::MAX));
            }),
        }
        Ok(())
    }

    fn round(&mut self, by: By, failing: Option<(u64, Lasting)>) -> Outcome {
        let what = format!("{by:?}, {failing:?}");
        let mut subjects = self.subjects();
        self.version += 2;
        subjects.iter_mut().for_each(|subject| subject.prepare(self.version));
        self.fs.sync().unwrap();
        subjects.iter_mut().for_each(|subject| subject.make_dirty(self.version + 1));
        let before = (self.faults.writes(), self.faults.failures());
        if let Some((left, lasting)) = failing {
            self.faults.fail_after(left, lasting);
        }
        let told_at_once = self.write_back(by, &subjects).is_err();
        self.faults.fail_no_more();
        let (writes, failures) =
            (self.faults.writes() - before.0, self.faults.failures() - before.1);
        // What is dirty still is written now; of what was lost a sync tells, once.
        let told = told_at_once || self.fs.sync().is_err();
        self.fs.sync().unwrap_or_else(|error| panic!("{what}: a sync tells again: {error}"));
        let (mut struck, mut lost_blocks) = (0, 0);
        for subject in &subjects {
            let what = format!("{what}, {}", KINDS[subject.number].0);
            let lost = subject.lost_blocks(&what);
            lost_blocks += lost as u64;
            struck += usize::from(self.assert_told(subject, lost > 0, &what));
            self.fs.drop_clean_data();
            assert_eq!(subject.lost_blocks(&what), lost, "{what}: read anew");
        }
        assert_eq!(told, struck > 0, "{what}: a sync was told");
        assert!(failures > 0 || struck == 0, "{what}");
        // A run is a block, and each that is lost failed by itself at last; those beside it are written.
        assert!(lost_blocks <= failures, "{what}: {lost_blocks} lost with {failures} failures");
        if struck > 0 {
            self.assert_on_medium(&subjects, &what);
        }
        // Written once more, all of it is there.
        for subject in &mut subjects {
            subject.make_dirty(self.version + 2);
            subject.handles[1].fsync().unwrap();
        }
        self.version += 2;
        self.fs.drop_clean_data();
        for subject in &subjects {
            assert!(contents(&subject.handles[0]) == subject.new, "{what}: written once more");
        }
        Outcome { writes, failures, struck }
    }

    /// What is shown is what a power cut leaves.
    fn assert_on_medium(&self, subjects: &[Subject], what: &str) {
        let copy = self.image.with_extension("cut");
        std::fs::copy(&self.image, &copy).unwrap();
        let medium = crate::common::open(&[&copy]);
        for subject in subjects {
            let handle = &subject.handles[0];
            assert!(read(&medium, handle.id()) == contents(handle), "{what}: on the medium");
        }
    }

    /// Who has the file open is told once, if anything of it was lost, and else not at all. But what is written in place may have got
    /// there by a write that failed. Returns whether he is.
    fn assert_told(&self, subject: &Subject, is_lost: bool, what: &str) -> bool {
        let tell = |number: usize, handle: &DataFile| {
            let is_told = match handle.fsync() {
                Ok(()) => false,
                Err(Error::Volume(_)) => true,
                Err(error) => panic!("{what}: {error}"),
            };
            handle.fsync().unwrap_or_else(|error| panic!("{what}: {number} again: {error}"));
            is_told
        };
        let is_told = tell(0, &subject.handles[0]);
        assert_eq!(tell(1, &subject.handles[1]), is_told, "{what}: each is told");
        let is_in_place = KINDS[subject.number].1 & flags::NODATACOW != 0;
        assert!(is_told == is_lost || is_told && is_in_place, "{what}: lost {is_lost}");
        is_told
    }
}

fn tried() -> u64 {
    let wanted = std::env::var("UBTRFS_WRITE_FAILURES").ok();
    wanted.map_or(TRIED, |count| count.parse().expect("UBTRFS_WRITE_FAILURES is a number"))
}

fn fail_nth(by: By) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let faults = Arc::<DataFaults>::default();
    let fs = open(&image, &faults);
    let ids = KINDS.map(|(name, bits)| create(&fs, name, bits).unwrap().id()).to_vec();
    fs.sync().unwrap();
    let mut run = Run { image: image.clone(), fs, faults, ids, version: 0 };
    let Outcome { writes, struck, .. } = run.round(by, None);
    assert!(writes > 30 && struck == 0, "{writes} writes, {struck} struck");
    let mut random = Prng::of_test(by as u64);
    let mut struck = [0; KINDS.len() + 1];
    for round in 0..tried() {
        let nth = round * (writes - 1) / (tried() - 1);
        let lasting = match round % 3 {
            0 => Lasting::UntilTold,
            1 => Lasting::Once,
            _ => Lasting::Again(random.below(writes / 4)),
        };
        let outcome = run.round(by, Some((nth, lasting)));
        let is_there = lasting != Lasting::UntilTold || outcome.failures > 0;
        assert!(is_there, "{nth}: {outcome:?}");
        struck[outcome.struck] += 1;
    }
    println!("{by:?}: {writes} writes, rounds by files that told: {struck:?}");
    assert!(struck[1..].iter().filter(|count| **count > 0).count() > 1, "{struck:?}");
    let expected: Vec<_> = run.ids.iter().map(|id| read(&run.fs, *id)).collect();
    let ids = run.ids;
    drop(run.fs);
    judge(&image);
    let fs = crate::common::open(&[&image]);
    for (id, expected) in ids.iter().zip(expected) {
        assert!(read(&fs, *id) == expected, "opened anew");
    }
}

#[test]
fn files_whose_background_writeback_fails_say_so_and_no_others() {
    fail_nth(By::Background);
}

#[test]
fn files_whose_sync_fails_say_so_and_no_others() {
    fail_nth(By::Sync);
}

#[test]
fn files_that_are_written_back_side_by_side_when_the_device_fails_say_so_and_no_others() {
    fail_nth(By::Threads);
}
