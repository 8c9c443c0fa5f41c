//! What an open file was told lately about where there may be data: a stretch of it, with one cookie. A seek asks the
//! filesystem only where that ends, and for more at once the longer seeks go on from each other.

use crate::mapping::{Cookie, Mapping};
use crate::offset::{FileOffset, FileRange};
use crate::report::Piece;

/// For how many mappings questions are, one after the other. The filesystem is held up for as long as one takes to answer.
#[derive(Debug, Default)]
pub(crate) struct Questions(usize);

impl Questions {
    /// For how many the next one is: the first ones, and those behind a jump, for few, each further one for twice as many.
    pub(crate) fn next(&mut self, goes_on: bool) -> usize {
        const FIRST: usize = 2;
        const MAX: usize = 128;
        self.0 = if goes_on { (self.0 * 2).clamp(FIRST, MAX) } else { FIRST };
        self.0
    }
}

/// A stretch, or nothing.
#[derive(Debug, Default)]
pub(crate) struct SeekWindow {
    cookie: Option<Cookie>,
    start: FileOffset,
    runs: Vec<Run>,
    /// Where the last look found what it was for.
    at: usize,
    questions: Questions,
    /// Empty between questions.
    mappings: Vec<Mapping>,
}

/// A part that is all zeros below memory, or all data. It begins where the one before ends.
#[derive(Clone, Copy, Debug)]
struct Run {
    end: FileOffset,
    is_zeros: bool,
}

impl SeekWindow {
    /// What lies at `at`, if the stretch holds that, whether it is current or not.
    #[inline(always)]
    pub(crate) fn find(&mut self, at: FileOffset) -> Option<Piece<()>> {
        let cookie = self.cookie?;
        let is_here = |index: usize| self.start_of(index) <= at && at < self.runs[index].end;
        let next = self.at + 1;
        let index = if self.at < self.runs.len() && is_here(self.at) {
            self.at
        } else if next < self.runs.len() && is_here(next) {
            next
        } else {
            let index = self.runs.partition_point(|run| run.end <= at);
            if at < self.start || index == self.runs.len() {
                return None;
            }
            index
        };
        self.at = index;
        let run = self.runs[index];
        let range = FileRange::new(self.start_of(index), run.end);
        Some(Piece { range, is_zeros: run.is_zeros, cookie, what: () })
    }

    fn start_of(&self, index: usize) -> FileOffset {
        index.checked_sub(1).map_or(self.start, |before| self.runs[before].end)
    }

    /// Replaces the stretch by one from `at` on. `ask` is told for how many mappings, and where to put them; those put there
    /// touch, and are of one moment.
    ///
    /// # Errors
    /// That of `ask`; then there is no stretch.
    pub(crate) fn refill<E>(
        &mut self,
        at: FileOffset,
        ask: impl FnOnce(usize, &mut Vec<Mapping>) -> Result<(), E>,
    ) -> Result<(), E> {
        let goes_on = self.runs.last().is_some_and(|last| last.end == at);
        let count_max = self.questions.next(goes_on);
        self.cookie = None;
        self.runs.clear();
        self.at = 0;
        let result = ask(count_max, &mut self.mappings);
        if let (Ok(()), Some(first)) = (&result, self.mappings.first()) {
            self.cookie = Some(first.cookie);
            self.start = first.range.start;
            for mapping in &self.mappings {
                let (end, is_zeros) = (mapping.range.end, mapping.kind.is_zeros());
                match self.runs.last_mut() {
                    Some(last) if last.is_zeros == is_zeros => last.end = end,
                    _ => self.runs.push(Run { end, is_zeros }),
                }
            }
        }
        self.mappings.clear();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{MappingFlags, MappingKind, MappingSequence};

    fn mapping(start: u64, end: u64, kind: MappingKind) -> Mapping {
        Mapping {
            range: FileRange::new(FileOffset::new(start), FileOffset::new(end)),
            kind,
            flags: MappingFlags::default(),
            cookie: MappingSequence::new().cookie(),
            address: None,
            token: 0,
        }
    }

    #[test]
    fn find_gives_merged_runs_in_any_order_and_nothing_outside() {
        let mut window = SeekWindow::default();
        assert!(window.find(FileOffset::ZERO).is_none());
        let told = [
            mapping(4, 8, MappingKind::Hole),
            mapping(8, 12, MappingKind::Unwritten),
            mapping(12, 16, MappingKind::Mapped),
            mapping(16, 24, MappingKind::Inline),
            mapping(24, 30, MappingKind::Hole),
        ];
        let ask = |_: usize, mappings: &mut Vec<Mapping>| -> Result<(), ()> {
            mappings.extend(told);
            Ok(())
        };
        window.refill(FileOffset::new(5), ask).unwrap();
        let expected = [(4, 12, true), (12, 24, false), (24, 30, true)];
        for at in [29, 4, 12, 11, 23, 24, 5, 4] {
            let found = window.find(FileOffset::new(at)).unwrap();
            let (start, end, is_zeros) =
                *expected.iter().find(|(start, end, _)| (*start..*end).contains(&at)).unwrap();
            assert_eq!((found.range.start.bytes(), found.range.end.bytes()), (start, end));
            assert_eq!(found.is_zeros, is_zeros);
        }
        for at in [0, 3, 30, 1000] {
            assert!(window.find(FileOffset::new(at)).is_none(), "{at}");
        }
    }

    #[test]
    fn refill_asks_for_more_where_seeks_go_on_and_for_little_behind_a_jump() {
        let mut window = SeekWindow::default();
        let mut asked = Vec::new();
        for at in [0, 10, 20, 30, 25, 35] {
            let ask = |count, mappings: &mut Vec<Mapping>| -> Result<(), ()> {
                asked.push(count);
                mappings.push(mapping(at, at + 10, MappingKind::Hole));
                Ok(())
            };
            window.refill(FileOffset::new(at), ask).unwrap();
        }
        assert_eq!(asked, [2, 4, 8, 16, 2, 4]);
    }

    #[test]
    fn refill_failed_leaves_nothing() {
        let mut window = SeekWindow::default();
        let ask = |_: usize, mappings: &mut Vec<Mapping>| -> Result<(), ()> {
            mappings.push(mapping(0, 10, MappingKind::Hole));
            Ok(())
        };
        window.refill(FileOffset::ZERO, ask).unwrap();
        assert_eq!(window.refill(FileOffset::ZERO, |_, _| Err("no")), Err("no"));
        assert!(window.find(FileOffset::ZERO).is_none());
    }
}
