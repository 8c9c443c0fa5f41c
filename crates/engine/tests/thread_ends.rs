//! Who reads and writes files while his thread ends, as what a thread owns may when it is dropped: the buffers that the thread kept are gone
//! by then. It aborted the process.

mod common;

use std::cell::RefCell;
use std::path::Path;
use std::sync::Mutex;

use common::full::{create, make, noise, open_with};
use ubtrfs_engine::{Filesystem, InodeId, OpenOptions};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Arc, Executor, Runtime};
use ubtrfs_testkit::Prng;

const LEN: usize = 1_000_000;

/// What was read, and read again once it was written anew.
static READ: Mutex<Vec<[Vec<u8>; 2]>> = Mutex::new(Vec::new());

/// Uses a file when it is dropped.
struct User {
    fs: Filesystem,
    id: InodeId,
}

impl User {
    /// Not from a block's beginning on, and by calls of that length.
    fn read(&self, call_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; LEN - 77];
        let mut done = 0;
        for piece in bytes.chunks_mut(call_bytes) {
            let at = DiskOffset(77 + done);
            done += self.fs.read(self.id, at, piece).unwrap() as u64;
        }
        bytes
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let before = self.read(LEN);
        let file = self.fs.open_data(self.id).unwrap();
        let text = Prng::new(9).text(LEN);
        file.write(FileOffset::ZERO, &text).unwrap();
        file.fsync().unwrap();
        drop(file);
        READ.lock().unwrap().push([before, self.read(50_000)]);
    }
}

thread_local! {
    static USERS: RefCell<Vec<User>> = const { RefCell::new(Vec::new()) };
}

fn open(image: &Path, executor: Executor) -> Filesystem {
    let runtime = Arc::new(Runtime { executor, ..Runtime::system() });
    open_with(image, OpenOptions { runtime, ..OpenOptions::default() })
}

/// With `Inline` the thread does all by itself; with others he is also the first who has kept threads made.
#[test]
fn files_are_read_and_written_while_a_thread_ends() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    for executor in [Executor::Inline, Executor::Threads(2)] {
        make(&image, 256 << 20);
        let fs = open(&image, Executor::Inline);
        let mut random = Prng::new(5);
        let kinds = [("plain", 0), ("packed", flags::COMPRESS)];
        let files = kinds.map(|(name, bits)| {
            let bytes = match name {
                "plain" => noise(&mut random, LEN as u64),
                _ => random.text(LEN),
            };
            let file = create(&fs, name, bits).unwrap();
            file.write(FileOffset::ZERO, &bytes).unwrap();
            file.fsync().unwrap();
            (file.id(), bytes)
        });
        drop(fs);
        let fs = open(&image, executor);
        let users: Vec<User> =
            files.iter().map(|(id, _)| User { fs: fs.clone(), id: *id }).collect();
        drop(fs);
        std::thread::spawn(move || {
            // First: what a thread has first it loses last.
            USERS.set(users);
            USERS.with_borrow(|users| users.iter().for_each(|user| drop(user.read(50_000))));
        })
        .join()
        .unwrap();
        let read = std::mem::take(&mut *READ.lock().unwrap());
        assert_eq!(read.len(), files.len());
        let text = Prng::new(9).text(LEN);
        for ((_, bytes), [before, after]) in files.iter().zip(&read) {
            assert!(*before == bytes[77..]);
            assert!(*after == text[77..]);
        }
        std::fs::remove_file(&image).unwrap();
    }
}
