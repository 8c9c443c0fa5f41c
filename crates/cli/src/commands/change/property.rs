//! `ubtrfs property`: what btrfs keeps of files and subvolumes beyond other filesystems.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::Subcommand;
use serde::Serialize;
use ubtrfs_engine::{InodeId, Reservation};
use ubtrfs_ondisk::InodeNo;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_ondisk::inode::flags;

use super::Change;
use super::subvolume::named_subvolume;
use crate::edit::{COMPRESSION, Edit};
use crate::facts::JsonPath;
use crate::failure::{Exit, Failure, Result};
use crate::image::{ChangedImageArgs, Image, ImageArgs};
use crate::output::{Output, json};

/// Show and set properties of subvolumes, files and directories
///
/// ro (of a subvolume): whether nothing in it can be changed, true or false.
/// label (of the filesystem, asked for at its root): as `ubtrfs filesystem label`.
/// compression (of a file or directory): how data that is written is compressed: zlib, lzo, zstd,
/// none for never, or empty for as the mount says. What is made in a directory takes it over.
#[derive(clap::Args)]
#[command(verbatim_doc_comment, arg_required_else_help = true)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    Get(GetArgs),
    Set(SetArgs),
}

/// Show properties
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ubtrfs property get disk.img /home
  ubtrfs property get disk.img /home ro")]
struct GetArgs {
    #[command(flatten)]
    image: ImageArgs,
    /// A subvolume, file or directory
    #[arg(value_name = "PATH")]
    path: OsString,
    /// This property only
    #[arg(value_name = "NAME")]
    name: Option<Property>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Set a property
///
/// A subvolume that was received forgets so when it becomes writable, and later differences cannot be
/// received for it any more: that is refused unless -f is given.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs property set disk.img /snapshots/1 ro true
  ubtrfs property set disk.img /var/log compression zstd"
)]
struct SetArgs {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// A subvolume, file or directory
    #[arg(value_name = "PATH")]
    path: OsString,
    /// The property
    #[arg(value_name = "NAME")]
    name: Property,
    /// Its value
    #[arg(value_name = "VALUE")]
    value: OsString,
    /// Make even a received subvolume writable
    #[arg(short, long)]
    force: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Property {
    Ro,
    Compression,
    Label,
}

#[derive(Serialize)]
struct JsonProperties {
    #[serde(flatten)]
    path: JsonPath,
    #[serde(skip_serializing_if = "Option::is_none")]
    ro: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compression: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    label_hex: Option<String>,
}

impl Args {
    /// The change that is asked for, if it is one.
    pub fn change(&self) -> Option<&dyn Change> {
        match &self.action {
            Action::Set(args) => Some(args),
            Action::Get(_) => None,
        }
    }
}

/// Shows; changes are made by who asks for them first.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let Action::Get(args) = &args.action else { return Ok(Exit::Done) };
    let image = args.image.read()?;
    let path = args.path.as_bytes();
    let is_wanted = |property| args.name.is_none_or(|name| name == property);
    let id = image.resolve_following(path)?;
    let is_subvolume = id.inode == InodeNo::SUBVOLUME_ROOT;
    let mut shown = JsonProperties {
        path: JsonPath::new(path),
        ro: None,
        compression: None,
        label: None,
        label_hex: None,
    };
    if is_wanted(Property::Ro) && (is_subvolume || args.name.is_some()) {
        let info = image.filesystem().subvolume(named_subvolume(&image, path)?.root);
        shown.ro = Some(info.map_err(|error| image.failure("reading", path, error))?.read_only);
    }
    if is_wanted(Property::Compression) {
        let value = image.filesystem().xattr(id, COMPRESSION);
        let value = value.map_err(|error| image.failure("reading", path, error))?;
        shown.compression = value.map(|value| json::text(&value));
    }
    if is_wanted(Property::Label) && (id == image.start() || args.name.is_some()) {
        check_root(&image, id, path)?;
        let superblock = image.filesystem().superblock();
        shown.label = Some(json::text(superblock.label()));
        shown.label_hex = json::hex_if_lossy(superblock.label());
    }
    if args.json {
        json::document(out, &shown)?;
        return Ok(Exit::Done);
    }
    if let Some(ro) = shown.ro {
        out.line(&format!("ro={ro}"))?;
    }
    if let Some(compression) = shown.compression {
        out.line(&format!("compression={compression}"))?;
    }
    if shown.label.is_some() {
        out.text("label=")?;
        out.name(image.filesystem().superblock().label())?;
        out.text("\n")?;
    }
    Ok(Exit::Done)
}

/// The label is the filesystem's, which its root stands for.
fn check_root(image: &Image, id: InodeId, path: &[u8]) -> Result<()> {
    if id == image.start() || id == image.filesystem().top_level() {
        return Ok(());
    }
    Err(Failure::new(Exit::Io, "label", "it is of the whole filesystem, not of what is in it")
        .at_name(path)
        .at_path(image.path())
        .advice("Name the root: /"))
}

impl Change for SetArgs {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, _: &mut Output) -> Result<()> {
        let (path, value) = (self.path.as_bytes(), self.value.as_bytes());
        match self.name {
            Property::Ro => self.set_read_only(edit, path, value),
            Property::Compression => {
                let id = edit.image().resolve_following(path)?;
                set_compression(edit, id, path, value)
            }
            Property::Label => {
                let image = edit.image();
                check_root(image, image.resolve_following(path)?, path)?;
                let result = edit.filesystem().set_label(value);
                result.map_err(|error| image.failure("setting the label", path, error))
            }
        }
    }
}

impl SetArgs {
    fn set_read_only(&self, edit: &Edit<'_>, path: &[u8], value: &[u8]) -> Result<()> {
        let read_only = match value {
            b"true" => true,
            b"false" => false,
            _ => return Err(Failure::usage("ro", "expected true or false").at_name(value)),
        };
        let image: &Image = edit.image();
        let root = named_subvolume(image, path)?.root;
        let failed = |error| image.failure("setting ro", path, error);
        let info = image.filesystem().subvolume(root).map_err(failed)?;
        if !read_only && info.read_only && !info.received_uuid.is_nil() && !self.force {
            return Err(Failure::new(Exit::Io, "setting ro", "it was received from elsewhere")
                .at_name(path)
                .at_path(image.path())
                .advice(
                    "Make a writable snapshot of it; or give -f (--force), and it forgets that.",
                ));
        }
        image.filesystem().set_subvolume_read_only(root, read_only).map_err(failed)
    }
}

/// The attribute; the engine sets the flags that go with it, as Linux does.
fn set_compression(edit: &Edit<'_>, id: InodeId, path: &[u8], value: &[u8]) -> Result<()> {
    let image = edit.image();
    let inode = image.inode(id, path)?;
    if !matches!(inode.file_type(), FileType::Regular | FileType::Directory) {
        return Err(Failure::new(
            Exit::Io,
            "setting compression",
            "it is no file and no directory",
        )
        .at_name(path)
        .at_path(image.path()));
    }
    if inode.flags & (flags::NODATACOW | flags::NODATASUM) != 0 {
        let why = "it is written in place or without checksums, and so never compressed";
        return Err(Failure::new(Exit::Io, "setting compression", why)
            .at_name(path)
            .at_path(image.path()));
    }
    if !matches!(value, b"" | b"none" | b"no" | b"zlib" | b"lzo" | b"zstd") {
        return Err(
            Failure::usage("compression", "zlib, lzo, zstd and none are known").at_name(value)
        );
    }
    edit.under_handle("setting compression", path, Reservation::items(4), |handle| {
        handle.set_xattr(id, COMPRESSION, value)
    })
}
