//! Access to files that a user names. A pipe is rejected instead of blocking the caller.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::with_limit;

/// Reason why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The path names a folder, a pipe or a device.
    #[error("not a regular file")]
    NotRegular,
    /// The file is larger than allowed.
    #[error("larger than {} KiB", most >> 10)]
    TooLarge {
        /// The limit in bytes.
        most: u64,
    },
    /// The system's error.
    #[error("{}", with_limit(.0))]
    Io(#[from] io::Error),
}

/// Checks whether the error means that this process or the host has too many open files.
#[must_use]
pub fn lacks_descriptor(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Opens a regular file to read it.
///
/// # Errors
///
/// [`FileError::NotRegular`], or the system's error.
pub fn open(path: &Path) -> Result<File, FileError> {
    // Without this flag, opening a pipe waits for a writer.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(FileError::NotRegular);
    }
    Ok(file)
}

/// Reads the text of a regular file of at most `most` bytes, without the byte-order mark that some
/// editors put before it.
///
/// # Errors
///
/// [`FileError`], which is [`FileError::Io`] if the file is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> Result<String, FileError> {
    let mut bytes = read_all(open(path)?, most)?;
    if bytes.starts_with(BYTE_ORDER_MARK) {
        bytes.drain(..BYTE_ORDER_MARK.len());
    }
    let text = String::from_utf8(bytes);
    text.map_err(|error| FileError::Io(io::Error::new(io::ErrorKind::InvalidData, error)))
}

/// Reads an open file of at most `most` bytes.
///
/// # Errors
///
/// [`FileError::TooLarge`], or the system's error.
pub fn read_all(file: File, most: u64) -> Result<Vec<u8>, FileError> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(FileError::TooLarge { most });
    }
    Ok(bytes)
}

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_not_waited_for() {
        let folder = std::env::temp_dir().join(format!("racksum-file-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pipe = folder.join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [&*pipe, &*folder, Path::new("/dev/zero")] {
            let why = read_text(path, 10).unwrap_err().to_string();
            assert_eq!(why, "not a regular file", "{path:?}");
        }
        let file = folder.join("file");
        for (text, read) in [("0123456789", true), ("0123456789+", false)] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(read_text(&file, 10).is_ok(), read);
        }
        std::fs::write(&file, "\u{feff}text").unwrap();
        assert_eq!(read_text(&file, 10).unwrap(), "text");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
