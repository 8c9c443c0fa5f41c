//! The workload `mount` as a user runs it, on a few files, with the command that lies beside this program. No time is judged.

use std::path::Path;
use std::process::Command;

use serde_json::Value;
use ubtrfs_testkit::oracle::{self, Oracle};

const JOBS: [&str; 10] = [
    "untar",
    "tar back, warm",
    "stat, warm",
    "readdir, warm",
    "fs_mark",
    "remove",
    "seek",
    "write",
    "read",
    "random 4 KiB reads, cached",
];

/// Of which a hundredth is taken.
fn make_source(directory: &Path) {
    for number in 0..2000 {
        let parent = directory.join(format!("directory {}", number % 20));
        std::fs::create_dir_all(&parent).unwrap();
        std::fs::write(parent.join(format!("file {number}")), vec![1; 20 * number]).unwrap();
    }
}

#[test]
fn mount_tells_of_each_job_what_it_took_and_what_was_asked() {
    if !oracle::require(Oracle::Fuse) {
        return;
    }
    let program = Path::new(env!("CARGO_BIN_EXE_ubtrfs-bench"));
    let ubtrfs = program.with_file_name("ubtrfs");
    assert!(ubtrfs.exists(), "`cargo build -p ubtrfs-cli` makes {}", ubtrfs.display());
    let directory = tempfile::tempdir().unwrap();
    let [source, scratch] = ["source", "scratch"].map(|name| directory.path().join(name));
    make_source(&source);
    std::fs::create_dir(&scratch).unwrap();
    let json = directory.path().join("figures.json");
    let mut command = Command::new(program);
    command.args(["mount", "--vs", "none", "--rounds", "1", "--scale", "0.01"]);
    command.arg("--source").arg(&source).arg("--scratch").arg(&scratch);
    command.arg("--ubtrfs").arg(&ubtrfs).arg("--json").arg(&json);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0);
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let rows = |table: &str| -> Vec<Value> {
        let tables = figures["tables"].as_array().unwrap();
        let found = tables.iter().find(|found| found["name"] == table);
        found.unwrap_or_else(|| panic!("table {table} is missing"))["rows"]
            .as_array()
            .unwrap()
            .clone()
    };
    let ours: Vec<_> = rows("mount").into_iter().filter(|row| row["who"] == "ubtrfs").collect();
    let jobs: Vec<_> = ours.iter().map(|row| row["job"].as_str().unwrap()).collect();
    assert_eq!(jobs, JOBS);
    for row in &ours {
        for column in ["count", "wall_s", "each"] {
            assert!(row[column].as_f64().unwrap() > 0.0, "{column}: {row}");
        }
    }
    // Of a file whose size does not go by the scale, each extent and each hole.
    assert_eq!(ours[6]["count"], 8192);
    let requests = rows("mount_requests");
    let jobs: Vec<_> = requests.iter().map(|row| row["job"].as_str().unwrap()).collect();
    assert_eq!(jobs, JOBS);
    for row in &requests {
        let [before, after] = ["before", "after"].map(|what| row[what].as_u64().unwrap());
        assert!(0 < after && after < before, "{row}");
        assert!(!row["asked"].as_str().unwrap().is_empty(), "{row}");
    }
}
