//! 12 and 15: devices, their superblocks and the chunks on them.

use std::sync::Arc;

use ubtrfs_check::{CheckOptions, Finding};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::chunk::{ChunkHeader, Stripe};
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::{DeviceId, KeyType, RootId};
use ubtrfs_testkit::{CheckMode, KernelMount, MkfsBtrfs, Oracle, Prng, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use crate::common;
use crate::common::image::{Base, Image, Place};

const DEVICE: DeviceId = DeviceId(1);

/// Linux up to 6.15 does not bring a superblock's own count up in a commit that drops a chunk and makes
/// none: such filesystems were called damaged. `btrfs check` takes them for clean, too.
#[test]
fn device_of_whose_bytes_its_superblock_says_other_than_the_chunk_tree_is_noted() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let expect = image.superblock().dev_item.bytes_used.get();
    let have = expect + (8 << 20);
    image.edit_super(|superblock| superblock.dev_item.bytes_used = have.into());
    let (device, field) = (DEVICE, "bytes_used");
    assert_eq!(
        image.expect_notes(&["device-superblock"]),
        [Finding::DeviceSuperblock { device, field, have, expect }]
    );
    assert!(image.theirs(CheckMode::Original).is_clean);

    let image = Image::single();
    let expect = image.superblock().dev_item.total_bytes.get();
    let have = expect - 4096;
    image.edit_super(|superblock| superblock.dev_item.total_bytes = have.into());
    let field = "total_bytes";
    assert_eq!(
        image.expect_notes(&["device-superblock"]),
        [Finding::DeviceSuperblock { device, field, have, expect }]
    );
}

/// Linux mounts a filesystem whose superblock counts more bytes than its devices have, and refuses one that
/// counts fewer: both were called damage.
#[test]
fn bytes_of_all_devices_that_the_superblock_counts_wrongly_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let edit = |superblock: &mut Superblock, have: u64| {
        superblock.total_bytes = have.into();
        let generation = superblock.generation;
        let own = superblock.super_roots.iter_mut().filter(|it| it.tree_root_gen == generation);
        own.for_each(|backup| backup.total_bytes = have.into());
    };
    let image = Image::single();
    let expect = image.superblock().total_bytes.get();
    let have = expect + (1 << 20);
    image.edit_super(|superblock| edit(superblock, have));
    assert_eq!(
        image.expect_notes(&["superblock-total-bytes"]),
        [Finding::SuperblockTotalBytes { have, expect }]
    );
    assert!(image.is_mounted());

    let image = Image::single();
    let have = expect - (1 << 20);
    image.edit_super(|superblock| edit(superblock, have));
    let (field, have, expect) = ("total_bytes", have.to_string(), format!("at least {expect}"));
    assert_eq!(
        image.expect(&["superblock-field"]),
        [Finding::SuperblockField { field, have, expect }]
    );
    assert!(!image.is_mounted());
}

/// Checks the first of two devices alone, with file data.
fn check_degraded(mkfs: &str) -> (u64, Vec<Finding>) {
    let directory = tempfile::tempdir().unwrap();
    let images = [directory.path().join("1"), directory.path().join("2")];
    MkfsBtrfs::new().options(mkfs).size_bytes(256 << 20).make_on(&images);
    let mounted = KernelMount::mount(&images, "", false).unwrap();
    let len_bytes = 2 << 20;
    std::fs::write(mounted.path().join("file"), Prng::new(3).bytes(len_bytes)).unwrap();
    mounted.unmount();
    let device = FileDevice::open(&images[0], OpenMode::ReadOnly, Window::Whole).unwrap();
    let options = VolumeOptions { read_only: true, degraded: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![Arc::new(device) as Arc<dyn Device>], &options).unwrap();
    let options = CheckOptions { data: true, ..CheckOptions::default() };
    let report = common::check_twice(&volume, &options).unwrap();
    (report.statistics.data_read_bytes, report.errors().cloned().collect())
}

/// Data of which a missing device had the only copy was called clean.
#[test]
fn data_that_only_a_missing_device_had_is_found() {
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let (read_bytes, found) = check_degraded("-m raid1 -d raid0");
    assert_eq!(read_bytes, 1 << 20);
    let lost = found.iter().map(|finding| match finding {
        Finding::DataUnreadable { len_bytes, mirror: 0, .. } => *len_bytes,
        other => panic!("{other}"),
    });
    assert_eq!(lost.sum::<u64>(), 1 << 20);
    // Where there is a copy, nothing is lost.
    assert_eq!(check_degraded("-m raid1 -d raid1"), (2 << 20, Vec::new()));
}

/// What a check says where one item of the chunk tree is wrong.
fn kinds_with(image: &Image, of: BlockGroupFlags, edit: impl Fn(&Image, &Place)) -> Vec<String> {
    let place = image.find(RootId::CHUNK_TREE, |key, data| {
        key.ty == KeyType::CHUNK_ITEM && data[24..32] == of.0.to_le_bytes()
    });
    edit(image, &place);
    let report = image.check();
    let errors: Vec<Finding> = report.errors().cloned().collect();
    let of_chunk = errors.iter().filter(
        |finding| matches!(finding, Finding::BadChunk { chunk, .. } if chunk.0 == place.key.offset),
    );
    assert_eq!(of_chunk.count(), 1, "\n{}", common::lines(&report));
    errors.iter().map(|finding| finding.kind().to_owned()).collect()
}

/// One such chunk ended the whole check, as if a device were missing.
#[test]
fn chunk_on_a_device_that_the_filesystem_has_not_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let kinds = kinds_with(&image, BlockGroupFlags::DATA, |image, place| {
        image.edit_behind::<Stripe>(place, 48, |stripe| stripe.devid = 257.into());
    });
    assert!(!image.is_mounted());
    assert_eq!(kinds[..3], ["bad-chunk", "dev-extent-missing", "dev-extent-without-chunk"]);
    // Where its data is nobody knows.
    assert!(kinds[3..].iter().all(|kind| kind == "data-unreadable"), "{kinds:?}");
}

/// One such chunk ended the whole check, as a profile that is not supported.
#[test]
fn chunk_of_raid5_in_a_filesystem_without_it_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    // With stripes too few, and with as many as there may be.
    let image = Image::single();
    let kinds = kinds_with(&image, BlockGroupFlags::DATA, |image, place| {
        image.edit::<ChunkHeader>(place, |chunk| chunk.ty |= BlockGroupFlags::RAID5.0);
    });
    assert!(!image.is_mounted());
    assert!(kinds.iter().any(|kind| kind == "feature-missing"), "{kinds:?}");
    let dup = BlockGroupFlags::METADATA | BlockGroupFlags::DUP;
    let kinds = kinds_with(&Image::of(Base::Dup), dup, |image, place| {
        let raid5 = BlockGroupFlags::METADATA | BlockGroupFlags::RAID5;
        image.edit::<ChunkHeader>(place, |chunk| chunk.ty = raid5.0.into());
    });
    assert_eq!(kinds[..2], ["feature-missing", "bad-chunk"]);
}
