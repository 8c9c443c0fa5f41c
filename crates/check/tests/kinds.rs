//! Each kind of finding is made by a test, so that none is only believed to be found.

use std::fs;
use std::path::Path;

use ubtrfs_check::Finding;

/// What nothing known leads to: a net below the other findings.
const NETS: [&str; 1] = ["references-disagree"];

/// All code of the tests, without comments: what is only spoken of is not expected. Nor is what helpers leave out.
fn read_all(directory: &Path, text: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with("common") || path.ends_with("kinds.rs") {
            continue;
        }
        if path.is_dir() {
            read_all(&path, text);
            continue;
        }
        let file = fs::read_to_string(path).unwrap();
        for line in file.lines().filter(|line| !line.trim_start().starts_with("//")) {
            text.push_str(line);
            text.push('\n');
        }
    }
}

#[test]
fn every_kind_is_expected_by_a_test() {
    let mut tests = String::new();
    read_all(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"), &mut tests);
    let is_expected = |kind: &&&str| tests.contains(&format!("\"{kind}\""));
    let missing: Vec<_> = Finding::KINDS.iter().filter(|kind| !is_expected(kind)).collect();
    assert_eq!(missing, NETS.iter().collect::<Vec<_>>());
}
