//! Reads what an open file has in several places: plain data that lies together on the medium with one request, by the
//! addresses that its mappings say, all else through the file's extents.

use ubtrfs_iomap::{Mapping, MappingKind, ReadPiece};
use ubtrfs_ondisk::{FileOffset, LogicalAddr};

use super::file_io::IoInode;
use crate::data::read::FileReader;
use crate::data::sectors::SectorReader;
use crate::error::Result;
use crate::filesystem::Filesystem;

/// Reads pieces of one file.
struct PieceReader<'a> {
    fs: &'a Filesystem,
    inode: &'a IoInode,
    has_csums: bool,
    /// Made when first needed.
    sectors: Option<SectorReader>,
    file: Option<FileReader>,
}

impl Filesystem {
    /// Fills the pieces' buffers.
    ///
    /// # Errors
    /// As [`Filesystem::read`].
    pub(super) fn read_pieces(&self, inode: &IoInode, pieces: &mut [ReadPiece<'_>]) -> Result<()> {
        let has_csums = self.disk_inode(inode.id)?.has_csums();
        let mut reader = PieceReader { fs: self, inode, has_csums, sectors: None, file: None };
        let mut rest = pieces;
        while !rest.is_empty() {
            let (together, behind) = rest.split_at_mut(count_together(rest));
            reader.read(together)?;
            rest = behind;
        }
        Ok(())
    }
}

/// How many of the first pieces are read together: those that lie one behind the other on the medium, as they are in the file, or those
/// that are each the whole of something encoded.
fn count_together(pieces: &[ReadPiece<'_>]) -> usize {
    let encoded_count = pieces.iter().take_while(|piece| is_whole_encoded(piece)).count();
    if encoded_count > 0 {
        return encoded_count;
    }
    let mut next = pieces.first().and_then(address_of);
    let mut is_next = |piece: &ReadPiece<'_>| {
        let is_next = next.is_some() && address_of(piece) == next;
        next = next.and_then(|at| at.checked_add(len_bytes(piece)));
        is_next
    };
    pieces.iter().take_while(|piece| is_next(piece)).count().max(1)
}

fn is_whole_encoded(piece: &ReadPiece<'_>) -> bool {
    let Mapping { flags, range, .. } = piece.mapping;
    let is_whole = piece.start == range.start && len_bytes(piece) == range.len_bytes();
    flags.is_encoded && is_whole && piece.buffers.len() == 1
}

/// Where plain data lies.
fn address_of(piece: &ReadPiece<'_>) -> Option<u64> {
    let Mapping { kind, flags, address, range, .. } = piece.mapping;
    let is_plain = kind == MappingKind::Mapped && !flags.is_encoded;
    let into = piece.start.bytes_since(range.start);
    address.filter(|_| is_plain)?.checked_add(into)
}

fn len_bytes(piece: &ReadPiece<'_>) -> u64 {
    piece.buffers.iter().map(|buffer| buffer.len() as u64).sum()
}

impl PieceReader<'_> {
    /// Reads pieces that are read together.
    fn read(&mut self, together: &mut [ReadPiece<'_>]) -> Result<()> {
        if let Some(at) = together.first().and_then(address_of) {
            let mut buffers: Vec<&mut [u8]> = together
                .iter_mut()
                .flat_map(|piece| piece.buffers.iter_mut().map(|buffer| &mut **buffer))
                .collect();
            if self.sectors()?.read_scattered(LogicalAddr(at), &mut buffers).is_ok() {
                return Ok(());
            }
            // The file's reader says of what file and where.
        }
        let is_encoded = together.first().is_some_and(is_whole_encoded);
        let file = self.file()?;
        let mut buffers = together.iter_mut().flat_map(|piece| {
            piece.buffers.iter_mut().scan(piece.start.bytes(), |at, buffer| {
                let offset = FileOffset(*at);
                *at += buffer.len() as u64;
                Some((offset, &mut **buffer))
            })
        });
        if is_encoded {
            return file.read_whole_extents(buffers);
        }
        buffers.try_for_each(|(offset, buffer)| file.read_or_zero(offset, buffer))
    }

    fn file(&mut self) -> Result<&mut FileReader> {
        match &mut self.file {
            Some(file) => Ok(file),
            none => {
                let tree = self.fs.tree(self.inode.id.root)?;
                let (source, of) = (self.fs.data_source()?, self.inode.of(self.fs));
                Ok(none.insert(FileReader::new(source, &tree, of, self.has_csums)?))
            }
        }
    }

    fn sectors(&mut self) -> Result<&mut SectorReader> {
        match &mut self.sectors {
            Some(sectors) => Ok(sectors),
            none => Ok(none.insert(SectorReader::new(self.fs.data_source()?, self.has_csums)?)),
        }
    }
}
