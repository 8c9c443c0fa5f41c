//! Threads at the same files, with writeback, reclaim and commits between them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ubtrfs_iomap::{CacheOptions, FiemapSync, FileOffset, FileRange, Reach};

use super::counts::{Count, Running, asked, count};
use super::history::History;
use super::model::Model;
use super::random::random_by_number;
use super::{DataFile, Harness, contents, judge_files, little_memory};
use crate::iomap_model::{at, range};

/// Threads that count their rounds in all tests of the suite: of writes and reads twice 6, of appends 3, beside truncation 3, of
/// several files 3, beside change twice 4, of mapped access twice 4, of writes that overlap in part twice 6, and at a failing device 4.
pub(super) const COUNTING_THREADS: u64 = 53;

/// What each thread of such a test does: `each` times the number of seeds, or as often as UBTRFS_IOMAP_CONCURRENT_ROUNDS says.
pub(super) fn concurrent_rounds<H: Harness>(each: u64) -> u64 {
    asked("UBTRFS_IOMAP_CONCURRENT_ROUNDS").unwrap_or(each * H::SEEDS)
}

/// Runs `work` in threads, and `trouble` in one more until they are done.
pub(super) fn beside(threads: u64, work: impl Fn(u64) + Sync, trouble: impl Fn(u64) + Sync) {
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (work, done) = (&work, &done);
                scope.spawn(move || {
                    let result =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(thread)));
                    done.fetch_add(1, Ordering::SeqCst);
                    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                })
            })
            .collect();
        let (trouble, done) = (&trouble, &done);
        scope.spawn(move || {
            let mut round = 0;
            while done.load(Ordering::SeqCst) < threads {
                trouble(round);
                round += 1;
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

pub(super) fn disturb<H: Harness>(harness: &H, inode: &H::Inode, file: &H::File, round: u64) {
    match round % 5 {
        0 => harness.background_pass(round * 10_000),
        1 => file.flush(FileRange::from(FileOffset::ZERO)).unwrap(),
        2 => _ = harness.relocate(inode),
        3 => harness.reclaim(),
        _ => harness.commit(),
    }
}

/// Each write fills a range with one value; a read finds one value only. Both are done through memory and past it, with ends on blocks,
/// and inside of them, where what is to go past memory goes through it.
///
/// # Panics
/// If it is not so.
pub fn reads_and_writes_are_atomic_to_each_other<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    let _running = Running::new();
    for start in [2048, 4096] {
        let mut harness = make(little_memory(4096));
        let rounds = concurrent_rounds::<H>(20);
        let inode = harness.create();
        let file = harness.open(&inode);
        // More than fits into memory, so that each read misses somewhere.
        let len = 24 * 4096;
        file.write(at(start), &vec![1; len]).unwrap();
        let work = |thread: u64| {
            // One open file for two threads, and one for each other.
            let own = harness.open(&inode);
            let file: &H::File = if thread < 2 { &file } else { &own };
            let is_direct = thread >= 4;
            for round in 0..rounds {
                if thread.is_multiple_of(2) {
                    let value = u8::try_from((thread * rounds + round) % 255 + 1).unwrap();
                    let bytes = vec![value; len];
                    let written = match is_direct {
                        true => file.direct_write(at(start), &bytes),
                        false => file.write(at(start), &bytes),
                    };
                    assert_eq!(written.unwrap(), len);
                } else {
                    let mut bytes = vec![0; len];
                    let read = match is_direct {
                        true => file.direct_read(at(start), &mut bytes),
                        false => file.read(at(start), &mut bytes),
                    };
                    assert_eq!(read.unwrap(), len);
                    let other = bytes.iter().position(|byte| *byte != bytes[0]);
                    assert!(bytes[0] != 0, "nothing, from {start} on");
                    assert!(
                        other.is_none(),
                        "torn at {other:?} from {start} on, direct: {is_direct}"
                    );
                }
            }
            count(Count::ConcurrentRounds, rounds);
        };
        beside(6, work, |round| disturb(&harness, &inode, &file, round));
        file.fsync().unwrap();
        drop(file);
        judge_files(&mut harness, &[inode]);
    }
}

/// A part of the file that two writers at most write, each all of it: who wrote it last, and which of his writes that was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    writer: u64,
    version: u64,
}

impl Stamp {
    fn bytes(self, len: usize) -> Vec<u8> {
        let stamp = self.writer << 32 | self.version;
        stamp.to_le_bytes().repeat(len / 8)
    }

    fn of(bytes: &[u8], what: &str) -> Self {
        let stamp: [u8; 8] = bytes[..8].try_into().expect("eight bytes");
        let torn = bytes.chunks(8).position(|other| other != stamp);
        assert!(torn.is_none(), "{what}: torn at {torn:?}");
        let stamp = u64::from_le_bytes(stamp);
        Self { writer: stamp >> 32, version: stamp & u64::from(u32::MAX) }
    }
}

/// Of each four parts of a read: the writes that are seen in part are those that a later one of another writer lies over.
fn assert_in_some_order(seen: [Stamp; 4], before: [u64; 3]) -> [u64; 3] {
    let writers = seen.map(|stamp| stamp.writer);
    assert!(writers[0] == 0 && writers[1] <= 1, "{seen:?}");
    assert!((1..=2).contains(&writers[2]) && writers[3] == 2, "{seen:?}");
    let mut last = [seen[0].version, before[1], seen[3].version];
    for stamp in [seen[1], seen[2]] {
        match stamp.writer {
            1 => {}
            writer => {
                assert_eq!(stamp.version, last[usize::try_from(writer).unwrap()], "{seen:?}");
            }
        }
    }
    let middle: Vec<u64> =
        seen[1..3].iter().filter(|one| one.writer == 1).map(|one| one.version).collect();
    assert!(middle.windows(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
    last[1] = middle.first().copied().unwrap_or(before[1]);
    // What was seen stays written.
    assert!(
        last.iter().zip(before).all(|(now, before)| *now >= before),
        "{seen:?} after {before:?}"
    );
    last
}

/// Three writers, of which the second overlaps a half of each of the others: who reads all of it finds each write whole but for what a later
/// one lies over, and never an older one again. Through memory and past it.
///
/// # Panics
/// If it is not so.
pub fn writes_that_overlap_in_part_are_whole_and_in_one_order<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    const PART: usize = 6 * 4096;
    let _running = Running::new();
    for start in [2048, 4096] {
        let mut harness = make(little_memory(4096));
        let rounds = concurrent_rounds::<H>(20);
        let inode = harness.create();
        let file = harness.open(&inode);
        for writer in [0, 1, 2] {
            let bytes = Stamp { writer, version: 0 }.bytes(2 * PART);
            file.write(at(start + writer * PART as u64), &bytes).unwrap();
        }
        let work = |thread: u64| {
            // One open file for two threads, and one for each other.
            let own = harness.open(&inode);
            let file: &H::File = if thread.is_multiple_of(3) { &file } else { &own };
            let mut before = [0; 3];
            for round in 0..rounds {
                let is_direct = (round + thread).is_multiple_of(3);
                if thread < 3 {
                    let bytes = Stamp { writer: thread, version: round + 1 }.bytes(2 * PART);
                    let at = at(start + thread * PART as u64);
                    let written = match is_direct {
                        true => file.direct_write(at, &bytes),
                        false => file.write(at, &bytes),
                    };
                    assert_eq!(written.unwrap(), bytes.len());
                    continue;
                }
                let mut bytes = vec![0; 4 * PART];
                let read = match is_direct {
                    true => file.direct_read(at(start), &mut bytes),
                    false => file.read(at(start), &mut bytes),
                };
                assert_eq!(read.unwrap(), bytes.len());
                let seen = [0, 1, 2, 3].map(|part| {
                    let what = format!("part {part} from {start} on, direct: {is_direct}");
                    Stamp::of(&bytes[part * PART..(part + 1) * PART], &what)
                });
                before = assert_in_some_order(seen, before);
            }
            count(Count::ConcurrentRounds, rounds);
        };
        beside(6, work, |round| disturb(&harness, &inode, &file, round));
        file.fsync().unwrap();
        drop(file);
        judge_files(&mut harness, &[inode]);
    }
}

/// Nothing is lost, torn or written over.
///
/// # Panics
/// If it is not so.
pub fn appends_of_threads_are_all_there_and_whole<H: Harness>(make: impl Fn(CacheOptions) -> H) {
    const RECORD: usize = 1000;
    let _running = Running::new();
    let rounds = concurrent_rounds::<H>(15);
    let records = usize::try_from(rounds).unwrap();
    let mut harness = make(little_memory(4096));
    let inode = harness.create();
    let disturber = harness.open(&inode);
    let work = |thread: u64| {
        let file = harness.open(&inode);
        for _ in 0..records {
            let record = vec![u8::try_from(thread + 1).unwrap(); RECORD];
            let (offset, len) = file.append(&record).unwrap();
            assert_eq!(len, RECORD);
            assert_eq!(offset.bytes() % 1000, 0);
        }
        count(Count::ConcurrentRounds, rounds);
    };
    beside(3, work, |round| disturb(&harness, &inode, &disturber, round));
    disturber.fsync().unwrap();
    drop(disturber);
    harness.reopen();
    let bytes = contents(&harness.open(&inode));
    assert_eq!(bytes.len(), 3 * records * RECORD);
    let mut counts = [0; 4];
    for record in bytes.chunks(RECORD) {
        assert!(record.iter().all(|byte| *byte == record[0]), "torn");
        counts[usize::from(record[0])] += 1;
    }
    assert_eq!(counts, [0, records, records, records]);
    judge_files(&mut harness, &[inode]);
}

/// One thread changes a file in all ways that cut and zero it. Each byte that others read meanwhile is what it was at some moment between the
/// beginning and the end of the read, or zero where the file was cut before it; never what lay there before, nor garbage from a place given
/// up; and each read ends where the file did at such a moment.
///
/// # Panics
/// If it is not so.
pub fn reads_beside_truncation_and_holes_see_bytes_or_zeros<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    const SIZE: u64 = 24 * 4096;
    let _running = Running::new();
    let mut harness = make(little_memory(4096));
    let inode = harness.create();
    let disturber = harness.open(&inode);
    let rounds = concurrent_rounds::<H>(25);
    let (history, end) = (History::default(), Mutex::new(Vec::new()));
    let change_all = || {
        let file = harness.open(&inode);
        let (mut random, mut model) = (random_by_number(0), Model::new(4096));
        for round in 0..rounds {
            let start = random.below(SIZE);
            let len = random.below(8 * 4096).clamp(1, SIZE - start);
            let kind = round % 6;
            let bytes: Vec<u8> = (start..start + len).map(|at| byte_of(at, round)).collect();
            match kind {
                0 => model.truncate(start),
                1 => model.punch(start, len),
                2 => model.zero(start, start + len),
                3 => {
                    model.drop_data(start, len);
                    model.allocate(start, len, Reach::Extends);
                }
                _ => model.write(start, &bytes),
            }
            history.begin(model.bytes.clone());
            match kind {
                0 => file.truncate(at(start)).unwrap(),
                1 => file.punch_hole(at(start), len).unwrap(),
                2 => file.zero_range(at(start), len).unwrap(),
                3 => file.allocate_zeroed(at(start), len, Reach::Extends).unwrap(),
                _ => assert_eq!(file.write(at(start), &bytes).unwrap(), bytes.len()),
            }
            history.end();
            if round % 7 == 0 {
                model.truncate(SIZE);
                history.begin(model.bytes.clone());
                file.truncate(at(SIZE)).unwrap();
                history.end();
            }
            // What may be after a crash is not asked here.
            model.synced();
        }
        *end.lock().unwrap() = model.bytes;
    };
    let work = |thread: u64| {
        if thread == 0 {
            change_all();
            return count(Count::ConcurrentRounds, rounds);
        }
        let file = harness.open(&inode);
        let reader = usize::try_from(thread - 1).unwrap();
        let mut random = random_by_number(thread);
        for _ in 0..rounds {
            let mut start = random.below(SIZE);
            let mut bytes = vec![0; usize::try_from(random.below(6 * 4096)).unwrap()];
            let is_direct = random.chance(1, 3);
            if is_direct {
                start = start / 4096 * 4096;
                bytes.truncate(bytes.len() / 4096 * 4096);
            }
            history.begin_reading(reader);
            let len = match is_direct {
                true => file.direct_read(at(start), &mut bytes).unwrap(),
                false => file.read(at(start), &mut bytes).unwrap(),
            };
            history.judge(reader, start, &bytes, len);
            if let Ok(data) = file.seek_data(at(start)) {
                assert!(data >= at(start));
            }
            file.fiemap(range(0, SIZE), 100, FiemapSync::AsIs).unwrap();
        }
        count(Count::ConcurrentRounds, rounds);
    };
    beside(3, work, |round| disturb(&harness, &inode, &disturber, round));
    let end = end.into_inner().unwrap();
    assert!(contents(&disturber) == end);
    disturber.fsync().unwrap();
    assert!(contents(&disturber) == end);
    drop(disturber);
    harness.reopen();
    assert!(contents(&harness.open(&inode)) == end);
    judge_files(&mut harness, &[inode]);
}

/// What a change writes there: no two of 255 that follow each other the same, and none zero.
fn byte_of(at: u64, change: u64) -> u8 {
    u8::try_from((at * 7 + change) % 255 + 1).unwrap()
}

/// Several files in one small cache, each in one thread: the budget is shared, the data is not.
///
/// # Panics
/// If it is not so.
pub fn files_that_share_a_small_cache_keep_their_bytes<H: Harness>(
    make: impl Fn(CacheOptions) -> H,
) {
    let _running = Running::new();
    let rounds = concurrent_rounds::<H>(30);
    let mut harness = make(little_memory(4096));
    let inodes: Vec<H::Inode> = (0..3).map(|_| harness.create()).collect();
    let work = |thread: u64| {
        let file = harness.open(&inodes[usize::try_from(thread).unwrap()]);
        let mut random = random_by_number(thread);
        let mut model = Vec::new();
        for _ in 0..rounds {
            let start = random.below(60 * 4096);
            let len = usize::try_from(random.below(3 * 4096)).unwrap();
            let from = usize::try_from(start).unwrap();
            let value = u8::try_from(random.below(256)).unwrap();
            assert_eq!(file.write(at(start), &vec![value; len]).unwrap(), len);
            if len > 0 {
                model.resize(model.len().max(from + len), 0);
                model[from..from + len].fill(value);
            }
            let start = usize::try_from(random.below(60 * 4096)).unwrap();
            let mut bytes = vec![0; 5000];
            let count = file.read(at(u64::try_from(start).unwrap()), &mut bytes).unwrap();
            let end = (start + 5000).min(model.len());
            assert!(bytes[..count] == model[start.min(end)..end], "{count} from {start} on");
        }
        assert!(contents(&file) == model);
        count(Count::ConcurrentRounds, rounds);
    };
    let (watcher, most) = (harness.open(&inodes[0]), AtomicU64::new(0));
    beside(3, work, |round| {
        harness.background_pass(round * 1000);
        most.fetch_max(watcher.cached_bytes(), Ordering::Relaxed);
    });
    // Each of three calls may hold one step of its own beyond the budget.
    let (most, budget) = (most.load(Ordering::Relaxed), little_memory(4096).cached_bytes_max);
    assert!(most <= budget + 3 * budget / 4, "{most} bytes in memory");
    drop(watcher);
    judge_files(&mut harness, &inodes);
}
