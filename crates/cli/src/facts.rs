//! What is known of a file, in the words that the listings share.

use serde::Serialize;
use ubtrfs_engine::Inode;
use ubtrfs_ondisk::inode::flags;

use crate::output::{json, mode, time};

/// Bytes allocated, in whole sectors, as Linux reports them in blocks of 512.
pub fn allocated_bytes(inode: &Inode, sectorsize_bytes: u64) -> u64 {
    inode.nbytes.checked_next_multiple_of(sectorsize_bytes).unwrap_or(inode.nbytes)
}

/// The inode's flags by name.
pub fn flag_names(inode: &Inode) -> Vec<&'static str> {
    const NAMES: [(u64, &str); 13] = [
        (flags::NODATASUM, "nodatasum"),
        (flags::NODATACOW, "nodatacow"),
        (flags::READONLY, "readonly"),
        (flags::NOCOMPRESS, "nocompress"),
        (flags::PREALLOC, "prealloc"),
        (flags::SYNC, "sync"),
        (flags::IMMUTABLE, "immutable"),
        (flags::APPEND, "append"),
        (flags::NODUMP, "nodump"),
        (flags::NOATIME, "noatime"),
        (flags::DIRSYNC, "dirsync"),
        (flags::COMPRESS, "compress"),
        (flags::RO_VERITY, "verity"),
    ];
    NAMES.iter().filter(|(bit, _)| inode.flags & bit != 0).map(|(_, name)| *name).collect()
}

/// A name or path in JSON, lossless.
#[derive(Serialize)]
pub struct JsonPath {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
}

impl JsonPath {
    /// Of these bytes.
    pub fn new(path: &[u8]) -> Self {
        Self { path: json::text(path), path_hex: json::hex_if_lossy(path) }
    }
}

/// An inode in JSON.
#[derive(Serialize)]
pub struct JsonFacts {
    #[serde(rename = "type")]
    kind: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    nlink: u32,
    size: u64,
    allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<JsonDevice>,
    inode: u64,
    subvolume: u64,
    generation: u64,
    transid: u64,
    flags: Vec<&'static str>,
    atime: String,
    mtime: String,
    ctime: String,
    birth: String,
}

#[derive(Serialize)]
struct JsonDevice {
    major: u32,
    minor: u32,
}

impl JsonFacts {
    /// Of this inode.
    pub fn new(inode: &Inode, sectorsize_bytes: u64) -> Self {
        let (major, minor) = inode.device();
        Self {
            kind: mode::kind(inode.file_type()),
            mode: format!("{:04o}", inode.mode & 0o7777),
            uid: inode.uid,
            gid: inode.gid,
            nlink: inode.nlink,
            size: inode.size_bytes,
            allocated: allocated_bytes(inode, sectorsize_bytes),
            device: mode::is_device(inode.file_type()).then_some(JsonDevice { major, minor }),
            inode: inode.id.inode.0,
            subvolume: inode.id.root.0,
            generation: inode.generation.0,
            transid: inode.transid.0,
            flags: flag_names(inode),
            atime: time::rfc3339(inode.atime),
            mtime: time::rfc3339(inode.mtime),
            ctime: time::rfc3339(inode.ctime),
            birth: time::rfc3339(inode.otime),
        }
    }
}
