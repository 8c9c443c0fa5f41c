//! Jobs that run inside of this process, each started as a child by a workload: they print their
//! timings as JSON.

mod create;
mod tree;

use std::ops::Add;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use ubtrfs_engine::{Filesystem, MkfsOptions, OpenOptions, mkfs};
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

/// Runs the job that the arguments name: `tree IMAGE COUNT` or
/// `create IMAGE COUNT`. Prints the
/// timings.
///
/// # Errors
/// A job that does not exist or fails.
pub fn main(arguments: &[String]) -> Result<()> {
    let usage = || Error::Input { what: "a job takes: tree|create IMAGE COUNT".to_owned() };
    let [job, image, count] = arguments else { return Err(usage()) };
    let count = count.parse().map_err(|_| usage())?;
    let timings = match job.as_str() {
        "tree" => tree::run(image.as_ref(), count)?,
        "create" => create::run(image.as_ref(), count)?,
        _ => return Err(usage()),
    };
    println!("{}", serde_json::to_string(&timings).expect("numbers and strings are JSON"));
    Ok(())
}

fn runtime() -> Arc<Runtime> {
    Arc::new(Runtime::system())
}

fn open_options() -> OpenOptions {
    OpenOptions { cache_bytes: CACHE_BYTES, runtime: runtime(), ..OpenOptions::default() }
}

fn make(image: &Path) -> Result<Filesystem> {
    let mode = OpenMode::CreateNew { len_bytes: IMAGE_BYTES };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole)?);
    let volume = mkfs(vec![device], &MkfsOptions::default(), &runtime())?;
    Ok(Filesystem::open(volume, open_options())?)
}

fn reopen(image: &Path) -> Result<Filesystem> {
    let device = FileDevice::open(image, OpenMode::ReadWrite, Window::Whole)?;
    let volume = Volume::open(vec![Arc::new(device)], &VolumeOptions::default())?;
    Ok(Filesystem::open(volume, open_options())?)
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
}
