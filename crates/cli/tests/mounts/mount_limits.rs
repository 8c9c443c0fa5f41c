//! What a mount does otherwise than Linux's btrfs, as the help, the README and ADR 3 tell users.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Command, Output};

use crate::place::Place;

fn run(program: &str, words: &[&str], directory: &Path) -> Output {
    Command::new(program).args(words).current_dir(directory).env("LC_ALL", "C").output().unwrap()
}

/// The lines, without a leading `./` and an ending `/`.
fn names(output: &Output) -> BTreeSet<String> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .map(|line| line.trim_start_matches("./").trim_end_matches('/').to_owned())
        .collect()
}

#[test]
fn what_stays_on_one_filesystem_goes_into_subvolumes_of_a_mount() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = place.directory.as_path();
    place.done(&["subvolume", "create"], &[top, Path::new("/sub")]);
    fs::write(top.join("sub/inside"), vec![7; 1 << 20]).unwrap();
    place.done(&["subvolume", "snapshot", "-r"], &[top, Path::new("/sub"), Path::new("/snap")]);
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    for name in ["sub", "sub/inside", "snap", "snap/inside"] {
        assert_eq!(device(&top.join(name)), device(top), "{name}");
    }
    let inside = ["sub/inside".to_owned(), "snap/inside".to_owned()];
    let has_both = |names: &BTreeSet<String>| inside.iter().all(|name| names.contains(name));
    let is_without = |names: &BTreeSet<String>| inside.iter().all(|name| !names.contains(name));
    assert!(has_both(&names(&run("find", &[".", "-xdev"], top))));
    let archive = |words: &str| {
        let script = format!("tar --one-file-system {words} -cf - . | tar -t");
        names(&run("sh", &["-c", &script], top))
    };
    assert!(has_both(&archive("")));
    assert!(is_without(&archive("--exclude=./sub --exclude=./snap")));
    let used = |words: &[&str]| {
        let output = run("du", &[words, &["-xsk", "."]].concat(), top);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    assert!(used(&[]) >= 2048 && used(&["--exclude=sub", "--exclude=snap"]) < 1024);
    let copy = |words: &[&str]| {
        let to = tempfile::tempdir_in(top.parent().unwrap()).unwrap();
        let target = format!("{}/", to.path().display());
        let output = run("rsync", &[&["-ax"], words, &["./", &target]].concat(), top);
        assert!(output.status.success(), "{output:?}");
        names(&run("find", &["."], to.path()))
    };
    assert!(has_both(&copy(&[])));
    assert!(is_without(&copy(&["--exclude=/sub", "--exclude=/snap"])));
    place.umount();
}

#[test]
fn what_the_kernel_keeps_from_a_mount_has_another_way() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let top = place.directory.as_path();
    fs::write(top.join("file"), vec![7; 1 << 20]).unwrap();
    let cloned = run("cp", &["--reflink=always", "file", "clone"], top);
    assert!(!cloned.status.success(), "{cloned:?}");
    let told = run("filefrag", &["file"], top);
    assert!(String::from_utf8_lossy(&told.stdout).contains(": 0 extents"), "{told:?}");
    for words in [["subvolume", "list"], ["filesystem", "usage"], ["filesystem", "df"]] {
        let output = run("btrfs", &[&words[..], &["."]].concat(), top);
        assert!(!output.status.success(), "{words:?}: {output:?}");
    }
    assert!(run("cp", &["file", "copy"], top).status.success());
    place.done(&["reflink"], &[top, Path::new("/file"), Path::new("/linked")]);
    let lies_at = |name: &str| {
        let said = place.done(&["inspect", "fiemap", "--json"], &[top, Path::new(name)]);
        assert!(said.contains("\"shared\""), "{name}: {said}");
        let logical = said.lines().find(|line| line.contains("\"logical\"")).map(str::to_owned);
        logical.unwrap_or(said)
    };
    assert_eq!(lies_at("/copy"), lies_at("/file"));
    assert_eq!(lies_at("/linked"), lies_at("/file"));
    place.umount();
    place.assert_clean();
}

/// Of a file of several extents, with holes and space that nothing is written to yet.
#[test]
fn extents_told_at_a_mount_are_those_of_the_image() {
    for options in ["commit=3600", "compress=zstd,commit=3600"] {
        let Some(place) = Place::new(true) else { return };
        place.mount(&["-o", options]);
        let top = place.directory.as_path();
        let file = fs::File::create(top.join("file")).unwrap();
        for (at, len) in [(0, 100_000), (1 << 20, 300_000), (200_000, 5000), (2 << 20, 4096)] {
            file.write_all_at(&vec![b'a'; len], at).unwrap();
            file.sync_all().unwrap();
        }
        file.write_all_at(&[b'b'; 4096], 20_480).unwrap();
        let words = ["-l", "1000000", "-o", "4194304", "file"];
        assert!(run("fallocate", &words, top).status.success());
        place.done(&["reflink"], &[top, Path::new("/file"), Path::new("/linked")]);
        // This one is in memory yet.
        file.write_all_at(&vec![b'c'; 50_000], 1_100_000).unwrap();
        drop(file);
        let told = |at: &Path| {
            let of = |name| place.done(&["inspect", "fiemap"], &[at, Path::new(name)]);
            [of("/file"), of("/linked")]
        };
        let at_the_mount = told(top);
        place.umount();
        assert_eq!(at_the_mount, told(&place.image), "{options}");
        let [of_file, _] = &at_the_mount;
        assert!(of_file.lines().count() > 8, "{of_file}");
        for word in ["hole", "unwritten", "shared"] {
            assert!(of_file.contains(word), "{options}: no {word}: {of_file}");
        }
        place.assert_clean();
    }
}
