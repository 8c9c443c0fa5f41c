//! Flags of files that are open: what memory knows of them.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::full::{create, make, noise, open_with, read};
use common::judge;
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, OpenOptions, Reservation, SetAttributes,
};
use ubtrfs_iomap::{CacheOptions, FileOffset};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::Prng;

const MIB: u64 = 1 << 20;

fn set_flags(fs: &Filesystem, id: InodeId, bits: u64) {
    let mut handle = fs.begin(Reservation::items(4)).unwrap();
    let flags = Some(bits);
    handle.set_attributes(id, &SetAttributes { flags, ..SetAttributes::default() }).unwrap();
}

/// Who waits for a thread that ends waits no longer.
struct Released<'a>(&'a AtomicUsize);

impl Drop for Released<'_> {
    fn drop(&mut self) {
        self.0.store(usize::MAX / 2, Ordering::SeqCst);
    }
}

/// Who changed the flags between the look and the moment when others found the file open told nobody: as long as that was open it could be
/// overwritten though it was for appends alone. One of some thousand rounds met it.
#[test]
fn file_that_is_opened_while_its_flags_change_has_the_new_ones() {
    const ROUNDS: usize = 3000;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 * MIB);
    let fs = open_with(&image, OpenOptions::default());
    let file = create(&fs, "file", 0).unwrap();
    file.append(b"old").unwrap();
    file.fsync().unwrap();
    let id = file.id();
    drop(file);
    // Each does its part of a round when both have come to it.
    let arrived = AtomicUsize::new(0);
    let wait_for_both = |round: usize| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < 2 * (round + 1) {
            std::hint::spin_loop();
            if round.is_multiple_of(2) {
                std::thread::yield_now();
            }
        }
    };
    let opened = std::thread::scope(|scope| {
        let opens = scope.spawn(|| {
            let _released = Released(&arrived);
            let mut refused = 0;
            for round in 0..ROUNDS {
                wait_for_both(2 * round);
                let file: DataFile = fs.open_data(id).unwrap();
                wait_for_both(2 * round + 1);
                match file.write(FileOffset::ZERO, b"new") {
                    Err(Error::NotPermitted { .. }) => refused += 1,
                    result => println!("round {round}: {result:?}"),
                }
                drop(file);
                set_flags(&fs, id, 0);
            }
            refused
        });
        let _released = Released(&arrived);
        for round in 0..ROUNDS {
            wait_for_both(2 * round);
            set_flags(&fs, id, flags::APPEND);
            wait_for_both(2 * round + 1);
        }
        opens.join().unwrap()
    });
    assert_eq!(opened, ROUNDS);
    assert_eq!(read(&fs, id), b"old");
}

/// What became dirty before a file was to be compressed has space for all its bytes promised, and takes less: on a full filesystem nothing
/// had it written, as memory did not know that it may.
#[test]
fn what_is_dirty_when_a_file_begins_to_be_compressed_gives_its_space() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 256 * MIB);
    let page_cache = CacheOptions {
        cached_bytes_max: 512 * MIB,
        dirty_bytes_max: 512 * MIB,
        dirty_bytes_background: 512 * MIB,
        ..CacheOptions::default()
    };
    let options = OpenOptions { page_cache: Some(page_cache), ..OpenOptions::default() };
    let fs = open_with(&image, options);
    let filler = create(&fs, "filler", 0).unwrap();
    filler.append(&noise(&mut Prng::new(1), 64 * MIB)).unwrap();
    filler.fsync().unwrap();
    let file = create(&fs, "file", 0).unwrap();
    // All of one kind, until nothing is left: it is dirty, with its promise.
    let part = vec![7; 1 << 20];
    let mut end = 0;
    loop {
        match file.append(&part) {
            Ok((_, len)) if len == part.len() => end += len,
            Ok((_, len)) => {
                end += len;
                break;
            }
            Err(Error::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(matches!(file.append(&part), Err(Error::NoSpace { .. })), "{end} bytes");
    set_flags(&fs, file.id(), flags::COMPRESS);
    for _ in 0..8 {
        assert_eq!(file.append(&part).unwrap().1, part.len());
        end += part.len();
    }
    file.fsync().unwrap();
    let bytes = read(&fs, file.id());
    assert!(bytes.len() == end && bytes.iter().all(|byte| *byte == 7));
    drop((file, filler));
    fs.sync().unwrap();
    drop(fs);
    judge(&image);
}
