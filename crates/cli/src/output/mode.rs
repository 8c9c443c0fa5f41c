//! File types and permissions in words.

use ubtrfs_ondisk::dir::FileType;

/// Whether it is a device node, whose number counts in place of a size.
pub fn is_device(kind: FileType) -> bool {
    matches!(kind, FileType::BlockDevice | FileType::CharDevice)
}

/// Ten characters, as `ls -l` begins a line.
pub fn letters(mode: u32) -> String {
    let mut text = String::with_capacity(10);
    text.push(match FileType::from_mode(mode) {
        FileType::Directory => 'd',
        FileType::Regular => '-',
        FileType::Symlink => 'l',
        FileType::BlockDevice => 'b',
        FileType::CharDevice => 'c',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Unknown | FileType::Xattr => '?',
    });
    for (shift, special, set, unset) in
        [(6, 0o4000, 's', 'S'), (3, 0o2000, 's', 'S'), (0, 0o1000, 't', 'T')]
    {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => set,
            (true, false) => unset,
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// The kind of file, as `stat` words it.
pub fn kind_words(kind: FileType, size_bytes: u64) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::Regular if size_bytes == 0 => "regular empty file",
        FileType::Regular => "regular file",
        FileType::Symlink => "symbolic link",
        FileType::BlockDevice => "block special file",
        FileType::CharDevice => "character special file",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Unknown | FileType::Xattr => "weird file",
    }
}

/// The kind of file in one word, for JSON.
pub fn kind(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "directory",
        FileType::Regular => "file",
        FileType::Symlink => "symlink",
        FileType::BlockDevice => "block-device",
        FileType::CharDevice => "character-device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Unknown | FileType::Xattr => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_all_kinds_and_special_bits() {
        for (mode, text) in [
            (0o040_755, "drwxr-xr-x"),
            (0o100_644, "-rw-r--r--"),
            (0o120_777, "lrwxrwxrwx"),
            (0o104_755, "-rwsr-xr-x"),
            (0o102_644, "-rw-r-Sr--"),
            (0o041_777, "drwxrwxrwt"),
            (0o041_776, "drwxrwxrwT"),
            (0o020_620, "crw--w----"),
            (0o060_660, "brw-rw----"),
            (0o010_600, "prw-------"),
            (0o140_000, "s---------"),
        ] {
            assert_eq!(letters(mode), text);
        }
    }
}
