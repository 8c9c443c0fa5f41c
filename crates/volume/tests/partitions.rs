//! Filesystems in partitions of tables that sfdisk wrote.

mod common;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use common::{READ_ONLY, judge, mkfs, run_with};
use ubtrfs_volume::partition::partitions;
use ubtrfs_volume::{Error, FileDevice, MemDevice, OpenMode, Volume, Window};

const SECTOR_BYTES: u64 = 512;

#[test]
fn partitions_that_sfdisk_wrote_are_where_it_put_them() {
    if !judge(&["sfdisk"]) {
        return;
    }
    let tables = [
        ("label: gpt\n1: start=2048,size=8192\n7: start=20480,size=4096\n", vec![1, 7]),
        (
            "label: dos\n1: start=2048,size=8192\n2: start=20480,size=60000,type=5\n\
             5: start=22528,size=4096\n6: start=32768,size=2048\n7: start=40960,size=8192\n",
            vec![1, 5, 6, 7],
        ),
    ];
    for (table, numbers) in tables {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk");
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        run_with("sfdisk", &["-q", image.to_str().unwrap()], table);
        let device = FileDevice::open(&image, OpenMode::ReadOnly, Window::Whole).unwrap();
        let found = partitions(&device).unwrap();
        assert_eq!(found.iter().map(|p| p.number).collect::<Vec<_>>(), numbers);
        for partition in found {
            let line =
                table.lines().find(|line| line.starts_with(&format!("{}:", partition.number)));
            let expect = format!(
                "start={},size={}",
                partition.start_bytes / SECTOR_BYTES,
                partition.len_bytes / SECTOR_BYTES
            );
            assert!(line.unwrap().contains(&expect), "{line:?} {expect}");
        }
    }
}

#[test]
fn open_of_a_filesystem_in_a_partition_reads_its_superblock() {
    if !judge(&["sfdisk"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let Some(images) = mkfs(dir.path(), 1, &[]) else { return };
    let disk = dir.path().join("disk");
    let mut file = File::create(&disk).unwrap();
    file.set_len(600 << 20).unwrap();
    run_with("sfdisk", &["-q", disk.to_str().unwrap()], "label: gpt\nstart=2048,size=1048576\n");
    file.seek(SeekFrom::Start(2048 * SECTOR_BYTES)).unwrap();
    let mut content = Vec::new();
    File::open(&images[0]).unwrap().take(256 << 20).read_to_end(&mut content).unwrap();
    file.write_all(&content).unwrap();

    let open = |window| FileDevice::open(&disk, OpenMode::ReadOnly, window);
    let volume = |window| Volume::open(vec![std::sync::Arc::new(open(window)?)], &READ_ONLY);
    volume(Window::Partition(1)).unwrap();
    volume(Window::Offset { start_bytes: 1 << 20, len_bytes: None }).unwrap();
    let error = volume(Window::Whole).unwrap_err();
    assert!(matches!(error, Error::NotBtrfs { .. }), "{error}");
    for window in
        [Window::Partition(2), Window::Offset { start_bytes: u64::MAX, len_bytes: Some(1) }]
    {
        let error = volume(window).unwrap_err();
        assert!(matches!(error, Error::Partition { .. }), "{error}");
    }
}

#[test]
fn partitions_of_a_filesystem_without_a_table_is_none() {
    assert!(partitions(&MemDevice::new(64 << 20)).unwrap().is_empty());
}
