//! The maps of sparse members: GNU's old one and those of extended headers, 0.0, 0.1 and 1.0.
//!
//! A map lists the ranges of a file that the archive holds, one after another.

use super::header::{Block, decimal, number};
use super::pax::Records;
use crate::entry::Segment;
use crate::error::ArchiveProblem;

/// More ranges than this are refused: a map is kept in memory.
const SEGMENTS_MAX: usize = 4 << 20;

/// Bytes of an entry of GNU's old map: two numbers.
const OLD_ENTRY_BYTES: usize = 24;

/// A map that is being read.
#[derive(Debug, Default)]
pub struct Map(Vec<Segment>);

impl Map {
    /// Adds a range.
    ///
    /// # Errors
    /// It does not lie behind the last one.
    pub fn push(&mut self, offset: u64, len_bytes: u64) -> Result<(), ArchiveProblem> {
        let bad = |why| ArchiveProblem::BadSparse { why };
        let end = offset.checked_add(len_bytes).ok_or(bad("a range is too long"))?;
        if self.0.len() >= SEGMENTS_MAX {
            return Err(bad("it has too many ranges"));
        }
        if i64::try_from(end).is_err() {
            return Err(bad("a range lies beyond the longest possible file"));
        }
        if self.0.last().is_some_and(|last| last.end() > offset) {
            return Err(bad("its ranges overlap or are out of order"));
        }
        self.0.push(Segment { offset, len_bytes });
        Ok(())
    }

    /// The ranges, once they are known to match the member.
    ///
    /// # Errors
    /// They pass the file's end or differ from what the archive holds.
    pub fn finish(
        mut self,
        size_bytes: u64,
        stored_bytes: u64,
    ) -> Result<Vec<Segment>, ArchiveProblem> {
        let bad = |why| ArchiveProblem::BadSparse { why };
        if self.0.last().is_some_and(|last| last.end() > size_bytes) {
            return Err(bad("a range passes the end of the file"));
        }
        let sum: u64 = self.0.iter().map(|segment| segment.len_bytes).sum();
        if sum != stored_bytes {
            return Err(bad("its ranges differ from the length of the content"));
        }
        self.0.retain(|segment| segment.len_bytes > 0);
        Ok(self.0)
    }

    /// Adds the entries of GNU's old map that a header or extension block holds. Returns whether
    /// the map may go on.
    ///
    /// # Errors
    /// A number or range is wrong.
    pub fn push_old(&mut self, entries: &[u8]) -> Result<(), ArchiveProblem> {
        for entry in entries.chunks_exact(OLD_ENTRY_BYTES) {
            let (offset, len) = entry.split_at(OLD_ENTRY_BYTES / 2);
            if len[0] == 0 && offset[0] == 0 {
                break;
            }
            let field = "sparse map";
            let convert = |field_bytes| {
                u64::try_from(number(field_bytes, field)?)
                    .map_err(|_| ArchiveProblem::BadNumber { field })
            };
            self.push(convert(offset)?, convert(len)?)?;
        }
        Ok(())
    }

    /// An extension block of GNU's old map; whether another follows.
    ///
    /// # Errors
    /// A number or range is wrong.
    pub fn push_extension(&mut self, block: &Block) -> Result<bool, ArchiveProblem> {
        const ENTRIES: usize = 21;
        self.push_old(&block[..ENTRIES * OLD_ENTRY_BYTES])?;
        Ok(block[ENTRIES * OLD_ENTRY_BYTES] != 0)
    }
}

/// What an extended header says of a sparse member.
#[derive(Debug)]
pub enum PaxSparse {
    /// Versions 0.0 and 0.1: the map is in the header.
    InHeader {
        /// The map.
        map: Map,
        /// Length of the file.
        size_bytes: u64,
    },
    /// Version 1.0: the map comes before the content.
    BeforeContent {
        /// Length of the file.
        size_bytes: u64,
    },
}

impl PaxSparse {
    /// Looks for one.
    ///
    /// # Errors
    /// A number or the map is wrong, or the version unknown.
    pub fn find(records: &Records) -> Result<Option<Self>, ArchiveProblem> {
        const FIELD: &str = "sparse map";
        let size_of = |key: &[u8]| {
            let value = records
                .value(key)
                .ok_or(ArchiveProblem::BadSparse { why: "the length of the file is missing" })?;
            decimal(value, "sparse file's length")
        };
        match (records.value(b"GNU.sparse.major"), records.value(b"GNU.sparse.minor")) {
            (None, _) | (Some(b"0"), _) => {}
            (Some(b"1"), Some(b"0")) => {
                let size_bytes = size_of(b"GNU.sparse.realsize")?;
                return Ok(Some(Self::BeforeContent { size_bytes }));
            }
            _ => {
                return Err(ArchiveProblem::Unsupported {
                    what: "sparse files of versions above 1.0",
                });
            }
        }
        let mut map = Map::default();
        if let Some(list) = records.value(b"GNU.sparse.map") {
            let mut numbers = list.split(|&b| b == b',');
            while let Some(offset) = numbers.next() {
                let len = numbers
                    .next()
                    .ok_or(ArchiveProblem::BadSparse { why: "it has an odd number of entries" })?;
                map.push(decimal(offset, FIELD)?, decimal(len, FIELD)?)?;
            }
        } else if records.value(b"GNU.sparse.numblocks").is_some() {
            let mut offset = None;
            for (key, value) in records.iter() {
                match (key, offset) {
                    (b"GNU.sparse.offset", _) => offset = Some(decimal(value, FIELD)?),
                    (b"GNU.sparse.numbytes", Some(at)) => {
                        map.push(at, decimal(value, FIELD)?)?;
                        offset = None;
                    }
                    _ => {}
                }
            }
        } else {
            return Ok(None);
        }
        let size_bytes = size_of(b"GNU.sparse.size")?;
        Ok(Some(Self::InHeader { map, size_bytes }))
    }
}

/// The map of version 1.0: decimal lines before the content, the first their number of pairs.
#[derive(Debug, Default)]
pub struct MapReader {
    map: Map,
    line: Vec<u8>,
    pairs_left: Option<u64>,
    offset: Option<u64>,
}

impl MapReader {
    /// Reads a block; the map, if it ends in it.
    ///
    /// # Errors
    /// A number or range is wrong.
    pub fn push(&mut self, block: &Block) -> Result<Option<Map>, ArchiveProblem> {
        const FIELD: &str = "sparse map";
        const LINE_BYTES_MAX: usize = 20;
        for &byte in block {
            if byte != b'\n' {
                self.line.push(byte);
                if self.line.len() > LINE_BYTES_MAX {
                    return Err(ArchiveProblem::BadNumber { field: FIELD });
                }
                continue;
            }
            let value = decimal(&self.line, FIELD)?;
            self.line.clear();
            match (self.pairs_left, self.offset) {
                (None, _) => self.pairs_left = Some(value),
                (Some(_), None) => self.offset = Some(value),
                (Some(left), Some(offset)) => {
                    self.map.push(offset, value)?;
                    self.offset = None;
                    self.pairs_left = Some(left - 1);
                }
            }
            if self.pairs_left == Some(0) {
                return Ok(Some(std::mem::take(&mut self.map)));
            }
        }
        Ok(None)
    }
}
