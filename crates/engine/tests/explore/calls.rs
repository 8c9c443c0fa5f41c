//! What is done to the two files, each by bytes of its own.

use ubtrfs_engine::{DataFile, Error, InodeId, RenameMode, SnapshotOptions};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::{FileOffset as DiskOffset, RootId};

use super::world::World;

type Result<T, E = Failure> = std::result::Result<T, E>;

/// Which of two was first decides also what is refused.
pub type Call = fn(&World) -> Result<()>;

/// How a call says that not all was done.
#[derive(Debug)]
pub enum Failure {
    Error(Error),
    /// Less was written than was to be.
    Short,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl Failure {
    /// Whether it says that something cannot be done as things are, and not that something failed.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Error(
                Error::NotFound { .. }
                    | Error::Exists { .. }
                    | Error::InvalidArgument { .. }
                    | Error::File(ubtrfs_iomap::Error::BeyondEnd { .. })
            )
        )
    }
}

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

fn with<T, E: Into<Failure>>(
    world: &World,
    id: InodeId,
    call: impl FnOnce(&DataFile) -> Result<T, E>,
) -> Result<()> {
    call(&world.fs.open_data(id)?).map(drop).map_err(E::into)
}

fn of_one<T, E: Into<Failure>>(
    world: &World,
    call: impl FnOnce(&DataFile) -> Result<T, E>,
) -> Result<()> {
    with(world, world.one, call)
}

fn write(world: &World, id: InodeId, offset: u64, bytes: &[u8]) -> Result<()> {
    with(world, id, |file| whole(file.write(at(offset), bytes)?, bytes))
}

fn direct_write(world: &World, offset: u64, bytes: &[u8]) -> Result<()> {
    of_one(world, |file| whole(file.direct_write(at(offset), bytes)?, bytes))
}

fn whole(written: usize, bytes: &[u8]) -> Result<()> {
    if written == bytes.len() { Ok(()) } else { Err(Failure::Short) }
}

pub const CHANGES: [(&str, Call); 24] = [
    ("write inside", |world| write(world, world.one, 100, &[2; 500])),
    ("write over the end", |world| write(world, world.one, 600, &[3; 9000])),
    ("write behind the end", |world| write(world, world.one, 13_000, &[4; 30])),
    ("append", |world| of_one(world, |file| whole(file.append(&[5; 5000])?.1, &[5; 5000]))),
    ("direct write inside", |world| direct_write(world, 0, &[6; 4096])),
    ("direct write over the end", |world| direct_write(world, 8192, &[7; 8192])),
    ("cut to nothing", |world| of_one(world, |file| file.truncate(at(0)))),
    ("cut inside", |world| of_one(world, |file| file.truncate(at(700)))),
    ("cut in the last block", |world| of_one(world, |file| file.truncate(at(8500)))),
    ("make longer", |world| of_one(world, |file| file.truncate(at(14_000)))),
    ("punch", |world| of_one(world, |file| file.punch_hole(at(400), 5000))),
    ("zero", |world| of_one(world, |file| file.zero_range(at(50), 9000))),
    ("allocate", |world| of_one(world, |file| file.allocate(at(4096), 9000, Reach::Extends))),
    ("unshare", |world| of_one(world, |file| file.unshare(at(0), 9000))),
    ("store", |world| of_one(world, |file| file.map(at(0), 16_384)?.store(at(4000), &[8; 300]))),
    ("write by number", |world| Ok(world.fs.write(world.one, DiskOffset(4000), &[10; 5000])?)),
    ("cut by number", |world| Ok(world.fs.truncate(world.one, 4100)?)),
    ("write the other", |world| write(world, world.other, 0, &[11; 6000])),
    ("clone the other", |world| Ok(world.fs.clone_file(world.other, world.one)?)),
    ("clone a part", |world| {
        let part = DiskOffset(0)..DiskOffset(4096);
        Ok(world.fs.clone_range(world.one, part, world.other, DiskOffset(4096))?)
    }),
    ("deduplicate", |world| {
        let part = DiskOffset(0)..DiskOffset(4096);
        Ok(world.fs.dedupe_range(world.one, part, world.other, DiskOffset(0)).map(drop)?)
    }),
    ("snapshot", |world| {
        let (top, options) = (world.fs.top_level(), SnapshotOptions { read_only: true });
        Ok(world.fs.snapshot(RootId(5), top, b"snapshot", &options).map(drop)?)
    }),
    ("unlink", |world| Ok(world.fs.unlink(world.fs.top_level(), b"one")?)),
    ("rename", |world| {
        let top = world.fs.top_level();
        Ok(world.fs.rename(top, b"other", top, b"one", RenameMode::Replace)?)
    }),
];

/// What changes nothing that anybody may see.
pub const BESIDE: [(&str, Call); 6] = [
    ("commit, write back and forget", |world| {
        let committed = world.fs.commit();
        world.fs.write_back_due(u64::MAX);
        world.fs.drop_clean_data();
        Ok(committed?)
    }),
    ("write back and forget", |world| {
        world.fs.write_back_due(u64::MAX);
        world.fs.drop_clean_data();
        Ok(())
    }),
    ("sync", |world| Ok(world.fs.sync()?)),
    ("fsync", |world| of_one(world, |file| file.fsync())),
    ("fsync by number", |world| Ok(world.fs.fsync(world.one)?)),
    ("read", |world| {
        world.fs.drop_clean_data();
        of_one(world, |file| file.read(at(0), &mut [0; 20_000]))
    }),
];
