//! What a tree is made of, whether it comes from a directory, an archive or an image.

use ubtrfs_rt::Time;

/// Owner, permissions and times of a file of any kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Metadata {
    /// Permission bits with set-user-id, set-group-id and sticky: the low twelve of `st_mode`.
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last access, where the source knows it.
    pub atime: Option<Time>,
    /// Last change of the content.
    pub mtime: Time,
}

/// The bits that [`Metadata::permissions`] may have.
pub const PERMISSION_BITS: u32 = 0o7777;

/// The type bits of `st_mode`.
pub mod file_type {
    /// All of them.
    pub const MASK: u32 = 0o170_000;
    /// Fifo.
    pub const FIFO: u32 = 0o010_000;
    /// Character device.
    pub const CHAR: u32 = 0o020_000;
    /// Directory.
    pub const DIRECTORY: u32 = 0o040_000;
    /// Block device.
    pub const BLOCK: u32 = 0o060_000;
    /// Regular file.
    pub const REGULAR: u32 = 0o100_000;
    /// Symbolic link.
    pub const SYMLINK: u32 = 0o120_000;
    /// Socket.
    pub const SOCKET: u32 = 0o140_000;
}

/// A device's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceNumber {
    /// Driver.
    pub major: u32,
    /// Device of the driver.
    pub minor: u32,
}

/// A file that is neither directory nor regular.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Special<T> {
    /// A symbolic link to `T`.
    Symlink(T),
    /// A character device.
    CharDevice(DeviceNumber),
    /// A block device.
    BlockDevice(DeviceNumber),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl<T> Special<T> {
    /// The type bits of its `st_mode`.
    pub fn type_bits(&self) -> u32 {
        match self {
            Self::Symlink(_) => file_type::SYMLINK,
            Self::CharDevice(_) => file_type::CHAR,
            Self::BlockDevice(_) => file_type::BLOCK,
            Self::Fifo => file_type::FIFO,
            Self::Socket => file_type::SOCKET,
        }
    }

    /// What a user calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Symlink(_) => "symbolic link",
            Self::CharDevice(_) => "character device",
            Self::BlockDevice(_) => "block device",
            Self::Fifo => "fifo",
            Self::Socket => "socket",
        }
    }

    /// The same kind, with another form of the symbolic link's target.
    pub fn map<U>(self, target: impl FnOnce(T) -> U) -> Special<U> {
        match self {
            Self::Symlink(t) => Special::Symlink(target(t)),
            Self::CharDevice(number) => Special::CharDevice(number),
            Self::BlockDevice(number) => Special::BlockDevice(number),
            Self::Fifo => Special::Fifo,
            Self::Socket => Special::Socket,
        }
    }
}

/// A range of a file that holds data; what lies between segments is a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Where it begins in the file.
    pub offset: u64,
    /// Its length.
    pub len_bytes: u64,
}

impl Segment {
    /// One past its last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.len_bytes
    }
}

/// Widens each segment to multiples of `align_bytes` (the last to the end of the file) and joins
/// those that then touch. `segments` ascend and lie below `size_bytes`.
pub fn align_segments(segments: &[Segment], align_bytes: u64, size_bytes: u64) -> Vec<Segment> {
    let mut aligned: Vec<Segment> = Vec::with_capacity(segments.len());
    for segment in segments.iter().filter(|s| s.len_bytes > 0) {
        let start = segment.offset - segment.offset % align_bytes;
        let end = segment.end().checked_next_multiple_of(align_bytes).unwrap_or(size_bytes);
        let end = end.min(size_bytes);
        match aligned.last_mut() {
            Some(last) if last.end() >= start => {
                last.len_bytes = last.len_bytes.max(end - last.offset);
            }
            _ => aligned.push(Segment { offset: start, len_bytes: end - start }),
        }
    }
    aligned
}

/// Whether btrfs stores extended attributes of that name.
pub fn xattr_is_storable(name: &[u8]) -> bool {
    const PREFIXES: [&[u8]; 4] = [b"user.", b"trusted.", b"security.", b"btrfs."];
    const NAMES: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    PREFIXES.iter().any(|prefix| name.len() > prefix.len() && name.starts_with(prefix))
        || NAMES.contains(&name)
}

/// Whether the attribute is an access control list.
pub fn xattr_is_acl(name: &[u8]) -> bool {
    name.starts_with(b"system.posix_acl_")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(offset: u64, len_bytes: u64) -> Segment {
        Segment { offset, len_bytes }
    }

    #[test]
    fn align_segments_close_neighbours_joined() {
        let segments = [segment(100, 10), segment(5000, 1), segment(8191, 1), segment(20_000, 500)];
        let aligned = align_segments(&segments, 4096, 20_500);
        assert_eq!(aligned, [segment(0, 8192), segment(16_384, 4116)]);
    }

    #[test]
    fn align_segments_empty_ones_dropped() {
        assert_eq!(align_segments(&[segment(9000, 0)], 4096, 9000), []);
    }
}
