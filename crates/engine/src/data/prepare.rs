//! Turning bytes into what goes to the medium: compressed, padded, checksummed. Takes no lock and
//! touches no tree, so that many threads can do it ahead of the one that places the result.

use ubtrfs_ondisk::CsumType;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_rt::{PerThread, with_per_thread};

use super::compression::{self, EXTENT_BYTES_MAX, Method, heuristic};

/// Longest data that is kept inline unless told otherwise, as in Linux.
pub const MAX_INLINE_BYTES_DEFAULT: usize = 2048;

/// How data is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteOptions {
    /// The filesystem's checksum; `None` writes data without.
    pub csum: Option<CsumType>,
    /// How to compress, if at all.
    pub compression: Option<Method>,
    /// Compress also what looks as if it would not shrink.
    pub force_compression: bool,
    /// Bytes of a sector.
    pub sectorsize_bytes: usize,
    /// Longest file that is kept in the tree instead of in an extent; 0 for none.
    pub max_inline_bytes: usize,
}

/// A piece of a file, ready to be placed: made on any thread, appended by one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PreparedData {
    len_bytes: usize,
    pub(crate) options: WriteOptions,
    form: Form,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Form {
    /// Short enough to be kept inline, if it turns out to be the whole file.
    Small {
        bytes: Vec<u8>,
        /// The same compressed, where that is shorter.
        packed: Option<(Compression, Vec<u8>)>,
    },
    Extents(Extents),
}

/// What goes to the medium: whole sectors, and how they are cut into extents.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Extents {
    pub(crate) disk_bytes: Vec<u8>,
    /// In the order of `disk_bytes`, which they fill.
    pub(crate) pieces: Vec<Piece>,
    /// A checksum for each sector of `disk_bytes`, or empty.
    pub(crate) csums: Vec<u8>,
}

/// Bytes that become one extent, or, plain, part of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    /// Bytes of the file, whole sectors.
    pub(crate) ram_bytes: usize,
    /// Bytes on the medium, whole sectors.
    pub(crate) disk_bytes: usize,
    pub(crate) compression: Compression,
}

impl PreparedData {
    /// Prepares `bytes`, a piece of a file. All but a file's last piece must be whole sectors;
    /// for large extents on the medium, pieces of 1 MiB or more serve best.
    pub fn new(bytes: Vec<u8>, options: &WriteOptions) -> Self {
        let options = *options;
        let len_bytes = bytes.len();
        let form = match small(bytes, &options) {
            Ok(small) => small,
            Err(bytes) => Form::Extents(extents(bytes, &options)),
        };
        Self { len_bytes, options, form }
    }

    /// Bytes of the file that it holds.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// The inline form, if it has one; compressed only where the file may be.
    pub(crate) fn inline(&self, may_compress: bool) -> Option<(Compression, &[u8])> {
        let Form::Small { bytes, packed } = &self.form else { return None };
        match packed {
            Some((compression, packed)) if may_compress => Some((*compression, packed)),
            _ => (!bytes.is_empty() && bytes.len() <= plain_inline_bytes_max(&self.options))
                .then_some((Compression::None, bytes)),
        }
    }

    /// Most extents that it becomes.
    pub(crate) fn extent_count_max(&self) -> u64 {
        match &self.form {
            Form::Small { .. } => 1,
            Form::Extents(extents) => extents.pieces.len() as u64 + 1,
        }
    }

    /// The form for extents of their own.
    pub(crate) fn into_extents(self) -> Extents {
        match self.form {
            Form::Extents(extents) => extents,
            Form::Small { bytes, .. } => extents(bytes, &self.options),
        }
    }
}

/// The inline form, if the data is short enough for one; else gives the bytes back. Plain inline
/// data must be shorter than a sector; compressed, it may stand for a whole one.
fn small(bytes: Vec<u8>, options: &WriteOptions) -> Result<Form, Vec<u8>> {
    let max = plain_inline_bytes_max(options);
    if bytes.is_empty() {
        return Ok(Form::Small { bytes, packed: None });
    }
    let mut packed = None;
    if let Some(method) = options.compression
        && bytes.len() <= options.sectorsize_bytes
    {
        let limit = max.min(bytes.len() - 1);
        let mut out = Vec::new();
        if compression::compress(method, &bytes, &mut out, limit, options.sectorsize_bytes) {
            packed = Some((method.compression, out));
        }
    }
    if packed.is_none() && bytes.len() > max {
        return Err(bytes);
    }
    Ok(Form::Small { bytes, packed })
}

fn plain_inline_bytes_max(options: &WriteOptions) -> usize {
    options.max_inline_bytes.min(options.sectorsize_bytes - 1)
}

impl Extents {
    /// Of bytes that lie in several places, one behind the other. The thread keeps the memory in which they are put together for the pieces
    /// to come: fresh for each, its faults would cost more than the copy.
    pub(crate) fn gathered(buffers: &[&[u8]], options: &WriteOptions) -> Self {
        thread_local! {
            static GATHERED: PerThread<Vec<u8>> = const { PerThread::new(None) };
        }
        with_per_thread(&GATHERED, |bytes| {
            bytes.clear();
            buffers.iter().for_each(|buffer| bytes.extend_from_slice(buffer));
            pad(bytes, options);
            let extents =
                compressed(bytes, options).unwrap_or_else(|| plain(std::mem::take(bytes)));
            extents.with_csums(options)
        })
    }

    /// Nothing of it shrank.
    pub(crate) fn is_plain(&self) -> bool {
        self.pieces.iter().all(|piece| piece.compression == Compression::None)
    }

    fn with_csums(mut self, options: &WriteOptions) -> Self {
        if let Some(csum) = options.csum {
            let sector = options.sectorsize_bytes;
            self.csums = vec![0; self.disk_bytes.len() / sector * csum.len_bytes()];
            csum.compute_sectors(&self.disk_bytes, sector, &mut self.csums);
        }
        self
    }

    /// The same without compression and checksums.
    pub(crate) fn into_plain(self, sectorsize_bytes: u64) -> Self {
        let sectorsize = usize::try_from(sectorsize_bytes).expect("a sector is small");
        let mut bytes = Vec::new();
        let mut from = 0;
        for piece in &self.pieces {
            let start = bytes.len();
            let disk = &self.disk_bytes[from..from + piece.disk_bytes];
            bytes.resize(start + piece.ram_bytes, 0);
            compression::decompress(piece.compression, disk, &mut bytes[start..], sectorsize)
                .expect("it was encoded here");
            from += piece.disk_bytes;
        }
        plain(bytes)
    }
}

fn extents(mut bytes: Vec<u8>, options: &WriteOptions) -> Extents {
    pad(&mut bytes, options);
    compressed(&bytes, options).unwrap_or_else(|| plain(bytes)).with_csums(options)
}

/// Fills the last sector with zeros.
fn pad(bytes: &mut Vec<u8>, options: &WriteOptions) {
    bytes.resize(bytes.len().next_multiple_of(options.sectorsize_bytes), 0);
}

fn plain(bytes: Vec<u8>) -> Extents {
    let piece =
        Piece { ram_bytes: bytes.len(), disk_bytes: bytes.len(), compression: Compression::None };
    let pieces = if bytes.is_empty() { Vec::new() } else { vec![piece] };
    Extents { disk_bytes: bytes, pieces, csums: Vec::new() }
}

/// `None` where nothing is to be compressed, or nothing shrank.
fn compressed(bytes: &[u8], options: &WriteOptions) -> Option<Extents> {
    let method = options.compression.filter(|method| method.compression != Compression::None)?;
    let mut out = Vec::new();
    let mut pieces: Vec<Piece> = Vec::new();
    for ram in bytes.chunks(EXTENT_BYTES_MAX) {
        let start = out.len();
        let worth = options.force_compression || heuristic::is_worth_compressing(ram);
        let shrank =
            worth && compression::compress_extent(method, ram, &mut out, options.sectorsize_bytes);
        if shrank {
            pieces.push(Piece {
                ram_bytes: ram.len(),
                disk_bytes: out.len() - start,
                compression: method.compression,
            });
            continue;
        }
        out.extend_from_slice(ram);
        match pieces.last_mut() {
            Some(last) if last.compression == Compression::None => {
                last.ram_bytes += ram.len();
                last.disk_bytes += ram.len();
            }
            _ => pieces.push(Piece {
                ram_bytes: ram.len(),
                disk_bytes: ram.len(),
                compression: Compression::None,
            }),
        }
    }
    let has_shrunk = pieces.iter().any(|piece| piece.compression != Compression::None);
    has_shrunk.then(|| Extents { disk_bytes: out, pieces, csums: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(compression: Option<Compression>) -> WriteOptions {
        WriteOptions {
            csum: Some(CsumType::Crc32c),
            compression: compression.map(Method::with_default_level),
            force_compression: false,
            sectorsize_bytes: 4096,
            max_inline_bytes: MAX_INLINE_BYTES_DEFAULT,
        }
    }

    fn noise(len: usize) -> Vec<u8> {
        let hash = |index: u32| CsumType::Sha256.compute(&index.to_le_bytes());
        (0..).flat_map(hash).take(len).collect()
    }

    fn pieces_fill(extents: &Extents, ram_bytes: usize) {
        let disk: usize = extents.pieces.iter().map(|piece| piece.disk_bytes).sum();
        let ram: usize = extents.pieces.iter().map(|piece| piece.ram_bytes).sum();
        assert_eq!(disk, extents.disk_bytes.len());
        assert_eq!(ram, ram_bytes.next_multiple_of(4096));
        assert_eq!(extents.csums.len(), disk / 4096 * 4);
    }

    #[test]
    fn new_short_plain_data_is_small_up_to_the_limit() {
        for (len, is_small) in [(0, true), (1, true), (2048, true), (2049, false)] {
            let data = PreparedData::new(vec![7; len], &options(None));
            assert_eq!(matches!(data.form, Form::Small { .. }), is_small, "{len}");
            pieces_fill(&data.into_extents(), len);
        }
    }

    #[test]
    fn new_compressible_sector_is_small_and_one_byte_more_is_not() {
        let options = options(Some(Compression::Zstd));
        let data = PreparedData::new(vec![7; 4096], &options);
        assert!(matches!(data.form, Form::Small { packed: Some(_), .. }));
        let data = PreparedData::new(vec![7; 4097], &options);
        assert!(matches!(data.form, Form::Extents(_)));
        let data = PreparedData::new(noise(4096), &options);
        assert!(matches!(data.form, Form::Extents(_)));
    }

    #[test]
    fn new_mixed_data_keeps_each_piece_in_its_better_form() {
        for compression in [Compression::Zlib, Compression::Lzo, Compression::Zstd] {
            let mut bytes = noise(256 << 10);
            bytes.extend(vec![1; 200 << 10]);
            bytes.extend(noise(100_000));
            let len = bytes.len();
            let data = PreparedData::new(bytes, &options(Some(compression)));
            let extents = data.into_extents();
            pieces_fill(&extents, len);
            assert!(extents.disk_bytes.len() < len);
            assert_eq!(extents.pieces[0].compression, Compression::None);
            assert_eq!(extents.pieces[0].ram_bytes, 256 << 10);
            assert_eq!(extents.pieces[1].compression, compression);
            assert!(extents.pieces.iter().all(|piece| {
                piece.compression == Compression::None || piece.ram_bytes <= EXTENT_BYTES_MAX
            }));
        }
    }
}
