//! LZO1X: the byte format as published, an encoder and a decoder of our own.
//!
//! A block is a sequence of instructions, each a match with up to three literals behind it, or a
//! literal run. The first byte of an instruction tells which; bits in the middle name the length,
//! and a length of zero there is continued by bytes of which each zero stands for 255. The two low
//! bits of a match's second byte from the end count the literals behind it. Which distances a
//! first byte below 16 means depends on the literals before it. The match `11 00 00` ends a block.

use super::bad;
use ubtrfs_ondisk::Result;

/// Longest distance of a short match with a length of 3 to 8.
const M2_DISTANCE_MAX: usize = 0x0800;
/// Longest distance of the middle form.
const M3_DISTANCE_MAX: usize = 0x4000;
/// Longest distance of all.
const M4_DISTANCE_MAX: usize = 0xBFFF;
/// Shortest match that the encoder looks for.
const MATCH_BYTES_MIN: usize = 4;
/// The last input bytes are always literals, so that the encoder may read four at a time.
const TAIL_BYTES: usize = 8;
/// Few enough that the table stays in the processor's first cache: blocks are sectors.
const HASH_BITS: u32 = 12;
/// Literals and matches up to this length are copied with one move of this length, where there is
/// room: most are short.
const MOVE_BYTES: usize = 16;

/// Most bytes that the encoder makes of `len_bytes`.
pub fn compressed_bytes_max(len_bytes: usize) -> usize {
    len_bytes + len_bytes / 16 + 64 + 3
}

/// The encoder's memory of where it saw each hash.
pub struct Dictionary {
    /// Position + `base` of the last occurrence; what is below `base` is of an earlier block.
    seen: Box<[u32; 1 << HASH_BITS]>,
    base: u32,
}

impl Default for Dictionary {
    fn default() -> Self {
        let seen = vec![0; 1 << HASH_BITS].into_boxed_slice();
        Self { seen: seen.try_into().expect("the length is that of the array"), base: 1 }
    }
}

impl Dictionary {
    /// Forgets the last block, of which no position reached `base` + `len_bytes`.
    fn next_block(&mut self, len_bytes: usize) -> u32 {
        let len = u32::try_from(len_bytes).unwrap_or(u32::MAX / 2);
        if self.base.checked_add(len).is_none_or(|end| end > u32::MAX / 2) {
            self.seen.fill(0);
            self.base = 1;
        }
        let base = self.base;
        self.base += len;
        base
    }
}

#[inline]
fn four_bytes(bytes: &[u8], at: usize) -> u32 {
    let four = bytes[at..at + 4].try_into().expect("a slice of four");
    u32::from_le_bytes(four)
}

#[inline]
fn hash(four: u32) -> usize {
    (four.wrapping_mul(0x9E37_79B1) >> (32 - HASH_BITS)) as usize
}

#[inline]
fn eight_bytes(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes[at..at + 8].try_into().expect("a slice of eight");
    u64::from_le_bytes(eight)
}

/// Length of what `input` has in common at `a` and at `b`, which is behind `a`.
#[inline]
fn common_bytes(input: &[u8], a: usize, b: usize) -> usize {
    let left = input.len() - b;
    let mut len = 0;
    while len + 8 <= left {
        let differs = eight_bytes(input, a + len) ^ eight_bytes(input, b + len);
        if differs != 0 {
            return len + (differs.trailing_zeros() / 8) as usize;
        }
        len += 8;
    }
    while len < left && input[a + len] == input[b + len] {
        len += 1;
    }
    len
}

/// Encodes `input`, which is at most 1 GiB, and appends the block to `out`.
pub fn compress(dictionary: &mut Dictionary, input: &[u8], out: &mut Vec<u8>) {
    let base = dictionary.next_block(input.len()) as usize;
    let start = out.len();
    let mut literals_from = 0;
    let mut at = 0;
    let limit = input.len().saturating_sub(TAIL_BYTES);
    while at < limit {
        let four = four_bytes(input, at);
        let slot = &mut dictionary.seen[hash(four)];
        let seen = *slot as usize;
        *slot = u32::try_from(base + at).expect("next_block keeps positions below 2^32");
        let candidate = seen.checked_sub(base).filter(|candidate| {
            at - candidate <= M4_DISTANCE_MAX && four_bytes(input, *candidate) == four
        });
        let Some(candidate) = candidate else {
            // The longer nothing matched, the larger the steps.
            at += 1 + ((at - literals_from) >> 5);
            continue;
        };
        let mut len = MATCH_BYTES_MIN
            + common_bytes(input, candidate + MATCH_BYTES_MIN, at + MATCH_BYTES_MIN);
        // The match may begin earlier than the step that found it.
        let mut from = candidate;
        while at > literals_from && from > 0 && input[at - 1] == input[from - 1] {
            (at, from, len) = (at - 1, from - 1, len + 1);
        }
        put_literals(&input[literals_from..at], start, out);
        put_match(len, at - from, out);
        at += len;
        literals_from = at;
        if at < limit {
            let slot = &mut dictionary.seen[hash(four_bytes(input, at - 2))];
            *slot = u32::try_from(base + at - 2).expect("next_block keeps positions below 2^32");
        }
    }
    put_literals(&input[literals_from..], start, out);
    out.extend_from_slice(&[0x11, 0, 0]);
}

#[inline]
fn put_literals(literals: &[u8], start: usize, out: &mut Vec<u8>) {
    let count = literals.len();
    if count == 0 {
        return;
    }
    let low = u8::try_from(count).unwrap_or(u8::MAX);
    if out.len() == start && count <= 238 {
        out.push(17 + low);
    } else if count <= 3 {
        // A block that begins with literals took the branch above, so a match precedes.
        let place = out.len() - 2;
        out[place] |= low;
    } else if count <= 18 {
        out.push(low - 3);
    } else {
        out.push(0);
        put_length(count - 18, out);
    }
    out.extend_from_slice(literals);
}

#[inline]
fn put_match(len: usize, distance: usize, out: &mut Vec<u8>) {
    let byte = |value: usize| u8::try_from(value & 0xff).expect("masked to a byte");
    if len <= 8 && distance <= M2_DISTANCE_MAX {
        let distance = distance - 1;
        out.push(byte((len - 1) << 5 | (distance & 7) << 2));
        out.push(byte(distance >> 3));
        return;
    }
    let (marker, short_max, distance) = if distance <= M3_DISTANCE_MAX {
        (0x20, 33, distance - 1)
    } else {
        let distance = distance - 0x4000;
        (0x10 | byte((distance >> 11) & 8), 9, distance & 0x3fff)
    };
    if len <= short_max {
        out.push(marker | byte(len - 2));
    } else {
        out.push(marker);
        put_length(len - short_max, out);
    }
    out.push(byte(distance << 2));
    out.push(byte(distance >> 6));
}

#[inline]
fn put_length(mut rest: usize, out: &mut Vec<u8>) {
    while rest > 255 {
        out.push(0);
        rest -= 255;
    }
    out.push(u8::try_from(rest).expect("at most 255 are left"));
}

/// The block being decoded.
struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    #[inline]
    fn byte(&mut self) -> Result<u8> {
        let byte = *self.bytes.get(self.at).ok_or_else(|| bad("LZO block cut off"))?;
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    fn pair(&mut self) -> Result<usize> {
        let low = usize::from(self.byte()?);
        Ok(low | usize::from(self.byte()?) << 8)
    }

    /// A length of which the instruction held `bits`, continued when they are zero.
    #[inline]
    fn length(&mut self, bits: u8, continued_from: usize) -> Result<usize> {
        if bits != 0 {
            return Ok(usize::from(bits));
        }
        let zeros = self.bytes[self.at..].iter().take_while(|byte| **byte == 0).count();
        self.at += zeros;
        // Each zero is a byte of input, so the sum stays far below 2^64.
        Ok(continued_from + zeros * 255 + usize::from(self.byte()?))
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..len));
        let taken = taken.ok_or_else(|| bad("LZO literals cut off"))?;
        self.at += len;
        Ok(taken)
    }
}

/// Copies the next `len` bytes of `input`. What lies behind them in `out` may be overwritten: it
/// comes later.
#[inline]
fn put_next(out: &mut [u8], written: &mut usize, input: &mut Input<'_>, len: usize) -> Result<()> {
    if len <= MOVE_BYTES
        && let Some(from) = input.bytes.get(input.at..input.at + MOVE_BYTES)
        && let Some(to) = out.get_mut(*written..*written + MOVE_BYTES)
    {
        to.copy_from_slice(from);
        input.at += len;
        *written += len;
        return Ok(());
    }
    put(out, written, input.take(len)?)
}

#[inline]
fn put(out: &mut [u8], written: &mut usize, literals: &[u8]) -> Result<()> {
    let end = *written + literals.len();
    let place = out.get_mut(*written..end).ok_or_else(|| bad("LZO block longer than promised"))?;
    place.copy_from_slice(literals);
    *written = end;
    Ok(())
}

#[inline]
fn copy_back(out: &mut [u8], written: &mut usize, distance: usize, len: usize) -> Result<()> {
    let to = *written;
    let from = to.checked_sub(distance).ok_or_else(|| bad("LZO match before the block"))?;
    if len > out.len() - to {
        return Err(bad("LZO block longer than promised"));
    }
    if len <= MOVE_BYTES && distance >= MOVE_BYTES && out.len() - to >= MOVE_BYTES {
        out.copy_within(from..from + MOVE_BYTES, to);
    } else if distance >= len {
        out.copy_within(from..from + len, to);
    } else if distance == 1 {
        let byte = out[from];
        out[to..to + len].fill(byte);
    } else {
        // The source grows with the copy: what was copied is a period that repeats.
        let mut done = 0;
        while done < len {
            let step = (distance + done).min(len - done);
            out.copy_within(from..from + step, to + done);
            done += step;
        }
    }
    *written += len;
    Ok(())
}

/// Decodes one block into `out`; returns the number of bytes written. What lies behind them may be
/// overwritten.
///
/// # Errors
/// `BadCompression` when the block is cut off, reaches back before its beginning, or does not fit.
pub fn decompress(block: &[u8], out: &mut [u8]) -> Result<usize> {
    let mut input = Input { bytes: block, at: 0 };
    let mut written = 0;
    // Literals since the last match: 0 to 3, or 4 for more.
    let mut state = 0;
    if let Some(&first) = block.first()
        && first > 17
    {
        input.at = 1;
        let count = usize::from(first - 17);
        put_next(out, &mut written, &mut input, count)?;
        state = count.min(4);
    }
    loop {
        let op = input.byte()?;
        let bits = usize::from(op);
        let (distance, len, behind) = match op {
            0..16 if state == 0 => {
                let count = input.length(op, 15)? + 3;
                put_next(out, &mut written, &mut input, count)?;
                state = 4;
                continue;
            }
            0..16 => {
                let high = usize::from(input.byte()?) << 2;
                let near = high | bits >> 2;
                let (distance, len) = if state == 4 { (near + 2049, 3) } else { (near + 1, 2) };
                (distance, len, bits & 3)
            }
            16..32 => {
                let len = input.length(op & 7, 7)? + 2;
                let pair = input.pair()?;
                let distance = 0x4000 + ((bits & 8) << 11) + (pair >> 2);
                if distance == 0x4000 {
                    return Ok(written);
                }
                (distance, len, pair & 3)
            }
            32..64 => {
                let len = input.length(op & 31, 31)? + 2;
                let pair = input.pair()?;
                ((pair >> 2) + 1, len, pair & 3)
            }
            64.. => {
                let high = usize::from(input.byte()?) << 3;
                ((high | (bits >> 2) & 7) + 1, (bits >> 5) + 1, bits & 3)
            }
        };
        copy_back(out, &mut written, distance, len)?;
        if behind > 0 {
            put_next(out, &mut written, &mut input, behind)?;
        }
        state = behind;
    }
}
