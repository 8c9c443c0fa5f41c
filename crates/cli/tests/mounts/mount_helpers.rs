//! The helpers of mount(8) and umount(8): however they were installed, what they exit with, and what of another namespace they run.

use std::process::Command;

use crate::place::Place;
use ubtrfs_testkit::oracle::{self, Oracle};

/// What a shell says, with the image as `$1`, the directory as `$2`, the scratch directory as `$3`, the command as `$4`, in a mount namespace
/// where the helpers are put into `/usr/sbin` by `$install`.
fn with_helpers(place: &Place, install: &str, script: &str) -> String {
    let prepare = "
        set -e
        mkdir -p \"$3/over\"
        mount -t tmpfs none \"$3/over\"
        mkdir \"$3/over/up\" \"$3/over/work\"
        mount -t overlay -o \"lowerdir=/usr/sbin,upperdir=$3/over/up,workdir=$3/over/work\" none /usr/sbin
        cp \"$4\" /usr/sbin/ubtrfs
        for name in mount.fuse.ubtrfs umount.fuse.ubtrfs umount.fuse; do
            $install /usr/sbin/ubtrfs /usr/sbin/$name
        done
        exec 2>&1
        ";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", &format!("{prepare}{script}"), "sh"])
        .args([&place.image, &place.directory])
        .arg(place.image.parent().unwrap())
        .arg(env!("CARGO_BIN_EXE_ubtrfs"))
        .env("install", install)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}{errors}");
    said
}

/// The process that serves was started by the helper's name, and took the words of the command for mount(8)'s.
#[test]
fn helper_serves_whether_it_is_a_link_or_a_copy() {
    for install in ["ln -s", "ln", "cp"] {
        let Some(place) = Place::new(true) else { return };
        let said = with_helpers(
            &place,
            install,
            "mount -t fuse.ubtrfs -o noexec,commit=3600 \"$1\" \"$2\"
            findmnt -n -o OPTIONS --mountpoint \"$2\" | cut -d, -f1-2
            touch \"$2/file\"
            mount -o remount,ro \"$2\"
            umount \"$2\"
            flock -n \"$1\" true || echo in use
            \"$4\" ls \"$1\" /
            \"$4\" mount \"$1\" \"$2\"
            \"$4\" ls \"$1\" / 2>&1 | grep -c 'mounted on'
            umount \"$2\"",
        );
        assert_eq!(said, "rw,noexec\nfile\n1\n", "{install}");
        place.assert_clean();
    }
}

/// mount(8) hands on what its helper exits with, and has meanings of its own for the numbers: 4 is a fault of mount(8).
#[test]
fn helpers_exit_as_mount_8_does_and_nofail_excuses_an_image_that_is_not_there() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(
        &place,
        "ln -s",
        "head -c 1000000 /dev/zero >\"$3/zeros\"
        helper=/usr/sbin/mount.fuse.ubtrfs back=/usr/sbin/umount.fuse.ubtrfs
        here=\"$3\" image=$1 dir=$2
        run() { name=$1; shift; \"$@\" >\"$here/said\" 2>&1 && code=0 || code=$?
            if [ -s \"$here/said\" ]; then echo \"$name: $code, said\"; else echo \"$name: $code\"; fi; }
        run done $helper \"$image\" \"$dir\"
        run busy $helper \"$image\" \"$here/over\"
        run 'taken off' $back \"$dir\"
        run 'not mounted' $back \"$dir\"
        run 'no place' $back
        run missing $helper \"$here/missing\" \"$dir\"
        run 'missing, nofail' $helper \"$here/missing\" \"$dir\" -o rw,nofail
        run 'no filesystem, nofail' $helper \"$here/zeros\" \"$dir\" -o nofail
        run 'no directory, nofail' $helper \"$image\" \"$here/missing\" -o nofail
        run 'bad option' $helper \"$image\" \"$dir\" -o nonsense
        run 'mount(8), missing' mount -t fuse.ubtrfs \"$here/missing\" \"$dir\"
        run 'mount(8), nofail' mount -t fuse.ubtrfs -o nofail \"$here/missing\" \"$dir\"
        run 'mount(8), no filesystem' mount -t fuse.ubtrfs \"$here/zeros\" \"$dir\"
        run 'the command itself' \"$4\" mount -o nofail \"$here/missing\" \"$dir\"",
    );
    let expected = "\
        done: 0\n\
        busy: 32, said\n\
        taken off: 0\n\
        not mounted: 32, said\n\
        no place: 1, said\n\
        missing: 32, said\n\
        missing, nofail: 0\n\
        no filesystem, nofail: 32, said\n\
        no directory, nofail: 32, said\n\
        bad option: 1, said\n\
        mount(8), missing: 32, said\n\
        mount(8), nofail: 0\n\
        mount(8), no filesystem: 32, said\n\
        the command itself: 4, said\n";
    assert_eq!(said, expected);
}

/// What it started behind the door of another namespace was that namespace's: root of the machine ran a container's programs.
#[test]
fn helpers_run_no_program_of_another_namespace() {
    // Those there are others; and, in the second round, none that needs the loader starts.
    for covered in ["programs", "loader"] {
        let Some(place) = Place::new(true) else { return };
        let script = IN_ANOTHER_NAMESPACE.replace("COVERED", covered);
        assert_eq!(with_helpers(&place, "ln -s", &script), "1\n0\n", "{covered}");
        place.assert_clean();
    }
}

/// What another namespace had by the name of a file in `/sys` was written to, and what it had by the name of a file that is open was mounted
/// again and unmounted: its users could have root of the machine empty any file that they see.
#[test]
fn helpers_go_by_nothing_that_another_namespace_has_as_proc_and_sys() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(&place, "ln -s", IN_A_NAMESPACE_THAT_LIES);
    assert_eq!(said, "rw\n512\nro\n0\nrw rw\nrw\n0\nuntouched\n");
    place.assert_clean();
}

/// The server ended its connection by the name that this has in `/sys`, and emptied what users of the namespace had put there.
#[test]
fn connection_is_ended_by_nothing_that_another_namespace_has_as_sys() {
    if !oracle::require(Oracle::Strace) {
        return;
    }
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(&place, "ln -s", ENDED_IN_A_NAMESPACE_THAT_LIES);
    assert_eq!(said, "it has ended\nit was told where the server is from\nuntouched\n");
    place.assert_clean();
}

const ENDED_IN_A_NAMESPACE_THAT_LIES: &str = r##"
        printf untouched >"$3/canary"
        mount -t fusectl none /sys/fs/fuse/connections
        unshare -m sh -c '
            mount -t tmpfs none /sys
            mkdir -p /sys/fs/fuse/connections/any
            ln -s "$3/canary" /sys/fs/fuse/connections/any/abort
            perl -e "symlink(q(any), qq(/sys/fs/fuse/connections/\$_)) or die for 0 .. 9999"
            : >"$3/ready"
            exec sleep 120
        ' sh "$1" "$2" "$3" &
        other=$!
        while ! [ -e "$3/ready" ]; do sleep 0.01; done
        timeout 60 /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o commit=3600 -N $other
        server=$(pgrep -f "mount.fuse.ubtrfs $1 ")
        # No request can be taken any more.
        strace -f -p $server -o "$3/trace" -e trace=read,openat -e inject=read:error=EIO 2>/dev/null &
        tracer=$!
        until grep -q "^TracerPid:.[1-9]" /proc/$server/task/*/status; do sleep 0.01; done
        sleep 0.5
        timeout 60 nsenter -m -t $other ls "$2" >/dev/null 2>&1 || true
        timeout 60 flock "$1" echo it has ended
        wait $tracer || true
        grep -q '"[0-9]*/abort", O_WRONLY' "$3/trace" && echo it was told where the server is from
        cat "$3/canary"; echo
        { kill $other; wait $other || true; } 2>/dev/null
        true"##;

/// The standard error stayed open where that namespace has no `/dev/null`: who read what the command said waited as long as it was mounted.
#[test]
fn server_keeps_nothing_of_its_caller_where_another_namespace_has_no_null_device() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(&place, "ln -s", WHERE_IS_NO_NULL_DEVICE);
    assert_eq!(said, "it was heard\n1\n0\n");
    place.assert_clean();
}

const WHERE_IS_NO_NULL_DEVICE: &str = r##"
        unshare -m sh -c '
            mount -t tmpfs none /dev
            mknod /dev/fuse c 10 229
            : >"$3/ready"
            exec sleep 120
        ' sh "$1" "$2" "$3" &
        other=$!
        while ! [ -e "$3/ready" ]; do sleep 0.01; done
        helper=/usr/sbin/mount.fuse.ubtrfs
        timeout 20 sh -c '"$0" "$1" "$2" -N "$3" 2>&1 | cat' $helper "$1" "$2" $other && echo it was heard
        grep -c " fuse.ubtrfs $1 " /proc/$other/mountinfo || true
        timeout 60 /usr/sbin/umount.fuse "$2" -N $other
        grep -c " fuse.ubtrfs $1 " /proc/$other/mountinfo || true
        { kill $other; wait $other || true; } 2>/dev/null
        true"##;

/// A FIFO by the name of `/dev/fuse` was opened, and who writes to it waited for.
#[test]
fn mount_waits_for_nothing_that_another_namespace_has_as_the_device() {
    let Some(place) = Place::new(true) else { return };
    let said = with_helpers(&place, "ln -s", WHERE_THE_DEVICE_IS_ANOTHER);
    assert_eq!(said, "fifo: 32\nlink: 32\nfile: 32\n");
    place.assert_clean();
}

const WHERE_THE_DEVICE_IS_ANOTHER: &str = r##"
        device=$(losetup -f --show "$1")
        mkfifo "$3/fifo"
        : >"$3/file"
        for kind in fifo link file; do
            unshare -m sh -c '
                mount -t tmpfs none /dev
                case $4 in
                    link) mknod /dev/other c 10 229; ln -s other /dev/fuse ;;
                    *) : >/dev/fuse; mount --bind "$3/$4" /dev/fuse ;;
                esac
                # By a name that is there, too.
                mknod "$5" b 7 "${5#/dev/loop}"
                : >"$3/ready"
                exec sleep 120
            ' sh "$1" "$2" "$3" $kind $device &
            other=$!
            while ! [ -e "$3/ready" ]; do sleep 0.01; done
            rm "$3/ready"
            timeout 20 /usr/sbin/mount.fuse.ubtrfs $device "$2" -N $other >/dev/null 2>&1 && code=0 || code=$?
            echo $kind: $code
            { kill $other; wait $other || true; } 2>/dev/null
        done
        losetup -d $device
        true"##;

const IN_A_NAMESPACE_THAT_LIES: &str = r##"
        mkdir "$3/decoy" "$3/real"
        printf untouched >"$3/canary"
        unshare -m sh -c '
            mount --bind /proc "$3/real"
            mount -t tmpfs none "$3/decoy"
            mkdir "$3/decoy/a b"
            mount -t tmpfs none "$3/decoy/a b"
            mount -t tmpfs none /sys
            mkdir -p /sys/class/bdi/any
            ln -s "$3/canary" /sys/class/bdi/any/read_ahead_kb
            mount -t tmpfs none /proc
            mkdir -p /proc/self/fd
            ln -s "$3/real/self/mountinfo" /proc/self/mountinfo
            perl -e "
                symlink(q(any), qq(/sys/class/bdi/0:\$_)) or die for 0 .. 9999;
                symlink(\$ARGV[0], qq(/proc/self/fd/\$_)) or die for 0 .. 99;
            " "$3/decoy"
            : >"$3/ready"
            exec sleep 120
        ' sh "$1" "$2" "$3" &
        other=$!
        while ! [ -e "$3/ready" ]; do sleep 0.01; done
        exec 7</proc/$other/ns/mnt
        try() { timeout 60 "$@" || echo "$1: $?"; }
        lines() { grep "$1" /proc/$other/mountinfo || true; }
        shown() { lines "$1" | cut -d " " -f 6 | cut -d , -f 1; }
        try /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o commit=3600 -N $other
        shown " fuse.ubtrfs $1 "
        cat "/sys/class/bdi/$(lines " fuse.ubtrfs $1 " | cut -d " " -f 3)/read_ahead_kb"
        try /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o remount,ro -N $other
        shown " fuse.ubtrfs $1 "
        try /usr/sbin/umount.fuse "$2" -N $other
        lines " fuse.ubtrfs $1 " | wc -l
        flock -n "$1" true || echo in use
        echo $(shown "$3/decoy")
        # By the process that serves, too.
        try /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o commit=3600 -N $other
        shown " fuse.ubtrfs $1 "
        kill $(pgrep -f "mount.fuse.ubtrfs $1 ")
        flock -w 60 "$1" true || echo in use
        lines " fuse.ubtrfs $1 " | wc -l
        cat "$3/canary"; echo
        { kill $other; wait $other || true; } 2>/dev/null
        true"##;

const IN_ANOTHER_NAMESPACE: &str = r##"
        mkdir "$3/memory"
        unshare -m sh -c '
            printf "#!/bin/sh\n: >\"%s/ran\"\n" "$3" >"$3/theirs"
            chmod +x "$3/theirs"
            mount -t tmpfs none "$3/memory"
            mount --bind "$3/theirs" "$(readlink -f "$4")"
            mount --bind "$3/theirs" /usr/sbin/ubtrfs
            loader=$(readlink -f /lib64/ld-linux-x86-64.so.2 || true)
            mount --bind "$3/theirs" "$(readlink -f "$(command -v umount)")"
            if [ "$5" = loader ] && [ -n "$loader" ]; then
                sleep 120 & sleeper=$!; echo $sleeper >"$3/sleeper"
                # It needs the loader, too.
                until grep -q sleep /proc/$sleeper/comm; do :; done
                mount --bind /dev/null "$loader"
                : >"$3/ready"
                wait $sleeper
            else
                : >"$3/ready"
                exec sleep 120
            fi
        ' sh "$1" "$2" "$3" "$4" COVERED &
        other=$!
        while ! [ -e "$3/ready" ]; do sleep 0.01; done
        # Not the process, but its namespace is to stay.
        exec 7</proc/$other/ns/mnt
        try() { timeout 60 "$@" || echo "$1: $?"; }
        try /usr/sbin/umount.fuse "$3/memory" -N $other
        grep -q "$3/memory" /proc/$other/mountinfo && echo memory is there
        try /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o commit=3600 -N $other
        grep -c " fuse.ubtrfs $1 " /proc/$other/mountinfo || true
        grep -c " fuse.ubtrfs $1 " /proc/self/mountinfo || true
        try /usr/sbin/mount.fuse.ubtrfs "$1" "$2" -o remount,ro -N $other
        try /usr/sbin/umount.fuse "$2" -N $other
        flock -n "$1" true || echo in use
        if [ -e "$3/ran" ]; then echo a program of theirs ran; fi
        [ ! -e "$3/sleeper" ] || kill $(cat "$3/sleeper")
        { kill $other; wait $other || true; } 2>/dev/null
        true"##;
