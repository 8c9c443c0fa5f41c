//! zstd, by its own library.

use zstd::zstd_safe::{
    self, CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective,
};

use super::bad;
use ubtrfs_ondisk::Result;

/// Largest window that Linux gives a reader: 128 KiB.
const WINDOW_LOG_MAX: u32 = 17;
/// What a frame begins with.
const FRAME_MAGIC: [u8; 4] = 0xFD2F_B528_u32.to_le_bytes();

#[derive(Default)]
pub(super) struct Workspace {
    decompressor: Option<DCtx<'static>>,
    compressor: Option<CCtx<'static>>,
    /// What it has put out, before it is known how much that is.
    packed: Vec<u8>,
}

impl Workspace {
    /// Decodes frame after frame until something else, or zero padding, follows. Returns the number
    /// of bytes written.
    pub(super) fn decompress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize> {
        let context = self.decompressor.get_or_insert_with(DCtx::create);
        let mut written = 0;
        let mut rest = input;
        if !rest.starts_with(&FRAME_MAGIC) {
            return Err(bad("no zstd frame"));
        }
        while rest.starts_with(&FRAME_MAGIC) && written < out.len() {
            // A whole frame at once needs no window buffer beside `out`. What does not go this
            // way, a frame cut off or longer than the extent, goes as a stream.
            let whole = zstd_safe::find_frame_compressed_size(rest)
                .ok()
                .filter(|len| *len <= rest.len())
                .and_then(|len| {
                    let done = context.decompress(&mut out[written..], &rest[..len]).ok()?;
                    Some((done, len))
                });
            let (done, taken) = match whole {
                Some(whole) => whole,
                None => stream(context, rest, &mut out[written..])?,
            };
            written += done;
            rest = &rest[taken..];
        }
        Ok(written)
    }

    pub(super) fn compress(
        &mut self,
        level: i32,
        input: &[u8],
        out: &mut Vec<u8>,
        limit_bytes: usize,
        sectorsize_bytes: usize,
    ) -> bool {
        let context = self.compressor.get_or_insert_with(CCtx::create);
        if self.packed.len() < limit_bytes {
            self.packed.resize(limit_bytes, 0);
        }
        // Output that did not fit leaves a frame open, with which nothing else can begin.
        let compressed = context
            .reset(ResetDirective::SessionOnly)
            .and_then(|_| context.set_parameter(CParameter::CompressionLevel(level)))
            .and_then(|_| {
                // The library makes the window no larger than the input, but never smaller than
                // this asks for.
                let bits = usize::BITS - input.len().saturating_sub(1).leading_zeros();
                context.set_parameter(CParameter::WindowLog(bits.clamp(10, WINDOW_LOG_MAX)))
            })
            // No more room than is asked for: what nearly fits would fit or not by what was compressed before.
            .and_then(|_| context.compress2(&mut self.packed[..limit_bytes], input));
        compressed.is_ok_and(|written| {
            // With the padding of the last sector: what grows behind this is copied.
            out.reserve(written.next_multiple_of(sectorsize_bytes));
            out.extend_from_slice(&self.packed[..written]);
            true
        })
    }
}

/// Decodes a frame until it or `out` ends; returns bytes written and bytes read.
fn stream(context: &mut DCtx<'_>, input: &[u8], out: &mut [u8]) -> Result<(usize, usize)> {
    let code = |code| bad(zstd_safe::get_error_name(code));
    context.reset(ResetDirective::SessionOnly).map_err(code)?;
    context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(code)?;
    let mut input = InBuffer::around(input);
    let mut output = OutBuffer::around(out);
    loop {
        let before = (input.pos(), output.pos());
        let hint = context.decompress_stream(&mut output, &mut input).map_err(code)?;
        let done = hint == 0 || output.pos() == output.capacity();
        if done {
            return Ok((output.pos(), input.pos()));
        }
        if (input.pos(), output.pos()) == before {
            return Err(bad("zstd frame cut off"));
        }
    }
}
