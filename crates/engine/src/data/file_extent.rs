//! From a file offset to what lies there: extents in order, the holes between them included.
//!
//! A hole is explicit (a file extent at address 0) or, with the feature NO_HOLES, just missing;
//! both are told alike, whatever the feature bit says. Extents that overlap, or whose numbers do
//! not fit together, are damage.

use ubtrfs_ondisk::file_extent::{Compression, FileExtent, FileExtentHeader, RegularExtent};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Corruption, FileOffset, InodeNo, Key, KeyType, LogicalAddr, Reason, RootId};
use ubtrfs_rt::Arc;

use super::compression::EXTENT_BYTES_MAX;
use crate::btree::{Cursor, Path, Readahead, Tree};
use crate::error::Result;

/// What a range of a file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum MappingKind {
    /// Nothing: reads as zeros.
    Hole,
    /// Data in the tree, beside the inode.
    Inline,
    /// Data in an extent.
    Data,
    /// Space in an extent, not yet written: reads as zeros.
    Prealloc,
}

/// A range of a file and where its bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Where the range begins in the file.
    pub offset: FileOffset,
    /// Its length; of inline data the length that the item decodes to, else whole sectors.
    pub len_bytes: u64,
    /// What it is.
    pub kind: MappingKind,
    /// The extent that it lies in; 0 for holes and inline data.
    pub disk_bytenr: LogicalAddr,
    /// Bytes of that extent on disk; of inline data, in the item.
    pub disk_num_bytes: u64,
    /// Bytes of the whole extent when decoded.
    pub ram_bytes: u64,
    /// Where the range begins in the decoded extent.
    pub extent_offset: u64,
    /// How the extent is compressed.
    pub compression: Compression,
}

impl Mapping {
    /// Of one that goes beyond `offset`, what lies there and behind.
    fn behind(self, offset: u64) -> Self {
        let cut = offset.saturating_sub(self.offset.0);
        let has_place = self.kind != MappingKind::Hole;
        Self {
            offset: FileOffset(self.offset.0 + cut),
            len_bytes: self.len_bytes.saturating_sub(cut),
            extent_offset: self.extent_offset + if has_place { cut } else { 0 },
            ..self
        }
    }

    fn hole(offset: u64, end: u64) -> Self {
        Self {
            offset: FileOffset(offset),
            len_bytes: end - offset,
            kind: MappingKind::Hole,
            disk_bytenr: LogicalAddr(0),
            disk_num_bytes: 0,
            ram_bytes: 0,
            extent_offset: 0,
            compression: Compression::None,
        }
    }

    /// Where the range ends in the file.
    pub fn end(&self) -> FileOffset {
        FileOffset(self.offset.0.saturating_add(self.len_bytes))
    }
}

/// Whose extents, and how they are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtentsOf {
    pub(crate) root: RootId,
    pub(crate) inode: InodeNo,
    pub(crate) sectorsize_bytes: u64,
    /// End of the last hole: the file's size in whole sectors.
    pub(crate) size_bytes: u64,
}

/// Walks a file's mappings in order.
#[derive(Debug)]
pub(crate) struct ExtentWalk {
    of: ExtentsOf,
    cursor: Cursor,
    /// File offset up to which mappings were told.
    position: u64,
    state: State,
    /// Whether the next mapping begins where the last ended.
    goes_on: bool,
}

/// Where a walk stood.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WalkPlace {
    position: u64,
    goes_on: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The cursor is not in the tree yet.
    Unplaced,
    /// The cursor is at the first item not told yet.
    Ahead,
    /// The cursor is at the item last told.
    Told,
}

impl ExtentWalk {
    /// A walk from the mapping that holds `from`.
    pub(crate) fn new(tree: &Arc<Tree>, of: ExtentsOf, from: FileOffset) -> Self {
        Self {
            of,
            cursor: tree.cursor_with(Readahead::Beside),
            position: from.0,
            state: State::Unplaced,
            goes_on: false,
        }
    }

    /// Goes on from the mapping that holds `from`.
    pub(crate) fn seek(&mut self, from: FileOffset) {
        if from.0 != self.position {
            self.position = from.0;
            (self.state, self.goes_on) = (State::Unplaced, false);
        }
    }

    /// File offset up to which mappings were told.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Generation of the extent last told.
    pub(crate) fn generation(&self) -> Result<u64> {
        let header = self.item()?.map(FileExtentHeader::peek).transpose()?;
        Ok(header.map_or(0, |header| header.generation.get()))
    }

    /// The item of the mapping last told: of inline data, with the data behind its header.
    pub(crate) fn item(&self) -> Result<Option<&[u8]>> {
        Ok(self.cursor.current()?.map(|(_, data)| data))
    }

    /// The blocks to the item of the mapping last told, leaf first, and the state of the tree that they are of.
    pub(crate) fn way(&self) -> (&Path, u64) {
        (self.cursor.path(), self.cursor.version())
    }

    /// Where it stands, to go back there.
    pub(crate) fn place_now(&self) -> WalkPlace {
        WalkPlace { position: self.position, goes_on: self.goes_on }
    }

    /// Goes back: what was told from there on may not have been of one state.
    pub(crate) fn go_back(&mut self, place: WalkPlace) {
        (self.position, self.goes_on) = (place.position, place.goes_on);
        self.state = State::Unplaced;
    }

    /// The next mapping. The first may begin before the offset asked for; all others begin where
    /// the one before ends, inline data being followed by the next sector.
    ///
    /// # Errors
    /// Damage, or a block that cannot be read. The next call is for the same mapping then.
    pub(crate) fn next(&mut self) -> Result<Option<Mapping>> {
        let step = self.step();
        match step {
            Ok(_) => self.goes_on = true,
            // Where the cursor stands is not known: it is no proof of a hole.
            Err(_) => self.state = State::Unplaced,
        }
        step
    }

    fn step(&mut self) -> Result<Option<Mapping>> {
        let mut is_placed = match self.state {
            State::Told => !self.step_cursor()?,
            State::Ahead => !self.cursor.is_current(),
            State::Unplaced => true,
        };
        if is_placed {
            self.place()?;
        }
        self.state = State::Ahead;
        let hole_end = self.hole_end();
        loop {
            let Some(mapping) = self.mapping_here()? else {
                if self.position >= hole_end {
                    return Ok(None);
                }
                let hole = Mapping::hole(self.position, hole_end);
                self.position = hole_end;
                return Ok(Some(hole));
            };
            let (start, end) = (mapping.offset.0, self.covered_end(&mapping));
            if start > self.position {
                let hole = Mapping::hole(self.position, start);
                self.position = start;
                return Ok(Some(hole));
            }
            if end == start || (end <= self.position && is_placed) {
                is_placed = !self.step_cursor()?;
                if is_placed {
                    self.place()?;
                }
                continue;
            }
            if start < self.position && !is_placed {
                return Err(self
                    .corrupt(Reason::Overlap, start)
                    .have(format!("file extent at {start}"))
                    .expect(format!("none before {}", self.position))
                    .into());
            }
            let told = if self.goes_on { mapping.behind(self.position) } else { mapping };
            self.position = end;
            self.state = State::Told;
            return Ok(Some(told));
        }
    }

    /// Goes to the next item. Returns whether the tree stayed as it was: if not, what lies before it may be gone, or have grown over
    /// what is passed.
    fn step_cursor(&mut self) -> Result<bool> {
        let version = self.cursor.version();
        self.cursor.next()?;
        Ok(self.cursor.version() == version)
    }

    fn key(&self, offset: u64) -> Key {
        Key::new(self.of.inode.object_id(), KeyType::EXTENT_DATA, offset)
    }

    /// Goes to the last extent that begins at or before the position, else to the first behind.
    fn place(&mut self) -> Result<()> {
        let key = self.key(self.position);
        loop {
            self.cursor.seek_back(&key)?;
            let is_ours = matches!(self.cursor.current()?, Some((found, _))
                if found.objectid == key.objectid && found.ty == key.ty);
            if is_ours {
                return Ok(());
            }
            let version = self.cursor.version();
            self.cursor.seek(&key)?;
            if self.cursor.version() == version {
                return Ok(());
            }
        }
    }

    fn hole_end(&self) -> u64 {
        let rest = self.of.sectorsize_bytes - 1;
        self.of.size_bytes.checked_add(rest).map_or(u64::MAX, |end| end & !rest)
    }

    /// Inline data has its sector for itself.
    fn covered_end(&self, mapping: &Mapping) -> u64 {
        match mapping.kind {
            MappingKind::Inline => {
                mapping.len_bytes.max(1).next_multiple_of(self.of.sectorsize_bytes)
            }
            _ => mapping.end().0,
        }
    }

    fn mapping_here(&self) -> Result<Option<Mapping>> {
        let Some((key, data)) = self.cursor.current()? else {
            return Ok(None);
        };
        if key.objectid != self.of.inode.object_id() || key.ty != KeyType::EXTENT_DATA {
            return Ok(None);
        }
        let extent = FileExtent::parse(data).map_err(|error| self.place_of(error, key.offset))?;
        let mapping = match extent {
            FileExtent::Inline { ram_bytes, compression, data, .. } => {
                self.inline(key.offset, ram_bytes, compression, data)?
            }
            FileExtent::Regular(extent) if extent.is_hole() => {
                // Old kernels left some of no length, which newer ones pass over.
                let end = match extent.num_bytes {
                    0 => key.offset,
                    _ => self.end_of(key.offset, &extent)?,
                };
                let sectorsize = self.of.sectorsize_bytes;
                if ![key.offset, end].iter().all(|at| at.is_multiple_of(sectorsize)) {
                    return Err(self
                        .corrupt(Reason::BadValue, key.offset)
                        .have(format!("a hole up to {end}"))
                        .expect("whole sectors")
                        .into());
                }
                Mapping::hole(key.offset, end)
            }
            FileExtent::Regular(extent) => self.regular(key.offset, MappingKind::Data, &extent)?,
            FileExtent::Prealloc(extent) => {
                self.regular(key.offset, MappingKind::Prealloc, &extent)?
            }
        };
        Ok(Some(mapping))
    }

    fn inline(
        &self,
        offset: u64,
        ram_bytes: u64,
        compression: Compression,
        data: &[u8],
    ) -> Result<Mapping> {
        // Old kernels left ram_bytes of plain inline data unequal to its length, which counts.
        let len_bytes =
            if compression == Compression::None { data.len() as u64 } else { ram_bytes };
        if offset != 0 || len_bytes > EXTENT_BYTES_MAX as u64 {
            return Err(self
                .corrupt(Reason::BadValue, offset)
                .have(format!("inline file extent of {len_bytes} bytes at {offset}"))
                .expect("at 0, and no longer than a sector")
                .into());
        }
        Ok(Mapping {
            len_bytes,
            kind: MappingKind::Inline,
            disk_num_bytes: data.len() as u64,
            ram_bytes: len_bytes,
            compression,
            ..Mapping::hole(0, 0)
        })
    }

    fn regular(&self, offset: u64, kind: MappingKind, extent: &RegularExtent) -> Result<Mapping> {
        let end = self.end_of(offset, extent)?;
        // A sector is a power of two, and this is on the way of each seek.
        let aligned = (extent.disk_bytenr.0
            | extent.disk_num_bytes
            | extent.offset
            | extent.num_bytes
            | offset)
            & (self.of.sectorsize_bytes - 1)
            == 0;
        let compressed = extent.compression != Compression::None;
        let whole_bytes = if compressed { extent.ram_bytes } else { extent.disk_num_bytes };
        let inside =
            extent.offset.checked_add(extent.num_bytes).is_some_and(|end| end <= whole_bytes);
        let max = EXTENT_BYTES_MAX as u64;
        let bounded =
            !compressed || (extent.ram_bytes <= max && (1..=max).contains(&extent.disk_num_bytes));
        let addressed = extent.disk_bytenr.checked_add(extent.disk_num_bytes).is_some();
        if !(aligned && inside && bounded && addressed) {
            return Err(self
                .corrupt(Reason::BadValue, offset)
                .have(format!("{extent:?}"))
                .expect("whole sectors inside one extent")
                .into());
        }
        Ok(Mapping {
            offset: FileOffset(offset),
            len_bytes: end - offset,
            kind,
            disk_bytenr: extent.disk_bytenr,
            disk_num_bytes: extent.disk_num_bytes,
            ram_bytes: extent.ram_bytes,
            extent_offset: extent.offset,
            compression: extent.compression,
        })
    }

    fn end_of(&self, offset: u64, extent: &RegularExtent) -> Result<u64> {
        let end = offset.checked_add(extent.num_bytes).filter(|end| *end > offset);
        end.ok_or_else(|| {
            self.corrupt(Reason::BadValue, offset)
                .have(format!("file extent of {} bytes", extent.num_bytes))
                .expect("at least one sector, below 2^64")
                .into()
        })
    }

    #[cold]
    fn corrupt(&self, reason: Reason, offset: u64) -> Box<Corruption> {
        self.place_of(Corruption::new(reason), offset)
    }

    #[cold]
    fn place_of(&self, corruption: Box<Corruption>, offset: u64) -> Box<Corruption> {
        let mut corruption = corruption.in_root(self.of.root);
        let place = format!("inode {}, file offset {offset}", self.of.inode);
        corruption.have = match corruption.have.as_str() {
            "" => place,
            have => format!("{have} ({place})"),
        };
        corruption
    }
}
