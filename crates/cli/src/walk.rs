//! Walks a tree of directories, in subvolumes too, without recursion.

use ubtrfs_engine::InodeId;

use crate::failure::{Exit, Failure, Result};
use crate::image::Image;

/// Directories below one another. Deeper is no tree that anybody made on purpose.
pub const DEPTH_MAX: usize = 16_384;

/// An entry of a directory.
#[derive(Clone, Debug)]
pub struct Child {
    /// Its name.
    pub name: Vec<u8>,
    /// What it names.
    pub id: InodeId,
    /// Whether it is a directory or subvolume, as the entry says.
    pub is_directory: bool,
    /// Whether it is a symbolic link, as the entry says.
    pub is_symlink: bool,
}

/// A directory to look at.
#[derive(Clone, Debug)]
pub struct Visit {
    /// The directory.
    pub id: InodeId,
    /// Its path, as it is printed.
    pub path: Vec<u8>,
    /// Directories above it, from where the walk began.
    pub depth: usize,
}

/// A walk: parents before children, children in the order in which they were added.
pub struct Walk {
    waiting: Vec<Visit>,
    /// Those on the way to the directory that was visited last, itself included.
    ancestors: Vec<InodeId>,
}

impl Walk {
    /// Begins at `id`.
    pub fn new(id: InodeId, path: Vec<u8>) -> Self {
        Self { waiting: vec![Visit { id, path, depth: 0 }], ancestors: Vec::new() }
    }

    /// The next directory.
    pub fn next(&mut self) -> Option<Visit> {
        let visit = self.waiting.pop()?;
        self.ancestors.truncate(visit.depth);
        self.ancestors.push(visit.id);
        Some(visit)
    }

    /// Adds those of `children` that are directories, to be visited next.
    ///
    /// # Errors
    /// Damage: a directory that is its own ancestor, which only a broken image has.
    pub fn enter(&mut self, visit: &Visit, children: &[Child]) -> Result<()> {
        for child in children.iter().rev().filter(|child| child.is_directory) {
            let path = join(&visit.path, &child.name);
            if self.ancestors.contains(&child.id) {
                return Err(Failure::new(
                    Exit::Damage,
                    "reading a directory",
                    "the directory lies inside itself",
                )
                .at_name(&path));
            }
            if visit.depth >= DEPTH_MAX {
                return Err(Failure::new(
                    Exit::Unsupported,
                    "reading a directory",
                    format!("more than {DEPTH_MAX} directories below one another"),
                )
                .at_name(&path));
            }
            self.waiting.push(Visit { id: child.id, path, depth: visit.depth + 1 });
        }
        Ok(())
    }
}

/// `directory/name`.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(directory.len() + 1 + name.len());
    path.extend_from_slice(directory);
    if !directory.is_empty() && !directory.ends_with(b"/") {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// The entries of a directory, sorted by name.
///
/// # Errors
/// As the engine reads them.
pub fn children(image: &Image, id: InodeId, path: &[u8]) -> Result<Vec<Child>> {
    let mut children = image.entries(id, path)?;
    children.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(children)
}
