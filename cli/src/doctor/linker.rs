// SPDX-License-Identifier: Apache-2.0
//! Where the dynamic linker would find a library, and what it would load with
//! it.
//!
//! The order is that of ld.so(8): `DT_RPATH` (where there is no `DT_RUNPATH`),
//! `LD_LIBRARY_PATH`, `DT_RUNPATH`, `/etc/ld.so.cache`, the default folders. A
//! file for another machine is passed over; one that is no ELF file ends the
//! search.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::elf::{Object, Unusable};
use super::machine::Machine;

const VARIABLE: &str = "LD_LIBRARY_PATH";
const CACHE: &str = "/etc/ld.so.cache";

/// What led to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A path was given.
    Given,
    /// `LD_LIBRARY_PATH`.
    Variable,
    /// The run path of this file.
    RunPath(PathBuf),
    /// The cache.
    Cache,
    /// A default folder.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("as given"),
            Self::Variable => f.write_str("from LD_LIBRARY_PATH"),
            Self::RunPath(of) => write!(f, "from the run path of {}", of.display()),
            Self::Cache => f.write_str("from the linker's cache"),
            Self::Default => f.write_str("from a default folder"),
        }
    }
}

/// A file that the linker would load.
#[derive(Debug)]
pub struct Located {
    /// Where it is.
    pub path: PathBuf,
    /// What led to it.
    pub origin: Origin,
    /// What it is.
    pub object: Object,
}

/// Why a library would not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Nothing of that name.
    #[error("not found on the linker's path{}", Passed(.passed))]
    NotFound {
        /// Files of that name that it passes over.
        passed: Vec<(PathBuf, Unusable)>,
    },
    /// A file that ends the search.
    #[error("{} {unusable}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        unusable: Unusable,
    },
    /// A file that cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
}

struct Passed<'a>(&'a [(PathBuf, Unusable)]);

impl fmt::Display for Passed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, unusable) in self.0 {
            write!(f, "; {} is passed over, it {unusable}", path.display())?;
        }
        Ok(())
    }
}

/// Run paths that a search goes through.
#[derive(Default)]
pub struct RunPaths {
    /// Before `LD_LIBRARY_PATH`.
    before: Vec<(PathBuf, PathBuf)>,
    /// After it.
    after: Vec<(PathBuf, PathBuf)>,
}

impl RunPaths {
    /// Those of one object, folder and file that has it.
    pub fn of(path: &Path, object: &Object) -> Self {
        let folder = path.parent().unwrap_or(Path::new("/"));
        let expand = |paths: &[String]| {
            let mut expanded = Vec::new();
            for entry in paths {
                let origin = folder.to_string_lossy();
                let entry = entry
                    .replace("${ORIGIN}", &origin)
                    .replace("$ORIGIN", &origin);
                expanded.push((PathBuf::from(entry), path.to_owned()));
            }
            expanded
        };
        if object.runpath.is_empty() {
            Self {
                before: expand(&object.rpath),
                after: Vec::new(),
            }
        } else {
            Self {
                before: Vec::new(),
                after: expand(&object.runpath),
            }
        }
    }
}

/// The linker's search path on one machine.
pub struct Linker<'a> {
    machine: &'a Machine<'a>,
    variable: Vec<PathBuf>,
    cache: Vec<(String, PathBuf)>,
    defaults: Vec<PathBuf>,
}

impl<'a> Linker<'a> {
    /// Reads the search path.
    pub fn new(machine: &'a Machine<'a>) -> Self {
        let variable = machine.variable(VARIABLE).unwrap_or_default();
        let variable = if variable.is_empty() {
            Vec::new()
        } else {
            // An empty entry is the current directory.
            let entries = variable.split([':', ';']).map(|entry| match entry {
                "" => ".",
                entry => entry,
            });
            entries.map(PathBuf::from).collect()
        };
        let arch = std::env::consts::ARCH;
        let cache = machine.read(Path::new(CACHE)).unwrap_or_default();
        Self {
            machine,
            variable,
            cache: parse_cache(&cache),
            defaults: [
                format!("/lib/{arch}-linux-gnu"),
                format!("/usr/lib/{arch}-linux-gnu"),
                "/lib64".to_owned(),
                "/usr/lib64".to_owned(),
                "/lib".to_owned(),
                "/usr/lib".to_owned(),
            ]
            .map(PathBuf::from)
            .to_vec(),
        }
    }

    /// Entries of `LD_LIBRARY_PATH` that are not there.
    pub fn missing_entries(&self) -> Vec<&Path> {
        self.variable
            .iter()
            .map(PathBuf::as_path)
            .filter(|entry| !self.machine.exists(entry))
            .collect()
    }

    /// Finds a library: a name with a slash is a path.
    pub fn find(&self, name: &str, run_paths: &RunPaths) -> Result<Located, Failure> {
        if name.contains('/') {
            return match self.open(Path::new(name), Origin::Given)? {
                Ok(located) => Ok(located),
                Err(unusable) => Err(Failure::Unusable {
                    path: PathBuf::from(name),
                    unusable,
                }),
            };
        }
        let run_path =
            |(folder, of): &(PathBuf, PathBuf)| (folder.join(name), Origin::RunPath(of.clone()));
        let mut places: Vec<(PathBuf, Origin)> = Vec::new();
        places.extend(run_paths.before.iter().map(run_path));
        let entries = self.variable.iter();
        places.extend(entries.map(|folder| (folder.join(name), Origin::Variable)));
        places.extend(run_paths.after.iter().map(run_path));
        let cached = self.cache.iter().filter(|(soname, _)| soname == name);
        places.extend(cached.map(|(_, path)| (path.clone(), Origin::Cache)));
        let defaults = self.defaults.iter();
        places.extend(defaults.map(|folder| (folder.join(name), Origin::Default)));

        let mut passed = Vec::new();
        for (path, origin) in places {
            if !self.machine.exists(&path) {
                continue;
            }
            match self.open(&path, origin)? {
                Ok(located) => return Ok(located),
                Err(unusable @ Unusable::OtherMachine(..)) => passed.push((path, unusable)),
                Err(unusable) => return Err(Failure::Unusable { path, unusable }),
            }
        }
        Err(Failure::NotFound { passed })
    }

    fn open(&self, path: &Path, origin: Origin) -> Result<Result<Located, Unusable>, Failure> {
        let bytes = self
            .machine
            .read(path)
            .map_err(|source| Failure::Unreadable {
                path: path.to_owned(),
                source,
            })?;
        Ok(Object::parse(&bytes).map(|object| Located {
            path: path.to_owned(),
            origin,
            object,
        }))
    }

    /// Everything that is loaded with a library, breadth first.
    pub fn closure(&self, top: Located) -> Closure {
        let mut closure = Closure::default();
        let mut known: HashSet<String> = HashSet::new();
        known.extend(top.object.soname.clone());
        let mut queue: VecDeque<(String, usize)> = VecDeque::new();
        closure.add(top, &mut queue);
        while let Some((name, by)) = queue.pop_front() {
            if !known.insert(name.clone()) {
                continue;
            }
            let requester = &closure.loaded[by];
            let run_paths = RunPaths::of(&requester.path, &requester.object);
            match self.find(&name, &run_paths) {
                Ok(located) => {
                    known.extend(located.object.soname.clone());
                    closure.names.push((name, closure.loaded.len()));
                    closure.add(located, &mut queue);
                }
                Err(failure) => closure.missing.push(Missing {
                    by: requester.path.clone(),
                    name,
                    failure,
                }),
            }
        }
        closure
    }
}

/// A library with all that is loaded with it.
#[derive(Debug, Default)]
pub struct Closure {
    /// The library, then its dependencies.
    pub loaded: Vec<Located>,
    /// Dependencies that would not load.
    pub missing: Vec<Missing>,
    /// Which name led to which of the loaded.
    names: Vec<(String, usize)>,
}

/// A dependency that would not load.
#[derive(Debug)]
pub struct Missing {
    /// Its name.
    pub name: String,
    /// Who needs it.
    pub by: PathBuf,
    /// Why not.
    pub failure: Failure,
}

impl Closure {
    fn add(&mut self, located: Located, queue: &mut VecDeque<(String, usize)>) {
        let index = self.loaded.len();
        queue.extend(
            located
                .object
                .needed
                .iter()
                .map(|name| (name.clone(), index)),
        );
        self.loaded.push(located);
    }

    /// Versions that a dependency does not have, as the linker words it.
    pub fn missing_versions(&self) -> Vec<String> {
        let mut missing = Vec::new();
        for located in &self.loaded {
            for (file, version) in &located.object.needs_versions {
                let found = self.names.iter().find(|(name, _)| name == file);
                let Some(provider) = found.map(|(_, index)| &self.loaded[*index]) else {
                    continue;
                };
                // A file without versions satisfies every one of them.
                let versions = &provider.object.versions;
                if !versions.is_empty() && !versions.contains(version) {
                    missing.push(format!(
                        "{}: version '{version}' not found (required by {})",
                        provider.path.display(),
                        located.path.display()
                    ));
                }
            }
        }
        missing
    }

    /// Symbols that nobody in here defines. Only of use where nothing is missing.
    pub fn undefined(&self) -> Vec<String> {
        let mut undefined = Vec::new();
        for located in &self.loaded {
            for symbol in &located.object.undefined {
                let mut all = self.loaded.iter();
                if !all.any(|other| other.object.exports(symbol)) {
                    undefined.push(format!("{symbol} ({})", located.path.display()));
                }
            }
        }
        undefined
    }
}

/// Names and paths of the linker's cache, those of this kind of machine.
///
/// The layout is glibc's `struct cache_file_new`: a header of 48 bytes, then
/// entries of 24, whose two string offsets count from the header. Older systems
/// write an older table in front of it.
fn parse_cache(bytes: &[u8]) -> Vec<(String, PathBuf)> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER: usize = 48;
    const ENTRY: usize = 24;
    // FLAG_ELF_LIBC6 with the machine's bits, `sysdeps/generic/ldconfig.h`.
    let own = match std::env::consts::ARCH {
        "x86_64" => Some(0x0303),
        "aarch64" => Some(0x0a03),
        _ => None,
    };
    let Some(start) = bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
    else {
        return Vec::new();
    };
    let table = &bytes[start..];
    let number = |at: usize| -> Option<u32> {
        let bytes = table.get(at..at + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    let string = |at: u32| -> Option<String> {
        let bytes = table.get(at as usize..)?;
        let end = bytes.iter().position(|byte| *byte == 0)?;
        String::from_utf8(bytes[..end].to_vec()).ok()
    };
    let count = number(MAGIC.len()).unwrap_or(0) as usize;
    (0..count)
        .map_while(|index| {
            let entry = HEADER + index * ENTRY;
            let (flags, name, path) = (number(entry)?, number(entry + 4)?, number(entry + 8)?);
            Some((flags, string(name)?, PathBuf::from(string(path)?)))
        })
        .filter(|(flags, ..)| own.is_none_or(|own| own == *flags))
        .map(|(_, name, path)| (name, path))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_cache_is_no_cache() {
        assert!(parse_cache(b"").is_empty());
        assert!(parse_cache(b"glibc-ld.so.cache1.1").is_empty());
        let mut table = b"glibc-ld.so.cache1.1".to_vec();
        table.extend(u32::MAX.to_ne_bytes());
        table.resize(200, 0xff);
        assert!(parse_cache(&table).is_empty());
    }

    #[test]
    fn the_origin_of_a_run_path_is_the_folder_of_its_file() {
        let object = Object {
            runpath: vec!["$ORIGIN/../lib".to_owned(), "${ORIGIN}".to_owned()],
            rpath: vec!["/ignored".to_owned()],
            ..Object::default()
        };
        let paths = RunPaths::of(Path::new("/opt/a/libx.so"), &object);
        let folders: Vec<_> = paths.after.iter().map(|(folder, _)| folder).collect();
        assert_eq!(folders, [Path::new("/opt/a/../lib"), Path::new("/opt/a")]);
        assert!(
            paths.before.is_empty(),
            "a run path silences the older kind"
        );
    }
}
