//! The common stream: a tree as ordered batches of steps.
//!
//! A source fills batches, workers load and prepare their data on other threads, and a sink
//! applies them in the order in which they were filled. Names and attribute values of a batch lie
//! in one buffer, so that a small file costs no allocation but that of its data.
//!
//! 1. Steps of a source that walks depth first are relative to the directory entered last
//!    ([`Place::Name`]); the first step enters the root, whose name is empty.
//! 2. Steps of an archive, whose members come in any order, name full paths ([`Place::Path`])
//!    without empty, `.` or `..` components; the empty path is the root.
//! 3. [`Step::File`] with [`Content::Pieces`] is followed by its [`Step::Data`], ascending and
//!    apart, then [`Step::End`]; only warnings may come between. What no data covers is a hole.

use crate::entry::{Metadata, Segment, Special};
use crate::error::{BytePath, Cause, Error, Result, Warning, WarningKind};

/// Content up to this length is loaded whole; longer files come in pieces of this length.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

/// A batch is full with so much data.
const BATCH_DATA_BYTES: usize = 1 << 20;

/// A batch is full with so many steps: an open file each.
const BATCH_STEPS: usize = 64;

/// A batch's names and values take no more: those of a full batch are handed on, so it is one file that
/// brings so many.
const TEXT_BYTES_MAX: usize = 64 << 20;

/// A range of a batch's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Span {
    start: u32,
    len: u32,
}

/// An extended attribute.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Xattr {
    /// Its name, with the namespace.
    pub name: Span,
    /// Its value.
    pub value: Span,
}

/// Where a step puts its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the directory that was entered last, under this name.
    Name(Span),
    /// At this path from the root.
    Path(Span),
}

impl Place {
    /// The name or path.
    pub fn span(self) -> Span {
        match self {
            Self::Name(span) | Self::Path(span) => span,
        }
    }
}

/// What files of every kind have.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it goes.
    pub place: Place,
    /// Owner, permissions and times.
    pub metadata: Metadata,
    /// Extended attributes.
    pub xattrs: Vec<Xattr>,
}

/// A file that may be linked again later in the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    /// What later [`LinkTarget::Identity`] steps call it.
    pub number: u64,
    /// Names that it has in the source, in the tree or outside.
    pub links: u32,
}

/// What a hard link is to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkTarget {
    /// An earlier file's [`Identity::number`].
    Identity(u64),
    /// An earlier file's path from the root.
    Path(Span),
}

/// What a regular file holds.
#[derive(Clone, Debug)]
pub enum Content<D> {
    /// Nothing, or one hole.
    Empty,
    /// Everything, here.
    Whole(D),
    /// Data steps follow.
    Pieces {
        /// Where the data lies; `None` means everywhere.
        segments: Option<Vec<Segment>>,
    },
}

/// One step of the stream.
#[derive(Clone, Debug)]
pub enum Step<D> {
    /// A directory, which the following steps are in.
    Enter(Entry),
    /// The end of the directory entered last.
    Leave,
    /// A directory that is not entered, new or there already; its parents may be missing.
    Directory(Entry),
    /// A regular file.
    File {
        /// Name and metadata.
        entry: Entry,
        /// Its length.
        size_bytes: u64,
        /// Its content.
        content: Content<D>,
        /// If it has more names.
        identity: Option<Identity>,
    },
    /// A piece of the last file.
    Data {
        /// Where in the file.
        offset: u64,
        /// How much.
        len_bytes: usize,
        /// The data.
        data: D,
    },
    /// The end of the last file's pieces.
    End,
    /// A file that is neither directory nor regular.
    Special {
        /// Name and metadata.
        entry: Entry,
        /// Kind.
        special: Special<Span>,
        /// If it has more names.
        identity: Option<Identity>,
    },
    /// Another name of an earlier file.
    Link {
        /// The name.
        place: Place,
        /// The file.
        target: LinkTarget,
    },
    /// Something to tell the user here.
    Warning(Box<Warning>),
}

/// The buffer of a batch's names and values.
#[derive(Debug, Default)]
pub struct Text(Vec<u8>);

impl Text {
    /// The bytes of a span.
    pub fn bytes(&self, span: Span) -> &[u8] {
        &self.0[span.start as usize..][..span.len as usize]
    }
}

/// Some steps of the stream.
#[derive(Debug)]
pub struct Batch<D> {
    /// The steps, in order.
    pub steps: Vec<Step<D>>,
    /// Their names and values.
    pub text: Text,
    /// Path of the directory that is current before the first step.
    pub directory: Vec<u8>,
    /// Path of the file whose pieces the batch begins with, if it does.
    pub file: Vec<u8>,
    data_bytes: usize,
}

impl<D> Default for Batch<D> {
    fn default() -> Self {
        Self {
            steps: Vec::with_capacity(BATCH_STEPS),
            text: Text::default(),
            directory: Vec::new(),
            file: Vec::new(),
            data_bytes: 0,
        }
    }
}

impl<D> Batch<D> {
    /// Copies an extended attribute into the batch's buffer. One with which the buffer would grow out of
    /// bounds is left out, with a warning of the file that `path` names.
    pub fn xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> Option<Xattr> {
        if self.text.0.len() + name.len() + value.len() > TEXT_BYTES_MAX {
            let why = format!("attributes of one file take over {TEXT_BYTES_MAX} bytes");
            self.warn(path, WarningKind::XattrRefused { name: name.into(), why });
            return None;
        }
        Some(Xattr { name: self.span(name), value: self.span(value) })
    }

    /// Copies `bytes`, a name or a link's target, into the batch's buffer.
    pub fn span(&mut self, bytes: &[u8]) -> Span {
        let start = u32::try_from(self.text.0.len()).expect("a batch's text is far below 4 GiB");
        let len = u32::try_from(bytes.len()).expect("names are far below 4 GiB");
        self.text.0.extend_from_slice(bytes);
        Span { start, len }
    }

    /// Appends a step that brings `data_bytes` of data.
    pub fn push(&mut self, step: Step<D>, data_bytes: usize) {
        self.steps.push(step);
        self.data_bytes += data_bytes;
    }

    /// Appends a warning.
    pub fn warn(&mut self, path: impl Into<BytePath>, what: WarningKind) {
        self.push(Step::Warning(Box::new(Warning { path: path.into(), what })), 0);
    }

    /// Whether a source should hand it over.
    pub fn is_full(&self) -> bool {
        self.steps.len() >= BATCH_STEPS
            || self.data_bytes >= BATCH_DATA_BYTES
            || self.text.0.len() >= BATCH_DATA_BYTES
    }

    /// Bytes that it takes once loaded.
    pub fn memory_bytes(&self) -> usize {
        self.data_bytes + self.text.0.len()
    }
}

/// What a load brought.
#[derive(Debug, Default)]
pub struct Loaded {
    /// The data, at most what was asked for; less if the file shrank meanwhile.
    pub bytes: Vec<u8>,
    /// Whether the file has grown meanwhile.
    pub grew: bool,
}

/// Data of a file that a worker can fetch.
pub trait Load: Send {
    /// Fetches `len_bytes`.
    ///
    /// # Errors
    /// As the source reports; the caller adds the path.
    fn load(self, len_bytes: usize) -> Result<Loaded, Cause>;
}

impl Load for Vec<u8> {
    fn load(self, _: usize) -> Result<Loaded, Cause> {
        Ok(Loaded { bytes: self, grew: false })
    }
}

/// A tree to be read.
pub trait Source: Send {
    /// Data that is still to be loaded.
    type Load: Load;

    /// Appends steps until the batch is full. `false`: the tree ended.
    ///
    /// # Errors
    /// What stops the reading; the batch then holds the steps before it.
    fn fill(&mut self, batch: &mut Batch<Self::Load>) -> Result<bool>;
}

/// What a worker does to data before the sink gets it.
pub trait Prepare<D>: Send + Sync {
    /// Checksums, compresses or passes on a whole file or a piece.
    ///
    /// # Errors
    /// As the destination reports; the caller adds the path.
    fn prepare(&self, bytes: Vec<u8>, is_whole_file: bool) -> Result<D, Cause>;
}

/// Passes bytes on as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unprepared;

impl Prepare<Vec<u8>> for Unprepared {
    fn prepare(&self, bytes: Vec<u8>, _: bool) -> Result<Vec<u8>, Cause> {
        Ok(bytes)
    }
}

/// Which file the step at hand concerns, kept so that an error can name it.
struct Whereabouts {
    directory: Vec<u8>,
    file: Vec<u8>,
    place: Option<Place>,
}

impl Whereabouts {
    fn note<D>(&mut self, step: &Step<D>, text: &Text) {
        match step {
            Step::Enter(entry) => {
                self.directory = self.join(entry.place, text).0;
                self.file.clone_from(&self.directory);
                self.place = None;
            }
            Step::Leave => {
                let parent_len = self.directory.iter().rposition(|&b| b == b'/').unwrap_or(0);
                self.directory.truncate(parent_len);
            }
            Step::Directory(entry) | Step::File { entry, .. } | Step::Special { entry, .. } => {
                self.place = Some(entry.place);
            }
            Step::Link { place, .. } => self.place = Some(*place),
            Step::Data { .. } | Step::End | Step::Warning(_) => {}
        }
    }

    fn path(&self, text: &Text) -> BytePath {
        self.place.map_or_else(|| BytePath(self.file.clone()), |place| self.join(place, text))
    }

    fn join(&self, place: Place, text: &Text) -> BytePath {
        match place {
            Place::Name(name) => BytePath::join(&self.directory, text.bytes(name)),
            Place::Path(path) => BytePath(text.bytes(path).to_vec()),
        }
    }
}

impl<L: Load> Batch<L> {
    /// Loads and prepares the data of every step, up to the first whose load fails: its error, with its
    /// file's path, and what is loaded of the batch, which is all that comes before it.
    pub fn load<D>(self, prepare: &dyn Prepare<D>) -> (Batch<D>, Result<()>) {
        let Self { steps, text, directory, file, data_bytes } = self;
        let mut at = Whereabouts { directory, file, place: None };
        let mut loaded = Vec::with_capacity(steps.len());
        let result = steps.into_iter().try_for_each(|step| {
            at.note(&step, &text);
            let (step, changed) = load_step(step, prepare, &at, &text)?;
            loaded.push(step);
            if let Some(what) = changed {
                loaded.push(Step::Warning(Box::new(Warning { path: at.path(&text), what })));
            }
            Ok(())
        });
        let (directory, file) = (Vec::new(), Vec::new());
        (Batch { steps: loaded, text, directory, file, data_bytes }, result)
    }
}

/// One step of [`Batch::load`], and how its file has changed meanwhile.
fn load_step<L: Load, D>(
    step: Step<L>,
    prepare: &dyn Prepare<D>,
    at: &Whereabouts,
    text: &Text,
) -> Result<(Step<D>, Option<WarningKind>)> {
    let mut changed = None;
    let step = match step {
        Step::File { entry, size_bytes, content: Content::Whole(load), identity } => {
            let len_bytes = usize::try_from(size_bytes).unwrap_or(usize::MAX);
            let bytes;
            (bytes, changed) = fetch(load, len_bytes, at, text)?;
            let size_bytes = bytes.len() as u64;
            let data = prepared(prepare, bytes, true, at, text)?;
            Step::File { entry, size_bytes, content: Content::Whole(data), identity }
        }
        Step::Data { offset, len_bytes, data } => {
            let mut bytes;
            (bytes, changed) = fetch(data, len_bytes, at, text)?;
            // The length was promised with the file: what is gone reads as zeros.
            bytes.resize(len_bytes, 0);
            let data = prepared(prepare, bytes, false, at, text)?;
            Step::Data { offset, len_bytes, data }
        }
        Step::File { entry, size_bytes, content: Content::Empty, identity } => {
            Step::File { entry, size_bytes, content: Content::Empty, identity }
        }
        Step::File { entry, size_bytes, content: Content::Pieces { segments }, identity } => {
            Step::File { entry, size_bytes, content: Content::Pieces { segments }, identity }
        }
        Step::Enter(entry) => Step::Enter(entry),
        Step::Leave => Step::Leave,
        Step::Directory(entry) => Step::Directory(entry),
        Step::End => Step::End,
        Step::Special { entry, special, identity } => Step::Special { entry, special, identity },
        Step::Link { place, target } => Step::Link { place, target },
        Step::Warning(warning) => Step::Warning(warning),
    };
    Ok((step, changed))
}

fn fetch<L: Load>(
    load: L,
    len_bytes: usize,
    at: &Whereabouts,
    text: &Text,
) -> Result<(Vec<u8>, Option<WarningKind>)> {
    let loaded = load.load(len_bytes).map_err(|e| Error::failed("read", at.path(text), e))?;
    let mut bytes = loaded.bytes;
    bytes.truncate(len_bytes);
    let changed = if bytes.len() < len_bytes {
        let (have_bytes, expect_bytes) = (bytes.len() as u64, len_bytes as u64);
        Some(WarningKind::Shrank { have_bytes, expect_bytes })
    } else if loaded.grew {
        Some(WarningKind::Grew)
    } else {
        None
    };
    Ok((bytes, changed))
}

fn prepared<D>(
    prepare: &dyn Prepare<D>,
    bytes: Vec<u8>,
    is_whole_file: bool,
    at: &Whereabouts,
    text: &Text,
) -> Result<D> {
    prepare.prepare(bytes, is_whole_file).map_err(|e| Error::failed("prepare", at.path(text), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A damaged image, or a hostile one, can have more attributes on a file than offsets of 32 bits
    /// reach: the batch panicked.
    #[test]
    fn batch_attributes_beyond_the_bound_left_out_with_a_warning() {
        let mut batch: Batch<Vec<u8>> = Batch::default();
        let value = vec![0; TEXT_BYTES_MAX / 2];
        assert!(batch.xattr(b"file", b"user.a", &value).is_some());
        assert!(batch.xattr(b"file", b"user.b", &value).is_none());
        assert!(batch.xattr(b"file", b"user.c", b"short").is_some());
        let [Step::Warning(warning)] = batch.steps.as_slice() else { panic!("{:?}", batch.steps) };
        assert_eq!(warning.path, BytePath::from(&b"file"[..]));
        assert!(matches!(&warning.what, WarningKind::XattrRefused { name, .. }
            if *name == BytePath::from(&b"user.b"[..])));
    }
}
