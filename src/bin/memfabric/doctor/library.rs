//! `libmf_smem.so`: which file, its dependencies, its symbols, its revision.

use std::path::{Path, PathBuf};

use memfabric_transport::Library;
use memfabric_transport::config::LIBRARY;

use super::elf::{self, Object};
use super::linker::{Closure, Failure, Linker, Located, RunPaths};
use super::machine::Machine;
use super::python;
use super::report::Finding;

/// Exported by the emulator and by nobody else.
const EMULATOR: &str = "mf_emu_version";
const VERSION: &str = "smem_get_abi_version";
/// What the release 1.3.0 does not export, and what it calls itself.
const NOT_IN_1_3: [&str; 3] = [
    "smem_trans_get_rpc_port",
    "smem_trans_batch_copy",
    "smem_trans_batch_status_query",
];
const ABI_1_3: u32 = 0x0001_0003;
/// Where the wheel keeps the library, in site-packages.
const IN_SITE_PACKAGES: &str = "memfabric_hybrid/lib";

/// Checks the library, `given` or the one that the dynamic linker would take.
pub fn check(machine: &Machine<'_>, linker: &Linker<'_>, given: Option<&Path>) -> Vec<Finding> {
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
        Err(failure) => return vec![absent(linker, &name, &failure, &installed, given.is_some())],
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
    findings.push(symbols(machine, &path, object, version, &installed));
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
        None => finding(found).mend("pip install \"$MEMFABRIC_WHEEL\"").mend(
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
    path: &Path,
    object: &Object,
    version: Option<u32>,
    installed: &[PathBuf],
) -> Finding {
    const CHECK: &str = "symbols";
    let needed = || format!("all {}", Library::SYMBOLS.len());
    let missing = missing_symbols(object);
    if missing.is_empty() {
        return Finding::ok(CHECK, needed());
    }
    let mut found = format!("missing {}", missing.join(", "));
    let release = release(machine, path);
    // What it exports decides, its VERSION file may be another's.
    let is_1_3 = version == Some(ABI_1_3) && missing.iter().all(|name| NOT_IN_1_3.contains(name));
    if is_1_3 || release.as_deref() == Some("1.3.0") {
        let release = release.unwrap_or_else(|| "1.3".to_owned());
        found += &format!(
            ": this is the published memfabric-hybrid {release}, an older, incompatible revision whose transfers are synchronous"
        );
    } else if missing.len() == Library::SYMBOLS.len() {
        found += ": this is no MemFabric library";
    } else {
        found += ": an older, incompatible revision of MemFabric";
    }
    let finding = Finding::problem(CHECK, found).needs(needed());
    let better = installed.iter().find(|folder| {
        let bytes = machine.read(&folder.join(LIBRARY)).unwrap_or_default();
        Object::parse(&bytes).is_ok_and(|object| missing_symbols(&object).is_empty())
    });
    match better {
        Some(folder) => finding.mend(export(folder)),
        None => finding.mend("pip install --force-reinstall \"$MEMFABRIC_WHEEL\""),
    }
}

fn missing_symbols(object: &Object) -> Vec<&'static str> {
    Library::SYMBOLS
        .into_iter()
        .filter(|symbol| !object.exports(symbol))
        .collect()
}

/// What the VERSION file of the wheel says, one folder above the library.
fn release(machine: &Machine<'_>, path: &Path) -> Option<String> {
    let real = machine.real(path).ok()?;
    let text = machine.text(real.parent()?.parent()?.join("VERSION"))?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("mf version:"))?;
    Some(version.trim().to_owned())
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
