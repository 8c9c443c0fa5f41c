//! Each kind of finding is made by a test, so that none is only believed to be found.

use std::fs;
use std::path::Path;

use ubtrfs_check::Finding;

/// What nothing known leads to: a net below the other findings.
const NETS: [&str; 1] = ["references-disagree"];

fn read_all(directory: &Path, text: &mut String) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_all(&path, text);
        } else if path.file_name().unwrap() != "kinds.rs" {
            text.push_str(&fs::read_to_string(path).unwrap());
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
