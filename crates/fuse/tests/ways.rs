//! Answers that others than the thread that took the request give, or that are given at the very end: each goes by the way that its request came
//! by. Descriptors of `/dev/fuse` (`-o clone_fd`), with the kernel, are in `mount_clones.rs` of `cli`.

#[path = "support/fake.rs"]
mod fake;

use std::time::{Duration, Instant};

use fake::{
    CREATE, DESTROY, Fake, GETATTR, IOCTL, LOOKUP, LSEEK, READ, ROOT_NODE, Served, WRITE, number,
};
use ubtrfs_engine::{MkfsOptions, NewInode, Reservation, mkfs};
use ubtrfs_fuse::ServeOptions;
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_volume::{Device, MemDevice};

/// For so long something may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is served by threads of which the first is kept, and the request that keeps it.
struct Kept {
    served: Served,
    keeps: u64,
}

impl Kept {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        let runtime = Arc::new(Runtime::system());
        mkfs(vec![Arc::clone(&device)], &MkfsOptions::default(), &runtime).unwrap();
        let served = Served::new(device, ServeOptions::default());
        let keeps = served.fake.keep_first_thread();
        Self { served, keeps }
    }

    fn fake(&self) -> &Fake {
        &self.served.fake
    }

    fn let_first_go(&self) {
        self.fake().let_through(self.keeps);
        self.fake().answer(self.keeps).unwrap();
    }

    /// A file of 1000 bytes of which the kernel has a page; its node.
    fn file(&self) -> u64 {
        let words = [0o102_u32, 0o100_644, 0, 0].map(u32::to_ne_bytes).concat();
        let made = self.fake().done(CREATE, ROOT_NODE, &[&words[..], b"file\0"].concat()).unwrap();
        let node = number(&made, 0);
        self.fake().done(WRITE, node, &write(0, &[b'd'; 1000])).unwrap();
        self.fake().done(READ, node, &place(0, 4096)).unwrap();
        node
    }

    /// Waits until others could have taken what the first did not.
    fn asked(&self, operation: u32, node: u64, body: &[u8]) -> u64 {
        let unique = self.fake().ask(operation, node, body);
        let begun = Instant::now();
        while self.fake().way_of(unique).is_none() {
            assert!(begun.elapsed() < PATIENCE, "taken, and not answered");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_ne!(self.fake().way_of(unique), Some(0));
        unique
    }
}

/// What READ and WRITE begin with.
fn place(at: u64, len: usize) -> Vec<u8> {
    let mut body = [0, at].map(u64::to_ne_bytes).concat();
    let words = [u32::try_from(len).unwrap(), 0, 0, 0, 0, 0];
    body.extend(words.map(u32::to_ne_bytes).concat());
    body
}

fn write(at: u64, bytes: &[u8]) -> Vec<u8> {
    [&place(at, bytes.len()), bytes].concat()
}

#[test]
fn overdue_answer_goes_by_the_way_of_its_request() {
    let kept = Kept::new();
    let node = kept.file();
    kept.fake().hold_stores(true);
    let request = kept.asked(WRITE, node, &write(1500, b"x"));
    let written = kept.fake().answer(request).unwrap();
    assert_eq!(written[..4], 1_u32.to_ne_bytes());
    kept.fake().hold_stores(false);
    kept.let_first_go();
}

#[test]
fn search_that_waits_for_the_kernel_is_answered_by_the_way_of_its_request() {
    const SEEK_HOLE: u32 = 4;
    let kept = Kept::new();
    let node = kept.file();
    kept.fake().done(WRITE, node, &write(100_000, b"x")).unwrap();
    kept.fake().done(READ, node, &place(0, 8192)).unwrap();
    kept.fake().hold_pages(true);
    let words = [SEEK_HOLE, 0].map(u32::to_ne_bytes).concat();
    let request = kept.asked(LSEEK, node, &[&[0; 16][..], &words].concat());
    kept.fake().hold_pages(false);
    assert_eq!(number(&kept.fake().answer(request).unwrap(), 0), 4096);
    kept.let_first_go();
}

#[test]
fn ioctl_that_waits_for_the_kernel_is_answered_by_the_way_of_its_request() {
    const SET_FLAGS: u32 = 0x4008_941a;
    const READ_ONLY: u64 = 2;
    let kept = Kept::new();
    let fs = &kept.served.fs;
    let new = |mode| NewInode::new(mode, fs.runtime().clock.now());
    let top = fs.default_subvolume().unwrap();
    let mut handle = fs.begin(Reservation::create_subvolume()).unwrap();
    let id = handle.create_subvolume(top, b"sub", &new(0o040_755)).unwrap();
    drop(handle);
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(id, b"file", &new(0o100_644)).unwrap();
    drop(handle);
    let found = kept.fake().done(LOOKUP, ROOT_NODE, b"sub\0").unwrap();
    let node = number(&found, 0);
    kept.fake().done(LOOKUP, node, b"file\0").unwrap();
    kept.fake().hold_pages(true);
    let [zero, flags] = [0, READ_ONLY].map(u64::to_ne_bytes);
    let words = |words: [u32; 2]| words.map(u32::to_ne_bytes).concat();
    let body = [&zero[..], &words([0, SET_FLAGS]), &zero, &words([8, 0]), &flags].concat();
    let request = kept.asked(IOCTL, node, &body);
    kept.fake().hold_pages(false);
    kept.fake().answer(request).unwrap();
    assert!(fs.subvolume(id.root).unwrap().read_only);
    kept.let_first_go();
}

/// It is the last, and sent when all threads have ended: by then nobody else keeps its way open.
#[test]
fn farewell_goes_by_the_way_of_its_request() {
    let kept = Kept::new();
    let request = kept.asked(DESTROY, 0, b"");
    kept.let_first_go();
    let begun = Instant::now();
    let farewell = loop {
        if let Some(farewell) = kept.served.take_farewell() {
            break farewell;
        }
        assert!(begun.elapsed() < PATIENCE, "a farewell");
        std::thread::sleep(Duration::from_millis(1));
    };
    farewell.send();
    kept.fake().answer(request).unwrap();
}

/// Any number of requests at once, of which each is answered by who took it.
#[test]
fn requests_of_many_are_answered_by_the_ways_that_they_came_by() {
    let kept = Kept::new();
    kept.let_first_go();
    let mut asked: Vec<u64> = Vec::new();
    for at in 0..2000 {
        asked.push(kept.fake().ask(GETATTR, ROOT_NODE, &[0; 16]));
        if at % 50 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    for request in asked {
        kept.fake().answer(request).unwrap();
    }
}
