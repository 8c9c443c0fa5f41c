//! What a caller may ask for: progress, a bound on the findings, output for machines.

mod common;

use std::sync::Mutex;

use common::image::Image;
use ubtrfs_check::{CheckOptions, Phase, Severity, Value, check};
use ubtrfs_ondisk::KeyType;
use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::inode::InodeItem;
use ubtrfs_rt::Executor;
use ubtrfs_testkit::{Oracle, oracle};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

fn volume(image: &Image) -> Volume {
    let devices = vec![image.device.clone() as std::sync::Arc<dyn Device>];
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    Volume::open(devices, &options).unwrap()
}

#[test]
fn progress_comes_in_the_order_of_the_phases() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let seen = Mutex::new(Vec::new());
    let note = |progress: ubtrfs_check::Progress| seen.lock().unwrap().push(progress);
    let options = CheckOptions {
        data: true,
        executor: Executor::Threads(2),
        progress: Some(&note),
        ..CheckOptions::default()
    };
    check(&volume(&image), &options).unwrap();
    let mut phases: Vec<Phase> = seen.lock().unwrap().iter().map(|it| it.phase).collect();
    phases.dedup();
    assert_eq!(phases, [Phase::Extents, Phase::Files, Phase::Comparing, Phase::Data]);
}

#[test]
fn findings_beyond_the_limit_are_counted() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inodes = image.items(RootId::FS_TREE);
    let inodes: Vec<_> =
        inodes.iter().filter(|it| it.key.ty == KeyType::INODE_ITEM).skip(20).take(30).collect();
    for place in &inodes {
        image.edit::<InodeItem>(place, |item| item.nbytes += 4096);
    }
    let options = CheckOptions { finding_count_max: 10, ..CheckOptions::default() };
    let report = check(&volume(&image), &options).unwrap();
    let (kept, errors) = (report.findings.len(), report.error_count);
    assert_eq!((kept, errors), (10, 30));
    assert_eq!(report.left_out_count, 30 + report.note_count - 10);
    assert!(!report.is_clean());
}

#[test]
fn findings_tell_their_kind_place_and_facts_by_name() {
    if !oracle::require(Oracle::KernelBtrfs) {
        return;
    }
    let image = Image::single();
    let inode = image.inode(RootId::FS_TREE, "data");
    let place = image.item(RootId::FS_TREE, inode, KeyType::INODE_ITEM, 0);
    image.edit::<InodeItem>(&place, |item| item.nlink += 1);
    let finding = image.expect(&["inode-links"]).remove(0);
    assert_eq!(finding.severity(), Severity::Error);
    assert_eq!(
        finding.fields(),
        [
            ("root", Value::Number(5)),
            ("block", Value::Number(place.block.0)),
            ("inode", Value::Number(inode)),
            ("have", Value::Number(2)),
            ("expect", Value::Number(1)),
        ]
    );
    let block = place.block;
    assert_eq!(
        finding.to_string(),
        format!("root 5, block {block}, inode {inode}: 2 links, 1 names")
    );
}
