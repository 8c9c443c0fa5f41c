//! Filesystems that fill up: no space is an answer to `begin`, never a commit that fails.

use ubtrfs_volume::MemDevice;

use super::*;
use crate::Error;

/// The commit's share was reckoned from what was pending alone. But each leaf of the extent tree
/// that it copies frees a block whose item lies in another leaf, and so on: a full filesystem with
/// scattered changes was aborted for want of space in the middle of a commit.
#[test]
fn scattered_changes_of_a_full_filesystem_commit() {
    let mut random = Prng::of_test(41);
    for nodesize_bytes in [4096, 16_384] {
        let options = MkfsOptions { nodesize_bytes, ..MkfsOptions::default() };
        let device = Arc::new(MemDevice::new(64 << 20));
        drop(mkfs_on(&device, &options));
        let volume =
            Volume::open(vec![Arc::clone(&device) as _], &VolumeOptions::default()).unwrap();
        let options = OpenOptions { cache_bytes: 512 << 20, ..open_options() };
        let fs = Filesystem::open(volume, options).unwrap();
        let mut model = contents(&fs);
        let mut full_count = 0;
        let mut is_filling = true;
        for step in 0_u64.. {
            let key = key(random.below(200_000), 0);
            let begun = fs.begin(Reservation::items(1));
            let mut handle = match begun {
                Ok(handle) => handle,
                Err(Error::NoSpace { .. }) => {
                    full_count += 1;
                    if full_count == 4 {
                        break;
                    }
                    fs.commit().unwrap_or_else(|error| panic!("{nodesize_bytes}: {error}"));
                    is_filling = false;
                    // Room again, scattered: shrinking items needs space as well.
                    let keys: Vec<Key> = model.keys().copied().collect();
                    for _ in 0..200 {
                        let key = keys[random.index(keys.len())];
                        let Ok(mut handle) = fs.begin(Reservation::items(1)) else { break };
                        if model.remove(&key).is_some() {
                            handle.txn.remove(RootId::UUID_TREE, key).unwrap();
                        }
                    }
                    continue;
                }
                Err(error) => panic!("{nodesize_bytes}, step {step}: {error}"),
            };
            let words = 1 + random.index(100);
            let data = random.bytes(8 * words);
            if model.contains_key(&key) {
                handle.txn.replace(RootId::UUID_TREE, key, &data).unwrap();
            } else {
                handle.txn.insert(RootId::UUID_TREE, key, &data).unwrap();
            }
            model.insert(key, data);
            drop(handle);
            if !is_filling && random.chance(1, 300) || random.chance(1, 5000) {
                fs.commit().unwrap_or_else(|error| panic!("{nodesize_bytes}, {step}: {error}"));
            }
        }
        fs.commit().unwrap_or_else(|error| panic!("{nodesize_bytes}: {error}"));
        assert!(contents(&fs) == model);
        drop(fs);
        judge(&*device);
    }
}

/// Where groups are mixed, data took the blocks that handles and the commit had been promised.
#[test]
fn data_in_mixed_groups_leaves_what_was_promised() {
    use ubtrfs_testkit::MkfsBtrfs;
    if !oracle::require(Oracle::MkfsBtrfs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().options("--mixed").size_bytes(96 << 20).make(&image);
    let fs = reopen(&image);
    let core = &fs.inner.core;
    let mut handle = fs.begin(Reservation::items(20)).unwrap();
    let mut data_bytes = 0;
    let error = loop {
        match core.alloc.allocate_data(&core.roots, 4096, 32 << 20, crate::alloc::DataPromise::None)
        {
            Ok((_, len)) => data_bytes += len,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::NoSpace { .. }), "{error}");
    assert!(data_bytes > 10 << 20, "{data_bytes}");
    for at in 0..20 {
        handle.txn.insert(RootId::UUID_TREE, key(1000 * at, 0), &[7; 2000]).unwrap();
    }
    drop(handle);
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

/// Freeing data removes its checksums when the commit runs the references, which copies leaves of
/// the checksum tree.
#[test]
fn data_removed_from_a_full_filesystem_commits() {
    use crate::{NewInode, PreparedData};
    use ubtrfs_ondisk::{CsumType, FileOffset};
    let options =
        MkfsOptions { nodesize_bytes: 4096, csum: CsumType::Sha256, ..MkfsOptions::default() };
    let device = Arc::new(MemDevice::new(320 << 20));
    drop(mkfs_on(&device, &options));
    let volume = Volume::open(vec![Arc::clone(&device) as _], &VolumeOptions::default()).unwrap();
    let options = OpenOptions { cache_bytes: 512 << 20, ..open_options() };
    let fs = Filesystem::open(volume, options).unwrap();
    let (now, options) = (fs.runtime().clock.now(), fs.write_options(None));
    let data = PreparedData::new(vec![7; 512 << 10], &options);
    let mut names = Vec::new();
    for at in 0..350 {
        let name = at.to_string().into_bytes();
        let new = NewInode::new(0o100_644, now);
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        let id = handle.create(fs.top_level(), &name, &new).unwrap();
        drop(handle);
        let mut appender = fs.appender(id, 0).unwrap();
        appender.push(FileOffset(0), data.clone()).unwrap();
        appender.finish().unwrap();
        names.push(name);
    }
    fs.commit().unwrap();
    for at in 0_u64.. {
        // Removing needs a promise of its own.
        let Ok(mut handle) = fs.begin(Reservation::items(400)) else { break };
        handle.txn.insert(RootId::UUID_TREE, key(at, 0), &[7; 3000]).unwrap();
    }
    fs.commit().unwrap();
    let used_before = fs.superblock().bytes_used.get();
    let removed = names.iter().take_while(|name| match fs.unlink(fs.top_level(), name) {
        Ok(()) => true,
        Err(Error::NoSpace { .. }) => false,
        Err(error) => panic!("{error}"),
    });
    let removed = removed.count() as u64;
    assert!(removed > 0, "a full filesystem can be emptied");
    // What found no room to go at once goes after a commit.
    fs.commit().unwrap();
    fs.commit().unwrap();
    let used_bytes = fs.superblock().bytes_used.get();
    let freed_bytes = used_before.saturating_sub(used_bytes);
    assert!(freed_bytes >= removed * (512 << 10), "{removed} files, {freed_bytes} bytes freed");
    drop(fs);
    judge(&*device);
}
