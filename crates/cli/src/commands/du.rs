//! `ubtrfs du`: how much directories hold.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::ArgAction;
use serde::Serialize;
use ubtrfs_engine::InodeId;

use crate::facts::{self, JsonPath};
use crate::failure::{Exit, Result};
use crate::image::{Image, ImageArgs};
use crate::output::Output;
use crate::output::json::Array;
use crate::size;
use crate::walk::{self, Visit, Walk};

/// Sum up how much directories in an image hold
///
/// As `du` of a mounted filesystem: KiB that files have allocated, before compression, for each
/// directory with all below it. A file with several names counts once.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs du -sh disk.img /home
  ubtrfs du disk.img /var | sort -n | tail    the largest directories last"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Files or directories inside it
    #[arg(value_name = "PATH", default_value = "/")]
    paths: Vec<OsString>,
    /// Print a sum for each PATH only
    #[arg(short, long, conflicts_with = "all")]
    summarize: bool,
    /// Print files, too, not only directories
    #[arg(short, long)]
    all: bool,
    /// Print sizes such as 1.5K, 234M, 2G
    #[arg(short, long)]
    human_readable: bool,
    /// Print JSON: an array with path and bytes of each
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Sums up.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let json = args.json.then(|| Array::begin(out)).transpose()?;
    let mut sums = Sums { args, image: &image, counted: HashSet::new(), json };
    for path in &args.paths {
        let result = sums.path(path.as_bytes(), out);
        out.tolerate(result)?;
    }
    if let Some(array) = sums.json {
        array.end(out)?;
    }
    Ok(Exit::Done)
}

struct Sums<'a> {
    args: &'a Args,
    image: &'a Image,
    /// Files with several names that were counted.
    counted: HashSet<InodeId>,
    json: Option<Array>,
}

#[derive(Serialize)]
struct JsonSum {
    #[serde(flatten)]
    path: JsonPath,
    bytes: u64,
}

impl Sums<'_> {
    fn path(&mut self, path: &[u8], out: &mut Output) -> Result<()> {
        let id = self.image.resolve(path)?;
        let inode = self.image.inode(id, path)?;
        if !inode.is_dir() {
            let bytes = facts::allocated_bytes(&inode, self.image.sectorsize_bytes());
            return self.print(path, bytes, out);
        }
        let mut walk = Walk::new(id, path.to_vec());
        let mut open: Vec<(Visit, u64)> = Vec::new();
        while let Some(visit) = walk.next() {
            self.close(&mut open, visit.depth, out)?;
            let result = self.directory(&visit, &mut walk, out);
            let bytes = match result {
                Ok(bytes) => bytes,
                Err(failure) => {
                    out.tolerate(Err(failure))?;
                    0
                }
            };
            open.push((visit, bytes));
        }
        self.close(&mut open, 0, out)
    }

    /// Ends the directories that are at `depth` or deeper.
    fn close(
        &mut self,
        open: &mut Vec<(Visit, u64)>,
        depth: usize,
        out: &mut Output,
    ) -> Result<()> {
        while open.len() > depth {
            let Some((visit, bytes)) = open.pop() else { break };
            if let Some((_, above)) = open.last_mut() {
                *above = above.saturating_add(bytes);
            }
            if !self.args.summarize || open.is_empty() {
                self.print(&visit.path, bytes, out)?;
            }
        }
        Ok(())
    }

    /// What a directory holds itself; those below it are added to the walk.
    fn directory(&mut self, visit: &Visit, walk: &mut Walk, out: &mut Output) -> Result<u64> {
        let sectorsize_bytes = self.image.sectorsize_bytes();
        let children = walk::children(self.image, visit.id, &visit.path)?;
        let inode = self.image.inode(visit.id, &visit.path)?;
        let mut sum = facts::allocated_bytes(&inode, sectorsize_bytes);
        for child in children.iter().filter(|child| !child.is_directory) {
            let path = walk::join(&visit.path, &child.name);
            let inode = match self.image.inode(child.id, &path) {
                Ok(inode) => inode,
                Err(failure) => {
                    out.tolerate(Err(failure))?;
                    continue;
                }
            };
            if inode.nlink > 1 && !self.counted.insert(child.id) {
                continue;
            }
            let bytes = facts::allocated_bytes(&inode, sectorsize_bytes);
            sum = sum.saturating_add(bytes);
            if self.args.all {
                self.print(&path, bytes, out)?;
            }
        }
        walk.enter(visit, &children)?;
        Ok(sum)
    }

    fn print(&mut self, path: &[u8], bytes: u64, out: &mut Output) -> Result<()> {
        if let Some(array) = &mut self.json {
            return array.element(out, &JsonSum { path: JsonPath::new(path), bytes });
        }
        let text = if self.args.human_readable {
            size::human(bytes)
        } else {
            bytes.div_ceil(1024).to_string()
        };
        out.text(&text)?;
        out.text("\t")?;
        out.name(path)?;
        out.text("\n")
    }
}
