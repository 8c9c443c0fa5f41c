//! What was done to open files.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use ubtrfs_testkit::crash::CrashKind;

use crate::report::{Count, Cuts, add_all};

/// Counts of what a run, or several, looked at.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpenFilesReport {
    /// Runs.
    pub runs: u64,
    /// Runs by the number of devices, and the profiles of metadata and data.
    pub shapes: BTreeMap<(usize, &'static str, &'static str), u64>,
    /// Operations by name.
    pub operations: BTreeMap<&'static str, Count>,
    /// Promises of a file: fsync, and of a part of one: msync.
    pub fsyncs: u64,
    /// Promises of all files.
    pub syncs: u64,
    /// Operations that brought commits that nobody asked for.
    pub own_commits: u64,
    /// Operations in which allocated space got its first data.
    pub converted: u64,
    /// Windows of operations whose cuts were enumerated.
    pub windows: u64,
    /// States after power cuts, by the way in which the power went.
    pub cuts: BTreeMap<CrashKind, Cuts>,
    /// Of the files that opened states showed, those that showed another version than the promised
    /// and the last one.
    pub between: u64,
    /// Of these, those that showed parts of several versions.
    pub mixed: u64,
    /// Blocks written in place that showed sectors of several versions.
    pub torn_blocks: u64,
    /// Files of snapshots that opened states showed, each as it was.
    pub snapshot_files: u64,
    /// Files of snapshots that were deleted and still used, each as it must be.
    pub held_files: u64,
    /// States on which the engine went on.
    pub went_on: u64,
    /// Of these, those of which what followed was cut as well.
    pub cut_again: u64,
    /// Repetitions on a device that failed.
    pub faults: u64,
    /// Of these, those in which the failure came.
    pub struck: u64,
    /// Of these, those that stopped the filesystem.
    pub stopped: u64,
    /// Operations that the device made fail.
    pub failed_operations: u64,
    /// Files of which an fsync told that data was lost, and the next did not.
    pub told: u64,
    /// States that `btrfs check` found clean.
    pub checked: u64,
    /// States that the kernel mounted and showed as the engine.
    pub mounted: u64,
    /// All that the devices held at the end of each run, as one number.
    pub digest: u64,
}

impl OpenFilesReport {
    /// All operations.
    pub fn operation_count(&self) -> u64 {
        self.operations.values().map(|count| count.done + count.refused + count.no_space).sum()
    }

    /// All states after power cuts.
    pub fn crash_state_count(&self) -> u64 {
        self.cuts.values().map(|cuts| cuts.states).sum()
    }

    /// States after power cuts that were opened, compared and checked.
    pub fn opened_state_count(&self) -> u64 {
        self.cuts.values().map(|cuts| cuts.opened).sum()
    }

    /// How often an operation was done.
    pub fn done(&self, name: &str) -> u64 {
        self.operations.get(name).map_or(0, |count| count.done)
    }

    /// One line of it, for who waits.
    pub fn line(&self) -> String {
        format!(
            "{} runs, {} operations, {} crash states ({} opened), {} checked, {} mounted, {} struck",
            self.runs,
            self.operation_count(),
            self.crash_state_count(),
            self.opened_state_count(),
            self.checked,
            self.mounted,
            self.struck
        )
    }
}

impl AddAssign for OpenFilesReport {
    fn add_assign(&mut self, other: Self) {
        add_all(&mut self.shapes, other.shapes);
        add_all(&mut self.operations, other.operations);
        add_all(&mut self.cuts, other.cuts);
        self.digest = self.digest.wrapping_add(other.digest);
        let counts = [
            (&mut self.runs, other.runs),
            (&mut self.fsyncs, other.fsyncs),
            (&mut self.syncs, other.syncs),
            (&mut self.own_commits, other.own_commits),
            (&mut self.converted, other.converted),
            (&mut self.windows, other.windows),
            (&mut self.between, other.between),
            (&mut self.mixed, other.mixed),
            (&mut self.torn_blocks, other.torn_blocks),
            (&mut self.snapshot_files, other.snapshot_files),
            (&mut self.held_files, other.held_files),
            (&mut self.went_on, other.went_on),
            (&mut self.cut_again, other.cut_again),
            (&mut self.faults, other.faults),
            (&mut self.struck, other.struck),
            (&mut self.stopped, other.stopped),
            (&mut self.failed_operations, other.failed_operations),
            (&mut self.told, other.told),
            (&mut self.checked, other.checked),
            (&mut self.mounted, other.mounted),
        ];
        for (sum, count) in counts {
            *sum += count;
        }
    }
}

impl fmt::Display for OpenFilesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} runs with files open; devices, metadata, data:", self.runs)?;
        for ((devices, metadata, data), runs) in &self.shapes {
            writeln!(f, "  {devices} {metadata} {data}: {runs}")?;
        }
        writeln!(
            f,
            "{} operations; {} promises of a file, {} of all; {} operations brought commits by the \
             engine itself, in {} allocated space got its first data",
            self.operation_count(),
            self.fsyncs,
            self.syncs,
            self.own_commits,
            self.converted
        )?;
        for (name, count) in &self.operations {
            write!(f, "  {name}: {} done, {} refused", count.done, count.refused)?;
            if count.no_space > 0 {
                write!(f, ", {} without space", count.no_space)?;
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "{} crash states of {} windows, {} opened, compared and checked; {} files between two \
             promises, {} of them of several versions, {} torn blocks, {} files of snapshots, {} of \
             deleted ones that were held",
            self.crash_state_count(),
            self.windows,
            self.opened_state_count(),
            self.between,
            self.mixed,
            self.torn_blocks,
            self.snapshot_files,
            self.held_files
        )?;
        for (kind, cuts) in &self.cuts {
            writeln!(f, "  {kind:?}: {} states, {} opened", cuts.states, cuts.opened)?;
        }
        writeln!(
            f,
            "on {} the engine went on, of {} of these that was cut again",
            self.went_on, self.cut_again
        )?;
        writeln!(
            f,
            "{} found clean by btrfs check, {} mounted by the kernel",
            self.checked, self.mounted
        )?;
        write!(
            f,
            "{} repetitions on failing devices, {} struck, {} of them stopped; {} operations \
             failed, {} files were told that data was lost",
            self.faults, self.struck, self.stopped, self.failed_operations, self.told
        )
    }
}
