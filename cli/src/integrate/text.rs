// SPDX-License-Identifier: Apache-2.0
//! A file's text with `\n` line endings, and the way back to its own bytes.

use std::ops::Range;

/// A text to search and splice.
pub struct Text {
    raw: String,
    flat: String,
    /// Where in `flat` the newlines are that `raw` spells `\r\n`.
    returns: Vec<usize>,
}

/// One place where a template occurs.
#[derive(Debug, PartialEq, Eq)]
pub struct Match {
    /// Where, in the flat text.
    pub range: Range<usize>,
    /// What stands for the template's word in braces, if it has one.
    pub filled: Option<String>,
}

/// The words that a template may have one of.
const WORDS: [&str; 2] = ["{source}", "{value}"];

impl Text {
    pub fn new(raw: String) -> Self {
        let mut flat = String::with_capacity(raw.len());
        let mut returns = Vec::new();
        for line in raw.split_inclusive('\n') {
            if let Some(body) = line.strip_suffix("\r\n") {
                flat.push_str(body);
                returns.push(flat.len());
                flat.push('\n');
            } else {
                flat.push_str(line);
            }
        }
        Self { raw, flat, returns }
    }

    /// The file's bytes.
    pub fn raw(&self) -> &str {
        &self.raw
    }

    /// The text to search.
    pub fn flat(&self) -> &str {
        &self.flat
    }

    /// Every place where `template` occurs.
    pub fn find(&self, template: &str) -> Vec<Match> {
        let word = WORDS
            .iter()
            .find_map(|word| Some((word, template.split_once(word)?)));
        let Some((word, (head, tail))) = word else {
            return self
                .flat
                .match_indices(template)
                .map(|(start, text)| Match {
                    range: start..start + text.len(),
                    filled: None,
                })
                .collect();
        };
        self.flat
            .match_indices(head)
            .filter_map(|(start, _)| {
                let rest = &self.flat[start + head.len()..];
                let filled = &rest[..rest.find(tail)?];
                let fits = match *word {
                    "{value}" => filled.bytes().all(|byte| byte.is_ascii_digit()),
                    _ => !filled.contains('\n'),
                };
                (fits && !filled.is_empty()).then(|| Match {
                    range: start..start + head.len() + filled.len() + tail.len(),
                    filled: Some(filled.to_owned()),
                })
            })
            .collect()
    }

    /// The number of the line that `offset` of the flat text is in, from 1.
    pub fn line(&self, offset: usize) -> usize {
        self.flat[..offset].matches('\n').count() + 1
    }

    /// The file with each range of the flat text replaced. The ranges do not
    /// overlap; those that start together keep their order. What is put in gets
    /// the line ending of the place where it goes.
    pub fn splice(&self, mut pieces: Vec<(Range<usize>, String)>) -> String {
        pieces.sort_by_key(|(range, _)| range.start);
        let mut spliced = String::with_capacity(self.raw.len());
        let mut done = 0;
        for (range, text) in pieces {
            let start = self.raw_offset(range.start);
            spliced.push_str(&self.raw[done..start]);
            if self.returns_at(range.start) {
                spliced.push_str(&text.replace('\n', "\r\n"));
            } else {
                spliced.push_str(&text);
            }
            done = self.raw_offset(range.end);
        }
        spliced.push_str(&self.raw[done..]);
        spliced
    }

    fn raw_offset(&self, offset: usize) -> usize {
        offset + self.returns.partition_point(|&at| at < offset)
    }

    /// Whether the line before `offset` ends in `\r\n`; on the first line, that
    /// line itself.
    fn returns_at(&self, offset: usize) -> bool {
        let newline = self.flat[..offset]
            .rfind('\n')
            .or_else(|| self.flat.find('\n'));
        newline.is_some_and(|at| self.returns.binary_search(&at).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_keeps_its_own_ending() {
        let text = Text::new("a\r\nb\nc\r\n".to_owned());
        assert_eq!(text.flat(), "a\nb\nc\n");
        assert_eq!(text.splice(vec![]), text.raw());
        let after_a = text.splice(vec![(2..2, "x\n".to_owned())]);
        assert_eq!(after_a, "a\r\nx\r\nb\nc\r\n");
        let after_b = text.splice(vec![(4..4, "x\n".to_owned())]);
        assert_eq!(after_b, "a\r\nb\nx\nc\r\n");
    }

    #[test]
    fn what_is_put_before_a_newline_does_not_part_it_from_its_return() {
        let text = Text::new("a\r\nb\r\n".to_owned());
        assert_eq!(
            text.splice(vec![(3..3, "\nx".to_owned())]),
            "a\r\nb\r\nx\r\n"
        );
    }

    #[test]
    fn pieces_that_start_together_keep_their_order() {
        let text = Text::new("ad".to_owned());
        let pieces = vec![(1..1, "b".to_owned()), (1..1, "c".to_owned())];
        assert_eq!(text.splice(pieces), "abcd");
    }

    #[test]
    fn a_word_in_braces_stands_for_what_is_there() {
        let text = Text::new("set(D\n  \"/a b\"\n  END)\nN (13) N (x) N ()".to_owned());
        let found = text.find("\"{source}\"\n  END");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].filled.as_deref(), Some("/a b"));
        let found = text.find("N ({value})");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].filled.as_deref(), Some("13"));
    }

    #[test]
    fn a_place_has_a_line_number() {
        let text = Text::new("a\r\nb\r\n".to_owned());
        assert_eq!((text.line(0), text.line(2)), (1, 2));
    }
}
