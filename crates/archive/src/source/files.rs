//! What the walks keep of files while they hand them out: names and pieces that are still to come.

use std::collections::HashMap;
use std::hash::Hash;
use std::vec::IntoIter;

use crate::batch::{Batch, Content, Entry, Identity, LinkTarget, PIECE_BYTES_MAX, Place, Step};
use crate::entry::Segment;

/// Files with several names of which some are still to come.
#[derive(Debug)]
pub(super) struct Identities<K> {
    /// A file's number and how many names are to come.
    waiting: HashMap<K, (u64, u32)>,
    next: u64,
}

impl<K: Eq + Hash> Identities<K> {
    pub(super) fn new() -> Self {
        Self { waiting: HashMap::new(), next: 0 }
    }

    /// Whether the file is another name of an earlier one: then it is handed out as a link, and
    /// `None` returned. Else the identity for its later names, if it can have some.
    #[expect(clippy::option_option, reason = "no step, a step without and one with identity")]
    pub(super) fn identify<L>(
        &mut self,
        batch: &mut Batch<L>,
        name: &[u8],
        file: K,
        links: u32,
    ) -> Option<Option<Identity>> {
        if links < 2 {
            return Some(None);
        }
        if let Some((number, names_left)) = self.waiting.get_mut(&file) {
            let target = LinkTarget::Identity(*number);
            *names_left = names_left.saturating_sub(1);
            if *names_left == 0 {
                self.waiting.remove(&file);
            }
            let place = Place::Name(batch.span(name));
            batch.push(Step::Link { place, target }, 0);
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.waiting.insert(file, (number, links - 1));
        Some(Some(Identity { number, links }))
    }
}

/// What is said of a file before its data.
#[derive(Debug)]
pub(super) struct FileStep {
    pub(super) entry: Entry,
    pub(super) size_bytes: u64,
    pub(super) identity: Option<Identity>,
}

/// A file that is handed out in pieces.
#[derive(Debug)]
pub(super) struct OpenFile<F> {
    /// The file.
    pub(super) file: F,
    segments: IntoIter<Segment>,
    current: Segment,
}

impl<F> OpenFile<F> {
    /// Hands out a file that has data in `segments`, or all over where there are none given: whole,
    /// as `whole` loads it, or to begin with its pieces, which are then still to come.
    pub(super) fn begin<L>(
        batch: &mut Batch<L>,
        step: FileStep,
        segments: Option<Vec<Segment>>,
        file: F,
        whole: impl FnOnce(F) -> L,
    ) -> Option<Self> {
        let FileStep { entry, size_bytes, identity } = step;
        if size_bytes == 0 || segments.as_ref().is_some_and(Vec::is_empty) {
            let content = Content::Empty;
            batch.push(Step::File { entry, size_bytes, content, identity }, 0);
            return None;
        }
        match usize::try_from(size_bytes) {
            Ok(len_bytes) if len_bytes <= PIECE_BYTES_MAX && segments.is_none() => {
                let content = Content::Whole(whole(file));
                batch.push(Step::File { entry, size_bytes, content, identity }, len_bytes);
                None
            }
            _ => {
                let all = || vec![Segment { offset: 0, len_bytes: size_bytes }];
                let ranges = segments.clone().unwrap_or_else(all);
                let content = Content::Pieces { segments };
                batch.push(Step::File { entry, size_bytes, content, identity }, 0);
                let current = Segment { offset: 0, len_bytes: 0 };
                Some(Self { file, segments: ranges.into_iter(), current })
            }
        }
    }

    /// Hands out the next piece, which `load` loads, told its offset and length; at the end of the file
    /// that, and returns `false`.
    pub(super) fn hand_out<L>(
        &mut self,
        batch: &mut Batch<L>,
        load: impl FnOnce(&F, u64, u64) -> L,
    ) -> bool {
        if self.current.len_bytes == 0 {
            let Some(segment) = self.segments.next() else {
                batch.push(Step::End, 0);
                return false;
            };
            self.current = segment;
        }
        let offset = self.current.offset;
        let len = self.current.len_bytes.min(PIECE_BYTES_MAX as u64);
        self.current.offset += len;
        self.current.len_bytes -= len;
        let len_bytes = usize::try_from(len).expect("at most a piece");
        let data = load(&self.file, offset, len);
        batch.push(Step::Data { offset, len_bytes, data }, len_bytes);
        true
    }
}
