//! `ubtrfs chmod`: permissions.

use std::ffi::OsString;

use ubtrfs_engine::{InodeId, SetAttributes};
use ubtrfs_ondisk::dir::FileType;

use super::{Below, Change, each_below};
use crate::edit::{Edit, UMASK};
use crate::failure::Result;
use crate::image::ChangedImageArgs;
use crate::output::Output;

/// Change permissions in an image
///
/// MODE is octal, as 644, or symbolic, as u+x,go-w. Where it does not say for whom, as +x, it is for
/// all, except that +w is for the owner only. Symbolic links are followed; with -R, those met on the
/// way are left alone.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  ubtrfs chmod disk.img 600 /etc/shadow
  ubtrfs chmod -R disk.img u=rwX,go=rX /srv"
)]
pub struct Args {
    #[command(flatten)]
    image: ChangedImageArgs,
    /// The permissions
    #[arg(value_name = "MODE", value_parser = Mode::parse, allow_hyphen_values = true)]
    mode: Mode,
    /// Files and directories
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<OsString>,
    /// Change directories with all below them
    #[arg(short = 'R', long)]
    recursive: bool,
}

impl Change for Args {
    fn image(&self) -> &ChangedImageArgs {
        &self.image
    }

    fn apply(&self, edit: &Edit<'_>, out: &mut Output) -> Result<()> {
        let options = Below { recursive: self.recursive, follow: true };
        each_below(edit, &self.paths, options, out, |id, path| {
            let inode = edit.image().inode(id, path)?;
            let mode = self.mode.applied_to(inode.mode, inode.file_type());
            let attributes = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
            edit.set_attributes(id, &attributes, path)
        })
    }
}

/// Those two and the sticky bit.
pub const SPECIAL: u32 = 0o7000;
/// Set-user-ID and set-group-ID, which directories keep unless they are named.
pub const SET_ID: u32 = 0o6000;

/// Permissions as `chmod` takes them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Mode {
    /// All of them; `keeps_set_id` where a directory keeps those two bits.
    Octal { mode: u32, keeps_set_id: bool },
    /// Steps, one after the other.
    Symbolic(Vec<Step>),
}

/// One change of a symbolic mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Bits of those it is for, special bits included.
    who: u32,
    /// For whom was said.
    is_who_given: bool,
    operator: Operator,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operator {
    Add,
    Remove,
    Set,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// Bits for everybody, special ones included; `X` apart.
    Bits { bits: u32, execute_if_some: bool },
    /// What those whose bits begin here have.
    CopyFrom { shift: u32 },
}

impl Mode {
    /// Reads octal or symbolic text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return match u32::from_str_radix(text, 8) {
                Ok(mode) if mode <= 0o7777 => {
                    Ok(Self::Octal { mode, keeps_set_id: text.len() < 5 })
                }
                _ => Err("octal permissions go from 0 to 7777".into()),
            };
        }
        let steps = text.split(',').map(clause).collect::<Result<Vec<_>, String>>()?;
        Ok(Self::Symbolic(steps.concat()))
    }

    /// The permissions that come of `mode`.
    pub fn applied_to(&self, mode: u32, kind: FileType) -> u32 {
        let is_directory = kind == FileType::Directory;
        let mode = mode & 0o7777;
        match self {
            Self::Octal { mode: octal, keeps_set_id } => {
                octal | if is_directory && *keeps_set_id { mode & SET_ID } else { 0 }
            }
            Self::Symbolic(steps) => {
                steps.iter().fold(mode, |mode, step| step.applied_to(mode, is_directory))
            }
        }
    }
}

/// Gives something new the permissions that are asked for, if any are. `usual` are those that it is made with, less the
/// umask; what was taken over from the directory stays but for the permissions.
pub fn set_on_new(
    edit: &Edit<'_>,
    id: InodeId,
    mode: Option<&Mode>,
    usual: u32,
    path: &[u8],
) -> Result<()> {
    let Some(mode) = mode else { return Ok(()) };
    let new = edit.image().inode(id, path)?;
    let mode = mode.applied_to(new.mode & SET_ID | usual & !UMASK, new.file_type());
    let attributes = SetAttributes { mode: Some(mode), ..SetAttributes::default() };
    edit.set_attributes(id, &attributes, path)
}

impl Step {
    fn applied_to(self, mode: u32, is_directory: bool) -> u32 {
        let bits = match self.what {
            What::Bits { bits, execute_if_some } => {
                let executes = execute_if_some && (is_directory || mode & 0o111 != 0);
                bits | if executes { 0o111 } else { 0 }
            }
            What::CopyFrom { shift } => (mode >> shift & 7) * 0o111,
        };
        let umask = if self.is_who_given { 0 } else { UMASK };
        let bits = bits & self.who & !umask;
        match self.operator {
            Operator::Add => mode | bits,
            Operator::Remove => mode & !bits,
            Operator::Set => {
                let kept = if is_directory { SET_ID & !bits } else { 0 };
                mode & (!self.who | kept) | bits
            }
        }
    }
}

/// One clause: for whom, and one change or several.
fn clause(text: &str) -> Result<Vec<Step>, String> {
    let wrong = || format!("'{text}' is no change of permissions such as u+x or go=r");
    let end = text.find(['+', '-', '=']).ok_or_else(wrong)?;
    let mut who = 0;
    for letter in text[..end].chars() {
        who |= match letter {
            'u' => 0o4700,
            'g' => 0o2070,
            'o' => 0o1007,
            'a' => 0o7777,
            _ => return Err(wrong()),
        };
    }
    let is_who_given = who != 0;
    if !is_who_given {
        who = 0o7777;
    }
    let mut steps = Vec::new();
    let mut rest = text[end..].chars().peekable();
    while let Some(operator) = rest.next() {
        let operator = match operator {
            '+' => Operator::Add,
            '-' => Operator::Remove,
            '=' => Operator::Set,
            _ => return Err(wrong()),
        };
        let mut letters = String::new();
        while let Some(letter) = rest.next_if(|letter| !"+-=".contains(*letter)) {
            letters.push(letter);
        }
        let what = permissions(&letters).ok_or_else(wrong)?;
        steps.push(Step { who, is_who_given, operator, what });
    }
    Ok(steps)
}

fn permissions(letters: &str) -> Option<What> {
    match letters {
        "u" => return Some(What::CopyFrom { shift: 6 }),
        "g" => return Some(What::CopyFrom { shift: 3 }),
        "o" => return Some(What::CopyFrom { shift: 0 }),
        _ => {}
    }
    let (mut bits, mut execute_if_some) = (0, false);
    for letter in letters.chars() {
        match letter {
            'r' => bits |= 0o444,
            'w' => bits |= 0o222,
            'x' => bits |= 0o111,
            'X' => execute_if_some = true,
            's' => bits |= SET_ID,
            't' => bits |= SPECIAL & !SET_ID,
            _ => return None,
        }
    }
    Some(What::Bits { bits, execute_if_some })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_applied_gives_what_coreutils_give() {
        for (text, before, kind, after) in [
            ("644", 0o4755, FileType::Regular, 0o644),
            ("755", 0o2700, FileType::Directory, 0o2755),
            ("00755", 0o2700, FileType::Directory, 0o755),
            ("u+x", 0o644, FileType::Regular, 0o744),
            ("go-w", 0o666, FileType::Regular, 0o644),
            ("+x", 0o644, FileType::Regular, 0o755),
            ("+w", 0o444, FileType::Regular, 0o644),
            ("a+w", 0o444, FileType::Regular, 0o666),
            ("u=rwX,go=rX", 0o600, FileType::Directory, 0o755),
            ("u=rwX,go=rX", 0o600, FileType::Regular, 0o644),
            ("a+X", 0o744, FileType::Regular, 0o755),
            ("g=u", 0o640, FileType::Regular, 0o660),
            ("o=g-w", 0o660, FileType::Regular, 0o664),
            ("u+s,g+s", 0o755, FileType::Regular, 0o6755),
            ("o+s", 0o755, FileType::Regular, 0o755),
            ("+t", 0o777, FileType::Directory, 0o1777),
            ("u=rx", 0o4755, FileType::Regular, 0o555),
            ("u=rx", 0o4755, FileType::Directory, 0o4555),
            ("a=", 0o755, FileType::Regular, 0),
            ("-x", 0o755, FileType::Regular, 0o644),
        ] {
            let mode = Mode::parse(text).unwrap();
            assert_eq!(mode.applied_to(before, kind), after, "{text} on {before:o}");
        }
    }

    #[test]
    fn mode_that_is_none_is_refused() {
        for text in ["", "8", "77777", "u", "u+q", "q+x", "u+x,", "ug"] {
            assert!(Mode::parse(text).is_err(), "{text}");
        }
    }
}
