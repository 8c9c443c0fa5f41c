//! What each file must look like, whatever it is about.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::mask::{code_only, is_word};
use crate::tidy::{Finding, Report, SourceFile};

const LINES_WANTED_MAX: usize = 800;
const LINES_MAX: usize = 1000;

/// Crates whose work cannot be done without `unsafe`.
const UNSAFE_CRATES: &[&str] = &["cpu", "volume", "memory", "fuse", "bench"];

/// Code that says it is not written yet.
const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "dbg!"];

/// Paths of somebody's machine. Written in halves, so that this file does not hold them.
const FORBIDDEN: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/home/", "runner"),
    concat!("/Us", "ers/"),
];

/// The files under version control (all files, where there is no git), as far as they hold text.
pub(crate) fn tracked(root: &Path) -> io::Result<Vec<SourceFile>> {
    let listing = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output();
    let mut paths: Vec<PathBuf> = match listing {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
            .split('\0')
            .filter(|name| !name.is_empty())
            .map(PathBuf::from)
            .collect(),
        _ => {
            let mut paths = Vec::new();
            walk(root, Path::new(""), &mut paths)?;
            paths
        }
    };
    paths.sort();
    let mut sources = Vec::new();
    for path in paths {
        match std::fs::read(root.join(&path)) {
            Ok(bytes) => {
                if let Ok(text) = String::from_utf8(bytes) {
                    sources.push(SourceFile { path, text });
                }
            }
            // Listed, and deleted or replaced by a directory since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sources)
}

fn walk(root: &Path, below: &Path, paths: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        if path == Path::new("target") || path == Path::new(".git") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            walk(root, &path, paths)?;
        } else if entry.file_type()?.is_file() {
            paths.push(path);
        }
    }
    Ok(())
}

pub(crate) fn check(sources: &[SourceFile], report: &mut Report) {
    let makefile = sources.iter().find(|source| source.path == Path::new("Makefile"));
    let targets: Vec<&str> = makefile
        .map_or("", |source| source.text.as_str())
        .lines()
        .filter(|line| !line.starts_with(['\t', '#', '.']))
        .filter_map(|line| line.split_once(':').map(|(target, _)| target))
        .flat_map(str::split_whitespace)
        .collect();
    for source in sources {
        check_words(source, report);
        if source.path.extension().is_some_and(|extension| extension == "rs") {
            check_length(source, report);
            let code = code_only(&source.text);
            check_unsafe(source, &code, report);
            check_unfinished(source, &code, report);
            check_ignored(source, &code, &targets, report);
            check_is_compiled(source, sources, report);
        }
    }
}

fn check_words(source: &SourceFile, report: &mut Report) {
    for (index, line) in source.text.lines().enumerate() {
        for word in FORBIDDEN {
            if line.contains(word) {
                report.errors.push(Finding {
                    file: source.path.clone(),
                    line: index + 1,
                    what: format!("a path of one machine: {word}"),
                });
            }
        }
    }
}

fn check_length(source: &SourceFile, report: &mut Report) {
    let lines = source.text.lines().count();
    let finding = |max: usize| Finding {
        file: source.path.clone(),
        line: lines,
        what: format!("{lines} lines, at most {max}: split it by subject"),
    };
    if lines > LINES_MAX {
        report.errors.push(finding(LINES_MAX));
    } else if lines > LINES_WANTED_MAX {
        report.warnings.push(finding(LINES_WANTED_MAX));
    }
}

fn check_unsafe(source: &SourceFile, code: &str, report: &mut Report) {
    let is_allowed =
        UNSAFE_CRATES.iter().any(|name| source.path.starts_with(Path::new("crates").join(name)));
    if is_allowed {
        return;
    }
    for line in lines_with_word(code, "unsafe") {
        report.errors.push(Finding {
            file: source.path.clone(),
            line,
            what: format!("unsafe outside of {}", UNSAFE_CRATES.join(", ")),
        });
    }
}

fn check_unfinished(source: &SourceFile, code: &str, report: &mut Report) {
    for macro_name in UNFINISHED {
        for line in lines_with_word(code, macro_name) {
            report.errors.push(Finding {
                file: source.path.clone(),
                line,
                what: format!("{macro_name} in what is to land"),
            });
        }
    }
}

fn check_ignored(source: &SourceFile, code: &str, targets: &[&str], report: &mut Report) {
    for (at, _) in code.match_indices("#[ignore") {
        let attribute = source.text[at..].lines().next().unwrap_or("");
        let named = attribute
            .split_once("make ")
            .map(|(_, rest)| rest.split(|c: char| !(c.is_alphanumeric() || c == '-')).next());
        if !named.flatten().is_some_and(|target| targets.contains(&target)) {
            report.errors.push(Finding {
                file: source.path.clone(),
                line: code[..at].matches('\n').count() + 1,
                what: "an ignored test whose reason does not name the `make` target that runs it"
                    .to_owned(),
            });
        }
    }
}

/// A file of tests that lies beside a `main.rs` which does not name it is compiled by nobody, and its tests never run.
fn check_is_compiled(source: &SourceFile, sources: &[SourceFile], report: &mut Report) {
    let (Some(directory), Some(stem)) = (source.path.parent(), source.path.file_stem()) else {
        return;
    };
    let program = directory.join("main.rs");
    if directory.file_name().is_none_or(|name| name == "src") || source.path == program {
        return;
    }
    let Some(program) = sources.iter().find(|other| other.path == program) else { return };
    let declaration = format!("mod {};", stem.to_string_lossy());
    if !code_only(&program.text).lines().any(|line| line.trim() == declaration) {
        report.errors.push(Finding {
            file: source.path.clone(),
            line: 1,
            what: format!(
                "its tests run nowhere: {} lacks `{declaration}`",
                program.path.display()
            ),
        });
    }
}

/// Lines, from 1, where `word` stands by itself.
fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    code.match_indices(word)
        .filter(|(at, _)| {
            let before = code[..*at].bytes().next_back();
            let after = code[at + word.len()..].bytes().next();
            !before.is_some_and(is_word) && (word.ends_with('!') || !after.is_some_and(is_word))
        })
        .map(|(at, _)| code[..at].matches('\n').count() + 1)
        .collect()
}
