//! What happens to a filesystem between the operations of a random run: it is closed and opened, crashes, its device fails.

use std::collections::BTreeSet;

use ubtrfs_iomap::{Error, FiemapExtent, FiemapFlags, FiemapSync, FileOffset, FileRange, Reach};

use super::content::assert_same;
use super::counts::{Count, count};
use super::model::{Model, index};
use super::random::{Run, Subject, random_by_number};
use super::{DataFile, Done, Expected, Harness, Look, Refusal, contents};
use crate::iomap_model::{at, range};

impl<H: Harness> Run<H> {
    /// Everything is written and closed; another look is had at it, and it is opened again.
    pub(super) fn reopen(&mut self, look: Look) {
        self.subjects.iter_mut().for_each(Subject::fsync);
        self.close_all();
        self.harness.reopen();
        self.judge(look);
    }

    /// Another look is had at what is durable as it is, and all is opened again.
    fn judge(&mut self, look: Look) {
        self.close_all();
        let expected = |subject: &Subject<H>| Expected {
            inode: subject.inode.clone(),
            bytes: subject.model.bytes.clone(),
            data_blocks: subject.model.data.iter().copied().collect(),
        };
        let files: Vec<_> = self.subjects.iter().map(expected).collect();
        self.harness.judge(&files, look);
        self.open_all();
    }

    fn close_all(&mut self) {
        self.subjects.iter_mut().for_each(|subject| subject.file = None);
    }

    fn open_all(&mut self) {
        for subject in &mut self.subjects {
            subject.file = Some(self.harness.open(&subject.inode));
        }
    }

    /// Closed without a sync, written by the next pass over what is old, and so out of memory.
    pub(super) fn close_and_open(&mut self, chosen: usize) {
        self.subjects[chosen].file = None;
        if self.random.chance(1, 2) {
            self.now_ms += 40_000;
            self.harness.background_pass(self.now_ms);
            self.harness.reclaim();
        }
        let subject = &mut self.subjects[chosen];
        subject.file = Some(self.harness.open(&subject.inode));
        self.check(chosen);
    }

    /// All that was written so far is durable.
    pub(super) fn sync(&mut self) {
        if self.harness.sync() == Done::Yes {
            self.subjects.iter_mut().for_each(|subject| subject.model.synced());
        }
    }

    /// All that is in memory only is gone.
    pub(super) fn crash(&mut self) {
        self.close_all();
        let has_crashed = self.harness.crash();
        self.open_all();
        if has_crashed == Done::NotSupported {
            return;
        }
        count(Count::Crashes, 1);
        for (number, subject) in self.subjects.iter_mut().enumerate() {
            println!("file {number} after a crash");
            let found = Model::of_file(subject.file(), self.block);
            subject.model.assert_may_crash_to(&found.bytes);
            subject.model = found;
        }
    }

    /// The device fails some writes of data. Whoever asks is told so, once, and no byte is anything that was never written there.
    pub(super) fn fail_writes(&mut self, chosen: usize) {
        // Nothing of the others is to be written while the device fails.
        self.subjects.iter_mut().for_each(Subject::fsync);
        let failures = self.harness.failures();
        let left = self.random.below(4);
        if self.harness.fail_data_writes(Some(left)) == Done::NotSupported {
            return;
        }
        self.subjects[chosen].model.begin_losing();
        // Of the writes that fail, those of calls that said so.
        let mut told = 0;
        for _ in 0..self.random.below(4) + 1 {
            let (start, len) = self.range();
            match self.random.below(8) {
                0 => {
                    self.now_ms += 40_000;
                    self.harness.background_pass(self.now_ms);
                }
                // What fsync tells in any case.
                1 => _ = self.subjects[chosen].file().flush(range(start, start + len)),
                2 => self.store_mapped(chosen, start, len),
                3 | 4 => told += self.change_failing(chosen, start, len.max(1)),
                _ => self.write(chosen, start, len),
            }
        }
        // What fsync left dirty is not to fail behind it.
        self.harness.rest(true);
        let result = self.subjects[chosen].file().fsync();
        self.harness.fail_data_writes(None);
        self.harness.rest(false);
        let failed = self.harness.failures() - failures;
        self.failures += failed;
        count(Count::FailuresInjected, failed);
        let what = || format!("{failed} writes failed, {told} told, and fsync: {result:?}");
        assert!(failed > 0 || result.is_ok(), "{}", what());
        // What goes straight and fails goes through memory, and the block in which the file ends on the medium stays there: then all
        // is stored in the end.
        let is_whole =
            || contents(self.subjects[chosen].file()) == self.subjects[chosen].model.bytes;
        assert!(failed == told || result.is_err() || is_whole(), "{}", what());
        if failed > 0 {
            count(Count::FailuresTold, 1);
            if result.is_err() {
                assert_eq!(self.refused(result), Err(Refusal::Io));
                assert!(self.subjects[chosen].file().fsync().is_ok(), "said once only");
            }
            let shown = contents(self.subjects[chosen].file());
            let model = &self.subjects[chosen].model;
            assert_eq!(shown.len(), model.bytes.len(), "where it ends is not data");
            model.assert_blocks_were(&shown);
            self.close_all();
            self.harness.reopen();
            self.open_all();
            let found = Model::of_file(self.subjects[chosen].file(), self.block);
            assert_same(&found.bytes, &shown, 0, self.block);
            self.subjects[chosen].model = found;
            // It takes the others' time: not each time.
            if self.random.chance(1, 4) {
                self.judge(Look::Sampled);
            }
        }
        self.subjects[chosen].model.synced();
        (0..self.subjects.len()).for_each(|index| self.check(index));
    }

    /// A call that fails where what it needs on the device first does not get there. It then has changed each block, or has not. Returns how
    /// many writes failed of a call that said so: of what stays as it was, as of inline data that cannot be moved, fsync tells nothing.
    fn change_failing(&mut self, chosen: usize, start: u64, len: u64) -> u64 {
        let kind = self.random.below(4);
        let failures = self.harness.failures();
        let file = self.subjects[chosen].file();
        let result = match kind {
            0 => file.truncate(at(start)),
            1 => file.zero_range(at(start), len),
            2 => file.punch_hole(at(start), len),
            _ => file.allocate_zeroed(at(start), len, Reach::Stays),
        };
        let size = file.size().bytes();
        let result = self.refused(result);
        let model = &mut self.subjects[chosen].model;
        match kind {
            0 => model.truncate(start),
            1 => model.zero(start, start + len),
            2 => model.punch(start, len),
            _ => {
                model.drop_data(start, len);
                model.allocate(start, len, Reach::Stays);
            }
        }
        if result.is_ok() {
            if kind == 0 {
                model.was_cut(start);
            }
            return 0;
        }
        assert_eq!(result, Err(Refusal::Io));
        model.truncate(size);
        self.harness.failures() - failures
    }

    /// All that is seen of a file is as the model says.
    pub(super) fn check(&self, chosen: usize) {
        // One look after another is to see the same.
        self.harness.rest(true);
        self.check_at_rest(chosen);
        self.harness.rest(false);
    }

    fn check_at_rest(&self, chosen: usize) {
        let Subject { model, .. } = &self.subjects[chosen];
        let file = self.subjects[chosen].file();
        assert_eq!(file.size(), at(model.size()));
        assert_same(&contents(file), &model.bytes, 0, self.block);
        // At other places of blocks each time, and of a long file not everywhere.
        let step = (model.size() / 64 / 2 * 2 + 1).max(1111);
        for from in (0..=model.size() + 1).step_by(usize::try_from(step).expect("small")) {
            let no_data = || Err(Refusal::Request(Error::NoData { offset: at(from) }));
            let expected = |found: Option<u64>| found.map_or_else(no_data, |found| Ok(at(found)));
            let data = self.refused(file.seek_data(at(from)));
            assert_eq!(data, expected(model.seek(from, true)), "data from {from}");
            let hole = self.refused(file.seek_hole(at(from)));
            assert_eq!(hole, expected(model.seek(from, false)), "hole from {from}");
        }
        let (data, space) = blocks_of(file, self.block);
        assert_eq!(data, model.data);
        assert_eq!(space, model.space);
        assert_parts_are_of_the_whole(file, self.block, model.size());
        let taken_blocks = self.harness.taken_bytes(&self.subjects[chosen].inode) / self.block;
        assert_eq!(taken_blocks, u64::try_from(space.len()).expect("a count fits"));
    }
}

impl Model {
    /// What a file that was just opened is, all of it durable.
    fn of_file(file: &impl DataFile, block: u64) -> Self {
        let bytes = contents(file);
        let (data, space) = blocks_of(file, block);
        for (number, bytes) in (0_u64..).zip(bytes.chunks(index(block))) {
            let is_zeros = bytes.iter().all(|byte| *byte == 0);
            assert!(is_zeros || data.contains(&number), "block {number} has bytes and is no data");
        }
        Self::durable(block, bytes, data, space)
    }
}

/// What fiemap says of a part of a file is what it says of all, block by block: of what is encoded only the beginning has a place, so what
/// goes on with what there depends on where a part begins. Of so many extents it says the first.
fn assert_parts_are_of_the_whole(file: &impl DataFile, block: u64, size: u64) {
    let fiemap = |range, extents_max| file.fiemap(range, extents_max, FiemapSync::AsIs).unwrap();
    let blocks_of = |extents: &[FiemapExtent], within: FileRange| -> Vec<_> {
        let blocks = extents.iter().flat_map(|extent| {
            let part = extent.range.intersection(within);
            let starts = (part.start.bytes()..part.end.bytes()).step_by(index(block));
            let flags = FiemapFlags { is_last: false, ..extent.flags };
            let place = extent.address.filter(|_| !flags.is_encoded);
            let start = extent.range.start.bytes();
            starts.map(move |at| (at, flags, place.map(|place| place + at - start)))
        });
        blocks.collect()
    };
    let whole = fiemap(FileRange::from(FileOffset::ZERO), usize::MAX);
    let end = whole.last().map(|last| last.range.end);
    // Other places for each length of the file, and the same in each run of a seed.
    let mut random = random_by_number(size);
    for _ in 0..4 {
        let start = random.below(size + 2 * block);
        let range = range(start, start + 1 + random.below(size + 1)).round_out(block);
        let part = fiemap(range, usize::MAX);
        let what = || format!("{range}: {part:?} of {whole:?}");
        assert_eq!(blocks_of(&part, range), blocks_of(&whole, range), "{}", what());
        for (number, extent) in part.iter().enumerate() {
            assert_eq!(extent.range, extent.range.intersection(range), "{}", what());
            let is_last = number + 1 == part.len() && Some(extent.range.end) == end;
            assert_eq!(extent.flags.is_last, is_last, "{}", what());
        }
        let count = random.index(part.len() + 2);
        assert_eq!(fiemap(range, count), part[..count.min(part.len())], "{count} of {}", what());
    }
}

/// The blocks that fiemap says are data, and those that have space.
fn blocks_of(file: &impl DataFile, block: u64) -> (BTreeSet<u64>, BTreeSet<u64>) {
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, usize::MAX, FiemapSync::AsIs).unwrap();
    let blocks = |range: FileRange| range.start.bytes() / block..range.end.bytes().div_ceil(block);
    for (index, extent) in extents.iter().enumerate() {
        assert_eq!(extent.flags.is_last, index + 1 == extents.len());
        let has_no_place = extent.flags.is_delalloc || extent.flags.is_inline;
        assert!(has_no_place || extent.address.is_some());
        assert!(!extent.flags.is_delalloc || extent.address.is_none());
    }
    for pair in extents.windows(2) {
        assert!(pair[0].range.end <= pair[1].range.start);
    }
    let data = extents.iter().filter(|extent| !extent.flags.is_unwritten);
    let data = data.flat_map(|extent| blocks(extent.range)).collect();
    (data, extents.iter().flat_map(|extent| blocks(extent.range)).collect())
}
