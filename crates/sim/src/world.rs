//! The engine on its simulated devices, and the model beside it.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ubtrfs_engine::{Error, Filesystem, OpenOptions, Reservation, mkfs};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::Runtime;
use ubtrfs_testkit::crash::{Image, SimArray};
use ubtrfs_testkit::model::{Id, Limits, Model, New, RenameMode, TOP_LEVEL};
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_volume::{Volume, VolumeOptions};

use crate::compare::{self, Differs, Wrong};
use crate::config::Shape;
use crate::judge::Ahead;
use crate::op::{Effect, Failed, Last, Op, to_engine, to_model};
use crate::superblocks;

/// References that a step of a deletion drops, about, and steps that none has.
const CLEAN_STEP_REFS: usize = 20;
const CLEAN_STEPS_MAX: usize = 100_000;

/// What came of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Both did it, and the engine made this, if anything.
    Done(Effect),
    /// Both refused it.
    Refused,
    /// The engine had no space; the model is as much further as the engine.
    NoSpace,
    /// The device failed; the model is as much further as the engine.
    DeviceFailed,
    /// The device failed, and the filesystem takes no more: what was done of the operation is gone
    /// when it is opened again.
    Stopped,
}

/// What may be wrong with what the engine shows, after what was done to its devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lenience {
    /// Nothing.
    Nothing,
    /// Bytes that have no checksums.
    UnprotectedBytes,
    /// These, and it may say that it cannot read something.
    Damage,
}

impl Lenience {
    pub(crate) fn allows(self, wrong: &Wrong) -> bool {
        match wrong {
            Wrong::Other(_) => false,
            Wrong::UnprotectedBytes(_) => self != Self::Nothing,
            Wrong::Unreadable(_) => self == Self::Damage,
        }
    }
}

/// What may be seen of a commit.
#[derive(Clone, Debug)]
pub(crate) struct Committed {
    /// The state then; of one that came in the middle of an operation, that before it and that
    /// after it.
    pub(crate) models: Vec<Model>,
    /// The operation in the middle of which it came, and the state before that: the states inside
    /// may be seen, too.
    pub(crate) inside: Option<Rc<(Op, Model)>>,
}

impl Committed {
    pub(crate) fn of(model: &Model) -> Self {
        Self { models: vec![durable(model)], inside: None }
    }

    /// The state that a filesystem shows, if it may be seen.
    ///
    /// # Errors
    /// How it differs from the last of those that lie outside of operations.
    pub(crate) fn shown(&self, fs: &Filesystem, lenience: Lenience) -> Differs<Model> {
        let all = |model: &Model| compare::all_but(fs, model, |wrong| lenience.allows(wrong));
        let mut last = "no state".to_owned();
        for model in &self.models {
            match all(model) {
                Ok(_) => return Ok(model.clone()),
                Err(wrong) => last = wrong.into(),
            }
        }
        if let Some(inside) = &self.inside {
            let (op, before) = &**inside;
            let shown = op.inside(before).map(|model| durable(&model)).find(|model| {
                let changed = op.touched(before).into_iter().next_back();
                let is_first = |id| match compare::inode(fs, model, id) {
                    Ok(()) => true,
                    Err(wrong) => lenience.allows(&wrong),
                };
                changed.is_none_or(is_first) && all(model).is_ok()
            });
            return shown.ok_or(format!("{last}; nor a beginning of {op:?}"));
        }
        Err(last)
    }
}

/// Engine and model, and what is durable.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) array: SimArray,
    pub(crate) fs: Filesystem,
    pub(crate) model: Model,
    /// What may be seen of each commit since the recording began.
    pub(crate) commits: BTreeMap<u64, Committed>,
    /// How many writes and flushes had been recorded when a commit was promised.
    pub(crate) promised: Vec<(usize, u64)>,
    pub(crate) lenience: Lenience,
    /// What an earlier cut had left when the recording began.
    pub(crate) ahead: Vec<Ahead>,
    shape: Rc<Shape>,
    seed: u64,
    opened: u64,
    /// Whether each operation is told before it is done, for who looks for one that hangs.
    traces: bool,
}

impl World {
    /// A new filesystem.
    pub(crate) fn make(shape: Rc<Shape>, seed: u64) -> Self {
        let array = SimArray::new(&shape.lens_bytes);
        let runtime = Arc::new(Runtime::simulated(seed));
        let options = &shape.options;
        let volume = mkfs(array.devices(), options, &runtime)
            .unwrap_or_else(|error| panic!("mkfs of {shape:?}: {error}"));
        let fs = Filesystem::open(volume, open_options(&shape, runtime))
            .unwrap_or_else(|error| panic!("opening what mkfs made: {error}"));
        let nodesize = usize::try_from(options.nodesize_bytes).expect("a size fits");
        let model = new_model(&fs, nodesize);
        Self::with(array, fs, model, shape, seed)
    }

    /// What lies on devices, where the model is the state that they hold.
    ///
    /// # Errors
    /// That it does not open.
    pub(crate) fn open(
        array: SimArray,
        model: Model,
        shape: Rc<Shape>,
        seed: u64,
    ) -> Differs<Self> {
        let fs = open(&array, &shape, seed).map_err(|error| not_open(&error))?;
        Ok(Self::with(array, fs, model, shape, seed))
    }

    /// As [`World::open`], where what the opening itself writes is recorded, and the commits that it
    /// makes are known: they show what was there.
    ///
    /// # Errors
    /// As [`World::open`].
    pub(crate) fn open_recorded(
        array: SimArray,
        model: Model,
        shape: Rc<Shape>,
        seed: u64,
    ) -> Differs<Self> {
        array.begin();
        let before = newest_generation(&array.images());
        let ahead = Ahead::all(&array.images());
        let fs = open(&array, &shape, seed).map_err(|error| not_open(&error))?;
        let mut world = Self { ahead, ..Self::unrecorded(array, fs, model, shape, seed) };
        let after = world.generation();
        let shown = Committed::of(&world.model);
        world.commits = (before..=after).map(|one| (one, shown.clone())).collect();
        world.promised = vec![(0, before), (world.array.event_count(), after)];
        Ok(world)
    }

    /// What is open already.
    pub(crate) fn with(
        array: SimArray,
        fs: Filesystem,
        model: Model,
        shape: Rc<Shape>,
        seed: u64,
    ) -> Self {
        let mut world = Self::unrecorded(array, fs, model, shape, seed);
        world.begin_recording();
        world
    }

    /// What is open already, and goes on being recorded as it is.
    pub(crate) fn unrecorded(
        array: SimArray,
        fs: Filesystem,
        model: Model,
        shape: Rc<Shape>,
        seed: u64,
    ) -> Self {
        array.suspend_faults(true);
        Self {
            array,
            fs,
            model,
            commits: BTreeMap::new(),
            promised: Vec::new(),
            lenience: Lenience::Nothing,
            ahead: Vec::new(),
            shape,
            seed,
            opened: 0,
            traces: std::env::var_os("UBTRFS_SIM_TRACE").is_some(),
        }
    }

    /// What it was made as.
    pub(crate) fn shape(&self) -> &Rc<Shape> {
        &self.shape
    }

    /// Forgets how things came to be as they are now, which a commit made durable.
    pub(crate) fn begin_recording(&mut self) {
        self.array.begin();
        let generation = self.generation();
        self.commits = BTreeMap::from([(generation, Committed::of(&self.model))]);
        self.promised = vec![(0, generation)];
    }

    /// The generation of the last commit.
    pub(crate) fn generation(&self) -> u64 {
        self.fs.superblock().generation.get()
    }

    /// The commit that was promised last when so many writes and flushes had been recorded.
    pub(crate) fn promised_at(&self, events: usize) -> u64 {
        let promised = self.promised.iter().rev().find(|(at, _)| *at <= events);
        promised.map_or(0, |(_, generation)| *generation)
    }

    /// How many writes and flushes had been recorded when a commit was last promised.
    pub(crate) fn last_promise(&self) -> usize {
        self.promised.last().map_or(0, |(events, _)| *events)
    }

    /// Does an operation to both sides, and compares what it touched. Faults strike the engine's
    /// part alone.
    ///
    /// # Errors
    /// How they differ.
    pub(crate) fn step(&mut self, op: &Op) -> Differs<Outcome> {
        let before = self.generation();
        let model_before = self.model.clone();
        if self.traces {
            eprintln!("commit {before}: {op:?}");
        }
        self.array.suspend_faults(false);
        let result = op.on_engine(&self.fs);
        self.array.suspend_faults(true);
        let outcome = self.outcome(op, result, &model_before)?;
        self.note_commits(op, before, &model_before, outcome);
        if outcome == Outcome::Stopped {
            return Ok(outcome);
        }
        let made = match outcome {
            Outcome::Done(effect) => {
                self.take_over_damage(op, effect)?;
                effect.made
            }
            _ => None,
        };
        for id in op.touched(&model_before).into_iter().chain(made) {
            self.is_shown(&self.model, id).map_err(|wrong| {
                let own = |id: Id| self.model.node(id).map(|node| (id, node.flags));
                let own: Vec<_> = op.mentions().into_iter().filter_map(own).collect();
                let wrong = String::from(wrong);
                format!("{wrong}, after {op:?}, {outcome:?}; inodes' flags {own:?}")
            })?;
        }
        Ok(outcome)
    }

    /// Bytes without checksums that were damaged on their way were copied as they came: they are right
    /// from then on, wherever they went.
    ///
    /// # Errors
    /// That they cannot be read.
    fn take_over_damage(&mut self, op: &Op, effect: Effect) -> Differs {
        let (Op::CopyRange(copied), Some(len_bytes)) = (op, effect.told) else { return Ok(()) };
        let source = self.model.node(copied.source);
        let is_unprotected = source.is_some_and(|node| node.flags & flags::NODATASUM != 0);
        if self.lenience == Lenience::Nothing || !is_unprotected {
            return Ok(());
        }
        let (target, at) = (copied.target, copied.target_offset);
        let mut bytes = vec![0; usize::try_from(len_bytes).expect("bytes of a file in memory")];
        let read = self.fs.read(to_engine(target), FileOffset(at), &mut bytes);
        read.map_err(|error| error.to_string())?;
        let written = self.model.write(target, at, &bytes);
        written.map_err(|refusal| format!("what was copied is refused, {refusal:?}: {op:?}"))
    }

    /// Whether the engine shows an inode as a model does.
    fn is_shown(&self, model: &Model, id: Id) -> Result<(), Wrong> {
        match compare::inode(&self.fs, model, id) {
            Err(wrong) if self.lenience.allows(&wrong) => Ok(()),
            other => other,
        }
    }

    fn outcome(
        &mut self,
        op: &Op,
        result: Result<Effect, Failed>,
        before: &Model,
    ) -> Differs<Outcome> {
        match result {
            Ok(effect) => match op.on_model(&mut self.model, effect.made) {
                Ok(expected) if expected == effect => Ok(Outcome::Done(effect)),
                // Damaged bytes are the same no more.
                Ok(_) if self.lenience != Lenience::Nothing && effect.told == Some(0) => {
                    self.model = before.clone();
                    Ok(Outcome::Done(effect))
                }
                Ok(expected) => Err(format!("{effect:?}, not {expected:?}: {op:?}")),
                Err(refusal) => Err(format!("the model refuses, {refusal:?}: {op:?}")),
            },
            Err(Failed::Refused(refusal)) => {
                let by_model = op.on_model(&mut self.model, None);
                if by_model != Err(refusal) {
                    return Err(format!("{refusal:?} by the engine, {by_model:?} here: {op:?}"));
                }
                Ok(Outcome::Refused)
            }
            Err(Failed::NoSpace) => {
                self.follow(op, before)?;
                Ok(Outcome::NoSpace)
            }
            Err(Failed::Device(error)) if self.array.strikes().is_empty() => {
                Err(format!("{error}: {op:?}"))
            }
            Err(Failed::Device(_)) if self.is_aborted() => Ok(Outcome::Stopped),
            Err(Failed::Device(error)) => {
                self.follow(op, before).map_err(|why| format!("{why} (it failed with {error})"))?;
                Ok(Outcome::DeviceFailed)
            }
            Err(Failed::Unexpected(error)) => Err(format!("{error}: {op:?}")),
        }
    }

    /// Whether it takes no more changes, because something failed.
    pub(crate) fn is_aborted(&self) -> bool {
        matches!(self.fs.begin(Reservation::items(0)).map(drop), Err(Error::Aborted { .. }))
    }

    /// After an operation failed half way, lets the model be in the state that the engine shows:
    /// that before it, or, where it has several steps, one inside of it.
    ///
    /// # Errors
    /// That it shows none of them.
    fn follow(&mut self, op: &Op, before: &Model) -> Differs {
        let touched = op.touched(before);
        let is_shown = |model: &Model| touched.iter().all(|id| self.is_shown(model, *id).is_ok());
        if is_shown(before) {
            return Ok(());
        }
        let mut after = before.clone();
        let whiteout = match op {
            Op::Rename { from, from_name, mode: RenameMode::Whiteout, .. } => {
                self.fs.lookup(to_engine(*from), from_name).ok().map(to_model)
            }
            _ => None,
        };
        // The name is gone, and the rest follows when the filesystem is opened again.
        let is_removal = matches!(
            op,
            Op::Evict { .. }
                // What is remembered of the subvolume may be read last.
                | Op::SetReadOnly { .. }
                | Op::Unlink { last: Last::Goes, .. }
                | Op::Rmdir { last: Last::Goes, .. }
                | Op::Rename { last: Last::Goes, .. }
        );
        let after = match is_removal && op.on_model(&mut after, whiteout).is_ok() {
            true => Some(after),
            false => None,
        };
        let shown = op.inside(before).chain(after).find(is_shown);
        self.model = shown.ok_or_else(|| format!("neither undone nor a beginning: {op:?}"))?;
        Ok(())
    }

    /// Frees what deleted subvolumes held, in small steps: what an earlier session or one before a
    /// cut began is gone on with.
    ///
    /// # Errors
    /// That it fails, or does not end.
    pub(crate) fn finish_deletions(&mut self) -> Differs {
        for _ in 0..CLEAN_STEPS_MAX {
            let (before, model) = (self.generation(), self.model.clone());
            let more = self.fs.clean_deleted_step(CLEAN_STEP_REFS).map_err(|e| e.to_string())?;
            self.note_commits(&Op::CleanDeleted { part: None }, before, &model, Outcome::Refused);
            if more {
                continue;
            }
            let infos = self.fs.subvolumes().map_err(|error| error.to_string())?;
            return match infos.iter().find(|info| info.deleted) {
                None => Ok(()),
                Some(info) => Err(format!("subvolume {} is left of a deletion", info.id)),
            };
        }
        Err("the dropping of deleted subvolumes does not end".to_owned())
    }

    /// Takes down the commits that an operation brought, asked for or not.
    fn note_commits(&mut self, op: &Op, before: u64, model_before: &Model, outcome: Outcome) {
        let after = self.generation();
        let mut model_after = self.model.clone();
        let mut last = after;
        if outcome == Outcome::Stopped {
            // The commit that failed may be on a device all the same, and what it was made for with it.
            last = last.max(newest_generation(&self.array.images()));
            if op.on_model(&mut model_after, None).is_err() {
                model_after = model_before.clone();
            }
        }
        for generation in before + 1..=last {
            let mut committed = Committed::of(model_before);
            if op.is_in_parts() {
                if model_after != *model_before {
                    committed.models.push(durable(&model_after));
                }
                committed.inside = Some(Rc::new((op.clone(), model_before.clone())));
            }
            self.commits.insert(generation, committed);
        }
        // What failed was written, perhaps, and not promised.
        let after = if outcome == Outcome::Stopped { after - 1 } else { after };
        if after > before {
            self.promised.push((self.array.event_count(), after));
        }
    }

    /// Closes the filesystem, which was committed, and opens it again.
    ///
    /// # Errors
    /// That it does not open.
    pub(crate) fn reopen(&mut self) -> Differs {
        self.opened += 1;
        let seed = self.seed.wrapping_add(self.opened << 32);
        let (before, writes) = (self.generation(), self.array.write_count());
        self.fs = open(&self.array, &self.shape, seed).map_err(|error| not_open(&error))?;
        if self.generation() == before && self.array.write_count() > writes {
            return Err("an opening that made no commit wrote something".to_owned());
        }
        self.model.evict_all();
        Ok(())
    }
}

/// What is seen of a state after the filesystem was opened again: inodes without a name are not.
pub(crate) fn durable(model: &Model) -> Model {
    let mut model = model.clone();
    model.evict_all();
    model
}

/// The generation that devices show before anything is mended.
pub(crate) fn newest_generation(images: &[Image]) -> u64 {
    superblocks::newest(images).map_or(0, |superblock| superblock.generation.get())
}

/// Opens what lies on devices.
///
/// # Errors
/// The engine's.
pub(crate) fn open(array: &SimArray, shape: &Shape, seed: u64) -> Result<Filesystem, Error> {
    let volume = Volume::open(array.devices(), &VolumeOptions::default())?;
    Filesystem::open(volume, open_options(shape, Arc::new(Runtime::simulated(seed))))
}

/// What is wrong where nothing may keep a filesystem from being opened.
pub(crate) fn not_open(error: &Error) -> String {
    format!("it does not open: {error}")
}

fn open_options(shape: &Shape, runtime: Arc<Runtime>) -> OpenOptions {
    OpenOptions {
        runtime,
        cache_bytes: shape.cache_bytes,
        discard: shape.discard,
        grow_device: shape.grows_when_full,
        ..OpenOptions::default()
    }
}

/// The model of a filesystem that was just made.
fn new_model(fs: &Filesystem, nodesize_bytes: usize) -> Model {
    let inode = fs
        .inode(to_engine(Id::root_of(TOP_LEVEL)))
        .unwrap_or_else(|error| panic!("the root of what mkfs made: {error}"));
    let timestamp = |time: ubtrfs_rt::Time| Timestamp { sec: time.sec, nsec: time.nsec };
    let root = New {
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        rdev: 0,
        atime: timestamp(inode.atime),
        mtime: timestamp(inode.mtime),
        ctime: timestamp(inode.ctime),
        otime: timestamp(inode.otime),
    };
    let now = timestamp(fs.runtime().clock.now());
    Model::new(&root, Limits::of_nodesize(nodesize_bytes), now)
}
