//! `ubtrfs inspect tree`: tree blocks and their items, as they lie there.
//!
//! Walks by itself, block by block, so that what lies beside a damaged block is still shown.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use ubtrfs_ondisk::block::{Block, Leaf};
use ubtrfs_ondisk::print;
use ubtrfs_ondisk::root::RootItem;
use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Generation, KeyType, LogicalAddr, RootId};
use ubtrfs_volume::Volume;

use crate::failure::{Exit, Failure, Result};
use crate::image::{DeviceArgs, Image};
use crate::output::Output;
use crate::output::json::Array;

/// Print the blocks of the trees and every item in them
///
/// Without --root and --block: the root tree, the chunk tree, and then every tree that the root tree
/// names. A damaged block is named where it would stand, and the rest is printed; the exit code is
/// then 3.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs inspect tree --list disk.img           the trees there are
  ubtrfs inspect tree --root fs disk.img        the top-level subvolume
  ubtrfs inspect tree --root 257 disk.img       another subvolume
  ubtrfs inspect tree --block 30408704 disk.img
  ubtrfs inspect tree --json --root extent disk.img | jq -c '.[] | {slot, key}'"
)]
pub struct Args {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print this tree only: a number, or root, chunk, extent, dev, fs, csum, quota, uuid,
    /// free-space, block-group, data-reloc, log
    #[arg(short, long, value_name = "TREE", value_parser = parse_tree)]
    root: Option<RootId>,
    /// Print the one block at this logical address
    #[arg(short, long, value_name = "ADDRESS", conflicts_with_all = ["root", "list"])]
    block: Option<u64>,
    /// List the trees and their root blocks only
    #[arg(short, long)]
    list: bool,
    /// Print JSON: an array with one object an item or child pointer
    #[arg(long)]
    json: bool,
}

const TREE_NAMES: [(&str, RootId); 13] = [
    ("root", RootId::ROOT_TREE),
    ("extent", RootId::EXTENT_TREE),
    ("chunk", RootId::CHUNK_TREE),
    ("dev", RootId::DEV_TREE),
    ("device", RootId::DEV_TREE),
    ("fs", RootId::FS_TREE),
    ("csum", RootId::CSUM_TREE),
    ("quota", RootId::QUOTA_TREE),
    ("uuid", RootId::UUID_TREE),
    ("free-space", RootId::FREE_SPACE_TREE),
    ("block-group", RootId::BLOCK_GROUP_TREE),
    ("data-reloc", RootId::DATA_RELOC_TREE),
    ("log", RootId::TREE_LOG),
];

fn parse_tree(text: &str) -> Result<RootId, String> {
    if let Some((_, root)) = TREE_NAMES.iter().find(|(name, _)| *name == text) {
        return Ok(*root);
    }
    let number = text.parse::<u64>().or_else(|_| text.parse::<i64>().map(i64::cast_unsigned));
    number.map(RootId).map_err(|_| "neither a number nor the name of a tree".to_owned())
}

/// Prints.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let json = args.json.then(|| Array::begin(out)).transpose()?;
    let mut dump = Dump { volume: image.filesystem().volume(), image: &image, json };
    let result = match args.block {
        Some(at) => {
            let at = Pointer { at: LogicalAddr(at), generation: None, level: None };
            dump.block(&at, None, out).map(drop)
        }
        None => dump.trees(args, out),
    };
    // What was printed before a failure is JSON, too.
    if let Some(array) = dump.json {
        array.end(out)?;
    }
    result?;
    Ok(Exit::Done)
}

/// What leads to a block.
#[derive(Clone, Copy)]
struct Pointer {
    at: LogicalAddr,
    generation: Option<Generation>,
    level: Option<u8>,
}

/// Calls `each` for every item of a tree, keys ascending. A damaged block is reported, and the rest is
/// gone through. Returns whether there is such a tree.
///
/// # Errors
/// What `each` returns.
pub fn for_each_item(
    image: &Image,
    root: RootId,
    out: &mut Output,
    mut each: impl FnMut(&ubtrfs_ondisk::Key, &[u8]) -> Result<()>,
) -> Result<bool> {
    let mut dump = Dump { volume: image.filesystem().volume(), image, json: None };
    let mut roots = dump.superblock_roots();
    dump.roots_of_root_tree(&mut roots, out)?;
    let Some(pointer) = roots.get(&root).copied() else { return Ok(false) };
    dump.walk(root, pointer, out, &mut |_, block, _| {
        let Block::Leaf(leaf) = block else { return Ok(()) };
        (0..leaf.len()).try_for_each(|slot| each(&leaf.key(slot), leaf.data(slot)))
    })?;
    Ok(true)
}

struct Dump<'a> {
    volume: &'a Volume,
    image: &'a Image,
    json: Option<Array>,
}

impl Dump<'_> {
    fn trees(&mut self, args: &Args, out: &mut Output) -> Result<()> {
        let mut roots = self.superblock_roots();
        let is_settled = args.root.is_some_and(|root| roots.contains_key(&root));
        if !is_settled {
            self.roots_of_root_tree(&mut roots, out)?;
        }
        if let Some(root) = args.root {
            roots.retain(|id, _| *id == root);
            if roots.is_empty() {
                return Err(Failure::new(
                    Exit::Io,
                    "finding the tree",
                    format!("there is no tree {root}"),
                )
                .at_path(self.image.path())
                .advice("`ubtrfs inspect tree --list` lists those there are."));
            }
        }
        for (root, pointer) in roots {
            if args.list {
                self.list(root, &pointer, out)?;
            } else {
                self.tree(root, pointer, out)?;
            }
        }
        Ok(())
    }

    /// The trees that the superblock itself points to.
    fn superblock_roots(&self) -> BTreeMap<RootId, Pointer> {
        let superblock = self.volume.superblock();
        let pointer = |at: u64, generation: u64, level| Pointer {
            at: LogicalAddr(at),
            generation: Some(Generation(generation)),
            level: Some(level),
        };
        let generation = superblock.generation.get();
        let mut roots = BTreeMap::new();
        roots.insert(
            RootId::ROOT_TREE,
            pointer(superblock.root.get(), generation, superblock.root_level),
        );
        roots.insert(
            RootId::CHUNK_TREE,
            pointer(
                superblock.chunk_root.get(),
                superblock.chunk_root_generation.get(),
                superblock.chunk_root_level,
            ),
        );
        let log = superblock.log_root.get();
        if log != 0 {
            let level = superblock.log_root_level;
            roots.insert(RootId::TREE_LOG, pointer(log, generation.saturating_add(1), level));
        }
        roots
    }

    /// Adds the trees that have a root item; of several, as old images have, the last counts.
    fn roots_of_root_tree(
        &mut self,
        roots: &mut BTreeMap<RootId, Pointer>,
        out: &mut Output,
    ) -> Result<()> {
        let Some(root_tree) = roots.get(&RootId::ROOT_TREE).copied() else { return Ok(()) };
        self.walk(RootId::ROOT_TREE, root_tree, out, &mut |_, block, _| {
            let Block::Leaf(leaf) = block else { return Ok(()) };
            for slot in 0..leaf.len() {
                let key = leaf.key(slot);
                if key.ty == KeyType::ROOT_ITEM
                    && let Ok(item) = RootItem::parse(leaf.data(slot))
                {
                    roots.insert(
                        RootId(key.objectid.0),
                        Pointer {
                            at: LogicalAddr(item.bytenr.get()),
                            generation: Some(Generation(item.generation.get())),
                            level: Some(item.level),
                        },
                    );
                }
            }
            Ok(())
        })
    }

    fn list(&mut self, root: RootId, pointer: &Pointer, out: &mut Output) -> Result<()> {
        let generation = pointer.generation.map_or(0, |generation| generation.0);
        let level = pointer.level.unwrap_or(0);
        let name = print::tree(root);
        if let Some(array) = &mut self.json {
            let value = json!({
                "root": root.0,
                "name": name,
                "block": pointer.at.0,
                "generation": generation,
                "level": level,
            });
            return array.element(out, &value);
        }
        let at = pointer.at;
        out.line(&format!("tree {name} ({root}) block {at} generation {generation} level {level}"))
    }

    fn tree(&mut self, root: RootId, pointer: Pointer, out: &mut Output) -> Result<()> {
        if self.json.is_none() {
            out.line(&format!("tree {} ({root})", print::tree(root)))?;
        }
        self.walk(root, pointer, out, &mut |dump, block, out| dump.print(Some(root), block, out))
    }

    fn block(&mut self, at: &Pointer, root: Option<RootId>, out: &mut Output) -> Result<()> {
        let block = self.read(at, root, None)?;
        self.print(root, &block, out)
    }

    /// Hands each block to `each`, parents first, keys ascending. Levels fall from parent to child
    /// and first keys must be as the parent says, so that no image can make this endless.
    fn walk(
        &mut self,
        root: RootId,
        top: Pointer,
        out: &mut Output,
        each: &mut dyn FnMut(&mut Self, &Block, &mut Output) -> Result<()>,
    ) -> Result<()> {
        let mut waiting = vec![(top, None)];
        while let Some((pointer, first_key)) = waiting.pop() {
            let block = match self.read(&pointer, Some(root), first_key) {
                Ok(block) => block,
                Err(failure) => {
                    out.tolerate(Err(failure))?;
                    continue;
                }
            };
            each(self, &block, out)?;
            if let Block::Node(node) = &block {
                for slot in (0..node.len()).rev() {
                    let child = Pointer {
                        at: node.child(slot),
                        generation: Some(node.child_generation(slot)),
                        level: block.level().checked_sub(1),
                    };
                    waiting.push((child, Some(node.key(slot))));
                }
            }
        }
        Ok(())
    }

    fn read(
        &self,
        pointer: &Pointer,
        root: Option<RootId>,
        first_key: Option<ubtrfs_ondisk::Key>,
    ) -> Result<Block> {
        let geometry = self.volume.geometry();
        let expect = Expect {
            bytenr: pointer.at,
            generation: pointer.generation,
            level: pointer.level,
            first_key,
            owner: root,
        };
        let accepted = RefCell::new(None);
        let accept = |copy: &[u8]| {
            *accepted.borrow_mut() = Some(verify::block(copy.into(), &geometry, &expect)?);
            Ok(())
        };
        let mut bytes = vec![0; geometry.nodesize_bytes];
        let read = self.volume.read(pointer.at, &mut bytes, &accept);
        read.map_err(|error| {
            let failure = Failure::volume("reading a tree block", &error);
            match root {
                Some(root) => failure.at(format!("tree {}", print::tree(root))),
                None => failure,
            }
            .at_path(self.image.path())
        })?;
        Ok(accepted.into_inner().expect("an accepted read left its block"))
    }

    fn print(&mut self, root: Option<RootId>, block: &Block, out: &mut Output) -> Result<()> {
        let Some(array) = &mut self.json else { return out.text(&print::block(block)) };
        let slots = match block {
            Block::Leaf(leaf) => leaf.len(),
            Block::Node(node) => node.len(),
        };
        for slot in 0..slots {
            let mut object = Map::new();
            object.insert("root".into(), json!(root.map(|root| root.0)));
            object.insert("block".into(), json!(block.bytenr().0));
            object.insert("level".into(), json!(block.level()));
            object.insert("slot".into(), json!(slot));
            match block {
                Block::Leaf(leaf) => add_item(&mut object, leaf, slot),
                Block::Node(node) => {
                    object.insert("key".into(), json_key(node.key(slot)));
                    object.insert("child".into(), json!(node.child(slot).0));
                    object.insert("generation".into(), json!(node.child_generation(slot).0));
                }
            }
            array.element(out, &object)?;
        }
        Ok(())
    }
}

fn add_item(object: &mut Map<String, Value>, leaf: &Leaf, slot: usize) {
    let key = leaf.key(slot);
    let records = print::records(key, leaf.data(slot));
    let records: Vec<Value> = records
        .into_iter()
        .map(|record| record.into_iter().map(|(name, value)| (name, json!(value))).collect())
        .collect();
    object.insert("key".into(), json_key(key));
    object.insert("length".into(), json!(leaf.data(slot).len()));
    object.insert("records".into(), json!(records));
}

fn json_key(key: ubtrfs_ondisk::Key) -> Value {
    let ty = key.ty.to_string();
    json!({ "objectid": key.objectid.0, "type": ty, "type_number": key.ty.0, "offset": key.offset })
}
