//! A btrfs filesystem mounted through FUSE: the kernel's requests to engine calls, errors to numbers.
//!
//! - `abi`, `message`: the protocol's structs, and taking them apart. A protocol layer of our own, as nodes must differ from inode
//!   numbers (`docs/adr/0003-own-fuse-protocol.md`).
//! - [`Transport`]: where requests come from; [`FuseDevice`] is `/dev/fuse`. `clones`: further descriptors of it.
//! - [`Queues`], `queue_threads`: queues that a transport has, and who serves them. `ring`: those of
//!   `/dev/fuse`, by io_uring, where it is switched on.
//! - `nodes`, `files`: which inodes the kernel knows, and which files are open.
//! - `ends`, `listed`: what of files and directories the kernel is not asked about.
//! - `first_open`: how it hears in time that it need not open files.
//! - `notify`: what the kernel is told unasked.
//! - `tail`: what the kernel has in memory behind the end of a file.
//! - `overdue`, `beside`: how requests wait for the kernel, which may wait for them. `owed`: by which way what they are answered goes.
//! - [`Server`] and `ops`: what each request does.
//! - `mount`: mounting and unmounting. `inherited`: what a process in the background has no use for.
//! - [`floor`]: a server that does nothing, for benchmarks.
//! - `control`: the socket by which commands reach the engine that serves a mount. `peer`: who is at its other end. `own`: what the system
//!   tells a process of itself, in another mount namespace, too.
//!
//! Writes go through at once: the kernel keeps what it wrote for reading only. But for stores to a shared map, and writes with
//! `-o writeback`: those it holds back, and they come marked WRITE_CACHE. What fsync (or msync) returned for is durable; the rest with the
//! next commit. That data was lost is told once a file, to the first who syncs it.
#![deny(unsafe_code)]

mod abi;
mod agree;
mod asker;
mod beside;
mod clones;
mod control;
mod ends;
mod errno;
mod files;
mod first_open;
#[doc(hidden)]
pub mod floor;
mod handed;
mod inherited;
mod leader;
mod listed;
mod message;
mod mount;
mod nodes;
mod notify;
mod ops;
mod overdue;
mod owed;
mod own;
mod peer;
mod queue_threads;
mod ring;
mod server;
mod settle;
mod tail;
mod transport;
mod unsettled;

pub use control::{
    Caller, ControlAnswer, ControlSocket, Said, ServingProcess, control, control_paths,
    control_within, serve_control,
};
pub use inherited::keep_from_programs_but;
pub use message::{Answer, Request};
pub use mount::{
    MountError, MountId, MountOptions, MountedDevice, Reached, Remount, Restriction,
    may_hold_block_devices, mount, reached, remount, unmount, unmount_by_force,
    unmount_when_unused,
};
pub use notify::Changed;
pub use own::{group, keep_own_proc, open_again, open_own_proc, user};
pub use ring::{RINGS_SWITCH, offers_rings};
pub use server::{Farewell, RequestCounts, ServeError, ServeOptions, Server, Syncs};
pub use transport::{Answers, FuseDevice, Queues, Received, Transport};
