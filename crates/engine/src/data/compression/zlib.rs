//! zlib, by libdeflate.

use libdeflater::{CompressionLvl, Compressor, DecompressionError, Decompressor};

use super::{EXTENT_BYTES_MAX, bad};
use ubtrfs_ondisk::Result;

/// Room that a stream gets which decodes to more than its extent promises.
const OVERLONG_BYTES_MAX: usize = 8 * EXTENT_BYTES_MAX;

#[derive(Default)]
pub(super) struct Workspace {
    decompressor: Option<Decompressor>,
    compressor: Option<(i32, Compressor)>,
}

impl Workspace {
    /// Decodes one stream; bytes behind it are ignored. Returns the number of bytes written.
    pub(super) fn decompress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize> {
        let decompressor = self.decompressor.get_or_insert_with(Decompressor::new);
        match decompressor.zlib_decompress(input, out) {
            Ok(written) => Ok(written),
            Err(DecompressionError::BadData) => Err(bad("no zlib stream")),
            Err(DecompressionError::InsufficientSpace) => {
                // libdeflate decodes a stream whole or not at all.
                let mut whole = vec![0; OVERLONG_BYTES_MAX.max(out.len())];
                match decompressor.zlib_decompress(input, &mut whole) {
                    Ok(written) => {
                        let len = written.min(out.len());
                        out[..len].copy_from_slice(&whole[..len]);
                        Ok(len)
                    }
                    Err(DecompressionError::BadData) => Err(bad("no zlib stream")),
                    Err(DecompressionError::InsufficientSpace) => {
                        Err(bad("zlib stream much longer than its extent"))
                    }
                }
            }
        }
    }

    pub(super) fn compress(
        &mut self,
        level: i32,
        input: &[u8],
        out: &mut Vec<u8>,
        limit_bytes: usize,
    ) -> bool {
        if self.compressor.as_ref().is_none_or(|(have, _)| *have != level) {
            let lvl = CompressionLvl::new(level.clamp(1, 9)).expect("libdeflate has levels 1 to 9");
            self.compressor = Some((level, Compressor::new(lvl)));
        }
        let Some((_, compressor)) = &mut self.compressor else {
            return false;
        };
        let start = out.len();
        out.resize(start + limit_bytes, 0);
        match compressor.zlib_compress(input, &mut out[start..]) {
            Ok(written) => {
                out.truncate(start + written);
                true
            }
            Err(_) => false,
        }
    }
}
