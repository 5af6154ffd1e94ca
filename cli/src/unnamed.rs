//! Files that have no name until they are whole. A process that is killed before leaves nothing
//! behind.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, linkat};

/// Opens a new file in a folder that has no name and can be given one, if the file system has such
/// files.
pub(crate) type Unnamed = fn(&Path, OpenOptions) -> Option<File>;

/// The usual [`Unnamed`].
pub(crate) fn unnamed(folder: &Path, mut options: OpenOptions) -> Option<File> {
    let file = options.custom_flags(OFlags::TMPFILE.bits().cast_signed()).open(folder).ok()?;
    // It is by this path that it gets one.
    open_at("self", &file).exists().then_some(file)
}

/// Gives such a file a name, which no other may have.
///
/// # Errors
/// The kernel's.
pub(crate) fn link(file: &File, to: &Path) -> io::Result<()> {
    Ok(linkat(CWD, open_at("self", file), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

/// The path at which a process has a file of this one open.
pub(crate) fn open_at(process: &str, file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{process}/fd/{}", file.as_raw_fd()))
}

/// The folder that a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Names tried for the temporary file.
pub(crate) const ATTEMPTS: u32 = 16;

/// Bytes of its name that the temporary file's has: less than the 255 that a name may have.
const LONGEST_NAME: usize = 200;

/// Makes a file beside a path, of a name that no other has: it ends with what `draw` returns.
pub(crate) fn beside<T>(
    path: &Path,
    mut draw: impl FnMut() -> u64,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    let name = path.file_name().unwrap_or_default();
    for _ in 0..ATTEMPTS {
        let mut hidden = OsString::from(".");
        // A name may be as long as the file system lets it.
        let len = name.len().min(LONGEST_NAME);
        hidden.push(OsStr::from_bytes(&name.as_bytes()[..len]));
        hidden.push(format!(".{:016x}.tmp", draw()));
        let hidden = folder_of(path).join(hidden);
        match make(&hidden) {
            Ok(made) => return Ok((hidden, made)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{ATTEMPTS} temporary files are in the way in its folder; remove them"),
    ))
}

/// Returns a number that another user cannot foresee, so that no file waits under the name.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_in_the_way_are_passed_over() {
        let folder = std::env::temp_dir().join(format!("racksum-way-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("sum");
        let make = |name: &Path| File::options().write(true).create_new(true).open(name);
        let in_order = || {
            let mut last = 0;
            move || {
                last += 1;
                last
            }
        };
        for number in 1..=ATTEMPTS {
            let (name, _) = beside(&path, in_order(), make).unwrap();
            assert_eq!(name, folder.join(format!(".sum.{number:016x}.tmp")));
        }
        let why = beside(&path, in_order(), make).unwrap_err().to_string();
        assert!(why.contains("16 temporary files are in the way"), "{why}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
