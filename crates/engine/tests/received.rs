//! What subvolumes say of where they come from, beside the kernel: received ones, and snapshots of them.

mod common;

use std::path::Path;

use ubtrfs_engine::{Filesystem, SnapshotOptions, SubvolumeInfo};
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, assert_checks_clean, oracle, run};

const MIB: u64 = 1 << 20;

/// What `btrfs subvolume show` says in a line that begins with `name`.
fn said<'a>(show: &'a str, name: &str) -> &'a str {
    let line = show.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {show}")).trim()
}

fn show(mount: &KernelMount, path: &str) -> String {
    let path = mount.path().join(path);
    run("btrfs", ["subvolume".as_ref(), "show".as_ref(), path.as_os_str()])
}

fn local_time(seconds: i64) -> String {
    run("date", [format!("--date=@{seconds}"), "+%Y-%m-%d %H:%M:%S %z".to_owned()])
        .trim()
        .to_owned()
}

/// As `show` prints it of the subvolume at that path.
fn assert_same(fs: &Filesystem, path: &str, show: &str) {
    let infos = fs.subvolumes().unwrap();
    let found = infos.iter().find(|info| info.path.as_deref() == Some(path.as_bytes()));
    let SubvolumeInfo { id, uuid, parent_uuid, received_uuid, .. } = found.unwrap();
    let info = found.unwrap();
    let or_none = |text: String| {
        if text.bytes().all(|byte| b"0-".contains(&byte)) { "-".to_owned() } else { text }
    };
    let time = |seconds: i64| if seconds == 0 { "-".to_owned() } else { local_time(seconds) };
    let ours = [
        ("UUID", uuid.to_string()),
        ("Parent UUID", or_none(parent_uuid.to_string())),
        ("Received UUID", or_none(received_uuid.to_string())),
        ("Creation time", time(info.otime.sec)),
        ("Subvolume ID", id.0.to_string()),
        ("Generation", info.generation.0.to_string()),
        ("Gen at creation", info.otransid.0.to_string()),
        ("Flags", if info.read_only { "readonly" } else { "-" }.to_owned()),
        ("Send transid", info.stransid.0.to_string()),
        (
            "Send time",
            local_time(if info.stime.sec == 0 { info.otime.sec } else { info.stime.sec }),
        ),
        ("Receive transid", info.rtransid.0.to_string()),
        ("Receive time", time(info.rtime.sec)),
    ];
    for (name, ours) in ours {
        let said = said(show, name);
        // Not received, it was not sent either: what is shown then is the time of its making, or nothing.
        if name == "Send time" && (said == "-" || info.stime.sec == 0) {
            assert_eq!(info.stime.sec, 0, "{path}: {name}");
            continue;
        }
        assert_eq!(ours, said, "{path}: {name}: ours, btrfs-progs");
    }
}

fn send_and_receive(mount: &KernelMount, subvolume: &str, into: &str) {
    let stream = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    let from = mount.path().join(subvolume);
    let file = stream.path().to_str().unwrap();
    run("btrfs", ["send", "-q", "-f", file, from.to_str().unwrap()]);
    let into = mount.path().join(into);
    run("btrfs", ["receive", "-q", "-f", file, into.to_str().unwrap()]);
}

/// The uuid tree leads from a received uuid to all that have it: btrfs-progs ask the kernel for it.
fn received_again(image: &Path, subvolume: &str) {
    let mount = KernelMount::read_write(image, "");
    std::fs::create_dir(mount.path().join("again")).unwrap();
    send_and_receive(&mount, subvolume, "again");
    mount.unmount();
}

#[test]
fn received_subvolumes_and_snapshots_of_them_are_as_the_kernels() {
    let judges = [Oracle::KernelBtrfs, Oracle::Root, Oracle::MkfsBtrfs, Oracle::BtrfsProgs];
    if !oracle::require_all(&judges) {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(300 * MIB).unwrap();
    MkfsBtrfs::new().make_on(std::slice::from_ref(&image));
    let mount = KernelMount::read_write(&image, "");
    let at = |path: &str| mount.path().join(path).to_str().unwrap().to_owned();
    std::fs::create_dir(mount.path().join("in")).unwrap();
    run("btrfs", ["subvolume", "create", &at("source")]);
    std::fs::write(mount.path().join("source/file"), [7; 100_000]).unwrap();
    run("btrfs", ["subvolume", "snapshot", "-r", &at("source"), &at("sent")]);
    send_and_receive(&mount, "sent", "in");
    run("btrfs", ["subvolume", "snapshot", "-r", &at("in/sent"), &at("kernel-ro")]);
    run("btrfs", ["subvolume", "snapshot", &at("in/sent"), &at("kernel-rw")]);
    run("btrfs", ["filesystem", "sync", mount.path().to_str().unwrap()]);
    let paths = ["source", "sent", "in/sent", "kernel-ro", "kernel-rw"];
    let shown = paths.map(|path| show(&mount, path));
    mount.unmount();

    let fs = common::open_for_writing(&image);
    for (path, show) in paths.iter().zip(&shown) {
        assert_same(&fs, path, show);
    }
    let of = |fs: &Filesystem, path: &str| {
        let id = fs.resolve(fs.top_level(), path.as_bytes()).unwrap();
        fs.subvolume(id.root).unwrap()
    };
    assert!(of(&fs, "in/sent").rtime.sec > 0 && of(&fs, "in/sent").stransid.0 > 0);
    // The same two snapshots by ours.
    let received = of(&fs, "in/sent").id;
    for (name, read_only) in [("our-ro", true), ("our-rw", false)] {
        let options = SnapshotOptions { read_only };
        fs.snapshot(received, fs.top_level(), name.as_bytes(), &options).unwrap();
    }
    for (kernels, ours) in [("kernel-ro", "our-ro"), ("kernel-rw", "our-rw")] {
        let (kernels, ours) = (of(&fs, kernels), of(&fs, ours));
        let origin = |info: &SubvolumeInfo| {
            let received = (info.received_uuid, info.stransid, info.rtransid);
            (info.parent_uuid, received, info.stime, info.rtime, info.ctransid, info.ctime)
        };
        assert_eq!(origin(&ours), origin(&kernels));
    }
    // Made writable, it is no longer what was sent.
    fs.set_subvolume_read_only(of(&fs, "our-ro").id, false).unwrap();
    let changed = of(&fs, "our-ro");
    assert_eq!((changed.stime.sec, changed.rtime.sec, changed.rtransid.0), (0, 0, 0));
    assert_eq!(changed.received_uuid, of(&fs, "kernel-rw").received_uuid);
    fs.commit().unwrap();
    drop(fs);
    assert_checks_clean(&image);
    received_again(&image, "sent");
    assert_checks_clean(&image);

    let mount = KernelMount::read_only(&image, "");
    let paths = ["our-ro", "our-rw", "again/sent"];
    let shown = paths.map(|path| show(&mount, path));
    mount.unmount();
    let fs = common::open(&[&image]);
    for (path, show) in paths.iter().zip(&shown) {
        assert_same(&fs, path, show);
    }
}
