//! Clones, copies and deduplication beside those who write source or target: lengths and times.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::common::full::{create, make, noise, open, open_failing, read};
use crate::common::{interrupted, judge};
use ubtrfs_engine::{DataFile, Filesystem, InodeId, Reservation, SetAttributes};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_rt::Time;
use ubtrfs_testkit::Prng;

const OLD: Time = Time { sec: 1_000_000, nsec: 0 };

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn set_times(fs: &Filesystem, id: InodeId, time: Time) {
    let times = SetAttributes { mtime: Some(time), ctime: Some(time), ..Default::default() };
    fs.begin(Reservation::items(1)).unwrap().set_attributes(id, &times).unwrap();
}

/// Deduplication set the target's time of modification back to what it had been before: also over what was written to the file meanwhile,
/// in another place, which no backup saw then. And the time of change moved, though nothing had changed.
#[test]
fn deduplication_keeps_times_and_those_of_writes_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let bytes = noise(&mut Prng::new(1), 1 << 20);
    for is_open in [false, true] {
        let (fs, hook) = interrupted::open(&image);
        let [source, target] = ["source", "target"].map(|name| {
            let file = create(&fs, &format!("{name} {is_open}"), 0).unwrap();
            file.write(at(0), &bytes).unwrap();
            file.write(at(8 << 20), &bytes).unwrap();
            file.fsync().unwrap();
            file
        });
        let (source_id, id) = (source.id(), target.id());
        drop((source, target));
        let held = is_open.then(|| fs.open_data(id).unwrap());
        set_times(&fs, id, OLD);
        let dedupe = || {
            let range = DiskOffset(0)..DiskOffset(1 << 20);
            assert!(fs.dedupe_range(source_id, range, id, DiskOffset(0)).unwrap());
        };
        dedupe();
        let inode = fs.inode(id).unwrap();
        assert_eq!((inode.mtime, inode.ctime), (OLD, OLD), "open: {is_open}");
        if let Some(held) = held {
            fs.drop_clean_data();
            // Of what shares its extents already nothing is read.
            held.write(at(0), &bytes).unwrap();
            held.fsync().unwrap();
            set_times(&fs, id, OLD);
            let (other, writes) = (Arc::new(held), Arc::<Mutex<Vec<_>>>::default());
            let (file, begun) = (Arc::clone(&other), Arc::clone(&writes));
            hook.set(move || {
                let mut begun = begun.lock().unwrap();
                if begun.is_empty() {
                    let file = Arc::clone(&file);
                    begun.push(std::thread::spawn(move || file.write(at(4 << 20), b"new")));
                    // Time enough to be noted; it may have to wait for the rest.
                    std::thread::sleep(Duration::from_millis(300));
                }
            });
            dedupe();
            hook.clear();
            let writes = std::mem::take(&mut *writes.lock().unwrap());
            assert_eq!(writes.len(), 1, "nothing was read to be compared");
            writes.into_iter().for_each(|write| assert_eq!(write.join().unwrap().unwrap(), 3));
            other.fsync().unwrap();
            assert!(fs.inode(id).unwrap().mtime > OLD, "it was written");
        }
        drop(fs);
    }
    judge(&image);
}

/// A write beside a clone into the same file was noted in memory while the clone said in the inode when it was: then the time of modification
/// went back to that of the write.
#[test]
fn clone_is_no_older_than_what_was_written_before() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let [source, target] = {
        let fs = open(&image);
        let ids = ["source", "target"].map(|name| create(&fs, name, 0).unwrap().id());
        fs.write(ids[0], DiskOffset(0), &[1; 1 << 20]).unwrap();
        fs.sync().unwrap();
        ids
    };
    // The first change of a filesystem just opened reads where there is space.
    let (fs, hook) = interrupted::open(&image);
    let file = Arc::new(fs.open_data(target).unwrap());
    let written = Arc::<Mutex<Option<(_, SystemTime)>>>::default();
    let (other, done) = (Arc::clone(&file), Arc::clone(&written));
    hook.set(move || {
        let mut done = done.lock().unwrap();
        if done.is_none() {
            let file = Arc::clone(&other);
            let writing = std::thread::spawn(move || file.write(at(4 << 20), b"new").unwrap());
            std::thread::sleep(Duration::from_millis(300));
            *done = Some((writing, SystemTime::now()));
        }
    });
    let range = DiskOffset(0)..DiskOffset(1 << 20);
    fs.clone_range(source, range, target, DiskOffset(0)).unwrap();
    hook.clear();
    let cloned = fs.inode(target).unwrap().mtime;
    let (writing, later) = written.lock().unwrap().take().expect("something was read");
    writing.join().unwrap();
    let later = later.duration_since(UNIX_EPOCH).unwrap();
    let later = Time { sec: later.as_secs().cast_signed(), nsec: later.subsec_nanos() };
    assert!(cloned >= later, "{cloned:?}, {later:?}");
    file.fsync().unwrap();
    assert!(fs.inode(target).unwrap().mtime >= later);
}

/// While the copy waits for the source to be brought to the medium, somebody appends to it.
fn copied_beside_append(by: impl Fn(&Filesystem, &DataFile, &DataFile) -> u64 + Sync) {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let (fs, faults) = open_failing(&image);
    let source = create(&fs, "source", 0).unwrap();
    let target = create(&fs, "target", 0).unwrap();
    let bytes = noise(&mut Prng::new(3), 50_000);
    source.write(at(0), &bytes[..49_000]).unwrap();
    faults.stalls.store(true, Ordering::Relaxed);
    let copied = std::thread::scope(|scope| {
        let copying = scope.spawn(|| by(&fs, &source, &target));
        while !faults.is_stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        source.append(&bytes[49_000..]).unwrap();
        faults.stalls.store(false, Ordering::Relaxed);
        copying.join().unwrap()
    });
    assert!([49_000, 50_000].contains(&copied), "{copied}");
    let found = read(&fs, target.id());
    assert_eq!(found.len() as u64, copied);
    assert!(found == bytes[..found.len()]);
    drop((source, target));
    drop(fs);
    judge(&image);
}

/// They were refused as no whole sectors: the source ended elsewhere by then.
#[test]
fn copy_and_clone_of_a_file_that_becomes_longer_have_it_as_it_was_or_is() {
    copied_beside_append(|fs, source, target| {
        let all = DiskOffset(0)..DiskOffset(49_000);
        fs.copy_range(source.id(), all, target.id(), DiskOffset(0)).unwrap()
    });
    copied_beside_append(|fs, source, target| {
        fs.clone_file(source.id(), target.id()).unwrap();
        target.size().bytes()
    });
}

/// Each clone of all of a file has all of the last append or nothing of it, whichever of the two is locked first, and though somebody
/// appends all the time.
#[test]
fn clones_of_a_file_that_grows_all_the_time_end_with_an_append() {
    const PIECE: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 1 << 30);
    let fs = open(&image);
    let ids = ["one", "two"].map(|name| create(&fs, name, 0).unwrap().id());
    for [from, to] in [ids, [ids[1], ids[0]]] {
        let (source, target) = (fs.open_data(from).unwrap(), fs.open_data(to).unwrap());
        source.truncate(at(0)).unwrap();
        let (count, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let number = count.fetch_add(1, Ordering::Relaxed);
                    let byte = u8::try_from(number % 251).unwrap();
                    source.append(&[byte; PIECE as usize]).unwrap();
                    if number > 20_000 {
                        break;
                    }
                }
            });
            for round in 0..30 {
                if round % 3 == 0 {
                    target.truncate(at(0)).unwrap();
                }
                fs.clone_file(from, to).unwrap();
                let found = read(&fs, to);
                let is_right = |(piece, bytes): (usize, &[u8])| {
                    bytes.iter().all(|byte| usize::from(*byte) == piece % 251)
                };
                let is_whole = found.len().is_multiple_of(PIECE as usize)
                    && found.chunks(PIECE as usize).enumerate().all(is_right);
                is_done.store(!is_whole, Ordering::Relaxed);
                assert!(is_whole, "round {round}: {} bytes", found.len());
            }
            is_done.store(true, Ordering::Relaxed);
        });
        source.truncate(at(0)).unwrap();
        target.truncate(at(0)).unwrap();
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}
