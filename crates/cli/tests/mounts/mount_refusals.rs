//! What a program sees of a file behind a call that was refused, or that was done and could not be made durable: what is there, and neither less nor more.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output};

use crate::place::{Memory, NOBODY, Place, wait_until};

fn run(program: &str, words: &[&str], path: &Path) -> Output {
    Command::new(program).args(words).arg(path).output().unwrap()
}

fn done(program: &str, words: &[&str], path: &Path) {
    let output = run(program, words, path);
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
}

fn first_block(file: &File) -> Vec<u8> {
    let mut block = vec![0xEE; 4096];
    file.read_exact_at(&mut block, 0).unwrap();
    block
}

/// A program that can only be appended to no longer ran with its owner's rights when he had tried to cut it. (With fallocate the kernel takes them
/// before it asks.)
#[test]
fn refused_change_of_an_append_only_file_leaves_its_mode() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("program");
    fs::write(&path, [1; 8192]).unwrap();
    chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o4755)).unwrap();
    done("chattr", &["+a"], &path);
    let refused: [&[&str]; 2] = [&["truncate", "-s", "0"], &["truncate", "-s", "10000"]];
    let who = NOBODY.to_string();
    for words in refused {
        let by_owner = ["--reuid", &who, "--regid", &who, "--clear-groups"];
        let output = run("setpriv", &[&by_owner, words].concat(), &path);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("not permitted"), "{words:?}: {said}");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o4755, "{words:?}");
    }
    assert!(fs::read(&path).unwrap() == [1; 8192]);
    done("chattr", &["-a"], &path);
    place.umount();
    place.assert_clean();
}

/// The hole was made, an error of before was told, and the kernel went on to show what had been there.
#[test]
fn hole_that_could_not_be_made_durable_is_shown() {
    let Some(mut place) = Place::new(true) else { return };
    let memory = Memory::with_image(&mut place, "100M");
    place.mount(&["-o", "commit=3600,cache=8M"]);
    let path = place.directory.join("file");
    let mut file = File::options().read(true).append(true).create(true).open(&path).unwrap();
    file.write_all(&[b'x'; 8192]).unwrap();
    file.sync_all().unwrap();
    memory.lose(&mut file);
    done("chattr", &["+S"], &path);
    assert!(first_block(&file) == [b'x'; 4096]);
    let output = run("fallocate", &["--punch-hole", "-l", "4096"], &path);
    assert!(!output.status.success(), "{output:?}");
    wait_until("shown", || first_block(&file) == [0; 4096]);
    drop(file);
    // Who unmounts is told, too, of what was lost.
    place.run(&["filesystem", "sync"], &[&place.directory]);
    place.umount();
    place.assert_clean();
    drop(memory);
}

/// Who stored to a map over a hole of a full filesystem was told by msync, and reads went on to show what was stored, until the kernel wanted its
/// memory back.
#[test]
fn what_was_stored_to_a_map_and_has_no_space_is_not_shown() {
    let Some(place) = Place::new(true) else { return };
    place.mount(&[]);
    let path = place.directory.join("file");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    for power in (12..29).rev() {
        let len = (1_u64 << power).to_string();
        let mut number = 0;
        let filler = |number| place.directory.join(format!("filler {power} {number}"));
        while run("fallocate", &["-l", &len], &filler(number)).status.success() {
            number += 1;
        }
    }
    let script = "
import errno,mmap,os,sys
fd=os.open(sys.argv[1],os.O_RDWR)
m=mmap.mmap(fd,4096)
m[0:5]=b'there'
try: m.flush()
except OSError as error: assert error.errno==errno.ENOSPC,error
else: raise SystemExit('it was stored')
";
    done("python3", &["-c", script], &path);
    let file = File::open(&path).unwrap();
    wait_until("gone", || first_block(&file) == [0; 4096]);
    drop(file);
    place.run(&["filesystem", "sync"], &[&place.directory]);
    place.umount();
    place.assert_clean();
}
