//! A tree in memory, to test sources and sinks without a filesystem.

use std::collections::BTreeMap;
use std::path::Path;

use ubtrfs_rt::{Executor, Time};
use ubtrfs_testkit::snapshot::{
    Entry as Seen, Kind, Timestamp, TreeBuilder, TreeSnapshot, hash_content, normal_ranges,
};

use crate::batch::{Prepare, Source, Unprepared};
use crate::entry::{Metadata, Segment, Special};
use crate::error::{Error, Warning};
use crate::pipeline::{PipelineOptions, run};
use crate::progress::Summary;
use crate::sink::contract::{Found, FoundKind, Link, Make, Tree, TreeError, Work};
use crate::sink::tree::{TreeOptions, TreeSink};

#[derive(Debug)]
enum What {
    Directory { names: BTreeMap<Vec<u8>, usize>, is_subvolume: bool },
    File { size_bytes: u64, segments: Vec<(u64, Vec<u8>)> },
    Special(Special<Vec<u8>>),
}

#[derive(Debug)]
struct Node {
    what: What,
    metadata: Metadata,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    links: u32,
}

/// The tree.
#[derive(Debug)]
pub struct Model {
    nodes: Vec<Node>,
    /// Nodes below this were there before.
    ours_from: usize,
    open: Option<(usize, u64, u64)>,
    in_change: bool,
}

impl Model {
    pub fn new() -> Self {
        let mtime = Time { sec: 1, nsec: 0 };
        let metadata = Metadata { permissions: 0o700, uid: 0, gid: 0, atime: None, mtime };
        let what = What::Directory { names: BTreeMap::new(), is_subvolume: false };
        let root = Node { what, metadata, xattrs: BTreeMap::new(), links: 1 };
        Self { nodes: vec![root], ours_from: 0, open: None, in_change: false }
    }

    /// What is there now is from before.
    pub fn settle(mut self) -> Self {
        self.ours_from = self.nodes.len();
        self
    }

    pub fn subvolumes(&self) -> usize {
        let is_subvolume =
            |node: &&Node| matches!(node.what, What::Directory { is_subvolume: true, .. });
        self.nodes.iter().filter(is_subvolume).count()
    }

    fn names(&mut self, dir: usize) -> &mut BTreeMap<Vec<u8>, usize> {
        match &mut self.nodes[dir].what {
            What::Directory { names, .. } => names,
            other => panic!("{other:?} is no directory"),
        }
    }

    fn changed(&self) {
        assert!(self.in_change, "a change outside of begin and end");
    }

    pub fn snapshot(&self) -> TreeSnapshot {
        let mut builder = TreeBuilder::new();
        self.add(&mut builder, 0, Vec::new());
        builder.finish()
    }

    fn add(&self, builder: &mut TreeBuilder, number: usize, path: Vec<u8>) {
        let node = &self.nodes[number];
        let Metadata { permissions, uid, gid, mtime, .. } = node.metadata;
        let kind = match &node.what {
            What::Directory { .. } => Kind::Directory,
            What::File { .. } => Kind::File,
            What::Special(special) => Kind::of_mode(special.type_bits()).unwrap(),
        };
        let mut seen = Seen::new(kind, permissions, uid, gid);
        seen.mtime = Some(Timestamp { sec: mtime.sec, nsec: mtime.nsec });
        seen.xattrs = Some(node.xattrs.clone());
        match &node.what {
            What::Directory { names, .. } => {
                for (name, child) in names {
                    let separator: &[u8] = if path.is_empty() { b"" } else { b"/" };
                    self.add(builder, *child, [&path, separator, name].concat());
                }
            }
            What::File { size_bytes, segments } => {
                seen.size_bytes = Some(*size_bytes);
                seen.nlink = Some(node.links);
                let ranges = segments.iter().map(|(at, data)| *at..at + data.len() as u64);
                let ranges = normal_ranges(ranges, *size_bytes);
                seen.content = Some(content(*size_bytes, segments, &ranges));
                seen.data = Some(ranges);
            }
            What::Special(special) => {
                seen.nlink = Some(node.links);
                match special {
                    Special::Symlink(target) => seen.target = Some(target.clone()),
                    Special::CharDevice(n) | Special::BlockDevice(n) => {
                        seen.rdev = Some((n.major, n.minor));
                    }
                    Special::Fifo | Special::Socket => {}
                }
            }
        }
        builder.add(path, (0, number as u64), seen);
    }
}

fn content(
    size_bytes: u64,
    segments: &[(u64, Vec<u8>)],
    ranges: &[std::ops::Range<u64>],
) -> ubtrfs_testkit::snapshot::ContentHash {
    hash_content::<()>(size_bytes, ranges, |at, buffer| {
        buffer.fill(0);
        let end = at + buffer.len() as u64;
        let from = segments.partition_point(|(offset, data)| offset + data.len() as u64 <= at);
        for (offset, data) in &segments[from..] {
            if *offset >= end {
                break;
            }
            let start = at.max(*offset);
            let stop = end.min(offset + data.len() as u64);
            let source = usize::try_from(start - offset).unwrap();
            let target = usize::try_from(start - at).unwrap();
            let len = usize::try_from(stop - start).unwrap();
            buffer[target..target + len].copy_from_slice(&data[source..source + len]);
        }
        Ok(())
    })
    .unwrap()
}

impl Tree for Model {
    type Node = usize;
    type Data = Vec<u8>;

    fn root(&self) -> usize {
        0
    }

    fn prepare(&self) -> Box<dyn Prepare<Vec<u8>>> {
        Box::new(Unprepared)
    }

    fn begin(&mut self, _: Work) -> Result<(), TreeError> {
        assert!(!std::mem::replace(&mut self.in_change, true));
        Ok(())
    }

    fn end(&mut self) {
        assert!(std::mem::replace(&mut self.in_change, false));
    }

    fn lookup(&mut self, dir: usize, name: &[u8]) -> Result<Option<Found<usize>>, TreeError> {
        let Some(&node) = self.names(dir).get(name) else { return Ok(None) };
        let kind = match self.nodes[node].what {
            What::Directory { .. } => FoundKind::Directory,
            What::Special(Special::Symlink(_)) => FoundKind::Symlink,
            _ => FoundKind::Other,
        };
        Ok(Some(Found { node, kind, is_ours: node >= self.ours_from }))
    }

    fn make(
        &mut self,
        dir: usize,
        name: &[u8],
        what: Make<'_>,
        metadata: &Metadata,
    ) -> Result<usize, TreeError> {
        self.changed();
        if self.names(dir).contains_key(name) {
            return Err(TreeError::Exists);
        }
        let what = match what {
            Make::Directory => What::Directory { names: BTreeMap::new(), is_subvolume: false },
            Make::Subvolume => What::Directory { names: BTreeMap::new(), is_subvolume: true },
            Make::File { size_bytes } => {
                assert!(size_bytes <= i64::MAX as u64);
                What::File { size_bytes, segments: Vec::new() }
            }
            Make::Special(special) => What::Special(special.map(<[u8]>::to_vec)),
        };
        let metadata = *metadata;
        self.nodes.push(Node { what, metadata, xattrs: BTreeMap::new(), links: 1 });
        let node = self.nodes.len() - 1;
        self.names(dir).insert(name.to_vec(), node);
        Ok(node)
    }

    fn link(&mut self, dir: usize, name: &[u8], node: usize) -> Result<Link, TreeError> {
        self.changed();
        if self.names(dir).contains_key(name) {
            return Err(TreeError::Exists);
        }
        self.names(dir).insert(name.to_vec(), node);
        self.nodes[node].links += 1;
        Ok(Link::Same)
    }

    fn unlink(&mut self, dir: usize, name: &[u8]) -> Result<(), TreeError> {
        self.changed();
        let node = self.names(dir).remove(name).expect("looked up before");
        assert!(node >= self.ours_from, "what was there before is kept");
        self.nodes[node].links -= 1;
        Ok(())
    }

    fn set_xattr(&mut self, node: usize, name: &[u8], value: &[u8]) -> Result<(), TreeError> {
        self.changed();
        self.nodes[node].xattrs.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    fn set_metadata(&mut self, node: usize, metadata: &Metadata) -> Result<(), TreeError> {
        self.changed();
        self.nodes[node].metadata = *metadata;
        Ok(())
    }

    fn set_times(&mut self, node: usize, metadata: &Metadata) -> Result<(), TreeError> {
        self.changed();
        self.nodes[node].metadata.mtime = metadata.mtime;
        Ok(())
    }

    fn write_whole(
        &mut self,
        node: usize,
        size: u64,
        data: Option<Vec<u8>>,
    ) -> Result<(), TreeError> {
        self.changed();
        assert!(data.as_ref().is_none_or(|data| data.len() as u64 == size));
        match &mut self.nodes[node].what {
            What::File { size_bytes, segments } => {
                *size_bytes = size;
                segments.extend(data.map(|data| (0, data)));
            }
            other => panic!("{other:?} is no file"),
        }
        Ok(())
    }

    fn begin_file(&mut self, node: usize, size_bytes: u64) -> Result<(), TreeError> {
        assert!(!self.in_change, "a file is appended to within a change");
        assert!(self.open.replace((node, size_bytes, 0)).is_none());
        Ok(())
    }

    fn append(&mut self, offset: u64, len_bytes: usize, data: Vec<u8>) -> Result<(), TreeError> {
        let (node, size_bytes, at) = self.open.as_mut().expect("a file is open");
        assert_eq!((offset, data.len()), (*at, len_bytes), "pieces follow each other");
        assert_eq!(offset % 4096, 0, "pieces are aligned");
        *at += len_bytes as u64;
        assert!(at <= size_bytes);
        assert!(*at == *size_bytes || len_bytes.is_multiple_of(4096));
        match &mut self.nodes[*node].what {
            What::File { segments, .. } => segments.push((offset, data)),
            other => panic!("{other:?} is no file"),
        }
        Ok(())
    }

    fn append_hole(&mut self, hole: Segment) -> Result<(), TreeError> {
        let (_, size_bytes, at) = self.open.as_mut().expect("a file is open");
        assert_eq!(hole.offset, *at);
        *at = hole.end();
        assert!(at <= size_bytes);
        Ok(())
    }

    fn finish_file(&mut self) -> Result<(), TreeError> {
        let (_, size_bytes, at) = self.open.take().expect("a file is open");
        assert_eq!(size_bytes, at, "the content was told whole");
        Ok(())
    }
}

/// Moves a source into a model.
pub fn to_model<S: Source>(
    source: S,
    model: Model,
    options: TreeOptions,
    executor: Executor,
) -> Result<(Model, Summary, Vec<Warning>), Error> {
    let mut sink = TreeSink::new(model, options)?;
    let mut warnings = Vec::new();
    let summary = run(source, &mut sink, &PipelineOptions::new(executor), &mut warnings)?;
    Ok((sink.into_tree(), summary, warnings))
}

/// A snapshot of a directory of the system.
pub fn seen(path: &Path) -> TreeSnapshot {
    TreeSnapshot::of_directory(path)
}
