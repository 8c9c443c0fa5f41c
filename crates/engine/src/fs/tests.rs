//! Trees as Linux leaves them and as no one should, made item by item and read.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::root::RootRef;
use ubtrfs_ondisk::{
    FileOffset, Generation, InodeNo, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId,
};
use ubtrfs_rt::{Arc, Runtime, Time};
use ubtrfs_volume::{Device, MemDevice, Volume, VolumeOptions};
use zerocopy::IntoBytes;

use super::background::BackgroundOptions;
use super::inode::InodeId;
use super::make::{EntryBytes, Inherit, NewInode, SetAttributes, insert_name};
use crate::data::compression::{self, Method};
use crate::data::{MappingKind, PreparedData};
use crate::error::Error;
use crate::filesystem::{Filesystem, OpenOptions};
use crate::mkfs::{MkfsOptions, mkfs};
use crate::txn::Reservation;

const TIME: Time = Time { sec: 1, nsec: 2 };
const SECTOR: u64 = 4096;

fn new_filesystem() -> Filesystem {
    new_filesystem_with(&MkfsOptions::default())
}

fn new_filesystem_with(options: &MkfsOptions) -> Filesystem {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let runtime = Arc::new(Runtime::simulated(1));
    let volume = mkfs(vec![device], options, &runtime).unwrap();
    Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap()
}

fn new_file(fs: &Filesystem, name: &str) -> InodeId {
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(fs.top_level(), name.as_bytes(), &NewInode::new(0o100_644, TIME)).unwrap()
}

fn put_extent(fs: &Filesystem, id: InodeId, offset: u64, extent: &FileExtent<'_>) {
    let mut item = Vec::new();
    extent.write(&mut item);
    put(fs, id.root, id.key(KeyType::EXTENT_DATA, offset), &item);
}

fn put(fs: &Filesystem, root: RootId, key: Key, item: &[u8]) {
    fs.begin(Reservation::items(1)).unwrap().txn.insert(root, key, item).unwrap();
}

fn set_size(fs: &Filesystem, id: InodeId, size: u64) {
    let mut handle = fs.begin(Reservation::items(1)).unwrap();
    handle.change_inode(id, |item| item.size = size.into()).unwrap();
}

/// Puts bytes on the medium, with checksums, outside of any file.
fn put_data(fs: &Filesystem, bytes: &[u8]) -> LogicalAddr {
    put_data_with_csums(fs, bytes, bytes.len() / 4096)
}

/// The same with checksums of the first `csum_count` sectors only.
fn put_data_with_csums(fs: &Filesystem, bytes: &[u8], csum_count: usize) -> LogicalAddr {
    let handle = fs.begin(Reservation::items(1)).unwrap();
    let core = handle.txn.core();
    let len = bytes.len() as u64;
    let (start, got) =
        core.alloc.allocate_data(&core.roots, len, len, crate::alloc::DataPromise::None).unwrap();
    assert_eq!(got, len);
    fs.volume().write(start, bytes).unwrap();
    let mut csums = vec![0; bytes.len() / 4096 * fs.csum_type().len_bytes()];
    fs.csum_type().compute_sectors(bytes, 4096, &mut csums);
    csums.truncate(csum_count * fs.csum_type().len_bytes());
    fs.inner.files.csums.add(start, &csums, fs.csum_type(), SECTOR);
    start
}

fn extent(start: LogicalAddr, disk: u64, offset: u64, num: u64) -> RegularExtent {
    RegularExtent {
        generation: Generation(5),
        ram_bytes: disk,
        compression: Compression::None,
        disk_bytenr: start,
        disk_num_bytes: disk,
        offset,
        num_bytes: num,
    }
}

fn read(fs: &Filesystem, id: InodeId) -> Result<Vec<u8>, Error> {
    let size = usize::try_from(fs.inode(id)?.size_bytes).unwrap();
    let mut bytes = vec![0xEE; size];
    assert_eq!(fs.read(id, FileOffset(0), &mut bytes)?, size);
    // In odd pieces the same comes out.
    let mut file = fs.open_file(id)?;
    let mut pieces = vec![0xDD; size];
    let mut at = 0;
    while at < size {
        let end = size.min(at + 1777);
        at += file.read(FileOffset(at as u64), &mut pieces[at..end])?;
    }
    assert!(bytes == pieces, "read at once and in pieces");
    Ok(bytes)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
}

#[test]
fn extents_used_in_part_and_holes_of_both_kinds_are_read() {
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    let bytes = pattern(64 << 10);
    let start = put_data(&fs, &bytes);
    // [hole 2][data 2..5][explicit hole 1][prealloc 2][data 10..12][hole to the end]
    put_extent(
        &fs,
        id,
        2 * SECTOR,
        &FileExtent::Regular(extent(start, 65536, 2 * SECTOR, 3 * SECTOR)),
    );
    put_extent(&fs, id, 5 * SECTOR, &FileExtent::Regular(extent(LogicalAddr(0), 0, 0, SECTOR)));
    put_extent(&fs, id, 6 * SECTOR, &FileExtent::Prealloc(extent(start, 65536, 0, 2 * SECTOR)));
    put_extent(
        &fs,
        id,
        8 * SECTOR,
        &FileExtent::Regular(extent(start, 65536, 10 * SECTOR, 2 * SECTOR)),
    );
    set_size(&fs, id, 12 * SECTOR + 5);
    let read = read(&fs, id).unwrap();
    let sector = |at: usize| &read[at * 4096..(at + 1) * 4096];
    let of = |at: usize| &bytes[at * 4096..(at + 1) * 4096];
    let zeros = [0; 4096];
    let expect =
        [&zeros, &zeros, of(2), of(3), of(4), &zeros, &zeros, &zeros, of(10), of(11), &zeros];
    for (at, expect) in expect.into_iter().enumerate() {
        assert!(sector(at) == expect, "sector {at}");
    }
    let kinds: Vec<_> = fs
        .file_extents(id, FileOffset(0))
        .unwrap()
        .map(|mapping| mapping.map(|m| (m.kind, m.offset.0 / SECTOR, m.len_bytes / SECTOR)))
        .collect::<Result<_, _>>()
        .unwrap();
    use MappingKind::{Data, Hole, Prealloc};
    assert_eq!(
        kinds,
        [(Hole, 0, 2), (Data, 2, 3), (Hole, 5, 1), (Prealloc, 6, 2), (Data, 8, 2), (Hole, 10, 3)]
    );
    let from = fs.file_extents(id, FileOffset(3 * SECTOR + 1)).unwrap().next().unwrap().unwrap();
    assert_eq!(from.offset.0, 2 * SECTOR);
}

#[test]
fn compressed_extents_used_in_part_are_read() {
    for compression in [Compression::Zlib, Compression::Lzo, Compression::Zstd] {
        let fs = new_filesystem();
        let id = new_file(&fs, "file");
        let bytes = pattern(128 << 10);
        let mut packed = Vec::new();
        let method = Method::with_default_level(compression);
        assert!(compression::compress_extent(method, &bytes, &mut packed, 4096));
        let start = put_data(&fs, &packed);
        let part = |offset: u64, num: u64| {
            FileExtent::Regular(RegularExtent {
                compression,
                ram_bytes: 128 << 10,
                disk_num_bytes: packed.len() as u64,
                ..extent(start, 0, offset, num)
            })
        };
        put_extent(&fs, id, 0, &part(5 * SECTOR, 3 * SECTOR));
        put_extent(&fs, id, 3 * SECTOR, &part(31 * SECTOR, SECTOR));
        put_extent(&fs, id, 4 * SECTOR, &part(0, 32 * SECTOR));
        set_size(&fs, id, 36 * SECTOR - 9);
        let expect =
            [&bytes[5 * 4096..8 * 4096], &bytes[31 * 4096..], &bytes[..bytes.len() - 9]].concat();
        assert!(read(&fs, id).unwrap() == expect, "{compression:?}");
    }
}

#[test]
fn inline_data_shorter_or_longer_than_the_file_is_read() {
    let fs = new_filesystem();
    for (name, data, size) in [("short", 100, 150), ("long", 200, 150), ("sparse", 100, 20_000)] {
        let id = new_file(&fs, name);
        let bytes = pattern(data);
        // A wrong ram_bytes, as old kernels left it.
        let inline = FileExtent::Inline {
            generation: Generation(5),
            ram_bytes: 4096,
            compression: Compression::None,
            data: &bytes,
        };
        put_extent(&fs, id, 0, &inline);
        set_size(&fs, id, size);
        let mut expect = bytes;
        expect.resize(usize::try_from(size).unwrap(), 0);
        assert_eq!(read(&fs, id).unwrap(), expect, "{name}");
    }
}

/// A truncation took all that stays of a file that begins with inline data for no more than a sector: it read that to memory, and wrote it, holes
/// and all.
#[test]
fn sparse_file_with_inline_data_is_cut_without_filling_its_holes() {
    const MIB: u64 = 1 << 20;
    let fs = new_filesystem();
    for behind in [false, true] {
        let id = new_file(&fs, if behind { "before an extent" } else { "alone" });
        let bytes = pattern(100);
        let inline = FileExtent::Inline {
            generation: Generation(5),
            ram_bytes: 100,
            compression: Compression::None,
            data: &bytes,
        };
        put_extent(&fs, id, 0, &inline);
        set_size(&fs, id, 32 * MIB);
        if behind {
            fs.write(id, FileOffset(24 * MIB), &[2; 4096]).unwrap();
        }
        for size in [16 * MIB, 5000, 4096, 50] {
            fs.truncate(id, size).unwrap();
            let mut expect = bytes.clone();
            expect.resize(usize::try_from(size).unwrap(), 0);
            assert!(read(&fs, id).unwrap() == expect, "{behind}, {size}");
            let nbytes = fs.inode(id).unwrap().nbytes;
            assert!(nbytes <= SECTOR, "{behind}: {nbytes} bytes for 100 of {size}");
        }
    }
}

/// The item has the key of the extent that comes in its place, which aborted the transaction, and with it the filesystem.
#[test]
fn extents_of_no_length_are_passed_over_and_written_over() {
    let inline = FileExtent::Inline {
        generation: Generation(5),
        ram_bytes: 0,
        compression: Compression::None,
        data: &[],
    };
    let hole = |start| FileExtent::Regular(extent(LogicalAddr(start), 0, 0, 0));
    type Write = fn(&Filesystem, InodeId);
    let ways: [(&str, Write); 4] = [
        ("closed", |fs, id| fs.write(id, FileOffset(0), &[7; 12 * 4096]).unwrap()),
        ("closed, a part", |fs, id| fs.write(id, FileOffset(2 * SECTOR), &[7; 100]).unwrap()),
        ("open", |fs, id| {
            let file = fs.open_data(id).unwrap();
            file.write(ubtrfs_iomap::FileOffset::ZERO, &[7; 12 * 4096]).unwrap();
            file.fsync().unwrap();
        }),
        ("cut", |fs, id| fs.truncate(id, SECTOR).unwrap()),
    ];
    for (way, write) in ways {
        for (offset, item, size) in
            [(0, &inline, 100), (0, &inline, 9 * SECTOR), (2 * SECTOR, &hole(0), 9 * SECTOR)]
        {
            let fs = new_filesystem();
            let id = new_file(&fs, "file");
            put_extent(&fs, id, offset, item);
            set_size(&fs, id, size);
            let mut expect = vec![0; usize::try_from(size).unwrap()];
            assert!(read(&fs, id).unwrap() == expect, "{way}");
            write(&fs, id);
            match way {
                "cut" => expect.resize(4096, 0),
                "closed, a part" => {
                    expect.resize(expect.len().max(2 * 4096 + 100), 0);
                    expect[2 * 4096..][..100].fill(7);
                }
                _ => expect = vec![7; 12 * 4096],
            }
            assert!(read(&fs, id).unwrap() == expect, "{way}");
            for is_there in [true, false] {
                fs.sync().unwrap();
                let report = ubtrfs_check::check(fs.volume(), &Default::default()).unwrap();
                // But for one that was not in the way.
                let errors =
                    report.errors().filter(|error| !error.to_string().contains("num_bytes"));
                let errors: Vec<_> = errors.map(ToString::to_string).collect();
                assert!(errors.is_empty(), "{way}, {is_there}: {errors:?}");
                assert!(is_there || report.is_clean(), "{way}");
                if is_there {
                    fs.unlink(fs.top_level(), b"file").unwrap();
                }
            }
        }
    }
}

/// It gives way to nothing: where holes have items, the one behind the end had its key, and the filesystem was aborted.
#[test]
fn extent_of_no_length_that_has_space_is_damage_and_aborts_nothing() {
    let fs = new_filesystem_with(&MkfsOptions {
        no_holes: false,
        block_group_tree: false,
        ..MkfsOptions::default()
    });
    let id = new_file(&fs, "file");
    fs.write(id, FileOffset(0), &[1; 8192]).unwrap();
    let start = put_data(&fs, &[2; 4096]);
    put_extent(&fs, id, 2 * SECTOR, &FileExtent::Regular(extent(start, SECTOR, 0, 0)));
    let longer = fs.truncate(id, 9 * SECTOR);
    assert!(matches!(longer, Err(Error::Corrupt(_))), "{longer:?}");
    let opened = fs.open_data(id).unwrap().truncate(ubtrfs_iomap::FileOffset::new(9 * SECTOR));
    assert!(matches!(opened, Err(Error::Corrupt(_))), "{opened:?}");
    assert_eq!(read(&fs, id).unwrap(), [1; 8192]);
    fs.commit().unwrap();
}

/// Where holes have items, that of what is behind the old end has that key; and what is appended.
#[test]
fn extent_of_no_length_at_the_end_gives_way_to_what_comes_there() {
    const END: u64 = 2 * SECTOR;
    fn at(offset: u64) -> ubtrfs_iomap::FileOffset {
        ubtrfs_iomap::FileOffset::new(offset)
    }
    type Change = fn(&Filesystem, InodeId);
    let ways: [(&str, Change); 6] = [
        ("closed, longer", |fs, id| fs.truncate(id, 9 * SECTOR).unwrap()),
        ("closed, written", |fs, id| fs.write(id, FileOffset(8 * SECTOR), &[0; 4096]).unwrap()),
        ("open, longer", |fs, id| fs.open_data(id).unwrap().truncate(at(9 * SECTOR)).unwrap()),
        ("open, written", |fs, id| {
            fs.open_data(id).unwrap().write(at(END), &[0; 7 * 4096]).unwrap();
        }),
        ("appended", |fs, id| {
            let mut appender = fs.appender(id, 7 * SECTOR).unwrap();
            let data = PreparedData::new(vec![0; 7 * 4096], &fs.write_options(None));
            appender.push(FileOffset(END), data).unwrap();
            appender.finish().unwrap();
        }),
        ("appended behind a hole", |fs, id| {
            let mut appender = fs.appender(id, 6 * SECTOR).unwrap();
            let data = PreparedData::new(vec![0; 6 * 4096], &fs.write_options(None));
            appender.push(FileOffset(END + SECTOR), data).unwrap();
            appender.finish().unwrap();
        }),
    ];
    for (way, change) in ways {
        for no_holes in [true, false] {
            let fs = new_filesystem_with(&MkfsOptions {
                no_holes,
                block_group_tree: false,
                ..MkfsOptions::default()
            });
            let id = new_file(&fs, "file");
            fs.write(id, FileOffset(0), &[1; 8192]).unwrap();
            put_extent(&fs, id, END, &FileExtent::Regular(extent(LogicalAddr(0), 0, 0, 0)));
            change(&fs, id);
            fs.sync().unwrap();
            assert!(read(&fs, id).unwrap() == [vec![1; 8192], vec![0; 7 * 4096]].concat(), "{way}");
            let report = ubtrfs_check::check(fs.volume(), &Default::default()).unwrap();
            // It may stay in a hole that has no item.
            let may_stay = no_holes && !way.starts_with("appended") && way != "open, written";
            let errors = report.errors().map(ToString::to_string);
            let errors: Vec<_> =
                errors.filter(|error| !may_stay || !error.contains("num_bytes")).collect();
            assert!(errors.is_empty(), "{way}, {no_holes}: {errors:?}");
        }
    }
}

#[test]
fn damaged_extents_are_errors_that_name_the_file() {
    let whole = |start| extent(start, 65536, 0, 65536);
    type Case = fn(RegularExtent) -> Vec<(u64, RegularExtent)>;
    let cases: [(&str, Case); 7] = [
        ("overlap", |e| vec![(0, e), (SECTOR, e)]),
        ("beyond the extent", |e| vec![(0, RegularExtent { offset: SECTOR, ..e })]),
        ("unaligned", |e| vec![(0, RegularExtent { num_bytes: 100, ..e })]),
        ("empty", |e| vec![(0, RegularExtent { num_bytes: 0, ..e })]),
        ("wraps", |e| {
            vec![
                (u64::MAX - 4095, RegularExtent { num_bytes: SECTOR, ..e }),
                (0, RegularExtent { num_bytes: u64::MAX - 4095, offset: 4096, ..e }),
            ]
        }),
        ("nowhere", |e| vec![(0, RegularExtent { disk_bytenr: LogicalAddr(1 << 50), ..e })]),
        ("too long compressed", |e| {
            vec![(0, RegularExtent { compression: Compression::Zstd, ram_bytes: 1 << 40, ..e })]
        }),
    ];
    let fs = new_filesystem();
    let start = put_data(&fs, &pattern(65536));
    for (name, extents) in cases {
        let id = new_file(&fs, name);
        for (offset, extent) in extents(whole(start)) {
            put_extent(&fs, id, offset, &FileExtent::Regular(extent));
        }
        set_size(&fs, id, 20 * SECTOR);
        assert!(read(&fs, id).is_err(), "{name}");
        // Ends, too, instead of going round.
        let count = fs.file_extents(id, FileOffset(0)).unwrap().take(100).count();
        assert!(count < 100, "{name}");
    }
    let id = new_file(&fs, "garbage");
    put(&fs, id.root, id.key(KeyType::EXTENT_DATA, 0), &[1, 2, 3]);
    set_size(&fs, id, 10);
    let Err(Error::Corrupt(corruption)) = read(&fs, id) else { panic!("garbage is read") };
    assert_eq!(corruption.root, Some(RootId::FS_TREE));
    assert!(corruption.to_string().contains(&format!("inode {}", id.inode)), "{corruption}");
}

#[test]
fn a_changed_sector_is_an_error_with_its_place() {
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    let options = fs.write_options(None);
    let mut appender = fs.appender(id, 0).unwrap();
    appender.push(FileOffset(0), PreparedData::new(pattern(1 << 20), &options)).unwrap();
    appender.finish().unwrap();
    fs.commit().unwrap();
    let mapping = fs.file_extents(id, FileOffset(0)).unwrap().next().unwrap().unwrap();
    let bad = LogicalAddr(mapping.disk_bytenr.0 + 50 * SECTOR);
    fs.volume().write(bad, &[9; 4096]).unwrap();
    let Err(Error::Corrupt(corruption)) = read(&fs, id) else { panic!("damage is read") };
    assert_eq!(corruption.reason, Reason::CsumMismatch);
    assert_eq!((corruption.root, corruption.block), (Some(RootId::FS_TREE), Some(bad)));
    assert!(corruption.have.contains(&format!("inode {}", id.inode)), "{corruption}");
    // What lies before it can still be read.
    let mut buf = vec![0; 50 * 4096];
    assert_eq!(fs.read(id, FileOffset(0), &mut buf).unwrap(), buf.len());
}

#[test]
fn data_without_a_checksum_is_an_error_unless_the_inode_says_so() {
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    let start = {
        let handle = fs.begin(Reservation::items(1)).unwrap();
        let core = handle.txn.core();
        core.alloc
            .allocate_data(&core.roots, SECTOR, SECTOR, crate::alloc::DataPromise::None)
            .unwrap()
            .0
    };
    fs.volume().write(start, &[5; 4096]).unwrap();
    put_extent(&fs, id, 0, &FileExtent::Regular(extent(start, SECTOR, 0, SECTOR)));
    set_size(&fs, id, SECTOR);
    let Err(Error::Corrupt(corruption)) = read(&fs, id) else { panic!("it is read") };
    assert_eq!(corruption.reason, Reason::Missing);
    let mut handle = fs.begin(Reservation::items(1)).unwrap();
    let flags = ubtrfs_ondisk::inode::flags::NODATASUM;
    handle.change_inode(id, |item| item.flags = flags.into()).unwrap();
    drop(handle);
    assert_eq!(read(&fs, id).unwrap(), [5; 4096]);
}

#[test]
fn directories_in_a_circle_are_walked_once() {
    let fs = new_filesystem();
    let top = fs.top_level();
    let mut handle = fs.begin(Reservation::items(30)).unwrap();
    let new = NewInode::new(0o040_755, TIME);
    let a = handle.create(top, b"a", &new).unwrap();
    let b = handle.create(a, b"b", &new).unwrap();
    let entry = EntryBytes::new(a.key(KeyType::INODE_ITEM, 0), 1, FileType::Directory, b"again");
    insert_name(&mut handle.txn, b, b"again", 2, &entry).unwrap();
    // The only parent that `a` knows is below it.
    handle.txn.remove(top.root, a.key(KeyType::INODE_REF, top.inode.0)).unwrap();
    super::make::insert_first_ref(&mut handle.txn, a, b.inode, 2, b"again").unwrap();
    drop(handle);
    assert_eq!(fs.resolve(top, b"a/b/again/b/again").unwrap(), a);
    assert!(matches!(fs.path_of(b), Err(Error::Corrupt(_))));
}

#[test]
fn subvolumes_in_a_circle_are_listed() {
    let fs = new_filesystem();
    let top = fs.top_level();
    let new = NewInode::new(0o040_755, TIME);
    let mut handle = fs.begin(Reservation::items(40)).unwrap();
    let child = handle.create_subvolume(top, b"sub", &new).unwrap();
    let key = Key::new(child.root.object_id(), KeyType::ROOT_BACKREF, top.root.0);
    handle.txn.remove(RootId::ROOT_TREE, key).unwrap();
    let own = RootRef { dirid: 256.into(), sequence: 2.into(), name_len: 4.into() };
    let key = Key::new(child.root.object_id(), KeyType::ROOT_BACKREF, child.root.0);
    let item = [own.as_bytes(), b"self"].concat();
    handle.txn.insert(RootId::ROOT_TREE, key, &item).unwrap();
    drop(handle);
    assert!(matches!(fs.path_of(child), Err(Error::Corrupt(_))));
    // The list is not spoilt by one that has no path.
    let infos = fs.subvolumes().unwrap();
    assert_eq!(infos.len(), 2);
    assert_eq!(infos[1].path, None);
}

#[test]
fn entries_with_garbage_are_errors() {
    let fs = new_filesystem();
    let top = fs.top_level();
    let index = top.key(KeyType::DIR_INDEX, 2);
    put(&fs, top.root, index, &[7; 31]);
    let entries: Vec<_> = fs.read_dir(top, 0).unwrap().collect();
    assert!(matches!(entries.as_slice(), [Err(Error::Corrupt(_))]));
    let key = top.key(KeyType::DIR_ITEM, ubtrfs_ondisk::hash::name_hash(b"name"));
    let location = Key::new(ObjectId(300), KeyType::EXTENT_DATA, 0);
    let entry = EntryBytes::new(location, 1, FileType::Regular, b"name");
    put(&fs, top.root, key, entry.as_slice());
    assert!(matches!(fs.lookup(top, b"name"), Err(Error::Corrupt(_))));
    let dangling = InodeId { root: top.root, inode: InodeNo(4711) };
    assert!(matches!(fs.inode(dangling), Err(Error::NotFound { .. })));
    assert!(matches!(fs.read_dir(dangling, 0), Err(Error::NotFound { .. })));
    let nowhere = InodeId::root_of(RootId(4711));
    assert!(matches!(fs.inode(nowhere), Err(Error::NotFound { .. })));
}

#[test]
fn readers_see_files_while_they_are_made_and_committed() {
    let fs = new_filesystem();
    let top = fs.top_level();
    let options = fs.write_options(None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0..400_usize {
                let id = new_file(&fs, &format!("file {index}"));
                let mut appender = fs.appender(id, 0).unwrap();
                let bytes = vec![u8::try_from(index % 256).unwrap(); index * 37];
                appender.push(FileOffset(0), PreparedData::new(bytes, &options)).unwrap();
                appender.finish().unwrap();
                if index % 50 == 7 {
                    fs.commit().unwrap();
                }
            }
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut seen = 0;
                while seen < 400 {
                    seen = 0;
                    for entry in fs.read_dir(top, 0).unwrap() {
                        let entry = entry.unwrap();
                        seen += 1;
                        let bytes = read(&fs, entry.target).unwrap();
                        let first = bytes.first().copied().unwrap_or(0);
                        assert!(bytes.iter().all(|byte| *byte == first));
                    }
                }
            });
        }
    });
    assert_eq!(fs.read_dir(top, 0).unwrap().count(), 400);
}

#[test]
fn read_only_subvolumes_take_no_changes() {
    let fs = new_filesystem();
    let new = NewInode::new(0o040_755, TIME);
    let mut handle = fs.begin(Reservation::items(40)).unwrap();
    let child = handle.create_subvolume(fs.top_level(), b"sub", &new).unwrap();
    let (key, mut item) = fs.root_item(child.root).unwrap().unwrap();
    item.flags = ubtrfs_ondisk::root::flags::RDONLY.into();
    handle.txn.replace(RootId::ROOT_TREE, key, item.as_bytes()).unwrap();
    let read_only = |result: Result<(), Error>| matches!(result, Err(Error::ReadOnly { .. }));
    assert!(read_only(handle.create(child, b"x", &new).map(|_| ())));
    assert!(read_only(handle.set_xattr(child, b"user.x", b"")));
    assert!(read_only(handle.set_attributes(child, &SetAttributes::default())));
    assert!(read_only(handle.create_subvolume(child, b"x", &new).map(|_| ())));
}

/// Each file that was written, and removed before that came to the medium, stayed in memory until somebody wrote back what is old: without a
/// background, for good.
#[test]
fn file_that_is_removed_while_it_is_dirty_is_not_kept_in_memory() {
    let fs = new_filesystem();
    for round in 0..20 {
        let id = new_file(&fs, "file");
        let file = fs.open_data(id).unwrap();
        file.write(ubtrfs_iomap::FileOffset::ZERO, &[round; 10_000]).unwrap();
        drop(file);
        fs.unlink(fs.top_level(), b"file").unwrap();
        assert!(!fs.is_open(id), "round {round}");
    }
}

/// An inode takes 512 bytes at most in memory, with its key in a table that is half full; a file that is open, of which there are fewer, with
/// its pages' and states' roots, locks and errors, twice as many.
#[test]
fn inodes_and_open_files_are_small_in_memory() {
    assert!(2 * size_of::<(InodeId, super::state::HeldInode)>() <= 512);
    assert!(size_of::<super::open_file::Space>() <= 1024);
}

/// Who walks through the extents of a file has the tree's leaves read by a thread of the background, as long as there is one.
#[test]
fn extents_of_a_file_are_read_beside_who_walks_through_them() {
    const EXTENTS: u64 = 6000;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let runtime = Arc::new(Runtime::simulated(1));
    let volume = mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap();
    let fs = Filesystem::open(volume, OpenOptions { runtime, ..OpenOptions::default() }).unwrap();
    let id = new_file(&fs, "file");
    for at in 0..EXTENTS {
        let place = extent(LogicalAddr(16 << 20), SECTOR, 0, SECTOR);
        put_extent(&fs, id, at * 2 * SECTOR, &FileExtent::Prealloc(place));
    }
    set_size(&fs, id, EXTENTS * 2 * SECTOR);
    fs.commit().unwrap();
    drop(fs);
    let open = || {
        let volume = Volume::open(vec![Arc::clone(&device)], &VolumeOptions::default()).unwrap();
        Filesystem::open(volume, OpenOptions::default()).unwrap()
    };
    // A half of them, so that there is something to read ahead.
    let blocks_read_by_walk = |fs: &Filesystem| {
        let before = fs.blocks_read();
        let mappings = fs.file_extents(id, FileOffset(0)).unwrap();
        for mapping in mappings.take(usize::try_from(EXTENTS).unwrap()) {
            mapping.unwrap();
            fs.inner.core.roots.store.wait_for_readers();
        }
        fs.blocks_read() - before
    };
    let alone = blocks_read_by_walk(&open());
    let fs = open();
    let background = fs.run_in_background(BackgroundOptions::default()).unwrap();
    while !fs.inner.core.roots.store.has_reader() {
        ubtrfs_rt::yield_now();
    }
    let beside = blocks_read_by_walk(&fs);
    assert!(beside >= alone + 8, "{beside} blocks read, alone {alone}");
    drop(background);
    assert!(!fs.inner.core.roots.store.has_reader());
}

/// Once only who changed something had trees give way, and a commit took that back: who only read, or only committed, could come to half as
/// much again as he allowed.
#[test]
fn trees_leave_memory_to_the_bytes_of_files_that_are_only_read() {
    const CACHE: usize = 8 << 20;
    const FILE: usize = 3 << 20;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let open = |read_only| {
        let volume = Volume::open(vec![Arc::clone(&device)], &VolumeOptions::default()).unwrap();
        let options = OpenOptions { read_only, cache_bytes: CACHE, ..OpenOptions::default() };
        Filesystem::open(volume, options).unwrap()
    };
    let left_to_files = |fs: &Filesystem| {
        let left = CACHE as u64 - fs.inner.core.roots.store.clean_bytes_max();
        usize::try_from(left).unwrap()
    };
    let runtime = Arc::new(Runtime::simulated(1));
    drop(mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap());
    let fs = open(false);
    let id = new_file(&fs, "file");
    let file = fs.open_data(id).unwrap();
    file.write(ubtrfs_iomap::FileOffset::ZERO, &pattern(FILE)).unwrap();
    file.fsync().unwrap();
    new_file(&fs, "other");
    fs.commit().unwrap();
    assert!(left_to_files(&fs) + (1 << 20) >= FILE, "{}", left_to_files(&fs));
    drop((file, fs));
    let fs = open(true);
    assert_eq!(left_to_files(&fs), 0);
    let file = fs.open_data(id).unwrap();
    for at in (0..FILE as u64).step_by(4096) {
        file.read(ubtrfs_iomap::FileOffset::new(at), &mut [0; 4096]).unwrap();
    }
    assert!(left_to_files(&fs) + (1 << 20) >= FILE, "{}", left_to_files(&fs));
}

/// The inode is made before its name is entered.
#[test]
fn what_gets_no_name_leaves_nothing() {
    let fs = new_filesystem();
    let top = fs.top_level();
    let dir = NewInode::new(0o040_755, TIME);
    let dir = fs.begin(Reservation::create(0)).unwrap().create(top, b"dir", &dir).unwrap();
    let set = |name: &[u8], value: &[u8]| {
        let mut handle = fs.begin(Reservation::create(2)).unwrap();
        handle.set_xattr(dir, name, value).unwrap();
    };
    // Inherited by what is made: a default access list (owner, group, a user, mask, others), and a compression.
    let entry = |tag: u16, perm: u16, id: u32| {
        [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let list = [
        2u32.to_le_bytes().to_vec(),
        entry(1, 7, u32::MAX),
        entry(2, 5, 1000),
        entry(4, 5, u32::MAX),
        entry(0x10, 7, u32::MAX),
        entry(0x20, 5, u32::MAX),
    ];
    set(b"system.posix_acl_default", &list.concat());
    set(b"btrfs.compression", b"zstd");
    let inherit = Inherit::AsProcess { umask: 0 };
    let make = |name: &[u8], mode: u32| {
        let new = NewInode { inherit, ..NewInode::new(mode, TIME) };
        let mut handle = fs.begin(Reservation::create(2)).unwrap();
        match mode {
            0o120_777 => handle.symlink(dir, name, b"target", &new),
            _ => handle.create(dir, name, &new),
        }
    };
    let first = make(b"file", 0o100_644).unwrap();
    assert_eq!(fs.xattrs(first).unwrap().len(), 2);
    let next = InodeId { inode: InodeNo(first.inode.0 + 1), ..first };
    for mode in [0o100_644, 0o040_755, 0o120_777] {
        assert!(matches!(make(b"file", mode), Err(Error::Exists { .. })));
        let tree = fs.tree(next.root).unwrap();
        let mut cursor = tree.cursor();
        cursor.seek(&next.key(KeyType(0), 0)).unwrap();
        let found = cursor.current().unwrap().map(|(key, _)| key);
        assert!(found.is_none_or(|key| key.objectid.0 > next.inode.0), "{found:?}");
    }
    assert_eq!(make(b"other", 0o040_755).unwrap(), next);
    fs.commit().unwrap();
    let names = fs.read_dir(dir, 0).unwrap().map(|entry| entry.unwrap().name);
    assert_eq!(names.collect::<Vec<_>>(), [&b"file"[..], b"other"]);
}

/// The new end was in a hole, where no extent changed: who had the file open by its number read on to the old end.
#[test]
fn who_reads_by_number_sees_where_a_file_ends_that_was_cut_in_a_hole() {
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    fs.write(id, FileOffset(0), &[1; 4096]).unwrap();
    fs.truncate(id, 8192).unwrap();
    let mut by_number = fs.open_file(id).unwrap();
    let mut read = || by_number.read(FileOffset(0), &mut [0; 10_000]).unwrap();
    assert_eq!(read(), 8192);
    let open = fs.open_data(id).unwrap();
    open.truncate(ubtrfs_iomap::FileOffset::new(5000)).unwrap();
    drop(open);
    assert_eq!(read(), 5000);
}

/// Who had it open by its number read on to its old end.
#[test]
fn who_reads_by_number_sees_what_is_appended() {
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    let mut by_number = fs.open_file(id).unwrap();
    let mut read = || by_number.read(FileOffset(0), &mut [0; 10_000]).unwrap();
    assert_eq!(read(), 0);
    let mut appender = fs.appender(id, 0).unwrap();
    let options = fs.write_options(None);
    appender.push(FileOffset(0), PreparedData::new(vec![1; 8192], &options)).unwrap();
    appender.finish().unwrap();
    assert_eq!(read(), 8192);
}

/// Sectors without checksums behind it do not hide a damaged one: all checksums are looked up before anything is read.
#[test]
fn damaged_sector_is_told_before_those_behind_it_without_checksums() {
    const LEN: u64 = 1 << 20;
    let fs = new_filesystem();
    let id = new_file(&fs, "file");
    let bytes = pattern(LEN as usize);
    let start = put_data_with_csums(&fs, &bytes, 100);
    put_extent(&fs, id, 0, &FileExtent::Regular(extent(start, LEN, 0, LEN)));
    set_size(&fs, id, LEN);
    let told = || {
        let Err(Error::Corrupt(told)) = fs.read(id, FileOffset(0), &mut [0; LEN as usize]) else {
            panic!("read what has no checksum")
        };
        (told.reason, told.block.unwrap().0 - start.0)
    };
    assert_eq!(told(), (Reason::Missing, 100 * SECTOR));
    fs.volume().write(LogicalAddr(start.0 + 3 * SECTOR), &[7; SECTOR as usize]).unwrap();
    assert_eq!(told(), (Reason::CsumMismatch, 3 * SECTOR));
    let mut front = [0; 3 * SECTOR as usize];
    assert_eq!(fs.read(id, FileOffset(0), &mut front).unwrap(), front.len());
    assert!(front == bytes[..front.len()]);
}

/// A short first block that is dirty, or on its way, may become inline while somebody writes more from the file's beginning on; what lies behind it
/// then moves it, for which no space was promised. Where there was none, data behind it that had been taken was lost.
#[test]
fn who_writes_over_a_short_block_and_behind_it_has_the_promise_for_moving_it() {
    let fs = new_filesystem();
    let file = fs.open_data(new_file(&fs, "file")).unwrap();
    let promised = || file.space().inode().has_outline_promise();
    file.write(ubtrfs_iomap::FileOffset::new(0), &[1; 100]).unwrap();
    assert!(!promised());
    file.write(ubtrfs_iomap::FileOffset::new(0), &[2; 2 * SECTOR as usize]).unwrap();
    assert!(promised());
    file.fsync().unwrap();
    assert!(!promised());
    // Nothing of it was ever short.
    let file = fs.open_data(new_file(&fs, "other")).unwrap();
    file.write(ubtrfs_iomap::FileOffset::new(0), &[2; 2 * SECTOR as usize]).unwrap();
    assert!(!file.space().inode().has_outline_promise());
}
