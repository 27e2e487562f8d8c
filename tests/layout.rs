// SPDX-License-Identifier: Apache-2.0
//! How the core's modules hang together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of `src`, by path such as `vendor::v1::queue`, with their source but
/// for its tests.
fn modules() -> BTreeMap<String, String> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            match entry.path() {
                path if path.is_dir() => walk(&path, found),
                path => found.push(path),
            }
        }
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    walk(&top, &mut paths);
    let modules = paths.iter().map(|path| {
        let name = path.strip_prefix(&top).expect("in it").with_extension("");
        let names = name.iter().map(|name| name.to_string_lossy().into_owned());
        let names: Vec<_> = names.filter(|name| name != "mod").collect();
        let text = fs::read_to_string(path).expect("source");
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
        (names.join("::"), code.to_owned())
    });
    // What is for tests alone, and the list of modules.
    modules
        .filter(|(name, _)| !["lib", "memory_order"].contains(&name.as_str()))
        .collect()
}

/// The paths after each `start` in a module's code, `{}` taken apart.
fn paths(code: &str, start: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(start) {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + start.len()..];
        let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let length = rest.find(|c| !word(c)).unwrap_or(rest.len());
        let path = &rest[..length];
        match rest[length..].strip_prefix('{') {
            None => found.push(path.to_owned()),
            Some(list) => {
                let list = list.split('}').next().unwrap_or_default();
                let names = list
                    .split(',')
                    .map(str::trim)
                    .filter(|name| !name.is_empty());
                found.extend(names.map(|name| format!("{path}{name}")));
            }
        }
    }
    found
}

/// The module that a path leads into: the longest that there is.
fn module_of(path: &str, modules: &BTreeMap<String, String>) -> Option<String> {
    let mut path = path.trim_end_matches(':').trim_end_matches("::self");
    loop {
        if modules.contains_key(path) {
            return Some(path.to_owned());
        }
        path = path.rsplit_once("::")?.0;
    }
}

fn without_comments(source: &str) -> String {
    let lines = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Which modules each module imports.
fn uses() -> BTreeMap<String, BTreeSet<String>> {
    let modules = modules();
    let used = |name: &str, source: &str| {
        let code = &without_comments(source);
        let parent = name.rsplit_once("::").map_or("", |(parent, _)| parent);
        let mut used: BTreeSet<_> = paths(code, "crate::").into_iter().collect();
        let within = |prefix: &str, path: String| match prefix {
            "" => path,
            prefix => format!("{prefix}::{path}"),
        };
        used.extend(
            paths(code, "super::")
                .into_iter()
                .map(|path| within(parent, path)),
        );
        for child in modules.keys() {
            if let Some((parent, last)) = child.rsplit_once("::")
                && parent == name
                && !paths(code, &format!("{last}::")).is_empty()
            {
                used.insert(child.clone());
            }
        }
        let used = used.iter().filter_map(|path| module_of(path, &modules));
        used.filter(|used| used != name).collect()
    };
    let all = modules.iter();
    all.map(|(name, code)| (name.clone(), used(name, code)))
        .collect()
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut uses = uses();
    assert!(uses["transport"].contains("batch"), "{uses:#?}");
    assert!(uses["vendor"].contains("vendor::batched"), "{uses:#?}");
    assert!(
        uses["vendor::v1::worker"].contains("vendor::v1::lanes"),
        "{uses:#?}"
    );
    // Takes away what imports nothing that is left; a circle stays.
    loop {
        let leaves: Vec<_> = uses
            .iter()
            .filter(|(_, used)| used.is_empty())
            .map(|(name, _)| name.clone())
            .collect();
        if leaves.is_empty() {
            break;
        }
        for leaf in leaves {
            uses.remove(&leaf);
            uses.values_mut().for_each(|used| {
                used.remove(&leaf);
            });
        }
    }
    assert_eq!(uses, BTreeMap::new(), "what is left has a circle");
}

#[test]
fn nothing_above_the_seam_knows_the_vendor() {
    for (name, used) in uses() {
        let may = name.starts_with("vendor") || ["transport", "bridge"].contains(&name.as_str());
        let vendor = used.iter().find(|used| used.starts_with("vendor"));
        assert!(may || vendor.is_none(), "{name} imports {vendor:?}");
    }
}

#[test]
fn no_file_of_the_core_is_too_long_to_read() {
    for (name, code) in modules() {
        let lines = code.lines().count();
        assert!(lines <= 500, "{name} has {lines} lines without its tests");
    }
}
