//! Files that are accessed as memory, and what others do to them meanwhile; space for a file that there is not.

mod common;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use common::full::{create, make, noise, open, read};
use common::judge;
use ubtrfs_engine::{DataFile, Error, Filesystem, MkfsOptions, OpenOptions, SnapshotOptions, mkfs};
use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Runtime;
use ubtrfs_testkit::{KernelMount, Oracle, Prng, command, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

const LEN: u64 = 1 << 20;
const KINDS: [(&str, u64); 3] =
    [("plain", 0), ("packed", flags::COMPRESS), ("in place", flags::NODATACOW | flags::NODATASUM)];

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn store(file: &DataFile, offset: u64, bytes: &[u8]) {
    file.map(at(0), LEN).unwrap().store(at(offset), bytes).unwrap();
}

/// What an msync of a part had made durable was the whole length of the file, of which the rest was not on the medium yet: after a
/// crash it read as zeros.
#[test]
fn msync_of_a_part_leaves_no_length_whose_bytes_are_missing() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bits) in KINDS {
        let image = dir.path().join(name);
        make(&image, 512 << 20);
        let fs = open(&image);
        let file = create(&fs, name, bits).unwrap();
        let bytes = noise(&mut Prng::new(1), LEN);
        file.write(at(0), &bytes).unwrap();
        // From the middle: what is before it in the file is promised with it.
        let part = FileRange::with_len(at(LEN / 2), 4096);
        file.map(at(0), LEN).unwrap().msync(part).unwrap();
        let copy = dir.path().join("as the power went");
        std::fs::copy(&image, &copy).unwrap();
        drop((file, fs));
        judge(&copy);
        let fs = open(&copy);
        let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
        let kept = read(&fs, id);
        assert!(kept.len() as u64 >= part.end.bytes(), "{name}: {} bytes", kept.len());
        assert!(kept == bytes[..kept.len()], "{name}: not what was written");
    }
}

/// Stores beside all that takes mappings from under a map.
#[test]
fn stores_through_a_map_go_to_the_file_alone_whatever_is_done_to_its_extents() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let top = fs.top_level();
    let disk = ubtrfs_ondisk::FileOffset;
    let mut expected = Vec::new();
    for (name, bits) in KINDS {
        let file = create(&fs, name, bits).unwrap();
        let copy_name = format!("copy of {name}");
        let copy = create(&fs, &copy_name, bits).unwrap().id();
        let mut bytes = noise(&mut Prng::new(1), LEN);
        file.write(at(0), &bytes).unwrap();
        file.fsync().unwrap();
        let map = file.map(at(0), LEN).unwrap();
        let put = |bytes: &mut Vec<u8>, offset: usize, byte: u8| {
            map.fault_for_write(at(offset as u64)).unwrap();
            map.store(at(offset as u64), &[byte; 100]).unwrap();
            bytes[offset..offset + 100].fill(byte);
        };
        put(&mut bytes, 10_000, 1);
        fs.clone_range(file.id(), disk(0)..disk(LEN), copy, disk(0)).unwrap();
        let cloned = bytes.clone();
        put(&mut bytes, 10_050, 2);
        let snapshot_name = format!("snapshot at {name}");
        let snapshot = snapshot_name.as_bytes();
        let root = fs.snapshot(top.root, top, snapshot, &SnapshotOptions::default()).unwrap();
        let shown = bytes.clone();
        put(&mut bytes, 10_100, 3);
        file.punch_hole(at(200_000), 100_000).unwrap();
        bytes[200_000..300_000].fill(0);
        put(&mut bytes, 250_000, 4);
        file.truncate(at(500_000)).unwrap();
        assert!(map.store(at(600_000), &[5]).is_err(), "{name}: beyond the end");
        file.truncate(at(LEN)).unwrap();
        bytes[500_000..].fill(0);
        put(&mut bytes, 700_000, 6);
        map.msync(FileRange::from(at(0))).unwrap();
        assert!(read(&fs, file.id()) == bytes, "{name}");
        assert!(read(&fs, copy) == cloned, "{copy_name}");
        let inside = fs.lookup(root, name.as_bytes()).unwrap();
        assert!(read(&fs, inside) == shown, "{snapshot_name}");
        store(&file, 20_000, &[7; 10]);
        bytes[20_000..20_010].fill(7);
        expected.push((name.to_owned(), bytes));
        expected.push((copy_name, cloned));
        expected.push((format!("{snapshot_name}/{name}"), shown));
    }
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
    let fs = open(&image);
    for (path, bytes) in expected {
        let id = fs.resolve(fs.top_level(), path.as_bytes()).unwrap();
        assert!(read(&fs, id) == bytes, "{path}");
    }
}

fn available(image: &Path) -> Option<String> {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
        return None;
    }
    let mount = KernelMount::read_write(image, "");
    let output =
        command("fallocate").args(["-l", "1T"]).arg(mount.path().join("large")).output().unwrap();
    mount.unmount();
    Some(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// It filled the filesystem before it said that there is no space.
#[test]
fn allocation_of_more_than_there_is_takes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let file = create(&fs, "large", 0).unwrap();
    file.write(at(0), &[1; 5000]).unwrap();
    fs.sync().unwrap();
    let before = fs.statfs(fs.top_level().root).unwrap();
    for reach in [Reach::Stays, Reach::Extends] {
        let result = file.allocate(at(0), 1 << 40, reach);
        assert!(matches!(result, Err(Error::NoSpace { .. })), "{result:?}");
    }
    fs.sync().unwrap();
    let after = fs.statfs(fs.top_level().root).unwrap();
    assert_eq!(before.blocks_available, after.blocks_available);
    assert_eq!(file.size(), at(5000));
    // All but what is asked for at once is there still.
    file.allocate(at(0), after.blocks_available * after.block_bytes / 2, Reach::Stays).unwrap();
    drop((file, fs));
    judge(&image);
    if let Some(said) = available(&image) {
        assert!(said.contains("No space left on device"), "{said}");
    }
}

/// With two copies of all data half of what the devices have is enough for nothing more: chunks were made of all of it, and then it was
/// said that there is no space, with none left for metadata.
#[test]
fn chunks_are_not_made_in_vain_where_data_is_stored_twice() {
    let dir = tempfile::tempdir().unwrap();
    let devices: Vec<Arc<dyn Device>> = ["a", "b"]
        .map(|name| dir.path().join(name))
        .iter()
        .map(|path| {
            File::create(path).unwrap().set_len(2 << 30).unwrap();
            let device = FileDevice::open(path, OpenMode::ReadWrite, Window::Whole).unwrap();
            Arc::new(device) as Arc<dyn Device>
        })
        .collect();
    let raid1 = Some(BlockGroupFlags::RAID1);
    let options =
        MkfsOptions { data_profile: raid1, metadata_profile: raid1, ..MkfsOptions::default() };
    let volume = mkfs(devices, &options, &Arc::new(Runtime::system())).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let file = create(&fs, "large", 0).unwrap();
    let allocated = || {
        fs.sync().unwrap();
        fs.usage().unwrap().allocated_bytes
    };
    let before = allocated();
    let result = file.allocate(at(0), 3 << 30, Reach::Extends);
    assert!(matches!(result, Err(Error::NoSpace { .. })), "{result:?}");
    assert_eq!(allocated(), before);
    file.allocate(at(0), 1 << 30, Reach::Extends).unwrap();
    assert!(allocated() > before);
}

/// What was written to allocated space and zeroed before it was stored had said where the file ends: once it was closed, it was empty.
#[test]
fn file_zeroed_before_it_was_stored_keeps_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 512 << 20);
    let fs = open(&image);
    let mut expected = Vec::new();
    for (name, zeroed) in [("whole", 0..LEN), ("end", LEN - 8192..LEN)] {
        let file = create(&fs, name, 0).unwrap();
        file.allocate(at(0), LEN, Reach::Stays).unwrap();
        fs.commit().unwrap();
        let mut bytes = noise(&mut Prng::new(7), LEN);
        file.write(at(0), &bytes).unwrap();
        file.allocate_zeroed(at(zeroed.start), zeroed.end - zeroed.start, Reach::Stays).unwrap();
        bytes[zeroed.start as usize..zeroed.end as usize].fill(0);
        expected.push((file.id(), bytes));
    }
    // Closed, and then written back as what is old is.
    fs.write_back_due(0);
    fs.write_back_due(100_000);
    fs.drop_clean_data();
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
    let fs = open(&image);
    for (id, bytes) in expected {
        assert!(read(&fs, id) == bytes, "{} bytes", fs.inode(id).unwrap().size_bytes);
    }
}
