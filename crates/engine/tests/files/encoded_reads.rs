//! Long reads of compressed files: past memory, and decoded on all cores.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::full::{create, make, noise, open_with};
use ubtrfs_engine::{DataFile, Filesystem, Method, OpenOptions};
use ubtrfs_iomap::{CacheOptions, FileOffset};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::Prng;

const MIB: usize = 1 << 20;
const EXTENT: usize = 128 << 10;

fn at(offset: usize) -> FileOffset {
    FileOffset::new(offset as u64)
}

fn open(image: &Path, compression: Compression) -> Filesystem {
    // Less than the file, so that it is read past memory.
    let page_cache = Some(CacheOptions { cached_bytes_max: 4 << 20, ..CacheOptions::default() });
    let compression = Some(Method::with_default_level(compression));
    open_with(image, OpenOptions { page_cache, compression, ..OpenOptions::default() })
}

/// What compresses, what does not, a hole, and a last block that is not whole.
fn contents() -> Vec<u8> {
    let mut random = Prng::new(7);
    let mut bytes = random.text(2 * MIB);
    bytes.extend(noise(&mut random, 300 << 10));
    bytes.resize(3 * MIB, 0);
    bytes.extend(random.text(3 * MIB - 1000));
    bytes
}

/// A file with them, durable, on a filesystem of its own.
fn made(image: &Path, compression: Compression, bytes: &[u8]) {
    make(image, 256 << 20);
    let fs = open(image, compression);
    let file = create(&fs, "file", flags::COMPRESS).unwrap();
    let hole = 2 * MIB + (300 << 10)..3 * MIB;
    for part in [0..hole.start, hole.end..bytes.len()] {
        assert_eq!(file.write(at(part.start), &bytes[part.clone()]).unwrap(), part.len());
    }
    file.fsync().unwrap();
}

fn opened(fs: &Filesystem) -> DataFile {
    let entry = fs.lookup(fs.top_level(), b"file").unwrap();
    fs.open_data(entry).unwrap()
}

#[test]
fn long_reads_of_compressed_files_are_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = contents();
    for compression in [Compression::Zlib, Compression::Lzo, Compression::Zstd] {
        let image = dir.path().join("image");
        made(&image, compression, &bytes);
        let fs = open(&image, compression);
        let file = opened(&fs);
        let packed = fs.file_extents(file.id(), DiskOffset(0)).unwrap().map(Result::unwrap);
        assert!(packed.filter(|extent| extent.compression == compression).count() > 30);
        let mut buffer = vec![0xEE; bytes.len() + 5000];
        // From places where extents begin and where none does, as much as extents have, and a byte more or less.
        for start in [0, 1, 4096, EXTENT, EXTENT + 4096, 2 * MIB - EXTENT, 3 * MIB + 1, 5 * MIB] {
            for len in [EXTENT, 4 * EXTENT - 1, 4 * EXTENT, MIB, 3 * MIB + 1, bytes.len() + 5000] {
                let expected = &bytes[start..bytes.len().min(start + len)];
                let what = format!("{compression:?}: {len} bytes from {start}");
                assert_eq!(file.read(at(start), &mut buffer[..len]).unwrap(), expected.len());
                assert!(buffer[..expected.len()] == *expected, "{what}");
                if start.is_multiple_of(4096) && len.is_multiple_of(4096) {
                    let count = file.direct_read(at(start), &mut buffer[..len]).unwrap();
                    assert!(buffer[..count] == *expected, "{what}, directly");
                }
            }
        }
        // One after the other.
        for len in [EXTENT, 4 * EXTENT, MIB, 3 * MIB] {
            let parts = bytes.chunks(len).enumerate();
            for (number, expected) in parts {
                buffer.fill(0xEE);
                let count = file.read(at(number * len), &mut buffer[..len]).unwrap();
                assert!(buffer[..count] == *expected, "{compression:?}: {number} of {len}");
            }
        }
        std::fs::remove_file(&image).unwrap();
    }
}

/// Others that were read with it are told of as if it had not been.
#[test]
fn damaged_extent_among_those_read_together_is_told_of_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = contents();
    let image = dir.path().join("image");
    made(&image, Compression::Zstd, &bytes);
    let bad = {
        let fs = open(&image, Compression::Zstd);
        let mut extents = fs.file_extents(opened(&fs).id(), DiskOffset(0)).unwrap();
        let extent = extents.nth(5).unwrap().unwrap();
        assert_eq!(extent.compression, Compression::Zstd);
        let chunks = fs.volume().chunks().to_vec();
        let logical = extent.disk_bytenr.0;
        let chunk = chunks
            .iter()
            .find(|chunk| (chunk.start.0..chunk.start.0 + chunk.len_bytes).contains(&logical));
        let chunk = chunk.unwrap();
        assert_eq!(chunk.stripes.len(), 1);
        let place = chunk.stripes[0].offset.0 + (logical - chunk.start.0);
        let device = std::fs::File::options().write(true).open(&image).unwrap();
        device.write_all_at(b"damage", place + 100).unwrap();
        usize::try_from(extent.offset.0).unwrap()
    };
    assert_eq!(bad, 5 * EXTENT);
    let fs = open(&image, Compression::Zstd);
    let file = opened(&fs);
    let mut buffer = vec![0; bytes.len()];
    // Until reads have gone on from each other for long enough to go past memory.
    for number in 0..8 {
        assert_eq!(file.read(at(number * 4096), &mut buffer[..4096]).unwrap(), 4096);
    }
    let begin = 8 * 4096;
    let count = file.read(at(begin), &mut buffer[..2 * MIB]).unwrap();
    assert_eq!(begin + count, bad);
    assert!(buffer[..count] == bytes[begin..bad]);
    let told = |result: Result<usize, ubtrfs_engine::Error>| {
        let error = result.unwrap_err().to_string();
        let inode = file.id().inode;
        assert!(error.contains(&format!("inode {inode}, file offset {bad}")), "{error}");
    };
    told(file.read(at(bad), &mut buffer[..MIB]));
    told(file.direct_read(at(bad), &mut buffer[..MIB]));
    let behind = bad + EXTENT;
    let len = bytes.len() - behind;
    assert_eq!(file.read(at(behind), &mut buffer[..len]).unwrap(), len);
    assert!(buffer[..len] == bytes[behind..]);
}
