//! `ubtrfs inspect fiemap`: where a file's bytes lie.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use serde::Serialize;
use ubtrfs_engine::{Mapping, MappingKind};
use ubtrfs_iomap::{FiemapExtent, FiemapSync, FileRange};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::file_extent::Compression;

use crate::commands::stat::compression_name;
use crate::failure::{Exit, Result};
use crate::image::{Image, ImageArgs};
use crate::output::Output;
use crate::output::json::Array;
use crate::output::table::{Align, Table};

/// List the extents of a file
///
/// Ranges of the file in order, with the logical address and the place on each device where they lie.
/// Holes are listed, too. Of a compressed extent, address and bytes are those of the whole extent on
/// disk, and Skip says how many decoded bytes precede the range. Flags are those of `filefrag -v`:
/// shared with other files or snapshots, encoded, unwritten, inline, last. What a mounted filesystem
/// holds of the file in memory is written first, as `filefrag -s` asks for.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs inspect fiemap disk.img /var/lib/database
  ubtrfs inspect fiemap --json disk.img /file | jq '.[] | select(.kind == \"hole\")'"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// A file inside it
    #[arg(value_name = "PATH")]
    path: OsString,
    /// Print JSON: an array with one object an extent
    #[arg(long)]
    json: bool,
}

/// Lists.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let path = args.path.as_bytes();
    let id = image.resolve_following(path)?;
    let failed = |error| image.failure("reading extents", path, error);
    let file = image.filesystem().open_data(id).map_err(failed)?;
    let whole = FileRange::from(ubtrfs_iomap::FileOffset::ZERO);
    let extents = file.fiemap(whole, usize::MAX, FiemapSync::WriteBack).map_err(failed)?;
    let mut rows = Vec::new();
    for mapping in image.filesystem().file_extents(id, FileOffset(0)).map_err(failed)? {
        rows.push(Row::new(&image, &mapping.map_err(failed)?, &extents)?);
    }
    if args.json {
        let mut array = Array::begin(out)?;
        for row in &rows {
            array.element(out, row)?;
        }
        array.end(out)?;
        return Ok(Exit::Done);
    }
    let right = Align::Right;
    let left = Align::Left;
    let columns = [right, right, left, right, right, right, left, left, left];
    let mut table = Table::new(&columns, "  ");
    table.row([
        "Offset",
        "Length",
        "Kind",
        "Logical",
        "On disk",
        "Skip",
        "Compression",
        "Flags",
        "Device:offset",
    ]);
    for row in &rows {
        table.row(row.cells());
    }
    table.lines().try_for_each(|line| out.line(&line))?;
    Ok(Exit::Done)
}

/// A range of the file.
#[derive(Serialize)]
struct Row {
    offset: u64,
    length: u64,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logical: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<u64>,
    /// Decoded bytes of the extent before the range; only of compressed ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    skip: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compression: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flags: Vec<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    places: Vec<Place>,
}

#[derive(Serialize)]
struct Place {
    devid: u64,
    offset: u64,
}

impl Row {
    fn new(image: &Image, mapping: &Mapping, extents: &[FiemapExtent]) -> Result<Self> {
        let is_compressed = mapping.compression != Compression::None;
        let mut row = Self {
            offset: mapping.offset.0,
            length: mapping.len_bytes,
            kind: match mapping.kind {
                MappingKind::Hole => "hole",
                MappingKind::Inline => "inline",
                MappingKind::Data => "data",
                MappingKind::Prealloc => "prealloc",
            },
            logical: None,
            disk_bytes: None,
            skip: None,
            compression: is_compressed.then(|| compression_name(mapping.compression)),
            flags: flags_of(mapping, extents),
            places: Vec::new(),
        };
        if !matches!(mapping.kind, MappingKind::Data | MappingKind::Prealloc) {
            return Ok(row);
        }
        let (skip, len_bytes) = if is_compressed {
            row.skip = Some(mapping.extent_offset);
            (0, mapping.disk_num_bytes)
        } else {
            (mapping.extent_offset, mapping.len_bytes)
        };
        let at = mapping.disk_bytenr.checked_add(skip).unwrap_or(mapping.disk_bytenr);
        row.logical = Some(at.0);
        row.disk_bytes = Some(len_bytes);
        // The place of the first byte: on striped profiles the rest goes on elsewhere.
        if let Some(run) = image.filesystem().volume().runs(at, len_bytes)?.first() {
            row.places =
                run.copies.iter().map(|c| Place { devid: c.devid.0, offset: c.at.0 }).collect();
        }
        Ok(row)
    }

    fn cells(&self) -> [String; 9] {
        let number = |value: Option<u64>| value.map_or("-".to_owned(), |value| value.to_string());
        let places = self.places.iter();
        let places: Vec<String> = places.map(|p| format!("{}:{}", p.devid, p.offset)).collect();
        [
            self.offset.to_string(),
            self.length.to_string(),
            self.kind.to_owned(),
            number(self.logical),
            number(self.disk_bytes),
            number(self.skip),
            self.compression.unwrap_or("-").to_owned(),
            if self.flags.is_empty() { "-".to_owned() } else { self.flags.join(",") },
            places.join(" "),
        ]
    }
}

/// What FIEMAP says of a range, of which it may make one with its neighbours; only of the last of them that it is that.
fn flags_of(mapping: &Mapping, extents: &[FiemapExtent]) -> Vec<&'static str> {
    let start = mapping.offset.0;
    let at = extents.partition_point(|extent| extent.range.end.bytes() <= start);
    let Some(extent) = extents.get(at).filter(|extent| extent.range.start.bytes() <= start) else {
        return Vec::new();
    };
    let of = extent.flags;
    // An inline extent is alone, and shorter than a block.
    let is_whole = of.is_inline || mapping.end().0 >= extent.range.end.bytes();
    let is_last = of.is_last && is_whole;
    let named = [
        (of.is_shared, "shared"),
        (of.is_encoded, "encoded"),
        (of.is_unwritten, "unwritten"),
        (of.is_inline, "inline"),
        (of.is_delalloc, "delalloc"),
        (is_last, "last"),
    ];
    named.into_iter().filter_map(|(is, name)| is.then_some(name)).collect()
}
