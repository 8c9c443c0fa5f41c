//! Requests that wait for the kernel, which waits for others that wait for this server: they keep no thread of those that serve, and wait
//! as long as it takes.

#[path = "support/fake.rs"]
mod fake;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::{
    Fake, GETATTR, INVAL_ENTRY, INVAL_INODE, IOCTL, LOOKUP, READ, ROOT_NODE, Served, WRITE, ioctl,
    number,
};
use ubtrfs_engine::{InodeId, MkfsOptions, NewInode, Reservation, mkfs};
use ubtrfs_fuse::ServeOptions;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Runtime;
use ubtrfs_volume::{Device, MemDevice};

/// More than the threads that serve.
const COUNT: usize = 8;
/// For so long a request waits that keeps such a thread.
const PATIENCE: Duration = Duration::from_secs(1);
const O_DIRECT: u32 = 0o40_000;

fn served() -> Served {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let runtime = ubtrfs_rt::Arc::new(Runtime::system());
    mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap();
    Served::new(device, ServeOptions::default())
}

fn made(served: &Served, name: &[u8]) -> (InodeId, u64) {
    let fs = &served.fs;
    let new = NewInode::new(0o100_644, fs.runtime().clock.now());
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    let id = handle.create(fs.default_subvolume().unwrap(), name, &new).unwrap();
    drop(handle);
    let found = served.fake.done(LOOKUP, ROOT_NODE, &[name, b"\0"].concat()).unwrap();
    (id, number(&found, 0))
}

/// What READ and WRITE begin with.
fn place(at: u64, len: usize, flags: u32) -> Vec<u8> {
    let mut body = [0, at].map(u64::to_ne_bytes).concat();
    let words = [u32::try_from(len).unwrap(), 0, 0, 0, flags, 0];
    body.extend(words.map(u32::to_ne_bytes).concat());
    body
}

/// Requests are answered while the others wait, which none of them does in vain.
fn assert_wait(fake: &Fake, waiting: &[u64]) {
    // Each thread could be at one of them: no answer would come before one of those had given up.
    for _ in 0..COUNT {
        fake.done(GETATTR, ROOT_NODE, &[0; 16]).unwrap();
    }
    std::thread::sleep(PATIENCE * 3 / 2);
    let early = waiting.iter().filter(|unique| fake.is_answered(**unique)).count();
    assert_eq!(early, 0);
}

/// In a directory in use the kernel has its lock for who makes a file there, which waits for the server: four requests stopped the mount for a second
/// at a time, and returned before the kernel knew.
#[test]
fn subvolumes_that_are_made_and_deleted_in_a_directory_in_use_keep_no_thread() {
    const CREATE: u32 = 0x5000_940e;
    const DELETE: u32 = 0x5000_940f;
    const CREATE_V2: u32 = 0x5000_9418;
    const DELETE_V2: u32 = 0x5000_943f;
    let served = served();
    let (fake, fs) = (&served.fake, &served.fs);
    let top = fs.default_subvolume().unwrap();
    let name = |number: usize| format!("sub {number}").into_bytes();
    for [one, two] in [[CREATE, CREATE_V2], [DELETE, DELETE_V2]] {
        fake.hold_names(true);
        let waiting: Vec<u64> = (0..COUNT)
            .map(|number| {
                let (command, front) = if number < COUNT / 2 { (one, 8) } else { (two, 56) };
                let mut argument = vec![0; front];
                argument.extend(name(number));
                argument.resize(4096, 0);
                fake.ask(IOCTL, ROOT_NODE, &ioctl(command, &argument))
            })
            .collect();
        assert_wait(fake, &waiting);
        fake.hold_names(false);
        for unique in waiting {
            fake.answer(unique).unwrap();
        }
        for number in 0..COUNT {
            assert_eq!(fs.lookup(top, &name(number)).is_ok(), one == CREATE);
            // Known when it was answered.
            let told = fake.told_of(ROOT_NODE, &name(number));
            assert!(told.contains(&(INVAL_ENTRY, 0)), "{told:?}");
        }
    }
}

/// Files that the kernel has something of which it wrote by requests, and had no thread to take them: each was refused with EBUSY after a second.
#[test]
fn flags_that_forbid_changes_wait_for_what_the_kernel_holds_back_and_keep_no_thread() {
    const SET_FLAGS: u32 = 0x4008_6602;
    const SET_XFLAGS: u32 = 0x401c_5820;
    let served = served();
    let (fake, fs) = (&served.fake, &served.fs);
    let files: Vec<(InodeId, u64)> =
        (0..COUNT).map(|number| made(&served, format!("file {number}").as_bytes())).collect();
    fake.hold_pages(true);
    let waiting: Vec<u64> = (0..COUNT)
        .map(|number| {
            // Immutable, and append-only, in either form.
            let (command, bits, len) = match number % 4 {
                0 => (SET_FLAGS, 0x10_u32, 8),
                1 => (SET_FLAGS, 0x20, 8),
                2 => (SET_XFLAGS, 0x8, 28),
                _ => (SET_XFLAGS, 0x10, 28),
            };
            let mut argument = bits.to_ne_bytes().to_vec();
            argument.resize(len, 0);
            fake.ask(IOCTL, files[number].1, &ioctl(command, &argument))
        })
        .collect();
    assert_wait(fake, &waiting);
    let bits = |(id, _): &(InodeId, u64)| fs.inode(*id).unwrap().flags;
    assert!(files.iter().all(|file| bits(file) == 0));
    fake.hold_pages(false);
    for unique in waiting {
        fake.answer(unique).unwrap();
    }
    for (number, file) in files.iter().enumerate() {
        let expected = [flags::IMMUTABLE, flags::APPEND][number % 2];
        assert_eq!(bits(file), expected, "{number}");
    }
}

/// The kernel writes the last page first that was stored to by a map. Writers waited a second for that, for each other's threads.
#[test]
fn direct_writes_behind_an_end_in_the_kernels_memory_keep_no_thread() {
    let served = served();
    let (fake, fs) = (&served.fake, &served.fs);
    let files: Vec<(InodeId, u64)> = (0..COUNT)
        .map(|number| {
            let (id, node) = made(&served, format!("file {number}").as_bytes());
            fake.done(WRITE, node, &[&place(0, 1, 0)[..], b"x"].concat()).unwrap();
            // So the kernel has the page.
            fake.done(READ, node, &place(0, 4096, 0)).unwrap();
            (id, node)
        })
        .collect();
    fake.hold_pages(true);
    let bytes = vec![b'd'; 4096];
    let waiting: Vec<u64> = files
        .iter()
        .map(|(_, node)| {
            fake.ask(WRITE, *node, &[place(4096, bytes.len(), O_DIRECT), bytes.clone()].concat())
        })
        .collect();
    assert_wait(fake, &waiting);
    assert!(files.iter().all(|(id, _)| fs.inode(*id).unwrap().size_bytes == 1));
    fake.hold_pages(false);
    for (unique, (id, node)) in waiting.into_iter().zip(files) {
        assert_eq!(fake.answer(unique).unwrap(), [0, 16, 0, 0, 0, 0, 0, 0]);
        assert_eq!(fs.inode(id).unwrap().size_bytes, 8192);
        assert!(fake.has_told(|told| (told.code, told.node, told.at) == (INVAL_INODE, node, 1)));
        let read = fake.done(READ, node, &place(0, 8192, 0)).unwrap();
        assert!(read[..4096] == [&b"x"[..], &[0; 4095]].concat() && read[4096..] == bytes);
    }
}

/// Whoever unmounts hears of no end before they are done.
#[test]
fn end_waits_for_subvolumes_that_are_being_made() {
    let served = served();
    let fs = served.fs.clone();
    let fake = Arc::clone(&served.fake);
    fake.hold_names(true);
    let mut argument = vec![0; 8];
    argument.extend(b"sub");
    argument.resize(4096, 0);
    let unique = fake.ask(IOCTL, ROOT_NODE, &ioctl(0x5000_940e, &argument));
    let top = fs.default_subvolume().unwrap();
    let begun = Instant::now();
    while fs.lookup(top, b"sub").is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
    // The fake kernel lets go of what waits for it then.
    drop(served);
    assert!(fake.is_answered(unique));
}
