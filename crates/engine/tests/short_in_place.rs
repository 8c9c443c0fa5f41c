//! Short files with space of their own, which Linux never makes inline: preallocated space was given up by the first write that fitted
//! into metadata, and on a full filesystem the next one that did not was refused.

mod common;

use common::full::{create, fill, fill_by, make, noise, open, read};
use common::judge;
use ubtrfs_engine::{DataFile, Error, PreparedData};
use ubtrfs_iomap::{FiemapExtent, FiemapSync, FileOffset, FileRange, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::oracle::{self, Oracle};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Prng, run};

const BLOCK: u64 = 4096;
const IN_PLACE: u64 = flags::NODATACOW | flags::NODATASUM;

fn at(bytes: u64) -> FileOffset {
    FileOffset::new(bytes)
}

fn only_extent(file: &DataFile) -> FiemapExtent {
    let extents = file.fiemap(FileRange::from(FileOffset::ZERO), 10, FiemapSync::AsIs).unwrap();
    assert_eq!(extents.len(), 1, "{extents:?}");
    extents[0]
}

fn write_short(file: &DataFile, way: &str) {
    match way {
        "through memory" => assert_eq!(file.write(at(0), &[b'a'; 100]).unwrap(), 100),
        _ => assert_eq!(file.direct_write(at(0), &[b'a'; 100]).unwrap(), 100),
    }
    file.fsync().unwrap();
}

#[test]
fn preallocated_block_takes_a_short_file_and_then_a_long_one_on_a_full_filesystem() {
    for bits in [0, flags::COMPRESS, IN_PLACE] {
        for way in ["through memory", "straight"] {
            let dir = tempfile::tempdir().unwrap();
            let image = dir.path().join("image");
            make(&image, 128 << 20);
            let fs = open(&image);
            let files: Vec<DataFile> = (0..16)
                .map(|number| create(&fs, &format!("file {number}"), bits).unwrap())
                .collect();
            files.iter().for_each(|file| file.allocate(at(0), BLOCK, Reach::Stays).unwrap());
            fs.sync().unwrap();
            let places: Vec<_> = files.iter().map(|file| only_extent(file).address).collect();
            let mut random = Prng::new(11);
            let filler = fill(&fs, &mut random);
            files.iter().for_each(|file| write_short(file, way));
            let rest = fill_by(&fs, "rest", &mut random);
            for (file, place) in files.iter().zip(&places) {
                let short = only_extent(file);
                assert!(!short.flags.is_inline && short.address == *place, "{bits:x} {way}");
                let bytes = noise(&mut random, BLOCK);
                let written = file.write(at(0), &bytes);
                // Written once it is like any other block, which wants another place, but for what is written in place.
                if bits == IN_PLACE {
                    assert_eq!(written.unwrap() as u64, BLOCK);
                    file.fsync().unwrap();
                    assert!(read(&fs, file.id()) == bytes);
                } else {
                    assert!(matches!(written, Err(Error::NoSpace { .. })), "{bits:x}: {written:?}");
                }
            }
            fs.sync().unwrap();
            drop((files, filler, rest, fs));
            judge(&image);
        }
    }
}

/// A file that is written in place has no copy of its data in metadata, however short it is, or becomes.
#[test]
fn file_that_is_written_in_place_is_never_inline() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 << 20);
    let fs = open(&image);
    let cut = create(&fs, "cut", IN_PLACE).unwrap();
    cut.write(at(0), &[1; BLOCK as usize]).unwrap();
    cut.fsync().unwrap();
    let place = only_extent(&cut).address;
    cut.truncate(at(100)).unwrap();
    cut.fsync().unwrap();
    cut.write(at(5), b"new").unwrap();
    cut.fsync().unwrap();
    assert_eq!(only_extent(&cut).address, place);
    let short = create(&fs, "short", IN_PLACE).unwrap();
    write_short(&short, "through memory");
    let place = only_extent(&short);
    assert!(!place.flags.is_inline);
    short.write(at(50), &[b'b'; 20]).unwrap();
    short.fsync().unwrap();
    assert_eq!(only_extent(&short).address, place.address);
    let closed = create(&fs, "closed", IN_PLACE).unwrap().id();
    fs.write(closed, DiskOffset(0), &[b'c'; 100]).unwrap();
    assert!(!only_extent(&fs.open_data(closed).unwrap()).flags.is_inline);
    let appended = create(&fs, "appended", IN_PLACE).unwrap().id();
    let data = PreparedData::new(vec![b'd'; 100], &fs.write_options(None));
    let mut appender = fs.appender(appended, 0).unwrap();
    appender.push(DiskOffset(0), data).unwrap();
    appender.finish().unwrap();
    assert!(!only_extent(&fs.open_data(appended).unwrap()).flags.is_inline);
    assert!(read(&fs, appended) == [b'd'; 100]);
    drop((cut, short, fs));
    judge(&image);
}

/// A short file that will never be inline wanted space for moving inline data behind which it is written.
#[test]
fn write_behind_a_short_start_goes_to_its_place_on_a_full_filesystem() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 << 20);
    let fs = open(&image);
    let files = ["dirty", "written back"].map(|name| {
        let file = create(&fs, name, IN_PLACE).unwrap();
        file.allocate(at(0), 2 * BLOCK, Reach::Stays).unwrap();
        file
    });
    fs.sync().unwrap();
    files.iter().for_each(|file| assert_eq!(file.write(at(0), &[b'a'; 100]).unwrap(), 100));
    files[1].fsync().unwrap();
    let mut random = Prng::new(12);
    let filler = fill(&fs, &mut random);
    for file in &files {
        let bytes = noise(&mut random, BLOCK);
        assert_eq!(file.write(at(BLOCK), &bytes).unwrap() as u64, BLOCK);
        file.fsync().unwrap();
        assert!(read(&fs, file.id())[BLOCK as usize..] == bytes);
    }
    drop((files, filler, fs));
    judge(&image);
}

/// Files that had preallocated space, and to which the kernel cloned inline data: they are inline all the same. To be cut they need no space.
#[test]
fn inline_file_with_flags_of_one_that_is_not_is_used_as_any() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    MkfsBtrfs::new().size_bytes(128 << 20).make(&image);
    let mount = KernelMount::read_write(&image, "");
    let names = ["cut", "cut to nothing", "cut open", "longer", "written", "written open"];
    std::fs::write(mount.path().join("source"), [b'a'; 100]).unwrap();
    for name in names {
        let path = mount.path().join(name);
        run("fallocate", ["-l".as_ref(), "4096".as_ref(), path.as_os_str()]);
        run("sync", ["-f".as_ref(), path.as_os_str()]);
        let source = mount.path().join("source");
        run("cp", ["--reflink=always".as_ref(), source.as_os_str(), path.as_os_str()]);
    }
    mount.unmount();
    let fs = open(&image);
    let ids = names.map(|name| {
        let id = fs.lookup(fs.top_level(), name.as_bytes()).unwrap();
        assert!(fs.inode(id).unwrap().flags & flags::PREALLOC != 0);
        assert!(only_extent(&fs.open_data(id).unwrap()).flags.is_inline);
        id
    });
    let [cut, nothing, cut_open, longer, written, written_open] = ids;
    fs.truncate(longer, 200).unwrap();
    fs.write(written, DiskOffset(50), &[b'b'; 100]).unwrap();
    let open_file = fs.open_data(written_open).unwrap();
    open_file.write(at(50), &[b'b'; 100]).unwrap();
    open_file.fsync().unwrap();
    drop(open_file);
    fs.sync().unwrap();
    let filler = fill(&fs, &mut Prng::new(13));
    fs.truncate(cut, 50).unwrap();
    fs.truncate(nothing, 0).unwrap();
    fs.open_data(cut_open).unwrap().truncate(at(0)).unwrap();
    fs.sync().unwrap();
    let expected = [
        vec![b'a'; 50],
        Vec::new(),
        Vec::new(),
        [&[b'a'; 100][..], &[0; 100]].concat(),
        [&[b'a'; 50][..], &[b'b'; 100]].concat(),
        [&[b'a'; 50][..], &[b'b'; 100]].concat(),
    ];
    for (id, expected) in ids.into_iter().zip(&expected) {
        assert!(read(&fs, id) == *expected, "{id}");
    }
    drop((filler, fs));
    judge(&image);
}
