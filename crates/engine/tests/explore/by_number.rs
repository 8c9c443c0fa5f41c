//! What is seen of a file by its number while one call changes it.

use std::sync::Arc;

use ubtrfs_engine::{DataFile, Reservation, SetAttributes};
use ubtrfs_iomap::FileOffset;
use ubtrfs_rt::Time;

use super::state::State;
use super::world::{self, IN_BLOCKS, IN_PLACE, OLD, Start, World};
use super::{explore, runs};

type Change = fn(&World, u64);

/// Looks at it beside the call, which makes `after` of it.
fn look_beside(
    start: &Start,
    change: Change,
    argument: u64,
    after: impl FnOnce(Vec<u8>) -> Vec<u8>,
) {
    let before = {
        let start = start.clone();
        super::made(move || State::of_one(&World::open(&start).fs).unwrap())
    };
    let moments = [before.clone(), after(before)];
    let start = start.clone();
    explore(50 * runs(), move || {
        let world = Arc::new(World::open(&start));
        let changing = Arc::clone(&world);
        let changed = shuttle::thread::spawn(move || change(&changing, argument));
        let mut left = &moments[..];
        for _ in 0..3 {
            let size = world.fs.inode(world.one).unwrap().size_bytes;
            left = behind(left, |moment| moment.len() as u64 == size, &size);
            let seen = State::of_one(&world.fs).unwrap();
            left = behind(left, |moment| *moment == seen, &super::state::shown(Some(&seen)));
        }
        changed.join().unwrap();
        let end = State::of_one(&world.fs);
        assert_eq!(super::state::shown(end.as_ref()), super::state::shown(moments.last()));
        world.fs.sync().unwrap();
        world::check(&world.cut_now(), start.name);
    });
}

/// What it may be from now on.
fn behind<'a>(
    moments: &'a [Vec<u8>],
    is_seen: impl Fn(&Vec<u8>) -> bool,
    seen: &dyn std::fmt::Debug,
) -> &'a [Vec<u8>] {
    let place = moments.iter().position(is_seen);
    &moments[place.unwrap_or_else(|| panic!("{seen:?} of {} moments left", moments.len()))..]
}

/// Its extents are taken away in steps, each of which made it shorter for who looked at it by its number.
#[test]
fn file_of_many_extents_is_cut_at_once() {
    let start = IN_BLOCKS.start();
    let ways: [Change; 2] = [
        |world, size| world.fs.truncate(world.one, size).unwrap(),
        // It is closed again when its end is where it is to be, which was looked at by nobody's count where that is in a hole.
        |world, size| {
            let file = world.fs.open_data(world.one).unwrap();
            file.truncate(FileOffset::new(size)).unwrap();
        },
    ];
    for way in ways {
        // In a hole, at the end of one, in data.
        for size in [4100, 8192, 8200] {
            look_beside(&start, way, size, |mut bytes| {
                bytes.truncate(usize::try_from(size).unwrap());
                bytes
            });
        }
    }
}

/// What is written where it is could be read in part, and has no checksums that tell.
#[test]
fn what_is_written_in_place_is_read_whole() {
    let start = IN_PLACE.start();
    let ways: [Change; 2] = [
        |world, len| {
            let file = world.fs.open_data(world.one).unwrap();
            let bytes = vec![2; usize::try_from(len).unwrap()];
            assert_eq!(file.write(FileOffset::ZERO, &bytes).unwrap(), bytes.len());
            file.fsync().unwrap();
        },
        |world, len| {
            let file = world.fs.open_data(world.one).unwrap();
            let bytes = vec![2; usize::try_from(len).unwrap()];
            assert_eq!(file.direct_write(FileOffset::ZERO, &bytes).unwrap(), bytes.len());
        },
    ];
    for way in ways {
        look_beside(&start, way, 8192, |bytes| vec![2; bytes.len()]);
    }
}

/// The time of a write went from memory to the tree while who looked had seen the tree, and not memory.
#[test]
fn time_of_a_write_is_seen_while_it_is_stored() {
    let start = IN_PLACE.start();
    let ways: [fn(&World, &DataFile); 3] = [
        |_, file| file.fsync().unwrap(),
        // The time alone, as its last block is dirty.
        |_, file| file.punch_hole(FileOffset::new(16_384), 4096).unwrap(),
        // Another in its place.
        |world, file| {
            let mtime = Some(Time { sec: OLD.sec + 1, ..OLD });
            let attributes = SetAttributes { mtime, ..SetAttributes::default() };
            let mut handle = world.fs.begin(Reservation::items(4)).unwrap();
            handle.set_attributes(file.id(), &attributes).unwrap();
        },
    ];
    for store in ways {
        let start = start.clone();
        explore(100 * runs(), move || {
            let world = Arc::new(World::open(&start));
            let time = || world.fs.inode(world.one).unwrap().mtime;
            assert_eq!(time(), OLD);
            let file = world.fs.open_data(world.one).unwrap();
            assert_eq!(file.write(FileOffset::new(8000), &[2; 100]).unwrap(), 100);
            let same = Arc::clone(&world);
            let storing = shuttle::thread::spawn(move || store(&same, &file));
            for _ in 0..3 {
                assert!(time() > OLD);
            }
            storing.join().unwrap();
            assert!(time() > OLD);
        });
    }
}

#[test]
fn size_of_a_write_is_not_seen_before_its_time() {
    let start = IN_PLACE.start();
    explore(100 * runs(), move || {
        let world = Arc::new(World::open(&start));
        let file = world.fs.open_data(world.one).unwrap();
        let writing = shuttle::thread::spawn(move || {
            assert_eq!(file.append(&[2; 100]).unwrap().1, 100);
            file.fsync().unwrap();
        });
        for _ in 0..3 {
            let inode = world.fs.inode(world.one).unwrap();
            assert!(inode.size_bytes == 8192 || inode.mtime > OLD, "{inode:?}");
        }
        writing.join().unwrap();
    });
}
