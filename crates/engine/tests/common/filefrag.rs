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
    logical: u64,
    physical: Option<u64>,
    len_bytes: u64,
    flags: BTreeSet<String>,
}

impl Extent {
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
        let number = |field: &str| field.split("..").next()?.trim().parse::<u64>().ok();
        let names = fields[fields.len() - 1].split(',').map(|name| name.trim().to_owned());
        let unsaid = ["", "eof", "not_aligned"];
        let flags: BTreeSet<_> = names.filter(|name| !unsaid.contains(&name.as_str())).collect();
        let has_place = !flags.contains("unknown_loc") && !flags.contains("delalloc");
        Some(Self {
            logical: number(fields[1])?,
            physical: number(fields[2]).filter(|_| has_place),
            len_bytes: number(fields[3])?,
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
    let all = FileRange::from(FileOffset::ZERO);
    let extents = file.fiemap(all, usize::MAX, FiemapSync::WriteBack).unwrap();
    extents.iter().map(Extent::of_engine).collect()
}

/// What the kernel says of a file of a mount.
pub fn by_kernel(path: &Path) -> Vec<Extent> {
    let said = run("filefrag", ["-v".as_ref(), "-b1".as_ref(), path.as_os_str()]);
    let mut pushed = Vec::new();
    said.lines().filter_map(Extent::of_line).for_each(|extent| push(&mut pushed, extent));
    pushed
}
