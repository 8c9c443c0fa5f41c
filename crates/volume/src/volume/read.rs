//! Reading: which copy answers, and which is counted as bad.

use ubtrfs_ondisk::{Corruption, LogicalAddr, PhysicalAddr, Result as Checked};

use super::{Volume, index, io_error};
use crate::chunk_map::{Place, Run};
use crate::error::{Error, Op, Result};
use crate::stats::Counters;

/// Ways in which the copies of several columns are combined at most.
const COMBINATION_COUNT_MAX: usize = 128;

impl Volume {
    /// Reads one copy, the first being 0, and judges nothing.
    ///
    /// # Errors
    /// `NoChunk`, `NoMirror`, `MissingDevice` or `Io`, which is counted.
    pub fn read_mirror(&self, at: LogicalAddr, mirror: usize, buf: &mut [u8]) -> Result<()> {
        let runs = self.runs(at, buf.len() as u64)?;
        let copies = self.mirror_count(at)?;
        if mirror >= copies {
            return Err(Error::NoMirror { at, mirror, copies });
        }
        runs.iter().try_for_each(|run| self.read_run(run, mirror, buf))
    }

    /// Reads from the first copy that `accept` finds whole; each copy that is not is counted
    /// against its device. The range may cross stripes, but not chunks.
    ///
    /// The range is judged as a whole: the shorter it is, the more damage can be read around. One
    /// that lies in several columns of RAID10 is put together from their copies, with those of up
    /// to two columns bad.
    ///
    /// # Errors
    /// `NoWholeCopy` with the last finding when `accept` took none; `NoChunk`, `MissingDevice` or
    /// `Io` when none could be read.
    pub fn read(
        &self,
        at: LogicalAddr,
        buf: &mut [u8],
        accept: &dyn Fn(&[u8]) -> Checked<()>,
    ) -> Result<()> {
        let runs = self.runs(at, buf.len() as u64)?;
        match &runs[..] {
            [] => accept(buf).map_err(Error::from),
            [run] => self.read_one(at, run, buf, accept),
            runs => self.read_columns(at, runs, buf, accept),
        }
    }

    /// A range in one piece: its copies in turn.
    fn read_one(
        &self,
        at: LogicalAddr,
        run: &Run,
        buf: &mut [u8],
        accept: &dyn Fn(&[u8]) -> Checked<()>,
    ) -> Result<()> {
        let copies = run.copies.len();
        let mut failure = None;
        for mirror in 0..copies {
            if let Err(error) = self.read_run(run, mirror, buf) {
                failure.get_or_insert(error);
                continue;
            }
            match accept(buf) {
                Ok(()) => return Ok(()),
                Err(corruption) => {
                    self.count_bad_copy(run, mirror, &corruption);
                    failure = Some(Error::NoWholeCopy { at, copies, corruption });
                }
            }
        }
        Err(failure.expect("every chunk has at least one copy"))
    }

    /// A range over several columns: first the copies that can be read, then with those of one
    /// column exchanged, then of two.
    fn read_columns(
        &self,
        at: LogicalAddr,
        runs: &[Run],
        buf: &mut [u8],
        accept: &dyn Fn(&[u8]) -> Checked<()>,
    ) -> Result<()> {
        let mut first = Vec::with_capacity(runs.len());
        for run in runs {
            first.push(self.read_any(run, buf)?);
        }
        let Err(mut corruption) = accept(buf) else { return Ok(()) };
        let copies = runs[0].copies.len();
        for columns in exchanges(runs.len()).take(COMBINATION_COUNT_MAX) {
            if copies < 2 {
                break;
            }
            // No striped profile keeps more than two copies.
            let other = |column: &usize| self.read_run(&runs[*column], 1 - first[*column], buf);
            if columns.iter().map(other).all(|result| result.is_ok()) {
                match accept(buf) {
                    Ok(()) => {
                        for column in columns {
                            self.count_bad_copy(&runs[column], first[column], &corruption);
                        }
                        return Ok(());
                    }
                    Err(found) => corruption = found,
                }
            }
            for column in &columns {
                self.read_run(&runs[*column], first[*column], buf)?;
            }
        }
        // Which of them it was is not known.
        for (run, mirror) in runs.iter().zip(first) {
            self.count_bad_copy(run, mirror, &corruption);
        }
        Err(Error::NoWholeCopy { at, copies, corruption })
    }

    /// Reads the first copy that can be read, and says which it was.
    fn read_any(&self, run: &Run, buf: &mut [u8]) -> Result<usize> {
        let mut failure = None;
        for mirror in 0..run.copies.len() {
            match self.read_run(run, mirror, buf) {
                Ok(()) => return Ok(mirror),
                Err(error) => failure.get_or_insert(error),
            };
        }
        Err(failure.expect("every run has at least one copy"))
    }

    /// Reads a run's pieces into their places in the buffer of the whole range.
    fn read_run(&self, run: &Run, mirror: usize, buf: &mut [u8]) -> Result<()> {
        let Place { devid, mut at } = run.copies[mirror];
        let member = self.member(devid)?;
        let device = member.device.as_ref().ok_or_else(|| self.missing_error(&member))?;
        for piece in run.pieces() {
            let piece = &mut buf[index(piece.start)..index(piece.end)];
            device.read_at(at, piece).map_err(|source| {
                Counters::add(&member.counters.read);
                io_error(&**device, Op::Read, at, source)
            })?;
            at = PhysicalAddr(at.0 + piece.len() as u64);
        }
        Ok(())
    }

    fn count_bad_copy(&self, run: &Run, mirror: usize, corruption: &Corruption) {
        if let Ok(member) = self.member(run.copies[mirror].devid) {
            member.counters.add_bad_copy(corruption);
        }
    }
}

/// Each column by itself, then each pair of them.
fn exchanges(count: usize) -> impl Iterator<Item = Vec<usize>> {
    let singles = (0..count).map(|column| vec![column]);
    let pairs = (0..count).flat_map(move |a| (a + 1..count).map(move |b| vec![a, b]));
    singles.chain(pairs)
}
