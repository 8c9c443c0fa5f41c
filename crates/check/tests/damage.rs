//! Random damage: bytes are flipped in a valid image, with and without their checksums made right
//! again. A check ends with a report, without a panic or a hang.

mod common;

use std::sync::Arc;

use common::image::{Base, Image};
use ubtrfs_check::{CheckOptions, check};
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_ondisk::{LogicalAddr, PhysicalAddr, RootId};
use ubtrfs_rt::Executor;
use ubtrfs_testkit::{Oracle, Prng, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

const ROUNDS: usize = 1500;

const TREES: [RootId; 8] = [
    RootId::ROOT_TREE,
    RootId::EXTENT_TREE,
    RootId::CHUNK_TREE,
    RootId::DEV_TREE,
    RootId::FS_TREE,
    RootId::CSUM_TREE,
    RootId::UUID_TREE,
    RootId::FREE_SPACE_TREE,
];

fn blocks(image: &Image) -> Vec<LogicalAddr> {
    let subvolumes = [image.subvolume("sub"), image.subvolume("snap")];
    let trees = TREES.into_iter().chain(subvolumes);
    trees.flat_map(|root| image.blocks(root)).map(|(block, _)| block.bytenr()).collect()
}

/// Overwrites some bytes, more often where the structure is than in the free middle.
fn flip(prng: &mut Prng, bytes: &mut [u8]) {
    for _ in 0..=prng.below(4) {
        let index = match prng.below(4) {
            0 => prng.index(200),
            1 => prng.index(1500),
            2 => bytes.len() - 1 - prng.index(3000),
            _ => prng.index(bytes.len()),
        };
        bytes[index] = match prng.below(3) {
            0 => bytes[index] ^ 1 << prng.below(8),
            1 => bytes[index].wrapping_add(1),
            _ => u8::try_from(prng.below(256)).unwrap(),
        };
    }
}

fn judge(image: &Image, round: usize) -> bool {
    let devices = vec![image.device.clone() as Arc<dyn Device>];
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let Ok(volume) = Volume::open(devices, &options) else { return false };
    let data = round.is_multiple_of(7);
    let executor = Executor::Inline;
    let options =
        CheckOptions { data, executor, finding_count_max: 100, ..CheckOptions::default() };
    let Ok(report) = common::check_twice(&volume, &options) else { return false };
    if round.is_multiple_of(10) {
        // What is found does not depend on the threads.
        let options = CheckOptions { executor: Executor::Threads(3), ..options };
        let mut same = check(&volume, &options).unwrap();
        same.statistics.table_bytes_peak = report.statistics.table_bytes_peak;
        assert_eq!(same, report);
    }
    for finding in &report.findings {
        assert!(
            !finding.to_string().is_empty() && !finding.fields().iter().any(|f| f.0.is_empty())
        );
    }
    !report.is_clean()
}

#[test]
fn random_damage_ends_with_a_report() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let mut prng = Prng::of_test(3);
    let image = Image::of(Base::Dup);
    let blocks = blocks(&image);
    let mut found = 0;
    for round in 0..ROUNDS {
        let mut undo = Vec::new();
        for _ in 0..=prng.below(2) {
            let at = blocks[prng.index(blocks.len())];
            let before = image.bytes(at);
            let mut bytes = before.clone();
            flip(&mut prng, &mut bytes);
            undo.push((at, before));
            // The checksum is made right again.
            image.write(at, bytes);
        }
        found += usize::from(judge(&image, round));
        for (at, before) in undo.into_iter().rev() {
            image.write(at, before);
        }
    }
    // What is flipped in the free middle of a block is no damage.
    assert!(found > ROUNDS / 2, "{found}");
    assert!(!judge(&image, 0), "all was undone");
}

#[test]
fn random_damage_of_the_superblock_ends_with_a_report_or_a_refusal() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let mut prng = Prng::of_test(4);
    let image = Image::single();
    let at: PhysicalAddr = SUPERBLOCK_OFFSETS[0];
    let before = image.superblock();
    for round in 0..ROUNDS {
        let mut bytes = zerocopy::IntoBytes::as_bytes(&before).to_vec();
        // The fields, not the backups and the padding alone.
        for _ in 0..=prng.below(3) {
            let index = 32 + prng.index(2000);
            bytes[index] ^= 1 << prng.below(8);
        }
        let mut damaged: Superblock = zerocopy::FromBytes::read_from_bytes(&bytes[..]).unwrap();
        if damaged.seal(at).is_ok() {
            image.device.write_at(at, zerocopy::IntoBytes::as_bytes(&damaged)).unwrap();
            judge(&image, round);
        }
    }
    assert_eq!(SUPERBLOCK_BYTES, 4096);
}
