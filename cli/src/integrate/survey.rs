// SPDX-License-Identifier: Apache-2.0
//! What a checkout has of the edits, and what putting them in or taking them
//! out makes of its files.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Problem;
use super::edits::{EDITS, Edit, INSIDE, Place, TYPES, When};
use super::text::Text;
use super::tree::Tree;

/// Every edit's state in one checkout.
pub struct Survey {
    files: BTreeMap<&'static str, Text>,
    states: Vec<State>,
}

/// One edit's state.
enum State {
    /// It is in, here, with this in the place of its word in braces.
    In {
        range: Range<usize>,
        filled: Option<String>,
    },
    /// It is not in, and would go here.
    Out(Range<usize>),
    /// This checkout has no place for it.
    NotHere,
    /// It is not in, and the file is not as known.
    Odd(Problem),
}

/// A line that speaks of MemFabric and is none of the edits.
#[derive(Debug, PartialEq, Eq)]
pub struct Mention {
    pub file: &'static str,
    pub line: usize,
}

/// What the words in braces stand for.
pub struct Words {
    /// This transport's sources, as CMake spells them.
    pub source: String,
    /// The integer of `TransportType::MEMFABRIC`.
    pub value: String,
}

impl Survey {
    /// Reads what the edits are about. A file that cannot be read counts against
    /// each of its edits.
    pub fn take(tree: &Tree) -> Self {
        let mut files = BTreeMap::new();
        let mut states = Vec::with_capacity(EDITS.len());
        for edit in EDITS {
            if !files.contains_key(edit.file) {
                match tree.read(edit.file) {
                    Ok(Some(text)) => {
                        files.insert(edit.file, text);
                    }
                    Ok(None) if edit.when != When::Always => {
                        states.push(State::NotHere);
                        continue;
                    }
                    Ok(None) => {
                        states.push(State::Odd(Problem::FileMissing { file: edit.file }));
                        continue;
                    }
                    Err(problem) => {
                        states.push(State::Odd(problem));
                        continue;
                    }
                }
            }
            states.push(State::of(edit, &files[edit.file]));
        }
        Self { files, states }
    }

    fn each(&self) -> impl Iterator<Item = (&'static Edit, &State)> {
        EDITS.iter().zip(&self.states)
    }

    /// The edits that are in.
    pub fn present(&self) -> Vec<&'static Edit> {
        self.each()
            .filter(|(_, state)| matches!(state, State::In { .. }))
            .map(|(edit, _)| edit)
            .collect()
    }

    /// The edits that are not in, but ought to be.
    pub fn missing(&self) -> Vec<&'static Edit> {
        self.each()
            .filter(|(_, state)| matches!(state, State::Out(_) | State::Odd(_)))
            .map(|(edit, _)| edit)
            .collect()
    }

    /// What is not as known, in the order of the edits, each thing once.
    pub fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self
            .states
            .iter()
            .filter_map(|state| match state {
                State::Odd(problem) => Some(problem.to_string()),
                _ => None,
            })
            .collect();
        problems.dedup();
        problems
    }

    /// What stands for the word in braces of the edit called `name`.
    pub fn filled(&self, name: &str) -> Option<&str> {
        self.each().find_map(|(edit, state)| match state {
            State::In { filled, .. } if edit.name == name => filled.as_deref(),
            _ => None,
        })
    }

    /// The integer that `MEMFABRIC` has, or would have.
    pub fn value(&self) -> Result<String, Problem> {
        self.files
            .get(TYPES)
            .and_then(|text| enumerator(text.flat()))
            .map(|value| value.to_string())
            .ok_or(Problem::Enumerators { file: TYPES })
    }

    /// Lines about MemFabric that no edit put in.
    pub fn mentions(&self) -> Vec<Mention> {
        let mut mentions = Vec::new();
        for (&file, text) in &self.files {
            let ours: Vec<&Range<usize>> = self
                .each()
                .filter(|(edit, _)| edit.file == file)
                .filter_map(|(_, state)| match state {
                    State::In { range, .. } => Some(range),
                    _ => None,
                })
                .collect();
            mentions.extend(
                words(text.flat())
                    .filter(|(at, word)| {
                        speaks_of_memfabric(word) && !ours.iter().any(|range| range.contains(at))
                    })
                    .map(|(at, _)| Mention {
                        file,
                        line: text.line(at),
                    }),
            );
        }
        mentions.dedup();
        mentions
    }

    /// The files that change when the edits go in.
    pub fn applied(&self, words: &Words) -> Vec<Change<'_>> {
        self.changes(|edit, state| match state {
            State::Out(range) => Some((range.clone(), words.fill(edit.text))),
            _ => None,
        })
    }

    /// The files that change when the edits that are in come out.
    pub fn reverted(&self) -> Vec<Change<'_>> {
        self.changes(|edit, state| match state {
            State::In { range, .. } => {
                let before = match edit.place {
                    Place::Instead => edit.anchor.to_owned(),
                    _ => String::new(),
                };
                Some((range.clone(), before))
            }
            _ => None,
        })
    }

    fn changes(
        &self,
        piece: impl Fn(&Edit, &State) -> Option<(Range<usize>, String)>,
    ) -> Vec<Change<'_>> {
        self.files
            .iter()
            .filter_map(|(&file, text)| {
                let pieces: Vec<_> = self
                    .each()
                    .filter(|(edit, _)| edit.file == file)
                    .filter_map(|(edit, state)| piece(edit, state))
                    .collect();
                (!pieces.is_empty()).then(|| Change {
                    file,
                    before: text.raw(),
                    after: text.splice(pieces),
                })
            })
            .collect()
    }
}

/// One file, as it is and as it is to be.
pub struct Change<'a> {
    pub file: &'static str,
    pub before: &'a str,
    pub after: String,
}

impl Words {
    fn fill(&self, text: &str) -> String {
        text.replace("{source}", &self.source)
            .replace("{value}", &self.value)
    }
}

impl State {
    fn of(edit: &'static Edit, text: &Text) -> Self {
        let lines = |found: &[super::text::Match]| {
            found
                .iter()
                .map(|one| text.line(one.range.start))
                .collect::<Vec<_>>()
        };
        let mut found = text.find(edit.text);
        match found.len() {
            0 => {}
            1 => {
                let one = found.remove(0);
                return Self::In {
                    range: one.range,
                    filled: one.filled,
                };
            }
            _ => {
                return Self::Odd(Problem::EditTwice {
                    file: edit.file,
                    name: edit.name,
                    lines: lines(&found),
                });
            }
        }
        if let When::FileHas(needle) = edit.when
            && !text.flat().contains(needle)
        {
            return Self::NotHere;
        }
        if edit.place == Place::End {
            let end = text.flat().len();
            return Self::Out(end..end);
        }
        let anchors = text.find(edit.anchor);
        let [anchor] = anchors.as_slice() else {
            return Self::Odd(Problem::Anchor {
                file: edit.file,
                name: edit.name,
                anchor: edit.anchor,
                lines: lines(&anchors),
            });
        };
        let Range { start, end } = anchor.range;
        Self::Out(match edit.place {
            Place::Before => start..start,
            Place::After | Place::End => end..end,
            Place::Instead => start..end,
        })
    }
}

/// Whether there is a MemFabric transport in the checkout that is not this one.
pub fn has_another(
    tree: &Tree,
    is_this: impl Fn(&std::path::Path) -> bool,
) -> Option<&'static str> {
    const HEADERS: &str = "mooncake-transfer-engine/tent/include/tent/transport/memfabric";
    if tree.root().join(HEADERS).exists() {
        return Some(HEADERS);
    }
    let inside = tree.root().join(INSIDE);
    (inside.exists() && !is_this(&inside)).then_some(INSIDE)
}

/// The runs of letters, digits and underscores, with their places.
fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let outside = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let mut at = 0;
    text.split_inclusive(outside).map(move |piece| {
        let start = at;
        at += piece.len();
        (start, piece.trim_end_matches(outside))
    })
}

/// `CUmemFabricHandle` and its like are CUDA's.
fn speaks_of_memfabric(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    word.starts_with("memfabric") || word.ends_with("_memfabric")
}

/// The value of `MEMFABRIC` in `enum TransportType`, or of the sentinel, whose
/// value it would take.
fn enumerator(types: &str) -> Option<i64> {
    let (_, body) = types.split_once("enum TransportType : int {")?;
    let (body, _) = body.split_once('}')?;
    let body: String = body
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect();
    let mut next = 0;
    for enumerator in body.split(',').map(str::trim) {
        let name = match enumerator.split_once('=') {
            Some((name, value)) => {
                next = value.trim().parse().ok()?;
                name.trim()
            }
            None => enumerator,
        };
        if name == "MEMFABRIC" || name == "kNumTransportTypes" {
            return Some(next);
        }
        if name.is_empty() || name.contains(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
            return None;
        }
        next += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::edits::MARK;
    use super::*;

    #[test]
    fn every_edit_can_be_told_from_all_else_and_taken_out_to_the_byte() {
        for (index, edit) in EDITS.iter().enumerate() {
            let name = edit.name;
            assert!(edit.text.contains(MARK), "{name} has no mark");
            assert!(!edit.reason.is_empty(), "{name} has no reason");
            assert_eq!(
                edit.anchor.is_empty(),
                edit.place == Place::End,
                "{name} needs an anchor unless it goes to the end"
            );
            if edit.place == Place::Instead {
                // Which line ending it had could not be told afterwards.
                assert!(!edit.anchor.contains('\n'), "{name} replaces a line's end");
            }
            for other in &EDITS[index + 1..] {
                assert_ne!(name, other.name);
                assert!(
                    edit.file != other.file
                        || !(edit.text.contains(other.text) || other.text.contains(edit.text)),
                    "{name} and {} cannot be told apart",
                    other.name
                );
            }
        }
    }

    #[test]
    fn the_integer_is_the_position_behind_the_last_enumerator() {
        let types = |body: &str| format!("enum TransportType : int {{\n{body}\n}};\n");
        let cases = [
            (
                "UNSPEC = 0,\nRDMA,\n// Sentinel\nkNumTransportTypes,",
                Some(2),
            ),
            (
                "UNSPEC = 0,\nRDMA,\nMEMFABRIC,\nkNumTransportTypes,",
                Some(2),
            ),
            (
                "UNSPEC = 0, RDMA = 7, // seven, not one\nkNumTransportTypes",
                Some(8),
            ),
            ("UNSPEC = 0, RDMA = TCP, kNumTransportTypes", None),
            ("UNSPEC = 0, RDMA /* one */, kNumTransportTypes", None),
            ("UNSPEC = 0, RDMA", None),
        ];
        for (body, value) in cases {
            assert_eq!(enumerator(&types(body)), value, "{body}");
        }
    }

    #[test]
    fn only_words_about_this_transport_are_mentions() {
        let text =
            "CUmemFabricHandle MEMFABRIC use_MemFabric ascend_use_fabric_mem MemFabricTransport";
        let found: Vec<_> = words(text)
            .filter(|(_, word)| speaks_of_memfabric(word))
            .collect();
        assert_eq!(
            found,
            [
                (18, "MEMFABRIC"),
                (28, "use_MemFabric"),
                (64, "MemFabricTransport")
            ]
        );
    }
}
