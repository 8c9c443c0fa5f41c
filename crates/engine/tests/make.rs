//! Filesystems that the engine makes and fills, judged by `btrfs check`, by the kernel and by the
//! engine itself after it opened them again.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use tempfile::TempDir;
use ubtrfs_engine::{
    Error, Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, PreparedData,
    RenameMode, Reservation, SetAttributes, mkfs,
};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::{CsumType, FileOffset};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    Compare, KernelMount, Oracle, Prng, TreeSnapshot, assert_checks_clean, oracle,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

struct Made {
    _directory: TempDir,
    image: PathBuf,
    fs: Filesystem,
}

fn make(options: &MkfsOptions) -> Made {
    make_with(options, 512 << 20)
}

fn make_with(options: &MkfsOptions, len_bytes: u64) -> Made {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let mode = OpenMode::CreateNew { len_bytes };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(&image, mode, Window::Whole).unwrap());
    let volume = mkfs(vec![device], options, &Arc::new(Runtime::system())).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    Made { _directory: directory, image, fs }
}

const TIME: Time = Time { sec: 1_600_000_000, nsec: 123_456_789 };

fn file() -> NewInode {
    NewInode { uid: 1000, gid: 100, ..NewInode::new(0o100_644, TIME) }
}

fn directory() -> NewInode {
    NewInode::new(0o040_755, TIME)
}

fn create(fs: &Filesystem, dir: InodeId, name: &[u8], new: &NewInode) -> InodeId {
    fs.begin(Reservation::create(0)).unwrap().create(dir, name, new).unwrap()
}

fn write(fs: &Filesystem, id: InodeId, bytes: &[u8], piece: usize, method: Option<Method>) {
    let options = fs.write_options(method);
    let mut appender = fs.appender(id, bytes.len() as u64).unwrap();
    for (index, part) in bytes.chunks(piece).enumerate() {
        let data = PreparedData::new(part.to_vec(), &options);
        appender.push(FileOffset((index * piece) as u64), data).unwrap();
    }
    appender.finish().unwrap();
}

fn read(fs: &Filesystem, id: InodeId) -> Vec<u8> {
    let size = usize::try_from(fs.inode(id).unwrap().size_bytes).unwrap();
    let mut bytes = vec![0; size];
    assert_eq!(fs.read(id, FileOffset(0), &mut bytes).unwrap(), size);
    bytes
}

/// The same image before the commit, after it, opened again, in the kernel, and checked.
fn judge(made: Made) -> TreeSnapshot {
    let before = common::snapshot(&made.fs, made.fs.top_level());
    made.fs.commit().unwrap();
    let after = common::snapshot(&made.fs, made.fs.top_level());
    before.assert_same(&after, &Compare::same_filesystem());
    let Made { _directory, image, fs } = made;
    drop(fs);
    let fs = common::open(&[&image]);
    let again = common::snapshot(&fs, fs.top_level());
    drop(fs);
    after.assert_same(&again, &Compare::same_filesystem());
    judge_image(&image, &again);
    again
}

fn judge_image(image: &Path, ours: &TreeSnapshot) {
    if oracle::require(Oracle::BtrfsProgs) {
        assert_checks_clean(image);
    }
    if oracle::require(Oracle::KernelBtrfs) {
        let mount = KernelMount::read_only(image, "subvolid=5");
        let kernel = TreeSnapshot::of_directory(mount.path());
        mount.unmount();
        kernel.assert_same(ours, &Compare::same_filesystem());
    }
}

fn all_options() -> Vec<MkfsOptions> {
    let old = MkfsOptions {
        no_holes: false,
        block_group_tree: false,
        nodesize_bytes: 4096,
        csum: CsumType::Sha256,
        ..MkfsOptions::default()
    };
    let plain = MkfsOptions { block_group_tree: false, ..MkfsOptions::default() };
    let large =
        MkfsOptions { nodesize_bytes: 65536, csum: CsumType::Xxhash, ..MkfsOptions::default() };
    let blake = MkfsOptions { csum: CsumType::Blake2, ..MkfsOptions::default() };
    vec![MkfsOptions::default(), old, plain, large, blake]
}

#[test]
fn empty_filesystem_is_clean() {
    for options in all_options() {
        judge(make(&options));
    }
}

#[test]
fn every_kind_of_inode_is_as_made() {
    for options in all_options() {
        let made = make(&options);
        let (fs, top) = (&made.fs, made.fs.top_level());
        let mut handle = fs.begin(Reservation::items(200)).unwrap();
        let dir = handle.create(top, b"dir", &directory()).unwrap();
        for (name, mode, rdev) in [
            (&b"file"[..], 0o104_755, 0),
            (b"\xff\xfe not utf-8", 0o100_000, 0),
            (b"char", 0o020_600, ubtrfs_engine::device_number(5, 7)),
            (b"block", 0o060_660, ubtrfs_engine::device_number(259, 70_000)),
            (b"fifo", 0o010_644, 0),
            (b"socket", 0o140_777, 0),
        ] {
            let new = NewInode { rdev, ..NewInode::new(mode, TIME) };
            let id = handle.create(dir, name, &new).unwrap();
            handle.set_xattr(id, b"trusted.name", name).unwrap();
            assert!(matches!(handle.create(dir, name, &new), Err(Error::Exists { .. })));
        }
        handle.symlink(dir, b"link", b"target/of it", &NewInode::new(0o777, TIME)).unwrap();
        let long = vec![b'x'; if options.nodesize_bytes == 4096 { 3900 } else { 4095 }];
        handle.symlink(top, &[b'n'; 255], &long, &NewInode::new(0o777, TIME)).unwrap();
        assert!(matches!(handle.create(top, &[b'n'; 256], &file()), Err(Error::TooLong { .. })));
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0"] {
            assert!(matches!(handle.create(top, bad, &file()), Err(Error::InvalidArgument { .. })));
        }
        let times = SetAttributes {
            mode: Some(0o1777),
            uid: Some(7),
            atime: Some(Time { sec: -5, nsec: 1 }),
            mtime: Some(TIME),
            ctime: Some(TIME),
            otime: Some(Time { sec: 1 << 33, nsec: 999_999_999 }),
            ..SetAttributes::default()
        };
        handle.set_attributes(dir, &times).unwrap();
        handle.set_attributes(top, &times).unwrap();
        drop(handle);
        let file = fs.lookup(dir, b"file").unwrap();
        assert!(matches!(fs.lookup(file, b"x"), Err(Error::NotDirectory { .. })));
        let snapshot = judge(made);
        assert_eq!(snapshot.entries.len(), 10);
    }
}

#[test]
fn hard_links_overflow_into_extended_references() {
    let made = make(&MkfsOptions { nodesize_bytes: 4096, ..MkfsOptions::default() });
    let (fs, top) = (&made.fs, made.fs.top_level());
    let dir = create(fs, top, b"dir", &directory());
    let id = create(fs, top, b"first", &file());
    for index in 0..500 {
        let name = format!("a further name of the same file, number {index}");
        let parent = if index % 7 == 0 { top } else { dir };
        fs.begin(Reservation::create(0)).unwrap().link(parent, name.as_bytes(), id).unwrap();
    }
    assert_eq!(fs.inode(id).unwrap().nlink, 501);
    assert_eq!(fs.links(id).unwrap().len(), 501);
    judge(made);
}

#[test]
fn xattrs_are_replaced_and_limited() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let id = create(fs, top, b"file", &file());
    let mut handle = fs.begin(Reservation::items(50)).unwrap();
    for (name, value) in [
        (&b"user.a"[..], &b"first"[..]),
        (b"user.b", b""),
        (b"user.a", b"second, longer"),
        (b"user.a", b"3"),
        (b"security.capability", &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        handle.set_xattr(id, name, value).unwrap();
    }
    handle.set_xattr(top, b"user.large", &vec![b'v'; 15_000]).unwrap();
    assert!(matches!(
        handle.set_xattr(id, b"user.too large", &vec![b'v'; 16_300]),
        Err(Error::TooLong { .. })
    ));
    drop(handle);
    assert_eq!(fs.xattr(id, b"user.a").unwrap().as_deref(), Some(&b"3"[..]));
    judge(made);
}

/// The longest attribute fills a leaf alone: what is left of it behind its header, the header of an item and the
/// head of an entry. Linux draws the border there, too.
#[test]
fn xattr_at_the_border_is_taken_and_a_byte_more_is_refused_as_by_the_kernel() {
    const NAME: &str = "user.long";
    for nodesize_bytes in [4096_u32, 16_384, 65_536] {
        let options = MkfsOptions { nodesize_bytes, ..MkfsOptions::default() };
        let Made { _directory, image, fs } = make(&options);
        let id = create(&fs, fs.top_level(), b"ours", &file());
        create(&fs, fs.top_level(), b"theirs", &file());
        let limit_bytes = usize::try_from(nodesize_bytes).unwrap() - 101 - 25 - 30;
        let too_long = vec![b'v'; limit_bytes + 1 - NAME.len()];
        let longest = &too_long[1..];
        let mut handle = fs.begin(Reservation::items(50)).unwrap();
        match handle.set_xattr(id, NAME.as_bytes(), &too_long) {
            Err(Error::TooLong { have_bytes, max_bytes, .. }) => {
                assert_eq!((have_bytes, max_bytes), (limit_bytes + 1, limit_bytes));
            }
            other => panic!("{other:?}"),
        }
        handle.set_xattr(id, NAME.as_bytes(), longest).unwrap();
        drop(handle);
        assert_eq!(fs.xattr(id, NAME.as_bytes()).unwrap().as_deref(), Some(longest));
        fs.commit().unwrap();
        let ours = common::snapshot(&fs, fs.top_level());
        drop(fs);
        judge_image(&image, &ours);
        if !oracle::require(Oracle::KernelBtrfs) {
            continue;
        }
        let mount = KernelMount::read_write(&image, "subvolid=5");
        let path = mount.path().join("theirs");
        let set = |value: &[u8]| rustix::fs::setxattr(&path, NAME, value, XattrFlags::empty());
        assert_eq!(set(&too_long), Err(Errno::NOSPC));
        assert_eq!(set(longest), Ok(()));
        mount.unmount();
        let fs = common::open(&[&image]);
        let theirs = fs.lookup(fs.top_level(), b"theirs").unwrap();
        assert_eq!(fs.xattr(theirs, NAME.as_bytes()).unwrap().as_deref(), Some(longest));
    }
}

/// Names whose crc32c with seed ~1 is the same: the hash is linear, so that a difference that the
/// hash maps to zero can be added to any name.
fn colliding_names(len_bytes: usize) -> Vec<Vec<u8>> {
    const VARIED_BYTES: usize = 16;
    let base = vec![b'x'; len_bytes];
    let hash = |name: &[u8]| ubtrfs_ondisk::hash::name_hash(name);
    let at_base = hash(&base);
    // One column for each bit that may be flipped without leaving printable letters.
    let mut columns = Vec::new();
    for position in 0..VARIED_BYTES {
        for bit in 0..3 {
            let mut name = base.clone();
            name[position] ^= 1 << bit;
            columns.push((hash(&name) ^ at_base, 1_u64 << columns.len()));
        }
    }
    // Gaussian elimination over GF(2): combinations of columns that vanish.
    let mut pivots: Vec<(u64, u64)> = Vec::new();
    let mut vanishing = Vec::new();
    for (mut value, mut of) in columns {
        for (pivot, pivot_of) in &pivots {
            if value & (1 << pivot.ilog2()) != 0 {
                value ^= pivot;
                of ^= pivot_of;
            }
        }
        if value == 0 { vanishing.push(of) } else { pivots.push((value, of)) }
    }
    let mut names = vec![base.clone()];
    let pairs = vanishing.iter().enumerate().flat_map(|(count, one)| {
        vanishing[..count].iter().map(move |other| one ^ other).chain([*one])
    });
    for of in pairs {
        let mut name = base.clone();
        for index in (0..48).filter(|index| of >> index & 1 == 1) {
            name[index / 3] ^= 1 << (index % 3);
        }
        names.push(name);
    }
    assert!(names.len() > 10 && names.iter().all(|name| hash(name) == at_base));
    names
}

#[test]
fn names_of_one_hash_share_an_item() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let names = colliding_names(16);
    for name in &names {
        let id = create(fs, top, name, &file());
        let mut handle = fs.begin(Reservation::items(20)).unwrap();
        assert!(matches!(handle.create(top, name, &file()), Err(Error::Exists { .. })));
        handle.set_xattr(id, b"user.x", name).unwrap();
    }
    assert_eq!(fs.read_dir(top, 0).unwrap().count(), names.len());
    judge(made);
}

/// As Linux has it, and no limit of links: the item of a hash is full.
#[test]
fn name_whose_hash_has_no_room_is_refused_and_others_are_not() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let names = colliding_names(255);
    let mut handle = fs.begin(Reservation::items(1000)).unwrap();
    let source = handle.create(top, b"source", &file()).unwrap();
    let results = names.iter().map(|name| handle.create(top, name, &file()));
    let count = results.take_while(Result::is_ok).count();
    // Of a leaf of 16 KiB.
    assert!(count > 50 && count < names.len(), "{count} of {}", names.len());
    let refused = [
        handle.create(top, &names[count], &file()).map(drop),
        handle.link(top, &names[count], source),
        handle.create_subvolume(top, &names[count], &directory()).map(drop),
    ];
    drop(handle);
    let moved = fs.rename(top, b"source", top, &names[count], RenameMode::Replace);
    for (number, refused) in refused.into_iter().chain([moved]).enumerate() {
        assert!(matches!(refused, Err(Error::HashFull { .. })), "{number}: {refused:?}");
    }
    create(fs, top, b"another", &file());
    assert_eq!(fs.read_dir(top, 0).unwrap().count(), count + 2);
    judge(made);
}

fn sizes() -> Vec<usize> {
    vec![
        0, 1, 100, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 10_000, 131_072, 131_073, 1_000_000,
        5_000_001,
    ]
}

#[test]
fn file_contents_of_every_size_and_compression() {
    let mut prng = Prng::new(17);
    for options in all_options() {
        let made = make(&options);
        let fs = &made.fs;
        for compression in
            [Compression::None, Compression::Zlib, Compression::Lzo, Compression::Zstd]
        {
            let method = Some(Method::with_default_level(compression));
            let top = fs.top_level();
            let dir = create(fs, top, format!("{compression:?}").as_bytes(), &directory());
            for size in sizes() {
                for (kind, bytes) in [
                    ("text", prng.text(size)),
                    ("noise", prng.bytes(size)),
                    ("zeros", vec![0; size]),
                ] {
                    let name = format!("{kind} {size}");
                    let id = create(fs, dir, name.as_bytes(), &file());
                    write(fs, id, &bytes, 1 << 20, method);
                    assert_eq!(read(fs, id), bytes, "{compression:?} {name}");
                }
            }
        }
        judge(made);
    }
}

#[test]
fn sparse_files_keep_their_holes() {
    for options in all_options() {
        let made = make(&options);
        let (fs, top) = (&made.fs, made.fs.top_level());
        let write_options = fs.write_options(None);
        let piece = |byte: u8, len: usize| PreparedData::new(vec![byte; len], &write_options);
        for (name, offsets, size) in [
            ("front", &[1_u64 << 20][..], (1_u64 << 20) + 5000),
            ("middle", &[0, 1 << 20, 1 << 30], (1 << 30) + 5000),
            ("behind", &[0], 1 << 20),
            ("all", &[], 12_345_678),
            ("unaligned", &[0, 8192, 65536], 100_001),
        ] {
            let id = create(fs, top, name.as_bytes(), &file());
            let mut appender = fs.appender(id, 0).unwrap();
            for offset in offsets {
                appender.push(FileOffset(*offset), piece(7, 5000)).unwrap();
            }
            appender.hole_to(size).unwrap();
            appender.finish().unwrap();
            let inode = fs.inode(id).unwrap();
            assert_eq!(inode.size_bytes, size);
            assert_eq!(inode.nbytes, 8192 * offsets.len() as u64);
            // The same under one handle.
            let mut handle = fs.begin(Reservation::items(100)).unwrap();
            let id = handle.create(top, format!("{name}2").as_bytes(), &file()).unwrap();
            let pieces =
                offsets.iter().map(|offset| (FileOffset(*offset), piece(8, 5000))).collect();
            handle.write_file(id, pieces, size).unwrap();
        }
        judge(made);
    }
}

#[test]
fn a_piece_longer_than_an_extent_becomes_several() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let id = create(fs, top, b"file", &file());
    write(fs, id, &vec![7; (300 << 20) + 5], 301 << 20, None);
    let longest =
        fs.file_extents(id, FileOffset(0)).unwrap().map(|mapping| mapping.unwrap().len_bytes).max();
    assert!(longest <= Some(128 << 20));
    judge(made);
}

#[test]
fn files_without_copies_on_write_have_neither_checksums_nor_compression() {
    use ubtrfs_ondisk::inode::flags;
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let dir = create(fs, top, b"dir", &directory());
    let no_cow = SetAttributes { flags: Some(flags::NODATACOW), ..SetAttributes::default() };
    fs.begin(Reservation::create(0)).unwrap().set_attributes(dir, &no_cow).unwrap();
    let mut prng = Prng::new(3);
    for size in sizes() {
        let id = create(fs, dir, format!("{size}").as_bytes(), &file());
        let inode = fs.inode(id).unwrap();
        assert_eq!(inode.flags, flags::NODATACOW | flags::NODATASUM);
        let bytes = prng.text(size);
        write(fs, id, &bytes, 1 << 20, Some(Method::with_default_level(Compression::Zstd)));
        assert_eq!(read(fs, id), bytes);
        let mut mappings = fs.file_extents(id, FileOffset(0)).unwrap();
        assert!(mappings.all(|mapping| mapping.unwrap().compression == Compression::None));
    }
    judge(made);
}

#[test]
fn pieces_out_of_place_are_refused() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let id = create(fs, top, b"file", &file());
    let options = fs.write_options(None);
    let other = ubtrfs_engine::WriteOptions { csum: Some(CsumType::Sha256), ..options };
    let mut appender = fs.appender(id, 0).unwrap();
    appender.push(FileOffset(0), PreparedData::new(vec![1; 8192], &options)).unwrap();
    for (offset, options) in [(4096, options), (8193, options), (8192, other)] {
        let data = PreparedData::new(vec![1; 8192], &options);
        let error = appender.push(FileOffset(offset), data).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    assert!(appender.hole_to(5).is_err());
    appender.finish().unwrap();
    assert!(matches!(fs.appender(top, 0), Err(Error::IsDirectory { .. })));
    judge(made);
}

#[test]
fn subvolumes_nest_and_one_is_the_default() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    let mut handle = fs.begin(Reservation::items(100)).unwrap();
    let outer = handle.create_subvolume(top, b"outer", &directory()).unwrap();
    let dir = handle.create(outer, b"dir", &directory()).unwrap();
    let inner = handle.create_subvolume(dir, b"inner", &directory()).unwrap();
    assert!(matches!(
        handle.create_subvolume(dir, b"inner", &directory()),
        Err(Error::Exists { .. })
    ));
    let id = handle.create(inner, b"file", &file()).unwrap();
    assert!(matches!(handle.link(dir, b"across", id), Err(Error::OtherSubvolume { .. })));
    drop(handle);
    write(fs, id, b"in the inner one", 4096, None);
    fs.set_default_subvolume(inner.root).unwrap();
    assert_eq!(fs.default_subvolume().unwrap(), inner);
    assert_eq!(fs.parent(inner).unwrap(), dir);
    let infos = fs.subvolumes().unwrap();
    let paths: Vec<_> = infos.iter().map(|info| info.path.clone().unwrap()).collect();
    assert_eq!(paths, [&b""[..], b"outer", b"outer/dir/inner"]);
    judge(made);
}

#[test]
fn many_files_over_several_commits() {
    let made = make(&MkfsOptions::default());
    let (fs, top) = (&made.fs, made.fs.top_level());
    for batch in 0..5 {
        let dir = create(fs, top, format!("dir{batch}").as_bytes(), &directory());
        for index in 0..2000 {
            let id = create(fs, dir, format!("file{index}").as_bytes(), &file());
            if index % 3 == 0 {
                write(fs, id, format!("{batch} {index}").repeat(index).as_bytes(), 1 << 20, None);
            }
        }
        create(fs, top, format!("another{batch}").as_bytes(), &file());
        fs.commit().unwrap();
    }
    judge(made);
}

/// Fills a filesystem with files of `file_bytes` until an error, which must be that of no space.
fn fill(fs: &Filesystem, file_bytes: usize, method: Option<Method>, prng: &mut Prng) -> usize {
    let dir = create(fs, fs.top_level(), b"dir", &directory());
    for index in 0.. {
        let result = fs
            .begin(Reservation::create(0))
            .and_then(|mut handle| handle.create(dir, format!("{index}").as_bytes(), &file()))
            .and_then(|id| {
                let options = fs.write_options(method);
                let mut appender = fs.appender(id, file_bytes as u64)?;
                let bytes =
                    if index % 2 == 0 { prng.bytes(file_bytes) } else { prng.text(file_bytes) };
                appender.push(FileOffset(0), PreparedData::new(bytes, &options))?;
                appender.finish()
            });
        match result {
            Ok(()) => {}
            Err(Error::NoSpace { needed_bytes, available_bytes, what }) => {
                // Compressed data cannot be cut to fit into what is left.
                assert!(needed_bytes > available_bytes || what == "data in one piece");
                return index;
            }
            Err(error) => panic!("file {index}: {error}"),
        }
    }
    unreachable!("the range has no end")
}

#[test]
fn a_full_filesystem_says_so_and_stays_whole() {
    let mut prng = Prng::new(23);
    let zstd = Some(Method::with_default_level(Compression::Zstd));
    for (len_mib, file_bytes, method, count_min) in [
        (64, 20_000_000, None, 1),
        (64, 3_000_000, zstd, 5),
        (128, 100_000, None, 300),
        (128, 100_000, zstd, 300),
        (48, 0, None, 2000),
        (64, 1500, None, 2000),
    ] {
        for single_metadata in [false, true] {
            let options = MkfsOptions {
                metadata_profile: single_metadata.then(Default::default),
                ..MkfsOptions::default()
            };
            let made = make_with(&options, len_mib << 20);
            let count = fill(&made.fs, file_bytes, method, &mut prng);
            assert!(count >= count_min, "{len_mib} MiB: {count} files of {file_bytes} bytes");
            judge(made);
        }
    }
}

#[test]
fn a_full_filesystem_is_filled_again_after_opening() {
    let mut prng = Prng::new(29);
    let made = make_with(&MkfsOptions::default(), 96 << 20);
    fill(&made.fs, 500_000, None, &mut prng);
    made.fs.commit().unwrap();
    // Names still fit where data does not.
    for index in 0..50 {
        create(&made.fs, made.fs.top_level(), format!("empty {index}").as_bytes(), &file());
    }
    judge(made);
}
