//! What is done to the two files, each by bytes of its own. What a call says is not looked at: which of two was first decides that, too.

use ubtrfs_engine::{DataFile, InodeId, RenameMode, SnapshotOptions};
use ubtrfs_iomap::{FileOffset, Reach};
use ubtrfs_ondisk::{FileOffset as DiskOffset, RootId};

use super::world::World;

pub type Call = fn(&World);

fn at(offset: u64) -> FileOffset {
    FileOffset::new(offset)
}

/// With the file open, if it is still there.
fn with<T>(world: &World, id: InodeId, call: impl FnOnce(&DataFile) -> T) {
    if let Ok(file) = world.fs.open_data(id) {
        call(&file);
    }
}

fn of_one<T>(world: &World, call: impl FnOnce(&DataFile) -> T) {
    with(world, world.one, call);
}

pub const CHANGES: [(&str, Call); 24] = [
    ("write inside", |world| of_one(world, |file| file.write(at(100), &[2; 500]))),
    ("write over the end", |world| of_one(world, |file| file.write(at(600), &[3; 9000]))),
    ("write behind the end", |world| of_one(world, |file| file.write(at(13_000), &[4; 30]))),
    ("append", |world| of_one(world, |file| file.append(&[5; 5000]))),
    ("direct write inside", |world| of_one(world, |file| file.direct_write(at(0), &[6; 4096]))),
    ("direct write over the end", |world| {
        of_one(world, |file| file.direct_write(at(8192), &[7; 8192]));
    }),
    ("cut to nothing", |world| of_one(world, |file| file.truncate(at(0)))),
    ("cut inside", |world| of_one(world, |file| file.truncate(at(700)))),
    ("cut in the last block", |world| of_one(world, |file| file.truncate(at(8500)))),
    ("make longer", |world| of_one(world, |file| file.truncate(at(14_000)))),
    ("punch", |world| of_one(world, |file| file.punch_hole(at(400), 5000))),
    ("zero", |world| of_one(world, |file| file.zero_range(at(50), 9000))),
    ("allocate", |world| of_one(world, |file| file.allocate(at(4096), 9000, Reach::Extends))),
    ("unshare", |world| of_one(world, |file| file.unshare(at(0), 9000))),
    ("store", |world| {
        of_one(world, |file| {
            file.map(at(0), 16_384).and_then(|map| map.store(at(4000), &[8; 300]))
        });
    }),
    ("write by number", |world| _ = world.fs.write(world.one, DiskOffset(4000), &[10; 5000])),
    ("cut by number", |world| _ = world.fs.truncate(world.one, 4100)),
    ("write the other", |world| {
        with(world, world.other, |file| file.write(at(0), &[11; 6000]));
    }),
    ("clone the other", |world| _ = world.fs.clone_file(world.other, world.one)),
    ("clone a part", |world| {
        let part = DiskOffset(0)..DiskOffset(4096);
        _ = world.fs.clone_range(world.one, part, world.other, DiskOffset(4096));
    }),
    ("deduplicate", |world| {
        let part = DiskOffset(0)..DiskOffset(4096);
        _ = world.fs.dedupe_range(world.one, part, world.other, DiskOffset(0));
    }),
    ("snapshot", |world| {
        let (top, options) = (world.fs.top_level(), SnapshotOptions { read_only: true });
        _ = world.fs.snapshot(RootId(5), top, b"snapshot", &options);
    }),
    ("unlink", |world| _ = world.fs.unlink(world.fs.top_level(), b"one")),
    ("rename", |world| {
        let top = world.fs.top_level();
        _ = world.fs.rename(top, b"other", top, b"one", RenameMode::Replace);
    }),
];

/// What changes nothing that anybody may see.
pub const BESIDE: [(&str, Call); 6] = [
    ("commit, write back and forget", |world| {
        world.fs.commit().unwrap();
        world.fs.write_back_due(u64::MAX);
        world.fs.drop_clean_data();
    }),
    ("write back and forget", |world| {
        world.fs.write_back_due(u64::MAX);
        world.fs.drop_clean_data();
    }),
    ("sync", |world| world.fs.sync().unwrap()),
    ("fsync", |world| of_one(world, |file| file.fsync())),
    ("fsync by number", |world| _ = world.fs.fsync(world.one)),
    ("read", |world| {
        world.fs.drop_clean_data();
        of_one(world, |file| file.read(at(0), &mut [0; 20_000]));
    }),
];
