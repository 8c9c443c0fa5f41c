//! Hundreds of dirty runs of a file, over holes, preallocated space and data, of which the nth write fails: what fsync was silent
//! about is stored, what it told of is old or new block by block, and other files are not touched.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::failing::{DataFaults, FailingDevice, Lasting};
use common::full::{create, fill, make, open_failing, read};
use common::{filefrag, judge};
use ubtrfs_engine::{DataFile, Error, Filesystem, InodeId, OpenOptions};
use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::oracle::{self, Oracle};
use ubtrfs_testkit::{KernelMount, Prng, assert_checks_clean};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

const BLOCK: u64 = 4096;
const BLOCK_LEN: usize = 4096;
/// Dirty runs, each of one block or two, with a block between them.
const RUNS: u64 = 300;
const STRIDE: u64 = 3;
const FILE_BYTES: u64 = RUNS * STRIDE * BLOCK;
/// Failing writes that are tried of each kind of file; UBTRFS_WRITE_FAILURES asks for more.
const TRIED: u64 = 16;

/// What a run lies over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Below {
    Hole,
    Preallocated,
    Data,
}

impl Below {
    fn of(run: u64) -> Self {
        [Self::Hole, Self::Preallocated, Self::Data][usize::try_from(run % 3).unwrap()]
    }
}

/// Where a run is, in bytes.
fn range_of(run: u64) -> FileRange {
    let start = run * STRIDE * BLOCK;
    // Those over holes touch no others on the medium, those over data and preallocation some.
    FileRange::with_len(FileOffset::new(start), (1 + run / 3 % 2) * BLOCK)
}

/// What a version has in a run: no two blocks are the same, and every other run cannot be compressed.
fn bytes_of(version: u64, run: u64) -> Vec<u8> {
    let range = range_of(run);
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < range.len_bytes() {
        let at = range.start.bytes() + bytes.len() as u64;
        if run.is_multiple_of(2) {
            bytes.extend_from_slice(format!("{version:7} {:8}", at / BLOCK).as_bytes());
        } else {
            bytes.extend_from_slice(&Prng::new((version << 32) | at).next_u64().to_le_bytes());
        }
    }
    bytes
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

/// Each run lies over what it is to; returns what the file has then. All of it is durable.
fn prepare(fs: &Filesystem, file: &DataFile, version: u64) -> Vec<u8> {
    file.truncate(FileOffset::new(FILE_BYTES)).unwrap();
    for run in 0..RUNS {
        let range = range_of(run);
        match Below::of(run) {
            Below::Hole => file.punch_hole(range.start, range.len_bytes()).unwrap(),
            Below::Preallocated => {
                // Anew, and not what was written already.
                file.punch_hole(range.start, range.len_bytes()).unwrap();
                file.allocate(range.start, range.len_bytes(), Reach::Stays).unwrap();
            }
            Below::Data => write(file, version, run),
        }
    }
    fs.sync().unwrap();
    contents(file)
}

fn write(file: &DataFile, version: u64, run: u64) {
    let bytes = bytes_of(version, run);
    assert_eq!(file.write(range_of(run).start, &bytes).unwrap(), bytes.len());
}

/// Makes all runs dirty; returns what the file has then.
fn dirty(file: &DataFile, version: u64) -> Vec<u8> {
    (0..RUNS).for_each(|run| write(file, version, run));
    contents(file)
}

fn blocks(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.chunks(BLOCK_LEN)
}

struct Files<'a> {
    fs: &'a Filesystem,
    struck: InodeId,
    beside: InodeId,
    version: u64,
}

/// What came of a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Outcome {
    writes: u64,
    failures: u64,
    is_told: bool,
    lost_blocks: usize,
}

impl Files<'_> {
    /// All runs are dirty, and then written while the device fails so.
    fn round(&mut self, faults: &DataFaults, failing: Option<(u64, Lasting)>) -> Outcome {
        let fs = self.fs;
        let (file, twice) =
            (fs.open_data(self.struck).unwrap(), fs.open_data(self.struck).unwrap());
        let beside = fs.open_data(self.beside).unwrap();
        self.version += 2;
        let old = prepare(fs, &file, self.version);
        prepare(fs, &beside, self.version);
        let new = dirty(&file, self.version + 1);
        let beside_new = dirty(&beside, self.version + 1);
        let (writes, failures) = (faults.writes(), faults.failures());
        if let Some((left, lasting)) = failing {
            faults.fail_after(left, lasting);
        }
        let result = file.fsync();
        faults.fail_no_more();
        let (writes, failures) = (faults.writes() - writes, faults.failures() - failures);
        let what = format!("{failing:?}, {failures} failed: {result:?}");
        let is_told = match &result {
            Ok(()) => false,
            Err(Error::Volume(_)) => true,
            Err(error) => panic!("{what}: {error}"),
        };
        assert!(failures > 0 || !is_told, "{what}");
        // Each open file is told once.
        assert_eq!(twice.fsync().is_err(), is_told, "{what}");
        file.fsync().unwrap_or_else(|error| panic!("{what}: then {error}"));
        twice.fsync().unwrap_or_else(|error| panic!("{what}: then {error}"));
        let shown = contents(&file);
        let mut lost_blocks = 0;
        assert_eq!(shown.len(), new.len());
        for (number, (have, (old, new))) in
            blocks(&shown).zip(blocks(&old).zip(blocks(&new))).enumerate()
        {
            assert!(have == new || have == old, "{what}: block {number} is neither");
            lost_blocks += usize::from(have != new);
        }
        assert!(is_told || lost_blocks == 0, "{what}: {lost_blocks} blocks lost, and nobody told");
        // What another wrote meanwhile is not lost with it.
        assert!(contents(&beside) == beside_new, "{what}: the other file");
        beside.fsync().unwrap_or_else(|error| panic!("{what}: the other file: {error}"));
        fs.sync().unwrap_or_else(|error| panic!("{what}: {error}"));
        fs.drop_clean_data();
        assert!(contents(&file) == shown, "{what}: read anew");
        assert!(contents(&beside) == beside_new, "{what}: the other file read anew");
        Outcome { writes, failures, is_told, lost_blocks }
    }
}

fn tried() -> u64 {
    match std::env::var("UBTRFS_WRITE_FAILURES") {
        Ok(text) => text.parse().expect("UBTRFS_WRITE_FAILURES is a number"),
        Err(_) => TRIED,
    }
}

fn fail_nth(bits: u64) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let faults = Arc::<DataFaults>::default();
    let fs = open(&image, &faults);
    let [struck, beside] = ["struck", "beside"].map(|name| create(&fs, name, bits).unwrap().id());
    fs.sync().unwrap();
    let mut files = Files { fs: &fs, struck, beside, version: 0 };
    let Outcome { writes, .. } = files.round(&faults, None);
    assert!(writes > 100, "{writes} writes");
    let mut random = Prng::of_test(bits + 1);
    let (mut told, mut lost, mut silent) = (0, 0, 0);
    for round in 0..tried() {
        // The first and the last, and what chance says between them.
        let nth = match round {
            0..3 => 0,
            3..6 => writes - 1,
            _ => random.below(writes),
        };
        let lasting = match round % 3 {
            0 => Lasting::UntilTold,
            1 => Lasting::Once,
            _ => Lasting::Again(random.below(2 * RUNS)),
        };
        let outcome = files.round(&faults, Some((nth, lasting)));
        assert!(outcome.failures > 0, "{nth}, {lasting:?}: {outcome:?}");
        assert!(outcome.is_told || lasting != Lasting::UntilTold, "{nth}: {outcome:?}");
        told += u64::from(outcome.is_told);
        lost += outcome.lost_blocks;
        silent += u64::from(!outcome.is_told);
    }
    println!("{writes} writes; {told} told, {silent} written anew, {lost} blocks lost");
    assert!(told > 0 && lost > 0);
    drop(fs);
    judge(&image);
}

#[test]
fn nth_write_of_many_runs_that_fails_is_told_once_and_harms_nothing_else() {
    fail_nth(0);
}

#[test]
fn nth_write_in_place_of_many_runs_that_fails_is_told_once_and_harms_nothing_else() {
    fail_nth(flags::NODATACOW | flags::NODATASUM);
}

#[test]
fn nth_write_of_many_compressed_runs_that_fails_is_told_once_and_harms_nothing_else() {
    fail_nth(flags::COMPRESS);
}

/// The last block of the largest file ends a byte behind where a file can. What of a run was stored there, when the rest failed, was taken to
/// be that byte shorter: the byte was written again, as an extent of its own that is no block.
#[test]
fn nth_write_that_fails_beside_the_last_block_of_the_largest_file_is_told_once() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let faults = Arc::<DataFaults>::default();
    let fs = open(&image, &faults);
    let tail = FileOffset::new(FileOffset::MAX.bytes() - (2 * BLOCK - 1));
    let mut failures = 0;
    for case in 0..24 {
        let file = create(&fs, &format!("file {case}"), 0).unwrap();
        let (nth, lasts, has_front) = (case % 4, case / 4 % 2 == 1, case / 8 > 0);
        // Behind which the medium must not end before it is there.
        if has_front {
            file.write(FileOffset::ZERO, &[1; 3000]).unwrap();
            file.allocate(FileOffset::new(BLOCK), BLOCK, Reach::Extends).unwrap();
        }
        if case / 8 < 2 {
            file.truncate(FileOffset::MAX).unwrap();
            file.allocate(tail, BLOCK, Reach::Stays).unwrap();
        } else {
            file.allocate(tail, BLOCK, Reach::Stays).unwrap();
        }
        file.fsync().unwrap();
        if has_front {
            file.write(FileOffset::ZERO, &[2; 2 * BLOCK_LEN]).unwrap();
        }
        file.write(tail, &[3; 2 * BLOCK_LEN - 1]).unwrap();
        let before = faults.failures();
        faults.fail_after(nth, if lasts { Lasting::UntilTold } else { Lasting::Once });
        let result = file.fsync();
        faults.fail_no_more();
        failures += faults.failures() - before;
        assert!(result.is_ok() || faults.failures() > before, "{case}: {result:?}");
        file.fsync().unwrap_or_else(|error| panic!("{case}: then {error}"));
        fs.sync().unwrap_or_else(|error| panic!("{case}: {error}"));
        fs.drop_clean_data();
        assert_eq!(file.size(), FileOffset::MAX, "{case}");
        let mut bytes = [0xEE; 2 * BLOCK_LEN - 1];
        let len = file.read(tail, &mut bytes).unwrap();
        assert_eq!(len, bytes.len(), "{case}");
        for block in blocks(&bytes[..len]) {
            let is_new = block.iter().all(|byte| *byte == 3);
            let is_lost = block.iter().all(|byte| *byte == 0);
            assert!(is_new || is_lost && result.is_err(), "{case}: {result:?}");
        }
        // Written once more, all of it is there.
        file.write(tail, &[4; 2 * BLOCK_LEN - 1]).unwrap();
        file.fsync().unwrap();
    }
    assert!(failures > 12, "{failures}");
    let names = (0..24).map(|case| format!("file {case}"));
    let extents: Vec<_> = names
        .map(|name| {
            let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
            (name, filefrag::by_engine(&fs.open_data(id).unwrap()))
        })
        .collect();
    drop(fs);
    // The kernel reads where the files end, and not all that lies before.
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
    if oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        let mount = KernelMount::read_only(&image, "");
        for entry in std::fs::read_dir(mount.path()).unwrap() {
            let file = std::fs::File::open(entry.unwrap().path()).unwrap();
            let mut bytes = [0; 2 * BLOCK_LEN - 1];
            file.read_exact_at(&mut bytes, tail.bytes()).unwrap();
            assert_eq!(bytes, [4; 2 * BLOCK_LEN - 1]);
        }
        for (name, extents) in extents {
            assert_eq!(filefrag::by_kernel(&mount.path().join(&name)), extents, "{name}");
        }
        mount.unmount();
    }
}

/// A file that is written in place on a full filesystem: a write of a part of a block waited for the block's way to the medium, where it did
/// not arrive and so was forgotten. Then zeros were stored beside the few bytes, over what an fsync had promised.
#[test]
fn write_in_place_behind_one_that_fails_has_the_rest_of_the_block() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 160 << 20);
    let (fs, faults) = open_failing(&image);
    let file = create(&fs, "in place", flags::NODATACOW | flags::NODATASUM).unwrap();
    file.write(FileOffset::ZERO, &[b'a'; 2 * BLOCK_LEN]).unwrap();
    file.fsync().unwrap();
    let filler = fill(&fs, &mut Prng::new(8));
    fs.sync().unwrap();
    file.write(FileOffset::ZERO, &[b'b'; 10]).unwrap();
    faults.stalls.store(true, Ordering::Relaxed);
    let (flushed, written) = std::thread::scope(|scope| {
        let flushing = scope.spawn(|| file.fsync());
        while !faults.is_stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let writing = scope.spawn(|| file.write(FileOffset::new(2000), &[b'c'; 10]));
        // Long enough to be taken, if it does not wait.
        std::thread::sleep(std::time::Duration::from_millis(100));
        faults.fails.store(true, Ordering::Relaxed);
        faults.stalls.store(false, Ordering::Relaxed);
        let flushed = flushing.join().unwrap();
        faults.fails.store(false, Ordering::Relaxed);
        (flushed, writing.join().unwrap())
    });
    assert!(flushed.is_err(), "the device failed");
    assert_eq!(written.unwrap(), 10);
    fs.sync().unwrap();
    file.fsync().unwrap();
    let mut expected = vec![b'a'; 2 * BLOCK_LEN];
    expected[2000..2010].fill(b'c');
    assert!(read(&fs, file.id()) == expected);
    drop((file, filler));
    drop(fs);
    judge(&image);
}
