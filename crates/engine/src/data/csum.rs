//! Checksums of data: looked up a run at a time, compared with what was read.
//!
//! Items lie in the checksum tree at (EXTENT_CSUM, EXTENT_CSUM, address), each a row of checksums
//! for the sectors from that address on.

use ubtrfs_ondisk::{Corruption, CsumType, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};
use ubtrfs_rt::Arc;

use crate::btree::{Cursor, Tree};
use crate::error::Result;

/// Finds the checksums of data, fastest where asked in order.
#[derive(Debug)]
pub(crate) struct CsumLookup {
    cursor: Cursor,
    csum_bytes: u64,
    sectorsize_bytes: u64,
}

/// The key at which checksums from `at` on lie.
pub(crate) fn csum_key(at: LogicalAddr) -> Key {
    Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at.0)
}

impl CsumLookup {
    pub(crate) fn new(csum_tree: &Arc<Tree>, csum: CsumType, sectorsize_bytes: u64) -> Self {
        Self { cursor: csum_tree.cursor(), csum_bytes: csum.len_bytes() as u64, sectorsize_bytes }
    }

    /// Fills `out` with the checksums of the `count` sectors from `at` on.
    ///
    /// # Errors
    /// `Missing` where a sector has none: data that is not marked to be without must have them.
    pub(crate) fn find(&mut self, at: LogicalAddr, count: u64, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let mut wanted = at.0;
        let mut left = count;
        if left > 0 && self.covering(wanted)?.is_none() {
            self.cursor.seek_back(&csum_key(LogicalAddr(wanted)))?;
        }
        while left > 0 {
            let Some((first, available)) = self.covering(wanted)? else {
                return Err(Corruption::new(Reason::Missing)
                    .in_root(RootId::CSUM_TREE)
                    .in_block(LogicalAddr(wanted))
                    .have("no checksum of the data at this address")
                    .into());
            };
            let take = left.min(available);
            if let Some((_, data)) = self.cursor.current()? {
                // Bounded by the item, which `covering` measured.
                let from = usize::try_from(first * self.csum_bytes).unwrap_or(usize::MAX);
                let len = usize::try_from(take * self.csum_bytes).unwrap_or(usize::MAX);
                out.extend_from_slice(&data[from..from + len]);
            }
            left -= take;
            wanted += take * self.sectorsize_bytes;
            if left > 0 {
                self.cursor.next()?;
            }
        }
        Ok(())
    }

    /// If the item here has the checksum of the sector at `wanted`: its index, and how many there
    /// are from it on.
    fn covering(&self, wanted: u64) -> Result<Option<(u64, u64)>> {
        let Some((key, data)) = self.cursor.current()? else { return Ok(None) };
        if key.objectid != ObjectId::EXTENT_CSUM || key.ty != KeyType::EXTENT_CSUM {
            return Ok(None);
        }
        let count = data.len() as u64 / self.csum_bytes;
        let Some(first) = wanted.checked_sub(key.offset).map(|d| d / self.sectorsize_bytes) else {
            return Ok(None);
        };
        Ok((first < count).then(|| (first, count - first)))
    }
}

/// Compares each sector of `data`, read from `at`, with the checksums.
///
/// # Errors
/// `CsumMismatch` with the address of the first sector that differs.
pub(crate) fn verify(
    csum: CsumType,
    csums: &[u8],
    data: &[u8],
    sectorsize_bytes: usize,
    at: LogicalAddr,
) -> Result<(), Box<Corruption>> {
    let len = csum.len_bytes();
    let sectors = data.chunks_exact(sectorsize_bytes).zip(csums.chunks_exact(len));
    for (index, (sector, stored)) in sectors.enumerate() {
        if !csum.matches(stored, sector) {
            let bad = at.0 + (index * sectorsize_bytes) as u64;
            return Err(mismatch(csum, stored, sector).in_block(LogicalAddr(bad)));
        }
    }
    Ok(())
}

#[cold]
fn mismatch(csum: CsumType, stored: &[u8], sector: &[u8]) -> Box<Corruption> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Corruption::new(Reason::CsumMismatch)
        .have(hex(&csum.compute(sector)[..csum.len_bytes()]))
        .expect(hex(stored))
}
