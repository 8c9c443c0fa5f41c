//! Power cuts while a long file is compressed by who writes it, beside those who write back what he gives to memory: a later part may be on
//! the medium before an earlier one.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::full::{create, read};
use common::holding::Holding;
use common::simulated::{check, with_file};
use ubtrfs_engine::{
    Background, BackgroundOptions, DataFile, Filesystem, Method, MkfsOptions, OpenOptions, mkfs,
};
use ubtrfs_iomap::CacheOptions;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Executor, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{CrashPlan, SimArray, SimDevice};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const IMAGE_BYTES: u64 = 256 << 20;
/// Long enough for whatever a machine is at besides.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the thread writes that writes back in the background waits as long as it is told to.
fn wait_while(stalls: &AtomicBool) {
    while std::thread::current().name() == Some("ubtrfs-writeback")
        && stalls.load(Ordering::Relaxed)
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets go on what waits, also where a thread panics.
struct Released<'a>(&'a AtomicBool);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Ends whoever goes on until then, also where a thread panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// With memory for a short file only.
fn options() -> OpenOptions {
    let page_cache = CacheOptions {
        cached_bytes_max: 8 * MIB as u64,
        dirty_bytes_max: 4 * MIB as u64,
        dirty_bytes_background: 2 * MIB as u64,
        ..CacheOptions::default()
    };
    OpenOptions {
        runtime: Arc::new(Runtime { executor: Executor::Threads(2), ..Runtime::system() }),
        compression: Some(Method::with_default_level(Compression::Zstd)),
        page_cache: Some(page_cache),
        ..OpenOptions::default()
    }
}

/// A new filesystem on devices that record what comes.
fn made(stalls: &Arc<AtomicBool>) -> (SimArray, Filesystem) {
    let array = SimArray::new(&[IMAGE_BYTES]);
    drop(mkfs(array.devices(), &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap());
    array.begin();
    let stalls = Arc::clone(stalls);
    let device = Holding::new(array.device(0), move || wait_while(&stalls));
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, options()).unwrap();
    (array, fs)
}

fn in_background(fs: &Filesystem, commit_every: Duration) -> Background {
    fs.run_in_background(BackgroundOptions { commit_every, ..BackgroundOptions::default() })
        .unwrap()
}

fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Prng::new(seed);
    let mut bytes = random.text(len);
    bytes.truncate(len);
    bytes
}

fn straight_bytes(file: &DataFile) -> u64 {
    file.space().cache().counts().straight_bytes_written
}

/// `UBTRFS_CRASH_SEEDS` asks for more.
fn seed_count() -> u64 {
    let wanted = std::env::var("UBTRFS_CRASH_SEEDS").ok();
    wanted.map_or(2, |count| count.parse().expect("UBTRFS_CRASH_SEEDS is a number"))
}

/// What a cut left: it opens, which replays a log, and both the checker and what is read agree. So much of the file is durable, and of the
/// rest each block is as it was written, or zero, from where the file ended once in it. Returns its length, and whether what is zero comes
/// before what is not.
fn judge_state(
    device: SimDevice,
    bytes: &[u8],
    (ends, durable): (&[usize], usize),
    what: &str,
) -> (usize, bool) {
    let device = Arc::new(device);
    let volume =
        Volume::open(vec![Arc::clone(&device) as Arc<dyn Device>], &VolumeOptions::default())
            .unwrap();
    let runtime = Arc::new(Runtime::simulated(1));
    let fs = Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() })
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let found = fs.lookup(fs.top_level(), b"file").ok();
    let seen = found.map_or_else(Vec::new, |id| read(&fs, id));
    assert!(seen.len() >= durable && seen.len() <= bytes.len(), "{what}: {} bytes", seen.len());
    let (mut has_gap, mut zeros) = (false, false);
    for (number, block) in seen.chunks(BLOCK).enumerate() {
        let at = number * BLOCK;
        // Text has no zeros.
        let is_other = |(seen, written): (&u8, &u8)| seen != written;
        let Some(place) = block.iter().zip(&bytes[at..]).position(is_other) else {
            has_gap |= zeros;
            continue;
        };
        let end = at + place;
        assert!(end >= durable, "{what}: not what is durable at {end}, up to {durable}");
        let is_zero = block[place..].iter().all(|byte| *byte == 0);
        assert!(is_zero, "{what}: nobody wrote what is at {end}: {:x?}", &block[place..]);
        if place > 0 {
            println!("{what}: zeros from {end} on");
            assert!(ends.contains(&end), "{what}: the file never ended at {end}");
        }
        zeros = true;
    }
    fs.sync().unwrap();
    drop(fs);
    check(&device, what);
    (seen.len(), has_gap)
}

/// An earlier part is held up, the later ones are on the medium, and a commit comes: the earlier part is zeros after a cut, and nothing else,
/// until it is made durable.
#[test]
fn what_is_held_up_shows_zeros_before_what_went_straight() {
    const LEN: usize = 32 * MIB;
    let stalls = Arc::default();
    let (array, fs) = made(&stalls);
    let bytes = text(1, LEN);
    let background = in_background(&fs, Duration::from_secs(3600));
    let file = create(&fs, "file", 0).unwrap();
    let (before, held) = bytes.split_at(12 * MIB);
    for part in before.chunks(MIB) {
        file.append(part).unwrap();
    }
    file.fsync().unwrap();
    let before_bytes = straight_bytes(&file);
    let released = Released(&stalls);
    stalls.store(true, Ordering::Relaxed);
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let (file, fs) = (&file, &fs);
        scope.spawn(move || {
            for part in held.chunks(3 * MIB) {
                file.append(part).unwrap();
            }
            fs.commit().unwrap();
            done.send(()).unwrap();
        });
        let seen = is_done.recv_timeout(PATIENCE);
        let cut = array.recording();
        drop(released);
        seen.expect("nobody waits for what is held up");
        let went_bytes = straight_bytes(file) - before_bytes;
        assert!(went_bytes > (held.len() / 2) as u64, "{went_bytes}");
        let state = cut.cut_after(cut.event_count());
        let (len, has_gap) = judge_state(state, &bytes, (&[], before.len()), "while it is held up");
        assert!(has_gap, "of {len} bytes nothing is missing");
    });
    file.fsync().unwrap();
    let cut = array.recording();
    let state = cut.cut_after(cut.event_count());
    judge_state(state, &bytes, (&[], LEN), "behind fsync");
    background.stop().unwrap();
}

/// Cuts of all kinds while one appends, another makes durable what is there, and a third commits all the time. What fsync returned for is
/// there; all else is as written, or zero.
#[test]
fn what_fsync_returned_for_survives_cuts_beside_who_compresses_himself() {
    const LEN: usize = 40 * MIB;
    let (mut state_count, mut gap_count) = (0, 0);
    for seed in 0..seed_count() {
        let (array, fs) = made(&Arc::default());
        let background = in_background(&fs, Duration::from_millis(20));
        let bytes = text(seed, LEN);
        let file = create(&fs, "file", 0).unwrap();
        // So much was written; and how much was durable behind so many requests of the device.
        let written = AtomicUsize::new(0);
        let durable = Mutex::new(vec![(0, 0)]);
        let is_done = AtomicBool::new(false);
        let mut ends = Vec::new();
        std::thread::scope(|scope| {
            let (file, written, durable, is_done, array) =
                (&file, &written, &durable, &is_done, &array);
            let _end = End(is_done);
            scope.spawn(move || {
                let mut random = Prng::new(seed + 100);
                while !is_done.load(Ordering::SeqCst) {
                    let len = written.load(Ordering::SeqCst);
                    file.fsync().unwrap();
                    durable.lock().unwrap().push((array.event_count(), len));
                    std::thread::sleep(Duration::from_millis(random.below(40)));
                }
            });
            let mut random = Prng::new(seed);
            let mut end = 0;
            while end < LEN {
                let len = match random.index(5) {
                    0 | 1 => 1 + random.index(2 * MIB),
                    2 => 1 + random.index(3000),
                    _ => MIB * (1 + random.index(3)),
                };
                let part = &bytes[end..LEN.min(end + len)];
                file.append(part).unwrap();
                end += part.len();
                ends.push(end);
                // What begins inside a block goes by memory: mostly a block begins there.
                if end % BLOCK > 0 && random.chance(1, 2) {
                    let part = &bytes[end..LEN.min(end.next_multiple_of(BLOCK))];
                    file.append(part).unwrap();
                    end += part.len();
                    ends.push(end);
                }
                written.store(end, Ordering::SeqCst);
            }
        });
        let went_bytes = straight_bytes(&file);
        assert!(went_bytes > MIB as u64, "{went_bytes} bytes went straight");
        background.stop().unwrap();
        drop((file, fs));
        let durable = durable.into_inner().unwrap();
        let recording = array.recording();
        let plan = CrashPlan {
            prefix_one_in: (recording.event_count() as u64 / 40).max(1),
            parts_per_window: 1,
            mixed_per_window: 1,
        };
        for (number, state) in recording.states(plan, Prng::new(seed)).enumerate() {
            let what = format!("seed {seed}, {:?} after {}", state.kind, state.cut_after);
            let is_before = |(events, _): &&(usize, usize)| *events <= state.cut_after;
            let durable = durable.iter().filter(is_before).map(|(_, len)| *len).max().unwrap();
            let device = SimArray::of_images(state.images).device(0);
            if number % 40 == 0 {
                with_file(&device, common::judge);
            }
            let (_, has_gap) = judge_state(device, &bytes, (&ends, durable), &what);
            gap_count += usize::from(has_gap);
            state_count += 1;
        }
    }
    println!("{gap_count} of {state_count} states with an earlier part missing");
    assert!(state_count > 40 * seed_count(), "{state_count} states");
}
