//! Removing checksums of data that is freed.

use ubtrfs_ondisk::{Corruption, Key, KeyType, ObjectId, Reason, RootId};

use crate::btree::Editor;
use crate::error::{Error, Result};

/// Removes the checksums of the sectors in `start..end` from the checksum tree, where there are
/// any. Items that reach beyond are cut.
///
/// # Errors
/// `ItemDataLayout` for an item that does not hold whole checksums; what stops an edit.
pub(crate) fn remove(
    editor: &mut Editor<'_>,
    start: u64,
    end: u64,
    csum_bytes: usize,
    sectorsize_bytes: u64,
) -> Result<()> {
    let key_at = |at| Key::new(ObjectId::EXTENT_CSUM, KeyType::EXTENT_CSUM, at);
    let mut end = end;
    while start < end {
        let Some((key, data)) = editor.at_or_before(&key_at(end - 1))? else { return Ok(()) };
        let is_csums = key.objectid == ObjectId::EXTENT_CSUM && key.ty == KeyType::EXTENT_CSUM;
        let covered = (data.len() / csum_bytes) as u64 * sectorsize_bytes;
        let item_end = key.offset.checked_add(covered);
        let Some(item_end) = item_end.filter(|_| data.len().is_multiple_of(csum_bytes)) else {
            return Err(Error::Corrupt(
                Corruption::new(Reason::BadItemLen)
                    .in_root(RootId::CSUM_TREE)
                    .have(format!("{} bytes in {key}", data.len()))
                    .expect(format!("whole checksums of {csum_bytes} bytes")),
            ));
        };
        if !is_csums || item_end <= start {
            return Ok(());
        }
        let bytes_upto = |at: u64| {
            let sectors = (at - key.offset) / sectorsize_bytes;
            usize::try_from(sectors).unwrap_or(usize::MAX).saturating_mul(csum_bytes)
        };
        let tail = (item_end > end).then(|| &data[bytes_upto(end)..]);
        if key.offset < start {
            editor.replace(&key, &data[..bytes_upto(start)])?;
        } else {
            editor.remove(&key)?;
        }
        if let Some(tail) = tail {
            editor.insert(key_at(end), tail.len(), |bytes| bytes.copy_from_slice(tail))?;
        }
        end = key.offset;
    }
    Ok(())
}
