//! The kernel and the engine take turns on one filesystem, of many shapes: each makes random operations,
//! snapshots and deletions, and then finds all that the other did, with its flags, its extents and what
//! they share. Both checkers judge after each turn. In some rounds the power goes while the kernel has it
//! mounted, right behind an fsync: the kernel and the engine replay the same log, and see the same.
//!
//! UBTRFS_TURNS says how many rounds each shape has; `make soak` runs a hundred. UBTRFS_TURNS_SHAPE picks
//! one shape, UBTRFS_TURNS_SEED repeats a run. What a round began with stays in the directory that
//! UBTRFS_TURNS_KEEP names, if it fails.

#[path = "../common/mod.rs"]
mod common;

mod by_engine;
mod by_kernel;
mod counts;
mod generate;
mod images;
mod operation;
mod shapes;
mod view;

use std::path::PathBuf;
use std::time::SystemTime;

use by_kernel::Kernel;
use counts::{Counts, Journal};
use generate::{Generator, Habits, LONG_NAME_BYTES};
use images::Images;
use operation::Operation;
use rustix::fs::StatVfsMountFlags;
use rustix::io::Errno;
use shapes::{PLAIN, Shape};
use ubtrfs_engine::{Error, Filesystem, Inode, Notice};
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{KernelMount, Oracle, Prng, oracle, refused_log};
use view::View;

const SEED_DEFAULT: u64 = 91;
/// With so many rounds, all that makes a shape what it is has to have happened.
const ROUNDS_TOLD_MIN: u64 = 20;
/// Of each so many rounds, a side has to make a file in place at least, whatever chance says.
const ROUNDS_A_FILE_IN_PLACE: u64 = 4;
const IN_PLACE: &str = "create in place";

/// A test of each shape.
macro_rules! shapes {
    ($($name:ident: $shape:expr,)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(#[test]
        fn $name() {
            static SHAPE: Shape = $shape;
            take_turns(stringify!($name), &SHAPE);
        })*
    };
}

shapes! {
    defaults: PLAIN,
    small_nodes: Shape { mkfs: "-n 4096", ..PLAIN },
    mixed: Shape { mkfs: "--mixed", ..PLAIN },
    explicit_holes: Shape { mkfs: "-O ^no-holes", ..PLAIN },
    block_group_tree: Shape { by_engine: true, ..PLAIN },
    block_group_tree_small_nodes: Shape { by_engine: true, mkfs: "-n 4096", ..PLAIN },
    v1_cache: Shape { mkfs: "-R ^free-space-tree", mount: "space_cache=v1", ..PLAIN },
    no_cache: Shape { mkfs: "-R ^free-space-tree", mount: "nospace_cache", ..PLAIN },
    xxhash: Shape { mkfs: "--csum xxhash", ..PLAIN },
    sha256: Shape { mkfs: "--csum sha256", ..PLAIN },
    blake2: Shape { mkfs: "--csum blake2", ..PLAIN },
    raid1: Shape { mkfs: "-m raid1 -d raid1", device_count: 2, ..PLAIN },
    raid0: Shape { mkfs: "-m raid0 -d raid0", device_count: 3, ..PLAIN },
    raid10: Shape { mkfs: "-m raid10 -d raid10", device_count: 4, ..PLAIN },
    raid1c3: Shape { mkfs: "-m raid1c4 -d raid1c3", device_count: 4, ..PLAIN },
    zstd: Shape { mount: "compress=zstd", compression: Some(Compression::Zstd), ..PLAIN },
    lzo: Shape { mount: "compress=lzo", compression: Some(Compression::Lzo), ..PLAIN },
    zlib: Shape { mount: "compress-force=zlib", compression: Some(Compression::Zlib), ..PLAIN },
    full: Shape { size_bytes: 256 << 20, runs_full: true, ..PLAIN },
    full_mixed: Shape { mkfs: "--mixed", size_bytes: 110 << 20, runs_full: true, ..PLAIN },
    full_small_nodes: Shape { mkfs: "-n 4096 -m single", size_bytes: 200 << 20, runs_full: true, ..PLAIN },
}

fn take_turns(name: &str, shape: &'static Shape) {
    if !oracle::require_all(&[
        Oracle::KernelBtrfs,
        Oracle::Root,
        Oracle::MkfsBtrfs,
        Oracle::BtrfsProgs,
    ]) {
        return;
    }
    if let Ok(wanted) = std::env::var("UBTRFS_TURNS_SHAPE") {
        assert!(NAMES.contains(&wanted.as_str()), "UBTRFS_TURNS_SHAPE is one of {NAMES:?}");
        if wanted != name {
            return;
        }
    }
    let number = |name: &str| std::env::var(name).map(|text| text.parse::<u64>().unwrap());
    let seed = number("UBTRFS_TURNS_SEED").unwrap_or(SEED_DEFAULT);
    let rounds = number("UBTRFS_TURNS").unwrap_or(1);
    println!("UBTRFS_TURNS={rounds} UBTRFS_TURNS_SEED={seed} UBTRFS_TURNS_SHAPE={name}");
    let mut run = Run::new(name, shape, seed);
    let mut left = None;
    for round in 0..rounds {
        run.round = round;
        let ours = run.engine_turn(left);
        left = Some(run.kernel_turn(&ours));
    }
    run.finish(name, rounds, &left.expect("there is a round"));
}

/// One run of one shape.
struct Run {
    shape: &'static Shape,
    images: Images,
    random: Prng,
    engine: Counts,
    kernel: Counts,
    journal: Journal,
    /// Cuts of the power, and those that left a log.
    cuts: u64,
    logs: u64,
    /// Logs of the kernel's that it does not replay itself.
    refused: u64,
    /// Extents that were shared, or compressed, in what was compared.
    shared: usize,
    encoded: usize,
    round: u64,
    /// The part of the filesystem that was in use when it was last looked.
    used_percent: u64,
}

impl Run {
    fn new(name: &str, shape: &'static Shape, seed: u64) -> Self {
        Self {
            shape,
            images: Images::make(name, shape),
            random: Prng::new(of_shape(seed, name)),
            engine: Counts::default(),
            kernel: Counts::default(),
            journal: Journal::default(),
            cuts: 0,
            logs: 0,
            refused: 0,
            shared: 0,
            encoded: 0,
            round: 0,
            used_percent: 0,
        }
    }

    /// For a side that has made so many files that are overwritten in place.
    fn generator(&mut self, found: &View, in_place_count: u64) -> Generator {
        // Each time it has run full, it is emptied for a while.
        let shrinks = match self.shape.runs_full {
            true => self.round % 4 == 3,
            false => self.used_percent > 50,
        };
        let nodesize_bytes = self.shape.nodesize_bytes();
        let many_names = self.shape.many_names(LONG_NAME_BYTES);
        let habits = Habits {
            nodesize_bytes,
            many_names,
            fills: self.shape.runs_full,
            shrinks,
            begins_in_place: in_place_count <= self.round / ROUNDS_A_FILE_IN_PLACE,
        };
        let random = Prng::new(self.random.next_u64());
        Generator::new(random, habits, found)
    }

    fn compare(&mut self, ours: &View, theirs: &View, when: &str) {
        theirs.assert_same(ours, &format!("{when} (kernel | engine)"));
        self.encoded += ours.extents_with("encoded");
        self.shared += ours.extents_with("shared");
    }

    /// The engine's turn, on what the kernel left. Returns what it left.
    fn engine_turn(&mut self, left: Option<View>) -> View {
        let when = format!("round {}, the engine", self.round);
        self.images.keep();
        let fs = self.images.open(self.shape, true);
        let is_settled = left.as_ref().is_some_and(|left| left.is_settled);
        let found = View::of_engine(&fs, is_settled);
        drop(fs);
        if let Some(left) = left {
            self.compare(&found, &left, &format!("{when} finds what the kernel left"));
        }
        let fs = self.images.open(self.shape, false);
        self.journal.begin(&when);
        let has_orphans = self.operations_of_engine(&fs, &found);
        fs.sync().unwrap();
        let is_settled = self.random.chance(2, 3) && !has_orphans;
        if is_settled {
            // Those that a cut of the power left, which go when somebody looks.
            for subvolume in fs.subvolumes().unwrap().iter().filter(|subvolume| !subvolume.deleted)
            {
                fs.clean_orphans(subvolume.id).unwrap();
            }
            fs.clean_deleted_subvolumes().unwrap();
            fs.commit().unwrap();
        }
        let view = View::of_engine(&fs, is_settled);
        drop(fs);
        self.images.judge(&format!("{when} is done"));
        view
    }

    /// Returns whether inodes without a name are left.
    fn operations_of_engine(&mut self, fs: &Filesystem, found: &View) -> bool {
        let mut has_orphans = false;
        let mut generator = self.generator(found, self.engine.done(IN_PLACE));
        for _ in 0..30 + self.random.below(31) {
            let operation = generator.next();
            let result = by_engine_witnessed(fs, &operation);
            self.journal.note(&operation, &result);
            let is_for_space = matches!(result, Err(Error::NoSpace { .. }));
            self.engine.count(&operation, &result, is_for_space);
            match &result {
                Ok(()) => {
                    has_orphans |= matches!(operation, Operation::RemoveOpen { .. });
                    generator.note(&operation);
                }
                Err(error) if is_defect(error, self.shape) => panic!("{operation:?}: {error}"),
                Err(_) => {}
            }
        }
        has_orphans
    }

    fn mount(&self, images: &[PathBuf], read_only: bool) -> KernelMount {
        self.try_mount(images, read_only).unwrap()
    }

    fn try_mount(&self, images: &[PathBuf], read_only: bool) -> Result<KernelMount, String> {
        let options = format!("subvolid=5,noatime,commit=300,{}", self.shape.mount);
        KernelMount::mount(images, options.trim_end_matches(','), read_only)
    }

    /// The kernel's turn, on what the engine left. Returns what it left.
    fn kernel_turn(&mut self, left: &View) -> View {
        let when = format!("round {}, the kernel", self.round);
        self.images.keep();
        let since = self.images.generation();
        let mount = self.mount(&self.images.paths, false);
        let found = View::of_kernel(mount.path(), left.is_settled);
        self.compare(left, &found, &format!("{when} finds what the engine left"));
        self.journal.begin(&when);
        let mut kernel = Kernel::new(mount.path());
        let mut generator = self.generator(&found, self.kernel.done(IN_PLACE));
        for _ in 0..30 + self.random.below(31) {
            let operation = generator.next();
            self.by_kernel(&mut kernel, &operation, &mut generator);
        }
        let stat = rustix::fs::statvfs(mount.path()).unwrap();
        assert!(!stat.f_flag.contains(StatVfsMountFlags::RDONLY), "the kernel stopped");
        self.used_percent = 100 - 100 * stat.f_bavail / stat.f_blocks;
        if self.shape.has_logs() && self.random.chance(1, 3) {
            kernel.perform(&Operation::Commit).unwrap();
            self.operations_and_fsyncs(&mut kernel, &mut generator);
            let copies = self.images.copy_at_one_moment();
            drop(kernel);
            mount.unmount();
            return self.replay(&copies, &when);
        }
        drop(kernel);
        let mut kernel = Kernel::new(mount.path());
        let is_settled = self.random.chance(2, 3);
        if is_settled {
            kernel.perform(&Operation::Clean { part: None }).unwrap();
        }
        kernel.perform(&Operation::Commit).unwrap();
        mount.unmount();
        self.images.judge_since(&format!("{when} is done"), since);
        let mount = self.mount(&self.images.paths, true);
        let view = View::of_kernel(mount.path(), is_settled);
        mount.unmount();
        view
    }

    fn by_kernel(
        &mut self,
        kernel: &mut Kernel<'_>,
        operation: &Operation,
        generator: &mut Generator,
    ) {
        let result = kernel.perform(operation);
        self.journal.note(operation, &result);
        let is = |errno: Errno| {
            let code = result.as_ref().err().and_then(std::io::Error::raw_os_error);
            code == Some(errno.raw_os_error())
        };
        self.kernel.count(operation, &result, is(Errno::NOSPC));
        let is_defect = is(Errno::IO) || is(Errno::UCLEAN);
        assert!(!is_defect, "{operation:?}: {result:?}");
        if result.is_ok() {
            generator.note(operation);
        }
    }

    /// What is in the log only, some of it, when the power goes.
    fn operations_and_fsyncs(&mut self, kernel: &mut Kernel<'_>, generator: &mut Generator) {
        let count = 5 + self.random.below(20);
        for left in (0..count).rev() {
            let operation = generator.next_without_commit();
            self.by_kernel(kernel, &operation, generator);
            if left == 0 || self.random.chance(1, 3) {
                let fsync = generator.fsync_after(&operation);
                self.by_kernel(kernel, &fsync, generator);
            }
        }
    }

    /// Goes on with a copy of the images that was taken while the kernel had them mounted. Each side
    /// replays the log in a copy of its own.
    fn replay(&mut self, copies: &(Vec<PathBuf>, Vec<PathBuf>), when: &str) -> View {
        let cut = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let cut =
            Timestamp { sec: i64::try_from(cut.as_secs()).unwrap(), nsec: cut.subsec_nanos() };
        let theirs = self.replay_by_kernel(copies, when);
        self.images.replace_by(&copies.1);
        let fs = self.images.open(self.shape, true);
        self.cuts += 1;
        self.logs += u64::from(fs.notices().contains(&Notice::LogNotReplayed));
        drop(fs);
        drop(self.images.open(self.shape, false));
        self.images.judge(&format!("{when} lost its power"));
        let fs = self.images.open(self.shape, true);
        assert!(fs.notices().is_empty());
        let mut ours = View::of_engine(&fs, false);
        let left = ours.clone();
        let mut theirs = theirs.unwrap_or_else(|| {
            // It mounts what the engine has made of the log that it refuses.
            let mount = self.mount(&self.images.paths, true);
            let theirs = View::of_kernel(mount.path(), false);
            mount.unmount();
            theirs
        });
        ours.forget_times_of_replay(&mut theirs, cut);
        self.compare(&ours, &theirs, &format!("{when} lost its power"));
        left
    }

    /// What the kernel makes of its log; nothing where it refuses to mount what it is known to refuse.
    fn replay_by_kernel(
        &mut self,
        copies: &(Vec<PathBuf>, Vec<PathBuf>),
        when: &str,
    ) -> Option<View> {
        match self.try_mount(&copies.0, false) {
            Ok(mount) => {
                let theirs = View::of_kernel(mount.path(), false);
                mount.unmount();
                Some(theirs)
            }
            Err(said) => {
                let why = refused_log(&copies.1);
                let is_known = why.iter().any(|why| why.is_told_by(&said));
                assert!(is_known, "{when} lost its power: {said}; known: {why:?}");
                println!("{when} lost its power, and the kernel refuses its log: {why:?}");
                self.refused += 1;
                None
            }
        }
    }

    /// Tells what was done, and that it was enough.
    fn finish(self, name: &str, rounds: u64, last: &View) {
        println!(
            "{name}: {rounds} rounds, {} cuts, {} logs replayed, {} of them refused by the kernel, extents \
             compared: {} shared, {} compressed; {} entries in the end",
            self.cuts,
            self.logs,
            self.refused,
            self.shared,
            self.encoded,
            last.tree.entries.len(),
        );
        for (side, counts) in [("engine", &self.engine), ("kernel", &self.kernel)] {
            counts.print(side);
            counts.assert_enough(side, rounds);
        }
        if rounds < ROUNDS_TOLD_MIN {
            return;
        }
        assert!(self.shared > 0 && self.encoded > 0, "shared, compressed");
        assert!(!self.shape.has_logs() || self.logs > 0, "logs");
        let is_full = |counts: &Counts| counts.without_space > 0;
        assert!(!self.shape.runs_full || is_full(&self.engine) && is_full(&self.kernel), "full");
    }
}

/// The seed of one shape, so that they do not all do the same.
fn of_shape(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

/// What the engine may not answer.
fn is_defect(error: &Error, shape: &Shape) -> bool {
    match error {
        Error::Corrupt(_)
        | Error::Aborted { .. }
        | Error::Volume(_)
        | Error::Unsupported { .. } => true,
        Error::File(error) => matches!(error, ubtrfs_iomap::Error::BadMapping { .. }),
        Error::NoSpace { .. } => !shape.runs_full,
        _ => false,
    }
}

/// An inode and its attributes.
type Witness = (Inode, Vec<(Vec<u8>, Vec<u8>)>);

/// What fails has changed nothing of what it names, if it is all or nothing.
fn by_engine_witnessed(fs: &Filesystem, operation: &Operation) -> Result<(), Error> {
    let look = |path: &&str| -> Option<Witness> {
        let id = fs.resolve(fs.top_level(), path.as_bytes()).ok()?;
        Some((fs.inode(id).unwrap(), fs.xattrs(id).unwrap()))
    };
    let names = operation.witnesses();
    let before: Vec<Option<Witness>> = names.iter().map(look).collect();
    by_engine::perform(fs, operation).inspect_err(|error| {
        let after: Vec<Option<Witness>> = names.iter().map(look).collect();
        assert_eq!(after, before, "{operation:?} failed: {error}");
    })
}
