//! How btrfs frames LZO blocks.
//!
//! An extent begins with its length in 32 bits, this field and all padding inside included. Then
//! come segments: a length in 32 bits and a block of that many bytes that decodes to one sector,
//! the last to what is left. A length field never straddles a sector of the extent: where fewer
//! than four bytes are left in one, they are zero and the field is in the next. Inline extents
//! have the same form, with one segment.

use super::{bad, lzo};
use ubtrfs_ondisk::Result;

const LENGTH_BYTES: usize = 4;

#[inline]
fn length_at(bytes: &[u8], at: usize) -> Result<usize> {
    let field = bytes.get(at..at + LENGTH_BYTES).ok_or_else(|| bad("LZO segments cut off"))?;
    let length = u32::from_le_bytes(field.try_into().expect("a slice of four"));
    usize::try_from(length).map_err(|_| bad("LZO length out of range"))
}

/// Where the length field goes that would begin at `at`.
#[inline]
fn field_start(at: usize, sectorsize_bytes: usize) -> usize {
    let left = sectorsize_bytes - at % sectorsize_bytes;
    if left < LENGTH_BYTES { at + left } else { at }
}

/// Decodes an extent; returns the number of bytes written.
///
/// # Errors
/// `BadCompression` when lengths do not fit the extent or a segment does not decode.
pub fn decompress(input: &[u8], out: &mut [u8], sectorsize_bytes: usize) -> Result<usize> {
    let total = length_at(input, 0)?;
    if total < LENGTH_BYTES || total > input.len() {
        return Err(bad("LZO extent with an impossible length"));
    }
    let input = &input[..total];
    let mut at = LENGTH_BYTES;
    let mut written = 0;
    while written < out.len() {
        at = field_start(at, sectorsize_bytes);
        if at >= total {
            break;
        }
        let len = length_at(input, at)?;
        at += LENGTH_BYTES;
        let block = input[at..].get(..len).ok_or_else(|| bad("LZO segment past its extent"))?;
        let end = out.len().min(written + sectorsize_bytes);
        let done = lzo::decompress(block, &mut out[written..end])?;
        if done == 0 {
            return Err(bad("empty LZO segment"));
        }
        written += done;
        at += len;
    }
    Ok(written)
}

/// Encodes an extent and appends it to `out`; `false` when it takes more than `limit_bytes`.
pub fn compress(
    dictionary: &mut lzo::Dictionary,
    input: &[u8],
    out: &mut Vec<u8>,
    limit_bytes: usize,
    sectorsize_bytes: usize,
) -> bool {
    let start = out.len();
    out.reserve(limit_bytes + lzo::compressed_bytes_max(sectorsize_bytes));
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    for sector in input.chunks(sectorsize_bytes) {
        out.resize(start + field_start(out.len() - start, sectorsize_bytes), 0);
        let field = out.len();
        out.extend_from_slice(&[0; LENGTH_BYTES]);
        lzo::compress(dictionary, sector, out);
        if out.len() - start > limit_bytes {
            return false;
        }
        let Ok(len) = u32::try_from(out.len() - field - LENGTH_BYTES) else {
            return false;
        };
        out[field..field + LENGTH_BYTES].copy_from_slice(&len.to_le_bytes());
    }
    let Ok(total) = u32::try_from(out.len() - start) else {
        return false;
    };
    out[start..start + LENGTH_BYTES].copy_from_slice(&total.to_le_bytes());
    out.len() - start <= limit_bytes
}
