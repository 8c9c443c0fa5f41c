//! Images whose bytes are right one by one and wrong together.

use ubtrfs_ondisk::Generation;
use ubtrfs_ondisk::block::Block;
use ubtrfs_ondisk::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, Superblock};
use ubtrfs_volume::MemDevice;
use zerocopy::IntoBytes;

use super::*;
use crate::btree::BlockPtr;

fn made(options: &MkfsOptions) -> Arc<MemDevice> {
    let device = Arc::new(MemDevice::new(64 << 20));
    let fs = mkfs_on(&device, options);
    for at in 0..200 {
        insert(&fs, key(at, 0), &[1; 200]);
    }
    fs.commit().unwrap();
    device
}

/// Changes the primary superblock.
fn forge(device: &MemDevice, change: impl FnOnce(&mut Superblock)) {
    let at = SUPERBLOCK_OFFSETS[0];
    let mut bytes = [0; SUPERBLOCK_BYTES];
    device.read_at(at, &mut bytes).unwrap();
    let mut superblock = Superblock::parse(&bytes, at).unwrap();
    change(&mut superblock);
    superblock.seal(at).unwrap();
    device.write_at(at, superblock.as_bytes()).unwrap();
}

/// Writes a block of the tree `root`, changed and sealed again, over itself.
fn forge_block(fs: &Filesystem, ptr: &BlockPtr, root: RootId, change: impl FnOnce(&mut Block)) {
    let store = &fs.inner.core.roots.store;
    let mut block = Block::clone(&*store.read(ptr, root, None).unwrap());
    change(&mut block);
    block.seal(fs.csum_type());
    store.volume().write(ptr.addr, block.as_bytes()).unwrap();
}

/// The generation after the last overflowed when the filesystem was opened.
#[test]
fn superblock_of_the_last_generation_is_an_error() {
    let device = made(&MkfsOptions::default());
    let fs = open_on(Arc::clone(&device) as _);
    let ptr = fs.tree(RootId::ROOT_TREE).unwrap().root();
    forge_block(&fs, &ptr, RootId::ROOT_TREE, |block| {
        block.readdress(ptr.addr, Generation(u64::MAX), RootId::ROOT_TREE);
    });
    drop(fs);
    forge(&device, |superblock| superblock.generation = u64::MAX.into());
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    assert!(Filesystem::open(volume, open_options()).is_err());
}

/// A node whose children are all one block, under other keys, was walked as often as it had
/// children: the first reading, under the first key, put the block into the cache, where no
/// expectation was compared any more.
#[test]
fn node_that_names_one_child_twice_is_damage() {
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let device = made(&options);
    let fs = open_on(Arc::clone(&device) as _);
    let ptr = fs.tree(RootId::UUID_TREE).unwrap().root();
    assert_eq!(ptr.level, 1);
    forge_block(&fs, &ptr, RootId::UUID_TREE, |block| {
        let Block::Node(node) = block else { panic!("a node") };
        let (child, generation) = (node.child(0), node.child_generation(0));
        for slot in 1..node.len() {
            node.set_child(slot, child, generation);
        }
    });
    drop(fs);
    let fs = open_on(device);
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let mut cursor = tree.cursor();
    cursor.seek(&Key::MIN).unwrap();
    let result = (0..1000).find_map(|_| cursor.next().err());
    assert!(result.is_some(), "walked one leaf many times");
    assert!(tree.lookup(&key(150, 0)).is_err());
}

/// A free space tree that calls blocks free which are in use: what is allocated there may have an
/// address that a node of the same tree gives as its child's.
#[test]
fn blocks_in_use_that_the_free_space_tree_calls_free_end_in_an_error() {
    for nodesize_bytes in [4096, 16_384] {
        let options = MkfsOptions { nodesize_bytes, ..MkfsOptions::default() };
        let device = made(&options);
        let fs = open_on(Arc::clone(&device) as _);
        let before = contents(&fs);
        // All of each group is free, says the tree.
        let ptr = fs.tree(RootId::FREE_SPACE_TREE).unwrap().root();
        forge_block(&fs, &ptr, RootId::FREE_SPACE_TREE, |block| {
            let Block::Leaf(leaf) = block else { panic!("a leaf") };
            let mut slot = 0;
            while slot < leaf.len() {
                let key = leaf.key(slot);
                match key.ty {
                    KeyType::FREE_SPACE_EXTENT => leaf.remove(slot..slot + 1),
                    KeyType::FREE_SPACE_INFO => {
                        leaf.data_mut(slot)[..4].copy_from_slice(&1_u32.to_le_bytes());
                        let all = Key::new(key.objectid, KeyType::FREE_SPACE_EXTENT, key.offset);
                        leaf.insert(slot + 1, all, 0);
                        slot += 2;
                    }
                    _ => slot += 1,
                }
            }
        });
        drop(fs);
        let fs = open_on(Arc::clone(&device) as _);
        let mut random = Prng::of_test(51);
        for _ in 0..200 {
            let Ok(mut handle) = fs.begin(Reservation::items(1)) else { break };
            let key = key(random.below(400), 0);
            if handle.txn.remove(RootId::UUID_TREE, key).is_err() {
                let _ = handle.txn.insert(RootId::UUID_TREE, key, &[1; 200]);
            }
        }
        assert!(fs.commit().is_err());
        drop(fs);
        let fs = open_on(device);
        assert!(contents(&fs) == before, "{nodesize_bytes}: nothing in use was overwritten");
    }
}

/// The number of free extents in a group's info item was believed: counted down from zero it
/// overflowed.
#[test]
fn free_extents_that_the_group_does_not_count_are_an_error() {
    let device = made(&MkfsOptions::default());
    let fs = open_on(Arc::clone(&device) as _);
    let before = contents(&fs);
    let ptr = fs.tree(RootId::FREE_SPACE_TREE).unwrap().root();
    forge_block(&fs, &ptr, RootId::FREE_SPACE_TREE, |block| {
        let Block::Leaf(leaf) = block else { panic!("a leaf") };
        for slot in 0..leaf.len() {
            if leaf.key(slot).ty == KeyType::FREE_SPACE_INFO {
                leaf.data_mut(slot).fill(0);
            }
        }
    });
    drop(fs);
    let fs = open_on(Arc::clone(&device) as _);
    insert(&fs, key(1 << 40, 0), &[1; 8]);
    assert!(fs.commit().is_err());
    drop(fs);
    assert!(contents(&open_on(device)) == before);
}

#[test]
fn reservation_of_more_than_there_can_be_is_no_space() {
    let fs = open_on(made(&MkfsOptions::default()));
    let error = fs.begin(Reservation::items(u64::MAX)).unwrap_err();
    assert!(matches!(error, crate::Error::NoSpace { .. }), "{error}");
    insert(&fs, key(1 << 40, 0), &[1; 8]);
    fs.commit().unwrap();
}

/// All blocks of a tree, from its root down.
fn blocks_of(fs: &Filesystem, root: RootId) -> Vec<BlockPtr> {
    let store = &fs.inner.core.roots.store;
    let mut found = vec![fs.tree(root).unwrap().root()];
    let mut at = 0;
    while let Some(ptr) = found.get(at).copied() {
        at += 1;
        if let Block::Node(node) = &*store.read(&ptr, root, None).unwrap() {
            found
                .extend((0..node.len()).map(|slot| crate::btree::readahead::child_ptr(node, slot)));
        }
    }
    found
}

/// Bytes of trees changed by chance, under right checksums: whatever they say, opening, changing
/// and committing end in a result.
#[test]
fn changes_of_a_forged_image_end_in_errors_not_panics() {
    use ubtrfs_testkit::crash::RecordingDevice;
    let mut random = Prng::of_test(52);
    let device = Arc::new(RecordingDevice::new(64 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs = mkfs_on(&device, &options);
    let mut model = contents(&fs);
    for _ in 0..200 {
        change(&fs, &mut model, &mut random, 300, true);
    }
    fs.commit().unwrap();
    let blocks: Vec<(RootId, BlockPtr)> = (1..=11)
        .map(RootId)
        .filter(|root| fs.tree(*root).is_ok())
        .flat_map(|root| blocks_of(&fs, root).into_iter().map(move |ptr| (root, ptr)))
        .collect();
    drop(fs);
    let recording = device.recording();
    let rounds = std::env::var("UBTRFS_ROUNDS").map_or(300, |rounds| rounds.parse().unwrap());
    for round in 0..rounds {
        let cut = Arc::new(recording.cut_after(recording.event_count()));
        let fs = open_on(Arc::clone(&cut) as _);
        for _ in 0..1 + random.below(2) {
            // The uuid tree is most of it and the least of interest.
            let (root, ptr) = loop {
                let (root, ptr) = blocks[random.index(blocks.len())];
                if root != RootId::UUID_TREE || random.chance(1, 20) {
                    break (root, ptr);
                }
            };
            let store = &fs.inner.core.roots.store;
            let mut bytes = vec![0; 4096];
            store.volume().read(ptr.addr, &mut bytes, &|_| Ok(())).unwrap();
            let count = u32::from_le_bytes(bytes[96..100].try_into().unwrap()) as usize;
            for _ in 0..1 + random.below(4) {
                // Keys and pointers at the front, or data anywhere.
                let end = if random.chance(1, 2) { 101 + 33 * count.max(1) } else { 4096 };
                let at = 96 + random.index(end.min(4096) - 96);
                let len = 1 + random.index((4096 - at).min(8));
                match random.below(3) {
                    0 => bytes[at..at + len].fill(0),
                    1 => bytes[at..at + len].fill(0xff),
                    _ => bytes[at] = bytes[at].wrapping_add(1 << random.below(8)),
                }
            }
            let csum = fs.csum_type().compute(&bytes[32..]);
            bytes[..32].copy_from_slice(&csum);
            store.volume().write(ptr.addr, &bytes).unwrap();
            let _ = root;
        }
        drop(fs);
        let seed = random.clone();
        let work = std::panic::AssertUnwindSafe(|| attack(&cut, &mut random));
        if let Err(panic) = std::panic::catch_unwind(work) {
            println!("round {round}, {seed:?}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Opens, changes, commits; every error is right.
fn attack(device: &Arc<ubtrfs_testkit::crash::CutDevice>, random: &mut Prng) {
    let device = Arc::clone(device) as Arc<dyn Device>;
    let Ok(volume) = Volume::open(vec![device], &VolumeOptions::default()) else { return };
    let Ok(fs) = Filesystem::open(volume, open_options()) else { return };
    for _ in 0..3 {
        for _ in 0..10 {
            let Ok(mut handle) = fs.begin(Reservation::items(2)) else { break };
            let key = key(random.below(300), random.below(4));
            let _ = match random.below(3) {
                0 => handle.txn.remove(RootId::UUID_TREE, key),
                1 => handle.txn.replace(RootId::UUID_TREE, key, &[1; 64]),
                _ => handle.txn.insert(RootId::UUID_TREE, key, &[1; 400]),
            };
        }
        let core = &fs.inner.core;
        if let Ok(handle) = fs.begin(Reservation::items(2)) {
            // Also data, and references to it taken back.
            let (root, inode) = (RootId::FS_TREE, ubtrfs_ondisk::InodeNo(257));
            if let Ok((start, len)) =
                core.alloc.allocate_data(&core.roots, 4096, 65_536, crate::alloc::DataPromise::None)
                && core.alloc.add_data(start, len, root, inode, 0).is_ok()
                && random.chance(1, 2)
                && core.alloc.drop_data(start, len, root, inode, 0)
            {
                core.alloc.release_data(start, len, crate::alloc::DataPromise::None);
            }
            drop(handle);
        }
        let _ = fs.commit();
    }
    let _ = fs.tree(RootId::UUID_TREE).map(|tree| {
        let mut cursor = tree.cursor();
        let _ = cursor.seek(&Key::MIN);
        for _ in 0..2000 {
            if !matches!(cursor.current(), Ok(Some(_))) || cursor.next().is_err() {
                break;
            }
        }
    });
}

/// Destroys the leaf of a tree that holds a key.
fn destroy_leaf(fs: &Filesystem, root: RootId, key: &Key) {
    let (ptr, _) = leaf_with(fs, root, key);
    fs.volume().write(ptr.addr, &[0x5a; 4096]).unwrap();
}

/// The leaf in which an item is, and its bytes.
fn leaf_with(fs: &Filesystem, root: RootId, key: &Key) -> (BlockPtr, Vec<u8>) {
    let store = &fs.inner.core.roots.store;
    let found = blocks_of(fs, root).into_iter().find_map(|ptr| {
        let block = store.read(&ptr, root, None).unwrap();
        let Block::Leaf(leaf) = &*block else { return None };
        let holds = (0..leaf.len()).any(|slot| leaf.key(slot) == *key);
        holds.then(|| (ptr, block.as_bytes().to_vec()))
    });
    found.unwrap()
}

/// Makes a file without a name in a directory, whose inode lies in another leaf than some of the files made with it.
fn orphan_among_others(fs: &Filesystem, dir: crate::InodeId) -> crate::InodeId {
    let new = crate::NewInode::new(0o100_644, ubtrfs_rt::Time::default());
    let create = |name: String| {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(dir, name.as_bytes(), &new).unwrap();
    };
    (0..60).for_each(|at| create(format!("before {at}")));
    let orphan = fs.begin(Reservation::create(0)).unwrap().create_unlinked(dir, &new).unwrap();
    (0..60).for_each(|at| create(format!("after {at}")));
    fs.commit().unwrap();
    orphan
}
/// What could not be removed at open was passed over in silence.
#[test]
fn orphan_that_cannot_be_removed_at_open_is_told_and_the_rest_goes_on() {
    use crate::{NewInode, Notice};
    use ubtrfs_rt::Time;
    let device = Arc::new(MemDevice::new(64 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs = mkfs_on(&device, &options);
    let top = fs.top_level();
    let new = NewInode::new(0o100_644, Time::default());
    let create = |fs: &Filesystem, name: &str| {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.create(top, name.as_bytes(), &new)
    };
    let orphan = orphan_among_others(&fs, top);
    drop(fs);
    let volume = Volume::open(vec![Arc::clone(&device) as _], &VolumeOptions::default()).unwrap();
    let read_only = OpenOptions { read_only: true, ..open_options() };
    let fs = Filesystem::open(volume, read_only).unwrap();
    assert!(fs.notices().is_empty());
    let item = Key::new(orphan.inode.object_id(), KeyType::INODE_ITEM, 0);
    destroy_leaf(&fs, RootId::FS_TREE, &item);
    drop(fs);

    for round in 0..2 {
        let fs = open_on(Arc::clone(&device) as _);
        let [notice] = fs.notices() else { panic!("{:?}", fs.notices()) };
        assert!(
            matches!(notice, Notice::OrphansNotCleaned { root: RootId::FS_TREE, .. }),
            "{notice}"
        );
        assert!(!notice.forbids_writing());
        assert!(notice.to_string().contains("without a name"), "{notice}");
        // What lies in other leaves can be read, and changed.
        let id = fs.lookup(top, b"before 1").unwrap();
        assert_eq!(fs.inode(id).unwrap().nlink, 1);
        create(&fs, &format!("new {round}")).unwrap();
        fs.commit().unwrap();
    }
}

/// A commit that came before the next change passed over what it could not clean, and nobody heard of
/// it.
#[test]
fn orphans_that_a_commit_cannot_clean_are_told_to_the_next_change() {
    use crate::NewInode;
    use ubtrfs_rt::Time;
    let device = Arc::new(MemDevice::new(64 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs = mkfs_on(&device, &options);
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let sub = handle.create_subvolume(fs.top_level(), b"sub", &new).unwrap();
    drop(handle);
    let create = |fs: &Filesystem, name: &str| {
        let mut handle = fs.begin(Reservation::create(0))?;
        handle.create(sub, name.as_bytes(), &new)
    };
    let orphan = orphan_among_others(&fs, sub);
    drop(fs);
    let volume = Volume::open(vec![Arc::clone(&device) as _], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, OpenOptions { read_only: true, ..open_options() }).unwrap();
    destroy_leaf(&fs, sub.root, &Key::new(orphan.inode.object_id(), KeyType::INODE_ITEM, 0));
    drop(fs);

    let fs = open_on(Arc::clone(&device) as _);
    assert!(fs.notices().is_empty());
    create(&fs, "new").unwrap();
    fs.commit().unwrap();
    let error = create(&fs, "told").unwrap_err();
    assert!(error.is_damage(), "{error}");
    create(&fs, "another").unwrap();
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(device);
    assert!(fs.lookup(sub, b"new").is_ok() && fs.lookup(sub, b"another").is_ok());
}

/// So was damage in what says which deleted subvolumes are to be freed.
#[test]
fn deleted_subvolume_that_cannot_be_looked_for_at_open_is_told() {
    use crate::{NewInode, Notice};
    use ubtrfs_rt::Time;
    let device = Arc::new(MemDevice::new(64 << 20));
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs = mkfs_on(&device, &options);
    let top = fs.top_level();
    let new = NewInode::new(0o040_755, Time::default());
    let ids: Vec<RootId> = (0..40)
        .map(|at| {
            let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
            handle.create_subvolume(top, format!("sub {at}").as_bytes(), &new).unwrap().root
        })
        .collect();
    fs.delete_subvolume(top, b"sub 20").unwrap();
    fs.commit().unwrap();
    drop(fs);
    let fs = open_on(Arc::clone(&device) as _);
    assert!(fs.notices().is_empty());
    assert_eq!(fs.next_deleted().unwrap(), Some(ids[20]), "it waits for who frees it");
    let item = fs.root_item(ids[20]).unwrap().unwrap().0;
    destroy_leaf(&fs, RootId::ROOT_TREE, &item);
    drop(fs);
    let fs = open_on(Arc::clone(&device) as _);
    let [notice] = fs.notices() else { panic!("{:?}", fs.notices()) };
    assert!(
        matches!(notice, Notice::OrphansNotCleaned { root: RootId::ROOT_TREE, .. }),
        "{notice}"
    );
    assert!(fs.clean_deleted_subvolumes().is_err());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(top, b"new", &NewInode::new(0o100_644, Time::default())).unwrap();
    drop(handle);
    fs.commit().unwrap();
}

/// One block that cannot be read, of a subvolume that nobody wants any more, stopped the filesystem, in this session and in each that followed.
#[test]
fn damaged_block_of_a_deleted_subvolume_stops_nothing() {
    for is_shared in [false, true] {
        let device = Arc::new(MemDevice::new(64 << 20));
        let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
        let fs = mkfs_on(&device, &options);
        let top = fs.top_level();
        let new = |mode| crate::NewInode::new(mode, ubtrfs_rt::Time::default());
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        let sub = handle.create_subvolume(top, b"sub", &new(0o040_755)).unwrap();
        drop(handle);
        let create = |fs: &Filesystem, dir, name: String| {
            let mut handle = fs.begin(Reservation::create(0)).unwrap();
            handle.create(dir, name.as_bytes(), &new(0o100_644)).unwrap()
        };
        let ids: Vec<_> = (0..600).map(|at| create(&fs, sub, format!("file {at}"))).collect();
        fs.commit().unwrap();
        if is_shared {
            let options = crate::SnapshotOptions::default();
            fs.snapshot(sub.root, top, b"snapshot", &options).unwrap();
        }
        fs.commit().unwrap();
        let key = Key::new(ids[300].inode.object_id(), KeyType::INODE_ITEM, 0);
        let (ptr, whole) = leaf_with(&fs, sub.root, &key);
        fs.delete_subvolume(top, b"sub").unwrap();
        let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
        let later = handle.create_subvolume(top, b"later", &new(0o040_755)).unwrap().root;
        drop(handle);
        fs.delete_subvolume(top, b"later").unwrap();
        fs.commit().unwrap();
        fs.volume().write(ptr.addr, &[0x5a; 4096]).unwrap();
        drop(fs);

        for round in 0..3 {
            let fs = open_on(Arc::clone(&device) as _);
            let generation = || fs.superblock().generation.get();
            let error = match round {
                0 => fs.clean_deleted_subvolumes().map(drop).unwrap_err(),
                _ => (0..1000).find_map(|_| fs.clean_deleted_step(8).err()).unwrap(),
            };
            assert!(error.is_damage(), "{error}");
            while fs.clean_deleted_step(8).unwrap() {}
            assert!(fs.root_item(later).unwrap().is_none(), "what is not damaged goes");
            fs.commit().unwrap();
            let before = generation();
            assert!(!fs.clean_deleted_step(8).unwrap(), "it is passed over");
            assert!(fs.clean_deleted_subvolumes().unwrap_err().is_damage());
            fs.commit().unwrap();
            assert_eq!(generation(), before, "there was nothing to commit");
            create(&fs, top, format!("new {round}"));
            fs.commit().unwrap();
        }
        // What was dropped is, and what was not is known: once the block is back, the rest goes.
        let fs = open_on(Arc::clone(&device) as _);
        fs.volume().write(ptr.addr, &whole).unwrap();
        assert_eq!(fs.clean_deleted_subvolumes().unwrap(), 1);
        fs.commit().unwrap();
        drop(fs);
        judge(&*device);
    }
}
