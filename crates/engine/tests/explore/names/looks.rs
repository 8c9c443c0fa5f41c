//! What is asked of names while something changes.

use ubtrfs_engine::{Error, InodeId, Link};
use ubtrfs_ondisk::dir::FileType;

use super::world::{Names, answer};

pub type Look = fn(&Names) -> String;

fn lookup(names: &Names, dir: InodeId, name: &[u8]) -> String {
    answer(names.fs.lookup(dir, name), |id| names.shown(id))
}

fn resolve(names: &Names, path: &[u8]) -> String {
    answer(names.fs.resolve(names.top, path), |id| names.shown(id))
}

fn parent(names: &Names, dir: InodeId) -> String {
    answer(names.fs.parent(dir), |id| names.shown(id))
}

fn path_of(names: &Names, id: InodeId) -> String {
    answer(names.fs.path_of(id), |path| String::from_utf8(path).unwrap())
}

fn links(names: &Names, id: InodeId) -> String {
    let shown = |link: Link| {
        format!("{} {}", names.shown(link.parent), String::from_utf8_lossy(&link.name))
    };
    answer(names.fs.links(id), |links| {
        let mut all: Vec<String> = links.into_iter().map(shown).collect();
        all.sort();
        all.join(", ")
    })
}

fn subvolume(names: &Names, root: InodeId) -> String {
    answer(names.fs.subvolume(root.root), |found| {
        let path = found.path.map(|path| String::from_utf8(path).unwrap());
        let parent = found.parent.map(|parent| names.shown(parent));
        format!("{path:?} in {parent:?}, read-only {}, deleted {}", found.read_only, found.deleted)
    })
}

/// What lost its last name may still be there.
fn inode(names: &Names, id: InodeId) -> String {
    answer(names.fs.inode(id), |inode| match inode.nlink {
        0 => "NotFound".to_owned(),
        nlink => format!("{:o} {nlink} {}", inode.mode, inode.size_bytes),
    })
}

fn contents(names: &Names, id: InodeId) -> String {
    let mut bytes = vec![0; 100];
    let read = names.fs.read(id, ubtrfs_ondisk::FileOffset(0), &mut bytes);
    answer(read, |len| String::from_utf8_lossy(&bytes[..len]).into_owned())
}

fn xattrs(names: &Names, id: InodeId) -> String {
    answer(names.fs.xattrs(id), |all| format!("{all:?}"))
}

/// Whether all is there of what a new name leads to. Of one that is taken away from several the reference goes first.
fn is_whole(names: &Names, dir: InodeId, name: &[u8]) -> String {
    let Ok(id) = names.fs.lookup(dir, name) else { return "whole".to_owned() };
    let found = what_is_there(names, dir, name, id);
    match found {
        Ok(()) => "whole".to_owned(),
        Err(what) => match names.fs.lookup(dir, name) {
            Ok(still) if still == id => what,
            // It left meanwhile.
            _ => "whole".to_owned(),
        },
    }
}

fn what_is_there(names: &Names, dir: InodeId, name: &[u8], id: InodeId) -> Result<(), String> {
    let inode = names.fs.inode(id).map_err(|error| format!("inode: {error}"))?;
    if inode.file_type() == FileType::Symlink {
        let target = names.fs.read_link(id).map_err(|error| format!("target: {error}"))?;
        assert!(!target.is_empty() && !target.contains(&0));
    }
    let path = names.fs.path_of(id).map_err(|error| format!("path: {error}"))?;
    if id.root != dir.root {
        return Ok(());
    }
    let links = names.fs.links(id).map_err(|error| format!("links: {error}"))?;
    match links.iter().any(|link| link.parent == dir && link.name == name) {
        true => Ok(()),
        false => Err(format!("{}, {links:?}", String::from_utf8_lossy(&path))),
    }
}

/// Each answers of one moment.
pub const LOOKS: [(&str, Look); 42] = [
    ("lookup a", |names| lookup(names, names.top, b"a")),
    ("lookup b", |names| lookup(names, names.top, b"b")),
    ("lookup s", |names| lookup(names, names.top, b"s")),
    ("lookup t", |names| lookup(names, names.top, b"t")),
    ("lookup one", |names| lookup(names, names.top, b"one")),
    ("lookup two", |names| lookup(names, names.top, b"two")),
    ("lookup x in a", |names| lookup(names, names.a, b"x")),
    ("lookup n in a", |names| lookup(names, names.a, b"n")),
    ("lookup n in b", |names| lookup(names, names.b, b"n")),
    ("lookup o in b", |names| lookup(names, names.b, b"o")),
    ("lookup y in s", |names| lookup(names, names.s, b"y")),
    ("lookup n in t", |names| lookup(names, names.t, b"n")),
    ("a/x", |names| resolve(names, b"a/x")),
    ("b/x", |names| resolve(names, b"b/x")),
    ("s/y", |names| resolve(names, b"s/y")),
    ("a/../one", |names| resolve(names, b"a/../one")),
    ("parent of a", |names| parent(names, names.a)),
    ("parent of b", |names| parent(names, names.b)),
    ("parent of s", |names| parent(names, names.s)),
    ("parent of t", |names| parent(names, names.t)),
    ("path of x", |names| path_of(names, names.x)),
    ("path of y", |names| path_of(names, names.y)),
    ("path of a", |names| path_of(names, names.a)),
    ("path of b", |names| path_of(names, names.b)),
    ("links of x", |names| links(names, names.x)),
    ("links of y", |names| links(names, names.y)),
    ("links of one", |names| links(names, names.one)),
    ("links of two", |names| links(names, names.two)),
    ("subvolume s", |names| subvolume(names, names.s)),
    ("subvolume t", |names| subvolume(names, names.t)),
    ("inode a", |names| inode(names, names.a)),
    ("inode x", |names| inode(names, names.x)),
    ("inode one", |names| inode(names, names.one)),
    ("inode two", |names| inode(names, names.two)),
    ("contents of one", |names| contents(names, names.one)),
    ("contents of x", |names| contents(names, names.x)),
    ("contents of y", |names| contents(names, names.y)),
    ("attributes of a", |names| xattrs(names, names.a)),
    ("all of b/n", |names| is_whole(names, names.b, b"n")),
    ("all of a/n", |names| is_whole(names, names.a, b"n")),
    ("all of t/n", |names| is_whole(names, names.t, b"n")),
    ("all of b/o", |names| is_whole(names, names.b, b"o")),
];

/// A directory's names, with what each leads to.
pub fn listed(names: &Names, dir: InodeId) -> Vec<(String, String)> {
    let entries = match names.fs.read_dir(dir, 0) {
        Ok(entries) => entries,
        // It went.
        Err(Error::NotFound { .. }) => return Vec::new(),
        Err(error) => panic!("{error:?}"),
    };
    let entry = |entry: ubtrfs_engine::DirEntry| {
        let target = names.shown(entry.target);
        (String::from_utf8(entry.name).unwrap(), format!("{target} {:?}", entry.file_type))
    };
    entries.map(|found| entry(found.unwrap())).collect()
}
