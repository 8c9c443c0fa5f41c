//! Direct writes that find space, or a device that works, for their front only.

use std::sync::atomic::Ordering;

use crate::common::full::{create, fill, make, make_mixed, noise, open, open_failing, read};
use crate::common::judge;
use ubtrfs_engine::{DataFile, Error};
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::Prng;

const MIB: usize = 1 << 20;

fn at(offset: usize) -> FileOffset {
    FileOffset::new(offset as u64)
}

fn is_no_space<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::NoSpace { .. }))
}

/// Where the file has space, and whether that is preallocated.
fn extents(file: &DataFile) -> Vec<(FileRange, bool)> {
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, usize::MAX, FiemapSync::WriteBack).unwrap();
    extents.iter().map(|extent| (extent.range, extent.flags.is_unwritten)).collect()
}

/// Where data and metadata share their groups, what was promised to data that has its place already was
/// kept from metadata: there was none for the items of a long write. Nor did what is dirty give any back by being written: a long
/// write got as far as what is kept back for the items of that let it.
#[test]
fn long_write_to_preallocated_space_is_stored_where_mixed_groups_are_full() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make_mixed(&image, 256 << 20);
    let fs = open(&image);
    let [direct, cached, pieces] = ["direct", "cached", "pieces"].map(|name| {
        let file = create(&fs, name, 0).unwrap();
        if name != "pieces" {
            file.allocate(at(0), 24 << 20, Reach::Extends).unwrap();
        }
        file
    });
    // Not in one piece either.
    for number in 0..64 {
        pieces.allocate(at(number * MIB / 2), 256 << 10, Reach::Extends).unwrap();
        direct.write(at(24 * MIB + number * 4096), &[1; 4096]).unwrap();
    }
    pieces.allocate(at(0), 32 << 20, Reach::Extends).unwrap();
    fs.sync().unwrap();
    let mut random = Prng::new(11);
    let filler = fill(&fs, &mut random);
    // Full but for some items: a thirtieth of what is written.
    filler.truncate(at(usize::try_from(filler.size().bytes()).unwrap() - 5 * MIB / 2)).unwrap();
    fs.sync().unwrap();
    let bytes = noise(&mut random, 32 << 20);
    assert_eq!(direct.direct_write(at(0), &bytes[..24 * MIB]).unwrap(), 24 * MIB);
    assert_eq!(pieces.direct_write(at(0), &bytes).unwrap(), 32 * MIB);
    assert_eq!(cached.write(at(0), &bytes[..24 * MIB]).unwrap(), 24 * MIB);
    cached.fsync().unwrap();
    fs.sync().unwrap();
    let more = filler.append(&bytes[..8 * MIB]);
    assert!(!matches!(more, Ok((_, count)) if count == 8 * MIB), "the filesystem is full");
    let check = |fs: &ubtrfs_engine::Filesystem, ids: [_; 3]| {
        assert!(read(fs, ids[0])[..24 * MIB] == bytes[..24 * MIB]);
        assert!(read(fs, ids[1]) == bytes[..24 * MIB]);
        assert!(read(fs, ids[2]) == bytes);
    };
    let ids = [direct.id(), cached.id(), pieces.id()];
    check(&fs, ids);
    drop((direct, cached, pieces, filler));
    drop(fs);
    judge(&image);
    check(&open(&image), ids);
}

/// One that had space, or its place, for its front only was refused whole.
#[test]
fn direct_write_with_space_for_its_front_writes_that() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 160 << 20);
    let fs = open(&image);
    let placed = create(&fs, "placed", 0).unwrap();
    placed.allocate(at(0), 300 << 10, Reach::Stays).unwrap();
    let old = create(&fs, "old", flags::NODATACOW | flags::NODATASUM).unwrap();
    old.write(at(0), &[1; MIB]).unwrap();
    old.write(at(2 * MIB), &[1; MIB]).unwrap();
    let spare = create(&fs, "spare", 0).unwrap();
    spare.allocate(at(0), 1_100_000, Reach::Extends).unwrap();
    fs.sync().unwrap();
    let mut random = Prng::new(12);
    let filler = fill(&fs, &mut random);
    let bytes = noise(&mut random, 4 << 20);

    assert_eq!(placed.direct_write(at(0), &bytes).unwrap(), 300 << 10);
    assert_eq!(placed.size(), at(300 << 10));
    let rest = placed.direct_write(at(300 << 10), &bytes);
    assert!(is_no_space(&rest), "{rest:?}");
    assert_eq!(placed.size(), at(300 << 10));
    // Over data that is written in place, up to a hole.
    assert_eq!(old.direct_write(at(MIB / 2), &bytes[..2 * MIB]).unwrap(), MIB / 2);
    assert!(is_no_space(&old.direct_write(at(MIB), &bytes[..2 * MIB])));
    assert_eq!(old.size(), at(3 * MIB));

    // Something is free, less than what is to be written.
    spare.truncate(at(0)).unwrap();
    fs.sync().unwrap();
    let new = create(&fs, "new", 0).unwrap();
    let count = new.direct_write(at(0), &bytes).unwrap();
    assert!((MIB..bytes.len()).contains(&count) && count.is_multiple_of(4096), "{count}");
    assert_eq!(new.size(), at(count));
    let rest = new.direct_write(at(count), &bytes[count..]);
    assert!(is_no_space(&rest), "{rest:?}");
    // What is cut off leaves zeros to who makes it longer.
    new.truncate(at(count + 4096)).unwrap();
    fs.sync().unwrap();
    let mut expected_old = vec![0; 3 * MIB];
    expected_old[..MIB].fill(1);
    expected_old[2 * MIB..].fill(1);
    expected_old[MIB / 2..MIB].copy_from_slice(&bytes[..MIB / 2]);
    let expected_new = [&bytes[..count], &[0; 4096]].concat();
    let ids = [placed.id(), old.id(), new.id()];
    let check = |fs: &ubtrfs_engine::Filesystem| {
        assert!(read(fs, ids[0]) == bytes[..300 << 10]);
        assert!(read(fs, ids[1]) == expected_old);
        assert!(read(fs, ids[2]) == expected_new);
    };
    check(&fs);
    drop((placed, old, new, spare, filler));
    drop(fs);
    judge(&image);
    check(&open(&image));
}

/// All that was preallocated behind the end went with a direct write that failed there, however far it had come.
#[test]
fn direct_write_that_fails_behind_the_end_keeps_what_is_preallocated() {
    const PIECE: usize = 64 << 10;
    const COUNT: usize = 40;
    let end = (1 + COUNT) * PIECE;
    for passes in [0, 1, 10, 31, 40, 55] {
        println!("{passes} writes pass");
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        make(&image, 512 << 20);
        let (fs, faults) = open_failing(&image);
        let file = create(&fs, "file", 0).unwrap();
        file.write(at(0), &[1; PIECE]).unwrap();
        // With holes between.
        for number in 1..=COUNT {
            file.allocate(at(number * PIECE), 32 << 10, Reach::Stays).unwrap();
        }
        file.allocate(at(end), 128 << 10, Reach::Stays).unwrap();
        fs.sync().unwrap();
        let before = extents(&file);
        assert!(before.len() >= COUNT, "{before:?}");
        let bytes = noise(&mut Prng::new(13), (COUNT * PIECE) as u64);
        faults.passes.store(passes, Ordering::Relaxed);
        faults.fails.store(true, Ordering::Relaxed);
        let written = file.direct_write(at(PIECE), &bytes);
        faults.fails.store(false, Ordering::Relaxed);
        let count = match written {
            Ok(count) => count,
            Err(error) => {
                assert!(matches!(error, Error::Volume(_)), "{error}");
                0
            }
        };
        // One write each for what is preallocated, and for each hole between.
        assert_eq!(count, passes * (32 << 10));
        let size = PIECE + count;
        assert_eq!(file.size(), at(size));
        // What lies behind the end is as it was, and reads as zeros once the file is longer.
        let behind = |list: &[(FileRange, bool)]| {
            let parts = list.iter().map(|(range, is_unwritten)| {
                (range.intersection(FileRange::from(at(size))), *is_unwritten)
            });
            parts.filter(|(range, _)| !range.is_empty()).collect::<Vec<_>>()
        };
        let after = extents(&file);
        assert_eq!(behind(&after), behind(&before), "{passes}");
        let id = file.id();
        file.fsync().unwrap();
        drop((file, fs));
        judge(&image);
        let fs = open(&image);
        let expected = [&[1; PIECE][..], &bytes[..count]].concat();
        assert!(read(&fs, id) == expected, "{passes}");
        let file = fs.open_data(id).unwrap();
        file.truncate(at(end + (128 << 10))).unwrap();
        fs.sync().unwrap();
        assert_eq!(behind(&extents(&file)), behind(&before), "{passes}");
        let all = read(&fs, id);
        assert!(all[..size] == expected && all[size..].iter().all(|byte| *byte == 0), "{passes}");
        // And it can be written after that.
        assert_eq!(file.direct_write(at(PIECE), &bytes).unwrap(), bytes.len());
        fs.sync().unwrap();
        assert!(read(&fs, id)[PIECE..][..bytes.len()] == bytes);
        drop((file, fs));
        judge(&image);
    }
}
