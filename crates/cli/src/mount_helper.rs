//! Called by mount(8) as `mount.fuse.ubtrfs`, for lines of `/etc/fstab` with the type `fuse.ubtrfs`.
//!
//! Source: the part EXTERNAL HELPERS of mount(8): `mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE.SUBTYPE]`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

/// What this command is called by mount(8).
pub const NAMES: [&str; 2] = ["mount.fuse.ubtrfs", "mount.ubtrfs"];

/// Options that are for mount(8) alone.
const OF_MOUNT: [&str; 11] = [
    "auto", "noauto", "user", "nouser", "users", "owner", "group", "nofail", "_netdev", "loop",
    "silent",
];

/// The arguments of this process, in the form in which the command takes them; `None` where nothing is to be done.
pub fn arguments() -> Option<Vec<OsString>> {
    translated(std::env::args_os().collect())
}

fn translated(words: Vec<OsString>) -> Option<Vec<OsString>> {
    let name = words.first().and_then(|word| Path::new(word).file_name());
    if !name.is_some_and(|name| NAMES.iter().any(|own| name == OsStr::new(own))) {
        return Some(words);
    }
    let mut options = OsString::new();
    let mut plain = Vec::new();
    let mut rest = words.into_iter().skip(1);
    while let Some(word) = rest.next() {
        match word.as_bytes() {
            b"-o" => options = rest.next().unwrap_or_default(),
            b"-t" | b"-N" => drop(rest.next()),
            [b'-', letters @ ..] if letters.iter().all(|letter| b"sfnv".contains(letter)) => {
                // Only to see whether it would go.
                if letters.contains(&b'f') {
                    return None;
                }
            }
            _ => plain.push(word),
        }
    }
    let ours: Vec<&[u8]> = options.as_bytes().split(|byte| *byte == b',').filter(is_ours).collect();
    let mut command: Vec<OsString> = vec!["ubtrfs".into(), "mount".into()];
    if !ours.is_empty() {
        command.extend(["-o".into(), OsString::from_vec(ours.join(&b','))]);
    }
    command.push("--".into());
    command.extend(plain);
    Some(command)
}

fn is_ours(option: &&[u8]) -> bool {
    let is_of_user_space = option.starts_with(b"x-") || option.starts_with(b"comment=");
    let is_of_mount = OF_MOUNT.iter().any(|name| name.as_bytes() == *option);
    !(option.is_empty() || is_of_user_space || is_of_mount)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn words_of_mount_become_those_of_the_command() {
        let said = "/sbin/mount.fuse.ubtrfs /a.img /mnt -n -o rw,noauto,x-systemd.automount,subvol=s -t fuse.ubtrfs";
        let expected = words("ubtrfs mount -o rw,subvol=s -- /a.img /mnt");
        assert_eq!(translated(words(said)), Some(expected));
        for said in ["mount.ubtrfs a b -sv", "mount.ubtrfs a b -o noauto", "mount.ubtrfs -n a b"] {
            assert_eq!(translated(words(said)), Some(words("ubtrfs mount -- a b")), "{said}");
        }
        assert_eq!(translated(words("mount.ubtrfs a b -fn")), None);
    }

    #[test]
    fn words_of_the_command_stay() {
        for said in ["ubtrfs mount -o ro a b", "/usr/bin/ubtrfs ls a.img -l", "x"] {
            assert_eq!(translated(words(said)), Some(words(said)));
        }
    }
}
