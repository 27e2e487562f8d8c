// SPDX-License-Identifier: Apache-2.0
//! Findings, one line each, for people and for programs.

use std::fmt;

use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it has to be.
    Ok,
    /// It goes on, but not as it should, or it could not be looked at.
    Warning,
    /// The transport will not start, or will not be used.
    Problem,
}

impl Level {
    /// What the command ends with: 0, 1 or 2.
    pub fn exit_status(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        })
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which check; stable, for programs.
    pub check: &'static str,
    /// How bad.
    pub level: Level,
    /// The value found.
    pub found: String,
    /// The value needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub needed: Option<String>,
    /// Commands that mend it, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mend: Vec<String>,
}

impl Finding {
    fn new(check: &'static str, level: Level, found: impl Into<String>) -> Self {
        Self {
            check,
            level,
            found: found.into(),
            needed: None,
            mend: Vec::new(),
        }
    }

    /// All is well.
    pub fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Ok, found)
    }

    /// Worth a look.
    pub fn warning(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Warning, found)
    }

    /// In the way.
    pub fn problem(check: &'static str, found: impl Into<String>) -> Self {
        Self::new(check, Level::Problem, found)
    }

    /// Adds the value needed.
    pub fn needs(mut self, needed: impl Into<String>) -> Self {
        self.needed = Some(needed.into());
        self
    }

    /// Adds a command that mends it.
    pub fn mend(mut self, command: impl Into<String>) -> Self {
        self.mend.push(command.into());
        self
    }
}

/// One line: a file's name or a linker's sentence may bring line ends along.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = format!("{:<7}  {}: {}", self.level, self.check, self.found);
        if let Some(needed) = &self.needed {
            line += &format!("; needed: {needed}");
        }
        if !self.mend.is_empty() {
            line += &format!("; mend: {}", self.mend.join(" && "));
        }
        f.write_str(&line.replace(['\n', '\r'], " "))
    }
}

/// Everything that was looked at, in order.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The worst level.
    level: Level,
    /// What the command ends with.
    exit_status: u8,
    /// Each thing.
    findings: Vec<Finding>,
}

impl Report {
    /// Sums findings up.
    pub fn new(findings: Vec<Finding>) -> Self {
        let level = findings.iter().map(|finding| finding.level).max();
        let level = level.unwrap_or(Level::Ok);
        Self {
            level,
            exit_status: level.exit_status(),
            findings,
        }
    }

    /// What the command ends with.
    pub fn exit_status(&self) -> u8 {
        self.exit_status
    }

    fn count(&self, level: Level) -> usize {
        self.findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        writeln!(
            f,
            "{} ok, {} warnings, {} problems",
            self.count(Level::Ok),
            self.count(Level::Warning),
            self.count(Level::Problem)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_finding_decides_the_exit_status() {
        let ok = Finding::ok("a", "fine");
        let warning = Finding::warning("b", "odd");
        let problem = Finding::problem("c", "bad");
        for (findings, status) in [
            (vec![], 0),
            (vec![ok.clone()], 0),
            (vec![warning.clone(), ok.clone()], 1),
            (vec![problem, warning, ok], 2),
        ] {
            assert_eq!(Report::new(findings).exit_status(), status);
        }
    }

    #[test]
    fn a_finding_is_one_line_with_value_need_and_mend() {
        let finding = Finding::problem("library", "not\nfound")
            .needs("there")
            .mend("one")
            .mend("two");
        assert_eq!(
            finding.to_string(),
            "problem  library: not found; needed: there; mend: one && two"
        );
    }
}
