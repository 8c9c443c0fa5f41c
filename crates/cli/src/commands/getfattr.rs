//! `ubtrfs getfattr`: extended attributes, read.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::ArgAction;
use serde::Serialize;

use crate::facts::JsonPath;
use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, ImageArgs};
use crate::output::Output;
use crate::output::json::{self, Array};

/// Show extended attributes in an image
///
/// As getfattr: the names of user attributes, of all with -m -, and with -d their values. What is no
/// text is printed in hexadecimal.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs getfattr -d -m - disk.img /usr/bin/ping
  ubtrfs getfattr --only-values -n user.origin disk.img /photos/old.jpg"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Files and directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// This attribute only, with its value
    #[arg(short, long, value_name = "NAME")]
    name: Option<OsString>,
    /// Values, too
    #[arg(short, long)]
    dump: bool,
    /// Attributes whose names begin so; - for all [default: user.]
    #[arg(short = 'm', long = "match", value_name = "PREFIX", allow_hyphen_values = true)]
    prefix: Option<OsString>,
    /// Values only, as they are
    #[arg(long, conflicts_with = "json")]
    only_values: bool,
    /// Of symbolic links, not of what they lead to
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print JSON: an array with one object an attribute
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

#[derive(Serialize)]
struct JsonXattr {
    #[serde(flatten)]
    path: JsonPath,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    value: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_hex: Option<String>,
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let mut array = args.json.then(|| Array::begin(out)).transpose()?;
    for path in &args.paths {
        let result = args.one(&image, path, &mut array, out);
        out.tolerate(result)?;
    }
    if let Some(array) = array {
        array.end(out)?;
    }
    Ok(Exit::Done)
}

impl Args {
    fn one(
        &self,
        image: &Image,
        path: &OsStr,
        array: &mut Option<Array>,
        out: &mut Output,
    ) -> Result<()> {
        let path = path.as_bytes();
        let id = if self.no_dereference {
            image.resolve(path)?
        } else {
            image.resolve_following(path)?
        };
        let found = image.filesystem().xattrs(id);
        let mut found =
            found.map_err(|error| image.failure("reading extended attributes", path, error))?;
        found.sort_unstable();
        found.retain(|(name, _)| self.is_wanted(name));
        if let (Some(name), []) = (&self.name, found.as_slice()) {
            return Err(Failure::new(Exit::Io, "reading extended attributes", "no such attribute")
                .at_name(name.as_bytes())
                .at_name(path)
                .at_path(image.path()));
        }
        if let Some(array) = array {
            return found.iter().try_for_each(|(name, value)| {
                array.element(
                    out,
                    &JsonXattr {
                        path: JsonPath::new(path),
                        name: json::text(name),
                        name_hex: json::hex_if_lossy(name),
                        value: json::text(value),
                        value_hex: json::hex_if_lossy(value),
                    },
                )
            });
        }
        if self.only_values {
            return found.iter().try_for_each(|(_, value)| out.bytes(value));
        }
        if found.is_empty() {
            return Ok(());
        }
        out.text("# file: ")?;
        out.name(path)?;
        out.text("\n")?;
        for (name, value) in &found {
            out.name(name)?;
            if self.dump || self.name.is_some() {
                out.text("=")?;
                out.text(&shown(value))?;
            }
            out.text("\n")?;
        }
        out.text("\n")
    }

    fn is_wanted(&self, name: &[u8]) -> bool {
        if let Some(wanted) = &self.name {
            return name == wanted.as_bytes();
        }
        let prefix = self.prefix.as_deref().map_or(&b"user."[..], OsStr::as_bytes);
        prefix == b"-" || name.starts_with(prefix)
    }
}

/// Text in quotes, anything else in hexadecimal, both as setfattr takes them.
fn shown(value: &[u8]) -> String {
    match std::str::from_utf8(value) {
        Ok(text) if !text.chars().any(char::is_control) => {
            format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
        }
        _ => format!("0x{}", json::hex(value)),
    }
}
