//! Regular files that are in use. The kernel does not say when it opens and closes one, which saves two requests each time; so those used
//! last stay open.

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use ubtrfs_engine::{DataFile, Filesystem, InodeId};
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Arc, AtomicBool, Mutex, Ordering, Time};

use crate::message;

/// Files that stay open, if nothing was written to them since their last fsync.
const OPEN_MAX: usize = 1024;
/// Files that stay open at most.
const WRITTEN_MAX: usize = 1 << 16;

/// A file in use.
#[derive(Debug)]
pub(crate) struct UsedFile {
    pub(crate) data: DataFile,
    /// Open once more, for who syncs the filesystem: an error of writeback is told to him and, by `data`, to who syncs the file.
    of_filesystem: DataFile,
    /// It has no capabilities that a write would have to take from it, as far as is known.
    is_without_capabilities: AtomicBool,
    is_immutable: AtomicBool,
    is_append_only: AtomicBool,
    /// Since its last fsync.
    is_written: AtomicBool,
    /// Somebody is about to have the kernel forget its data, and has not begun.
    is_forgotten_soon: AtomicBool,
    /// With `-o writeback`: when its data and it were changed last, as the kernel has said.
    times: Mutex<Option<(Time, Time)>>,
}

impl UsedFile {
    /// It is about to be written.
    pub(crate) fn note_written(&self) {
        self.is_written.store(true, Ordering::Release);
    }

    /// Whether nobody else is about to have the kernel forget its data.
    pub(crate) fn note_forgotten_soon(&self) -> bool {
        !self.is_forgotten_soon.swap(true, Ordering::AcqRel)
    }

    /// What is refused from now on is to be forgotten once more.
    pub(crate) fn note_forgotten(&self) {
        self.is_forgotten_soon.store(false, Ordering::Release);
    }

    /// It is about to be synced, and errors are about to be told.
    pub(crate) fn note_synced(&self) {
        self.is_written.store(false, Ordering::Release);
    }

    /// The kernel says when its data and it were changed last.
    pub(crate) fn note_times(&self, mtime: Time, ctime: Time) {
        *self.times.lock() = Some((mtime, ctime));
    }

    /// What the kernel said of that.
    pub(crate) fn times(&self) -> Option<(Time, Time)> {
        *self.times.lock()
    }

    /// Refuses to change one that is immutable. Linux does so where it is opened, which the kernel does not tell here; so who
    /// has it open when it becomes immutable is refused, too.
    pub(crate) fn check_mutable(&self) -> message::Result {
        if self.is_immutable.load(Ordering::Acquire) { Err(Errno::PERM) } else { Ok(()) }
    }

    /// Refuses to change what is there of one that is immutable or append-only: also what was stored to a map, which Linux lets nobody make to store to
    /// of such a file.
    pub(crate) fn check_changeable(&self) -> message::Result {
        if self.is_append_only.load(Ordering::Acquire) {
            Err(Errno::PERM)
        } else {
            self.check_mutable()
        }
    }

    /// Its flags are these now.
    pub(crate) fn note_flags(&self, bits: u64) {
        self.is_immutable.store(bits & flags::IMMUTABLE != 0, Ordering::Release);
        self.is_append_only.store(bits & flags::APPEND != 0, Ordering::Release);
    }

    /// Whether it may have capabilities, or was never asked.
    pub(crate) fn may_have_capabilities(&self) -> bool {
        !self.is_without_capabilities.load(Ordering::Acquire)
    }

    /// It has none.
    pub(crate) fn note_without_capabilities(&self) {
        self.is_without_capabilities.store(true, Ordering::Release);
    }

    /// Somebody gives it some.
    pub(crate) fn note_capabilities(&self) {
        self.is_without_capabilities.store(false, Ordering::Release);
    }
}

#[derive(Debug, Default)]
struct Table {
    files: FxHashMap<InodeId, (u64, Arc<UsedFile>)>,
    clock: u64,
    /// With so many, some are closed; more than [`OPEN_MAX`] where many may not be, so that not each new one looks at all.
    look_at: usize,
}

/// The files of a mount.
#[derive(Debug, Default)]
pub(crate) struct Files {
    table: Mutex<Table>,
}

impl Files {
    /// The file, opened if it is not.
    ///
    /// # Errors
    /// As [`Filesystem::open_data`].
    pub(crate) fn open(
        &self,
        fs: &Filesystem,
        id: InodeId,
    ) -> ubtrfs_engine::Result<Arc<UsedFile>> {
        if let Some(file) = self.find(id) {
            return Ok(file);
        }
        let (data, of_filesystem) = (fs.open_data(id)?, fs.open_data(id)?);
        // Who syncs the filesystem hears of that from it.
        of_filesystem.skip_errors();
        let inode = data.inode()?;
        let new = Arc::new(UsedFile {
            data,
            of_filesystem,
            is_without_capabilities: AtomicBool::new(false),
            is_immutable: AtomicBool::new(inode.flags & flags::IMMUTABLE != 0),
            is_append_only: AtomicBool::new(inode.flags & flags::APPEND != 0),
            is_written: AtomicBool::new(false),
            is_forgotten_soon: AtomicBool::new(false),
            times: Mutex::default(),
        });
        let mut table = self.table.lock();
        table.clock += 1;
        let now = table.clock;
        let is_full = table.files.len() >= table.look_at.max(OPEN_MAX);
        let gone = if is_full { table.take_oldest() } else { Vec::new() };
        let (used, file) = table.files.entry(id).or_insert((now, new));
        *used = now;
        let file = Arc::clone(file);
        drop(table);
        // To close one may take its time.
        drop(gone);
        // They may have changed before it could be found here.
        let read = || file.data.inode().map(|inode| inode.flags);
        note_settled(read, |bits| file.note_flags(bits))?;
        Ok(file)
    }

    /// The file, if it is open.
    pub(crate) fn find(&self, id: InodeId) -> Option<Arc<UsedFile>> {
        let mut table = self.table.lock();
        table.clock += 1;
        let now = table.clock;
        let (used, file) = table.files.get_mut(&id)?;
        *used = now;
        Some(Arc::clone(file))
    }

    /// It is not used any more.
    pub(crate) fn close(&self, id: InodeId) {
        let file = self.table.lock().files.remove(&id);
        drop(file);
    }

    /// The last error of writeback of a file that is open which no sync of the filesystem has told.
    ///
    /// # Errors
    /// That error.
    pub(crate) fn take_errors(&self) -> ubtrfs_engine::Result<()> {
        let mut result = Ok(());
        // Of each, though only one is returned: what was told so is not told again.
        for file in self.all() {
            let told = match file.of_filesystem.take_error() {
                // Of one that went meanwhile nothing was to be kept.
                Err(ubtrfs_engine::Error::NotFound { .. }) => Ok(()),
                told => told,
            };
            result = told.and(result);
        }
        result
    }

    /// Any may have been given capabilities.
    pub(crate) fn note_capabilities(&self) {
        self.all().iter().for_each(|file| file.note_capabilities());
    }

    fn all(&self) -> Vec<Arc<UsedFile>> {
        self.table.lock().files.values().map(|(_, file)| Arc::clone(file)).collect()
    }

    /// None is used any more.
    pub(crate) fn close_all(&self) {
        let files = std::mem::take(&mut self.table.lock().files);
        drop(files);
    }
}

/// Notes what is read, until it is the same after that as before: who changes it notes that after the change, and this must not put what was before
/// over it.
fn note_settled<T: PartialEq + Copy, E>(
    mut read: impl FnMut() -> Result<T, E>,
    mut note: impl FnMut(T),
) -> Result<(), E> {
    let mut value = read()?;
    loop {
        note(value);
        let now = read()?;
        if now == value {
            return Ok(());
        }
        value = now;
    }
}

impl Table {
    /// Takes out the half that was not used for longest, of those that may be closed.
    fn take_oldest(&mut self) -> Vec<Arc<UsedFile>> {
        let is_too_much = self.files.len() >= WRITTEN_MAX;
        let mut times: Vec<u64> = self.files.values().map(|(used, _)| *used).collect();
        let middle = times.len() / 2;
        let limit = *times.select_nth_unstable(middle).1;
        let old = self.files.extract_if(|_, (used, file)| {
            *used < limit && (is_too_much || !file.is_written.load(Ordering::Acquire))
        });
        let old = old.map(|(_, (_, file))| file).collect();
        self.look_at = (self.files.len() * 2).min(WRITTEN_MAX);
        old
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// A chattr between the look and the note was undone in memory: a file stayed open to changes that had become immutable.
    #[test]
    fn what_changes_between_the_look_and_the_note_is_noted_last() {
        let (stored, noted, changes) = (Cell::new(0), Cell::new(0), Cell::new(2));
        let note = |value| {
            // Somebody else changes it and notes that.
            if changes.get() > 0 {
                changes.set(changes.get() - 1);
                stored.set(stored.get() + 1);
                noted.set(stored.get());
            }
            noted.set(value);
        };
        note_settled(|| Ok::<_, ()>(stored.get()), note).unwrap();
        assert_eq!((stored.get(), noted.get()), (2, 2));
    }
}
