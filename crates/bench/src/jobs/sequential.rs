//! A large file written from its beginning to its end, and read.

use ubtrfs_testkit::Prng;

use super::data::{Data, with_file, with_plain_file};
use super::{Args, Outcome, Phase, Timing, require, timed};
use crate::error::{Error, Result};

/// What one call of a copy writes or reads, and of the rest unless it is told otherwise.
const CHUNK: usize = 1 << 20;
/// Text that repeats after so much: further than any compression looks back.
const TEXT: usize = 64 << 20;

/// What a read of [`Phase::Random`] reads.
const BLOCK: usize = 4096;
const PAGE: usize = 4096;
/// How much of the file those reads are of, in MiB: cached by whatever caches.
const RANDOM_MIB: u64 = 64;
const RANDOM_READS: u64 = 100_000;

/// With [`Phase::Make`] a new file of `count` MiB is written, by so much a call, and made durable; with [`Phase::Look`] it is read, with
/// [`Phase::Random`] by blocks and after its beginning was read once. With [`Phase::Into`] it is made by copying a plain
/// file, with [`Phase::Out`] copied to one; both durable.
pub(super) fn run(args: &Args) -> Result<Outcome> {
    if let Some(plain) = &args.plain {
        return match args.phase {
            Phase::Into => with_plain_file(plain, false, |from| {
                with_file(args, true, |to| copy(args, "write", from, to))
            }),
            Phase::Out => with_file(args, false, |from| {
                with_plain_file(plain, true, |to| copy(args, "read", from, to))
            }),
            _ => Err(Error::Input { what: "no such phase of a copy".to_owned() }),
        };
    }
    let text = match &args.contents {
        None => Prng::new(1).text(TEXT),
        Some(path) => std::fs::read(path).map_err(Error::io("read the contents"))?,
    };
    if text.is_empty() || !text.len().is_multiple_of(CHUNK) {
        return Err(Error::Input { what: "contents that are no whole MiB".to_owned() });
    }
    match args.phase {
        Phase::Make => with_file(args, true, |file| write(args, &text, file)),
        Phase::Look => with_file(args, false, |file| read(args, &text, file)),
        Phase::Random => with_file(args, false, |file| random(args.count, file)),
        _ => Err(Error::Input { what: "no such phase of sequential".to_owned() }),
    }
}

/// Memory for what is read. Where it begins in a page decides how fast some processors copy to it (`ubtrfs_cpu::copy`).
struct Buffer {
    memory: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new(args: &Args, len: usize) -> Self {
        let memory = vec![0; if args.whole_pages { len + PAGE } else { len }];
        let start = if args.whole_pages { memory.as_ptr().align_offset(PAGE) } else { 0 };
        Self { memory, start }
    }

    fn bytes(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.start..][..len]
    }
}

/// What one call takes, and how many calls the file takes.
fn calls(args: &Args) -> (usize, u64) {
    let chunk = args.chunk_kib as usize * 1024;
    (chunk, args.count * CHUNK as u64 / chunk as u64)
}

/// What the file has from `at` on, where as much begins.
fn text_at(text: &[u8], at: u64, len: usize) -> &[u8] {
    let start = usize::try_from(at % text.len() as u64).expect("a remainder");
    &text[start..start + len]
}

fn write(args: &Args, text: &[u8], file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let (chunk, count) = calls(args);
    let places = || (0..count).map(|number| number * chunk as u64);
    let (written, ()) =
        timed(|| places().try_for_each(|at| file.write(at, text_at(text, at, chunk))))?;
    let (synced, ()) = timed(|| file.fsync())?;
    outcome.timings.push(Timing::new("write", count, written + synced));
    outcome.timings.push(Timing::new("fsync", 1, synced));
    outcome.note_counts("write", file.counts());
    Ok(outcome)
}

fn read(args: &Args, text: &[u8], file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let (chunk, count) = calls(args);
    let mut memory = Buffer::new(args, chunk);
    let buffer = memory.bytes(chunk);
    let (spent, ()) = timed(|| {
        (0..count).map(|number| number * chunk as u64).try_for_each(|at| {
            require(file.read(at, buffer)? == chunk)?;
            let expected = text_at(text, at, chunk);
            // At some places only: to compare all would be the larger part of the work.
            require(buffer.iter().step_by(4099).eq(expected.iter().step_by(4099)))
        })
    })?;
    outcome.timings.push(Timing::new("read", count, spent));
    outcome.note_counts("read", file.counts());
    Ok(outcome)
}

/// Called `what`, as it is beside the writing or reading of the same file.
fn copy(
    args: &Args,
    what: &'static str,
    from: &mut dyn Data,
    to: &mut dyn Data,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut memory = Buffer::new(args, CHUNK);
    let buffer = memory.bytes(CHUNK);
    let (spent, ()) = timed(|| {
        (0..args.count).try_for_each(|number| {
            require(from.read(number * CHUNK as u64, buffer)? == CHUNK)?;
            to.write(number * CHUNK as u64, buffer)
        })?;
        to.fsync()
    })?;
    outcome.timings.push(Timing::new(what, args.count, spent));
    // The plain file tells none.
    outcome.note_counts(what, from.counts());
    outcome.note_counts(what, to.counts());
    Ok(outcome)
}

fn random(count: u64, file: &mut dyn Data) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mib = count.min(RANDOM_MIB);
    let mut chunk = vec![0; CHUNK];
    for number in 0..mib {
        require(file.read(number * CHUNK as u64, &mut chunk)? == CHUNK)?;
    }
    let blocks = mib * (CHUNK / BLOCK) as u64;
    let (mut prng, mut block) = (Prng::new(2), vec![0; BLOCK]);
    let (spent, ()) = timed(|| {
        (0..RANDOM_READS).try_for_each(|_| {
            let at = prng.below(blocks) * BLOCK as u64;
            require(file.read(at, &mut block)? == BLOCK)
        })
    })?;
    outcome.timings.push(Timing::new("random", RANDOM_READS, spent));
    Ok(outcome)
}
