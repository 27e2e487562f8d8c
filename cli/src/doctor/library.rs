// SPDX-License-Identifier: Apache-2.0
//! `libmf_smem.so`: which file, its dependencies, its symbols, its revision.

use std::path::{Path, PathBuf};

use memfabric_transport::Library;
use memfabric_transport::config::{Generation, LIBRARY};
use memfabric_transport::vendor::v1;

use super::elf::{self, Object};
use super::linker::{Closure, Failure, Linker, Located, RunPaths};
use super::machine::Machine;
use super::python;
use super::report::Finding;

/// Exported by the emulator and by nobody else.
const EMULATOR: &str = "mf_emu_version";
const VERSION: &str = "smem_get_abi_version";
/// What the published library does not export: a library that has it is of the
/// other generation, whatever else it has.
const ASYNCHRONOUS: &str = "smem_trans_batch_copy";
/// Where the wheel keeps the library, in site-packages.
const IN_SITE_PACKAGES: &str = "memfabric_hybrid/lib";

/// What pip is to install for a generation.
pub fn wheel(generation: Generation) -> &'static str {
    match generation {
        // Not published: the file that came with it.
        Generation::Batched => "\"$MEMFABRIC_WHEEL\"",
        Generation::V1 => "memfabric-hybrid==1.3.0",
    }
}

/// Checks the library, `given` or the one that the dynamic linker would take, as
/// one of the generation `wanted`; `unset` is the command that asks for the other
/// one than the published.
pub fn check(
    machine: &Machine<'_>,
    linker: &Linker<'_>,
    given: Option<&Path>,
    wanted: Generation,
    unset: &str,
) -> Vec<Finding> {
    let installed = installed(machine);
    let run_paths = engine_run_paths(machine, linker);
    let name = given.map_or_else(
        || LIBRARY.to_owned(),
        |path| match path.to_string_lossy() {
            path if path.contains('/') => path.into_owned(),
            // A bare name would be searched for.
            path => format!("./{path}"),
        },
    );
    let top = match linker.find(&name, &run_paths) {
        Ok(top) => top,
        Err(failure) => {
            let given = given.is_some();
            return vec![absent(linker, &name, &failure, &installed, given, wanted)];
        }
    };
    let path = top.path.clone();
    let mut findings = vec![file(machine, &top)];
    let closure = linker.closure(top);
    let dependencies = dependencies(machine, &closure, &path, &installed);
    findings.push(dependencies);
    findings.push(undefined(&closure));
    let object = &closure.loaded[0].object;
    let bytes = machine.read(&path).unwrap_or_default();
    let version = elf::constant(&bytes, VERSION);
    let release = release(machine, &path, version);
    findings.push(symbols(machine, object, release, wanted, &installed, unset));
    findings.push(abi_version(object, version));
    findings
}

/// Copies that pip installed, by their folder.
fn installed(machine: &Machine<'_>) -> Vec<PathBuf> {
    python::site_packages(machine)
        .into_iter()
        .map(|folder| folder.join(IN_SITE_PACKAGES))
        .filter(|folder| machine.exists(folder.join(LIBRARY)))
        .collect()
}

/// The linker also follows the run path of the module that opens the library:
/// Mooncake's, where it is installed for this Python.
fn engine_run_paths(machine: &Machine<'_>, linker: &Linker<'_>) -> RunPaths {
    for folder in python::site_packages(machine) {
        let folder = folder.join("mooncake");
        for name in machine.list(&folder) {
            if !(name.starts_with("engine") && name.ends_with(".so")) {
                continue;
            }
            let path = folder.join(name);
            if let Ok(Located { object, .. }) =
                linker.find(&path.to_string_lossy(), &RunPaths::default())
            {
                return RunPaths::of(&path, &object);
            }
        }
    }
    RunPaths::default()
}

fn export(folder: &Path) -> String {
    let folder = super::quoted(&folder.to_string_lossy());
    format!("export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH")
}

fn absent(
    linker: &Linker<'_>,
    name: &str,
    failure: &Failure,
    installed: &[PathBuf],
    given: bool,
    wanted: Generation,
) -> Finding {
    let mut found = match failure {
        Failure::NotFound { .. } => format!("{name} {failure}"),
        other => other.to_string(),
    };
    if !given {
        for entry in linker.missing_entries() {
            found += &format!(
                "; LD_LIBRARY_PATH names {}, which is not there",
                entry.display()
            );
        }
    }
    let finding = |found: String| {
        Finding::problem("library", found).needs(format!("{LIBRARY} on the linker's path"))
    };
    match installed.first() {
        _ if given => Finding::problem("library", found).needs("a shared object for this machine"),
        Some(folder) => finding(format!(
            "{found}; it is in Python's site-packages: {}",
            folder.join(LIBRARY).display()
        ))
        .mend(export(folder)),
        None => finding(found).mend(format!("pip install {}", wheel(wanted))).mend(
            "export LD_LIBRARY_PATH=$(python3 -c 'import site; print(site.getsitepackages()[0])')/memfabric_hybrid/lib:$LD_LIBRARY_PATH",
        ),
    }
}

fn file(machine: &Machine<'_>, top: &Located) -> Finding {
    let path = top.path.display();
    let mut found = format!("{path}, {}", top.origin);
    if let Some(real) = machine
        .real(&top.path)
        .ok()
        .filter(|real| *real != top.path)
    {
        found += &format!(", which is {}", real.display());
    }
    if top.object.exports(EMULATOR) {
        return Finding::warning("library", format!("{found}: the emulator"))
            .needs("Huawei's library, unless this is a trial: the emulator moves bytes within one machine only");
    }
    Finding::ok("library", found)
}

fn dependencies(
    machine: &Machine<'_>,
    closure: &Closure,
    library: &Path,
    installed: &[PathBuf],
) -> Finding {
    const CHECK: &str = "dependencies";
    let versions = closure.missing_versions();
    if closure.missing.is_empty() && versions.is_empty() {
        let count = closure.loaded.len() - 1;
        return Finding::ok(CHECK, format!("{count}, all found"));
    }
    let mut found: Vec<String> = Vec::new();
    let mut mends: Vec<String> = Vec::new();
    for missing in &closure.missing {
        let by = missing.by.display();
        found.push(match &missing.failure {
            Failure::NotFound { .. } => {
                format!("{} {} (needed by {by})", missing.name, missing.failure)
            }
            other => format!("{other} (needed by {by})"),
        });
        let beside = library.parent().into_iter();
        let mut folders = beside.chain(installed.iter().map(PathBuf::as_path));
        let mend = match folders.find(|folder| machine.exists(folder.join(&missing.name))) {
            Some(folder) => export(folder),
            None if missing.name.starts_with("libascend") => super::cann::source(machine),
            None => format!("ldconfig -p | grep {}", super::quoted(&missing.name)),
        };
        if !mends.contains(&mend) {
            mends.push(mend);
        }
    }
    found.extend(versions);
    let finding = Finding::problem(CHECK, found.join("; "))
        .needs("every dependency on the linker's path, in the versions asked for");
    mends.into_iter().fold(finding, Finding::mend)
}

/// The library is opened with every symbol bound at once, so what nobody defines
/// keeps it from loading; but the process may have more in it than can be seen
/// here, hence no more than a warning.
fn undefined(closure: &Closure) -> Finding {
    const CHECK: &str = "bindings";
    if !closure.missing.is_empty() {
        return Finding::warning(CHECK, "not looked at, as dependencies are missing");
    }
    let undefined = closure.undefined();
    if undefined.is_empty() {
        return Finding::ok(CHECK, "every symbol that is needed is defined");
    }
    const SHOWN: usize = 4;
    let mut found = undefined[..undefined.len().min(SHOWN)].join(", ");
    if undefined.len() > SHOWN {
        found += &format!(" and {} more", undefined.len() - SHOWN);
    }
    Finding::warning(CHECK, format!("undefined: {found}")).needs(
        "each defined by a dependency: libraries of one age, or of the process that opens them",
    )
}

fn symbols(
    machine: &Machine<'_>,
    object: &Object,
    release: String,
    wanted: Generation,
    installed: &[PathBuf],
    unset: &str,
) -> Finding {
    const CHECK: &str = "symbols";
    let all = |generation| match generation {
        Generation::Batched => format!(
            "all {} of the generation with asynchronous batches",
            Library::SYMBOLS.len()
        ),
        Generation::V1 => format!(
            "all {} of the published generation",
            v1::Library::SYMBOLS.len()
        ),
    };
    let is = generation(object);
    if is == Some(wanted) {
        return Finding::ok(CHECK, all(wanted));
    }
    let missing = missing_symbols(object, wanted);
    let mut found = match missing.is_empty() {
        true => format!("has {ASYNCHRONOUS}"),
        false => format!("missing {}", missing.join(", ")),
    };
    found += &match (wanted, is) {
        (_, Some(Generation::V1)) => format!(
            ": this is the published memfabric-hybrid {release}, whose transfers are synchronous: it is used with MF_ABI=v1 only"
        ),
        (_, Some(Generation::Batched)) => {
            ": this is the generation with asynchronous batches, not the published one that is asked for".to_owned()
        }
        (Generation::V1, None) => ": not the published memfabric-hybrid".to_owned(),
        (Generation::Batched, None) if missing.len() == Library::SYMBOLS.len() => {
            ": this is no MemFabric library".to_owned()
        }
        (Generation::Batched, None) => {
            ": an older, incompatible revision of MemFabric".to_owned()
        }
    };
    let needed = match is {
        Some(Generation::V1) => format!("{}, or MF_ABI=v1 for this one", all(wanted)),
        _ => all(wanted),
    };
    let finding = Finding::problem(CHECK, found).needs(needed);
    let better = installed.iter().find(|folder| {
        let bytes = machine.read(&folder.join(LIBRARY)).unwrap_or_default();
        Object::parse(&bytes).is_ok_and(|object| generation(&object) == Some(wanted))
    });
    match (better, is) {
        (Some(folder), _) => finding.mend(export(folder)),
        (None, Some(Generation::V1)) => finding.mend("export MF_ABI=v1"),
        (None, Some(Generation::Batched)) => finding.mend(unset),
        (None, None) => finding.mend(format!("pip install --force-reinstall {}", wheel(wanted))),
    }
}

/// Which one it is, by what it exports.
fn generation(object: &Object) -> Option<Generation> {
    let whole = |generation| missing_symbols(object, generation).is_empty();
    [Generation::Batched, Generation::V1]
        .into_iter()
        .find(|generation| whole(*generation))
        .filter(|is| *is == Generation::Batched || !object.exports(ASYNCHRONOUS))
}

fn missing_symbols(object: &Object, generation: Generation) -> Vec<&'static str> {
    let symbols = match generation {
        Generation::Batched => &Library::SYMBOLS[..],
        Generation::V1 => &v1::Library::SYMBOLS[..],
    };
    let missing = symbols.iter().filter(|symbol| !object.exports(symbol));
    missing.copied().collect()
}

/// The release: what the VERSION file of the wheel says, one folder above the
/// library, else what its code does.
fn release(machine: &Machine<'_>, path: &Path, version: Option<u32>) -> String {
    let file = || {
        let real = machine.real(path).ok()?;
        let text = machine.text(real.parent()?.parent()?.join("VERSION"))?;
        let version = text
            .lines()
            .find_map(|line| line.strip_prefix("mf version:"))?;
        Some(version.trim().to_owned())
    };
    let told = || version.map(|version| format!("{}.{}", version >> 16, version & 0xffff));
    file().or_else(told).unwrap_or_else(|| "1.x".to_owned())
}

fn abi_version(object: &Object, version: Option<u32>) -> Finding {
    const CHECK: &str = "abi version";
    match version {
        Some(version) => Finding::ok(
            CHECK,
            format!("{}.{} ({version:#010x})", version >> 16, version & 0xffff),
        ),
        None if object.exports(VERSION) => Finding::ok(
            CHECK,
            format!("cannot be told without running {VERSION}, which is not done here"),
        ),
        None => Finding::ok(CHECK, format!("not told, {VERSION} is not exported")),
    }
}
