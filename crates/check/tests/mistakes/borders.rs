//! What lies in two leaves, where no single block shows it: 10, 16 and 17 again.

use ubtrfs_check::Finding;
use ubtrfs_ondisk::file_extent::FileExtentItem;
use ubtrfs_ondisk::{InodeNo, Key, KeyType, LogicalAddr, RootId};
use ubtrfs_testkit::corpus::kernel_image;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, Prng, oracle};

use crate::common::image::{Image, Place};

/// A filesystem with one file of thousands of extents, so that all trees have many leaves.
fn fragmented() -> Option<Image> {
    if !oracle::require(Oracle::KernelBtrfs) {
        return None;
    }
    Some(Image::of_file(&kernel_image("fragmented")?.devices[0]))
}

/// A filesystem with one long extent, whose checksums go on from leaf to leaf. Those of the fragmented
/// file do so only if the kernel happened to lay some of it side by side.
fn contiguous() -> Option<Image> {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs]) {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    MkfsBtrfs::new().options("-m single -d single").size_bytes(1 << 30).make(&image);
    let mount = KernelMount::read_write(&image, "noatime");
    std::fs::write(mount.path().join("long"), Prng::new(3).bytes(48 << 20)).unwrap();
    mount.unmount();
    Some(Image::of_file(&image))
}

/// Two items that follow each other in two leaves.
fn over_a_border(image: &Image, root: RootId, fits: impl Fn(&Place, &Place) -> bool) -> [Place; 2] {
    let items = image.items(root);
    let pairs = items.windows(2).filter(|pair| pair[0].block != pair[1].block);
    let mut pairs = pairs.map(|pair| [pair[0].clone(), pair[1].clone()]);
    pairs.find(|[before, after]| fits(before, after)).expect("there is such a border")
}

#[test]
fn mistake_10_extents_that_overlap_over_a_border_are_found() {
    let Some(image) = fragmented() else { return };
    let [before, after] = over_a_border(&image, RootId::EXTENT_TREE, |before, after| {
        before.key.ty == KeyType::EXTENT_ITEM
            && after.key.ty == KeyType::EXTENT_ITEM
            && before.key.objectid.0 + before.key.offset == after.key.objectid.0
    });
    let key = Key { offset: before.key.offset + 4096, ..before.key };
    image.edit_leaf(before.block, |leaf| leaf.set_key(before.slot, key));
    let found = image.expect(&[
        "extent-overlap",
        "extent-disagrees",
        "group-used",
        "superblock-bytes-used",
    ]);
    assert_eq!(
        found[0],
        Finding::ExtentOverlap {
            bytenr: LogicalAddr(after.key.objectid.0),
            previous: LogicalAddr(before.key.objectid.0),
            previous_bytes: key.offset,
        }
    );
}

#[test]
fn mistake_16_checksums_that_overlap_over_a_border_are_found() {
    let Some(image) = contiguous() else { return };
    let end = |item: &Place| item.key.offset + item.data.len() as u64 / 4 * 4096;
    let items = image.items(RootId::CSUM_TREE);
    // The last item of a leaf gets one sector more, which the first of the next leaf has too.
    let pair = items
        .windows(2)
        .find(|pair| pair[0].block != pair[1].block && end(&pair[0]) == pair[1].key.offset);
    let Some([before, after]) = pair else { panic!("no checksums go on over a border") };
    image.edit_leaf(before.block, |leaf| {
        let len = before.data.len();
        leaf.resize(before.slot, len + 4)[len..].copy_from_slice(&after.data[..4]);
    });
    let found = image.expect(&["csum-overlap"]);
    let previous_end = LogicalAddr(end(before) + 4096);
    assert_eq!(found[0], Finding::CsumOverlap { key: after.key, previous_end });
}

#[test]
fn mistake_17_file_extents_that_overlap_over_a_border_are_found() {
    let Some(image) = fragmented() else { return };
    let [before, after] = over_a_border(&image, RootId::FS_TREE, |before, after| {
        before.key.objectid == after.key.objectid
            && before.key.ty == KeyType::EXTENT_DATA
            && after.key.ty == KeyType::EXTENT_DATA
    });
    image.edit::<FileExtentItem>(&before, |item| item.num_bytes += 8192);
    // It reaches over its extent's end too, and counts in the sum of the inode's bytes; behind its
    // data there are checksums of another or none.
    let report = image.check();
    let inode = InodeNo(before.key.objectid.0);
    let overlap = Finding::FileExtentOverlap {
        root: RootId::FS_TREE,
        block: after.block,
        inode,
        offset: after.key.offset,
        previous_end: before.key.offset + 4096 + 8192,
    };
    assert!(report.errors().any(|finding| *finding == overlap), "{overlap}");
    let others = ["file-extent-overlap", "file-extent-field", "inode-nbytes", "csum-missing"];
    assert!(report.errors().all(|finding| others.contains(&finding.kind())));
}
