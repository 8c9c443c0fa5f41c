//! What the engine's errors are for a system call.

use rustix::io::Errno;
use ubtrfs_engine::Error;

/// The number that Linux's btrfs gives in the same case.
pub(crate) fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound { .. } => Errno::NOENT,
        Error::Exists { .. } => Errno::EXIST,
        Error::NotDirectory { .. } => Errno::NOTDIR,
        Error::IsDirectory { .. } => Errno::ISDIR,
        Error::NotEmpty { .. } => Errno::NOTEMPTY,
        Error::TooLong { .. } => Errno::NAMETOOLONG,
        Error::InvalidArgument { .. } => Errno::INVAL,
        Error::OtherSubvolume { .. } => Errno::XDEV,
        Error::NotPermitted { .. } => Errno::PERM,
        Error::Limit { .. } => Errno::MLINK,
        Error::NoSpace { .. } => Errno::NOSPC,
        Error::ReadOnly { .. } | Error::Aborted { .. } => Errno::ROFS,
        Error::Unsupported { .. } => Errno::OPNOTSUPP,
        Error::File(ubtrfs_iomap::Error::TooLarge { .. }) => Errno::FBIG,
        Error::File(ubtrfs_iomap::Error::NoData { .. }) => Errno::NXIO,
        Error::File(_) => Errno::INVAL,
        _ => Errno::IO,
    }
}
