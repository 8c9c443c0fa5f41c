//! What was done.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

/// Counts of what a run, or several, looked at.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Runs.
    pub runs: u64,
    /// Operations by name: done and refused.
    pub operations: BTreeMap<&'static str, (u64, u64)>,
    /// Operations for which there was no space.
    pub no_space: u64,
    /// Commits that an operation asked for.
    pub commits: u64,
    /// Commits that the engine made by itself.
    pub own_commits: u64,
    /// Comparisons of everything.
    pub compared: u64,
    /// States after power cuts at which everything up to a write had arrived.
    pub cut_states: u64,
    /// States after power cuts at which a part of the last writes was lost or torn.
    pub torn_states: u64,
    /// Of these, those that showed the commit that was being made.
    pub new_states: u64,
    /// States on which the engine went on after the cut.
    pub went_on: u64,
    /// States that `btrfs check` found clean.
    pub checked: u64,
    /// States that the kernel mounted and showed as the model.
    pub mounted: u64,
    /// Repetitions on a device that failed.
    pub faults: u64,
    /// Of these, those that stopped the filesystem.
    pub aborted: u64,
}

impl Report {
    /// All operations.
    pub fn operation_count(&self) -> u64 {
        self.operations.values().map(|(done, refused)| done + refused).sum::<u64>() + self.no_space
    }

    /// All states after power cuts.
    pub fn crash_state_count(&self) -> u64 {
        self.cut_states + self.torn_states
    }
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        for (name, (done, refused)) in other.operations {
            let entry = self.operations.entry(name).or_default();
            entry.0 += done;
            entry.1 += refused;
        }
        let counts = [
            (&mut self.runs, other.runs),
            (&mut self.no_space, other.no_space),
            (&mut self.commits, other.commits),
            (&mut self.own_commits, other.own_commits),
            (&mut self.compared, other.compared),
            (&mut self.cut_states, other.cut_states),
            (&mut self.torn_states, other.torn_states),
            (&mut self.new_states, other.new_states),
            (&mut self.went_on, other.went_on),
            (&mut self.checked, other.checked),
            (&mut self.mounted, other.mounted),
            (&mut self.faults, other.faults),
            (&mut self.aborted, other.aborted),
        ];
        for (sum, count) in counts {
            *sum += count;
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operations = self.operation_count();
        writeln!(f, "{} runs, {operations} operations, {} commits", self.runs, self.commits)?;
        for (name, (done, refused)) in &self.operations {
            writeln!(f, "  {name}: {done} done, {refused} refused by both")?;
        }
        writeln!(f, "  without space: {}; own commits: {}", self.no_space, self.own_commits)?;
        writeln!(f, "{} comparisons of everything", self.compared)?;
        writeln!(
            f,
            "{} crash states: {} after each write, {} with writes lost or torn; {} showed the \
             commit being made; on {} the engine went on",
            self.crash_state_count(),
            self.cut_states,
            self.torn_states,
            self.new_states,
            self.went_on
        )?;
        writeln!(f, "{} found clean by btrfs check", self.checked)?;
        writeln!(f, "{} mounted by the kernel, read-only and read-write", self.mounted)?;
        write!(f, "{} runs on a failing device, {} aborted", self.faults, self.aborted)
    }
}
