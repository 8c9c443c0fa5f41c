//! Trees, allocator and commit against a `BTreeMap`, judged by `btrfs check`.
//!
//! The items are those of the uuid tree: any key of type UUID_KEY_SUBVOL holds any number of
//! subvolume ids, so that a test is free in keys and lengths and the image stays a valid one.

use std::collections::BTreeMap;
use std::path::Path;

use ubtrfs_ondisk::{Key, KeyType, ObjectId, RootId};
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_testkit::{Oracle, Prng, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use super::{Core, Leaves};
use crate::alloc::Left;
use crate::{Filesystem, MkfsOptions, OpenOptions, Reservation, mkfs};

mod crash;
mod faults;
mod fragments;
mod free_space_forms;
mod full;
mod hostile;
mod limits;
mod races;
mod readahead;
mod trees;

type Model = BTreeMap<Key, Vec<u8>>;

fn key(objectid: u64, offset: u64) -> Key {
    Key::new(ObjectId(objectid), KeyType::UUID_KEY_SUBVOL, offset)
}

/// What [`take_metadata`] takes at a time.
const PIECE: u64 = 64 << 10;

/// Promises all metadata that there is; returns how much.
fn take_metadata(core: &Core) -> u64 {
    let nothing = Left { freeing_bytes: 0, storing_bytes: 0, by: Leaves::Nothing };
    let mut taken = 0;
    while matches!(core.alloc.reserve(&core.roots, PIECE, 0, 0, nothing), Ok(true)) {
        taken += PIECE;
    }
    taken
}

fn device(path: &Path, len_bytes: u64) -> Arc<dyn Device> {
    std::fs::File::create(path).unwrap().set_len(len_bytes).unwrap();
    Arc::new(FileDevice::open(path, OpenMode::ReadWrite, Window::Whole).unwrap())
}

fn make(path: &Path, len_bytes: u64, options: &MkfsOptions) -> Filesystem {
    let volume = mkfs(vec![device(path, len_bytes)], options, &runtime()).unwrap();
    Filesystem::open(volume, open_options()).unwrap()
}

fn runtime() -> Arc<Runtime> {
    Arc::new(Runtime::simulated(1))
}

fn open_options() -> OpenOptions {
    OpenOptions { runtime: runtime(), cache_bytes: 4 << 20, ..OpenOptions::default() }
}

fn reopen(path: &Path) -> Filesystem {
    let device = FileDevice::open(path, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, open_options()).unwrap()
}

fn mkfs_on(device: &Arc<impl Device + 'static>, options: &MkfsOptions) -> Filesystem {
    let device = Arc::clone(device) as Arc<dyn Device>;
    let volume = mkfs(vec![device], options, &runtime()).unwrap();
    Filesystem::open(volume, open_options()).unwrap()
}

fn open_on(device: Arc<dyn Device>) -> Filesystem {
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, open_options()).unwrap()
}

/// Writes what a device in memory holds to a file, for judges that read files.
fn write_image(device: &dyn Device, image: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(image).unwrap();
    file.set_len(device.len_bytes()).unwrap();
    let mut piece = vec![0; 64 << 10];
    for at in (0..device.len_bytes()).step_by(piece.len()) {
        device.read_at(ubtrfs_ondisk::PhysicalAddr(at), &mut piece).unwrap();
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(&piece, at).unwrap();
        }
    }
}

/// Both modes of `btrfs check`, of what a device in memory holds.
fn judge(device: &dyn Device) {
    if !oracle::require(Oracle::BtrfsProgs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    write_image(device, &image);
    assert_checks_clean(&image);
}

fn insert(fs: &Filesystem, key: Key, data: &[u8]) {
    let mut handle = fs.begin(Reservation::items(1)).unwrap();
    handle.txn.insert(RootId::UUID_TREE, key, data).unwrap();
}

fn contents(fs: &Filesystem) -> Model {
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let mut cursor = tree.cursor();
    cursor.seek(&Key::MIN).unwrap();
    let mut items = Model::new();
    while let Some((key, data)) = cursor.current().unwrap() {
        items.insert(key, data.to_vec());
        cursor.next().unwrap();
    }
    items
}

fn contents_backward(fs: &Filesystem) -> Vec<Key> {
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let mut cursor = tree.cursor();
    cursor.seek_back(&Key::MAX).unwrap();
    let mut keys = Vec::new();
    while let Some((key, _)) = cursor.current().unwrap() {
        keys.push(key);
        cursor.prev().unwrap();
    }
    keys.reverse();
    keys
}

fn random_data(random: &mut Prng, leaf_bytes: u64) -> Vec<u8> {
    // Now and then an item as large as half a leaf, which forces splits in three.
    let large = leaf_bytes / 16;
    let words = if random.chance(1, 20) { random.below(large) } else { 1 + random.below(20) };
    let len = usize::try_from(words.max(1) * 8).unwrap();
    random.bytes(len)
}

/// One random change, made to the filesystem and the model.
fn change(fs: &Filesystem, model: &mut Model, random: &mut Prng, key_space: u64, grow: bool) {
    let key = key(random.below(key_space), random.below(4));
    let mut handle = fs.begin(Reservation::items(2)).unwrap();
    let known = model.contains_key(&key);
    if known && !grow && random.chance(3, 4) {
        handle.txn.remove(RootId::UUID_TREE, key).unwrap();
        model.remove(&key);
        return;
    }
    let data = random_data(random, fs.nodesize_bytes());
    if known {
        handle.txn.replace(RootId::UUID_TREE, key, &data).unwrap();
    } else {
        handle.txn.insert(RootId::UUID_TREE, key, &data).unwrap();
    }
    model.insert(key, data);
}

fn run_model(options: &MkfsOptions, seed: u64, rounds: u64, key_space: u64) {
    let mut random = Prng::of_test(seed);
    println!("seed {}", random.seed());
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let mut fs = make(&image, 256 << 20, options);
    let mut model = contents(&fs);
    for round in 0..rounds {
        // Rounds that grow, rounds that shrink: trees gain and lose levels.
        let grow = round * 2 < rounds;
        for _ in 0..random.below(800) {
            change(&fs, &mut model, &mut random, key_space, grow);
        }
        if random.chance(1, 2) {
            fs.commit().unwrap();
        }
        if random.chance(1, 4) {
            fs.commit().unwrap();
            drop(fs);
            fs = reopen(&image);
        }
        assert!(contents(&fs) == model, "round {round}");
        assert!(contents_backward(&fs).iter().eq(model.keys()), "round {round}, backward");
    }
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn random_items_agree_with_the_model_and_btrfs_check() {
    run_model(&MkfsOptions::default(), 1, 40, 2000);
}

#[test]
fn random_items_in_small_nodes_agree_with_the_model_and_btrfs_check() {
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let mut random = Prng::of_test(2);
    println!("seed {}", random.seed());
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, 256 << 20, &options);
    let mut model = contents(&fs);
    for round in 0..30_u64 {
        for _ in 0..500 {
            let key = key(random.below(5000), random.below(2));
            let mut handle = fs.begin(Reservation::items(2)).unwrap();
            if model.remove(&key).is_some() {
                handle.txn.remove(RootId::UUID_TREE, key).unwrap();
            } else {
                let words = usize::try_from(1 + random.below(40)).unwrap();
                let data = random.bytes(words * 8);
                handle.txn.insert(RootId::UUID_TREE, key, &data).unwrap();
                model.insert(key, data);
            }
        }
        if round % 3 == 0 {
            fs.commit().unwrap();
        }
        assert!(contents(&fs) == model, "round {round}");
        assert!(contents_backward(&fs).iter().eq(model.keys()), "round {round}, backward");
    }
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn random_items_without_block_group_tree_agree_with_the_model_and_btrfs_check() {
    let options = MkfsOptions { block_group_tree: false, ..MkfsOptions::default() };
    run_model(&options, 3, 20, 1000);
}

#[test]
fn random_items_without_free_space_tree_agree_with_the_model_and_btrfs_check() {
    let options = MkfsOptions {
        block_group_tree: false,
        free_space_tree: false,
        no_holes: false,
        ..MkfsOptions::default()
    };
    run_model(&options, 4, 20, 1000);
}

#[test]
fn items_in_order_fill_leaves_whole() {
    let dir = tempfile::tempdir().unwrap();
    let fs = make(&dir.path().join("image"), 256 << 20, &MkfsOptions::default());
    for at in 0..20_000_u64 {
        let mut handle = fs.begin(Reservation::items(1)).unwrap();
        handle.txn.insert(RootId::UUID_TREE, key(1000, at), &[0; 16]).unwrap();
    }
    fs.commit().unwrap();
    let tree = fs.tree(RootId::UUID_TREE).unwrap();
    let leaf_bytes = fs.nodesize_bytes() - 101;
    let leaves = (20_000 * (25 + 16_u64)).div_ceil(leaf_bytes);
    let blocks = tree.read().bytes_used / fs.nodesize_bytes();
    assert!(blocks <= leaves + leaves / 100 + 2, "{blocks} blocks for {leaves} full leaves");
}

#[test]
fn metadata_that_runs_out_fails_at_begin_and_the_image_stays_clean() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, 24 << 20, &MkfsOptions::default());
    let mut model = contents(&fs);
    let error = (0_u64..)
        .find_map(|at| {
            let mut handle = match fs.begin(Reservation::items(1)) {
                Ok(handle) => handle,
                Err(error) => return Some(error),
            };
            handle.txn.insert(RootId::UUID_TREE, key(at, 0), &[7; 800]).unwrap();
            model.insert(key(at, 0), vec![7; 800]);
            assert!(at < 1_000_000, "a small filesystem fills up");
            None
        })
        .unwrap();
    assert!(matches!(error, crate::Error::NoSpace { .. }), "{error}");
    fs.commit().unwrap();
    assert!(contents(&fs) == model);
    drop(fs);
    let fs = reopen(&image);
    assert!(contents(&fs) == model);
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

/// A transaction that a handle opened and nothing changed was committed with a new superblock,
/// whose generation the root tree's root did not have: the filesystem did not open again.
#[test]
fn empty_transaction_leaves_the_filesystem_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let fs = make(&image, 64 << 20, &MkfsOptions::default());
    let generation = fs.superblock().generation;
    drop(fs.begin(Reservation::items(1)).unwrap());
    fs.commit().unwrap();
    assert_eq!(fs.superblock().generation, generation);
    drop(fs);
    reopen(&image);
}

/// Kinds of items in the free space tree.
fn free_space_keys(fs: &Filesystem) -> Vec<KeyType> {
    let tree = fs.tree(RootId::FREE_SPACE_TREE).unwrap();
    let mut cursor = tree.cursor();
    cursor.seek(&Key::MIN).unwrap();
    let mut keys = Vec::new();
    while let Some((key, _)) = cursor.current().unwrap() {
        keys.push(key.ty);
        cursor.next().unwrap();
    }
    keys
}

/// Inserts items at random keys, each transaction one, so that every commit frees and takes blocks
/// all over the small metadata group. Returns the searches for the form of its free space.
fn fragment(image: &Path, cache_free_space_form: bool) -> u64 {
    let volume = mkfs(vec![device(image, 64 << 20)], &MkfsOptions::default(), &runtime()).unwrap();
    let options = OpenOptions { cache_free_space_form, ..open_options() };
    let fs = Filesystem::open(volume, options).unwrap();
    let mut random = Prng::of_test(5);
    println!("seed {}", random.seed());
    let mut model = contents(&fs);
    let mut seen_bitmaps = false;
    for round in 0..400 {
        change(&fs, &mut model, &mut random, 3000, round < 300);
        if round >= 20 {
            fs.commit().unwrap();
        }
        seen_bitmaps |= free_space_keys(&fs).contains(&KeyType::FREE_SPACE_BITMAP);
    }
    assert!(seen_bitmaps, "the group never went to bitmaps: the test shows nothing");
    assert!(contents(&fs) == model);
    fs.commit().unwrap();
    let searches = fs.free_space_form_searches();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
    assert!(contents(&reopen(image)) == model);
    searches
}

#[test]
fn fragmented_free_space_goes_to_bitmaps_and_its_form_is_searched_once() {
    let dir = tempfile::tempdir().unwrap();
    let remembered = fragment(&dir.path().join("remembered"), true);
    let searched = fragment(&dir.path().join("searched"), false);
    println!("searches for the form: {remembered} remembered, {searched} not");
    assert!(remembered <= 4, "at most one a group, not {remembered}");
    assert!(searched > 100 * remembered.max(1), "{searched} against {remembered}");
}
