//! The uuid tree: from a subvolume's uuid, its own or what it was received from, to its number.
//!
//! An item's key is the uuid's two halves, its data the numbers, eight bytes each.

use ubtrfs_ondisk::{Key, KeyType, ObjectId, RootId, Uuid};

use super::make::item_bytes_max;
use crate::error::{Error, Result};
use crate::txn;

fn key_of(ty: KeyType, uuid: Uuid) -> Key {
    let half = |at: usize| {
        u64::from_le_bytes(uuid.0[at..at + 8].try_into().expect("a slice of eight bytes"))
    };
    Key::new(ObjectId(half(0)), ty, half(8))
}

/// What the tree has under a uuid; `None` where there is no such tree: Linux makes it when it is
/// missing.
fn have(txn: &txn::Handle<'_>, key: &Key) -> Result<Option<Vec<u8>>> {
    match txn.core().roots.tree(RootId::UUID_TREE) {
        Ok(tree) => Ok(Some(tree.lookup(key)?.map(|item| item.to_vec()).unwrap_or_default())),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Refuses a uuid under which no other number fits.
///
/// # Errors
/// `Limit`; damage in the tree.
pub(super) fn check_room(txn: &txn::Handle<'_>, ty: KeyType, uuid: Uuid) -> Result<()> {
    let key = key_of(ty, uuid);
    let have_bytes = have(txn, &key)?.map_or(0, |have| have.len());
    if uuid.is_nil() || have_bytes + size_of::<u64>() <= item_bytes_max(txn.core()) {
        return Ok(());
    }
    Err(Error::Limit { what: format!("subvolumes of one uuid, {uuid}") })
}

/// Enters `root` under `uuid`. A nil uuid is not entered.
///
/// # Errors
/// What stops an edit.
pub(super) fn add(txn: &mut txn::Handle<'_>, ty: KeyType, uuid: Uuid, root: RootId) -> Result<()> {
    let key = key_of(ty, uuid);
    let id = root.0.to_le_bytes();
    match have(txn, &key)? {
        _ if uuid.is_nil() => Ok(()),
        None => Ok(()),
        Some(have) if have.is_empty() => txn.insert(RootId::UUID_TREE, key, &id),
        Some(have) if have.chunks_exact(id.len()).any(|known| known == id) => Ok(()),
        Some(have) => txn.replace(RootId::UUID_TREE, key, &[&have[..], &id].concat()),
    }
}

/// Takes `root` away from under `uuid`, where it is.
///
/// # Errors
/// What stops an edit.
pub(super) fn remove(
    txn: &mut txn::Handle<'_>,
    ty: KeyType,
    uuid: Uuid,
    root: RootId,
) -> Result<()> {
    let key = key_of(ty, uuid);
    let Some(have) = have(txn, &key)? else { return Ok(()) };
    let id = root.0.to_le_bytes();
    let rest: Vec<u8> =
        have.chunks(id.len()).filter(|known| *known != id).flatten().copied().collect();
    if rest.len() == have.len() {
        Ok(())
    } else if rest.is_empty() {
        txn.remove(RootId::UUID_TREE, key)
    } else {
        txn.replace(RootId::UUID_TREE, key, &rest)
    }
}
