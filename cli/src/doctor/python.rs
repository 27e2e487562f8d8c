// SPDX-License-Identifier: Apache-2.0
//! The site-packages of the `python3` on the path, found without running it.

use std::path::{Path, PathBuf};

use super::machine::Machine;

/// Where `python3` looks for packages, the likeliest first.
pub fn site_packages(machine: &Machine<'_>) -> Vec<PathBuf> {
    let Some(python) = program(machine, "python3") else {
        return Vec::new();
    };
    let real = machine.real(&python).unwrap_or_else(|_| python.clone());
    // `python3` is a link to its version: pythonX.Y.
    let version = real
        .file_name()
        .and_then(|name| name.to_str())
        .filter(|name| name.contains('.'));
    let mut found = Vec::new();
    let mut add = |folder: PathBuf| {
        if machine.exists(&folder) && !found.contains(&folder) {
            found.push(folder);
        }
    };
    // A virtual environment's python3 is a link out of it, so both ends count.
    for program in [&python, &real] {
        let Some(prefix) = program.parent().and_then(Path::parent) else {
            continue;
        };
        let home = machine.variable("HOME").map(PathBuf::from);
        let roots = [
            Some(prefix.to_owned()),
            Some(prefix.join("local")),
            home.map(|home| home.join(".local")),
        ];
        for root in roots.into_iter().flatten() {
            for lib in ["lib", "lib64"] {
                let lib = root.join(lib);
                let names = machine.list(&lib).into_iter();
                for name in names.filter(|name| match version {
                    Some(version) => name == version,
                    None => name.starts_with("python3."),
                }) {
                    add(lib.join(&name).join("site-packages"));
                    add(lib.join(&name).join("dist-packages"));
                }
                add(lib.join("python3/dist-packages"));
            }
        }
    }
    found
}

/// A program on `PATH`.
fn program(machine: &Machine<'_>, name: &str) -> Option<PathBuf> {
    let path = machine.variable("PATH")?;
    path.split(':')
        .filter(|folder| !folder.is_empty())
        .map(|folder| Path::new(folder).join(name))
        .find(|program| machine.exists(program))
}
