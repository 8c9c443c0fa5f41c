//! Space that comes and goes: groups made and removed, devices grown, images with holes.

mod common;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{judge, open_for_writing};
use ubtrfs_engine::{
    Error, Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs,
};
use ubtrfs_iomap::Reach;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::{DeviceId, FileOffset, LogicalAddr};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    KernelMount, LoopDevice, MkfsBtrfs, Oracle, Prng, assert_checks_clean, command, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const MIB: u64 = 1 << 20;

fn make(image: &Path, len_bytes: u64) -> Filesystem {
    let mode = OpenMode::CreateNew { len_bytes };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

fn create(fs: &Filesystem, name: &str, len: usize, random: &mut Prng) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
    drop(handle);
    fs.write(id, FileOffset(0), &random.bytes(len)).unwrap();
    id
}

fn data_groups(fs: &Filesystem) -> u64 {
    let usage = fs.usage().unwrap();
    let data = usage.spaces.iter().filter(|space| space.flags.contains(BlockGroupFlags::DATA));
    data.map(|space| space.total_bytes).sum()
}

#[test]
fn groups_that_become_empty_are_removed_and_their_space_is_used_again() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let fs = make(&image, 500 * MIB);
    let mut random = Prng::of_test(3);
    for round in 0..3 {
        for number in 0..6 {
            create(&fs, &format!("{round} {number}"), 50 << 20, &mut random);
        }
        fs.commit().unwrap();
        let many = data_groups(&fs);
        assert!(many >= 300 * MIB, "{many}");
        for number in 0..6 {
            fs.unlink(fs.top_level(), format!("{round} {number}").as_bytes()).unwrap();
        }
        fs.commit().unwrap();
        // What was freed by the last commit can go now.
        create(&fs, &format!("small {round}"), 10_000, &mut random);
        fs.commit().unwrap();
        let left = data_groups(&fs);
        // Small files may keep some; an empty one stays.
        assert!(left + 150 * MIB <= many, "{left} bytes of {many} stayed");
    }
    drop(fs);
    judge(&image);
}

/// Metadata was promised three blocks for each stretch of checksums that waited to be entered, however many waited: for so many blocks
/// of an allocated file, written here and there between two commits, groups of metadata were made that held nothing.
#[test]
fn blocks_written_here_and_there_make_no_groups_of_metadata() {
    const BLOCKS: u64 = 8000;
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let fs = make(&image, 16 << 30);
    let id = create(&fs, "file", 0, &mut Prng::of_test(5));
    let file = fs.open_data(id).unwrap();
    file.allocate(ubtrfs_iomap::FileOffset::ZERO, BLOCKS * 8192, Reach::Extends).unwrap();
    fs.commit().unwrap();
    let metadata = || {
        let usage = fs.usage().unwrap();
        let is_metadata = |flags: BlockGroupFlags| flags.contains(BlockGroupFlags::METADATA);
        let spaces = usage.spaces.iter().filter(|space| is_metadata(space.flags));
        spaces.map(|space| space.total_bytes).sum::<u64>()
    };
    let before = metadata();
    for block in 0..BLOCKS {
        let at = ubtrfs_iomap::FileOffset::new(block * 8192);
        file.write(at, &[block.to_le_bytes()[0]; 4096]).unwrap();
    }
    fs.flush_files().unwrap();
    // As an operation that takes space does.
    create(&fs, "other", 0, &mut Prng::of_test(5));
    assert_eq!(metadata(), before);
    file.fsync().unwrap();
    assert_eq!(metadata(), before);
    drop((file, fs));
    judge(&image);
}

#[test]
fn discard_gives_holes_back_to_the_image() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    drop(make(&image, 300 * MIB));
    let open = |discard| {
        let device = FileDevice::open(&image, OpenMode::ReadWrite, Window::Whole).unwrap();
        let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
        let options = OpenOptions { discard, ..OpenOptions::default() };
        Filesystem::open(volume, options).unwrap()
    };
    let mut random = Prng::of_test(4);
    let fs = open(true);
    create(&fs, "file", 30 << 20, &mut random);
    create(&fs, "kept", 1 << 20, &mut random);
    fs.commit().unwrap();
    let full = image.metadata().unwrap().blocks();
    fs.unlink(fs.top_level(), b"file").unwrap();
    fs.commit().unwrap();
    drop(fs);
    let freed = full.saturating_sub(image.metadata().unwrap().blocks()) * 512;
    assert!(freed >= 30 << 20, "{freed}");
    judge(&image);
}

#[test]
fn label_and_size_are_what_the_kernel_says() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let fs = make(&image, 200 * MIB);
    fs.set_label(b"a label").unwrap();
    fs.commit().unwrap();
    assert_eq!(fs.superblock().label(), b"a label");
    assert!(matches!(fs.set_label(&[b'x'; 256]), Err(Error::TooLong { .. })));
    assert!(matches!(fs.set_label(b"two\nlines"), Err(Error::InvalidArgument { .. })));
    let less = fs.grow_device(DeviceId(1), 100 * MIB);
    assert!(matches!(less, Err(Error::InvalidArgument { .. })), "{less:?}");
    fs.grow_device(DeviceId(1), 400 * MIB + 100).unwrap();
    fs.commit().unwrap();
    let mut random = Prng::of_test(5);
    create(&fs, "file", 220 << 20, &mut random);
    fs.commit().unwrap();
    drop(fs);
    assert_eq!(image.metadata().unwrap().len(), 400 * MIB);
    judge(&image);
    if oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::BtrfsProgs]) {
        let mount = KernelMount::read_write(&image, "");
        let show = ["filesystem".as_ref(), "show".as_ref(), mount.path().as_os_str()];
        let said = run("btrfs", show);
        assert!(said.contains("a label") && said.contains("400.00MiB"), "{said}");
        mount.unmount();
        drop(open_for_writing(&image));
    }
}

#[test]
fn delayed_refs_are_timed() {
    let directory = tempfile::tempdir().unwrap();
    let fs = make(&directory.path().join("image"), 200 * MIB);
    assert_eq!(fs.delayed_ref_times().count, 0);
    let mut random = Prng::of_test(6);
    create(&fs, "file", 1 << 20, &mut random);
    fs.commit().unwrap();
    let times = fs.delayed_ref_times();
    assert!(times.count > 3, "{times:?}");
    assert!(times.median_ns <= times.p90_ns && times.p90_ns <= times.p99_ns);
    assert!(times.p99_ns <= times.max_ns.max(1) && times.mean_ns > 0.0);
    assert_eq!(times.buckets.iter().map(|(_, count)| count).sum::<u64>(), times.count);
}

/// The first change of a large filesystem read an item of each chunk, each in another leaf.
#[test]
fn first_change_reads_no_more_where_the_kernel_has_filled_many_groups() {
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    const PIECE_BYTES: u64 = 16 * MIB;
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let reads_with = |gibibytes: u64| {
        let image = directory.path().join(format!("of {gibibytes}"));
        MkfsBtrfs::new().options("-n 4096 -m single").size_bytes(64 << 30).make(&image);
        let mount = KernelMount::read_write(&image, "");
        for number in 0..gibibytes {
            let file = std::fs::File::create(mount.path().join(format!("f{number}"))).unwrap();
            for piece in 0..(1 << 30) / PIECE_BYTES {
                let flags = rustix::fs::FallocateFlags::empty();
                rustix::fs::fallocate(&file, flags, piece * PIECE_BYTES, PIECE_BYTES).unwrap();
            }
        }
        mount.unmount();

        let fs = open_for_writing(&image);
        let before = fs.blocks_read();
        create(&fs, "inline", 100, &mut Prng::of_test(7));
        fs.commit().unwrap();
        let small = fs.blocks_read() - before;
        // What is freed lies in one or two groups.
        fs.unlink(fs.top_level(), b"f3").unwrap();
        fs.commit().unwrap();
        let freeing = fs.blocks_read() - before - small;
        create(&fs, "data", 100_000, &mut Prng::of_test(8));
        fs.commit().unwrap();
        drop(fs);
        assert_checks_clean(&image);
        let mount = KernelMount::read_write(&image, "");
        assert_eq!(std::fs::read(mount.path().join("data")).unwrap().len(), 100_000);
        assert!(!mount.path().join("f3").exists());
        std::fs::remove_file(mount.path().join("f1")).unwrap();
        mount.unmount();
        assert_checks_clean(&image);
        std::fs::remove_file(&image).unwrap();
        (small, freeing)
    };
    let (few, many) = (reads_with(4), reads_with(40));
    println!("{few:?} blocks with 4 groups, {many:?} with 40");
    assert!(many.0 <= few.0 + 4, "a small change: {few:?}, {many:?}");
    assert!(many.1 <= few.1 + 8, "a file freed: {few:?}, {many:?}");
}

fn open_all(images: &[PathBuf]) -> Filesystem {
    let devices = images.iter().map(|image| {
        let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
        Arc::new(device) as Arc<dyn Device>
    });
    let volume = Volume::open(devices.collect(), &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, OpenOptions::default()).unwrap()
}

/// The profiles of the groups that a file lies in.
fn profiles_of(fs: &Filesystem, id: InodeId) -> BTreeSet<u64> {
    let chunks = fs.volume().chunks();
    let extents = fs.file_extents(id, FileOffset(0)).unwrap().map(Result::unwrap);
    let places = extents.filter(|extent| extent.disk_num_bytes > 0);
    places
        .map(|extent| {
            let chunk = chunks.iter().rfind(|chunk| chunk.start <= extent.disk_bytenr).unwrap();
            chunk.flags.profile().0
        })
        .collect()
}

/// After half a conversion, in each direction, data came to whatever group had room, and new groups were as the last one was.
#[test]
fn what_is_new_after_half_a_conversion_lies_where_the_kernel_puts_it() {
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    let (raid0, raid1) = (BlockGroupFlags::RAID0.0, BlockGroupFlags::RAID1.0);
    for (from, to, expected) in [
        ("raid1", "single", raid1),
        ("single", "raid1", raid1),
        ("raid0", "raid1", raid1),
        ("single", "raid0", raid0),
    ] {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let images = |name: &str| [1, 2].map(|part| dir.path().join(format!("{name} {part}")));
        let made = images("made");
        let options = format!("-d {from} -m raid1");
        MkfsBtrfs::new().options(&options).size_bytes(1 << 30).make_on(&made);
        let mount = KernelMount::mount(&made, "", false).unwrap();
        // Of more than one group, of which one is converted.
        let file = mount.path().join("old");
        run("fallocate", ["-l".as_ref(), "300M".as_ref(), file.as_os_str()]);
        let convert = format!("-dconvert={to},limit=1");
        let arguments = ["balance", "start", "-f", &convert].map(OsStr::new);
        run("btrfs", arguments.into_iter().chain([mount.path().as_os_str()]));
        mount.unmount();

        let what = format!("{from} to {to}");
        let [theirs, ours] = write_new(&made, "", 80 << 20);
        assert_eq!(ours.lies_in, theirs.lies_in, "{what}");
        assert_eq!(ours.lies_in, BTreeSet::from([expected]), "{what}");
    }
}

/// Where a new file went.
#[derive(PartialEq, Eq, Debug)]
struct Went {
    /// Profiles of the groups that it lies in.
    lies_in: BTreeSet<u64>,
    /// Of those that were made for it.
    made: BTreeSet<u64>,
}

impl Went {
    fn to(fs: &Filesystem, before: &[LogicalAddr]) -> Self {
        let id = fs.lookup(fs.top_level(), b"new").unwrap();
        let chunks = data_chunks(fs).into_iter();
        let new = chunks.filter(|chunk| !before.contains(&chunk.start));
        let made = new.map(|chunk| chunk.flags.profile().0).collect();
        Self { lies_in: profiles_of(fs, id), made }
    }
}

fn data_chunks(fs: &Filesystem) -> Vec<Arc<Chunk>> {
    let mut chunks = fs.volume().chunks();
    chunks.retain(|chunk| chunk.flags.contains(BlockGroupFlags::DATA));
    chunks
}

/// The kernel and the engine each write a new file of the same bytes to a copy of the filesystem, which both can read, and in which
/// `btrfs check` finds nothing. Returns where the kernel's went, and the engine's.
fn write_new(made: &[PathBuf; 2], options: &str, new_bytes: usize) -> [Went; 2] {
    let dir = made[0].parent().unwrap();
    let images = |name: &str| [1, 2].map(|part| dir.join(format!("{name} {part}")));
    let (theirs, ours) = (images("theirs"), images("ours"));
    for copy in [&theirs, &ours] {
        for (from, to) in made.iter().zip(copy) {
            run("cp", ["--sparse=always".as_ref(), from.as_os_str(), to.as_os_str()]);
        }
    }
    let fs = open_all(&ours);
    let before: Vec<_> = data_chunks(&fs).iter().map(|chunk| chunk.start).collect();
    create(&fs, "new", new_bytes, &mut Prng::new(1));
    fs.sync().unwrap();
    let our_place = Went::to(&fs, &before);
    drop(fs);

    let bytes = Prng::new(1).bytes(new_bytes);
    let mount = KernelMount::mount(&theirs, options, false).unwrap();
    std::fs::write(mount.path().join("new"), &bytes).unwrap();
    mount.unmount();
    let their_place = Went::to(&open_all(&theirs), &before);
    let mount = KernelMount::mount(&ours, options, true).unwrap();
    assert!(std::fs::read(mount.path().join("new")).unwrap() == bytes);
    mount.unmount();
    let devices = ours.each_ref().map(|image| LoopDevice::attach(image, true));
    for device in &devices {
        run("btrfs", ["device".as_ref(), "scan".as_ref(), device.path().as_os_str()]);
    }
    run("btrfs", ["check".as_ref(), "--readonly".as_ref(), devices[0].path().as_os_str()]);
    [their_place, our_place]
}

/// Of one that is to go on new groups are of what is converted to, though that has fewer copies.
#[test]
fn groups_made_during_a_conversion_are_of_what_is_converted_to() {
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let made = [1, 2].map(|part| dir.path().join(format!("made {part}")));
    MkfsBtrfs::new().options("-d raid1 -m raid1").size_bytes(1 << 30).make_on(&made);
    let mount = KernelMount::mount(&made, "", false).unwrap();
    std::fs::write(mount.path().join("old"), Prng::new(2).bytes(400 << 20)).unwrap();
    let btrfs = |arguments: &[&str]| {
        command("btrfs").arg("balance").args(arguments).arg(mount.path()).output().unwrap()
    };
    run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    assert!(btrfs(&["start", "--background", "-f", "-dconvert=single"]).status.success());
    // It takes a moment until there is something to pause, which then ends with the group that it is at.
    let mut tries = 0..2000;
    while !btrfs(&["pause"]).status.success() {
        assert!(tries.next().is_some(), "never to be paused");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let status = btrfs(&["status"]);
    let status = String::from_utf8_lossy(&status.stdout);
    assert!(status.contains("paused"), "{status}");
    mount.unmount();
    // More than is free of either profile.
    let [theirs, ours] = write_new(&made, "skip_balance", 500 << 20);
    assert_eq!(theirs.made, BTreeSet::from([0]));
    assert_eq!(ours.made, theirs.made);
}
