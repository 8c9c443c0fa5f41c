//! A file is cut while others look at it.

use std::sync::Arc;

use super::state::State;
use super::world::{self, IN_BLOCKS, World};
use super::{explore, runs};

/// As long as it is now.
const SIZE: u64 = 5 * 4096;
const CUT_TO: u64 = 4100;

/// While its extents were taken away in steps, who looked at it by its number found it as long as what was left.
#[test]
fn file_of_many_extents_is_cut_at_once() {
    let start = IN_BLOCKS.start();
    explore(100 * runs(), move || {
        let world = Arc::new(World::open(&start));
        let sizes = [SIZE, CUT_TO];
        let cutting = {
            let world = Arc::clone(&world);
            shuttle::thread::spawn(move || world.fs.truncate(world.one, CUT_TO).unwrap())
        };
        let mut left = &sizes[..];
        for _ in 0..4 {
            let size = world.fs.inode(world.one).unwrap().size_bytes;
            left = from(left, size);
            let seen = State::of_one(&world.fs).unwrap();
            left = from(left, seen.len() as u64);
            assert!(seen.iter().all(|byte| *byte == 1));
        }
        cutting.join().unwrap();
        assert_eq!(world.fs.inode(world.one).unwrap().size_bytes, CUT_TO);
        world.fs.sync().unwrap();
        world::check(&world.cut_now(), "cut");
    });
}

/// What it may be from now on.
fn from(sizes: &[u64], found: u64) -> &[u64] {
    let place = sizes.iter().position(|size| *size == found);
    &sizes[place.unwrap_or_else(|| panic!("{found} bytes, not one of {sizes:?}"))..]
}
