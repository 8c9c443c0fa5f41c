//! The README's tour, run as it stands there.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn tour_of_the_readme_runs() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = fs::read_to_string(readme).unwrap();
    let section = readme.split("\n## A tour\n").nth(1).expect("the README has a tour");
    let script = section.split("```").nth(1).expect("the tour has a code block");
    let script = script.strip_prefix("sh\n").expect("the code block is for a shell");
    assert!(script.lines().filter(|line| line.starts_with("ubtrfs ")).count() >= 10);

    let place = tempfile::tempdir().unwrap();
    fs::create_dir_all(place.path().join("photos/summer")).unwrap();
    fs::write(place.path().join("photos/summer/beach.txt"), "sand\n".repeat(5000)).unwrap();
    let command = Path::new(env!("CARGO_BIN_EXE_ubtrfs")).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let output = Command::new("sh")
        .args(["-e", "-c", script])
        .current_dir(place.path())
        .env("PATH", format!("{}:{path}", command.display()))
        .output()
        .unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}\n{stderr}");
    assert_eq!(stderr, "");
    for expect in
        ["imported 1 file, 2 directories", "summer", "sand", "beach.txt", "zstd", "1 file"]
    {
        assert!(stdout.contains(expect), "{expect:?} not in\n{stdout}");
    }
    for image in ["disk.img", "small.img"] {
        support::assert_judged(&place.path().join(image));
    }
}
