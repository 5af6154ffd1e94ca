//! Socket buffers: setting their sizes, and reporting the sizes that the kernel granted.
//!
//! Many senders normally send to one socket at the same time (incast), so a receive buffer that the
//! kernel silently cut to its limit is the most common cause of slow runs. The report states that
//! cause in a sentence.

use std::fs;
use std::io;
use std::os::fd::AsFd;

use libc::c_int;
use socket2::Socket;

use crate::options;

/// Sizes of the socket buffers that were requested and granted, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BufferReport {
    /// Requested receive buffer; 0 keeps the kernel's default.
    pub asked_receive: usize,
    /// Receive buffer that the kernel granted.
    pub got_receive: usize,
    /// Requested send buffer; 0 keeps the kernel's default.
    pub asked_send: usize,
    /// Send buffer that the kernel granted.
    pub got_send: usize,
    /// The kernel's limit on receive buffers, if this process can read it.
    pub rmem_max: Option<usize>,
    /// The kernel's limit on send buffers, if this process can read it.
    pub wmem_max: Option<usize>,
}

impl BufferReport {
    /// Returns a sentence that states which buffers are too small and how to enlarge them, or
    /// `None` if both are large enough.
    #[must_use]
    pub fn shortfall(&self) -> Option<String> {
        let receive = clause(
            ("receive", "net.core.rmem_max"),
            (self.asked_receive, self.got_receive),
            self.rmem_max,
        );
        let send =
            clause(("send", "net.core.wmem_max"), (self.asked_send, self.got_send), self.wmem_max);
        match (receive, send) {
            (Some(receive), Some(send)) => Some(format!("{receive}; {send}")),
            (receive, send) => receive.or(send),
        }
    }
}

/// Sets the sizes of both buffers of `socket`, as far as this user's permissions and the kernel's
/// limits allow, and reports the result.
pub(super) fn size(socket: &Socket, receive: usize, send: usize) -> io::Result<BufferReport> {
    ask(socket, receive, [libc::SO_RCVBUFFORCE, libc::SO_RCVBUF])?;
    ask(socket, send, [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF])?;
    Ok(BufferReport {
        asked_receive: receive,
        got_receive: got(socket, libc::SO_RCVBUF)?,
        asked_send: send,
        got_send: got(socket, libc::SO_SNDBUF)?,
        rmem_max: limit("rmem_max"),
        wmem_max: limit("wmem_max"),
    })
}

/// Requests a buffer size. The forced option ignores the kernel's limit but needs CAP_NET_ADMIN.
/// The kernel caps the plain option at the limit.
fn ask(socket: &Socket, bytes: usize, [force, plain]: [c_int; 2]) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let bytes = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    options::set_int(socket.as_fd(), libc::SOL_SOCKET, force, bytes)
        .or_else(|_| options::set_int(socket.as_fd(), libc::SOL_SOCKET, plain, bytes))
}

/// Returns the granted size. The kernel reports twice that size, because it includes its own
/// overhead.
fn got(socket: &Socket, option: c_int) -> io::Result<usize> {
    let doubled = options::get_int(socket.as_fd(), libc::SOL_SOCKET, option)?;
    Ok(usize::try_from(doubled).unwrap_or(0) / 2)
}

/// Reads one of the kernel's limits; `None` if it cannot be read. Network namespaces other than the
/// initial one may lack the file.
fn limit(name: &str) -> Option<usize> {
    fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok()
}

fn clause(
    (kind, sysctl): (&str, &str),
    (asked, got): (usize, usize),
    limit: Option<usize>,
) -> Option<String> {
    if got >= asked {
        return None;
    }
    let (got, whole) = (bytes(got), bytes(asked));
    let now = limit
        .map_or_else(|| "its current value cannot be read".to_owned(), |max| format!("now {max}"));
    Some(format!(
        "{kind} buffer is {got}, not the requested {whole}; raise {sysctl} to {asked} ({now})"
    ))
}

/// Formats a size in MiB if that is a whole number, else in KiB, or in bytes below one KiB.
fn bytes(count: usize) -> String {
    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;
    match count {
        0..KIB => format!("{count} bytes"),
        MIB.. if count.is_multiple_of(MIB) => format!("{} MiB", count / MIB),
        _ => format!("{} KiB", count / KIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_buffer_has_a_sentence_that_says_what_to_raise() {
        let short = BufferReport {
            asked_receive: 4 << 20,
            got_receive: 212_992,
            asked_send: 1 << 20,
            got_send: 1 << 20,
            rmem_max: Some(212_992),
            wmem_max: None,
        };
        assert_eq!(
            short.shortfall().unwrap(),
            "receive buffer is 208 KiB, not the requested 4 MiB; raise net.core.rmem_max to \
             4194304 (now 212992)"
        );
        let both = BufferReport { got_send: 1_000, ..short };
        assert!(both.shortfall().unwrap().ends_with(
            "; send buffer is 1000 bytes, not the requested 1 MiB; raise net.core.wmem_max to \
             1048576 (its current value cannot be read)"
        ));
        let enough = BufferReport { got_receive: 4 << 20, ..short };
        assert_eq!(enough.shortfall(), None);
        assert_eq!(BufferReport::default().shortfall(), None, "a default size is never too small");
    }
}
