//! Inside `engine`, imports point downward only.

use std::path::{Component, Path};

use crate::mask::{code_only, is_word};
use crate::tidy::{Finding, Report, SourceFile};

/// The layers, higher ones importing lower ones; modules of one layer may import each other.
const LAYER_OF: &[(&str, u8)] = &[
    ("bench_hooks", 5),
    ("mkfs", 5),
    ("filesystem", 3),
    ("admin", 4),
    ("fs", 3),
    ("data", 2),
    ("txn", 1),
    ("alloc", 1),
    ("btree", 1),
    ("error", 0),
    ("options", 0),
];

const ENGINE: &str = "crates/engine/src";

fn layer_of(module: &str) -> Option<u8> {
    LAYER_OF.iter().find(|(name, _)| *name == module).map(|(_, layer)| *layer)
}

pub(crate) fn check(sources: &[SourceFile], report: &mut Report) {
    let root_names = root_reexports(sources);
    for source in sources {
        let Ok(inside) = source.path.strip_prefix(ENGINE) else { continue };
        let module_path = module_path(inside);
        let Some(module) = module_path.first() else { continue };
        if is_test_file(inside) || inside.extension().is_none_or(|e| e != "rs") {
            continue;
        }
        let Some(layer) = layer_of(module) else {
            report.errors.push(Finding {
                file: source.path.clone(),
                line: 1,
                what: format!("engine's module {module} has no layer yet (xtask, modules.rs)"),
            });
            continue;
        };
        for (line, name) in imports(&source.text, module_path.len()) {
            let target = root_names
                .iter()
                .find(|(exported, _)| *exported == name)
                .map_or(name.as_str(), |(_, module)| module);
            if layer_of(target).is_some_and(|other| other > layer) {
                report.errors.push(Finding {
                    file: source.path.clone(),
                    line,
                    what: format!("{module} is below {target} and may not import {name} from it"),
                });
            }
        }
    }
}

/// `["fs", "inode"]` for `fs/inode.rs`, and for `fs/inode/mod.rs`.
fn module_path(inside: &Path) -> Vec<String> {
    let mut names: Vec<String> = inside
        .with_extension("")
        .components()
        .filter_map(|component| match component {
            Component::Normal(name) => name.to_str().map(str::to_owned),
            _ => None,
        })
        .collect();
    if names.last().is_some_and(|name| ["mod", "lib", "main"].contains(&name.as_str())) {
        names.pop();
    }
    names
}

fn is_test_file(path: &Path) -> bool {
    path.components().any(|component| {
        matches!(component.as_os_str().to_str(), Some("tests.rs" | "tests" | "testing.rs"))
    }) || path.file_stem().and_then(|s| s.to_str()).is_some_and(|s| s.ends_with("_tests"))
}

/// Names that `lib.rs` exports at the root, with the module that each comes from.
fn root_reexports(sources: &[SourceFile]) -> Vec<(String, String)> {
    let lib = sources.iter().find(|source| source.path == Path::new(ENGINE).join("lib.rs"));
    let text = lib.map(|source| code_only(&source.text)).unwrap_or_default();
    let mut found = Vec::new();
    for statement in text.split(';') {
        let Some((_, path)) = statement.rsplit_once("pub use ") else { continue };
        let Some((module, names)) = path.split_once("::") else { continue };
        let module = module.trim().trim_start_matches("self::").trim_start_matches("crate::");
        for name in names.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            if !name.is_empty() {
                found.push((name.to_owned(), module.to_owned()));
            }
        }
    }
    found
}

/// The first name after the crate's root in each path that code outside of tests mentions, with
/// its line. `depth` is the number of modules that the file lies in.
pub(crate) fn imports(source: &str, depth: usize) -> Vec<(usize, String)> {
    let masked = code_only(source);
    let code = match masked.find("#[cfg(test)]") {
        // Tests stand at the end of a file.
        Some(end) if masked[end..].contains("mod tests {") => &masked[..end],
        _ => &masked,
    };
    let to_root = "super::".repeat(depth.max(1));
    let mut found = Vec::new();
    for prefix in ["crate::", to_root.as_str()] {
        for (at, _) in code.match_indices(prefix) {
            let before = code[..at].bytes().next_back();
            if before.is_some_and(|b| is_word(b) || b == b':' || b == b'$') {
                continue;
            }
            let line = code[..at].matches('\n').count() + 1;
            for name in heads(&code[at + prefix.len()..]) {
                found.push((line, name));
            }
        }
    }
    found
}

/// `["fs"]` of `fs::inode::Inode`; `["fs", "btree"]` of `{fs::{inode, dir}, btree::Path}`.
fn heads(path: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        text.trim_start().bytes().take_while(|b| is_word(*b)).map(char::from).collect()
    };
    let Some(group) = path.strip_prefix('{') else { return vec![word(path)] };
    let mut names = Vec::new();
    let mut depth = 0;
    let mut start = 0;
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                names.push(word(&group[start..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(word(&group[start..at]));
                start = at + 1;
            }
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}
