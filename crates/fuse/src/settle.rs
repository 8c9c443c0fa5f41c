//! What is durable when it is answered: by the mount's options ([`Syncs`]), and by flags of an inode (`chattr +S` and `+D`), of which the
//! kernel tells no filesystem of type `fuse` anything.
//!
//! A file with SYNC is changed as with `-o sync`, and names in a directory with SYNC or DIRSYNC as with `-o dirsync`. Nothing is looked up as
//! long as the kernel knows no inode with such a flag.

use ubtrfs_engine::{Inode, InodeId};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Ordering;

use crate::abi::opcode;
use crate::errno::errno;
use crate::message::Result;
use crate::notify::Changed;
use crate::server::{Server, Syncs};

/// What an inode's flags promise.
fn syncs_by_flags(inode: &Inode) -> Syncs {
    match (inode.flags & flags::SYNC != 0, inode.flags & flags::DIRSYNC != 0) {
        (true, _) => Syncs::All,
        (false, true) if inode.is_dir() => Syncs::Names,
        (false, _) => Syncs::Asked,
    }
}

impl Server {
    /// The kernel is about to know an inode with these flags.
    pub(crate) fn note_syncs(&self, bits: u64) {
        if bits & (flags::SYNC | flags::DIRSYNC) != 0 {
            self.has_synced.store(true, Ordering::Release);
        }
    }

    /// What is durable of an inode when a program hears that it is done.
    pub(crate) fn syncs_of(&self, id: InodeId) -> Syncs {
        let promised = self.options.syncs;
        if promised == Syncs::All || !self.has_synced.load(Ordering::Acquire) {
            return promised;
        }
        // One that is gone has nothing to be kept.
        self.fs.inode(id).map_or(promised, |inode| syncs_by_flags(&inode).max(promised))
    }

    /// Makes durable what an operation has changed of an inode, where that is promised. Of names, and what is copied, it is where that is
    /// done.
    pub(crate) fn settle(&self, id: InodeId, operation: u32) -> Result {
        match operation {
            // With an error of this file, and of no other.
            opcode::WRITE | opcode::FALLOCATE if self.syncs_of(id) == Syncs::All => {
                let synced = self.fsync(id);
                if synced.is_err() && operation == opcode::FALLOCATE {
                    // It was done, and the kernel believes that it was not.
                    self.forget_data_later(id);
                }
                synced
            }
            opcode::SETATTR | opcode::SETXATTR | opcode::REMOVEXATTR
                if self.syncs_of(id) >= Syncs::Names =>
            {
                let committed = self.fs.commit().map_err(|error| errno(&error));
                if committed.is_err() {
                    self.forget_attributes(id);
                }
                committed
            }
            _ => Ok(()),
        }
    }

    /// Names were changed: makes that durable, where it is promised. If that fails they are changed all the same, and the kernel, which is
    /// told of the failure only, is to ask again.
    pub(crate) fn settle_names(&self, names: &[(InodeId, &[u8])]) -> Result {
        for (dir, name) in names {
            self.forget_name_of_deleted(*dir, name);
        }
        if names.iter().all(|(dir, _)| self.syncs_of(*dir) < Syncs::Names) {
            return Ok(());
        }
        let committed = self.fs.commit().map_err(|error| errno(&error));
        if committed.is_err() {
            for (dir, name) in names {
                self.forget_name_later(*dir, name);
            }
            let _ = self.forget_all(Changed::Names);
        }
        committed
    }
}
