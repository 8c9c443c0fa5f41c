//! File types and permissions in words.

/// `S_IFMT`.
pub const TYPE_MASK: u32 = 0o170_000;
/// `S_IFDIR`.
pub const DIRECTORY: u32 = 0o040_000;
/// `S_IFREG`.
pub const REGULAR: u32 = 0o100_000;
/// `S_IFLNK`.
pub const SYMLINK: u32 = 0o120_000;
/// `S_IFBLK`.
pub const BLOCK_DEVICE: u32 = 0o060_000;
/// `S_IFCHR`.
pub const CHARACTER_DEVICE: u32 = 0o020_000;
/// `S_IFIFO`.
pub const FIFO: u32 = 0o010_000;
/// `S_IFSOCK`.
pub const SOCKET: u32 = 0o140_000;

/// Whether `mode` is a directory's.
pub fn is_directory(mode: u32) -> bool {
    mode & TYPE_MASK == DIRECTORY
}

/// Whether `mode` is a symbolic link's.
pub fn is_symlink(mode: u32) -> bool {
    mode & TYPE_MASK == SYMLINK
}

/// Whether `mode` is a device node's, whose number counts in place of a size.
pub fn is_device(mode: u32) -> bool {
    matches!(mode & TYPE_MASK, BLOCK_DEVICE | CHARACTER_DEVICE)
}

/// Ten characters, as `ls -l` begins a line.
pub fn letters(mode: u32) -> String {
    let mut text = String::with_capacity(10);
    text.push(match mode & TYPE_MASK {
        DIRECTORY => 'd',
        REGULAR => '-',
        SYMLINK => 'l',
        BLOCK_DEVICE => 'b',
        CHARACTER_DEVICE => 'c',
        FIFO => 'p',
        SOCKET => 's',
        _ => '?',
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
pub fn kind_words(mode: u32, size_bytes: u64) -> &'static str {
    match mode & TYPE_MASK {
        DIRECTORY => "directory",
        REGULAR if size_bytes == 0 => "regular empty file",
        REGULAR => "regular file",
        SYMLINK => "symbolic link",
        BLOCK_DEVICE => "block special file",
        CHARACTER_DEVICE => "character special file",
        FIFO => "fifo",
        SOCKET => "socket",
        _ => "weird file",
    }
}

/// The kind of file in one word, for JSON.
pub fn kind(mode: u32) -> &'static str {
    match mode & TYPE_MASK {
        DIRECTORY => "directory",
        REGULAR => "file",
        SYMLINK => "symlink",
        BLOCK_DEVICE => "block-device",
        CHARACTER_DEVICE => "character-device",
        FIFO => "fifo",
        SOCKET => "socket",
        _ => "unknown",
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
