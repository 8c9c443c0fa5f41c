//! Random operations, most of which succeed.

mod clear;
mod contents;
mod xattrs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use ubtrfs_ondisk::inode::flags;
use ubtrfs_testkit::model::{Change, Copied, Id, Model, New, Node, RenameMode, TOP_LEVEL, Target};
use ubtrfs_testkit::snapshot::Timestamp;
use ubtrfs_testkit::{Prng, odd};

use crate::config::Shape;
use crate::op::{Last, Op};

/// Inodes beyond which more is removed than made.
const NODES_MAX: usize = 200;
/// Directories and subvolumes at most: a tree that is walked after each power cut must be small.
const DIRECTORIES_MAX: usize = 30;
const SUBVOLUMES_MAX: usize = 8;

const SECTOR: u64 = 4096;
/// By how much a device grows, in MiB, at most; and to what length all do.
const GROWTH_MIB_MAX: u64 = 30;
const DEVICE_BYTES_MAX: u64 = 300 << 20;

/// Makes operations.
#[derive(Debug)]
pub(crate) struct Generator {
    prng: Prng,
    /// One operation in so many is a commit.
    commit_one_in: u64,
    /// Inodes that were there once.
    gone: Vec<Id>,
    /// Numbers of files that were changed otherwise than at their ends; in snapshots, too.
    written: BTreeSet<u64>,
    /// What was copied lately.
    copied: Vec<Copied>,
    /// Lengths of the devices.
    lens_bytes: Vec<u64>,
    /// Whether the filesystem is small, and to be filled.
    is_tight: bool,
    /// Names of which two have one hash.
    colliding: &'static [Vec<u8>],
}

impl Generator {
    pub(crate) fn new(prng: Prng, commit_one_in: u64, shape: &Shape) -> Self {
        Self {
            prng,
            commit_one_in,
            gone: Vec::new(),
            written: BTreeSet::new(),
            copied: Vec::new(),
            lens_bytes: shape.lens_bytes.clone(),
            is_tight: shape.is_tight,
            colliding: colliding_names(),
        }
    }

    /// The next operation on what the model shows. `is_full` after there was no space.
    pub(crate) fn next(&mut self, model: &Model, is_full: bool) -> Op {
        if self.prng.chance(1, self.commit_one_in) {
            return if self.prng.chance(1, 8) { Op::Reopen } else { Op::Commit };
        }
        if model.node_count() > NODES_MAX && self.prng.chance(3, 4) {
            return self.removal(model);
        }
        if is_full && let Some(op) = self.clearing_somewhere(model) {
            return op;
        }
        match self.prng.below(150) {
            0..=16 => self.create(model),
            17..=19 => self.symlink(model),
            20..=26 => self.link(model),
            27..=28 => self.create_unlinked(model),
            29..=45 => self.removal(model),
            46..=57 => self.rename(model),
            58..=65 => self.attributes(model),
            66..=75 => self.xattr(model),
            76..=87 => self.append(model),
            88..=109 => self.write(model),
            110..=118 => self.truncate(model),
            119..=128 => self.clone_range(model),
            129..=132 => self.dedupe_range(model),
            133..=139 => self.copy_range(model),
            140 => self.subvolume(model),
            141..=143 => self.snapshot(model),
            144 => self.read_only(model),
            145..=146 => self.clean_deleted(),
            147 => self.default_subvolume(model),
            148 => self.grow(model),
            _ => self.delete_subvolume(model),
        }
    }

    fn grow(&mut self, model: &Model) -> Op {
        let device = self.prng.index(self.lens_bytes.len());
        let by_bytes = match self.prng.below(4) {
            0 => 4096 * self.prng.below(256),
            _ => (1 + self.prng.below(GROWTH_MIB_MAX)) << 20,
        };
        let len_bytes = &mut self.lens_bytes[device];
        // Seldom, or no filesystem stays full.
        let is_seldom = !self.prng.chance(1, if self.is_tight { 12 } else { 3 });
        if *len_bytes + by_bytes > DEVICE_BYTES_MAX || is_seldom {
            return self.write(model);
        }
        *len_bytes += by_bytes;
        Op::GrowDevice { device, by_bytes }
    }

    fn create(&mut self, model: &Model) -> Op {
        let directories = model.nodes().filter(|(_, node)| node.entries().is_some()).count();
        let ty = match self.prng.below(40) {
            0..=24 => 0o100_000,
            25..=33 if directories < DIRECTORIES_MAX => 0o040_000,
            25..=33 => 0o100_000,
            34 => 0o020_000,
            35 => 0o060_000,
            36..=37 => 0o010_000,
            38 => 0o140_000,
            // No type, or one that has a call of its own.
            _ => [0, 0o120_000][self.prng.index(2)],
        };
        Op::Create { dir: self.directory(model), name: self.new_name(), new: self.new_inode(ty) }
    }

    fn symlink(&mut self, model: &Model) -> Op {
        let len = match self.prng.below(20) {
            0 => 0,
            1 => 4000 + self.prng.index(200),
            2..=5 => self.prng.index(4000),
            _ => 1 + self.prng.index(60),
        };
        let mut target = vec![b'a' + self.letter(); len];
        if self.prng.chance(1, 60) {
            target.push(0);
        }
        let new = self.new_inode(0o120_000);
        Op::Symlink { dir: self.directory(model), name: self.new_name(), target, new }
    }

    fn link(&mut self, model: &Model) -> Op {
        let id = self.any(model, |node| node.entries().is_none());
        let mut dir = self.directory(model);
        if dir.root != id.root && self.prng.chance(7, 8) {
            dir = self.pick(model, |of, node| of.root == id.root && node.entries().is_some());
        }
        Op::Link { dir, name: self.new_name(), id }
    }

    fn create_unlinked(&mut self, model: &Model) -> Op {
        let ty = [0o100_000, 0o100_000, 0o100_000, 0o010_000, 0o040_000][self.prng.index(5)];
        Op::CreateUnlinked { dir: self.changeable_directory(model), new: self.new_inode(ty) }
    }

    fn removal(&mut self, model: &Model) -> Op {
        match self.prng.below(20) {
            0..=2 => {
                let dir = self.directory(model);
                let empty = self.name_in(model, dir, |node| {
                    node.is_none_or(|node| node.entries().is_some_and(BTreeMap::is_empty))
                });
                let name = empty.unwrap_or_else(|| self.name_of_any(model, dir));
                Op::Rmdir { dir, name, last: self.last() }
            }
            3 => match self.find(model, |_, node| node.nlink == 0) {
                Some(id) => Op::Evict { id },
                None => self.clean_deleted(),
            },
            4..=5 if model.subvolumes().len() > 3 => self.delete_subvolume(model),
            _ => self.unlink(model),
        }
    }

    fn unlink(&mut self, model: &Model) -> Op {
        let dir = self.directory(model);
        let is_file = |node: Option<&Node>| node.is_some_and(|node| node.entries().is_none());
        let name = match self.name_in(model, dir, is_file) {
            Some(name) if !self.prng.chance(1, 12) => name,
            _ => self.name_of_any(model, dir),
        };
        let last = self.last();
        let target = model.node(dir).and_then(Node::entries).and_then(|names| names.get(&name));
        if let (Some(Target::Inode(inode)), Last::Goes) = (target, last) {
            self.gone.push(Id { root: dir.root, inode: *inode });
            if self.gone.len() > 20 {
                self.gone.remove(0);
            }
        }
        Op::Unlink { dir, name, last }
    }

    fn delete_subvolume(&mut self, model: &Model) -> Op {
        let places: Vec<_> =
            model.subvolumes().values().filter_map(|subvolume| subvolume.parent.clone()).collect();
        if places.is_empty() || self.prng.chance(1, 12) {
            let dir = self.directory(model);
            return Op::DeleteSubvolume { dir, name: self.name_of_any(model, dir) };
        }
        let (dir, name) = places[self.prng.index(places.len())].clone();
        Op::DeleteSubvolume { dir, name }
    }

    fn rename(&mut self, model: &Model) -> Op {
        let from = self.directory(model);
        let from_name = self.name_in(model, from, |_| true).unwrap_or_else(|| self.new_name());
        let to = match self.prng.below(8) {
            0..=2 => from,
            3 => self.directory(model),
            _ => self.pick(model, |id, node| id.root == from.root && node.entries().is_some()),
        };
        let to_name = match self.prng.below(3) {
            0 => self.name_of_any(model, to),
            _ => self.new_name(),
        };
        let modes = [
            RenameMode::Replace,
            RenameMode::Replace,
            RenameMode::NoReplace,
            RenameMode::Exchange,
            RenameMode::Whiteout,
        ];
        let mode = modes[self.prng.index(modes.len())];
        Op::Rename { from, from_name, to, to_name, mode, last: self.last() }
    }

    /// A name of a directory, of what is wanted; `None` stands for a subvolume or its stand-in.
    fn name_in(
        &mut self,
        model: &Model,
        dir: Id,
        wanted: impl Fn(Option<&Node>) -> bool,
    ) -> Option<Vec<u8>> {
        let node = |target: &Target| match target {
            Target::Inode(inode) => model.node(Id { root: dir.root, inode: *inode }),
            Target::Subvolume(_) => None,
        };
        let entries = model.node(dir).and_then(Node::entries)?;
        let names: Vec<&Vec<u8>> = entries
            .iter()
            .filter(|(_, target)| wanted(node(target)))
            .map(|(name, _)| name)
            .collect();
        (!names.is_empty()).then(|| names[self.prng.index(names.len())].clone())
    }

    fn last(&mut self) -> Last {
        if self.prng.chance(1, 6) { Last::Stays } else { Last::Goes }
    }

    fn attributes(&mut self, model: &Model) -> Op {
        let id = self.any(model, |_| true);
        let mut change = Change::default();
        // That a list follows the permissions is not modelled.
        let has_list =
            model.node(id).is_some_and(|node| node.xattrs.contains_key(xattrs::ACL_ACCESS));
        if self.prng.chance(1, 3) && !has_list {
            change.mode = Some(self.bits32());
        }
        if self.prng.chance(1, 3) {
            change.uid = Some(self.bits32());
        }
        if self.prng.chance(1, 3) {
            change.gid = Some(self.bits32());
        }
        for time in [&mut change.atime, &mut change.mtime, &mut change.ctime, &mut change.otime] {
            if self.prng.chance(1, 4) {
                *time = Some(Self::time(&mut self.prng));
            }
        }
        if let Some(node) = model.node(id) {
            change.flags = self.flags(node);
        }
        Op::SetAttributes { id, change }
    }

    fn flags(&mut self, node: &Node) -> Option<u64> {
        let forbidding = flags::IMMUTABLE | flags::APPEND;
        let (is_file, is_directory) = (node.bytes().is_some(), node.entries().is_some());
        let wanted = if node.flags & forbidding != 0 && self.prng.chance(2, 3) {
            0
        } else if (is_file || is_directory) && self.prng.chance(1, 25) {
            [flags::IMMUTABLE, flags::APPEND][self.prng.index(2)]
        } else if is_directory && self.prng.chance(1, 4) {
            let all = [0, flags::COMPRESS, flags::NOCOMPRESS, flags::NODATACOW, flags::NOATIME];
            return Some(all[self.prng.index(all.len())]);
        } else {
            return None;
        };
        // Whether its data has checksums cannot change any more.
        Some(node.flags & !forbidding | wanted)
    }

    fn subvolume(&mut self, model: &Model) -> Op {
        if model.subvolumes().len() >= SUBVOLUMES_MAX {
            return self.create(model);
        }
        let new = self.new_inode(0o040_000);
        Op::CreateSubvolume { dir: self.changeable_directory(model), name: self.new_name(), new }
    }

    fn snapshot(&mut self, model: &Model) -> Op {
        if model.subvolumes().len() >= SUBVOLUMES_MAX {
            return self.delete_subvolume(model);
        }
        let roots: Vec<u64> = model.subvolumes().keys().copied().collect();
        let source = match self.prng.below(20) {
            0 => 9999,
            _ => roots[self.prng.index(roots.len())],
        };
        let read_only = self.prng.chance(1, 3);
        let dir = self.changeable_directory(model);
        Op::Snapshot { source, dir, name: self.new_name(), read_only }
    }

    fn read_only(&mut self, model: &Model) -> Op {
        // The top level stays writable, or little could be done.
        let roots: Vec<u64> =
            model.subvolumes().keys().copied().filter(|root| *root != TOP_LEVEL).collect();
        let root = match roots.len() {
            0 => 9999,
            len => roots[self.prng.index(len)],
        };
        Op::SetReadOnly { root, read_only: self.prng.chance(1, 3) }
    }

    fn clean_deleted(&mut self) -> Op {
        let part = self.prng.chance(1, 2).then(|| 1 + self.prng.index(6));
        Op::CleanDeleted { part }
    }

    fn default_subvolume(&mut self, model: &Model) -> Op {
        let roots: Vec<u64> = model.subvolumes().keys().copied().collect();
        let root = if self.prng.chance(1, 8) { 9999 } else { roots[self.prng.index(roots.len())] };
        Op::SetDefaultSubvolume { root }
    }

    /// A directory; at times something else, or what is no more.
    fn directory(&mut self, model: &Model) -> Id {
        if self.prng.chance(1, 40) {
            return self.any(model, |_| true);
        }
        self.pick(model, |_, node| node.entries().is_some())
    }

    /// A directory that is not immutable.
    fn changeable_directory(&mut self, model: &Model) -> Id {
        let is_free = |node: &Node| node.flags & flags::IMMUTABLE == 0;
        self.pick(model, |_, node| node.entries().is_some() && is_free(node))
    }

    /// An inode; at times what the condition excludes, or what is no more.
    fn any(&mut self, model: &Model, wanted: impl Fn(&Node) -> bool) -> Id {
        match self.prng.below(40) {
            0 if !self.gone.is_empty() => self.gone[self.prng.index(self.gone.len())],
            1 => self.pick(model, |_, _| true),
            _ => self.pick(model, |_, node| wanted(node)),
        }
    }

    fn pick(&mut self, model: &Model, wanted: impl Fn(Id, &Node) -> bool) -> Id {
        self.find(model, wanted).unwrap_or(Id::root_of(TOP_LEVEL))
    }

    fn find(&mut self, model: &Model, wanted: impl Fn(Id, &Node) -> bool) -> Option<Id> {
        let all: Vec<Id> =
            model.nodes().filter(|(id, node)| wanted(*id, node)).map(|(id, _)| id).collect();
        (!all.is_empty()).then(|| all[self.prng.index(all.len())])
    }

    fn name_of_any(&mut self, model: &Model, dir: Id) -> Vec<u8> {
        let entries = model.node(dir).and_then(Node::entries);
        let names: Vec<&Vec<u8>> = entries.into_iter().flatten().map(|(name, _)| name).collect();
        if names.is_empty() || self.prng.chance(1, 2) {
            return self.new_name();
        }
        names[self.prng.index(names.len())].clone()
    }

    /// Few short names, so that some are taken; some long ones; some that none can be.
    fn new_name(&mut self) -> Vec<u8> {
        match self.prng.below(60) {
            0 => Vec::new(),
            1 => b"..".to_vec(),
            2 => b"a/b".to_vec(),
            3 => vec![b'x'; 256],
            4 => b"nul\0".to_vec(),
            5..=9 => vec![b'a' + self.letter(); 200 + self.prng.index(56)],
            10..=12 => vec![0xff, 0xc3, self.letter()],
            13..=17 => self.colliding[self.prng.index(self.colliding.len())].clone(),
            _ => format!("{}", self.prng.below(40)).into_bytes(),
        }
    }

    fn new_inode(&mut self, ty: u32) -> New {
        let prng = &mut self.prng;
        let times = [(); 4].map(|()| Self::time(prng));
        New {
            mode: ty | self.bits32() & 0o7777,
            uid: self.bits32(),
            gid: self.bits32(),
            rdev: self.prng.below(1 << 32),
            atime: times[0],
            mtime: times[1],
            ctime: times[2],
            otime: times[3],
        }
    }

    /// What a file begins with.
    pub(crate) fn new_file(&mut self) -> New {
        self.new_inode(0o100_000)
    }

    /// Times as far as the kernel shows them.
    fn time(prng: &mut Prng) -> Timestamp {
        let sec = i64::try_from(prng.below(1 << 33)).expect("few bits fit") - (1 << 31);
        Timestamp { sec, nsec: u32::try_from(prng.below(1_000_000_000)).expect("few bits fit") }
    }

    fn letter(&mut self) -> u8 {
        u8::try_from(self.prng.below(26)).expect("below 26")
    }

    fn bits32(&mut self) -> u32 {
        u32::try_from(self.prng.below(1 << 32)).expect("32 bits fit")
    }
}

/// Names of which two each have one hash. To find them takes a moment.
fn colliding_names() -> &'static [Vec<u8>] {
    static NAMES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let pairs = odd::colliding_names(4).into_iter();
        pairs.flat_map(|(first, second)| [first.into_bytes(), second.into_bytes()]).collect()
    })
}
