// SPDX-License-Identifier: Apache-2.0
//! The machine that is looked at: files below one root directory, and
//! environment variables.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

/// Symbolic links that a path may lead through, as the kernel has it.
const MAX_LINKS: usize = 40;

/// Looks a variable up; None if it is unset.
pub type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// A machine. Paths are the machine's own: `/etc` is `etc` below its root, also
/// where a symbolic link leads there.
pub struct Machine<'a> {
    root: PathBuf,
    /// What relative paths are relative to.
    folder: PathBuf,
    environment: &'a Environment<'a>,
}

impl<'a> Machine<'a> {
    /// The machine whose root directory is `root`. Its current directory is this
    /// process's if it is this machine, and `/` otherwise.
    pub fn new(root: &Path, environment: &'a Environment<'a>) -> Self {
        let here = root == Path::new("/");
        let folder = std::env::current_dir().ok().filter(|_| here);
        Self {
            root: root.to_owned(),
            folder: folder.unwrap_or_else(|| PathBuf::from("/")),
            environment,
        }
    }

    /// A variable's value; None if it is unset.
    pub fn variable(&self, name: &str) -> Option<String> {
        (self.environment)(name)
    }

    /// A path without symbolic links, in the machine's own terms.
    pub fn real(&self, path: &Path) -> io::Result<PathBuf> {
        let mut links = 0;
        let mut real = PathBuf::from("/");
        // What is left to walk, the next component last.
        let mut left: Vec<PathBuf> = Vec::new();
        let push = |left: &mut Vec<PathBuf>, path: &Path| {
            let components = path.components().rev();
            left.extend(components.map(|component| PathBuf::from(component.as_os_str())));
        };
        push(&mut left, &self.folder.join(path));
        while let Some(next) = left.pop() {
            match next.components().next() {
                Some(Component::RootDir) => real = PathBuf::from("/"),
                Some(Component::ParentDir) => {
                    real.pop();
                }
                Some(Component::Normal(name)) => {
                    let here = real.join(name);
                    let below = self.below(&here);
                    if fs::symlink_metadata(&below)?.is_symlink() {
                        links += 1;
                        if links > MAX_LINKS {
                            return Err(io::Error::other("too many symbolic links"));
                        }
                        push(&mut left, &fs::read_link(&below)?);
                    } else {
                        real = here;
                    }
                }
                _ => {}
            }
        }
        Ok(real)
    }

    /// Where a real path is for this process.
    fn below(&self, real: &Path) -> PathBuf {
        self.root
            .join(real.strip_prefix("/").unwrap_or(real))
            .components()
            .collect()
    }

    fn host(&self, path: &Path) -> io::Result<PathBuf> {
        self.real(path).map(|real| self.below(&real))
    }

    /// A file's bytes.
    pub fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let host = self.host(path)?;
        // A pipe would block, and a device may do anything.
        if !fs::metadata(&host)?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        fs::read(host)
    }

    /// A file's text without the blanks around it; None if it cannot be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = self.read(path.as_ref()).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file's number; None if it cannot be read, or is none.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Whether there is such a file or directory.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.host(path.as_ref()).is_ok_and(|host| host.exists())
    }

    /// Names in a directory, sorted; none if it is not there.
    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(host) = self.host(path.as_ref()) else {
            return Vec::new();
        };
        let mut names: Vec<String> = fs::read_dir(host)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_below_the_root() {
        let root = tempfile::tempdir().expect("temporary directory");
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("usr/lib/vendor")).expect("directories");
        fs::create_dir_all(at("opt")).expect("directories");
        fs::write(at("usr/lib/vendor/file"), "inside\n").expect("file");
        symlink("/usr/lib", at("lib")).expect("absolute link");
        symlink("../lib/vendor", at("opt/vendor")).expect("relative link");
        symlink("../../../../../../lib/vendor/file", at("opt/high")).expect("link");
        symlink("/opt/loop", at("opt/loop")).expect("link");
        let nothing = |_: &str| None;
        let machine = Machine::new(root.path(), &nothing);

        for path in ["/opt/vendor/file", "/opt/high", "opt/vendor/../vendor/file"] {
            assert_eq!(machine.text(path).as_deref(), Some("inside"), "{path}");
            let real = machine.real(Path::new(path)).expect(path);
            assert_eq!(real, Path::new("/usr/lib/vendor/file"), "{path}");
        }
        assert!(!machine.exists("/opt/loop"));
        assert!(!machine.exists("/opt/nothing"));
        assert_eq!(machine.list("/opt"), ["high", "loop", "vendor"]);
        assert!(
            machine.read(Path::new("/opt")).is_err(),
            "a directory was read"
        );
    }
}
