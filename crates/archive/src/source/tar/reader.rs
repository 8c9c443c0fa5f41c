//! The bytes of an archive, counted.

use std::io::{self, Read};

use super::header::{BLOCK_BYTES, Block};
use crate::error::{ArchiveProblem, BytePath, Error};

/// Why reading stopped, before the member's name is put to it.
#[derive(Debug)]
pub struct Trouble(ArchiveProblem);

impl Trouble {
    /// The error that names the member and place.
    pub fn error(self, member: Option<Vec<u8>>, offset: u64) -> Error {
        Error::Archive { member: member.map(BytePath), offset, problem: self.0 }
    }
}

impl From<ArchiveProblem> for Trouble {
    fn from(problem: ArchiveProblem) -> Self {
        Self(problem)
    }
}

/// The archive, decompressed.
pub struct Input {
    bytes: Box<dyn Read + Send>,
    offset: u64,
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl Input {
    pub fn new(bytes: Box<dyn Read + Send>) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next block; `None` at the end of the archive.
    pub fn block(&mut self) -> Result<Option<Block>, Trouble> {
        let mut block = [0; BLOCK_BYTES];
        let mut have = 0;
        while have < BLOCK_BYTES {
            match self.bytes.read(&mut block[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => return Err(truncated(BLOCK_BYTES - have)),
                Ok(count) => {
                    have += count;
                    self.offset += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ArchiveProblem::Read(error).into()),
            }
        }
        Ok(Some(block))
    }

    /// The next block, which has to be there.
    pub fn whole_block(&mut self) -> Result<Block, Trouble> {
        self.block()?.ok_or_else(|| truncated(BLOCK_BYTES))
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: u64) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        self.append(count, &mut bytes)?;
        Ok(bytes)
    }

    /// Appends the next `count` bytes, which the caller has bounded.
    pub fn append(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<(), Trouble> {
        bytes.reserve_exact(usize::try_from(count).unwrap_or(0));
        let have = self.bytes.by_ref().take(count).read_to_end(bytes);
        let have = have.map_err(ArchiveProblem::Read)? as u64;
        self.offset += have;
        if have < count {
            return Err(ArchiveProblem::Truncated { missing_bytes: count - have }.into());
        }
        Ok(())
    }

    /// Passes over `count` bytes.
    pub fn skip(&mut self, count: u64) -> Result<(), Trouble> {
        let passed = io::copy(&mut self.bytes.by_ref().take(count), &mut io::sink());
        let passed = passed.map_err(ArchiveProblem::Read)?;
        self.offset += passed;
        if passed < count {
            return Err(ArchiveProblem::Truncated { missing_bytes: count - passed }.into());
        }
        Ok(())
    }

    /// Passes over everything that is left.
    pub fn drain(&mut self) -> Result<(), Trouble> {
        io::copy(&mut self.bytes, &mut io::sink()).map_err(ArchiveProblem::Read)?;
        Ok(())
    }
}

fn truncated(missing: usize) -> Trouble {
    ArchiveProblem::Truncated { missing_bytes: missing as u64 }.into()
}
