//! Operations on subvolumes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::names::{Growth, Named};
use super::{Content, Id, Model, New, Node, ROOT_DIRECTORY, Refusal, Result, Subvolume, Target};

impl Model {
    /// Makes an empty subvolume, of the number that the other side chose.
    ///
    /// # Errors
    /// As the engine's.
    pub fn create_subvolume(&mut self, dir: Id, name: &[u8], new: &New, number: u64) -> Result<Id> {
        self.free_name(dir, name)?;
        let new = New { mode: 0o040_000 | new.mode & 0o7777, ..*new };
        let node = Node::new(&new, Content::Directory(BTreeMap::new()));
        self.add_subvolume(
            number,
            Subvolume {
                nodes: BTreeMap::from([(ROOT_DIRECTORY, Arc::new(node))]),
                parent: Some((dir, name.to_vec())),
                read_only: false,
                snapshot_of: None,
            },
        );
        self.enter(dir, name, Target::Subvolume(number));
        Ok(Id::root_of(number))
    }

    /// Makes a snapshot of `source`, of the number that the other side chose.
    ///
    /// # Errors
    /// As the engine's.
    pub fn snapshot(
        &mut self,
        source: u64,
        dir: Id,
        name: &[u8],
        read_only: bool,
        number: u64,
    ) -> Result<Id> {
        let original = self.subvolumes.get(&source).ok_or(Refusal::NotFound)?.clone();
        self.free_name(dir, name)?;
        let mut nodes = original.nodes;
        // What has no name has none there either.
        nodes.retain(|_, node| node.nlink > 0);
        let parent = Some((dir, name.to_vec()));
        let snapshot = Subvolume { nodes, parent, read_only, snapshot_of: Some(source) };
        self.add_subvolume(number, snapshot);
        self.enter(dir, name, Target::Subvolume(number));
        Ok(Id::root_of(number))
    }

    /// Deletes a subvolume.
    ///
    /// # Errors
    /// As the engine's.
    pub fn delete_subvolume(&mut self, dir: Id, name: &[u8]) -> Result<()> {
        let root = match self.named(dir, name).ok_or(Refusal::NotFound)? {
            Named::Subvolume(root) => root,
            Named::Inode(_) | Named::StandIn => return Err(Refusal::InvalidArgument),
        };
        if root == self.default_subvolume {
            return Err(Refusal::InvalidArgument);
        }
        let is_inside =
            |other: &Subvolume| matches!(other.parent, Some((dir, _)) if dir.root == root);
        if self.subvolumes.values().any(is_inside) {
            return Err(Refusal::NotEmpty);
        }
        self.writable(dir.root)?;
        self.permitted(dir, Growth::Forbidden)?;
        self.leave(dir, name);
        self.subvolumes.remove(&root);
        Ok(())
    }

    /// Makes a subvolume read-only, or writable.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_subvolume_read_only(&mut self, root: u64, read_only: bool) -> Result<()> {
        self.subvolumes.get_mut(&root).ok_or(Refusal::NotFound)?.read_only = read_only;
        Ok(())
    }

    /// Refuses a name that cannot be made.
    fn free_name(&self, dir: Id, name: &[u8]) -> Result<()> {
        self.writable(dir.root)?;
        let entries = self.entries(dir)?;
        self.check_name(name)?;
        if entries.contains_key(name) {
            return Err(Refusal::Exists);
        }
        self.permitted(dir, Growth::Allowed)
    }

    fn add_subvolume(&mut self, number: u64, subvolume: Subvolume) {
        let before = self.subvolumes.insert(number, subvolume);
        assert!(before.is_none(), "the number {number} is taken");
    }

    /// Chooses the subvolume that is mounted when none is named.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn set_default_subvolume(&mut self, root: u64) -> Result<()> {
        self.subvolumes.get(&root).ok_or(Refusal::NotFound)?;
        self.default_subvolume = root;
        Ok(())
    }

    /// The subvolume that a name leads to; `None` where an empty directory stands in for it.
    pub fn subvolume_at(&self, dir: Id, name: &[u8], root: u64) -> Option<u64> {
        let parent = self.subvolumes.get(&root)?.parent.as_ref()?;
        (parent.0 == dir && parent.1 == name).then_some(root)
    }
}
