//! What lies on a device already: so that nothing is overwritten unasked, and so that "this is no
//! btrfs" can say what it is instead.

use ubtrfs_ondisk::PhysicalAddr;
use ubtrfs_ondisk::superblock::{MAGIC, SUPERBLOCK_OFFSETS};

use crate::device::Device;
use crate::error::{Error, Op, Result};
use crate::partition;

/// Bytes at either end of a device that are looked at. All magic numbers lie in them.
const LOOKED_AT_BYTES: u64 = 1 << 20;

/// What a device holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Contents {
    /// Zeros, as far as was looked: the first and the last MiB.
    Empty,
    /// Something that is known by its magic number.
    Known(&'static str),
    /// Something else.
    Unknown,
}

/// Looks at what the device holds.
///
/// # Errors
/// `Io`.
pub fn contents(device: &dyn Device) -> Result<Contents> {
    let head = read(device, 0)?;
    if let Some(name) = name_of(&head) {
        return Ok(Contents::Known(name));
    }
    if partition::partitions(device).is_ok_and(|partitions| !partitions.is_empty()) {
        return Ok(Contents::Known("a partition table"));
    }
    let tail = read(device, device.len_bytes().saturating_sub(LOOKED_AT_BYTES))?;
    let is_empty = head.iter().chain(&tail).all(|byte| *byte == 0);
    Ok(if is_empty { Contents::Empty } else { Contents::Unknown })
}

fn read(device: &dyn Device, at: u64) -> Result<Vec<u8>> {
    let len = LOOKED_AT_BYTES.min(device.len_bytes() - at);
    let mut bytes = vec![0; usize::try_from(len).expect("at most a MiB")];
    let at = PhysicalAddr(at);
    device.read_at(at, &mut bytes).map_err(|source| {
        let device = device.name();
        Error::Io { device, op: Op::Read, offset: at, source }
    })?;
    Ok(bytes)
}

/// The name of what has its magic number in the first bytes of a device.
fn name_of(head: &[u8]) -> Option<&'static str> {
    let btrfs_at = usize::try_from(SUPERBLOCK_OFFSETS[0].0).ok()? + 64;
    if has(head, btrfs_at, &MAGIC.to_le_bytes()) {
        return Some("a btrfs filesystem");
    }
    let known = MAGIC_NUMBERS.iter().find(|(at, magic, _)| has(head, *at, magic));
    known.map(|(_, _, name)| *name)
}

fn has(head: &[u8], at: usize, magic: &[u8]) -> bool {
    head.get(at..).is_some_and(|rest| rest.starts_with(magic))
}

/// Offset, bytes, name. The weaker a magic number, the further down.
const MAGIC_NUMBERS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0, b"QFI\xfb", "a qcow2 image (convert it: qemu-img convert -O raw)"),
    (0, b"KDMV", "a VMDK image (convert it: qemu-img convert -O raw)"),
    (64, b"\x7f\x10\xda\xbe", "a VDI image (convert it: qemu-img convert -O raw)"),
    (0, b"vhdxfile", "a VHDX image (convert it: qemu-img convert -O raw)"),
    (0, b"btrfs-stream\0", "a btrfs send stream"),
    (0, b"XFSB", "an XFS filesystem"),
    (0, b"hsqs", "a squashfs filesystem"),
    (3, b"NTFS    ", "an NTFS filesystem"),
    (3, b"EXFAT   ", "an exFAT filesystem"),
    (54, b"FAT1", "a FAT filesystem"),
    (82, b"FAT32   ", "a FAT filesystem"),
    (257, b"ustar", "a tar archive"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\xfd7zXZ\0", "an xz file"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x7fELF", "a program"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (4096, b"EFI PART", "a partition table (GPT)"),
    (536, b"LVM2 001", "an LVM volume"),
    (4086, b"SWAPSPACE2", "a swap area"),
    (65526, b"SWAPSPACE2", "a swap area"),
    (32769, b"CD001", "an ISO 9660 filesystem"),
    (32768, b"JFS1", "a JFS filesystem"),
    (65588, b"ReIsEr", "a ReiserFS filesystem"),
    (
        4120,
        b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef",
        "a bcachefs filesystem",
    ),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of an MD array"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of an MD array"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS filesystem"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS filesystem"),
    (1030, b"\x34\x34", "a NILFS2 filesystem"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 filesystem"),
];

#[cfg(test)]
mod tests {
    use super::*;

    use crate::device::MemDevice;

    #[test]
    fn contents_of_magic_numbers_are_named() {
        for (at, magic, name) in MAGIC_NUMBERS {
            let device = MemDevice::new(16 << 20);
            device.write_at(PhysicalAddr(*at as u64), magic).unwrap();
            assert_eq!(contents(&device).unwrap(), Contents::Known(name));
        }
    }

    #[test]
    fn contents_without_magic_numbers_are_empty_or_unknown() {
        for len_bytes in [0, 1, 4096, 3 << 20] {
            let device = MemDevice::new(len_bytes);
            assert_eq!(contents(&device).unwrap(), Contents::Empty);
            if len_bytes > 0 {
                device.write_at(PhysicalAddr(len_bytes - 1), b"x").unwrap();
                assert_eq!(contents(&device).unwrap(), Contents::Unknown);
            }
        }
    }
}
