//! The contents of files and symbolic links.

use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::{Corruption, FileOffset, Reason, RootId};
use ubtrfs_rt::Arc;

use super::inode::{Inode, InodeId};
use super::open_file::Space;
use crate::data::file_extent::{ExtentWalk, ExtentsOf, Mapping};
use crate::data::read::FileReader;
use crate::data::sectors::DataSource;
use crate::error::{Error, Result};
use crate::filesystem::Filesystem;

/// Longest target of a symbolic link that is read: Linux's PATH_MAX.
pub(crate) const SYMLINK_BYTES_MAX: usize = 4096;

/// How often a piece is read again that others change meanwhile.
const READ_COUNT_MAX: usize = 100_000;
/// What is read in one go, so that who changes the file now and then does not keep it from being read.
const PIECE_BYTES: u64 = 1 << 20;

/// The mappings of a file in order, its holes included up to its size; preallocation may follow
/// behind that. Beside writers each is told as it was at one moment, and none twice.
#[derive(Debug)]
pub struct FileExtents {
    fs: Filesystem,
    id: InodeId,
    walk: ExtentWalk,
    done: bool,
    /// Of changes, when it was there whole.
    count: u64,
}

impl FileExtents {
    fn step(&mut self) -> Result<Option<Mapping>> {
        let files = &self.fs.inner.files;
        for _ in 0..READ_COUNT_MAX {
            let place = self.walk.place_now();
            let before = files.quiet_data_count(self.id);
            let next = self.walk.next();
            // Who frees what a deleted subvolume held counts no change of its files.
            if self.fs.inner.core.roots.is_deleted(self.id.root) {
                return Err(deleted(self.id));
            }
            // Between what goes and what comes in its place, there is a hole.
            if files.data_count(self.id) == Some(before) {
                // And there is where the file goes.
                if before != self.count {
                    self.fs.check_is_whole(&self.fs.disk_inode(self.id)?)?;
                    self.count = before;
                }
                return next;
            }
            self.walk.go_back(place);
        }
        Err(Error::Limit {
            what: format!("a walk over {}, which others change without end", self.id),
        })
    }
}

fn deleted(id: InodeId) -> Error {
    Error::not_found(format!("{id}, of a deleted subvolume,"))
}

impl Iterator for FileExtents {
    type Item = Result<Mapping>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let next = self.step();
        self.done = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

impl Filesystem {
    /// Reads a file from `offset` on until `buf` is full or the file ends, and returns how many
    /// bytes that were. What has checksums is compared with them; where one copy of the data is
    /// damaged another is read. Holes read as zeros. Behind the bytes returned, `buf` may hold
    /// anything.
    ///
    /// # Errors
    /// `Corrupt` that names subvolume, inode, file offset and logical address where no copy is
    /// whole; `IsDirectory`, or `InvalidArgument` for what is neither file nor symbolic link.
    pub fn read(&self, id: InodeId, offset: FileOffset, buf: &mut [u8]) -> Result<usize> {
        self.open_file(id)?.read(offset, buf)
    }

    /// As [`Filesystem::read`], of what is on the medium.
    pub(super) fn read_device(
        &self,
        id: InodeId,
        offset: FileOffset,
        buf: &mut [u8],
    ) -> Result<usize> {
        self.open_file(id)?.read_device(offset, buf)
    }

    /// As [`Filesystem::read`], again and again for the same file: spares looking the inode up,
    /// and finds its place again where the last call ended. The file's size is that of now.
    ///
    /// # Errors
    /// As [`Filesystem::read`]; `NotFound` once what has no name any more is being removed.
    pub fn open_file(&self, id: InodeId) -> Result<File> {
        // A change after this is seen by the count.
        let (inode, count) = self.counted_inode(id)?;
        let count = Some(count).filter(|count| count.is_multiple_of(2));
        let tree = self.tree(id.root)?;
        let source = self.data_source()?;
        let of = self.extents_of(&inode)?;
        let reader = FileReader::new(source, &tree, of, inode.has_csums())?;
        Ok(File { fs: self.clone(), inode, reader, count })
    }

    /// The file's mappings on the medium, from the one that holds `from` on. What is in memory only is
    /// not in them.
    ///
    /// # Errors
    /// As [`Filesystem::read`]; later damage comes out of the iterator, `NotFound` where the file goes, and `Limit` where others change it
    /// without end.
    pub fn file_extents(&self, id: InodeId, from: FileOffset) -> Result<FileExtents> {
        let count = self.inner.files.quiet_data_count(id);
        let inode = self.disk_inode(id)?;
        let of = self.extents_of(&inode)?;
        let walk = ExtentWalk::new(&self.tree(id.root)?, of, from);
        Ok(FileExtents { fs: self.clone(), id, walk, done: false, count })
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `InvalidArgument` when `id` is none.
    pub fn read_link(&self, id: InodeId) -> Result<Vec<u8>> {
        let mut file = self.open_file(id)?;
        if file.inode.file_type() != FileType::Symlink {
            return Err(Error::InvalidArgument { what: format!("{id} is not a symbolic link") });
        }
        let size_bytes = usize::try_from(file.inode.size_bytes).unwrap_or(usize::MAX);
        if size_bytes > SYMLINK_BYTES_MAX {
            return Err(Corruption::new(Reason::BadValue)
                .in_root(id.root)
                .have(format!("a symbolic link of {size_bytes} bytes, {id}"))
                .expect(format!("at most {SYMLINK_BYTES_MAX}"))
                .into());
        }
        let mut target = vec![0; size_bytes];
        file.read(FileOffset(0), &mut target)?;
        Ok(target)
    }

    pub(crate) fn data_source(&self) -> Result<DataSource> {
        let csum_tree = match self.tree(RootId::CSUM_TREE) {
            Ok(tree) => Some(tree),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let executor = self.runtime().executor;
        let shares_reads = self.inner.options.shares_reads && executor.thread_count() > 1;
        Ok(DataSource {
            store: Arc::clone(&self.inner.core.roots.store),
            csum_tree,
            pending_csums: Arc::clone(&self.inner.files.csums),
            decoded: Arc::clone(&self.inner.files.decoded),
            executor,
            long_reads: shares_reads.then(|| Arc::clone(&self.inner.files.long_reads)),
        })
    }

    /// Refuses what is being removed: a part of it may be gone.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn check_is_whole(&self, inode: &Inode) -> Result<()> {
        if inode.nlink > 0 {
            return Ok(());
        }
        self.inner.files.names().check_is_whole(inode.id)
    }

    /// Where the extents of a file are looked for, all of which are there.
    fn extents_of(&self, inode: &Inode) -> Result<ExtentsOf> {
        self.check_is_whole(inode)?;
        match inode.file_type() {
            FileType::Regular | FileType::Symlink => Ok(ExtentsOf {
                root: inode.id.root,
                inode: inode.id.inode,
                sectorsize_bytes: self.sectorsize_bytes(),
                size_bytes: inode.size_bytes,
            }),
            FileType::Directory => Err(Error::IsDirectory { what: inode.id.to_string() }),
            _ => Err(Error::InvalidArgument { what: format!("{} has no data", inode.id) }),
        }
    }
}

/// A file opened for reading.
#[derive(Debug)]
pub struct File {
    fs: Filesystem,
    inode: Inode,
    reader: FileReader,
    /// What [`FileState::data_count`](super::state::FileState::data_count) said when it was opened;
    /// `None` where a change was under way.
    count: Option<u64>,
}

impl File {
    /// The attributes as they were when it was opened.
    pub fn inode(&self) -> &Inode {
        &self.inode
    }

    /// See [`Filesystem::read`]. The bytes of each MiB are of one moment.
    ///
    /// # Errors
    /// As there; `NotFound` where the subvolume was deleted since; `Limit` where others change the
    /// file without end.
    pub fn read(&mut self, offset: FileOffset, buf: &mut [u8]) -> Result<usize> {
        self.read_all(offset, buf, Look::Memory)
    }

    /// Reads what is on the medium.
    fn read_device(&mut self, offset: FileOffset, buf: &mut [u8]) -> Result<usize> {
        self.read_all(offset, buf, Look::MediumOnly)
    }

    fn read_all(&mut self, offset: FileOffset, buf: &mut [u8], look: Look) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset.0.saturating_add(done as u64);
            let piece_end = (at / PIECE_BYTES).saturating_add(1).saturating_mul(PIECE_BYTES);
            let left = buf.len() - done;
            let len = usize::try_from(piece_end - at).map_or(left, |len| len.min(left));
            // The last piece may use the room behind the bytes that are wanted.
            let room = if len == left { &mut buf[done..] } else { &mut buf[done..done + len] };
            let count = match self.read_piece(FileOffset(at), room, look)? {
                Piece::Read(count) => count,
                Piece::InMemory(space) => {
                    return Ok(done + read_memory(&space, at, &mut buf[done..])?);
                }
            };
            done += count;
            if count < len {
                break;
            }
        }
        Ok(done)
    }

    /// Reads what is of one moment.
    fn read_piece(&mut self, offset: FileOffset, buf: &mut [u8], look: Look) -> Result<Piece> {
        let (files, id) = (&self.fs.inner.files, self.inode.id);
        for _ in 0..READ_COUNT_MAX {
            // Its extents may have been replaced, and their space used again, since it was opened or
            // while it is read: then what is read may be anything.
            let before = files.data_count(id);
            // Memory may be ahead of the medium, also that of who opened it since the last time.
            if look == Look::Memory
                && let Some(space) = self.fs.inner.open_files.find(id)
            {
                return Ok(Piece::InMemory(space));
            }
            if before.is_none() {
                files.quiet_data_count(id);
                continue;
            }
            if before == self.count {
                let result = self.reader.read(offset, buf);
                // Who frees what a deleted subvolume held counts no change of its files.
                if self.fs.inner.core.roots.is_deleted(id.root) {
                    return Err(deleted(id));
                }
                if files.data_count(id) == before {
                    return result.map(Piece::Read);
                }
            }
            let again = self.fs.open_file(id)?;
            (self.inode, self.reader, self.count) = (again.inode, again.reader, again.count);
        }
        Err(Error::Limit { what: format!("reading {id}, which others change without end") })
    }
}

/// Where a file's bytes are looked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Memory,
    MediumOnly,
}

/// What a piece came to.
enum Piece {
    Read(usize),
    /// The file is open.
    InMemory(Arc<Space>),
}

fn read_memory(space: &Arc<Space>, offset: u64, buf: &mut [u8]) -> Result<usize> {
    // No file has bytes further on, which is no mistake here.
    let left = ubtrfs_iomap::FileOffset::MAX.bytes().saturating_sub(offset);
    let len = buf.len().min(usize::try_from(left).unwrap_or(usize::MAX));
    let at = ubtrfs_iomap::FileOffset::new(offset);
    if len == 0 { Ok(0) } else { space.open().read_whole(at, &mut buf[..len]) }
}
