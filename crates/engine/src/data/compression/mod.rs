//! The three compressions of the format: bytes to bytes, no I/O and no locks.
//!
//! Everything here is bounded by the caller's buffers: a decoder writes into the slice it is given
//! and nothing else, an encoder stops at its limit. Hostile input gives an error.
//!
//! What btrfs asks beyond the codecs themselves:
//!
//! 1. A compressed extent decodes to at most [`EXTENT_BYTES_MAX`]; it is padded with zeros to whole
//!    sectors, so a decoder must know by itself where its input ends.
//! 2. An extent that decodes to less than its `ram_bytes` has zeros behind, one that decodes to
//!    more is cut off: encoded writes and receive may leave both.
//! 3. LZO has a framing of its own, see [`mod@lzo_frame`].

pub mod heuristic;
pub mod lzo;
pub mod lzo_frame;
mod zlib;
mod zstandard;

use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::{Corruption, Reason, Result};
use ubtrfs_rt::{PerThread, with_per_thread};

/// Most bytes that a compressed extent decodes to, and most that it takes: 128 KiB.
pub const EXTENT_BYTES_MAX: usize = 128 << 10;

/// An algorithm and how hard it works.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Method {
    /// The algorithm; `None` here means that data is stored plain.
    pub compression: Compression,
    /// zlib 1 to 9, zstd −15 to 15; without meaning for LZO.
    pub level: i32,
}

impl Method {
    /// `compression` at the level that Linux takes when none is named: 3 for zlib and zstd.
    pub fn with_default_level(compression: Compression) -> Self {
        let level = match compression {
            Compression::Zlib | Compression::Zstd => 3,
            Compression::None | Compression::Lzo => 0,
        };
        Self { compression, level }
    }

    /// `compression` at `level`, moved into the range that the algorithm has. Level 0 is the
    /// default, as in the mount option `compress=`.
    pub fn new(compression: Compression, level: i32) -> Self {
        if level == 0 {
            return Self::with_default_level(compression);
        }
        let level = match compression {
            Compression::Zlib => level.clamp(1, 9),
            Compression::Zstd => level.clamp(-15, 15),
            Compression::None | Compression::Lzo => 0,
        };
        Self { compression, level }
    }
}

/// Contexts of the codecs, kept from one extent to the next since making them costs more than
/// using them.
#[derive(Default)]
struct Workspace {
    zlib: zlib::Workspace,
    lzo: lzo::Dictionary,
    zstd: zstandard::Workspace,
}

thread_local! {
    static WORKSPACE: PerThread<Workspace> = const { PerThread::new(None) };
}

/// Decodes `input`, a compressed extent or inline extent, into `out`, whose length is the extent's
/// `ram_bytes`. What is missing at the end of `out` becomes zeros.
///
/// # Errors
/// `BadCompression` when `input` is not of that algorithm.
pub fn decompress(
    compression: Compression,
    input: &[u8],
    out: &mut [u8],
    sectorsize_bytes: usize,
) -> Result<()> {
    let written = with_per_thread(&WORKSPACE, |workspace| match compression {
        Compression::None => {
            let len = input.len().min(out.len());
            out[..len].copy_from_slice(&input[..len]);
            Ok(len)
        }
        Compression::Zlib => workspace.zlib.decompress(input, out),
        Compression::Lzo => lzo_frame::decompress(input, out, sectorsize_bytes),
        Compression::Zstd => workspace.zstd.decompress(input, out),
    })?;
    out[written..].fill(0);
    Ok(())
}

/// Encodes `input` and appends the result to `out`, unless it would take more than `limit_bytes`:
/// then `out` is as it was and the answer is `false`.
pub fn compress(
    method: Method,
    input: &[u8],
    out: &mut Vec<u8>,
    limit_bytes: usize,
    sectorsize_bytes: usize,
) -> bool {
    let start = out.len();
    let fits = with_per_thread(&WORKSPACE, |workspace| match method.compression {
        Compression::None => false,
        Compression::Zlib => workspace.zlib.compress(method.level, input, out, limit_bytes),
        Compression::Lzo => {
            lzo_frame::compress(&mut workspace.lzo, input, out, limit_bytes, sectorsize_bytes)
        }
        Compression::Zstd => {
            workspace.zstd.compress(method.level, input, out, limit_bytes, sectorsize_bytes)
        }
    });
    if !fits {
        out.truncate(start);
    }
    fits
}

/// Encodes `input` for an extent of its own: appends whole sectors, the last filled with zeros, and
/// says whether at least one sector was saved. If not, `out` is as it was.
pub fn compress_extent(
    method: Method,
    input: &[u8],
    out: &mut Vec<u8>,
    sectorsize_bytes: usize,
) -> bool {
    let Some(limit_bytes) =
        input.len().checked_next_multiple_of(sectorsize_bytes).map(|len| len - sectorsize_bytes)
    else {
        return false;
    };
    let start = out.len();
    if limit_bytes == 0 || !compress(method, input, out, limit_bytes, sectorsize_bytes) {
        return false;
    }
    let len = (out.len() - start).next_multiple_of(sectorsize_bytes);
    out.resize(start + len, 0);
    true
}

#[cold]
fn bad(what: &str) -> Box<Corruption> {
    Corruption::new(Reason::BadCompression).have(what)
}

#[cfg(test)]
mod tests;
