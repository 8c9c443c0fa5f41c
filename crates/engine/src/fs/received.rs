//! What a subvolume was received from.

use ubtrfs_ondisk::{Generation, KeyType, RootId, Uuid};
use ubtrfs_rt::Time;

use super::state::timespec;
use super::uuid_tree;
use crate::error::Result;
use crate::filesystem::{Filesystem, Handle};
use crate::txn::Reservation;

/// When a subvolume was sent or received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The transaction, of the filesystem where that was.
    pub transid: Generation,
    /// The time there.
    pub time: Time,
}

impl Filesystem {
    /// Says of a subvolume what it was received from: the uuid of what was sent, nil for nothing, and when that was sent. Returns when it
    /// was received: now. As BTRFS_IOC_SET_RECEIVED_SUBVOL does it. Durable with the next commit.
    ///
    /// # Errors
    /// `NotFound` when there is no such subvolume; `ReadOnly` for one that is read-only; `Limit` where the uuid is that of too many.
    pub fn set_received(&self, root: RootId, from: Uuid, sent: Transfer) -> Result<Transfer> {
        let txn = self.inner.core.begin_alone(Reservation::items(4))?;
        let mut handle = Handle { fs: self, txn };
        let item = handle.live_root_item(root)?;
        self.inner.files.names().check_writable(handle.txn.core(), root)?;
        let ty = KeyType::UUID_KEY_RECEIVED_SUBVOL;
        let old = Uuid(item.received_uuid);
        if old != from {
            uuid_tree::check_room(&handle.txn, ty, from)?;
        }
        let received = Transfer { transid: handle.txn.generation(), time: handle.txn.now() };
        handle.txn.change_root_item(root, |item| {
            item.received_uuid = from.0;
            item.stransid = sent.transid.0.into();
            item.rtransid = received.transid.0.into();
            item.stime = timespec(sent.time);
            item.rtime = timespec(received.time);
        })?;
        if old != from {
            let txn = &mut handle.txn;
            uuid_tree::remove(txn, ty, old, root)
                .and_then(|()| uuid_tree::add(txn, ty, from, root))
                .map_err(|error| txn.abort(error))?;
        }
        Ok(received)
    }
}
