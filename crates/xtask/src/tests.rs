use std::path::{Path, PathBuf};

use crate::mask::code_only;
use crate::tidy::{Report, SourceFile};
use crate::{docs, edges, files, modules, tidy};

fn source(path: &str, text: &str) -> SourceFile {
    SourceFile { path: PathBuf::from(path), text: text.to_owned() }
}

#[test]
fn repository_as_it_stands_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let report = tidy(&root).expect("the repository can be read");
    assert!(report.is_clean(), "\n{report}");
    assert!(report.file_count > 30, "found only {} files", report.file_count);
}

#[test]
fn mask_literals_and_comments_leaves_code_only() {
    let text = "a // unsafe\nb /* x /* y */ z */ c \"d \\\" e\" r#\"f\"g\"# 'h' '\\'' i: &'j str";
    let masked = code_only(text);
    assert_eq!(masked.len(), text.len());
    let words: Vec<&str> = masked.split_whitespace().collect();
    assert_eq!(words, ["a", "b", "c", "i:", "&'j", "str"]);
}

#[test]
fn dependencies_every_way_to_write_them_are_found() {
    let manifest = "[package]\nname = \"x\"\n[dependencies]\na.workspace = true\nb = \"1\"\n\
                    c = { version = \"1\" }\n[dependencies.d]\nversion = \"1\"\n\
                    [target.'cfg(unix)'.dependencies]\ne = \"1\"\n[dev-dependencies]\nf = \"1\"\n";
    let found: Vec<(String, bool)> =
        edges::dependencies(manifest).into_iter().map(|d| (d.name, d.is_for_tests)).collect();
    let names = ["a", "b", "c", "d", "e"].map(|name| (name.to_owned(), false));
    assert_eq!(found[..5], names);
    assert_eq!(found[5], ("f".to_owned(), true));
}

#[test]
fn edge_upward_between_crates_is_an_error() {
    let mut report = Report::default();
    let manifest = "[dependencies]\nubtrfs-engine.workspace = true\n\
                    [dev-dependencies]\nubtrfs-testkit.workspace = true\n";
    edges::check(&[source("crates/volume/Cargo.toml", manifest)], &mut report);
    assert_eq!(report.errors.len(), 1, "{report}");
    assert!(report.errors[0].what.contains("volume may not use engine"));
}

/// The table lacked an edge that was there, though it was said to be enforced.
#[test]
fn edge_that_the_table_of_crates_lacks_is_an_error() {
    let manifest = "[dependencies]\nubtrfs-ondisk.workspace = true\n";
    let check = |row: &str| {
        let mut report = Report::default();
        let sources = [source("crates/check/Cargo.toml", manifest), source("ARCHITECTURE.md", row)];
        edges::check(&sources, &mut report);
        report.errors
    };
    assert!(check("| `check` | the checker | volume, ondisk, rt |").is_empty());
    assert!(check("| `check` | the checker | all above |").is_empty());
    for row in ["| `check` | about ondisk | volume, rt |", "| `other` | x | ondisk |"] {
        let errors = check(row);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].what.contains("check uses ondisk"), "{}", errors[0]);
    }
}

#[test]
fn dependency_without_reason_is_an_error() {
    let manifest = source("crates/rt/Cargo.toml", "[dependencies]\nserde = \"1\"\n");
    let mut report = Report::default();
    edges::check(&[manifest, source("ARCHITECTURE.md", "| `other` | x |")], &mut report);
    assert_eq!(report.errors.len(), 1, "{report}");
}

#[test]
fn import_upward_between_modules_is_an_error() {
    let lib = source("crates/engine/src/lib.rs", "pub use filesystem::{Filesystem, Open};");
    let cases = [
        ("crates/engine/src/btree/path.rs", "use crate::fs::inode;", 1),
        ("crates/engine/src/btree/path.rs", "use crate::{alloc::A, data::{x, y}};", 1),
        ("crates/engine/src/btree/path.rs", "use super::super::data::x;", 1),
        ("crates/engine/src/btree/path.rs", "use crate::Filesystem;", 1),
        ("crates/engine/src/btree/path.rs", "use crate::txn::x; use super::node; // crate::fs", 0),
        ("crates/engine/src/fs/inode.rs", "use crate::data::x; use crate::Error;", 0),
        ("crates/engine/src/btree/tests.rs", "use crate::fs::inode;", 0),
        ("crates/engine/src/newcomer.rs", "", 1),
    ];
    for (path, text, errors) in cases {
        let mut report = Report::default();
        modules::check(
            &[source("crates/engine/src/lib.rs", &lib.text), source(path, text)],
            &mut report,
        );
        assert_eq!(report.errors.len(), errors, "{path}: {text}: {report}");
    }
}

#[test]
fn file_rules_each_broken_are_errors() {
    let makefile = source("Makefile", "soak: build\n\ttrue\n");
    let long = "\n".repeat(1001);
    let cases = [
        ("crates/engine/src/a.rs", "fn f() { unsafe { g() } }", 1),
        ("crates/volume/src/a.rs", "fn f() { unsafe { g() } }", 0),
        ("crates/engine/src/a.rs", "#![forbid(unsafe_code)] // unsafe \"unsafe\"", 0),
        ("crates/engine/src/a.rs", "fn f() { todo!() }", 1),
        ("crates/engine/src/a.rs", long.as_str(), 1),
        ("crates/engine/src/a.rs", "#[ignore]\nfn f() {}", 1),
        ("crates/engine/src/a.rs", "#[ignore = \"long: make nosuch\"]\nfn f() {}", 1),
        ("crates/engine/src/a.rs", "#[ignore = \"long: make soak\"]\nfn f() {}", 0),
        ("README.md", concat!("see /wo", "rk/x"), 1),
    ];
    for (path, text, errors) in cases {
        let mut report = Report::default();
        files::check(&[source("Makefile", &makefile.text), source(path, text)], &mut report);
        assert_eq!(report.errors.len(), errors, "{path}: {text}: {report}");
    }
}

#[test]
fn file_of_tests_that_its_program_does_not_name_is_an_error() {
    let check = |program: &str| {
        let main = source("crates/engine/tests/files/main.rs", program);
        let named = source("crates/engine/tests/files/named.rs", "fn f() {}");
        let mut report = Report::default();
        files::check(&[main, named], &mut report);
        report.errors.len()
    };
    assert_eq!(check("mod named;\n"), 0);
    assert_eq!(check("// mod named;\nmod other;\n"), 1);
    assert_eq!(check("mod renamed;\n"), 1);
}

#[test]
fn documents_that_name_what_is_not_there_are_errors() {
    let code = source("crates/engine/src/a.rs", "fn commit() {}");
    let cases = [
        ("`Core::commit()` and `a.rs` and `commit`", 0),
        ("`Core::gone()`", 1),
        ("[a](../crates/engine) [b](https://example.org/x) [c](#below)", 0),
        ("[a](SPEC.md)", 1),
    ];
    for (text, errors) in cases {
        let mut report = Report::default();
        let sources = [source("docs/X.md", text), source(code.path.to_str().unwrap(), &code.text)];
        docs::check(&sources, &mut report);
        assert_eq!(report.errors.len(), errors, "{text}: {report}");
    }
}
