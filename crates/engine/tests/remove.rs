//! Files removed, some in the transaction that made them, judged by `btrfs check`.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_engine::{
    Error, Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, PreparedData,
    Reservation, mkfs,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{Oracle, Prng, assert_checks_clean, oracle};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

fn create(fs: &Filesystem, name: &[u8], bytes: &[u8], method: Option<Method>) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(fs.top_level(), name, &new).unwrap();
    drop(handle);
    let options = fs.write_options(method);
    let mut appender = fs.appender(id, bytes.len() as u64).unwrap();
    for (at, part) in (0..).zip(bytes.chunks(1 << 20)) {
        let data = PreparedData::new(part.to_vec(), &options);
        appender.push(FileOffset(at << 20), data).unwrap();
    }
    appender.finish().unwrap();
    id
}

fn random_contents(random: &mut Prng) -> Vec<u8> {
    let len = match random.below(4) {
        0 => random.below(2048),
        1 => random.below(64 << 10),
        2 => random.below(1 << 20),
        _ => random.below(3 << 20),
    };
    let len = usize::try_from(len).unwrap();
    if random.chance(1, 2) { random.bytes(len) } else { random.text(len) }
}

#[test]
fn unlink_of_files_in_and_after_their_transaction_leaves_a_clean_image() {
    let mut random = Prng::of_test(11);
    println!("seed {}", random.seed());
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 512 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let runtime = Arc::new(Runtime::system());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let top = fs.top_level();
    let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    for round in 0..300_u32 {
        if random.chance(2, 5) && !model.is_empty() {
            let name = model.keys().nth(random.index(model.len())).unwrap().clone();
            fs.unlink(top, &name).unwrap();
            model.remove(&name);
            assert!(matches!(fs.unlink(top, &name), Err(Error::NotFound { .. })));
        } else {
            let name = format!("file {round}").into_bytes();
            let bytes = random_contents(&mut random);
            let method = random.chance(1, 2).then(|| Method::with_default_level(Compression::Zstd));
            create(&fs, &name, &bytes, method);
            model.insert(name, bytes);
        }
        if random.chance(1, 8) {
            fs.commit().unwrap();
        }
    }
    let names: Vec<Vec<u8>> =
        fs.read_dir(top, 0).unwrap().map(|entry| entry.unwrap().name).collect();
    assert_eq!(names.len(), model.len());
    for (name, bytes) in &model {
        let id = fs.lookup(top, name).unwrap();
        let mut have = vec![0; bytes.len()];
        assert_eq!(fs.read(id, FileOffset(0), &mut have).unwrap(), bytes.len());
        assert!(have == *bytes, "{}", String::from_utf8_lossy(name));
    }
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn unlink_of_links_removes_the_file_with_the_last() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes: 128 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let runtime = Arc::new(Runtime::system());
    // Small nodes hold few references of one directory: the others are extended ones.
    let options = MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() };
    let fs =
        Filesystem::open(mkfs(vec![device], &options, &runtime).unwrap(), OpenOptions::default())
            .unwrap();
    let top = fs.top_level();
    let id = create(&fs, b"0", b"contents", None);
    for at in 1..200 {
        let mut handle = fs.begin(Reservation::items(8)).unwrap();
        handle.link(top, format!("{at:0>100}").as_bytes(), id).unwrap();
    }
    fs.commit().unwrap();
    for at in 1..200 {
        fs.unlink(top, format!("{at:0>100}").as_bytes()).unwrap();
        assert_eq!(fs.inode(id).unwrap().nlink, 200 - at);
        if at == 100 {
            fs.commit().unwrap();
        }
    }
    fs.unlink(top, b"0").unwrap();
    assert!(matches!(fs.inode(id), Err(Error::NotFound { .. })));
    assert_eq!(fs.inode(top).unwrap().size_bytes, 0);
    fs.commit().unwrap();
    drop(fs);
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(&image);
    }
}

#[test]
fn unlink_of_a_directory_is_refused() {
    let device = Arc::new(ubtrfs_volume::MemDevice::new(128 << 20));
    let runtime = Arc::new(Runtime::system());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let new = NewInode::new(0o040_755, Time::default());
    fs.begin(Reservation::create(0)).unwrap().create(fs.top_level(), b"d", &new).unwrap();
    assert!(matches!(fs.unlink(fs.top_level(), b"d"), Err(Error::IsDirectory { .. })));
}
