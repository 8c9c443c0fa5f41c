//! A log on a filesystem whose metadata is nearly full. The replay asked for as much room as what takes space, and could not begin:
//! nobody could open such a filesystem for writing, to empty it.

mod common;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use common::kernel_log::{assert_as_clean, copy, has_judges};
use ubtrfs_engine::Notice;
use ubtrfs_testkit::{Compare, KernelMount, MkfsBtrfs, TreeSnapshot, run};

/// Gives data all that it can have, and metadata what is left; returns how many files lie in metadata.
fn fill(mount: &Path) -> u32 {
    let filler = File::create(mount.join("filler")).unwrap();
    let mut at = 0;
    for step in [64 << 20, 8 << 20, 1 << 20, 4096] {
        let flags = rustix::fs::FallocateFlags::empty();
        while rustix::fs::fallocate(&filler, flags, at, step).is_ok() {
            at += step;
        }
    }
    // What ends in metadata is promised room among data, first.
    filler.set_len(at - (8 << 20)).unwrap();
    let mut count = 0;
    while fs::write(mount.join(format!("small {count}")), [b's'; 2000]).is_ok() {
        count += 1;
    }
    // The one that found no room.
    let _ = fs::remove_file(mount.join(format!("small {count}")));
    count
}

/// Files changed, new and renamed, and all of that fsynced; another one is renamed each `turn`, as after a turn that the kernel committed
/// the first one is gone.
fn change(at: &dyn Fn(u32) -> PathBuf, turn: u32) -> std::io::Result<()> {
    for number in 0..20 {
        for (number, byte) in [(number, b'n'), (4100 + number * 40, b'c')] {
            fs::write(at(number), [byte; 1500])?;
            File::open(at(number))?.sync_all()?;
        }
    }
    let from = 4900 + 2 * turn;
    fs::rename(at(from), at(from + 1))?;
    File::open(at(from + 1))?.sync_all()
}

#[test]
fn log_on_a_full_filesystem_is_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    for mkfs in ["", "-n 4096"] {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = directory.path().join("image");
        MkfsBtrfs::new().options(mkfs).size_bytes(300 << 20).make(&image);
        let mount = KernelMount::read_write(&image, "subvolid=5,commit=300");
        let at = |number: u32| mount.path().join(format!("small {number}"));
        let count = fill(mount.path());
        assert!(count > 5100, "{count}");
        let copies = ["kernel", "engine"].map(|name| image.with_extension(name));
        // As full as it may be that the kernel can log anything.
        let mut freed = 0;
        loop {
            (freed..freed + 50).for_each(|number| fs::remove_file(at(number)).unwrap());
            freed += 50;
            run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
            if change(&at, freed / 50).is_ok() {
                copies.iter().for_each(|to| copy(&image, to));
                // With little room it commits by itself, now and then.
                let notices = common::open(&[&copies[0]]).notices().to_vec();
                if notices == [Notice::LogNotReplayed] {
                    break;
                }
            }
        }
        println!("{mkfs}: {count} files, {freed} removed");
        mount.unmount();
        let [for_kernel, for_engine] = &copies;

        let mount = KernelMount::read_write(for_kernel, "subvolid=5,noatime");
        let theirs = TreeSnapshot::of_directory(mount.path());
        mount.unmount();
        let fs = common::open_for_writing(for_engine);
        assert!(fs.notices().is_empty());
        let ours = common::snapshot(&fs, fs.top_level());
        theirs.assert_same(&ours, &Compare::same_filesystem());
        drop(fs);
        assert_as_clean(for_engine, for_kernel);
        // It can be emptied.
        let fs = common::open_for_writing(for_engine);
        for number in 4000..4010 {
            let name = format!("small {number}");
            fs.unlink(fs.top_level(), name.as_bytes()).unwrap();
        }
        fs.commit().unwrap();
        drop(fs);
        assert_as_clean(for_engine, for_kernel);
    }
}
