//! Blocks that several trees share: whose references what lies below them carries.
//!
//! What lies below a block (child blocks of a node, data of a leaf's file extents) is referenced
//! either by the tree that owns the block, or, once the block is marked FULL_BACKREF, by the
//! block's address. A snapshot shares all below its root block. When one of the trees then copies
//! a shared block:
//!
//! - the owner leaves the old block to the others: below it, references by address are added, it
//!   is marked, and those of the owner pass to the copy;
//! - another tree adds references of its own below its copy;
//! - the last tree that refers to a marked block adds its own and drops those by address.
//!
//! The references that are there are those of the extent tree and those that wait in the queue.

use ubtrfs_ondisk::block::{Block, Node};
use ubtrfs_ondisk::extent::{BackRef, ExtentItem, InlineRefs, flags};
use ubtrfs_ondisk::file_extent::FileExtent;
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{Corruption, InodeNo, Key, KeyType, LogicalAddr, ObjectId, Reason, RootId};

use super::delayed_ref::{ExtentKind, Queued};
use super::{Allocator, State};
use ubtrfs_rt::MutexGuard;

use crate::btree::{Cursor, Roots, Tree};
use crate::error::{Error, Result};

/// Items of references that are looked at: one file has one for each offset at which an extent begins.
const REF_ITEMS_MAX: usize = 8;

/// Waiting changes of one extent that are looked at to tell whether it is shared; with more it is said to
/// be, until the commit.
const CHANGES_MAX: usize = 1024;

/// A reference as the queue names it, and its count; an owner's note is none.
fn counted(reference: BackRef) -> (BackRef, u32) {
    match reference {
        BackRef::ExtentData { root, inode, offset, count } => {
            (BackRef::ExtentData { root, inode, offset, count: 1 }, count)
        }
        BackRef::SharedData { parent, count } => (BackRef::SharedData { parent, count: 1 }, count),
        BackRef::Owner { .. } => (reference, 0),
        other => (other, 1),
    }
}

/// What refers to a block, as of now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockRefs {
    /// Number of references.
    pub(crate) count: u64,
    /// What lies below is referenced by the block's address.
    pub(crate) is_full_backref: bool,
}

/// Whose references what lies below a block carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Below {
    /// A tree's.
    Tree(RootId),
    /// The block's, by its address.
    Block(LogicalAddr),
}

impl Below {
    /// The reference of a child block.
    pub(crate) fn of_block(self) -> BackRef {
        match self {
            Self::Tree(root) => BackRef::TreeBlock { root },
            Self::Block(parent) => BackRef::SharedBlock { parent },
        }
    }

    /// The reference of a file extent's data.
    pub(crate) fn of_data(self, inode: InodeNo, offset: u64) -> BackRef {
        match self {
            Self::Tree(root) => BackRef::ExtentData { root, inode, offset, count: 1 },
            Self::Block(parent) => BackRef::SharedData { parent, count: 1 },
        }
    }
}

/// A file extent's data, with what its reference is made of.
pub(crate) struct DataBelow {
    pub(crate) start: LogicalAddr,
    pub(crate) len_bytes: u64,
    pub(crate) inode: InodeNo,
    /// File offset minus offset in the extent.
    pub(crate) offset: u64,
}

/// The data that a leaf's file extents refer to, one for each.
///
/// # Errors
/// A file extent that is damaged.
pub(crate) fn data_below(block: &Block, root: RootId) -> Result<Vec<DataBelow>> {
    let Block::Leaf(leaf) = block else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for slot in 0..leaf.len() {
        let key = leaf.key(slot);
        if key.ty != KeyType::EXTENT_DATA {
            continue;
        }
        let extent = FileExtent::parse(leaf.data(slot))
            .map_err(|error| error.in_block(block.bytenr()).in_root(root))?;
        let (FileExtent::Regular(extent) | FileExtent::Prealloc(extent)) = extent else { continue };
        if !extent.is_hole() {
            found.push(DataBelow {
                start: extent.disk_bytenr,
                len_bytes: extent.disk_num_bytes,
                inode: InodeNo(key.objectid.0),
                offset: key.offset.wrapping_sub(extent.offset),
            });
        }
    }
    Ok(found)
}

impl Allocator {
    /// Held by who decides by the references of a block that others may share, until its own is
    /// dropped.
    pub(crate) fn lock_sharing(&self) -> MutexGuard<'_, ()> {
        self.sharing.lock()
    }

    /// What refers to the block at `addr`.
    ///
    /// # Errors
    /// `Corrupt` where the extent tree has no such block; what stops the look-up.
    pub(crate) fn block_refs(
        &self,
        roots: &Roots,
        addr: LogicalAddr,
        level: u8,
    ) -> Result<BlockRefs> {
        let waiting = self.state().refs.waiting(addr);
        let (recorded, item_flags) = match waiting.is_new {
            true => (0, 0),
            false => self.recorded_refs(roots, addr, level)?,
        };
        let count = recorded.checked_add_signed(waiting.net).filter(|count| *count > 0);
        let is_full_backref = item_flags & flags::FULL_BACKREF != 0 || waiting.sets_full_backref;
        match count {
            Some(count) => Ok(BlockRefs { count, is_full_backref }),
            None => Err(Error::Corrupt(
                Corruption::new(Reason::BadValue)
                    .in_root(RootId::EXTENT_TREE)
                    .have(format!("{recorded} references of block {addr}, {} more", waiting.net))
                    .expect("one at least"),
            )),
        }
    }

    fn recorded_refs(&self, roots: &Roots, addr: LogicalAddr, level: u8) -> Result<(u64, u64)> {
        let extent_tree = roots.tree(RootId::EXTENT_TREE)?;
        let skinny = Key::new(ObjectId(addr.0), KeyType::METADATA_ITEM, u64::from(level));
        let long = Key::new(ObjectId(addr.0), KeyType::EXTENT_ITEM, self.nodesize_bytes());
        for key in [skinny, long] {
            if let Some(bytes) = extent_tree.lookup(&key)? {
                let (item, _) =
                    ExtentItem::split(&bytes).map_err(|e| e.in_root(RootId::EXTENT_TREE))?;
                return Ok((item.refs.get(), item.flags.get()));
            }
        }
        Err(Error::Corrupt(
            Corruption::new(Reason::Missing)
                .in_root(RootId::EXTENT_TREE)
                .have("no extent item")
                .expect(skinny),
        ))
    }

    /// Whether all references to a data extent are the caller's own, and none of another is only about to
    /// go: until that is durable, the last commit shows the extent by it. For who would write there.
    ///
    /// # Errors
    /// What stops the look-up; damage in the item.
    pub(crate) fn is_data_of_caller(
        &self,
        roots: &Roots,
        start: LogicalAddr,
        len_bytes: u64,
        is_own: impl Fn(&BackRef) -> bool,
    ) -> Result<bool> {
        let (is_new, has_others) = self.state().refs.others(start, &is_own);
        if has_others {
            return Ok(false);
        }
        if is_new {
            return Ok(true);
        }
        let key = Key::new(ObjectId(start.0), KeyType::EXTENT_ITEM, len_bytes);
        let Some(bytes) = roots.tree(RootId::EXTENT_TREE)?.lookup(&key)? else {
            return Ok(false);
        };
        let placed = |error: Box<Corruption>| error.in_root(RootId::EXTENT_TREE);
        let (item, rest) = ExtentItem::split(&bytes).map_err(placed)?;
        let mut own_count = 0;
        for reference in InlineRefs::new(rest) {
            let reference = reference.map_err(placed)?;
            match reference {
                BackRef::Owner { .. } => {}
                BackRef::ExtentData { count, .. } | BackRef::SharedData { count, .. }
                    if is_own(&reference) =>
                {
                    own_count += u64::from(count);
                }
                _ => return Ok(false),
            }
        }
        let missing_count = item.refs.get().saturating_sub(own_count);
        Ok(missing_count == 0 || self.are_items_of_caller(roots, key, missing_count, is_own)?)
    }

    /// Whether the references of an extent that stand in items of their own, behind its item, are so many and the caller's own. One that
    /// had more references than fit into its item keeps some there.
    fn are_items_of_caller(
        &self,
        roots: &Roots,
        key: Key,
        count: u64,
        is_own: impl Fn(&BackRef) -> bool,
    ) -> Result<bool> {
        let mut cursor = roots.tree(RootId::EXTENT_TREE)?.cursor();
        cursor.seek(&key.successor().unwrap_or(key))?;
        let mut own_count = 0;
        for _ in 0..REF_ITEMS_MAX {
            let Some((at, bytes)) = cursor.current()? else { break };
            if at.objectid != key.objectid || at.ty > KeyType::SHARED_DATA_REF {
                break;
            }
            let reference = BackRef::parse_keyed(at, bytes)
                .map_err(|error| error.in_root(RootId::EXTENT_TREE))?;
            match reference {
                BackRef::ExtentData { count, .. } | BackRef::SharedData { count, .. }
                    if is_own(&reference) =>
                {
                    own_count += u64::from(count);
                }
                _ => return Ok(false),
            }
            cursor.next()?;
        }
        Ok(own_count == count)
    }

    /// A cursor for [`Allocator::is_data_shared`].
    ///
    /// # Errors
    /// There is no such tree.
    pub(crate) fn references(&self, roots: &Roots) -> Result<Cursor> {
        Ok(roots.tree(RootId::EXTENT_TREE)?.cursor())
    }

    /// Whether a data extent is shared as Linux tells it: by a reference of another than the caller, or
    /// by two kinds of the caller's own, as by inode and by a leaf that was shared once. What is about
    /// to go counts no more. What lies in leaves that trees share has one reference for all of them:
    /// who asks looks at those, too. The caller holds a handle, so that nothing moves from the queue
    /// into the tree meanwhile. `cursor` is one of [`Allocator::references`], anywhere.
    ///
    /// # Errors
    /// What stops the look-up; damage in the items.
    pub(crate) fn is_data_shared(
        &self,
        cursor: &mut Cursor,
        start: LogicalAddr,
        len_bytes: u64,
        is_own: impl Fn(&BackRef) -> bool,
    ) -> Result<bool> {
        let changes = self.state().refs.changes(start, CHANGES_MAX);
        let Some((is_new, mut refs)) = changes else { return Ok(true) };
        let items_max = REF_ITEMS_MAX + refs.len();
        if !is_new {
            let key = Key::new(ObjectId(start.0), KeyType::EXTENT_ITEM, len_bytes);
            cursor.seek(&key)?;
            let placed = |error: Box<Corruption>| error.in_root(RootId::EXTENT_TREE);
            let mut add = |reference: BackRef| {
                let (reference, count) = counted(reference);
                match refs.iter_mut().find(|(known, _)| *known == reference) {
                    Some((_, net)) => *net += i64::from(count),
                    None => refs.push((reference, i64::from(count))),
                }
            };
            let mut item_count = 0;
            while let Some((at, bytes)) = cursor.current()? {
                if at.objectid != key.objectid || at.ty > KeyType::SHARED_DATA_REF {
                    break;
                }
                if item_count > items_max {
                    return Ok(true);
                }
                if at == key {
                    let (_, rest) = ExtentItem::split(bytes).map_err(placed)?;
                    for reference in InlineRefs::new(rest) {
                        add(reference.map_err(placed)?);
                    }
                } else if matches!(at.ty, KeyType::EXTENT_DATA_REF | KeyType::SHARED_DATA_REF) {
                    add(BackRef::parse_keyed(at, bytes).map_err(placed)?);
                }
                item_count += 1;
                cursor.next()?;
            }
        }
        let mut present = refs.iter().filter(|(_, count)| *count > 0);
        let is_anothers = present.next().is_some_and(|(first, _)| !is_own(first));
        Ok(is_anothers || present.next().is_some())
    }

    /// Before `tree` copies `block`: brings the references below it to what they must be when the
    /// copy is the tree's own and the old block is left to others, if there are any. The caller holds
    /// [`Allocator::lock_sharing`] where the block may be shared, until it has dropped its reference.
    ///
    /// # Errors
    /// Damage in the block or the extent tree.
    pub(crate) fn share_below(&self, roots: &Roots, tree: &Tree, block: &Block) -> Result<()> {
        if !tree.may_share(block) {
            return Ok(());
        }
        let refs = self.block_refs(roots, block.bytenr(), block.level())?;
        let own = Below::Tree(tree.id);
        let by_address = Below::Block(block.bytenr());
        if refs.count > 1 {
            if block.owner() == tree.id && !refs.is_full_backref {
                self.change_below(block, by_address, 1)?;
                self.mark_full_backref(block);
            } else {
                self.change_below(block, own, 1)?;
            }
        } else if refs.is_full_backref {
            self.change_below(block, own, 1)?;
            self.change_below(block, by_address, -1)?;
        }
        Ok(())
    }

    /// Hands a block that its owner leaves over to the others: what lies below it is referenced by
    /// its address from now on.
    ///
    /// # Errors
    /// Damage in the block.
    pub(crate) fn hand_over(&self, block: &Block) -> Result<()> {
        self.change_below(block, Below::Block(block.bytenr()), 1)?;
        self.change_below(block, Below::Tree(block.owner()), -1)?;
        self.mark_full_backref(block);
        Ok(())
    }

    fn mark_full_backref(&self, block: &Block) {
        let kind = ExtentKind::Block { level: block.level(), first_key: Key::MIN };
        self.state().refs.set_full_backref(block.bytenr(), self.nodesize_bytes(), kind);
    }

    /// Queues `count` references, 1 or -1, for all that lies below `block`. Drops follow additions
    /// for the same blocks: none goes to zero here.
    ///
    /// # Errors
    /// A file extent that is damaged.
    pub(crate) fn change_below(&self, block: &Block, below: Below, count: i64) -> Result<()> {
        match block {
            Block::Node(node) => self.state().change_children(
                node,
                block.level() - 1,
                self.nodesize_bytes(),
                below,
                count,
            ),
            Block::Leaf(_) => {
                let found = data_below(block, block.owner())?;
                let mut state = self.state();
                for data in found {
                    let reference = below.of_data(data.inode, data.offset);
                    let (start, len) = (data.start, data.len_bytes);
                    let queued = state.refs.change(start, len, ExtentKind::Data, reference, count);
                    debug_assert_eq!(queued, Queued::Pending, "data at {start} went beside a copy");
                }
            }
        }
        Ok(())
    }
}

impl State {
    fn change_children(
        &mut self,
        node: &Node,
        level: u8,
        nodesize_bytes: u64,
        below: Below,
        count: i64,
    ) {
        for slot in 0..node.len() {
            let kind = ExtentKind::Block { level, first_key: node.key(slot) };
            self.refs.change(node.child(slot), nodesize_bytes, kind, below.of_block(), count);
        }
    }
}
