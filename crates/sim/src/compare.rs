//! Whether engine and model show the same.

use std::collections::{BTreeMap, BTreeSet};

use ubtrfs_engine::{Error, Filesystem, InodeId};
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::flags;
use ubtrfs_ondisk::{FileOffset, Uuid};
use ubtrfs_rt::Time;
use ubtrfs_testkit::model::{
    Content, Id, Model, Node, ROOT_DIRECTORY, SparseBytes, TOP_LEVEL, Target,
};
use ubtrfs_testkit::snapshot::Timestamp;

use crate::op::{to_engine, to_model};

/// What went wrong in a run, in words.
pub(crate) type Differs<T = ()> = Result<T, String>;

/// How the engine's answer differs from the model's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Wrong {
    /// It is another.
    Other(String),
    /// Bytes of a file without checksums are others.
    UnprotectedBytes(String),
    /// There is none: the device or the checksums say no.
    Unreadable(String),
}

impl From<Wrong> for String {
    fn from(wrong: Wrong) -> Self {
        match wrong {
            Wrong::Other(what) | Wrong::UnprotectedBytes(what) | Wrong::Unreadable(what) => what,
        }
    }
}

type Compared<T = ()> = Result<T, Wrong>;

/// Everything: all subvolumes, inodes, names, contents, attributes.
pub(crate) fn all(fs: &Filesystem, model: &Model) -> Compared {
    all_but(fs, model, |_| false).map(drop)
}

/// As [`all`], but for what may be wrong; returns how much was.
pub(crate) fn all_but(
    fs: &Filesystem,
    model: &Model,
    may_be: impl Fn(&Wrong) -> bool,
) -> Compared<u64> {
    let mut count = 0;
    let mut judge = |result: Compared| match result {
        Err(wrong) if may_be(&wrong) => {
            count += 1;
            Ok(())
        }
        other => other,
    };
    judge(subvolumes(fs, model))?;
    nodes(fs, model, |_| true, judge)?;
    Ok(count)
}

/// Those subvolumes of the model that are wanted, as far as their inodes show them.
pub(crate) fn part(fs: &Filesystem, model: &Model, is_wanted: impl Fn(u64) -> bool) -> Compared {
    nodes(fs, model, is_wanted, |result| result)
}

fn nodes(
    fs: &Filesystem,
    model: &Model,
    is_wanted: impl Fn(u64) -> bool,
    mut judge: impl FnMut(Compared) -> Compared,
) -> Compared {
    let mut links: BTreeMap<Id, BTreeSet<(Id, &[u8])>> = BTreeMap::new();
    let wanted = || model.nodes().filter(|(id, _)| is_wanted(id.root));
    for (dir, node) in wanted() {
        for (name, target) in node.entries().into_iter().flatten() {
            if let Target::Inode(inode) = target {
                let id = Id { root: dir.root, inode: *inode };
                links.entry(id).or_default().insert((dir, name));
            }
        }
    }
    for (id, node) in wanted() {
        judge(inode_of(fs, model, id, node))?;
        judge(names(fs, id, &links.remove(&id).unwrap_or_default()))?;
    }
    Ok(())
}

fn names(fs: &Filesystem, id: Id, wanted: &BTreeSet<(Id, &[u8])>) -> Compared {
    let have = fs.links(to_engine(id)).map_err(|error| failed(id, &error))?;
    let have: BTreeSet<(Id, &[u8])> =
        have.iter().map(|link| (to_model(link.parent), &link.name[..])).collect();
    same(id, "names", &have, wanted)
}

/// One inode, which may be in neither.
pub(crate) fn inode(fs: &Filesystem, model: &Model, id: Id) -> Compared {
    match (model.node(id), fs.inode(to_engine(id))) {
        (Some(node), Ok(_)) => inode_of(fs, model, id, node),
        (None, Err(Error::NotFound { .. })) => Ok(()),
        (Some(_), Err(error)) => Err(failed(id, &error)),
        // Its last name is gone, and what it holds goes bit by bit.
        (None, Ok(inode)) if inode.nlink == 0 => Ok(()),
        (None, Ok(_)) => Err(Wrong::Other(format!("{id:?} is in the engine alone"))),
        (None, Err(error)) => Err(failed(id, &error)),
    }
}

fn failed(id: Id, error: &Error) -> Wrong {
    let what = format!("{id:?}: {error}");
    match error {
        Error::Volume(_) | Error::Corrupt(_) => Wrong::Unreadable(what),
        _ => Wrong::Other(what),
    }
}

fn same<T: PartialEq + std::fmt::Debug>(id: Id, what: &str, engine: &T, model: &T) -> Compared {
    if engine == model {
        return Ok(());
    }
    let what = format!("{what} of {id:?}: {engine:?} in the engine, {model:?} in the model");
    Err(Wrong::Other(what))
}

fn inode_of(fs: &Filesystem, model: &Model, id: Id, node: &Node) -> Compared {
    let fail = |error: Error| failed(id, &error);
    let at = to_engine(id);
    let inode = fs.inode(at).map_err(fail)?;
    let is_device = matches!(inode.file_type(), FileType::CharDevice | FileType::BlockDevice);
    let numbers = [
        ("mode", u64::from(inode.mode), u64::from(node.mode)),
        ("owner", u64::from(inode.uid), u64::from(node.uid)),
        ("group", u64::from(inode.gid), u64::from(node.gid)),
        ("number of links", u64::from(inode.nlink), u64::from(node.nlink)),
        ("flags", inode.flags, node.flags),
        ("size", inode.size_bytes, node.size_bytes()),
        ("device", if is_device { inode.rdev } else { 0 }, node.rdev),
    ];
    for (what, engine, model) in numbers {
        same(id, what, &engine, &model)?;
    }
    let times = [
        ("access time", inode.atime, node.atime),
        ("modification time", inode.mtime, node.mtime),
        ("change time", inode.ctime, node.ctime),
        ("birth", inode.otime, node.otime),
    ];
    for (what, engine, model) in times {
        same(id, what, &timestamp(engine), &model)?;
    }
    let xattrs: BTreeMap<_, _> = fs.xattrs(at).map_err(fail)?.into_iter().collect();
    same(id, "attributes", &xattrs, &node.xattrs)?;
    match &node.content {
        Content::File(bytes) => contents(fs, id, node, bytes),
        Content::Symlink(target) => same(id, "target", &fs.read_link(at).map_err(fail)?, target),
        Content::Directory(entries) => directory(fs, model, id, entries),
        Content::Special => Ok(()),
    }
}

fn contents(fs: &Filesystem, id: Id, node: &Node, bytes: &SparseBytes) -> Compared {
    let len = usize::try_from(bytes.len_bytes()).expect("a file in memory");
    let (mut engine, mut model) = (vec![0; len + 1], vec![0; len + 1]);
    let read = fs.read(to_engine(id), FileOffset(0), &mut engine);
    let read = read.map_err(|error| failed(id, &error))?;
    same(id, "bytes read", &read, &len)?;
    bytes.read(0, &mut model);
    if engine[..len] == model[..len] {
        return Ok(());
    }
    let at = engine.iter().zip(&model).position(|(one, two)| one != two);
    let what = format!("contents of {id:?} differ at {at:?} of {len}");
    Err(match node.flags & flags::NODATASUM {
        0 => Wrong::Other(what),
        _ => Wrong::UnprotectedBytes(what),
    })
}

fn timestamp(time: Time) -> Timestamp {
    Timestamp { sec: time.sec, nsec: time.nsec }
}

fn directory(
    fs: &Filesystem,
    model: &Model,
    id: Id,
    entries: &BTreeMap<Vec<u8>, Target>,
) -> Compared {
    let fail = |error: Error| failed(id, &error);
    let mut have = BTreeMap::new();
    let mut last_index = 0;
    for entry in fs.read_dir(to_engine(id), 0).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if entry.index <= last_index {
            let what = format!("index {} after {last_index} in {id:?}", entry.index);
            return Err(Wrong::Other(what));
        }
        last_index = entry.index;
        let found = fs.lookup(to_engine(id), &entry.name).map_err(fail)?;
        same(id, "a name looked up", &found, &entry.target)?;
        if have.insert(entry.name, (entry.target, entry.file_type)).is_some() {
            return Err(Wrong::Other(format!("a name of {id:?} comes twice")));
        }
    }
    let mut want = BTreeMap::new();
    for (name, target) in entries {
        let (target, file_type) = match target {
            Target::Inode(inode) => {
                let child = Id { root: id.root, inode: *inode };
                let node = model.node(child).expect("the model has no name of no inode");
                (to_engine(child), FileType::from_mode(node.mode))
            }
            Target::Subvolume(root) => {
                let child = match model.subvolume_at(id, name, *root) {
                    Some(root) => to_engine(Id::root_of(root)),
                    None => InodeId::stand_in(to_engine(id).root),
                };
                (child, FileType::Directory)
            }
        };
        want.insert(name.clone(), (target, file_type));
    }
    same(id, "entries", &have, &want)
}

/// The list of subvolumes.
pub(crate) fn subvolumes(fs: &Filesystem, model: &Model) -> Compared {
    let top = Id::root_of(TOP_LEVEL);
    let fail = |error: Error| failed(top, &error);
    let default = to_model(fs.default_subvolume().map_err(fail)?);
    same(top, "the default subvolume", &default, &Id::root_of(model.default_subvolume()))?;
    let infos = fs.subvolumes().map_err(fail)?;
    let uuids: BTreeMap<u64, _> = infos.iter().map(|info| (info.id.0, info.uuid)).collect();
    let mut have = BTreeMap::new();
    for info in infos.iter().filter(|info| !info.deleted) {
        let parent = info.parent.map(to_model);
        have.insert(info.id.0, (parent, info.read_only, info.parent_uuid));
    }
    let mut want = BTreeMap::new();
    for (root, subvolume) in model.subvolumes() {
        let parent = subvolume.parent.as_ref().map(|(dir, _)| *dir);
        let source = match subvolume.snapshot_of {
            None => Uuid::NIL,
            // Of what is gone, nobody knows the uuid.
            Some(source) => match (uuids.get(&source), have.get(root)) {
                (Some(uuid), _) | (None, Some((_, _, uuid))) => *uuid,
                (None, None) => Uuid::NIL,
            },
        };
        want.insert(*root, (parent, subvolume.read_only, source));
        assert!(subvolume.nodes.contains_key(&ROOT_DIRECTORY), "the model's {root} has no root");
    }
    same(top, "subvolumes", &have, &want)
}
