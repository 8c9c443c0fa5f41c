//! Jobs that run inside of this process, each started as a child by a workload: they print their
//! timings as JSON.

mod check;
mod create;
mod data;
mod files;
mod seek;
mod sequential;
mod snapshot;
mod tree;
mod walk;
mod zeroing;

use std::ffi::OsString;
use std::ops::Add;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use ubtrfs_engine::{CACHE_BYTES_DEFAULT, Filesystem, MkfsOptions, OpenOptions, mkfs};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_testkit::Prng;
use ubtrfs_volume::{Device, FileDevice, OpenMode, Volume, VolumeOptions, Window};

use crate::error::{Error, Result};

/// Takes the image of any job; all of it a hole at first.
const IMAGE_BYTES: u64 = 8 << 30;
/// Holds the whole tree of the tree job, so that no search reads.
const CACHE_BYTES: usize = 1 << 30;

/// How long something took, so many times.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// What was done.
    pub what: String,
    /// How often.
    pub count: u64,
    /// Time for all of them.
    pub wall_ns: u64,
    /// Processor time of all threads for all of them: what the work costs when others keep the
    /// processors busy.
    pub cpu_ns: u64,
}

impl Timing {
    fn new(what: &str, count: u64, spent: Spent) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self { what: what.to_owned(), count, wall_ns: ns(spent.wall), cpu_ns: ns(spent.cpu) }
    }

    /// Nanoseconds of one.
    pub fn wall_each_ns(&self) -> f64 {
        self.wall_ns as f64 / self.count.max(1) as f64
    }

    /// Processor time of one, in nanoseconds.
    pub fn cpu_each_ns(&self) -> f64 {
        self.cpu_ns as f64 / self.count.max(1) as f64
    }
}

/// Time that went by and processor time of this process.
#[derive(Clone, Copy, Debug)]
struct Spent {
    wall: Duration,
    cpu: Duration,
}

impl Add for Spent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { wall: self.wall + other.wall, cpu: self.cpu + other.cpu }
    }
}

fn cpu_now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// What a job tells: more than its time.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// How long things took.
    pub timings: Vec<Timing>,
    /// What the engine counted.
    pub engine: Option<EngineCounts>,
    /// What a check looked at.
    pub checked: Option<Checked>,
    /// What was counted, by what was done, as `"fsync: commits"`.
    #[serde(default)]
    pub counts: Vec<Count>,
}

/// A number of things that does not depend on the machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each is named by what it is")]
pub struct Count {
    pub what: String,
    pub count: u64,
}

/// What a job of several processes does in this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum Phase {
    /// Makes the file and looks at it.
    #[default]
    Make,
    /// Walks it by SEEK_DATA and SEEK_HOLE.
    Seek,
    /// Copies it sparsely to nothing.
    Copy,
    /// Asks for its extents.
    Fiemap,
    /// Zeroes a range of which every other block is dirty.
    Zero,
    /// As `zero`, by the call of fallocate that makes the range unwritten.
    ZeroRange,
    /// Stores beyond the end of a file through a map.
    Store,
    /// Looks at what was stored.
    Look,
    /// As `make`, but walks and copies parts only of the file as long as it is delalloc.
    Walk,
    /// Asks for the next data and hole at places that are known.
    Places,
    /// Reads blocks of what is cached, in no order.
    Random,
    /// Removes the files that were made.
    Remove,
    /// Asks for the attributes of each file.
    Stat,
    /// Lists each directory.
    List,
    /// Makes all of the filesystem durable.
    Sync,
    /// Copies a plain file into the file.
    Into,
    /// Copies the file to a plain file.
    Out,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Make => "make",
            Self::Seek => "seek",
            Self::Copy => "copy",
            Self::Fiemap => "fiemap",
            Self::Zero => "zero",
            Self::ZeroRange => "zero-range",
            Self::Store => "store",
            Self::Look => "look",
            Self::Walk => "walk",
            Self::Places => "places",
            Self::Random => "random",
            Self::Remove => "remove",
            Self::Stat => "stat",
            Self::List => "list",
            Self::Sync => "sync",
            Self::Into => "into",
            Self::Out => "out",
        }
    }
}

/// A mechanism that is off, to see what it is good for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Ablate {
    /// Each search of the extent states begins at the root.
    Hint,
    /// Ranges are locked record by record.
    Lock,
    /// Both.
    Seek,
    /// Zeroing writes back what is dirty first.
    Batch,
    /// Memory for what files hold comes from the allocator, each folio's by itself.
    Slabs,
}

impl Outcome {
    /// Those timings that are called `what`.
    pub fn all<'a>(&'a self, what: &'a str) -> impl Iterator<Item = &'a Timing> {
        self.timings.iter().filter(move |timing| timing.what == what)
    }

    fn note_count(&mut self, what: &str, count: u64) {
        self.counts.push(Count { what: what.to_owned(), count });
    }

    fn note_counts(&mut self, done: &str, counts: Vec<Count>) {
        let named = counts.into_iter().map(|Count { what, count }| {
            let what = format!("{done}: {what}");
            Count { what, count }
        });
        self.counts.extend(named);
    }

    /// What was counted while `done` was done.
    pub fn count(&self, done: &str, what: &str) -> Option<u64> {
        let name = format!("{done}: {what}");
        self.counts.iter().find(|count| count.what == name).map(|count| count.count)
    }

    /// Seconds that went by in all that is called `what`; NaN if nothing is, as what was not timed did not take no time.
    pub fn wall_s(&self, what: &str) -> f64 {
        let walls = self.all(what).map(|timing| timing.wall_ns as f64 / 1e9);
        walls.reduce(f64::add).unwrap_or(f64::NAN)
    }

    /// Seconds of processor time of all that; NaN if there is none.
    pub fn cpu_s(&self, what: &str) -> f64 {
        let cpus = self.all(what).map(|timing| timing.cpu_ns as f64 / 1e9);
        cpus.reduce(f64::add).unwrap_or(f64::NAN)
    }
}

/// What the engine counted while it worked.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct EngineCounts {
    /// How long each run of an extent's delayed references took.
    pub delayed_refs: RefTimes,
    /// Searches for the form in which a group's free space is kept.
    pub free_space_form_searches: u64,
    /// Transactions, that of mkfs included.
    pub commits: u64,
    /// Tree blocks read back, which the cache did not hold.
    pub blocks_read: u64,
}

/// A summary of a histogram, in nanoseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "each is named by what it is")]
pub struct RefTimes {
    pub count: u64,
    pub mean_ns: f64,
    pub median_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
    /// Upper bounds, and how many runs took up to that and more than the last.
    pub buckets: Vec<(u64, u64)>,
}

/// What a check looked at.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Checked {
    /// Bytes of tree blocks, one copy.
    pub block_bytes: u64,
    /// Inodes.
    pub inode_count: u64,
}

/// A job in words.
#[derive(Clone, Debug, Parser)]
#[command(name = "ubtrfs-bench job")]
pub(crate) struct Args {
    /// tree, create, files, snapshot, check, seek, zeroing, sequential or walk
    job: String,
    /// The image, or where it is mounted
    path: PathBuf,
    /// Items, snapshots, inodes at least; of files, those of one thread in one loop
    count: u64,
    /// Through system calls, PATH being a mounted filesystem
    #[arg(long)]
    system: bool,
    #[arg(long, default_value_t = 1)]
    threads: usize,
    #[arg(long, default_value_t = 1)]
    loops: u64,
    /// Contents of a file
    #[arg(long, default_value_t = 0)]
    bytes: usize,
    /// Files in one directory; all of a thread's, unless given
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    per_directory: Option<u64>,
    /// Length of a file's name, at least 9
    #[arg(long, default_value_t = 12)]
    name_bytes: usize,
    /// The cache option, unless it is the default; a job on one file may have as much data dirty
    #[arg(long)]
    cache_mib: Option<usize>,
    /// Search for the form of each group's free space each time
    #[arg(long)]
    without_form_cache: bool,
    /// Read alone, however much at once
    #[arg(long)]
    without_shared_reads: bool,
    /// Metadata once, not twice
    #[arg(long)]
    one_copy: bool,
    /// Files that are made before each snapshot
    #[arg(long, default_value_t = 1)]
    dirty: u64,
    /// In a subvolume of their own
    #[arg(long)]
    subvolume: bool,
    /// What names of snapshots begin with
    #[arg(long, default_value = "snapshot")]
    tag: String,
    /// Of jobs that take several processes
    #[arg(long, value_enum, default_value = "make")]
    phase: Phase,
    /// Where the plain file lies that is copied from or to
    #[arg(long, value_name = "DIRECTORY")]
    plain: Option<PathBuf>,
    /// A mechanism to turn off
    #[arg(long, value_enum)]
    ablate: Option<Ablate>,
    /// Memory for what files hold is backed by huge pages
    #[arg(long)]
    huge_pages: bool,
    /// What one call writes or reads of a file, from its beginning to its end
    #[arg(long, value_name = "KIB", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1024))]
    chunk_kib: u32,
    /// What is read goes to memory that begins with a page, as cp has it; else to where the allocator has it
    #[arg(long)]
    whole_pages: bool,
    /// What a large file has again and again, whole MiB; text, unless given
    #[arg(long, value_name = "FILE")]
    contents: Option<PathBuf>,
    /// The file is compressed, by zstd of this level
    #[arg(long, value_name = "LEVEL")]
    compress: Option<i32>,
}

/// Runs the job that the arguments name and prints its [`Outcome`].
///
/// # Errors
/// A job that does not exist or fails.
pub fn main(arguments: &[OsString]) -> Result<()> {
    let words = [OsString::from("job")].into_iter().chain(arguments.iter().cloned());
    let args =
        Args::try_parse_from(words).map_err(|error| Error::Input { what: error.to_string() })?;
    let outcome = run(&args)?;
    println!("{}", serde_json::to_string(&outcome).expect("numbers and strings are JSON"));
    Ok(())
}

fn run(args: &Args) -> Result<Outcome> {
    let only = |timings| Outcome { timings, ..Outcome::default() };
    match args.job.as_str() {
        "tree" => tree::run(&args.path, args.count).map(only),
        "create" => create::run(&args.path, args.count).map(only),
        "files" => files::run(args),
        "snapshot" => snapshot::run(args),
        "check" => check::run(args),
        "seek" => seek::run(args),
        "zeroing" => zeroing::run(args),
        "sequential" => sequential::run(args),
        "walk" => walk::run(args),
        unknown => Err(Error::Input { what: format!("{unknown}: no such job") }),
    }
}

fn runtime() -> Arc<Runtime> {
    Arc::new(Runtime::system())
}

fn open_options() -> OpenOptions {
    OpenOptions { cache_bytes: CACHE_BYTES, runtime: runtime(), ..OpenOptions::default() }
}

impl Args {
    fn open_options(&self) -> OpenOptions {
        let cache_bytes = self.cache_mib.map_or(CACHE_BYTES_DEFAULT, |mib| mib << 20);
        let cache_free_space_form = !self.without_form_cache;
        let shares_reads = !self.without_shared_reads;
        OpenOptions { cache_bytes, cache_free_space_form, shares_reads, ..open_options() }
    }
}

fn make(image: &Path) -> Result<Filesystem> {
    let volume = make_volume(image, &MkfsOptions::default())?;
    Ok(Filesystem::open(volume, open_options())?)
}

fn make_with(args: &Args) -> Result<Filesystem> {
    let mut mkfs_options = MkfsOptions::default();
    if args.one_copy {
        mkfs_options.metadata_profile = Some(BlockGroupFlags::default());
    }
    let volume = make_volume(&args.path, &mkfs_options)?;
    Ok(Filesystem::open(volume, args.open_options())?)
}

fn make_volume(image: &Path, options: &MkfsOptions) -> Result<Volume> {
    let mode = OpenMode::CreateNew { len_bytes: IMAGE_BYTES };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole)?);
    Ok(mkfs(vec![device], options, &runtime())?)
}

fn reopen(image: &Path) -> Result<Filesystem> {
    Ok(Filesystem::open(open_volume(image)?, open_options())?)
}

fn reopen_with(args: &Args) -> Result<Filesystem> {
    Ok(Filesystem::open(open_volume(&args.path)?, args.open_options())?)
}

fn open_volume(image: &Path) -> Result<Volume> {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole)?;
    Ok(Volume::open(vec![Arc::new(device)], &VolumeOptions::default())?)
}

fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<(Spent, T)> {
    let (start, cpu_start) = (Instant::now(), cpu_now());
    let value = work()?;
    Ok((Spent { wall: start.elapsed(), cpu: cpu_now().saturating_sub(cpu_start) }, value))
}

/// The numbers below `count`, shuffled the same way every time.
fn random_order(count: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let mut random = Prng::new(1);
    for at in (1..order.len()).rev() {
        let other = random.below(at as u64 + 1);
        order.swap(at, usize::try_from(other).expect("below a length"));
    }
    order
}

fn require(holds: bool) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(Error::Input { what: "a job did not find what it made".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_find_what_they_made() {
        let dir = tempfile::tempdir().unwrap();
        let timings = tree::run(&dir.path().join("tree"), 2000).unwrap();
        assert!(timings.iter().any(|timing| timing.what == "next, cold"));
        create::run(&dir.path().join("files"), 500).unwrap();
    }

    fn job(words: &str) -> Result<Outcome> {
        run(&Args::try_parse_from(["job"].into_iter().chain(words.split(' '))).unwrap())
    }

    #[test]
    fn files_of_two_threads_and_their_snapshots_check_clean() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let image = image.to_str().unwrap();
        let shape = "--threads 2 --loops 3 --bytes 2000 --per-directory 50 --subvolume --one-copy";
        let made = job(&format!("files {image} 100 {shape}")).unwrap();
        assert_eq!(made.all("create").map(|timing| timing.count).sum::<u64>(), 600);
        assert!(made.engine.unwrap().delayed_refs.count > 0);
        let snapshots = job(&format!("snapshot {image} 3 --tag a")).unwrap();
        assert_eq!(snapshots.all("snapshot").count(), 3);
        let snapshots = job(&format!("snapshot {image} 2 --tag b --dirty 50")).unwrap();
        assert_eq!(snapshots.all("commit").count(), 2);
        // Files, 14 directories and the files before each snapshot.
        let checked = job(&format!("check {image} 717")).unwrap().checked.unwrap();
        assert!(checked.block_bytes > 600 * 2000);
        assert!(job(&format!("check {image} 100000")).is_err());
    }

    #[test]
    fn sparse_file_is_walked_alike_in_process_and_through_system_calls() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        for place in [format!("{path}/image"), format!("{path} --system")] {
            let made = job(&format!("seek {place} 100")).unwrap_or_default();
            for phase in ["seek", "copy", "fiemap"] {
                // Not each filesystem below a temporary directory has all of it.
                let looked = job(&format!("seek {place} 100 --phase {phase}"));
                if place.ends_with("image") {
                    let looked = looked.unwrap();
                    assert!(looked.all(&format!("{phase}, reopened")).next().unwrap().count >= 100);
                    assert!(looked.count(&format!("{phase}, reopened"), "mappings").is_some());
                }
            }
            if place.ends_with("image") {
                assert_eq!(made.count("seek, delalloc", "device reads"), Some(0));
                assert_eq!(made.count("seek, delalloc", "tree searches"), Some(0));
                assert!(made.count("fsync", "tree searches") > Some(0));
                assert!(made.count("fsync", "tree blocks written") > Some(0));
            }
        }
        let walked = job(&format!("seek {path}/walk 100 --phase walk")).unwrap();
        let count = |what: &str| walked.all(what).next().unwrap().count;
        assert_eq!((count("seek, delalloc"), count("copy, delalloc")), (200, 100));
        assert_eq!((count("seek, synced"), count("copy, synced")), (201, 100));
        assert_eq!((count("fiemap, delalloc"), count("fiemap, synced")), (100, 100));
        for (state, no_place) in [("delalloc", 100), ("synced", 0)] {
            let told = walked.count(&format!("fiemap, {state}"), "extents without a place");
            assert_eq!(told, Some(no_place), "{state}");
        }
        assert_eq!(walked.count("copy, delalloc", "written back meanwhile"), Some(0));
        // Files of less than a part, and of less than all of them.
        for extents in [1, 7, 66] {
            job(&format!("seek {path}/walk{extents} {extents} --phase walk")).unwrap();
        }
        let sought = job(&format!("seek {path}/places 100 --phase places")).unwrap();
        assert_eq!(sought.count("seek", "told"), Some(200));
        for ablate in ["hint", "lock", "seek"] {
            job(&format!("seek {path}/{ablate} 100 --ablate {ablate}")).unwrap();
        }
    }

    #[test]
    fn zeroing_leaves_no_wrong_bytes_and_flushes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        let rounds = job(&format!("zeroing {path}/a 200")).unwrap();
        assert_eq!(rounds.count("rounds", "pages flushed"), Some(0));
        let rounds = job(&format!("zeroing {path}/b 200 --ablate batch")).unwrap();
        assert!(rounds.count("rounds", "pages flushed").unwrap() >= 200);
        for phase in ["store", "look"] {
            let stored = job(&format!("zeroing {path}/c 1 --phase {phase}")).unwrap();
            assert_eq!(stored.counts[0].count, 0, "wrong bytes");
        }
        job(&format!("zeroing {path} 200 --system")).unwrap();
    }

    #[test]
    fn sequential_file_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        for place in
            [format!("{path}/a"), format!("{path}/b --compress 1"), format!("{path} --system")]
        {
            for phase in ["make", "look", "random"] {
                job(&format!("sequential {place} 3 --phase {phase}")).unwrap();
            }
            let looked = job(&format!("sequential {place} 3 --phase look --chunk-kib 64")).unwrap();
            assert_eq!(looked.all("read").next().unwrap().count, 48);
        }
    }

    #[test]
    fn files_through_system_calls_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        let made = job(&format!("files {path} 100 --system --bytes 2000 --per-directory 50"));
        assert_eq!(made.unwrap().all("create").next().unwrap().count, 100);
        let last = dir.path().join("t0/d00001");
        assert_eq!(std::fs::read_dir(last).unwrap().count(), 50);
    }

    #[test]
    fn files_of_two_threads_are_walked_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap();
        job(&format!("files {path} 100 --system --threads 2")).unwrap();
        let walked = job(&format!("walk {path} 3 --system --phase stat")).unwrap();
        // The directories count, too.
        assert_eq!(walked.all("stat").next().unwrap().count, 3 * 202);
        let listed = job(&format!("walk {path} 2 --system --phase list")).unwrap();
        assert_eq!(listed.all("list").next().unwrap().count, 2 * 202);
        job(&format!("walk {path} 1 --system --phase sync")).unwrap();
        let removed = job(&format!("files {path} 100 --system --threads 2 --phase remove"));
        assert_eq!(removed.unwrap().all("remove").next().unwrap().count, 200);
        assert_eq!(std::fs::read_dir(dir.path().join("t1")).unwrap().count(), 0);
    }
}
