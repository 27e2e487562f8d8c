// SPDX-License-Identifier: Apache-2.0
//! The files of a checkout: read within it, replaced all or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use super::Problem;
use super::text::Text;

/// A directory that looks like Mooncake.
pub struct Tree {
    root: PathBuf,
}

/// What every Mooncake has had at its top.
const SIGNS: [&str; 3] = [
    "CMakeLists.txt",
    "mooncake-common/common.cmake",
    "mooncake-transfer-engine",
];

impl Tree {
    /// Errors if `directory` is no Mooncake checkout.
    pub fn open(directory: &Path) -> Result<Self, Problem> {
        let root = fs::canonicalize(directory).map_err(|source| Problem::Unreadable {
            path: directory.to_owned(),
            source,
        })?;
        match SIGNS.iter().find(|sign| !root.join(sign).exists()) {
            Some(sign) => Err(Problem::NotMooncake {
                path: directory.to_owned(),
                sign,
            }),
            None => Ok(Self { root }),
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file's text, or none if there is no such file. A link is followed as
    /// long as it stays inside the checkout.
    pub fn read(&self, file: &'static str) -> Result<Option<Text>, Problem> {
        let unreadable = |source| Problem::Unreadable {
            path: self.root.join(file),
            source,
        };
        match fs::symlink_metadata(self.root.join(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
            Ok(_) => {}
        }
        let path = self.locate(file)?;
        let bytes = fs::read(path).map_err(unreadable)?;
        match String::from_utf8(bytes) {
            Ok(raw) => Ok(Some(Text::new(raw))),
            Err(_) => Err(Problem::NotText { file }),
        }
    }

    /// Where a file really is.
    fn locate(&self, file: &'static str) -> Result<PathBuf, Problem> {
        let path =
            fs::canonicalize(self.root.join(file)).map_err(|source| Problem::Unreadable {
                path: self.root.join(file),
                source,
            })?;
        if !path.starts_with(&self.root) {
            return Err(Problem::Outside { file, path });
        }
        Ok(path)
    }

    /// Gives the files their new content, or leaves all of them as they are.
    pub fn replace(&self, files: &[(&'static str, String)]) -> Result<(), Problem> {
        let mut staged = Staged::default();
        for (file, content) in files {
            staged.add(self.locate(file)?, content)?;
        }
        staged.commit()
    }
}

/// New files beside the old ones, and a second name for each old one.
#[derive(Default)]
struct Staged {
    entries: Vec<Entry>,
}

struct Entry {
    target: PathBuf,
    new: PathBuf,
    old: PathBuf,
}

impl Staged {
    /// Puts `content` next to `target`, so that what can fail for want of room
    /// or permission fails before any file is replaced.
    fn add(&mut self, target: PathBuf, content: &str) -> Result<(), Problem> {
        let new = beside(&target, "new");
        let old = beside(&target, "old");
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| Problem::Unwritable { path, source }
        };
        let mut fresh = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&new)
            .map_err(failed(&new))?;
        let filled = fill(&mut fresh, &target, content);
        if let Err(source) = filled {
            remove(&new);
            return Err(failed(&new)(source));
        }
        // A second name costs no room and brings back the very file.
        if let Err(source) = fs::hard_link(&target, &old) {
            let copied = match source.kind() {
                io::ErrorKind::AlreadyExists => Err(source),
                _ => copy_new(&target, &old),
            };
            if let Err(source) = copied {
                remove(&new);
                return Err(failed(&old)(source));
            }
        }
        self.entries.push(Entry { target, new, old });
        Ok(())
    }

    /// Renames each new file over its old one. If one fails, those before it get
    /// their old files back.
    fn commit(self) -> Result<(), Problem> {
        for (done, entry) in self.entries.iter().enumerate() {
            let Err(source) = fs::rename(&entry.new, &entry.target) else {
                continue;
            };
            let lost: Vec<PathBuf> = self.entries[..done]
                .iter()
                .rev()
                .filter(|entry| fs::rename(&entry.old, &entry.target).is_err())
                .map(|entry| entry.target.clone())
                .collect();
            let path = entry.target.clone();
            if lost.is_empty() {
                return Err(Problem::Unwritable { path, source });
            }
            // Their old content must outlive this process under its second name.
            std::mem::forget(self);
            return Err(Problem::HalfWritten { path, source, lost });
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for entry in &self.entries {
            remove(&entry.new);
            remove(&entry.old);
        }
    }
}

fn beside(target: &Path, role: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.memfabric-{role}"))
}

fn fill(fresh: &mut File, target: &Path, content: &str) -> io::Result<()> {
    let metadata = fs::metadata(target)?;
    fresh.write_all(content.as_bytes())?;
    let mine = fresh.metadata()?;
    if (mine.uid(), mine.gid()) != (metadata.uid(), metadata.gid()) {
        // Only root may give a file away; anyone else keeps what they write.
        let _ = fchown(&*fresh, Some(metadata.uid()), Some(metadata.gid()));
    }
    fresh.set_permissions(metadata.permissions())?;
    fresh.sync_all()
}

fn copy_new(from: &Path, to: &Path) -> io::Result<()> {
    let mut copy = OpenOptions::new().write(true).create_new(true).open(to)?;
    let copied = fs::read_to_string(from).and_then(|content| fill(&mut copy, from, &content));
    if copied.is_err() {
        remove(to);
    }
    copied
}

/// Takes away a file of our own; it may be gone already, renamed into place.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two files with their new content staged.
    fn staged() -> (tempfile::TempDir, Staged) {
        let directory = tempfile::tempdir().expect("a directory of the test's own");
        let mut staged = Staged::default();
        for name in ["first", "second"] {
            let path = directory.path().join(name);
            fs::write(&path, format!("old {name}")).expect("a file of the test's own");
            staged.add(path, "new").expect("stages");
        }
        (directory, staged)
    }

    fn names(directory: &tempfile::TempDir) -> Vec<(String, String)> {
        let mut names: Vec<_> = fs::read_dir(directory.path())
            .expect("lists")
            .map(|entry| entry.expect("lists").path())
            .map(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                (
                    name.into_owned(),
                    fs::read_to_string(&path).unwrap_or_default(),
                )
            })
            .collect();
        names.sort();
        names
    }

    fn pair(first: &str, second: &str) -> Vec<(String, String)> {
        vec![
            ("first".to_owned(), first.to_owned()),
            ("second".to_owned(), second.to_owned()),
        ]
    }

    #[test]
    fn all_files_are_replaced_and_nothing_else_stays() {
        let (directory, staged) = staged();
        staged.commit().expect("commits");
        assert_eq!(names(&directory), pair("new", "new"));
    }

    #[test]
    fn nothing_happens_until_the_commit() {
        let (directory, staged) = staged();
        drop(staged);
        assert_eq!(names(&directory), pair("old first", "old second"));
    }

    #[test]
    fn a_rename_that_fails_half_way_brings_the_earlier_files_back() {
        let (directory, staged) = staged();
        let inode = |name: &str| {
            let metadata = fs::metadata(directory.path().join(name)).expect("is there");
            metadata.ino()
        };
        let before = inode("first");
        // The second rename finds no file to rename.
        fs::remove_file(directory.path().join(".second.memfabric-new")).expect("was staged");
        let problem = staged.commit().expect_err("cannot rename what is gone");
        assert!(matches!(problem, Problem::Unwritable { path, .. } if path.ends_with("second")));
        assert_eq!(names(&directory), pair("old first", "old second"));
        assert_eq!(inode("first"), before, "the very file is back");
    }

    #[test]
    fn what_could_not_be_brought_back_is_named_and_kept() {
        let (directory, staged) = staged();
        fs::remove_file(directory.path().join(".second.memfabric-new")).expect("was staged");
        fs::remove_file(directory.path().join(".first.memfabric-old")).expect("was staged");
        let problem = staged.commit().expect_err("cannot rename what is gone");
        assert!(problem.to_string().contains("first"), "{problem}");
        assert!(directory.path().join(".second.memfabric-old").exists());
    }
}
