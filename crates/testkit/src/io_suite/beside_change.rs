//! What FIEMAP and SEEK say of a file that others change: of what stays as it is, that and nothing else.

use ubtrfs_iomap::{CacheOptions, FiemapExtent, FiemapSync, FileOffset, FileRange, Reach};

use super::concurrency::{beside, concurrent_rounds, disturb};
use super::counts::{Count, Running, count};
use super::random::random_by_number;
use super::{DataFile, Harness, judge_files, little_memory, walk};
use crate::iomap_model::{at, range};
use crate::prng::Prng;

/// The file is groups of blocks, in each: some that are always data, some that are always a hole, and some that change.
const GROUPS: u64 = 8;
const GROUP_BLOCKS: u64 = 9;
const PART_BLOCKS: u64 = 3;

fn part(group: u64, part: u64, block: u64) -> FileRange {
    let first = group * GROUP_BLOCKS + part * PART_BLOCKS;
    range(first * block, (first + PART_BLOCKS) * block)
}

fn data(group: u64, block: u64) -> FileRange {
    part(group, 0, block)
}

fn hole(group: u64, block: u64) -> FileRange {
    part(group, 1, block)
}

fn changing(group: u64, block: u64) -> FileRange {
    part(group, 2, block)
}

/// The answers are in order, do not overlap, hold all that is always data, and nothing of what is always a hole.
fn assert_holds(found: &[FileRange], block: u64, what: &str) {
    for pair in found.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{what}: {} and {}", pair[0], pair[1]);
    }
    assert!(found.iter().all(|range| !range.is_empty()), "{what}: {found:?}");
    for group in 0..GROUPS {
        let data = data(group, block);
        // Several may hold it together.
        let mut at = data.start;
        for range in found.iter().filter(|range| !range.intersection(data).is_empty()) {
            assert!(range.start <= at, "{what}: nothing from {at} to {}", range.start);
            at = range.end;
        }
        assert!(at >= data.end, "{what}: nothing from {at} on, in {found:?}");
        let hole = hole(group, block);
        let in_hole = found.iter().find(|range| !range.intersection(hole).is_empty());
        assert!(in_hole.is_none(), "{what}: {in_hole:?} in the hole {hole}");
    }
}

fn ranges(extents: &[FiemapExtent], has_unwritten: bool) -> Vec<FileRange> {
    let shown = extents.iter().filter(|extent| has_unwritten || !extent.flags.is_unwritten);
    shown.map(|extent| extent.range).collect()
}

fn look<F: DataFile>(file: &F, random: &mut Prng, block: u64) {
    let all = FileRange::from(FileOffset::ZERO);
    let sync = if random.chance(1, 4) { FiemapSync::WriteBack } else { FiemapSync::AsIs };
    let extents = file.fiemap(all, usize::MAX, sync).unwrap();
    assert_holds(&ranges(&extents, true), block, "fiemap, all");
    assert_holds(&ranges(&extents, false), block, "fiemap, data");
    let last = extents.iter().rposition(|extent| extent.flags.is_last);
    assert!(last.is_none() || last == Some(extents.len() - 1), "{extents:?}");
    // By two calls each: what is data for the first can be a hole for the second, where it changes.
    let mut walked = walk(file);
    let changes = |place| (0..=GROUPS).any(|group| changing(group, block).contains(place));
    walked.retain(|range| !range.is_empty() || !changes(range.start));
    assert_holds(&walked, block, "seek");
    let group = random.below(GROUPS);
    let (data, hole) = (data(group, block), hole(group, block));
    let inside = at(random.below(PART_BLOCKS * block));
    let (in_data, in_hole) =
        (data.start.saturating_add(inside.bytes()), hole.start.saturating_add(inside.bytes()));
    assert_eq!(file.seek_data(in_data).unwrap(), in_data);
    assert_eq!(file.seek_hole(in_data).unwrap(), hole.start);
    assert_eq!(file.seek_hole(in_hole).unwrap(), in_hole);
    let next = file.seek_data(in_hole).unwrap();
    let next_data = self::data(group + 1, block).start;
    assert!(next >= hole.end && next <= next_data, "data at {next} behind {in_hole}");
    // Of a part of the file, and only so many.
    let few = file.fiemap(data, 2, sync).unwrap();
    assert!(few.len() <= 2);
    assert!(few.iter().all(|extent| !extent.range.intersection(data).is_empty()), "{few:?}");
    assert_eq!(few.first().map(|extent| extent.range.start), Some(data.start));
}

/// Data is written over, written back, moved and cut into extents; and beside it holes come and go.
///
/// # Panics
/// If an answer misses what is always data, or shows a hole as something else.
pub fn fiemap_and_seek_beside_change_hold_to_what_stays<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let _running = Running::new();
    for options in [CacheOptions::default(), little_memory(4096)] {
        let mut harness = make(options);
        let block = harness.block_bytes();
        let inode = harness.create();
        let disturber = harness.open(&inode);
        let part_len = usize::try_from(PART_BLOCKS * block).expect("blocks fit into memory");
        // One more, so that there is data behind the last group.
        for group in 0..=GROUPS {
            disturber.write(data(group, block).start, &vec![1; part_len]).unwrap();
        }
        let rounds = concurrent_rounds::<H>(40);
        // Threads that look share it, with what it knows of the last look, each other round.
        let shared = harness.open(&inode);
        let work = |thread: u64| {
            let file = harness.open(&inode);
            let mut random = random_by_number(thread);
            for round in 0..rounds {
                if thread >= 2 {
                    let looked_at = if round % 2 == 0 { &shared } else { &file };
                    look(looked_at, &mut random, block);
                    continue;
                }
                // Each changes groups of its own.
                let group = random.below(GROUPS / 2) * 2 + thread;
                let within =
                    if random.chance(1, 3) { data(group, block) } else { changing(group, block) };
                let is_data = within == data(group, block);
                let from = random.below(PART_BLOCKS * block);
                let len = random.below(PART_BLOCKS * block - from) + 1;
                let start = within.start.saturating_add(from);
                let bytes = vec![2; usize::try_from(len).expect("blocks fit into memory")];
                match random.below(if is_data { 3 } else { 7 }) {
                    0 => file.flush(range(start.bytes(), start.bytes() + len)).unwrap(),
                    1 | 2 => assert_eq!(file.write(start, &bytes).unwrap(), bytes.len()),
                    3 | 4 => file.punch_hole(start, len).unwrap(),
                    5 => file.allocate(start, len, Reach::Stays).unwrap(),
                    _ => file.allocate_zeroed(start, len, Reach::Stays).unwrap(),
                }
                if round % 16 == 0 {
                    file.punch_hole(changing(group, block).start, PART_BLOCKS * block).unwrap();
                }
            }
            count(Count::ConcurrentRounds, rounds);
        };
        beside(4, work, |round| disturb(&harness, &inode, &disturber, round));
        drop((disturber, shared));
        judge_files(&mut harness, &[inode]);
    }
}
