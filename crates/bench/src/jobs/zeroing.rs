//! A block is written and the file cut to one byte less, over and over; a range is zeroed of which every other block is dirty; and the mapped
//! store beyond the end of the file.

use super::data::{Data, with_file};
use super::{Args, Outcome, Phase, Timing, require, timed};
use crate::error::{Error, Result};

const BLOCK: u64 = 4096;
/// Where the mapped store goes.
const STORE_AT: usize = 3072;

/// With [`Phase::Make`] `count` rounds in a new file; with [`Phase::Zero`] and [`Phase::ZeroRange`] a range with as many dirty blocks; with
/// [`Phase::Store`] the mapped store beyond the end in a new file; with [`Phase::Look`] what is there then.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    match args.phase {
        Phase::Make => with_file(args, true, |file| rounds(args.count, file)),
        Phase::Zero => {
            with_file(args, true, |file| zero(args.count, file, |file, len| file.zero(len)))
        }
        Phase::ZeroRange => {
            with_file(args, true, |file| zero(args.count, file, |file, len| file.zero_range(len)))
        }
        Phase::Store => with_file(args, true, |file| store(file)),
        Phase::Look => with_file(args, false, |file| look(file)),
        _ => Err(Error::Input { what: "no such phase of zeroing".to_owned() }),
    }
}

fn rounds(count: u64, file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let block = [7; 4096];
    let (spent, ()) = timed(|| {
        (0..count).try_for_each(|round| {
            file.write(round * BLOCK, &block)?;
            file.truncate((round + 1) * BLOCK - 1)
        })
    })?;
    outcome.timings.push(Timing::new("rounds", count, spent));
    outcome.note_counts("rounds", file.counts());
    let (synced, ()) = timed(|| file.fsync())?;
    outcome.timings.push(Timing::new("fsync", 1, synced));
    outcome.note_counts("fsync", file.counts());
    // Each block's last byte was cut off, and reads as zero where others came behind it.
    read_all(file, count * BLOCK - 1, |at, bytes| {
        let is_right =
            |(at, byte): (u64, &u8)| *byte == if at % BLOCK == BLOCK - 1 { 0 } else { 7 };
        (at..).zip(bytes).all(is_right)
    })?;
    Ok(outcome)
}

/// Reads a file of `len` bytes; `is_right` tells of each piece, by where it begins.
fn read_all(file: &dyn Data, len: u64, is_right: impl Fn(u64, &[u8]) -> bool) -> Result<()> {
    const PIECE: usize = 1 << 20;
    let mut buffer = vec![0xEE; PIECE];
    for at in (0..len).step_by(PIECE) {
        let read = file.read(at, &mut buffer)?;
        require(read as u64 == (len - at).min(PIECE as u64) && is_right(at, &buffer[..read]))?;
        buffer.fill(0xEE);
    }
    Ok(())
}

/// Over space that was allocated and holds nothing else: what is dirty has to be found, and need not be written back for that.
fn zero(
    count: u64,
    file: &mut dyn Data,
    zero: impl Fn(&dyn Data, u64) -> Result<()>,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let len = 2 * count * BLOCK;
    file.allocate(len)?;
    (0..count).try_for_each(|run| file.write(2 * run * BLOCK, &[7; 4096]))?;
    file.counts();
    let (spent, ()) = timed(|| zero(file, len))?;
    outcome.timings.push(Timing::new("zero", count, spent));
    outcome.note_counts("zero", file.counts());
    let (synced, ()) = timed(|| file.fsync())?;
    outcome.timings.push(Timing::new("fsync", 1, synced));
    read_all(file, len, |_, bytes| bytes.iter().all(|byte| *byte == 0))?;
    Ok(outcome)
}

fn store(file: &mut dyn Data) -> Result<Outcome> {
    file.allocate(1024)?;
    file.write(0, &[1; 1024])?;
    file.store_mapped(4096, STORE_AT, &[2; 1024])?;
    file.write(32768, &[3; 4096])?;
    file.fsync()?;
    look(file)
}

/// Counts bytes that are not what they must be.
fn look(file: &mut dyn Data) -> Result<Outcome> {
    let mut buffer = vec![0xEE; 65536];
    require(file.read(0, &mut buffer)? == 36864)?;
    let expected = |at: usize| match at {
        0..1024 => 1,
        32768.. => 3,
        _ => 0,
    };
    let bytes = buffer[..36864].iter().enumerate();
    let wrong = bytes.filter(|(at, byte)| **byte != expected(*at)).count();
    let mut outcome = Outcome::default();
    outcome.note_count("wrong bytes", wrong as u64);
    Ok(outcome)
}
