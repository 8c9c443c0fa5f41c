//! What a check answers with.

use crate::finding::{Finding, Severity};
use crate::view::number;

/// What was looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// Tree blocks, each counted once however many trees share it.
    pub block_count: u64,
    /// Bytes of them, one copy.
    pub block_bytes: u64,
    /// Trees, logs included.
    pub tree_count: u64,
    /// Subvolumes and snapshots, deleted ones that are still there included.
    pub subvolume_count: u64,
    /// Inodes, each counted once however many snapshots share it.
    pub inode_count: u64,
    /// Directory entries, each counted once.
    pub entry_count: u64,
    /// File extents, each counted once.
    pub file_extent_count: u64,
    /// Extents of file data.
    pub data_extent_count: u64,
    /// Bytes of them on disk, one copy.
    pub data_extent_bytes: u64,
    /// Bytes of data that have checksums.
    pub csum_bytes: u64,
    /// Bytes of data that were read and compared with their checksums, all copies.
    pub data_read_bytes: u64,
    /// Block groups.
    pub group_count: u64,
    /// Bytes of memory that tables took at most.
    pub table_bytes_peak: u64,
    /// Bytes of tables that were written to a temporary file, as often as they were. With several
    /// threads it is chance which pages are.
    pub spilled_bytes: u64,
}

/// The outcome of a check.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// What was found, in the order of the checks; the same for the same image, whatever the number
    /// of threads and the memory.
    pub findings: Vec<Finding>,
    /// Findings beyond the limit, of which only the number is kept.
    pub left_out_count: u64,
    /// Errors, those left out included.
    pub error_count: u64,
    /// Notes, those left out included.
    pub note_count: u64,
    /// What was looked at.
    pub statistics: Statistics,
}

impl Report {
    /// Whether there is no damage. Notes are none.
    pub fn is_clean(&self) -> bool {
        self.error_count == 0
    }

    /// The findings that are damage.
    pub fn errors(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Error)
    }

    /// The findings that are no damage.
    pub fn notes(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.severity() == Severity::Note)
    }
}

/// How many findings there are of each severity.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counts {
    errors: u64,
    notes: u64,
}

impl Counts {
    pub(crate) fn of(findings: &[Finding]) -> Self {
        let errors = findings.iter().filter(|it| it.severity() == Severity::Error).count();
        let (errors, all) = (number(errors), number(findings.len()));
        Self { errors, notes: all - errors }
    }
}

/// Collects findings up to a limit.
#[derive(Debug)]
pub(crate) struct Findings {
    list: Vec<Finding>,
    count_max: usize,
    left_out_count: u64,
    error_count: u64,
    note_count: u64,
}

impl Findings {
    pub(crate) fn new(count_max: usize) -> Self {
        Self { list: Vec::new(), count_max, left_out_count: 0, error_count: 0, note_count: 0 }
    }

    pub(crate) fn push(&mut self, finding: Finding) {
        match finding.severity() {
            Severity::Error => self.error_count += 1,
            Severity::Note => self.note_count += 1,
        }
        if self.list.len() < self.count_max {
            self.list.push(finding);
        } else {
            self.left_out_count += 1;
        }
    }

    /// Whether no further one is kept.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= self.count_max
    }

    /// Counts findings that are not kept.
    pub(crate) fn count(&mut self, counts: Counts) {
        self.error_count += counts.errors;
        self.note_count += counts.notes;
        self.left_out_count += counts.errors + counts.notes;
    }

    /// How many there are, those left out included.
    pub(crate) fn len(&self) -> u64 {
        self.error_count + self.note_count
    }

    pub(crate) fn extend(&mut self, findings: impl IntoIterator<Item = Finding>) {
        findings.into_iter().for_each(|finding| self.push(finding));
    }

    /// None yet, of which as many are kept as are here.
    pub(crate) fn like(&self) -> Self {
        Self::new(self.count_max)
    }

    /// Takes in those that were collected elsewhere.
    pub(crate) fn join(&mut self, others: Self) {
        let Self { list, left_out_count, error_count, note_count, .. } = others;
        let before = self.list.len();
        self.list.extend(list);
        let kept = self.list.len().min(self.count_max).max(before);
        self.left_out_count += left_out_count + number(self.list.len() - kept);
        self.list.truncate(kept);
        self.error_count += error_count;
        self.note_count += note_count;
    }

    pub(crate) fn into_report(self, statistics: Statistics) -> Report {
        Report {
            findings: self.list,
            left_out_count: self.left_out_count,
            error_count: self.error_count,
            note_count: self.note_count,
            statistics,
        }
    }
}
