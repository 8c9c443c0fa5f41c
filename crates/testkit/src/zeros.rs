//! Whether bytes are zeros.

/// Piece by piece, as the system's comparison is fast where code is hardly optimised: byte by byte a hundred times slower, it was most of the
/// time of tests that look at large sparse files.
pub(crate) fn is_zeros(bytes: &[u8]) -> bool {
    const ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|piece| piece == &ZEROS[..piece.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_that_is_none_is_found_wherever_it_lies() {
        for len in [0, 1, 4095, 4096, 4097, 9000] {
            let mut bytes = vec![0; len];
            assert!(is_zeros(&bytes));
            for at in [0, 4095, 4096, len.saturating_sub(1)].into_iter().filter(|at| *at < len) {
                bytes[at] = 1;
                assert!(!is_zeros(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
    }
}
