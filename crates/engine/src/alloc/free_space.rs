//! The free extents of one block group, in memory.

use std::collections::BTreeMap;

/// Disjoint free ranges, merged where they touch.
#[derive(Clone, Debug, Default)]
pub(crate) struct FreeSpace {
    /// Start to end.
    extents: BTreeMap<u64, u64>,
    free_bytes: u64,
    /// Where the last allocation ended; the next is sought from here.
    cursor: u64,
    /// No range is longer: known since one was sought in all of them in vain, or added. So to place data in many short ones is not to go
    /// through all of them for each.
    longest_max_bytes: u64,
}

impl FreeSpace {
    /// Bytes that are free.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The ranges, ascending.
    #[cfg(test)]
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.extents.iter().map(|(start, end)| (*start, *end))
    }

    /// Whether any of a range is free.
    pub(crate) fn overlaps(&self, start: u64, end: u64) -> bool {
        let before = self.extents.range(..end).next_back();
        before.is_some_and(|(_, before_end)| *before_end > start)
    }

    /// Whether all of a range is free.
    pub(crate) fn contains(&self, start: u64, end: u64) -> bool {
        let around = self.extents.range(..=start).next_back();
        around.is_some_and(|(_, around_end)| *around_end >= end)
    }

    /// Adds a range, none of which may be free already.
    pub(crate) fn add(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        self.free_bytes += end - start;
        if let Some((&before, &before_end)) = self.extents.range(..start).next_back() {
            debug_assert!(before_end <= start, "freed twice");
            if before_end == start {
                self.extents.remove(&before);
                start = before;
            }
        }
        if let Some((&after, &after_end)) = self.extents.range(start..).next() {
            debug_assert!(end <= after, "freed twice");
            if after == end {
                self.extents.remove(&after);
                end = after_end;
            }
        }
        self.longest_max_bytes = self.longest_max_bytes.max(end - start);
        self.extents.insert(start, end);
    }

    /// Takes a range out, whatever of it is free.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        let first = self.extents.range(..=start).next_back().map_or(start, |(first, _)| *first);
        let hit: Vec<(u64, u64)> = self
            .extents
            .range(first..end)
            .map(|(start, end)| (*start, *end))
            .filter(|(_, hit_end)| *hit_end > start)
            .collect();
        for (hit_start, hit_end) in hit {
            self.extents.remove(&hit_start);
            self.free_bytes -= hit_end.min(end) - hit_start.max(start);
            if hit_start < start {
                self.extents.insert(hit_start, start);
            }
            if end < hit_end {
                self.extents.insert(end, hit_end);
            }
        }
    }

    /// Bytes that no range is longer than: as many as the longest has, once one of more was sought in vain.
    pub(crate) fn longest_max_bytes(&self) -> u64 {
        self.longest_max_bytes
    }

    /// Takes a range of `max_bytes`, or the largest of at least `min_bytes` where there is none,
    /// its start a multiple of `align_bytes`. Seeks from where the last one ended.
    pub(crate) fn take(
        &mut self,
        min_bytes: u64,
        max_bytes: u64,
        align_bytes: u64,
    ) -> Option<(u64, u64)> {
        if self.longest_max_bytes < min_bytes {
            return None;
        }
        let enough = max_bytes.min(self.longest_max_bytes);
        let mut longest = Some(0);
        let mut largest: Option<(u64, u64)> = None;
        let around = self
            .extents
            .range(..=self.cursor)
            .next_back()
            .filter(|(_, end)| **end > self.cursor)
            .map(|(start, _)| *start);
        let from = around.unwrap_or(self.cursor);
        let candidates = self.extents.range(from..).chain(self.extents.range(..from));
        for (&start, &end) in candidates {
            longest = longest.max(Some(end - start));
            let Some(aligned) = start.checked_next_multiple_of(align_bytes) else { continue };
            let len = end.saturating_sub(aligned);
            if len >= enough {
                largest = Some((aligned, len.min(max_bytes)));
                longest = None;
                break;
            }
            if len >= min_bytes && largest.is_none_or(|(_, best)| len > best) {
                largest = Some((aligned, len));
            }
        }
        if let Some(longest) = longest {
            self.longest_max_bytes = longest;
        }
        let (start, len) = largest?;
        let end = start + len;
        let (&extent_start, &extent_end) =
            self.extents.range(..=start).next_back().expect("it was found there");
        if extent_start < start {
            self.extents.insert(extent_start, start);
        } else {
            self.extents.remove(&extent_start);
        }
        if end < extent_end {
            self.extents.insert(end, extent_end);
        }
        self.free_bytes -= len;
        self.cursor = end;
        Some((start, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn add_neighbours_merge_to_one_range() {
        let mut free = FreeSpace::default();
        free.add(0, 10);
        free.add(20, 30);
        free.add(10, 20);
        assert_eq!(free.ranges().collect::<Vec<_>>(), [(0, 30)]);
        assert_eq!(free.free_bytes(), 30);
    }

    #[test]
    fn remove_across_several_keeps_the_outside() {
        let mut free = FreeSpace::default();
        free.add(0, 10);
        free.add(20, 30);
        free.add(40, 50);
        free.remove(5, 45);
        assert_eq!(free.ranges().collect::<Vec<_>>(), [(0, 5), (45, 50)]);
        assert_eq!(free.free_bytes(), 10);
    }

    #[test]
    fn take_goes_on_where_the_last_ended_and_wraps() {
        let mut free = FreeSpace::default();
        free.add(0, 100);
        assert_eq!(free.take(10, 10, 1), Some((0, 10)));
        assert_eq!(free.take(10, 10, 1), Some((10, 10)));
        free.add(0, 10);
        assert_eq!(free.take(80, 80, 1), Some((20, 80)));
        assert_eq!(free.take(1, 80, 1), Some((0, 10)));
        assert_eq!(free.take(1, 80, 1), None);
    }

    #[test]
    fn take_aligned_leaves_the_rest_free() {
        let mut free = FreeSpace::default();
        free.add(4, 100);
        assert_eq!(free.take(16, 16, 16), Some((16, 16)));
        assert_eq!(free.free_bytes(), 80);
        assert_eq!(free.take(69, 90, 16), None);
        assert_eq!(free.take(16, 90, 16), Some((32, 68)));
    }

    #[test]
    fn take_aligned_at_the_end_of_the_address_space_finds_nothing() {
        let mut free = FreeSpace::default();
        free.add(u64::MAX - 8191, u64::MAX - 4095);
        assert_eq!(free.take(16_384, 16_384, 16_384), None);
    }

    /// Each of 16 MiB that were written into single free blocks went through all of them twice.
    #[test]
    fn take_of_equal_ranges_goes_through_them_once() {
        let mut free = FreeSpace::default();
        for at in 0..1000 {
            free.add(at * 10, at * 10 + 4);
        }
        free.add(10_000, 10_006);
        assert_eq!(free.take(50, 50, 1), None);
        assert_eq!(free.longest_max_bytes(), 6);
        assert_eq!(free.take(1, 50, 1), Some((10_000, 6)));
        // Nothing says yet that there is none as long.
        assert_eq!(free.take(1, 50, 1), Some((0, 4)));
        assert_eq!(free.longest_max_bytes(), 4);
        for at in 1..1000 {
            assert_eq!(free.take(5, 50, 1), None);
            // The next one is taken, not one that is sought.
            assert_eq!(free.take(1, 50, 1), Some((at * 10, 4)));
        }
        free.add(4, 20);
        assert_eq!(free.longest_max_bytes(), 16);
        assert_eq!(free.take(1, 50, 1), Some((4, 16)));
    }
}
