//! Filesystems in partitions of tables that sfdisk wrote.

mod common;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use common::{READ_ONLY, judge, mkfs, run_with};
use ubtrfs_volume::partition::partitions;
use ubtrfs_volume::{Device, Error, FileDevice, MemDevice, OpenMode, Volume, Window};

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

/// A window from an offset on ran to the end of the file, other partitions included, and could cut
/// the file off or grow over them.
#[test]
fn window_from_an_offset_on_ends_with_its_partition_and_keeps_the_file() {
    if !judge(&["sfdisk"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let table = "label: gpt\nstart=2048,size=20480\nstart=40960,size=20480\n";
    run_with("sfdisk", &["-q", disk.to_str().unwrap()], table);
    let open = |start_bytes, len_bytes| {
        let window = Window::Offset { start_bytes, len_bytes };
        FileDevice::open(&disk, OpenMode::ReadWrite, window).unwrap()
    };
    for (start, len, expect, is_known) in [
        (1 << 20, None, 10 << 20, true),
        (2 << 20, None, 9 << 20, true),
        (20 << 20, None, 10 << 20, true),
        (15 << 20, None, 49 << 20, false),
        (1 << 20, Some(63 << 20), 63 << 20, true),
    ] {
        let device = open(start, len);
        assert_eq!((device.len_bytes(), device.is_end_known()), (expect, is_known), "{start}");
        for len_bytes in [1 << 20, 100 << 20] {
            let error = device.resize(len_bytes).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        }
    }
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 64 << 20);

    // A file that was made for it is the filesystem's to its end.
    let (new, window) =
        (dir.path().join("new"), Window::Offset { start_bytes: 4096, len_bytes: None });
    let device =
        FileDevice::open(&new, OpenMode::CreateNew { len_bytes: 1 << 20 }, window).unwrap();
    device.resize(2 << 20).unwrap();
    assert_eq!(std::fs::metadata(&new).unwrap().len(), (2 << 20) + 4096);
}

#[test]
fn data_in_a_window_is_found_wherever_it_lies() {
    use std::os::unix::fs::FileExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let file = File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    let holds = |start_bytes, len_bytes| {
        let window = Window::Offset { start_bytes, len_bytes: Some(len_bytes) };
        FileDevice::open(&path, OpenMode::ReadOnly, window).unwrap().holds_data().unwrap()
    };
    assert!(!holds(0, 64 << 20));
    // Written zeros are data to the system, and none to us.
    file.write_all_at(&[0; 3 << 20], 5 << 20).unwrap();
    assert!(!holds(0, 64 << 20));
    file.write_all_at(&[1], 40 << 20).unwrap();
    assert!(holds(0, 64 << 20) && holds(40 << 20, 1) && holds((40 << 20) - 1, 2));
    assert!(!holds(0, 40 << 20) && !holds((40 << 20) + 1, 20 << 20));
}

#[test]
fn partitions_of_a_filesystem_without_a_table_is_none() {
    assert!(partitions(&MemDevice::new(64 << 20)).unwrap().is_empty());
}
