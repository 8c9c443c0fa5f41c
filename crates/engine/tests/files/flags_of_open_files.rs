//! Flags of files that are open: what memory knows of them.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::full::{create, make, noise, open_with, read};
use crate::common::judge;
use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, OpenOptions, Reservation, SetAttributes,
};
use ubtrfs_iomap::{CacheOptions, FileOffset, Reach};
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

/// An immutable file could be changed by who opened it in process: only the calls that open nothing looked. Linux refuses to open it to be
/// written, and fallocate(2) even to who had it open; he may write on, and cut it.
#[test]
fn immutable_file_is_changed_by_nobody_but_who_had_it_open() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 * MIB);
    let fs = open_with(&image, OpenOptions::default());
    let before = create(&fs, "file", 0).unwrap();
    before.append(&[1; 8192]).unwrap();
    before.fsync().unwrap();
    let id = before.id();
    set_flags(&fs, id, flags::IMMUTABLE);
    let file = fs.open_data(id).unwrap();
    let at = FileOffset::new;
    let space = |file: &DataFile| {
        [
            file.allocate(at(0), 4096, Reach::Stays),
            file.allocate_zeroed(at(0), 4096, Reach::Stays),
            file.zero_range(at(0), 4096),
            file.punch_hole(at(0), 4096),
            file.unshare(at(0), 4096),
        ]
    };
    let map = file.map(at(0), 4096).unwrap();
    let changes = [
        file.write(at(0), b"x").map(drop),
        file.direct_write(at(0), &[2; 4096]).map(drop),
        file.append(b"x").map(drop),
        file.truncate(at(0)),
        file.resize(at(0)),
        map.store(at(0), b"x"),
        map.fault_for_write(at(0)),
    ];
    for (which, result) in changes.into_iter().chain(space(&file)).enumerate() {
        assert!(matches!(result, Err(Error::NotPermitted { .. })), "{which}: {result:?}");
    }
    for (which, result) in space(&before).into_iter().enumerate() {
        assert!(matches!(result, Err(Error::NotPermitted { .. })), "{which}: {result:?}");
    }
    assert_eq!(read(&fs, id), [1; 8192]);
    assert_eq!(before.write(at(0), &[3; 100]).unwrap(), 100);
    before.truncate(at(100)).unwrap();
    // What a cache above held back when it became immutable was allowed.
    assert_eq!(file.write_cached(at(50), &[4; 50]).unwrap(), 50);
    set_flags(&fs, id, 0);
    assert_eq!(file.append(&[5; 10]).unwrap(), (at(100), 10));
    file.fsync().unwrap();
    assert_eq!(read(&fs, id), [&[3; 50][..], &[4; 50], &[5; 10]].concat());
    drop((before, file));
    drop(fs);
    judge(&image);
}

/// Where a file ends was looked at before it was locked: of two who wrote behind the end of one for appends alone, the second wrote over what
/// the first had appended.
#[test]
fn writes_behind_the_end_of_a_file_for_appends_change_nothing_that_it_has() {
    const ROUNDS: u64 = 2000;
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    make(&image, 128 * MIB);
    let fs = open_with(&image, OpenOptions::default());
    let file = create(&fs, "file", flags::APPEND).unwrap();
    let refused = AtomicUsize::new(0);
    let done: usize = std::thread::scope(|scope| {
        let write = |byte: u8| {
            let (fs, refused, id) = (&fs, &refused, file.id());
            move || {
                let file = fs.open_data(id).unwrap();
                let mut done = 0;
                for _ in 0..ROUNDS {
                    match file.write(file.size(), &[byte; 7]) {
                        Ok(len) => done += len,
                        Err(Error::NotPermitted { .. }) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                done
            }
        };
        let threads = [1, 2].map(|byte| scope.spawn(write(byte)));
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{refused:?} writes were refused");
    assert_eq!(file.size().bytes(), done as u64);
    let bytes = read(&fs, file.id());
    assert!(bytes.chunks(7).all(|part| part.iter().all(|byte| *byte == part[0])));
    assert_eq!(file.direct_write(file.size(), &[3; 4096]).unwrap(), 4096);
    assert!(matches!(
        file.direct_write(FileOffset::ZERO, &[3; 4096]),
        Err(Error::NotPermitted { .. })
    ));
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
