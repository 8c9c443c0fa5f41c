//! Reading one tree block: which copy, and what is wrong with it.

use ubtrfs_ondisk::verify::{self, Expect};
use ubtrfs_ondisk::{Corruption, Generation, Key, LogicalAddr, Reason, RootId};
use ubtrfs_volume::Error;

use crate::context::Context;
use crate::finding::{Finding, Maybe};
use crate::view::{View, number};

/// Where a deletion of a tree has come to: in nodes from `level` up, children that lie wholly
/// before `key` are gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dropped {
    pub(crate) key: Key,
    pub(crate) level: u8,
}

/// A block and what its parent says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pointer {
    pub(crate) at: LogicalAddr,
    pub(crate) generation: Generation,
    pub(crate) level: u8,
    /// `None` for a root.
    pub(crate) first_key: Option<Key>,
    /// First key of the right neighbour.
    pub(crate) limit: Option<Key>,
    /// The tree in which it is reached.
    pub(crate) root: RootId,
    /// 0 for a root.
    pub(crate) parent: LogicalAddr,
    pub(crate) dropped: Option<Dropped>,
}

impl Pointer {
    pub(crate) fn to_root(root: RootId, at: u64, generation: u64, level: u8) -> Self {
        Self {
            at: LogicalAddr(at),
            generation: Generation(generation),
            level,
            first_key: None,
            limit: None,
            root,
            parent: LogicalAddr(0),
            dropped: None,
        }
    }

    fn expect(&self) -> Expect {
        Expect {
            bytenr: self.at,
            generation: Some(self.generation),
            level: Some(self.level),
            first_key: self.first_key,
            owner: Some(self.root),
        }
    }

    /// The pointer to the child in `slot` of this block.
    pub(crate) fn child(&self, view: &View, slot: usize) -> Option<Self> {
        let ptr = view.ptr(slot)?;
        let next = view.key(slot + 1);
        if let (Some(dropped), Some(next)) = (self.dropped, next)
            && view.level() >= dropped.level
            && next <= dropped.key
        {
            return None;
        }
        Some(Self {
            at: LogicalAddr(ptr.blockptr.get()),
            generation: Generation(ptr.generation.get()),
            level: view.level().saturating_sub(1),
            first_key: Some(ptr.key.key()),
            limit: next.or(self.limit),
            root: self.root,
            parent: self.at,
            dropped: self.dropped,
        })
    }
}

/// Why a copy was not taken.
enum Refused {
    Corrupt(Box<Corruption>),
    Failed(Error),
}

impl Context<'_> {
    /// Reads a block: the first copy that is whole, else the first that can be made use of.
    /// `None` when there is none.
    pub(crate) fn read_block(&self, pointer: &Pointer, found: &mut Vec<Finding>) -> Option<View> {
        let copies = match self.volume.mirror_count(pointer.at) {
            Ok(copies) => copies,
            Err(error) => {
                found.push(unreadable(pointer, &error));
                return None;
            }
        };
        let mut whole = None;
        let mut refused = Vec::new();
        for mirror in 0..copies {
            match self.read_copy(pointer, mirror) {
                Ok(view) => {
                    whole.get_or_insert(view);
                    if !self.options.data {
                        break;
                    }
                }
                Err(why) => refused.push((mirror, why)),
            }
        }
        if whole.is_some() {
            found.extend(refused.into_iter().filter_map(|(mirror, why)| match why {
                Refused::Corrupt(corruption) => Some(bad_copy(pointer, mirror, *corruption)),
                // Of a device that is missing or failing there is nothing to say here.
                Refused::Failed(Error::MissingDevice { .. }) => None,
                Refused::Failed(error) => Some(unreadable(pointer, &error)),
            }));
            return whole;
        }
        self.salvage(pointer, refused, found)
    }

    /// No copy is whole: reports the best of them, and reads it as far as it makes sense.
    fn salvage(
        &self,
        pointer: &Pointer,
        refused: Vec<(usize, Refused)>,
        found: &mut Vec<Finding>,
    ) -> Option<View> {
        let mut failure = None;
        let mut lost = None;
        for (mirror, why) in refused {
            match why {
                Refused::Failed(error) => _ = failure.get_or_insert(error),
                Refused::Corrupt(corruption) if is_usable(corruption.reason) => {
                    let view = self.read_raw(pointer, mirror).filter(|view| view.level() < 8);
                    found.push(bad_block(pointer, *corruption, view.as_ref()));
                    return view;
                }
                Refused::Corrupt(corruption) => _ = lost.get_or_insert(corruption),
            }
        }
        match (lost, failure) {
            (Some(corruption), _) => found.push(bad_block(pointer, *corruption, None)),
            (None, Some(error)) => found.push(unreadable(pointer, &error)),
            (None, None) => {}
        }
        None
    }

    fn read_copy(&self, pointer: &Pointer, mirror: usize) -> Result<View, Refused> {
        let mut bytes = vec![0; self.geometry.nodesize_bytes].into_boxed_slice();
        self.volume.read_mirror(pointer.at, mirror, &mut bytes).map_err(Refused::Failed)?;
        verify::block(bytes, &self.geometry, &pointer.expect())
            .map(View::verified)
            .map_err(Refused::Corrupt)
    }

    fn read_raw(&self, pointer: &Pointer, mirror: usize) -> Option<View> {
        let mut bytes = vec![0; self.geometry.nodesize_bytes].into_boxed_slice();
        self.volume.read_mirror(pointer.at, mirror, &mut bytes).ok()?;
        View::raw(bytes)
    }
}

/// Whether the block is the one that was meant, with its bytes as they were written.
fn is_usable(reason: Reason) -> bool {
    !matches!(
        reason,
        Reason::CsumMismatch | Reason::WrongBytenr | Reason::WrongFsid | Reason::Truncated
    )
}

fn bad_block(pointer: &Pointer, corruption: Corruption, view: Option<&View>) -> Finding {
    let is_empty_leaf = view.is_some_and(|view| view.level() == 0 && view.len() == 0);
    if is_empty_leaf && pointer.parent.0 != 0 {
        return Finding::EmptyLeaf {
            root: pointer.root,
            block: pointer.at,
            parent: pointer.parent,
        };
    }
    Finding::BadBlock {
        root: pointer.root,
        block: pointer.at,
        slot: Maybe(corruption.slot.map(u64::from)),
        reason: corruption.reason,
        have: corruption.have,
        expect: corruption.expect,
    }
}

fn bad_copy(pointer: &Pointer, mirror: usize, corruption: Corruption) -> Finding {
    Finding::BadBlockCopy {
        root: pointer.root,
        block: pointer.at,
        mirror: number(mirror),
        reason: corruption.reason,
        have: corruption.have,
        expect: corruption.expect,
    }
}

fn unreadable(pointer: &Pointer, error: &Error) -> Finding {
    Finding::UnreadableBlock { root: pointer.root, block: pointer.at, error: error.to_string() }
}
