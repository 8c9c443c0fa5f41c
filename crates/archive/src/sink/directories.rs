//! The directories of a destination that an archive's paths have led to.

use std::collections::HashMap;

use crate::entry::Metadata;

#[derive(Debug)]
struct Directory<N> {
    node: N,
    /// To be set at the end, since what is made in it changes its times.
    metadata: Option<Metadata>,
    /// It was there before: its metadata stays.
    is_kept: bool,
    children: HashMap<Box<[u8]>, usize>,
}

/// A tree of known directories. Each is kept once, whatever the length of its path.
#[derive(Debug)]
pub(super) struct Directories<N> {
    all: Vec<Directory<N>>,
    /// The path that was resolved last: members of one directory mostly follow each other.
    last_path: Vec<u8>,
    last_index: usize,
    /// Directories below this had their metadata taken.
    taken: usize,
}

impl<N: Copy> Directories<N> {
    /// The root's index.
    pub const ROOT: usize = 0;

    pub fn new(root: N) -> Self {
        let root =
            Directory { node: root, metadata: None, is_kept: false, children: HashMap::new() };
        Self { all: vec![root], last_path: Vec::new(), last_index: Self::ROOT, taken: 0 }
    }

    pub fn node(&self, index: usize) -> N {
        self.all[index].node
    }

    pub fn child(&self, parent: usize, name: &[u8]) -> Option<usize> {
        self.all[parent].children.get(name).copied()
    }

    pub fn insert(
        &mut self,
        parent: usize,
        name: &[u8],
        node: N,
        metadata: Option<Metadata>,
    ) -> usize {
        let index = self.all.len();
        self.all.push(Directory { node, metadata, is_kept: false, children: HashMap::new() });
        self.all[parent].children.insert(name.into(), index);
        index
    }

    /// The metadata of this one stays.
    pub fn keep(&mut self, index: usize) {
        self.all[index].is_kept = true;
    }

    pub fn is_kept(&self, index: usize) -> bool {
        self.all[index].is_kept
    }

    pub fn set_metadata(&mut self, index: usize, metadata: Metadata) {
        self.all[index].metadata = Some(metadata);
    }

    /// The directory at `path`, if it was the last to be resolved.
    pub fn last_resolved(&self, path: &[u8]) -> Option<usize> {
        (self.last_path == path).then_some(self.last_index)
    }

    pub fn set_last_resolved(&mut self, path: &[u8], index: usize) {
        self.last_path.clear();
        self.last_path.extend_from_slice(path);
        self.last_index = index;
    }

    /// The metadata of the next directories that have some, at most `count_max`; `None` at the end.
    pub fn take_metadata(&mut self, count_max: usize) -> Option<Vec<(N, Metadata)>> {
        let mut some = Vec::new();
        while some.len() < count_max
            && let Some(directory) = self.all.get(self.taken)
        {
            self.taken += 1;
            some.extend(directory.metadata.map(|metadata| (directory.node, metadata)));
        }
        (!some.is_empty()).then_some(some)
    }
}
