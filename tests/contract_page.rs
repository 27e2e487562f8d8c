// SPDX-License-Identifier: Apache-2.0
//! `docs/contract.md` against the tests that it names.
#![allow(missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Clauses of the specification's section, and of the design.
const SPECIFICATION: usize = 16;
const DESIGN: usize = 20;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every file with one of the extensions, at any depth.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.expect("a readable folder").path()) {
        if path.is_dir() {
            found.extend(files(&path, extensions));
        } else if path
            .extension()
            .is_some_and(|extension| extensions.iter().any(|known| extension == *known))
        {
            found.push(path);
        }
    }
    found
}

/// Tests that run by default: `#[test]` functions, and GoogleTests by their
/// second name.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let sources = ["src", "tests"].map(|folder| files(&root().join(folder), &["rs"]));
    for source in sources.iter().flatten() {
        // What stands between a `#[test]` and its function are more attributes.
        for piece in text(source).split("#[test]").skip(1) {
            let Some((attributes, rest)) = piece.split_once("fn ") else {
                continue;
            };
            if !attributes.contains("ignore") {
                let name = rest.split('(').next().unwrap_or_default();
                names.insert(name.to_owned());
            }
        }
    }
    for source in files(&root().join("tests/cpp"), &["cpp", "cc"]) {
        let source = text(&source);
        for macro_name in ["TEST(", "TEST_F(", "TEST_P("] {
            for piece in source.split(macro_name).skip(1) {
                let arguments = piece.split(')').next().unwrap_or_default();
                if let Some((_, name)) = arguments.split_once(',') {
                    names.insert(name.trim().to_owned());
                }
            }
        }
    }
    names
}

struct Clause {
    sentence: String,
    tests: Vec<String>,
}

/// The rows of the page whose first cell is a clause's number.
fn clauses() -> BTreeMap<String, Clause> {
    let page = text(&root().join("docs/contract.md"));
    let mut clauses = BTreeMap::new();
    for line in page.lines() {
        let cells: Vec<_> = line
            .split(" | ")
            .map(|cell| cell.trim_matches(['|', ' ']))
            .collect();
        let number = cells[0];
        let is_clause = number
            .strip_prefix(['S', 'C'])
            .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()));
        if !is_clause {
            continue;
        }
        assert_eq!(
            cells.len(),
            4,
            "{number} has number, sentence, tests, meaning"
        );
        let tests = cells[2].split('`').skip(1).step_by(2).map(str::to_owned);
        let clause = Clause {
            sentence: cells[1].to_owned(),
            tests: tests.collect(),
        };
        let twice = clauses.insert(number.to_owned(), clause);
        assert!(twice.is_none(), "{number} is there twice");
    }
    clauses
}

#[test]
fn every_clause_is_there_with_its_sentence_and_a_test() {
    let clauses = clauses();
    let specification = (1..=SPECIFICATION).map(|number| format!("S{number}"));
    let design = (1..=DESIGN).map(|number| format!("C{number}"));
    let numbers: BTreeSet<_> = specification.chain(design).collect();
    let found: BTreeSet<_> = clauses.keys().cloned().collect();
    assert_eq!(found, numbers);
    for (number, clause) in &clauses {
        assert!(!clause.sentence.is_empty(), "{number} says nothing");
        assert!(!clause.tests.is_empty(), "{number} has no test");
    }
}

#[test]
fn every_clause_of_the_design_has_a_test_that_is_named_after_it() {
    for (number, clause) in clauses() {
        let Some(digits) = number.strip_prefix('C') else {
            continue;
        };
        let prefix = format!("c{digits:0>2}_");
        assert!(
            clause.tests.iter().any(|test| test.starts_with(&prefix)),
            "{number} names no test that begins with {prefix}"
        );
    }
}

#[test]
fn every_test_that_the_page_names_exists_and_runs() {
    let tests = tests();
    assert!(
        tests.len() > 100,
        "the sources were searched: {}",
        tests.len()
    );
    for (number, clause) in clauses() {
        for test in clause.tests {
            assert!(
                tests.contains(&test),
                "{number} names `{test}`, which is no test, or an ignored one"
            );
        }
    }
    // The search itself: a helper and an ignored test are none.
    for name in ["finish", "target", "no_such_test"] {
        assert!(!tests.contains(name), "{name}");
    }
}

/// Programs and variables of the long forms.
#[test]
fn every_program_and_variable_that_the_page_names_exists() {
    let page = text(&root().join("docs/contract.md"));
    let sources: String = files(&root().join("tests"), &["rs"])
        .iter()
        .filter(|path| !path.ends_with("contract_page.rs"))
        .map(|path| text(path))
        .collect();
    let words = page.split(['`', ' ', '=', '\n']);
    for word in words.filter(|word| !word.contains('*')) {
        if word.starts_with("tests/") && word.ends_with(".rs") {
            assert!(root().join(word).exists(), "{word}");
        }
        if word.starts_with("MEMFABRIC_") {
            assert!(sources.contains(&format!("\"{word}\"")), "{word}");
        }
    }
}
