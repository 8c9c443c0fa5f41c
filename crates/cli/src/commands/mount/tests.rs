use std::os::unix::process::ExitStatusExt;

use super::*;

/// A server that was killed was taken for one that had not found the image.
#[test]
fn server_that_was_killed_is_excused_by_no_word() {
    let ended = |status, is_excused| Ended::by(ExitStatus::from_raw(status), is_excused);
    for is_excused in [true, false] {
        assert_eq!(ended(9, is_excused), Ended::Silent);
        assert_eq!(ended(4 << 8, is_excused), Ended::Failed(4));
    }
    assert_eq!([ended(0, true), ended(0, false)], [Ended::Excused, Ended::Silent]);
}

fn parse(text: &str) -> Result<Wanted> {
    Wanted::parse(&text.split(',').map(str::to_owned).collect::<Vec<_>>())
}

#[test]
fn options_known_are_taken_and_others_refused() {
    let wanted = parse("ro,subvol=a/b,compress=zstd:3,commit=5,max_inline=0,noatime").unwrap();
    assert!(wanted.read_only);
    assert_eq!(wanted.subvol.as_deref(), Some("a/b"));
    assert_eq!((wanted.commit_seconds, wanted.max_inline_bytes), (Some(5), Some(0)));
    assert!(wanted.compress.is_some() && !wanted.force_compression);
    assert!(parse("compress-force=lzo").unwrap().force_compression);
    assert!(!parse("ro,rw").unwrap().read_only);
    let every = |text| parse(text).unwrap().background().commit_every;
    assert_eq!(every("rw"), BackgroundOptions::default().commit_every);
    assert_eq!(every("commit=0"), BackgroundOptions::default().commit_every);
    assert_eq!(every("commit=1"), Duration::from_secs(1));
    assert_eq!(every("commit=3600"), Duration::from_secs(3600));
    let restrictions = |text| parse(text).unwrap().restrictions(&[]);
    assert_eq!(restrictions("nodev,dev,noexec,noexec"), [Restriction::NoExec]);
    assert_eq!(restrictions("users,exec,suid"), [Restriction::NoDev]);
    assert_eq!(restrictions("nosymfollow"), [Restriction::NoSymFollow]);
    let before = [Restriction::NoExec, Restriction::NoDev];
    let again = |text| parse(text).unwrap().restrictions(&before);
    assert_eq!(again("ro"), [Restriction::NoDev, Restriction::NoExec]);
    assert_eq!(again("nodev,dev,nosuid"), [Restriction::NoSuid, Restriction::NoExec]);
    assert!(parse("rw").unwrap().says_writable && !parse("nodev").unwrap().says_writable);
    assert!(parse("clone_fd").unwrap().clones_device);
    assert!(parse("clone_fd,io_uring").is_err());
    assert!(parse("discard=async").unwrap().discard);
    assert!(!parse("discard,nodiscard").unwrap().discard);
    for bad in [
        "write-back",
        "ro=1",
        "subvol",
        "commit=soon",
        "compress=rar",
        "compress=zstd:99",
        "nodatacow",
        "nodatasum",
        "nobarrier",
        "flushoncommit",
        "noacl",
        "strictatime",
        "user_id=0",
        "busy_poll=x",
        "cache=much",
    ] {
        assert!(parse(bad).is_err(), "{bad}");
    }
}
