//! What all parts of a check have in common, and the order in which they come.

use rustc_hash::FxHashSet;
use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::verify::Geometry;
use ubtrfs_rt::{Arc, AtomicU64, Ordering};
use ubtrfs_volume::Volume;

use crate::blocks::Blocks;
use crate::finding::Finding;
use crate::report::{Findings, Report, Statistics};
use crate::store::Store;
use crate::{CheckOptions, Error, Phase, Progress, Result};

/// Progress is told after about this much was read.
const PROGRESS_BYTES: u64 = 4 << 20;

/// A check that is being made.
pub(crate) struct Context<'a> {
    pub(crate) volume: &'a Volume,
    pub(crate) options: &'a CheckOptions<'a>,
    pub(crate) superblock: Superblock,
    pub(crate) geometry: Geometry,
    /// The superblock's.
    pub(crate) generation: u64,
    pub(crate) incompat: Incompat,
    pub(crate) compat_ro: CompatRo,
    pub(crate) findings: Findings,
    pub(crate) statistics: Statistics,
    /// Where all that grows with the filesystem is kept.
    pub(crate) store: Arc<Store>,
    pub(crate) blocks: Blocks,
    /// Trees of which blocks were lost.
    pub(crate) gaps: FxHashSet<RootId>,
    phase: Phase,
    done_bytes: AtomicU64,
    total_bytes: u64,
}

impl<'a> Context<'a> {
    pub(crate) fn new(volume: &'a Volume, options: &'a CheckOptions<'a>) -> Self {
        let superblock = volume.superblock();
        let store = Arc::new(Store::new(options.memory_bytes_max));
        Self {
            volume,
            options,
            superblock,
            geometry: volume.geometry(),
            generation: superblock.generation.get(),
            incompat: Incompat(superblock.incompat_flags.get()),
            compat_ro: CompatRo(superblock.compat_ro_flags.get()),
            findings: Findings::new(options.finding_count_max),
            statistics: Statistics::default(),
            blocks: Blocks::new(&store),
            store,
            gaps: FxHashSet::default(),
            phase: Phase::Roots,
            done_bytes: AtomicU64::new(0),
            total_bytes: 0,
        }
    }

    pub(crate) fn check(mut self) -> Result<Report> {
        self.check_superblock();
        let devices = self.load_devices()?;
        let roots = self.load_roots();
        self.check_backup_trees(&roots);
        self.begin(Phase::Extents, self.superblock.bytes_used.get());
        let extents = self.load_extents(&roots);
        self.expect_total(&extents);
        let dev_extents = self.load_dev_extents(&roots);
        let csums = self.load_csums(&roots);
        let free_space = self.load_free_space(&roots);
        self.walk_other_trees(&roots);
        self.stop_if_failed()?;
        self.enter_phase(Phase::Files);
        let summaries = self.load_files(&roots, &extents, &csums);
        let logged = self.walk_logs();
        self.stop_if_failed()?;
        self.enter_phase(Phase::Comparing);
        self.check_devices(&devices, &dev_extents);
        self.check_groups(&devices, &extents);
        self.check_free_space(&extents, free_space);
        self.stop_if_failed()?;
        self.check_references(&roots, &extents);
        self.stop_if_failed()?;
        self.check_csum_coverage(&extents, &csums, &logged);
        drop(extents);
        self.stop_if_failed()?;
        self.check_files(&roots, summaries);
        self.check_roots(&roots);
        if self.options.data {
            self.begin(Phase::Data, csums.covered_bytes());
            self.check_data();
        }
        self.finish()?;
        Ok(self.findings.into_report(self.statistics))
    }

    /// Metadata is what is used and not data.
    fn expect_total(&mut self, extents: &crate::extents::Extents) {
        self.total_bytes = extents.metadata_bytes;
    }

    fn begin(&mut self, phase: Phase, total_bytes: u64) {
        self.total_bytes = total_bytes;
        self.done_bytes = AtomicU64::new(0);
        self.enter_phase(phase);
    }

    fn enter_phase(&mut self, phase: Phase) {
        self.phase = phase;
        if let Some(progress) = self.options.progress {
            let done_bytes = self.done_bytes.load(Ordering::Relaxed);
            progress(Progress { phase, done_bytes, total_bytes: self.total_bytes });
        }
    }

    /// What lies in the tables after a failure of the temporary file is nothing to go by.
    fn stop_if_failed(&self) -> Result<()> {
        self.store.take_failure().map_or(Ok(()), |error| Err(Error::Spill(error)))
    }

    fn finish(&mut self) -> Result<()> {
        self.stop_if_failed()?;
        let taken = self.store.taken();
        self.statistics.table_bytes_peak = taken.peak_bytes;
        self.statistics.spilled_bytes = taken.spilled_bytes;
        if self.blocks.lost_count > 0 {
            self.findings.push(Finding::Incomplete { blocks: self.blocks.lost_count });
        }
        let nodesize = crate::view::number(self.geometry.nodesize_bytes);
        self.statistics.block_bytes = self.statistics.block_count.saturating_mul(nodesize);
        Ok(())
    }

    /// Counts a block or a piece of data that was read.
    pub(crate) fn count_progress(&self, bytes: u64) {
        let Some(progress) = self.options.progress else { return };
        let before = self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
        let done_bytes = before.saturating_add(bytes);
        if before / PROGRESS_BYTES != done_bytes / PROGRESS_BYTES {
            progress(Progress { phase: self.phase, done_bytes, total_bytes: self.total_bytes });
        }
    }

    pub(crate) fn lost(&mut self, root: RootId, is_lost: bool) {
        if is_lost {
            self.blocks.lost_count += 1;
            self.gaps.insert(root);
        }
    }

    /// Whether nothing of the tree was lost.
    pub(crate) fn is_complete(&self, root: RootId) -> bool {
        !self.gaps.contains(&root)
    }

    /// Whether nothing was lost of the trees that refer to file data.
    pub(crate) fn files_are_complete(&self) -> bool {
        let refers = |root: &RootId| {
            root.holds_files() || *root == RootId::ROOT_TREE || *root == RootId::TREE_RELOC
        };
        !self.gaps.iter().any(refers)
    }

    pub(crate) fn sector(&self) -> u64 {
        crate::view::number(self.geometry.sectorsize_bytes)
    }
}
