//! Walking a file with data in every other block by SEEK_DATA and SEEK_HOLE, copying it sparsely to nothing, and FIEMAP of it.

use super::data::{Data, with_file};
use super::{Args, Outcome, Phase, Timing, require, timed};
use crate::error::{Error, Result};

const BLOCK: u64 = 4096;
/// What a copy reads at once.
const COPY_BYTES: usize = 128 << 10;
/// Where a walk of a part begins: at each tenth of the file.
const PARTS: u64 = 10;
/// Extents that it finds there.
const PART_EXTENTS: u64 = 10;

/// With [`Phase::Make`], makes the file of `count` extents, and looks at it in its two states; with [`Phase::Walk`] walks
/// parts of it only, in the first one; else looks at it in one way, right after it was opened.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    match args.phase {
        Phase::Make => with_file(args, true, |file| make(args, file)),
        Phase::Walk => with_file(args, true, |file| {
            let mut outcome = fill(args, file)?;
            let (spent, count) = timed(|| walk_parts(file, args.count))?;
            outcome.timings.push(Timing::new("seek, delalloc", count, spent));
            outcome.note_counts("seek, delalloc", file.counts());
            Ok(outcome)
        }),
        Phase::Places => with_file(args, true, |file| places(args.count, file)),
        phase => with_file(args, false, |file| {
            let mut outcome = Outcome::default();
            look(file, args.count, phase, "reopened", &mut outcome)?;
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

fn make(args: &Args, file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = fill(args, file)?;
    // What the walk "with delalloc" finds: who has written back by then walks another file.
    if file.tells_extents() {
        outcome.note_count("seek, delalloc: extents without a place", told_delalloc(file)?);
    }
    file.counts();
    for state in ["delalloc", "synced"] {
        if state == "synced" {
            let (synced, ()) = timed(|| file.fsync())?;
            outcome.timings.push(Timing::new("fsync", 1, synced));
            outcome.note_counts("fsync", file.counts());
        }
        for phase in [Phase::Seek, Phase::Copy, Phase::Fiemap] {
            look(file, args.count, phase, state, &mut outcome)?;
        }
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
    state: &str,
    outcome: &mut Outcome,
) -> Result<()> {
    if phase == Phase::Fiemap && !file.tells_extents() {
        return Ok(());
    }
    let what = format!("{}, {state}", phase.name());
    let (spent, count) = match phase {
        Phase::Seek => timed(|| walk(file, extents))?,
        Phase::Copy => timed(|| copy(file, extents))?,
        Phase::Fiemap => timed(|| fiemap(file, extents))?,
        _ => {
            return Err(Error::Input { what: "no such phase of seek".to_owned() });
        }
    };
    outcome.timings.push(Timing::new(&what, count, spent));
    outcome.note_counts(&what, file.counts());
    Ok(())
}

/// Returns how many seeks it took.
fn walk(file: &dyn Data, extents: u64) -> Result<u64> {
    let (mut found, mut at, mut seeks) = (0, 0, 1);
    while let Some(start) = file.seek_data(at)? {
        at = file.seek_hole(start)?;
        found += 1;
        seeks += 2;
    }
    require(found == extents)?;
    Ok(seeks)
}

/// Some seeks at each tenth of the file, where a walk of all would take hours. Returns how many.
fn walk_parts(file: &dyn Data, extents: u64) -> Result<u64> {
    let mut seeks = 0;
    for part in 0..PARTS.min(extents) {
        let first = extents * part / PARTS.min(extents);
        let mut at = first * 2 * BLOCK;
        for extent in first..extents.min(first + PART_EXTENTS) {
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
    while let Some(start) = file.seek_data(at)? {
        let end = file.seek_hole(start)?;
        at = start;
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(COPY_BYTES);
            let count = file.read(at, &mut buffer[..len])?;
            require(count == len && buffer[0] == 7 && buffer[len - 1] == 7)?;
            at += count as u64;
            bytes += count as u64;
        }
    }
    require(bytes == extents * BLOCK)?;
    Ok(extents)
}

fn fiemap(file: &dyn Data, extents: u64) -> Result<u64> {
    let (mut found, mut at) = (0, Some(0));
    while let Some(from) = at {
        let told = file.fiemap(from)?;
        found += told.extents;
        at = told.next;
    }
    require(found == extents)?;
    Ok(found)
}

/// Returns how many extents have no place yet.
fn told_delalloc(file: &dyn Data) -> Result<u64> {
    let (mut found, mut at) = (0, Some(0));
    while let Some(from) = at {
        let told = file.fiemap(from)?;
        found += told.delalloc;
        at = told.next;
    }
    Ok(found)
}
