//! Words of mount options that ask for nothing, or not of this filesystem: of lines of `/etc/fstab`, and of mount(8), which says again
//! what it finds in the table of mounts.
//!
//! Source: the parts FILESYSTEM-INDEPENDENT MOUNT OPTIONS of mount(8) and MOUNT OPTIONS of btrfs(5).

/// For mount(8) alone, or so in any case, or asking for a way of doing and not for what is done.
const HARMLESS: [&str; 32] = [
    // For mount(8) alone.
    "auto",
    "noauto",
    "nouser",
    "nofail",
    "_netdev",
    "loop",
    "silent",
    "loud",
    // So in any case.
    "default_permissions",
    "defaults",
    "nolazytime",
    "noiversion",
    "nomand",
    "nostrictatime",
    "datacow",
    "datasum",
    "barrier",
    "treelog",
    "acl",
    "noflushoncommit",
    "noenospc_debug",
    // May be durable later, and is as all else.
    "lazytime",
    // How it is done.
    "ssd",
    "nossd",
    "ssd_spread",
    "nossd_spread",
    "space_cache",
    "autodefrag",
    "noautodefrag",
    "notreelog",
    "enospc_debug",
    "rescan_uuid_tree",
];

/// What the kernel shows of a mount, and mount(8) says again to whom it asks to mount it again.
const OF_KERNEL: [&str; 5] = ["user_id", "group_id", "max_read", "blksize", "rootmode"];

/// What mounting again changes, or cannot.
const CHANGED_BY_REMOUNT: [&str; 17] = [
    "ro",
    "rw",
    "nodev",
    "dev",
    "nosuid",
    "suid",
    "noexec",
    "exec",
    "nosymfollow",
    "symfollow",
    "user",
    "users",
    "owner",
    "group",
    "allow_other",
    "noatime",
    "relatime",
];

/// Whether a word can be left out.
pub fn is_harmless(name: &str, value: Option<&str>) -> bool {
    let is_number = |value: &str| !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    match (name, value) {
        (name, None) if HARMLESS.contains(&name) => true,
        ("space_cache", Some("v1" | "v2")) => true,
        ("thread_pool" | "metadata_ratio", Some(value)) => is_number(value),
        ("comment" | "helper" | "uhelper", Some(_)) => true,
        (name, _) => name.is_empty() || name.starts_with("x-") || name.starts_with("X-"),
    }
}

/// Whether a word is about mounting again alone.
pub fn is_of_remount(word: &str) -> bool {
    let name = word.split('=').next().unwrap_or_default();
    matches!(word, "remount" | "bind") || OF_KERNEL.contains(&name)
}

/// Whether a word needs no word when it is said as something is mounted again.
pub fn is_changed_by_remount(word: &str) -> bool {
    let (name, value) = match word.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (word, None),
    };
    CHANGED_BY_REMOUNT.contains(&name) || is_harmless(name, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_that_change_what_is_stored_are_not_harmless() {
        for word in [
            "nodatacow",
            "nodatasum",
            "nobarrier",
            "flushoncommit",
            "noacl",
            "nologreplay",
            "user_subvol_rm_allowed",
            "skip_balance",
            "fatal_errors",
            "clear_cache",
            "subvol",
        ] {
            assert!(!is_harmless(word, None), "{word}");
        }
        for (name, value) in
            [("space_cache", "v3"), ("thread_pool", "x"), ("thread_pool", ""), ("ssd", "1")]
        {
            assert!(!is_harmless(name, Some(value)), "{name}={value}");
        }
        assert!(is_harmless("x-systemd.requires", Some("a=b")) && is_harmless("ssd", None));
    }

    #[test]
    fn what_a_remount_leaves_as_it_is_is_told() {
        for word in ["ro", "nodev", "x-gvfs", "ssd", "thread_pool=3"] {
            assert!(is_changed_by_remount(word), "{word}");
        }
        for word in ["compress=zstd", "subvol=a", "commit=3"] {
            assert!(!is_changed_by_remount(word), "{word}");
        }
        assert!(is_of_remount("user_id=0") && is_of_remount("bind") && !is_of_remount("user"));
    }
}
