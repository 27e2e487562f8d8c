// SPDX-License-Identifier: Apache-2.0
//! The documentation keeps up with the source.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use memfabric_transport::config::table::{self, Kind, Setting};

/// What stands for a part that differs from case to case.
const VARIABLE: &str = "<>";

/// A message, as source has it and as the documentation has to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    /// Constant parts, with [`VARIABLE`] between them.
    text: String,
    /// Where it is.
    file: String,
}

fn top() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(top().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Files in a folder, by name, with their text.
fn files(folder: &str, ending: &str) -> Vec<(String, String)> {
    fn walk(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, ending, found);
            } else if path
                .extension()
                .is_some_and(|extension| extension == ending)
            {
                found.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    walk(&top().join(folder), ending, &mut paths);
    paths.sort();
    let file = |path: &PathBuf| {
        let name = path.strip_prefix(top()).unwrap_or(path).display();
        let text = fs::read_to_string(path).expect("a source");
        (name.to_string(), text)
    };
    paths.iter().map(file).collect()
}

/// As [`files`], without their comments and tests.
fn sources(folder: &str, ending: &str) -> Vec<(String, String)> {
    let files = files(folder, ending).into_iter();
    files
        .map(|(name, text)| {
            // What follows is not in the library.
            let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            (name, without_comments(code))
        })
        .collect()
}

/// Blanks line comments out; strings may have slashes of their own.
fn without_comments(code: &str) -> String {
    let mut out = String::with_capacity(code.len());
    let mut chars = code.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                out.push(c);
                out.extend(chars.next());
                continue;
            }
            '"' => quoted = !quoted,
            // A quotation mark as a character.
            '\'' if !quoted && chars.peek() == Some(&'"') => {
                chars.next();
                continue;
            }
            '/' if !quoted && chars.peek() == Some(&'/') => {
                for c in chars.by_ref() {
                    if c == '\n' {
                        break;
                    }
                }
                out.push('\n');
                continue;
            }
            _ => {}
        }
        out.push(c);
    }
    out
}

/// A piece of an argument list: a string literal, or what is between two.
#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Code(String),
}

/// Splits what follows an opening parenthesis, up to the closing one; with
/// `until`, up to that character outside of parentheses instead.
fn pieces(code: &str, until: Option<char>) -> Vec<Piece> {
    let mut found = Vec::new();
    let mut between = String::new();
    let mut depth = 0;
    let mut chars = code.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                let mut text = String::new();
                while let Some(c) = chars.next() {
                    match c {
                        '"' => break,
                        '\\' => match chars.next() {
                            Some('n') => text.push('\n'),
                            Some(c) => text.push(c),
                            None => break,
                        },
                        c => text.push(c),
                    }
                }
                found.push(Piece::Code(std::mem::take(&mut between)));
                found.push(Piece::Text(text));
                continue;
            }
            ')' | ']' | '}' if depth == 0 && until.is_none() => break,
            c if depth == 0 && until == Some(c) => break,
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        between.push(c);
    }
    found.push(Piece::Code(between));
    found
}

fn after<'a>(code: &'a str, pattern: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(pattern)
        .map(move |(at, _)| &code[at + pattern.len()..])
}

/// `{…}` of a format string becomes [`VARIABLE`].
fn format_string(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, braces)) = rest.split_once('{') {
        out += before;
        out += VARIABLE;
        rest = braces.split_once('}').map_or("", |(_, rest)| rest);
    }
    out + rest
}

/// `#[error("…")]` and the constant sentence of each event.
fn rust_messages() -> Vec<Message> {
    let mut messages = Vec::new();
    for (file, code) in sources("src", "rs") {
        let mut add = |text: &str| {
            messages.push(Message {
                text: format_string(text),
                file: file.clone(),
            });
        };
        for arguments in after(&code, "#[error(") {
            let pieces = pieces(arguments, None);
            let text = pieces.iter().find_map(|piece| match piece {
                Piece::Text(text) => Some(text),
                Piece::Code(_) => None,
            });
            if let Some(text) = text {
                add(text);
            }
        }
        for level in ["error!(", "warn!(", "info!(", "debug!(", "trace!("] {
            for arguments in after(&code, level) {
                let pieces = pieces(arguments, None);
                let sentence = pieces.windows(2).find_map(|pair| match pair {
                    // A field's value follows an equals sign.
                    [Piece::Code(before), Piece::Text(text)]
                        if before.is_empty()
                            || before.trim_end().ends_with(',')
                            || before.trim().is_empty() =>
                    {
                        Some(text)
                    }
                    _ => None,
                });
                add(sentence
                    .unwrap_or_else(|| panic!("{file}: {level}{arguments:.80} says nothing")));
            }
        }
    }
    messages
}

/// The texts of `Status::…(…)`, `LOG(…)` and of what becomes a task's problem.
fn cpp_messages() -> Vec<Message> {
    let mut messages = Vec::new();
    for (file, code) in sources("cpp", "cpp") {
        let mut add = |pieces: &[Piece]| {
            if let Some(text) = joined(pieces) {
                messages.push(Message {
                    text,
                    file: file.clone(),
                });
            }
        };
        for call in after(&code, "Status::") {
            if let Some((name, arguments)) = call.split_once('(')
                && name.chars().all(|c| c.is_ascii_alphanumeric())
            {
                add(&pieces(arguments, None));
            }
        }
        for log in ["LOG(", "LOG_IF(", "LOG_EVERY_N(", "LOG_FIRST_N("] {
            for statement in after(&code, log) {
                let stream = statement.split_once("<<").map_or("", |(_, stream)| stream);
                add(&pieces(stream, Some(';')));
            }
        }
    }
    messages
}

/// C++ text: adjacent literals are one, anything else between them varies.
fn joined(pieces: &[Piece]) -> Option<String> {
    let mut text = String::new();
    let mut literals = 0;
    for piece in pieces {
        match piece {
            Piece::Text(literal) => {
                literals += 1;
                text += literal;
            }
            Piece::Code(code) => {
                let code = code.replace("std::string", "");
                if code.contains(|c: char| c.is_ascii_alphanumeric()) && !text.ends_with(VARIABLE) {
                    text += VARIABLE;
                }
            }
        }
    }
    (literals > 0).then_some(text)
}

fn messages() -> Vec<Message> {
    let mut messages = rust_messages();
    messages.extend(cpp_messages());
    messages.sort();
    messages.dedup_by(|one, other| one.text == other.text);
    messages
}

/// The headings below "Messages", with [`VARIABLE`] for what is in angle
/// brackets; and whether something follows each.
fn entries() -> Vec<(String, bool)> {
    let document = read("docs/troubleshooting.md");
    let (_, list) = document
        .split_once("\n## Messages\n")
        .expect("a section called Messages");
    let mut entries: Vec<(String, bool)> = Vec::new();
    for line in list.lines() {
        if let Some(heading) = line.strip_prefix("#### ") {
            let heading = heading.trim().trim_matches('`').trim();
            let mut text = String::new();
            let mut rest = heading;
            while let Some((before, bracket)) = rest.split_once('<') {
                text += before;
                text += VARIABLE;
                rest = bracket.split_once('>').map_or("", |(_, rest)| rest);
            }
            entries.push((text + rest, false));
        } else if let Some(last) = entries.last_mut() {
            last.1 |= line.starts_with(|c: char| c.is_alphabetic());
        }
    }
    entries
}

#[test]
fn every_message_of_the_source_has_an_entry() {
    let messages = messages();
    let entries: BTreeSet<String> = entries().into_iter().map(|(text, _)| text).collect();
    let missing: Vec<_> = messages
        .iter()
        .filter(|message| !entries.contains(&message.text))
        .map(|message| format!("{}: {}", message.file, message.text))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/troubleshooting.md has no entry (a line '#### `text`', with <name> for each <>) for:\n{}",
        missing.join("\n")
    );
}

#[test]
fn every_entry_is_a_message_of_the_source_and_is_explained() {
    let messages: BTreeSet<String> = messages().into_iter().map(|message| message.text).collect();
    let mut seen = BTreeSet::new();
    for (entry, explained) in entries() {
        assert!(messages.contains(&entry), "no source says: {entry}");
        assert!(explained, "nothing explains: {entry}");
        assert!(seen.insert(entry.clone()), "twice: {entry}");
    }
}

/// A scan that finds nothing would make the two above hold.
#[test]
fn the_scan_finds_each_kind_of_message() {
    let all: BTreeSet<String> = messages().into_iter().map(|message| message.text).collect();
    for text in [
        // An error on one line, one on several, an event, one with fields.
        "the memfabric transport is not installed: call install first",
        "<> unavailable: <>; put its folder, with the libraries it needs, into LD_LIBRARY_PATH before the process starts",
        "peer is down",
        "submission refused, tasks failed",
        // C++: a status of several literals, one with an expression, a log line.
        "memfabric install: metadata is null, must be the engine's control service",
        "memfabric <> failed: <>",
        "memfabric uninstall in destructor: <>",
    ] {
        assert!(all.contains(text), "not found: {text}\nin {all:#?}");
    }
    assert!(all.len() > 50, "only {} messages", all.len());
}

/// The rows that documents have of the settings, made from their table.
#[test]
fn the_tables_of_settings_are_those_of_the_source() {
    let document = read("docs/operating.md");
    let has = |row: String| {
        assert!(
            document.contains(&format!("\n{row}\n")),
            "docs/operating.md does not have the row\n{row}"
        );
    };
    let default = |setting: &Setting| match (setting.required, setting.default) {
        (_, "") => String::new(),
        (_, default) => format!("`{default}`"),
    };
    for setting in table::ALL {
        let (key, default) = (setting.key(), default(setting));
        let kind = match setting.kind {
            Kind::Text => "string",
            Kind::Integer => "integer",
            Kind::Boolean => "boolean",
        };
        let meaning = match setting.variable {
            Some(variable) => format!("as `{variable}`"),
            None => setting.meaning.to_owned(),
        };
        has(format!("| `{key}` | {kind} | {default} | {meaning} |").replace("|  |", "| |"));
        if let Some(variable) = setting.variable {
            let required = match setting.required {
                true => "yes, or the key",
                false => "no",
            };
            let row = format!(
                "| `{variable}` | {required} | {default} | {} |",
                setting.meaning
            );
            has(row.replace("|  |", "| |"));
        }
    }
}

#[test]
fn every_check_of_the_doctor_is_in_the_operators_table() {
    let document = read("docs/operating.md");
    let mut checks: BTreeSet<String> = BTreeSet::new();
    for (_, code) in sources("cli/src/doctor", "rs") {
        for start in [
            "Finding::ok(",
            "Finding::warning(",
            "Finding::problem(",
            "const CHECK: &str = ",
            "const VARIABLE: &str = ",
        ] {
            for arguments in after(&code, start) {
                if let Some(Piece::Text(check)) = pieces(arguments.trim_start(), Some(';')).get(1)
                    && arguments.trim_start().starts_with('"')
                {
                    checks.insert(check.clone());
                }
            }
        }
    }
    // The linker's variable is looked at, and is no check of its own.
    checks.remove("LD_LIBRARY_PATH");
    assert!(
        checks.contains("library") && checks.contains("policy"),
        "{checks:?}"
    );
    for check in checks {
        let name = format!("`{check}`");
        assert!(
            document.contains(&name),
            "docs/operating.md does not have {name}"
        );
    }
}

/// A test that is named after a reported fault names one that is written down.
#[test]
fn every_case_of_a_test_is_one_of_the_reported_faults() {
    let document = read("docs/public-faults.md");
    let mut cases: BTreeSet<String> = BTreeSet::new();
    for folder in ["src", "tests", "cli"] {
        for (_, code) in files(folder, "rs") {
            let number = |name: &str| name.chars().take_while(char::is_ascii_digit).collect();
            cases.extend(after(&code, "fn case_").map(number));
        }
    }
    assert!(cases.contains("01") && cases.contains("38"), "{cases:?}");
    // This test's own words.
    cases.remove("");
    for case in cases {
        let row = format!("| `case_{case}` |");
        assert!(
            document.contains(&row),
            "docs/public-faults.md has no {row}"
        );
    }
}

#[test]
fn links_lead_somewhere() {
    let mut documents = vec!["README.md".to_owned()];
    for entry in fs::read_dir(top().join("docs")).expect("docs").flatten() {
        documents.push(format!("docs/{}", entry.file_name().to_string_lossy()));
    }
    for document in documents {
        let folder = top().join(&document);
        let folder = folder.parent().expect("a folder");
        for target in after(&read(&document), "](") {
            let target = target.split(')').next().unwrap_or_default();
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            if path.contains("://") {
                continue;
            }
            let path = if path.is_empty() {
                top().join(&document)
            } else {
                folder.join(path)
            };
            assert!(path.exists(), "{document}: {target} leads nowhere");
            if anchor.is_empty() {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            let found = text
                .lines()
                .filter(|line| line.starts_with('#'))
                .any(|line| slug(line) == anchor);
            assert!(found, "{document}: {target}: no such heading");
        }
    }
}

/// The name of a heading in a link.
fn slug(heading: &str) -> String {
    heading
        .trim_start_matches('#')
        .trim()
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_')
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}
