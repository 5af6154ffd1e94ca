//! Files that a user names: opened so that none of them hangs.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a regular file to read it.
///
/// # Errors
///
/// What the system says; that it is not a regular file, as a pipe or a device.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening a pipe would otherwise wait for somebody who writes to it.
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

/// Reads the text of a regular file of at most so many bytes.
///
/// # Errors
///
/// As [`open`]; that it is no text, or too long.
pub fn read_text(path: &Path, most: u64) -> io::Result<String> {
    let mut text = String::new();
    open(path)?.take(most.saturating_add(1)).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::other(format!("it is larger than {} KiB", most >> 10)));
    }
    Ok(text)
}

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
            assert_eq!(why, "it is not a regular file", "{path:?}");
        }
        let file = folder.join("file");
        for (text, read) in [("0123456789", true), ("0123456789+", false)] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(read_text(&file, 10).is_ok(), read);
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
