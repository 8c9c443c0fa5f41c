//! From memory to the medium.
//!
//! A run of dirty blocks is taken as long as blocks touch, so that the filesystem can place it as few extents. While it is on its way
//! readers read it, and writers write to a copy.
//!
//! What the block that holds the end of the file has behind it is zeroed each time: a mapped store may have
//! put bytes there, at any time.

use crate::address_space::{AddressSpace, OpenFile, SeenEnd};
use crate::extent_state::{Conversion, CountQuery, LockMode, Span, StateBits, Want};
use crate::mapping::{Fate, FileSystem, RunFailure, WritebackRun};
use crate::offset::{FileOffset, FileRange};
use crate::page_cache::{Blocks, ErrorMark, FolioPart, Gone, LostData, Pages};
use ubtrfs_rt::{MutexGuard, Ordering};

/// What to do about dirty blocks of which an older version is still on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Busy {
    Wait,
    Skip,
}

/// Runs that are given to the filesystem together.
const RUNS_MAX: usize = 256;

/// Blocks on their way.
struct RunUnderWay {
    range: FileRange,
    size: FileOffset,
    ticket: u64,
    parts: Vec<FolioPart>,
}

/// What came of some runs.
struct Written<E> {
    /// Written, or lost.
    done_bytes: u64,
    /// Those from here on are dirty again.
    abandoned_from: Option<FileOffset>,
    /// Why nothing more can be written at the moment.
    obstacle: Option<E>,
}

impl<F: FileSystem> OpenFile<F> {
    /// Makes the file durable: its data, how it is mapped, and its size. All that was written before the call is
    /// durable when it returns without an error.
    ///
    /// # Errors
    /// That of the last writeback of this file that failed since the last call on this open file, whoever began it;
    /// the data of such a writeback is lost. Else that of making it durable, or one with which nothing was lost, as one that passes, and
    /// the data is still in memory.
    pub fn fsync(&self) -> Result<(), F::Error> {
        let synced = self.space.make_durable(FileOffset::MAX);
        self.take_error()?;
        synced
    }

    /// This open file does not tell what was lost before, of which nobody counts as told.
    pub fn skip_errors(&self) {
        *self.errors_seen.lock() = self.space.errors.lock().now();
    }

    /// The error of writeback that this open file was not told of yet, for who does not make the file
    /// durable by [`OpenFile::fsync()`].
    ///
    /// # Errors
    /// That error.
    pub fn take_error(&self) -> Result<(), F::Error> {
        let mut seen = self.errors_seen.lock();
        let (error, mark) = self.space.errors.lock().since(*seen);
        *seen = mark;
        error.map_or(Ok(()), Err)
    }
}

impl<F: FileSystem> AddressSpace<F> {
    /// Makes the file durable up to `upto`: what it has before that, and that it ends there, or where it does. Who cuts it meanwhile is waited
    /// for: a cut that is refused leaves the file as long as it was, and on the medium it may have been shorter by then.
    pub(crate) fn make_durable(&self, upto: FileOffset) -> Result<(), F::Error> {
        let sync = || -> Result<SeenEnd, F::Error> {
            let end = self.see_end().at_most(upto);
            self.flush(FileRange::new(FileOffset::ZERO, upto))?;
            self.filesystem.sync(&self.inode, end)?;
            Ok(end)
        };
        let seen = sync()?;
        if !self.is_being_cut() && !self.was_cut_in_vain_since(seen) {
            return Ok(());
        }
        // Who changes where a file ends has all behind that locked, as far as one can reach.
        let last = FileRange::from(FileOffset::MAX.round_down(self.block_bytes));
        let _locked = self.states.lock(last, LockMode::Shared);
        if self.was_cut_in_vain_since(seen) { sync().map(drop) } else { Ok(()) }
    }

    /// Brings to the device what is dirty in `range`, as far as the file reaches now, and waits for what is on its way. What others append
    /// meanwhile is not waited for: who appends as fast as the device writes would let it never end. Errors with which data was lost are kept
    /// for [`OpenFile::fsync()`], and told at once by [`AddressSpace::flush_told()`] only. Durable only after that.
    ///
    /// # Errors
    /// One that passes, or with which the block could not be written in which the file ends on the medium ([`Fate`]): some of it is
    /// still dirty.
    pub fn flush(&self, range: FileRange) -> Result<(), F::Error> {
        // Under the lock under which what is appended becomes dirty and of the file: who had the place taken from it that an append counts
        // on waits for that append here.
        let pages = self.pages.lock();
        let size = self.size();
        drop(pages);
        let end = range.end.min(size.round_up(self.block_bytes)).max(range.start);
        self.flush_blocks(range, FileRange::new(range.start, end)).map(drop)
    }

    /// Brings to the device what is dirty in `written`, and waits for what is on its way in `range`. Returns how many bytes were written or lost.
    fn flush_blocks(&self, range: FileRange, written: FileRange) -> Result<u64, F::Error> {
        let blocks = self.blocks(range);
        let mut done_bytes = 0;
        loop {
            let abandoned_before = self.pages.lock().abandoned_count();
            let (bytes, obstacle) = self.write_back_runs(written, u64::MAX, Busy::Wait);
            if let Some(obstacle) = obstacle {
                return Err(obstacle);
            }
            done_bytes += bytes;
            let mut pages = self.pages.lock();
            self.wait_for_runs(&mut pages, &blocks);
            // What somebody else had begun may be dirty again, because a run before it failed.
            if pages.abandoned_count() == abandoned_before {
                self.unlist_if_clean(&mut pages);
                return Ok(done_bytes);
            }
        }
    }

    /// [`AddressSpace::flush()`] for who goes on with what is on the medium, and so has to know of data that did not get there: an error
    /// of this file's writeback that came meanwhile is returned, whoever began it. [`OpenFile::fsync()`] tells it, too.
    ///
    /// # Errors
    /// As [`AddressSpace::flush()`], and one with which data was lost.
    pub fn flush_told(&self, range: FileRange) -> Result<(), F::Error> {
        let before = self.errors.lock().now();
        self.flush(range)?;
        let lost = self.errors.lock().look_since(before);
        lost.map_or(Ok(()), Err)
    }

    /// The errors so far, for [`AddressSpace::flush_written()`].
    pub fn errors_so_far(&self) -> ErrorMark {
        self.errors.lock().now()
    }

    /// [`AddressSpace::flush()`] for who just wrote `range`, and takes for written what stays dirty as well. `before` is of before he wrote: where
    /// too much is dirty he, or somebody else, has written back some of it already.
    ///
    /// # Errors
    /// One with which data of this file was lost since, whoever began that. [`OpenFile::fsync()`] tells it, too.
    pub fn flush_written(&self, range: FileRange, before: ErrorMark) -> Result<(), F::Error> {
        // What stays dirty comes again, and who makes it durable is told why it cannot be.
        let _ = self.flush(range);
        let lost = self.errors.lock().look_since(before);
        lost.map_or(Ok(()), Err)
    }

    /// For who syncs all files: the error with which data of this one was lost, if neither an open file was told of it nor this.
    ///
    /// # Errors
    /// That error.
    pub fn take_unsynced_error(&self) -> Result<(), F::Error> {
        self.errors.lock().take_unsynced().map_or(Ok(()), Err)
    }

    /// What was lost of this file when it was in memory before: who has it open, and who opens it next, is told by an fsync.
    pub fn restore_lost(&self, lost: LostData<F::Error>) {
        self.errors.lock().restore(lost);
    }

    /// Waits for what is on its way to the device, and was begun before. Returns whether there was anything.
    pub fn wait_for_writeback(&self) -> bool {
        let blocks = self.blocks(FileRange::from(FileOffset::ZERO));
        self.wait_for_runs(&mut self.pages.lock(), &blocks)
    }

    /// Waits for what is on its way in `blocks`, and was begun before. Returns whether there was anything.
    pub(crate) fn wait_for_runs(&self, pages: &mut MutexGuard<'_, Pages>, blocks: &Blocks) -> bool {
        let ticket = pages.next_ticket();
        let mut has_waited = false;
        while pages.has_writeback(blocks, ticket) {
            self.ended.wait(pages);
            has_waited = true;
        }
        has_waited
    }

    /// Before the file ends at `upto` on the medium: brings the block in which it ends there now, where it is dirty. Behind its end
    /// that block may hold what was cut off, or was written and never became part of the file, as a crash left it; memory has
    /// zeros there, or what was written since.
    ///
    /// # Errors
    /// As [`AddressSpace::flush_told()`]; that of [`FileSystem::stored_size()`].
    pub fn flush_old_tail(&self, upto: FileOffset) -> Result<(), F::Error> {
        self.old_tail(upto)?.map_or(Ok(()), |tail| self.flush_told(tail))
    }

    /// The block that must be on the medium before runs that are about to be written, and is not; `None` where it is one of them, of
    /// which the filesystem writes it first.
    fn old_tail_beside(&self, runs: &[RunUnderWay]) -> Result<Option<FileRange>, F::Error> {
        let Some(last) = runs.last() else { return Ok(None) };
        let tail = self.old_tail(last.range.end)?;
        Ok(tail.filter(|tail| !runs.iter().any(|run| run.range.overlaps(*tail))))
    }

    /// Runs that were begun and are not to be written now are dirty again.
    fn abandon(&self, runs: &[RunUnderWay]) {
        let mut pages = self.pages.lock();
        let unused_bytes: u64 = runs.iter().map(|run| self.abandon_run(&mut pages, run, &[])).sum();
        drop(pages);
        self.ended.notify_all();
        if unused_bytes > 0 {
            self.filesystem.unreserve(&self.inode, unused_bytes);
        }
    }

    /// The block that must be on the medium before the file may end at `upto` there, and is not.
    fn old_tail(&self, upto: FileOffset) -> Result<Option<FileRange>, F::Error> {
        let Some(end) = self.filesystem.stored_size(&self.inode)? else { return Ok(None) };
        let tail = FileRange::new(end, end.round_up(self.block_bytes));
        if upto <= end || tail.is_empty() {
            return Ok(None);
        }
        let block = tail.round_out(self.block_bytes);
        let is_missing = Want::Any(StateBits::DELALLOC | StateBits::ORDERED);
        Ok(self.states.test(block, is_missing).then_some(block))
    }

    /// The block in which the file ends on the medium, where it could not be written before, and something in `range` is dirty that is it or lies
    /// behind it. `None` where the range is that block.
    fn failed_tail(&self, range: FileRange) -> Result<Option<FileRange>, F::Error> {
        if !self.has_failed_tail() {
            return Ok(None);
        }
        let Some(tail) = self.old_tail(FileOffset::MAX)? else {
            self.has_failed_tail.store(false, Ordering::Relaxed);
            return Ok(None);
        };
        let from_there = FileRange::new(range.start.max(tail.start), range.end);
        let dirty = CountQuery::first_run(from_there, Want::All(StateBits::DELALLOC));
        let needs_it = tail != range && self.states.count_range(dirty, None).is_some();
        Ok(needs_it.then_some(tail))
    }

    /// Whether the block in which the file ends on the medium could not be written, and was not since.
    pub(crate) fn has_failed_tail(&self) -> bool {
        self.has_failed_tail.load(Ordering::Relaxed)
    }

    /// Brings `bytes_max` dirty bytes to the device, in whole blocks and at least one, but none of which an older version is
    /// on its way; returns how many.
    pub(crate) fn write_back_dirty(&self, range: FileRange, bytes_max: u64) -> u64 {
        self.write_back_runs(range, bytes_max, Busy::Skip).0
    }

    /// As [`AddressSpace::write_back_dirty()`] of all of the file, in sweeps: each goes once from the beginning to where the file ended when
    /// it began, in as many calls as that takes. So who dirties the same blocks over and over keeps none behind them from being written, and who
    /// appends none before.
    pub(crate) fn write_back_swept(&self, bytes_max: u64) -> u64 {
        let mut done_bytes = 0;
        loop {
            let mut pages = self.pages.lock();
            if pages.sweep.is_empty() {
                let end = self.size().round_up(self.block_bytes);
                pages.sweep = FileRange::new(FileOffset::ZERO, end);
            }
            let sweep = pages.sweep;
            drop(pages);
            done_bytes += self.write_back_dirty(sweep, bytes_max - done_bytes);
            if done_bytes >= bytes_max {
                return done_bytes;
            }
            // There is nothing more in it, or nothing more can be written.
            self.pages.lock().sweep = FileRange::default();
            if sweep.start == FileOffset::ZERO {
                return done_bytes;
            }
        }
    }

    /// Returns how many bytes were written or lost, and why no more could be. A block in which the file ends on the medium that could not be
    /// written before is tried by itself, behind what lies before it, which needs nothing of it: as long as it fails, nothing behind it is taken.
    fn write_back_runs(
        &self,
        range: FileRange,
        bytes_max: u64,
        busy: Busy,
    ) -> (u64, Option<F::Error>) {
        let range = range.round_out(self.block_bytes);
        let tail = match self.failed_tail(range) {
            Ok(Some(tail)) => tail,
            Ok(None) => return self.write_back_in(range, bytes_max, busy),
            Err(error) => return (0, Some(error)),
        };
        let before = FileRange::new(range.start, tail.start);
        let (mut done_bytes, obstacle) = self.write_back_in(before, bytes_max, busy);
        if obstacle.is_some() || done_bytes >= bytes_max {
            return (done_bytes, obstacle);
        }
        match self.flush_blocks(tail, tail) {
            Ok(tail_bytes) => done_bytes += tail_bytes,
            Err(error) => return (done_bytes, Some(error)),
        }
        self.has_failed_tail.store(false, Ordering::Relaxed);
        let rest = FileRange::new(range.start.max(tail.start), range.end);
        let left_bytes = bytes_max.saturating_sub(done_bytes);
        let (rest_bytes, obstacle) = self.write_back_in(rest, left_bytes, busy);
        (done_bytes + rest_bytes, obstacle)
    }

    /// [`AddressSpace::write_back_runs()`] of whole blocks, whatever failed before.
    fn write_back_in(
        &self,
        mut rest: FileRange,
        bytes_max: u64,
        busy: Busy,
    ) -> (u64, Option<F::Error>) {
        let mut done_bytes = 0;
        while done_bytes < bytes_max {
            let mut pages = self.pages.lock();
            let left_bytes = bytes_max - done_bytes;
            let (runs, is_blocked) = self.begin_runs(&mut pages, &mut rest, left_bytes, busy);
            if !runs.is_empty() {
                drop(pages);
                // Nobody waits for others' runs while his own are on their way: they might wait for his.
                let tail = match self.old_tail_beside(&runs) {
                    Ok(tail) => tail,
                    Err(error) => {
                        self.abandon(&runs);
                        return (done_bytes, Some(error));
                    }
                };
                if let Some(tail) = tail {
                    self.abandon(&runs);
                    rest.start = runs.first().map_or(rest.start, |run| run.range.start);
                    match self.flush_blocks(tail, tail) {
                        Ok(tail_bytes) => done_bytes += tail_bytes,
                        Err(error) => {
                            let before = FileRange::new(rest.start, tail.start);
                            let left_bytes = bytes_max - done_bytes;
                            let (before_bytes, _) = self.write_back_in(before, left_bytes, busy);
                            return (done_bytes + before_bytes, Some(error));
                        }
                    }
                    continue;
                }
                let written = self.write_runs(runs);
                done_bytes += written.done_bytes;
                if written.obstacle.is_some() {
                    return (done_bytes, written.obstacle);
                }
                rest.start = written.abandoned_from.unwrap_or(rest.start);
            } else if is_blocked {
                self.ended.wait(&mut pages);
            } else {
                break;
            }
        }
        (done_bytes, None)
    }

    /// Takes runs of dirty blocks from the start of `rest`, as many as are written together, of `bytes_max` at most or one block,
    /// and makes them ordered. Also whether the next one has to wait for an older version of itself.
    fn begin_runs(
        &self,
        pages: &mut Pages,
        rest: &mut FileRange,
        bytes_max: u64,
        busy: Busy,
    ) -> (Vec<RunUnderWay>, bool) {
        let mut left_bytes = self.cache.options().writeback_bytes_max.min(bytes_max);
        let mut runs = Vec::new();
        let from = rest.start;
        while runs.len() < RUNS_MAX && (left_bytes >= self.block_bytes || runs.is_empty()) {
            let dirty = CountQuery {
                within: *rest,
                want: Want::All(StateBits::DELALLOC),
                span: Span::Contiguous,
                bytes_max: (left_bytes - left_bytes % self.block_bytes).max(self.block_bytes),
            };
            let Some(found) = self.states.count_range(dirty, None) else { break };
            let mut run = found.run();
            let ordered = CountQuery::first_run(run, Want::All(StateBits::ORDERED));
            match self.states.count_range(ordered, None) {
                Some(on_its_way) if on_its_way.start > run.start => run.end = on_its_way.start,
                Some(_) if busy == Busy::Wait => return (runs, true),
                Some(on_its_way) => {
                    rest.start = on_its_way.run().end;
                    continue;
                }
                None => {}
            }
            if let Some(boundary) = self.next_boundary(run) {
                run.end = boundary;
            }
            rest.start = run.end;
            left_bytes = left_bytes.saturating_sub(run.len_bytes());
            runs.push(self.begin_run(pages, run));
        }
        // Nothing in front of that is dirty any more.
        if from <= pages.sweep.start && pages.sweep.start < rest.start {
            pages.sweep = FileRange::new(rest.start, pages.sweep.end);
        }
        (runs, false)
    }

    /// The first place inside a run, not its start, that an extent must not be merged across.
    fn next_boundary(&self, run: FileRange) -> Option<FileOffset> {
        let first_in = |range| {
            let marked = CountQuery::first_run(range, Want::All(StateBits::BOUNDARY));
            self.states.count_range(marked, None)
        };
        let mut found = first_in(run)?;
        if found.start == run.start {
            found = first_in(FileRange::new(found.run().end, run.end))?;
        }
        Some(found.start)
    }

    /// Blocks that are all dirty, and none of which is on its way, now are.
    fn begin_run(&self, pages: &mut Pages, range: FileRange) -> RunUnderWay {
        let size = self.size();
        if range.contains(size) {
            pages.zero_tail(size.bytes());
        }
        let (ticket, parts) = pages.begin_writeback(&self.blocks(range));
        let ordered = Conversion { set: StateBits::ORDERED, clear: StateBits::DELALLOC };
        self.states.convert(range, ordered);
        self.cache.subtract_dirty(range.len_bytes());
        RunUnderWay { range, size, ticket, parts }
    }

    fn write_runs(&self, mut runs: Vec<RunUnderWay>) -> Written<F::Error> {
        let buffers: Vec<Vec<&[u8]>> =
            runs.iter().map(|run| run.parts.iter().map(FolioPart::bytes).collect()).collect();
        let given: Vec<WritebackRun<'_>> = runs
            .iter()
            .zip(&buffers)
            .map(|(run, buffers)| WritebackRun { range: run.range, buffers, size: run.size })
            .collect();
        let result = self.filesystem.write_back(&self.inode, &given);
        // The memory of folios that are dropped below is free then.
        runs.iter_mut().for_each(|run| run.parts.clear());
        let failed = match &result {
            Ok(()) => runs.len(),
            Err(failure) => failure.index.min(runs.len() - 1),
        };
        let (written, mut abandoned) = runs.split_at(failed);
        let mut done_bytes: u64 = written.iter().map(|run| run.range.len_bytes()).sum();

        let mut gone = Gone::new();
        let mut pages = self.pages.lock();
        for run in written {
            self.cache.usage().count_run(run.range.len_bytes());
            pages.end_writeback(run.ticket);
            // The mapping shows the data before the state goes: a seek that does not see the one sees the other.
            self.states.clear(run.range, StateBits::ORDERED);
            self.end_new(run.range, false);
            if !self.cache.options().keeps_clean {
                gone.extend(pages.drop_clean(&self.blocks(run.range)));
            }
        }
        let (mut unused_bytes, mut obstacle) = (0, None);
        if let Err(RunFailure { error, fate, stored, .. }) = result {
            obstacle = Some(error.clone());
            if let (Fate::Lost { but }, Some((run, behind))) = (fate, abandoned.split_first()) {
                let kept = but.intersection(run.range);
                unused_bytes += self.lose_run(&mut pages, run, kept, &stored);
                done_bytes += run.range.len_bytes() - kept.len_bytes();
                abandoned = behind;
                if kept.is_empty() {
                    obstacle = None;
                } else {
                    self.has_failed_tail.store(true, Ordering::Relaxed);
                }
                if kept != run.range {
                    self.errors.lock().record(error);
                }
            }
            let abandon = |run| self.abandon_run(&mut pages, run, &stored);
            unused_bytes += abandoned.iter().map(abandon).sum::<u64>();
        }
        drop(pages);
        self.ended.notify_all();
        drop(gone);
        if unused_bytes > 0 {
            self.filesystem.unreserve(&self.inode, unused_bytes);
        }
        Written {
            done_bytes,
            abandoned_from: abandoned.first().map(|run| run.range.start),
            obstacle,
        }
    }

    /// A run that the filesystem could not write is lost, but for what of it is stored, and for a part that is dirty again. Returns for how many
    /// bytes of that there are two reservations now.
    fn lose_run(
        &self,
        pages: &mut Pages,
        run: &RunUnderWay,
        kept: FileRange,
        stored: &[FileRange],
    ) -> u64 {
        for part in stored.iter().filter(|part| part.overlaps(run.range)) {
            self.end_new(part.intersection(run.range), false);
        }
        pages.lose_writeback(run.ticket, &self.blocks(kept));
        // Where nothing is kept, that lies anywhere: also far behind the run, among what others have on their way.
        let kept =
            if kept.is_empty() { FileRange::new(run.range.end, run.range.end) } else { kept };
        let lost =
            [FileRange::new(run.range.start, kept.start), FileRange::new(kept.end, run.range.end)];
        for part in lost {
            self.states.clear(part, StateBits::ORDERED);
            self.end_new(part, true);
            if !self.cache.options().keeps_clean {
                drop(pages.drop_clean(&self.blocks(part)));
            }
        }
        if kept.is_empty() {
            return 0;
        }
        let twice_bytes = self.make_dirty_again(kept);
        self.list(pages);
        twice_bytes
    }

    /// A run that ended adds nothing to what the file takes any more: it has its space, also for what became dirty again meanwhile, or it
    /// is lost, and then only what became dirty again does.
    fn end_new(&self, range: FileRange, is_lost: bool) {
        let dirty_again = |rest| {
            let dirty = CountQuery::first_run(rest, Want::All(StateBits::DELALLOC));
            if is_lost { self.states.count_range(dirty, None) } else { None }
        };
        let mut rest = range;
        while let Some(found) = dirty_again(rest) {
            let before = FileRange::new(rest.start, found.start);
            self.states.clear(before, StateBits::DELALLOC_NEW);
            rest.start = found.run().end;
        }
        self.states.clear(rest, StateBits::DELALLOC_NEW);
    }

    /// A run that the filesystem did not write is dirty again, but for what of it is stored. Returns for how many bytes there are two
    /// reservations now, as they were made dirty meanwhile by somebody else.
    fn abandon_run(&self, pages: &mut Pages, run: &RunUnderWay, stored: &[FileRange]) -> u64 {
        let stored: Vec<FileRange> = stored
            .iter()
            .map(|part| part.intersection(run.range))
            .filter(|part| !part.is_empty())
            .collect();
        let stored_blocks: Vec<_> = stored.iter().map(|part| self.blocks(*part)).collect();
        pages.abandon_writeback(run.ticket, &stored_blocks);
        let mut twice_bytes = 0;
        let mut at = run.range.start;
        for part in stored.iter().copied().chain([FileRange::new(run.range.end, run.range.end)]) {
            twice_bytes += self.make_dirty_again(FileRange::new(at, part.start));
            if !part.is_empty() {
                self.cache.usage().count_run(part.len_bytes());
            }
            self.states.clear(part, StateBits::ORDERED);
            self.end_new(part, false);
            if !self.cache.options().keeps_clean {
                drop(pages.drop_clean(&self.blocks(part)));
            }
            at = part.end;
        }
        self.list(pages);
        twice_bytes
    }

    /// What was on its way, and is dirty in memory. Returns how many bytes of it were made so meanwhile.
    fn make_dirty_again(&self, range: FileRange) -> u64 {
        let dirty = CountQuery {
            within: range,
            want: Want::All(StateBits::DELALLOC),
            span: Span::All,
            bytes_max: u64::MAX,
        };
        let dirty_bytes = self.states.count_range(dirty, None).map_or(0, |sum| sum.len_bytes);
        let delalloc = Conversion { set: StateBits::DELALLOC, clear: StateBits::ORDERED };
        self.states.convert(range, delalloc);
        self.cache.add_dirty(range.len_bytes() - dirty_bytes);
        dirty_bytes
    }
}
