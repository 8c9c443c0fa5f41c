//! Files open through memory where the device fails or is full: what was taken is stored or told, and
//! nothing else is harmed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::common::full::{
    create, fill, fill_by, make, make_mixed, noise, open, open_failing, read,
};
use crate::common::judge;
use ubtrfs_engine::{Error, NewInode, Reservation, SnapshotOptions};
use ubtrfs_iomap::{FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Time;
use ubtrfs_testkit::Prng;

#[test]
fn fsync_after_a_failed_write_says_so_once_and_other_files_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, faults) = open_failing(&image);
    let fails = &faults.fails;
    let at = FileOffset::new;
    for (name, bits) in [("plain", 0), ("packed", flags::COMPRESS)] {
        let file = create(&fs, name, bits).unwrap();
        let twice = fs.open_data(file.id()).unwrap();
        let other = create(&fs, &format!("beside {name}"), bits).unwrap();
        file.write(at(0), &[1; 100_000]).unwrap();
        other.write(at(0), &[2; 100_000]).unwrap();
        fs.sync().unwrap();
        fails.store(true, Ordering::Relaxed);
        file.write(at(0), &[3; 50_000]).unwrap();
        assert!(matches!(file.fsync(), Err(Error::Volume(_))), "{name}");
        fails.store(false, Ordering::Relaxed);
        // Each open file is told once; what could not be stored is not shown.
        assert!(matches!(twice.fsync(), Err(Error::Volume(_))), "{name}");
        file.fsync().unwrap();
        twice.fsync().unwrap();
        assert!(read(&fs, file.id()) == [1; 100_000], "{name}");
        assert!(read(&fs, other.id()) == [2; 100_000], "{name}");
        // Of a file that nobody has open when its data is lost, the next sync tells, once.
        let alone = create(&fs, &format!("alone {name}"), bits).unwrap();
        fails.store(true, Ordering::Relaxed);
        alone.write(at(0), &[6; 50_000]).unwrap();
        drop(alone);
        fs.write_back_due(u64::MAX);
        fails.store(false, Ordering::Relaxed);
        assert!(matches!(fs.sync(), Err(Error::Volume(_))), "{name}");
        fs.sync().unwrap();
        // And the next fsync of who opens it, once: it was forgotten with the file before.
        let id = fs.lookup(fs.top_level(), format!("alone {name}").as_bytes()).unwrap();
        let alone = fs.open_data(id).unwrap();
        fs.sync().unwrap();
        // Again with nobody told.
        drop(alone);
        fs.sync().unwrap();
        let alone = fs.open_data(id).unwrap();
        assert!(matches!(alone.fsync(), Err(Error::Volume(_))), "{name}");
        alone.fsync().unwrap();
        drop(alone);
        fs.open_data(id).unwrap().fsync().unwrap();
        fails.store(true, Ordering::Relaxed);
        fs.open_data(id).unwrap().write(at(0), &[7; 50_000]).unwrap();
        fs.write_back_due(u64::MAX);
        fails.store(false, Ordering::Relaxed);
        // Who writes what is well is not refused for it, and does not use it up.
        let reader = fs.open_data(id).unwrap();
        fs.write(id, ubtrfs_ondisk::FileOffset(0), &[8; 100]).unwrap();
        drop(reader);
        assert!(matches!(fs.fsync(id), Err(Error::Volume(_))), "{name}");
        fs.fsync(id).unwrap();
        // Of one that is removed nothing was to be kept.
        let gone = create(&fs, "gone", bits).unwrap();
        fails.store(true, Ordering::Relaxed);
        gone.write(at(0), &[6; 50_000]).unwrap();
        drop(gone);
        fs.write_back_due(u64::MAX);
        fails.store(false, Ordering::Relaxed);
        fs.unlink(fs.top_level(), b"gone").unwrap();
        fs.sync().unwrap();
        file.write(at(0), &[4; 50_000]).unwrap();
        file.fsync().unwrap();
        other.write(at(0), &[5; 100_000]).unwrap();
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
    let fs = open(&image);
    for name in ["plain", "packed"] {
        let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
        assert!(read(&fs, id) == [&[4; 50_000][..], &[1; 50_000]].concat(), "{name}");
        let beside = format!("beside {name}");
        let id = fs.lookup(fs.top_level(), beside.as_bytes()).unwrap();
        assert!(read(&fs, id) == [5; 100_000], "{name}");
    }
}

/// Where the tail of a short file was lost and its inline data could not be moved either, what is on the medium ended before that,
/// and the flush said that all was well: a commit made the short file durable as if it were what was flushed.
#[test]
fn flush_of_files_that_cannot_say_where_one_ends_fails() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, faults) = open_failing(&image);
    let file = create(&fs, "short", 0).unwrap();
    file.write(FileOffset::ZERO, &[1; 1000]).unwrap();
    fs.sync().unwrap();
    faults.fails.store(true, Ordering::Relaxed);
    file.write(FileOffset::new(1000), &[2; 4000]).unwrap();
    assert!(matches!(fs.sync(), Err(Error::Volume(_))));
    faults.fails.store(false, Ordering::Relaxed);
    // In memory it is as long as it was, and so it is on the medium as soon as that can be.
    assert_eq!(file.size(), FileOffset::new(5000));
    fs.sync().unwrap();
    // That data was lost is told apart, to who has it open.
    assert!(matches!(file.fsync(), Err(Error::Volume(_))));
    file.fsync().unwrap();
    let id = file.id();
    drop((file, fs));
    judge(&image);
    // The block in which it ended on the medium was not lost, the one behind it was.
    let expect = [&[1; 1000][..], &[2; 3096], &[0; 904]].concat();
    assert!(read(&open(&image), id) == expect);
}

/// They go through memory: that was all that was looked at.
#[test]
fn direct_writes_through_memory_tell_what_is_lost_as_the_next_fsync_does() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, faults) = open_failing(&image);
    let at = FileOffset::new;
    for (name, flags, offset) in [("parts", 0, 4096), ("appends", flags::APPEND, 65_536)] {
        let file = create(&fs, name, flags).unwrap();
        file.append(&[1; 65_536]).unwrap();
        file.fsync().unwrap();
        faults.fails.store(true, Ordering::Relaxed);
        assert!(matches!(file.direct_write(at(offset), &[2; 100]), Err(Error::Volume(_))));
        faults.fails.store(false, Ordering::Relaxed);
        assert!(matches!(file.fsync(), Err(Error::Volume(_))));
        file.fsync().unwrap();
        assert!(read(&fs, file.id())[..65_536] == [1; 65_536]);
    }
    drop(fs);
    judge(&image);
}

/// The file was cut to its size after any direct write that failed: preallocation behind the end went,
/// and what others had appended meanwhile.
#[test]
fn direct_write_that_fails_leaves_what_is_behind_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let (fs, faults) = open_failing(&image);
    let fails = &faults.fails;
    let file = create(&fs, "file", 0).unwrap();
    let at = FileOffset::new;
    file.write(at(0), &[1; 65_536]).unwrap();
    file.allocate(at(65_536), 65_536, Reach::Stays).unwrap();
    fs.sync().unwrap();
    let extents = || {
        let all = FileRange::from(FileOffset::ZERO);
        let extents = file.fiemap(all, usize::MAX, FiemapSync::WriteBack).unwrap();
        extents.iter().map(|extent| (extent.range, extent.flags.is_unwritten)).collect::<Vec<_>>()
    };
    let before = extents();
    assert!(before.len() == 2 && before[1].1, "{before:?}");
    fails.store(true, Ordering::Relaxed);
    assert!(matches!(file.direct_write(at(0), &[2; 8192]), Err(Error::Volume(_))));
    fails.store(false, Ordering::Relaxed);
    assert_eq!(extents(), before);
    // What it would have made longer is as long as it was.
    fails.store(true, Ordering::Relaxed);
    assert!(matches!(file.direct_write(at(131_072), &[2; 8192]), Err(Error::Volume(_))));
    fails.store(false, Ordering::Relaxed);
    assert_eq!(extents(), before);
    fs.sync().unwrap();
    assert!(read(&fs, file.id()) == [1; 65_536]);
    drop((file, fs));
    judge(&image);
}

/// What was taken before a subvolume became read-only is written after it; stores through a mapping and unsharing went round
/// the refusal.
#[test]
fn file_of_a_subvolume_made_read_only_is_written_back_and_refuses_changes() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let new = NewInode::new(0o40_755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let top = handle.create_subvolume(fs.top_level(), b"sub", &new).unwrap();
    drop(handle);
    let new = NewInode::new(0o100_644, Time::default());
    let id = fs.begin(Reservation::create(0)).unwrap().create(top, b"file", &new).unwrap();
    let file = fs.open_data(id).unwrap();
    let at = FileOffset::new;
    file.write(at(0), &[1; 8192]).unwrap();
    // A writer who had been let through when the subvolume became read-only.
    let late = file.space().open();
    fs.set_subvolume_read_only(id.root, true).unwrap();
    late.write(at(4096), &[2; 8192]).unwrap();
    fs.sync().unwrap();
    assert!(read(&fs, id) == [&[1; 4096][..], &[2; 8192]].concat());
    let is_refused = |result: Result<(), Error>| matches!(result, Err(Error::ReadOnly { .. }));
    assert!(is_refused(file.write(at(0), &[3; 10]).map(drop)));
    let mapped = file.map(at(0), 4096).unwrap();
    assert!(is_refused(mapped.store(at(0), &[3; 10])));
    assert!(is_refused(mapped.fault_for_write(at(0))));
    assert!(is_refused(file.unshare(at(0), 4096)));
    mapped.load(at(0), &mut [0; 10]).unwrap();
    drop((file, late));
    fs.sync().unwrap();
    assert!(read(&fs, id) == [&[1; 4096][..], &[2; 8192]].concat());
    drop(fs);
    judge(&image);
}

/// Written back right after it was written, and closed: when it was written was not known yet.
#[test]
fn file_written_back_at_once_and_closed_says_when_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let file = create(&fs, "file", 0).unwrap();
    let id = file.id();
    fs.sync().unwrap();
    let before = fs.inode(id).unwrap().mtime;
    file.map(FileOffset::new(0), 4096).unwrap();
    file.write(FileOffset::new(0), &[1; 10]).unwrap();
    fs.write_back_due(u64::MAX);
    drop(file);
    assert!(fs.inode(id).unwrap().mtime > before);
    let file = fs.open_data(id).unwrap();
    let before = fs.inode(id).unwrap().mtime;
    file.map(FileOffset::new(0), 4096).unwrap().store(FileOffset::new(0), &[2; 10]).unwrap();
    fs.write_back_due(u64::MAX);
    drop(file);
    assert!(fs.inode(id).unwrap().mtime > before);
}

/// What made nothing dirty was written by nobody, and its time went with the memory of the file.
#[test]
fn call_that_makes_nothing_dirty_says_when_it_was_after_the_file_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let at = FileOffset::new;
    let id = create(&fs, "file", 0).unwrap().id();
    fs.write(id, ubtrfs_ondisk::FileOffset(0), &[1; 4096]).unwrap();
    fs.open_data(id).unwrap().truncate(at(3 * 4096)).unwrap();
    type Change = fn(&ubtrfs_engine::DataFile, fn(u64) -> FileOffset) -> Result<(), Error>;
    let changes: [(&str, Change); 6] = [
        ("space that is there", |file, at| file.allocate(at(0), 4096, Reach::Extends)),
        ("zeros over a hole", |file, at| file.zero_range(at(4096), 4096)),
        ("a hole in a hole", |file, at| file.punch_hole(at(4096), 4096)),
        ("the same end", |file, at| file.truncate(at(3 * 4096))),
        ("what was dirty goes", |file, at| {
            file.write(at(5 * 4096), &[1; 10])?;
            file.truncate(at(3 * 4096))
        }),
        ("zeros that are there", |file, at| file.allocate_zeroed(at(4096), 4096, Reach::Stays)),
    ];
    for (name, change) in changes {
        fs.sync().unwrap();
        let before = fs.inode(id).unwrap();
        let file = fs.open_data(id).unwrap();
        change(&file, at).unwrap();
        let shown = fs.inode(id).unwrap();
        drop(file);
        let closed = fs.inode(id).unwrap();
        assert!(closed.mtime > before.mtime && closed.ctime > before.ctime, "{name}");
        assert_eq!((closed.mtime, closed.ctime), (shown.mtime, shown.ctime), "{name}");
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// A call that made nothing dirty, or a hole, recorded where the file ends in memory while the data before that end was still on its way: with a crash then
/// the file was that long, and zeros.
#[test]
fn end_of_a_file_is_not_recorded_before_what_is_on_its_way_there() {
    let dir = tempfile::tempdir().unwrap();
    let (image, copy) = (dir.path().join("image"), dir.path().join("copy"));
    make(&image, 512 << 20);
    let (fs, faults) = open_failing(&image);
    let at = FileOffset::new;
    type Change = fn(&ubtrfs_engine::DataFile, fn(u64) -> FileOffset) -> Result<(), Error>;
    let changes: [Change; 2] = [
        |file, at| file.allocate(at(0), 4096, Reach::Stays),
        |file, at| file.punch_hole(at(0), 4096),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let file = create(&fs, &format!("file {number}"), 0).unwrap();
        let id = file.id();
        // What is behind is not written together with the first block.
        file.truncate(at(4096)).unwrap();
        fs.sync().unwrap();
        faults.reach_all(&fs);
        file.write(at(1 << 20), &[1; 1 << 20]).unwrap();
        faults.is_stalled.store(false, Ordering::Relaxed);
        faults.stalls.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| fs.write_back_due(u64::MAX));
            while !faults.is_stalled.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            change(&file, at).unwrap();
            fs.commit().unwrap();
            std::fs::copy(&image, &copy).unwrap();
            faults.stalls.store(false, Ordering::Relaxed);
        });
        drop(file);
        let cut = open(&copy);
        assert_eq!(cut.inode(id).unwrap().size_bytes, 4096, "{number}");
        drop(cut);
        judge(&copy);
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}

/// What a write took had its space promised: it reaches the medium though the filesystem is full and its
/// free space in pieces.
#[test]
fn all_that_was_taken_until_the_filesystem_was_full_is_stored() {
    stores_all_that_was_taken(make);
}

/// Where groups are mixed, a promise of data once left no metadata to place it with.
#[test]
fn all_that_was_taken_until_mixed_groups_were_full_is_stored() {
    stores_all_that_was_taken(make_mixed);
}

fn stores_all_that_was_taken(make: fn(&Path, u64)) {
    let at = FileOffset::new;
    for seed in 0..3 {
        println!("seed {seed}");
        let mut random = Prng::new(seed);
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        make(&image, 160 << 20);
        let fs = open(&image);
        let mut expected = BTreeMap::new();
        let mut number = 0;
        for round in 0..3 {
            // Full, then with holes of a few blocks.
            let mut open_files = Vec::new();
            loop {
                let bits = [0, flags::COMPRESS, flags::NODATACOW | flags::NODATASUM];
                let name = format!("file {number}");
                let Ok(file) = create(&fs, &name, bits[random.index(3)]) else { break };
                number += 1;
                let mut bytes = Vec::new();
                let mut is_full = false;
                if random.chance(1, 5) {
                    is_full = file.allocate(at(0), 1 << 20, Reach::Stays).is_err();
                }
                for _ in 0..1 + random.below(4) {
                    let len_max = [3000, 30_000, 3_000_000][random.index(3)];
                    let len = 1 + random.below(len_max);
                    let piece = match random.chance(1, 3) {
                        true => vec![7; usize::try_from(len).unwrap()],
                        false => noise(&mut random, len),
                    };
                    match file.append(&piece) {
                        Ok((_, count)) => bytes.extend_from_slice(&piece[..count]),
                        Err(Error::NoSpace { .. }) => {
                            is_full = true;
                            break;
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                expected.insert(name, (file.id(), bytes));
                open_files.push(file);
                if is_full {
                    break;
                }
            }
            fs.flush_files().unwrap();
            for file in &open_files {
                file.fsync().unwrap();
            }
            drop(open_files);
            for (name, (id, bytes)) in &expected {
                assert!(read(&fs, *id) == *bytes, "{name} in round {round}");
            }
            let gone: Vec<String> =
                expected.keys().filter(|_| random.chance(1, 2)).cloned().collect();
            for name in gone {
                fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
                expected.remove(&name);
            }
            fs.commit().unwrap();
        }
        drop(fs);
        judge(&image);
        let fs = open(&image);
        for (name, (id, bytes)) in &expected {
            assert!(read(&fs, *id) == *bytes, "{name} at the end");
        }
    }
}

/// Metadata is full, and data is not: single blocks here and there, of which each needs items of its own, are stored or refused.
#[test]
fn all_that_was_taken_until_metadata_was_full_is_stored() {
    const BLOCK: u64 = 4096;
    const BLOCKS: u64 = 12_000;
    let at = FileOffset::new;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 << 20);
    let fs = open(&image);
    let names = ["plain", "packed", "in place", "allocated"];
    let in_place = flags::NODATACOW | flags::NODATASUM;
    let bits = [0, flags::COMPRESS, in_place, 0];
    let mut random = Prng::new(5);
    let mut files = Vec::new();
    for (name, bits) in names.iter().zip(bits) {
        let file = create(&fs, name, bits).unwrap();
        let old = noise(&mut random, 100_000);
        file.write(at(0), &old).unwrap();
        file.fsync().unwrap();
        files.push((file, old));
    }
    // All that metadata could have is data's, of which half is free then.
    let large = create(&fs, "large", 0).unwrap();
    let mut rest_bytes = 256_u64 << 20;
    while rest_bytes >= BLOCK {
        let size = large.size();
        if large.allocate(size, rest_bytes, Reach::Extends).is_err() {
            rest_bytes /= 2;
        }
    }
    files[3].0.allocate(at(0), 2 * BLOCKS * BLOCK, Reach::Stays).unwrap_err();
    large.truncate(at(large.size().bytes() / 4)).unwrap();
    fs.commit().unwrap();
    files[3].0.allocate(at(0), 2 * BLOCKS * BLOCK, Reach::Stays).unwrap();
    let attributes = NewInode::new(0o100_644, Time::default());
    for number in 0_u64.. {
        let Ok(mut handle) = fs.begin(Reservation::create(1)) else { break };
        let name = format!("{number:0>200}");
        let id = handle.create(fs.top_level(), name.as_bytes(), &attributes).unwrap();
        handle.set_xattr(id, b"user.x", &[7; 3000]).unwrap();
    }
    let (mut taken, mut refused) = ([0; 4], [0; 4]);
    while refused.iter().any(|count| *count < 20) {
        let index = random.index(4);
        let (file, expected) = &mut files[index];
        let block = random.below(2 * BLOCKS);
        let bytes = noise(&mut random, BLOCK);
        match file.write(at(block * BLOCK), &bytes) {
            Ok(count) => {
                assert_eq!(count, bytes.len());
                let start = usize::try_from(block * BLOCK).unwrap();
                expected.resize(expected.len().max(start + count), 0);
                expected[start..start + count].copy_from_slice(&bytes);
                taken[index] += 1;
            }
            Err(Error::NoSpace { .. }) => refused[index] += 1,
            Err(error) => panic!("{error}"),
        }
        if random.chance(1, 500) {
            fs.flush_files().unwrap();
        }
        assert!(taken.iter().sum::<u64>() < BLOCKS, "{taken:?} were taken");
    }
    println!("{taken:?} blocks were taken");
    assert!(taken.iter().all(|count| *count > 0));
    for (file, expected) in &files {
        file.fsync().unwrap();
        assert!(read(&fs, file.id()) == *expected);
    }
    let ids: Vec<_> = files.iter().map(|(file, _)| file.id()).collect();
    let expected: Vec<_> = files.into_iter().map(|(_, bytes)| bytes).collect();
    drop((large, fs));
    judge(&image);
    let fs = open(&image);
    for (id, expected) in ids.into_iter().zip(expected) {
        assert!(read(&fs, id) == expected);
    }
}

/// One file takes all that was left beside small ones, in memory: it was lost where groups are mixed, as
/// what was placed of it was counted as promised still.
#[test]
fn file_that_takes_the_rest_of_a_filesystem_is_stored() {
    for (is_mixed, len_mib) in [(true, 110), (true, 256), (false, 256)] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        if is_mixed {
            make_mixed(&image, len_mib << 20)
        } else {
            make(&image, len_mib << 20)
        }
        let fs = open(&image);
        let mut random = Prng::new(1);
        let mut small = Vec::new();
        while fs.statfs(RootId::FS_TREE).unwrap().blocks_available > 5000 && small.len() < 400 {
            let file = create(&fs, &format!("small {}", small.len()), 0).unwrap();
            let bytes = noise(&mut random, 1 << 20);
            assert_eq!(file.write(FileOffset::new(0), &bytes).unwrap(), bytes.len());
            small.push((file.id(), bytes));
            if small.len() % 8 == 0 {
                drop(file);
                fs.flush_files().unwrap();
                fs.commit().unwrap();
            }
        }
        fs.flush_files().unwrap();
        fs.commit().unwrap();
        let file = create(&fs, "last", 0).unwrap();
        let bytes = noise(&mut random, 64 << 20);
        let mut taken = 0;
        let error = loop {
            match file.append(&bytes[taken..]) {
                Ok((_, count)) if taken + count < bytes.len() => taken += count,
                Ok(_) => panic!("{len_mib} MiB had space for {}", bytes.len()),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::NoSpace { .. }), "{error}");
        assert!(taken > 1 << 20, "took {taken}");
        fs.flush_files().unwrap();
        file.fsync().unwrap();
        let id = file.id();
        drop(file);
        for (id, bytes) in
            small.iter().map(|(id, bytes)| (*id, &bytes[..])).chain([(id, &bytes[..taken])])
        {
            assert!(read(&fs, id) == *bytes);
        }
        drop(fs);
        judge(&image);
    }
}

/// Space that was allocated for a file is there for its data when nothing else is free.
#[test]
fn preallocated_space_takes_its_data_on_a_full_filesystem() {
    let at = FileOffset::new;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 160 << 20);
    let fs = open(&image);
    let file = create(&fs, "allocated", 0).unwrap();
    file.allocate(at(0), 2 << 20, Reach::Extends).unwrap();
    let mut random = Prng::new(5);
    let filler = fill(&fs, &mut random);
    let bytes = noise(&mut random, 2 << 20);
    for (index, piece) in bytes.chunks(102_400).enumerate() {
        let count = file.write(at(index as u64 * 102_400), piece).unwrap();
        assert_eq!(count, piece.len());
        if index % 5 == 0 {
            file.fsync().unwrap();
        }
    }
    file.fsync().unwrap();
    assert!(filler.append(&[1; 100_000]).is_err(), "the filesystem is full");
    assert!(read(&fs, file.id()) == bytes);
    drop((file, filler));
    drop(fs);
    judge(&image);
}

/// A direct write knew nothing of that.
#[test]
fn direct_write_goes_to_preallocated_space_on_a_full_filesystem() {
    let at = FileOffset::new;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 160 << 20);
    let fs = open(&image);
    let file = create(&fs, "allocated", 0).unwrap();
    file.allocate(at(0), 1 << 20, Reach::Extends).unwrap();
    let mut random = Prng::new(6);
    let filler = fill(&fs, &mut random);
    let bytes = noise(&mut random, 1 << 20);
    for (index, piece) in bytes.chunks(256 << 10).enumerate() {
        let offset = at((index * piece.len()) as u64);
        assert_eq!(file.direct_write(offset, piece).unwrap(), piece.len());
    }
    assert!(read(&fs, file.id()) == bytes);
    // Beyond what it has there is nothing.
    let result = file.direct_write(at((1 << 20) - 4096), &bytes[..1 << 19]);
    assert!(matches!(result, Err(Error::NoSpace { .. })), "{result:?}");
    fs.sync().unwrap();
    assert!(read(&fs, file.id()) == bytes);
    // One that is longer takes what is allocated behind the end, and no more.
    let behind = create(&fs, "behind", 0).unwrap();
    filler.truncate(at(filler.size().bytes() - (12 << 20))).unwrap();
    fs.sync().unwrap();
    behind.allocate(at(0), 512 << 10, Reach::Stays).unwrap();
    let rest = fill_by(&fs, "rest", &mut random);
    assert_eq!(behind.direct_write(at(0), &bytes).unwrap(), 512 << 10);
    let result = behind.direct_write(at(512 << 10), &bytes[512 << 10..]);
    assert!(matches!(result, Err(Error::NoSpace { .. })), "{result:?}");
    fs.sync().unwrap();
    assert!(read(&fs, behind.id()) == bytes[..512 << 10]);
    drop((file, filler, behind, rest));
    drop(fs);
    judge(&image);
}

/// A write over a preallocated block whose data was on its way was taken for the same place, where by
/// then there was data, which is not overwritten: it had nowhere to go.
#[test]
fn write_over_a_preallocated_block_on_its_way_is_stored_or_refused() {
    let at = FileOffset::new;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 160 << 20);
    let (fs, faults) = open_failing(&image);
    let file = create(&fs, "allocated", 0).unwrap();
    file.allocate(at(0), 64 << 10, Reach::Extends).unwrap();
    let filler = fill(&fs, &mut Prng::new(8));
    fs.sync().unwrap();
    file.write(at(0), &[1; 4096]).unwrap();
    faults.stalls.store(true, Ordering::Relaxed);
    let written = std::thread::scope(|scope| {
        let flushing = scope.spawn(|| file.fsync());
        while !faults.is_stalled.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let writing = scope.spawn(|| file.write(at(0), &[2; 4096]));
        // Long enough to be taken, if it does not wait.
        std::thread::sleep(std::time::Duration::from_millis(100));
        faults.stalls.store(false, Ordering::Relaxed);
        flushing.join().unwrap().unwrap();
        writing.join().unwrap()
    });
    fs.sync().unwrap();
    file.fsync().unwrap();
    let expected = match written {
        Ok(count) => {
            assert_eq!(count, 4096);
            2
        }
        Err(Error::NoSpace { .. }) => 1,
        Err(error) => panic!("{error}"),
    };
    assert!(read(&fs, file.id())[..4096] == [expected; 4096]);
    drop((file, filler));
    drop(fs);
    judge(&image);
}

/// Snapshots and clones beside writers to preallocated space of a full filesystem: what a write was taken
/// for is stored, or it was refused.
#[test]
fn data_taken_for_preallocated_space_is_stored_beside_snapshots_and_clones() {
    const PIECE: usize = 64 << 10;
    let at = FileOffset::new;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 200 << 20);
    let fs = open(&image);
    let mut random = Prng::new(7);
    for round in 0..6_u8 {
        let file = create(&fs, &format!("allocated {round}"), 0).unwrap();
        file.allocate(at(0), 4 << 20, Reach::Extends).unwrap();
        let copy = create(&fs, &format!("copy {round}"), 0).unwrap();
        let filler = fill(&fs, &mut random);
        let mut taken = vec![0; 4 << 20];
        std::thread::scope(|scope| {
            let (fs, file) = (&fs, &file);
            let sharer = scope.spawn(move || {
                let top = fs.top_level();
                if round % 2 == 0 {
                    let name = format!("snapshot {round}");
                    let options = SnapshotOptions::default();
                    return fs.snapshot(top.root, top, name.as_bytes(), &options).map(drop);
                }
                let disk = ubtrfs_ondisk::FileOffset;
                fs.clone_range(file.id(), disk(0)..disk(4 << 20), copy.id(), disk(0))
            });
            for (index, piece) in taken.chunks_mut(PIECE).enumerate() {
                let offset = at((index * PIECE) as u64);
                match file.write(offset, &[round + 1; PIECE]) {
                    Ok(count) => piece[..count].fill(round + 1),
                    Err(Error::NoSpace { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            match sharer.join().unwrap() {
                Ok(()) | Err(Error::NoSpace { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        });
        file.fsync().unwrap();
        fs.sync().unwrap();
        assert!(read(&fs, file.id()) == taken, "round {round}");
        filler.truncate(at(0)).unwrap();
        drop(filler);
        fs.unlink(fs.top_level(), b"filler").unwrap();
        // It shows the filler, too.
        match fs.delete_subvolume(fs.top_level(), format!("snapshot {round}").as_bytes()) {
            Ok(_) | Err(Error::NotFound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        fs.clean_deleted_subvolumes().unwrap();
        fs.sync().unwrap();
    }
    drop(fs);
    judge(&image);
}

/// Where a block that cannot be read lies in an open file: a read ends before it, and a copy of the file says so. It once went
/// on with zeros, as a read that ends early was taken for the end of the file.
#[test]
fn copy_of_an_open_file_with_a_damaged_block_fails() {
    const BLOCK: usize = 4096;
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    make(&image, 256 << 20);
    let fs = open(&image);
    let file = create(&fs, "source", 0).unwrap();
    let mut bytes = noise(&mut Prng::new(9), 64 * 4096);
    bytes[5 * BLOCK..6 * BLOCK].fill(0xa7);
    file.write(FileOffset::new(0), &bytes).unwrap();
    file.fsync().unwrap();
    let target = create(&fs, "target", 0).unwrap().id();
    let id = file.id();
    fs.sync().unwrap();
    drop((file, fs));
    damage(&image, &[0xa7; BLOCK]);
    for is_open in [true, false] {
        let fs = open(&image);
        let file = is_open.then(|| fs.open_data(id).unwrap());
        let mut buffer = vec![0; bytes.len()];
        let disk = ubtrfs_ondisk::FileOffset;
        if let Some(file) = &file {
            assert_eq!(file.read(FileOffset::new(1), &mut buffer).unwrap(), 5 * BLOCK - 1);
            assert!(buffer[..5 * BLOCK - 1] == bytes[1..5 * BLOCK]);
            let rest = file.read(FileOffset::new(6 * BLOCK as u64), &mut buffer).unwrap();
            assert!(buffer[..rest] == bytes[6 * BLOCK..]);
        }
        let result = fs.read(id, disk(1), &mut buffer);
        assert!(matches!(result, Err(Error::Corrupt(_))), "{result:?}");
        // Not of whole blocks, so it is no reflink.
        let copied = fs.copy_range(id, disk(1)..disk(bytes.len() as u64), target, disk(0));
        assert!(matches!(copied, Err(Error::Corrupt(_))), "{copied:?}");
        fs.sync().unwrap();
    }
}

/// Changes a byte of the one place in a file that holds `bytes`.
fn damage(image: &Path, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(image).unwrap();
    let all = std::fs::read(image).unwrap();
    let places: Vec<usize> = all
        .chunks(bytes.len())
        .enumerate()
        .filter_map(|(at, chunk)| (chunk == bytes).then_some(at * bytes.len()))
        .collect();
    let [place] = places[..] else { panic!("{places:?}") };
    file.write_all_at(&[!bytes[0]], place as u64 + 100).unwrap();
}
