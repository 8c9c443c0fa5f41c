//! A filesystem on a device in memory, and one of two files.

use std::ops::Deref;
use std::sync::Arc;

use shuttle::rand::{Rng, RngCore};
use ubtrfs_engine::{
    Filesystem, InodeId, Method, MkfsOptions, NewInode, OpenOptions, Reservation, SetAttributes,
    mkfs,
};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::file_extent::Compression;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_rt::{Executor, Runtime, Time};
use ubtrfs_testkit::Prng;
use ubtrfs_testkit::crash::{Effect, Fault, Image, Request, SimDevice};
use ubtrfs_volume::{Device, Volume, VolumeOptions};

use super::state::State;

pub struct World {
    opened: Opened,
    /// What the names lead to at first.
    pub one: InodeId,
    pub other: InodeId,
}

/// What the two files are at first.
pub struct Shape {
    name: &'static str,
    compression: Option<Compression>,
    fill: fn(&World),
    /// It is in memory only when a case begins.
    is_dirty: bool,
}

/// A filesystem as it lies on its device before a case begins.
#[derive(Clone)]
pub struct Start {
    pub name: &'static str,
    pub compression: Option<Compression>,
    image: Image,
    /// What is in memory only.
    dirty: Option<fn(&World)>,
    /// Then, what is not.
    pub stored: Option<State>,
}

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

const USUAL: Shape = Shape {
    name: "extents",
    compression: None,
    fill: |world| world.write_both(9000, 9000),
    is_dirty: false,
};

pub const SHAPES: [Shape; 6] = [
    USUAL,
    Shape { name: "inline", fill: |world| world.write_both(750, 5000), ..USUAL },
    Shape {
        name: "shared",
        fill: |world| {
            world.write_both(9000, 1);
            world.fs.clone_file(world.one, world.other).unwrap();
        },
        ..USUAL
    },
    Shape {
        name: "allocated ahead",
        fill: |world| {
            for id in [world.one, world.other] {
                let file = world.fs.open_data(id).unwrap();
                file.allocate(at(0), 12_288, Reach::Extends).unwrap();
                file.write(at(4096), &[1; 1000]).unwrap();
            }
        },
        ..USUAL
    },
    Shape { name: "compressed", compression: Some(Compression::Zstd), ..USUAL },
    Shape { name: "dirty", is_dirty: true, ..USUAL },
];

/// Before the time that the clock says.
pub const OLD: Time = Time { sec: 1_600_000_000, nsec: 0 };

/// Five blocks, of which the second is a hole, each in an extent of its own.
pub const IN_BLOCKS: Shape = Shape {
    name: "in blocks",
    fill: |world| {
        let file = world.fs.open_data(world.one).unwrap();
        for block in [0, 2, 3, 4] {
            assert_eq!(file.write(at(block * 4096), &[1; 4096]).unwrap(), 4096);
            file.fsync().unwrap();
        }
        world.make_old();
    },
    ..USUAL
};

/// Two blocks that are written where they are.
pub const IN_PLACE: Shape = Shape {
    name: "in place",
    fill: |world| {
        let flags = Some(flags::NODATACOW | flags::NODATASUM);
        let mut handle = world.fs.begin(Reservation::items(4)).unwrap();
        let attributes = SetAttributes { flags, ..SetAttributes::default() };
        handle.set_attributes(world.one, &attributes).unwrap();
        drop(handle);
        // Apart from each other.
        for (id, offset) in [(world.one, 0), (world.other, 0), (world.one, 4096)] {
            let file = world.fs.open_data(id).unwrap();
            assert_eq!(file.write(at(offset), &[1; 4096]).unwrap(), 4096);
            file.fsync().unwrap();
        }
        world.make_old();
    },
    ..USUAL
};

impl Shape {
    pub fn start(&self) -> Start {
        let &Self { name, compression, fill, is_dirty } = self;
        let image = super::made(move || {
            let opened = Opened::new(compression);
            let [one, other] = [&b"one"[..], b"other"].map(|name| create(&opened.fs, name));
            let world = World { opened, one, other };
            if !is_dirty {
                fill(&world);
            }
            world.opened.close()
        });
        let dirty = is_dirty.then_some(fill);
        let stored = is_dirty.then(|| {
            let image = image.clone();
            super::made(move || State::of(&Opened::of_image(image.clone(), compression).fs))
        });
        Start { name, compression, image, dirty, stored }
    }
}

/// A filesystem, and the device that it lies on.
pub struct Opened {
    device: Arc<SimDevice>,
    pub fs: Filesystem,
}

impl Opened {
    /// A new one.
    pub fn new(compression: Option<Compression>) -> Self {
        let device = Arc::new(SimDevice::new(256 << 20));
        let options = MkfsOptions {
            nodesize_bytes: 4096,
            metadata_profile: Some(BlockGroupFlags::default()),
            ..MkfsOptions::default()
        };
        let runtime = Arc::new(Runtime::simulated(1));
        drop(mkfs(vec![Arc::clone(&device) as Arc<dyn Device>], &options, &runtime).unwrap());
        Self::on(device, compression)
    }

    pub fn of_image(image: Image, compression: Option<Compression>) -> Self {
        Self::on(Arc::new(SimDevice::of_image(image)), compression)
    }

    fn on(device: Arc<SimDevice>, compression: Option<Compression>) -> Self {
        let devices = vec![Arc::clone(&device) as Arc<dyn Device>];
        let volume = Volume::open(devices, &VolumeOptions::default()).unwrap();
        let options = OpenOptions {
            runtime: Arc::new(Runtime::simulated(1)),
            compression: compression.map(Method::with_default_level),
            ..OpenOptions::default()
        };
        Self { device, fs: Filesystem::open(volume, options).unwrap() }
    }

    /// What the device has once the filesystem is closed.
    pub fn close(self) -> Image {
        self.fs.sync().unwrap();
        drop(self.fs);
        self.device.image()
    }

    /// From a moment on that chance chooses, a write fails, or all do.
    pub fn plan_fault(&self) {
        let mut random = shuttle::rand::thread_rng();
        let effect = match random.next_u64() % 3 {
            0 => Effect::Tear { sectors: 1 },
            _ => Effect::Fail,
        };
        let stays = random.next_u64().is_multiple_of(4);
        let after = random.next_u64() % 24;
        let request = Request::Write;
        self.device.plan(Fault { device: None, request, after, effect, stays });
    }

    pub fn image(&self) -> Image {
        self.device.image()
    }

    /// What a power cut leaves that comes at any moment since it was opened.
    pub fn cut(&self) -> Image {
        let event_count = self.device.recording().event_count();
        self.cut_after(shuttle::rand::thread_rng().gen_range(0..=event_count))
    }

    /// What a power cut leaves that comes now.
    pub fn cut_now(&self) -> Image {
        self.cut_after(self.device.recording().event_count())
    }

    fn cut_after(&self, events: usize) -> Image {
        let mut random = Prng::new(shuttle::rand::thread_rng().next_u64());
        self.device.recording().torn_after(events, &mut random).image()
    }
}

impl Deref for World {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

impl World {
    pub fn open(start: &Start) -> Self {
        let opened = Opened::of_image(start.image.clone(), start.compression);
        let fs = &opened.fs;
        let [one, other] =
            [&b"one"[..], b"other"].map(|name| fs.lookup(fs.top_level(), name).unwrap());
        let world = Self { opened, one, other };
        if let Some(fill) = start.dirty {
            fill(&world);
        }
        world
    }

    fn write_both(&self, one: usize, other: usize) {
        for (id, len, byte) in [(self.one, one, 1), (self.other, other, 31)] {
            let file = self.fs.open_data(id).unwrap();
            assert_eq!(file.write(at(0), &vec![byte; len]).unwrap(), len);
        }
    }

    /// The clock stands still: only so is a write later than what was.
    fn make_old(&self) {
        let mtime = Some(OLD);
        let mut handle = self.fs.begin(Reservation::items(4)).unwrap();
        let attributes = SetAttributes { mtime, ..SetAttributes::default() };
        handle.set_attributes(self.one, &attributes).unwrap();
    }

    /// Returns whether there is a file of that name.
    pub fn fsync_one(&self) -> bool {
        let found = self.fs.lookup(self.fs.top_level(), b"one").ok();
        found.map(|id| self.fs.fsync(id).unwrap()).is_some()
    }
}

fn create(fs: &Filesystem, name: &[u8]) -> InodeId {
    let new = NewInode::new(0o100_644, Time { sec: 1_700_000_000, nsec: 0 });
    let mut handle = fs.begin(Reservation::create(0)).unwrap();
    handle.create(fs.top_level(), name, &new).unwrap()
}

/// The checker that shares no code with the engine finds nothing.
pub fn check(image: &Image, what: &str) {
    let device = Arc::new(SimDevice::of_image(image.clone()));
    let options = VolumeOptions { read_only: true, ..VolumeOptions::default() };
    let volume = Volume::open(vec![device], &options).unwrap();
    let executor = Executor::Inline;
    let options = ubtrfs_check::CheckOptions { data: true, executor, ..Default::default() };
    let report = ubtrfs_check::check(&volume, &options).unwrap();
    let errors: Vec<String> = report.errors().map(ToString::to_string).collect();
    assert!(report.is_clean(), "{what}: {errors:#?}");
}
