//! Replaying data: file extents, the references and checksums of what they refer to.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::features::Incompat;
use ubtrfs_ondisk::file_extent::{Compression, FileExtent, RegularExtent};
use ubtrfs_ondisk::{Corruption, LogicalAddr, Reason, RootId};

use super::names::logged_csums;
use super::{Item, Replay};
use crate::data::append::Target;
use crate::data::drop_range::{drop_range, end_of_extents};
use crate::error::Result;
use crate::filesystem::Handle;
use crate::fs::write::{STEP_EXTENTS_MAX, start_of_last_extents};
use crate::txn::Reservation;

/// To take extents out of a file: the inode besides.
const DROP: Reservation = Reservation::removals(STEP_EXTENTS_MAX as u64).and(Reservation::items(1));

/// To enter an extent: its item, the inode, and the checksums of 128 MiB at most, those that were there taken away.
const ENTER: Reservation = Reservation::items(24);

impl Replay<'_> {
    fn target(&self, number: u64) -> Result<Target> {
        let inode = self.fs.inode(self.id(number))?;
        let has_csums = inode.has_csums();
        Ok(Target { root: self.root, inode: inode.id.inode, has_csums })
    }

    /// Takes `start..end` out of a file, a few extents under each handle.
    fn drop_extents(&self, number: u64, start: u64, end: u64) -> Result<()> {
        let target = self.target(number)?;
        let mut at = start;
        while at < end {
            let core = &self.fs.inner.core;
            let step_end = end_of_extents(core, &target, &(at..end), STEP_EXTENTS_MAX)?;
            let step_end = step_end.max(at + 1).min(end);
            let mut handle = self.begin(DROP)?;
            self.drop_step(&mut handle, &target, at, step_end)?;
            at = step_end;
        }
        Ok(())
    }

    fn drop_step(
        &self,
        handle: &mut Handle<'_>,
        target: &Target,
        start: u64,
        end: u64,
    ) -> Result<()> {
        let kept = self.fs.inner.files.kept();
        let lost = drop_range(&mut handle.txn, target, &(start..end), kept)?;
        self.add_nbytes(handle, target, 0, lost)
    }

    fn add_nbytes(
        &self,
        handle: &mut Handle<'_>,
        target: &Target,
        added: u64,
        lost: u64,
    ) -> Result<()> {
        handle.change_inode(self.id(target.inode.0), |item| {
            item.nbytes = item.nbytes.get().saturating_add(added).saturating_sub(lost).into();
        })
    }

    /// Removes what a file has behind its end: it was cut off, and what it got since is in the log.
    pub(super) fn cut_behind_end(&self, number: u64) -> Result<()> {
        let inode = self.fs.inode(self.id(number))?;
        let sectorsize = self.fs.sectorsize_bytes();
        let end = inode.size_bytes.checked_next_multiple_of(sectorsize).unwrap_or(u64::MAX);
        let target = self.target(number)?;
        loop {
            let from = start_of_last_extents(self.fs, inode.id, end, STEP_EXTENTS_MAX)?;
            let mut handle = self.begin(DROP)?;
            self.drop_step(&mut handle, &target, from, u64::MAX)?;
            if from <= end {
                return Ok(());
            }
        }
    }

    /// Gives a file an extent of the log's.
    pub(super) fn put_extent(&self, number: u64, item: &Item) -> Result<()> {
        let sectorsize = self.fs.sectorsize_bytes();
        let extent =
            FileExtent::parse(&item.data).map_err(|error| error.in_root(RootId::TREE_LOG))?;
        let start = item.key.offset;
        if let Some(have) = self.tree()?.lookup(&item.key)?
            && have[..] == item.data[..]
            && !matches!(extent, FileExtent::Inline { .. })
        {
            return Ok(());
        }
        let inode = self.fs.inode(self.id(number))?;
        if !matches!(inode.file_type(), FileType::Regular | FileType::Symlink) {
            return Err(Corruption::new(Reason::BadValue)
                .in_root(RootId::TREE_LOG)
                .have(format!("data of {}, mode {:#o}", inode.id, inode.mode))
                .expect("a regular file or a symbolic link")
                .into());
        }
        let (end, nbytes, regular) = match &extent {
            FileExtent::Inline { ram_bytes, .. } => {
                let end = start.saturating_add(*ram_bytes).checked_next_multiple_of(sectorsize);
                (end.unwrap_or(u64::MAX), *ram_bytes, None)
            }
            FileExtent::Regular(regular) | FileExtent::Prealloc(regular) => {
                let nbytes = if regular.is_hole() { 0 } else { regular.num_bytes };
                (start.saturating_add(regular.num_bytes), nbytes, Some(*regular))
            }
        };
        self.drop_extents(number, start, end)?;
        let superblock = self.fs.superblock();
        let no_holes = Incompat(superblock.incompat_flags.get()).contains(Incompat::NO_HOLES);
        if no_holes && regular.is_some_and(|regular| regular.is_hole()) {
            return Ok(());
        }
        let target = self.target(number)?;
        let mut handle = self.begin(ENTER)?;
        handle.txn.insert(self.root, item.key, &item.data)?;
        if let Some(regular) = regular.filter(|regular| !regular.is_hole()) {
            self.refer(&mut handle, &target, start, &regular)?;
        }
        self.add_nbytes(&mut handle, &target, nbytes, 0)
    }

    /// Enters the reference to an extent, which may be one of the log's alone, and its checksums.
    fn refer(
        &self,
        handle: &mut Handle<'_>,
        target: &Target,
        file_offset: u64,
        extent: &RegularExtent,
    ) -> Result<()> {
        let core = &self.fs.inner.core;
        let offset = file_offset.wrapping_sub(extent.offset);
        let (at, len) = (extent.disk_bytenr, extent.disk_num_bytes);
        let (root, inode) = (target.root, target.inode);
        if core.alloc.is_known(&core.roots, at, len)? {
            core.alloc.share_data(at, len, root, inode, offset);
        } else {
            core.alloc.take_claimed(at);
            core.alloc.add_data(at, len, root, inode, offset)?;
        }
        let used = match extent.compression {
            Compression::None => {
                let from = at.0.saturating_add(extent.offset);
                from..from.saturating_add(extent.num_bytes)
            }
            _ => at.0..at.0.saturating_add(len),
        };
        let geometry = *core.roots.store.geometry();
        let csum_bytes = geometry.csum.len_bytes();
        let sectorsize = geometry.sectorsize_bytes as u64;
        let runs = logged_csums(&self.log, used.start, used.end, csum_bytes, sectorsize)?;
        let csums = &self.fs.inner.files.csums;
        for (start, bytes) in runs {
            let end = start + (bytes.len() / csum_bytes) as u64 * sectorsize;
            csums.remove(&mut handle.txn, start, end)?;
            csums.add(LogicalAddr(start), &bytes, geometry.csum, sectorsize);
        }
        // Nothing commits yet, and what is held back needs room for each run: a log may bring many thousands, here and there.
        csums.flush(&mut handle.txn)
    }
}
