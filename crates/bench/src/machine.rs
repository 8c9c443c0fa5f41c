//! What figures depend on: the machine, without its name.

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Where a run was made.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Machine {
    /// The processor as it names itself.
    pub processor: String,
    /// Processors that this process may use.
    pub core_count: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// The running kernel.
    pub kernel: String,
    /// Processes that wanted to run, over the last minute, when the run began.
    pub load_at_start: f64,
    /// The same when the run ended.
    pub load_at_end: f64,
    /// A system call that does nothing.
    pub syscall_ns: f64,
    /// A page of 4 KiB of fresh memory, touched when the run began.
    pub fresh_page_ns_at_start: f64,
    /// The same when the run ended.
    pub fresh_page_ns_at_end: f64,
    /// btrfs-progs, if it is there.
    pub btrfs_progs: Option<String>,
}

impl Machine {
    /// Looks at the machine.
    pub fn look() -> Self {
        let uname = rustix::system::uname();
        Self {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            core_count: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory_bytes(),
            kernel: uname.release().to_string_lossy().into_owned(),
            load_at_start: load(),
            load_at_end: 0.0,
            syscall_ns: syscall_ns(),
            fresh_page_ns_at_start: fresh_page_ns(),
            fresh_page_ns_at_end: 0.0,
            btrfs_progs: btrfs_progs(),
        }
    }
}

/// The state of the checkout that the command was started in, as `git describe` names it; empty where it is in none.
pub(crate) fn commit() -> String {
    let output =
        std::process::Command::new("git").args(["describe", "--always", "--dirty"]).output();
    let output = output.ok().filter(|output| output.status.success());
    output.map_or_else(String::new, |out| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// Processes that wanted to run, over the last minute.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// The price of a bare system call: what every operation pays that leaves the process.
fn syscall_ns() -> f64 {
    const CALLS: u32 = 200_000;
    let round = || {
        let start = Instant::now();
        for _ in 0..CALLS {
            // SAFETY: getppid takes nothing and cannot fail.
            black_box(unsafe { libc::syscall(libc::SYS_getppid) });
        }
        start.elapsed()
    };
    let best = (0..5).map(|_| round()).min().unwrap_or(Duration::ZERO);
    best.as_secs_f64() * 1e9 / f64::from(CALLS)
}

/// How much may be dirty before the kernel writes back, and before who writes waits for that: of each the bytes if they are set, else the share of
/// free memory.
pub(crate) fn writeback_limits() -> String {
    writeback_limits_of(|name| {
        std::fs::read_to_string(format!("/proc/sys/vm/{name}")).ok()?.trim().parse().ok()
    })
}

fn writeback_limits_of(value: impl Fn(&str) -> Option<u64>) -> String {
    let limit = |name: &str| {
        let [bytes, ratio] = ["bytes", "ratio"].map(|unit| format!("{name}_{unit}"));
        match (value(&bytes), value(&ratio)) {
            (Some(set), _) if set > 0 => format!("vm.{bytes} = {set}"),
            (_, Some(share)) => format!("vm.{ratio} = {share} %"),
            _ => format!("vm.{ratio} not known"),
        }
    };
    format!("{}, {}", limit("dirty_background"), limit("dirty"))
}

fn field(path: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_bytes() -> u64 {
    meminfo_kib("MemTotal") * 1024
}

fn meminfo_kib(name: &str) -> u64 {
    let kib = field("/proc/meminfo", name)
        .and_then(|text| text.split(' ').next().and_then(|number| number.parse::<u64>().ok()));
    kib.unwrap_or(0)
}

/// Has the machine back so much memory, and leaves it free. A virtual machine gives what is free for seconds back to its host, and who
/// touches it first waits for the host: without this, who comes behind one that freed much is the faster.
pub(crate) fn touch_memory(mib: u64) {
    const BLOCK_MIB: u64 = 64;
    let count = mib.min(meminfo_kib("MemAvailable") / 2048).div_ceil(BLOCK_MIB);
    let blocks: Vec<_> = (0..count).map(|_| vec![1_u8; (BLOCK_MIB as usize) << 20]).collect();
    drop(black_box(blocks));
    forget_peak();
}

/// What it costs to touch a page of 4 KiB of memory that is mapped anew. Once only: what was touched and freed is cheaper the next time, and
/// the price is that of memory as jobs find it.
pub(crate) fn fresh_page_ns() -> f64 {
    const BYTES: usize = 256 << 20;
    const PAGE: usize = 4096;
    let start = Instant::now();
    // Zeroed, so it is mapped and not touched.
    let mut memory = black_box(vec![0_u8; BYTES]);
    for page in memory.chunks_mut(PAGE) {
        page[0] = 1;
    }
    black_box(&memory);
    let spent = start.elapsed();
    drop(memory);
    forget_peak();
    spent.as_secs_f64() * 1e9 / (BYTES / PAGE) as f64
}

/// A child's peak begins with its parent's; this one's is that of now again (proc(5)). Where it cannot be, peaks are told too high.
fn forget_peak() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn btrfs_progs() -> Option<String> {
    let output = ubtrfs_testkit::command("mkfs.btrfs").arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Some(text.rsplit(' ').next()?.trim().trim_start_matches('v').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_writeback_are_told_in_bytes_if_these_are_set() {
        let limits = writeback_limits_of(|name| match name {
            "dirty_background_bytes" => Some(0),
            "dirty_background_ratio" => Some(10),
            "dirty_bytes" => Some(4096),
            "dirty_ratio" => Some(0),
            _ => None,
        });
        assert_eq!(limits, "vm.dirty_background_ratio = 10 %, vm.dirty_bytes = 4096");
        let limits = writeback_limits_of(|_| None);
        assert_eq!(limits, "vm.dirty_background_ratio not known, vm.dirty_ratio not known");
    }

    #[test]
    fn machine_tells_what_a_call_and_a_page_cost() {
        let machine = Machine::look();
        for price in [machine.syscall_ns, machine.fresh_page_ns_at_start] {
            assert!(price.is_finite() && price > 0.0, "{machine:?}");
        }
    }
}
