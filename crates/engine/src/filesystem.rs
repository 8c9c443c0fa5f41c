//! Opening a filesystem, and what every part of the engine finds it by.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use ubtrfs_ondisk::chunk::Chunk;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::misc::{DevItem, OnDisk};
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::superblock::{LABEL_BYTES, Superblock};
use ubtrfs_ondisk::{
    Corruption, CsumType, DeviceId, Generation, Key, KeyType, LogicalAddr, ObjectId, Reason,
    RootId, Uuid,
};
use ubtrfs_rt::{Arc, Mutex, Runtime};
use ubtrfs_volume::{LeftOut, Volume};

use crate::alloc::{AllocOptions, Allocator};
use crate::btree::{BlockPtr, Readahead, Roots, Store, Tree};
use crate::data::MAX_INLINE_BYTES_DEFAULT;
use crate::data::compression::Method;
use crate::error::{Error, Result};
use crate::fs::{FileState, InodeId, OpenFiles, SubvolumeHolds, log_replay};
use crate::txn::{self, Core, Flush, Reservation};

/// Bytes of tree blocks that are kept in memory unless told otherwise.
pub const CACHE_BYTES_DEFAULT: usize = 256 << 20;

/// How to open a filesystem.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Refuse every change.
    pub read_only: bool,
    /// Most bytes of tree blocks that are kept in memory. A transaction commits by itself when its
    /// own blocks take three quarters of that.
    pub cache_bytes: usize,
    /// Time, threads and identifiers.
    pub runtime: Arc<Runtime>,
    /// Let an image file, if it is the only device, grow when it is full.
    pub grow_device: bool,
    /// Give freed space back to the devices after each commit: an image file gets holes.
    pub discard: bool,
    /// How data is compressed of files that say nothing else, as Linux's mount option `compress` has it: a property
    /// chooses another algorithm, at this level as far as it has that, and a file's flags refuse. For open files and
    /// [`Filesystem::write`]; data that is prepared apart has its own ([`Filesystem::write_options`]).
    pub compression: Option<Method>,
    /// Compress what files refuse and what does not look like it would shrink, too, as `compress-force` does.
    pub force_compression: bool,
    /// Most bytes of a file, as they are stored, that are kept inline in a tree block; 0 for none. Never more than a
    /// block holds, and less than a sector.
    pub max_inline_bytes: usize,
    /// Share a read of a quarter of a MiB or more of what lies together on the medium with one of the process's kept threads, where no other such
    /// read of this filesystem goes on: in less time, for more work. It is this thread then that waits for the device, and is none for whoever
    /// compresses. Of no use where who reads keeps the other processors busy, as a mount's kernel does.
    pub shares_reads: bool,
    /// How the memory for file data is used, where that is not what follows from
    /// [`OpenOptions::cache_bytes`], of which half is for file data. To measure what mechanisms save.
    #[doc(hidden)]
    pub page_cache: Option<ubtrfs_iomap::CacheOptions>,
    /// Remember the form in which each block group's free space is kept. Off only to measure what
    /// that saves.
    #[doc(hidden)]
    pub cache_free_space_form: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            cache_bytes: CACHE_BYTES_DEFAULT,
            runtime: Arc::new(Runtime::system()),
            grow_device: false,
            discard: false,
            compression: None,
            force_compression: false,
            max_inline_bytes: MAX_INLINE_BYTES_DEFAULT,
            shares_reads: true,
            page_cache: None,
            cache_free_space_form: true,
        }
    }
}

/// Something about an open filesystem that its user should know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// Linux left a log of the last fsyncs, and the filesystem was opened read-only: what is shown is
    /// the last commit. Opened to be written, the log is replayed.
    LogNotReplayed,
    /// Features that a writer must know are not known: nothing can be written.
    UnknownCompatRo(CompatRo),
    /// A device that was given is out of date, and the filesystem, opened degraded, does without it.
    DeviceLeftOut(LeftOut),
    /// What has no name any more could not be removed at open, or not even looked for: inodes of the
    /// subvolume `root`, or, where that is the root tree, deleted subvolumes. Their space stays in
    /// use; everything else can be read and written.
    OrphansNotCleaned {
        /// The tree whose orphan items say what is to be removed.
        root: RootId,
        /// What kept it from being done.
        error: Error,
    },
}

impl Notice {
    /// Whether it says why nothing can be written.
    pub fn forbids_writing(&self) -> bool {
        match self {
            Self::LogNotReplayed | Self::UnknownCompatRo(_) => true,
            Self::DeviceLeftOut(_) | Self::OrphansNotCleaned { .. } => false,
        }
    }
}

impl PartialEq for Notice {
    /// Errors are the same that say the same.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::LogNotReplayed, Self::LogNotReplayed) => true,
            (Self::UnknownCompatRo(a), Self::UnknownCompatRo(b)) => a == b,
            (Self::DeviceLeftOut(a), Self::DeviceLeftOut(b)) => a == b,
            (
                Self::OrphansNotCleaned { root: a, error: a_error },
                Self::OrphansNotCleaned { root: b, error: b_error },
            ) => a == b && a_error.to_string() == b_error.to_string(),
            _ => false,
        }
    }
}

impl Eq for Notice {}

impl std::fmt::Display for Notice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LogNotReplayed => f.write_str(
                "the filesystem was not unmounted cleanly and holds a log of the last fsyncs; \
                 opened read-only without it, as of the last commit",
            ),
            Self::DeviceLeftOut(LeftOut { device, have, newest }) => write!(
                f,
                "{device}: left out, as it is out of date: it holds generation {have}, the \
                 filesystem is of {newest}; replace it"
            ),
            Self::UnknownCompatRo(bits) => {
                write!(f, "opened read-only: unknown features {bits}")
            }
            Self::OrphansNotCleaned { root: RootId::ROOT_TREE, error } => {
                write!(f, "the space of deleted subvolumes cannot be freed: {error}")
            }
            Self::OrphansNotCleaned { root, error } => {
                write!(f, "files of subvolume {root} without a name cannot be removed: {error}")
            }
        }
    }
}

/// An open filesystem. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Filesystem {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) core: Core,
    pub(crate) files: Arc<FileState>,
    pub(crate) options: OpenOptions,
    /// Set at the end of the opening.
    notices: OnceLock<Vec<Notice>>,
    /// Held by who drops deleted subvolumes, one at a time: those that cannot be dropped for damage.
    pub(crate) cleaning: Mutex<BTreeSet<RootId>>,
    pub(crate) open_files: OpenFiles,
    pub(crate) subvolume_holds: SubvolumeHolds,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What nobody brought to the medium is lost, as what nobody committed.
        self.open_files.forget_dirty();
    }
}

/// The right to change a filesystem, for one operation or a few. Dropping it ends it.
#[derive(Debug)]
pub struct Handle<'a> {
    pub(crate) fs: &'a Filesystem,
    pub(crate) txn: txn::Handle<'a>,
}

/// From [`Filesystem::hold_commits`].
#[derive(Debug)]
#[must_use = "commits are held while it lives"]
pub struct HeldCommits<'a> {
    fs: &'a Filesystem,
}

impl Drop for HeldCommits<'_> {
    fn drop(&mut self) {
        self.fs.inner.core.release_commits();
    }
}

/// How long runs of delayed references took.
#[derive(Clone, PartialEq, Debug)]
pub struct DelayedRefTimes {
    /// Number of runs.
    pub count: u64,
    /// Their mean.
    pub mean_ns: f64,
    /// Half of them took no longer.
    pub median_ns: u64,
    /// Nine of ten took no longer.
    pub p90_ns: u64,
    /// Ninety-nine of a hundred took no longer.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Upper bounds, each twice the last, and how many runs took up to that and more than the last.
    pub buckets: Vec<(u64, u64)>,
}

/// Features that are read; another bit is refused.
const INCOMPAT_KNOWN: Incompat = Incompat(
    Incompat::MIXED_BACKREF.0
        | Incompat::DEFAULT_SUBVOL.0
        | Incompat::MIXED_GROUPS.0
        | Incompat::COMPRESS_LZO.0
        | Incompat::COMPRESS_ZSTD.0
        | Incompat::BIG_METADATA.0
        | Incompat::EXTENDED_IREF.0
        | Incompat::SKINNY_METADATA.0
        | Incompat::NO_HOLES.0
        | Incompat::METADATA_UUID.0
        | Incompat::RAID1C34.0
        | Incompat::SIMPLE_QUOTA.0,
);

/// Features that are read but not written.
const INCOMPAT_READ_ONLY: Incompat = Incompat::SIMPLE_QUOTA;

/// Features that are written rightly; another bit forbids writing.
const COMPAT_RO_KNOWN: CompatRo = CompatRo(
    CompatRo::FREE_SPACE_TREE.0 | CompatRo::FREE_SPACE_TREE_VALID.0 | CompatRo::BLOCK_GROUP_TREE.0,
);

impl Filesystem {
    /// Opens what `volume` holds. Reads the chunk tree and the root tree's root, nothing that
    /// grows with the number of files. A log that Linux left is replayed and committed, unless
    /// nothing can be written.
    ///
    /// # Errors
    /// `Unsupported` for features that this version cannot read, or to write where it cannot
    /// write; corruption or the device's error where the roots cannot be read.
    pub fn open(volume: Volume, options: OpenOptions) -> Result<Self> {
        let superblock = volume.superblock();
        let unknown = Incompat(superblock.incompat_flags.get()).without(INCOMPAT_KNOWN);
        if !unknown.is_empty() {
            return Err(Error::Unsupported {
                what: format!("the filesystem's features {unknown}"),
            });
        }
        if superblock.generation.get() == u64::MAX {
            return Err(Error::Corrupt(
                Corruption::new(Reason::WrongGeneration)
                    .have(format!("superblock of generation {}", superblock.generation))
                    .expect("one that another can follow"),
            ));
        }
        let mut notices = notices_of(&superblock);
        let store = Arc::new(Store::new(Arc::new(volume), options.cache_bytes));
        let chunk_root = BlockPtr {
            addr: LogicalAddr(superblock.chunk_root.get()),
            generation: Generation(superblock.chunk_root_generation.get()),
            level: superblock.chunk_root_level,
        };
        let chunk_tree = Arc::new(Tree::new(RootId::CHUNK_TREE, Arc::clone(&store), chunk_root));
        load_chunks(&chunk_tree)?;
        store.volume().note_durable_items();
        let root = BlockPtr {
            addr: LogicalAddr(superblock.root.get()),
            generation: Generation(superblock.generation.get()),
            level: superblock.root_level,
        };
        let root_tree = Arc::new(Tree::new(RootId::ROOT_TREE, Arc::clone(&store), root));
        root_tree.lookup(&Key::MIN)?;
        let chunk_block = chunk_tree.store.read(&chunk_root, RootId::CHUNK_TREE, None)?;
        let chunk_tree_uuid = Uuid(chunk_block.header().chunk_tree_uuid);
        let alloc_options = AllocOptions {
            cache_free_space_form: options.cache_free_space_form,
            grow_device: options.grow_device,
            discard: options.discard,
        };
        let alloc = Allocator::new(Arc::clone(&store), &superblock, chunk_tree_uuid, alloc_options);
        let read_only = read_only_reason(store.volume(), &options, &notices);
        notices.extend(store.volume().left_out().iter().cloned().map(Notice::DeviceLeftOut));
        // Where it can be written, the log becomes part of it before anything else does.
        let has_log = superblock.log_root.get() != 0;
        let is_writable = read_only.is_none();
        let replays = has_log && is_writable;
        if is_writable {
            // Here, where a device that fails costs nobody what he wrote.
            store.volume().make_opened_durable()?;
        }
        if has_log && !replays {
            notices.push(Notice::LogNotReplayed);
        }
        let core = Core::new(
            Roots::new(store, root_tree, chunk_tree),
            alloc,
            Arc::clone(&options.runtime),
            superblock,
            read_only,
            transaction_bytes_max(&options),
        );
        let files = Arc::<FileState>::default();
        core.install(Arc::clone(&files) as Arc<dyn Flush>);
        let open_files = OpenFiles::new(&options, core.roots.store.geometry().csum, &files);
        let cleaning = Mutex::default();
        let notices_set = OnceLock::new();
        let inner = Inner {
            core,
            files,
            options,
            notices: notices_set,
            cleaning,
            open_files,
            subvolume_holds: SubvolumeHolds::default(),
        };
        let fs = Self { inner: Arc::new(inner) };
        if is_writable {
            fs.inner.core.roots.look_for_shared()?;
        }
        // First the log: nothing may commit before its space is claimed.
        if replays {
            log_replay::replay(&fs)?;
        }
        if is_writable && fs.inner.core.alloc.needs_rebuild(fs.compat_ro()) {
            match fs.rebuild_free_space_tree() {
                // Without it, free space is read from the extent tree; a later open finds room.
                Err(Error::NoSpace { .. }) => {}
                result => result?,
            }
        }
        if is_writable {
            notices.extend(fs.clean_at_open());
        }
        let _ = fs.inner.notices.set(notices);
        Ok(fs)
    }

    /// Removes what had no name left in the top level when the filesystem was last closed, and looks
    /// for a deleted subvolume that is to be freed. Other subvolumes are cleaned when they are first
    /// changed, and deleted ones freed in the background.
    fn clean_at_open(&self) -> Vec<Notice> {
        let top = RootId::FS_TREE;
        let known = self.inner.files.names().check_known(&self.inner.core, top);
        let known = known.map_err(|error| (top, error));
        let cleaned = known.and_then(|()| self.clean_noted_orphans());
        let found = self.next_deleted().map(drop).map_err(|error| (RootId::ROOT_TREE, error));
        let failures = [cleaned, found].into_iter().filter_map(Result::err);
        failures.map(|(root, error)| Notice::OrphansNotCleaned { root, error }).collect()
    }

    /// Makes the free space tree anew and commits.
    fn rebuild_free_space_tree(&self) -> Result<()> {
        let core = &self.inner.core;
        let mut handle = self.begin(core.alloc.reservation_of_rebuild(&core.roots)?)?;
        core.alloc
            .rebuild_free_space_tree(&mut handle.txn)
            .map_err(|error| handle.txn.abort(error))?;
        drop(handle);
        self.commit()
    }

    /// What the user should know of this filesystem.
    pub fn notices(&self) -> &[Notice] {
        self.inner.notices.get().map_or(&[], Vec::as_slice)
    }

    /// The superblock as last read or written.
    pub fn superblock(&self) -> Superblock {
        self.volume().superblock()
    }

    /// How data is compressed of files that do not say otherwise; `None` where it is not.
    pub fn compression(&self) -> Option<Method> {
        self.inner.options.compression
    }

    /// The devices and the chunk map.
    pub fn volume(&self) -> &Volume {
        self.inner.core.roots.store.volume()
    }

    /// Bytes of a sector, the unit of data.
    pub fn sectorsize_bytes(&self) -> u64 {
        self.inner.core.roots.store.geometry().sectorsize_bytes as u64
    }

    /// Bytes of a tree block.
    pub fn nodesize_bytes(&self) -> u64 {
        self.inner.core.roots.store.geometry().nodesize_bytes as u64
    }

    /// The checksum of blocks and data.
    pub fn csum_type(&self) -> CsumType {
        self.inner.core.roots.store.geometry().csum
    }

    /// Features that a reader must know.
    pub fn incompat(&self) -> Incompat {
        Incompat(self.superblock().incompat_flags.get())
    }

    /// Features that a writer must know.
    pub fn compat_ro(&self) -> CompatRo {
        CompatRo(self.superblock().compat_ro_flags.get())
    }

    /// Tree blocks read from the devices so far.
    pub fn blocks_read(&self) -> u64 {
        self.inner.core.roots.store.blocks_read()
    }

    /// Tree blocks written to the devices so far, each once, whatever its copies.
    pub fn blocks_written(&self) -> u64 {
        self.inner.core.roots.store.blocks_written()
    }

    /// Searches so far of any tree from its root to a leaf, those of changes included.
    pub fn tree_searches(&self) -> u64 {
        self.inner.core.roots.store.searches()
    }

    /// Searches of the free space tree for the form of a block group, so far: what
    /// [`OpenOptions::cache_free_space_form`] saves.
    #[doc(hidden)]
    pub fn free_space_form_searches(&self) -> u64 {
        self.inner.core.alloc.form_searches()
    }

    /// How long each run of an extent's delayed references took, in nanoseconds, since the
    /// filesystem was opened.
    pub fn delayed_ref_times(&self) -> DelayedRefTimes {
        let times = self.inner.core.alloc.ref_times();
        DelayedRefTimes {
            count: times.len(),
            mean_ns: times.mean(),
            median_ns: times.value_at_quantile(0.5),
            p90_ns: times.value_at_quantile(0.9),
            p99_ns: times.value_at_quantile(0.99),
            max_ns: times.max(),
            buckets: times
                .iter_log(128, 2.0)
                .map(|bucket| (bucket.value_iterated_to(), bucket.count_since_last_iteration()))
                .collect(),
        }
    }

    /// Names the filesystem. Durable with the next commit.
    ///
    /// # Errors
    /// `TooLong` beyond 255 bytes, `InvalidArgument` for one with a zero byte or a line break;
    /// as [`Filesystem::begin`].
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        if label.contains(&0) || label.contains(&b'\n') {
            return Err(Error::InvalidArgument {
                what: "a label with a zero byte or a line break".to_owned(),
            });
        }
        let mut bytes = [0; LABEL_BYTES];
        let max_bytes = LABEL_BYTES - 1;
        let place = bytes[..max_bytes].get_mut(..label.len()).ok_or_else(|| Error::TooLong {
            what: "label".to_owned(),
            have_bytes: label.len(),
            max_bytes,
        })?;
        place.copy_from_slice(label);
        let mut handle = self.begin(Reservation::items(0))?;
        handle.txn.change_superblock(|superblock| superblock.label = bytes);
        Ok(())
    }

    /// Lets the filesystem have `total_bytes` of a device, which is made as long where it is an image
    /// file. Durable with the next commit.
    ///
    /// # Errors
    /// `InvalidArgument` for fewer bytes than it has, or a device that is not there; the volume's
    /// error where the device has a length of its own.
    pub fn grow_device(&self, devid: DeviceId, total_bytes: u64) -> Result<()> {
        let _handle = self.begin(Reservation::items(1))?;
        self.inner.core.alloc.grow_device(devid, total_bytes)
    }

    /// Time, threads and identifiers.
    pub fn runtime(&self) -> &Runtime {
        &self.inner.options.runtime
    }

    /// Opens a handle for the operations that `reservation` names. Nothing that is done through it
    /// is durable before [`Filesystem::commit`].
    ///
    /// The thread that holds a handle must not open another: the second may wait for a commit,
    /// which waits for the first.
    ///
    /// # Errors
    /// `ReadOnly`, `Aborted`, or `NoSpace` when the worst case does not fit.
    pub fn begin(&self, reservation: Reservation) -> Result<Handle<'_>> {
        self.clean_noted_orphans().map_err(|(_, error)| error)?;
        self.begin_beside_dirty(reservation)
    }

    /// Whether changes are possible. Looks, and does nothing: opens no handle, waits for no commit.
    ///
    /// # Errors
    /// `ReadOnly` where the filesystem was opened so; `Aborted`, with its first cause, after a commit that
    /// failed.
    pub fn check_writable(&self) -> Result<()> {
        self.inner.core.check_writable()
    }

    /// As [`Filesystem::check_writable`], in a subvolume.
    ///
    /// # Errors
    /// As there, and `ReadOnly` where the subvolume is; `NotFound` where there is none.
    pub fn check_subvolume_writable(&self, root: RootId) -> Result<()> {
        self.check_writable()?;
        self.inner.files.names().check_writable(&self.inner.core, root)
    }

    /// Cleans the orphans of subvolumes that were looked at since, to be changed. That of which it
    /// fails is not tried again.
    fn clean_noted_orphans(&self) -> Result<(), (RootId, Error)> {
        let mut noted = self.inner.files.take_uncleaned();
        while let Some(root) = noted.pop() {
            if let Err(error) = self.clean_orphans_or_later(root) {
                self.inner.files.names().note_uncleaned(noted);
                return Err((root, error));
            }
        }
        Ok(())
    }

    /// As [`Filesystem::begin`], without looking for what is to be cleaned up: for who holds a file's
    /// data lock, which a clean-up would wait for.
    pub(crate) fn begin_step(&self, reservation: Reservation) -> Result<Handle<'_>> {
        Ok(Handle { fs: self, txn: self.inner.core.begin(reservation)? })
    }

    /// As [`Filesystem::begin_step`], for who has another way: `None` where there is no space without a commit.
    pub(crate) fn try_begin_step(&self, reservation: Reservation) -> Result<Option<Handle<'_>>> {
        Ok(self.inner.core.try_begin(reservation)?.map(|txn| Handle { fs: self, txn }))
    }

    /// As [`Filesystem::begin_step`], for extents of a subvolume that are to be written in place later. Those of the transaction in which
    /// its last snapshot was made count as shared with that, for us and for Linux, whose snapshots are the last that a transaction makes: so it
    /// is committed first, unless commits are held.
    pub(crate) fn begin_step_behind_snapshots(
        &self,
        root: RootId,
        reservation: Reservation,
    ) -> Result<Handle<'_>> {
        /// Who makes snapshots all the time is not waited for.
        const TRIES_MAX: usize = 10;
        let core = &self.inner.core;
        for _ in 0..TRIES_MAX {
            let handle = self.begin_step(reservation)?;
            if core.roots.tree(root)?.last_snapshot() < handle.txn.generation() || core.is_held() {
                return Ok(handle);
            }
            drop(handle);
            core.commit_unless_held()?;
        }
        self.begin_step(reservation)
    }

    /// As [`Filesystem::begin_step_behind_snapshots`] for data of a file that is written in place, else as [`Filesystem::begin_step`].
    pub(crate) fn begin_step_for_data(
        &self,
        root: RootId,
        inode_flags: u64,
        reservation: Reservation,
    ) -> Result<Handle<'_>> {
        match inode_flags & flags::NODATACOW {
            0 => self.begin_step(reservation),
            _ => self.begin_step_behind_snapshots(root, reservation),
        }
    }

    /// While the answer lives, nothing commits by itself: all that is done becomes durable with one
    /// [`Filesystem::commit`], or not at all where the filesystem is dropped instead: what was done
    /// stays in memory, and who goes on with it commits it. What does not fit three quarters of
    /// [`OpenOptions::cache_bytes`], or into the space that there is without a commit, is refused.
    pub fn hold_commits(&self) -> HeldCommits<'_> {
        self.inner.core.hold_commits(transaction_bytes_max(&self.inner.options).max(1));
        HeldCommits { fs: self }
    }

    /// Makes durable all that was done through handles closed before the call. Of many threads that
    /// ask at once, one does it for all.
    ///
    /// # Errors
    /// `Aborted`, with its first cause: the medium then holds the last commit.
    pub fn commit(&self) -> Result<()> {
        // New contents are stored first: to clean may take a commit of its own.
        self.commit_with_written_anew(|| {
            match self.clean_noted_orphans() {
                Ok(()) => {}
                Err((_, error @ Error::Aborted { .. })) => return Err(error),
                // Orphans that cannot be cleaned, as for damage, keep nobody's changes from becoming
                // durable. Who changes something next hears of it.
                Err((root, _)) => self.inner.files.names().note_uncleaned(vec![root]),
            }
            self.inner.core.commit()
        })?;
        // What was unlinked and found no room to go has some now.
        let late = self.inner.files.names().take_late();
        let mut count = 0;
        for root in late {
            match self.clean_orphans(root) {
                Ok(cleaned) => count += cleaned,
                Err(Error::NoSpace { .. } | Error::Limit { .. }) => {
                    self.inner.files.names().note_late(root);
                }
                Err(error @ Error::Aborted { .. }) => return Err(error),
                // The commit is done; they go at the next open.
                Err(_) => {}
            }
        }
        if count > 0 { self.inner.core.commit() } else { Ok(()) }
    }

    /// Makes a file durable, as `fsync` does: all that was done to it through handles closed before
    /// the call. That is a commit of all that was done.
    ///
    /// # Errors
    /// As [`Filesystem::commit`]; `NotFound` where there is no such file; that with which data of it was lost, if nobody's fsync told.
    pub fn fsync(&self, id: InodeId) -> Result<()> {
        if self.is_open(id) || self.has_lost_data(id) {
            return self.open_data(id)?.fsync();
        }
        self.inode(id)?;
        self.commit()
    }

    /// Cuts the only device off behind the last byte that chunks use, commits, and returns the
    /// length that the image can be truncated to.
    ///
    /// # Errors
    /// As [`Filesystem::commit`]; `Unsupported` with several devices.
    pub fn shrink_to_fit(&self) -> Result<u64> {
        if self.volume().device_count() != 1 {
            return Err(Error::Unsupported { what: "shrinking several devices".to_owned() });
        }
        let handle = self.begin(Reservation::items(1))?;
        self.inner.core.alloc.shrink_device_to_fit(&self.inner.core.roots)?;
        drop(handle);
        self.commit()?;
        // Not what it was cut to: what was held back may have needed a chunk since.
        Ok(self.inner.core.alloc.devices_bytes())
    }

    /// The tree `root`, read from its root item when first asked for.
    ///
    /// # Errors
    /// `NotFound` when there is no such tree; corruption where its root item is damaged.
    pub(crate) fn tree(&self, root: RootId) -> Result<Arc<Tree>> {
        self.inner.core.roots.tree(root)
    }

    /// The root item of a tree and its key.
    ///
    /// # Errors
    /// A damaged block or item.
    pub(crate) fn root_item(&self, root: RootId) -> Result<Option<(Key, RootItem)>> {
        self.inner.core.roots.root_item(root)
    }
}

/// Most memory that a transaction takes. The rest is for the blocks that it reads.
fn transaction_bytes_max(options: &OpenOptions) -> u64 {
    options.cache_bytes as u64 / 4 * 3
}

/// Why the filesystem cannot be written, if it cannot.
fn read_only_reason(volume: &Volume, options: &OpenOptions, notices: &[Notice]) -> Option<String> {
    if options.read_only || volume.is_read_only() {
        return Some("opened read-only".to_owned());
    }
    if let Some(notice) = notices.first() {
        return Some(notice.to_string());
    }
    let incompat = Incompat(volume.superblock().incompat_flags.get());
    let unwritten = Incompat(incompat.0 & INCOMPAT_READ_ONLY.0);
    (!unwritten.is_empty()).then(|| format!("feature {unwritten} is read but not written"))
}

fn notices_of(superblock: &Superblock) -> Vec<Notice> {
    let mut notices = Vec::new();
    let unknown = CompatRo(superblock.compat_ro_flags.get()).without(COMPAT_RO_KNOWN);
    if !unknown.is_empty() {
        notices.push(Notice::UnknownCompatRo(unknown));
    }
    notices
}

/// Fills the chunk map from the chunk tree.
fn load_chunks(chunk_tree: &Arc<Tree>) -> Result<()> {
    let volume = chunk_tree.store.shared_volume();
    let mut cursor = chunk_tree.cursor_with(Readahead::Forward);
    cursor.seek(&Key::MIN)?;
    while let Some((key, data)) = cursor.current()? {
        match key.ty {
            KeyType::CHUNK_ITEM if key.objectid == ObjectId::FIRST_CHUNK_TREE => {
                let chunk = Chunk::parse(LogicalAddr(key.offset), data)
                    .map_err(|error| error.in_root(RootId::CHUNK_TREE))?;
                if volume.chunk_at(chunk.start).is_none_or(|known| *known != chunk) {
                    volume.add_chunk(chunk)?;
                }
            }
            KeyType::DEV_ITEM => {
                volume.set_device_item(*DevItem::peek(data)?);
            }
            _ => {}
        }
        cursor.next()?;
    }
    Ok(())
}

/// A handle, from `begin`, to free up to `count` things: for fewer, and fewer in the steps that follow,
/// where there is no room for as many. Who has filled a filesystem may have left less than a long
/// step needs at worst, and what is freed must not depend on what is free.
///
/// # Errors
/// Those of `begin`; `NoSpace` where there is no room for one, either.
pub(crate) fn begin_freeing<'a>(
    count: &mut usize,
    begin: impl Fn(u64) -> Result<Handle<'a>>,
) -> Result<Handle<'a>> {
    loop {
        match begin(*count as u64) {
            Err(Error::NoSpace { .. }) if *count > 1 => *count = count.div_ceil(8),
            handle => return handle,
        }
    }
}
