//! `ubtrfs ls`: the contents of directories, as coreutils list them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use clap::ArgAction;
use serde::Serialize;
use ubtrfs_engine::{Inode, InodeId};
use ubtrfs_ondisk::dir::FileType;

use crate::facts::{self, JsonFacts, JsonPath};
use crate::failure::{Exit, Result};
use crate::image::{Image, ImageArgs};
use crate::output::json::{self, Array};
use crate::output::owner::Owners;
use crate::output::table::{Align, Table};
use crate::output::time::Calendar;
use crate::output::{Output, mode};
use crate::size;
use crate::walk::{self, Visit, Walk};

/// List files and directories in an image
///
/// As `ls` of a mounted filesystem: a directory's contents, sorted by name, one a line; a file
/// itself. Names that begin with a dot are shown with -a or -A.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    disable_help_flag = true,
    after_help = "\
Examples:
  ubtrfs ls disk.img                   the root directory
  ubtrfs ls -l disk.img /etc /home     with types, permissions, owners, sizes and times
  ubtrfs ls -lR disk.img /etc          and all directories below
  ubtrfs ls -R --json disk.img / | jq -r '.[] | select(.size > 1000000) | .path'"
)]
pub struct Args {
    #[command(flatten)]
    image: ImageArgs,
    /// Files or directories inside it
    #[arg(value_name = "PATH", default_value = "/")]
    paths: Vec<OsString>,
    /// Long: type, permissions, links, owner, group, size, time, name
    #[arg(short)]
    long: bool,
    /// List directories below, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Show names that begin with a dot, `.` and `..` included
    #[arg(short, long)]
    all: bool,
    /// Show names that begin with a dot, without `.` and `..`
    #[arg(short = 'A', long)]
    almost_all: bool,
    /// List directories themselves, not their contents
    #[arg(short, long)]
    directory: bool,
    /// Print sizes such as 1.5K, 234M, 2G
    #[arg(short, long)]
    human_readable: bool,
    /// Print numbers of users and groups in place of the names they have on this machine
    #[arg(short, long)]
    numeric_uid_gid: bool,
    /// Print inode numbers
    #[arg(short, long)]
    inode: bool,
    /// Print JSON: an array with one object a file
    #[arg(long)]
    json: bool,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// Lists.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let json = args.json.then(|| Array::begin(out)).transpose()?;
    let owners = if args.numeric_uid_gid { Owners::numeric() } else { Owners::system() };
    let mut listing =
        Listing { args, image: &image, owners, calendar: Calendar::system(), json, printed: false };
    listing.all(out)?;
    if let Some(array) = listing.json {
        array.end(out)?;
    }
    Ok(Exit::Done)
}

struct Listing<'a> {
    args: &'a Args,
    image: &'a Image,
    owners: Owners,
    calendar: Calendar,
    json: Option<Array>,
    /// Something was printed: an empty line separates what follows.
    printed: bool,
}

/// A line: a name and what is known of it.
struct Line {
    id: InodeId,
    name: Vec<u8>,
    path: Vec<u8>,
    /// Where they are shown: a plain list of names reads no inodes.
    inode: Option<Inode>,
    target: Option<Vec<u8>>,
    has_acl: bool,
}

/// What stands above lines.
#[derive(Clone, Copy)]
enum Heading<'a> {
    /// Files that were named: nothing.
    Files,
    /// The one directory that was named.
    OnlyDirectory,
    /// A directory of several.
    Directory(&'a [u8]),
}

impl Listing<'_> {
    fn all(&mut self, out: &mut Output) -> Result<()> {
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        for path in &self.args.paths {
            match self.named(path) {
                Ok((line, true)) if !self.args.directory => directories.push(line),
                Ok((line, _)) => files.push(line),
                Err(failure) => out.tolerate(Err(failure))?,
            }
        }
        if !files.is_empty() {
            self.print(&files, Heading::Files, out)?;
        }
        for directory in directories {
            let mut walk = Walk::new(directory.id, directory.path);
            while let Some(visit) = walk.next() {
                let result = self.directory(&visit, &mut walk, out);
                out.tolerate(result)?;
            }
        }
        Ok(())
    }

    fn named(&self, path: &OsStr) -> Result<(Line, bool)> {
        let path = path.as_bytes();
        let mut id = self.image.resolve(path)?;
        let mut inode = self.image.inode(id, path)?;
        // As in coreutils: what a link that is named leads to is listed, where links are not shown.
        let shows_links = self.args.long || self.args.json || self.args.directory;
        if inode.file_type() == FileType::Symlink
            && !shows_links
            && let Ok(target) = self.image.resolve_following(path)
        {
            let target_inode = self.image.inode(target, path)?;
            if target_inode.is_dir() {
                (id, inode) = (target, target_inode);
            }
        }
        let is_directory = inode.is_dir();
        Ok((self.line(id, path.to_vec(), path.to_vec())?, is_directory))
    }

    fn directory(&mut self, visit: &Visit, walk: &mut Walk, out: &mut Output) -> Result<()> {
        let mut children = walk::children(self.image, visit.id, &visit.path)?;
        if !self.args.all && !self.args.almost_all {
            children.retain(|child| !child.name.starts_with(b"."));
        }
        let mut lines = Vec::with_capacity(children.len());
        if self.args.all {
            let parent = self.image.parent(visit.id, &visit.path)?;
            for (name, id) in [(&b"."[..], visit.id), (b"..", parent)] {
                lines.push(self.line(id, name.to_vec(), walk::join(&visit.path, name))?);
            }
        }
        for child in &children {
            match self.line(child.id, child.name.clone(), walk::join(&visit.path, &child.name)) {
                Ok(line) => lines.push(line),
                Err(failure) => out.tolerate(Err(failure))?,
            }
        }
        let several = self.args.recursive || self.args.paths.len() > 1;
        let heading =
            if several { Heading::Directory(&visit.path) } else { Heading::OnlyDirectory };
        self.print(&lines, heading, out)?;
        if self.args.recursive { walk.enter(visit, &children) } else { Ok(()) }
    }

    fn line(&self, id: InodeId, name: Vec<u8>, path: Vec<u8>) -> Result<Line> {
        let mut line = Line { id, name, path, inode: None, target: None, has_acl: false };
        if self.args.long || self.args.json {
            let inode = self.image.inode(id, &line.path)?;
            if inode.file_type() == FileType::Symlink {
                line.target = Some(self.image.read_link(id, &line.path)?);
            }
            line.has_acl = !self.args.json && self.image.has_acl(id, &line.path)?;
            line.inode = Some(inode);
        }
        Ok(line)
    }

    fn print(&mut self, lines: &[Line], heading: Heading<'_>, out: &mut Output) -> Result<()> {
        if let Some(array) = &mut self.json {
            let sectorsize_bytes = self.image.sectorsize_bytes();
            return lines
                .iter()
                .try_for_each(|line| array.element(out, &JsonLine::new(line, sectorsize_bytes)));
        }
        if let Heading::Directory(path) = heading {
            if self.printed {
                out.text("\n")?;
            }
            out.name(path)?;
            out.text(":\n")?;
        }
        self.printed = true;
        if self.args.long && !matches!(heading, Heading::Files) {
            let sectorsize_bytes = self.image.sectorsize_bytes();
            let bytes = inodes_of(lines)
                .map(|inode| facts::allocated_bytes(inode, sectorsize_bytes))
                .fold(0, u64::saturating_add);
            let human = self.args.human_readable;
            let total = if human { size::human(bytes) } else { (bytes / 1024).to_string() };
            out.line(&format!("total {total}"))?;
        }
        self.rows(lines, out)
    }

    fn rows(&self, lines: &[Line], out: &mut Output) -> Result<()> {
        let mut columns = Vec::new();
        if self.args.inode {
            columns.push(Align::Right);
        }
        if self.args.long {
            columns.extend([Align::Left, Align::Right, Align::Left, Align::Left, Align::Right]);
            columns.push(Align::Left);
        }
        let widths = Widths::of(lines, &self.owners);
        let mut table = Table::new(&columns, " ");
        for line in lines {
            table.row(self.cells(line, &widths));
        }
        for (line, before_name) in lines.iter().zip(table.lines()) {
            if !before_name.is_empty() {
                out.text(&before_name)?;
                out.text(" ")?;
            }
            out.name(&line.name)?;
            if let Some(target) = &line.target {
                out.text(" -> ")?;
                out.name(target)?;
            }
            out.text("\n")?;
        }
        Ok(())
    }

    /// What stands before the name.
    fn cells(&self, line: &Line, widths: &Widths) -> Vec<String> {
        let mut cells = Vec::new();
        if self.args.inode {
            cells.push(line.id.inode.to_string());
        }
        if let Some(inode) = &line.inode {
            let plus = if line.has_acl { "+" } else { "" };
            cells.push(format!("{}{plus}", mode::letters(inode.mode)));
            cells.push(inode.nlink.to_string());
            cells.push(name_or_number(self.owners.user(inode.uid), inode.uid, widths.user));
            cells.push(name_or_number(self.owners.group(inode.gid), inode.gid, widths.group));
            cells.push(if mode::is_device(inode.file_type()) {
                let (major, minor) = inode.device();
                format!("{major}, {minor:>width$}", width = widths.minor)
            } else if self.args.human_readable {
                size::human(inode.size_bytes)
            } else {
                inode.size_bytes.to_string()
            });
            cells.push(self.calendar.short(inode.mtime));
        }
        cells
    }
}

/// Columns in which not all cells lean the same way.
struct Widths {
    user: usize,
    group: usize,
    /// Of the minor numbers of device nodes.
    minor: usize,
}

impl Widths {
    fn of(lines: &[Line], owners: &Owners) -> Self {
        let digits = |number: u64| number.to_string().len();
        let mut widths = Self { user: 0, group: 0, minor: 0 };
        for inode in inodes_of(lines) {
            let width = |name: Option<&str>, number: u32| {
                name.map_or_else(|| digits(number.into()), |name| name.chars().count())
            };
            widths.user = widths.user.max(width(owners.user(inode.uid), inode.uid));
            widths.group = widths.group.max(width(owners.group(inode.gid), inode.gid));
            if mode::is_device(inode.file_type()) {
                widths.minor = widths.minor.max(digits(inode.device().1.into()));
            }
        }
        widths
    }
}

/// Names lean left, numbers right.
fn name_or_number(name: Option<&str>, number: u32, width: usize) -> String {
    name.map_or_else(|| format!("{number:>width$}"), str::to_owned)
}

fn inodes_of(lines: &[Line]) -> impl Iterator<Item = &Inode> {
    lines.iter().filter_map(|line| line.inode.as_ref())
}

#[derive(Serialize)]
struct JsonLine {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    #[serde(flatten)]
    path: JsonPath,
    #[serde(flatten)]
    facts: Option<JsonFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
}

impl JsonLine {
    fn new(line: &Line, sectorsize_bytes: u64) -> Self {
        Self {
            name: json::text(&line.name),
            name_hex: json::hex_if_lossy(&line.name),
            path: JsonPath::new(&line.path),
            facts: line.inode.as_ref().map(|inode| JsonFacts::new(inode, sectorsize_bytes)),
            target: line.target.as_deref().map(json::text),
            target_hex: line.target.as_deref().and_then(json::hex_if_lossy),
        }
    }
}
