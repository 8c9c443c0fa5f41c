//! `ubtrfs filesystem`: the filesystem as a whole.

use clap::Subcommand;
use ubtrfs_ondisk::DeviceId;
use ubtrfs_ondisk::block_group::BlockGroupFlags;

use crate::commands::df::Summary;
use crate::failure::{Exit, Result};
use crate::image::DeviceArgs;
use crate::output::{Output, json};
use crate::size;

/// Show how full a filesystem is and what it is called
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

/// Show the label
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  ubtrfs filesystem label disk.img")]
struct LabelArgs {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    match &args.action {
        Action::Df(args) => df(args, out)?,
        Action::Usage(args) => usage(args, out)?,
        Action::Label(args) => label(args, out)?,
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
    let used: u64 = usage.spaces.iter().map(|space| space.used_bytes * space.copies).sum();
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
            let bytes: u64 = chunks
                .iter()
                .filter(|chunk| chunk.flags == space.flags)
                .map(|chunk| {
                    // All stripes of a chunk are of one length.
                    let here = chunk.stripes.iter().filter(|stripe| stripe.device == devid);
                    let all = u128::from(chunk.len_bytes) * u128::from(space.copies);
                    let bytes = all * here.count() as u128 / (chunk.stripes.len().max(1) as u128);
                    u64::try_from(bytes).unwrap_or(u64::MAX)
                })
                .sum();
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
