//! Snapshots that are deleted while somebody uses what is in them: they show what they did, and what is written to them since, until he
//! lets go.

use std::rc::Rc;

use ubtrfs_engine::{DataFile, Error, Filesystem, InodeId, SubvolumeHold};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::{InodeNo, RootId};

use super::fill::Fill;
use super::stage::read_closed;
use crate::compare::Differs;

/// Of so many snapshots one is held as it is deleted.
const HELD_ONE_IN: usize = 3;
/// How many are held at a time.
const HELD_MAX: usize = 2;
/// While it is held something is written to it after one operation in so many.
const WRITTEN_ONE_IN: u64 = 4;
const WRITTEN_BYTES: usize = 6000;
/// As no file of the run.
const FILE: usize = 30;

/// One that is held.
#[derive(Debug)]
pub(super) struct Held {
    root: RootId,
    /// Number and contents of each file.
    files: Vec<(InodeNo, Rc<[u8]>)>,
    is_read_only: bool,
    /// The file that is written, once it was.
    open: Option<DataFile>,
    _hold: SubvolumeHold,
}

impl Held {
    /// Holds a snapshot of this number that is about to be deleted, if it is one of those to be.
    pub(super) fn of(
        fs: &Filesystem,
        number: usize,
        root: RootId,
        files: Vec<(InodeNo, Rc<[u8]>)>,
    ) -> Option<Self> {
        let hold = fs.subvolume_holds().hold(root);
        let is_read_only = number.is_multiple_of(2);
        let is_held = number % HELD_ONE_IN == 1;
        is_held.then_some(Self { root, files, is_read_only, open: None, _hold: hold })
    }

    fn id(&self, file: usize) -> InodeId {
        InodeId { root: self.root, inode: self.files[file].0 }
    }

    /// Writes to a file of it after some operations, where that is allowed.
    ///
    /// # Errors
    /// What it fails with, but for a lack of space.
    fn write(&mut self, fs: &Filesystem, operation: u64) -> Result<(), Error> {
        let file = usize::try_from(operation).unwrap_or(0) % self.files.len();
        let id = self.id(file);
        if self.open.as_ref().is_none_or(|open| open.id() != id) {
            self.open = Some(fs.open_data(id)?);
        }
        let Some(open) = &self.open else { return Ok(()) };
        let mut bytes = self.files[file].1.to_vec();
        let offset = u64::try_from(bytes.len()).unwrap_or(0).min(operation * 513 % 20_000);
        let new = Fill::Words.bytes(FILE, operation, offset, WRITTEN_BYTES);
        let done = match open.write(FileOffset::new(offset), &new) {
            Err(Error::NoSpace { .. }) => 0,
            done => done?,
        };
        let at = usize::try_from(offset).unwrap_or(0);
        bytes.resize(bytes.len().max(at + done), 0);
        bytes[at..at + done].copy_from_slice(&new[..done]);
        self.files[file].1 = bytes.into();
        Ok(())
    }

    /// That it shows what it must.
    fn compare(&self, fs: &Filesystem) -> Differs<u64> {
        let mut count = 0;
        for (number, (_, expect)) in self.files.iter().enumerate() {
            let have = read_closed(fs, self.id(number))?;
            if have != **expect {
                let first = have.iter().zip(&**expect).position(|(have, expect)| have != expect);
                let lens = (have.len(), expect.len());
                return Err(format!("file {number} of it: {lens:?} bytes, another at {first:?}"));
            }
            count += 1;
        }
        Ok(count)
    }
}

/// Keeps one more, and lets go of the oldest where these are too many.
pub(super) fn keep(held: &mut Vec<Held>, new: Option<Held>) {
    held.extend(new);
    if held.len() > HELD_MAX {
        held.remove(0);
    }
}

/// Uses all that are held; returns how many files were compared.
///
/// # Errors
/// What is not as it must be.
pub(super) fn use_all(held: &mut [Held], fs: &Filesystem, operation: u64) -> Differs<u64> {
    let mut count = 0;
    for one in held {
        let root = one.root;
        let failed = |why: String| format!("deleted and held, subvolume {root}: {why}");
        if !one.is_read_only && operation.is_multiple_of(WRITTEN_ONE_IN) {
            one.write(fs, operation).map_err(|error| failed(format!("writing: {error}")))?;
        }
        count += one.compare(fs).map_err(failed)?;
    }
    Ok(count)
}
