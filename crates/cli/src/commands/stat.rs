//! `ubtrfs stat`: all that is known of a file.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use serde::Serialize;
use ubtrfs_engine::{Inode, MappingKind};
use ubtrfs_ondisk::FileOffset;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::file_extent::Compression;

use crate::facts::{self, JsonFacts, JsonPath};
use crate::failure::{Exit, Result};
use crate::image::{Image, ImageArgs};
use crate::output::json::{self, Array};
use crate::output::owner::Owners;
use crate::output::time::Calendar;
use crate::output::{Output, mode, quote};
use crate::size;

/// Show everything known about files in an image
///
/// As `stat` of a mounted filesystem, and what btrfs keeps beyond it: subvolume, generation, flags,
/// extents and their compression, extended attributes.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs stat disk.img /etc/passwd
  ubtrfs stat --json disk.img /etc/passwd | jq .[0].extents"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Files or directories inside it
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Show what symbolic links lead to, not the links
    #[arg(short = 'L', long)]
    dereference: bool,
    /// Print JSON: an array with one object a file
    #[arg(long)]
    json: bool,
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let mut array = args.json.then(|| Array::begin(out)).transpose()?;
    let show = Show { owners: Owners::system(), calendar: Calendar::system() };
    for path in &args.paths {
        let result = Stat::of(&image, path, args.dereference).and_then(|stat| match &mut array {
            Some(array) => array.element(out, &stat.to_json()),
            None => show.print(&stat, out),
        });
        out.tolerate(result)?;
    }
    if let Some(array) = array {
        array.end(out)?;
    }
    Ok(Exit::Done)
}

/// What is known of one file.
struct Stat {
    path: Vec<u8>,
    inode: Inode,
    sectorsize_bytes: u64,
    target: Option<Vec<u8>>,
    extents: Option<Extents>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Counts of a file's extents, and their bytes.
#[derive(Default, Serialize)]
struct Extents {
    data: u64,
    inline: u64,
    preallocated: u64,
    holes: u64,
    /// Bytes on disk of the data extents that the file refers to, each once.
    disk_bytes: u64,
    compression: BTreeSet<&'static str>,
}

impl Stat {
    fn of(image: &Image, path: &OsStr, dereference: bool) -> Result<Self> {
        let path = path.as_bytes();
        let id = if dereference { image.resolve_following(path)? } else { image.resolve(path)? };
        let inode = image.inode(id, path)?;
        let is_symlink = inode.file_type() == FileType::Symlink;
        let target = is_symlink.then(|| image.read_link(id, path)).transpose()?;
        let has_extents = inode.file_type() == FileType::Regular;
        let extents = has_extents.then(|| Extents::of(image, &inode, path)).transpose()?;
        let xattrs = image
            .filesystem()
            .xattrs(id)
            .map_err(|error| image.failure("reading extended attributes", path, error))?;
        let sectorsize_bytes = image.sectorsize_bytes();
        Ok(Self { path: path.to_vec(), inode, sectorsize_bytes, target, extents, xattrs })
    }

    fn to_json(&self) -> JsonStat<'_> {
        JsonStat {
            path: JsonPath::new(&self.path),
            facts: JsonFacts::new(&self.inode, self.sectorsize_bytes),
            target: self.target.as_deref().map(json::text),
            target_hex: self.target.as_deref().and_then(json::hex_if_lossy),
            extents: self.extents.as_ref(),
            xattrs: self.xattrs.iter().map(|(name, value)| JsonXattr::new(name, value)).collect(),
        }
    }
}

impl Extents {
    fn of(image: &Image, inode: &Inode, path: &[u8]) -> Result<Self> {
        let failed = |error| image.failure("reading extents", path, error);
        let mut counts = Self::default();
        let mut seen = BTreeSet::new();
        for mapping in image.filesystem().file_extents(inode.id, FileOffset(0)).map_err(failed)? {
            let mapping = mapping.map_err(failed)?;
            match mapping.kind {
                MappingKind::Hole => counts.holes += 1,
                MappingKind::Prealloc => counts.preallocated += 1,
                MappingKind::Inline => counts.inline += 1,
                MappingKind::Data => counts.data += 1,
            }
            if mapping.disk_bytenr.0 != 0 && seen.insert(mapping.disk_bytenr) {
                counts.disk_bytes = counts.disk_bytes.saturating_add(mapping.disk_num_bytes);
            }
            if mapping.compression != Compression::None {
                counts.compression.insert(compression_name(mapping.compression));
            }
        }
        Ok(counts)
    }

    fn words(&self) -> String {
        let mut parts = Vec::new();
        let counts = [
            (self.data, "data"),
            (self.inline, "inline"),
            (self.preallocated, "preallocated"),
            (self.holes, "hole"),
        ];
        for (count, name) in counts {
            if count > 0 {
                parts.push(format!("{count} {name}"));
            }
        }
        if parts.is_empty() {
            parts.push("none".into());
        }
        if self.disk_bytes > 0 {
            parts.push(format!("{} on disk", size::binary(self.disk_bytes)));
        }
        if !self.compression.is_empty() {
            let names: Vec<&str> = self.compression.iter().copied().collect();
            parts.push(format!("compressed with {}", names.join(" and ")));
        }
        parts.join(", ")
    }
}

/// A compression's name, as options have it.
pub fn compression_name(compression: Compression) -> &'static str {
    match compression {
        Compression::None => "none",
        Compression::Zlib => "zlib",
        Compression::Lzo => "lzo",
        Compression::Zstd => "zstd",
    }
}

struct Show {
    owners: Owners,
    calendar: Calendar,
}

impl Show {
    fn print(&self, stat: &Stat, out: &mut Output) -> Result<()> {
        let inode = &stat.inode;
        out.text("  File: ")?;
        out.name(&stat.path)?;
        if let Some(target) = &stat.target {
            out.text(" -> ")?;
            out.name(target)?;
        }
        let blocks = facts::allocated_bytes(inode, stat.sectorsize_bytes) / 512;
        out.line(&format!(
            "\n  Size: {:<10}\tBlocks: {:<10} IO Block: {:<6} {}",
            inode.size_bytes,
            blocks,
            stat.sectorsize_bytes,
            mode::kind_words(inode.file_type(), inode.size_bytes)
        ))?;
        let (root, number, nlink) = (inode.id.root, inode.id.inode, inode.nlink);
        out.text(&format!("Subvol: {root:<10}\tInode: {number:<10}  Links: "))?;
        if mode::is_device(inode.file_type()) {
            let (major, minor) = inode.device();
            out.line(&format!("{nlink:<5} Device type: {major},{minor}"))?;
        } else {
            out.line(&nlink.to_string())?;
        }
        out.line(&format!(
            "Access: ({:04o}/{})  Uid: ({:5}/{:>8})   Gid: ({:5}/{:>8})",
            inode.mode & 0o7777,
            mode::letters(inode.mode),
            inode.uid,
            self.owners.user(inode.uid).unwrap_or("UNKNOWN"),
            inode.gid,
            self.owners.group(inode.gid).unwrap_or("UNKNOWN"),
        ))?;
        for (name, time) in [
            ("Access", inode.atime),
            ("Modify", inode.mtime),
            ("Change", inode.ctime),
            (" Birth", inode.otime),
        ] {
            out.line(&format!("{name}: {}", self.calendar.full(time)))?;
        }
        self.print_btrfs(stat, out)
    }

    fn print_btrfs(&self, stat: &Stat, out: &mut Output) -> Result<()> {
        let inode = &stat.inode;
        let flags = facts::flag_names(inode);
        let flags = if flags.is_empty() { "none".to_owned() } else { flags.join(", ") };
        out.line(&format!(
            " Btrfs: made in generation {}, changed in {}, flags {flags}",
            inode.generation, inode.transid
        ))?;
        if let Some(extents) = &stat.extents {
            out.line(&format!("Extent: {}", extents.words()))?;
        }
        for (name, value) in &stat.xattrs {
            let name = quote::for_message(name);
            let value = match std::str::from_utf8(value) {
                Ok(text) if !text.chars().any(char::is_control) => format!("\"{text}\""),
                _ => format!("0x{}", json::hex(value)),
            };
            out.line(&format!(" Xattr: {name} = {value}"))?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct JsonStat<'a> {
    #[serde(flatten)]
    path: JsonPath,
    #[serde(flatten)]
    facts: JsonFacts,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extents: Option<&'a Extents>,
    xattrs: Vec<JsonXattr>,
}

/// Values are any bytes: always in hexadecimal, and as text where they are text.
#[derive(Serialize)]
struct JsonXattr {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    value_hex: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
}

impl JsonXattr {
    fn new(name: &[u8], value: &[u8]) -> Self {
        Self {
            name: json::text(name),
            name_hex: json::hex_if_lossy(name),
            value_hex: json::hex(value),
            value: std::str::from_utf8(value).ok().map(str::to_owned),
        }
    }
}
