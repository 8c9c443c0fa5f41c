//! Help, usage errors, and errors that need no filesystem.

mod support;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use support::{ubtrfs, ubtrfs_in};

/// Every command and subcommand.
const COMMANDS: &[&[&str]] = &[
    &["import"],
    &["export"],
    &["mount"],
    &["umount"],
    &["mkfs"],
    &["ls"],
    &["tree"],
    &["cat"],
    &["stat"],
    &["df"],
    &["du"],
    &["put"],
    &["get"],
    &["mkdir"],
    &["mknod"],
    &["cp"],
    &["reflink"],
    &["mv"],
    &["rm"],
    &["ln"],
    &["chmod"],
    &["chown"],
    &["touch"],
    &["truncate"],
    &["getfattr"],
    &["setfattr"],
    &["batch"],
    &["subvolume"],
    &["subvolume", "create"],
    &["subvolume", "delete"],
    &["subvolume", "snapshot"],
    &["subvolume", "set-default"],
    &["subvolume", "list"],
    &["subvolume", "show"],
    &["subvolume", "get-default"],
    &["property"],
    &["property", "get"],
    &["property", "set"],
    &["filesystem"],
    &["filesystem", "df"],
    &["filesystem", "usage"],
    &["filesystem", "label"],
    &["filesystem", "resize"],
    &["filesystem", "sync"],
    &["check"],
    &["inspect"],
    &["inspect", "super"],
    &["inspect", "tree"],
    &["inspect", "chunks"],
    &["inspect", "fiemap"],
    &["inspect", "free-space"],
    &["inspect", "delayed-refs"],
    &["bench"],
    &["help"],
];

#[test]
fn help_every_command_explains_itself() {
    for words in COMMANDS {
        let by_flag = ubtrfs(words.iter().chain(&["--help"])).ok();
        assert!(by_flag.text().contains("Usage: ubtrfs"), "{words:?}");
        let by_help = ubtrfs(["help"].iter().chain(*words)).ok();
        assert_eq!(by_help.text(), by_flag.text(), "{words:?}");
        assert!(by_flag.text().lines().all(|line| line.chars().count() <= 100), "{words:?}");
    }
}

/// To take what is printed for right: `UBTRFS_BLESS=1 cargo test -p ubtrfs-cli --test usage`.
#[test]
fn help_texts_are_those_reviewed() {
    let mut texts = ubtrfs(["--help"]).ok().text().to_owned();
    for words in COMMANDS.iter().chain(&[&["exit-codes"][..], &["topics"]]) {
        texts.push_str(&format!("\n==== ubtrfs help {}\n", words.join(" ")));
        texts.push_str(ubtrfs(["help"].iter().chain(*words)).ok().text());
    }
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/help.txt");
    if std::env::var_os("UBTRFS_BLESS").is_some() {
        fs::create_dir_all(golden.parent().unwrap()).unwrap();
        fs::write(&golden, &texts).unwrap();
    }
    let reviewed = fs::read_to_string(&golden).unwrap();
    for (number, (have, expect)) in texts.lines().zip(reviewed.lines()).enumerate() {
        assert_eq!(have, expect, "line {}", number + 1);
    }
    assert_eq!(texts.lines().count(), reviewed.lines().count());
}

#[test]
fn help_topics_are_all_there() {
    let list = ubtrfs(["help", "topics"]).ok();
    let names: Vec<&str> =
        list.text().lines().skip(1).filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.contains(&"exit-codes"));
    for name in names {
        assert!(!ubtrfs(["help", name]).ok().stdout.is_empty());
    }
    ubtrfs(["help", "nonsense"]).fails(2).says("no command or topic 'nonsense'");
}

#[test]
fn no_arguments_prints_help_and_fails() {
    let ran = ubtrfs::<&str>([]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("Usage: ubtrfs <COMMAND>"));
}

#[test]
fn unknown_command_says_it_is_not_there() {
    for name in ["send", "receive", "scrub", "nonsense"] {
        ubtrfs([name]).fails(2).says(&format!("{name}: this version has no such command"));
    }
    ubtrfs(["subvolum"]).fails(2).says("Did you mean subvolume");
    ubtrfs(["subvolume", "sync"]).fails(2).says("no such command");
}

#[test]
fn usage_errors_exit_2_with_our_name_in_front() {
    ubtrfs(["ls"]).fails(2).says("IMAGE");
    ubtrfs(["ls", "--nonsense", "x.img"]).fails(2).says("--nonsense");
    ubtrfs(["ls", "--offset", "12x", "x.img"]).fails(2).says("unknown suffix 'x'");
    ubtrfs(["ls", "--offset", "1", "--partition", "1", "x.img"]).fails(2);
    ubtrfs(["ls", "--super-copy", "3", "x.img"]).fails(2);
}

#[test]
fn image_missing_empty_or_something_else_exits_4() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("empty"), b"").unwrap();
    fs::write(path("text"), vec![b'x'; 1 << 20]).unwrap();
    let run = |name| ubtrfs_in(directory.path(), ["ls", name]);
    run("missing.img").fails(4).says("opening: missing.img: No such file or directory");
    run("empty").fails(4).says("empty");
    run("text").fails(4).says("text: no btrfs filesystem");
    run(".").fails(4).says("a directory");
}

#[test]
fn image_name_that_is_no_text_is_quoted_in_messages() {
    let name = std::ffi::OsStr::from_bytes(b"caf\xe9\x1b.img");
    ubtrfs([std::ffi::OsStr::new("ls"), name]).fails(4).says("'caf'$'\\351\\033''.img'");
}

#[test]
fn generate_writes_man_pages_and_completions() {
    let directory = tempfile::tempdir().unwrap();
    let run = |what| ubtrfs_in(directory.path(), ["generate", what, what]).ok();
    run("man");
    run("completions");
    let page = fs::read_to_string(directory.path().join("man/ubtrfs-inspect-super.1")).unwrap();
    assert!(page.contains(".SH EXAMPLES") || page.contains(".SH \"EXAMPLES\""));
    let pages = fs::read_dir(directory.path().join("man")).unwrap().count();
    assert_eq!(pages, COMMANDS.len() + 1);
    for name in ["ubtrfs.bash", "_ubtrfs", "ubtrfs.fish"] {
        let text = fs::read_to_string(directory.path().join("completions").join(name)).unwrap();
        assert!(text.contains("subvolume"), "{name}");
    }
}

/// It hands on what it is given, and its exit code is that of the program.
#[test]
fn bench_becomes_the_program_beside() {
    let dir = tempfile::tempdir().unwrap();
    let ours = dir.path().join("ubtrfs");
    // By other processes: what this one has open to write is open in what tests beside start, too, for a moment, and is not run then.
    let made = |script: &str| {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-ec", script, env!("CARGO_BIN_EXE_ubtrfs")]).arg(dir.path());
        assert!(shell.status().unwrap().success());
    };
    made("cp \"$0\" \"$1/ubtrfs\"");
    let run = |path: &std::path::Path| {
        let words = ["bench", "all", "seek", "--scale", "0.1"];
        std::process::Command::new(&ours).args(words).env("PATH", path).output().unwrap()
    };
    let without = run(dir.path());
    let said = String::from_utf8(without.stderr).unwrap();
    assert_eq!(without.status.code(), Some(6), "{said}");
    assert!(said.contains("ubtrfs-bench") && said.contains("cargo build"), "{said}");
    made(
        "cd \"$1\"; printf '#!/bin/sh\necho \"$@\"; exit 3\n' >ubtrfs-bench; chmod 755 ubtrfs-bench",
    );
    let with = run(dir.path());
    assert_eq!(with.status.code(), Some(3));
    assert_eq!(with.stdout, b"seek --scale 0.1\n");
}
