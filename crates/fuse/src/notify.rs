//! What the kernel is told unasked: that it knows something no more, as it was changed beside it.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use ubtrfs_engine::{ChangedName, InodeId};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::RootId;
use ubtrfs_ondisk::dir::FileType;
use ubtrfs_rt::{Arc, AtomicUsize, Mutex, Ordering};

use crate::abi;
use crate::ends::MovedEnd;
use crate::files::UsedFile;
use crate::message::{Answer, Result};
use crate::nodes::Nodes;
use crate::server::Server;
use crate::tail::forgotten;

/// What a notification has beside its header: a struct and a name.
const NOTIFICATION_BYTES_MAX: usize = 512;
/// For so long a request waits until the kernel has taken what it is told: it may wait for others who wait for this server.
const PATIENCE: Duration = Duration::from_secs(1);
/// An answer that tells the kernel of a node is under way for so long at most: one of a large directory on a slow medium.
const ON_ITS_WAY_MAX: Duration = Duration::from_secs(60);
/// So long after the first look whether it has come is the second one, and each time twice as long.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// For how long a request waits for others who have the kernel write what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Patience {
    /// Its thread is to answer what the kernel writes.
    Brief,
    /// Nobody needs its thread.
    Endless,
}

/// What was changed beside the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// Names and attributes, and no data of files that were there before.
    Names,
    /// Anything.
    Anything,
}

/// What the kernel knows of an inode.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    Attributes,
    Everything,
}

thread_local! {
    /// This thread does what the kernel asks for.
    static ANSWERS: Cell<bool> = const { Cell::new(false) };
}

/// This thread answers the kernel from now on, which knows of the names that it changes.
pub(crate) fn note_thread_answers() {
    ANSWERS.set(true);
}

/// A name that was entered or taken away.
#[derive(PartialEq, Eq, Hash)]
struct Told {
    dir: InodeId,
    name: Vec<u8>,
    gone: Option<InodeId>,
}

/// Names in directories that the kernel knows which were changed beside it.
#[derive(Default)]
pub(crate) struct ChangedNames {
    /// Changes under way.
    change_count: AtomicUsize,
    /// Changes that were done, of which the kernel has not been told before.
    done_count: AtomicUsize,
    names: Mutex<Vec<Told>>,
}

/// A change that is under way, until it is dropped: who tells of it may panic.
struct UnderWay<'a>(&'a ChangedNames);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.change_count.fetch_sub(1, Ordering::AcqRel);
        self.0.done_count.fetch_add(1, Ordering::AcqRel);
    }
}

impl ChangedNames {
    /// So many changes were done: of those that follow the kernel is told for each node that is known now.
    pub(crate) fn done_count(&self) -> usize {
        self.done_count.load(Ordering::Acquire)
    }

    /// A change begins, and is under way until what is returned is dropped.
    fn begin(&self) -> UnderWay<'_> {
        self.change_count.fetch_add(1, Ordering::AcqRel);
        UnderWay(self)
    }

    /// To be called where the filesystem changes a name.
    pub(crate) fn note(&self, nodes: &Nodes, changed: ChangedName<'_>) {
        if ANSWERS.get() || self.change_count.load(Ordering::Acquire) == 0 {
            return;
        }
        // Of the names in others it remembers none.
        if nodes.number(changed.dir).is_some() {
            let ChangedName { dir, name, gone } = changed;
            self.names.lock().push(Told { dir, name: name.to_vec(), gone });
        }
    }
}

impl Server {
    /// The kernel believes attributes of an inode that a request changed besides: it is to ask again.
    pub(crate) fn forget_attributes(&self, id: InodeId) {
        if let Some(node) = self.nodes.number(id) {
            // One that it does not know needs no telling.
            let _ = self.invalidate(node, Known::Attributes);
        }
    }

    /// Has the filesystem changed beside the kernel, which believes what it was told: it is to ask again for what changed of names, for
    /// all attributes, and for data where that may have changed. Called without a handle, and not by who serves requests: the
    /// kernel may wait for those. Of a change that panics the kernel is told as far as it was done, before the panic goes on.
    pub fn change<T>(&self, changed: Changed, change: impl FnOnce() -> T) -> T {
        // It is not used any more where it panics.
        let change = || catch_unwind(AssertUnwindSafe(change));
        let under_way = self.changed_names.begin();
        let (result, grown) = match changed {
            Changed::Names => (change(), Vec::new()),
            Changed::Anything => self.change_anything(change),
        };
        drop(under_way);
        let names = std::mem::take(&mut *self.changed_names.names.lock());
        for told in names {
            self.forget_changed(&told);
        }
        let unknown = self.forget_all(changed);
        for (id, end) in grown {
            self.tell_end(id, end);
        }
        self.tell_later(unknown);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// A file has grown to `end`. Who stats it hears that from the kernel, which asks; who copies from it or looks at a map of it does not,
    /// and may have SIGBUS. What the kernel is given of a file moves the end that it knows: so it is given the last byte, and forgets that at
    /// once, as somebody may have written there. Before this it has written what it had behind the old end, which is no part of the file.
    fn tell_end(&self, id: InodeId, end: u64) {
        let (Some(node), Some(transport)) = (self.nodes.number(id), self.transport()) else {
            return;
        };
        let (since, last) = (self.ends.now(), end.saturating_sub(1));
        let mut byte = [0];
        let is_read = self.file(id).is_ok_and(|file| {
            let read = file.data.read(FileOffset::new(last), &mut byte);
            read.is_ok_and(|len| len == 1)
                && file.data.inode().is_ok_and(|inode| inode.size_bytes == end)
        });
        if !is_read {
            return;
        }
        self.ends.note_told(id, since);
        let mut message = Answer::with_room(NOTIFICATION_BYTES_MAX);
        message.put(&abi::NotifyStore { node, offset: last, size: 1, padding: 0 });
        message.put_bytes(&byte);
        // One that it does not know asks.
        let _ = transport.send(message.finish_notification(abi::NOTIFY_STORE));
        let mut message = forgotten(node, last, 1);
        let _ = transport.send(message.finish_notification(abi::NOTIFY_INVAL_INODE));
    }

    /// Returns the files that the kernel knew and that have grown, and to where.
    fn change_anything<T>(&self, change: impl FnOnce() -> T) -> (T, Vec<(InodeId, u64)>) {
        let under_way = self.ends.begin();
        let before: FxHashMap<InodeId, u64> = self.known_sizes().collect();
        let result = change();
        let mut moved = Vec::new();
        for (id, true_bytes) in self.known_sizes() {
            // One that it has been told of meanwhile may have had another size then, too.
            let known_bytes = before.get(&id).copied().unwrap_or(u64::MAX);
            if known_bytes != true_bytes {
                moved.push((id, MovedEnd { known_bytes, true_bytes }));
            }
        }
        let has_grown = |(_, end): &&(InodeId, MovedEnd)| end.known_bytes < end.true_bytes;
        let grown = moved.iter().filter(has_grown).map(|(id, end)| (*id, end.true_bytes)).collect();
        under_way.end(moved);
        self.files.note_capabilities();
        (result, grown)
    }

    /// The regular files that the kernel knows, and how long they are.
    fn known_sizes(&self) -> impl Iterator<Item = (InodeId, u64)> {
        let inodes = self.nodes.all().into_iter().filter_map(|(_, id)| self.fs.inode(id).ok());
        inodes
            .filter(|inode| inode.file_type() == FileType::Regular)
            .map(|inode| (inode.id, inode.size_bytes))
    }

    /// Returns the nodes that the kernel does not know: it is about to, or has forgotten them.
    pub(crate) fn forget_all(&self, changed: Changed) -> Vec<u64> {
        let mut unknown = Vec::new();
        for (node, id) in self.nodes.all() {
            let is_directory = self.fs.inode(id).is_ok_and(|inode| inode.is_dir());
            let known = match changed {
                // What a directory holds the kernel keeps as it does data.
                Changed::Names if !is_directory => Known::Attributes,
                _ => Known::Everything,
            };
            if self.invalidate(node, known) == Err(Errno::NOENT) {
                unknown.push(node);
            }
        }
        unknown
    }

    /// The kernel may be about to hear of these nodes what was looked up before a change: has it ask again as soon as it has heard. The
    /// wait for that ends after a while.
    fn tell_later(&self, mut unknown: Vec<u64>) {
        let Some(transport) = self.transport().filter(|_| !unknown.is_empty()) else { return };
        let (transport, nodes) = (Arc::clone(transport), Arc::clone(&self.nodes));
        let (is_told, told) = mpsc::channel();
        let begun = std::thread::Builder::new().spawn(move || {
            let (begun, mut pause) = (Instant::now(), LOOK_AGAIN);
            while !unknown.is_empty() && begun.elapsed() < ON_ITS_WAY_MAX {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PATIENCE);
                unknown.retain(|node| {
                    let mut message = invalidated(*node, Known::Attributes);
                    let message = message.finish_notification(abi::NOTIFY_INVAL_INODE);
                    // Forgotten here, it is so there, too.
                    nodes.inode(*node).is_some() && transport.send(message) == Err(Errno::NOENT)
                });
            }
            let _ = is_told.send(());
        });
        if begun.is_ok() {
            let _ = told.recv_timeout(PATIENCE);
        }
    }

    /// A name that was changed means something else now, or nothing. No other is told of: what is mounted below one is taken off by that.
    fn forget_changed(&self, told: &Told) {
        let Some(parent) = self.nodes.number(told.dir) else { return };
        let Some(transport) = self.transport() else { return };
        let gone = told.gone.filter(|gone| self.is_gone(*gone));
        // Of what is gone whoever watches it hears, and what it was is not to be found by who is in it.
        if let Some(child) = gone.and_then(|gone| self.nodes.number(gone))
            && self.fs.lookup(told.dir, &told.name).is_err()
        {
            let mut message = named(&told.name, |name_len| abi::NotifyDelete {
                parent,
                child,
                name_len,
                padding: 0,
            });
            // One that it does not remember needs no telling.
            let _ = transport.send(message.finish_notification(abi::NOTIFY_DELETE));
            return;
        }
        let mut message = invalidated_entry(parent, &told.name);
        let _ = transport.send(message.finish_notification(abi::NOTIFY_INVAL_ENTRY));
    }

    /// It has no name any more.
    fn is_gone(&self, id: InodeId) -> bool {
        match self.fs.inode(id) {
            // A deleted subvolume may be there yet.
            Ok(inode) => {
                inode.nlink == 0
                    || id == InodeId::root_of(id.root) && self.nodes.is_deleted(id.root)
            }
            Err(error) => matches!(error, ubtrfs_engine::Error::NotFound { .. }),
        }
    }

    /// Has the kernel write what it holds of files, by `-o writeback` or by stores to maps of them, and waits until it has: what it is
    /// told to forget it writes before. syncfs(2) alone begins to write, and does not wait for a server of type `fuse`. Called as
    /// [`Server::change`] is.
    pub fn bring_back(&self) {
        self.bring_back_where(|_| true);
    }

    /// Something that the kernel held back was not written.
    pub(crate) fn note_refused(&self, errno: Errno) {
        self.refused.lock().get_or_insert(errno);
    }

    /// Whether all that the kernel held back was written, since this was asked last. For who cannot ask the kernel by syncfs(2).
    ///
    /// # Errors
    /// The first that a write of it had.
    pub fn take_refused(&self) -> std::io::Result<()> {
        self.refused.lock().take().map_or(Ok(()), |errno| Err(errno.into()))
    }

    fn bring_back_where(&self, is_meant: impl Fn(InodeId) -> bool) {
        for (node, id) in self.nodes.all().into_iter().filter(|(_, id)| is_meant(*id)) {
            if self.fs.inode(id).is_ok_and(|inode| inode.file_type() == FileType::Regular) {
                let _ = self.invalidate(node, Known::Everything);
            }
        }
    }

    /// As [`Server::bring_back`], of the files of a subvolume, for a request of which the kernel holds no inode's lock. One at a time does so.
    ///
    /// # Errors
    /// `BUSY` where another one takes longer than who waits has patience.
    pub(crate) fn bring_back_subvolume(&self, root: RootId, patience: Patience) -> Result {
        let _turn = match patience {
            Patience::Brief => self.brings_back.try_lock_for(PATIENCE).ok_or(Errno::BUSY)?,
            Patience::Endless => self.brings_back.lock(),
        };
        self.bring_back_where(|id| id.root == root);
        Ok(())
    }

    /// As [`Server::bring_back`], of one file, for a request of which the kernel may hold the inode's lock, and holds no page.
    ///
    /// # Errors
    /// `BUSY` where it takes longer than who waits has patience.
    pub(crate) fn bring_back_file(&self, id: InodeId, patience: Patience) -> Result {
        let Some(node) = self.nodes.number(id) else { return Ok(()) };
        let message = invalidated(node, Known::Everything);
        match self.notify_in(patience, abi::NOTIFY_INVAL_INODE, message) {
            true => Ok(()),
            false => Err(Errno::BUSY),
        }
    }

    /// A request that is none for names made or took one away: the kernel is to know when that is answered. For that it waits for the
    /// directory's lock, which who has it may keep until he is answered something else.
    pub(crate) fn forget_name(&self, dir: InodeId, name: &[u8], patience: Patience) {
        let Some(node) = self.nodes.number(dir) else { return };
        // What a directory holds the kernel keeps as it does data.
        let _ = self.invalidate(node, Known::Everything);
        // Where there is no patience it knows soon after the answer.
        self.notify_in(patience, abi::NOTIFY_INVAL_ENTRY, invalidated_entry(node, name));
    }

    /// As [`Server::forget_name`], for a request of which the kernel holds the directory's lock: it knows soon after the answer.
    pub(crate) fn forget_name_later(&self, dir: InodeId, name: &[u8]) {
        if let Some(node) = self.nodes.number(dir) {
            drop(self.notify_later(abi::NOTIFY_INVAL_ENTRY, invalidated_entry(node, name)));
        }
    }

    /// Subvolumes are deleted: the kernel is to know no names in them any more, so that it forgets what nobody uses, now or when it is
    /// closed. Waits for nobody; where it is just being told of others, these have their turn when the cleaner passes by.
    pub(crate) fn let_go_of_subvolumes(&self, roots: &[RootId]) {
        roots.iter().for_each(|root| self.nodes.note_deleted(*root));
        let Some(transport) = self.transport().map(Arc::clone) else { return };
        if self.lets_go.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut places = self.nodes.stand_ins_in(roots);
        for (_, id) in self.nodes.all().into_iter().filter(|(_, id)| roots.contains(&id.root)) {
            // Its root directory has no name, nor has a stand-in here.
            let links = self.fs.links(id).unwrap_or_default();
            places.extend(links.into_iter().map(|link| (link.parent, link.name.into())));
        }
        let told = places.into_iter().filter_map(|(dir, name)| {
            let node = self.nodes.number(dir)?;
            Some(invalidated_entry(node, &name))
        });
        let (mut told, lets_go) = (told.collect::<Vec<_>>(), Arc::clone(&self.lets_go));
        let begun = self.beside.run(move || {
            for message in &mut told {
                let _ = transport.send(message.finish_notification(abi::NOTIFY_INVAL_ENTRY));
            }
            lets_go.store(false, Ordering::Release);
        });
        if begun.is_err() {
            self.lets_go.store(false, Ordering::Release);
        }
    }

    /// Refuses the root directory of a deleted subvolume, in which there is nothing any more, as in any directory that was removed. What is
    /// below stays for who is in there.
    pub(crate) fn check_not_deleted(&self, dir: InodeId) -> Result {
        let is_deleted = dir == InodeId::root_of(dir.root) && self.nodes.is_deleted(dir.root);
        if is_deleted { Err(Errno::NOENT) } else { Ok(()) }
    }

    /// A name was asked for or changed. In a deleted subvolume the kernel is not to remember that there is none: that keeps the directory.
    pub(crate) fn forget_name_of_deleted(&self, dir: InodeId, name: &[u8]) {
        if self.nodes.is_deleted(dir.root) {
            self.forget_name_later(dir, name);
        }
    }

    /// The kernel may have old data of a file.
    pub(crate) fn forget_data_later(&self, id: InodeId) {
        if let Some(node) = self.nodes.number(id) {
            let message = invalidated(node, Known::Everything);
            drop(self.notify_later(abi::NOTIFY_INVAL_INODE, message));
        }
    }

    /// As [`Server::forget_data_later`], for each of many requests at once: who has not begun does it for all.
    pub(crate) fn forget_refused(&self, id: InodeId, file: &Arc<UsedFile>) {
        let Some((node, transport)) = self.nodes.number(id).zip(self.transport()) else { return };
        if !file.note_forgotten_soon() {
            return;
        }
        let (waiting, transport) = (Arc::clone(file), Arc::clone(transport));
        let mut message = invalidated(node, Known::Everything);
        let begun = self.beside.run(move || {
            waiting.note_forgotten();
            let _ = transport.send(message.finish_notification(abi::NOTIFY_INVAL_INODE));
        });
        if begun.is_err() {
            file.note_forgotten();
        }
    }

    /// Tells the kernel what it waits with for others, who wait for a thread of this server: so not on one of these. What is returned
    /// hears when it is told.
    pub(crate) fn notify_later(
        &self,
        code: i32,
        mut message: Answer,
    ) -> Option<mpsc::Receiver<()>> {
        let transport = Arc::clone(self.transport()?);
        let (is_told, told) = mpsc::channel();
        let begun = self.beside.run(move || {
            let _ = transport.send(message.finish_notification(code));
            let _ = is_told.send(());
        });
        begun.is_ok().then_some(told)
    }

    /// Tells the kernel what it may wait with for others, who wait for this server. Returns whether it has taken it.
    pub(crate) fn notify_in(&self, patience: Patience, code: i32, message: Answer) -> bool {
        match patience {
            Patience::Brief => {
                let told = self.notify_later(code, message);
                told.is_some_and(|told| told.recv_timeout(PATIENCE).is_ok())
            }
            Patience::Endless => {
                // What it does not know it has nothing old of.
                let _ = self.notify(code, message);
                true
            }
        }
    }

    /// # Errors
    /// `NOENT` where the kernel does not know the node.
    fn invalidate(&self, node: u64, known: Known) -> Result {
        self.notify(abi::NOTIFY_INVAL_INODE, invalidated(node, known))
    }

    fn notify(&self, code: i32, mut message: Answer) -> Result {
        let transport = self.transport().ok_or(Errno::NOTCONN)?;
        transport.send(message.finish_notification(code))
    }
}

fn invalidated(node: u64, known: Known) -> Answer {
    let offset = if known == Known::Everything { 0 } else { -1 };
    let mut message = Answer::with_room(NOTIFICATION_BYTES_MAX);
    message.put(&abi::NotifyInvalInode { node, offset, len: 0 });
    message
}

fn invalidated_entry(parent: u64, name: &[u8]) -> Answer {
    named(name, |name_len| abi::NotifyInvalEntry { parent, name_len, flags: 0 })
}

/// A message about a name.
fn named<T: zerocopy::IntoBytes + zerocopy::Immutable>(
    name: &[u8],
    about: impl FnOnce(u32) -> T,
) -> Answer {
    let mut message = Answer::with_room(NOTIFICATION_BYTES_MAX);
    message.put(&about(u32::try_from(name.len()).unwrap_or(0)));
    message.put_bytes(name);
    message.put_bytes(&[0]);
    message
}
