//! Who reads or walks over a file beside those who write it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::full::{create, make, noise, open, read};
use crate::common::{interrupted, judge};
use ubtrfs_engine::{DataFile, Filesystem, MappingKind};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_testkit::Prng;

const MIB: u64 = 1 << 20;

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// The lengths of the extents that the file refers to, on the medium.
fn extents(fs: &Filesystem, file: &DataFile) -> Vec<u64> {
    let mappings = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
    mappings.map(|mapping| mapping.disk_num_bytes).collect()
}

/// Brings what is in memory to its place, without a commit.
fn settle(fs: &Filesystem) {
    fs.flush_files().unwrap();
}

/// An extent became longer over what a walk had not told yet, and whose file extent went for that: told was a hole where there was data
/// all the time.
#[test]
fn walk_over_an_extent_that_grows_tells_each_byte_once() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let id = create(&fs, "file", 0).unwrap().id();
    let half = noise(&mut Prng::new(1), 4 * MIB);
    fs.write(id, DiskOffset(0), &half).unwrap();
    fs.write(id, DiskOffset(4 * MIB), &half).unwrap();
    fs.sync().unwrap();
    fs.write(id, DiskOffset(0), &half).unwrap();
    let mut walk = fs.file_extents(id, DiskOffset(0)).unwrap();
    let first = walk.next().unwrap().unwrap();
    assert_eq!((first.offset.0, first.len_bytes), (0, 4 * MIB));
    fs.write(id, DiskOffset(4 * MIB), &half).unwrap();
    let second = walk.next().unwrap().unwrap();
    assert_eq!(second.kind, MappingKind::Data);
    assert_eq!((second.offset.0, second.len_bytes), (4 * MIB, 4 * MIB));
    assert_eq!((second.disk_bytenr, second.extent_offset), (first.disk_bytenr, 4 * MIB));
    assert!(walk.next().is_none());
    let all = fs.file_extents(id, DiskOffset(0)).unwrap().map(Result::unwrap);
    assert_eq!(all.map(|one| one.disk_num_bytes).collect::<Vec<_>>(), [8 * MIB]);
    assert!(read(&fs, id) == half.repeat(2));
    drop(walk);
    drop(fs);
    judge(&image);
}

/// Between what goes and what comes in its place a walk told a hole, and an export zeros where there was data all the time.
#[test]
fn walk_beside_a_write_tells_no_hole_where_there_is_data() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (first, second) = (noise(&mut Prng::new(1), 8 * MIB), noise(&mut Prng::new(2), 4 * MIB));
    let id = {
        let fs = open(&image);
        let id = create(&fs, "file", 0).unwrap().id();
        fs.write(id, DiskOffset(0), &first).unwrap();
        fs.sync().unwrap();
        id
    };
    // Of a filesystem just opened, whose tree of checksums is read when some of it go.
    let (fs, hook) = interrupted::open(&image);
    fs.write(id, DiskOffset(4 * MIB), &second).unwrap();
    let walks = Arc::<Mutex<Vec<_>>>::default();
    let (other, begun) = (fs.clone(), Arc::clone(&walks));
    hook.set(move || {
        let (other, (told, answer)) = (other.clone(), channel());
        let walk = std::thread::spawn(move || {
            let mappings = other.file_extents(id, DiskOffset(0)).unwrap().map(Result::unwrap);
            let kinds: Vec<_> = mappings.map(|one| (one.kind, one.len_bytes)).collect();
            // Nobody may wait for it any more.
            told.send(()).ok();
            kinds
        });
        // Time enough to tell what there is now; or it waits until the write is over.
        answer.recv_timeout(Duration::from_millis(300)).ok();
        begun.lock().unwrap().push(walk);
    });
    fs.write(id, DiskOffset(4 * MIB), &second).unwrap();
    hook.clear();
    let walks = std::mem::take(&mut *walks.lock().unwrap());
    assert!(!walks.is_empty(), "nothing was read while it was written");
    for walk in walks {
        assert_eq!(walk.join().unwrap(), [(MappingKind::Data, 4 * MIB); 2]);
    }
    assert!(read(&fs, id) == [&first[..second.len()], &second].concat());
    drop(fs);
    judge(&image);
}

/// What was read of an extent was thrown away, and read again, each time the extent had become longer meanwhile, though that lay
/// behind: without end, as long as somebody appended faster.
#[test]
fn reading_is_not_kept_from_its_end_by_what_is_appended_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, hook) = interrupted::open(&image);
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(1), 4 * MIB);
    file.append(&bytes).unwrap();
    settle(&fs);
    let more = bytes[..1 << 16].to_vec();
    for is_direct in [false, true] {
        fs.drop_clean_data();
        let reads = Arc::new(AtomicU64::new(0));
        let (other, more, count) =
            (fs.open_data(file.id()).unwrap(), more.clone(), Arc::clone(&reads));
        hook.set(move || {
            assert!(count.fetch_add(1, Ordering::Relaxed) < 100, "it is read again and again");
            let end = other.size();
            std::thread::scope(|scope| {
                scope.spawn(|| other.direct_write(end, &more).unwrap()).join().unwrap()
            });
        });
        let mut found = vec![0; 1 << 20];
        let len = match is_direct {
            true => file.direct_read(at(0), &mut found).unwrap(),
            false => file.read(at(0), &mut found).unwrap(),
        };
        hook.clear();
        assert!(found[..len] == bytes[..len]);
        let reads = reads.load(Ordering::Relaxed);
        assert!((1..40).contains(&reads), "direct: {is_direct}, {reads} reads");
        assert_eq!(extents(&fs, &file), [file.size().bytes()], "it grows meanwhile");
    }
    drop((file, fs));
    judge(&image);
}

/// The same, where what lies ahead of what is read is written: what is read ahead is nobody's to hold.
#[test]
fn reading_is_not_kept_from_its_end_by_what_is_written_ahead_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, hook) = interrupted::open(&image);
    let file = create(&fs, "file", 0).unwrap();
    let bytes = noise(&mut Prng::new(1), 4 * MIB);
    file.append(&bytes).unwrap();
    settle(&fs);
    fs.drop_clean_data();
    let reads = Arc::new(AtomicU64::new(0));
    let (other, block, count) =
        (fs.open_data(file.id()).unwrap(), bytes[1 << 20..][..4096].to_vec(), Arc::clone(&reads));
    hook.set(move || {
        assert!(count.fetch_add(1, Ordering::Relaxed) < 100, "it is read again and again");
        std::thread::scope(|scope| {
            scope.spawn(|| other.direct_write(at(MIB), &block).unwrap()).join().unwrap()
        });
    });
    let mut found = vec![0; 1 << 20];
    assert_eq!(file.read(at(0), &mut found).unwrap(), found.len());
    hook.clear();
    assert!(found == bytes[..1 << 20]);
    drop((file, fs));
    judge(&image);
}

/// A clone took a part of what somebody was writing to its source: Linux lets either come first.
#[test]
fn clone_has_all_of_a_write_to_its_source_or_nothing() {
    const LEN: u64 = 6 * MIB;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 2 << 30);
    let fs = open(&image);
    let id = create(&fs, "file", 0).unwrap().id();
    let other = create(&fs, "other", 0).unwrap().id();
    // Which of two files is the source decides which is locked first; the third way is within one file.
    for (from, to, to_start) in [(id, other, 0), (other, id, 0), (id, id, 2 * LEN)] {
        let file = fs.open_data(from).unwrap();
        let target = fs.open_data(to).unwrap();
        file.write(at(0), &vec![0; usize::try_from(LEN).unwrap()]).unwrap();
        let (rounds, is_done) = (AtomicU64::new(0), std::sync::atomic::AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 0;
                while !is_done.load(Ordering::Relaxed) {
                    value = value % 250 + 1;
                    file.write(at(0), &vec![value; usize::try_from(LEN).unwrap()]).unwrap();
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut bytes = vec![0; usize::try_from(LEN).unwrap()];
            for _ in 0..25 {
                let before = rounds.load(Ordering::Relaxed);
                fs.clone_range(from, DiskOffset(0)..DiskOffset(LEN), to, DiskOffset(to_start))
                    .unwrap();
                assert_eq!(target.read(at(to_start), &mut bytes).unwrap(), bytes.len());
                let odd = bytes.iter().position(|byte| *byte != bytes[0]);
                is_done.store(odd.is_some(), Ordering::Relaxed);
                assert_eq!(odd, None, "{from} to {to}");
                while rounds.load(Ordering::Relaxed) == before {
                    std::thread::yield_now();
                }
            }
            is_done.store(true, Ordering::Relaxed);
        });
        file.truncate(at(0)).unwrap();
        target.truncate(at(0)).unwrap();
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// Two files are cloned to each other, and written, by several threads: nobody waits for ever.
#[test]
fn clones_to_and_fro_end() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 1 << 30);
    let fs = open(&image);
    let ids = ["one", "two"].map(|name| create(&fs, name, 0).unwrap().id());
    let files = ids.map(|id| fs.open_data(id).unwrap());
    files.iter().for_each(|file| assert_eq!(file.write(at(0), &[7; 1 << 20]).unwrap(), 1 << 20));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (fs, files) = (&fs, &files);
            scope.spawn(move || {
                let mut random = Prng::new(thread);
                for _ in 0..150 {
                    let [from, to] = if random.chance(1, 2) { [0, 1] } else { [1, 0] };
                    let block = |random: &mut Prng| random.below(128) * 4096;
                    let (start, to_start) = (block(&mut random), block(&mut random));
                    let range = DiskOffset(start)..DiskOffset(start + 65536);
                    match random.below(4) {
                        0 => _ = files[to].write(at(to_start), &[9; 100_000]).unwrap(),
                        1 if start >= to_start + 65536 || to_start >= start + 65536 => {
                            fs.clone_range(ids[to], range, ids[to], DiskOffset(to_start)).unwrap();
                        }
                        _ => {
                            fs.clone_range(ids[from], range, ids[to], DiskOffset(to_start)).unwrap()
                        }
                    }
                }
            });
        }
    });
    drop(files);
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}
