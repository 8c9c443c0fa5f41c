//! Extents of files as `filefrag -v` on a kernel mount tells them, and as the engine does.

use std::collections::BTreeSet;
use std::path::Path;

use ubtrfs_engine::DataFile;
use ubtrfs_iomap::{FiemapExtent, FiemapSync, FileOffset, FileRange};
use ubtrfs_testkit::run;

use super::fiemap_flag_names;

/// An extent: where it begins in the file and on the medium, its length, and its flags by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Extent {
    pub logical: u64,
    pub physical: Option<u64>,
    pub len_bytes: u64,
    pub flags: BTreeSet<String>,
}

impl Extent {
    pub fn is(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }

    fn of_engine(extent: &FiemapExtent) -> Self {
        Self {
            logical: extent.range.start.bytes(),
            physical: extent.address,
            len_bytes: extent.range.len_bytes(),
            flags: fiemap_flag_names(extent).into_iter().collect(),
        }
    }

    /// From a line of `filefrag`, if it is one of an extent:
    /// `ext: logical..end: physical..end: length: [expected:] flags`.
    fn of_line(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(':').collect();
        if fields.len() < 5 || fields[0].trim().parse::<u64>().is_err() {
            return None;
        }
        let number = |text: &str| text.trim().parse::<u64>().ok();
        let first = |field: &str| number(field.split("..").next()?);
        let names = fields[fields.len() - 1].split(',').map(|name| name.trim().to_owned());
        let unsaid = ["", "eof", "not_aligned"];
        let mut flags: BTreeSet<_> =
            names.filter(|name| !unsaid.contains(&name.as_str())).collect();
        let is_delalloc = flags.contains("delalloc");
        // What has no place yet is at no known one.
        let has_place = !(flags.contains("unknown_loc") || is_delalloc);
        flags.retain(|flag| !is_delalloc || flag != "unknown_loc");
        // The column of lengths says 0 of what has no place.
        let logical = first(fields[1])?;
        Some(Self {
            logical,
            physical: first(fields[2]).filter(|_| has_place),
            len_bytes: number(fields[1].split("..").last()?)? + 1 - logical,
            flags,
        })
    }
}

/// Adds an extent that the kernel told. Of two where their places follow each other as their offsets do it makes one, also of compressed
/// ones, which are shorter there; but not where one answer ends and `filefrag` asks for the next.
fn push(extents: &mut Vec<Extent>, extent: Extent) {
    if let Some(last) = extents.last_mut() {
        let place = last.physical.map(|place| place + last.len_bytes);
        let follows = last.logical + last.len_bytes == extent.logical
            && place.is_some()
            && place == extent.physical;
        let mut flags = extent.flags.clone();
        let is_last = flags.remove("last");
        if follows && flags == last.flags {
            last.len_bytes += extent.len_bytes;
            last.flags.extend(is_last.then(|| "last".to_owned()));
            return;
        }
    }
    extents.push(extent);
}

/// What the engine says, of what is on the medium.
pub fn by_engine(file: &DataFile) -> Vec<Extent> {
    by_engine_as(file, FiemapSync::WriteBack)
}

/// What the engine says.
pub fn by_engine_as(file: &DataFile, sync: FiemapSync) -> Vec<Extent> {
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, usize::MAX, sync).unwrap();
    extents.iter().map(Extent::of_engine).collect()
}

/// What the kernel says of a file of a mount.
pub fn by_kernel(path: &Path) -> Vec<Extent> {
    let said = run("filefrag", ["-v".as_ref(), "-b1".as_ref(), path.as_os_str()]);
    let mut pushed = Vec::new();
    said.lines().filter_map(Extent::of_line).for_each(|extent| push(&mut pushed, extent));
    pushed
}
