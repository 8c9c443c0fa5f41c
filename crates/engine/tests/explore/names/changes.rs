//! What is done to names, directories and subvolumes.

use ubtrfs_engine::{
    Handle, InodeId, NewInode, RenameMode, Reservation, Result, SetAttributes, SnapshotOptions,
};
use ubtrfs_ondisk::RootId;

use super::world::{NOW, Names};

pub type Change = fn(&Names) -> Result<()>;

fn under<T>(
    names: &Names,
    reservation: Reservation,
    change: impl FnOnce(&mut Handle<'_>) -> Result<T>,
) -> Result<()> {
    change(&mut names.fs.begin(reservation)?).map(drop)
}

fn make(names: &Names, dir: InodeId, name: &[u8], mode: u32) -> Result<()> {
    let new = NewInode::new(mode, NOW);
    under(names, Reservation::create(0), |handle| handle.create(dir, name, &new))
}

fn link(names: &Names, dir: InodeId, name: &[u8], id: InodeId) -> Result<()> {
    under(names, Reservation::create(0), |handle| handle.link(dir, name, id))
}

fn rename(
    names: &Names,
    from: (InodeId, &[u8]),
    to: (InodeId, &[u8]),
    mode: RenameMode,
) -> Result<()> {
    names.fs.rename(from.0, from.1, to.0, to.1, mode)
}

fn replace(names: &Names, from: (InodeId, &[u8]), to: (InodeId, &[u8])) -> Result<()> {
    rename(names, from, to, RenameMode::Replace)
}

fn exchange(names: &Names, from: (InodeId, &[u8]), to: (InodeId, &[u8])) -> Result<()> {
    rename(names, from, to, RenameMode::Exchange)
}

fn snapshot(names: &Names, source: RootId, dir: InodeId, name: &[u8]) -> Result<()> {
    let options = SnapshotOptions { read_only: false };
    names.fs.snapshot(source, dir, name, &options).map(drop)
}

fn set_xattr(names: &Names, id: InodeId, value: &[u8]) -> Result<()> {
    under(names, Reservation::create(1), |handle| handle.set_xattr(id, b"user.name", value))
}

pub const CHANGES: [(&str, Change); 38] = [
    ("make b/n", |names| make(names, names.b, b"n", 0o100_644)),
    ("make directory b/n", |names| make(names, names.b, b"n", 0o040_755)),
    ("make symbolic link b/n", |names| {
        let new = NewInode::new(0o777, NOW);
        under(names, Reservation::create(0), |handle| {
            handle.symlink(names.b, b"n", b"target", &new)
        })
    }),
    ("make b/n without a name first", |names| {
        let new = NewInode::new(0o100_600, NOW);
        let mut id = names.one;
        under(names, Reservation::create(0), |handle| {
            id = handle.create_unlinked(names.b, &new)?;
            Ok(())
        })?;
        link(names, names.b, b"n", id).or_else(|error| names.fs.evict(id).and(Err(error)))
    }),
    ("make a/n", |names| make(names, names.a, b"n", 0o100_644)),
    ("make t/n", |names| make(names, names.t, b"n", 0o100_644)),
    ("link one as b/n", |names| link(names, names.b, b"n", names.one)),
    ("link one as two", |names| link(names, names.top, b"two", names.one)),
    ("link s/y as s/z", |names| link(names, names.s, b"z", names.y)),
    ("unlink a/x", |names| names.fs.unlink(names.a, b"x")),
    ("unlink one", |names| names.fs.unlink(names.top, b"one")),
    ("unlink two", |names| names.fs.unlink(names.top, b"two")),
    ("unlink s/y", |names| names.fs.unlink(names.s, b"y")),
    ("remove b", |names| names.fs.rmdir(names.top, b"b")),
    ("a/x to b/x", |names| replace(names, (names.a, b"x"), (names.b, b"x"))),
    ("a/x to one", |names| replace(names, (names.a, b"x"), (names.top, b"one"))),
    ("one to two", |names| replace(names, (names.top, b"one"), (names.top, b"two"))),
    ("one to a/x", |names| replace(names, (names.top, b"one"), (names.a, b"x"))),
    ("a to b/a", |names| replace(names, (names.top, b"a"), (names.b, b"a"))),
    ("b to a/b", |names| replace(names, (names.top, b"b"), (names.a, b"b"))),
    ("a to b", |names| replace(names, (names.top, b"a"), (names.top, b"b"))),
    ("b to a", |names| replace(names, (names.top, b"b"), (names.top, b"a"))),
    ("a and b change places", |names| exchange(names, (names.top, b"a"), (names.top, b"b"))),
    ("a/x and one change places", |names| exchange(names, (names.a, b"x"), (names.top, b"one"))),
    ("s and t change places", |names| exchange(names, (names.top, b"s"), (names.top, b"t"))),
    ("a and s change places", |names| exchange(names, (names.top, b"a"), (names.top, b"s"))),
    ("s to b/s", |names| replace(names, (names.top, b"s"), (names.b, b"s"))),
    ("s to t/s", |names| replace(names, (names.top, b"s"), (names.t, b"s"))),
    ("t to s/t", |names| replace(names, (names.top, b"t"), (names.s, b"t"))),
    ("one leaves a whiteout for b/o", |names| {
        rename(names, (names.top, b"one"), (names.b, b"o"), RenameMode::Whiteout)
    }),
    ("make subvolume b/n", |names| {
        let new = NewInode::new(0o040_755, NOW);
        under(names, Reservation::create_subvolume(), |handle| {
            handle.create_subvolume(names.b, b"n", &new)
        })
    }),
    ("snapshot of s as b/n", |names| snapshot(names, names.s.root, names.b, b"n")),
    ("snapshot of all as t/n", |names| snapshot(names, names.top.root, names.t, b"n")),
    ("delete s", |names| names.fs.delete_subvolume(names.top, b"s").map(drop)),
    ("delete t if it is empty", |names| names.fs.delete_empty_subvolume(names.top, b"t").map(drop)),
    ("s is read-only", |names| names.fs.set_subvolume_read_only(names.s.root, true)),
    ("attribute of a", |names| set_xattr(names, names.a, b"a value")),
    ("permissions of one", |names| {
        let attributes = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        under(names, Reservation::items(4), |handle| handle.set_attributes(names.one, &attributes))
    }),
];
