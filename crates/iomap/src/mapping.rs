//! The seam: what a filesystem says a range of a file is, and what it does for it.
//!
//! Invariants:
//! 1. A mapping is a sample. It carries the [`Cookie`] of the moment when it was taken; whoever acts on what it says
//!    compares the cookie again under the page cache's lock, and maps again if mappings changed since.
//! 2. A filesystem changes a file's mappings under a lock of its own, its extent lock, and calls
//!    [`MappingSequence::changed()`] before it lets go of it.
//! 3. No decision about data rests on the absence of a folio. What is dirty or on its way to the medium
//!    is said by the extent states, which a filesystem looks at under its extent lock ([`DirtyBatch::fill()`]).
//!
//! Lock order: locked ranges, then the filesystem's locks, then the extent states. The page cache's lock is never held while
//! the filesystem is called.

use ubtrfs_rt::{AtomicU64, Ordering};

use crate::address_space::SeenEnd;
use crate::extent_state::{CountQuery, ExtentStates, StateBits, Want};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::LostData;

/// What a range of a file is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MappingKind {
    /// Nothing; reads as zeros.
    Hole,
    /// A hole over which space is reserved, and data is in memory only. Of [`Purpose::Write`].
    Delalloc,
    /// Data on the medium.
    Mapped,
    /// Space that is the file's, and reads as zeros until it is written.
    Unwritten,
    /// Data in the filesystem's own records.
    Inline,
}

impl MappingKind {
    /// Whether it reads as zeros, whatever lies below. What is in memory only is not known here.
    pub fn is_zeros(self) -> bool {
        matches!(self, Self::Hole | Self::Unwritten)
    }
}

/// More about a mapping, for those that report it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MappingFlags {
    /// Others refer to the same data: writing must not change it in place. Need be right for [`Detail::Sharing`] only.
    pub is_shared: bool,
    /// What lies on the medium is not the data itself, byte by byte: compressed, encrypted.
    pub is_encoded: bool,
    /// Of [`Purpose::Write`]: the file had a hole here, so that what is written adds to the space that it takes.
    pub is_new: bool,
    /// Of [`Purpose::Write`]: there is no space for the data but where the mapping lies, and none once it is stale.
    pub is_placed: bool,
}

/// The moment when a mapping was taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cookie(u64);

/// Counts the changes of a file's mappings.
#[derive(Debug, Default)]
pub struct MappingSequence(AtomicU64);

impl MappingSequence {
    /// Before the first change.
    pub fn new() -> Self {
        Self::default()
    }

    /// The moment now; taken under the filesystem's extent lock together with the mapping.
    pub fn cookie(&self) -> Cookie {
        Cookie(self.0.load(Ordering::Acquire))
    }

    /// Whether no mapping changed since.
    pub fn is_current(&self, cookie: Cookie) -> bool {
        self.cookie() == cookie
    }

    /// A mapping of the file changed. Called under the filesystem's extent lock.
    pub fn changed(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// What a range of a file is, at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The range, in whole blocks; holds the first byte asked for, and may reach beyond what was asked for.
    pub range: FileRange,
    /// What it is.
    pub kind: MappingKind,
    /// More about it.
    pub flags: MappingFlags,
    /// When.
    pub cookie: Cookie,
    /// Where it lies in the filesystem's address space, in bytes; only ever reported.
    pub address: Option<u64>,
    /// The filesystem's own, to find the place again in [`FileSystem::read()`].
    pub token: u64,
}

impl Mapping {
    /// Whether it reads as zeros, as far as what is in memory only is not there to be read.
    pub(crate) fn is_zeros(&self) -> bool {
        self.kind.is_zeros() || self.flags.is_new
    }

    /// The same for [`Purpose::Write`], once space is reserved for it: nothing that was there becomes something new.
    #[must_use]
    pub fn reserved(mut self) -> Self {
        if self.kind == MappingKind::Hole {
            self.kind = MappingKind::Delalloc;
            self.flags.is_new = true;
        }
        self
    }

    /// Whether both say the same of `part`, whenever they were taken: what became longer behind it says nothing else of it.
    pub(crate) fn is_same_in(&self, other: &Self, part: FileRange) -> bool {
        let clipped = |mapping: &Self| {
            // What it says of a place counts from its start.
            let start = mapping.range.start;
            let range = FileRange::new(start, mapping.range.end.min(part.end));
            Self { range, cookie: other.cookie, ..*mapping }
        };
        clipped(self) == clipped(other)
    }
}

/// What a mapping is wanted for.
#[derive(Debug)]
pub enum Purpose<'a, 'b> {
    /// To read data, or to tell data from holes. Whether it is shared need not be known.
    Read,
    /// To make the range dirty in memory. The filesystem reserves space for as much of what was asked for as the mapping holds,
    /// or fails; see [`FileSystem::unreserve()`].
    Write,
    /// To zero the range. Over holes and unwritten space the filesystem fills the batch, under its extent lock, and gives
    /// a mapping that ends where the batch does.
    Zero(&'a mut DirtyBatch<'b>),
}

/// What is to be known of mappings that are only looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Detail {
    /// All but whether they are shared.
    Contents,
    /// Also whether they are shared, which may take long to find out.
    Sharing,
}

/// How many runs of dirty blocks a batch holds, so that one call is bounded.
pub const BATCH_RUNS_MAX: usize = 64;

/// The blocks of a range that were dirty or under writeback, at the moment when the filesystem looked.
#[derive(Debug)]
pub struct DirtyBatch<'a> {
    states: &'a ExtentStates,
    runs: Vec<FileRange>,
    covered: Option<FileRange>,
}

impl<'a> DirtyBatch<'a> {
    pub(crate) fn new(states: &'a ExtentStates) -> Self {
        Self { states, runs: Vec::new(), covered: None }
    }

    /// Notes what of `range` is dirty or under writeback now; returns how much of `range`, from its
    /// start, was looked at. The mapping given must not reach further. To be called under the lock under which the filesystem
    /// turns what was written into mappings, which it does before the blocks stop being under writeback. So over what
    /// the filesystem sees unwritten, all blocks that are not in the batch hold nothing but zeros.
    pub fn fill(&mut self, range: FileRange) -> FileRange {
        let want = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
        self.runs.clear();
        let mut covered = range;
        let mut at = range.start;
        while let Some(found) = self
            .states
            .count_range(CountQuery::first_run(FileRange::new(at, range.end), want), None)
        {
            if self.runs.len() == BATCH_RUNS_MAX {
                covered.end = at;
                break;
            }
            at = found.run().end;
            self.runs.push(found.run());
        }
        self.covered = Some(covered);
        covered
    }

    /// What was looked at; `None` if the filesystem did not fill the batch.
    pub(crate) fn covered(&self) -> Option<FileRange> {
        self.covered
    }

    pub(crate) fn runs(&self) -> &[FileRange] {
        &self.runs
    }
}

/// Data to be read.
#[derive(Debug)]
pub struct ReadPiece<'a> {
    /// Where it is: [`MappingKind::Mapped`] or [`MappingKind::Inline`].
    pub mapping: Mapping,
    /// What to read first, in the mapping.
    pub start: FileOffset,
    /// To be filled, one after the other. They do not reach beyond the mapping.
    pub buffers: Vec<&'a mut [u8]>,
}

/// Dirty data on its way to the medium.
#[derive(Debug)]
pub struct WritebackRun<'a> {
    /// Whole blocks that touch. Space was reserved for each of them.
    pub range: FileRange,
    /// Their bytes, in order. What lies beyond the end of the file is zero.
    pub buffers: &'a [&'a [u8]],
    /// Where the file ended in memory when this began. It may have been cut off since, which the filesystem is told beside this: of what
    /// comes from memory it lets the file end at [`crate::AddressSpace::size()`] at most, asked where such news would wait.
    pub size: FileOffset,
}

/// What becomes of space beyond a file's new end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beyond {
    /// It is given up: the file was cut.
    Dropped,
    /// It stays the file's: the file grew, and space may have been allocated further on.
    Kept,
}

/// A run that could not be written, among those given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunFailure<E> {
    /// Which one.
    pub index: usize,
    /// Why.
    pub error: E,
    /// What becomes of it.
    pub fate: Fate,
    /// Parts of this run and of those behind it, whole blocks and ascending, that are stored all the same: their reservations are used
    /// up, and they do not come again.
    pub stored: Vec<FileRange>,
}

/// What becomes of a run that could not be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// The error goes away by itself, and is no reason to lose data: the run keeps its reservation and will come again.
    Kept,
    /// Its data is lost, and so is its reservation, but for one part of whole blocks, which may be empty, wherever it lies then: that is as if the
    /// error passed.
    Lost {
        /// The block in which the file ends on the medium, where the run has it and that is not stored: what that has behind the end
        /// was cut off, and would be shown as soon as the file ended further on, were its zeros lost.
        but: FileRange,
    },
}

/// Whether writes that make a long file longer go past memory, straight from the writer's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StraightWrites {
    /// Others write back better than the writer, from memory.
    Never,
    /// To copy them would be all that memory is good for.
    Always,
    /// Those who write back get what is copied to memory, and the writer does a part of the work himself where he would wait for them: as
    /// long as more is dirty than the background lets be.
    Beside,
}

/// What plugs in below: a filesystem. All offsets and lengths it is given are whole blocks, sizes of files excepted.
pub trait FileSystem: Send + Sync + 'static {
    /// What it keeps of a file.
    type Inode: Send + Sync + 'static;
    /// What it says when something fails.
    type Error: From<crate::Error> + Clone + Send + Sync + std::fmt::Debug + 'static;

    /// The unit in which it allocates, a power of two from 512 to 65536.
    fn block_bytes(&self) -> u32;

    /// Counts the changes of the file's mappings.
    fn sequence<'a>(&self, inode: &'a Self::Inode) -> &'a MappingSequence;

    /// What the file is at the start of `range`, and how far.
    ///
    /// # Errors
    /// If that cannot be read; for [`Purpose::Write`] also if there is no space.
    fn map(
        &self,
        inode: &Self::Inode,
        range: FileRange,
        purpose: Purpose<'_, '_>,
    ) -> Result<Mapping, Self::Error>;

    /// What the file is from the start of `range` on, to be looked at, as far as that comes cheaply: mappings of one moment,
    /// each beginning where the one before ends, at least the first and at most `count_max`, put behind what `mappings` has. The last one
    /// is the first that reaches the end of the range, or ends before.
    ///
    /// # Errors
    /// If the first cannot be read.
    fn map_ahead(
        &self,
        inode: &Self::Inode,
        range: FileRange,
        detail: Detail,
        count_max: usize,
        mappings: &mut Vec<Mapping>,
    ) -> Result<(), Self::Error>;

    /// Reads data of several places of a file, in ascending order, so that what lies together on the medium is read together. If a
    /// mapping is stale, any bytes or any error may come: the caller looks at the cookie then.
    ///
    /// # Errors
    /// If one of them cannot be read.
    fn read(&self, inode: &Self::Inode, pieces: &mut [ReadPiece<'_>]) -> Result<(), Self::Error>;

    /// Brings dirty data to the device, for which space was reserved by [`FileSystem::map()`], and maps it: runs of one file in
    /// ascending order, together so that they can be placed and written together. Two that touch
    /// are apart for their length, or for a [`StateBits::BOUNDARY`] between them, across which the filesystem that set it makes no
    /// extent.
    /// When it returns, mappings show the data, and reads of them give it. Durable only after [`FileSystem::sync()`].
    /// Uses the reservations up of the runs written, and of one that fails. Must not write through the page cache itself: who
    /// writes may wait for this.
    ///
    /// # Errors
    /// The run that failed. Those before it are written. Its own mappings are unchanged in at least the part that was not
    /// written. Those behind it keep their reservations and will come again, but for what is said to be stored. What becomes of
    /// the one that failed it says itself.
    fn write_back(
        &self,
        inode: &Self::Inode,
        runs: &[WritebackRun<'_>],
    ) -> Result<(), RunFailure<Self::Error>>;

    /// Data of a file was lost with an error in writeback, and the file left memory before an open file was told. Who remembers it gives
    /// it back with [`crate::AddressSpace::restore_lost()`].
    fn lost(&self, _inode: &Self::Inode, _lost: LostData<Self::Error>) {}

    /// Writes one run to the device and maps it, without a reservation before, from its front on; else as
    /// [`FileSystem::write_back()`]. Returns how many bytes, in whole blocks and at least one: fewer than all where there is no space
    /// for the rest, or it cannot be written. The rest keeps its mappings, and its contents but where data is overwritten in place.
    ///
    /// # Errors
    /// If nothing was written: there is no space, or it cannot be written.
    fn write_direct(&self, inode: &Self::Inode, run: &WritebackRun<'_>)
    -> Result<u64, Self::Error>;

    /// Whether writes that make a long file longer go past memory.
    fn straight_writes(&self, _inode: &Self::Inode) -> StraightWrites {
        StraightWrites::Always
    }

    /// [`FileSystem::write_direct()`] of such a write.
    ///
    /// # Errors
    /// As there.
    fn write_straight(
        &self,
        inode: &Self::Inode,
        run: &WritebackRun<'_>,
    ) -> Result<u64, Self::Error> {
        self.write_direct(inode, run)
    }

    /// Gives back the reservation for `len_bytes`, which were not made dirty, or were thrown away before they were
    /// written.
    fn unreserve(&self, inode: &Self::Inode, len_bytes: u64);

    /// Where the file ends on the medium; `None` of one that is no more. Behind that end its last block may hold what was cut off,
    /// where a crash came before the zeros were written: so that block goes first where a call will let the file end further on
    /// ([`crate::AddressSpace::flush_old_tail()`]).
    ///
    /// # Errors
    /// If that cannot be read.
    fn stored_size(&self, inode: &Self::Inode) -> Result<Option<FileOffset>, Self::Error>;

    /// Makes the file end at `size`. With [`Beyond::Dropped`] mappings of blocks wholly beyond it go, whatever the filesystem knew of
    /// the file's end: in memory it may have been further on. With [`Beyond::Kept`] space that was allocated beyond it stays.
    ///
    /// # Errors
    /// If that cannot be recorded.
    fn set_size(
        &self,
        inode: &Self::Inode,
        size: FileOffset,
        beyond: Beyond,
    ) -> Result<(), Self::Error>;

    /// Makes whole blocks a hole. Who records then where the file ends, as a dirty block may be gone that would have said so, brings the block in which
    /// it ended there before: [`crate::AddressSpace::flush_old_tail()`].
    ///
    /// # Errors
    /// If that cannot be recorded.
    fn punch(&self, inode: &Self::Inode, range: FileRange) -> Result<(), Self::Error>;

    /// Makes what is a hole in `range` unwritten space, and leaves all else in it as it is. None of it is dirty, nor under
    /// writeback.
    ///
    /// # Errors
    /// If there is no space, or that cannot be recorded; then any part of the range may have space.
    fn allocate(&self, inode: &Self::Inode, range: FileRange) -> Result<(), Self::Error>;

    /// Whether there is space for so many bytes of data now, none of which is taken.
    ///
    /// # Errors
    /// If there is none.
    fn check_space(&self, inode: &Self::Inode, len_bytes: u64) -> Result<(), Self::Error>;

    /// Whether so many bytes can be made unwritten space now, as far as that is known before it begins: [`FileSystem::check_space()`], and what
    /// else that takes. Asked before anything is dropped for it.
    ///
    /// # Errors
    /// As [`FileSystem::check_space()`].
    fn check_unwritten_space(
        &self,
        inode: &Self::Inode,
        len_bytes: u64,
    ) -> Result<(), Self::Error> {
        self.check_space(inode, len_bytes)
    }

    /// Makes whole blocks unwritten space, whatever they were. A filesystem that can do so in one step, which fails before it
    /// has lost data, does. The dirty block that would have said where the file ends may be gone before, as with [`FileSystem::punch()`].
    ///
    /// # Errors
    /// As [`FileSystem::allocate()`]; then any part of the range may be a hole.
    fn make_unwritten(&self, inode: &Self::Inode, range: FileRange) -> Result<(), Self::Error> {
        self.punch(inode, range)?;
        self.allocate(inode, range)
    }

    /// Makes durable what was brought to the device and how it is mapped, and that the file ends at
    /// [`AddressSpace::end_to_record()`](crate::AddressSpace::end_to_record), at least.
    ///
    /// # Errors
    /// If it cannot.
    fn sync(&self, inode: &Self::Inode, end: SeenEnd) -> Result<(), Self::Error>;
}
