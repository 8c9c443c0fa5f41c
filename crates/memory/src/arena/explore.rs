//! Threads in any order, under an explorer of interleavings. `make explore` runs these; a failure prints the schedule that replays it.

use shuttle::thread;
use ubtrfs_rt::check_orders;

use super::tests::{grown, options};
use super::*;
use crate::units::RUN_BYTES_MAX;

const MIB: u64 = 1 << 20;

/// Takes and drops runs of several lengths, each marked while it is there. Returns what is left of them.
fn take_and_drop(arena: &Arena, mark: u8) -> Vec<Buffer> {
    let mut kept: Vec<Buffer> = Vec::new();
    for len_bytes in [4096, RUN_BYTES_MAX, 128 << 10, RUN_BYTES_MAX, RUN_BYTES_MAX, 4096] {
        let mut buffer = arena.zeroed(len_bytes);
        assert!(buffer.iter().step_by(512).all(|byte| *byte == 0));
        buffer.fill(mark);
        kept.push(buffer);
        if kept.len() > 4 {
            let gone = kept.swap_remove(0);
            assert!(gone.iter().step_by(512).all(|byte| *byte == mark));
        }
    }
    assert!(kept.iter().all(|buffer| buffer.iter().step_by(512).all(|byte| *byte == mark)));
    kept.truncate(1);
    kept
}

/// Two who take and drop, past the first slabs, where little may idle: nobody gets what another has, and all is counted, what came meanwhile and
/// what was given back.
#[test]
fn takers_in_any_order() {
    check_orders(|| {
        let (arena, first) = grown(options(20 * MIB, 20 * MIB, MIB / 2));
        let takers = [1, 2].map(|mark| {
            let its = arena.clone();
            thread::spawn(move || take_and_drop(&its, mark))
        });
        let kept = takers.map(|taker| taker.join().expect("a taker ends"));
        let slabs = lock_brief(&arena.inner.slabs);
        let idle: usize = slabs.places.iter().flatten().map(Slab::count_idle).sum();
        assert_eq!((slabs.idle, slabs.pledged), (idle, 0));
        // A word or a run more for each of the two.
        assert!(slabs.idle_bytes() <= MIB / 2 + 2 * 256 * 1024, "{}", slabs.idle_bytes());
        drop(slabs);
        drop((first, kept));
    });
}
