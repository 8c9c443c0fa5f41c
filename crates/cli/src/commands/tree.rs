//! `ubtrfs tree`: directories drawn as a tree.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::vec;

use serde::Serialize;
use ubtrfs_engine::InodeId;

use crate::failure::{Exit, Failure, Result};
use crate::image::{Image, ImageArgs};
use crate::output::{Output, json, mode};
use crate::walk::{self, Child};

/// Draw the directories of an image as a tree
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ubtrfs tree disk.img
  ubtrfs tree -L 2 disk.img /usr      two levels deep
  ubtrfs tree --json disk.img /etc    nested objects, directories with their contents")]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Directories inside it
    #[arg(value_name = "PATH", default_value = "/")]
    paths: Vec<OsString>,
    /// Show names that begin with a dot, too
    #[arg(short, long)]
    all: bool,
    /// Show directories only
    #[arg(short, long)]
    directories: bool,
    /// Go at most N directories deep
    #[arg(short = 'L', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    level: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Draws.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let mut drawing = Drawing { args, image: &image, trees: 0, directories: 0, files: 0 };
    if args.json {
        out.text("[")?;
    }
    for path in &args.paths {
        let result = drawing.whole(path.as_bytes(), out);
        out.tolerate(result)?;
    }
    if args.json {
        out.text("\n]\n")?;
    } else {
        let count = |number: u64, one: &str, many: &str| {
            format!("{number} {}", if number == 1 { one } else { many })
        };
        let mut line = count(drawing.directories, "directory", "directories");
        if !args.directories {
            line.push_str(", ");
            line.push_str(&count(drawing.files, "file", "files"));
        }
        out.line(&format!("\n{line}"))?;
    }
    Ok(Exit::Done)
}

struct Drawing<'a> {
    args: &'a Args,
    image: &'a Image,
    trees: u64,
    directories: u64,
    files: u64,
}

/// A directory that is being drawn.
struct Frame {
    id: InodeId,
    path: Vec<u8>,
    /// What is still to be drawn of it.
    children: vec::IntoIter<Child>,
    /// Whether more follows in the directory above.
    is_last: bool,
    /// Nothing was drawn of it yet.
    is_fresh: bool,
}

impl Frame {
    fn new(id: InodeId, path: Vec<u8>, children: Vec<Child>, is_last: bool) -> Self {
        Self { id, path, children: children.into_iter(), is_last, is_fresh: true }
    }
}

#[derive(Serialize)]
struct JsonName<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    inode: u64,
    subvolume: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
}

impl Drawing<'_> {
    fn whole(&mut self, path: &[u8], out: &mut Output) -> Result<()> {
        let id = self.image.resolve(path)?;
        let children = self.children(id, path)?;
        if self.args.json {
            let object = opened(self.json_object(id, path, path, None)?);
            out.text(if self.trees == 0 { "\n" } else { ",\n" })?;
            out.text(&object)?;
        } else {
            out.name(path)?;
            out.text("\n")?;
        }
        self.trees += 1;
        let mut frames = vec![Frame::new(id, path.to_vec(), children, true)];
        while let Some(frame) = frames.last_mut() {
            let Some(child) = frame.children.next() else {
                let is_empty = frame.is_fresh;
                frames.pop();
                if self.args.json {
                    out.text(if is_empty { "]}" } else { "\n]}" })?;
                }
                continue;
            };
            let path = walk::join(&frame.path, &child.name);
            match self.child(&mut frames, child, path, out) {
                Ok(below) => frames.extend(below),
                Err(failure) => out.tolerate(Err(failure))?,
            }
        }
        Ok(())
    }

    /// Draws a child of the innermost frame; of a directory, returns the frame for what is in it.
    /// Whatever can fail comes before the first byte of output, so that JSON stays whole.
    fn child(
        &mut self,
        frames: &mut [Frame],
        child: Child,
        path: Vec<u8>,
        out: &mut Output,
    ) -> Result<Option<Frame>> {
        let target = child.is_symlink.then(|| self.image.read_link(child.id, &path)).transpose()?;
        let object = if self.args.json {
            let object = self.json_object(child.id, &child.name, &path, target.as_deref())?;
            Some(if child.is_directory { opened(object) } else { object })
        } else {
            None
        };
        let frame = frames.last_mut().expect("the walk stands in a directory");
        let is_last = frame.children.len() == 0;
        let is_fresh = std::mem::take(&mut frame.is_fresh);
        match object {
            Some(object) => {
                out.text(if is_fresh { "\n" } else { ",\n" })?;
                out.text(&object)?;
            }
            None => self.draw(frames, &child, is_last, target.as_deref(), out)?,
        }
        if !child.is_directory {
            self.files += 1;
            return Ok(None);
        }
        self.directories += 1;
        let grandchildren = match self.enter(frames, &child, &path) {
            Ok(children) => children,
            Err(failure) => {
                out.tolerate(Err(failure))?;
                Vec::new()
            }
        };
        Ok(Some(Frame::new(child.id, path, grandchildren, is_last)))
    }

    /// What is in a directory below; nothing where it is too deep to be shown.
    fn enter(&self, frames: &[Frame], child: &Child, path: &[u8]) -> Result<Vec<Child>> {
        if frames.iter().any(|frame| frame.id == child.id) {
            return Err(Failure::new(
                Exit::Damage,
                "reading a directory",
                "the directory lies inside itself",
            )
            .at_name(path)
            .at_path(self.image.path()));
        }
        let level = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        let too_deep = self.args.level.is_some_and(|max| level >= max);
        if too_deep || frames.len() > walk::DEPTH_MAX {
            return Ok(Vec::new());
        }
        self.children(child.id, path)
    }

    fn children(&self, id: InodeId, path: &[u8]) -> Result<Vec<Child>> {
        let mut children = walk::children(self.image, id, path)?;
        children.retain(|child| {
            (self.args.all || !child.name.starts_with(b"."))
                && (child.is_directory || !self.args.directories)
        });
        Ok(children)
    }

    fn draw(
        &self,
        frames: &[Frame],
        child: &Child,
        is_last: bool,
        target: Option<&[u8]>,
        out: &mut Output,
    ) -> Result<()> {
        for frame in frames.iter().skip(1) {
            out.text(if frame.is_last { "    " } else { "│   " })?;
        }
        out.text(if is_last { "└── " } else { "├── " })?;
        out.name(&child.name)?;
        if let Some(target) = target {
            out.text(" -> ")?;
            out.name(target)?;
        }
        out.text("\n")
    }

    /// A file's object, or a directory's up to its contents.
    fn json_object(
        &self,
        id: InodeId,
        name: &[u8],
        path: &[u8],
        target: Option<&[u8]>,
    ) -> Result<String> {
        let inode = self.image.inode(id, path)?;
        let target_text = target.map(json::text);
        let value = JsonName {
            kind: mode::kind(inode.file_type()),
            name: json::text(name),
            name_hex: json::hex_if_lossy(name),
            inode: id.inode.0,
            subvolume: id.root.0,
            target: target_text.as_deref(),
            target_hex: target.and_then(json::hex_if_lossy),
        };
        json::compact(&value)
    }
}

/// A directory's object, up to where its contents follow.
fn opened(mut object: String) -> String {
    if object.ends_with('}') {
        object.pop();
    }
    object.push_str(",\"contents\":[");
    object
}
