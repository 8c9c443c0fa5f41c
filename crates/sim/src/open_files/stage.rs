//! The engine with files open, beside what they must hold.

use std::rc::Rc;
use std::sync::Arc;

use ubtrfs_engine::{
    DataFile, Error, Filesystem, InodeId, MappingKind, NewInode, Reservation, SetAttributes,
    SnapshotOptions, mkfs,
};
use ubtrfs_iomap::{FileOffset, FileRange, Reach};
use ubtrfs_ondisk::FileOffset as DiskOffset;
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::SimArray;

use super::fill;
use super::held::{self, Held};
use super::history::History;
use super::op::{Change, Copied, FileOp, Op, Scene, blocks};
use super::report::OpenFilesReport;
use super::shape::{FilesShape, Kind};
use crate::compare::Differs;
use crate::judge::Ahead;
use crate::world::not_open;

/// What passes between two passes of the background: more than data may be dirty for.
const PASS_MS: u64 = 40_000;
/// References that a step of a deletion drops, about.
const STEP_REFS: usize = 20;
/// The subvolume of the files.
const SUBVOLUME: &[u8] = b"files";
const PREALLOCATED_BYTES_MAX: u64 = 160 << 10;

/// A file, and what it may hold after a cut.
#[derive(Debug)]
pub(super) struct OneFile {
    pub(super) id: InodeId,
    pub(super) kind: Kind,
    pub(super) history: History,
    open: Option<DataFile>,
    /// The version that the next commit makes durable, and the last commit before.
    stored: Option<(u64, usize)>,
    /// Data was lost, and who has it open was not told yet.
    pub(super) is_lost: bool,
}

/// A snapshot of the files' subvolume.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) number: usize,
    /// Of each file.
    pub(super) contents: Vec<Rc<[u8]>>,
    /// The last commit before it was made.
    made_after: u64,
    /// Writes and flushes by when it was durable.
    promised: Option<usize>,
    /// Writes and flushes by when its deletion began, and the last commit before it ended.
    deleted: Option<(usize, u64)>,
}

impl Snapshot {
    /// Whether a state after a cut must have it.
    pub(super) fn must_be_there(&self, cut_after: usize) -> bool {
        self.promised.is_some_and(|at| at <= cut_after)
            && self.deleted.is_none_or(|(at, _)| cut_after <= at)
    }
}

/// What came of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Done,
    Refused,
    NoSpace,
    /// The device failed.
    Failed,
    /// The device failed, and the filesystem takes no more.
    Stopped,
}

/// A filesystem with files open.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) array: SimArray,
    pub(super) shape: Rc<FilesShape>,
    pub(super) files: Vec<OneFile>,
    pub(super) snapshots: Vec<Snapshot>,
    /// What an earlier cut had left when the recording began.
    pub(super) ahead: Vec<Ahead>,
    pub(super) fs: Filesystem,
    /// How many writes and flushes had been recorded when a commit was promised.
    promised: Vec<(usize, u64)>,
    /// The last operation.
    pub(super) number: u64,
    snapshot_count: usize,
    /// Deleted, and still used.
    held: Vec<Held>,
    clock_ms: u64,
    seed: u64,
    opened: u64,
    /// Whether a device may fail.
    pub(super) may_fail: bool,
    traces: bool,
}

impl Stage {
    /// A new filesystem with its files.
    ///
    /// # Errors
    /// That they cannot be made.
    pub(super) fn make(shape: &Rc<FilesShape>, seed: u64) -> Differs<Self> {
        let array = SimArray::new(&shape.shape.lens_bytes);
        array.suspend_faults(true);
        let runtime = Arc::new(Runtime::simulated(seed));
        let volume = mkfs(array.devices(), &shape.shape.options, &runtime)
            .map_err(|error| format!("mkfs: {error}"))?;
        let fs = shape.open_volume(volume, runtime).map_err(|error| not_open(&error))?;
        let mut stage = Self {
            array,
            shape: Rc::clone(shape),
            files: Vec::new(),
            snapshots: Vec::new(),
            ahead: Vec::new(),
            fs,
            promised: Vec::new(),
            number: 0,
            snapshot_count: 0,
            held: Vec::new(),
            clock_ms: 0,
            seed,
            opened: 0,
            may_fail: false,
            traces: std::env::var_os("UBTRFS_SIM_TRACE").is_some(),
        };
        stage.make_files(seed).map_err(|error| format!("making files: {error}"))?;
        stage.begin_recording();
        Ok(stage)
    }

    fn make_files(&mut self, seed: u64) -> Result<(), Error> {
        let mut prng = Prng::new(seed ^ 0x6d61_6b65);
        let fs = self.fs.clone();
        let directory = NewInode::new(0o040_755, Time::default());
        let mut handle = fs.begin(Reservation::create_subvolume())?;
        let root = handle.create_subvolume(fs.top_level(), SUBVOLUME, &directory)?;
        drop(handle);
        for (number, kind) in self.shape.kinds.clone().into_iter().enumerate() {
            let name = format!("file {number}");
            let new = NewInode::new(0o100_644, Time::default());
            let mut handle = fs.begin(Reservation::create(1))?;
            let id = handle.create(root, name.as_bytes(), &new)?;
            drop(handle);
            let attributes = SetAttributes { flags: Some(kind.flags()), ..Default::default() };
            fs.begin(Reservation::create(1))?.set_attributes(id, &attributes)?;
            if let Kind::Compressed(Some(method)) = kind {
                let mut handle = fs.begin(Reservation::create(1))?;
                handle.set_xattr(id, b"btrfs.compression", method.as_bytes())?;
            }
            let file = fs.open_data(id)?;
            if kind == Kind::Preallocated {
                let len = 1 + prng.below(PREALLOCATED_BYTES_MAX);
                let reach = if prng.chance(1, 2) { Reach::Extends } else { Reach::Stays };
                file.allocate(FileOffset::ZERO, len, reach)?;
            }
            let len = usize::try_from(file.size().bytes()).expect("a file in memory");
            let history = History::new(vec![0; len].into(), kind == Kind::InPlace);
            let open = Some(file);
            self.files.push(OneFile { id, kind, history, open, stored: None, is_lost: false });
        }
        fs.sync()
    }

    /// What a cut left, opened: the files show those contents.
    pub(super) fn after_cut(
        &self,
        array: SimArray,
        fs: Filesystem,
        cut_after: usize,
        contents: &[Rc<[u8]>],
        snapshots: &[Snapshot],
        ahead: Vec<Ahead>,
    ) -> Self {
        array.suspend_faults(true);
        let file = |(file, shown): (&OneFile, &Rc<[u8]>)| OneFile {
            id: file.id,
            kind: file.kind,
            history: file.history.after_cut(cut_after, Rc::clone(shown)),
            open: None,
            stored: None,
            is_lost: false,
        };
        let still_there = |snapshot: &Snapshot| Snapshot {
            promised: Some(0),
            deleted: None,
            made_after: 0,
            ..snapshot.clone()
        };
        let generation = fs.superblock().generation.get();
        Self {
            promised: vec![(0, generation)],
            array,
            shape: Rc::clone(&self.shape),
            files: self.files.iter().zip(contents).map(file).collect(),
            snapshots: snapshots.iter().map(still_there).collect(),
            ahead,
            fs,
            number: self.number,
            snapshot_count: self.snapshot_count,
            held: Vec::new(),
            clock_ms: 0,
            seed: self.seed,
            opened: self.opened + 1,
            may_fail: false,
            traces: self.traces,
        }
    }

    /// Takes what is there as arrived, and forgets how it came to be.
    pub(super) fn begin_recording(&mut self) {
        self.array.begin();
        self.promised = vec![(0, self.generation())];
        for file in &mut self.files {
            let forgotten = file.history.begin_recording();
            // What was stored before the last promise is promised.
            let kept = file.stored.filter(|(_, version)| *version >= forgotten);
            file.stored = kept.map(|(generation, version)| (generation, version - forgotten));
        }
        let generation = self.generation();
        let is_gone = |(_, after): (usize, u64)| generation > after;
        self.snapshots.retain(|snapshot| !snapshot.deleted.is_some_and(is_gone));
        for snapshot in &mut self.snapshots {
            snapshot.promised = snapshot.promised.map(|_| 0);
            snapshot.deleted = snapshot.deleted.map(|(_, after)| (0, after));
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.fs.superblock().generation.get()
    }

    /// The commit that was promised last when so many writes and flushes had been recorded.
    pub(super) fn promised_at(&self, events: usize) -> u64 {
        let promised = self.promised.iter().rev().find(|(at, _)| *at <= events);
        promised.map_or(0, |(_, generation)| *generation)
    }

    /// How many promises of anything there were when so many writes and flushes had been recorded.
    pub(super) fn promise_count(&self, events: usize) -> usize {
        let of_files = self.files.iter().map(|file| file.history.promise_count(events));
        let of_snapshots = self.snapshots.iter().filter_map(|snapshot| snapshot.promised);
        let others = self.promised.iter().map(|(at, _)| *at).chain(of_snapshots);
        of_files.sum::<usize>() + others.filter(|at| *at <= events).count()
    }

    pub(super) fn contents(&self) -> Vec<Rc<[u8]>> {
        self.files.iter().map(|file| Rc::clone(file.history.now())).collect()
    }

    /// Snapshots that were not deleted.
    pub(super) fn snapshots_there(&self) -> impl Iterator<Item = &Snapshot> {
        self.snapshots.iter().filter(|snapshot| snapshot.deleted.is_none())
    }

    /// What the next operation is chosen by.
    pub(super) fn with_scene<T>(&self, choose: impl FnOnce(&Scene<'_>) -> T) -> T {
        let kinds: Vec<Kind> = self.files.iter().map(|file| file.kind).collect();
        let len = |file: &OneFile| u64::try_from(file.history.now().len()).expect("a length fits");
        let lens: Vec<u64> = self.files.iter().map(len).collect();
        let snapshots: Vec<usize> = self.snapshots_there().map(|one| one.number).collect();
        choose(&Scene { kinds: &kinds, lens: &lens, snapshots: &snapshots })
    }

    /// Does an operation, and compares what it touched.
    ///
    /// # Errors
    /// What is not as it must be.
    pub(super) fn step(&mut self, op: &Op, report: &mut OpenFilesReport) -> Differs<Outcome> {
        self.number += 1;
        if self.traces {
            eprintln!("operation {}, {} events: {op:?}", self.number, self.array.event_count());
        }
        let number = self.number;
        let failed = |why: String| format!("{why}; operation {number}, {op:?}");
        let (before, unwritten) = (self.generation(), self.unwritten_bytes().map_err(failed)?);
        let began = self.array.event_count();
        let contents = self.contents();
        self.array.suspend_faults(false);
        let result = self.on_engine(op);
        self.array.suspend_faults(true);
        let outcome = self.outcome(op, result, began).map_err(failed)?;
        self.note_commits(before, outcome);
        if outcome == Outcome::Done {
            self.note_promises(op, report);
        }
        let after = self.unwritten_bytes().map_err(failed)?;
        if !op.may_drop_unwritten() && after < unwritten {
            report.converted += 1;
        }
        let asks = matches!(op, Op::Sync | Op::Commit | Op::Reopen)
            || matches!(op, Op::File { op: FileOp::Fsync | FileOp::Msync { .. }, .. });
        report.own_commits += u64::from(!asks && self.generation() > before);
        let count = report.operations.entry(op.name()).or_default();
        match outcome {
            Outcome::Done => count.done += 1,
            Outcome::Refused => count.refused += 1,
            Outcome::NoSpace => count.no_space += 1,
            Outcome::Failed | Outcome::Stopped => report.failed_operations += 1,
        }
        if self.may_fail {
            self.look_for_lost(op, outcome, began, &contents).map_err(failed)?;
        }
        let used = held::use_all(&mut self.held, &self.fs, number).map_err(failed)?;
        report.held_files += used;
        match op {
            Op::File { file, .. } => self.compare(*file).map_err(failed)?,
            Op::Commit => {}
            _ => self.compare_all().map_err(failed)?,
        }
        Ok(outcome)
    }

    /// All files are as they must be.
    ///
    /// # Errors
    /// Which is not.
    pub(super) fn compare_all(&self) -> Differs {
        (0..self.files.len()).try_for_each(|file| self.compare(file))
    }

    /// A file is as it must be, and no data lies where it says that there is a hole.
    fn compare(&self, file: usize) -> Differs {
        let (have, expect) = (self.read(file)?, self.files[file].history.now());
        let kind = self.files[file].kind;
        if have != **expect {
            return Err(format!("file {file} ({kind:?}) {}", difference(&have, expect)));
        }
        match &self.files[file].open {
            Some(open) => {
                holes_are_zeros(open, expect).map_err(|why| format!("file {file} ({kind:?}) {why}"))
            }
            None => Ok(()),
        }
    }

    /// All bytes of a file, by who has it open, if anybody has.
    fn read(&self, file: usize) -> Differs<Vec<u8>> {
        let file = &self.files[file];
        match &file.open {
            Some(open) => read_open(open),
            None => read_closed(&self.fs, file.id),
        }
    }

    /// Space of files that holds no data yet.
    fn unwritten_bytes(&self) -> Differs<u64> {
        let mut sum = 0;
        for file in &self.files {
            let told = |error: Error| error.to_string();
            for mapping in self.fs.file_extents(file.id, DiskOffset(0)).map_err(told)? {
                let mapping = mapping.map_err(told)?;
                if mapping.kind == MappingKind::Prealloc {
                    sum += mapping.end().0 - mapping.offset.0;
                }
            }
        }
        Ok(sum)
    }

    /// Does it to the engine; returns how many bytes were written.
    fn on_engine(&mut self, op: &Op) -> Result<usize, Error> {
        let fs = self.fs.clone();
        match op {
            Op::File { file, op } => return self.on_file(*file, op),
            Op::Sync => fs.sync()?,
            Op::Commit => fs.commit()?,
            Op::FlushFiles => fs.flush_files()?,
            Op::WriteBackDue => {
                self.clock_ms += PASS_MS;
                fs.write_back_due(self.clock_ms);
            }
            Op::DropClean => fs.drop_clean_data(),
            Op::Snapshot => {
                let number = self.snapshot_count + 1;
                let (name, options) = (
                    snapshot_name(number),
                    SnapshotOptions { read_only: number.is_multiple_of(2) },
                );
                let source = self.files[0].id.root;
                fs.snapshot(source, fs.top_level(), name.as_bytes(), &options)?;
                self.snapshot_count = number;
                self.snapshots.push(Snapshot {
                    number,
                    contents: self.contents(),
                    made_after: self.generation(),
                    promised: None,
                    deleted: None,
                });
            }
            Op::DeleteSnapshot { number } => {
                let began = self.array.event_count();
                let new = self.held_snapshot(*number)?;
                held::keep(&mut self.held, new);
                let deleted =
                    fs.delete_subvolume(fs.top_level(), snapshot_name(*number).as_bytes());
                let generation = self.generation();
                if let Some(one) = self.snapshots.iter_mut().find(|one| one.number == *number) {
                    one.deleted = Some((began, generation));
                }
                deleted?;
                fs.clean_deleted_step(STEP_REFS)?;
            }
            Op::Reopen => {
                fs.sync()?;
                drop(fs);
                self.held.clear();
                self.files.iter_mut().for_each(|file| file.open = None);
                self.opened += 1;
                let seed = self.seed.wrapping_add(self.opened << 32);
                self.fs = self.shape.open(&self.array, seed)?;
            }
        }
        Ok(usize::MAX)
    }

    /// A snapshot that is about to be deleted, to be used further, if it is one of those. Not where data may be lost.
    fn held_snapshot(&self, number: usize) -> Result<Option<Held>, Error> {
        let Some(one) = self.snapshots.iter().find(|one| one.number == number) else {
            return Ok(None);
        };
        if self.may_fail {
            return Ok(None);
        }
        let name = snapshot_name(number);
        let root = self.fs.lookup(self.fs.top_level(), name.as_bytes())?.root;
        let numbers = self.files.iter().map(|file| file.id.inode);
        let files = numbers.zip(one.contents.iter().cloned()).collect();
        Ok(Held::of(&self.fs, number, root, files))
    }

    fn on_file(&mut self, file: usize, op: &FileOp) -> Result<usize, Error> {
        let (number, id, fs) = (self.number, self.files[file].id, self.fs.clone());
        let at = FileOffset::new;
        let bytes = |data: &super::op::Data| data.fill.bytes(file, number, data.offset, data.len);
        // These are done to files that are closed, too.
        match op {
            FileOp::WriteThrough(data) => {
                fs.write(id, DiskOffset(data.offset), &bytes(data))?;
                return Ok(usize::MAX);
            }
            FileOp::TruncateThrough { size } => {
                fs.truncate(id, *size)?;
                return Ok(usize::MAX);
            }
            FileOp::CloneFrom(copied) => {
                let (source, range, offset) = self.copied(copied);
                fs.clone_range(source, range, id, offset)?;
                return Ok(usize::MAX);
            }
            FileOp::DedupeFrom(copied) => {
                let (source, range, offset) = self.copied(copied);
                return Ok(usize::from(fs.dedupe_range(source, range, id, offset)?));
            }
            FileOp::Close => {
                self.files[file].open = None;
                return Ok(usize::MAX);
            }
            _ => {}
        }
        let size = self.files[file].history.now().len();
        if self.files[file].open.is_none() {
            self.files[file].open = Some(fs.open_data(id)?);
        }
        let Some(open) = &self.files[file].open else { return Ok(0) };
        match op {
            FileOp::Write(data) => return open.write(at(data.offset), &bytes(data)),
            FileOp::DirectWrite(data) => return open.direct_write(at(data.offset), &bytes(data)),
            FileOp::Append { len, fill } => {
                let offset = u64::try_from(size).expect("a length fits");
                return Ok(open.append(&fill.bytes(file, number, offset, *len))?.1);
            }
            FileOp::Store(data) => {
                let len = u64::try_from(size).expect("a length fits");
                open.map(FileOffset::ZERO, len)?.store(at(data.offset), &bytes(data))?;
            }
            FileOp::Fault { at: place } => {
                let len = u64::try_from(size).expect("a length fits");
                open.map(FileOffset::ZERO, len)?.fault_for_write(at(*place))?;
            }
            FileOp::Rewrite => {
                let now = Rc::clone(self.files[file].history.now());
                return open.write(FileOffset::ZERO, &now);
            }
            FileOp::Truncate { size } => open.truncate(at(*size))?,
            FileOp::Change { change, range } => {
                let (offset, len) = (at(range.start), range.end - range.start);
                let reach = |extends: bool| if extends { Reach::Extends } else { Reach::Stays };
                match *change {
                    Change::Zero => open.zero_range(offset, len)?,
                    Change::Punch => open.punch_hole(offset, len)?,
                    Change::Allocate { extends } => open.allocate(offset, len, reach(extends))?,
                    Change::AllocateZeroed { extends } => {
                        open.allocate_zeroed(offset, len, reach(extends))?;
                    }
                    Change::Unshare => open.unshare(offset, len)?,
                }
            }
            FileOp::Flush { range } => {
                open.space().flush(FileRange::new(at(range.start), at(range.end)))?;
            }
            FileOp::Fsync => open.fsync()?,
            FileOp::Msync { range } => {
                let range = FileRange::new(at(range.start), at(range.end));
                open.map(range.start, range.len_bytes())?.msync(range)?;
            }
            FileOp::WriteThrough(_)
            | FileOp::TruncateThrough { .. }
            | FileOp::CloneFrom(_)
            | FileOp::DedupeFrom(_)
            | FileOp::Close => unreachable!("done to the closed file above"),
        }
        Ok(usize::MAX)
    }

    fn copied(&self, copied: &Copied) -> (InodeId, std::ops::Range<DiskOffset>, DiskOffset) {
        let range = DiskOffset(copied.range.start)..DiskOffset(copied.range.end);
        (self.files[copied.source].id, range, DiskOffset(copied.offset))
    }

    /// Brings the histories up to what was done.
    fn outcome(&mut self, op: &Op, result: Result<usize, Error>, began: usize) -> Differs<Outcome> {
        let is_refusal_due = self.is_refusal_due(op);
        let done = match result {
            Ok(_) if is_refusal_due => return Err("it is not refused".to_owned()),
            Ok(done) => done,
            Err(Error::InvalidArgument { .. }) if is_refusal_due => return Ok(Outcome::Refused),
            Err(Error::NoSpace { .. }) => {
                self.follow(op, began)?;
                return Ok(Outcome::NoSpace);
            }
            Err(error) if self.may_fail && !self.array.strikes().is_empty() => {
                self.follow(op, began)?;
                let stops = matches!(error, Error::Aborted { .. });
                return Ok(if stops { Outcome::Stopped } else { Outcome::Failed });
            }
            Err(error) => return Err(format!("it fails: {error}")),
        };
        let Op::File { file, op } = op else { return Ok(Outcome::Done) };
        if let FileOp::DedupeFrom(copied) = op {
            let is_same = self.is_same(*file, copied);
            if (done == 1) != is_same {
                return Err(format!("deduplicated: {}, the same: {is_same}", done == 1));
            }
        }
        let contents = self.contents();
        if let Some(bytes) = op.result(*file, self.number, done, &contents) {
            self.files[*file].history.push(bytes.into(), began, self.number);
        }
        let wanted = match op {
            FileOp::Write(data) | FileOp::DirectWrite(data) => data.len,
            FileOp::Append { len, .. } => *len,
            _ => 0,
        };
        Ok(if done < wanted { Outcome::NoSpace } else { Outcome::Done })
    }

    fn is_refusal_due(&self, op: &Op) -> bool {
        let Op::File { file, op: FileOp::CloneFrom(copied) | FileOp::DedupeFrom(copied) } = op
        else {
            return false;
        };
        self.files[*file].kind.has_csums() != self.files[copied.source].kind.has_csums()
    }

    fn is_same(&self, file: usize, copied: &Copied) -> bool {
        let range = |offset: u64| {
            let start = usize::try_from(offset).expect("a file in memory");
            let len = copied.range.end - copied.range.start;
            start..start + usize::try_from(len).expect("a file in memory")
        };
        let source = self.files[copied.source].history.now().get(range(copied.range.start));
        source == self.files[file].history.now().get(range(copied.offset))
    }

    /// After an operation failed half way, lets the file be what the engine shows: each block that
    /// before it or that after it.
    fn follow(&mut self, op: &Op, began: usize) -> Differs {
        let Op::File { file, op } = op else { return Ok(()) };
        let contents = self.contents();
        let Some(after) = op.result(*file, self.number, usize::MAX, &contents) else {
            return Ok(());
        };
        let after: Rc<[u8]> = after.into();
        let shown: Rc<[u8]> = self.read(*file)?.into();
        let number = self.number;
        let mut both = History::new(Rc::clone(&contents[*file]), false);
        both.push(Rc::clone(&after), 0, number);
        let history = &mut self.files[*file].history;
        // With a device that fails, data of earlier operations may be lost, too.
        if !self.may_fail {
            both.judge(&shown, usize::MAX)
                .map_err(|why| format!("neither undone nor begun: {why}"))?;
        }
        history.push(after, began, number);
        if !self.may_fail {
            history.push(shown, began, number);
        }
        Ok(())
    }

    /// With a device that fails, data whose writeback failed is what it was on the medium. Who is told
    /// by the operation itself need not be told again. What was lost before the operation came to it is
    /// what it was done to.
    fn look_for_lost(
        &mut self,
        op: &Op,
        outcome: Outcome,
        began: usize,
        contents: &[Rc<[u8]>],
    ) -> Differs {
        let told = match op {
            Op::File { file, .. } if outcome != Outcome::Done => Some(*file),
            _ => None,
        };
        for number in 0..self.files.len() {
            let shown: Rc<[u8]> = self.read(number)?.into();
            let operation = self.number;
            let file = &mut self.files[number];
            if shown == *file.history.now() {
                continue;
            }
            if self.array.strikes().is_empty() {
                return Err(format!("file {number} {}", difference(&shown, file.history.now())));
            }
            let mut history = file.history.clone();
            if let Op::File { file: changed, op } = op
                && *changed == number
            {
                for version in file.history.versions() {
                    let mut contents = contents.to_vec();
                    let op = op.at_end_of(contents[number].len());
                    contents[number] = version;
                    if !op.has_source(&contents) {
                        continue;
                    }
                    if let Some(bytes) = op.result(number, operation, usize::MAX, &contents) {
                        history.push(bytes.into(), began, operation);
                    }
                }
            }
            history
                .judge(&shown, usize::MAX)
                .map_err(|why| format!("file {number}, after a device failed: {why}"))?;
            file.history.push(shown, began, operation);
            file.is_lost |= file.open.is_some() && told != Some(number);
        }
        Ok(())
    }

    /// The filesystem takes no more, though the operation was done: writeback that it had to wait for
    /// needed a commit, which failed.
    fn has_stopped(&self) -> bool {
        let is_struck = self.may_fail && !self.array.strikes().is_empty();
        is_struck && matches!(self.fs.check_writable(), Err(Error::Aborted { .. }))
    }

    /// Takes down what commits made durable, asked for or not.
    fn note_commits(&mut self, before: u64, outcome: Outcome) {
        let events = self.array.event_count();
        // What failed was written, perhaps, and not promised.
        let failed = u64::from(outcome == Outcome::Stopped || self.has_stopped());
        let generation = self.generation() - failed;
        if generation <= before {
            return;
        }
        self.promised.push((events, generation));
        for file in &mut self.files {
            if let Some((_, version)) = file.stored.take_if(|(after, _)| *after < generation) {
                file.history.promise(version, events);
            }
        }
        for snapshot in &mut self.snapshots {
            if snapshot.promised.is_none() && snapshot.made_after < generation {
                snapshot.promised = Some(events);
            }
        }
    }

    /// Takes down what the operation promised, which was done.
    fn note_promises(&mut self, op: &Op, report: &mut OpenFilesReport) {
        let (generation, events) = (self.generation(), self.array.event_count());
        match op {
            Op::Sync | Op::Reopen => {
                for file in &mut self.files {
                    file.history.promise(file.history.newest(), events);
                }
                report.syncs += 1;
            }
            Op::File { file, op: FileOp::Fsync } => {
                let history = &mut self.files[*file].history;
                history.promise(history.newest(), events);
                report.fsyncs += 1;
            }
            Op::File { file, op: FileOp::Msync { range } } => {
                self.files[*file].history.promise_blocks(blocks(range), events);
                report.fsyncs += 1;
            }
            // In the next commit all that was in memory by now is durable.
            Op::FlushFiles | Op::Snapshot => {
                for file in &mut self.files {
                    file.stored = Some((generation, file.history.newest()));
                }
            }
            _ => {}
        }
    }
}

/// The name of a snapshot.
pub(super) fn snapshot_name(number: usize) -> String {
    format!("snapshot {number}")
}

fn read_open(file: &DataFile) -> Differs<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(file.size().bytes()).expect("a file in memory")];
    let mut done = 0;
    while done < bytes.len() {
        let at = FileOffset::new(u64::try_from(done).expect("a length fits"));
        match file.read(at, &mut bytes[done..]) {
            Ok(0) => return Err(format!("a read at {at} of {} bytes gives nothing", bytes.len())),
            Ok(count) => done += count,
            Err(error) => return Err(format!("a read at {at}: {error}")),
        }
    }
    Ok(bytes)
}

/// All bytes of a file that nobody need have open.
pub(super) fn read_closed(fs: &Filesystem, id: InodeId) -> Differs<Vec<u8>> {
    let inode = fs.inode(id).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; usize::try_from(inode.size_bytes).expect("a file in memory")];
    let have = fs.read(id, DiskOffset(0), &mut bytes).map_err(|error| error.to_string())?;
    match have == bytes.len() {
        true => Ok(bytes),
        false => Err(format!("{have} bytes of {} are read", bytes.len())),
    }
}

/// As [`read_closed`], by who opens it, with where it has data.
pub(super) fn read_opened(fs: &Filesystem, id: InodeId) -> Differs<Vec<u8>> {
    let file = fs.open_data(id).map_err(|error| error.to_string())?;
    let bytes = read_open(&file)?;
    holes_are_zeros(&file, &bytes)?;
    Ok(bytes)
}

/// Where seeks find no data, there are zeros.
fn holes_are_zeros(file: &DataFile, bytes: &[u8]) -> Differs {
    let mut at = FileOffset::ZERO;
    let index = |at: FileOffset| usize::try_from(at.bytes()).expect("a file in memory");
    while index(at) < bytes.len() {
        let data = match file.seek_data(at) {
            Ok(data) => data,
            Err(Error::File(ubtrfs_iomap::Error::NoData { .. })) => file.size(),
            Err(error) => return Err(format!("seeking data from {at}: {error}")),
        };
        if bytes[index(at)..index(data)].iter().any(|byte| *byte != 0) {
            return Err(format!("has a hole at {at}..{data}, where there is data"));
        }
        if index(data) >= bytes.len() {
            return Ok(());
        }
        at =
            file.seek_hole(data).map_err(|error| format!("seeking a hole from {data}: {error}"))?;
        if at <= data {
            return Err(format!("has data and a hole at {data}"));
        }
    }
    Ok(())
}

fn difference(have: &[u8], expect: &[u8]) -> String {
    let first = have.iter().zip(expect).position(|(have, expect)| have != expect);
    let Some(first) = first else {
        return format!("has {} bytes, not {}", have.len(), expect.len());
    };
    let part = |bytes: &[u8]| {
        let bytes = bytes[first..].iter().copied().take(24).collect::<Vec<_>>();
        let origin = fill::origin(&bytes, first);
        format!("{bytes:02x?}{origin}")
    };
    let lens = (have.len(), expect.len());
    format!("({lens:?} bytes) differs at byte {first}: {}, not {}", part(have), part(expect))
}
