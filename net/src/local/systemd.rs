//! What systemd gives a service that it starts, and hears from it: `sd_listen_fds(3)` and
//! `sd_notify(3)`, of which a few lines are all that a service needs.

#![expect(unsafe_code, reason = "systemd passes a descriptor by its number")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;

use super::Listener;

/// The first descriptor that systemd passes.
const FIRST: i32 = 3;

/// The socket that systemd has opened for this process, if it has. To be called once, before
/// anything else opens files.
///
/// # Errors
/// A sentence, when what was passed is not one such socket.
pub fn listener_of_systemd() -> Result<Option<Listener>, String> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(several) => return Err(format!("systemd has passed {several} sockets, and not one")),
    }
    // SAFETY: systemd says that it has opened the descriptor for this process, which does not know
    // of it yet.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST) };
    match socket_type(&socket) {
        Ok(SocketType::SEQPACKET) => {
            Listener::of_socket(socket).map(Some).map_err(|error| error.to_string())
        }
        _ => Err("systemd has passed no sequential packet socket; the unit of the socket needs \
                  ListenSequentialPacket="
            .into()),
    }
}

/// Tells systemd, if it has started this process and wants to know, how this process is:
/// `READY=1`, say.
///
/// # Errors
/// The kernel's.
pub fn tell_systemd(state: &str) -> io::Result<()> {
    let Some(at) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let at = match at.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(at)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &at)?;
    Ok(())
}
