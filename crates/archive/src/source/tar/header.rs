//! The 512-byte headers of tar archives: v7, ustar (POSIX.1-1988), GNU and star.
//!
//! Facts from POSIX.1-2017 `pax`, and the manuals of GNU tar and star.

use crate::error::ArchiveProblem;
use ubtrfs_rt::Time;

/// Bytes of a header and of every block.
pub const BLOCK_BYTES: usize = 512;

/// A block.
pub type Block = [u8; BLOCK_BYTES];

/// What a member is, by its header's type letter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemberType {
    /// A regular file, perhaps sparse.
    Regular,
    /// A regular file with GNU's old sparse map.
    GnuSparse,
    /// Another name of an earlier member.
    HardLink,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A directory.
    Directory,
    /// A directory with GNU's listing of its names as content.
    GnuDumpDir,
    /// A fifo.
    Fifo,
    /// Extended header of the next member.
    Pax,
    /// Extended header of all that follow.
    PaxGlobal,
    /// GNU's long name of the next member.
    GnuLongName,
    /// GNU's long link target of the next member.
    GnuLongLink,
    /// The rest of a file that another volume began.
    GnuMultiVolume,
    /// A volume label.
    GnuVolume,
    /// Something else.
    Other(u8),
}

/// Which dialect the fields behind the first 257 bytes are of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Dialect {
    V7,
    Ustar,
    Star,
    Gnu,
}

/// A header whose checksum is right.
#[derive(Debug)]
pub struct Header<'a>(&'a Block);

impl<'a> Header<'a> {
    /// Checks the checksum.
    ///
    /// # Errors
    /// `BadChecksum`.
    pub fn new(block: &'a Block) -> Result<Self, ArchiveProblem> {
        let stored =
            number(&block[148..156], "checksum").map_err(|_| ArchiveProblem::BadChecksum)?;
        let unsigned: i64 = checksum_bytes(block).map(i64::from).sum();
        // Some old archives summed signed characters.
        let signed: i64 = checksum_bytes(block).map(|byte| i64::from(byte.cast_signed())).sum();
        if stored == unsigned || stored == signed {
            Ok(Self(block))
        } else {
            Err(ArchiveProblem::BadChecksum)
        }
    }

    fn dialect(&self) -> Dialect {
        match &self.0[257..265] {
            b"ustar  \0" => Dialect::Gnu,
            magic if magic.starts_with(b"ustar") && self.0[508..] == *b"tar\0" => Dialect::Star,
            magic if magic.starts_with(b"ustar") => Dialect::Ustar,
            _ => Dialect::V7,
        }
    }

    /// What the member is.
    pub fn member_type(&self) -> MemberType {
        match self.0[156] {
            b'0' | b'7' | 0 => MemberType::Regular,
            b'1' => MemberType::HardLink,
            b'2' => MemberType::Symlink,
            b'3' => MemberType::CharDevice,
            b'4' => MemberType::BlockDevice,
            b'5' => MemberType::Directory,
            b'6' => MemberType::Fifo,
            b'x' | b'X' => MemberType::Pax,
            b'g' => MemberType::PaxGlobal,
            b'L' => MemberType::GnuLongName,
            b'K' => MemberType::GnuLongLink,
            b'S' => MemberType::GnuSparse,
            b'D' => MemberType::GnuDumpDir,
            b'M' => MemberType::GnuMultiVolume,
            b'V' => MemberType::GnuVolume,
            other => MemberType::Other(other),
        }
    }

    /// The name, with ustar's prefix.
    pub fn path(&self) -> Vec<u8> {
        let name = text(&self.0[..100]);
        let prefix = match self.dialect() {
            Dialect::Ustar => text(&self.0[345..500]),
            Dialect::Star => text(&self.0[345..476]),
            Dialect::V7 | Dialect::Gnu => b"",
        };
        if prefix.is_empty() { name.to_vec() } else { [prefix, name].join(&b'/') }
    }

    /// The link's target.
    pub fn link_path(&self) -> &'a [u8] {
        text(&self.0[157..257])
    }

    /// Permission bits; type bits of old archives included.
    pub fn mode(&self) -> Result<i64, ArchiveProblem> {
        number(&self.0[100..108], "mode")
    }

    /// Owner.
    pub fn uid(&self) -> Result<i64, ArchiveProblem> {
        number(&self.0[108..116], "owner")
    }

    /// Group.
    pub fn gid(&self) -> Result<i64, ArchiveProblem> {
        number(&self.0[116..124], "group")
    }

    /// Bytes of content that follow.
    pub fn size(&self) -> Result<i64, ArchiveProblem> {
        number(&self.0[124..136], "size")
    }

    /// Modification time in seconds.
    pub fn mtime(&self) -> Result<i64, ArchiveProblem> {
        number(&self.0[136..148], "modification time")
    }

    /// A device's major and minor number.
    pub fn device(&self) -> Result<(i64, i64), ArchiveProblem> {
        if self.dialect() == Dialect::V7 {
            return Ok((0, 0));
        }
        Ok((
            number(&self.0[329..337], "device number")?,
            number(&self.0[337..345], "device number")?,
        ))
    }

    /// GNU's old sparse map: the entries in the header, whether more blocks follow, and the length
    /// of the file.
    pub fn gnu_sparse(&self) -> Result<(&'a [u8], bool, i64), ArchiveProblem> {
        let real_size = number(&self.0[483..495], "sparse file's length")?;
        Ok((&self.0[386..482], self.0[482] != 0, real_size))
    }
}

/// Bytes that the checksum sums: those of its own field count as spaces.
fn checksum_bytes(block: &Block) -> impl Iterator<Item = u8> + '_ {
    block.iter().enumerate().map(|(at, &byte)| match at {
        148..156 => b' ',
        _ => byte,
    })
}

/// The checksum of a header whose checksum field is still to be filled.
pub fn checksum(block: &Block) -> u32 {
    checksum_bytes(block).map(u32::from).sum()
}

/// The text of a field: up to its first NUL.
pub fn text(field: &[u8]) -> &[u8] {
    let len = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    &field[..len]
}

/// A number: octal text, or big-endian two's complement where the first byte is 0x80 or 0xff (GNU
/// and star).
pub fn number(field: &[u8], name: &'static str) -> Result<i64, ArchiveProblem> {
    let bad = || ArchiveProblem::BadNumber { field: name };
    match field.split_first() {
        Some((&first, rest)) if first & 0x80 != 0 => {
            // The first byte's remaining bits are the most significant ones.
            let start = if first & 0x40 != 0 {
                i128::from(first.cast_signed())
            } else {
                i128::from(first & 0x3f)
            };
            let value = rest.iter().fold(start, |value, &byte| value << 8 | i128::from(byte));
            i64::try_from(value).map_err(|_| bad())
        }
        _ => {
            let digits = text(field).trim_ascii();
            let mut value = 0_i64;
            for &digit in digits {
                if !(b'0'..=b'7').contains(&digit) {
                    return Err(bad());
                }
                value = value.checked_mul(8).ok_or_else(bad)? + i64::from(digit - b'0');
            }
            Ok(value)
        }
    }
}

/// A decimal number of an extended header.
pub fn decimal(digits: &[u8], name: &'static str) -> Result<u64, ArchiveProblem> {
    let bad = || ArchiveProblem::BadNumber { field: name };
    let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    digits.parse().map_err(|_| bad())
}

/// A time of an extended header: seconds with a sign and decimals.
pub fn decimal_time(digits: &[u8], name: &'static str) -> Result<Time, ArchiveProblem> {
    let bad = || ArchiveProblem::BadNumber { field: name };
    let (is_negative, digits) = match digits.split_first() {
        Some((b'-', rest)) => (true, rest),
        _ => (false, digits),
    };
    let mut parts = digits.splitn(2, |&byte| byte == b'.');
    let whole = decimal(parts.next().unwrap_or_default(), name)?;
    let whole = i64::try_from(whole).map_err(|_| bad())?;
    let mut nsec = 0_u32;
    let decimals = parts.next().unwrap_or_default();
    if !decimals.iter().all(u8::is_ascii_digit) {
        return Err(bad());
    }
    for place in 0..9 {
        nsec = nsec * 10 + u32::from(decimals.get(place).map_or(0, |digit| digit - b'0'));
    }
    Ok(match (is_negative, nsec) {
        (false, _) => Time { sec: whole, nsec },
        (true, 0) => Time { sec: -whole, nsec },
        (true, _) => Time { sec: -whole - 1, nsec: 1_000_000_000 - nsec },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_octal_and_binary() {
        assert_eq!(number(b"0000644\0", "x").unwrap(), 0o644);
        assert_eq!(number(b"   644 \0", "x").unwrap(), 0o644);
        assert_eq!(number(b"\0\0\0\0", "x").unwrap(), 0);
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0], "x").unwrap(), 256);
        assert_eq!(number(&[0xff; 12], "x").unwrap(), -1);
        assert!(number(b"12x\0", "x").is_err());
        assert!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "x").is_err());
        assert!(number(&[b'7'; 40], "x").is_err());
    }

    #[test]
    fn decimal_time_both_signs() {
        assert_eq!(decimal_time(b"12.5", "x").unwrap(), Time { sec: 12, nsec: 500_000_000 });
        assert_eq!(decimal_time(b"-1.25", "x").unwrap(), Time { sec: -2, nsec: 750_000_000 });
        assert_eq!(decimal_time(b"-3", "x").unwrap(), Time { sec: -3, nsec: 0 });
        assert_eq!(decimal_time(b"1.0000000019", "x").unwrap(), Time { sec: 1, nsec: 1 });
        assert!(decimal_time(b"1.x", "x").is_err());
        assert!(decimal_time(b"", "x").is_err());
        assert!(decimal_time(b"99999999999999999999", "x").is_err());
    }
}
