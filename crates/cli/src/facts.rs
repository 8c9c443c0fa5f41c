//! What is known of a file, in the words that the listings share.

use serde::Serialize;
use ubtrfs_engine::InodeId;
use ubtrfs_rt::Time;

use crate::output::{json, mode, time};

/// An inode's facts.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Which inode.
    pub id: InodeId,
    /// Type and permissions.
    pub mode: u32,
    /// Names that it has; 1 for a directory.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length.
    pub size_bytes: u64,
    /// Bytes that its extents hold, uncompressed.
    pub nbytes: u64,
    /// Of a device node.
    pub rdev: u64,
    /// Flags, `ubtrfs_ondisk::inode::flags`.
    pub flags: u64,
    /// The transaction that made it.
    pub generation: u64,
    /// The transaction that changed it last.
    pub transid: u64,
    /// Last access.
    pub atime: Time,
    /// Last change of the content.
    pub mtime: Time,
    /// Last change of the inode.
    pub ctime: Time,
    /// Birth.
    pub otime: Time,
}

impl Facts {
    /// Bytes allocated, in whole sectors, as Linux reports them in blocks of 512.
    pub fn allocated_bytes(&self, sectorsize_bytes: u64) -> u64 {
        self.nbytes.checked_next_multiple_of(sectorsize_bytes).unwrap_or(self.nbytes)
    }

    /// Major and minor number of a device node.
    pub fn device_numbers(&self) -> (u64, u64) {
        (self.rdev >> 20, self.rdev & 0xf_ffff)
    }

    /// For JSON.
    pub fn to_json(&self, sectorsize_bytes: u64) -> JsonFacts {
        let device = mode::is_device(self.mode).then(|| {
            let (major, minor) = self.device_numbers();
            JsonDevice { major, minor }
        });
        JsonFacts {
            kind: mode::kind(self.mode),
            mode: format!("{:04o}", self.mode & 0o7777),
            uid: self.uid,
            gid: self.gid,
            nlink: self.nlink,
            size: self.size_bytes,
            allocated: self.allocated_bytes(sectorsize_bytes),
            device,
            inode: self.id.inode.0,
            subvolume: self.id.root.0,
            generation: self.generation,
            transid: self.transid,
            flags: self.flag_names(),
            atime: time::rfc3339(self.atime),
            mtime: time::rfc3339(self.mtime),
            ctime: time::rfc3339(self.ctime),
            birth: time::rfc3339(self.otime),
        }
    }

    /// The inode's flags by name.
    pub fn flag_names(&self) -> Vec<&'static str> {
        use ubtrfs_ondisk::inode::flags;
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
        NAMES.iter().filter(|(bit, _)| self.flags & bit != 0).map(|(_, name)| *name).collect()
    }
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

/// [`Facts`] in JSON.
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
    major: u64,
    minor: u64,
}
