//! What a file was after each operation, what of that was promised, and what a power cut may
//! therefore show.
//!
//! Each block is one of those that it was from the last promise on, up to the operation in which the
//! power went; of a file that is written in place each sector. The size is one of those, or, where
//! the file was mapped bit by bit, the end of a block between them.

use std::ops::Range;
use std::rc::Rc;

use crate::compare::Differs;
use crate::open_files::fill;

/// The unit in which files are mapped.
pub(super) const BLOCK_BYTES: usize = 4096;
/// The unit in which a write in place arrives.
const SECTOR_BYTES: usize = 512;
/// Bytes that are shown of what is wrong.
const SHOWN_BYTES: usize = 24;

/// A file after an operation.
#[derive(Clone, Debug)]
struct Version {
    bytes: Rc<[u8]>,
    /// Writes and flushes that had been recorded when the operation began.
    began: usize,
    /// The operation, by number.
    operation: u64,
}

/// Something was said to be durable.
#[derive(Clone, Debug)]
struct Promise {
    /// Writes and flushes by when it was.
    events: usize,
    version: usize,
    /// These blocks; `None` for the whole file and its size.
    blocks: Option<Range<usize>>,
}

/// A file's versions and promises since something was last promised of all of it.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// It is written where it lies.
    is_in_place: bool,
    /// Oldest first; never empty.
    versions: Vec<Version>,
    promises: Vec<Promise>,
}

/// What a state showed of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Shown {
    /// Another version than the promised and the last one, or parts of several.
    pub(super) is_between: bool,
    /// Parts of several versions.
    pub(super) is_mixed: bool,
    /// Blocks of which the sectors are of several versions.
    pub(super) torn_blocks: u64,
}

impl History {
    /// A file that is durable as it is.
    pub(super) fn new(bytes: Rc<[u8]>, is_in_place: bool) -> Self {
        let promise = Promise { events: 0, version: 0, blocks: None };
        let versions = vec![Version { bytes, began: 0, operation: 0 }];
        Self { is_in_place, versions, promises: vec![promise] }
    }

    /// Its bytes now.
    pub(super) fn now(&self) -> &Rc<[u8]> {
        &self.versions.last().expect("there is one version at least").bytes
    }

    /// All that it was since the last promise of all of it, and may be again where data is lost.
    pub(super) fn versions(&self) -> impl Iterator<Item = Rc<[u8]>> {
        self.versions[self.floor(usize::MAX)..].iter().map(|version| Rc::clone(&version.bytes))
    }

    /// The last version's number, for [`Self::promise`].
    pub(super) fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    /// An operation that began after so many writes and flushes made it this.
    pub(super) fn push(&mut self, bytes: Rc<[u8]>, began: usize, operation: u64) {
        if *self.now() != bytes {
            self.versions.push(Version { bytes, began, operation });
        }
    }

    /// All of a version is durable after so many writes and flushes.
    pub(super) fn promise(&mut self, version: usize, events: usize) {
        self.promises.push(Promise { events, version, blocks: None });
    }

    /// Some blocks of the last version are durable after so many writes and flushes.
    pub(super) fn promise_blocks(&mut self, blocks: Range<usize>, events: usize) {
        let version = self.newest();
        self.promises.push(Promise { events, version, blocks: Some(blocks) });
    }

    /// The recording begins anew: what was written by now has arrived. Versions before the last
    /// promise of all are forgotten. Returns how many they were.
    pub(super) fn begin_recording(&mut self) -> usize {
        let first = self.floor(usize::MAX);
        self.versions.drain(..first);
        self.versions.iter_mut().for_each(|version| version.began = 0);
        self.promises.retain(|promise| promise.blocks.is_some() && promise.version > first);
        for promise in &mut self.promises {
            promise.version -= first;
            promise.events = 0;
        }
        self.promises.insert(0, Promise { events: 0, version: 0, blocks: None });
        first
    }

    /// The history of a file that a cut after so many writes and flushes left showing `shown`. Of one
    /// that is written in place other copies may hold what else the cut may have left.
    pub(super) fn after_cut(&self, cut_after: usize, shown: Rc<[u8]>) -> Self {
        let mut after = Self::new(Rc::clone(&shown), self.is_in_place);
        if self.is_in_place {
            let allowed = self.floor(cut_after)..=self.ceiling(cut_after);
            after.versions = self.versions[allowed].to_vec();
            after.versions.iter_mut().for_each(|version| version.began = 0);
            after.versions.push(Version { bytes: shown, began: 0, operation: 0 });
        }
        after
    }

    /// What a state after a cut shows of the file.
    ///
    /// # Errors
    /// That it may not.
    pub(super) fn judge(&self, shown: &[u8], cut_after: usize) -> Differs<Shown> {
        let (floor, ceiling) = (self.floor(cut_after), self.ceiling(cut_after));
        let allowed = &self.versions[floor..=ceiling];
        self.judge_size(shown.len(), allowed)?;
        let mut result = Shown::default();
        for (block, have) in shown.chunks(BLOCK_BYTES).enumerate() {
            let floor = self.floor_of(block, cut_after).clamp(floor, ceiling);
            let allowed = &self.versions[floor..=ceiling];
            let at = block * BLOCK_BYTES;
            if allowed.iter().any(|version| holds(&version.bytes, at, have)) {
                continue;
            }
            let is_sector = |(sector, have): (usize, &[u8])| {
                let at = at + sector * SECTOR_BYTES;
                allowed.iter().any(|version| holds(&version.bytes, at, have))
            };
            if self.is_in_place && have.chunks(SECTOR_BYTES).enumerate().all(is_sector) {
                result.torn_blocks += 1;
                continue;
            }
            return Err(format!(
                "block {block} of {} bytes {}",
                shown.len(),
                wrong(have, at, allowed)
            ));
        }
        let is_whole = |version: &Version| *version.bytes == *shown;
        let is_first = allowed.first().is_some_and(is_whole);
        let is_last = allowed.last().is_some_and(is_whole);
        result.is_mixed = !allowed.iter().any(is_whole);
        result.is_between = !is_first && !is_last;
        Ok(result)
    }

    fn judge_size(&self, len: usize, allowed: &[Version]) -> Differs {
        let mut lens: Vec<usize> = allowed.iter().map(|version| version.bytes.len()).collect();
        let (min, max) = (lens.iter().min().copied(), lens.iter().max().copied());
        let is_between = min.is_some_and(|min| min < len) && max.is_some_and(|max| len < max);
        if lens.contains(&len) || is_between && len.is_multiple_of(BLOCK_BYTES) {
            return Ok(());
        }
        lens.dedup();
        Err(format!("{len} bytes long, and it was {lens:?} since the last promise"))
    }

    /// The version that was promised last when so many writes and flushes had been recorded.
    fn floor(&self, events: usize) -> usize {
        let made = self.promises.iter().filter(|promise| promise.events <= events);
        made.filter(|promise| promise.blocks.is_none()).map(|one| one.version).max().unwrap_or(0)
    }

    /// The same for a block.
    fn floor_of(&self, block: usize, events: usize) -> usize {
        let is_of = |promise: &&Promise| {
            promise.events <= events
                && promise.blocks.as_ref().is_none_or(|blocks| blocks.contains(&block))
        };
        self.promises.iter().filter(is_of).map(|promise| promise.version).max().unwrap_or(0)
    }

    /// The version of the operation in which the power went, or of the last one before.
    fn ceiling(&self, events: usize) -> usize {
        // What an operation writes comes after its beginning.
        let begun = self.versions.iter().rposition(|version| version.began < events);
        begun.unwrap_or(0).max(self.floor(events))
    }

    /// How many promises of anything there were when so many writes and flushes had been recorded.
    pub(super) fn promise_count(&self, events: usize) -> usize {
        self.promises.iter().filter(|promise| promise.events <= events).count()
    }
}

/// Whether a version holds those bytes at `at`; behind its end it has zeros.
fn holds(version: &[u8], at: usize, have: &[u8]) -> bool {
    let rest = version.get(at..).unwrap_or_default();
    let (inside, behind) = have.split_at(rest.len().min(have.len()));
    rest.starts_with(inside) && behind.iter().all(|byte| *byte == 0)
}

/// Where a block is none of those that it may be, and whose bytes it has.
fn wrong(have: &[u8], at: usize, allowed: &[Version]) -> String {
    let differs = |version: &Version| {
        let byte = |index: usize| version.bytes.get(at + index).copied().unwrap_or(0);
        let first = have.iter().enumerate().find(|(index, have)| byte(*index) != **have);
        first.map_or(0, |(index, _)| index)
    };
    let each: Vec<String> = allowed
        .iter()
        .map(|version| {
            let index = differs(version);
            let bytes = &have[index..(index + SHOWN_BYTES).min(have.len())];
            let (operation, len) = (version.operation, version.bytes.len());
            format!(
                "from that of operation {operation} ({len} bytes) it differs at byte {} on, {bytes:02x?}{}",
                at + index,
                fill::origin(bytes, at + index)
            )
        })
        .collect();
    format!("is none that it was since the last promise: {}", each.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(parts: &[(u8, usize)]) -> Rc<[u8]> {
        parts.iter().flat_map(|(byte, len)| vec![*byte; *len]).collect()
    }

    /// 8 KiB of 1, which became 2 in an operation after 10 events, and 3 in one after 20; 2 was
    /// promised after 15.
    fn history(is_in_place: bool) -> History {
        let mut history = History::new(bytes(&[(1, 8192)]), is_in_place);
        history.push(bytes(&[(2, 8192)]), 10, 1);
        history.promise(1, 15);
        history.push(bytes(&[(3, 6000)]), 20, 2);
        history
    }

    #[test]
    fn judge_takes_versions_from_the_promise_to_the_operation_of_the_cut() {
        let history = history(false);
        let ok = |parts: &[(u8, usize)], cut| history.judge(&bytes(parts), cut).is_ok();
        assert!(ok(&[(1, 8192)], 10) && !ok(&[(2, 8192)], 10));
        assert!(ok(&[(1, 8192)], 14) && ok(&[(2, 4096), (1, 4096)], 14));
        assert!(!ok(&[(1, 8192)], 15) && ok(&[(2, 8192)], 15) && !ok(&[(3, 6000)], 20));
        assert!(ok(&[(3, 6000)], 21) && ok(&[(3, 4096), (2, 1904)], 21));
        // Behind the end of a version it has zeros.
        assert!(ok(&[(2, 4096), (3, 1904), (0, 2192)], 21));
        assert!(!ok(&[(2, 4096), (3, 1904), (2, 2192)], 21));
        assert!(!ok(&[(3, 5000)], 21) && !ok(&[(2, 4096)], 21));
    }

    #[test]
    fn judge_of_a_block_with_sectors_of_two_versions_takes_it_where_it_is_written_in_place() {
        let torn = bytes(&[(2, 512), (1, 7680)]);
        assert!(history(false).judge(&torn, 12).is_err());
        let shown = history(true).judge(&torn, 12).unwrap();
        assert_eq!(shown, Shown { is_between: true, is_mixed: true, torn_blocks: 1 });
        assert!(history(true).judge(&bytes(&[(2, 500), (1, 7692)]), 12).is_err());
    }

    #[test]
    fn promise_of_blocks_leaves_the_others_as_they_may_be() {
        let mut history = History::new(bytes(&[(1, 8192)]), false);
        history.push(bytes(&[(2, 8192)]), 10, 1);
        history.promise_blocks(1..2, 15);
        assert!(history.judge(&bytes(&[(1, 4096), (2, 4096)]), 15).is_ok());
        assert!(history.judge(&bytes(&[(2, 4096), (1, 4096)]), 15).is_err());
        assert_eq!(history.begin_recording(), 0);
        assert!(history.judge(&bytes(&[(2, 4096), (1, 4096)]), 0).is_err());
    }
}
