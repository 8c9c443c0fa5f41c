//! `ubtrfs inspect free-space`: what the free space tree says.

use serde::Serialize;
use ubtrfs_ondisk::free_space::{FreeSpaceInfo, USING_BITMAPS};
use ubtrfs_ondisk::misc::OnDisk;
use ubtrfs_ondisk::{KeyType, LogicalAddr, RootId};

use super::tree::for_each_item;
use crate::failure::{Exit, Failure, Result};
use crate::image::{DeviceArgs, Image};
use crate::output::Output;
use crate::output::json::Array;
use crate::output::table::{Align, Table};

/// Show the free space of each block group, as the free space tree has it
///
/// Form is how it is kept: as extents, or as bitmaps where there are many. Pieces counts contiguous
/// ranges; Largest is the longest of them.
#[derive(clap::Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  ubtrfs inspect free-space disk.img"
)]
pub struct Args {
    #[command(flatten)]
    image: DeviceArgs,
    /// Print JSON: an array with one object a block group
    #[arg(long)]
    json: bool,
}

/// The free space of one block group.
#[derive(Serialize)]
struct Group {
    start: u64,
    length: u64,
    #[serde(rename = "type")]
    ty: &'static str,
    profile: &'static str,
    form: &'static str,
    free: u64,
    pieces: u64,
    largest: u64,
    /// The range that what comes next may go on.
    #[serde(skip)]
    last: (u64, u64),
}

impl Group {
    fn add(&mut self, start: u64, len_bytes: u64) {
        self.free = self.free.saturating_add(len_bytes);
        let (last_start, last_len) = self.last;
        let goes_on = self.pieces > 0 && last_start.checked_add(last_len) == Some(start);
        self.last = if goes_on {
            (last_start, last_len.saturating_add(len_bytes))
        } else {
            self.pieces += 1;
            (start, len_bytes)
        };
        self.largest = self.largest.max(self.last.1);
    }

    /// Each bit stands for a sector; set ones are free.
    fn add_bitmap(&mut self, start: u64, bits: &[u8], sectorsize_bytes: u64) {
        for (index, byte) in (0_u64..).zip(bits) {
            for bit in (0..8).filter(|bit| byte >> bit & 1 != 0) {
                let sector = index * 8 + bit;
                self.add(start.saturating_add(sector * sectorsize_bytes), sectorsize_bytes);
            }
        }
    }
}

/// Shows.
pub fn run(args: &Args, out: &mut Output) -> Result<Exit> {
    let image = args.image.read()?;
    let groups = groups(&image, out)?;
    if args.json {
        let mut array = Array::begin(out)?;
        groups.iter().try_for_each(|group| array.element(out, group))?;
        array.end(out)?;
        return Ok(Exit::Done);
    }
    let (left, right) = (Align::Left, Align::Right);
    let mut table = Table::new(&[right, right, left, left, left, right, right, right], "  ");
    table.row(["Group", "Length", "Type", "Profile", "Form", "Free", "Pieces", "Largest"]);
    for group in &groups {
        table.row([
            group.start.to_string(),
            group.length.to_string(),
            group.ty.to_owned(),
            group.profile.to_owned(),
            group.form.to_owned(),
            group.free.to_string(),
            group.pieces.to_string(),
            group.largest.to_string(),
        ]);
    }
    table.lines().try_for_each(|line| out.line(&line))?;
    Ok(Exit::Done)
}

fn groups(image: &Image, out: &mut Output) -> Result<Vec<Group>> {
    let volume = image.filesystem().volume();
    let sectorsize_bytes = image.sectorsize_bytes();
    let mut groups: Vec<Group> = Vec::new();
    let is_there = for_each_item(image, RootId::FREE_SPACE_TREE, out, |key, data| {
        match key.ty {
            KeyType::FREE_SPACE_INFO => {
                let info = FreeSpaceInfo::peek(data).map_err(|error| {
                    Failure::engine("reading", error.into()).at_path(image.path())
                })?;
                let chunk = volume.chunk_at(LogicalAddr(key.objectid.0));
                let flags = chunk.map(|chunk| chunk.flags).unwrap_or_default();
                let has_bitmaps = info.flags.get() & USING_BITMAPS != 0;
                groups.push(Group {
                    start: key.objectid.0,
                    length: key.offset,
                    ty: flags.type_name(),
                    profile: flags.profile_name().unwrap_or("unknown"),
                    form: if has_bitmaps { "bitmaps" } else { "extents" },
                    free: 0,
                    pieces: 0,
                    largest: 0,
                    last: (0, 0),
                });
            }
            KeyType::FREE_SPACE_EXTENT => {
                if let Some(group) = groups.last_mut() {
                    group.add(key.objectid.0, key.offset);
                }
            }
            KeyType::FREE_SPACE_BITMAP => {
                if let Some(group) = groups.last_mut() {
                    group.add_bitmap(key.objectid.0, data, sectorsize_bytes);
                }
            }
            _ => {}
        }
        Ok(())
    })?;
    if is_there {
        return Ok(groups);
    }
    Err(Failure::new(Exit::Unsupported, "reading free space", "there is no free space tree")
        .at_path(image.path())
        .advice("`ubtrfs filesystem usage` shows how full it is."))
}
