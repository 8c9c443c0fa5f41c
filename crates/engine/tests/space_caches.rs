//! Free space caches of version 1, which Linux wrote and the engine does not keep.

mod common;

use std::fs;
use std::path::Path;

use common::open_for_writing;
use ubtrfs_engine::{NewInode, Reservation};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, Prng, oracle, run};

/// Linux keeps no caches of groups of less than 100 MiB: a tenth of the filesystem here.
const IMAGE_BYTES: u64 = 1200 << 20;
const FILE_BYTES: usize = 16 << 20;

/// The generations of the inodes of the root tree: the caches.
fn cache_generations(image: &Path) -> Vec<u64> {
    let dump =
        run("btrfs", ["inspect-internal", "dump-tree", "-t", "root", image.to_str().unwrap()]);
    let mut lines = dump.lines();
    let mut generations = Vec::new();
    while let Some(line) = lines.next() {
        let mut words = line.split_whitespace().skip_while(|word| *word != "key").skip(1);
        let objectid = words.next().and_then(|word| word.strip_prefix('(')).unwrap_or_default();
        let is_cache = objectid.parse::<u64>().is_ok_and(|number| number >= 256);
        if is_cache && words.next() == Some("INODE_ITEM") {
            let item = lines.next().unwrap();
            let mut words = item.split_whitespace().skip_while(|word| *word != "generation");
            generations.push(words.nth(1).unwrap().parse().unwrap());
        }
    }
    generations
}

/// Linux believes a cache again at the second mount after a change of the engine's, when its first
/// had no reason to write that cache: what the engine had put there since was free to it. That as
/// much is free as the cache says kept nothing from that here.
#[test]
fn caches_of_changed_groups_are_not_believed_two_mounts_later() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::MkfsBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    let mut random = Prng::of_test(79);
    MkfsBtrfs::new().options("-R ^free-space-tree -m single").size_bytes(IMAGE_BYTES).make(&image);
    let mount = KernelMount::read_write(&image, "space_cache=v1");
    // The first group is a small one.
    fs::write(mount.path().join("filler"), random.bytes(8 << 20)).unwrap();
    run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    fs::write(mount.path().join("first"), random.bytes(FILE_BYTES)).unwrap();
    mount.unmount();
    let before = cache_generations(&image);
    assert!(!before.is_empty() && !before.contains(&0), "{before:?}");

    let engine = open_for_writing(&image);
    let top = engine.top_level();
    let new = NewInode::new(0o100_644, engine.runtime().clock.now());
    let id = engine.begin(Reservation::create(0)).unwrap().create(top, b"second", &new).unwrap();
    let second = random.bytes(FILE_BYTES);
    engine.write(id, FileOffset(0), &second).unwrap();
    engine.commit().unwrap();
    engine.unlink(top, b"first").unwrap();
    engine.commit().unwrap();
    drop(engine);
    let after = cache_generations(&image);
    assert_eq!(after.len(), before.len());
    assert!(after.contains(&0), "{before:?}, {after:?}");

    let mount = KernelMount::read_write(&image, "space_cache=v1");
    fs::write(mount.path().join("inline"), b"of the tree alone").unwrap();
    mount.unmount();
    let mount = KernelMount::read_write(&image, "space_cache=v1");
    // All of the group that is free to it.
    fs::write(mount.path().join("third"), random.bytes(IMAGE_BYTES as usize / 4)).unwrap();
    mount.unmount();
    let mount = KernelMount::read_only(&image, "");
    assert!(fs::read(mount.path().join("second")).unwrap() == second);
    mount.unmount();
    let report = run("btrfs", ["check", "--check-data-csum", image.to_str().unwrap()]);
    assert!(report.contains("no error found"), "{report}");
}

/// One number of each key with that type in a tree.
fn keys_of(image: &Path, tree: &str, ty: &str, word: usize) -> Vec<u64> {
    let dump = run("btrfs", ["inspect-internal", "dump-tree", "-t", tree, image.to_str().unwrap()]);
    let items = dump.lines().filter(|line| line.trim_start().starts_with("item "));
    let keys = items.filter_map(|line| Some(line.split_once("key (")?.1.split_once(')')?.0));
    let of_type = keys.filter(|key| key.split_whitespace().any(|word| word == ty));
    of_type.filter_map(|key| key.split_whitespace().nth(word)?.parse().ok()).collect()
}

/// The caches of groups that the engine removed stayed in the root tree: files that nobody would remove any more, and a
/// cache to be found for the next group at that address.
#[test]
fn caches_of_removed_groups_are_removed() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::MkfsBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().options("-R ^free-space-tree -m single").size_bytes(IMAGE_BYTES).make(&image);
    let mount = KernelMount::read_write(&image, "space_cache=v1");
    fs::write(mount.path().join("first"), vec![1; FILE_BYTES]).unwrap();
    for number in 0..6 {
        let file = fs::File::create(mount.path().join(format!("f{number}"))).unwrap();
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&file, flags, 0, 118 << 20).unwrap();
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), mount.path().as_os_str()]);
    }
    mount.unmount();
    let headers = || keys_of(&image, "root", "UNTYPED", 2);
    let groups = || keys_of(&image, "extent", "BLOCK_GROUP_ITEM", 0);
    let inodes = || {
        let all = keys_of(&image, "root", "INODE_ITEM", 0);
        all.into_iter().filter(|number| *number >= 256).count()
    };
    let (headers_before, groups_before) = (headers(), groups());
    assert!(headers_before.len() >= 6, "{headers_before:?} of {groups_before:?}");
    assert_eq!(headers_before.len(), inodes());

    let engine = open_for_writing(&image);
    let top = engine.top_level();
    for number in 0..5 {
        engine.unlink(top, format!("f{number}").as_bytes()).unwrap();
    }
    engine.commit().unwrap();
    let new = NewInode::new(0o100_644, engine.runtime().clock.now());
    let second = engine.begin(Reservation::create(0)).unwrap().create(top, b"second", &new);
    engine.commit().unwrap();
    engine.write(second.unwrap(), FileOffset(0), &vec![2; FILE_BYTES]).unwrap();
    engine.commit().unwrap();
    drop(engine);
    let (headers_after, groups_after) = (headers(), groups());
    assert!(groups_after.len() + 2 <= groups_before.len(), "{groups_after:?}");
    let gone = headers_before.iter().filter(|group| !groups_after.contains(group));
    assert!(gone.count() >= 2, "{headers_before:?}, {groups_after:?}");
    assert!(headers_after.iter().all(|group| groups_after.contains(group)), "{headers_after:?}");
    assert_eq!(headers_after.len(), inodes());
    for _ in 0..2 {
        let mount = KernelMount::read_write(&image, "space_cache=v1");
        assert!(fs::read(mount.path().join("second")).unwrap() == vec![2; FILE_BYTES]);
        fs::write(mount.path().join("third"), vec![3; 200 << 20]).unwrap();
        mount.unmount();
        let report = run("btrfs", ["check", "--check-data-csum", image.to_str().unwrap()]);
        assert!(report.contains("no error found"), "{report}");
    }
}
