//! Checksums that somebody left of space that is free.

use ubtrfs_ondisk::{FileOffset, LogicalAddr, RootId};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::crash::SimDevice;
use ubtrfs_testkit::{KernelMount, Oracle, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use super::*;
use crate::{Filesystem, InodeId, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs};

const SECTOR: u64 = 4096;
const FILE_BYTES: usize = 3 << 20;

fn open(device: &Arc<SimDevice>) -> Filesystem {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
    let options =
        OpenOptions { runtime: Arc::new(Runtime::simulated(1)), ..OpenOptions::default() };
    Filesystem::open(volume, options).unwrap()
}

fn bytes_of(byte: u8) -> Vec<u8> {
    (0..FILE_BYTES).map(|at| byte ^ (at / 4096) as u8).collect()
}

fn make(fs: &Filesystem, name: &str, byte: u8) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(fs.top_level(), name.as_bytes(), &new).unwrap();
    drop(handle);
    fs.write(id, FileOffset(0), &bytes_of(byte)).unwrap();
    id
}

fn read(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), FILE_BYTES);
    bytes
}

/// What was new there was compared with checksums of what had been there; items came to lie over each other, which neither Linux nor this
/// reads; or the commit failed, each time.
#[test]
fn data_comes_to_space_of_which_there_are_checksums_still() {
    // Of a few sectors, apart; of more than one item holds, with one that is full; of all.
    for (len, step) in [(3, 40), (1, 2), (4000, 4001), (700, 700)] {
        let device = Arc::new(SimDevice::new(256 << 20));
        let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
        let runtime = Arc::new(Runtime::simulated(1));
        drop(mkfs(devices, &MkfsOptions::default(), &runtime).unwrap());
        let fs = open(&device);
        let kept = make(&fs, "kept", 1);
        fs.commit().unwrap();
        let group =
            fs.volume().chunks().into_iter().find(|chunk| {
                chunk.flags.contains(ubtrfs_ondisk::block_group::BlockGroupFlags::DATA)
            });
        let group = group.unwrap();
        let extents = fs.file_extents(kept, FileOffset(0)).unwrap().map(Result::unwrap);
        let used = extents.map(|extent| extent.disk_bytenr.0 + extent.disk_num_bytes).max();
        let (mut at, end) = (used.unwrap() + SECTOR, group.start.0 + group.len_bytes);
        let mut count = 0;
        while at < end {
            let sectors = len.min((end - at) / SECTOR);
            let mut handle = fs.begin(Reservation::items(4)).unwrap();
            let stale = vec![0x5a; 4 * sectors as usize];
            handle.txn.insert(RootId::CSUM_TREE, csum_key(LogicalAddr(at)), &stale).unwrap();
            at += step * SECTOR;
            count += 1;
        }
        fs.commit().unwrap();
        drop(fs);

        let what = format!("{count} items of {len} sectors, each {step}");
        let fs = open(&device);
        let ids = [2, 3].map(|byte| make(&fs, &format!("file {byte}"), byte));
        for (id, byte) in ids.into_iter().zip([2, 3]) {
            assert!(read(&fs, id) == bytes_of(byte), "before the commit, {what}");
        }
        let extents = fs.file_extents(ids[0], FileOffset(0)).unwrap().map(Result::unwrap);
        assert!(extents.into_iter().any(|extent| extent.disk_bytenr.0 < end), "not there, {what}");
        fs.commit().unwrap();
        drop(fs);
        let fs = open(&device);
        for (id, byte) in [kept].into_iter().chain(ids).zip([1, 2, 3]) {
            assert!(read(&fs, id) == bytes_of(byte), "opened again, {what}");
        }
        drop(fs);
        if oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root]) {
            let directory = tempfile::tempdir_in("/dev/shm").unwrap();
            let image = directory.path().join("image");
            device.write_image(&image);
            let mount = KernelMount::read_only(&image, "");
            for (name, byte) in [("kept", 1), ("file 2", 2), ("file 3", 3)] {
                let found = std::fs::read(mount.path().join(name)).unwrap();
                assert!(found == bytes_of(byte), "{name} by the kernel, {what}");
            }
        }
    }
}
