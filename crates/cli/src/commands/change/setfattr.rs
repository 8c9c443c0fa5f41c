//! `ubtrfs setfattr`: extended attributes.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use clap::ArgAction;
use ubtrfs_engine::{InodeId, Reservation};

use super::{Below, Change, each_below};
use crate::edit::{COMPRESSION, Edit};
use crate::failure::{Exit, Failure, Result};
use crate::image::ChangedImageArgs;
use crate::output::Output;

/// Set and remove extended attributes in an image
///
/// NAME has its namespace in front: user., trusted. or security. VALUE is text; in double quotes it may
/// have \\, \" and octal \ooo; behind 0x it is hexadecimal, behind 0s base64.
///
/// The access control lists system.posix_acl_access and system.posix_acl_default take the value that
/// Linux shows of them (getfattr -e hex). They set permissions as there, and -x takes a list away.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs setfattr -n user.origin -v 'the attic' disk.img /photos/old.jpg
  ubtrfs setfattr -x user.origin disk.img /photos/old.jpg
  ubtrfs setfattr -x system.posix_acl_default disk.img /photos"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// Files and directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Set this attribute
    #[arg(short, long, value_name = "NAME", required_unless_present = "remove")]
    name: Option<OsString>,
    /// ... to this; empty if not given
    #[arg(short, long, value_name = "VALUE", requires = "name", allow_hyphen_values = true)]
    value: Option<OsString>,
    /// Remove this attribute
    #[arg(short = 'x', long, value_name = "NAME", conflicts_with = "name")]
    remove: Option<OsString>,
    /// Of symbolic links, not of what they lead to
    #[arg(short = 'h', long)]
    no_dereference: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let options = Below { recursive: false, follow: !self.no_dereference };
        if let Some(name) = &self.remove {
            let name = name.as_bytes();
            return each_below(edit, &self.paths, options, out, |id, path| {
                if is_acl(name) {
                    return set(edit, id, path, name, NO_ACL);
                }
                let result = edit.under_handle("removing", path, Reservation::items(3), |handle| {
                    handle.remove_xattr(id, name)
                });
                result.map_err(|failure| match failure.is_not_found() {
                    true => Failure::new(Exit::Io, "removing", "no such attribute")
                        .at_name(path)
                        .at_path(edit.image().path()),
                    false => failure,
                })
            });
        }
        let name = self.name.as_ref().map(|name| name.as_bytes()).unwrap_or_default();
        check_name(name)?;
        let value = match &self.value {
            Some(value) => {
                decode(value.clone().into_vec()).map_err(|why| Failure::usage("--value", why))?
            }
            None => Vec::new(),
        };
        each_below(edit, &self.paths, options, out, |id, path| set(edit, id, path, name, &value))
    }
}

fn set(edit: &Edit<'_>, id: InodeId, path: &[u8], name: &[u8], value: &[u8]) -> Result<()> {
    let reservation = Reservation::items(3);
    let result = edit.under_handle("setting the attribute", path, reservation, |handle| {
        handle.set_xattr(id, name, value)
    });
    let is_malformed = |failure: &Failure| is_acl(name) && failure.is_invalid();
    result.map_err(|failure| match is_malformed(&failure) && !value.is_empty() {
        true => failure.advice("What `getfattr -e hex` shows of a list, this takes behind -v."),
        false => failure,
    })
}

/// The lists that Linux interprets.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
/// As in Linux, that there is no list can be said whether there is one or not.
const NO_ACL: &[u8] = b"";

fn is_acl(name: &[u8]) -> bool {
    ACLS.contains(&name)
}

/// Refuses what Linux would not have set so: other namespaces it does not know, and those it
/// interprets have commands of their own, but for access control lists.
fn check_name(name: &[u8]) -> Result<()> {
    const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    if NAMESPACES.iter().any(|space| name.len() > space.len() && name.starts_with(space))
        || is_acl(name)
    {
        return Ok(());
    }
    if name == COMPRESSION {
        return Err(Failure::usage("--name", "the property of btrfs has a command of its own")
            .at_name(name)
            .advice("See `ubtrfs help property set`."));
    }
    Err(Failure::usage("--name", "expected a name such as user.x, trusted.x or security.x")
        .at_name(name))
}

/// A value as `setfattr` takes it.
fn decode(text: Vec<u8>) -> Result<Vec<u8>, String> {
    if let Some(digits) = text.strip_prefix(b"0x").or(text.strip_prefix(b"0X")) {
        return hexadecimal(digits).ok_or_else(|| "expected pairs of hexadecimal digits".into());
    }
    if let Some(digits) = text.strip_prefix(b"0s").or(text.strip_prefix(b"0S")) {
        return base64(digits).ok_or_else(|| "expected base64".into());
    }
    let Some(inner) = text.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")) else {
        return Ok(text);
    };
    let mut value = Vec::with_capacity(inner.len());
    let mut rest = inner.iter().copied().peekable();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            value.push(byte);
            continue;
        }
        match rest.next() {
            Some(escaped @ (b'\\' | b'"')) => value.push(escaped),
            Some(digit @ b'0'..=b'7') => {
                let mut code = u32::from(digit - b'0');
                for _ in 0..2 {
                    let Some(next) = rest.next_if(|next| (b'0'..=b'7').contains(next)) else {
                        break;
                    };
                    code = code * 8 + u32::from(next - b'0');
                }
                let byte = u8::try_from(code).map_err(|_| "an octal escape goes to \\377")?;
                value.push(byte);
            }
            _ => return Err("a backslash stands before \\, \" or octal digits".into()),
        }
    }
    Ok(value)
}

fn hexadecimal(digits: &[u8]) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = digits
        .iter()
        .map(|digit| char::from(*digit).to_digit(16).and_then(|value| u8::try_from(value).ok()))
        .collect();
    let digits = digits?;
    let pairs = digits.chunks_exact(2);
    pairs.remainder().is_empty().then(|| pairs.map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Four digits stand for three bytes; at the end `=` for what is missing.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let value = |digit: &u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let quads = text.chunks_exact(4);
    if !quads.remainder().is_empty() {
        return None;
    }
    let count = quads.len();
    let mut bytes = Vec::with_capacity(count * 3);
    for (index, quad) in quads.enumerate() {
        let padding = quad.iter().rev().take_while(|digit| **digit == b'=').count();
        if padding > 2 || (padding > 0 && index + 1 < count) {
            return None;
        }
        let digits = quad[..4 - padding].iter().map(value);
        let bits = digits
            .chain(std::iter::repeat_n(Some(0), padding))
            .try_fold(0_u32, |bits, digit| digit.map(|digit| bits << 6 | u32::from(digit)))?;
        bytes.extend_from_slice(&bits.to_be_bytes()[1..4 - padding]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_reads_text_escapes_and_hexadecimal() {
        for (text, value) in [
            (&b"plain"[..], &b"plain"[..]),
            (b"", b""),
            (b"0x00fF", b"\x00\xff"),
            (b"\"a\\\"b\\\\c\\0\\1012\"", b"a\"b\\c\0A2"),
            (b"\"", b"\""),
            (b"0sAP8Q", b"\x00\xff\x10"),
            (b"0SAP8=", b"\x00\xff"),
            (b"0sAA==", b"\x00"),
            (b"0s", b""),
        ] {
            assert_eq!(decode(text.to_vec()).unwrap(), value);
        }
        for text in [
            &b"0x0"[..],
            b"0xgg",
            b"0sAAA",
            b"0sA===",
            b"0sAA==AAAA",
            b"0sA-AA",
            b"0sA=AA",
            b"\"\\n\"",
            b"\"\\400\"",
        ] {
            assert!(decode(text.to_vec()).is_err());
        }
    }
}
