//! What a file is at a place: what the filesystem mapped, and over it what is in memory only or on its way.
//!
//! Writeback first makes the filesystem map the data, and then ends the block's state. So who looks at the mapping first and
//! at the states then can miss data that went from the one to the other in between; the cookie, looked at last, tells.

use crate::address_space::OpenFile;
use crate::extent_state::{CountQuery, LockMode, LockedRange, StateBits, Want};
use crate::iter::MappingIter;
use crate::mapping::{FileSystem, Mapping, Purpose};
use crate::offset::{FileOffset, FileRange};

/// A part of a file that is all the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) range: FileRange,
    pub(crate) content: Content,
    /// Whether data in memory begins where it ends.
    pub(crate) is_before_data: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// As the filesystem mapped it.
    Mapping(Mapping),
    /// Data that the mapping does not show yet.
    InMemory,
}

impl Segment {
    pub(crate) fn is_data(&self) -> bool {
        match self.content {
            Content::Mapping(mapping) => !mapping.kind.is_zeros(),
            Content::InMemory => true,
        }
    }
}

impl<F: FileSystem> OpenFile<F> {
    /// What the file is from `at` on, at most up to `end`, which is after it; `mapping_at` tells mappings.
    pub(crate) fn segment(
        &self,
        at: FileOffset,
        end: FileOffset,
        mut mapping_at: impl FnMut(FileOffset) -> Result<Mapping, F::Error>,
    ) -> Result<Segment, F::Error> {
        loop {
            let mapping = mapping_at(at)?;
            let within = FileRange::new(at, mapping.range.end.min(end));
            let content = Content::Mapping(mapping);
            if !mapping.kind.is_zeros() {
                return Ok(Segment { range: within, content, is_before_data: false });
            }
            let any = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
            let query = CountQuery::first_run(within, any);
            let found = self.space.states.count_range(query, Some(&self.cached_state));
            if !self.space.is_current(mapping.cookie) {
                continue;
            }
            return Ok(match found {
                None => Segment { range: within, content, is_before_data: false },
                Some(found) if found.start == at => Segment {
                    range: found.run(),
                    content: Content::InMemory,
                    is_before_data: false,
                },
                Some(found) => Segment {
                    range: FileRange::new(at, found.start),
                    content,
                    is_before_data: true,
                },
            });
        }
    }

    /// The mapping at a place, to tell data from a hole: the last one asked for, if it is current and holds the place.
    pub(crate) fn mapping_for_seek(&self, at: FileOffset) -> Result<Mapping, F::Error> {
        if let Some(mapping) = self.seek_mapping.load()
            && self.is_usable(&mapping, at)
        {
            return Ok(mapping);
        }
        let mapping = self.ask_mapping(at, Purpose::Seek)?;
        self.seek_mapping.store(&mapping);
        Ok(mapping)
    }

    /// The mapping at a place, with all that is to be known of it; `last` is the one that the same call asked for before.
    pub(crate) fn mapping_for_fiemap(
        &self,
        at: FileOffset,
        last: &mut Option<Mapping>,
    ) -> Result<Mapping, F::Error> {
        if let Some(mapping) = last
            && self.is_usable(mapping, at)
        {
            return Ok(*mapping);
        }
        let mapping = self.ask_mapping(at, Purpose::Fiemap)?;
        *last = Some(mapping);
        Ok(mapping)
    }

    fn is_usable(&self, mapping: &Mapping, at: FileOffset) -> bool {
        mapping.range.contains(at) && self.space.is_current(mapping.cookie)
    }

    fn ask_mapping(&self, at: FileOffset, purpose: Purpose<'_, '_>) -> Result<Mapping, F::Error> {
        let mut iter = MappingIter::new(&*self.space, FileRange::from(at));
        let Some((mapping, _)) = iter.next(purpose)? else {
            return Err(crate::Error::NoData { offset: at }.into());
        };
        Ok(mapping)
    }

    /// Only for the experiment that shows what it costs to lock ranges record by record.
    pub(crate) fn lock_as_before(&self, range: FileRange) -> Option<LockedRange<'_>> {
        let locks = self.space.cache.options().ablation.states.lock_in_tree;
        locks.then(|| self.space.states.lock(range, LockMode::Shared))
    }
}
