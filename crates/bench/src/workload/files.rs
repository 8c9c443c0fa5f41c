//! What the workloads share that do something to one large file.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use super::{Context, run_job};
use crate::contest::{Series, largest_value, median, smallest_value};
use crate::error::{Error, Result};
use crate::jobs::Outcome;
use crate::machine::{touch_memory, writeback_limits};
use crate::mount::{Kernel, Mount, Setup};
use crate::peer::Peer;
use crate::report::{Cell, Table};

/// What a reader must know of [`times`].
pub(super) const CPU_NOTE: &str = "Min and max of the rounds. CPU: of the process that asks, while it is timed. Of ours in \
     process that is all there is; a mount's server and the kernel's threads are not in it.";

const BLOCK_BYTES: u64 = 4096;

/// What a reader must know of [`Kept::add`].
pub(super) const MEMORY_NOTE: &str = "Memory is touched before each job, as much as its file and as much for its cache, and left free.";

/// What the processes of one round told.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    pub(super) outcome: Outcome,
    /// The most of them.
    pub(super) peak_bytes: u64,
    /// What the image takes where it lies since the first of them was done, without what it took before.
    pub(super) stored_bytes: Option<u64>,
    /// What is touched before each of them.
    pub(super) touched_mib: u64,
}

impl Kept {
    /// Of a job that writes or reads so much, whose time is that of memory else: as much for what it is kept in, and for the cache.
    pub(super) fn on_touched_memory(mib: u64) -> Self {
        Self { touched_mib: 2 * mib, ..Self::default() }
    }

    /// Of a job that takes a number: of MiB, or of blocks that it writes. Whoever does it, as much is touched.
    fn of(job: &str, count: u64) -> Self {
        let bytes = match job {
            "seek" => count * BLOCK_BYTES,
            // A range has as many blocks between them that are zeroed, too.
            "zeroing" => 2 * count * BLOCK_BYTES,
            _ => count << 20,
        };
        Self::on_touched_memory(bytes.div_ceil(1 << 20))
    }

    pub(super) fn add(&mut self, command: &mut Command) -> Result<()> {
        touch_memory(self.touched_mib);
        let run = run_job(command)?;
        self.peak_bytes = self.peak_bytes.max(run.usage.peak_bytes);
        self.outcome.timings.extend(run.outcome.timings);
        self.outcome.counts.extend(run.outcome.counts);
        Ok(())
    }

    /// Nanoseconds of one of what is called so; NaN if there is none.
    pub(super) fn wall_each_ns(&self, what: &str) -> f64 {
        match self.outcome.all(what).map(|timing| timing.count).sum() {
            0_u64 => f64::NAN,
            count => self.outcome.wall_s(what) * 1e9 / count as f64,
        }
    }
}

/// The job's phases on the engine, each in a process of its own, in a new image; it is checked after the first one.
///
/// # Errors
/// If a phase fails or the image is damaged.
pub(super) fn ours(
    context: &Context<'_>,
    job: &str,
    count: u64,
    arguments: impl Fn(&str, &mut Command),
    phases: &[&str],
) -> Result<Kept> {
    let image = context.scratch.absent("image")?;
    let mut kept = Kept::of(job, count);
    for (at, phase) in phases.iter().enumerate() {
        let mut command = context.job(job);
        command.arg(&image).arg(count.to_string());
        arguments(phase, &mut command);
        kept.add(&mut command)?;
        if at == 0 {
            kept.stored_bytes = Some(taken_bytes(&image)?);
            context.check("image", 1)?;
        }
    }
    context.scratch.absent("image")?;
    Ok(kept)
}

/// The same phases on the kernel's filesystem, mounted anew for each.
///
/// # Errors
/// If a phase fails.
pub(super) fn theirs(
    context: &Context<'_>,
    kernel: Kernel,
    setup: Setup<'_>,
    (job, count): (&str, u64),
    arguments: &[&str],
    phases: &[&str],
) -> Result<Kept> {
    let image = context.scratch.absent("image")?;
    kernel.make(&image, setup.room)?;
    let mut kept = Kept::of(job, count);
    let taken_before = taken_bytes(&image)?;
    for (at, phase) in phases.iter().enumerate() {
        on_mount(kernel, &image, setup.options, |path| {
            let mut command = context.job(job);
            command.arg(path).arg(count.to_string()).args(["--system", "--phase", phase]);
            command.args(arguments);
            kept.add(&mut command)
        })?;
        if at == 0 {
            kept.stored_bytes = Some(taken_bytes(&image)?.saturating_sub(taken_before));
        }
    }
    context.scratch.absent("image")?;
    Ok(kept)
}

/// What a file takes of the filesystem that it lies on.
///
/// # Errors
/// If it cannot be told.
fn taken_bytes(image: &Path) -> Result<u64> {
    const BLOCK_BYTES: u64 = 512;
    let look = || {
        let file = File::open(image)?;
        // A disk's filesystem may give it space no sooner.
        file.sync_all()?;
        file.metadata()
    };
    let told = look().map_err(Error::io(format!("look at {}", image.display())))?;
    Ok(told.blocks() * BLOCK_BYTES)
}

fn on_mount<T>(
    kernel: Kernel,
    image: &Path,
    options: &str,
    work: impl FnOnce(&Path) -> Result<T>,
) -> Result<T> {
    let mount = Mount::new(kernel, image, options)?;
    let done = work(&mount.path())?;
    mount.end()?;
    Ok(done)
}

/// As tables name the engine where system calls reach it through its mount.
pub(super) const MOUNTED: &str = "ubtrfs, mounted";

/// The same phases by the same system calls on the engine's mount, with the options that a user gets who gives none; the image is checked
/// after the first one.
///
/// # Errors
/// If a phase fails or the image is damaged.
pub(super) fn mounted(
    context: &Context<'_>,
    job: &str,
    count: u64,
    phases: &[&str],
) -> Result<Kept> {
    Peer::Ubtrfs.make(context.options, context.scratch)?;
    let mut kept = Kept::of(job, count);
    for (at, phase) in phases.iter().enumerate() {
        let mount = Peer::Ubtrfs.mount(context.options, context.scratch)?;
        let mut command = context.job(job);
        command.arg(mount.path()).arg(count.to_string()).args(["--system", "--phase", phase]);
        kept.add(&mut command)?;
        mount.end()?;
        if at == 0 {
            context.check("image", 1)?;
        }
    }
    Peer::Ubtrfs.clear(context.scratch)?;
    Ok(kept)
}

/// Why the mount cannot compete, if it cannot.
pub(super) fn mount_available(context: &Context<'_>) -> std::result::Result<(), String> {
    let ubtrfs = &context.options.ubtrfs;
    // A bare name is looked for when it is started.
    if ubtrfs.components().count() > 1 && !ubtrfs.is_file() {
        return Err(format!("there is no command {}", ubtrfs.display()));
    }
    Peer::Ubtrfs.available()
}

/// Those that can compete.
pub(super) fn kernels(context: &Context<'_>) -> Vec<Kernel> {
    if !context.options.with_kernel {
        return Vec::new();
    }
    Kernel::BOTH.into_iter().filter(|kernel| kernel.available().is_ok()).collect()
}

/// Says which rows are missing, and why.
pub(super) fn note_missing(context: &Context<'_>, table: &mut Table) {
    if let Err(why) = mount_available(context) {
        table.note(format!("The row of {MOUNTED} is missing: {why}."));
    }
    if !context.options.with_kernel {
        table.note("The kernel's rows were left out on request.");
        return;
    }
    for kernel in Kernel::BOTH {
        if let Err(why) = kernel.available() {
            table.note(format!("The row of {} is missing: {why}.", kernel.name()));
        }
    }
}

/// The median of rounds with all of them beside it; nothing if it is not known of one of them.
pub(super) fn of_rounds(rounds: Vec<f64>, cell: fn(f64) -> Cell) -> Cell {
    let median = median(rounds.clone());
    if median > 0.0 { Cell::OfRounds(Box::new(cell(median)), rounds) } else { Cell::Missing }
}

/// How long what is called so took, in the columns that compared contestants have: median, shortest, longest, times ours, and the processor time of
/// the job's process.
pub(super) fn times(
    one: &Series<Kept>,
    ours: &Series<Kept>,
    what: &str,
    cell: fn(f64) -> Cell,
) -> [Cell; 5] {
    let walls = |series: &Series<Kept>| series.values(|run| run.outcome.wall_s(what));
    [
        of_rounds(walls(one), cell),
        cell(smallest_value(walls(one))),
        cell(largest_value(walls(one))),
        Cell::Ratio(median(walls(one)) / median(walls(ours))),
        cell(one.median(|run| run.outcome.cpu_s(what))),
    ]
}

/// The most that one took at any size, over what it took at the smallest, which is the first.
pub(super) fn growth(each: &[f64]) -> f64 {
    let Some((smallest, larger)) = each.split_first() else { return f64::NAN };
    largest_value(larger.iter().map(|one| one / smallest))
}

/// Says what the kernel's writeback depends on.
pub(super) fn note_writeback(table: &mut Table) {
    table.note(format!(
        "The kernel writes back as this machine tells it to: {}.",
        writeback_limits()
    ));
}

/// What jobs count, as they call it; its name in JSON; its heading.
const COUNTS: [(&str, &str, &str); 11] = [
    ("state searches", "state_searches", "searches of states"),
    ("mappings", "mappings", "mappings asked for"),
    ("tree searches", "tree_searches", "searches of trees"),
    ("tree blocks read", "tree_blocks_read", "tree blocks read"),
    ("tree blocks written", "tree_blocks_written", "written"),
    ("runs flushed", "runs_flushed", "runs flushed"),
    ("pages flushed", "pages_flushed", "pages flushed"),
    ("device reads", "device_reads", "device reads"),
    ("device writes", "device_writes", "writes"),
    ("device flushes", "device_flushes", "flushes"),
    ("commits", "commits", "commits"),
];

/// A table of what does not depend on the machine, of ours in process. Its first column is the workload's own.
pub(super) fn counts_table(
    name: &'static str,
    title: &str,
    first: (&'static str, &'static str),
) -> Table {
    let mut columns = vec![first, ("who", "who"), ("what", "what")];
    columns.extend(COUNTS.map(|(_, name, heading)| (name, heading)));
    let mut table = Table::new(name, title, &columns);
    table.note(
        "Of the first round. Searches of states: of the tree of extent states from its root; of trees: of any tree of the filesystem \
         from its root to a leaf. A tree block is counted once, whatever its copies. Threads that write back, read ahead and commit each half \
         minute are counted with the rest, so what is done beside may vary.",
    );
    table
}

/// Adds to a [`counts_table`] what was counted while each of `done` was done. Who counts nothing has no rows.
pub(super) fn push_counts(table: &mut Table, first: &Cell, series: &Series<Kept>, done: &[String]) {
    let Some(round) = series.rounds.first() else { return };
    for done in done {
        let counts = COUNTS.map(|(what, ..)| round.outcome.count(done, what));
        if counts.iter().all(Option::is_none) {
            continue;
        }
        let mut row = vec![first.clone(), Cell::text(&series.name), Cell::text(done)];
        row.extend(counts.map(|count| count.map_or(Cell::Missing, Cell::Count)));
        table.push(row);
    }
}

/// What a job must have told.
///
/// # Errors
/// If it did not.
pub(super) fn told<T>(value: Option<T>, what: &str) -> Result<T> {
    value.ok_or_else(|| Error::Input { what: format!("a job did not tell {what}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_touched_for_a_file_and_its_cache_before_each_job() {
        let touched_mib = |job, count| Kept::of(job, count).touched_mib;
        assert_eq!(touched_mib("sequential", 4096), 8192);
        assert_eq!(touched_mib("seek", 131_072), 1024);
        assert_eq!(touched_mib("zeroing", 16_384), 256);
        assert_eq!(touched_mib("zeroing", 1), 2);
    }

    #[test]
    fn growth_is_that_of_the_worst_size() {
        assert_eq!(growth(&[2.0, 6.0, 3.0]), 3.0);
        assert_eq!(growth(&[2.0, 3.0, 6.0]), 3.0);
        for missing in [&[][..], &[1.0], &[f64::NAN, 1.0], &[1.0, f64::NAN, 1.0]] {
            assert!(growth(missing).is_nan(), "{missing:?}");
        }
    }

    /// What was not timed once gave 0, which is below every goal.
    #[test]
    fn time_of_what_was_not_timed_is_not_a_number() {
        let kept = Kept::default();
        assert!(kept.wall_each_ns("seek, synced").is_nan());
        assert!(kept.outcome.wall_s("rounds").is_nan());
    }
}
