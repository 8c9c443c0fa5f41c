//! The way from a range to its mappings, one at a time, for what changes them or answers from them. Who reads asks for many at once
//! ([`AddressSpace::mappings`]).

use crate::address_space::AddressSpace;
use crate::error::Error;
use crate::mapping::{FileSystem, Mapping, Purpose};
use crate::offset::{FileOffset, FileRange};

/// Goes through the mappings of a range, one at a time, as far as its user says that it came.
pub(crate) struct MappingIter<'a, F: FileSystem> {
    space: &'a AddressSpace<F>,
    rest: FileRange,
}

impl<'a, F: FileSystem> MappingIter<'a, F> {
    pub(crate) fn new(space: &'a AddressSpace<F>, range: FileRange) -> Self {
        Self { space, rest: range }
    }

    /// The mapping at the start of what is left, and the part of what is left that it holds.
    ///
    /// # Errors
    /// What the filesystem says, or that its answer does not fit.
    pub(crate) fn next(
        &mut self,
        purpose: Purpose<'_, '_>,
    ) -> Result<Option<(Mapping, FileRange)>, F::Error> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let asked = self.rest.round_out(self.space.block_bytes);
        self.space.cache.usage().count_mapping();
        let mapping = self.space.filesystem.map(&self.space.inode, asked, purpose)?;
        let part = mapping.range.intersection(self.rest);
        if !mapping.range.contains(self.rest.start) || part.is_empty() {
            return Err(Error::BadMapping { asked, mapped: mapping.range }.into());
        }
        Ok(Some((mapping, part)))
    }

    /// What lies before `offset` is done.
    pub(crate) fn advance_to(&mut self, offset: FileOffset) {
        self.rest = FileRange::new(offset, self.rest.end);
    }
}
