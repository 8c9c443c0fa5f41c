//! Extended references are those of the kernel, item for item.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ubtrfs_engine::{Filesystem, MkfsOptions, NewInode, OpenOptions, Reservation, mkfs};
use ubtrfs_rt::{Runtime, Time};
use ubtrfs_testkit::{
    KernelMount, MkfsBtrfs, Oracle, assert_checks_clean_but_for_extended_refs, oracle, run,
};
use ubtrfs_volume::{Device, FileDevice, OpenMode, Window};

const LINK_COUNT: usize = 200;

fn name(number: usize) -> String {
    format!("{number:03}-{}", "l".repeat(150 + number % 100))
}

fn by_kernel(image: &Path) {
    MkfsBtrfs::new().make(image);
    let mounted = KernelMount::read_write(image, "noatime");
    let [one, many] = ["one", "many"].map(|name| mounted.path().join(name));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&many).unwrap();
    fs::write(one.join("first"), "").unwrap();
    for number in 0..LINK_COUNT {
        fs::hard_link(one.join("first"), many.join(name(number))).unwrap();
    }
    mounted.unmount();
}

fn by_engine(image: &Path) {
    let mode = OpenMode::CreateNew { len_bytes: 256 << 20 };
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, mode, Window::Whole).unwrap());
    let volume = mkfs(vec![device], &MkfsOptions::default(), &Arc::new(Runtime::system())).unwrap();
    let fs = Filesystem::open(volume, OpenOptions::default()).unwrap();
    let create = |dir, name: &str, mode| {
        let new = NewInode::new(mode, Time { sec: 1_700_000_000, nsec: 0 });
        fs.begin(Reservation::create(0)).unwrap().create(dir, name.as_bytes(), &new).unwrap()
    };
    let one = create(fs.top_level(), "one", 0o040_755);
    let many = create(fs.top_level(), "many", 0o040_755);
    let first = create(one, "first", 0o100_644);
    for number in 0..LINK_COUNT {
        let mut handle = fs.begin(Reservation::create(0)).unwrap();
        handle.link(many, name(number).as_bytes(), first).unwrap();
    }
    fs.commit().unwrap();
}

/// The references of all inodes: each item's key and length, and all of its fields.
fn references(image: &Path) -> Vec<String> {
    let words = ["inspect-internal", "dump-tree", "-t", "5"].map(AsRef::as_ref);
    let dump = run("btrfs", words.into_iter().chain([image.as_os_str()]));
    let mut found = Vec::new();
    let mut is_reference = false;
    for line in dump.lines().map(str::trim) {
        if line.starts_with("item ") {
            is_reference = line.contains(" INODE_REF ") || line.contains(" INODE_EXTREF ");
            // Not where the leaf has it.
            let key = &line[line.find("key").unwrap()..line.find("itemoff").unwrap()];
            let len = &line[line.find("itemsize").unwrap()..];
            if is_reference {
                found.push(format!("{key}{len}"));
            }
        } else if is_reference && line.starts_with("index ") {
            found.push(line.to_owned());
        }
    }
    found
}

#[test]
fn references_of_many_links_are_those_of_the_kernel() {
    if !oracle::require_all(&[Oracle::KernelBtrfs, Oracle::BtrfsProgs]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [kernel, engine] = ["kernel", "engine"].map(|name| directory.path().join(name));
    by_kernel(&kernel);
    by_engine(&engine);
    let (theirs, ours) = (references(&kernel), references(&engine));
    let extended = theirs.iter().filter(|line| line.contains("INODE_EXTREF")).count();
    assert!(extended > 100, "{extended}");
    let differing = ours.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
    assert_eq!(differing, None);
    assert_eq!(ours.len(), theirs.len());
    assert_checks_clean_but_for_extended_refs(&kernel);
    assert_checks_clean_but_for_extended_refs(&engine);
}
