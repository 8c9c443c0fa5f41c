//! `ubtrfs mkfs`: a new filesystem.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use ubtrfs_engine::MkfsOptions;
use ubtrfs_ondisk::block_group::BlockGroupFlags;
use ubtrfs_ondisk::features::{CompatRo, Incompat};
use ubtrfs_ondisk::superblock::Superblock;
use ubtrfs_ondisk::{CsumType, Uuid};
use ubtrfs_rt::{Arc, Runtime};
use ubtrfs_volume::Volume;

use crate::epoch;
use crate::failure::{Exit, Failure, Result};
use crate::image::WindowArgs;
use crate::output::table::{Align, Table};
use crate::output::{Output, quote};
use crate::size;
use crate::target::{Existing, Length, Target};

/// Make a new, empty btrfs filesystem in an image file or on a device
///
/// The defaults are those of a current mkfs.btrfs. A file that does not exist is made, with --size; it
/// takes space only as it fills. A target that holds a filesystem, a partition table or other data is
/// refused unless -f is given.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs mkfs --size 2G disk.img
  ubtrfs mkfs --size 512M -L backup --csum xxhash backup.img
  ubtrfs mkfs -f --partition 2 whole-disk.img
  ubtrfs mkfs --size 1G -d raid1 first.img second.img

To make an image with files in it, see `ubtrfs help import`, with --mkfs."
)]
pub struct Args {
    /// The image files or devices; each becomes a device of the one filesystem
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,
    #[command(flatten)]
    make: MakeArgs,
    /// Say nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    window: WindowArgs,
}

/// What a new filesystem is to be like.
#[derive(clap::Args, Debug, Default)]
pub struct MakeArgs {
    /// The label, at most 255 bytes
    #[arg(short = 'L', long, value_name = "LABEL")]
    label: Option<OsString>,
    /// The filesystem's uuid [default: random]
    #[arg(short = 'U', long, value_name = "UUID", value_parser = parse_uuid)]
    uuid: Option<Uuid>,
    /// Bytes of a tree block, 4K to 64K [default: 16K]
    #[arg(short, long, value_name = "NODESIZE", value_parser = crate::size::parse)]
    nodesize: Option<u64>,
    /// The checksum: crc32c, xxhash, sha256 or blake2 [default: crc32c]
    #[arg(long, value_name = "CSUM", value_parser = parse_csum)]
    csum: Option<CsumType>,
    /// Features to turn on, or with ^ in front off: no-holes, free-space-tree, block-group-tree, all
    /// on by default
    #[arg(short = 'O', long, value_name = "FEATURE", value_delimiter = ',')]
    features: Vec<String>,
    /// How metadata is kept: single, dup, raid0, raid1, raid1c3, raid1c4 or raid10 [default: dup on one
    /// device, raid1 on several]
    #[arg(short, long, value_name = "PROFILE", value_parser = parse_profile)]
    metadata: Option<BlockGroupFlags>,
    /// How data is kept, likewise [default: single]
    #[arg(short, long, value_name = "PROFILE", value_parser = parse_profile)]
    data: Option<BlockGroupFlags>,
    /// Length of the filesystem; an image file is made, or made longer, to hold it
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// Overwrite a target that holds something
    #[arg(short, long)]
    force: bool,
}

fn parse_uuid(text: &str) -> Result<Uuid, String> {
    Uuid::parse(text)
        .ok_or_else(|| "expected 32 hexadecimal digits, with or without hyphens".into())
}

fn parse_csum(text: &str) -> Result<CsumType, String> {
    CsumType::from_name(text).ok_or_else(|| "crc32c, xxhash, sha256 and blake2 are known".into())
}

fn parse_profile(text: &str) -> Result<BlockGroupFlags, String> {
    Ok(match text.to_ascii_lowercase().as_str() {
        "single" => BlockGroupFlags::default(),
        "dup" => BlockGroupFlags::DUP,
        "raid0" => BlockGroupFlags::RAID0,
        "raid1" => BlockGroupFlags::RAID1,
        "raid1c3" => BlockGroupFlags::RAID1C3,
        "raid1c4" => BlockGroupFlags::RAID1C4,
        "raid10" => BlockGroupFlags::RAID10,
        "raid5" => BlockGroupFlags::RAID5,
        "raid6" => BlockGroupFlags::RAID6,
        _ => return Err("no profile of btrfs has this name".into()),
    })
}

/// Makes it.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let options = args.make.options()?;
    let runtime = args.make.runtime()?;
    let length = args.make.size.map_or(Length::AsItIs, Length::Bytes);
    let targets = args
        .images
        .iter()
        .map(|path| Target::open(path, &args.window, length, args.make.existing()))
        .collect::<Result<Vec<_>>>()?;
    let devices = targets.iter().map(Target::device).collect();
    let volume = ubtrfs_engine::mkfs(devices, &options, &runtime)
        .map_err(|error| Failure::engine("making the filesystem", error))?;
    targets.into_iter().for_each(Target::keep);
    if !args.quiet {
        summary(&volume, out)?;
    }
    Ok(Exit::Done)
}

impl MakeArgs {
    /// The engine's form.
    pub fn options(&self) -> Result<MkfsOptions> {
        let mut options = MkfsOptions::default();
        if let Some(label) = &self.label {
            options.label = label.clone().into_vec();
        }
        options.uuid = self.uuid;
        if let Some(bytes) = self.nodesize {
            options.nodesize_bytes =
                u32::try_from(bytes).map_err(|_| Failure::usage("--nodesize", "too large"))?;
        }
        if let Some(csum) = self.csum {
            options.csum = csum;
        }
        options.metadata_profile = self.metadata;
        options.data_profile = self.data;
        for feature in &self.features {
            set_feature(&mut options, feature)?;
        }
        Ok(options)
    }

    /// Whether what is there may go.
    pub fn existing(&self) -> Existing {
        if self.force { Existing::Overwrite } else { Existing::Refuse }
    }

    /// Time and identifiers; the latter from these options where they are to be reproducible.
    pub fn runtime(&self) -> Result<Arc<Runtime>> {
        // All that shapes the filesystem, and not how the target is treated.
        let shape = (&self.label, &self.uuid, &self.nodesize, &self.csum, &self.features);
        let shape = (shape, &self.metadata, &self.data, &self.size);
        epoch::runtime(&format!("{shape:?}"))
    }

    /// The first option that was given although nothing is made.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            (self.label.is_some(), "--label"),
            (self.uuid.is_some(), "--uuid"),
            (self.nodesize.is_some(), "--nodesize"),
            (self.csum.is_some(), "--csum"),
            (!self.features.is_empty(), "--features"),
            (self.metadata.is_some(), "--metadata"),
            (self.data.is_some(), "--data"),
            (self.size.is_some(), "--size"),
            (self.force, "--force"),
        ];
        given.iter().find(|(is_given, _)| *is_given).map(|(_, name)| *name)
    }
}

fn set_feature(options: &mut MkfsOptions, text: &str) -> Result<()> {
    let (name, on) = match text.strip_prefix('^') {
        Some(name) => (name, false),
        None => (text, true),
    };
    match name {
        "no-holes" => options.no_holes = on,
        "free-space-tree" | "fst" => options.free_space_tree = on,
        "block-group-tree" | "bgt" => options.block_group_tree = on,
        // Always on; nothing makes filesystems without them any more.
        "extref" | "skinny-metadata" | "big-metadata" if on => {}
        "extref" | "skinny-metadata" | "big-metadata" | "mixed-bg" | "quota" | "squota"
        | "raid56" | "zoned" | "raid-stripe-tree" | "extent-tree-v2" => {
            let what = if on { "cannot be made" } else { "cannot be turned off" };
            return Err(Failure::new(Exit::Unsupported, "--features", what).at(name));
        }
        _ => {
            let why = "unknown; no-holes, free-space-tree and block-group-tree can be chosen";
            return Err(Failure::usage("--features", why).at(quote::for_message(text.as_bytes())));
        }
    }
    // What needs it goes with it, unless it is asked for by name.
    if !on && matches!(name, "no-holes" | "free-space-tree" | "fst") {
        options.block_group_tree = false;
    }
    Ok(())
}

/// What was made, in a few lines.
pub fn summary(volume: &Volume, out: &mut Output) -> Result<()> {
    let superblock: Superblock = volume.superblock();
    let label = match superblock.label() {
        b"" => "none".to_owned(),
        label => quote::for_message(label),
    };
    let csum = superblock.csum_type().map_or("unknown", CsumType::name);
    let mut profiles: Vec<String> = Vec::new();
    for chunk in volume.chunks() {
        let text = format!(
            "{} {}",
            chunk.flags.type_name(),
            chunk.flags.profile_name().unwrap_or("unknown")
        );
        if !profiles.contains(&text) {
            profiles.push(text);
        }
    }
    let mut table = Table::new(&[Align::Left, Align::Left], "  ");
    table.row(["Label", &label]);
    table.row(["UUID", &Uuid(superblock.fsid).to_string()]);
    table.row(["Size", &size::binary(superblock.total_bytes.get())]);
    table.row(["Node size", &superblock.nodesize.to_string()]);
    table.row(["Sector size", &superblock.sectorsize.to_string()]);
    table.row(["Checksum", csum]);
    table.row(["Profiles", &profiles.join(", ")]);
    let mut features = Incompat(superblock.incompat_flags.get()).to_string();
    let compat_ro = CompatRo(superblock.compat_ro_flags.get());
    if !compat_ro.is_empty() {
        features = format!("{features}|{compat_ro}");
    }
    let features = features.to_ascii_lowercase().replace('_', "-").replace('|', ", ");
    table.row(["Features", &features]);
    table.lines().try_for_each(|line| out.line(&line))
}
