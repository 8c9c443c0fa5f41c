//! Flags of files that are set while others write them, or clone into them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::full::{create, fill, make, noise, open, open_failing, read};
use crate::common::{interrupted, judge};
use ubtrfs_engine::{Error, Filesystem, InodeId, Reservation, SetAttributes};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::Prng;

const WITHOUT_CSUMS: u64 = flags::NODATACOW | flags::NODATASUM;
/// Of the file that is cloned: some leaves full.
const EXTENT_COUNT: u64 = 1500;

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn set_flags(fs: &Filesystem, id: InodeId, bits: u64) -> Result<(), Error> {
    let flags = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
    fs.begin(Reservation::create(0))?.set_attributes(id, &flags)
}

/// How a file is written.
type Write = fn(&Filesystem, InodeId, &[u8]);

/// The size in memory was 0 until the write ended, so that whether the file has checksums could be changed after the write had asked: its data
/// had no checksums and was read by some, or had some that Linux does not look for.
#[test]
fn whether_a_file_has_checksums_stays_while_it_is_written() {
    let direct: Write = |fs, id, bytes| {
        let file = fs.open_data(id).unwrap();
        assert_eq!(file.direct_write(at(0), bytes).unwrap(), bytes.len());
    };
    let closed: Write = |fs, id, bytes| fs.write(id, DiskOffset(0), bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let bytes = noise(&mut Prng::new(3), 64 << 10);
    {
        let fs = open(&image);
        let first = create(&fs, "first", 0).unwrap();
        first.write(at(0), &bytes).unwrap();
        first.fsync().unwrap();
    }
    for (way, write) in [("direct", direct), ("closed", closed)] {
        for (before, after) in [(0, WITHOUT_CSUMS), (WITHOUT_CSUMS, 0)] {
            let (fs, faults) = open_failing(&image);
            let id = create(&fs, &format!("{way} {before}"), before).unwrap().id();
            fs.sync().unwrap();
            faults.stalls.store(true, Ordering::Relaxed);
            faults.is_stalled.store(false, Ordering::Relaxed);
            let set = std::thread::scope(|scope| {
                scope.spawn(|| write(&fs, id, &bytes));
                while !faults.is_stalled.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let set = set_flags(&fs, id, after);
                faults.stalls.store(false, Ordering::Relaxed);
                set
            });
            fs.sync().unwrap();
            drop(fs);
            let fs = open(&image);
            assert_eq!(read(&fs, id), bytes, "{way}, {before}");
            assert!(matches!(set, Err(Error::InvalidArgument { .. })), "{way}, {before}: {set:?}");
            drop(fs);
            judge(&image);
        }
    }
}

/// A clone compared once whether both files have checksums, and took many steps, under handles of their own.
#[test]
fn whether_a_file_has_checksums_stays_while_another_is_cloned_into_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let source = {
        let fs = open(&image);
        let mut random = Prng::new(8);
        let source = create(&fs, "source", WITHOUT_CSUMS).unwrap();
        for number in 0..EXTENT_COUNT {
            source.write(at(number * 8192), &noise(&mut random, 4096)).unwrap();
        }
        source.fsync().unwrap();
        source.id()
    };
    for is_open in [false, true] {
        let mut outcomes = [0; 2];
        for nth in 1.. {
            let (fs, hook) = interrupted::open(&image);
            let target = create(&fs, &format!("target {is_open} {nth}"), WITHOUT_CSUMS).unwrap();
            let id = target.id();
            let held = is_open.then_some(target);
            let (reads, setting) =
                (Arc::<AtomicUsize>::default(), Arc::<Mutex<Option<JoinHandle<_>>>>::default());
            let (count, begun, other) = (Arc::clone(&reads), Arc::clone(&setting), fs.clone());
            hook.set(move || {
                if count.fetch_add(1, Ordering::Relaxed) + 1 != nth {
                    return;
                }
                let fs = other.clone();
                let thread = std::thread::spawn(move || set_flags(&fs, id, 0));
                // It may have to wait for what reads here.
                let began = Instant::now();
                while !thread.is_finished() && began.elapsed() < Duration::from_millis(300) {
                    std::thread::yield_now();
                }
                *begun.lock().unwrap() = Some(thread);
            });
            let cloned = fs.clone_file(source, id);
            hook.clear();
            let Some(setting) = setting.lock().unwrap().take() else { break };
            let set = setting.join().unwrap();
            match (&cloned, &set) {
                (Ok(()), Err(Error::InvalidArgument { .. })) => outcomes[0] += 1,
                (Err(Error::InvalidArgument { .. }), Ok(())) => outcomes[1] += 1,
                both => panic!("open: {is_open}, {nth}: {both:?}"),
            }
            fs.sync().unwrap();
            fs.drop_clean_data();
            if cloned.is_ok() {
                assert_eq!(read(&fs, id), read(&fs, source), "open: {is_open}, {nth}");
            }
            drop(held);
            fs.unlink(fs.top_level(), format!("target {is_open} {nth}").as_bytes()).unwrap();
        }
        assert!(outcomes[0] > 1, "open: {is_open}: {outcomes:?}");
    }
    judge(&image);
}

/// Flags were set as they had been read, with one more. What had been allocated between was not known as such any more: data that had been taken
/// into that space on a full filesystem was to have space of its own, and was lost.
#[test]
fn flags_read_before_an_allocation_and_set_after_it_leave_its_space() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 << 20);
    let fs = open(&image);
    let mut random = Prng::new(8);
    let file = create(&fs, "file", 0).unwrap();
    let id = file.id();
    let flags_seen = fs.inode(id).unwrap().flags;
    file.allocate(at(0), 64 << 10, Reach::Stays).unwrap();
    fill(&fs, &mut random);
    let bytes = noise(&mut random, 64 << 10);
    assert_eq!(file.write(at(0), &bytes).unwrap(), bytes.len());
    set_flags(&fs, id, flags_seen | flags::NOATIME).unwrap();
    file.fsync().unwrap();
    assert_eq!(fs.inode(id).unwrap().flags, flags::NOATIME | flags::PREALLOC);
    // Nor is it given to who has nothing allocated.
    let other = create(&fs, "other", flags::PREALLOC | flags::NODUMP).unwrap();
    assert_eq!(other.inode().unwrap().flags, flags::NODUMP);
    drop((file, other, fs));
    let fs = open(&image);
    assert_eq!(read(&fs, id), bytes);
    drop(fs);
    judge(&image);
}
