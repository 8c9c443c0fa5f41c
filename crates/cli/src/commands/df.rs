//! `ubtrfs df`: how full a filesystem is.

use clap::ArgAction;
use serde::Serialize;
use ubtrfs_engine::Usage;
use ubtrfs_ondisk::Uuid;

use crate::failure::{Exit, Failure, Result};
use crate::image::{DeviceArgs, Image};
use crate::output::table::{Align, Table};
use crate::output::{Output, json, quote};
use crate::size;

/// Show how full the filesystem in an image is
///
/// Sizes of types and profiles count each byte once, however many copies there are; those of the
/// device count every copy.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs df disk.img
  ubtrfs df --json disk.img | jq .free"
)]
pub struct Args {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print sizes in bytes
    #[arg(short, long, conflicts_with = "human_readable")]
    bytes: bool,
    /// Print sizes such as 1.50GiB (the default)
    #[arg(short, long)]
    human_readable: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let summary = Summary::of(&args.image.read()?)?;
    if args.json {
        summary.print_json(out)?;
    } else {
        summary.print(args.bytes, out)?;
    }
    Ok(Exit::Done)
}

/// What is known of a filesystem as a whole.
pub struct Summary {
    label: Vec<u8>,
    uuid: Uuid,
    devices: u64,
    /// How full it is.
    pub usage: Usage,
}

impl Summary {
    /// Of the filesystem in this image.
    pub fn of(image: &Image) -> Result<Self> {
        let filesystem = image.filesystem();
        let usage = filesystem
            .usage()
            .map_err(|error| Failure::engine("reading usage", error).at_path(image.path()))?;
        let superblock = filesystem.superblock();
        Ok(Self {
            label: superblock.label().to_vec(),
            uuid: Uuid(superblock.fsid),
            devices: superblock.num_devices.get(),
            usage,
        })
    }

    /// Prints it as JSON.
    pub fn print_json(&self, out: &mut Output) -> Result<()> {
        json::document(out, &JsonUsage::new(self))
    }

    fn print(&self, in_bytes: bool, out: &mut Output) -> Result<()> {
        let size = |bytes: u64| if in_bytes { bytes.to_string() } else { size::binary(bytes) };
        let usage = &self.usage;
        let label =
            if self.label.is_empty() { "none".into() } else { quote::for_message(&self.label) };
        out.line(&format!("Label: {label}  UUID: {}  Devices: {}\n", self.uuid, self.devices))?;
        let mut totals = Table::new(&[Align::Left, Align::Right], "  ");
        totals.row(["Device size", &size(usage.device_bytes)]);
        totals.row(["Device allocated", &size(usage.allocated_bytes)]);
        let unallocated = usage.device_bytes.saturating_sub(usage.allocated_bytes);
        totals.row(["Device unallocated", &size(unallocated)]);
        totals.row(["Used", &size(usage.used_bytes)]);
        totals.row(["Free (estimated)", &size(usage.free_bytes)]);
        totals.lines().try_for_each(|line| out.line(&line))?;
        out.text("\n")?;
        let columns = [Align::Left, Align::Left, Align::Right, Align::Right, Align::Right];
        let mut spaces = Table::new(&columns, "  ");
        spaces.row(["Type", "Profile", "Total", "Used", "Use%"]);
        for space in &usage.spaces {
            spaces.row([
                space.flags.type_name().to_owned(),
                space.flags.profile_name().unwrap_or("unknown").to_owned(),
                size(space.total_bytes),
                size(space.used_bytes),
                format!("{}%", percent(space.used_bytes, space.total_bytes)),
            ]);
        }
        spaces.lines().try_for_each(|line| out.line(&line))
    }
}

/// Rounded up, as `df` does.
fn percent(part: u64, whole: u64) -> u128 {
    if whole == 0 { 0 } else { (u128::from(part) * 100).div_ceil(u128::from(whole)) }
}

#[derive(Serialize)]
struct JsonUsage {
    label: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    label_hex: Option<String>,
    uuid: String,
    devices: u64,
    device_size: u64,
    device_allocated: u64,
    used: u64,
    free: u64,
    spaces: Vec<JsonSpace>,
}

#[derive(Serialize)]
struct JsonSpace {
    #[serde(rename = "type")]
    ty: &'static str,
    profile: &'static str,
    copies: u64,
    total: u64,
    used: u64,
}

impl JsonUsage {
    fn new(summary: &Summary) -> Self {
        let usage = &summary.usage;
        let space = |space: &ubtrfs_engine::SpaceUsage| JsonSpace {
            ty: space.flags.type_name(),
            profile: space.flags.profile_name().unwrap_or("unknown"),
            copies: space.copies,
            total: space.total_bytes,
            used: space.used_bytes,
        };
        Self {
            label: json::text(&summary.label),
            label_hex: json::hex_if_lossy(&summary.label),
            uuid: summary.uuid.to_string(),
            devices: summary.devices,
            device_size: usage.device_bytes,
            device_allocated: usage.allocated_bytes,
            used: usage.used_bytes,
            free: summary.usage.free_bytes,
            spaces: usage.spaces.iter().map(space).collect(),
        }
    }
}
