//! Listing directories. A place in one is the index of the entry that comes next, so it stays as others change the directory.

use ubtrfs_engine::{DirEntry, InodeId};
use ubtrfs_ondisk::dir::FileType;
use zerocopy::IntoBytes;

use crate::abi::{Dirent, EntryOut, ReadIn};
use crate::errno::errno;
use crate::message::{Answer, Request, Result};
use crate::server::{DATA_BYTES_MAX, Server};

/// Places of the entries that each directory has beside those that it holds: the latter have indices from 2 on.
const BEHIND_SELF: u64 = 1;
const BEHIND_PARENT: u64 = 2;

/// How much of an answer is used, and its end.
pub(crate) struct Room {
    len_max: usize,
    is_plus: bool,
}

/// Which way an entry went.
#[derive(PartialEq, Eq)]
pub(crate) enum Put {
    Done,
    Full,
}

impl Server {
    pub(crate) fn readdir(&self, id: InodeId, request: Request<'_>, answer: &mut Answer) -> Result {
        self.list(id, request, answer, false)
    }

    pub(crate) fn readdirplus(
        &self,
        id: InodeId,
        request: Request<'_>,
        answer: &mut Answer,
    ) -> Result {
        self.list(id, request, answer, true)
    }

    fn list(
        &self,
        id: InodeId,
        mut request: Request<'_>,
        answer: &mut Answer,
        is_plus: bool,
    ) -> Result {
        let wanted: ReadIn = request.take()?;
        self.check_not_deleted(id)?;
        if self.options.notes_access && !self.options.leaves_directories {
            self.note_access(id, wanted.flags);
        }
        let len_max = usize::try_from(wanted.size).unwrap_or(usize::MAX).min(DATA_BYTES_MAX);
        let room = Room::new(len_max, is_plus);
        if wanted.offset < BEHIND_SELF
            && room.put(answer, EntryOut::default(), self.shown_number(id), BEHIND_SELF, b".", DIR)
                == Put::Full
        {
            return Ok(());
        }
        if wanted.offset < BEHIND_PARENT {
            let parent = self.fs.parent(id).unwrap_or(id);
            let number = self.shown_number(parent);
            if room.put(answer, EntryOut::default(), number, BEHIND_PARENT, b"..", DIR) == Put::Full
            {
                return Ok(());
            }
        }
        let after = wanted.offset.saturating_sub(1);
        let last = || self.fs.last_dir_index(id);
        let end = self.listed.end(id, wanted.offset == 0, last);
        let end = end.map_err(|error| errno(&error))?;
        for entry in self.fs.read_dir(id, after).map_err(|error| errno(&error))? {
            let entry = match entry {
                Ok(entry) => entry,
                // What the kernel is told of by now it must hear of, to forget it some day. It will ask for more, and hear this then.
                Err(_) if answer.body_len() > 0 => break,
                Err(error) => return Err(errno(&error)),
            };
            if entry.index > end {
                break;
            }
            if self.put_dir_entry(&room, answer, &entry) == Put::Full {
                break;
            }
        }
        if answer.body_len() == 0 {
            self.listed.forget(id);
        }
        Ok(())
    }

    fn put_dir_entry(&self, room: &Room, answer: &mut Answer, entry: &DirEntry) -> Put {
        let DirEntry { name, index, target, file_type } = entry;
        if !room.has_room(answer, name) {
            return Put::Full;
        }
        // Told without its attributes, the kernel asks for those itself, and is told what is wrong. What stands in for a subvolume is a new
        // node each time that it is told of, and would take the place of that which somebody may be in.
        let told = match room.is_plus && !target.is_stand_in() {
            true => self.entry(*target).unwrap_or_default(),
            false => EntryOut::default(),
        };
        let number = self.shown_number(*target);
        room.put(answer, told, number, index.saturating_add(1), name, entry_type(*file_type))
    }
}

impl Room {
    /// For so many bytes; with the attributes of each entry, or without.
    pub(crate) fn new(len_max: usize, is_plus: bool) -> Self {
        Self { len_max, is_plus }
    }

    fn record_len(&self, name: &[u8]) -> usize {
        let front = if self.is_plus { size_of::<EntryOut>() } else { 0 };
        front + (size_of::<Dirent>() + name.len()).next_multiple_of(8)
    }

    fn has_room(&self, answer: &Answer, name: &[u8]) -> bool {
        answer.body_len() + self.record_len(name) <= self.len_max
    }

    pub(crate) fn put(
        &self,
        answer: &mut Answer,
        told: EntryOut,
        ino: u64,
        off: u64,
        name: &[u8],
        ty: u32,
    ) -> Put {
        if !self.has_room(answer, name) {
            return Put::Full;
        }
        if self.is_plus {
            answer.put(&told);
        }
        let name_len = u32::try_from(name.len()).unwrap_or(0);
        answer.put_bytes(Dirent { ino, off, name_len, ty }.as_bytes());
        answer.put_bytes(name);
        let len = size_of::<Dirent>() + name.len();
        answer.put_bytes(&[0; 8][..len.next_multiple_of(8) - len]);
        Put::Done
    }
}

/// DT_DIR.
const DIR: u32 = 4;

/// The type as `getdents` has it: that of the mode, shifted.
fn entry_type(file_type: FileType) -> u32 {
    match file_type {
        FileType::Regular => 8,
        FileType::Directory => DIR,
        FileType::CharDevice => 2,
        FileType::BlockDevice => 6,
        FileType::Fifo => 1,
        FileType::Socket => 12,
        FileType::Symlink => 10,
        _ => 0,
    }
}
