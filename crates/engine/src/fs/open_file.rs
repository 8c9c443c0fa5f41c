//! Files that are open through the page cache: which are, and what that means for all else that is
//! done to them.
//!
//! Invariant: a file has one [`AddressSpace`] as long as anybody has it open or it is dirty. Who reads
//! or writes it otherwise goes through that, or brings it to the medium first.

use std::ops::Deref;
use std::sync::Weak;

use rustc_hash::FxHashMap;
use ubtrfs_iomap::{
    AddressSpace, CacheOptions, FileOffset, FileRange, LostData, MappedRange, OpenFile, PageCache,
    Reach,
};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{CsumType, RootId};
use ubtrfs_rt::{Arc, AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, RwLock};

use super::age_clock::AgeClock;
use super::entry::check_flags;
use super::file_io::{FileIo, IoInode};
use super::inode::{Inode, InodeId};
use super::lost_data::LostFiles;
use super::replaced::WrittenAnew;
use super::state::FileState;
use super::writeback::compressed::Writers;
use crate::error::{Error, Result};
use crate::filesystem::{Filesystem, OpenOptions};

pub(super) type Space = AddressSpace<FileIo>;

/// The files of a filesystem that are open, and the memory that they share.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    cache: Arc<PageCache>,
    /// Files in `spaces`; read without its lock, to skip it where there are none.
    count: AtomicUsize,
    spaces: Mutex<FxHashMap<InodeId, Weak<Space>>>,
    /// Who shares extents of files shares this, and who promises data their space has it alone: see
    /// [`super::placed`].
    pub(super) placing: RwLock<()>,
    /// What was lost of files that are not open any more, and of which no open file was told.
    pub(super) lost: LostFiles,
    /// Whether some of what is dirty may take less space than was promised to it.
    pub(super) may_take_less: AtomicBool,
    pub(super) written_anew: WrittenAnew,
    pub(super) writers: Writers,
    /// How often the flags of an inode were changed: who opens a file meanwhile looks at them again. Changed and read with `spaces` locked.
    flag_changes: AtomicU64,
    age_clock: AgeClock,
}

/// So much may be dirty of a small cache, too, if it is no more than a quarter of it: what is written at once should be long.
const DIRTY_BYTES_ENOUGH: u64 = 8 << 20;

impl OpenFiles {
    pub(crate) fn new(options: &OpenOptions, csum: CsumType, files: &FileState) -> Self {
        let cache_options = options.page_cache.clone().unwrap_or_else(|| {
            let bytes = options.cache_bytes as u64;
            let default = CacheOptions::default();
            // Where a checksum costs more than a copy, the threads that read ahead and write back do better.
            let is_csum_cheap = matches!(csum, CsumType::Crc32c | CsumType::Xxhash);
            // What is dirty is written while processors still have it near: of the default cache twice as much takes 4 % more of them where
            // files are compressed, and gains nothing where they are not.
            let dirty_bytes = (bytes / 16).max(DIRTY_BYTES_ENOUGH.min(bytes / 4));
            // Half of the budget at most; the trees may have what this does not use.
            CacheOptions {
                cached_bytes_max: bytes / 2,
                dirty_bytes_max: default.dirty_bytes_max.min(dirty_bytes),
                dirty_bytes_background: default.dirty_bytes_background.min(dirty_bytes / 2),
                straight_bytes_min: if is_csum_cheap {
                    default.straight_bytes_min
                } else {
                    u64::MAX
                },
                straight_write_bytes_min: if is_csum_cheap {
                    default.straight_write_bytes_min
                } else {
                    u64::MAX
                },
                ..default
            }
        });
        let cache = PageCache::new(cache_options);
        files.set_page_cache(Arc::clone(&cache));
        Self {
            cache,
            count: AtomicUsize::new(0),
            spaces: Mutex::default(),
            placing: RwLock::default(),
            may_take_less: AtomicBool::new(false),
            written_anew: WrittenAnew::default(),
            writers: Writers::default(),
            flag_changes: AtomicU64::new(0),
            age_clock: AgeClock::default(),
            lost: LostFiles::default(),
        }
    }

    /// The file, if it is open or dirty.
    pub(crate) fn find(&self, id: InodeId) -> Option<Arc<Space>> {
        if self.is_none_open() {
            return None;
        }
        self.spaces.lock().get(&id).and_then(Weak::upgrade)
    }

    fn flag_change_count(&self) -> u64 {
        let _spaces = self.spaces.lock();
        self.flag_changes.load(Ordering::Relaxed)
    }

    /// Whether no file is open or dirty.
    pub(super) fn is_none_open(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Gives up what is dirty: the filesystem is closed.
    pub(crate) fn forget_dirty(&self) {
        self.cache.forget_dirty();
    }

    fn all(&self) -> Vec<Arc<Space>> {
        if self.is_none_open() {
            return Vec::new();
        }
        self.spaces.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Those of a subvolume.
    pub(super) fn of_subvolume(&self, root: RootId) -> Vec<Arc<Space>> {
        let mut spaces = self.all();
        spaces.retain(|space| space.inode().id.root == root);
        spaces
    }

    /// A file leaves memory before an fsync told of what of it was lost.
    pub(super) fn note_lost(&self, id: InodeId, lost: LostData<Error>) {
        self.lost.note(id, lost);
        // Who opened it anew in this moment looked before it was there.
        if let Some(space) = self.find(id) {
            self.restore_lost(&space);
        }
    }

    fn restore_lost(&self, space: &Space) {
        if let Some(lost) = self.lost.take(space.inode().id) {
            space.restore_lost(lost);
        }
    }

    /// Called by the last owner of the file's space.
    pub(super) fn forget(&self, id: InodeId) {
        let mut spaces = self.spaces.lock();
        // It may have been opened anew since.
        if spaces.get(&id).is_some_and(|space| space.strong_count() == 0) {
            spaces.remove(&id);
            self.count.store(spaces.len(), Ordering::Release);
        }
    }
}

/// A regular file that is open: reads and writes go through memory, and [`OpenFile::fsync`] makes them
/// durable. Threads may share it. All operations of [`OpenFile`] are on it; those that change the file
/// are here.
///
/// The thread that calls an operation holds no [`Handle`](crate::Handle). A file that is removed while
/// it is open fails from then on, unless its inode was kept
/// ([`Filesystem::unlink_deferred`]).
#[derive(Debug)]
pub struct DataFile {
    fs: Filesystem,
    open: OpenFile<FileIo>,
    /// When it was opened.
    was_immutable: bool,
}

impl Deref for DataFile {
    type Target = OpenFile<FileIo>;

    fn deref(&self) -> &OpenFile<FileIo> {
        &self.open
    }
}

impl Filesystem {
    /// Opens a regular file for reading and writing through memory.
    ///
    /// # Errors
    /// `NotFound`, also of an inode without a name that is to be removed; `IsDirectory`; `InvalidArgument` for another type. Whether it
    /// can be written is found when it is.
    pub fn open_data(&self, id: InodeId) -> Result<DataFile> {
        let files = &self.inner.open_files;
        let known = files.find(id);
        let opened = |space: &Arc<Space>| {
            let was_immutable = space.inode().flags() & flags::IMMUTABLE != 0;
            DataFile { fs: self.clone(), open: space.open(), was_immutable }
        };
        let space = match known {
            Some(space) => space,
            None => {
                // Who changes the closed file holds it, and finds it open afterwards.
                let _lock = self.inner.files.lock_data(id);
                if let Some(space) = files.find(id) {
                    return Ok(opened(&space));
                }
                let changes = files.flag_change_count();
                let inode = self.disk_inode(id)?;
                match inode.file_type() {
                    FileType::Regular => {}
                    FileType::Directory => return Err(Error::IsDirectory { what: id.to_string() }),
                    _ => {
                        let what = format!("{id} is no regular file");
                        return Err(Error::InvalidArgument { what });
                    }
                }
                self.inner.files.names().check_not_going(id, inode.nlink)?;
                if inode.size_bytes > FileOffset::MAX.bytes() {
                    let what = format!("{id} of {} bytes", inode.size_bytes);
                    return Err(Error::Limit { what });
                }
                let size = FileOffset::new(inode.size_bytes);
                let (io, of) = (Arc::new(FileIo::new(self)), IoInode::new(self, &inode));
                let space = AddressSpace::new(io, of, size, Arc::clone(&files.cache));
                let mut spaces = files.spaces.lock();
                spaces.insert(id, Arc::downgrade(&space));
                files.count.store(spaces.len(), Ordering::Release);
                let changes_now = files.flag_changes.load(Ordering::Relaxed);
                drop(spaces);
                files.restore_lost(&space);
                if changes_now != changes {
                    self.settle_flags(&space, inode.flags)?;
                }
                space
            }
        };
        Ok(opened(&space))
    }

    /// Brings all that is dirty to the medium, and commits.
    ///
    /// # Errors
    /// As [`Filesystem::flush_files`] and [`Filesystem::commit`].
    pub fn sync(&self) -> Result<()> {
        let flushed = self.flush_files();
        self.commit()?;
        flushed
    }

    /// Brings what is dirty of all files to the medium, and waits for what is on its way. Durable with
    /// the next commit.
    ///
    /// # Errors
    /// That of what is still in memory: data that could not be written while commits are held, the block in which a file ends on the medium,
    /// where the device fails it (it is tried again each time; the file can be cut in front of it, or removed), or where a file
    /// ends, or when it was written, that could not be entered in its inode; else one with which data was lost of which neither an
    /// fsync told nor this. Each open file's next fsync tells that, too.
    pub fn flush_files(&self) -> Result<()> {
        let mut result = Ok(());
        for space in self.inner.open_files.all() {
            let stored = match self.flush_space(&space) {
                // One that went meanwhile has nothing to be recorded.
                Err(Error::NotFound { .. }) => Ok(()),
                stored => stored,
            };
            result = result.and(stored).and(match space.take_unsynced_error() {
                // Of one that went meanwhile nothing was to be kept.
                Err(Error::NotFound { .. }) => Ok(()),
                told => told,
            });
        }
        result.and(self.inner.open_files.lost.tell_sync())
    }

    /// Whether data of a file that nobody has open was lost, and no fsync told.
    pub(crate) fn has_lost_data(&self, id: InodeId) -> bool {
        self.inner.open_files.lost.has(id)
    }

    /// Brings what is dirty of a file to the medium, and where it ends, and when it was written, to its inode.
    pub(super) fn flush_space(&self, space: &Space) -> Result<()> {
        let end = space.see_end();
        space.flush(FileRange::from(FileOffset::ZERO))?;
        self.record_file(space.inode(), end)
    }

    /// Drops clean file data from memory.
    pub fn drop_clean_data(&self) {
        self.inner.open_files.cache.shrink_clean(u64::MAX);
    }

    /// Writes back what has been dirty for long by a clock in milliseconds, or is too much. A
    /// [`Background`](crate::Background) does so by itself.
    pub fn write_back_due(&self, now_ms: u64) {
        let _ = self.inner.open_files.cache.background_pass(now_ms);
    }

    /// As [`Filesystem::write_back_due`], by the filesystem's clock.
    pub(super) fn write_back_old(&self) {
        self.write_back_due(self.now_ms());
    }

    /// The clock by which data grows old in memory, in milliseconds.
    pub(super) fn now_ms(&self) -> u64 {
        self.inner.open_files.age_clock.at(self.runtime().clock.now())
    }

    pub(super) fn page_cache(&self) -> &PageCache {
        &self.inner.open_files.cache
    }

    /// Whether what is given to memory is written back by others, on other processors.
    pub(super) fn writes_back_beside(&self) -> bool {
        self.runtime().executor.thread_count() > 1 && self.page_cache().has_writeback_service()
    }

    /// Brings what is dirty of a file, if it is open, to the medium, and what its inode does not say
    /// yet to the inode.
    pub(super) fn flush_file(&self, id: InodeId) -> Result<Option<Arc<Space>>> {
        let Some(space) = self.inner.open_files.find(id) else { return Ok(None) };
        let end = space.see_end();
        // What was lost before is told by who syncs the file.
        space.flush_told(FileRange::from(FileOffset::ZERO))?;
        self.record_file(space.inode(), end)?;
        Ok(Some(space))
    }

    /// As [`Filesystem::flush_file`], of all files of a subvolume.
    pub(super) fn flush_subvolume(&self, root: RootId) -> Result<()> {
        for space in self.inner.open_files.of_subvolume(root) {
            match self.flush_file(space.inode().id) {
                // It went meanwhile.
                Err(Error::NotFound { .. }) | Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for what others bring to the medium just now of a file, if there is one. Returns whether there was anything. The thread holds no handle,
    /// and no file's data lock.
    pub(super) fn wait_for_writeback(&self) -> bool {
        let spaces = self.inner.open_files.all();
        spaces.iter().any(|space| space.wait_for_writeback())
    }

    /// No file of the subvolume that is open can be read or written any more. Called by who deletes
    /// it, before anything of it is freed. Returns them: what memory has of them is to be thrown away.
    pub(super) fn end_files_of(&self, root: RootId) -> Vec<Arc<Space>> {
        self.inner.open_files.lost.forget(|id| id.root == root);
        let spaces = self.inner.open_files.of_subvolume(root);
        for space in &spaces {
            space.inode().end(&space.inode().change_mappings());
        }
        spaces
    }

    /// The flags of a file that may be open were changed.
    pub(super) fn note_flags(&self, id: InodeId, bits: u64) {
        let files = &self.inner.open_files;
        if self.compresses(bits) {
            // What is dirty of it was promised space for all its bytes.
            files.may_take_less.store(true, Ordering::Relaxed);
        }
        let spaces = files.spaces.lock();
        files.flag_changes.fetch_add(1, Ordering::Relaxed);
        let space = spaces.get(&id).and_then(Weak::upgrade);
        drop(spaces);
        if let Some(space) = space {
            space.inode().note_flags(bits);
        }
    }

    /// Notes the flags of a file that was just opened, until they are the same after that as before: who changed them before found nobody to
    /// tell, and who changes them now notes that after the change, which this must not put what was before over.
    fn settle_flags(&self, space: &Space, mut noted: u64) -> Result<()> {
        loop {
            let now = self.disk_inode(space.inode().id)?.flags;
            if now == noted {
                return Ok(());
            }
            space.inode().note_flags(now);
            noted = now;
        }
    }

    /// The time of change of a file that may be open was set: what was written before does not count.
    pub(super) fn forget_write_time(&self, id: InodeId) {
        if let Some(space) = self.inner.open_files.find(id) {
            // Who had looked at the tree looks again.
            self.inner.files.note_data_changed(id);
            *space.inode().written.lock() = None;
        }
    }

    /// Whether anybody has a file open, or it is dirty.
    pub(crate) fn is_open(&self, id: InodeId) -> bool {
        self.inner.open_files.find(id).is_some()
    }

    /// The data lock of a file that is not open: while it is held nobody opens it.
    pub(super) fn lock_closed(&self, id: InodeId) -> Option<MutexGuard<'_, ()>> {
        let lock = self.inner.files.lock_data(id);
        (!self.is_open(id)).then_some(lock)
    }

    /// [`Filesystem::write`] to a file that is open.
    pub(super) fn write_open(
        &self,
        id: InodeId,
        offset: ubtrfs_ondisk::FileOffset,
        bytes: &[u8],
    ) -> Result<()> {
        let file = self.open_data(id)?;
        // Not of what was lost before, but of all since: the background may be quicker than the flush.
        file.skip_errors();
        let offset = FileOffset::new(offset.0);
        check_flags(id, self.disk_inode(id)?.flags, offset >= file.size())?;
        let mut done = 0;
        let mut written = Ok(());
        while done < bytes.len() && written.is_ok() {
            let at = offset.saturating_add(done as u64);
            written = file.write(at, &bytes[done..]).map(|count| done += count);
        }
        // What was written before an error stays, too, and is durable with the next commit.
        let flushed = file.space().flush(FileRange::with_len(offset, done as u64));
        written?;
        flushed?;
        file.take_error()
    }

    /// [`Filesystem::truncate`] of a file that is open.
    pub(super) fn truncate_open(&self, id: InodeId, size_bytes: u64) -> Result<()> {
        let file = self.open_data(id)?;
        file.skip_errors();
        check_flags(id, self.disk_inode(id)?.flags, false)?;
        file.truncate(FileOffset::new(size_bytes))?;
        self.flush_space(file.space())?;
        file.take_error()
    }

    /// Bytes that what is in memory only, or on its way to the medium, adds to what a file takes by its inode: what lies over
    /// holes. 0 of a file that is not open.
    pub fn unstored_bytes(&self, id: InodeId) -> u64 {
        let space = self.inner.open_files.find(id);
        space.map_or(0, |space| space.states().delalloc_new_bytes())
    }
}

impl DataFile {
    /// The inode, as of now.
    ///
    /// # Errors
    /// `NotFound` where it was removed.
    pub fn inode(&self) -> Result<Inode> {
        self.fs.inode(self.id())
    }

    /// Which file it is.
    pub fn id(&self) -> InodeId {
        self.open.space().inode().id
    }

    /// As [`OpenFile::write`].
    ///
    /// # Errors
    /// As there; `ReadOnly`, `NoSpace`; `NotPermitted` where the file can only be appended to, or was immutable when it was opened, and
    /// is.
    pub fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize> {
        self.check_change(offset < self.open.size())?;
        Space::io_range(offset, bytes.len() as u64)?;
        self.note(bytes);
        let written = if self.is_append_only() {
            self.write_behind(offset, bytes)
        } else {
            Ok(self.open.write(offset, bytes)?)
        };
        self.fs.note_written(self.open.space());
        written
    }

    /// What was behind the end when it was looked at may be in the file now, as another thread appends.
    fn write_behind(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize> {
        match self.open.write_behind(offset, bytes)? {
            Some(len) => Ok(len),
            None => check_flags(self.id(), flags::APPEND, false).map(|()| 0),
        }
    }

    /// As [`DataFile::write`], of what was written to a cache above this one before: who wrote was allowed to, so that the file
    /// is immutable, or can only be appended to, does not matter any more.
    ///
    /// # Errors
    /// As there.
    pub fn write_cached(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize> {
        self.check(false, false)?;
        Space::io_range(offset, bytes.len() as u64)?;
        self.note(bytes);
        let written = self.open.write(offset, bytes);
        self.fs.note_written(self.open.space());
        written
    }

    /// As [`OpenFile::append`].
    ///
    /// # Errors
    /// As [`DataFile::write`].
    pub fn append(&self, bytes: &[u8]) -> Result<(FileOffset, usize)> {
        self.check_change(false)?;
        self.open.space().check_append(bytes.len() as u64)?;
        self.note(bytes);
        let appended = self.open.append(bytes);
        self.fs.note_written(self.open.space());
        appended
    }

    /// As [`OpenFile::direct_write`]; to a file for appends alone as of what is not whole blocks.
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn direct_write(&self, offset: FileOffset, bytes: &[u8]) -> Result<usize> {
        self.check_change(offset < self.open.size())?;
        if self.is_append_only() {
            // Seldom enough to go through memory.
            let space = self.open.space();
            let before = space.errors_so_far();
            let written = self.write(offset, bytes)?;
            space.flush_written(FileRange::with_len(offset, written as u64), before)?;
            return Ok(written);
        }
        Space::io_range(offset, bytes.len() as u64)?;
        self.note(bytes);
        self.open.direct_write(offset, bytes)
    }

    /// As [`OpenFile::truncate`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn truncate(&self, size: FileOffset) -> Result<()> {
        self.check_change(true)?;
        Space::io_range(size, 0)?;
        self.note_now();
        if size == FileOffset::ZERO && self.open.size() > FileOffset::ZERO {
            // Before it is: another thread may write to it at once.
            self.fs.note_cut(self.open.space());
        }
        self.open.truncate(size)?;
        self.record_times()
    }

    /// As [`DataFile::truncate`], but where it ends there already no time moves: only space that was
    /// allocated beyond goes. So truncate(2) does in Linux, where ftruncate(2) is as that.
    ///
    /// # Errors
    /// As there.
    pub fn resize(&self, size: FileOffset) -> Result<()> {
        self.check_change(true)?;
        Space::io_range(size, 0)?;
        if self.open.drop_beyond(size)? { Ok(()) } else { self.truncate(size) }
    }

    /// As [`OpenFile::zero_range`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn zero_range(&self, offset: FileOffset, len_bytes: u64) -> Result<()> {
        self.check_space_change(true)?;
        Space::space_range(offset, len_bytes)?;
        self.note_now();
        self.open.zero_range(offset, len_bytes)?;
        self.record_times()
    }

    /// As [`OpenFile::punch_hole`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn punch_hole(&self, offset: FileOffset, len_bytes: u64) -> Result<()> {
        self.check_space_change(true)?;
        Space::space_range(offset, len_bytes)?;
        self.note_now();
        self.open.punch_hole(offset, len_bytes)?;
        self.record_times()
    }

    /// As [`OpenFile::allocate`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn allocate(&self, offset: FileOffset, len_bytes: u64, reach: Reach) -> Result<()> {
        self.check_space_change(false)?;
        Space::space_range(offset, len_bytes)?;
        self.note_now();
        self.open.allocate(offset, len_bytes, reach)?;
        self.record_times()
    }

    /// As [`OpenFile::allocate_zeroed`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn allocate_zeroed(&self, offset: FileOffset, len_bytes: u64, reach: Reach) -> Result<()> {
        self.check_space_change(true)?;
        Space::space_range(offset, len_bytes)?;
        self.note_now();
        self.open.allocate_zeroed(offset, len_bytes, reach)?;
        self.record_times()
    }

    /// As [`OpenFile::unshare`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn unshare(&self, offset: FileOffset, len_bytes: u64) -> Result<()> {
        // The contents stay.
        self.check_space_change(false)?;
        self.open.unshare(offset, len_bytes)
    }

    /// As [`OpenFile::map`].
    ///
    /// # Errors
    /// As there.
    pub fn map(&self, offset: FileOffset, len_bytes: u64) -> Result<MappedFile<'_>> {
        Ok(MappedFile { file: self, range: self.open.map(offset, len_bytes)? })
    }

    fn is_append_only(&self) -> bool {
        self.open.space().inode().flags() & flags::APPEND != 0
    }

    /// Refuses a change that the filesystem, the subvolume or the inode's flags forbid. Who has a file open when it becomes immutable may
    /// write on, as in Linux, where an immutable one is not opened to be written.
    fn check_change(&self, changes_old: bool) -> Result<()> {
        self.check(changes_old, self.was_immutable)
    }

    /// As [`DataFile::check_change`], of what fallocate(2) does: refused also to who had it open before.
    fn check_space_change(&self, changes_old: bool) -> Result<()> {
        self.check(changes_old, true)
    }

    fn check(&self, changes_old: bool, minds_immutable: bool) -> Result<()> {
        let fs = &self.fs;
        fs.inner.core.check_writable()?;
        fs.inner.files.names().check_writable(&fs.inner.core, self.id().root)?;
        let inode = self.open.space().inode();
        let minded = if minds_immutable { flags::IMMUTABLE } else { 0 };
        check_flags(self.id(), inode.flags() & (minded | flags::APPEND), !changes_old)?;
        fs.drop_left_behind(inode)
    }

    /// The file is about to be written, and the call is not refused for its arguments. Before it is: writeback may come right behind,
    /// and says when.
    fn note(&self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.note_now();
        }
    }

    /// After a change: where nothing is dirty no writeback comes that says when it was. That there is no space to say it is for who syncs
    /// the file, as the change was made; any other error the caller hears, who would else take a filesystem that has stopped for well.
    fn record_times(&self) -> Result<()> {
        let space = self.open.space();
        if space.is_dirty() {
            return Ok(());
        }
        // Not where it ends: what is on its way says so when it is there.
        match self.fs.record_times(space.inode()) {
            Err(Error::NoSpace { .. } | Error::Limit { .. }) => Ok(()),
            result => result,
        }
    }

    fn note_now(&self) {
        self.open.space().inode().note_write(self.fs.runtime().clock.now());
    }
}

/// A range of a file that is accessed as memory.
#[derive(Debug)]
pub struct MappedFile<'a> {
    file: &'a DataFile,
    range: MappedRange<'a, FileIo>,
}

impl MappedFile<'_> {
    /// The range, in whole blocks.
    pub fn range(&self) -> FileRange {
        self.range.range()
    }

    /// As [`MappedRange::load`].
    ///
    /// # Errors
    /// As there.
    pub fn load(&self, at: FileOffset, buffer: &mut [u8]) -> Result<()> {
        self.range.load(at, buffer)
    }

    /// As [`MappedRange::store`].
    ///
    /// # Errors
    /// As there, and as [`DataFile::write`].
    pub fn store(&self, at: FileOffset, bytes: &[u8]) -> Result<()> {
        self.file.check_change(true)?;
        self.range.check(at, bytes.len())?;
        self.file.note(bytes);
        let stored = self.range.store(at, bytes);
        self.file.fs.note_written(self.file.open.space());
        stored
    }

    /// As [`MappedRange::fault_for_read`].
    ///
    /// # Errors
    /// As there.
    pub fn fault_for_read(&self, at: FileOffset) -> Result<()> {
        self.range.fault_for_read(at)
    }

    /// As [`MappedRange::fault_for_write`].
    ///
    /// # Errors
    /// As [`MappedFile::store`].
    pub fn fault_for_write(&self, at: FileOffset) -> Result<()> {
        self.file.check_change(true)?;
        self.range.check(at, 1)?;
        self.file.note_now();
        self.range.fault_for_write(at)
    }

    /// As [`MappedRange::msync`].
    ///
    /// # Errors
    /// As there.
    pub fn msync(&self, range: FileRange) -> Result<()> {
        self.range.msync(range)
    }
}
