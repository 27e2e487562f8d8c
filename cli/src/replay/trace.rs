// SPDX-License-Identifier: Apache-2.0
//! A KV-cache trace: one JSON object a line, as Mooncake publishes them.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::interrupt::Interrupt;
use super::problem::Problem;
use super::synthetic::Synthetic;

/// No line of a trace is longer, so that a file that is none ends soon.
const LONGEST_LINE: u64 = 16 << 20;

/// How often reading looks for Ctrl-C, in lines.
const LINES_BETWEEN_LOOKS: u64 = 1024;

/// Where requests come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file.
    File(PathBuf),
    /// The built-in one.
    Synthetic,
}

/// The block ids of each request, or what is wrong with its line.
pub type Requests = Box<dyn Iterator<Item = Result<Vec<u64>, Problem>>>;

/// What a trace holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Requests.
    pub requests: u64,
    /// Ids in them, repetitions included.
    pub blocks: u64,
}

/// A line, as far as a replay looks at it; unknown fields are fine.
#[derive(Deserialize)]
struct Line {
    #[serde(rename = "timestamp")]
    _timestamp: f64,
    #[serde(rename = "input_length")]
    _input_length: u64,
    #[serde(rename = "output_length")]
    _output_length: u64,
    hash_ids: Vec<u64>,
}

impl Source {
    /// Its first requests, at most `limit`.
    pub fn requests(&self, limit: u64) -> Result<Requests, Problem> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        Ok(match self {
            Self::File(path) => Box::new(Lines::open(path)?.take(limit)),
            Self::Synthetic => Box::new(Synthetic::new().map(Ok).take(limit)),
        })
    }

    /// Reads every line that is to be replayed, so that a bad one is known
    /// before the first block moves.
    pub fn measure(&self, limit: u64, interrupt: &Interrupt) -> Result<Extent, Problem> {
        let mut extent = Extent::default();
        for request in self.requests(limit)? {
            extent.requests += 1;
            extent.blocks += request?.len() as u64;
            if extent.requests.is_multiple_of(LINES_BETWEEN_LOOKS) {
                interrupt.check()?;
            }
        }
        match (self, extent.blocks) {
            (Self::File(path), 0) => Err(Problem::BadInput(format!(
                "trace {}: has no block to move, must be JSON lines with hash_ids",
                path.display()
            ))),
            _ => Ok(extent),
        }
    }
}

/// The lines of a file.
struct Lines {
    path: PathBuf,
    reader: BufReader<File>,
    number: u64,
    line: Vec<u8>,
}

impl Lines {
    fn open(path: &Path) -> Result<Self, Problem> {
        let bad = |reason: String| {
            Err(Problem::BadInput(format!(
                "trace {}: {reason}",
                path.display()
            )))
        };
        // Before it is opened, for a pipe that nobody writes to blocks.
        match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return bad("is not a regular file, which is read twice".to_owned()),
            Err(error) => return bad(error.to_string()),
        }
        match File::open(path) {
            Ok(file) => Ok(Self {
                path: path.to_owned(),
                reader: BufReader::new(file),
                number: 0,
                line: Vec::new(),
            }),
            Err(error) => bad(error.to_string()),
        }
    }

    /// The next line that is not blank, without its end; None at the file's end.
    fn read(&mut self) -> Result<Option<&[u8]>, String> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut limited = self.reader.by_ref().take(LONGEST_LINE);
            let length = limited
                .read_until(b'\n', &mut self.line)
                .map_err(|error| error.to_string())?;
            if length == 0 {
                return Ok(None);
            }
            if length as u64 == LONGEST_LINE && !self.line.ends_with(b"\n") {
                return Err(format!(
                    "is longer than {} MiB, is this a trace?",
                    LONGEST_LINE >> 20
                ));
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(Some(self.line.trim_ascii()));
            }
        }
    }
}

impl Iterator for Lines {
    type Item = Result<Vec<u64>, Problem>;

    fn next(&mut self) -> Option<Self::Item> {
        let outcome = match self.read() {
            Ok(None) => return None,
            Ok(Some(line)) => parse(line),
            Err(reason) => Err(reason),
        };
        Some(outcome.map_err(|reason| {
            Problem::BadInput(format!("{}:{}: {reason}", self.path.display(), self.number))
        }))
    }
}

/// The ids of a line, or what is wrong with it and where.
fn parse(line: &[u8]) -> Result<Vec<u64>, String> {
    let mut json = serde_json::Deserializer::from_slice(line);
    // An array would do for a struct, its fields taken by position.
    if !line.starts_with(b"{") {
        return Err("is not a JSON object".to_owned());
    }
    let line: Line = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let field = error.path().to_string();
        let inner = error.into_inner();
        let text = on_its_line(&inner);
        match inner.classify() {
            serde_json::error::Category::Data if field == "." => text,
            serde_json::error::Category::Data => format!("{field}: {text}"),
            _ => format!("is not JSON: {text}"),
        }
    })?;
    match json.end() {
        Ok(()) => Ok(line.hash_ids),
        Err(error) => Err(format!("is not JSON: {}", on_its_line(&error))),
    }
}

/// The error's own words without its line, which is always 1 here.
fn on_its_line(error: &serde_json::Error) -> String {
    error
        .to_string()
        .replace(" at line 1 column ", " at column ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    use proptest::prelude::*;
    use proptest::sample::Index;
    use proptest::test_runner::RngSeed;

    fn source(text: &[u8]) -> (tempfile::NamedTempFile, Source) {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(text).expect("room for it");
        let source = Source::File(file.path().to_owned());
        (file, source)
    }

    fn error(text: &str) -> String {
        let (file, source) = source(text.as_bytes());
        let problem = source
            .measure(u64::MAX, &Interrupt::default())
            .expect_err(text);
        assert_eq!(problem.exit_status(), 2);
        let message = problem.to_string();
        message.replace(&file.path().display().to_string(), "FILE")
    }

    const GOOD: &str = r#"{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 18446744073709551615], "more": null}"#;

    #[test]
    fn good_lines_are_read_in_order_up_to_the_limit() {
        let text = format!("{GOOD}\r\n\n{}\n", GOOD.replace("600", "1"));
        let (_file, source) = source(text.as_bytes());
        let requests: Result<Vec<_>, _> = source.requests(9).expect("a file").collect();
        let expected = vec![vec![0, u64::MAX]; 2];
        assert_eq!(requests.expect("no bad line"), expected);
        let extent = source.measure(1, &Interrupt::default()).expect("good");
        assert_eq!((extent.requests, extent.blocks), (1, 2));
    }

    #[test]
    fn a_bad_line_is_named_with_its_field() {
        for (find, put, message) in [
            (
                "\"hash_ids\"",
                "\"hashes\"",
                "missing field `hash_ids` at column",
            ),
            (
                "\"input_length\"",
                "\"in\"",
                "missing field `input_length` at column",
            ),
            ("[0, ", "[-1, ", "hash_ids[0]: invalid value: integer `-1`"),
            (
                "[0, ",
                "[0, 1.5, ",
                "hash_ids[1]: invalid type: floating point `1.5`",
            ),
            ("[0, ", "[0, \"7\", ", "hash_ids[1]: invalid type: string"),
            (
                "18446744073709551615",
                "18446744073709551616",
                "hash_ids[1]: invalid type",
            ),
            (
                "[0, 18446744073709551615]",
                "5",
                "hash_ids: invalid type: integer `5`",
            ),
            ("600", "-600", "input_length: invalid value: integer `-600`"),
            (
                "\"timestamp\": 0",
                "\"timestamp\": \"0\"",
                "timestamp: invalid type: string",
            ),
            ("{", "[", "is not a JSON object"),
            ("{", "{,", "is not JSON: key must be a string at column 2"),
            (
                "null}",
                "null",
                "is not JSON: EOF while parsing an object at column",
            ),
            (
                "null}",
                "null} x",
                "is not JSON: trailing characters at column",
            ),
        ] {
            let bad = GOOD.replacen(find, put, 1);
            let message = format!("FILE:3: {message}");
            let got = error(&format!("{GOOD}\n\n{bad}\n{GOOD}\n"));
            assert!(got.starts_with(&message), "{got}\n{message}");
            assert!(!got.contains('\n'), "{got}");
        }
    }

    #[test]
    fn a_file_without_blocks_is_no_trace() {
        for text in ["", "\n\n", &GOOD.replace("0, 18446744073709551615", "")] {
            let got = error(text);
            assert!(got.contains("trace FILE: has no block to move"), "{got}");
        }
    }

    #[test]
    fn what_is_no_readable_file_is_named() {
        for (path, reason) in [
            ("/nonexistent/trace.jsonl", "No such file or directory"),
            ("/", "is not a regular file"),
            ("/dev/zero", "is not a regular file"),
        ] {
            let source = Source::File(path.into());
            let problem = source
                .measure(1, &Interrupt::default())
                .expect_err("no trace");
            let text = problem.to_string();
            assert!(text.starts_with(&format!("trace {path}: ")), "{text}");
            assert!(text.contains(reason), "{text}");
        }
    }

    #[test]
    fn a_binary_file_is_given_up_soon() {
        let length = usize::try_from(LONGEST_LINE).expect("a few MiB");
        let (_file, source) = source(&vec![b'1'; length + 1]);
        let problem = source
            .measure(1, &Interrupt::default())
            .expect_err("no line end");
        assert!(problem.to_string().contains(":1: is longer than"));
    }

    /// A line that is good, nearly good, or anything; the same in each run
    /// unless more are asked for with `PROPTEST_CASES`.
    fn line() -> impl Strategy<Value = Vec<u8>> {
        let damaged = (any::<Vec<(Index, u8)>>(), any::<Index>(), any::<bool>());
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..80),
            ("-?[0-9]{1,25}", "[0-9]{0,3}[.e-]{0,2}[0-9]{0,3}").prop_map(|(id, length)| {
                GOOD.replace("[0, ", &format!("[{id}, "))
                    .replace("600", &length)
                    .into_bytes()
            }),
            damaged.prop_map(|(bytes, end, cut)| {
                let mut line = GOOD.as_bytes().to_vec();
                for (at, byte) in bytes.into_iter().take(3) {
                    line[at.index(GOOD.len())] = byte;
                }
                if cut {
                    line.truncate(end.index(line.len()));
                }
                line
            }),
        ]
    }

    fn inputs() -> ProptestConfig {
        let mut config = ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        };
        if std::env::var_os("PROPTEST_CASES").is_none() {
            config.cases = 2000;
            config.rng_seed = RngSeed::Fixed(2);
        }
        config
    }

    proptest! {
        #![proptest_config(inputs())]

        #[test]
        fn any_bytes_are_the_ids_they_say_or_a_bad_line_by_number(
            lines in prop::collection::vec(line(), 0..4),
        ) {
            let text = lines.join(&b'\n');
            let (file, source) = source(&text);
            let requests: Vec<_> = source.requests(u64::MAX).expect("a file").collect();
            let lines = text.split(|byte| *byte == b'\n').enumerate();
            let mut lines = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
            for request in requests {
                let (index, line) = lines.next().expect("a request is from a line");
                let json: Option<serde_json::Value> = serde_json::from_slice(line).ok();
                match request {
                    Ok(ids) => {
                        let json = json.expect("an accepted line is JSON");
                        let told = json["hash_ids"].as_array().expect("a list");
                        let told: Option<Vec<u64>> =
                            told.iter().map(serde_json::Value::as_u64).collect();
                        prop_assert_eq!(Some(ids), told);
                    }
                    Err(problem) => {
                        let text = problem.to_string();
                        let name = format!("{}:{}: ", file.path().display(), index + 1);
                        prop_assert!(text.starts_with(&name), "{}", text);
                        prop_assert!(!text.contains('\n'), "{}", text);
                        prop_assert!(line != GOOD.as_bytes(), "{}", text);
                    }
                }
            }
            prop_assert!(lines.next().is_none(), "a line was passed over");
        }
    }
}
