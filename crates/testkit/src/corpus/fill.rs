//! What the images hold. Each function fills an empty, mounted filesystem.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use rustix::fs::{FallocateFlags, IFlags};

use crate::odd::odd_files;
use crate::{Prng, run};

/// Odd files, files written over and over in parts, and one subvolume.
pub(super) fn everything(directory: &Path, prng: &mut Prng) {
    let below = directory.join("odd");
    fs::create_dir(&below).expect("a directory");
    odd_files(&below, prng.next_u64());
    overwritten(directory, prng);
    btrfs(&["subvolume", "create"], &[&directory.join("subvolume")]);
    fs::write(directory.join("subvolume/file"), prng.text(30_000)).expect("a file");
}

/// A few files.
pub(super) fn few(directory: &Path, prng: &mut Prng) {
    for number in 0..20 {
        let len = prng.index(100_000);
        fs::write(directory.join(format!("file-{number}")), prng.text(len)).expect("a file");
    }
    fs::create_dir(directory.join("directory")).expect("a directory");
}

/// Extents of which later writes left only parts in use.
fn overwritten(directory: &Path, prng: &mut Prng) {
    let below = directory.join("overwritten");
    fs::create_dir(&below).expect("a directory");
    for number in 0..6 {
        let file = create(&below.join(format!("file-{number}")));
        let len = 700_000;
        file.write_all_at(&prng.text(len), 0).expect("the first write");
        sync(directory);
        for _ in 0..15 {
            let at = prng.below(u64::try_from(len).expect("a length fits"));
            let piece_len = 1 + prng.index(30_000);
            let piece =
                if prng.chance(1, 2) { prng.text(piece_len) } else { prng.bytes(piece_len) };
            file.write_all_at(&piece, at).expect("a later write");
            if prng.chance(1, 3) {
                file.sync_all().expect("the file is synced");
            }
        }
        if number % 3 == 0 {
            file.set_len(prng.below(700_000)).expect("the file is cut");
        }
    }
}

/// Space that is allocated and not written, in every position.
pub(super) fn preallocated(directory: &Path, prng: &mut Prng) {
    let keep = FallocateFlags::KEEP_SIZE;
    let none = FallocateFlags::empty();
    let path = |name: &str| directory.join(name);
    let file = create(&path("whole"));
    allocate(&file, none, 0, 1 << 20);
    let file = create(&path("beyond-end"));
    file.write_all_at(&prng.bytes(10_000), 0).expect("a write");
    allocate(&file, keep, 0, 1 << 20);
    let file = create(&path("partly-written"));
    allocate(&file, none, 0, 4 << 20);
    sync(directory);
    for at in [0, 500_000, 1_000_000, 4_190_000] {
        file.write_all_at(&prng.text(4096 * 3), at).expect("a write into allocated space");
    }
    let file = create(&path("punched"));
    file.write_all_at(&prng.text(2 << 20), 0).expect("a write");
    sync(directory);
    allocate(&file, keep | FallocateFlags::PUNCH_HOLE, 300_000, 700_000);
    let file = create(&path("zeroed"));
    file.write_all_at(&prng.text(1 << 20), 0).expect("a write");
    sync(directory);
    allocate(&file, FallocateFlags::ZERO_RANGE, 100_000, 500_000);
    let file = create(&path("empty-beyond-end"));
    allocate(&file, keep, 0, 64 << 10);
    few(directory, prng);
}

/// Extents that several files share, in whole and in part.
pub(super) fn reflinks(directory: &Path, prng: &mut Prng) {
    let source = directory.join("source");
    fs::write(&source, prng.text(3 << 20)).expect("a file");
    sync(directory);
    for number in 0..40 {
        let copy = create(&directory.join(format!("copy-{number}")));
        rustix::fs::ioctl_ficlone(&copy, File::open(&source).expect("the source"))
            .expect("a reflink");
        for _ in 0..number % 5 {
            let at = prng.below(3 << 20);
            let len = prng.index(40_000);
            copy.write_all_at(&prng.bytes(len), at).expect("a write over shared space");
        }
    }
    fs::remove_file(&source).expect("the source is removed");
}

/// One file of many extents, and trees of several levels.
pub(super) fn fragmented(directory: &Path, prng: &mut Prng) {
    let file = create(&directory.join("file"));
    let block = prng.bytes(4096);
    // Backwards and with a gap after each, so that no extents can join.
    for number in (0..4000_u64).rev() {
        file.write_all_at(&block, number * 8192).expect("a block");
        if number % 500 == 0 {
            file.sync_all().expect("the file is synced");
        }
    }
    let wide = directory.join("wide");
    fs::create_dir(&wide).expect("a directory");
    for number in 0..12_000 {
        let name = format!("a-rather-long-name-so-that-leaves-fill-{number}");
        fs::write(wide.join(name), number.to_string()).expect("a file");
    }
    // Every third is gone again.
    for number in (0..12_000).step_by(3) {
        let name = format!("a-rather-long-name-so-that-leaves-fill-{number}");
        fs::remove_file(wide.join(name)).expect("a file is removed");
    }
}

/// Subvolumes in subvolumes, snapshots of them, a default one, deleted ones.
pub(super) fn subvolumes(directory: &Path, prng: &mut Prng) {
    let path = |name: &str| directory.join(name);
    few(directory, prng);
    btrfs(&["subvolume", "create"], &[&path("one")]);
    btrfs(&["subvolume", "create"], &[&path("one/inner")]);
    fs::create_dir(path("one/directory")).expect("a directory");
    btrfs(&["subvolume", "create"], &[&path("one/directory/deep")]);
    for name in ["one", "one/inner", "one/directory/deep"] {
        for number in 0..50 {
            let len = prng.index(20_000);
            let file = path(name).join(format!("file-{number}"));
            fs::write(file, prng.text(len)).expect("a file");
        }
    }
    symlink("inner/file-1", path("one/symlink")).expect("a symbolic link");
    btrfs(&["subvolume", "snapshot"], &[&path("one"), &path("snapshot")]);
    btrfs(&["subvolume", "snapshot", "-r"], &[&path("one"), &path("read-only")]);
    fs::write(path("one/file-1"), prng.text(50_000)).expect("a change after the snapshot");
    fs::write(path("snapshot/file-2"), prng.text(50_000)).expect("a change of the snapshot");
    fs::remove_file(path("snapshot/file-3")).expect("a file is removed");
    btrfs(&["subvolume", "snapshot", "-r"], &[&path("one"), &path("read-only-2")]);
    btrfs(&["subvolume", "create"], &[&path("doomed")]);
    fs::write(path("doomed/file"), prng.text(100_000)).expect("a file");
    btrfs(&["subvolume", "delete", "-c"], &[&path("doomed")]);
    btrfs(&["subvolume", "snapshot"], &[&path("snapshot"), &path("default")]);
    btrfs(&["subvolume", "set-default"], &[&path("default")]);
}

/// Shared blocks that were moved, so that their references name parents, not owners.
pub(super) fn balanced(directory: &Path, prng: &mut Prng) {
    subvolumes(directory, prng);
    reflinks(&directory.join("one"), prng);
    let snapshot = directory.join("before-balance");
    btrfs(&["subvolume", "snapshot", "-r"], &[&directory.join("one"), &snapshot]);
    btrfs(&["balance", "start", "--full-balance"], &[directory]);
    fs::write(directory.join("one/after-balance"), prng.text(70_000)).expect("a file");
}

/// Flags and properties of single files and directories.
pub(super) fn properties(directory: &Path, prng: &mut Prng) {
    for name in ["zlib", "lzo", "zstd"] {
        let below = directory.join(name);
        fs::create_dir(&below).expect("a directory");
        let path = below.to_str().expect("a path of text");
        run("btrfs", ["property", "set", path, "compression", name]);
        for len in [500, 3000, 10_000, 400_000] {
            fs::write(below.join(format!("text-{len}")), prng.text(len)).expect("a file");
            fs::write(below.join(format!("random-{len}")), prng.bytes(len)).expect("a file");
        }
    }
    let below = directory.join("nocow");
    fs::create_dir(&below).expect("a directory");
    set_flags(&below, IFlags::NOCOW);
    fs::write(below.join("file"), prng.text(300_000)).expect("a file");
    for (name, flags) in [
        ("immutable", IFlags::IMMUTABLE),
        ("append", IFlags::APPEND),
        ("noatime-nodump", IFlags::NOATIME | IFlags::NODUMP),
    ] {
        let path = directory.join(name);
        fs::write(&path, name).expect("a file");
        set_flags(&path, flags);
    }
}

/// Free space in many pieces, kept as bitmaps too.
pub(super) fn swiss_cheese(directory: &Path, prng: &mut Prng) {
    let block = prng.bytes(4096);
    let file = create(&directory.join("file"));
    for number in 0..16_000_u64 {
        file.write_all_at(&block, number * 4096).expect("a block");
    }
    sync(directory);
    let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
    // A new extent each, and the rest of the large one given up: then each second one is freed.
    for number in (0..16_000_u64).rev() {
        file.write_all_at(&block, number * 4096).expect("a block");
        if number % 4000 == 0 {
            sync(directory);
        }
    }
    for number in (0..16_000_u64).step_by(2) {
        allocate(&file, punch, number * 4096, 4096);
    }
}

/// Changes that are only in the log when the power goes. No rename: to sync a renamed file commits
/// the transaction.
pub(super) fn leave_log(directory: &Path, prng: &mut Prng) {
    let path = |name: &str| directory.join(name);
    // So that there is room later: the sync of a file after a chunk was allocated commits too.
    fs::write(path("room"), prng.bytes(24 << 20)).expect("a file");
    sync(directory);
    fs::remove_file(path("room")).expect("the file is removed");
    sync(directory);
    sync(directory);
    let synced = |name: &str| {
        let file = OpenOptions::new().write(true).open(path(name)).expect("the file opens");
        file.sync_all().expect("the file is synced");
    };
    fs::write(path("new"), prng.text(200_000)).expect("a file");
    synced("new");
    fs::write(path("directory/new-inline"), b"small").expect("a file");
    synced("directory/new-inline");
    let file = OpenOptions::new().write(true).open(path("file-1")).expect("the file opens");
    file.write_all_at(&prng.bytes(50_000), 20_000).expect("a write over committed data");
    file.sync_all().expect("the file is synced");
    fs::hard_link(path("file-3"), path("another-name")).expect("another name");
    synced("another-name");
    let file = OpenOptions::new().write(true).open(path("file-4")).expect("the file opens");
    file.set_len(100).expect("the file is cut");
    file.sync_all().expect("the file is synced");
    // Not synced: gone with the power, unless others' syncs took it along.
    fs::write(path("never-synced"), prng.text(1000)).expect("a file");
}

fn btrfs(words: &[&str], paths: &[&Path]) {
    let words = words.iter().map(std::ffi::OsStr::new);
    run("btrfs", words.chain(paths.iter().map(|path| path.as_os_str())));
}

fn create(path: &Path) -> File {
    File::create(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn allocate(file: &File, flags: FallocateFlags, at: u64, len: u64) {
    rustix::fs::fallocate(file, flags, at, len).expect("space can be allocated");
}

fn set_flags(path: &Path, flags: IFlags) {
    let file = File::open(path).expect("the file opens");
    let before = rustix::fs::ioctl_getflags(&file).expect("flags can be read");
    rustix::fs::ioctl_setflags(&file, before | flags).expect("flags can be set");
}

fn sync(directory: &Path) {
    btrfs(&["filesystem", "sync"], &[directory]);
}
