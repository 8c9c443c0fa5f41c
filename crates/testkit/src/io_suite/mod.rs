//! Tests of file I/O that any filesystem passes which plugs into `iomap`: the one in memory, and the engine.
//!
//! A filesystem is tested by what implements [`Harness`]. [`crate::io_suite_tests!`] makes a test of each function here, so that
//! none is forgotten:
//!
//! ```text
//! ubtrfs_testkit::io_suite_tests!(MyHarness::new);
//! ```
//!
//! where `MyHarness::new` makes an empty filesystem with the [`CacheOptions`] that it is given. Random runs print their
//! seed; `UBTRFS_IOMAP_SEEDS` asks for more of them, `UBTRFS_IOMAP_FIRST_SEED` for others, `UBTRFS_IOMAP_CONCURRENT_ROUNDS` for so many rounds of
//! each thread where there are several, `UBTRFS_IOMAP_JUDGED_ONE_IN` and `UBTRFS_IOMAP_REPLAYED_ONE_IN` for more states to be seen by
//! the kernel, and `UBTRFS_IOMAP_OPERATIONS_MIN` fails a test run that did less.

mod allocate;
mod beside_change;
mod concurrency;
mod content;
mod counts;
mod failing_device;
mod file;
mod history;
mod limits;
mod mapped;
mod memory;
mod model;
mod random;
mod random_events;
mod restless;
mod seek;
mod zeroing;

use std::fmt::Debug;

use ubtrfs_iomap::{CacheOptions, FileRange};

pub use allocate::*;
pub use beside_change::*;
pub use concurrency::*;
pub use counts::{
    Count, Running, count, counted, judged_one_in, replayed_one_in,
    zz_counts_of_all_tests_are_what_was_asked_for,
};
pub use failing_device::*;
pub use file::{DataFile, contents, is_on_its_way, walk};
pub use limits::*;
pub use mapped::*;
pub use memory::MemoryHarness;
pub use random::*;
pub use seek::*;
pub use zeroing::*;

/// Why something was refused, whatever a filesystem calls it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The request cannot be met.
    Request(ubtrfs_iomap::Error),
    /// There is no space.
    NoSpace,
    /// A device failed.
    Io,
    /// Anything else.
    Other(String),
}

/// Whether a harness can do something that not all can.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Done {
    /// It did.
    Yes,
    /// It cannot, and did nothing.
    NotSupported,
}

/// How closely a filesystem is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// By some of the judges, and now and then by all.
    Sampled,
    /// By all.
    Full,
}

/// What a file must be when nothing of it is dirty any more.
#[derive(Clone, Debug)]
pub struct Expected<I> {
    /// Which file.
    pub inode: I,
    /// All its bytes.
    pub bytes: Vec<u8>,
    /// The blocks that are data; others read as zeros.
    pub data_blocks: Vec<u64>,
}

/// A filesystem under test.
pub trait Harness: Send + Sync {
    /// What names a file.
    type Inode: Clone + Debug + Send + Sync;
    /// A file that is open.
    type File: DataFile;

    /// How many seeds a random test of the default set runs.
    const SEEDS: u64 = 20;

    /// How many rounds of a race the default set runs.
    const RACE_ROUNDS: u64 = 100_000;

    /// How many kinds of its files are raced.
    const RACES: u64 = 1;

    /// Whether it lies in an image, at which others look, too.
    const IS_IMAGE: bool = false;

    /// The unit in which it allocates.
    fn block_bytes(&self) -> u64 {
        4096
    }

    /// A new, empty file; durable when this returns.
    fn create(&self) -> Self::Inode;

    /// Opens a file. All that are open of one file share its memory.
    fn open(&self, inode: &Self::Inode) -> Self::File;

    /// What an error says.
    fn refusal(&self, error: &<Self::File as DataFile>::Error) -> Refusal;

    /// Bytes that a file takes as `stat` tells them, in whole blocks: also by what is in memory only.
    fn taken_bytes(&self, inode: &Self::Inode) -> u64;

    /// Drops what is clean from memory.
    fn reclaim(&self);

    /// As [`ubtrfs_iomap::PageCache::background_pass()`].
    fn background_pass(&self, now_ms: u64);

    /// Makes durable what the filesystem has, dirty data of files excepted.
    fn commit(&self) {}

    /// Makes durable all that was written so far.
    fn sync(&self) -> Done {
        Done::NotSupported
    }

    /// Moves a file's data elsewhere without changing it.
    fn relocate(&self, _inode: &Self::Inode) -> Done {
        Done::NotSupported
    }

    /// Makes whole blocks of `to`, from `to_start` on, share what a range of `from`, another file, has; the range lies
    /// in it.
    fn clone_range(
        &self,
        _from: &Self::Inode,
        _range: FileRange,
        _to: &Self::Inode,
        _to_start: ubtrfs_iomap::FileOffset,
    ) -> Done {
        Done::NotSupported
    }

    /// Closes the filesystem well and opens it again, so that nothing is in memory. No file is open.
    fn reopen(&mut self);

    /// Loses what is not durable and opens the filesystem again. No file is open.
    fn crash(&mut self) -> Done {
        Done::NotSupported
    }

    /// After so many more writes of data the device fails all, or none again.
    fn fail_data_writes(&self, _left: Option<u64>) -> Done {
        Done::NotSupported
    }

    /// Whether who writes data to the device lets other threads run first: threads at one processor do not meet else.
    fn yield_in_data_writes(&self, _yields: bool) {}

    /// Whether what goes on beside the test, if anything does, rests: from when this returns.
    fn rest(&self, _rests: bool) {}

    /// Writes of data that the device failed so far.
    fn failures(&self) -> u64 {
        0
    }

    /// Looks at the filesystem with other eyes, when nothing is dirty and no file is open: what a checker says,
    /// what another implementation reads.
    fn judge(&mut self, _files: &[Expected<Self::Inode>], _look: Look) {}
}

/// Files as they are, none of them open, are judged, once they are durable.
///
/// # Panics
/// If a judge finds them otherwise.
pub fn judge_files<H: Harness>(harness: &mut H, inodes: &[H::Inode]) {
    let expected: Vec<_> = inodes
        .iter()
        .map(|inode| {
            let file = harness.open(inode);
            file.fsync().expect("the file can be written");
            let block = harness.block_bytes();
            let blocks =
                |data: &FileRange| data.start.bytes() / block..data.end.bytes().div_ceil(block);
            let data_blocks = walk(&file).iter().flat_map(blocks).collect();
            Expected { inode: inode.clone(), bytes: contents(&file), data_blocks }
        })
        .collect();
    harness.reopen();
    harness.judge(&expected, Look::Full);
}

/// Little enough that whatever is clean goes with the next read or write.
pub fn hardly_any_memory(block_bytes: u64) -> CacheOptions {
    CacheOptions {
        cached_bytes_max: block_bytes,
        folio_bytes_max: block_bytes,
        ..CacheOptions::default()
    }
}

/// A few blocks, so that writeback and reclaim go on all the time.
pub fn little_memory(block_bytes: u64) -> CacheOptions {
    CacheOptions {
        cached_bytes_max: 16 * block_bytes,
        dirty_bytes_max: 8 * block_bytes,
        dirty_bytes_background: 4 * block_bytes,
        folio_bytes_max: 4 * block_bytes,
        writeback_bytes_max: 4 * block_bytes,
        readahead_bytes_max: 4 * block_bytes,
        straight_bytes_min: 2 * block_bytes,
        straight_encoded_bytes_min: 2 * block_bytes,
        straight_write_bytes_min: 2 * block_bytes,
        ..CacheOptions::default()
    }
}

/// A test of each function of the suite, for the filesystems that `$make` makes of [`CacheOptions`].
#[macro_export]
macro_rules! io_suite_tests {
    ($make:expr) => {
        $crate::io_suite_tests!(@each $make;
            walk_of_sparse_file_finds_each_extent
            fiemap_names_each_kind_of_extent
            seek_outside_of_the_file_is_no_data
            mapped_store_beyond_end_then_extension_reads_zeros
            mapped_store_beyond_end_after_writeback_then_extension_reads_zeros
            truncate_against_flush_and_reclaim_leaves_no_stale_bytes
            write_and_truncate_by_turns_keeps_all_but_the_cut_bytes
            zero_range_over_more_dirty_runs_than_a_batch_holds_zeroes_all
            zero_range_over_hole_makes_no_data
            bytes_cut_off_before_a_crash_stay_away_when_the_file_grows
            bytes_cut_off_stay_away_when_blocks_behind_come_first
            bytes_cut_off_on_their_way_stay_away_when_the_file_grows
            allocate_gives_holes_space_and_leaves_data
            space_beyond_the_end_goes_with_truncation_down_only
            allocate_that_extends_reads_zeros_behind_the_old_end
            allocate_zeroed_makes_whole_blocks_unwritten_and_zeroes_the_edges
            offsets_at_the_limits_are_answered_as_linux_does
            allocate_at_the_limits_is_answered_as_linux_does
            mapped_access_wholly_beyond_the_end_is_refused
            reads_and_writes_are_atomic_to_each_other
            writes_that_overlap_in_part_are_whole_and_in_one_order
            appends_of_threads_are_all_there_and_whole
            reads_beside_truncation_and_holes_see_bytes_or_zeros
            files_that_share_a_small_cache_keep_their_bytes
            fiemap_and_seek_beside_change_hold_to_what_stays
            failing_device_takes_no_more_from_threads_than_is_told
            mapped_access_of_threads_beside_truncation_and_holes_is_exact
            random_operations_same_as_arrays
            random_operations_with_little_memory_same_as_arrays
            random_operations_where_clean_folios_go_at_once_same_as_arrays
            random_operations_with_mechanisms_off_same_as_arrays
            random_operations_beside_services_same_as_arrays
            zz_counts_of_all_tests_are_what_was_asked_for
        );
    };
    (@each $make:expr; $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                $crate::io_suite::$name($make);
            }
        )*
    };
}
