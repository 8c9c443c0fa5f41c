//! Walking a file with data in every other block by SEEK_DATA and SEEK_HOLE, copying it sparsely to nothing, and FIEMAP of it.

use std::ops::Range;

use super::data::{Data, with_file};
use super::{Args, Outcome, Phase, Timing, require, timed};
use crate::error::{Error, Result};

const BLOCK: u64 = 4096;
/// What a copy reads at once.
const COPY_BYTES: usize = 128 << 10;
/// A part is looked at in the middle of each tenth of the file.
const PARTS: u64 = 10;
/// Extents that are found there.
const PART_EXTENTS: u64 = 10;

/// What is counted of FIEMAP.
const NO_PLACE: &str = "extents without a place";

/// How much of the file is walked and copied as long as it is delalloc.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    All,
    /// Where a walk of all would take hours, or longer than the kernel keeps it so.
    Parts,
}

/// With [`Phase::Make`], makes the file of `count` extents, and looks at it in its two states; with [`Phase::Walk`] walks and
/// copies parts of it only, in the first one; else looks at it in one way, right after it was opened.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    match args.phase {
        Phase::Make => with_file(args, true, |file| make(args, file, Share::All)),
        Phase::Walk => with_file(args, true, |file| make(args, file, Share::Parts)),
        Phase::Places => with_file(args, true, |file| places(args.count, file)),
        phase => with_file(args, false, |file| {
            let mut outcome = Outcome::default();
            look(file, args.count, phase, ("reopened", Share::All), &mut outcome)?;
            Ok(outcome)
        }),
    }
}

/// Writes the extents.
fn fill(args: &Args, file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let block = [7; 4096];
    let (written, ()) =
        timed(|| (0..args.count).try_for_each(|extent| file.write(extent * 2 * BLOCK, &block)))?;
    outcome.timings.push(Timing::new("write", args.count, written));
    outcome.note_counts("write", file.counts());
    Ok(outcome)
}

fn make(args: &Args, file: &mut dyn Data, share: Share) -> Result<Outcome> {
    let mut outcome = fill(args, file)?;
    // FIEMAP first, as it tells what the others find: who has written back by then walks another file.
    for phase in [Phase::Fiemap, Phase::Seek, Phase::Copy] {
        look(file, args.count, phase, ("delalloc", share), &mut outcome)?;
    }
    if outcome.count("fiemap, delalloc", NO_PLACE) == Some(args.count) {
        // Of the first ones, as it may take long to ask for all.
        let told = file.fiemap(0)?;
        let written_back = told.starts.len() as u64 - told.delalloc;
        outcome.note_count("copy, delalloc: written back meanwhile", written_back);
        file.counts();
    }
    let (synced, ()) = timed(|| file.fsync())?;
    outcome.timings.push(Timing::new("fsync", 1, synced));
    outcome.note_counts("fsync", file.counts());
    for phase in [Phase::Seek, Phase::Copy, Phase::Fiemap] {
        look(file, args.count, phase, ("synced", Share::All), &mut outcome)?;
    }
    Ok(outcome)
}

/// Makes the file, and asks at the places that a walk would ask at. Where a filesystem does not tell its holes a walk
/// would end at once, while this takes as many seeks everywhere; it counts those that were answered rightly.
fn places(extents: u64, file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let block = [7; 4096];
    (0..extents).try_for_each(|extent| file.write(extent * 2 * BLOCK, &block))?;
    file.fsync()?;
    let mut told = 0;
    let (spent, ()) = timed(|| {
        for extent in 0..extents {
            let start = extent * 2 * BLOCK;
            // From the hole before it.
            let data = file.seek_data(start.saturating_sub(BLOCK))?;
            let hole = file.seek_hole(start)?;
            told += u64::from(data == Some(start)) + u64::from(hole == start + BLOCK);
        }
        Ok(())
    })?;
    outcome.timings.push(Timing::new("seek", 2 * extents, spent));
    outcome.note_count("seek: told", told);
    Ok(outcome)
}

fn look(
    file: &mut dyn Data,
    extents: u64,
    phase: Phase,
    (state, share): (&str, Share),
    outcome: &mut Outcome,
) -> Result<()> {
    if phase == Phase::Fiemap && !file.tells_extents() {
        return Ok(());
    }
    let what = format!("{}, {state}", phase.name());
    let mut no_place = None;
    let (spent, count) = match (phase, share) {
        (Phase::Seek, Share::All) => timed(|| walk(file, extents))?,
        (Phase::Seek, Share::Parts) => timed(|| walk_parts(file, extents))?,
        (Phase::Copy, Share::All) => timed(|| copy(file, extents))?,
        (Phase::Copy, Share::Parts) => timed(|| copy_parts(file, extents))?,
        (Phase::Fiemap, _) => {
            let (spent, delalloc) = timed(|| fiemap(file, extents))?;
            no_place = Some(delalloc);
            (spent, extents)
        }
        _ => {
            return Err(Error::Input { what: "no such phase of seek".to_owned() });
        }
    };
    outcome.timings.push(Timing::new(&what, count, spent));
    outcome.note_counts(&what, file.counts());
    if let Some(no_place) = no_place {
        outcome.note_count(&format!("{what}: {NO_PLACE}"), no_place);
    }
    Ok(())
}

/// Returns how many seeks it took.
fn walk(file: &dyn Data, extents: u64) -> Result<u64> {
    let (mut found, mut at, mut seeks) = (0, 0, 1);
    while let Some(start) = file.seek_data(at)? {
        at = file.seek_hole(start)?;
        require((start, at) == (found * 2 * BLOCK, (found * 2 + 1) * BLOCK))?;
        found += 1;
        seeks += 2;
    }
    require(found == extents)?;
    Ok(seeks)
}

/// The extents that parts are made of: some in the middle of each tenth of the file, so that what depends on the place is
/// that of all of it on average.
fn parts(extents: u64) -> impl Iterator<Item = Range<u64>> {
    let count = PARTS.min(extents);
    (0..count).map(move |part| {
        let middle = extents * (2 * part + 1) / (2 * count);
        let first = middle.saturating_sub(PART_EXTENTS / 2);
        first..extents.min(first + PART_EXTENTS)
    })
}

/// Returns how many seeks it took.
fn walk_parts(file: &dyn Data, extents: u64) -> Result<u64> {
    let mut seeks = 0;
    for part in parts(extents) {
        let mut at = part.start * 2 * BLOCK;
        for extent in part {
            require(file.seek_data(at)? == Some(extent * 2 * BLOCK))?;
            at = file.seek_hole(extent * 2 * BLOCK)?;
            seeks += 2;
        }
    }
    Ok(seeks)
}

/// Returns how many extents it read.
fn copy(file: &dyn Data, extents: u64) -> Result<u64> {
    let mut buffer = vec![0; COPY_BYTES];
    let (mut bytes, mut at) = (0, 0);
    while let Some((copied, end)) = copy_next(file, at, &mut buffer)? {
        bytes += copied;
        at = end;
    }
    require(bytes == extents * BLOCK)?;
    Ok(extents)
}

/// Returns how many extents it read.
fn copy_parts(file: &dyn Data, extents: u64) -> Result<u64> {
    let mut buffer = vec![0; COPY_BYTES];
    let mut count = 0;
    for part in parts(extents) {
        let mut at = part.start * 2 * BLOCK;
        for extent in part {
            let copied = copy_next(file, at, &mut buffer)?;
            at = (extent * 2 + 1) * BLOCK;
            require(copied == Some((BLOCK, at)))?;
            count += 1;
        }
    }
    Ok(count)
}

/// Copies the data that is next from `at` on. Returns how many bytes, and where they end.
fn copy_next(file: &dyn Data, at: u64, buffer: &mut [u8]) -> Result<Option<(u64, u64)>> {
    let Some(start) = file.seek_data(at)? else { return Ok(None) };
    let end = file.seek_hole(start)?;
    let mut at = start;
    while at < end {
        let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let count = file.read(at, &mut buffer[..len])?;
        require(count == len && buffer[0] == 7 && buffer[len - 1] == 7)?;
        at += count as u64;
    }
    Ok(Some((end - start, end)))
}

/// Returns how many extents have no place yet.
fn fiemap(file: &dyn Data, extents: u64) -> Result<u64> {
    let (mut found, mut delalloc, mut at) = (0, 0, Some(0));
    while let Some(from) = at {
        let told = file.fiemap(from)?;
        for start in told.starts {
            require(start == found * 2 * BLOCK)?;
            found += 1;
        }
        delalloc += told.delalloc;
        at = told.next;
    }
    require(found == extents)?;
    Ok(delalloc)
}
