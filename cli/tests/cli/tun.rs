//! TUN devices, for wires that a test makes bad.
#![expect(unsafe_code, reason = "a TUN device is made by ioctl")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A new TUN device: what is read of it is a packet that this host has sent to it, and what is
/// written to it comes here by it.
pub(crate) fn make(name: &str) -> io::Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // The largest that the kernel knows, of which it reads the first two fields.
    let mut request = [0u8; 64];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = libc::IFF_TUN | libc::IFF_NO_PI;
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&flags.to_ne_bytes()[..2]);
    // SAFETY: the descriptor is open, and the request is a `struct ifreq`, or longer.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, request.as_mut_ptr()) };
    if made < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}
