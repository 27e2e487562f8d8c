// SPDX-License-Identifier: Apache-2.0
//! `memfabric integrate`: what Mooncake itself needs, put in and taken out.

pub mod edits;
mod survey;
mod text;
mod tree;

use std::fmt::{self, Display};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use edits::{Edit, INSIDE, INSIDE_IN_CMAKE, MARK, OLDEST};
use similar::TextDiff;
use survey::{Change, Mention, Survey, Words};
use tree::Tree;

/// Where TENT declares what the engine calls.
const TRANSPORT: &str = "mooncake-transfer-engine/tent/include/tent/runtime/transport.h";

const EXIT_STATUS: &str = "\
Exit status:
  0  done, or nothing to do; with --check: integrated
  1  with --check: not integrated
  2  refused, and no file was changed; the message says why
  3  with --check: partly integrated";

/// Put the MemFabric transport into a Mooncake checkout
///
/// Edits the checkout's files so that cmake -DUSE_TENT=ON -DUSE_MEMFABRIC=ON
/// builds this transport into TENT. Every edit finds its place by the text
/// around it. Either all go in or none; a second run changes nothing. Git is
/// never touched.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// The top of a Mooncake checkout
    #[arg(value_name = "MOONCAKE_DIR")]
    mooncake: PathBuf,

    /// Say whether the checkout is integrated, partly or not, and whether its engine
    /// calls quiesce(), and change nothing
    #[arg(long, conflicts_with_all = ["diff", "revert"])]
    check: bool,

    /// Print what would change as a unified diff, and change nothing
    #[arg(long, conflicts_with = "revert")]
    diff: bool,

    /// Take the edits out again, to the byte
    #[arg(long)]
    revert: bool,

    /// This transport's sources; the default is where this command was built
    #[arg(long, value_name = "DIR", conflicts_with_all = ["check", "revert"])]
    source: Option<PathBuf>,
}

/// Why a checkout is left alone.
#[derive(Debug, thiserror::Error)]
enum Problem {
    #[error("{} is not a Mooncake checkout: it has no {sign}; name the top directory of one", path.display())]
    NotMooncake { path: PathBuf, sign: &'static str },

    #[error("{}: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },

    #[error("{file}: not UTF-8 text")]
    NotText { file: &'static str },

    #[error("{file} is a link to {}, outside of the checkout", path.display())]
    Outside { file: &'static str, path: PathBuf },

    #[error("{file}: no such file")]
    FileMissing { file: &'static str },

    #[error("{file}: {} (edit {name})", Anchor(anchor, lines))]
    Anchor {
        file: &'static str,
        name: &'static str,
        anchor: &'static str,
        lines: Vec<usize>,
    },

    #[error("{file}: edit {name} is in more than once, on lines {}", Listed(lines))]
    EditTwice {
        file: &'static str,
        name: &'static str,
        lines: Vec<usize>,
    },

    #[error("{file}: cannot tell the values of enum TransportType")]
    Enumerators { file: &'static str },

    #[error("{} is not this transport's source: it has no {sign}; pass --source DIR", path.display())]
    NotSource { path: PathBuf, sign: &'static str },

    #[error("{:?}: CMake cannot name such a directory; move the sources", path)]
    SourceName { path: PathBuf },

    #[error("cannot write {}: {source}; no file was changed", path.display())]
    Unwritable { path: PathBuf, source: io::Error },

    #[error(
        "cannot write {}: {source}; and cannot bring back {}: what it was is in the same directory, as .*.memfabric-old",
        path.display(), Listed(&lost.iter().map(|path| path.display()).collect::<Vec<_>>())
    )]
    HalfWritten {
        path: PathBuf,
        source: io::Error,
        lost: Vec<PathBuf>,
    },

    #[error("cannot print: {0}")]
    Output(#[source] io::Error),

    /// Several of the above, or a state of the whole checkout.
    #[error("{0}")]
    Refused(String),
}

/// An anchor that is not there exactly once.
struct Anchor<'a>(&'a str, &'a [usize]);

impl Display for Anchor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(anchor, lines) = self;
        let anchor = anchor.trim().replace('\n', "\\n");
        if lines.is_empty() {
            write!(f, "no `{anchor}`")
        } else {
            let lines = Listed(lines);
            write!(f, "`{anchor}` more than once, on lines {lines}")
        }
    }
}

/// Things with commas between them.
struct Listed<'a, T>(&'a [T]);

impl<T: Display> Display for Listed<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, thing) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{thing}")?;
        }
        Ok(())
    }
}

/// Runs the command.
pub fn run(args: Args) -> ExitCode {
    match act(&args) {
        Ok(status) => ExitCode::from(status),
        Err(problem) => {
            eprintln!("memfabric integrate: {problem}");
            ExitCode::from(2)
        }
    }
}

fn act(args: &Args) -> Result<u8, Problem> {
    let tree = Tree::open(&args.mooncake)?;
    let survey = Survey::take(&tree);
    let report = if args.check {
        return check(&tree, &survey);
    } else if args.revert {
        revert(&tree, &survey)?
    } else {
        integrate(&tree, &survey, args)?
    };
    print(&report)?;
    Ok(0)
}

/// Puts the edits in, or shows what that would change.
fn integrate(tree: &Tree, survey: &Survey, args: &Args) -> Result<String, Problem> {
    let root = tree.root().display();
    let present = survey.present();
    let missing = survey.missing();
    if !present.is_empty() {
        if !missing.is_empty() {
            return Err(Problem::Refused(format!(
                "{root} is partly integrated\n{}\ntake out what is in with --revert, then integrate again",
                parts(survey)
            )));
        }
        stale(survey)?;
        let there = survey.filled("sources").unwrap_or_default();
        if args.source.is_some() {
            let asked = source_in_cmake(tree, args)?;
            if asked != there {
                return Err(Problem::Refused(format!(
                    "{root} is integrated with the sources in {there}, not {asked}; use --revert first"
                )));
            }
        }
        return Ok(if args.diff {
            String::new()
        } else {
            format!("{root} is integrated already, with the sources in {there}\n")
        });
    }
    ready(tree, survey)?;
    let words = Words {
        source: source_in_cmake(tree, args)?,
        value: survey.value()?,
    };
    let changes = survey.applied(&words);
    if args.diff {
        return Ok(diff(&changes));
    }
    write(tree, &changes)?;
    Ok(format!(
        "{root} is integrated: {} edits in {} files, each marked {MARK:?}\nsources: {}\nTransportType::MEMFABRIC: {}\nnext: cmake -DUSE_TENT=ON -DUSE_MEMFABRIC=ON\n",
        missing.len(),
        changes.len(),
        words.source,
        words.value,
    ))
}

/// Takes out what is in.
fn revert(tree: &Tree, survey: &Survey) -> Result<String, Problem> {
    let root = tree.root().display();
    let present = survey.present();
    let missing = survey.missing();
    let changed = survey
        .mentions()
        .into_iter()
        .find(|mention| missing.iter().any(|edit| edit.file == mention.file));
    if let Some(Mention { file, line }) = changed {
        return Err(Problem::Refused(format!(
            "{root}: {file}:{line} speaks of MemFabric and is not as integrate wrote it; no file was changed; restore or remove that line"
        )));
    }
    let changes = survey.reverted();
    write(tree, &changes)?;
    Ok(if present.is_empty() {
        format!("{root} is not integrated; nothing to take out\n")
    } else {
        format!(
            "{root}: {} edits taken out of {} files\n",
            present.len(),
            changes.len()
        )
    })
}

/// Says which state the checkout is in.
fn check(tree: &Tree, survey: &Survey) -> Result<u8, Problem> {
    let root = tree.root().display();
    let present = survey.present();
    let missing = survey.missing();
    if present.is_empty() {
        print(&format!("not integrated: {root}\n"))?;
        if let Err(problem) = ready(tree, survey) {
            eprintln!("memfabric integrate: {problem}");
        }
        return Ok(1);
    }
    if !missing.is_empty() {
        print(&format!("partly integrated: {root}\n{}\n", parts(survey)))?;
        return Ok(3);
    }
    if let Err(problem) = stale(survey) {
        print(&format!("partly integrated: {root}\n{problem}\n"))?;
        return Ok(3);
    }
    let there = survey.filled("sources").unwrap_or_default();
    let teardown = teardown(tree)?;
    print(&format!(
        "integrated: {root}\nsources: {there}\nteardown: {teardown}\n"
    ))?;
    Ok(0)
}

/// Whether the engine asks its transports to quiesce. One that names that method
/// otherwise compiles, and never calls ours; so does one that is older than it.
fn teardown(tree: &Tree) -> Result<&'static str, Problem> {
    let Some(header) = tree.read(TRANSPORT)? else {
        return Ok("not known, Transport's header is not where it was");
    };
    let declared = header.flat().lines().any(|line| {
        let code = line.split("//").next().unwrap_or_default();
        code.split_once("quiesce").is_some_and(|(before, after)| {
            !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
                && after.trim_start().starts_with('(')
        })
    });
    Ok(match declared {
        true => "the engine calls Transport::quiesce() before it frees memory",
        false => {
            "Transport declares no quiesce(): the transport drains when a range in use is removed and when it is destroyed; if this engine is of September 2026 or later, look what the method is called now"
        }
    })
}

/// Errors if a checkout that has none of the edits cannot take them.
fn ready(tree: &Tree, survey: &Survey) -> Result<(), Problem> {
    let root = tree.root().display();
    let another = survey::has_another(tree, is_this_transport)
        .map(str::to_owned)
        .or_else(|| {
            let Mention { file, line } = survey.mentions().into_iter().next()?;
            Some(format!("{file}:{line}"))
        });
    if let Some(place) = another {
        return Err(Problem::Refused(format!(
            "{root} already has a MEMFABRIC of its own: {place}; no file was changed"
        )));
    }
    let problems = survey.problems();
    if !problems.is_empty() {
        return Err(Problem::Refused(format!(
            "{root} differs from what is known; no file was changed\n  {}\nthe oldest supported Mooncake is {OLDEST}",
            problems.join("\n  ")
        )));
    }
    Ok(())
}

/// Which edits are in and which are not.
fn parts(survey: &Survey) -> String {
    let list = |edits: &[&Edit]| -> String {
        edits
            .iter()
            .map(|edit| format!("\n    {}: {} ({})", edit.name, edit.reason, edit.file))
            .collect()
    };
    let mut parts = format!(
        "  in:{}\n  not in:{}",
        list(&survey.present()),
        list(&survey.missing())
    );
    let problems = survey.problems();
    if !problems.is_empty() {
        parts += &format!("\n  not as known:\n    {}", problems.join("\n    "));
    }
    parts
}

/// Errors if the integer that C sees is not the enumerator's.
fn stale(survey: &Survey) -> Result<(), Problem> {
    let value = survey.value()?;
    match survey.filled("c-type") {
        Some(written) if written != value => Err(Problem::Refused(format!(
            "TRANSPORT_MEMFABRIC is {written}, TransportType::MEMFABRIC is {value}; use --revert, then integrate again"
        ))),
        _ => Ok(()),
    }
}

fn write(tree: &Tree, changes: &[Change]) -> Result<(), Problem> {
    let files: Vec<_> = changes
        .iter()
        .map(|change| (change.file, change.after.clone()))
        .collect();
    tree.replace(&files)
}

fn diff(changes: &[Change]) -> String {
    changes
        .iter()
        .map(|change| {
            TextDiff::from_lines(change.before, &change.after)
                .unified_diff()
                .header(&format!("a/{}", change.file), &format!("b/{}", change.file))
                .to_string()
        })
        .collect()
}

/// Whether a directory is this package's.
fn is_this_transport(directory: &Path) -> bool {
    let name = "name = \"memfabric-transport\"";
    fs::read_to_string(directory.join("Cargo.toml"))
        .is_ok_and(|manifest| manifest.lines().any(|line| line.trim() == name))
}

/// This transport's sources, as the edited CMake file names them.
fn source_in_cmake(tree: &Tree, args: &Args) -> Result<String, Problem> {
    let built_in = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let directory = args.source.as_deref().unwrap_or(built_in);
    let not_source = |sign| Problem::NotSource {
        path: directory.to_owned(),
        sign,
    };
    if !is_this_transport(directory) {
        return Err(not_source("Cargo.toml of memfabric-transport"));
    }
    if !directory.join("CMakeLists.txt").is_file() {
        return Err(not_source("CMakeLists.txt"));
    }
    let real = |path: &Path| {
        fs::canonicalize(path).map_err(|source| Problem::Unreadable {
            path: path.to_owned(),
            source,
        })
    };
    let path = real(directory)?;
    if real(&tree.root().join(INSIDE)).is_ok_and(|inside| inside == path) {
        return Ok(INSIDE_IN_CMAKE.to_owned());
    }
    match path.to_str() {
        Some(name) if !name.contains(|c: char| c.is_control() || c == ';') => Ok(name
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('$', "\\$")),
        _ => Err(Problem::SourceName { path }),
    }
}

fn print(text: &str) -> Result<(), Problem> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(Problem::Output)
}
