//! Places in a file.

use std::fmt;

/// A byte offset in a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FileOffset(u64);

impl FileOffset {
    /// The beginning of a file.
    pub const ZERO: Self = Self(0);
    /// One past the last byte that a file can have: offsets are signed where callers see them (`loff_t`).
    pub const MAX: Self = Self(i64::MAX as u64);

    /// The offset `bytes` from the beginning.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Bytes from the beginning.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// `len_bytes` further on, or `None` where no file reaches.
    pub fn checked_add(self, len_bytes: u64) -> Option<Self> {
        self.0.checked_add(len_bytes).map(Self).filter(|sum| *sum <= Self::MAX)
    }

    /// `len_bytes` further on, at most [`FileOffset::MAX`].
    #[must_use]
    pub fn saturating_add(self, len_bytes: u64) -> Self {
        Self(self.0.saturating_add(len_bytes)).min(Self::MAX)
    }

    /// Bytes from `earlier` to here; 0 if that is not earlier.
    pub fn bytes_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The last multiple of `unit_bytes` that is not after this. `unit_bytes` is not 0.
    #[must_use]
    pub fn round_down(self, unit_bytes: u64) -> Self {
        Self(self.0 - self.0 % unit_bytes)
    }

    /// The first multiple of `unit_bytes` that is not before this. `unit_bytes` is not 0.
    #[must_use]
    pub fn round_up(self, unit_bytes: u64) -> Self {
        Self(self.0.saturating_add(unit_bytes - 1)).round_down(unit_bytes)
    }
}

impl fmt::Display for FileOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A half-open range of a file: `start` is in it, `end` is not.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FileRange {
    /// The first byte.
    pub start: FileOffset,
    /// One past the last byte; never before `start`.
    pub end: FileOffset,
}

impl FileRange {
    /// From `start` up to `end`; empty if `end` is not after `start`.
    pub fn new(start: FileOffset, end: FileOffset) -> Self {
        Self { start, end: end.max(start) }
    }

    /// `len_bytes` from `start` on, cut at [`FileOffset::MAX`].
    pub fn with_len(start: FileOffset, len_bytes: u64) -> Self {
        Self::new(start, start.saturating_add(len_bytes))
    }

    /// All from `start` on.
    pub fn from(start: FileOffset) -> Self {
        Self::new(start, FileOffset::MAX)
    }

    /// How many bytes.
    pub fn len_bytes(self) -> u64 {
        self.end.bytes_since(self.start)
    }

    /// Whether there is no byte in it.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether the byte at `offset` is in it.
    pub fn contains(self, offset: FileOffset) -> bool {
        self.start <= offset && offset < self.end
    }

    /// What both have; empty, at one of the ends, if that is nothing.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self::new(start, self.end.min(other.end))
    }

    /// Whether a byte is in both.
    pub fn overlaps(self, other: Self) -> bool {
        !self.intersection(other).is_empty()
    }

    /// Widened on both sides to multiples of `unit_bytes`, which is not 0.
    #[must_use]
    pub fn round_out(self, unit_bytes: u64) -> Self {
        Self::new(self.start.round_down(unit_bytes), self.end.round_up(unit_bytes))
    }
}

impl fmt::Display for FileRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Debug for FileRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> FileRange {
        FileRange::new(FileOffset::new(start), FileOffset::new(end))
    }

    #[test]
    fn offset_beyond_signed_limit_is_refused() {
        assert_eq!(FileOffset::MAX.checked_add(1), None);
        assert_eq!(FileOffset::new(u64::MAX).checked_add(0), None);
        assert_eq!(FileOffset::MAX.saturating_add(u64::MAX), FileOffset::MAX);
        assert_eq!(FileOffset::new(5).checked_add(3), Some(FileOffset::new(8)));
    }

    #[test]
    fn range_backwards_is_empty() {
        assert!(range(7, 3).is_empty());
        assert_eq!(range(7, 3).len_bytes(), 0);
        assert!(!range(0, 4).overlaps(range(4, 8)));
        assert!(range(0, 5).overlaps(range(4, 8)));
        assert_eq!(range(5, 9).round_out(4), range(4, 12));
    }
}
