// SPDX-License-Identifier: Apache-2.0
//! `memfabric doctor`: why the transport does not start, or is not used.

mod cann;
mod conf;
mod elf;
mod headers;
mod hugepages;
mod library;
mod linker;
mod machine;
mod published;
mod python;
mod report;
mod settings;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use conf::Conf;
use linker::Linker;
use machine::Machine;
use memfabric_transport::config::{Generation, Value, table};
use memfabric_transport::{Code, Config};
use report::{Finding, Report};

const EXIT_STATUS: &str = "\
Exit status:
  0  all is well
  1  warnings
  2  problems

Nothing is changed, and MemFabric's library is never opened: files are read.";

/// Say why the transport does not start, or is not used
///
/// Looks at what the transport needs, in the order in which it can fail, and
/// prints one line each: ok, warning or problem, the value found, the value
/// needed, and the command that mends it.
#[derive(clap::Args)]
#[command(after_help = EXIT_STATUS)]
pub struct Args {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,

    /// Look at this library, not at the one that the dynamic linker would take
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,

    /// Compare with MemFabric's own headers, by a probe that cc compiles
    #[arg(long, value_name = "DIR")]
    headers: Option<PathBuf>,

    /// Say whether this Mooncake checkout is integrated
    #[arg(long, value_name = "DIR")]
    mooncake: Option<PathBuf>,

    /// Count the huge pages that a Store pool of this size needs, such as 200GB
    #[arg(long, value_name = "N", value_parser = bytes)]
    store_bytes: Option<u64>,

    /// Look at the machine whose root directory this is; variables are this
    /// process's
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Units are powers of 1024, as in Mooncake's own settings.
fn bytes(text: &str) -> Result<u64, String> {
    match parse_size::Config::new().with_binary().parse_size(text) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => Err("must be a size above zero, such as 214748364800 or 200GB".to_owned()),
    }
}

/// Runs the command.
pub fn run(args: Args) -> ExitCode {
    if !args.root.is_dir() {
        let root = args.root.display();
        eprintln!("memfabric doctor: --root {root}: no such directory");
        return ExitCode::from(2);
    }
    let machine = Machine::new(&args.root, &Config::process_environment);
    let report = Report::new(examine(&machine, &args));
    let text = if args.json {
        serde_json::to_string_pretty(&report).map(|json| json + "\n")
    } else {
        Ok(report.to_string())
    };
    let printed = text
        .map_err(io::Error::from)
        .and_then(|text| io::stdout().lock().write_all(text.as_bytes()));
    if let Err(error) = printed {
        eprintln!("memfabric doctor: cannot print: {error}");
        return ExitCode::from(2);
    }
    ExitCode::from(report.exit_status())
}

/// Makes every check, in the order in which they can fail.
fn examine(machine: &Machine<'_>, args: &Args) -> Vec<Finding> {
    let conf = Conf::load(machine);
    let tent = conf.as_ref().map(Conf::settings).unwrap_or_default();
    // Where that is no usable setting, for what it would be without.
    let generation = settings::generation(machine, &tent).unwrap_or_default();
    let published = generation == Generation::V1;
    let protocol = settings::protocol(machine, &tent, generation).ok();
    let linker = Linker::new(machine);

    let unset = match &conf {
        Ok(conf)
            if *tent.get(&table::ABI) != Value::Absent && machine.variable("MF_ABI").is_none() =>
        {
            conf.edit("del(.transports.memfabric.abi)")
        }
        _ => "unset MF_ABI".to_owned(),
    };
    let given = args.library.as_deref();
    let mut findings = library::check(machine, &linker, given, generation, &unset);
    if let Some(folder) = &args.headers {
        let need_retry = settings::need_retry(machine, &tent).unwrap_or(Code::NEED_RETRY.0);
        findings.extend(headers::check(machine, folder, generation, need_retry, |code| {
            match &conf {
                Ok(conf) => conf.edit(&format!(".transports.memfabric.need_retry_code = {code}")),
                Err(_) => format!(
                    "export MC_TENT_CONF='{{\"transports\":{{\"memfabric\":{{\"enable\":true,\"need_retry_code\":{code}}}}}}}'"
                ),
            }
        }));
    }
    findings.extend(cann::check(machine, &linker, protocol, published));
    if published {
        findings.extend(published::files(machine, &linker));
    }
    findings.extend(settings::check(machine, &tent));
    if published {
        findings.extend(published::check(machine, &tent, protocol));
    }
    findings.extend(conf::engine(machine));
    match conf {
        Ok(conf) => findings.extend(conf.check()),
        Err(finding) => findings.push(finding),
    }
    findings.extend(hugepages::check(machine, args.store_bytes));
    if let Some(checkout) = &args.mooncake {
        findings.push(mooncake(checkout));
    }
    findings
}

/// Asks `memfabric integrate --check`, whose exit status and first line are made
/// for this.
fn mooncake(checkout: &Path) -> Finding {
    const CHECK: &str = "mooncake";
    let place = checkout.to_string_lossy();
    let output = std::env::current_exe().and_then(|command| {
        Command::new(command)
            .args(["integrate", "--check"])
            .arg(checkout)
            .output()
    });
    let output = match output {
        Ok(output) => output,
        Err(error) => {
            return Finding::warning(CHECK, format!("cannot run memfabric integrate: {error}"))
                .mend(format!("memfabric integrate --check {}", quoted(&place)));
        }
    };
    let line = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.lines().next().unwrap_or_default().to_owned()
    };
    let (found, refusal) = (line(&output.stdout), line(&output.stderr));
    let integrate = format!("memfabric integrate {}", quoted(&place));
    let problem = |found: String| Finding::problem(CHECK, found).needs("integrated");
    match output.status.code() {
        Some(0) => Finding::ok(CHECK, found),
        Some(1) if refusal.is_empty() => problem(found).mend(integrate),
        Some(1) => problem(format!("{found}; {refusal}")),
        Some(3) => problem(found)
            .mend(format!("{integrate} --revert"))
            .mend(integrate),
        _ => Finding::problem(CHECK, refusal).needs("a Mooncake checkout"),
    }
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        for (word, text) in [
            ("/opt/lib", "/opt/lib"),
            ("/opt/my lib", "'/opt/my lib'"),
            ("it's", "'it'\\''s'"),
            ("$HOME", "'$HOME'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(word), text);
        }
    }

    #[test]
    fn a_size_is_a_number_with_or_without_a_unit() {
        assert_eq!(bytes("200GB"), Ok(200 << 30));
        assert_eq!(bytes("4096"), Ok(4096));
        for text in ["", "0", "many", "-1"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
