//! What is measured, by name.

mod check;
mod cost;
mod create;
mod delayed_refs;
mod files;
mod flat;
mod fsmark;
mod growth;
mod import;
mod making;
mod memory;
mod mount;
mod published;
mod readback;
mod seek;
mod sequential;
mod snapshot;
mod zeroing;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use ubtrfs_testkit::{Oracle, oracle};

use crate::child::{self, Usage};
use crate::contest::Series;
use crate::error::{Error, Result};
use crate::jobs::Outcome;
use crate::machine::{self, Machine};
use crate::report::{Cell, Report, Table};
use crate::scratch::Scratch;
use crate::source::Source;

/// Where Debian's linux-source packages put their tarballs.
const SOURCES: &str = "/usr/src";

/// A benchmark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Workload {
    /// An image from a directory: `ubtrfs import --mkfs`, `mkfs.btrfs --rootdir`, the kernel.
    Import,
    /// Every file read back from an image, cold, as a tar archive.
    Readback,
    /// Peak memory of import and export under different cache options.
    Memory,
    /// Import of a tenth, a third and all of the tree.
    Growth,
    /// Tree search, cursor, insert; making files.
    Cost,
    /// Small files kept inline, in process, and on the kernel's mount.
    Create,
    /// A million empty files by two threads, in process, and on the kernel's mount.
    Fsmark,
    /// Snapshots of a subvolume of a million files, and the kernel's.
    Snapshot,
    /// Making a file where there are ten thousand to a million.
    Flat,
    /// An image checked, beside `btrfs check`.
    Check,
    /// A sparse file walked by SEEK_DATA and SEEK_HOLE, copied, asked for its extents.
    Seek,
    /// Blocks written and cut by one byte; a mapped store beyond the end of a file.
    Zeroing,
    /// A large file written and read, plain and compressed.
    Sequential,
    /// What users do on a mount, beside the kernel and other FUSE filesystems.
    Mount,
}

impl Workload {
    /// All of them, in the order they run.
    pub const ALL: [Self; 14] = [
        Self::Cost,
        Self::Import,
        Self::Readback,
        Self::Memory,
        Self::Growth,
        Self::Create,
        Self::Fsmark,
        Self::Snapshot,
        Self::Flat,
        Self::Check,
        Self::Seek,
        Self::Zeroing,
        Self::Sequential,
        Self::Mount,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Readback => "readback",
            Self::Memory => "memory",
            Self::Growth => "growth",
            Self::Cost => "cost",
            Self::Create => "create",
            Self::Fsmark => "fsmark",
            Self::Snapshot => "snapshot",
            Self::Flat => "flat",
            Self::Check => "check",
            Self::Seek => "seek",
            Self::Zeroing => "zeroing",
            Self::Sequential => "sequential",
            Self::Mount => "mount",
        }
    }

    /// The workload of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|workload| workload.name() == name)
    }

    /// Whether it works on a tree of sources.
    fn needs_source(self) -> bool {
        match self {
            Self::Import
            | Self::Readback
            | Self::Memory
            | Self::Growth
            | Self::Sequential
            | Self::Mount => true,
            Self::Cost
            | Self::Create
            | Self::Fsmark
            | Self::Snapshot
            | Self::Flat
            | Self::Check
            | Self::Seek
            | Self::Zeroing => false,
        }
    }

    /// What it measures, in a line.
    pub fn about(self) -> &'static str {
        match self {
            Self::Import => {
                "an image from a source tree, beside mkfs.btrfs --rootdir and the kernel"
            }
            Self::Readback => "every file read back as tar, cold, beside the kernel",
            Self::Memory => "peak memory of import and export under the cache option",
            Self::Growth => "import of 1/10, 1/3 and all: time a file",
            Self::Cost => "tree search, cursor, insert, file creation, in process",
            Self::Create => "500,000 files of 2000 bytes inline, beside the kernel",
            Self::Fsmark => "a million empty files by two threads, beside the kernel",
            Self::Snapshot => "snapshots of a subvolume of a million files, beside the kernel",
            Self::Flat => "making a file where there are ten thousand to a million",
            Self::Check => "metadata checked, beside btrfs check",
            Self::Seek => {
                "a sparse file walked, copied and mapped, beside the kernel's btrfs and xfs"
            }
            Self::Sequential => {
                "a file of 4 GiB written and read, beside a plain file and the kernel"
            }
            Self::Mount => {
                "untar, tar, stat, fs_mark and more on a mount, beside the kernel, bindfs, fuse2fs, ntfs-3g"
            }
            Self::Zeroing => {
                "blocks written and cut by one byte, beside the kernel's btrfs and xfs"
            }
        }
    }
}

/// How a run is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// How often each contestant does the job; medians count.
    pub round_count: usize,
    /// Share of the source tree, and of the items of in-process jobs, above 0 and up to 1.
    pub scale: f64,
    /// Directory or tarball to import; `None` for the newest linux-source of Debian.
    pub source: Option<PathBuf>,
    /// Where images are made; `None` for memory.
    pub scratch: Option<PathBuf>,
    /// The `ubtrfs` command.
    pub ubtrfs: PathBuf,
    /// Program and first arguments that reach [`crate::jobs::main`].
    pub job: Vec<OsString>,
    /// Program and first arguments that reach [`crate::floor::main`].
    pub floor: Vec<OsString>,
    /// Whether the kernel, `mkfs.btrfs` and other FUSE filesystems compete.
    pub with_kernel: bool,
}

/// What the workloads of a run share.
pub(crate) struct Context<'a> {
    pub(crate) options: &'a Options,
    pub(crate) scratch: &'a Scratch,
    source: std::cell::OnceCell<Source>,
    /// The system call's price, printed beside in-process figures.
    pub(crate) syscall_ns: f64,
}

/// Runs workloads one after the other and hands each table to `show` as it is made. A job that fails ends the run: the tables made
/// before are in the report, which says why it ends there, and of the workload that failed what it tells
/// ([`Error::Unfinished`]). A missing kernel or `mkfs.btrfs` is no failure, but is said.
///
/// # Errors
/// If sources that a workload needs are not there, or have no data, before the first is run.
pub fn run(
    workloads: &[Workload],
    options: &Options,
    mut show: impl FnMut(&Table),
) -> Result<Report> {
    let scratch = Scratch::new(options.scratch.as_deref())?;
    let mut machine = Machine::look();
    let date = now();
    let context = Context {
        options,
        scratch: &scratch,
        source: std::cell::OnceCell::new(),
        syscall_ns: machine.syscall_ns,
    };
    if workloads.iter().any(|workload| workload.needs_source()) {
        context.source()?;
    }
    let mut tables = Vec::new();
    let mut ended_by = None;
    for workload in workloads {
        let made = match measure(*workload, &context) {
            Ok(made) => made,
            Err(error) => {
                ended_by = Some(format!("{}: {error}", workload.name()));
                match error {
                    Error::Unfinished { tables, .. } => tables,
                    _ => Vec::new(),
                }
            }
        };
        made.iter().for_each(&mut show);
        tables.extend(made);
        if ended_by.is_some() {
            break;
        }
    }
    machine.load_at_end = machine::load();
    machine.fresh_page_ns_at_end = machine::fresh_page_ns();
    let arguments = arguments(workloads, options);
    Ok(Report { date, arguments, commit: machine::commit(), machine, tables, ended_by })
}

fn measure(workload: Workload, context: &Context<'_>) -> Result<Vec<Table>> {
    match workload {
        Workload::Import => import::run(context),
        Workload::Readback => readback::run(context),
        Workload::Memory => memory::run(context),
        Workload::Growth => growth::run(context),
        Workload::Cost => cost::run(context),
        Workload::Create => create::run(context),
        Workload::Fsmark => fsmark::run(context),
        Workload::Snapshot => snapshot::run(context),
        Workload::Flat => flat::run(context),
        Workload::Check => check::run(context),
        Workload::Seek => seek::run(context),
        Workload::Zeroing => zeroing::run(context),
        Workload::Sequential => sequential::run(context),
        Workload::Mount => mount::run(context),
    }
}

/// What decides what is measured; no paths.
fn arguments(workloads: &[Workload], options: &Options) -> String {
    let mut words: Vec<_> = workloads.iter().map(|workload| workload.name().to_owned()).collect();
    words.push(format!("--rounds {} --scale {}", options.round_count, options.scale));
    if !options.with_kernel {
        words.push("--vs none".to_owned());
    }
    words.join(" ")
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M UTC").to_string()
}

impl Context<'_> {
    /// The tree to import, unpacked and sampled when first asked for.
    pub(crate) fn source(&self) -> Result<&Source> {
        if let Some(source) = self.source.get() {
            return Ok(source);
        }
        let path = match &self.options.source {
            Some(path) => path.clone(),
            None => newest_linux_source()?,
        };
        let mut source = Source::open(&path, self.scratch)?;
        if source.bytes == 0 {
            return Err(Error::Input {
                what: format!("{}: a source without data", path.display()),
            });
        }
        if self.options.scale < 1.0 {
            source = source.sample(self.options.scale, &self.scratch.new_directory()?)?;
        }
        Ok(self.source.get_or_init(|| source))
    }

    /// Why the kernel cannot compete, if it cannot.
    pub(crate) fn kernel(&self) -> std::result::Result<(), String> {
        self.competitor(Oracle::KernelBtrfs)
    }

    /// Why `mkfs.btrfs` cannot compete, if it cannot.
    pub(crate) fn mkfs_btrfs(&self) -> std::result::Result<(), String> {
        self.competitor(Oracle::MkfsBtrfs)
    }

    fn competitor(&self, which: Oracle) -> std::result::Result<(), String> {
        if !self.options.with_kernel {
            return Err("left out on request".to_owned());
        }
        oracle::available(which)
    }

    /// Our command.
    pub(crate) fn ubtrfs(&self) -> Command {
        Command::new(&self.options.ubtrfs)
    }

    /// The command that makes `image`, of `len_bytes`, from `source`.
    pub(crate) fn import(&self, source: &Path, image: &Path, len_bytes: u64) -> Command {
        let mut command = self.ubtrfs();
        command.args(["import", "--mkfs", "--size", &len_bytes.to_string()]);
        command.arg(image).arg(source);
        command
    }

    /// `btrfs check`, if it can be run.
    pub(crate) fn btrfs_progs(&self) -> std::result::Result<(), String> {
        self.competitor(Oracle::BtrfsProgs)
    }

    /// So many, at full scale.
    pub(crate) fn scaled(&self, count: u64) -> u64 {
        ((count as f64 * self.options.scale).round() as u64).max(1)
    }

    /// Whether what is measured is as large as goals are meant.
    pub(crate) fn is_full_size(&self) -> bool {
        self.options.scale >= 1.0
    }

    /// As [`verdict`], of a goal for the full size: at another one it is told and not judged.
    pub(crate) fn verdict(&self, what: &str, have: f64, goal: f64, unit: &str) -> String {
        if self.is_full_size() {
            verdict(what, have, goal, unit)
        } else {
            not_judged(what, "≤", have, goal, unit)
        }
    }

    /// As [`verdict_at_least`], in the same way.
    pub(crate) fn verdict_at_least(&self, what: &str, have: f64, goal: f64, unit: &str) -> String {
        if self.is_full_size() {
            verdict_at_least(what, have, goal, unit)
        } else {
            not_judged(what, "≥", have, goal, unit)
        }
    }

    /// Checks an image of the scratch directory, which is to hold so many inodes at least.
    ///
    /// # Errors
    /// If it is damaged or lacks some.
    pub(crate) fn check(&self, image: &str, inode_count: u64) -> Result<()> {
        let image = self.scratch.path(image);
        run_job(self.job("check").arg(image).arg(inode_count.to_string())).map(drop)
    }

    /// A job inside of a process of our own.
    pub(crate) fn job(&self, name: &str) -> Command {
        let mut command = Command::new(&self.options.job[0]);
        command.args(&self.options.job[1..]).arg(name);
        command
    }
}

/// What a job used and what it told.
#[derive(Clone, Debug)]
pub(crate) struct JobRun {
    pub(crate) usage: Usage,
    pub(crate) outcome: Outcome,
}

/// Runs a [`Context::job`].
///
/// # Errors
/// If it fails.
pub(crate) fn run_job(command: &mut Command) -> Result<JobRun> {
    let (usage, text) = child::run_for_text(command)?;
    let outcome = serde_json::from_str(&text)
        .map_err(|error| Error::Input { what: format!("{command:?}: {error}") })?;
    Ok(JobRun { usage, outcome })
}

/// The tarball of the newest linux-source package.
fn newest_linux_source() -> Result<PathBuf> {
    let entries = std::fs::read_dir(SOURCES).map_err(Error::io(format!("list {SOURCES}")))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("linux-source-") && name.ends_with(".tar.xz")
        })
        .collect();
    found.sort();
    found.pop().ok_or_else(|| Error::Input {
        what: format!(
            "no linux-source tarball in {SOURCES}: install Debian's linux-source, or name a \
             directory or tarball with --source"
        ),
    })
}

/// The columns of a table in which contestants are compared.
const CONTEST_COLUMNS: [(&str, &str); 9] = [
    ("job", "job"),
    ("who", "who"),
    ("wall_s", "wall s"),
    ("wall_min_s", "min"),
    ("wall_max_s", "max"),
    ("times_ours", "× ours"),
    ("cpu_s", "CPU s"),
    ("cpu_times_ours", "× ours"),
    ("peak_bytes", "peak MiB"),
];

/// A row for each contestant; the first is ours.
fn push_contest(table: &mut Table, job: &str, series: &[Series]) {
    let Some(ours) = series.first() else { return };
    for one in series {
        let (min, max) = one.wall_range();
        table.push(vec![
            Cell::text(job),
            Cell::text(&one.name),
            Cell::Seconds(one.wall_s()),
            Cell::Seconds(min.as_secs_f64()),
            Cell::Seconds(max.as_secs_f64()),
            Cell::Ratio(one.wall_s() / ours.wall_s()),
            Cell::Seconds(one.cpu_s()),
            Cell::Ratio(one.cpu_s() / ours.cpu_s()),
            Cell::Bytes(one.peak_bytes()),
        ]);
    }
}

/// Whether a goal was met, in words.
fn verdict(what: &str, have: f64, goal: f64, unit: &str) -> String {
    let met = if is_measured(have) && have <= goal { "met" } else { "NOT met" };
    format!("Goal, {what}: ≤ {goal} {unit}; measured {}: {met}.", in_words(have, unit))
}

/// The same, where more is better.
fn verdict_at_least(what: &str, have: f64, goal: f64, unit: &str) -> String {
    let met = if is_measured(have) && have >= goal { "met" } else { "NOT met" };
    format!("Goal, {what}: ≥ {goal} {unit}; measured {}: {met}.", in_words(have, unit))
}

fn not_judged(what: &str, sign: &str, have: f64, goal: f64, unit: &str) -> String {
    let have = in_words(have, unit);
    format!("Goal, {what}: {sign} {goal} {unit}; measured {have} (not at full size: not judged).")
}

/// Nothing takes no time, and nothing is infinitely fast: such a figure comes of one that is missing.
fn is_measured(have: f64) -> bool {
    have.is_finite() && have > 0.0
}

fn in_words(have: f64, unit: &str) -> String {
    if is_measured(have) { format!("{have:.2} {unit}") } else { "nothing".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_on_what_was_not_measured_is_that_it_is_not_met() {
        let told = Outcome::default();
        for have in [told.wall_s("read"), f64::INFINITY, f64::NAN, 0.0] {
            for verdict in [verdict("it", have, 1.0, "s"), verdict_at_least("it", have, 1.0, "s")] {
                assert!(verdict.ends_with("measured nothing: NOT met."), "{verdict}");
            }
        }
        let met = "Goal, it: ≤ 1 s; measured 0.50 s: met.";
        assert_eq!(verdict("it", 0.5, 1.0, "s"), met);
        let told = "Goal, it: ≥ 2 times; measured 1.50 times (not at full size: not judged).";
        assert_eq!(not_judged("it", "≥", 1.5, 2.0, "times"), told);
        assert!(verdict("it", 1.5, 1.0, "s").ends_with("measured 1.50 s: NOT met."));
        assert!(verdict_at_least("it", 1.5, 1.0, "times").ends_with("measured 1.50 times: met."));
    }
}
