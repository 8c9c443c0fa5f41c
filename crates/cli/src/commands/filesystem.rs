//! `ubtrfs filesystem`: the filesystem as a whole.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Subcommand;
use ubtrfs_ondisk::DeviceId;
use ubtrfs_ondisk::block_group::BlockGroupFlags;

use crate::commands::change::Change;
use crate::commands::df::Summary;
use crate::edit::Edit;
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, DeviceArgs};
use crate::output::{Output, json};
use crate::size;

/// Show how full a filesystem is; name it, and make it larger
#[derive(clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    Df(DfArgs),
    Usage(UsageArgs),
    Label(LabelArgs),
    Resize(ResizeArgs),
    Sync(SyncArgs),
}

impl Args {
    /// Whether all is to be made durable.
    pub fn is_sync(&self) -> bool {
        matches!(self.action, Action::Sync(_))
    }

    /// The change that is asked for, if it is one.
    pub fn change(&self) -> Option<&dyn Change> {
        match &self.action {
            Action::Label(args) if args.label.is_some() => Some(args),
            Action::Resize(args) => Some(args),
            Action::Sync(args) => Some(args),
            _ => None,
        }
    }
}

/// Show how full each kind of space is
///
/// As `btrfs filesystem df`: bytes of block groups and of what is in them, a copy counted once.
/// `ubtrfs df` says the same with sums, and as JSON.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs filesystem df disk.img"
)]
struct DfArgs {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print sizes in bytes
    #[arg(short, long)]
    bytes: bool,
    /// Print JSON, as `ubtrfs df --json`
    #[arg(long)]
    json: bool,
}

/// Show how full the filesystem and each of its devices is
///
/// As `btrfs filesystem usage`: bytes of the devices, every copy counted, then each kind of space and
/// what of it lies on which device.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs filesystem usage disk.img"
)]
struct UsageArgs {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print sizes in bytes
    #[arg(short, long)]
    bytes: bool,
    /// Print JSON, as `ubtrfs df --json`
    #[arg(long)]
    json: bool,
}

/// Show the label, or set it
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ubtrfs filesystem label disk.img
  ubtrfs filesystem label disk.img backup
  ubtrfs filesystem label disk.img ''         no label")]
struct LabelArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The new label, at most 255 bytes
    #[arg(value_name = "LABEL", conflicts_with = "json")]
    label: Option<OsString>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Make a filesystem larger
///
/// An image file is made longer with it. SIZE is the new length, with + in front what is added, or
/// max for all that a block device or partition has. With several devices, N: in front names which,
/// as in 2:+10G; else it is the first.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs filesystem resize disk.img 20G
  ubtrfs filesystem resize disk.img +512M
  ubtrfs filesystem resize --partition 2 whole-disk.img max"
)]
struct ResizeArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The length, as `ubtrfs help sizes` says
    #[arg(value_name = "[N:]SIZE", value_parser = Size::parse, allow_hyphen_values = true)]
    size: Size,
}

/// Make everything durable
///
/// Each command that changes an image has done so when it ends. What is left is what others left: a
/// log of a Linux that was cut off is replayed, and what the system still holds of the image in
/// memory goes to the medium.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs filesystem sync disk.img"
)]
struct SyncArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
}

/// A length that is asked for, and of which device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Size {
    device: Option<u64>,
    length: Length,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Length {
    Is(u64),
    Grows(u64),
    Shrinks(u64),
    Max,
}

impl Size {
    fn parse(text: &str) -> Result<Self, String> {
        let (device, text) = match text.split_once(':') {
            Some((device, text)) => {
                let number = device.parse().map_err(|_| format!("'{device}' is no device"))?;
                (Some(number), text)
            }
            None => (None, text),
        };
        let length = match (text.strip_prefix('+'), text.strip_prefix('-')) {
            _ if text == "max" => Length::Max,
            (Some(text), _) => Length::Grows(size::parse(text)?),
            (_, Some(text)) => Length::Shrinks(size::parse(text)?),
            _ => Length::Is(size::parse(text)?),
        };
        Ok(Self { device, length })
    }
}

impl Change for LabelArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let label = self.label.as_ref().map(|label| label.as_bytes()).unwrap_or_default();
        edit.filesystem().set_label(label).map_err(|error| {
            Failure::engine("setting the label", error).at_path(edit.image().path())
        })
    }
}

impl Change for SyncArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    /// Opening replayed a log; the caller commits.
    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        edit.filesystem()
            .volume()
            .flush()
            .map_err(|error| Failure::volume("syncing", &error).at_path(edit.image().path()))
    }
}

impl Change for ResizeArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let failed =
            |exit, why: String| Failure::new(exit, "resizing", why).at_path(edit.image().path());
        let volume = edit.filesystem().volume();
        let items = volume.device_items();
        let item = items
            .iter()
            .find(|item| self.size.device.is_none_or(|devid| item.devid.get() == devid))
            .ok_or_else(|| failed(Exit::Io, "there is no such device".to_owned()))?;
        let devid = DeviceId(item.devid.get());
        let (now, sector) = (item.total_bytes.get(), edit.image().sectorsize_bytes());
        let wanted = match self.size.length {
            Length::Is(bytes) => bytes,
            Length::Grows(bytes) => now.saturating_add(bytes),
            Length::Shrinks(bytes) => now.saturating_sub(bytes),
            Length::Max => match volume.device(devid) {
                Some(device) if !device.is_end_known() => {
                    let why = "with --offset, and no partition there, how far it may reach is not \
                               known: give a length";
                    return Err(failed(Exit::Usage, why.to_owned()));
                }
                Some(device) => device.len_bytes(),
                None => now,
            },
        };
        let wanted = wanted / sector * sector;
        if wanted < now {
            let why = format!(
                "it has {} already, and is only made larger by this version",
                size::binary(now)
            );
            return Err(failed(Exit::Unsupported, why));
        }
        if wanted == now {
            return Ok(());
        }
        edit.filesystem()
            .grow_device(devid, wanted)
            .map_err(|error| Failure::engine("resizing", error).at_path(edit.image().path()))
    }
}

/// Shows; changes are made by who asks for them first.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    match &args.action {
        Action::Df(args) => df(args, out)?,
        Action::Usage(args) => usage(args, out)?,
        Action::Label(args) => label(args, out)?,
        Action::Resize(_) | Action::Sync(_) => {}
    }
    Ok(Exit::Done)
}

/// Sizes in bytes, or for eyes.
fn sizes(in_bytes: bool) -> impl Fn(u64) -> String {
    move |bytes| if in_bytes { bytes.to_string() } else { size::binary(bytes) }
}

fn name_of(flags: BlockGroupFlags, between: &str) -> String {
    let profile = flags.profile_name().unwrap_or("unknown");
    format!("{}{between}{profile}", flags.type_name())
}

fn df(args: &DfArgs, out: &mut Output) -> Result<()> {
    let summary = Summary::of(&args.image.read()?)?;
    if args.json {
        return summary.print_json(out);
    }
    let size = sizes(args.bytes);
    summary.usage.spaces.iter().try_for_each(|space| {
        let name = name_of(space.flags, ", ");
        let (total, used) = (size(space.total_bytes), size(space.used_bytes));
        out.line(&format!("{name}: total={total}, used={used}"))
    })
}

fn usage(args: &UsageArgs, out: &mut Output) -> Result<()> {
    let image = args.image.read()?;
    let summary = Summary::of(&image)?;
    if args.json {
        return summary.print_json(out);
    }
    let size = sizes(args.bytes);
    let usage = &summary.usage;
    let volume = image.filesystem().volume();
    let unallocated = usage.device_bytes.saturating_sub(usage.allocated_bytes);
    // What was read may be anything.
    let used = usage
        .spaces
        .iter()
        .map(|space| space.used_bytes.saturating_mul(space.copies))
        .fold(0, u64::saturating_add);
    out.line("Overall:")?;
    for (name, bytes) in [
        ("Device size:", usage.device_bytes),
        ("Device allocated:", usage.allocated_bytes),
        ("Device unallocated:", unallocated),
        ("Used:", used),
        ("Free (estimated):", usage.free_bytes),
    ] {
        out.line(&format!("    {name:<20} {:>14}", size(bytes)))?;
    }
    let chunks = volume.chunks();
    for space in &usage.spaces {
        let percent = match space.total_bytes {
            0 => 0.0,
            total => space.used_bytes as f64 * 100.0 / total as f64,
        };
        let (total, used) = (size(space.total_bytes), size(space.used_bytes));
        out.line(&format!(
            "\n{}: Size:{total}, Used:{used} ({percent:.2}%)",
            name_of(space.flags, ",")
        ))?;
        for item in volume.device_items() {
            let devid = DeviceId(item.devid.get());
            let bytes = chunks
                .iter()
                .filter(|chunk| chunk.flags == space.flags)
                .map(|chunk| {
                    // All stripes of a chunk are of one length.
                    let here = chunk.stripes.iter().filter(|stripe| stripe.device == devid);
                    let all = u128::from(chunk.len_bytes) * u128::from(space.copies);
                    let bytes = all * here.count() as u128 / (chunk.stripes.len().max(1) as u128);
                    u64::try_from(bytes).unwrap_or(u64::MAX)
                })
                .fold(0, u64::saturating_add);
            if bytes > 0 {
                out.line(&format!("   device {devid} {:>18}", size(bytes)))?;
            }
        }
    }
    out.line("\nUnallocated:")?;
    for item in volume.device_items() {
        let bytes = item.total_bytes.get().saturating_sub(item.bytes_used.get());
        out.line(&format!("   device {} {:>18}", DeviceId(item.devid.get()), size(bytes)))?;
    }
    Ok(())
}

fn label(args: &LabelArgs, out: &mut Output) -> Result<()> {
    let image = args.image.read()?;
    let superblock = image.filesystem().superblock();
    let label = superblock.label();
    if args.json {
        let mut value = serde_json::Map::new();
        value.insert("label".into(), json::text(label).into());
        if let Some(hex) = json::hex_if_lossy(label) {
            value.insert("label_hex".into(), hex.into());
        }
        return json::document(out, &value);
    }
    out.name(label)?;
    out.text("\n")
}
