//! Copies that no processor takes for overlapping ones.
//!
//! From Zen 3 on AMD's processors copy by `rep movsb` at a fraction of their speed where the destination lies 1 to 31 bytes behind the source,
//! modulo 4096 (measured on a Zen 3: 1.7 GB/s for 8.5 out of the kernel's page cache, 2.5 for 40 within a processor's cache; docs/EXPERIMENTS.md; glibc's
//! bug 30994, and issue 5658 of microsoft/STL, tell of it). The kernel copies so, and `memcpy` of a glibc that is not new. It is no rare case: pages begin at a
//! multiple of 4096, and large buffers of glibc's allocator 16 bytes behind one.

use std::cell::RefCell;

use crate::processor::Processor;

/// Of addresses a processor compares those bits first that say the place within a page.
const PAGE: usize = 4096;
/// So far behind the source, modulo [`PAGE`], a destination is too near.
const NEAR: std::ops::RangeInclusive<usize> = 1..=31;
/// Shorter copies gain nothing.
const LEN_MIN: usize = 1024;
/// Below what any glibc copies by `rep movsb`: 2112 bytes at least where that is fast (`x86_rep_movsb_threshold` of its tunables).
const PIECE: usize = 1024;
/// What is read at a time to be copied from there, so that it stays in a processor's second cache.
const DETOUR: usize = 64 << 10;

thread_local! {
    /// [`DETOUR`] bytes from any place in a page on; empty until it is needed.
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Copies all of `from`, which is as long as `to`.
///
/// # Panics
/// Where it is not.
pub fn copy(to: &mut [u8], from: &[u8]) {
    if is_slow(to, from.as_ptr().addr()) {
        copy_by_pieces(to, from);
    } else {
        to.copy_from_slice(from);
    }
}

/// Fills `to` by `read`, which is told what to fill from which offset on, and copies it out of memory that is aligned as the file is, like the
/// system's page cache: at once, or by way of a buffer of this thread's where that takes less time.
///
/// # Errors
/// Those of `read`; then `to` holds anything.
pub fn read_aligned<E>(
    to: &mut [u8],
    offset: u64,
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
) -> Result<(), E> {
    if is_slow(to, place_of(offset)) { read_by_detour(to, offset, read) } else { read(to, offset) }
}

fn copy_by_pieces(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy of another length");
    for (to, from) in to.chunks_mut(PIECE).zip(from.chunks(PIECE)) {
        to.copy_from_slice(from);
    }
}

fn read_by_detour<E>(
    to: &mut [u8],
    offset: u64,
    read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
) -> Result<(), E> {
    // A thread that ends may have none any more: as `ubtrfs_rt::with_per_thread`, without which formats do, and so this crate.
    let mut buffer = BUFFER.try_with(RefCell::take).unwrap_or_default();
    buffer.resize(DETOUR + PAGE, 0);
    let result = read_through(&mut buffer, to, offset, read);
    let _ = BUFFER.try_with(|place| place.replace(buffer));
    result
}

/// `buffer` has a page more than what is read at a time.
fn read_through<E>(
    buffer: &mut [u8],
    to: &mut [u8],
    mut offset: u64,
    mut read: impl FnMut(&mut [u8], u64) -> Result<(), E>,
) -> Result<(), E> {
    // As far as can be from the source's place in a page, and so from the destination's.
    let place = place_of(offset) + PAGE / 2;
    let start = place.wrapping_sub(buffer.as_ptr().addr()) % PAGE;
    let detour = &mut buffer[start..start + DETOUR];
    for piece in to.chunks_mut(DETOUR) {
        let bytes = &mut detour[..piece.len()];
        read(bytes, offset)?;
        piece.copy_from_slice(bytes);
        offset += bytes.len() as u64;
    }
    Ok(())
}

/// Of an offset, its place in a page.
fn place_of(offset: u64) -> usize {
    usize::try_from(offset % PAGE as u64).unwrap_or(0)
}

/// Whether to copy to `to` from an address, of which the place in a page is enough, is slow here.
fn is_slow(to: &[u8], from: usize) -> bool {
    is_near(to, from) && Processor::this().is_amd_fsrm
}

fn is_near(to: &[u8], from: usize) -> bool {
    to.len() >= LEN_MIN && NEAR.contains(&(to.as_ptr().addr().wrapping_sub(from) % PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of which each stretch differs from its neighbours.
    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|at| (at ^ (at >> 7) ^ (at >> 13)) as u8).collect()
    }

    /// Where in `memory`, which is a page longer than what is wanted, a place in a page is.
    fn start_at(memory: &[u8], place: usize) -> usize {
        place.wrapping_sub(memory.as_ptr().addr()) % PAGE
    }

    #[test]
    fn destination_is_near_from_1_to_31_bytes_behind_in_a_page() {
        let memory = vec![0; 3 * PAGE];
        let near = |place: usize, from: usize, len: usize| {
            let start = start_at(&memory, place);
            is_near(&memory[start..start + len], from)
        };
        assert!(!near(64, 64, PAGE));
        assert!(near(64, 63, PAGE));
        assert!(near(64, 33 + 7 * PAGE, PAGE));
        assert!(!near(64, 32, PAGE));
        assert!(near(3, PAGE - 28, PAGE), "the page before");
        assert!(!near(64, 65, PAGE), "behind the source, not before it");
        assert!(near(16, 0, LEN_MIN) && !near(16, 0, LEN_MIN - 1));
    }

    #[test]
    fn copy_by_pieces_copies_all() {
        for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3] {
            let from = bytes(len);
            let mut to = vec![0; len];
            copy_by_pieces(&mut to, &from);
            assert_eq!(to, from);
        }
    }

    #[test]
    fn detour_reads_each_byte_once_from_its_place() {
        let file = bytes(4 * DETOUR);
        for (offset, len) in [(0, DETOUR), (4096, DETOUR + 1), (8191, 2 * DETOUR + 777), (5, 1)] {
            let mut to = vec![0; len];
            let mut next = offset;
            let result: Result<(), ()> = read_by_detour(&mut to, offset as u64, |piece, at| {
                assert_eq!(at, next as u64);
                assert!(piece.len() <= DETOUR);
                assert!(!is_near(piece, place_of(at)), "the detour is slow, too");
                assert_eq!(start_at(piece, offset + PAGE / 2), 0);
                piece.copy_from_slice(&file[next..next + piece.len()]);
                next += piece.len();
                Ok(())
            });
            result.unwrap();
            assert_eq!(next, offset + len);
            assert_eq!(to, file[offset..offset + len]);
        }
    }

    #[test]
    fn detour_ends_with_the_first_error() {
        let mut to = vec![0; 3 * DETOUR];
        let mut calls = 0;
        let result = read_by_detour(&mut to, 0, |_, at| {
            calls += 1;
            if at == 0 { Ok(()) } else { Err(at) }
        });
        assert_eq!(result, Err(DETOUR as u64));
        assert_eq!(calls, 2);
    }

    /// Who reads while his thread ends, as what is dropped then may, has no buffer there any more: it panicked.
    #[test]
    fn detour_goes_while_a_thread_ends() {
        use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
        static READS: AtomicUsize = AtomicUsize::new(0);
        struct Reader;
        impl Drop for Reader {
            fn drop(&mut self) {
                let mut to = [0; 2];
                let read = |piece: &mut [u8], _| {
                    piece.fill(7);
                    Ok::<_, ()>(())
                };
                if read_by_detour(&mut to, 0, read) == Ok(()) && to == [7; 2] {
                    READS.fetch_add(1, Relaxed);
                }
            }
        }
        thread_local! {
            static BEFORE: Reader = const { Reader };
            static BEHIND: Reader = const { Reader };
        }
        std::thread::spawn(|| {
            BEFORE.with(|_| ());
            BUFFER.with(|_| ());
            BEHIND.with(|_| ());
        })
        .join()
        .unwrap();
        assert_eq!(READS.load(Relaxed), 2);
    }

    /// On whatever processor this runs: near and far, the bytes are the same.
    #[test]
    fn copies_and_reads_give_the_bytes_from_any_place() {
        let len = DETOUR + 5000;
        let file = bytes(len + 64);
        let mut memory = vec![0; len + PAGE];
        for place in [0, 1, 16, 31, 32, 2048, PAGE - 1] {
            let start = start_at(&memory, place);
            let to = &mut memory[start..start + len];
            copy(to, &file[64..]);
            assert_eq!(to, &file[64..]);
            to.fill(0);
            let result: Result<(), ()> = read_aligned(to, 0, |piece, at| {
                let at = usize::try_from(at).unwrap();
                piece.copy_from_slice(&file[at..at + piece.len()]);
                Ok(())
            });
            result.unwrap();
            assert_eq!(to, &file[..len]);
        }
    }
}
