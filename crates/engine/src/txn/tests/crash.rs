//! A power cut at every write of several commits, and with the writes since the last flush lost in
//! part: what opens is the last commit, or the one whose superblock had arrived.

use ubtrfs_testkit::crash::{CutDevice, RecordingDevice};

use super::*;

/// The contents after each commit, by generation, and how many writes had been made when the
/// commit returned.
struct History {
    states: BTreeMap<u64, Model>,
    commits: Vec<(usize, u64)>,
}

impl History {
    /// The generations that a cut after `events` may show.
    fn allowed(&self, events: usize) -> std::ops::RangeInclusive<u64> {
        let durable = self.commits.iter().rev().find(|(at, _)| *at <= events).unwrap().1;
        durable..=durable + 1
    }
}

fn judge_cut(cut: CutDevice, history: &History, events: usize) {
    let fs = open_on(Arc::new(cut));
    let generation = fs.superblock().generation.get();
    assert!(history.allowed(events).contains(&generation), "cut after {events}: {generation}");
    assert!(contents(&fs) == history.states[&generation], "cut after {events}: {generation}");
    // Every tree, so that a block that is not what its parent says is met.
    for info in fs.subvolumes().unwrap() {
        fs.tree(info.id).unwrap().lookup(&Key::MAX).unwrap();
    }
}

fn run(options: &MkfsOptions, seed: u64) {
    let mut random = Prng::of_test(seed);
    let device = Arc::new(RecordingDevice::new(96 << 20));
    let fs = mkfs_on(&device, options);
    for at in 0..400 {
        insert(&fs, key(at, 0), &random.bytes(200));
    }
    fs.commit().unwrap();
    let mut model = contents(&fs);
    device.begin();
    let generation = fs.superblock().generation.get();
    let mut history = History {
        states: BTreeMap::from([(generation, model.clone())]),
        commits: vec![(0, generation)],
    };
    for _ in 0..6 {
        for _ in 0..60 {
            change(&fs, &mut model, &mut random, 1500, false);
        }
        fs.commit().unwrap();
        let generation = fs.superblock().generation.get();
        history.states.insert(generation, model.clone());
        history.commits.push((device.recording().event_count(), generation));
    }
    drop(fs);
    let recording = device.recording();
    let count = recording.event_count();
    assert_eq!(recording.flush_count(), 12, "two flushes a commit");
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mut judged = 0;
    for events in 0..=count {
        judge_cut(recording.cut_after(events), &history, events);
        judge_cut(recording.torn_after(events, &mut random.clone()), &history, events);
        judged += 2;
        if random.chance(12, count as u64) && oracle::require(Oracle::BtrfsProgs) {
            recording.torn_after(events, &mut random.clone()).write_image(&image);
            assert_checks_clean(&image);
        }
        random.next_u64();
    }
    println!("{judged} states");
    assert!(judged > 300);
}

#[test]
fn commit_cut_at_any_write_leaves_the_last_state_or_the_new_one() {
    run(&MkfsOptions::default(), 21);
}

#[test]
fn commit_in_small_nodes_cut_at_any_write_leaves_the_last_state_or_the_new_one() {
    let options = MkfsOptions {
        nodesize_bytes: 4096,
        block_group_tree: false,
        free_space_tree: false,
        ..MkfsOptions::default()
    };
    run(&options, 22);
}

/// A cut, then transactions on what it left: what the lost transaction had written is met again as
/// stale blocks of the very generation that is being written.
#[test]
fn transaction_after_a_cut_is_not_confused_by_what_the_lost_one_wrote() {
    let mut random = Prng::of_test(23);
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let device = Arc::new(RecordingDevice::new(64 << 20));
    let fs = mkfs_on(&device, &options);
    let mut model = contents(&fs);
    for _ in 0..600 {
        change(&fs, &mut model, &mut random, 1500, true);
    }
    fs.commit().unwrap();
    let durable = model.clone();
    device.begin();
    for _ in 0..200 {
        change(&fs, &mut model, &mut random, 1500, false);
    }
    fs.commit().unwrap();
    drop(fs);
    let recording = device.recording();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for _ in 0..8 {
        // All tree blocks are there, the superblocks are not.
        let events = recording.event_count() - 4;
        let cut = Arc::new(recording.cut_after(events));
        let fs = open_on(Arc::clone(&cut) as Arc<dyn Device>);
        let mut model = contents(&fs);
        assert!(model == durable);
        for _ in 0..4 {
            for _ in 0..150 {
                change(&fs, &mut model, &mut random, 1500, false);
            }
            assert!(contents(&fs) == model);
            fs.commit().unwrap();
        }
        drop(fs);
        let fs = open_on(Arc::clone(&cut) as Arc<dyn Device>);
        assert!(contents(&fs) == model);
        cut.write_image(&image);
    }
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

/// The superblocks of two devices are written without a flush between them: a cut leaves either
/// device one commit behind the other, and both what the newer one reaches.
#[test]
fn superblocks_of_two_devices_cut_apart_show_one_of_the_states() {
    let mut random = Prng::of_test(24);
    let recorded: Vec<_> = (0..2).map(|_| Arc::new(RecordingDevice::new(80 << 20))).collect();
    let devices = recorded.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let volume = mkfs(devices, &MkfsOptions::default(), &runtime()).unwrap();
    let fs = Filesystem::open(volume, open_options()).unwrap();
    let mut model = contents(&fs);
    for _ in 0..100 {
        change(&fs, &mut model, &mut random, 500, true);
    }
    fs.commit().unwrap();
    let old = model.clone();
    for device in &recorded {
        device.begin();
    }
    for _ in 0..100 {
        change(&fs, &mut model, &mut random, 500, false);
    }
    fs.commit().unwrap();
    drop(fs);
    let recordings: Vec<_> = recorded.iter().map(|device| device.recording()).collect();
    let mut seen_both = [false; 2];
    // Behind the flush of the blocks: the copy of the superblock, the primary, a flush.
    for (first, second) in (0..4).flat_map(|first| (0..4).map(move |second| (first, second))) {
        let cuts: Vec<Arc<dyn Device>> = recordings
            .iter()
            .zip([first, second])
            .map(|(recording, back)| {
                Arc::new(recording.cut_after(recording.event_count() - back)) as Arc<dyn Device>
            })
            .collect();
        let open = || Volume::open(cuts.clone(), &VolumeOptions::default()).unwrap();
        let fs = Filesystem::open(open(), open_options()).unwrap();
        let is_new = contents(&fs) == model;
        assert!(is_new || contents(&fs) == old, "{first}, {second} events back");
        assert!(is_new || first > 1 && second > 1, "a primary that arrived counts");
        seen_both[usize::from(is_new)] = true;
        insert(&fs, key(1 << 40, 0), &[1; 8]);
        fs.commit().unwrap();
        drop(fs);
        let fs = Filesystem::open(open(), open_options()).unwrap();
        assert_eq!(contents(&fs).len(), 1 + if is_new { model.len() } else { old.len() });
    }
    assert_eq!(seen_both, [true; 2]);
}

/// Two devices that were each written to without the other, by sessions that did as much, had the same superblocks, and were opened together: mirrors
/// of two histories, each right by checksum and generation.
#[test]
fn devices_that_were_each_written_to_alone_are_not_opened_together() {
    let raid1 = Some(ubtrfs_ondisk::block_group::BlockGroupFlags::RAID1);
    let options = MkfsOptions { data_profile: raid1, ..MkfsOptions::default() };
    for commits in 1..4 {
        let devices: Vec<_> = (0..2).map(|_| Arc::new(RecordingDevice::new(80 << 20))).collect();
        let as_devices = |devices: &[Arc<RecordingDevice>]| -> Vec<Arc<dyn Device>> {
            devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
        };
        let volume = mkfs(as_devices(&devices), &options, &runtime()).unwrap();
        drop(Filesystem::open(volume, open_options()).unwrap());
        let degraded = VolumeOptions { degraded: true, ..VolumeOptions::default() };
        for (value, alone) in devices.chunks(1).enumerate() {
            let volume = Volume::open(as_devices(alone), &degraded).unwrap();
            let fs = Filesystem::open(volume, open_options()).unwrap();
            for number in 0..commits {
                insert(&fs, key(number, 0), &[u8::try_from(value).unwrap(); 8]);
                fs.commit().unwrap();
            }
        }
        for options in [VolumeOptions::default(), VolumeOptions { read_only: true, ..degraded }] {
            let left_out = Volume::open(as_devices(&devices), &options);
            let left_out = left_out.map(|volume| volume.left_out().len());
            assert!(matches!(left_out, Ok(1)) == options.degraded, "{left_out:?}");
        }
        let read_only = VolumeOptions { read_only: true, ..VolumeOptions::default() };
        let error = Volume::open(as_devices(&devices), &read_only).unwrap_err();
        assert!(error.to_string().contains("out of date"), "{error}");
    }
}
