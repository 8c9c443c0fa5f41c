//! Trees in and out for who is not root, and does as if he were: by fakeroot(1), and as root of a user namespace.

#[path = "support/place.rs"]
mod place;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use place::{NOBODY, Place as Mounted};
use tempfile::TempDir;
use ubtrfs_testkit::{KernelMount, Oracle, command, oracle, run};

const UBTRFS: &str = env!("CARGO_BIN_EXE_ubtrfs");

/// What find(1) tells of each file below the working directory, and stat(1) of devices.
const LIST: &str = "
    list() {
        find . -printf '%P %y %m %U:%G %l\\n' | sort
        find . -type b -o -type c | sort | xargs -r stat -c '%n %t:%T'
    }
";

/// Makes `tree`, of which fakeroot(1) alone knows how it is.
const TREE: &str = "
    mkdir -p tree/dir
    echo text >tree/file
    cp tree/file tree/dir/file
    mkfifo tree/pipe
    mknod tree/console c 5 1
    mknod tree/disk b 8 300
    ln -s file tree/link
    ln tree/file tree/dir/hard
    chmod 4755 tree/file
    chmod 2750 tree/dir
    chown 42:43 tree/file
    chown 7:8 tree/dir tree/console
    chown -h 9:10 tree/link
    setfattr -n user.real -v kept tree/file
    setfattr -n security.capability -v 0x0100000200200000000000000000000000000000 tree/dir/file
";

/// A directory of nobody's.
struct Place(TempDir);

impl Place {
    fn new() -> Option<Self> {
        let judges = [Oracle::Root, Oracle::KernelBtrfs, Oracle::Fakeroot, Oracle::Tar];
        if !oracle::require_all(&judges) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        Some(Self(dir))
    }

    /// What the script prints, which nobody runs here; `$1` is the command.
    #[track_caller]
    fn run(&self, by: &[&str], script: &str) -> String {
        let who = NOBODY.to_string();
        let output = command("setpriv")
            .args(["--reuid", &who, "--regid", &who, "--clear-groups"])
            .args(by)
            .args(["sh", "-ec", script, "sh", UBTRFS])
            .current_dir(self.0.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the kernel shows of an image.
    fn seen(&self, image: &str) -> String {
        let mount = KernelMount::read_only(&self.0.path().join(image), "");
        let script = format!("{LIST}\ncd \"$1\"; list; getfattr -d -m - file dir/file");
        let told = run("sh", ["-ec", &script, "sh", mount.path().to_str().unwrap()]);
        mount.unmount();
        told
    }
}

/// It saw what is really there: all files the caller's, devices empty files, and no capabilities. Nothing said so.
#[test]
fn import_by_fakeroot_brings_what_tar_does() {
    let Some(place) = Place::new() else { return };
    let script = format!(
        "{LIST}{TREE}
        tar --xattrs --xattrs-include='*' --numeric-owner -C tree -cf tree.tar .
        \"$1\" import --quiet --mkfs of-tree tree
        \"$1\" import --quiet --mkfs of-tar tree.tar
        cd tree
        list"
    );
    let expected = place.run(&["fakeroot"], &script);
    assert!(expected.contains("file f 4755 42:43") && expected.contains("console c"), "{expected}");
    let seen = place.seen("of-tree");
    assert!(seen.starts_with(&expected), "{seen}\n{expected}");
    assert!(seen.contains("user.real") && seen.contains("security.capability"), "{seen}");
    assert_eq!(seen, place.seen("of-tar"));
}

#[test]
fn export_by_fakeroot_gives_it_what_the_image_has() {
    let Some(place) = Place::new() else { return };
    let script = format!(
        "{LIST}{TREE}
        \"$1\" import --quiet --mkfs image tree
        \"$1\" export --quiet image / out
        (cd tree; list) >expected
        (cd out; list) >seen
        diff expected seen
        getfattr -d -m - out/dir/file"
    );
    let told = place.run(&["fakeroot"], &script);
    assert!(told.contains("security.capability"), "{told}");
}

/// Commands about a mount are the kernel's matter, which knows the caller whatever fakeroot(1) says.
#[test]
fn mount_is_reached_by_fakeroot() {
    let Some(place) = Mounted::new(false) else { return };
    place.mount(&[]);
    let output = place
        .command("fakeroot")
        .args([UBTRFS, "subvolume", "create"])
        .args([&place.directory, Path::new("sub")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut list = place.command(UBTRFS);
    let output = list.args(["subvolume", "list"]).arg(&place.directory).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("sub"), "{output:?}");
    let output =
        place.command("fakeroot").args([UBTRFS, "umount"]).arg(&place.directory).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    place.assert_clean();
}

/// It ended at the first file whose owner is nobody in the namespace.
#[test]
fn export_in_a_user_namespace_leaves_owners_out_that_are_not_in_it() {
    let Some(place) = Place::new() else { return };
    let script = format!("{TREE}\n\"$1\" import --quiet --mkfs image tree; rm -r tree");
    place.run(&["fakeroot"], &script);
    let told =
        place.run(&["unshare", "-Ur"], "\"$1\" export --quiet image / out 2>&1 || test $? = 1");
    // Devices nobody makes there.
    assert!(told.contains("owner 42:43 not set") && told.contains("needs root"), "{told}");
    assert!(told.contains("set-id bits dropped"), "{told}");
    let file = place.0.path().join("out/file");
    let about = file.metadata().unwrap();
    assert_eq!((about.uid(), about.permissions().mode() & 0o7777), (NOBODY, 0o755));
    assert_eq!(fs::read(&file).unwrap(), b"text\n");
    assert_eq!(fs::read_link(place.0.path().join("out/link")).unwrap(), Path::new("file"));
}

/// Of whose process it was the owner was taken for recorded: a program got set-group-ID of the group that a
/// set-group-ID directory gives to what is made in it.
#[test]
fn export_into_a_set_group_id_directory_gives_no_program_that_group() {
    const GROUP: u32 = 4321;
    let Some(place) = Place::new() else { return };
    let shared = place.0.path().join("shared");
    fs::create_dir(&shared).unwrap();
    chown(&shared, Some(NOBODY), Some(GROUP)).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o2777)).unwrap();
    let script = "
        mkdir tree
        echo text >tree/program
        chmod 2755 tree/program
        \"$1\" import --quiet --mkfs image tree
        \"$1\" export --quiet image / shared/out 2>&1
        \"$1\" export --quiet image / out 2>&1";
    let told = place.run(&[], script);
    assert_eq!(told.matches("set-id bits dropped").count(), 1, "{told}");
    let about = |path: &str| {
        let about = place.0.path().join(path).metadata().unwrap();
        (about.gid(), about.permissions().mode() & 0o7777)
    };
    assert_eq!(about("shared/out/program"), (GROUP, 0o755));
    assert_eq!(about("out/program"), (NOBODY, 0o2755));
}
