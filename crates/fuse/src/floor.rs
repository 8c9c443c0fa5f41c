//! A server that does nothing: the least that the protocol costs, for benchmarks.
//!
//! Names and attributes are kept in memory, in one table under one lock. What is written is thrown away, and all data reads as
//! zeros. The requests are those that [`crate::Server`] gets, and as many threads wait for them.

use std::collections::BTreeMap;
use std::path::Path;

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use ubtrfs_rt::Mutex;

use crate::abi::{self, Attr, AttrOut, EntryOut, ROOT_NODE, fattr, fopen, opcode};
use crate::agree::agree;
use crate::first_open::FirstOpen;
use crate::leader::{LOOKING, Leaders};
use crate::message::{Answer, Request, Result};
use crate::mount::{MountOptions, mount};
use crate::ops::directories::{Put, Room};
use crate::server::{
    DATA_BYTES_MAX, REQUEST_BYTES_MAX, ServeError, ServeOptions, THREADS_MIN, VALID_SECONDS,
    send_answer,
};
use crate::transport::FuseDevice;

const TYPE_DIRECTORY: u32 = 0o040_000;
const TYPE_SYMLINK: u32 = 0o120_000;
const TYPE_MASK: u32 = 0o170_000;
/// What `statfs` says there is: enough.
const BLOCKS: u64 = 1 << 24;

#[derive(Default)]
struct Node {
    attr: Attr,
    parent: u64,
    target: Vec<u8>,
    /// By its place in the directory.
    entries: BTreeMap<u64, (Vec<u8>, u64)>,
}

#[derive(Default)]
struct Table {
    nodes: FxHashMap<u64, Node>,
    /// Node and place of a name.
    names: FxHashMap<(u64, Vec<u8>), (u64, u64)>,
    /// The next node, and the next place.
    next: u64,
}

/// Mounts on a directory, and serves until it is unmounted. `is_ready` is called when it can be used.
///
/// # Errors
/// The system's.
pub fn run(directory: &Path, is_ready: impl FnOnce()) -> std::result::Result<(), ServeError> {
    let options =
        MountOptions { source: "floor".into(), allow_other: true, ..MountOptions::default() };
    let device = mount(directory, &options).map_err(|error| ServeError::Transport(error.errno))?;
    let transport = FuseDevice::new(device).map_err(ServeError::Transport)?;
    let mut buffer = vec![0; REQUEST_BYTES_MAX];
    if agree(&transport, &mut buffer, &ServeOptions::default())?.is_none() {
        return Ok(());
    }
    let mut table = Table { next: ROOT_NODE, ..Table::default() };
    table.add(0, b"", TYPE_DIRECTORY | 0o755, (0, 0));
    let table = Mutex::new(table);
    let leaders = Leaders::new(LOOKING);
    let first_open = FirstOpen::default();
    let answers = |request: Request<'_>, answer: &mut Answer| {
        first_open.answer(request, answer).or_else(|| Some(table.lock().answer(request, answer)))
    };
    std::thread::scope(|scope| {
        for _ in 1..THREADS_MIN {
            scope.spawn(|| work(&leaders, &transport, &answers, &mut vec![0; REQUEST_BYTES_MAX]));
        }
        first_open.run(&transport);
        is_ready();
        work(&leaders, &transport, &answers, &mut buffer)
    })
}

fn work(
    leaders: &Leaders,
    transport: &FuseDevice,
    answers: &dyn Fn(Request<'_>, &mut Answer) -> Option<Result>,
    buffer: &mut [u8],
) -> std::result::Result<(), ServeError> {
    let mut answer = Answer::with_room(DATA_BYTES_MAX);
    leaders.work(transport, buffer, |bytes| {
        let Some(request) = Request::parse(bytes) else { return Ok(()) };
        let opcode = request.header.opcode;
        if matches!(opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT) {
            return Ok(());
        }
        answer.clear();
        let Some(result) = answers(request, &mut answer) else { return Ok(()) };
        send_answer(transport, answer.finish(request.header.unique, result))
    })
}

impl Table {
    fn answer(&mut self, mut request: Request<'_>, answer: &mut Answer) -> Result {
        let (node, header) = (request.header.node, request.header);
        let owner = (header.uid, header.gid);
        match header.opcode {
            opcode::LOOKUP => {
                let name = request.take_name()?;
                match self.names.get(&(node, name.to_vec())) {
                    Some((child, _)) => answer.put(&self.entry(*child)?),
                    None => {
                        answer.put(&EntryOut { entry_valid: VALID_SECONDS, ..EntryOut::default() });
                    }
                }
            }
            opcode::GETATTR => answer.put(&self.attributes(node)?),
            opcode::SETATTR => {
                let wanted: abi::SetattrIn = request.take()?;
                let attr = &mut self.node(node)?.attr;
                for (bit, from, to) in [
                    (fattr::MODE, wanted.mode | attr.mode & TYPE_MASK, &mut attr.mode),
                    (fattr::UID, wanted.uid, &mut attr.uid),
                    (fattr::GID, wanted.gid, &mut attr.gid),
                ] {
                    if wanted.valid & bit != 0 {
                        *to = from;
                    }
                }
                for (bit, from, to) in [
                    (fattr::SIZE, wanted.size, &mut attr.size),
                    (fattr::ATIME, wanted.atime, &mut attr.atime),
                    (fattr::MTIME, wanted.mtime, &mut attr.mtime),
                ] {
                    if wanted.valid & bit != 0 {
                        *to = from;
                    }
                }
                answer.put(&self.attributes(node)?);
            }
            opcode::MKNOD => {
                let wanted: abi::MknodIn = request.take()?;
                let made = self.add(node, request.take_name()?, wanted.mode & !wanted.umask, owner);
                answer.put(&self.entry(made)?);
            }
            opcode::MKDIR => {
                let wanted: abi::MkdirIn = request.take()?;
                let mode = TYPE_DIRECTORY | wanted.mode & !wanted.umask;
                let made = self.add(node, request.take_name()?, mode, owner);
                answer.put(&self.entry(made)?);
            }
            opcode::CREATE => {
                let wanted: abi::CreateIn = request.take()?;
                let made = self.add(node, request.take_name()?, wanted.mode & !wanted.umask, owner);
                answer.put(&self.entry(made)?);
                let open_flags = fopen::KEEP_CACHE | fopen::NOFLUSH;
                answer.put(&abi::OpenOut { open_flags, ..abi::OpenOut::default() });
            }
            opcode::SYMLINK => {
                let (name, target) = (request.take_name()?, request.take_name()?);
                let made = self.add(node, name, TYPE_SYMLINK | 0o777, owner);
                self.node(made)?.target = target.to_vec();
                self.node(made)?.attr.size = target.len() as u64;
                answer.put(&self.entry(made)?);
            }
            opcode::READLINK => answer.put_bytes(&self.node(node)?.target),
            opcode::LINK => {
                let wanted: abi::LinkIn = request.take()?;
                self.name(node, request.take_name()?, wanted.old_node);
                self.node(wanted.old_node)?.attr.nlink += 1;
                answer.put(&self.entry(wanted.old_node)?);
            }
            opcode::UNLINK | opcode::RMDIR => {
                let name = request.take_name()?;
                self.unname(node, name)?;
            }
            opcode::RENAME | opcode::RENAME2 => {
                let wanted: abi::RenameIn = request.take()?;
                if header.opcode == opcode::RENAME2 {
                    request.take_bytes(8)?;
                }
                let (old, new) = (request.take_name()?, request.take_name()?);
                let moved = self.unname(node, old)?;
                let _ = self.unname(wanted.new_dir, new);
                self.name(wanted.new_dir, new, moved);
            }
            opcode::READ => {
                let wanted: abi::ReadIn = request.take()?;
                let left = self.node(node)?.attr.size.saturating_sub(wanted.offset);
                let len = usize::try_from(left.min(wanted.size.into())).unwrap_or(0);
                answer.fill(len, |bytes| {
                    bytes.fill(0);
                    Ok::<usize, Errno>(bytes.len())
                })?;
            }
            opcode::WRITE => {
                let wanted: abi::WriteIn = request.take()?;
                let attr = &mut self.node(node)?.attr;
                attr.size = attr.size.max(wanted.offset + u64::from(wanted.size));
                answer.put(&abi::WriteOut { size: wanted.size, padding: 0 });
            }
            opcode::READDIR | opcode::READDIRPLUS => {
                let wanted: abi::ReadIn = request.take()?;
                self.list(node, &wanted, header.opcode == opcode::READDIRPLUS, answer)?;
            }
            opcode::STATFS => answer.put(&abi::StatfsOut {
                blocks: BLOCKS,
                bfree: BLOCKS,
                bavail: BLOCKS,
                bsize: 4096,
                namelen: 255,
                frsize: 4096,
                ..abi::StatfsOut::default()
            }),
            opcode::FSYNC
            | opcode::FSYNCDIR
            | opcode::SYNCFS
            | opcode::RELEASE
            | opcode::RELEASEDIR
            | opcode::DESTROY => {}
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    fn node(&mut self, node: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&node).ok_or(Errno::STALE)
    }

    fn add(&mut self, parent: u64, name: &[u8], mode: u32, (uid, gid): (u32, u32)) -> u64 {
        let node = self.next;
        self.next += 1;
        let attr = Attr { ino: node, mode, nlink: 1, uid, gid, blksize: 4096, ..Attr::default() };
        self.nodes.insert(node, Node { attr, parent, ..Node::default() });
        if parent != 0 {
            self.name(parent, name, node);
        }
        node
    }

    fn name(&mut self, parent: u64, name: &[u8], node: u64) {
        let place = self.next;
        self.next += 1;
        self.names.insert((parent, name.to_vec()), (node, place));
        if let Ok(parent) = self.node(parent) {
            parent.entries.insert(place, (name.to_vec(), node));
        }
    }

    fn unname(&mut self, parent: u64, name: &[u8]) -> Result<u64> {
        let (node, place) = self.names.remove(&(parent, name.to_vec())).ok_or(Errno::NOENT)?;
        self.node(parent)?.entries.remove(&place);
        Ok(node)
    }

    fn entry(&self, node: u64) -> Result<EntryOut> {
        let attr = self.nodes.get(&node).ok_or(Errno::STALE)?.attr;
        let (entry_valid, attr_valid) = (VALID_SECONDS, VALID_SECONDS);
        Ok(EntryOut { node, entry_valid, attr_valid, attr, ..EntryOut::default() })
    }

    fn attributes(&self, node: u64) -> Result<AttrOut> {
        let attr = self.nodes.get(&node).ok_or(Errno::STALE)?.attr;
        Ok(AttrOut { attr_valid: VALID_SECONDS, attr, ..AttrOut::default() })
    }

    fn list(&self, node: u64, wanted: &abi::ReadIn, is_plus: bool, answer: &mut Answer) -> Result {
        let directory = self.nodes.get(&node).ok_or(Errno::STALE)?;
        let len_max = usize::try_from(wanted.size).unwrap_or(0).min(DATA_BYTES_MAX);
        let room = Room::new(len_max, is_plus);
        let itself = [(1, &b"."[..], node), (2, b"..", directory.parent)];
        for (place, name, node) in itself {
            let is_due = wanted.offset < place;
            let ty = type_of(TYPE_DIRECTORY);
            if is_due && room.put(answer, EntryOut::default(), node, place, name, ty) == Put::Full {
                return Ok(());
            }
        }
        for (place, (name, node)) in directory.entries.range(wanted.offset.saturating_sub(1)..) {
            let entry = self.entry(*node)?;
            let told = if is_plus { entry } else { EntryOut::default() };
            let ty = type_of(entry.attr.mode);
            if room.put(answer, told, *node, place + 2, name, ty) == Put::Full {
                break;
            }
        }
        Ok(())
    }
}

/// As `getdents` has it.
fn type_of(mode: u32) -> u32 {
    (mode & TYPE_MASK) >> 12
}
