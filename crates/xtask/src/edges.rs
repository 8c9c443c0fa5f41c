//! Which crate may depend on which, and that each outside dependency has its reason written down.

use std::collections::BTreeSet;
use std::path::Path;

use crate::tidy::{Finding, Report, SourceFile};

/// The crates of the workspace, and those of them that each may use. All that start threads or ask
/// for the time go through `rt`.
const MAY_USE: &[(&str, &[&str])] = &[
    ("cpu", &[]),
    ("ondisk", &["cpu"]),
    ("rt", &[]),
    ("volume", &["ondisk", "cpu", "rt"]),
    ("memory", &["cpu", "rt"]),
    ("iomap", &["memory", "cpu", "rt"]),
    ("engine", &["iomap", "volume", "ondisk", "cpu", "rt"]),
    ("check", &["volume", "ondisk", "rt"]),
    ("archive", &["engine", "ondisk", "rt"]),
    ("fuse", &["engine", "iomap", "ondisk", "rt"]),
    ("testkit", &["volume", "ondisk", "iomap"]),
    ("sim", &["engine", "check", "testkit", "volume", "iomap", "ondisk", "rt"]),
    (
        "bench",
        &["engine", "archive", "fuse", "check", "testkit", "volume", "iomap", "ondisk", "rt"],
    ),
    (
        "cli",
        &[
            "bench", "fuse", "archive", "check", "sim", "testkit", "engine", "volume", "iomap",
            "ondisk", "rt",
        ],
    ),
    ("xtask", &[]),
];

/// A crate's tests may use these besides; devices to make filesystems on among them, and a judge.
const TESTS_MAY_USE: &[&str] = &["testkit", "rt", "volume", "check"];

pub(crate) fn check(sources: &[SourceFile], report: &mut Report) {
    let mut outside = BTreeSet::new();
    let architecture = sources.iter().find(|source| source.path == Path::new("ARCHITECTURE.md"));
    for source in sources {
        let Some(name) = crate_of_manifest(&source.path) else { continue };
        for dependency in dependencies(&source.text) {
            match dependency.name.strip_prefix("ubtrfs-") {
                Some(inside) => {
                    check_edge(source, name, inside, &dependency, report);
                    if let Some(architecture) = architecture {
                        check_row(architecture, name, inside, &dependency, report);
                    }
                }
                None => {
                    outside.insert(dependency.name);
                }
            }
        }
    }
    check_reasons(sources, &outside, report);
}

/// `volume` for `crates/volume/Cargo.toml`.
fn crate_of_manifest(path: &Path) -> Option<&str> {
    let directory = path.strip_prefix("crates").ok()?;
    (directory.file_name()? == "Cargo.toml" && directory.components().count() == 2)
        .then(|| directory.parent()?.to_str())
        .flatten()
}

fn check_edge(
    source: &SourceFile,
    from: &str,
    to: &str,
    dependency: &Dependency,
    report: &mut Report,
) {
    let Some((_, allowed)) = MAY_USE.iter().find(|(name, _)| *name == from) else {
        report.errors.push(Finding {
            file: source.path.clone(),
            line: 1,
            what: format!("crate {from} is not in the table of import edges (xtask, edges.rs)"),
        });
        return;
    };
    let tests_too = dependency.is_for_tests && TESTS_MAY_USE.contains(&to);
    if !allowed.contains(&to) && !tests_too {
        report.errors.push(Finding {
            file: source.path.clone(),
            line: dependency.line,
            what: format!("crate {from} may not use {to}; it may use: {}", allowed.join(", ")),
        });
    }
}

/// What a crate uses stands in its row of the table of crates, too.
fn check_row(
    architecture: &SourceFile,
    from: &str,
    to: &str,
    dependency: &Dependency,
    report: &mut Report,
) {
    if dependency.is_for_tests {
        return;
    }
    let first_cell = format!("| `{from}` |");
    let row = architecture.text.lines().zip(1..).find(|(line, _)| line.starts_with(&first_cell));
    let (line, number) = row.unwrap_or(("", 0));
    let may_use = line.trim_end_matches(['|', ' ']).rsplit('|').next().unwrap_or("").trim();
    if may_use != "all above" && !may_use.split(", ").any(|name| name == to) {
        report.errors.push(Finding {
            file: architecture.path.clone(),
            line: number,
            what: format!("the table of crates does not say that {from} uses {to}"),
        });
    }
}

pub(crate) struct Dependency {
    pub(crate) name: String,
    pub(crate) line: usize,
    pub(crate) is_for_tests: bool,
}

/// The dependencies that a manifest names, of any kind and target.
pub(crate) fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found = Vec::new();
    let mut section = None;
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (table, name) = match header.split_once("dependencies.") {
                Some((table, name)) => (format!("{table}dependencies"), Some(name)),
                None => (header.to_owned(), None),
            };
            section = table.ends_with("dependencies").then(|| table.contains("dev-"));
            if let (Some(is_for_tests), Some(name)) = (section, name) {
                found.push(Dependency { name: name.to_owned(), line: index + 1, is_for_tests });
                section = None;
            }
            continue;
        }
        let Some(is_for_tests) = section else { continue };
        let name: String =
            line.chars().take_while(|c| c.is_alphanumeric() || "-_".contains(*c)).collect();
        let rest = line[name.len()..].trim_start();
        if !name.is_empty() && (rest.starts_with('=') || rest.starts_with('.')) {
            found.push(Dependency { name, line: index + 1, is_for_tests });
        }
    }
    found
}

fn check_reasons(sources: &[SourceFile], outside: &BTreeSet<String>, report: &mut Report) {
    let architecture = sources.iter().find(|source| source.path == Path::new("ARCHITECTURE.md"));
    let text = architecture.map_or("", |source| source.text.as_str());
    for name in outside {
        if !text.contains(&format!("| `{name}` |")) {
            report.errors.push(Finding {
                file: "ARCHITECTURE.md".into(),
                line: 0,
                what: format!("dependency {name} has no line in the table that says what for"),
            });
        }
    }
}
