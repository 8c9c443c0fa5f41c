//! A filesystem of one file, as small as can be, for calls beside each other: it writes each block to a new place, and a place that is given
//! up reads as garbage from then on.

use ubtrfs_rt::{Arc, Mutex};

use super::range;
use crate::address_space::{AddressSpace, OpenFile, SeenEnd};
use crate::error::Error;
use crate::mapping::{
    Beyond, Detail, FileSystem, Mapping, MappingFlags, MappingKind, MappingSequence, Purpose,
    ReadPiece, RunFailure, WritebackRun,
};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{CacheOptions, PageCache};

pub(super) const BLOCK: u64 = 512;
/// Of a file; what is asked for beyond is a hole.
pub(super) const BLOCKS_MAX: u64 = 8;
const fn blocks_from(first: u64, end: u64) -> FileRange {
    FileRange { start: FileOffset::new(first * BLOCK), end: FileOffset::new(end * BLOCK) }
}

/// What just this range is asked for fails.
pub(super) const DIRECT_REFUSED: FileRange = blocks_from(0, 2);
pub(super) const PUNCH_REFUSED: FileRange = blocks_from(1, 2);
/// Of this, one block is written.
pub(super) const DIRECT_ENDS_EARLY: FileRange = blocks_from(2, 4);
/// That a file ends there cannot be recorded.
pub(super) const SIZE_REFUSED: u64 = 333;
const BLOCK_LEN: usize = BLOCK as usize;
const GARBAGE: u8 = 0xDB;

/// What a file has in one block.
#[derive(Clone, Copy)]
struct Place {
    /// Which of the blocks that were ever written.
    number: usize,
    is_unwritten: bool,
}

#[derive(Default)]
struct State {
    places: [Option<Place>; BLOCKS_MAX as usize],
    written: Vec<[u8; BLOCK_LEN]>,
    size: u64,
    reserved_blocks: u64,
}

#[derive(Default)]
pub(super) struct Moving {
    state: Mutex<State>,
    /// Data is written over data, and mappings stay.
    is_in_place: bool,
}

pub(super) type Space = AddressSpace<Moving>;

fn blocks(range: FileRange) -> std::ops::Range<usize> {
    let number = |bytes: u64| usize::try_from((bytes / BLOCK).min(BLOCKS_MAX)).unwrap();
    number(range.start.bytes())..number(range.end.round_up(BLOCK).bytes())
}

impl State {
    fn place(&mut self, bytes: [u8; BLOCK_LEN], is_unwritten: bool) -> Place {
        self.written.push(bytes);
        Place { number: self.written.len() - 1, is_unwritten }
    }

    fn drop_place(&mut self, block: usize) {
        if let Some(old) = self.places[block].take() {
            self.written[old.number].fill(GARBAGE);
        }
    }

    fn drop_range(&mut self, sequence: &MappingSequence, range: FileRange) {
        blocks(range).for_each(|block| self.drop_place(block));
        sequence.changed();
    }

    fn write(&mut self, sequence: &MappingSequence, run: &WritebackRun<'_>, is_in_place: bool) {
        let bytes = run.buffers.concat();
        let in_file = run.size.bytes().saturating_sub(run.range.start.bytes());
        let is_zeros = bytes.iter().skip(usize::try_from(in_file).unwrap()).all(|byte| *byte == 0);
        assert!(is_zeros, "bytes behind the end are written");
        let mut is_mapped_anew = false;
        for (block, bytes) in blocks(run.range).zip(bytes.chunks(BLOCK_LEN)) {
            if let Some(place) = self.places[block]
                && is_in_place
                && !place.is_unwritten
            {
                self.written[place.number].copy_from_slice(bytes);
                continue;
            }
            is_mapped_anew = true;
            let new = self.place(bytes.try_into().unwrap(), false);
            self.drop_place(block);
            self.places[block] = Some(new);
        }
        self.size = self.size.max(run.size.bytes().min(run.range.end.bytes()));
        if is_mapped_anew {
            sequence.changed();
        }
    }
}

impl FileSystem for Moving {
    type Inode = MappingSequence;
    type Error = Error;

    fn block_bytes(&self) -> u32 {
        BLOCK as u32
    }

    fn sequence<'a>(&self, sequence: &'a MappingSequence) -> &'a MappingSequence {
        sequence
    }

    fn map(
        &self,
        sequence: &MappingSequence,
        asked: FileRange,
        purpose: Purpose<'_, '_>,
    ) -> Result<Mapping, Error> {
        let mut state = self.state.lock();
        let block = asked.start.bytes() / BLOCK;
        let place = state.places.get(block as usize).copied().flatten();
        let kind = match place {
            None => MappingKind::Hole,
            Some(Place { is_unwritten: true, .. }) => MappingKind::Unwritten,
            Some(_) => MappingKind::Mapped,
        };
        let mut mapped = range(block * BLOCK, (block + 1) * BLOCK);
        if block >= BLOCKS_MAX {
            mapped.end = asked.end.round_up(BLOCK);
        }
        let is_write = matches!(purpose, Purpose::Write);
        match purpose {
            Purpose::Write => state.reserved_blocks += mapped.len_bytes() / BLOCK,
            Purpose::Zero(batch) if kind.is_zeros() => mapped = batch.fill(mapped),
            _ => {}
        }
        let mapping = Mapping {
            range: mapped,
            kind,
            flags: MappingFlags::default(),
            cookie: sequence.cookie(),
            address: None,
            token: place.map_or(0, |place| place.number as u64),
        };
        Ok(if is_write { mapping.reserved() } else { mapping })
    }

    /// One, of which nothing is shared.
    fn map_ahead(
        &self,
        sequence: &MappingSequence,
        asked: FileRange,
        _detail: Detail,
        _count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<(), Error> {
        mappings.push(self.map(sequence, asked, Purpose::Read)?);
        Ok(())
    }

    fn read(&self, _: &MappingSequence, pieces: &mut [ReadPiece<'_>]) -> Result<(), Error> {
        let state = self.state.lock();
        for piece in pieces {
            let mut at =
                usize::try_from(piece.start.bytes_since(piece.mapping.range.start)).unwrap();
            for buffer in &mut piece.buffers {
                let block = &state.written[usize::try_from(piece.mapping.token).unwrap()];
                buffer.copy_from_slice(&block[at..at + buffer.len()]);
                at += buffer.len();
            }
        }
        Ok(())
    }

    fn write_back(
        &self,
        sequence: &MappingSequence,
        runs: &[WritebackRun<'_>],
    ) -> Result<(), RunFailure<Error>> {
        for run in runs {
            self.state.lock().write(sequence, run, self.is_in_place);
            self.unreserve(sequence, run.range.len_bytes());
        }
        Ok(())
    }

    fn write_direct(
        &self,
        sequence: &MappingSequence,
        run: &WritebackRun<'_>,
    ) -> Result<u64, Error> {
        if run.range == DIRECT_REFUSED {
            return Err(Error::NoData { offset: run.range.start });
        }
        let bytes = run.buffers.concat();
        let is_cut = run.range == DIRECT_ENDS_EARLY;
        let len = if is_cut { BLOCK_LEN } else { bytes.len() };
        let range = FileRange::with_len(run.range.start, len as u64);
        let front = WritebackRun { range, buffers: &[&bytes[..len]], size: run.size };
        self.state.lock().write(sequence, &front, self.is_in_place);
        Ok(len as u64)
    }

    fn unreserve(&self, _: &MappingSequence, len_bytes: u64) {
        self.state.lock().reserved_blocks -= len_bytes / BLOCK;
    }

    fn stored_size(&self, _: &MappingSequence) -> Result<Option<FileOffset>, Error> {
        Ok(Some(FileOffset::new(self.state.lock().size)))
    }

    fn set_size(
        &self,
        sequence: &MappingSequence,
        size: FileOffset,
        beyond: Beyond,
    ) -> Result<(), Error> {
        if size.bytes() == SIZE_REFUSED {
            return Err(Error::NoData { offset: size });
        }
        let mut state = self.state.lock();
        if beyond == Beyond::Dropped {
            state.drop_range(sequence, FileRange::from(size.round_up(BLOCK)));
        }
        state.size = size.bytes();
        Ok(())
    }

    fn punch(&self, sequence: &MappingSequence, range: FileRange) -> Result<(), Error> {
        if range == PUNCH_REFUSED {
            return Err(Error::NoData { offset: range.start });
        }
        self.state.lock().drop_range(sequence, range);
        Ok(())
    }

    fn allocate(&self, sequence: &MappingSequence, range: FileRange) -> Result<(), Error> {
        let mut state = self.state.lock();
        for block in blocks(range) {
            if state.places[block].is_none() {
                let place = state.place([GARBAGE; BLOCK_LEN], true);
                state.places[block] = Some(place);
            }
        }
        sequence.changed();
        Ok(())
    }

    fn check_space(&self, _: &MappingSequence, _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn sync(&self, _: &MappingSequence, _: SeenEnd) -> Result<(), Error> {
        Ok(())
    }
}

/// A file that is in memory only.
pub(super) fn new_file(options: CacheOptions, is_in_place: bool, bytes: &[u8]) -> Arc<Space> {
    let space = AddressSpace::new(
        Arc::new(Moving { is_in_place, ..Moving::default() }),
        MappingSequence::new(),
        FileOffset::ZERO,
        PageCache::new(options),
    );
    space.open().write(FileOffset::ZERO, bytes).unwrap();
    space
}

/// Memory keeps nothing that is not dirty.
pub(super) fn forget(space: &Space) {
    crate::page_cache::CachedFile::reclaim(space, u64::MAX);
}

/// Bytes that somebody gives the file by the filesystem alone.
pub(super) fn clone_into(space: &Space, to: FileRange, byte: u8) {
    let change = || {
        let bytes = vec![byte; usize::try_from(to.len_bytes()).unwrap()];
        let run = WritebackRun { range: to, buffers: &[&bytes], size: to.end };
        space.filesystem.state.lock().write(&space.inode, &run, false);
        Ok(Some(to.end))
    };
    assert_eq!(space.replace_flushed_range(to, None, to.end, change), Ok(true));
}

pub(super) fn contents(file: &OpenFile<Moving>) -> Vec<u8> {
    let mut bytes = vec![9; (BLOCK * BLOCKS_MAX) as usize];
    let len = file.read_whole(FileOffset::ZERO, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

/// What the medium has of a file of which nothing is dirty, and for which nothing may be reserved any more.
pub(super) fn stored(space: &Space) -> Vec<u8> {
    let state = space.filesystem.state.lock();
    assert_eq!(state.reserved_blocks, 0);
    let bytes_of = |place: &Option<Place>| match place {
        Some(place) if !place.is_unwritten => state.written[place.number],
        _ => [0; BLOCK_LEN],
    };
    let mut bytes = state.places.iter().map(bytes_of).collect::<Vec<_>>().concat();
    bytes.truncate(usize::try_from(space.size().bytes()).unwrap());
    bytes
}
