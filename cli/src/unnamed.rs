//! Unnamed files, which get a name only once they are complete, so that a killed process leaves no
//! partial file behind. On file systems without unnamed files, callers use temporary files instead.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, linkat};

/// Opens an unnamed file in a folder; [`link`] can name the file later. Returns `None` if the file
/// system does not support unnamed files.
pub(crate) type Unnamed = fn(&Path, OpenOptions) -> Option<File>;

/// Opens an unnamed file with `O_TMPFILE`. Tests also use other functions of type [`Unnamed`].
pub(crate) fn unnamed(folder: &Path, mut options: OpenOptions) -> Option<File> {
    let file = options.custom_flags(OFlags::TMPFILE.bits().cast_signed()).open(folder).ok()?;
    // `link` needs this path, which is missing if /proc is not mounted.
    open_at("self", &file).exists().then_some(file)
}

/// Gives an unnamed file a name. Fails if another file already has that name.
///
/// # Errors
/// The error from linkat(2).
pub(crate) fn link(file: &File, to: &Path) -> io::Result<()> {
    Ok(linkat(CWD, open_at("self", file), CWD, to, AtFlags::SYMLINK_FOLLOW)?)
}

/// Returns the path of an open file under `/proc/{process}/fd`.
pub(crate) fn open_at(process: &str, file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/{process}/fd/{}", file.as_raw_fd()))
}

/// Returns the folder of a file.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// Number of names that [`beside`] tries for a temporary file.
pub(crate) const ATTEMPTS: u32 = 16;

/// Maximum number of bytes that a temporary name repeats from the file's name. Most file systems
/// allow names of at most 255 bytes.
const LONGEST_NAME: usize = 200;

/// Creates a temporary file in the folder of `path` with `make`, under an unused name that contains
/// a number from `draw`.
pub(crate) fn beside<T>(
    path: &Path,
    mut draw: impl FnMut() -> u64,
    make: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    let name = path.file_name().unwrap_or_default();
    for _ in 0..ATTEMPTS {
        let mut hidden = OsString::from(".");
        // The path's own name may be as long as the file system allows, so repeat only its start.
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
        format!(
            "all {ATTEMPTS} temporary names that were tried in its folder are taken; remove old \
             temporary files there"
        ),
    ))
}

/// Returns a random number for a name. Other users cannot predict the number, so they cannot occupy
/// the name in advance.
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
        assert!(why.contains("all 16 temporary names that were tried"), "{why}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
