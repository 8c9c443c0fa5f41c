//! Which folios of a file go from memory.

use super::{Blocks, Folio, Gone, Pages, len_u64};

/// Folios that are still to be looked at, in this order. See [`Pages::reclaim_round()`].
pub(crate) struct ReclaimRound {
    rest: [Blocks; 2],
}

impl Pages {
    /// Drops folios in `blocks` that are neither dirty nor under writeback.
    pub(crate) fn drop_clean(&mut self, blocks: &Blocks) -> Gone {
        let mut gone = Gone::new();
        for first in self.firsts(blocks) {
            if self.folios.get(first).is_some_and(Folio::is_clean) {
                gone.extend(self.remove(first));
            }
        }
        gone
    }

    /// Somebody may come again for these blocks.
    pub(crate) fn note_wanted(&mut self, blocks: &Blocks) {
        for first in self.firsts(blocks) {
            if let Some(folio) = self.folios.get_mut(first) {
                folio.is_wanted = true;
            }
        }
    }

    /// Drops clean folios that end in `blocks` and that nobody wants again.
    pub(crate) fn drop_passed(&mut self, blocks: &Blocks) -> Gone {
        let mut gone = Gone::new();
        let mut at = blocks.start;
        while at < blocks.end {
            let Some((first, folio)) = self.folio(at) else {
                let Some(next) = self.folios.next(at) else { break };
                at = next;
                continue;
            };
            at = first + self.block_count(folio);
            if at <= blocks.end && folio.is_clean() && !folio.is_wanted {
                gone.extend(self.remove(first));
            }
        }
        gone
    }

    /// Once through all folios, from where the last round stopped.
    pub(crate) fn reclaim_round(&self) -> ReclaimRound {
        ReclaimRound { rest: [self.hand..u64::MAX, 0..self.hand] }
    }

    /// Drops clean folios that were not used since the round before, until so many bytes are free; returns how many are. Fewer where the
    /// round has ended.
    pub(crate) fn reclaim(&mut self, round: &mut ReclaimRound, wanted_bytes: u64) -> (u64, Gone) {
        let mut freed = 0;
        let mut gone = Vec::new();
        for range in &mut round.rest {
            for (first, folio) in self.folios.range_mut(range.start, range.end) {
                if freed >= wanted_bytes {
                    break;
                }
                range.start = first + 1;
                self.hand = first + 1;
                if !folio.is_clean() || std::mem::take(&mut folio.is_referenced) {
                    continue;
                }
                freed += len_u64(&folio.data);
                gone.push(first);
            }
        }
        let gone = gone.into_iter().filter_map(|first| self.remove(first)).collect();
        (freed, gone)
    }
}
