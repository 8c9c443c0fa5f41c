//! The server of a mount: takes requests, lets the engine do them, answers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{OnceLock, Weak};
use std::time::Duration;

use rustix::io::Errno;
use ubtrfs_engine::{Error, Filesystem, Inode, InodeId};
use ubtrfs_iomap::FileOffset;
use ubtrfs_ondisk::RootId;
use ubtrfs_rt::{Arc, AtomicBool, AtomicUsize, Mutex, Ordering, Time};

use crate::abi::{self, Attr, EntryOut, InHeader, init, opcode};
use crate::agree::agree;
use crate::beside::Beside;
use crate::ends::Ends;
use crate::errno::errno;
use crate::files::{Files, UsedFile};
use crate::first_open::FirstOpen;
use crate::handed::Handed;
use crate::leader::{LOOKING, Leaders};
use crate::listed::Listed;
use crate::message::{Answer, Request, Result};
use crate::mount;
use crate::nodes::Nodes;
use crate::notify::{ChangedNames, note_thread_answers};
use crate::overdue::Overdue;
use crate::owed::Owed;
use crate::queue_threads::QueueThreads;
use crate::transport::Transport;
use crate::unsettled::Unsettled;

/// The most that one request writes or reads.
pub(crate) const DATA_BYTES_MAX: usize = 1 << 20;
/// What a request may have beside its data: header, arguments, names.
pub(crate) const REQUEST_BYTES_MAX: usize = DATA_BYTES_MAX + (16 << 10);
/// For so long the kernel need not ask again. Nobody else changes the filesystem.
pub(crate) const VALID_SECONDS: u64 = 1 << 32;
/// From this minor version of the protocol on (Linux 5.14, and 5.13 with the one before) the kernel looks itself at who sets flags of an
/// inode, as of any filesystem; before it hands the request on as it is.
const LOOKS_AT_FLAGS_MINOR: u32 = 34;
/// At least so many threads, as one may wait for a commit.
pub(crate) const THREADS_MIN: usize = 4;

/// What the kernel is told of an inode.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) attr: Attr,
    /// For so long it need not ask again.
    pub(crate) valid_seconds: u64,
    pub(crate) inode: Inode,
}

/// What is durable when a program hears that it is done.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Syncs {
    /// What it asks for, by fsync.
    #[default]
    Asked,
    /// Names and attributes, too.
    Names,
    /// Everything that it changes, but what it stores to maps.
    All,
}

/// How a filesystem is served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServeOptions {
    /// Who has answered a request looks for the next one so long before it sleeps. 0 saves that of the processor.
    pub looking: Duration,
    /// What is read of it is noted in the time of access, if the last such note is older than a change or a day. Of what the kernel has in
    /// memory nobody hears that it is read.
    pub notes_access: bool,
    /// But not of directories.
    pub leaves_directories: bool,
    /// The user and the group for which root is taken, as `fakeroot` does: what they make is root's. To be mounted without
    /// [`default_permissions`](crate::MountOptions::fake_root).
    pub fake_root: Option<(u32, u32)>,
    /// What is written stays with the kernel until it is synced, closed or old: then it decides on sizes and times of what it knows, and
    /// asks for no holes.
    pub writeback: bool,
    /// To measure against: the kernel is told of nothing that saves it requests. It opens and closes each file, asks for each attribute
    /// anew and for those of a directory's entries one by one.
    pub naive: bool,
    /// What is made durable before it is answered.
    pub syncs: Syncs,
    /// Requests come by io_uring where root has switched that on in the kernel. Off, they come by `/dev/fuse` alone, which is faster for a
    /// single program.
    pub uses_rings: bool,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            looking: LOOKING,
            notes_access: false,
            leaves_directories: false,
            fake_root: None,
            writeback: false,
            naive: false,
            syncs: Syncs::default(),
            uses_rings: false,
        }
    }
}

impl ServeOptions {
    /// Whether holes are told. The kernel does not bring what it holds back before it asks, so that what was written would look
    /// like a hole.
    pub(crate) fn asks_for_holes(&self) -> bool {
        !self.writeback
    }

    /// For so long the kernel keeps what it is told.
    pub(crate) fn valid_seconds(&self) -> u64 {
        if self.naive { 0 } else { VALID_SECONDS }
    }
}

/// A filesystem that is served to a kernel.
pub struct Server {
    pub(crate) fs: Filesystem,
    pub(crate) root: InodeId,
    pub(crate) nodes: Arc<Nodes>,
    pub(crate) changed_names: Arc<ChangedNames>,
    pub(crate) files: Files,
    first_open: FirstOpen,
    counts: Mutex<RequestCounts>,
    unsettled: Unsettled,
    leaders: Leaders,
    pub(crate) options: ServeOptions,
    /// Where to tell the kernel what it did not ask for.
    transport: OnceLock<Arc<dyn Transport>>,
    has_setxattr_ext: AtomicBool,
    /// The kernel does not look at who sets flags of an inode.
    leaves_flags_to_us: AtomicBool,
    /// Whether the mount was read-only as the table of mounts last changed.
    pub(crate) read_only_watch: Mutex<mount::ReadOnlyWatch>,
    /// The kernel may know inodes whose flags promise more than the mount does.
    pub(crate) has_synced: AtomicBool,
    device: OnceLock<String>,
    pub(crate) ends: Arc<Ends>,
    pub(crate) beside: Beside,
    pub(crate) overdue: Overdue,
    /// More than one thread answers.
    has_helpers: AtomicBool,
    /// Threads that take requests from the connection itself.
    takers: AtomicUsize,
    /// Held by who looks at an inode's flags to set them: another would be undone.
    pub(crate) flags: Mutex<()>,
    pub(crate) listed: Listed,
    /// Held by a request that waits until the kernel has written what it holds of files.
    pub(crate) brings_back: Mutex<()>,
    /// Requests that threads beside are at.
    pub(crate) handed: Arc<Handed>,
    /// For who does something for a request that outlasts it.
    pub(crate) itself: Weak<Self>,
    /// The first error since somebody asked of a write that the kernel had held back.
    pub(crate) refused: Mutex<Option<Errno>>,
    before_end: Mutex<Option<Hook>>,
    farewell: Mutex<Option<Farewell>>,
    /// The kernel is just being told of names in a deleted subvolume.
    pub(crate) lets_go: Arc<AtomicBool>,
}

type Hook = Box<dyn FnOnce(std::result::Result<(), &ServeError>) + Send>;

/// The answer to DESTROY, the last request of a mount that holds its block device. Who unmounts waits for it, so it is sent when
/// nobody has the device open any more.
#[derive(Debug)]
#[must_use = "who unmounts waits for it"]
pub struct Farewell {
    owed: Owed,
}

impl Farewell {
    /// Sends it. Until then it keeps the connection.
    pub fn send(self) {
        self.owed.send(Answer::with_room(0).finish(self.owed.unique(), Ok(())));
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("root", &self.root).finish_non_exhaustive()
    }
}

/// Sends an answer.
///
/// # Errors
/// The transport's.
pub(crate) fn send_answer(
    transport: &dyn Transport,
    answer: &[u8],
) -> std::result::Result<(), ServeError> {
    match transport.send(answer) {
        // Nobody waits for it any more; or all is unmounted, as the next look tells; or the kernel took it for malformed, and has had the
        // request fail.
        Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::INVAL) => Ok(()),
        Err(other) => Err(ServeError::Transport(other)),
    }
}

/// How often each operation was asked for, by its number in `linux/fuse.h`.
pub type RequestCounts = std::collections::BTreeMap<u32, u64>;

impl Server {
    /// Serves `fs` with the directory `root` as the top.
    pub fn new(fs: Filesystem, root: InodeId, options: ServeOptions) -> Arc<Self> {
        let nodes = Arc::new(Nodes::new(root, fs.subvolume_holds()));
        let changed_names = Arc::new(ChangedNames::default());
        let (known, noted) = (Arc::clone(&nodes), Arc::clone(&changed_names));
        fs.watch_names(move |changed| noted.note(&known, changed));
        let counts = Mutex::new(RequestCounts::new());
        let server = Arc::new_cyclic(|itself| Self {
            fs,
            root,
            nodes,
            changed_names,
            files: Files::default(),
            first_open: FirstOpen::default(),
            counts,
            unsettled: Unsettled::default(),
            leaders: Leaders::new(options.looking),
            options,
            transport: OnceLock::new(),
            has_setxattr_ext: AtomicBool::new(false),
            leaves_flags_to_us: AtomicBool::new(false),
            read_only_watch: Mutex::default(),
            has_synced: AtomicBool::new(false),
            device: OnceLock::new(),
            ends: Arc::default(),
            beside: Beside::default(),
            overdue: Overdue::default(),
            has_helpers: AtomicBool::new(false),
            takers: AtomicUsize::new(0),
            flags: Mutex::new(()),
            listed: Listed::default(),
            brings_back: Mutex::new(()),
            handed: Arc::default(),
            itself: Weak::clone(itself),
            refused: Mutex::new(None),
            before_end: Mutex::new(None),
            farewell: Mutex::new(None),
            lets_go: Arc::default(),
        });
        // The kernel need not ask for it before it uses it.
        if let Ok(top) = server.fs.inode(root) {
            server.note_syncs(top.flags);
        }
        let its = Weak::clone(&server.itself);
        server.fs.subvolume_holds().watch(move |roots| {
            if let Some(server) = its.upgrade() {
                server.let_go_of_subvolumes(roots);
            }
        });
        server
    }

    /// Whether one thread may wait for the kernel, as others answer it meanwhile.
    pub(crate) fn has_helpers(&self) -> bool {
        self.has_helpers.load(Ordering::Acquire)
    }

    /// So many threads take requests beside the one that calls [`Server::run`].
    pub fn further_threads(&self) -> usize {
        self.fs.runtime().executor.thread_count().max(THREADS_MIN) - 1
    }

    /// What was asked for so far.
    pub fn request_counts(&self) -> RequestCounts {
        self.counts.lock().clone()
    }

    /// Serves until the filesystem is unmounted; then all is brought to the medium and committed. `is_ready` is called when the
    /// kernel is answered, and nobody here uses the mount any more, but for who opens a file of it in vain (`first_open`). Who unmounts may wait for
    /// [`Server::take_farewell`] then.
    ///
    /// # Errors
    /// The transport's; the engine's where something could not be made durable.
    pub fn run(
        self: &Arc<Self>,
        transport: &Arc<dyn Transport>,
        is_ready: impl FnOnce(),
    ) -> std::result::Result<(), ServeError> {
        let served = self.serve(transport, is_ready);
        // Nobody answers the kernel any more, for which what the hook stops may wait: what there is, is made durable before.
        let finished = if served.is_err() { self.finish() } else { Ok(()) };
        let before_end = self.before_end.lock().take();
        if let Some(before_end) = before_end {
            before_end(served.as_ref().copied());
        }
        finished.and(self.finish())?;
        served
    }

    /// Has `hook` called when the last request was taken, before all is made durable: to stop what changes the filesystem besides.
    /// It is told of a failure: the mount is there yet, and answers nobody, so that nothing may be waited for that waits for the kernel.
    pub fn before_end(
        &self,
        hook: impl FnOnce(std::result::Result<(), &ServeError>) + Send + 'static,
    ) {
        *self.before_end.lock() = Some(Box::new(hook));
    }

    /// What is still to be sent when the filesystem is closed, if somebody waits for that.
    pub fn take_farewell(&self) -> Option<Farewell> {
        self.farewell.lock().take()
    }

    /// Nothing is used any more: makes all durable.
    fn finish(&self) -> ubtrfs_engine::Result<()> {
        self.files.close_all();
        for id in self.nodes.take_nameless() {
            // What cannot go now goes at the next open.
            let _ = self.fs.evict_now_or_later(id);
        }
        self.sync()
    }

    fn serve(
        self: &Arc<Self>,
        transport: &Arc<dyn Transport>,
        is_ready: impl FnOnce(),
    ) -> std::result::Result<(), ServeError> {
        let mut buffer = vec![0; REQUEST_BYTES_MAX];
        let _ = self.transport.set(Arc::clone(transport));
        let Some(agreed) = agree(&**transport, &mut buffer, &self.options)? else { return Ok(()) };
        self.has_setxattr_ext.store(agreed.flags & init::SETXATTR_EXT != 0, Ordering::Release);
        self.leaves_flags_to_us.store(agreed.minor < LOOKS_AT_FLAGS_MINOR, Ordering::Release);
        let executor = self.fs.runtime().executor;
        let mut threads = Vec::new();
        self.takers.store(1, Ordering::Release);
        let queue_threads = agreed.queues.map(|queues| {
            self.leaders.stop_looking();
            QueueThreads::spawn(queues, self, transport)
        });
        for _ in 0..self.further_threads() {
            let way = transport.further_way().unwrap_or_else(|| Arc::clone(transport));
            let server = Arc::clone(self);
            let work = move || {
                let mut buffer = vec![0; REQUEST_BYTES_MAX];
                // The first thread tells of what fails.
                let _ = server.take_requests(&way, &mut buffer);
            };
            self.takers.fetch_add(1, Ordering::AcqRel);
            match executor.spawn("ubtrfs-fuse", work) {
                Ok(Some(service)) => threads.push(service),
                // With fewer it takes longer.
                Ok(None) | Err(_) => {
                    self.takers.fetch_sub(1, Ordering::AcqRel);
                    break;
                }
            }
        }
        let is_answered = !threads.is_empty();
        self.has_helpers.store(is_answered, Ordering::Release);
        let server = Arc::clone(self);
        let settling = executor.spawn("ubtrfs-settle", move || server.settle_spaces());
        if !matches!(settling, Ok(Some(_))) {
            self.unsettled.end();
        }
        // Where OPEN is not refused there is nothing to be saved.
        if is_answered && !self.options.naive {
            self.first_open.run(&**transport);
        }
        is_ready();
        let result = self.take_requests(transport, &mut buffer);
        // Where this one has failed they may serve on.
        threads.into_iter().for_each(ubtrfs_rt::Service::join);
        self.unsettled.end();
        let queue_failure = queue_threads.and_then(|queue_threads| {
            if let Err(error) = &result {
                queue_threads.fail(error.errno());
            }
            queue_threads.join()
        });
        if let Ok(Some(settling)) = settling {
            settling.join();
        }
        result?;
        // What the kernel was waited for is over. Where nobody serves it any more it may not be, ever.
        self.handed.wait();
        queue_failure.map_or(Ok(()), |errno| Err(ServeError::Transport(errno)))
    }

    /// Has the kernel ask again for files that took another space than it was told, until the end.
    fn settle_spaces(&self) {
        while let Some(mut told) = self.unsettled.wait() {
            told.retain(|id, blocks| {
                let unstored_bytes = self.fs.unstored_bytes(*id);
                if unstored_bytes > 0 {
                    return true;
                }
                // One that is gone takes nothing, and nobody asks for it.
                let inode = self.inode(*id);
                if inode.is_ok_and(|inode| self.attr(&inode, 0).blocks != *blocks) {
                    self.forget_attributes(*id);
                }
                false
            });
            self.unsettled.put_back(told);
        }
    }

    /// As [`Server::work`]. The last thread to fail ends the connection: somebody may wait until the kernel has taken a notification, before
    /// which it writes by requests that nobody takes any more.
    fn take_requests(
        &self,
        transport: &Arc<dyn Transport>,
        buffer: &mut [u8],
    ) -> std::result::Result<(), ServeError> {
        let result = self.work(transport, buffer);
        if self.takers.fetch_sub(1, Ordering::AcqRel) == 1 && result.is_err() {
            transport.abort(self.device());
        }
        result
    }

    fn work(
        &self,
        transport: &Arc<dyn Transport>,
        buffer: &mut [u8],
    ) -> std::result::Result<(), ServeError> {
        let mut answer = Answer::with_room(DATA_BYTES_MAX);
        self.leaders.work(&**transport, buffer, |bytes| {
            let Some(request) = Request::parse(bytes) else { return Ok(()) };
            answer.clear();
            let unique = request.header.unique;
            answer.allow_early(Owed::new(unique, transport));
            // Who asks would wait for ever, and so would who unmounts, if a panic ended the thread.
            let answered =
                catch_unwind(AssertUnwindSafe(|| self.count_and_answer(request, &mut answer)));
            let result = answered.unwrap_or(Some(Err(Errno::IO)));
            match result {
                Some(result) if !answer.is_sent() => {
                    send_answer(&**transport, answer.finish(unique, result))
                }
                _ => Ok(()),
            }
        })
    }

    /// As [`Server::answer`], which it counts.
    pub(crate) fn count_and_answer(
        &self,
        request: Request<'_>,
        answer: &mut Answer,
    ) -> Option<Result> {
        note_thread_answers();
        *self.counts.lock().entry(request.header.opcode).or_default() += 1;
        self.answer(request, answer)
    }

    /// Does what a request asks for, or has it done; `None` where nobody waits for an answer.
    pub(crate) fn answer(&self, request: Request<'_>, answer: &mut Answer) -> Option<Result> {
        let node = request.header.node;
        match request.header.opcode {
            opcode::FORGET => {
                let _ = self.forget(node, request);
                return None;
            }
            opcode::BATCH_FORGET => {
                let _ = self.batch_forget(request);
                return None;
            }
            opcode::INTERRUPT => return None,
            // Of a mount that holds a block device. It is about no node.
            opcode::DESTROY => {
                *self.farewell.lock() = answer.owed().map(|owed| Farewell { owed: owed.clone() });
                return None;
            }
            _ => {}
        }
        if let Some(answered) = self.first_open.answer(request, answer) {
            return Some(answered);
        }
        let Some(id) = self.nodes.inode(node) else { return Some(Err(Errno::STALE)) };
        if self.hand_over(id, request, answer) {
            return Some(Ok(()));
        }
        let may_change_size =
            matches!(request.header.opcode, opcode::SETATTR | opcode::WRITE | opcode::FALLOCATE);
        let since = self.ends.now();
        if may_change_size {
            self.ends.note_touched(id);
        }
        let operation = request.header.opcode;
        let result = self.answer_of(id, request, answer).and_then(|()| self.settle(id, operation));
        if may_change_size {
            self.ends.note_done(id, since);
        }
        if result.is_err() && may_change_size {
            // It may be done in part, and the kernel believes that nothing was.
            self.forget_attributes(id);
        }
        Some(result)
    }

    fn answer_of(&self, id: InodeId, request: Request<'_>, answer: &mut Answer) -> Result {
        match request.header.opcode {
            opcode::LOOKUP => self.lookup(id, request, answer),
            opcode::GETATTR => self.getattr(id, answer),
            opcode::SETATTR => self.setattr(id, request, answer),
            opcode::STATX => self.statx(id, answer),
            opcode::READLINK => self.readlink(id, answer),
            opcode::SYMLINK => self.symlink(id, request, answer),
            opcode::MKNOD => self.mknod(id, request, answer),
            opcode::MKDIR => self.mkdir(id, request, answer),
            opcode::CREATE => self.create(id, request, answer),
            opcode::TMPFILE => self.tmpfile(id, request, answer),
            opcode::LINK => self.link(id, request, answer),
            opcode::UNLINK => self.unlink(id, request),
            opcode::RMDIR => self.rmdir(id, request),
            opcode::RENAME | opcode::RENAME2 => self.rename(id, request),
            opcode::READDIR => self.readdir(id, request, answer),
            opcode::READDIRPLUS => self.readdirplus(id, request, answer),
            opcode::READ => self.read(id, request, answer),
            opcode::WRITE => self.write(id, request, answer),
            // Of the top it stands for all: `sync` does not come here by itself.
            opcode::FSYNCDIR if id == self.root => self.sync().map_err(|error| errno(&error)),
            opcode::FSYNC | opcode::FSYNCDIR => self.fsync(id),
            opcode::FALLOCATE => self.fallocate(id, request, answer),
            opcode::LSEEK if self.options.asks_for_holes() => self.lseek(id, request, answer),
            opcode::COPY_FILE_RANGE => self.copy_file_range(id, request, answer),
            opcode::SETXATTR => self.setxattr(id, request),
            opcode::GETXATTR => self.getxattr(id, request, answer),
            opcode::LISTXATTR => self.listxattr(id, request, answer),
            opcode::REMOVEXATTR => self.removexattr(id, request),
            opcode::STATFS => self.statfs(id, answer),
            opcode::IOCTL => self.ioctl(id, request, answer),
            opcode::SYNCFS => self.sync().map_err(|error| errno(&error)),
            opcode::RELEASE | opcode::RELEASEDIR => Ok(()),
            opcode::OPEN | opcode::OPENDIR if self.options.naive => {
                answer.put(&abi::OpenOut::default());
                Ok(())
            }
            opcode::FLUSH if self.options.naive => Ok(()),
            // Among others OPEN, OPENDIR and FLUSH: told so once, the kernel does without them.
            _ => Err(Errno::NOSYS),
        }
    }

    /// Makes all durable that reached this server; of what cannot be written nothing is missing.
    ///
    /// # Errors
    /// As [`Filesystem::sync`]; and that with which data of a file was lost since this was called last, though each file's next fsync
    /// tells it, too.
    pub fn sync(&self) -> ubtrfs_engine::Result<()> {
        let synced = match self.fs.sync() {
            Err(Error::ReadOnly { .. }) => Ok(()),
            result => result,
        };
        let lost = self.files.take_errors();
        synced.and(lost)
    }

    pub(crate) fn transport(&self) -> Option<&Arc<dyn Transport>> {
        self.transport.get()
    }

    /// Whether SETXATTR has flags of its own.
    pub(crate) fn has_setxattr_ext(&self) -> bool {
        self.has_setxattr_ext.load(Ordering::Acquire)
    }

    /// Whether who sets flags of an inode is to be looked at here.
    pub(crate) fn leaves_flags_to_us(&self) -> bool {
        self.leaves_flags_to_us.load(Ordering::Acquire)
    }

    /// The mount's device number, as `/proc` writes it.
    pub(crate) fn device(&self) -> Option<&str> {
        self.device.get().map(String::as_str)
    }

    /// Says where this is mounted, by the device number that `/proc/self/mountinfo` shows: by it files that others have open are known to
    /// be of this mount.
    pub fn set_device(&self, device: &str) {
        let _ = self.device.set(device.to_owned());
    }

    /// Whether nothing may be changed through the mount, wherever it is seen: it may have become so after it was mounted.
    pub fn is_mounted_read_only(&self) -> bool {
        self.device().is_some_and(mount::is_read_only)
    }

    /// The time for what is changed now.
    pub(crate) fn now(&self) -> Time {
        self.fs.runtime().clock.now()
    }

    /// The user and the group that ask, as they are to be recorded.
    pub(crate) fn owner(&self, header: &InHeader) -> (u32, u32) {
        match self.options.fake_root {
            None => (header.uid, header.gid),
            Some((uid, gid)) => (
                if header.uid == uid { 0 } else { header.uid },
                if header.gid == gid { 0 } else { header.gid },
            ),
        }
    }

    /// The attributes of an inode.
    pub(crate) fn inode(&self, id: InodeId) -> Result<Inode> {
        self.fs.inode(id).map_err(|error| errno(&error))
    }

    /// A regular file.
    pub(crate) fn file(&self, id: InodeId) -> Result<Arc<UsedFile>> {
        self.files.open(&self.fs, id).map_err(|error| errno(&error))
    }

    /// The number that `stat` shows. Each subvolume counts from the same one, and a mount is one device: those of other
    /// subvolumes than the one that is mounted have their subvolume's number above their own.
    pub(crate) fn shown_number(&self, id: InodeId) -> u64 {
        if id.root == self.root.root {
            return id.inode.0;
        }
        number_beside(id.root, id.inode.0)
    }

    /// The attributes of an inode as the kernel is told them. What of a file is in memory only takes space as well, as in Linux: a
    /// file that takes none looks as if it were all holes.
    pub(crate) fn shown(&self, id: InodeId) -> Result<Shown> {
        // First: what is stored by the time of the second look is in the inode then. What is not may take another space later.
        let unstored_bytes = self.fs.unstored_bytes(id);
        let since = self.ends.now();
        let inode = self.inode(id)?;
        self.note_syncs(inode.flags);
        self.ends.note_told(id, since);
        let attr = self.attr(&inode, unstored_bytes);
        let may_be_kept = unstored_bytes == 0 || self.unsettled.note(id, attr.blocks);
        let valid_seconds = if may_be_kept { self.options.valid_seconds() } else { 0 };
        Ok(Shown { attr, valid_seconds, inode })
    }

    fn attr(&self, inode: &Inode, unstored_bytes: u64) -> Attr {
        let sector = self.fs.sectorsize_bytes();
        let taken_bytes = inode.nbytes.saturating_add(unstored_bytes);
        let seconds = |time: Time| u64::from_ne_bytes(time.sec.to_ne_bytes());
        Attr {
            ino: self.shown_number(inode.id),
            size: inode.size_bytes,
            blocks: taken_bytes.next_multiple_of(sector) / 512,
            atime: seconds(inode.atime),
            mtime: seconds(inode.mtime),
            ctime: seconds(inode.ctime),
            atimensec: inode.atime.nsec,
            mtimensec: inode.mtime.nsec,
            ctimensec: inode.ctime.nsec,
            mode: inode.mode,
            nlink: inode.nlink,
            uid: inode.uid,
            gid: inode.gid,
            rdev: encode_device(inode.device()),
            blksize: u32::try_from(sector).unwrap_or(4096),
            flags: 0,
        }
    }

    /// Tells the kernel of an inode, which it knows once more then.
    pub(crate) fn entry(&self, id: InodeId) -> Result<EntryOut> {
        let change_count = self.changed_names.done_count();
        let shown = self.shown(id)?;
        let node = self.nodes.remember(id);
        // Of what was changed since the look the kernel is told for nodes that were known by then.
        let is_new = self.changed_names.done_count() == change_count;
        Ok(EntryOut {
            node,
            entry_valid: self.options.valid_seconds(),
            attr_valid: if is_new { shown.valid_seconds } else { 0 },
            attr: shown.attr,
            ..EntryOut::default()
        })
    }

    fn forget(&self, node: u64, mut request: Request<'_>) -> Result {
        let abi::ForgetIn { count } = request.take()?;
        self.forget_node(node, count);
        Ok(())
    }

    fn batch_forget(&self, mut request: Request<'_>) -> Result {
        let abi::BatchForgetIn { count, .. } = request.take()?;
        for _ in 0..count {
            let abi::ForgetOne { node, count } = request.take()?;
            self.forget_node(node, count);
        }
        Ok(())
    }

    fn forget_node(&self, node: u64, count: u64) {
        let id = self.nodes.inode(node);
        if let Some(id) = self.nodes.forget(node, count) {
            self.evict(id);
        }
        if let Some(id) = id.filter(|id| self.nodes.number(*id).is_none()) {
            self.ends.forget(id);
        }
    }

    /// An inode may have lost its last name: it goes when the kernel does not know it any more.
    pub(crate) fn let_go(&self, id: Option<InodeId>) {
        if let Some(id) = id.filter(|id| self.nodes.lost_name(*id)) {
            self.evict(id);
        }
    }

    fn evict(&self, id: InodeId) {
        self.files.close(id);
        // What cannot go now goes later.
        let _ = self.fs.evict_now_or_later(id);
    }
}

/// A number for an inode of another subvolume: no two are the same as long as there are fewer than 2²³ subvolumes and 2⁴⁰ inodes in each.
fn number_beside(root: RootId, inode: u64) -> u64 {
    const INODE_BITS: u32 = 40;
    let above = root.0.wrapping_shl(INODE_BITS) ^ (root.0 >> (64 - INODE_BITS));
    above ^ inode
}

/// A device's number as the protocol has it: twelve bits of the major number, 20 of the minor, in the kernel's own order.
fn encode_device((major, minor): (u32, u32)) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}

/// The other way round.
pub(crate) fn decode_device(rdev: u32) -> (u32, u32) {
    (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xf_ff00)
}

/// A place in a file.
///
/// # Errors
/// `FBIG` behind the largest.
pub(crate) fn offset(bytes: u64) -> Result<FileOffset> {
    let offset = FileOffset::new(bytes);
    if offset > FileOffset::MAX { Err(Errno::FBIG) } else { Ok(offset) }
}

/// Why a mount ended other than by being unmounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The connection to the kernel failed.
    #[error("connection to the kernel: {0}")]
    Transport(Errno),
    /// The kernel speaks another protocol.
    #[error("the kernel speaks another version of the FUSE protocol")]
    Protocol,
    /// Something could not be made durable.
    #[error(transparent)]
    Engine(#[from] ubtrfs_engine::Error),
}

impl ServeError {
    fn errno(&self) -> Errno {
        match self {
            Self::Transport(errno) => *errno,
            Self::Protocol => Errno::PROTO,
            Self::Engine(error) => errno(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_same_there_and_back() {
        for device in [(0, 0), (1, 3), (8, 255), (259, 256), (4095, 0xf_ffff)] {
            assert_eq!(decode_device(encode_device(device)), device);
        }
        // As mknod(1) and stat(1) show /dev/null.
        assert_eq!(encode_device((1, 3)), 0x103);
    }

    #[test]
    fn numbers_of_subvolumes_differ() {
        let mut seen = std::collections::BTreeSet::new();
        for root in [256, 257, 1000, 1 << 22] {
            for inode in [256, 257, 1 << 39] {
                assert!(seen.insert(number_beside(RootId(root), inode)));
            }
        }
        assert!(!seen.contains(&256));
    }
}
