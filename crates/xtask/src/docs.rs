//! What the documents say is there must be there.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use crate::tidy::{Finding, Report, SourceFile};

pub(crate) fn check(sources: &[SourceFile], report: &mut Report) {
    let functions = functions(sources);
    let files: HashSet<&Path> = sources.iter().map(|source| source.path.as_path()).collect();
    let is_known = |path: &Path| {
        path.as_os_str().is_empty() || files.iter().any(|file| file.starts_with(path))
    };
    for source in sources {
        if source.path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        for (index, line) in source.text.lines().enumerate() {
            let mut wrong = |what: String| {
                report.errors.push(Finding { file: source.path.clone(), line: index + 1, what });
            };
            for name in called_functions(line) {
                if !functions.contains(name) {
                    wrong(format!("there is no function {name}"));
                }
            }
            for target in links(line) {
                let directory = source.path.parent().unwrap_or(Path::new(""));
                if !is_known(&lexically(&directory.join(target))) {
                    wrong(format!("the link {target} leads nowhere"));
                }
            }
        }
    }
}

/// The names of all functions in the crates.
fn functions(sources: &[SourceFile]) -> HashSet<&str> {
    let rust = sources.iter().filter(|source| source.path.extension().is_some_and(|e| e == "rs"));
    rust.flat_map(|source| source.text.split("fn ").skip(1))
        .map(|rest| {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            &rest[..end.unwrap_or(rest.len())]
        })
        .collect()
}

/// `bar` for each `` `foo::bar()` `` in a line.
pub(crate) fn called_functions(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter_map(|code| {
        let path = code.strip_suffix("()")?;
        let name = path.rsplit("::").next()?;
        name.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(name)
    })
}

/// The targets of a line's links, to files of this repository.
pub(crate) fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = &rest[..rest.find(')')?];
        let file = target.split('#').next()?;
        (!file.is_empty() && !file.contains("://")).then_some(file)
    })
}

fn lexically(path: &Path) -> PathBuf {
    let mut simple = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => _ = simple.pop(),
            Component::Normal(name) => simple.push(name),
            _ => {}
        }
    }
    simple
}
