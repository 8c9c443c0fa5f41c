//! 25: the superblock.

use ubtrfs_check::Finding;
use ubtrfs_ondisk::extent::BackRef;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::FileExtentHeader;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{DeviceId, Generation, KeyType, PhysicalAddr, Reason, RootId};
use ubtrfs_testkit::{CheckMode, KernelMount, MkfsBtrfs, Oracle, btrfs_check, oracle, run};
use ubtrfs_volume::Device;

use crate::common;
use crate::common::image::Image;

const DEVICE: DeviceId = DeviceId(1);

#[test]
fn mistake_25_copy_of_another_filesystem_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    // In the primary a volume refuses it at its opening.
    let image = Image::single();
    image.edit_super_copy(1, |superblock| superblock.dev_item.fsid[0] ^= 1);
    let found = image.expect(&["superblock-copy-differs"]);
    assert!(matches!(
        &found[0],
        Finding::SuperblockCopyDiffers { device: DEVICE, copy: 1, field: "the device's fsid", .. }
    ));
}

#[test]
fn mistake_25_copy_with_the_address_of_another_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    image.edit_super_copy(1, |superblock| superblock.bytenr = SUPERBLOCK_OFFSETS[0].0.into());
    let found = image.expect(&["superblock-copy"]);
    assert!(matches!(
        &found[0],
        Finding::SuperblockCopy { device: DEVICE, copy: 1, reason: Reason::WrongBytenr, .. }
    ));

    // A torn copy.
    let image = Image::single();
    image.device.write_at(PhysicalAddr(SUPERBLOCK_OFFSETS[1].0 + 4000), b"torn").unwrap();
    let found = image.expect(&["superblock-copy"]);
    assert!(matches!(
        &found[0],
        Finding::SuperblockCopy { device: DEVICE, copy: 1, reason: Reason::CsumMismatch, .. }
    ));
}

/// Tools that restore an image write the primary alone.
#[test]
fn copy_that_was_never_written_is_noted() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    image.device.write_at(SUPERBLOCK_OFFSETS[1], &[0; 4096]).unwrap();
    assert_eq!(
        image.expect_notes(&["superblock-copy-absent"]),
        [Finding::SuperblockCopyAbsent { device: DEVICE, copy: 1 }]
    );
}

/// Of a cut between two writes nothing is wrong; of two copies that say different things of one
/// commit, one is.
#[test]
fn mistake_25_copy_that_differs_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let expect = Generation(image.superblock().generation.get());
    image.edit_super_copy(1, |superblock| superblock.generation -= 1);
    let have = Generation(expect.0 - 1);
    assert_eq!(
        image.expect_notes(&["superblock-copy-stale"]),
        [Finding::SuperblockCopyStale { device: DEVICE, copy: 1, have, expect }]
    );

    let image = Image::single();
    image.edit_super_copy(1, |superblock| superblock.root += 16_384);
    let found = image.expect(&["superblock-copy-differs"]);
    assert!(matches!(
        &found[0],
        Finding::SuperblockCopyDiffers { device: DEVICE, copy: 1, field: "root", .. }
    ));
}

/// All that a commit writes is compared, but for the log: Linux writes that in the primary alone.
#[test]
fn mistake_25_any_field_of_a_copy_that_differs_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    type Edit = fn(&mut Superblock);
    let edits: [(&str, Edit); 9] = [
        ("chunk_root_level", |it| it.chunk_root_level += 1),
        ("nodesize", |it| it.nodesize = 4096.into()),
        ("sectorsize", |it| it.sectorsize = 8192.into()),
        ("leafsize", |it| it.leafsize = 4096.into()),
        ("stripesize", |it| it.stripesize = 8192.into()),
        ("flags", |it| it.flags ^= 1 << 32),
        ("label", |it| it.set_label(b"other").unwrap()),
        ("dev_item", |it| it.dev_item.total_bytes -= 4096),
        ("super_roots", |it| it.super_roots[0].tree_root += 4096),
    ];
    for (expect, edit) in edits {
        let image = Image::single();
        image.edit_super_copy(1, edit);
        let found = image.expect(&["superblock-copy-differs"]);
        assert!(matches!(
            &found[0],
            Finding::SuperblockCopyDiffers { device: DEVICE, copy: 1, field, .. } if *field == expect
        ));
    }
    let image = Image::single();
    image.edit_super_copy(1, |it| it.log_root_transid = 7.into());
    image.expect(&[]);
}

/// An image that was cut off behind its last block was taken for clean: Linux does not mount it.
#[test]
fn device_shorter_than_the_filesystem_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let expect = image.device.len_bytes();
    for have in [expect - 4096, expect - (8 << 20)] {
        image.device.resize(have).unwrap();
        assert_eq!(
            image.expect(&["device-too-short"]),
            [Finding::DeviceTooShort { device: DEVICE, have, expect }]
        );
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        image.save(&path);
        image.expect_theirs();
        assert!(KernelMount::mount(&[path], "", true).is_err());
    }
}

#[test]
fn mistake_25_generations_of_caches_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let generation = image.superblock().generation.get();
    image.edit_super(|superblock| superblock.cache_generation = (generation + 1).into());
    assert_eq!(
        image.expect(&["superblock-field"]),
        [Finding::SuperblockField {
            field: "cache_generation",
            have: (generation + 1).to_string(),
            expect: format!("at most {generation}"),
        }]
    );
    let image = Image::single();
    image.edit_super(|superblock| superblock.uuid_tree_generation = (generation + 1).into());
    let found = image.expect(&["superblock-field"]);
    assert!(matches!(&found[0], Finding::SuperblockField { field: "uuid_tree_generation", .. }));
}

#[test]
fn mistake_25_backup_roots_are_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let generation = image.superblock().generation;
    let own = |superblock: &ubtrfs_ondisk::superblock::Superblock| {
        superblock.super_roots.iter().position(|it| it.tree_root_gen == generation).unwrap()
    };
    let index = own(&image.superblock());
    let expect = image.superblock().chunk_root.get();
    image.edit_super(|superblock| superblock.super_roots[own(superblock)].chunk_root += 4096);
    let (field, have) = ("chunk_root", expect + 4096);
    assert_eq!(
        image.expect_notes(&["backup-root"]),
        [Finding::BackupRoot { index: index as u64, field, have, expect }]
    );
    let image = Image::single();
    image.edit_super(|superblock| superblock.super_roots[own(superblock)].tree_root_gen -= 1);
    let expect = Generation(generation.get());
    assert_eq!(
        image.expect_notes(&["backup-root-missing"]),
        [Finding::BackupRootMissing { expect }]
    );

    // That of a tree is in its root item too.
    let image = Image::single();
    let expect = image.root(ubtrfs_ondisk::RootId::FS_TREE).0;
    image.edit_super(|superblock| superblock.super_roots[own(superblock)].fs_root += 4096);
    let (field, have) = ("fs_root", expect + 4096);
    assert_eq!(
        image.expect_notes(&["backup-root"]),
        [Finding::BackupRoot { index: index as u64, field, have, expect }]
    );
}

/// Linux sets the bit when it compresses, and not when it takes in data that was compressed before:
/// an image that had received a stream of the second version was damaged by ours.
#[test]
fn compression_whose_feature_is_not_set_is_noted() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inode = image.inode(RootId::FS_TREE, "more");
    let place = image.item(RootId::FS_TREE, inode, KeyType::EXTENT_DATA, 0);
    image.edit::<FileExtentHeader>(&place, |header| header.compression = 3);
    let used_by = format!("inode {inode} of root 5");
    assert_eq!(
        image.expect_notes(&["feature-unset"]),
        [Finding::FeatureUnset { feature: "COMPRESS_ZSTD", used_by }]
    );

    let directory = tempfile::tempdir().unwrap();
    let paths = ["from", "to", "stream"].map(|name| directory.path().join(name));
    let [from, to, stream] = &paths;
    let make = |path| MkfsBtrfs::new().size_bytes(128 << 20).make(path);
    make(from);
    make(to);
    let mounted = KernelMount::read_write(from, "compress=zstd");
    let top = mounted.path().to_str().unwrap();
    std::fs::write(mounted.path().join("file"), "compressible ".repeat(30_000)).unwrap();
    run("btrfs", ["subvolume", "snapshot", "-r", top, &format!("{top}/snapshot")]);
    let stream = stream.to_str().unwrap();
    let source = format!("{top}/snapshot");
    run("btrfs", ["send", "--proto", "2", "--compressed-data", "-f", stream, &source]);
    mounted.unmount();
    let mounted = KernelMount::read_write(to, "");
    run("btrfs", ["receive", "-f", stream, mounted.path().to_str().unwrap()]);
    mounted.unmount();
    assert!(btrfs_check(to, CheckMode::Original).is_clean);
    let report = common::check_all(&common::open(&[to]));
    assert!(report.is_clean(), "{}", common::lines(&report));
    assert!(report.notes().any(|note| note.kind() == "feature-unset"));
}

/// Linux looks for a block as a METADATA_ITEM only where the feature is set, and sets the bit of
/// simple quotas, for good, before it writes who owns an extent.
#[test]
fn form_of_extents_whose_feature_is_not_set_is_found() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let first = image.find(RootId::EXTENT_TREE, |key, _| key.ty == KeyType::METADATA_ITEM);
    image.edit_super(|superblock| {
        superblock.incompat_flags &= !Incompat::SKINNY_METADATA.0;
    });
    let used_by = format!("the extent at {}", first.key.objectid);
    assert_eq!(
        image.expect(&["feature-missing"]),
        [Finding::FeatureMissing { feature: "SKINNY_METADATA", used_by }]
    );
    image.expect_theirs();

    let image = Image::single();
    let place = image.find(RootId::EXTENT_TREE, |key, _| key.ty == KeyType::EXTENT_ITEM);
    image.edit_leaf(place.block, |leaf| {
        let mut refs = Vec::new();
        BackRef::Owner { root: RootId::FS_TREE }.write_inline(&mut refs);
        refs.extend_from_slice(&place.data[24..]);
        leaf.resize(place.slot, 24 + refs.len())[24..].copy_from_slice(&refs);
    });
    let used_by = format!("the extent at {}", place.key.objectid);
    assert_eq!(
        image.expect(&["feature-missing"]),
        [Finding::FeatureMissing { feature: "SIMPLE_QUOTA", used_by }]
    );
    image.edit_super(|superblock| superblock.incompat_flags |= Incompat::SIMPLE_QUOTA.0);
    image.expect(&[]);
}

/// A power cut between the superblocks of two devices leaves the second of the commit before, which
/// says what was so then: it was called damage where that commit gave the device a chunk, or more
/// length.
#[test]
fn device_that_a_cut_kept_from_its_last_superblock_is_no_damage() {
    use std::os::unix::fs::FileExt;
    use ubtrfs_ondisk::superblock::SUPERBLOCK_BYTES;
    use zerocopy::IntoBytes;
    if !oracle::require_all(&[Oracle::MkfsBtrfs, Oracle::KernelBtrfs, Oracle::Root]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let images = [dir.path().join("1"), dir.path().join("2")];
    MkfsBtrfs::new().options("-m raid1 -d raid1").size_bytes(256 << 20).make_on(&images);
    let file = std::fs::File::options().read(true).write(true).open(&images[1]).unwrap();
    let at = SUPERBLOCK_OFFSETS[0];
    let mut bytes = [0; SUPERBLOCK_BYTES];
    file.read_exact_at(&mut bytes, at.0).unwrap();
    let mut superblock = Superblock::parse(&bytes, at).unwrap();
    superblock.generation -= 1;
    // The last chunk was not there, nor the length that it lies in.
    superblock.dev_item.bytes_used -= 8 << 20;
    superblock.dev_item.total_bytes = (32 << 20).into();
    superblock.seal(at).unwrap();
    file.write_all_at(superblock.as_bytes(), at.0).unwrap();
    let report = common::check_all(&common::open(&images));
    assert!(report.is_clean(), "{}", common::lines(&report));
    let kinds: Vec<_> = report.findings.iter().map(Finding::kind).collect();
    assert!(kinds.contains(&"superblock-copy-stale"), "{kinds:?}");
    let mount = KernelMount::mount(&images, "", true).unwrap();
    mount.unmount();
}
