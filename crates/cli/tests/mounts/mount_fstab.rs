//! mount(8) and umount(8) with the helpers of this command, each in a mount namespace of its own, where they are linked into
//! `/usr/sbin`.

use std::path::Path;
use std::process::Command;

use crate::place::Place;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Prng};

/// What a shell says, with the image as `$1`, the directory as `$2`, the scratch directory as `$3`, the command as `$4`.
fn with_helpers(place: &Place, script: &str) -> String {
    let linked = "
        set -e
        mkdir -p \"$3/over\" \"$3/kernel\"
        mount -t tmpfs none \"$3/over\"
        mkdir \"$3/over/up\" \"$3/over/work\"
        mount -t overlay -o \"lowerdir=/usr/sbin,upperdir=$3/over/up,workdir=$3/over/work\" none /usr/sbin
        ln -s \"$4\" /usr/sbin/mount.fuse.ubtrfs
        ln -s \"$4\" /usr/sbin/umount.fuse.ubtrfs
        ln -s \"$4\" /usr/sbin/umount.fuse
        exec 2>&1
        ";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &format!("{linked}{script}"), "sh"])
        .args([&place.image, &place.directory])
        .arg(place.image.parent().unwrap())
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{errors}");
    said
}

/// umount(8) returned while the process that served still wrote, and the kernel, which mounted the image right after, wrote over it.
#[test]
fn umount_8_waits_for_who_serves_and_the_kernel_mounts_at_once() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "head -c 60000000 /dev/urandom >\"$3/data\"
        for round in 1 2 3; do
            \"$4\" mount -o commit=3600 \"$1\" \"$2\"
            cp \"$3/data\" \"$2/ours $round\"
            # umount(8) takes this for `fuse`, and a name that does not begin at the root for `fuse.ubtrfs`.
            case $round in 2) (cd \"$2/..\"; umount \"${2##*/}\") ;; *) umount \"$2\" ;; esac
            mount -o loop \"$1\" \"$3/kernel\"
            cmp \"$3/data\" \"$3/kernel/ours $round\"
            cp \"$3/data\" \"$3/kernel/theirs $round\"
            rm -f \"$3/kernel/theirs $((round - 1))\" \"$3/kernel/ours $((round - 1))\"
            umount \"$3/kernel\"
        done",
    );
    assert_eq!(said, "");
    place.assert_clean();
    let kernel = KernelMount::read_only(&place.image, "");
    let data = std::fs::read(place.image.with_file_name("data")).unwrap();
    for name in ["ours 3", "theirs 3"] {
        assert!(std::fs::read(kernel.path().join(name)).unwrap() == data, "{name}");
    }
}

/// Lazily it does not wait for who uses it, by force not for who holds it elsewhere; and it goes to another namespace where it is told so.
#[test]
fn umount_8_takes_off_what_is_in_use_where_that_is_asked_for() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "\"$4\" mount \"$1\" \"$2\"
        exec 3>\"$2/file\"
        if umount \"$2\" >/dev/null 2>&1; then echo no longer busy; fi
        umount -l \"$2\"
        mountpoint -q \"$2\" && echo still there
        echo later >&3
        exec 3>&-
        \"$4\" ls \"$1\" /
        \"$4\" mount \"$1\" \"$2\"
        unshare -m sleep 60 & sleeper=$!
        umount -f \"$2\"
        mountpoint -q \"$2\" && echo still there
        { kill $sleeper; wait $sleeper || true; } 2>/dev/null
        # In a namespace where this one does not see it.
        unshare -m sh -c '\"$0\" mount \"$1\" \"$2\"; touch \"$3/ready\"; exec sleep 60' \"$4\" \"$1\" \"$2\" \"$3\" & other=$!
        while ! [ -e \"$3/ready\" ]; do sleep 0.01; done
        umount -N $other \"$2\"
        \"$4\" ls \"$1\" /
        { kill $other; wait $other || true; } 2>/dev/null
        true",
    );
    assert_eq!(said, "file\nfile\n");
    assert_eq!(place.done(&["cat"], &[&place.image, Path::new("/file")]), "later\n");
    place.assert_clean();
}

/// Who unmounted one of two places where the same is to be seen waited for two minutes for the image, which the other one has in use.
#[test]
fn umount_of_one_of_two_places_does_not_wait_for_the_other() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "mkdir \"$3/bound\" \"$3/part\"
        for order in mount-first bind-first part-first; do
            for program in umount \"$4 umount\"; do
                \"$4\" mount -o commit=3600 \"$1\" \"$2\"
                mkdir -p \"$2/dir\"
                mount --bind \"$2\" \"$3/bound\"
                mount --bind \"$2/dir\" \"$3/part\"
                echo $order $program >\"$3/part/file\"
                case $order in
                    mount-first) set -- \"$@\" \"$2\" \"$3/bound\" \"$3/part\" ;;
                    bind-first) set -- \"$@\" \"$3/bound\" \"$2\" \"$3/part\" ;;
                    part-first) set -- \"$@\" \"$3/part\" \"$3/bound\" \"$2\" ;;
                esac
                for directory in \"$5\" \"$6\" \"$7\"; do
                    timeout 60 $program \"$directory\" || echo $order, $program: $?
                done
                set -- \"$1\" \"$2\" \"$3\" \"$4\"
                # Of the last one it is waited for who serves.
                \"$4\" cat \"$1\" /dir/file | grep -qx \"$order $program\"
                flock -n \"$1\" true || echo in use
            done
        done",
    );
    assert_eq!(said, "");
    place.assert_clean();
}

/// Lines as they are in use for Linux's btrfs and other filesystems were refused for words that ask for nothing.
#[test]
fn words_of_fstab_are_taken_and_such_as_change_what_is_stored_are_not() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "for words in defaults,noatime,nodiratime relatime,nodiratime lazytime relatime,auto,_netdev,nofail,x-systemd.automount \\
            noauto,user,exec noauto,users,owner,group,nosymfollow ssd,discard=async,space_cache=v2,subvolid=5,subvol=/ \\
            nossd,ssd_spread,space_cache,autodefrag,noautodefrag,nodiscard datacow,datasum,barrier,thread_pool=4; do
            mount -t fuse.ubtrfs -o \"$words\" \"$1\" \"$2\"
            echo \"$words $(findmnt -n -o OPTIONS --mountpoint \"$2\" | cut -d, -f1-6)\"
            umount \"$2\"
        done
        for words in nodatacow nodatasum nobarrier flushoncommit noacl strictatime; do
            mount -t fuse.ubtrfs -o \"$words\" \"$1\" \"$2\" >/dev/null 2>&1 && echo \"$words is taken\"
        done
        true",
    );
    let shown = |words: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("{words} ")));
        let line = line.unwrap_or_else(|| panic!("{words}: {said}"));
        line.split(',').map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(said.lines().count(), 9, "{said}");
    assert_eq!(shown("noauto,user,exec")[..4], ["rw", "nosuid", "nodev", "noatime"]);
    assert_eq!(shown("relatime,nodiratime")[..3], ["rw", "nodiratime", "relatime"]);
    let restricted = shown("noauto,users,owner,group,nosymfollow");
    for option in ["nosuid", "nodev", "noexec", "nosymfollow"] {
        assert!(restricted.iter().any(|word| word == option), "{restricted:?}");
    }
}

/// It was taken for a mount of its own, which failed as the image is in use.
#[test]
fn mount_8_makes_a_mount_read_only_and_writable_again() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "mount -t fuse.ubtrfs -o compress=zstd,nodev \"$1\" \"$2\"
        echo first >\"$2/file\"
        mount -o remount,ro \"$2\"
        echo \"$(findmnt -n -o OPTIONS --mountpoint \"$2\")\"
        (echo second >\"$2/file\") 2>/dev/null && echo written
        mount -o remount,rw,noexec \"$2\"
        echo \"$(findmnt -n -o OPTIONS --mountpoint \"$2\")\"
        echo third >\"$2/file\"
        mount -o remount,rw,compress=lzo \"$2\"
        mount -o remount,ro \"$2\"
        umount \"$2\"
        mount -o loop,ro \"$1\" \"$3/kernel\"
        cat \"$3/kernel/file\"
        umount \"$3/kernel\"
        mount -t fuse.ubtrfs -o ro \"$1\" \"$2\"
        mount -o remount,rw \"$2\" || echo refused
        umount \"$2\"",
    );
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].starts_with("ro,") && lines[0].contains("nodev"), "{said}");
    assert!(lines[1].starts_with("rw,") && lines[1].contains("nodev,noexec"), "{said}");
    assert!(lines[2].contains("stays as it was mounted: compress=lzo"), "{said}");
    assert_eq!(lines[3], "third", "{said}");
    assert!(lines[4].contains("to be read only") && lines[5..] == ["refused"], "{said}");
    place.assert_clean();
}

/// It was in the memory of who serves, which the kernel tells nothing of this, and lost with that.
#[test]
fn what_was_written_before_a_mount_became_read_only_is_durable() {
    let Some(place) = Place::new(true) else { return };
    for (round, how) in ["ro", "ro,nodev", "ro"].into_iter().enumerate() {
        place.mount(&["-o", "commit=3600"]);
        let name = format!("round {round}");
        let bytes = Prng::new(round as u64).bytes(3 << 20);
        std::fs::write(place.directory.join(&name), &bytes).unwrap();
        let remount = |how: &str| {
            let options = format!("remount,{how}");
            place.done(&["mount", "-o", &options], &[&place.image, &place.directory]);
        };
        if round == 2 {
            // In this place alone it is so already.
            remount("bind,ro");
        }
        remount(how);
        place.cut_off();
        let output = place.run(&["cat"], &[&place.image, &Path::new("/").join(&name)]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout == bytes, "{round}: {said}");
    }
    place.assert_clean();
}

/// It was taken, and nothing became of it.
#[test]
fn other_word_for_the_time_of_access_is_refused_as_a_mount_is_mounted_again() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "for words in noatime relatime rw; do
            mount -t fuse.ubtrfs -o $words \"$1\" \"$2\"
            for again in ro rw noatime relatime rw,nodev,noatime ro,relatime; do
                mount -o remount,$again \"$2\" >\"$3/said\" 2>&1 && is=taken || is=refused
                grep -q 'as it was mounted' \"$3/said\" && is=\"$is and said\"
                echo $words, $again: $is
            done
            umount \"$2\"
        done",
    );
    let refused: Vec<&str> = said.lines().filter(|line| !line.ends_with(": taken")).collect();
    let expected = [
        "noatime, relatime: refused and said",
        "noatime, ro,relatime: refused and said",
        "relatime, noatime: refused and said",
        "relatime, rw,nodev,noatime: refused and said",
        "rw, relatime: refused and said",
        "rw, ro,relatime: refused and said",
    ];
    assert_eq!(refused, expected, "{said}");
    assert_eq!(said.lines().count(), 18, "{said}");
}

/// What is mounted is what Linux mounts, or nothing.
#[test]
fn subvolume_by_number_and_path_is_that_which_the_kernel_mounts() {
    let Some(place) = Place::new(true) else { return };
    MkfsBtrfs::new()
        .size_bytes(256 << 20)
        .options("-f")
        .make_on(std::slice::from_ref(&place.image));
    let name = |path: &'static str| Path::new(path);
    for path in ["/one", "/two"] {
        place.done(&["subvolume", "create"], &[&place.image, name(path)]);
        place
            .done(&["mkdir"], &[&place.image, &Path::new(path).join(format!("in {}", &path[1..]))]);
    }
    place.done(&["subvolume", "set-default"], &[&place.image, name("/one")]);
    for options in [
        "subvolid=0",
        "subvolid=5",
        "subvolid=5,subvol=/",
        "subvolid=0,subvol=/",
        "subvolid=256,subvol=one",
        "subvolid=257,subvol=two",
        "subvolid=257,subvol=one",
        "subvolid=5,subvol=one",
        "subvolid=256,subvol=nothing",
        "subvolid=300",
        "subvolid=300,subvol=one",
        "rw",
    ] {
        let names = |directory: &Path| -> Vec<_> {
            let entries = std::fs::read_dir(directory).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let images = [place.image.clone()];
        let theirs =
            KernelMount::mount(&images, options, true).ok().map(|kernel| names(kernel.path()));
        let output = place
            .run(&["mount", "-o", &format!("ro,{options}")], &[&place.image, &place.directory]);
        let ours = output.status.success().then(|| names(&place.directory));
        if ours.is_some() {
            place.umount();
        }
        assert_eq!(ours, theirs, "{options}");
    }
}
