//! The filesystem in memory under the suite.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use ubtrfs_iomap::{AddressSpace, CacheOptions, FileOffset, FileRange, OpenFile, PageCache};

use super::{Done, Expected, Harness, Look, Refusal};
use crate::iomap_model::{BLOCK, Failure, MemoryFs, MemoryInode};

/// A file of the filesystem in memory.
#[derive(Clone, Debug)]
pub struct MemoryFile {
    number: u64,
    inode: Arc<MemoryInode>,
}

/// The filesystem in memory, and the files of it that are in the page cache.
pub struct MemoryHarness {
    fs: Arc<MemoryFs>,
    options: CacheOptions,
    cache: Arc<PageCache>,
    spaces: Mutex<HashMap<u64, Weak<AddressSpace<MemoryFs>>>>,
    inodes: Mutex<Vec<Arc<MemoryInode>>>,
    next_number: AtomicU64,
}

const UNPOISONED: &str = "no thread panicked with the lock";

impl MemoryHarness {
    /// An empty one.
    pub fn new(options: CacheOptions) -> Self {
        let fs = MemoryFs::new();
        // Others have time to look at what is on its way.
        fs.before_mapping(std::thread::yield_now);
        Self {
            fs,
            cache: PageCache::new(options.clone()),
            options,
            spaces: Mutex::default(),
            inodes: Mutex::default(),
            next_number: AtomicU64::new(0),
        }
    }

    /// The same, where mappings hold so many blocks at most.
    pub fn with_cut_mappings(options: CacheOptions, blocks_max: u64) -> Self {
        let harness = Self::new(options);
        harness.fs.cut_mappings(blocks_max);
        harness
    }

    /// The same, where who makes a long file longer writes beside those who write back.
    pub fn with_writers_beside(options: CacheOptions) -> Self {
        let harness = Self::new(options);
        harness.fs.writes_beside.store(true, Ordering::Relaxed);
        harness
    }

    /// The filesystem below.
    pub fn model(&self) -> Arc<MemoryFs> {
        Arc::clone(&self.fs)
    }

    fn space(&self, file: &MemoryFile) -> Arc<AddressSpace<MemoryFs>> {
        let mut spaces = self.spaces.lock().expect(UNPOISONED);
        if let Some(space) = spaces.get(&file.number).and_then(Weak::upgrade) {
            return space;
        }
        let (fs, cache) = (Arc::clone(&self.fs), Arc::clone(&self.cache));
        let size = FileOffset::new(MemoryFs::stored_size(&file.inode));
        let space = AddressSpace::new(fs, Arc::clone(&file.inode), size, cache);
        spaces.insert(file.number, Arc::downgrade(&space));
        file.inode.note_space(&space);
        space
    }
}

impl Harness for MemoryHarness {
    type Inode = MemoryFile;
    type File = OpenFile<MemoryFs>;

    fn create(&self) -> MemoryFile {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let inode = Arc::default();
        self.inodes.lock().expect(UNPOISONED).push(Arc::clone(&inode));
        MemoryFile { number, inode }
    }

    fn open(&self, file: &MemoryFile) -> OpenFile<MemoryFs> {
        self.space(file).open()
    }

    fn refusal(&self, error: &Failure) -> Refusal {
        match error {
            Failure::Request(error) => Refusal::Request(error.clone()),
            Failure::NoSpace => Refusal::NoSpace,
            Failure::Io | Failure::NotNow => Refusal::Io,
        }
    }

    fn taken_bytes(&self, file: &MemoryFile) -> u64 {
        let unstored_bytes = self.space(file).states().delalloc_new_bytes();
        let blocks = MemoryFs::allocated_blocks(&file.inode).len();
        u64::try_from(blocks).expect("a count fits") * BLOCK + unstored_bytes
    }

    fn reclaim(&self) {
        self.cache.shrink_clean(u64::MAX);
    }

    fn background_pass(&self, now_ms: u64) {
        self.cache.background_pass(now_ms);
    }

    fn commit(&self) {
        self.inodes.lock().expect(UNPOISONED).iter().for_each(|inode| self.fs.commit(inode));
    }

    fn sync(&self) -> Done {
        let spaces = self.spaces.lock().expect(UNPOISONED);
        for space in spaces.values().filter_map(Weak::upgrade) {
            space.open().fsync().expect("nothing fails");
        }
        // Of files that are in memory no more.
        self.commit();
        Done::Yes
    }

    fn relocate(&self, file: &MemoryFile) -> Done {
        self.fs.relocate(&file.inode);
        Done::Yes
    }

    fn clone_range(
        &self,
        from: &MemoryFile,
        range: FileRange,
        to: &MemoryFile,
        to_start: FileOffset,
    ) -> Done {
        let (source, target) = (self.space(from), self.space(to));
        source.flush(range).expect("nothing keeps it from being written");
        let to_range = FileRange::with_len(to_start, range.len_bytes());
        let blocks = range.start.bytes() / BLOCK..range.end.bytes() / BLOCK;
        let clone = || {
            let to_block = to_start.bytes() / BLOCK;
            self.fs.clone_blocks(&from.inode, blocks, &to.inode, to_block);
            Ok(())
        };
        target.replace_range(to_range, to_range.end, clone).expect("nothing fails");
        Done::Yes
    }

    fn reopen(&mut self) {
        self.cache.shrink_dirty(u64::MAX);
        assert_eq!(self.cache.dirty_bytes(), 0);
        for space in self.spaces.get_mut().expect(UNPOISONED).drain() {
            assert!(space.1.upgrade().is_none(), "a clean file that nobody has open is in memory");
        }
        assert_eq!((self.cache.cached_bytes(), self.fs.reserved_blocks()), (0, 0));
        self.commit();
        self.cache = PageCache::new(self.options.clone());
    }

    fn crash(&mut self) -> Done {
        for (_, space) in self.spaces.get_mut().expect(UNPOISONED).drain() {
            if let Some(space) = space.upgrade() {
                // What is in memory of the file goes, and the filesystem is not asked.
                let all = FileRange::from(FileOffset::ZERO);
                space.replace_range(all, FileOffset::ZERO, || Ok(())).expect("nothing fails");
            }
        }
        assert_eq!((self.cache.dirty_bytes(), self.fs.reserved_blocks()), (0, 0));
        self.inodes.get_mut().expect(UNPOISONED).iter().for_each(|inode| self.fs.crash(inode));
        self.cache = PageCache::new(self.options.clone());
        Done::Yes
    }

    fn fail_data_writes(&self, left: Option<u64>) -> Done {
        self.fs.writes_left.store(left.unwrap_or(u64::MAX), Ordering::Relaxed);
        Done::Yes
    }

    fn failures(&self) -> u64 {
        self.fs.failure_count.load(Ordering::Relaxed)
    }

    /// What is stored is what is expected, and nothing is left over.
    fn judge(&mut self, files: &[Expected<MemoryFile>], _look: Look) {
        for file in files {
            let durable = self.fs.durable(&file.inode.inode);
            assert_eq!(durable.len(), file.bytes.len());
            assert!(durable == file.bytes, "file {} is durable otherwise", file.inode.number);
        }
    }
}
