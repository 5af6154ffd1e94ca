//! Parts of `sd_listen_fds(3)` and `sd_notify(3)` that a service needs: taking the socket that
//! systemd passes, and reporting the service's state.

#![expect(unsafe_code, reason = "systemd passes a descriptor by its number")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;

use super::Listener;

/// Number of the first descriptor that systemd passes.
const FIRST: i32 = 3;

/// Returns the socket that systemd opened for this process, if any. Call this once, before the
/// process opens other files.
///
/// # Errors
/// Returns a message if systemd passed several sockets or a socket of the wrong type, or if too
/// many files are open.
pub fn listener_of_systemd() -> Result<Option<Listener>, String> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(several) => {
            return Err(format!(
                "systemd passed {several} sockets; keep only one in the socket unit"
            ));
        }
    }
    // SAFETY: systemd opened the descriptor for this process, and no other code of the process uses
    // it.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST) };
    match socket_type(&socket) {
        Ok(SocketType::SEQPACKET) => {
            Listener::of_socket(socket).map(Some).map_err(|error| error.to_string())
        }
        _ => Err(
            "systemd passed a socket that is not SOCK_SEQPACKET; set ListenSequentialPacket= in \
             the socket unit"
                .into(),
        ),
    }
}

/// Sends this process's state, such as `READY=1`, to systemd, if systemd requests it.
///
/// # Errors
/// Returns the kernel's error.
pub fn notify_systemd(state: &str) -> io::Result<()> {
    let Some(at) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let at = match at.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(at)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &at)?;
    Ok(())
}
