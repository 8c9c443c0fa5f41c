//! What a target already holds, by the magic numbers that `blkid` and the systems themselves go by.

use std::io;

use ubtrfs_ondisk::superblock::{MAGIC, SUPERBLOCK_OFFSETS};

/// Magic bytes, where they lie, and what they say.
struct Magic {
    at_bytes: u64,
    bytes: &'static [u8],
    name: &'static str,
}

const fn magic(at_bytes: u64, bytes: &'static [u8], name: &'static str) -> Magic {
    Magic { at_bytes, bytes, name }
}

const GPT: &str = "a partition table (GPT)";
const SWAP: &str = "swap space";
const LVM: &str = "an LVM physical volume";
const RAID: &str = "a Linux software RAID member";

/// By rank: what holds other things comes before what it may hold.
const MAGICS: &[Magic] = &[
    magic(64 * 1024 + 64, b"_BHRfS_M", "a btrfs filesystem"),
    magic(0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    magic(16 * 1024, b"SKUL\xba\xbe", "a LUKS encrypted volume"),
    magic(0, b"XFSB", "an XFS filesystem"),
    magic(1024 + 56, &[0x53, 0xef], "an ext2, ext3 or ext4 filesystem"),
    magic(1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS filesystem"),
    magic(1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS filesystem"),
    magic(1024 + 6, &[0x34, 0x34], "a NILFS2 filesystem"),
    magic(1024, b"H+\x00\x04", "an HFS+ filesystem"),
    magic(1024, b"HX\x00\x05", "an HFS+ filesystem"),
    magic(32, b"NXSB", "an APFS container"),
    magic(0, b"hsqs", "a SquashFS filesystem"),
    magic(0, b"sqsh", "a SquashFS filesystem"),
    magic(3, b"NTFS    ", "an NTFS filesystem"),
    magic(3, b"EXFAT   ", "an exFAT filesystem"),
    magic(3, b"-FVE-FS-", "a BitLocker volume"),
    magic(0x36, b"FAT12   ", "a FAT filesystem"),
    magic(0x36, b"FAT16   ", "a FAT filesystem"),
    magic(0x52, b"FAT32   ", "a FAT filesystem"),
    magic(4096 + 24, BCACHEFS, "a bcachefs filesystem"),
    magic(4096 + 24, BCACHE, "a bcache device"),
    magic(64 * 1024 + 52, b"ReIsErFs", "a ReiserFS filesystem"),
    magic(64 * 1024 + 52, b"ReIsEr2Fs", "a ReiserFS filesystem"),
    magic(64 * 1024 + 52, b"ReIsEr3Fs", "a ReiserFS filesystem"),
    magic(64 * 1024, &[0x01, 0x16, 0x19, 0x70], "a GFS2 filesystem"),
    magic(8 * 1024, b"OCFSV2", "an OCFS2 filesystem"),
    magic(32 * 1024, b"JFS1", "a JFS filesystem"),
    magic(32 * 1024 + 1, b"CD001", "an ISO 9660 filesystem"),
    magic(32 * 1024 + 1, b"BEA01", "a UDF filesystem"),
    magic(0, b"bluestore block device", "a Ceph BlueStore device"),
    magic(4096 - 10, b"SWAPSPACE2", SWAP),
    magic(4096 - 10, b"SWAP-SPACE", SWAP),
    magic(16384 - 10, b"SWAPSPACE2", SWAP),
    magic(65536 - 10, b"SWAPSPACE2", SWAP),
    magic(0, b"LABELONE", LVM),
    magic(512, b"LABELONE", LVM),
    magic(1024, b"LABELONE", LVM),
    magic(1536, b"LABELONE", LVM),
    magic(0, &[0xfc, 0x4e, 0x2b, 0xa9], RAID),
    magic(4096, &[0xfc, 0x4e, 0x2b, 0xa9], RAID),
    magic(512, b"EFI PART", GPT),
    magic(4096, b"EFI PART", GPT),
    magic(0, b"QFI\xfb", "a QCOW2 disk image"),
    magic(0, b"vhdxfile", "a VHDX disk image"),
    magic(0, b"KDMV", "a VMDK disk image"),
];

const BCACHEFS: &[u8] = &[
    0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef,
];
const BCACHE: &[u8] = &[
    0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81,
];

/// Uberblocks of a ZFS label: one a KiB in its second half.
const ZFS_UBERBLOCKS_AT: std::ops::Range<u64> = 128 * 1024..256 * 1024;
const ZFS_MAGIC: u64 = 0x00ba_b10c;

/// Where a superblock has its magic.
const SUPERBLOCK_MAGIC_AT: u64 = 64;

/// The head of the target: everything above lies in it.
const HEAD_BYTES: usize = 256 * 1024;

/// Looks at a target of `len_bytes` through `read`, which fills its buffer from an offset. Returns
/// what it holds, if that has a name.
///
/// # Errors
/// Those of `read`.
pub fn find(
    len_bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<Option<&'static str>> {
    let head_len = usize::try_from(len_bytes).unwrap_or(usize::MAX).min(HEAD_BYTES);
    let mut head = vec![0; head_len];
    read(0, &mut head)?;
    if let Some(name) = name_of_head(&head) {
        return Ok(Some(name));
    }
    if let Some(name) = name_of_tail(len_bytes, &mut read)? {
        return Ok(Some(name));
    }
    // Where the first copy was overwritten, the others still lead to the files.
    for copy in SUPERBLOCK_OFFSETS {
        let at = copy.0 + SUPERBLOCK_MAGIC_AT;
        if at + 8 <= len_bytes && read_array::<8>(at, &mut read)? == MAGIC.to_le_bytes() {
            return Ok(Some("a btrfs filesystem, whose first superblock is overwritten"));
        }
    }
    Ok(None)
}

fn name_of_head(head: &[u8]) -> Option<&'static str> {
    let has = |magic: &Magic| {
        let at = usize::try_from(magic.at_bytes).ok()?;
        let end = at.checked_add(magic.bytes.len())?;
        (head.get(at..end)? == magic.bytes).then_some(magic.name)
    };
    if let Some(name) = MAGICS.iter().find_map(has) {
        return Some(name);
    }
    if has_zfs_uberblock(head) {
        return Some("a ZFS pool member");
    }
    has_mbr(head).then_some("a partition table (MBR)")
}

fn has_zfs_uberblock(head: &[u8]) -> bool {
    ZFS_UBERBLOCKS_AT.step_by(1024).any(|at| {
        let Ok(at) = usize::try_from(at) else { return false };
        let Some(Ok(bytes)) = head.get(at..at + 8).map(<[u8; 8]>::try_from) else { return false };
        u64::from_le_bytes(bytes) == ZFS_MAGIC || u64::from_be_bytes(bytes) == ZFS_MAGIC
    })
}

/// The signature and one entry with a type.
fn has_mbr(head: &[u8]) -> bool {
    head.get(510..512) == Some(&[0x55, 0xaa])
        && head.get(446..510).is_some_and(|table| table.chunks_exact(16).any(|entry| entry[4] != 0))
}

/// What announces itself at the end: the second GPT, and RAID of the versions 0.90 and 1.0.
fn name_of_tail(
    len_bytes: u64,
    read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<Option<&'static str>> {
    const GPT_AT: [u64; 2] = [512, 4096];
    for from_end in GPT_AT {
        if let Some(at) = len_bytes.checked_sub(from_end)
            && read_array::<8>(at, read)? == *b"EFI PART"
        {
            return Ok(Some(GPT));
        }
    }
    let raid_090 = (len_bytes & !0xffff).checked_sub(64 * 1024);
    let raid_10 = len_bytes.checked_sub(8 * 1024).map(|at| at & !0xfff);
    for at in [raid_090, raid_10].into_iter().flatten() {
        let found = u32::from_le_bytes(read_array::<4>(at, read)?);
        if found == 0xa92b_4efc {
            return Ok(Some(RAID));
        }
    }
    Ok(None)
}

fn read_array<const N: usize>(
    at: u64,
    read: &mut impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    read(at, &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_in(bytes: &[u8]) -> Option<&'static str> {
        find(bytes.len() as u64, |at, buf| {
            let at = usize::try_from(at).unwrap();
            buf.copy_from_slice(&bytes[at..at + buf.len()]);
            Ok(())
        })
        .unwrap()
    }

    #[test]
    fn find_each_magic_by_its_name() {
        for magic in MAGICS {
            let mut bytes = vec![0; 1 << 20];
            let at = usize::try_from(magic.at_bytes).unwrap();
            bytes[at..at + magic.bytes.len()].copy_from_slice(magic.bytes);
            assert_eq!(find_in(&bytes), Some(magic.name));
        }
    }

    #[test]
    fn find_blank_and_tiny_targets_hold_nothing() {
        for len in [0, 1, 511, 512, 4096, 100_000, 1 << 20] {
            assert_eq!(find_in(&vec![0; len]), None, "{len}");
        }
    }

    #[test]
    fn find_btrfs_by_any_copy_of_its_superblock() {
        for copy in SUPERBLOCK_OFFSETS {
            let found = find(1 << 40, |at, buf| {
                buf.fill(0);
                if at == copy.0 + SUPERBLOCK_MAGIC_AT {
                    buf.copy_from_slice(&MAGIC.to_le_bytes());
                }
                Ok(())
            });
            assert!(found.unwrap().unwrap().starts_with("a btrfs filesystem"), "{copy}");
        }
    }

    #[test]
    fn find_partition_tables_and_tails() {
        let mut mbr = vec![0; 1 << 20];
        mbr[510] = 0x55;
        mbr[511] = 0xaa;
        assert_eq!(find_in(&mbr), None);
        mbr[446 + 4] = 0x83;
        assert_eq!(find_in(&mbr), Some("a partition table (MBR)"));

        let mut gpt = vec![0; 1 << 20];
        let at = gpt.len() - 512;
        gpt[at..at + 8].copy_from_slice(b"EFI PART");
        assert_eq!(find_in(&gpt), Some(GPT));

        let mut raid = vec![0; 1 << 20];
        let at = raid.len() - 8192;
        raid[at..at + 4].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
        assert_eq!(find_in(&raid), Some(RAID));
    }

    #[test]
    fn find_zfs_by_any_uberblock() {
        let mut zfs = vec![0; 1 << 20];
        zfs[130 * 1024..130 * 1024 + 8].copy_from_slice(&ZFS_MAGIC.to_be_bytes());
        assert_eq!(find_in(&zfs), Some("a ZFS pool member"));
    }
}
