//! Files written, cut, extended and cloned at random, beside a model in memory, judged by `btrfs
//! check` with all checksums and by what the kernel reads.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{judge, open_for_writing};
use ubtrfs_engine::{
    Error, Filesystem, InodeId, MappingKind, Method, NewInode, OpenOptions, Reservation,
    SetAttributes, SnapshotOptions,
};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{FileOffset, RootId};
use ubtrfs_rt::Time;
use ubtrfs_testkit::{MkfsBtrfs, Oracle, Prng, oracle};
use ubtrfs_volume::{FileDevice, OpenMode, Volume, VolumeOptions, Window};

const SECTOR: u64 = 4096;

fn make(directory: &Path, options: &str) -> PathBuf {
    let image = directory.join("image");
    MkfsBtrfs::new().options(options).size_bytes(512 << 20).make(&image);
    image
}

fn create(fs: &Filesystem, name: &str) -> InodeId {
    let new = NewInode::new(0o100_644, Time::default());
    let mut handle = fs.begin(Reservation::create(1)).unwrap();
    handle.create(fs.top_level(), name.as_bytes(), &new).unwrap()
}

fn set_flags(fs: &Filesystem, id: InodeId, bits: u64) {
    let mut handle = fs.begin(Reservation::items(4)).unwrap();
    let attributes = SetAttributes { flags: Some(bits), ..SetAttributes::default() };
    handle.set_attributes(id, &attributes).unwrap();
    if bits & flags::COMPRESS != 0 {
        handle.set_xattr(id, b"btrfs.compression", b"zstd").unwrap();
    }
}

struct Model {
    files: BTreeMap<InodeId, Vec<u8>>,
}

impl Model {
    fn pick(&self, random: &mut Prng) -> InodeId {
        *self.files.keys().nth(random.index(self.files.len())).unwrap()
    }

    fn step(&mut self, fs: &Filesystem, random: &mut Prng) {
        let id = self.pick(random);
        let bytes = self.files.get_mut(&id).unwrap();
        match random.below(10) {
            0..4 => {
                // Some small enough to stay inline.
                let (max_offset, max_len) = match random.below(3) {
                    0 => (2000, 500),
                    1 => (100_000, 20_000),
                    _ => (3_000_000, 600_000),
                };
                let offset = random.index(max_offset.min(bytes.len() + 5000) + 1);
                let len = random.index(max_len);
                let data = if random.chance(1, 2) { random.bytes(len) } else { random.text(len) };
                fs.write(id, FileOffset(offset as u64), &data).unwrap();
                if len > 0 {
                    bytes.resize(bytes.len().max(offset + len), 0);
                    bytes[offset..offset + len].copy_from_slice(&data);
                }
            }
            4..6 => {
                let size = match random.below(4) {
                    0 => 0,
                    1 => random.index(3000),
                    _ => random.index(bytes.len() + 50_000),
                };
                fs.truncate(id, size as u64).unwrap();
                bytes.resize(size, 0);
            }
            _ => self.clone_some(fs, random, id),
        }
    }

    fn clone_some(&mut self, fs: &Filesystem, random: &mut Prng, source: InodeId) {
        let target = self.pick(random);
        let from = self.files[&source].clone();
        let to = self.files.get_mut(&target).unwrap();
        if random.chance(1, 3) {
            let start = random.index(from.len() + 1);
            let end = start + random.index(300_000);
            let offset = random.index(to.len() + 10_000);
            let range = FileOffset(start as u64)..FileOffset(end as u64);
            let copied = fs.copy_range(source, range, target, FileOffset(offset as u64));
            let end = end.min(from.len());
            let overlaps =
                source == target && start < end && offset < end && start < offset + (end - start);
            if overlaps {
                assert!(matches!(copied, Err(Error::InvalidArgument { .. })), "{copied:?}");
                return;
            }
            assert_eq!(copied.unwrap(), (end - start) as u64);
            if start < end {
                to.resize(to.len().max(offset + end - start), 0);
                to[offset..offset + end - start].copy_from_slice(&from[start..end]);
            }
            return;
        }
        let sector = usize::try_from(SECTOR).unwrap();
        let start = random.index(from.len() / sector + 1) * sector;
        let end = match random.chance(1, 2) {
            true => from.len(),
            false => (start + random.index(100) * sector).min(from.len() / sector * sector),
        };
        let offset = random.index(to.len() / sector + 3) * sector;
        let range = FileOffset(start as u64)..FileOffset(end as u64);
        let result = fs.clone_range(source, range, target, FileOffset(offset as u64));
        let is_wrong = start > end
            || !end.is_multiple_of(sector) && offset + end - start < to.len()
            || source == target && offset < end && start < offset + (end - start);
        if is_wrong {
            assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
            return;
        }
        result.unwrap();
        if start < end {
            to.resize(to.len().max(offset + end - start), 0);
            to[offset..offset + end - start].copy_from_slice(&from[start..end]);
        }
    }

    fn check(&self, fs: &Filesystem) {
        for (id, bytes) in &self.files {
            assert_eq!(fs.inode(*id).unwrap().size_bytes, bytes.len() as u64, "{id}");
            let mut have = vec![0; bytes.len()];
            assert_eq!(fs.read(*id, FileOffset(0), &mut have).unwrap(), bytes.len());
            let differs = have.iter().zip(bytes).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{id}");
        }
    }
}

#[test]
fn random_changes_of_files_are_what_a_model_and_the_kernel_say() {
    if !oracle::require_all(&[
        Oracle::MkfsBtrfs,
        Oracle::BtrfsProgs,
        Oracle::KernelBtrfs,
        Oracle::Root,
    ]) {
        return;
    }
    for (options, default_seed) in [("", 51), ("-O ^no-holes", 52), ("--csum sha256 -n 4096", 53)] {
        let mut random = Prng::of_test(default_seed);
        println!("seed {} {options}", random.seed());
        let directory = tempfile::tempdir().unwrap();
        let image = make(directory.path(), options);
        let mut fs = open_for_writing(&image);
        let mut model = Model { files: BTreeMap::new() };
        for number in 0..6 {
            let id = create(&fs, &format!("file {number}"));
            if number % 3 == 1 {
                set_flags(&fs, id, flags::COMPRESS);
            }
            model.files.insert(id, Vec::new());
        }
        for round in 0..360 {
            model.step(&fs, &mut random);
            if random.chance(1, 12) {
                model.check(&fs);
            }
            if random.chance(1, 15) {
                fs.commit().unwrap();
            }
            if random.chance(1, 60) {
                let name = format!("snapshot {round}");
                let options = SnapshotOptions { read_only: true };
                fs.snapshot(RootId::FS_TREE, fs.top_level(), name.as_bytes(), &options).unwrap();
            }
            if round % 120 == 119 {
                model.check(&fs);
                fs.commit().unwrap();
                drop(fs);
                judge(&image);
                fs = open_for_writing(&image);
                model.check(&fs);
            }
        }
    }
}

#[test]
fn clone_shares_extents_across_subvolumes_and_dedupe_only_what_is_equal() {
    if !oracle::require_all(&[
        Oracle::MkfsBtrfs,
        Oracle::BtrfsProgs,
        Oracle::KernelBtrfs,
        Oracle::Root,
    ]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = make(directory.path(), "");
    let fs = open_for_writing(&image);
    let mut random = Prng::of_test(60);
    let source = create(&fs, "source");
    let bytes = random.bytes(1 << 20);
    fs.write(source, FileOffset(0), &bytes).unwrap();
    let new = NewInode::new(0o755, Time::default());
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let top = handle.create_subvolume(fs.top_level(), b"subvolume", &new).unwrap();
    let file = NewInode::new(0o100_644, Time::default());
    drop(handle);
    let target = fs.begin(Reservation::create(0)).unwrap().create(top, b"copy", &file).unwrap();
    let whole = FileOffset(0)..FileOffset(1 << 20);
    fs.clone_range(source, whole.clone(), target, FileOffset(0)).unwrap();
    let extents = |id| -> Vec<_> {
        fs.file_extents(id, FileOffset(0)).unwrap().map(|m| m.unwrap().disk_bytenr).collect()
    };
    assert_eq!(extents(source), extents(target));

    // Equal bytes in an extent of its own, then one byte that differs.
    let twin = create(&fs, "twin");
    fs.write(twin, FileOffset(0), &bytes).unwrap();
    assert_ne!(extents(source), extents(twin));
    assert!(fs.dedupe_range(source, whole.clone(), twin, FileOffset(0)).unwrap());
    assert_eq!(extents(source), extents(twin));
    fs.write(twin, FileOffset(70_000), &[!bytes[70_000]]).unwrap();
    let before = extents(twin);
    assert!(!fs.dedupe_range(source, whole.clone(), twin, FileOffset(0)).unwrap());
    assert_eq!(extents(twin), before);

    // Without checksums on one side, Linux refuses, too.
    let plain = create(&fs, "plain");
    set_flags(&fs, plain, flags::NODATASUM | flags::NODATACOW);
    let refused = fs.clone_range(source, whole, plain, FileOffset(0)).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument { .. }));
    fs.unlink(fs.top_level(), b"source").unwrap();
    fs.commit().unwrap();
    drop(fs);
    judge(&image);
}

/// Data that was decoded for a read in part was kept under its address and generation: a file of
/// the same transaction that got the address next showed the first one's bytes.
#[test]
fn extent_that_is_reused_in_its_transaction_is_decoded_again() {
    let directory = tempfile::tempdir().unwrap();
    if !oracle::require(Oracle::MkfsBtrfs) {
        return;
    }
    let image = make(directory.path(), "");
    let fs = open_for_writing(&image);
    let mut seen = Vec::new();
    for byte in [b'a', b'b'] {
        let id = create(&fs, "file");
        set_flags(&fs, id, flags::COMPRESS);
        fs.write(id, FileOffset(0), &vec![byte; 100_000]).unwrap();
        let extent = fs.file_extents(id, FileOffset(0)).unwrap().next().unwrap().unwrap();
        assert_eq!(extent.kind, MappingKind::Data);
        seen.push(extent.disk_bytenr);
        let mut part = [0; 10];
        fs.read(id, FileOffset(50_000), &mut part).unwrap();
        assert_eq!(part, [byte; 10]);
        fs.unlink(fs.top_level(), b"file").unwrap();
    }
    assert_eq!(seen[0], seen[1], "the address was to be used again");
}

/// As Linux's `compress`, `compress-force` and `max_inline`: who says nothing follows the option, a property chooses another
/// algorithm, a flag refuses unless it is forced; what does not look like it would shrink is left alone unless it is forced.
#[test]
fn options_at_opening_choose_compression_and_inline_data() {
    let dir = tempfile::tempdir().unwrap();
    let image = make(dir.path(), "");
    let zstd = Method::new(Compression::Zstd, 1);
    let lzo = Method::new(Compression::Lzo, 0);
    let (none, z, l, d) =
        (Compression::None, Compression::Zstd, Compression::Lzo, Compression::Zlib);
    // Said nothing, refused, property zlib, flag alone; and what looks like noise.
    let cases = [
        (None, false, [none, none, d, d, none]),
        (Some(zstd), false, [z, none, d, z, none]),
        (Some(lzo), false, [l, none, d, l, none]),
        (Some(lzo), true, [l, l, d, l, none]),
    ];
    let (text, noise) = (Prng::new(1).text(300_000), Prng::new(2).bytes(300_000));
    for (index, (compression, force_compression, expect)) in cases.into_iter().enumerate() {
        let options = OpenOptions { compression, force_compression, ..OpenOptions::default() };
        let fs = open_with(&image, options);
        for (at, expect) in expect.into_iter().enumerate() {
            for is_open in [false, true] {
                let id = create(&fs, &format!("{index} {at} {is_open}"));
                let mut handle = fs.begin(Reservation::items(4)).unwrap();
                let flag = |bits| SetAttributes { flags: Some(bits), ..SetAttributes::default() };
                match at {
                    1 => handle.set_attributes(id, &flag(flags::NOCOMPRESS)).unwrap(),
                    2 => handle.set_xattr(id, b"btrfs.compression", b"zlib").unwrap(),
                    3 => handle.set_attributes(id, &flag(flags::COMPRESS)).unwrap(),
                    _ => {}
                }
                drop(handle);
                let bytes = if at == 4 { &noise } else { &text };
                if is_open {
                    let file = fs.open_data(id).unwrap();
                    file.write(ubtrfs_iomap::FileOffset::ZERO, bytes).unwrap();
                    file.fsync().unwrap();
                } else {
                    fs.write(id, FileOffset(0), bytes).unwrap();
                }
                let extents = fs.file_extents(id, FileOffset(0)).unwrap();
                let mut found: Vec<_> = extents.map(|m| m.unwrap().compression).collect();
                found.dedup();
                assert_eq!(found, [expect], "case {index}, file {at}, open: {is_open}");
            }
        }
        fs.sync().unwrap();
    }
    let limits = [(0, false), (99, false), (100, true), (1 << 20, true), (usize::MAX, true)];
    for (max_inline_bytes, is_inline) in limits {
        let fs = open_with(&image, OpenOptions { max_inline_bytes, ..OpenOptions::default() });
        let id = create(&fs, &format!("inline {max_inline_bytes}"));
        fs.write(id, FileOffset(0), &text[..100]).unwrap();
        let mapping = fs.file_extents(id, FileOffset(0)).unwrap().next().unwrap().unwrap();
        assert_eq!(mapping.kind == MappingKind::Inline, is_inline, "{max_inline_bytes}");
        // Beside others it cannot stay inline, nor in a file that ends behind its sector, whatever the limit.
        let other = create(&fs, &format!("grown {max_inline_bytes}"));
        fs.write(other, FileOffset(0), &text[..100]).unwrap();
        fs.write(id, FileOffset(8192), &text[..100]).unwrap();
        fs.truncate(other, 1 << 40).unwrap();
        for id in [id, other] {
            let mut extents = fs.file_extents(id, FileOffset(0)).unwrap();
            assert!(extents.all(|m| m.unwrap().kind != MappingKind::Inline), "{max_inline_bytes}");
        }
        fs.truncate(other, 1 << 20).unwrap();
        fs.sync().unwrap();
    }
    judge(&image);
}

fn open_with(image: &Path, options: OpenOptions) -> Filesystem {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole).unwrap();
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default()).unwrap();
    Filesystem::open(volume, options).unwrap()
}
