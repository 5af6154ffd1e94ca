//! TUN devices, with which tests simulate a faulty network link.
#![expect(unsafe_code, reason = "only an ioctl creates a TUN device")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Creates a TUN device. Reads return packets that this host has sent to the device, and writes
/// arrive at this host from the device.
pub(crate) fn make(name: &str) -> io::Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // The buffer has room for a `struct ifreq`. The kernel reads only its name and its flags.
    let mut request = [0u8; 64];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = libc::IFF_TUN | libc::IFF_NO_PI;
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&flags.to_ne_bytes()[..2]);
    // SAFETY: the descriptor is open, and the request is at least as long as a `struct ifreq`.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, request.as_mut_ptr()) };
    if made < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}
