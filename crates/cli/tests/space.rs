//! How full a filesystem is said to be, as btrfs-progs says of the kernel's mount of the same image;
//! and space that is given back to the image file.

mod support;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use support::{Ran, assert_judged, ubtrfs_in};
use tempfile::TempDir;
use ubtrfs_testkit::{KernelMount, MkfsBtrfs, Oracle, Prng, oracle, run};

const JUDGES: [Oracle; 3] = [Oracle::MkfsBtrfs, Oracle::KernelBtrfs, Oracle::BtrfsProgs];

/// A directory with images in it.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> Ran {
        ubtrfs_in(self.0.path(), words)
    }

    /// A file of the host's that cannot be compressed away.
    fn random_file(&self, name: &str, len_bytes: usize) {
        fs::write(self.path(name), Prng::new(7).bytes(len_bytes)).unwrap();
    }

    /// Bytes of the disk that the image takes.
    fn image_bytes(&self) -> u64 {
        fs::metadata(self.path("disk.img")).unwrap().blocks() * 512
    }
}

/// What `filesystem usage` says in bytes.
#[derive(PartialEq, Eq, Debug, Default)]
struct Figures {
    overall: BTreeMap<String, u64>,
    /// Of each class what it says, and the bytes of each device, in their order.
    classes: BTreeMap<String, Vec<u64>>,
}

/// What both say of all devices. The kernel's reserve and what statfs makes of it are numbers of its
/// memory, ratios follow from the classes, and of devices that are missing or longer than their
/// filesystem ours says nothing.
const OVERALL: [&str; 5] =
    ["Device size", "Device allocated", "Device unallocated", "Used", "Free (estimated)"];

impl Figures {
    fn of(text: &str) -> Self {
        let mut figures = Self::default();
        let mut class = String::new();
        for line in text.lines().filter(|line| !line.is_empty()) {
            let Some(item) = line.strip_prefix([' ', '\t']) else {
                class = line.to_owned();
                continue;
            };
            let words: Vec<&str> = item.split_whitespace().collect();
            if class == "Overall:" {
                let (name, value) = item.split_once(':').unwrap();
                if OVERALL.contains(&name.trim()) {
                    let number = value.split_whitespace().next().unwrap().parse().unwrap();
                    figures.overall.insert(name.trim().to_owned(), number);
                }
                continue;
            }
            let bytes = words.last().unwrap().parse().unwrap();
            figures.classes.entry(class.clone()).or_default().push(bytes);
        }
        figures.classes.values_mut().for_each(|devices| devices.sort_unstable());
        figures
    }

    /// Ours and theirs, of an image that lies in these files of a place.
    fn both(place: &Place, names: &[&str]) -> (Self, Self) {
        let mut words = vec!["filesystem", "usage", "--bytes"];
        names[1..].iter().for_each(|name| words.extend(["--device", name]));
        words.push(names[0]);
        let ours = Self::of(place.run(&words).ok().text());
        let files: Vec<PathBuf> = names.iter().map(|name| place.path(name)).collect();
        let mount = KernelMount::mount(&files, "", true).unwrap();
        let theirs = Self::of(&btrfs(&["filesystem", "usage", "-b"], mount.path()));
        mount.unmount();
        assert_eq!(theirs.overall.len(), OVERALL.len(), "{theirs:?}");
        (ours, theirs)
    }
}

fn btrfs(words: &[&str], path: &Path) -> String {
    run("btrfs", words.iter().map(OsStr::new).chain([path.as_os_str()]))
}

#[test]
fn filesystem_usage_agrees_with_btrfs_progs() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    for (profiles, names) in [
        (&[][..], &["disk.img"][..]),
        (&["-m", "single", "-d", "dup"], &["disk.img"]),
        (&[], &["disk.img", "other.img"]),
        (&["-m", "raid1", "-d", "raid0"], &["disk.img", "other.img"]),
        (&["-m", "raid1c3", "-d", "raid10"], &["disk.img", "other.img", "third.img"]),
    ] {
        let place = Place::new();
        let words = [&["mkfs", "-q", "--size", "300M"], profiles, names].concat();
        place.run(&words).ok();
        place.random_file("data", 5_000_001);
        let mut put = vec!["put"];
        names[1..].iter().for_each(|name| put.extend(["--device", name]));
        put.extend(["disk.img", "data", "/"]);
        place.run(&put).ok();
        let (ours, theirs) = Figures::both(&place, names);
        assert_eq!(ours, theirs, "{profiles:?} on {names:?}");
    }
}

/// New data was taken to go into the first profile found, whatever else was there.
#[test]
fn filesystem_usage_with_data_of_two_profiles_agrees_with_btrfs_progs() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let place = Place::new();
    let image = place.path("disk.img");
    MkfsBtrfs::new().size_bytes(1 << 30).make(&image);
    let mount = KernelMount::read_write(&image, "");
    // Of more than one block group, of which one is converted.
    let file = mount.path().join("file");
    run("fallocate", [OsStr::new("-l"), OsStr::new("230M"), file.as_os_str()]);
    btrfs(&["balance", "start", "-f", "-dconvert=dup,limit=1"], mount.path());
    mount.unmount();
    let (mut ours, mut theirs) = Figures::both(&place, &["disk.img"]);
    let data = ours.classes.keys().filter(|class| class.starts_with("Data,"));
    assert_eq!(data.count(), 2, "{ours:?}");
    // They divide floating-point numbers.
    let free = [&mut ours, &mut theirs].map(|one| one.overall.remove("Free (estimated)").unwrap());
    assert!(free[0].abs_diff(free[1]) <= 2, "{free:?}");
    assert_eq!(ours, theirs);
}

#[test]
fn filesystem_usage_of_mixed_groups_agrees_but_for_the_kernels_reserve() {
    if !oracle::require_all(&JUDGES) {
        return;
    }
    let place = Place::new();
    let image = place.path("disk.img");
    MkfsBtrfs::new().size_bytes(300 << 20).options("-M").make(&image);
    let (mut ours, mut theirs) = Figures::both(&place, &["disk.img"]);
    let free = [&mut ours, &mut theirs].map(|one| one.overall.remove("Free (estimated)").unwrap());
    // The kernel reserves it in the groups that data shares with metadata; it is not in the image.
    assert!(free[0] > free[1] && free[0] - free[1] < 16 << 20, "{free:?}");
    assert_eq!(ours, theirs);
}

#[test]
fn image_takes_less_of_the_disk_after_changes_with_discard() {
    const LEN_BYTES: u64 = 24 << 20;
    let place = Place::new();
    place.run(&["mkfs", "-q", "--size", "400M", "disk.img"]).ok();
    place.random_file("data", LEN_BYTES as usize);
    place.run(&["subvolume", "create", "disk.img", "/sub"]).ok();
    for to in ["/kept", "/plain", "/gone", "/whole", "/batched", "/sub/file"] {
        place.run(&["put", "disk.img", "data", to]).ok();
    }
    // A hole divides it into two extents.
    let (half_bytes, hole_bytes) = (LEN_BYTES / 2, 1 << 20);
    let parted = fs::File::create(place.path("parted")).unwrap();
    let data = fs::read(place.path("data")).unwrap();
    parted.write_all_at(&data[..half_bytes as usize], 0).unwrap();
    parted.write_all_at(&data[half_bytes as usize..], half_bytes + hole_bytes).unwrap();
    place.run(&["put", "disk.img", "parted", "/cut"]).ok();
    let freed = |words: &[&str]| {
        let before = place.image_bytes();
        place.run(words).ok();
        before.saturating_sub(place.image_bytes())
    };
    // Some metadata goes and some comes.
    let slack = 1 << 20;
    assert!(freed(&["rm", "disk.img", "/plain"]) < slack);
    assert!(freed(&["rm", "--discard", "disk.img", "/gone"]) > LEN_BYTES - slack);
    let half = format!("{half_bytes}");
    let cut = freed(&["truncate", "--discard", "-s", &half, "disk.img", "/cut"]);
    assert!((half_bytes - slack..half_bytes + slack).contains(&cut), "{cut}");
    // An extent of which a file shows a part stays whole, as everywhere on btrfs.
    let whole = freed(&["truncate", "--discard", "-s", "4096", "disk.img", "/whole"]);
    assert!(whole < LEN_BYTES - slack, "{whole}");
    assert!(freed(&["subvolume", "delete", "--discard", "disk.img", "/sub"]) > LEN_BYTES - slack);
    fs::write(place.path("commands"), "rm /batched\nmkdir /dir\n").unwrap();
    let batched = freed(&["batch", "--discard", "-f", "commands", "disk.img"]);
    assert!(batched > LEN_BYTES - slack, "{batched}");
    fs::write(place.path("commands"), "rm --discard /kept\n").unwrap();
    let ran = place.run(&["batch", "-f", "commands", "disk.img"]);
    ran.fails(2).says("before the batch");
    // What is left is as it was.
    let kept = place.run(&["cat", "disk.img", "/kept"]).ok();
    assert!(kept.stdout == data);
    let cut = place.run(&["cat", "disk.img", "/cut"]).ok();
    assert!(cut.stdout == data[..half_bytes as usize]);
    place.run(&["check", "--data", "disk.img"]).ok();
    assert_judged(&place.path("disk.img"));
}
