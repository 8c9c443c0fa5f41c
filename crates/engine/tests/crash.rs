//! Power cuts: whatever of the last writes arrived, the filesystem opens, shows one of its commits,
//! never an older one than the last that was promised, and is clean.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_engine::{
    Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation,
    mkfs,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::crash::{CutDevice, RecordingDevice};
use ubtrfs_testkit::{Compare, Oracle, Prng, TreeSnapshot, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

const ROUNDS: usize = 12;
const CUTS: usize = 100;
/// Every so many cuts, `btrfs check` looks too.
const CHECKED_EVERY: usize = 15;

#[test]
fn cut_at_any_write_leaves_a_commit() {
    cut_at_any_write(&MkfsOptions::default(), 1);
}

#[test]
fn cut_at_any_write_with_small_nodes_and_no_free_space_tree_leaves_a_commit() {
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        free_space_tree: false,
        block_group_tree: false,
        ..MkfsOptions::default()
    };
    cut_at_any_write(&options, 2);
}

fn cut_at_any_write(options: &MkfsOptions, seed: u64) {
    let mut prng = Prng::of_test(seed);
    let device = Arc::new(RecordingDevice::new(512 << 20));
    let runtime = Arc::new(Runtime::reproducible(Time { sec: 1_700_000_000, nsec: 1 }, seed));
    let volume = mkfs(vec![device.clone() as Arc<dyn Device>], options, &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    device.begin();

    // What each commit holds, and how many writes had been made when it was promised.
    let mut commits = BTreeMap::new();
    let mut promised = Vec::new();
    let mut note = |fs: &Filesystem| {
        let generation = fs.superblock().generation.get();
        commits.insert(generation, common::snapshot(fs, fs.top_level()));
        promised.push((device.recording().event_count(), generation));
    };
    note(&fs);
    for round in 0..ROUNDS {
        fill(&fs, round, &mut prng);
        fs.commit().unwrap();
        note(&fs);
    }
    drop(fs);

    let recording = device.recording();
    let events = recording.event_count();
    assert!(recording.flush_count() >= 2 * ROUNDS, "{} flushes", recording.flush_count());
    for number in 0..CUTS {
        let cut_after = prng.index(events + 1);
        let (oldest, torn) = (
            promised.iter().rev().find(|(count, _)| *count <= cut_after).unwrap().1,
            prng.chance(2, 3),
        );
        let state = |prng: &mut Prng| {
            if torn {
                recording.torn_after(cut_after, prng)
            } else {
                recording.cut_after(cut_after)
            }
        };
        let what = format!("cut {number} after {cut_after} of {events}, torn: {torn}");
        judge(state(&mut prng.clone()), &commits, oldest, &what);
        if number % CHECKED_EVERY == 0 && oracle::require(Oracle::BtrfsProgs) {
            let scratch = tempfile::tempdir().unwrap();
            let image = scratch.path().join("image");
            state(&mut prng).write_image(&image);
            assert_checks_clean(&image);
        }
    }
}

fn judge(cut: CutDevice, commits: &BTreeMap<u64, TreeSnapshot>, oldest: u64, what: &str) {
    let volume = Volume::open(vec![Arc::new(cut)], &VolumeOptions::default())
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let fs = Filesystem::open(volume, OpenOptions::default())
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    let generation = fs.superblock().generation.get();
    assert!(generation >= oldest, "{what}: shows {generation}, {oldest} was promised");
    let expected = commits.get(&generation).unwrap_or_else(|| panic!("{what}: {generation}"));
    println!("{what}: shows {generation}");
    expected.assert_same(&common::snapshot(&fs, fs.top_level()), &Compare::same_filesystem());
    // And goes on from there.
    fill(&fs, ROUNDS, &mut Prng::new(1));
    fs.commit().unwrap_or_else(|error| panic!("{what}: {error}"));
}

/// A directory with files of each kind.
fn fill(fs: &Filesystem, round: usize, prng: &mut Prng) {
    let time = Time { sec: 1_700_000_000 + i64::try_from(round).unwrap(), nsec: 5 };
    let create = |dir: InodeId, name: String, mode: u32| {
        let new = NewInode::new(mode, time);
        let mut handle = fs.begin(Reservation::create(1)).unwrap();
        let id = handle.create(dir, name.as_bytes(), &new).unwrap();
        handle.set_xattr(id, b"user.round", round.to_string().as_bytes()).unwrap();
        id
    };
    let dir = create(fs.top_level(), format!("round-{round}"), 0o040_755);
    for number in 0..20 {
        let id = create(dir, format!("file-{number}"), 0o100_644);
        let len = [10, 3000, 5000, 40_000, 300_000][prng.index(5)];
        let method = prng.chance(1, 2).then(|| Method::with_default_level(Compression::Zstd));
        let data = PreparedData::new(prng.text(len), &fs.write_options(method));
        let mut appender = fs.appender(id, 0).unwrap();
        appender.push(FileOffset(0), data).unwrap();
        appender.finish().unwrap();
    }
}
