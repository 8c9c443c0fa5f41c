//! Whether what was run covered what was promised.

use ubtrfs_sim::{OpenFilesReport, Report, ThreadsReport};
use ubtrfs_testkit::oracle::{Oracle, available};

/// What a run, or several together, must have looked at: else it proves less than it is run for,
/// however clean it was.
#[derive(clap::Args, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtLeast {
    /// Fail where there were fewer operations than these
    #[arg(long = "at-least-operations", value_name = "N", default_value = "0")]
    operations_min: u64,
    /// ... fewer states after power cuts
    #[arg(long = "at-least-crash-states", value_name = "N", default_value = "0")]
    crash_states_min: u64,
    /// ... fewer of these that were opened, compared and checked
    #[arg(long = "at-least-opened", value_name = "N", default_value = "0")]
    opened_min: u64,
    /// ... fewer of these that were gone on with and cut again
    #[arg(long = "at-least-cut-again", value_name = "N", default_value = "0")]
    cut_again_min: u64,
    /// ... fewer repetitions on failing devices in which the failure came
    #[arg(long = "at-least-struck", value_name = "N", default_value = "0")]
    struck_min: u64,
    /// ... fewer states that the kernel mounted and `btrfs check` then found clean
    #[arg(long = "at-least-mounted", value_name = "N", default_value = "0")]
    mounted_min: u64,
    /// ... fewer states that `btrfs check` found clean
    #[arg(long = "at-least-checked", value_name = "N", default_value = "0")]
    checked_min: u64,
}

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Covered {
    operations: u64,
    crash_states: u64,
    opened: u64,
    cut_again: u64,
    struck: u64,
    mounted: u64,
    checked: u64,
}

impl From<&Report> for Covered {
    fn from(report: &Report) -> Self {
        Self {
            operations: report.operation_count(),
            crash_states: report.crash_state_count(),
            opened: report.opened_state_count(),
            cut_again: report.nested.all,
            struck: report.fault_sum().struck,
            mounted: report.mounted,
            checked: report.checked,
        }
    }
}

impl From<&OpenFilesReport> for Covered {
    fn from(report: &OpenFilesReport) -> Self {
        Self {
            operations: report.operation_count(),
            crash_states: report.crash_state_count(),
            opened: report.opened_state_count(),
            cut_again: report.cut_again,
            struck: report.struck,
            mounted: report.mounted,
            checked: report.checked,
        }
    }
}

impl From<&ThreadsReport> for Covered {
    fn from(report: &ThreadsReport) -> Self {
        Self {
            operations: report.operations,
            crash_states: report.states.0,
            opened: report.states.1,
            checked: report.checked,
            ..Self::default()
        }
    }
}

impl AtLeast {
    /// What fell short, a line each.
    pub fn missed(&self, covered: &Covered) -> Vec<String> {
        [
            ("operations", covered.operations, self.operations_min),
            ("crash states", covered.crash_states, self.crash_states_min),
            ("crash states opened", covered.opened, self.opened_min),
            ("crash states cut again", covered.cut_again, self.cut_again_min),
            ("repetitions struck by a failure", covered.struck, self.struck_min),
            ("states mounted by the kernel", covered.mounted, self.mounted_min),
            ("states found clean by btrfs check", covered.checked, self.checked_min),
        ]
        .into_iter()
        .filter(|(_, have, wanted)| have < wanted)
        .map(|(what, have, wanted)| format!("{have} {what}, and at least {wanted} are wanted"))
        .collect()
    }

    /// Sees to it that the judges are there without which these numbers cannot be reached.
    ///
    /// # Errors
    /// Which is not, and why.
    pub fn require_judges(&self) -> Result<(), String> {
        let mut judges = Vec::new();
        if self.mounted_min > 0 || self.checked_min > 0 {
            judges.push(Oracle::BtrfsProgs);
        }
        if self.mounted_min > 0 {
            judges.push(Oracle::KernelBtrfs);
        }
        judges.into_iter().try_for_each(|judge| {
            available(judge).map_err(|why| format!("{judge:?} is wanted and missing: {why}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_least(count: u64) -> AtLeast {
        AtLeast {
            operations_min: count,
            crash_states_min: count,
            opened_min: count,
            cut_again_min: count,
            struck_min: count,
            mounted_min: count,
            checked_min: count,
        }
    }

    #[test]
    fn missed_what_was_not_asked_for_is_nothing() {
        assert!(at_least(0).missed(&Covered::default()).is_empty());
        assert!(at_least(0).require_judges().is_ok());
    }

    #[test]
    fn missed_of_a_report_that_has_as_many_is_nothing_and_of_less_is_named() {
        let covered = Covered {
            operations: 10,
            crash_states: 10,
            opened: 10,
            cut_again: 10,
            struck: 10,
            mounted: 10,
            checked: 10,
        };
        assert!(at_least(10).missed(&covered).is_empty());
        assert_eq!(at_least(11).missed(&covered).len(), 7);
        let fewer = Covered { mounted: 9, ..covered };
        assert_eq!(
            at_least(10).missed(&fewer),
            ["9 states mounted by the kernel, and at least 10 are wanted"]
        );
    }

    #[test]
    fn missed_by_runs_that_only_say_nothing_failed_is_all_that_was_wanted() {
        assert_eq!(at_least(1).missed(&Covered::from(&Report::default())).len(), 7);
        let threads =
            ThreadsReport { operations: 1, states: (1, 1), checked: 1, ..ThreadsReport::default() };
        // Several threads know no failing devices, no cuts of what follows a cut and no mounts.
        assert_eq!(at_least(1).missed(&Covered::from(&threads)).len(), 3);
    }
}
