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
        Error::TooManyLinks { .. } => Errno::MLINK,
        Error::HashFull { .. } => Errno::OVERFLOW,
        Error::Limit { .. } | Error::NoSpace { .. } => Errno::NOSPC,
        Error::ReadOnly { .. } | Error::Aborted { .. } => Errno::ROFS,
        Error::Unsupported { .. } => Errno::OPNOTSUPP,
        Error::File(ubtrfs_iomap::Error::TooLarge { .. }) => Errno::FBIG,
        Error::File(ubtrfs_iomap::Error::NoData { .. }) => Errno::NXIO,
        Error::File(_) => Errno::INVAL,
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each limit was EMLINK: a program that copies links made a copy instead, of what had no room at all.
    #[test]
    fn limits_have_the_numbers_of_linux() {
        let what = || String::from("something");
        assert_eq!(errno(&Error::TooManyLinks { what: what() }), Errno::MLINK);
        assert_eq!(errno(&Error::HashFull { what: what() }), Errno::OVERFLOW);
        assert_eq!(errno(&Error::Limit { what: what() }), Errno::NOSPC);
    }
}
