//! Logs that the kernel wrote, replayed by the engine and by the kernel: both see the same then, and
//! `btrfs check` finds nothing.
//!
//! A copy of the image, taken right after an fsync while it is mounted, is what a power cut would
//! leave.

mod common;

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::kernel_log::{
    Case, Stage, compare, compare_changed, fallocate, has_judges, pwrite, sync, tree, write, xattr,
};
use rustix::fs::{AtFlags, CWD, FallocateFlags as Flags, FileType, Mode, OFlags, RenameFlags};
use ubtrfs_testkit::{Prng, run};

fn cases() -> Vec<Case> {
    let case = |name, after| Case { name, before: tree, after };
    vec![
        case("a new file", |s| {
            write(s, "a/new", 200_000);
            sync(&s.at("a/new"));
        }),
        case("a new inline file in a new directory", |s| {
            fs::create_dir(s.at("a/new dir")).unwrap();
            write(s, "a/new dir/file", 100);
            sync(&s.at("a/new dir/file"));
        }),
        case("a new directory with files", |s| {
            fs::create_dir(s.at("d")).unwrap();
            for at in 0..40 {
                write(s, &format!("d/{at}"), 10 + at * 300);
            }
            sync(&s.at("d"));
        }),
        case("an overwritten and a longer file", |s| {
            pwrite(s, "a/large", 100_000, 30_000);
            pwrite(s, "a/large", 800_000, 5000);
            sync(&s.at("a/large"));
        }),
        case("the same file fsynced twice", |s| {
            pwrite(s, "a/large", 100_000, 30_000);
            sync(&s.at("a/large"));
            pwrite(s, "a/large", 110_000, 100);
            sync(&s.at("a/large"));
        }),
        case("a truncated file", |s| {
            File::options().write(true).open(s.at("a/large")).unwrap().set_len(12_345).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a truncated and extended file", |s| {
            let file = File::options().write(true).open(s.at("a/large")).unwrap();
            file.set_len(12_345).unwrap();
            file.set_len(900_000).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a punched hole and preallocation", |s| {
            fallocate(s, "a/large", Flags::PUNCH_HOLE | Flags::KEEP_SIZE, 65_536, 200_000);
            fallocate(s, "a/b/file", Flags::KEEP_SIZE, 0, 500_000);
            pwrite(s, "a/b/file", 200_000, 8192);
            sync(&s.at("a/large"));
            sync(&s.at("a/b/file"));
        }),
        case("attributes set, replaced and removed", |s| {
            xattr(s, "a/large", "user.one", None);
            xattr(s, "a/large", "user.two", Some(b"another"));
            xattr(s, "a/large", "user.three", Some(b"3"));
            sync(&s.at("a/large"));
        }),
        case("a renamed file", |s| {
            fs::rename(s.at("a/large"), s.at("a/b/moved")).unwrap();
            sync(&s.at("a/b/moved"));
        }),
        case("a file renamed over another", |s| {
            write(s, "a/new", 30_000);
            fs::rename(s.at("a/new"), s.at("a/small")).unwrap();
            sync(&s.at("a/small"));
        }),
        case("a removed name of two", |s| {
            fs::remove_file(s.at("c/link")).unwrap();
            sync(&s.at("a/large"));
        }),
        case("a removed file, its directory fsynced", |s| {
            fs::remove_file(s.at("a/small")).unwrap();
            sync(&s.at("a"));
        }),
        case("a removed name, its directory fsynced", |s| {
            fs::remove_file(s.at("c/link")).unwrap();
            sync(&s.at("c"));
        }),
        case("a name given to another file", |s| {
            fs::remove_file(s.at("a/small")).unwrap();
            write(s, "a/small", 20_000);
            sync(&s.at("a/small"));
        }),
        case("many links", |s| {
            for at in 0..300 {
                fs::hard_link(s.at("a/small"), s.at(&format!("c/a link of a long name {at}")))
                    .unwrap();
            }
            sync(&s.at("a/small"));
        }),
        case("names exchanged", |s| {
            let (a, b) = (s.at("a/small"), s.at("a/large"));
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, flags).unwrap();
            sync(&a);
        }),
        case("a directory moved", |s| {
            fs::rename(s.at("a/b"), s.at("c/b")).unwrap();
            pwrite(s, "c/b/file", 0, 10);
            sync(&s.at("c/b/file"));
        }),
        case("a directory moved and fsynced", |s| {
            fs::rename(s.at("a/b"), s.at("c/b")).unwrap();
            sync(&s.at("c/b"));
        }),
        case("a symbolic link", |s| {
            std::os::unix::fs::symlink("../a/large", s.at("c/symlink")).unwrap();
            sync(&s.at("c"));
        }),
        case("a clone", |s| {
            run(
                "cp",
                [
                    "--reflink=always".as_ref(),
                    s.at("a/large").as_os_str(),
                    s.at("c/clone").as_os_str(),
                ],
            );
            sync(&s.at("c/clone"));
        }),
        case("a file without a name", |s| {
            let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            let file = File::from(rustix::fs::open(s.at("a"), flags, mode).unwrap());
            file.write_all_at(&[7; 20_000], 0).unwrap();
            file.sync_all().unwrap();
            write(s, "a/new", 5);
            sync(&s.at("a/new"));
            s.open.borrow_mut().push(file);
        }),
        Case {
            name: "files of two subvolumes",
            before: |s| {
                tree(s);
                for name in ["one", "two"] {
                    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), s.at(name).as_os_str()]);
                    write(s, &format!("{name}/file"), 90_000);
                }
            },
            after: |s| {
                pwrite(s, "one/file", 5000, 10_000);
                write(s, "two/new", 300_000);
                fs::rename(s.at("two/file"), s.at("two/renamed")).unwrap();
                for name in ["one/file", "two/new", "two/renamed"] {
                    sync(&s.at(name));
                }
            },
        },
        Case {
            name: "a file of a subvolume with snapshots",
            before: |s| {
                tree(s);
                run(
                    "btrfs",
                    [
                        "subvolume".as_ref(),
                        "snapshot".as_ref(),
                        s.at("").as_os_str(),
                        s.at("snapshot").as_os_str(),
                    ],
                );
            },
            after: |s| {
                pwrite(s, "a/large", 5000, 10_000);
                sync(&s.at("a/large"));
                pwrite(s, "snapshot/a/large", 9000, 10_000);
                fs::remove_file(s.at("snapshot/a/small")).unwrap();
                sync(&s.at("snapshot/a/large"));
                sync(&s.at("snapshot/a"));
            },
        },
    ]
}

/// Cases in which the kernel commits instead of writing a log, which it does by itself: what is
/// shown is that the engine needs none.
const COMMITTED: [&str; 2] = ["a renamed file", "a directory moved and fsynced"];

#[test]
fn logs_of_the_kernel_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    let only = std::env::var("UBTRFS_CASE").ok();
    let mut logged = std::collections::BTreeSet::new();
    for (mkfs, mount) in [("", ""), ("-O ^no-holes", ""), ("--mixed", "compress=zstd")] {
        for case in cases() {
            if only.as_ref().is_some_and(|only| only != case.name) {
                continue;
            }
            let stage = Stage::new(mkfs, mount);
            (case.before)(&stage);
            stage.commit();
            (case.after)(&stage);
            let had_log = compare(&stage.image, &format!("{} ({mkfs}; {mount})", case.name));
            stage.done();
            println!("{} ({mkfs}; {mount}): log {had_log}", case.name);
            if had_log {
                logged.insert(case.name);
            }
        }
    }
    // In the others there is something to be replayed.
    if only.is_none() {
        let names = cases().into_iter().map(|case| case.name);
        let others: Vec<_> = names.filter(|name| !logged.contains(name)).collect();
        assert_eq!(others, COMMITTED);
    }
}

/// It was refused: the tree was to be made anew first, and that commits.
#[test]
fn logs_beside_a_stale_free_space_tree_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    for case in cases().into_iter().take(8) {
        let stage = Stage::new("-R free-space-tree", "");
        (case.before)(&stage);
        stage.commit();
        (case.after)(&stage);
        assert!(compare_changed(&stage.image, case.name, common::forget_valid), "{}", case.name);
        stage.done();
    }
}

/// How files are opened that may have become something else: a FIFO is not waited for, and no link is
/// followed.
fn options() -> fs::OpenOptions {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.custom_flags(i32::try_from(flags.bits()).unwrap());
    options
}

fn change(path: &Path) -> std::io::Result<File> {
    options().write(true).create(true).truncate(false).open(path)
}

fn done(result: rustix::io::Result<()>, what: impl FnOnce() -> String) -> std::io::Result<String> {
    result?;
    Ok(what())
}

/// Random work on few names, with fsyncs of files and directories; after some of them the power
/// is cut.
#[test]
fn logs_of_random_work_are_replayed_as_the_kernel_does() {
    if !has_judges() {
        return;
    }
    let mut random = Prng::of_test(81);
    println!("seed {}", random.seed());
    let (mut cuts, mut logs) = (0, 0);
    for (mkfs, mount) in [("", ""), ("-O ^no-holes -n 4096", ""), ("", "compress-force=lzo")] {
        let stage = Stage::new(mkfs, mount);
        for number in 0..4 {
            fs::create_dir(stage.at(&format!("d{number}"))).unwrap();
        }
        let mut journal = Vec::new();
        for round in 0..700 {
            let path = |random: &mut Prng| {
                let dir = ["", "d0/", "d1/", "d2/d3/", "d2/"][random.index(5)];
                format!("{dir}f{}", random.below(5))
            };
            let (a, b) = (path(&mut random), path(&mut random));
            let (from, to) = (stage.at(&a), stage.at(&b));
            let did = match random.below(28) {
                0..3 => change(&from).and_then(|file| {
                    file.set_len(0)?;
                    file.write_all_at(&random.text(300), 0)?;
                    Ok(format!("write {a}"))
                }),
                3..5 => {
                    let (at, len) = (random.below(300_000), random.index(50_000));
                    change(&from).and_then(|file| {
                        file.write_all_at(&random.bytes(len), at)?;
                        Ok(format!("write {a} {at} {len}"))
                    })
                }
                5 => options().write(true).open(&from).and_then(|file| {
                    let len = random.below(200_000);
                    file.set_len(len).map(|()| format!("truncate {a} {len}"))
                }),
                6 => fs::hard_link(&from, &to).map(|()| format!("link {a} {b}")),
                7..9 => fs::rename(&from, &to).map(|()| format!("rename {a} {b}")),
                9 => fs::remove_file(&from).map(|()| format!("unlink {a}")),
                10 => {
                    let dir = stage.at("d2/d3");
                    fs::create_dir(&dir)
                        .or_else(|_| fs::rename(&dir, stage.at("d1/d3")))
                        .or_else(|_| fs::rename(stage.at("d1/d3"), &dir))
                        .map(|()| "directory d3".to_owned())
                }
                11 if random.chance(1, 3) => {
                    stage.commit();
                    Ok("commit".to_owned())
                }
                12 => {
                    let flags = [RenameFlags::EXCHANGE, RenameFlags::WHITEOUT][random.index(2)];
                    let renamed = rustix::fs::renameat_with(CWD, &from, CWD, &to, flags);
                    done(renamed, || format!("{flags:?} {a} {b}"))
                }
                13 => {
                    let types = [FileType::Fifo, FileType::Socket, FileType::CharacterDevice];
                    let (ty, mode) = (types[random.index(3)], Mode::from_raw_mode(0o600));
                    // A device that harms nobody: /dev/null.
                    let null = rustix::fs::makedev(1, 3);
                    let made = rustix::fs::mknodat(CWD, &from, ty, mode, null);
                    done(made, || format!("{ty:?} {a}"))
                }
                14 => {
                    let (name, value) = (format!("user.{}", random.below(4)), random.bytes(300));
                    let flags = rustix::fs::XattrFlags::empty();
                    let set = rustix::fs::lsetxattr(&from, &name, &value, flags);
                    done(set, || format!("set {name} of {a}"))
                }
                15 => {
                    let name = format!("user.{}", random.below(4));
                    let removed = rustix::fs::lremovexattr(&from, &name);
                    done(removed, || format!("remove {name} of {a}"))
                }
                16 => File::create_new(&from).and_then(|file| {
                    rustix::fs::ioctl_setflags(&file, rustix::fs::IFlags::NOCOW)?;
                    Ok(format!("NOCOW {a}"))
                }),
                17 => {
                    let flags = OFlags::TMPFILE | OFlags::RDWR;
                    let mode = Mode::from_raw_mode(0o600);
                    rustix::fs::open(stage.at(""), flags, mode).map_err(Into::into).and_then(
                        |file| {
                            let file = File::from(file);
                            file.write_all_at(&random.bytes(9000), 0)?;
                            if random.chance(1, 2) {
                                file.sync_all()?;
                            }
                            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                            rustix::fs::linkat(CWD, path, CWD, &from, AtFlags::SYMLINK_FOLLOW)?;
                            Ok(format!("name {a}"))
                        },
                    )
                }
                18..20 => {
                    let kinds = [
                        Flags::PUNCH_HOLE | Flags::KEEP_SIZE,
                        Flags::KEEP_SIZE,
                        Flags::ZERO_RANGE,
                        Flags::empty(),
                    ];
                    let (kind, at) = (kinds[random.index(4)], random.below(300_000));
                    let len = 1 + random.below(100_000);
                    let file = options().write(true).open(&from);
                    file.and_then(|file| {
                        rustix::fs::fallocate(&file, kind, at, len)?;
                        Ok(format!("{kind:?} {a} {at} {len}"))
                    })
                }
                20 => {
                    let whole = |random: &mut Prng| random.below(60) * 4096;
                    let (mut at, mut to_at) = (whole(&mut random), whole(&mut random));
                    let len = 4096 * (1 + random.index(20));
                    options().read(true).open(&from).and_then(|source| {
                        let target = change(&to)?;
                        let (from_at, to_at) = (Some(&mut at), Some(&mut to_at));
                        rustix::fs::copy_file_range(&source, from_at, &target, to_at, len)?;
                        Ok(format!("clone {a} {b}, {len}"))
                    })
                }
                21 => std::os::unix::fs::symlink("x".repeat(1 + random.index(200)), &from)
                    .map(|()| format!("symlink {a}")),
                22 => {
                    let dir = stage.at(&format!("d{}/e", random.below(3)));
                    fs::create_dir(&dir)
                        .or_else(|_| fs::remove_dir(&dir))
                        .map(|()| format!("directory {}", dir.display()))
                }
                23 => {
                    use std::os::unix::fs::PermissionsExt;
                    let mode = 0o600 + u32::try_from(random.below(64)).unwrap();
                    fs::set_permissions(&from, fs::Permissions::from_mode(mode))
                        .map(|()| format!("mode {a}"))
                }
                _ => {
                    let what = match random.below(3) {
                        0 => ["", "d0", "d1", "d2"][random.index(4)].to_owned(),
                        _ => a,
                    };
                    let file = options().read(true).open(stage.at(&what));
                    file.and_then(|file| file.sync_all()).map(|()| format!("fsync {what}"))
                }
            };
            let Ok(did) = did else { continue };
            let is_fsync = did.starts_with("fsync");
            journal.push(format!("{round}: {did}"));
            if is_fsync && random.chance(1, 3) {
                let from = journal.iter().rposition(|line| line.ends_with("commit")).unwrap_or(0);
                let when = journal[from..].join("\n");
                cuts += 1;
                logs += u32::from(compare(&stage.image, &when));
            }
        }
        stage.done();
    }
    println!("{cuts} cuts, {logs} with a log");
    assert!(logs > 30, "{logs} of {cuts} images had a log");
}
