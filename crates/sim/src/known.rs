//! States that were opened and found right. What opening, comparing and checking did with one of
//! them they do with another that is the same in every block they read.

use std::collections::VecDeque;

use ubtrfs_testkit::crash::{BlockSet, Image};

/// States that others are held against, the last ones: cuts go forward.
const KEPT_MAX: usize = 8;

/// A few states that were found right.
#[derive(Debug, Default)]
pub(crate) struct Known {
    opened: VecDeque<Opened>,
}

/// A state that was found right.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) images: Vec<Image>,
    /// Blocks that were read by who opened, compared and checked it.
    pub(crate) reads: Vec<BlockSet>,
    /// The commit that it showed; or whatever else must be the same where the blocks are.
    pub(crate) generation: u64,
}

impl Opened {
    fn is_same(&self, images: &[Image]) -> bool {
        let mut both = self.images.iter().zip(images).zip(&self.reads);
        both.all(|((ours, theirs), reads)| ours.is_same_in(theirs, reads))
    }
}

impl Known {
    /// The commit that a state shows, where it is the same as a known one in all that is read.
    pub(crate) fn generation_of(&self, images: &[Image]) -> Option<u64> {
        self.opened.iter().find(|known| known.is_same(images)).map(|known| known.generation)
    }

    /// Whether a state is the same as a known one of that commit in all that is read.
    pub(crate) fn has(&self, images: &[Image], generation: u64) -> bool {
        let mut of_it = self.opened.iter().filter(|known| known.generation == generation);
        of_it.any(|known| known.is_same(images))
    }

    /// Remembers one, and forgets the oldest.
    pub(crate) fn note(&mut self, opened: Opened) {
        if self.opened.len() == KEPT_MAX {
            self.opened.pop_front();
        }
        self.opened.push_back(opened);
    }
}
