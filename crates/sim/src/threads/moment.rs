//! What is seen of the shared subvolume at one moment, and whether it is one.
//!
//! Each worker says after its n-th step, in two files under one handle, that it is n steps far; and
//! makes pairs of files under one handle, with n in their names, before it does the next. So of one
//! moment: both files say the same; of a pair both are there or none; all pairs of a worker before
//! its last step are there, and none after it; each token is in one place. And whatever was over
//! before something began that is seen, is seen as well.

use std::collections::BTreeSet;

use ubtrfs_engine::{Error, Filesystem};

use super::worker::Log;
use super::{Shared, inode_in};
use crate::compare::Differs;

/// The attribute that says how far a worker is.
pub(super) const PROGRESS: &[u8] = b"user.progress";

/// What is seen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Moment {
    /// How far each worker is.
    pub(super) progress: Vec<u64>,
    /// Names of pairs: worker, and how far it was.
    pairs: BTreeSet<(usize, u64)>,
}

/// When it was seen, as time passed for the threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// What was over then is in it.
    pub(super) not_before: u64,
    /// What had not begun then is not in it.
    pub(super) not_after: u64,
}

pub(super) fn pair_name(worker: usize, done: u64) -> String {
    format!("pair {worker} {done}")
}

fn pair_of(name: &[u8]) -> Option<(usize, u64)> {
    let name = std::str::from_utf8(name).ok()?.strip_prefix("pair ")?;
    let (worker, done) = name.split_once(' ')?;
    Some((worker.parse().ok()?, done.parse().ok()?))
}

impl Moment {
    /// Reads it, in the subvolume or in a snapshot of it.
    ///
    /// # Errors
    /// What cannot be of one moment.
    pub(super) fn of(fs: &Filesystem, root: u64, shared: &Shared) -> Differs<Self> {
        let failed = |error: Error| format!("subvolume {root}: {error}");
        let mut progress = Vec::new();
        for files in &shared.progress {
            let said = files.map(|file| fs.xattr(inode_in(root, file), PROGRESS));
            let [one, two] = said;
            let (one, two) = (one.map_err(failed)?, two.map_err(failed)?);
            if one != two {
                return Err(format!("half of a handle: {one:?} and {two:?}"));
            }
            let number = one
                .as_deref()
                .map_or(Some(0), |bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?)));
            progress.push(number.ok_or("no number")?);
        }
        let mut entries = Vec::new();
        for directory in &shared.directories {
            let mut names = BTreeSet::new();
            for entry in fs.read_dir(inode_in(root, *directory), 0).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                names.insert((entry.name.to_vec(), entry.target.inode.0));
            }
            entries.push(names);
        }
        for (number, token) in shared.tokens.iter().enumerate() {
            let name = (format!("token {number}").into_bytes(), *token);
            let places = entries.iter().filter(|names| names.contains(&name)).count();
            let links = fs.inode(inode_in(root, *token)).map_err(failed)?.nlink;
            if (places, links) != (1, 1) {
                return Err(format!("token {number} is in {places} places, with {links} links"));
            }
        }
        let pairs = |names: &BTreeSet<(Vec<u8>, u64)>| -> BTreeSet<(usize, u64)> {
            names.iter().filter_map(|(name, _)| pair_of(name)).collect()
        };
        let (first, second) = (pairs(&entries[0]), pairs(&entries[1]));
        if first != second {
            let alone: Vec<_> = first.symmetric_difference(&second).collect();
            return Err(format!("half of a handle: {alone:?}"));
        }
        Ok(Self { progress, pairs: first })
    }

    /// Whether it can have been one, by what the workers noted.
    ///
    /// # Errors
    /// What cannot be.
    pub(super) fn is_one(&self, logs: &[Log], seen: &Seen) -> Differs {
        // The latest beginning of what is in it.
        let mut begun = seen.not_before;
        for (log, done) in logs.iter().zip(&self.progress) {
            let done = usize::try_from(*done).expect("a count fits");
            if let Some(mark) = done.checked_sub(1).and_then(|last| log.marks.get(last)) {
                begun = begun.max(mark.began);
            }
        }
        for (number, (log, done)) in logs.iter().zip(&self.progress).enumerate() {
            let count = |marks: usize| u64::try_from(marks).expect("a count fits");
            let over = count(log.marks.iter().take_while(|mark| mark.ended < begun).count());
            let all = log.marks.iter().take_while(|mark| mark.began < seen.not_after);
            let (least, most) = (over, count(all.count()));
            if *done < least || *done > most {
                return Err(format!(
                    "worker {number} is {done} steps far, where it was between {least} and {most}: \
                     {:?}",
                    self.progress
                ));
            }
            for pair in &log.pairs {
                let is_there = self.pairs.contains(&(number, pair.done));
                let must_be = pair.done < *done || pair.ended < begun;
                let may_be = pair.done <= *done && pair.began < seen.not_after;
                if is_there && !may_be || !is_there && must_be {
                    return Err(format!(
                        "pair {number} {}: {is_there}, where worker {number} is {done} steps far",
                        pair.done
                    ));
                }
            }
        }
        let known = |(worker, done): &(usize, u64)| {
            logs.get(*worker).is_some_and(|log| log.pairs.iter().any(|pair| pair.done == *done))
        };
        match self.pairs.iter().find(|pair| !known(pair)) {
            None => Ok(()),
            Some(pair) => Err(format!("pair {pair:?}, which nobody made")),
        }
    }
}
