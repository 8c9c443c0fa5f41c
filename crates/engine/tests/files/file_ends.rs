//! What lies behind the end of a file in its last block, after a power cut.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::simulated;
use ubtrfs_engine::{
    DataFile, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation, SetAttributes,
    mkfs,
};
use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::crash::SimArray;
use ubtrfs_volume::{Volume, VolumeOptions};

/// Where the file ended first, and where it was cut off: in the same block.
const LONG: usize = 32_700;
const SHORT: usize = 30_869;
const BLOCK: u64 = 4096;

/// Makes the file longer.
type Grow = fn(&Filesystem, InodeId);

const WAYS: [(&str, Grow); 17] = [
    ("truncate where it ends, dirty, with space behind", |fs, id| {
        dirty_end_before_space(fs, id, 100).truncate(at((1 << 20) + 100)).unwrap();
    }),
    ("resize where it ends, dirty, with space behind", |fs, id| {
        dirty_end_before_space(fs, id, 100).resize(at((1 << 20) + 100)).unwrap();
    }),
    ("truncate to less, dirty, with space behind", |fs, id| {
        dirty_end_before_space(fs, id, 8192).truncate(at((1 << 20) + 100)).unwrap();
    }),
    ("clone, closed", |fs, id| clone_behind(fs, id)),
    ("truncate to less than in memory", |fs, id| {
        let file = fs.open_data(id).unwrap();
        file.write(at(1 << 20), &[2; 1]).unwrap();
        file.truncate(at(500_050)).unwrap();
    }),
    ("punch", |fs, id| {
        let file = fs.open_data(id).unwrap();
        file.write(at(1 << 20), &[2; 1]).unwrap();
        file.punch_hole(at(65_536), BLOCK).unwrap();
    }),
    ("truncate, closed", |fs, id| fs.truncate(id, 50_000).unwrap()),
    ("write, closed", |fs, id| {
        fs.write(id, ubtrfs_ondisk::FileOffset(40_000), &[2; 3000]).unwrap();
    }),
    ("append, closed", |fs, id| {
        fs.write(id, ubtrfs_ondisk::FileOffset(SHORT as u64), &[2; 12_000]).unwrap();
    }),
    ("truncate", |fs, id| fs.open_data(id).unwrap().truncate(at(50_000)).unwrap()),
    ("truncate inside of the block", |fs, id| {
        fs.open_data(id).unwrap().truncate(at(SHORT as u64 + 100)).unwrap();
    }),
    ("allocate", |fs, id| {
        fs.open_data(id).unwrap().allocate(at(26_005), 20_000, Reach::Extends).unwrap();
    }),
    ("write", |fs, id| {
        let file = fs.open_data(id).unwrap();
        file.write(at(40_000), &[2; 3000]).unwrap();
        flush(&file, 36_864..50_000);
    }),
    ("write in place", |fs, id| {
        let file = fs.open_data(id).unwrap();
        file.allocate(at(36_864), BLOCK, Reach::Stays).unwrap();
        file.write(at(36_864), &[2; 3000]).unwrap();
        flush(&file, 36_864..40_960);
    }),
    ("direct write", |fs, id| {
        fs.open_data(id).unwrap().direct_write(at(40_960), &[2; 4096]).unwrap();
    }),
    ("clone", |fs, id| {
        let file = fs.open_data(id).unwrap();
        clone_behind(fs, file.id());
    }),
    ("append", |fs, id| {
        let file = fs.open_data(id).unwrap();
        file.append(&[2; 12_000]).unwrap();
        flush(&file, 36_864..40_960);
    }),
];

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn flush(file: &DataFile, range: std::ops::Range<u64>) {
    file.space().flush(FileRange::new(at(range.start), at(range.end))).unwrap();
}

fn open(array: &SimArray) -> Filesystem {
    let volume = Volume::open(array.devices(), &VolumeOptions::default()).unwrap();
    let runtime = Arc::new(Runtime::simulated(1));
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn set_flags(fs: &Filesystem, id: InodeId, bits: u64) {
    let changes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
    fs.begin(Reservation::create(0)).unwrap().set_attributes(id, &changes).unwrap();
}

fn create(fs: &Filesystem, name: &[u8], bits: u64) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let top = fs.top_level();
    let id = fs.begin(Reservation::create(0)).unwrap().create(top, name, &new).unwrap();
    set_flags(fs, id, bits);
    id
}

/// The file with so much written far behind its end, and space allocated behind that.
fn dirty_end_before_space(fs: &Filesystem, id: InodeId, len: usize) -> DataFile {
    let file = fs.open_data(id).unwrap();
    file.allocate(at(2 << 20), 65_536, Reach::Stays).unwrap();
    file.write(at(1 << 20), &vec![2; len]).unwrap();
    file
}

/// Clones a block of another file to behind the end.
fn clone_behind(fs: &Filesystem, id: InodeId) {
    let disk = ubtrfs_ondisk::FileOffset;
    let other = create(fs, b"other", fs.inode(id).unwrap().flags);
    fs.write(other, disk(0), &[2; 4096]).unwrap();
    fs.clone_range(other, disk(0)..disk(4096), id, disk(40_960)).unwrap();
}

/// The image that a power cut leaves which loses all that was not flushed.
fn cut(fs: Filesystem, array: &SimArray) -> SimArray {
    drop(fs);
    SimArray::of_images(array.images())
}

/// A file was cut off inside of a block, and the power went after the commit that said so, before the zeros behind the end were
/// written: nobody sees what lies there. Then the file became longer, and the power went after the commit of that, again before the
/// block was written: what had been cut off was shown. Later so where space was dropped behind a new end that was not written yet: it
/// was told at once where the file ends.
#[test]
fn what_was_cut_off_stays_away_whatever_makes_the_file_longer_and_whenever_the_power_goes() {
    for (kind, bits) in [("plain", 0), ("in place", flags::NODATACOW | flags::NODATASUM)] {
        for (way, grow) in WAYS {
            let array = SimArray::new(&[160 << 20]);
            let runtime = Arc::new(Runtime::simulated(1));
            drop(mkfs(array.devices(), &MkfsOptions::default(), &runtime).unwrap());
            let fs = open(&array);
            let id = create(&fs, b"file", bits);
            let file = fs.open_data(id).unwrap();
            file.write(at(0), &[1; LONG]).unwrap();
            file.fsync().unwrap();
            file.truncate(at(SHORT as u64)).unwrap();
            fs.commit().unwrap();
            drop(file);
            let array = cut(fs, &array);
            let fs = open(&array);
            assert_eq!(fs.inode(id).unwrap().size_bytes, SHORT as u64, "{kind}, {way}");
            grow(&fs, id);
            fs.commit().unwrap();
            let array = cut(fs, &array);
            let fs = open(&array);
            let len = usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap();
            let mut bytes = vec![0; len];
            fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes).unwrap();
            assert!(bytes[..SHORT] == [1; SHORT], "{kind}, {way}: what it had");
            assert!(!bytes[SHORT..].contains(&1), "{kind}, {way}: of {len} bytes some are back");
        }
    }
}

/// It became shorter in two steps, the first up to the next block: a commit between them, and a crash, left it there. Found by random
/// operations beside services, one time in four with seed 85.
#[test]
fn truncation_of_few_extents_is_one_step_on_the_medium() {
    const LONG: u64 = 40 * BLOCK;
    const SHORT: u64 = 28 * BLOCK - 1;
    for is_open in [true, false] {
        truncate_beside_commits(LONG, SHORT, is_open);
    }
}

/// A closed file may end at the block behind the end for a while no more than one that is open.
fn truncate_beside_commits(long: u64, short: u64, is_open: bool) {
    let disk = ubtrfs_ondisk::FileOffset;
    let (device, fs) = simulated::empty(&MkfsOptions::default());
    let id = create(&fs, b"file", 0);
    let bytes = vec![1; usize::try_from(long).unwrap()];
    fs.write(id, disk(0), &bytes).unwrap();
    fs.sync().unwrap();
    let file = is_open.then(|| fs.open_data(id).unwrap());
    let write = |offset: u64| {
        let bytes = &bytes[usize::try_from(offset).unwrap()..];
        match &file {
            Some(file) => drop(file.write(at(offset), bytes).unwrap()),
            None => fs.write(id, disk(offset), bytes).unwrap(),
        }
    };
    let truncate = |size: u64| match &file {
        Some(file) => file.truncate(at(size)).unwrap(),
        None => fs.truncate(id, size).unwrap(),
    };
    let is_done = AtomicBool::new(false);
    let sizes = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut sizes = BTreeSet::new();
            while !is_done.load(Ordering::Relaxed) {
                fs.commit().unwrap();
                // What was committed stays as it is until the next commit, which is this thread's.
                sizes.insert(simulated::open(&device).inode(id).unwrap().size_bytes);
            }
            sizes
        });
        for round in 0..3000 {
            // Whole, with a hole in front of its last extent, and all of what goes a hole.
            match round % 3 {
                0 => write(0),
                1 => write(long - BLOCK),
                _ => truncate(long),
            }
            if let Some(file) = &file {
                file.space().flush(FileRange::from(at(0))).unwrap();
            }
            truncate(short);
        }
        is_done.store(true, Ordering::Relaxed);
        watch.join().unwrap()
    });
    assert_eq!(sizes, [long, short].into(), "open: {is_open}");
    drop((file, fs));
    simulated::check(&device, "after truncation beside commits");
}
