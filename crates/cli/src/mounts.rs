//! What this command has mounted on the machine, as the system tells.

use std::path::{Path, PathBuf};

/// A mount of this command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mounted {
    /// Where.
    pub directory: PathBuf,
    /// The image that was named when it was mounted.
    pub source: PathBuf,
    /// Its device number, as `/proc/self/mountinfo` writes it.
    pub device: String,
    /// Who mounted it.
    pub uid: u32,
    /// Nothing can be written.
    pub is_read_only: bool,
}

/// What is mounted on a directory, if this command mounted it.
pub fn on(directory: &Path) -> Option<Mounted> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    on_in(&table, directory)
}

/// Where an image is mounted.
pub fn of_image(image: &Path) -> Option<Mounted> {
    let image = std::fs::canonicalize(image).ok()?;
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    table.lines().filter_map(of_line).find(|mounted| mounted.source == image)
}

fn on_in(table: &str, directory: &Path) -> Option<Mounted> {
    // The last one on a directory lies on top.
    let is_there = |line: &&str| {
        let place = line.split(' ').nth(4).map(unescape);
        place.is_some_and(|place| Path::new(&place) == directory)
    };
    table.lines().rev().find(is_there).and_then(of_line)
}

/// `ID PARENT MAJOR:MINOR ROOT PLACE OPTIONS FIELD… - TYPE SOURCE OPTIONS`.
fn of_line(line: &str) -> Option<Mounted> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ').skip(2);
    let device = front.next()?.to_owned();
    let directory = PathBuf::from(unescape(front.nth(1)?));
    let is_read_only = front.next()?.split(',').any(|option| option == "ro");
    let mut back = back.split(' ');
    if !matches!(back.next()?, "fuse.ubtrfs" | "fuseblk.ubtrfs") {
        return None;
    }
    let source = PathBuf::from(unescape(back.next().unwrap_or_default()));
    let options = back.next().unwrap_or_default();
    let uid = options.split(',').find_map(|option| option.strip_prefix("user_id="));
    Some(Mounted { directory, source, device, uid: uid?.parse().ok()?, is_read_only })
}

/// Undoes the octal escapes of `/proc`.
fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('\\') {
        plain.push_str(before);
        let byte = behind.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte {
            Some(byte) => {
                plain.push(char::from(byte));
                rest = &behind[3..];
            }
            None => {
                plain.push('\\');
                rest = behind;
            }
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_proc_are_read() {
        assert_eq!(unescape(r"/a\040b\134c\x"), r"/a b\c\x");
        assert_eq!(unescape("/plain"), "/plain");
    }

    #[test]
    fn mounts_of_this_command_are_found_and_no_others() {
        let table = "\
            22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n\
            40 22 0:51 / /mnt/a\\040b rw,noatime shared:9 - fuse.ubtrfs /disk\\0401.img rw,user_id=7,group_id=8\n\
            41 22 0:52 / /mnt/c rw - fuse.ubtrfs /d.img rw,user_id=0\n\
            42 22 0:53 / /mnt/c rw - tmpfs none rw\n";
        let found = on_in(table, Path::new("/mnt/a b")).unwrap();
        assert_eq!((found.device.as_str(), found.uid), ("0:51", 7));
        assert!(!found.is_read_only);
        assert!(
            of_line("9 1 0:5 / /m ro,noatime - fuse.ubtrfs /i ro,user_id=1").unwrap().is_read_only
        );
        assert_eq!(found.source, Path::new("/disk 1.img"));
        let line = "9 1 7:0 / /m rw,noatime - fuseblk.ubtrfs /dev/loop0 rw,user_id=0,blksize=4096";
        assert_eq!(of_line(line).unwrap().source, Path::new("/dev/loop0"));
        for other in ["/", "/mnt/c", "/mnt"] {
            assert_eq!(on_in(table, Path::new(other)), None, "{other}");
        }
    }
}
