//! Which inodes the kernel knows, and by what number.
//!
//! The kernel names an inode by a node, which it learns with a name and forgets later; an inode's own number would not do, as each
//! subvolume counts from the same one. An inode without a name stays as long as its node is known.
//!
//! The stand-ins for subvolumes in a snapshot ([`InodeId::stand_in`]) are one inode in many places. A directory may be in one place only, or
//! the kernel moves it: so a stand-in is a node of its own each time that the kernel is told of one, found by number alone.

use rustc_hash::FxHashMap;
use ubtrfs_engine::{InodeId, SubvolumeHold, SubvolumeHolds};
use ubtrfs_ondisk::RootId;
use ubtrfs_rt::{AtomicBool, Mutex, Ordering};

use crate::abi::ROOT_NODE;

#[derive(Debug)]
struct Node {
    id: InodeId,
    /// How often the kernel was told of it, and has not forgotten it yet.
    count: u64,
    has_no_name: bool,
    /// Of a stand-in: where the kernel was told of it.
    place: Option<(InodeId, Box<[u8]>)>,
    /// Of a file: behind this the kernel has no pages whose contents it knows.
    cached_bytes: u64,
}

impl Node {
    fn new(id: InodeId) -> Self {
        Self { id, count: 1, has_no_name: false, place: None, cached_bytes: 0 }
    }
}

#[derive(Debug)]
struct KnownSubvolume {
    node_count: usize,
    is_deleted: bool,
    _hold: SubvolumeHold,
}

#[derive(Debug)]
struct Table {
    by_number: FxHashMap<u64, Node>,
    /// Without stand-ins.
    by_inode: FxHashMap<InodeId, u64>,
    /// How many nodes each subvolume has, which is held for them: deleted, it stays for who has its files open.
    subvolumes: FxHashMap<RootId, KnownSubvolume>,
    next: u64,
}

impl Table {
    fn put(&mut self, number: u64, id: InodeId, holds: &SubvolumeHolds) {
        self.by_number.insert(number, Node::new(id));
        if !id.is_stand_in() {
            self.by_inode.insert(id, number);
        }
        let known = self.subvolumes.entry(id.root).or_insert_with(|| KnownSubvolume {
            node_count: 0,
            is_deleted: false,
            _hold: holds.hold(id.root),
        });
        known.node_count += 1;
    }

    fn leave_subvolume(&mut self, root: RootId) {
        if let Some(known) = self.subvolumes.get_mut(&root) {
            known.node_count -= 1;
            if known.node_count == 0 {
                self.subvolumes.remove(&root);
            }
        }
    }
}

/// The nodes of a mount.
#[derive(Debug)]
pub(crate) struct Nodes {
    table: Mutex<Table>,
    holds: SubvolumeHolds,
    /// There was a deleted subvolume with nodes; read without the table's lock, to skip it where there was none.
    has_deleted: AtomicBool,
}

impl Nodes {
    /// With the directory that is mounted.
    pub(crate) fn new(root: InodeId, holds: &SubvolumeHolds) -> Self {
        let mut table = Table {
            by_number: FxHashMap::default(),
            by_inode: FxHashMap::default(),
            subvolumes: FxHashMap::default(),
            next: ROOT_NODE + 1,
        };
        table.put(ROOT_NODE, root, holds);
        Self { table: Mutex::new(table), holds: holds.clone(), has_deleted: AtomicBool::new(false) }
    }

    /// A subvolume is deleted.
    pub(crate) fn note_deleted(&self, root: RootId) {
        if let Some(known) = self.table.lock().subvolumes.get_mut(&root) {
            known.is_deleted = true;
            self.has_deleted.store(true, Ordering::Release);
        }
    }

    /// Where the kernel was told of a stand-in.
    pub(crate) fn note_place(&self, number: u64, dir: InodeId, name: &[u8]) {
        if let Some(node) = self.table.lock().by_number.get_mut(&number) {
            node.place = Some((dir, name.into()));
        }
    }

    /// The places of all stand-ins in subvolumes.
    pub(crate) fn stand_ins_in(&self, roots: &[RootId]) -> Vec<(InodeId, Box<[u8]>)> {
        let table = self.table.lock();
        let places = table.by_number.values().filter_map(|node| node.place.as_ref());
        places.filter(|(dir, _)| roots.contains(&dir.root)).cloned().collect()
    }

    /// Whether [`Nodes::note_deleted`] told so of a subvolume, and it has nodes yet.
    pub(crate) fn is_deleted(&self, root: RootId) -> bool {
        self.has_deleted.load(Ordering::Acquire)
            && self.table.lock().subvolumes.get(&root).is_some_and(|known| known.is_deleted)
    }

    /// The inode of a node.
    pub(crate) fn inode(&self, number: u64) -> Option<InodeId> {
        self.table.lock().by_number.get(&number).map(|node| node.id)
    }

    /// The node of an inode, if the kernel knows it.
    pub(crate) fn number(&self, id: InodeId) -> Option<u64> {
        self.table.lock().by_inode.get(&id).copied()
    }

    /// The kernel is about to know what pages of a file hold, up to `end`. It forgets them with the node, or before.
    pub(crate) fn note_cached(&self, id: InodeId, end: u64) {
        let mut table = self.table.lock();
        let number = table.by_inode.get(&id).copied();
        if let Some(node) = number.and_then(|number| table.by_number.get_mut(&number)) {
            node.cached_bytes = node.cached_bytes.max(end);
        }
    }

    /// The node of a file, and up to where the kernel may know what its pages hold. Of one that was only ever written it knows those that
    /// were written whole.
    pub(crate) fn cached_bytes(&self, id: InodeId) -> Option<(u64, u64)> {
        let table = self.table.lock();
        let number = table.by_inode.get(&id).copied()?;
        table.by_number.get(&number).map(|node| (number, node.cached_bytes))
    }

    /// All that the kernel knows, with their nodes.
    pub(crate) fn all(&self) -> Vec<(u64, InodeId)> {
        let table = self.table.lock();
        table.by_number.iter().map(|(number, node)| (*number, node.id)).collect()
    }

    /// The node of an inode, of which the kernel will be told once more.
    pub(crate) fn remember(&self, id: InodeId) -> u64 {
        let mut table = self.table.lock();
        if let Some(number) = table.by_inode.get(&id).copied() {
            if let Some(node) = table.by_number.get_mut(&number) {
                node.count += 1;
            }
            return number;
        }
        let number = table.next;
        table.next += 1;
        table.put(number, id, &self.holds);
        number
    }

    /// The kernel forgot a node so many times. Returns its inode if that is to go now.
    pub(crate) fn forget(&self, number: u64, count: u64) -> Option<InodeId> {
        let mut table = self.table.lock();
        let node = table.by_number.get_mut(&number)?;
        node.count = node.count.saturating_sub(count);
        if node.count > 0 || number == ROOT_NODE {
            return None;
        }
        let node = table.by_number.remove(&number)?;
        table.by_inode.remove(&node.id);
        table.leave_subvolume(node.id.root);
        node.has_no_name.then_some(node.id)
    }

    /// An inode lost its last name. Returns whether it is to go now, as the kernel does not know it.
    pub(crate) fn lost_name(&self, id: InodeId) -> bool {
        let mut table = self.table.lock();
        let number = table.by_inode.get(&id).copied();
        match number.and_then(|number| table.by_number.get_mut(&number)) {
            Some(node) => {
                node.has_no_name = true;
                false
            }
            None => true,
        }
    }

    /// What is to go, now that the kernel knows nothing any more.
    pub(crate) fn take_nameless(&self) -> Vec<InodeId> {
        let mut table = self.table.lock();
        let nodes = std::mem::take(&mut table.by_number);
        table.by_inode.clear();
        table.subvolumes.clear();
        nodes.into_values().filter(|node| node.has_no_name).map(|node| node.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ubtrfs_ondisk::{InodeNo, RootId};

    fn id(root: u64, inode: u64) -> InodeId {
        InodeId { root: RootId(root), inode: InodeNo(inode) }
    }

    #[test]
    fn inode_without_name_goes_when_the_kernel_forgets_it() {
        let holds = SubvolumeHolds::default();
        let nodes = Nodes::new(id(5, 256), &holds);
        let (one, same) = (nodes.remember(id(5, 257)), nodes.remember(id(5, 257)));
        let other = nodes.remember(id(256, 257));
        assert_eq!(one, same);
        assert_ne!(one, other);
        assert_eq!(nodes.inode(other), Some(id(256, 257)));
        let more = nodes.remember(id(256, 258));
        assert_eq!(nodes.forget(more, 1), None);
        assert!(holds.is_held(RootId(256)));
        assert_eq!(nodes.forget(other, 1), None);
        assert!(!holds.is_held(RootId(256)) && holds.is_held(RootId(5)));
        assert_eq!(nodes.inode(other), None);
        assert!(nodes.lost_name(id(256, 257)));
        assert!(!nodes.lost_name(id(5, 257)));
        assert_eq!(nodes.forget(one, 1), None);
        assert_eq!(nodes.forget(one, 1), Some(id(5, 257)));
        assert_eq!(nodes.forget(one, 1), None);
        // The number of what is gone is not given again.
        assert_ne!(nodes.remember(id(5, 257)), one);
        assert_eq!(nodes.forget(ROOT_NODE, 7), None);
        assert_eq!(nodes.inode(ROOT_NODE), Some(id(5, 256)));
    }

    #[test]
    fn what_the_kernel_has_of_a_file_goes_with_its_node() {
        let nodes = Nodes::new(id(5, 256), &SubvolumeHolds::default());
        nodes.note_cached(id(5, 257), 4096);
        assert_eq!(nodes.cached_bytes(id(5, 257)), None);
        let one = nodes.remember(id(5, 257));
        nodes.note_cached(id(5, 257), 8192);
        nodes.note_cached(id(5, 257), 4096);
        assert_eq!(nodes.cached_bytes(id(5, 257)), Some((one, 8192)));
        nodes.forget(one, 1);
        let next = nodes.remember(id(5, 257));
        assert_eq!(nodes.cached_bytes(id(5, 257)), Some((next, 0)));
    }
}
