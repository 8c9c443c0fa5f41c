//! 12 and 15: devices, their superblocks and the chunks on them.

use ubtrfs_check::Finding;
use ubtrfs_ondisk::DeviceId;
use ubtrfs_testkit::{CheckMode, Oracle, oracle};

use crate::common::image::Image;

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
