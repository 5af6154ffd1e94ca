//! Writes to standard error. A full or closed standard error must not stop a running server.

use std::fmt::Display;
use std::io::{self, StderrLock, Write};
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use racksum_net::udp::wait_writable;
use racksum_proto::counted::counted;
use racksum_proto::peer_text::PeerText;
use racksum_proto::time::Span;

/// Number of lines that could not be written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// A writer of lines that never fails. It counts the lines that it cannot write, and reports the
/// count before the next line that it writes.
#[derive(Debug)]
pub(crate) struct Lines<'a, W> {
    to: W,
    lost: &'a AtomicU64,
}

/// Returns a [`Lines`] writer for standard error.
pub(crate) fn lines() -> Lines<'static, StderrLock<'static>> {
    Lines { to: io::stderr().lock(), lost: &LOST }
}

/// An output that can be full for a while; a write would then block.
pub(crate) trait Room {
    /// Returns whether [`ROOM`] bytes can be written without blocking.
    fn has_room(&self) -> bool;
}

impl Room for StderrLock<'_> {
    fn has_room(&self) -> bool {
        has_room(self)
    }
}

/// Returns whether [`ROOM`] bytes can be written without blocking. A pipe fills up if its reader
/// stops reading.
pub(crate) fn has_room(at: impl AsFd) -> bool {
    // A pipe is writable when it has room for `PIPE_BUF` bytes; see pipe(7).
    wait_writable(at.as_fd(), Some(Span::ZERO)).unwrap_or(true)
}

/// Largest size of one write in bytes.
const ROOM: usize = 4096;

impl<W: Write + Room> Write for Lines<'_, W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = self.lost.swap(0, Relaxed);
        let note = match lost {
            0 => String::new(),
            _ => {
                let lines = counted(lost, "line");
                format!("racksum: {lines} of the log could not be written here\n")
            }
        };
        // Write the note and the line together: the ranks of a benchmark share standard error, so
        // another rank's line could come between them.
        let whole = [note.as_bytes(), line].concat();
        let piece = |piece: &[u8]| self.to.has_room() && self.to.write_all(piece).is_ok();
        if !whole.chunks(ROOM).all(piece) {
            self.lost.fetch_add(lost + 1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints a message on its own line.
pub(crate) fn print_line(what: impl Display) {
    // `Lines::write` never fails.
    drop(lines().write_all(line_of(what).as_bytes()));
}

/// Formats a line, and escapes control characters, which paths and files may contain.
fn line_of(what: impl Display) -> String {
    format!("racksum: {}\n", PeerText::of(what))
}

/// Writes text that replaces the current line of a terminal.
pub(crate) fn overwrite_line(what: impl Display) {
    drop(lines().write_all(what.to_string().as_bytes()));
}

/// Prints a warning.
pub(crate) fn warn(what: impl Display) {
    print_line(format_args!("warning: {what}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_one_line_without_control_characters() {
        let line = line_of("cannot read a\n\x1b[31mb: No such file");
        assert_eq!(line, "racksum: cannot read a\\n\\u{1b}[31mb: No such file\n");
        assert!(line_of("x".repeat(1 << 20)).len() < 2 * PeerText::MAX);
    }

    /// An output with room for `room` bytes.
    struct Disk<'a> {
        room: usize,
        has: &'a mut Vec<u8>,
    }

    impl Room for Disk<'_> {
        fn has_room(&self) -> bool {
            self.room > 0
        }
    }

    impl Write for Disk<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            assert!(self.room > 0, "a write without room would block");
            if bytes.len() > self.room {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.has.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_cannot_be_written_is_told_of_once_there_is_room() {
        let (lost, mut has) = (AtomicU64::new(0), Vec::new());
        for (room, line) in [(9, "one\n"), (0, "two\n"), (5, "three\n"), (99, "four\n"), (9, "5\n")]
        {
            let mut lines = Lines { to: Disk { room, has: &mut has }, lost: &lost };
            lines.write_all(line.as_bytes()).unwrap();
        }
        let note = "racksum: 2 lines of the log could not be written here";
        assert_eq!(String::from_utf8(has).unwrap(), format!("one\n{note}\nfour\n5\n"));
    }
}
