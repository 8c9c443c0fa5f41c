//! Giving a file space of its own for what it shares with others.

use crate::address_space::{AddressSpace, OpenFile, Reach};
use crate::mapping::{Detail, FileSystem};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::Source;

impl<F: FileSystem> OpenFile<F> {
    /// Makes what the file shares in the range dirty, so that writeback gives it space of its own.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`], [`crate::Error::TooLarge`], or what the filesystem said.
    pub fn unshare(&self, offset: FileOffset, len_bytes: u64) -> Result<(), F::Error> {
        let range = AddressSpace::<F>::space_range(offset, len_bytes)?;
        let space = &*self.space;
        let _locked = space.lock_for_write(range);
        let in_file = FileRange::new(range.start, range.end.min(space.size()));
        let mut rest = in_file.round_out(space.block_bytes);
        let mut mappings = Vec::new();
        while !rest.is_empty() {
            // One by one: what is written here may be written back, which changes what comes behind it.
            space.ask_ahead(rest, Detail::Sharing, 1, &mut mappings)?;
            let Some(mapping) = mappings.pop() else { break };
            let part = mapping.range.intersection(rest);
            if mapping.flags.is_shared && !mapping.kind.is_zeros() {
                space.write_range(part, Source::Same, Reach::Stays).map_err(|(_, error)| error)?;
            }
            rest.start = part.end;
        }
        Ok(())
    }
}
