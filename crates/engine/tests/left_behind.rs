//! Data that Linux left behind the end of a file, without NO_HOLES, as the power went: no part of the file, whatever makes it longer.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use common::full::open;
use common::judge;
use common::kernel_log::{copy, has_judges};
use rustix::fs::{FallocateFlags, fallocate};
use ubtrfs_engine::{Filesystem, InodeId, MappingKind};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, run};

const BLOCK: u64 = 4096;
/// Where all was written, of which only the third block, and some space behind it, arrived.
const WRITTEN: u64 = 3 * BLOCK;
const LEFT: u64 = 2 * BLOCK;
const ALLOCATED: u64 = 16 * BLOCK;

type ByEngine = fn(&Filesystem, InodeId);
type ByKernel = fn(&File, &File);

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// What makes a file longer, here and with the kernel.
const WAYS: [(&str, ByEngine, ByKernel); 9] = [
    (
        "truncate",
        |fs, id| fs.open_data(id).unwrap().truncate(at(WRITTEN)).unwrap(),
        |file, _| file.set_len(WRITTEN).unwrap(),
    ),
    (
        "truncate, closed",
        |fs, id| fs.truncate(id, WRITTEN).unwrap(),
        |file, _| file.set_len(WRITTEN).unwrap(),
    ),
    (
        "truncate inside of it",
        |fs, id| fs.open_data(id).unwrap().truncate(at(LEFT + 100)).unwrap(),
        |file, _| file.set_len(LEFT + 100).unwrap(),
    ),
    (
        "write behind it",
        |fs, id| _ = fs.open_data(id).unwrap().write(at(5 * BLOCK + 7), &[2; 100]).unwrap(),
        |file, _| file.write_all_at(&[2; 100], 5 * BLOCK + 7).unwrap(),
    ),
    (
        "write behind it, closed",
        |fs, id| fs.write(id, DiskOffset(5 * BLOCK + 7), &[2; 100]).unwrap(),
        |file, _| file.write_all_at(&[2; 100], 5 * BLOCK + 7).unwrap(),
    ),
    (
        "write into it",
        |fs, id| _ = fs.open_data(id).unwrap().write(at(LEFT + 9), &[2; 100]).unwrap(),
        |file, _| file.write_all_at(&[2; 100], LEFT + 9).unwrap(),
    ),
    (
        "direct write behind it",
        |fs, id| {
            let file = fs.open_data(id).unwrap();
            assert_eq!(file.direct_write(at(5 * BLOCK), &[2; 4096]).unwrap(), 4096);
        },
        |file, _| file.write_all_at(&[2; 4096], 5 * BLOCK).unwrap(),
    ),
    (
        "allocate",
        |fs, id| fs.open_data(id).unwrap().allocate(at(0), 6 * BLOCK, Reach::Extends).unwrap(),
        |file, _| fallocate(file, FallocateFlags::empty(), 0, 6 * BLOCK).unwrap(),
    ),
    (
        "clone behind it",
        |fs, id| {
            let source = fs.resolve(fs.top_level(), b"source").unwrap();
            fs.clone_range(source, DiskOffset(0)..DiskOffset(BLOCK), id, DiskOffset(5 * BLOCK))
                .unwrap();
        },
        |file, source| {
            let mut from = 0;
            let mut to = 5 * BLOCK;
            let copied = rustix::fs::copy_file_range(
                source,
                Some(&mut from),
                file,
                Some(&mut to),
                usize::try_from(BLOCK).unwrap(),
            );
            assert_eq!(copied.unwrap() as u64, BLOCK);
        },
    ),
];

/// Has the kernel write the files and lose the power: `copy` is what is left.
fn leave(image: &Path, left: &Path) {
    MkfsBtrfs::new().options("-O ^no-holes").size_bytes(256 << 20).make(image);
    let kernel = KernelMount::read_write(image, "commit=1");
    let path = |name: &str| kernel.path().join(name);
    std::fs::write(path("source"), [3; BLOCK as usize]).unwrap();
    for way in 0..WAYS.len() {
        File::create(path(&way.to_string())).unwrap();
    }
    run("sync", ["-f".as_ref(), kernel.path()]);
    let script = "import ctypes,os,sys
libc=ctypes.CDLL(None,use_errno=True)
for path in sys.argv[1:]:
    fd=os.open(path,os.O_WRONLY)
    os.pwrite(fd,b'L'*12288,0)
    assert libc.sync_file_range(fd,ctypes.c_long(8192),ctypes.c_long(4096),7)==0
    assert libc.fallocate(fd,1,ctypes.c_long(65536),ctypes.c_long(16384))==0";
    let files = (0..WAYS.len()).map(|way| path(&way.to_string()).into_os_string());
    let arguments = ["-c".into(), script.into()].into_iter().chain(files);
    run("python3", arguments.collect::<Vec<std::ffi::OsString>>());
    // Its transaction is committed with time, and not what is dirty brought along as by a sync.
    std::thread::sleep(Duration::from_millis(2500));
    copy(image, left);
}

#[test]
fn what_linux_left_behind_the_end_is_not_shown_whatever_makes_the_file_longer() {
    if !has_judges() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [image, ours, theirs] = ["image", "ours", "theirs"].map(|name| dir.path().join(name));
    leave(&image, &ours);
    copy(&ours, &theirs);
    let kernel = KernelMount::read_write(&theirs, "");
    let fs = open(&ours);
    for (way, (name, by_engine, by_kernel)) in WAYS.into_iter().enumerate() {
        let id = fs.resolve(fs.top_level(), way.to_string().as_bytes()).unwrap();
        let extents = || -> Vec<_> {
            let mappings = fs.file_extents(id, DiskOffset(0)).unwrap().map(Result::unwrap);
            let there = mappings.filter(|mapping| mapping.kind != MappingKind::Hole);
            there.map(|mapping| (mapping.kind, mapping.offset.0)).collect()
        };
        assert_eq!(fs.inode(id).unwrap().size_bytes, 0, "{name}");
        let left = [(MappingKind::Data, LEFT), (MappingKind::Prealloc, ALLOCATED)];
        assert_eq!(extents(), left, "{name}");
        by_engine(&fs, id);
        fs.sync().unwrap();
        assert!(extents().contains(&left[1]), "{name}: what is preallocated stays");
        let path = kernel.path().join(way.to_string());
        let file = File::options().read(true).write(true).open(&path).unwrap();
        by_kernel(&file, &File::open(kernel.path().join("source")).unwrap());
        let expected = std::fs::read(&path).unwrap();
        assert!(!expected.contains(&b'L'), "{name}: the kernel shows it");
        let mut found = vec![0; usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap()];
        fs.read(id, DiskOffset(0), &mut found).unwrap();
        assert!(found == expected, "{name}: {} and {} bytes", found.len(), expected.len());
    }
    drop(fs);
    judge(&ours);
}
