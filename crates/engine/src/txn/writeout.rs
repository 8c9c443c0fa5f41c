//! Writing the dirty blocks: sealed, in address order, neighbours in one request. And file data, as it comes.

use ubtrfs_ondisk::LogicalAddr;
use ubtrfs_ondisk::block::Block;
use ubtrfs_rt::Arc;

use super::Core;
use crate::btree::TreeState;
use crate::error::{Error, Result};

/// Most blocks of one request.
const RUN_BLOCKS_MAX: usize = 256;

impl Core {
    /// Writes every dirty block, each copy of it. They stay dirty until [`Core::retire_blocks`].
    pub(super) fn write_blocks(&self) -> Result<()> {
        let geometry = *self.roots.store.geometry();
        let executor = self.runtime.executor;
        let mut blocks: Vec<Arc<Block>> = Vec::new();
        for tree in self.all_trees() {
            let mut state = tree.read_mut_quietly();
            let mut dirty: Vec<&mut Arc<Block>> = state.dirty.values_mut().collect();
            executor.for_each_part(&mut dirty, |part| {
                for block in part {
                    Arc::make_mut(block).seal(geometry.csum);
                }
                Ok::<_, Error>(())
            })?;
            blocks.extend(state.dirty.values().map(Arc::clone));
        }
        blocks.sort_unstable_by_key(|block| block.bytenr());
        executor.for_each_part(&mut blocks, |part| self.write_sorted(part))
    }

    /// Writes the dirty blocks of one locked tree now, before the commit: they are clean ones of the
    /// running transaction then, copied again before they change.
    pub(crate) fn write_early(&self, state: &mut TreeState) -> Result<()> {
        let geometry = *self.roots.store.geometry();
        let executor = self.runtime.executor;
        state.fingers = Default::default();
        let mut dirty: Vec<&mut Arc<Block>> = state.dirty.values_mut().collect();
        executor.for_each_part(&mut dirty, |part| {
            for block in part {
                Arc::make_mut(block).seal(geometry.csum);
            }
            Ok::<_, Error>(())
        })?;
        // They stay where they can be read until all are written.
        let mut blocks: Vec<Arc<Block>> = state.dirty.values().map(Arc::clone).collect();
        blocks.sort_unstable_by_key(|block| block.bytenr());
        executor.for_each_part(&mut blocks, |part| self.write_sorted(part))?;
        state.dirty.clear();
        for block in blocks {
            self.roots.store.insert(block);
        }
        Ok(())
    }

    /// Writes file data. Where somebody else has written to the filesystem nothing here is worth keeping, and it stops.
    ///
    /// # Errors
    /// The volume's; `Aborted`.
    pub(crate) fn write_data(&self, at: LogicalAddr, buffers: &[&[u8]]) -> Result<()> {
        match self.roots.store.volume().write_vectored(at, buffers) {
            Err(error @ ubtrfs_volume::Error::SuperblockChanged { .. }) => {
                Err(self.abort(error.into()))
            }
            written => Ok(written?),
        }
    }

    fn write_sorted(&self, blocks: &[Arc<Block>]) -> Result<()> {
        let volume = self.roots.store.volume();
        let nodesize = self.roots.store.geometry().nodesize_bytes as u64;
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let start = first.bytenr();
            let chunk_end = volume.chunk_at(start).map_or(LogicalAddr(u64::MAX), |c| c.end());
            let count = rest
                .iter()
                .zip(0..)
                .take(RUN_BLOCKS_MAX)
                .take_while(|(block, at)| {
                    let expected = start.0 + at * nodesize;
                    block.bytenr().0 == expected && expected < chunk_end.0
                })
                .count();
            let (run, others) = rest.split_at(count);
            let bytes: Vec<&[u8]> = run.iter().map(|block| block.as_bytes()).collect();
            volume.write_vectored(start, &bytes)?;
            self.roots.store.note_written(count);
            rest = others;
        }
        Ok(())
    }

    /// Moves the dirty blocks, which are durable now, to the clean ones.
    pub(super) fn retire_blocks(&self) {
        for tree in self.all_trees() {
            let mut state = tree.write();
            for (_, block) in std::mem::take(&mut state.dirty) {
                self.roots.store.insert(block);
            }
            state.fingers = Default::default();
        }
    }
}
