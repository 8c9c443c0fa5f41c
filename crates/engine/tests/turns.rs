//! The kernel and the engine write to one filesystem in turns; each finds what the other left.

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{
    Filesystem, Method, MkfsOptions, NewInode, OpenOptions, PreparedData, Reservation, mkfs,
};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, Prng, TreeSnapshot, assert_checks_clean, oracle,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

const TIME: Time = Time { sec: 1_650_000_000, nsec: 7 };

/// Adds a directory with files, links and a subvolume to the top level and to each directory that
/// was made before.
fn engine_turn(image: &Path, turn: usize, prng: &mut Prng) {
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap());
    let volume = Volume::open(vec![device], &VolumeOptions::default()).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let top = fs.top_level();
    let mut places = vec![top];
    for before in 0..turn {
        for name in [format!("engine{before}"), format!("kernel{before}")] {
            places.push(fs.resolve(top, name.as_bytes()).unwrap());
        }
    }
    let name = format!("engine{turn}");
    for place in places {
        let mut handle = fs.begin(Reservation::items(100)).unwrap();
        let new = NewInode::new(0o040_755, TIME);
        let dir = handle.create(place, name.as_bytes(), &new).unwrap();
        handle.set_xattr(dir, b"user.turn", name.as_bytes()).unwrap();
        handle.symlink(dir, b"link", name.as_bytes(), &new).unwrap();
        let sub = handle.create_subvolume(dir, b"sub", &new).unwrap();
        drop(handle);
        for (index, dir) in [dir, sub].into_iter().cycle().take(40).enumerate() {
            let method = match index % 4 {
                0 => None,
                1 => Some(Compression::Zlib),
                2 => Some(Compression::Lzo),
                _ => Some(Compression::Zstd),
            };
            let options = fs.write_options(method.map(Method::with_default_level));
            let len = prng.index(100_000);
            let bytes = if index % 5 == 0 { prng.bytes(len) } else { prng.text(len) };
            let mut handle = fs.begin(Reservation::items(30)).unwrap();
            let new = NewInode::new(0o100_644, TIME);
            let id = handle.create(dir, format!("file{index}").as_bytes(), &new).unwrap();
            let data = PreparedData::new(bytes, &options);
            handle.write_file(id, vec![(FileOffset(0), data)], len as u64).unwrap();
            handle.link(dir, format!("again{index}").as_bytes(), id).unwrap();
        }
    }
    fs.commit().unwrap();
}

/// Changes, removes and adds files, as the kernel.
fn kernel_turn(image: &Path, turn: usize, options: &str, prng: &mut Prng) {
    let mount = KernelMount::read_write(image, options);
    let top = mount.path();
    let dir = top.join(format!("kernel{turn}"));
    fs::create_dir(&dir).unwrap();
    for index in 0..50 {
        let len = prng.index(50_000);
        fs::write(dir.join(format!("new{index}")), prng.text(len)).unwrap();
    }
    let ours = top.join(format!("engine{turn}"));
    for index in (0..40).step_by(6) {
        let name = format!("file{index}");
        fs::remove_file(ours.join(&name)).unwrap();
        let kept = ours.join(format!("again{}", index + 2));
        let mut bytes = fs::read(&kept).unwrap();
        bytes.extend(prng.text(5000));
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&kept, bytes).unwrap();
    }
    fs::rename(ours.join("link"), dir.join("link of the engine's")).unwrap();
    fs::write(ours.join("sub").join("from the kernel"), b"hello").unwrap();
    mount.unmount();
}

fn both_see_the_same(image: &Path) {
    assert_checks_clean(image);
    let mount = KernelMount::read_only(image, "subvolid=5");
    let kernel = TreeSnapshot::of_directory(mount.path());
    mount.unmount();
    let fs = common::open(&[image]);
    let ours = common::snapshot(&fs, fs.top_level());
    kernel.assert_same(&ours, &Compare::same_filesystem());
}

#[test]
fn kernel_and_engine_write_in_turns() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let old = MkfsOptions {
        no_holes: false,
        block_group_tree: false,
        nodesize_bytes: 4096,
        ..MkfsOptions::default()
    };
    for (index, (made, mounted)) in
        [(MkfsOptions::default(), "compress=zstd"), (old, "compress-force=lzo,autodefrag")]
            .into_iter()
            .enumerate()
    {
        let mut prng = Prng::new(40 + index as u64);
        let image = directory.path().join(format!("image{index}"));
        let mode = OpenMode::CreateNew { len_bytes: 512 << 20 };
        let device: Arc<dyn Device> =
            Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
        drop(mkfs(vec![device], &made, &Arc::new(Runtime::system())).unwrap());
        for turn in 0..3 {
            engine_turn(&image, turn, &mut prng);
            both_see_the_same(&image);
            kernel_turn(&image, turn, mounted, &mut prng);
            both_see_the_same(&image);
        }
    }
}
