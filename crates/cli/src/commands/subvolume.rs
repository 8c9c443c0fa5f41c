//! `ubtrfs subvolume`: subvolumes and snapshots.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Subcommand;
use serde::Serialize;
use ubtrfs_engine::SubvolumeInfo;
use ubtrfs_ondisk::{RootId, Uuid};

use crate::commands::change::Change;
use crate::commands::change::subvolume::{self as change, named_subvolume};
use crate::failure::{Exit, Failure, Result};
use crate::image::{DeviceArgs, ImageArgs};
use crate::output::json::Array;
use crate::output::time::{self, Calendar};
use crate::output::{Output, json, quote};

/// Make, delete, list and show subvolumes and snapshots
#[derive(clap::Args)]
#[command(arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    Create(change::CreateArgs),
    Delete(change::DeleteArgs),
    Snapshot(change::SnapshotArgs),
    SetDefault(change::SetDefaultArgs),
    List(ListArgs),
    Show(ShowArgs),
    GetDefault(GetDefaultArgs),
}

/// List the subvolumes of an image
///
/// One a line, as `btrfs subvolume list`: number, generation, the subvolume it lies in, and its path
/// from the top level.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs subvolume list disk.img
  ubtrfs subvolume list -s disk.img     snapshots only
  ubtrfs subvolume list -u --json disk.img"
)]
struct ListArgs {
    #[command(flatten)]
    image: DeviceArgs,
    /// Snapshots only
    #[arg(short, long)]
    snapshots: bool,
    /// Read-only subvolumes only
    #[arg(short, long)]
    readonly: bool,
    /// Deleted ones that wait to be cleaned up only
    #[arg(short, long)]
    deleted: bool,
    /// Print the uuid, too
    #[arg(short, long)]
    uuid: bool,
    /// Print JSON: an array with one object a subvolume
    #[arg(long)]
    json: bool,
}

/// Show what is known about a subvolume
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ubtrfs subvolume show disk.img /home
  ubtrfs subvolume show disk.img          the default subvolume")]
struct ShowArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// The subvolume inside it
    #[arg(value_name = "PATH", default_value = "/")]
    path: OsString,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Show the default subvolume: what is mounted when none is named
#[derive(clap::Args)]
struct GetDefaultArgs {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The change that is asked for, if it is one.
    pub fn change(&self) -> Option<&dyn Change> {
        match &self.action {
            Action::Create(args) => Some(args),
            Action::Delete(args) => Some(args),
            Action::Snapshot(args) => Some(args),
            Action::SetDefault(args) => Some(args),
            Action::List(_) | Action::Show(_) | Action::GetDefault(_) => None,
        }
    }

    /// Whether a snapshot is to be made.
    pub fn takes_snapshot(&self) -> bool {
        matches!(self.action, Action::Snapshot(_))
    }
}

/// Lists or shows; changes are made by who asks for them first.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    match &args.action {
        Action::List(args) => list(args, out)?,
        Action::Show(args) => show(args, out)?,
        Action::GetDefault(args) => get_default(args, out)?,
        _ => {}
    }
    Ok(Exit::Done)
}

fn list(args: &ListArgs, out: &mut Output) -> Result<()> {
    let image = args.image.read()?;
    let mut subvolumes = image
        .filesystem()
        .subvolumes()
        .map_err(|error| Failure::engine("reading subvolumes", error).at_path(image.path()))?;
    subvolumes.retain(|info| {
        info.id != RootId::FS_TREE
            && info.deleted == args.deleted
            && (!args.snapshots || !info.parent_uuid.is_nil())
            && (!args.readonly || info.read_only)
    });
    if args.json {
        let mut array = Array::begin(out)?;
        for info in &subvolumes {
            array.element(out, &JsonSubvolume::new(info))?;
        }
        return array.end(out);
    }
    for info in &subvolumes {
        let parent = info.parent.map_or(0, |parent| parent.root.0);
        out.text(&format!("ID {} gen {} top level {parent} ", info.id, info.generation))?;
        if args.uuid {
            out.text(&format!("uuid {} ", info.uuid))?;
        }
        out.text("path ")?;
        match &info.path {
            Some(path) => out.name(path)?,
            None => out.text("DELETED")?,
        }
        out.text("\n")?;
    }
    Ok(())
}

fn show(args: &ShowArgs, out: &mut Output) -> Result<()> {
    let image = args.image.read()?;
    let path = args.path.as_bytes();
    let id = named_subvolume(&image, path)?;
    let info = image
        .filesystem()
        .subvolume(id.root)
        .map_err(|error| image.failure("reading the subvolume", path, error))?;
    if args.json {
        return json::document(out, &JsonSubvolume::new(&info));
    }
    print(&info, out)
}

fn print(info: &SubvolumeInfo, out: &mut Output) -> Result<()> {
    let calendar = Calendar::system();
    let path = match &info.path {
        Some(path) if path.is_empty() => "/".to_owned(),
        Some(path) => quote::for_message(path),
        None => "DELETED".to_owned(),
    };
    let flags = if info.read_only { "readonly" } else { "-" };
    let uuid = |uuid: Uuid| if uuid.is_nil() { "-".to_owned() } else { uuid.to_string() };
    out.line(&path)?;
    for (name, value) in [
        ("UUID", uuid(info.uuid)),
        ("Parent UUID", uuid(info.parent_uuid)),
        ("Received UUID", uuid(info.received_uuid)),
        ("Creation time", calendar.full(info.otime)),
        ("Subvolume ID", info.id.to_string()),
        ("Generation", info.generation.to_string()),
        ("Gen at creation", info.otransid.to_string()),
        ("Parent ID", info.parent.map_or("-".into(), |parent| parent.root.to_string())),
        ("Flags", flags.to_owned()),
        ("Send transid", info.stransid.to_string()),
        ("Receive transid", info.rtransid.to_string()),
    ] {
        out.line(&format!("  {:<17} {value}", format!("{name}:")))?;
    }
    Ok(())
}

fn get_default(args: &GetDefaultArgs, out: &mut Output) -> Result<()> {
    let image = args.image.read()?;
    let fs = image.filesystem();
    // Not where paths begin: at a mount that is what is mounted.
    let default = fs.default_subvolume().map_err(|error| {
        Failure::engine("finding the default subvolume", error).at_path(image.path())
    })?;
    let info = fs
        .subvolume(default.root)
        .map_err(|error| Failure::engine("reading the subvolume", error).at_path(image.path()))?;
    if args.json {
        return json::document(out, &JsonSubvolume::new(&info));
    }
    if info.id == RootId::FS_TREE {
        return out.line("ID 5 (FS_TREE)");
    }
    let parent = info.parent.map_or(0, |parent| parent.root.0);
    out.text(&format!("ID {} gen {} top level {parent} path ", info.id, info.generation))?;
    out.name(info.path.as_deref().unwrap_or_default())?;
    out.text("\n")
}

#[derive(Serialize)]
struct JsonSubvolume {
    id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    parent_id: Option<u64>,
    uuid: String,
    parent_uuid: Option<String>,
    received_uuid: Option<String>,
    generation: u64,
    ctransid: u64,
    otransid: u64,
    stransid: u64,
    rtransid: u64,
    ctime: String,
    otime: String,
    read_only: bool,
    deleted: bool,
}

impl JsonSubvolume {
    fn new(info: &SubvolumeInfo) -> Self {
        let uuid = |uuid: Uuid| (!uuid.is_nil()).then(|| uuid.to_string());
        Self {
            id: info.id.0,
            path: info.path.as_deref().map(json::text),
            path_hex: info.path.as_deref().and_then(json::hex_if_lossy),
            parent_id: info.parent.map(|parent| parent.root.0),
            uuid: info.uuid.to_string(),
            parent_uuid: uuid(info.parent_uuid),
            received_uuid: uuid(info.received_uuid),
            generation: info.generation.0,
            ctransid: info.ctransid.0,
            otransid: info.otransid.0,
            stransid: info.stransid.0,
            rtransid: info.rtransid.0,
            ctime: time::rfc3339(info.ctime),
            otime: time::rfc3339(info.otime),
            read_only: info.read_only,
            deleted: info.deleted,
        }
    }
}
