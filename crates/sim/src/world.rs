//! The engine on its simulated device, and the model beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use ubtrfs_engine::{Filesystem, OpenOptions, mkfs};
use ubtrfs_rt::Runtime;
use ubtrfs_testkit::crash::SimDevice;
use ubtrfs_testkit::model::{Id, Limits, Model, New, TOP_LEVEL};
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use crate::compare::{self, Differs};
use crate::config::Config;
use crate::op::{Effect, Failed, Op, to_engine};

/// Clean tree blocks that are kept: few enough that some are read again.
const CACHE_BYTES: usize = 8 << 20;

/// What came of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Both did it, and the engine made this, if anything.
    Done(Effect),
    /// Both refused it.
    Refused,
    /// The engine had no space, and changed nothing.
    NoSpace,
    /// The device failed, and nothing was changed.
    DeviceFailed,
}

/// Engine and model, and what is durable.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) device: Arc<SimDevice>,
    pub(crate) fs: Filesystem,
    pub(crate) model: Model,
    /// What may be seen of each commit since the recording began: of one that came in the middle of
    /// an operation, either the state before it or the one after it.
    pub(crate) commits: BTreeMap<u64, Vec<Model>>,
    /// How many writes and flushes had been recorded when a commit was promised.
    pub(crate) promised: Vec<(usize, u64)>,
    seed: u64,
    opened: u64,
    /// Whether each operation is told before it is done, for who looks for one that hangs.
    traces: bool,
}

impl World {
    /// A new filesystem.
    pub(crate) fn make(config: &Config) -> Self {
        let (options, len_bytes) = config.filesystem();
        let device = Arc::new(SimDevice::new(len_bytes));
        let runtime = Arc::new(Runtime::simulated(config.seed));
        let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
        let volume = mkfs(devices, &options, &runtime)
            .unwrap_or_else(|error| panic!("mkfs of {len_bytes} bytes, {options:?}: {error}"));
        let fs = Filesystem::open(volume, open_options(runtime))
            .unwrap_or_else(|error| panic!("opening what mkfs made: {error}"));
        let nodesize = usize::try_from(options.nodesize_bytes).expect("a size fits");
        let model = new_model(&fs, nodesize);
        Self::of(device, fs, model, config.seed)
    }

    /// What lies on a device, where the model is the state that it holds.
    ///
    /// # Errors
    /// That it does not open.
    pub(crate) fn open(device: SimDevice, model: Model, seed: u64) -> Differs<Self> {
        let device = Arc::new(device);
        let fs = open(&device, seed)?;
        Ok(Self::of(device, fs, model, seed))
    }

    fn of(device: Arc<SimDevice>, fs: Filesystem, model: Model, seed: u64) -> Self {
        let (commits, promised) = (BTreeMap::new(), Vec::new());
        let traces = std::env::var_os("UBTRFS_SIM_TRACE").is_some();
        let mut world = Self { device, fs, model, commits, promised, seed, opened: 0, traces };
        world.begin_recording();
        world
    }

    /// Forgets how things came to be as they are now, which a commit made durable.
    pub(crate) fn begin_recording(&mut self) {
        self.device.begin();
        let generation = self.generation();
        self.commits = BTreeMap::from([(generation, vec![durable(&self.model)])]);
        self.promised = vec![(0, generation)];
    }

    /// The generation of the last commit.
    pub(crate) fn generation(&self) -> u64 {
        self.fs.superblock().generation.get()
    }

    /// Does an operation to both sides, and compares what it touched.
    ///
    /// # Errors
    /// How they differ.
    pub(crate) fn step(&mut self, op: &Op) -> Differs<Outcome> {
        let before = self.generation();
        let model_before = self.model.clone();
        if self.traces {
            eprintln!("commit {before}: {op:?}");
        }
        let result = op.on_engine(&self.fs);
        let outcome = match result {
            Ok(effect) => match op.on_model(&mut self.model, effect.made) {
                Ok(orphan) if orphan == effect.orphan => Outcome::Done(effect),
                Ok(orphan) => {
                    return Err(format!("{:?} is left, not {orphan:?}: {op:?}", effect.orphan));
                }
                Err(refusal) => return Err(format!("the model refuses, {refusal:?}: {op:?}")),
            },
            Err(Failed::Refused(refusal)) => {
                let by_model = op.on_model(&mut self.model, None);
                if by_model != Err(refusal) {
                    return Err(format!("{refusal:?} by the engine, {by_model:?} here: {op:?}"));
                }
                Outcome::Refused
            }
            Err(Failed::NoSpace) => Outcome::NoSpace,
            Err(Failed::Device(error)) => match self.device.fault_count() {
                0 => return Err(format!("{error}: {op:?}")),
                _ => Outcome::DeviceFailed,
            },
            Err(Failed::Unexpected(error)) => return Err(format!("{error}: {op:?}")),
        };
        let touched = op.touched(&model_before);
        self.note_commits(op, before, &model_before);
        let made = match outcome {
            Outcome::Done(effect) => effect.made,
            _ => None,
        };
        for id in touched.into_iter().chain(made) {
            compare::inode(&self.fs, &self.model, id)
                .map_err(|what| format!("{what}, after {op:?}, {outcome:?}"))?;
        }
        Ok(outcome)
    }

    /// Takes down the commits that an operation brought, asked for or not.
    fn note_commits(&mut self, op: &Op, before: u64, model_before: &Model) {
        let after = self.generation();
        for generation in before + 1..=after {
            let mut states = vec![durable(model_before)];
            if op.is_in_parts() && self.model != *model_before {
                states.push(durable(&self.model));
            }
            self.commits.insert(generation, states);
        }
        if after > before {
            self.promised.push((self.device.recording().event_count(), after));
        }
    }

    /// Closes the filesystem, which was committed, and opens it again.
    ///
    /// # Errors
    /// That it does not open.
    pub(crate) fn reopen(&mut self) -> Differs {
        self.opened += 1;
        self.fs = open(&self.device, self.seed.wrapping_add(self.opened << 32))?;
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

/// Opens what lies on a device.
///
/// # Errors
/// That it does not open.
pub(crate) fn open(device: &Arc<SimDevice>, seed: u64) -> Differs<Filesystem> {
    let devices = vec![Arc::clone(device) as Arc<dyn Device>];
    let volume = Volume::open(devices, &VolumeOptions::default())
        .map_err(|error| format!("the volume does not open: {error}"))?;
    Filesystem::open(volume, open_options(Arc::new(Runtime::simulated(seed))))
        .map_err(|error| format!("the filesystem does not open: {error}"))
}

fn open_options(runtime: Arc<Runtime>) -> OpenOptions {
    OpenOptions { runtime, cache_bytes: CACHE_BYTES, ..OpenOptions::default() }
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
