//! What was done.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use ubtrfs_testkit::crash::CrashKind;

/// Counts of what a run, or several, looked at.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Runs.
    pub runs: u64,
    /// Runs by the number of devices, and the profiles of metadata and data.
    pub shapes: BTreeMap<(usize, &'static str, &'static str), u64>,
    /// Runs on filesystems that were full again and again.
    pub tight_runs: u64,
    /// Operations by name.
    pub operations: BTreeMap<&'static str, Count>,
    /// Filesystems that were emptied at the end of a run.
    pub emptied: u64,
    /// Of these, those that then had room for some files.
    pub refilled: u64,
    /// Commits that an operation asked for.
    pub commits: u64,
    /// Commits that the engine made by itself.
    pub own_commits: u64,
    /// Operations that brought such commits, after which the checker looked at the devices.
    pub own_judged: u64,
    /// Comparisons of everything.
    pub compared: u64,
    /// States after power cuts, by the way in which the power went.
    pub cuts: BTreeMap<CrashKind, Cuts>,
    /// Of those that were opened, those that showed the commit that was being made.
    pub new_states: u64,
    /// Of those that were opened, those that showed a state inside of an operation.
    pub inside_states: u64,
    /// States on which the engine went on after the cut.
    pub went_on: u64,
    /// Of these, those of which the opening, a few operations and their commit were cut as well.
    pub nested: Nested,
    /// States that `btrfs check` found clean.
    pub checked: u64,
    /// States that the kernel mounted and showed as the model.
    pub mounted: u64,
    /// All that the devices held at the end of each run, as one number.
    pub digest: u64,
    /// Repetitions on a device that failed, by what was to go wrong.
    pub faults: BTreeMap<&'static str, Faults>,
}

/// Operations of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// Both sides did it.
    pub done: u64,
    /// Both refused it.
    pub refused: u64,
    /// There was no space.
    pub no_space: u64,
    /// Of these, those that had done a part.
    pub no_space_inside: u64,
}

/// States after power cuts of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cuts {
    /// States that were made.
    pub states: u64,
    /// Of these, those that were opened, compared and checked.
    pub opened: u64,
}

/// Repetitions on failing devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// Repetitions.
    pub runs: u64,
    /// Of these, those in which the fault came.
    pub struck: u64,
    /// Of these, those that nobody but the volume noticed.
    pub unnoticed: u64,
    /// Of these, those that stopped the filesystem.
    pub aborted: u64,
    /// Of these, those that left a part of an operation of several steps.
    pub inside: u64,
    /// States that a power cut after the failure may leave, opened, compared and checked.
    pub cut: u64,
}

/// Crash states whose opening, and what followed, was cut as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Nested {
    /// All of them.
    pub all: u64,
    /// Of these, those that held inodes without a name.
    pub with_orphans: u64,
    /// Of these, those that held subvolumes whose deletion was to be gone on with.
    pub half_deleted: u64,
    /// Of these, those whose free space tree was to be made anew.
    pub stale: u64,
    /// States that those cuts left, opened, compared and checked.
    pub opened: u64,
}

impl Report {
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

    /// Operations for which there was no space.
    pub fn no_space_count(&self) -> u64 {
        self.operations.values().map(|count| count.no_space).sum()
    }

    /// All repetitions on failing devices.
    pub fn fault_sum(&self) -> Faults {
        let mut sum = Faults::default();
        self.faults.values().for_each(|faults| sum += *faults);
        sum
    }

    /// One line of it, for who waits.
    pub fn line(&self) -> String {
        format!(
            "{} runs, {} operations, {} crash states ({} opened), {} checked, {} mounted, {} faults",
            self.runs,
            self.operation_count(),
            self.crash_state_count(),
            self.opened_state_count(),
            self.checked,
            self.mounted,
            self.fault_sum().struck
        )
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.done += other.done;
        self.refused += other.refused;
        self.no_space += other.no_space;
        self.no_space_inside += other.no_space_inside;
    }
}

impl AddAssign for Cuts {
    fn add_assign(&mut self, other: Self) {
        self.states += other.states;
        self.opened += other.opened;
    }
}

impl AddAssign for Faults {
    fn add_assign(&mut self, other: Self) {
        self.runs += other.runs;
        self.struck += other.struck;
        self.unnoticed += other.unnoticed;
        self.aborted += other.aborted;
        self.inside += other.inside;
        self.cut += other.cut;
    }
}

impl AddAssign for Nested {
    fn add_assign(&mut self, other: Self) {
        self.all += other.all;
        self.with_orphans += other.with_orphans;
        self.half_deleted += other.half_deleted;
        self.stale += other.stale;
        self.opened += other.opened;
    }
}

pub(crate) fn add_all<K: Ord, V: AddAssign + Default>(
    sum: &mut BTreeMap<K, V>,
    other: BTreeMap<K, V>,
) {
    for (key, value) in other {
        *sum.entry(key).or_default() += value;
    }
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        add_all(&mut self.shapes, other.shapes);
        add_all(&mut self.operations, other.operations);
        add_all(&mut self.cuts, other.cuts);
        add_all(&mut self.faults, other.faults);
        self.nested += other.nested;
        self.digest = self.digest.wrapping_add(other.digest);
        let counts = [
            (&mut self.runs, other.runs),
            (&mut self.tight_runs, other.tight_runs),
            (&mut self.emptied, other.emptied),
            (&mut self.refilled, other.refilled),
            (&mut self.commits, other.commits),
            (&mut self.own_commits, other.own_commits),
            (&mut self.own_judged, other.own_judged),
            (&mut self.compared, other.compared),
            (&mut self.new_states, other.new_states),
            (&mut self.inside_states, other.inside_states),
            (&mut self.went_on, other.went_on),
            (&mut self.checked, other.checked),
            (&mut self.mounted, other.mounted),
        ];
        for (sum, count) in counts {
            *sum += count;
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} runs, {} of them on filesystems that were full; devices, metadata, data:",
            self.runs, self.tight_runs
        )?;
        for ((devices, metadata, data), runs) in &self.shapes {
            writeln!(f, "  {devices} {metadata} {data}: {runs}")?;
        }
        let (operations, commits) = (self.operation_count(), self.commits);
        writeln!(
            f,
            "{operations} operations, {commits} commits and {} by the engine itself, in {} \
             operations after which it was checked",
            self.own_commits, self.own_judged
        )?;
        for (name, count) in &self.operations {
            write!(f, "  {name}: {} done, {} refused by both", count.done, count.refused)?;
            if count.no_space > 0 {
                write!(f, ", {} without space", count.no_space)?;
            }
            if count.no_space_inside > 0 {
                write!(f, ", {} of them after a part was done", count.no_space_inside)?;
            }
            writeln!(f)?;
        }
        writeln!(
            f,
            "{} comparisons of everything; {} filesystems emptied, {} of them with room then",
            self.compared, self.emptied, self.refilled
        )?;
        writeln!(
            f,
            "{} crash states, {} opened, compared and checked; {} showed the commit being made, {} \
             a state inside of an operation; on {} the engine went on",
            self.crash_state_count(),
            self.opened_state_count(),
            self.new_states,
            self.inside_states,
            self.went_on
        )?;
        for (kind, cuts) in &self.cuts {
            writeln!(f, "  {kind:?}: {} states, {} opened", cuts.states, cuts.opened)?;
        }
        let nested = self.nested;
        writeln!(
            f,
            "{} of these were cut again, while they were opened or in their first commit: {} with \
             inodes without a name, {} with a deletion to be gone on with, {} with a free space tree \
             to be made anew; {} of these states were opened",
            nested.all, nested.with_orphans, nested.half_deleted, nested.stale, nested.opened
        )?;
        writeln!(f, "{} found clean by btrfs check", self.checked)?;
        writeln!(f, "{} mounted by the kernel, read-only and read-write", self.mounted)?;
        let sum = self.fault_sum();
        write!(f, "{} repetitions on failing devices, {} struck", sum.runs, sum.struck)?;
        for (name, faults) in &self.faults {
            write!(
                f,
                "\n  {name}: {} runs, {} struck, {} unnoticed, {} aborted, {} inside of an \
                 operation, {} states of cuts after it",
                faults.runs,
                faults.struck,
                faults.unnoticed,
                faults.aborted,
                faults.inside,
                faults.cut
            )?;
        }
        Ok(())
    }
}
