//! The files that are imported: a directory, or a tarball of one, or an even sample of it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::child;
use crate::error::{Error, Result};
use crate::scratch::Scratch;

/// A tree of real files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub(crate) directory: PathBuf,
    /// Files, directories and symbolic links.
    pub(crate) file_count: u64,
    /// Bytes in files.
    pub(crate) bytes: u64,
}

impl Source {
    /// The tree at `path`: a directory, or a tarball, which is unpacked into `scratch`.
    ///
    /// # Errors
    /// If it cannot be read or unpacked.
    pub(crate) fn open(path: &Path, scratch: &Scratch) -> Result<Self> {
        if path.is_dir() {
            return Self::count(path);
        }
        // Of a name that no job knows: one whose own directory had the same threw the sources away.
        let directory = scratch.new_directory()?;
        child::run(Command::new("tar").arg("xf").arg(path).arg("-C").arg(&directory))?;
        Self::count(&directory)
    }

    /// An even sample of `fraction` of the files, with their directories, as a tree of its own.
    ///
    /// # Errors
    /// If a file cannot be copied.
    pub(crate) fn sample(&self, fraction: f64, to: &Path) -> Result<Self> {
        let mut names = Vec::new();
        list(&self.directory, Path::new(""), &mut names)?;
        let mut due = 0.0;
        for (name, kind) in &names {
            let target = to.join(name);
            if kind.is_dir() {
                continue;
            }
            due += fraction;
            if due < 1.0 {
                continue;
            }
            due -= 1.0;
            let copied = fs::create_dir_all(target.parent().unwrap_or(to))
                .and_then(|()| copy(&self.directory.join(name), &target, *kind));
            copied.map_err(Error::io(format!("copy {}", name.display())))?;
        }
        Self::count(to)
    }

    /// So many bytes of its files, one behind the other, of files evenly all over the tree; again and again where it has not as many.
    ///
    /// # Errors
    /// If a file cannot be read, or all are empty.
    pub(crate) fn contents(&self, len: usize) -> Result<Vec<u8>> {
        let mut names = Vec::new();
        list(&self.directory, Path::new(""), &mut names)?;
        names.retain(|(_, kind)| kind.is_file());
        let step = usize::try_from(self.bytes / len.max(1) as u64).unwrap_or(usize::MAX).max(1);
        let evenly = (0..step).flat_map(|first| names.iter().skip(first).step_by(step));
        let mut contents = Vec::with_capacity(len);
        for (name, _) in evenly {
            let read = fs::read(self.directory.join(name));
            contents.extend(read.map_err(Error::io(format!("read {}", name.display())))?);
            if contents.len() >= len {
                break;
            }
        }
        if contents.is_empty() && len > 0 {
            return Err(Error::Input { what: "a source without data".to_owned() });
        }
        let found = contents.len();
        while contents.len() < len {
            contents.extend_from_within(..found.min(len - contents.len()));
        }
        contents.truncate(len);
        Ok(contents)
    }

    fn count(directory: &Path) -> Result<Self> {
        let mut names = Vec::new();
        list(directory, Path::new(""), &mut names)?;
        let mut bytes = 0;
        for (name, kind) in &names {
            if kind.is_file() {
                let metadata = fs::symlink_metadata(directory.join(name));
                bytes += metadata.map_err(Error::io(format!("stat {}", name.display())))?.len();
            }
        }
        let file_count = names.len() as u64;
        Ok(Self { directory: directory.to_owned(), file_count, bytes })
    }

    /// Length of an image with room for all of it, checksums, two copies of metadata and chunks
    /// that are not full.
    pub(crate) fn image_bytes(&self) -> u64 {
        let gib = 1 << 30;
        (self.bytes + self.bytes / 2 + self.file_count * 4096 + gib).next_multiple_of(gib)
    }
}

fn copy(from: &Path, to: &Path, kind: fs::FileType) -> io::Result<()> {
    if kind.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if kind.is_file() {
        fs::copy(from, to)?;
    }
    Ok(())
}

/// All names below `directory`, in order, so that a sample is the same every time.
fn list(directory: &Path, below: &Path, names: &mut Vec<(PathBuf, fs::FileType)>) -> Result<()> {
    let shown = directory.join(below);
    let fail = || Error::io(format!("list {}", shown.display()));
    let entries: io::Result<Vec<fs::DirEntry>> =
        fs::read_dir(&shown).and_then(|entries| entries.collect());
    let mut entries = entries.map_err(fail())?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().map_err(fail())?;
        let name = below.join(entry.file_name());
        names.push((name.clone(), kind));
        if kind.is_dir() {
            list(directory, &name, names)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_takes_an_even_share_of_the_files() {
        let from = tempfile::tempdir().unwrap();
        for at in 0..30 {
            let directory = from.path().join(format!("d{}", at % 3));
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(format!("f{at}")), vec![0; 100]).unwrap();
        }
        symlink("nowhere", from.path().join("d0/link")).unwrap();
        let all = Source::count(from.path()).unwrap();
        assert_eq!((all.file_count, all.bytes), (34, 3000));
        let to = tempfile::tempdir().unwrap();
        let third = all.sample(1.0 / 3.0, to.path()).unwrap();
        assert!((900..=1100).contains(&third.bytes), "{third:?}");
        assert!(to.path().join("d2").is_dir());
    }

    /// Sources that were unpacked lay where a job of `sequential` had a directory of its own, and threw away what was there.
    #[test]
    fn sources_are_unpacked_where_no_job_has_files() {
        let from = tempfile::tempdir().unwrap();
        fs::write(from.path().join("file"), b"data").unwrap();
        let tarball = tempfile::NamedTempFile::new().unwrap();
        let mut tar = Command::new("tar");
        child::run(tar.arg("cf").arg(tarball.path()).arg("-C").arg(from.path()).arg(".")).unwrap();
        let scratch = Scratch::new(None).unwrap();
        let one = Source::open(tarball.path(), &scratch).unwrap();
        let other = Source::open(tarball.path(), &scratch).unwrap();
        assert_eq!((one.bytes, other.bytes), (4, 4));
        assert_ne!(one.directory, other.directory);
        assert!(one.directory.starts_with(scratch.path("")));
        assert_ne!(one.directory, scratch.path("source"));
    }

    #[test]
    fn contents_are_of_files_all_over_the_tree_and_as_long_as_is_asked_for() {
        let from = tempfile::tempdir().unwrap();
        for at in 0..10u8 {
            fs::write(from.path().join(format!("f{at}")), vec![at; 100]).unwrap();
        }
        let all = Source::count(from.path()).unwrap();
        let contents = all.contents(300).unwrap();
        assert_eq!(contents.chunks(100).map(|file| file[0]).collect::<Vec<_>>(), [0, 3, 6]);
        assert_eq!(all.contents(950).unwrap()[900..], [9; 50]);
        let again = all.contents(2500).unwrap();
        assert!(again.len() == 2500 && again[1000..2000] == again[..1000]);
        let empty = tempfile::tempdir().unwrap();
        assert!(Source::count(empty.path()).unwrap().contents(1).is_err());
    }
}
