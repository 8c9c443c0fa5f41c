//! The block in which a file ends, whose zeros behind the end are in memory only, and which cannot be written. What was cut off there was
//! shown as soon as the file ended further on: the zeros had been lost with the error.

use std::sync::atomic::Ordering;

use crate::common::full::{Faults, create, make, open, open_failing, open_failing_with, read};
use crate::common::judge;
use ubtrfs_engine::{DataFile, Filesystem, OpenOptions};
use ubtrfs_iomap::{CacheOptions, FileOffset, FileRange};
use ubtrfs_ondisk::inode::flags;

const BLOCK: u64 = 4096;
const KEPT: u64 = 3000;

fn at(bytes: u64) -> FileOffset {
    FileOffset::new(bytes)
}

/// Kinds of files: plain, compressed, written in place.
const KINDS: [u64; 3] = [0, flags::COMPRESS, flags::NODATACOW | flags::NODATASUM];

/// A file of one block of which all but [`KEPT`] bytes were cut off, in memory.
fn cut_file(fs: &Filesystem, bits: u64) -> DataFile {
    cut_file_named(fs, "file", bits)
}

fn cut_file_named(fs: &Filesystem, name: &str, bits: u64) -> DataFile {
    let file = create(fs, name, bits).unwrap();
    // What is compressed has two blocks, as one would be inline.
    let len = if bits == flags::COMPRESS { 2 * BLOCK } else { BLOCK };
    file.write(at(0), &vec![0xaa; len as usize]).unwrap();
    file.fsync().unwrap();
    file.truncate(at(KEPT)).unwrap();
    file
}

fn expected(len: u64, written: FileRange, byte: u8) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    bytes[..KEPT as usize].fill(0xaa);
    bytes[written.start.bytes() as usize..written.end.bytes() as usize].fill(byte);
    bytes
}

#[test]
fn what_was_cut_off_stays_away_when_writeback_of_all_failed() {
    let mut cases = Vec::new();
    for bits in KINDS {
        for from in [KEPT, BLOCK, 2 * BLOCK] {
            cases.push((bits, from));
        }
    }
    for (bits, from) in cases {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        make(&image, 128 << 20);
        let (fs, faults) = open_failing(&image);
        let file = cut_file(&fs, bits);
        file.write(at(from), &[0xbb; BLOCK as usize]).unwrap();
        faults.fails.store(true, Ordering::Relaxed);
        assert!(file.fsync().is_err(), "{bits:x} {from}");
        faults.fails.store(false, Ordering::Relaxed);
        // Of another block it may be lost, or come again: where it was not asked for.
        let shown = |fs: &Filesystem| {
            let have = read(fs, file.id());
            let end = from + BLOCK;
            let whole = expected(end, FileRange::new(at(from), at(end)), 0xbb);
            let mut lost = expected(end, FileRange::default(), 0);
            lost[from as usize..].copy_from_slice(&have[from as usize..]);
            assert_eq!(have.len(), whole.len());
            let is_lost = |byte: &u8| *byte == 0 || *byte == 0xbb;
            assert!(lost[from as usize..].iter().all(is_lost), "{bits:x} {from}");
            assert!(have == lost, "{bits:x} {from}: what was cut off is shown");
            have
        };
        let before = shown(&fs);
        file.fsync().unwrap();
        assert!(shown(&fs) == before, "{bits:x} {from}");
        fs.sync().unwrap();
        fs.drop_clean_data();
        assert!(shown(&fs) == before, "{bits:x} {from}");
        let id = file.id();
        drop((file, fs));
        let fs = open(&image);
        assert!(read(&fs, id) == before, "{bits:x} {from}: after reopening");
        drop(fs);
        judge(&image);
    }
}

/// With such a file of each kind on a device that can fail; what is judged in the end is the image.
fn with_cut_files(test: impl Fn(u64, &Filesystem, &Faults, &DataFile)) {
    for bits in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        make(&image, 128 << 20);
        let (fs, faults) = open_failing(&image);
        let file = cut_file(&fs, bits);
        test(bits, &fs, &faults, &file);
        drop((file, fs));
        judge(&image);
    }
}

/// In memory, and on the medium.
fn assert_is(fs: &Filesystem, file: &DataFile, bytes: &[u8], bits: u64) {
    assert!(read(fs, file.id()) == bytes, "{bits:x}");
    fs.sync().unwrap();
    fs.drop_clean_data();
    assert!(read(fs, file.id()) == bytes, "{bits:x}: on the medium");
}

/// Only the block in which it ends failed, and what lies behind was written later.
#[test]
fn what_was_cut_off_stays_away_when_only_writing_its_zeros_failed() {
    with_cut_files(|bits, fs, faults, file| {
        file.write(at(2 * BLOCK), &[0xbb; BLOCK as usize]).unwrap();
        faults.fails.store(true, Ordering::Relaxed);
        // Whoever tries, and however often.
        fs.write_back_due(u64::MAX);
        for _ in 0..2 {
            assert!(file.fsync().is_err());
        }
        faults.fails.store(false, Ordering::Relaxed);
        fs.write_back_due(u64::MAX);
        file.fsync().unwrap_or_else(|error| panic!("{bits:x}: nothing was lost: {error}"));
        let written = FileRange::new(at(2 * BLOCK), at(3 * BLOCK));
        assert_is(fs, file, &expected(3 * BLOCK, written, 0xbb), bits);
    });
}

/// Who needs these zeros on the medium first is refused each time, not only the first.
#[test]
fn file_does_not_grow_behind_zeros_that_could_not_be_written() {
    with_cut_files(|bits, fs, faults, file| {
        faults.fails.store(true, Ordering::Relaxed);
        for _ in 0..2 {
            assert!(file.truncate(at(2 * BLOCK)).is_err(), "{bits:x}");
            assert!(file.direct_write(at(2 * BLOCK), &[1; BLOCK as usize]).is_err(), "{bits:x}");
            assert_eq!(file.size(), at(KEPT));
        }
        faults.fails.store(false, Ordering::Relaxed);
        file.truncate(at(2 * BLOCK)).unwrap();
        assert_is(fs, file, &expected(2 * BLOCK, FileRange::default(), 0), bits);
    });
}

/// What stays dirty as its device fails for ever holds nobody up: not who writes where too much is dirty, nor who removes a file, opens
/// it anew or closes the filesystem. What was durable is.
#[test]
fn zeros_that_can_never_be_written_hold_nobody_up() {
    for bits in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        make(&image, 128 << 20);
        let page_cache = CacheOptions {
            dirty_bytes_max: 4 * BLOCK,
            dirty_bytes_background: BLOCK,
            cached_bytes_max: 64 * BLOCK,
            ..CacheOptions::default()
        };
        let options = OpenOptions { page_cache: Some(page_cache), ..OpenOptions::default() };
        let (fs, faults) = open_failing_with(&image, options);
        let files: Vec<DataFile> =
            (0..16).map(|number| cut_file_named(&fs, &format!("file {number}"), bits)).collect();
        fs.commit().unwrap();
        faults.fails.store(true, Ordering::Relaxed);
        let other = create(&fs, "other", 0).unwrap();
        for number in 0..64 {
            other.write(at(number * BLOCK), &[1; BLOCK as usize]).unwrap();
        }
        for file in &files {
            // Where its last block was tried already, this is refused.
            let _ = file.write(at(2 * BLOCK), &[2; BLOCK as usize]);
            assert!(file.fsync().is_err(), "{bits:x}");
        }
        assert!(fs.sync().is_err());
        fs.drop_clean_data();
        // What comes behind a block that cannot be written is refused, or lost: memory does not fill with it.
        for _ in 0..64 {
            let _ = files[2].append(&[3; BLOCK as usize]);
        }
        let left_bytes = fs.unstored_bytes(files[2].id());
        assert!(left_bytes <= 8 * BLOCK, "{bits:x}: {left_bytes} bytes are dirty");
        // Removed, it has nothing to be written.
        fs.unlink(fs.top_level(), b"file 0").unwrap();
        let id = files[1].id();
        drop((files, other));
        let again = fs.open_data(id).unwrap();
        assert!(again.fsync().is_err(), "{bits:x}: it is dirty still");
        drop(again);
        drop(fs);
        let fs = open(&image);
        for number in 1..16 {
            let id = fs.lookup(fs.top_level(), format!("file {number}").as_bytes()).unwrap();
            assert!(read(&fs, id) == [0xaa; KEPT as usize], "{bits:x}");
        }
        drop(fs);
        judge(&image);
    }
}
