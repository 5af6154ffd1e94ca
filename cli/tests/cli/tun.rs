//! TUN devices for wires with faults.
#![expect(unsafe_code, reason = "a TUN device is made by ioctl")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Creates a TUN device. Reads return packets that this host has sent to the device, and writes
/// arrive at this host from the device.
pub(crate) fn make(name: &str) -> io::Result<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // The buffer has the kernel's largest size of the request, of which it reads the first two
    // fields.
    let mut request = [0u8; 64];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = libc::IFF_TUN | libc::IFF_NO_PI;
    request[libc::IFNAMSIZ..][..2].copy_from_slice(&flags.to_ne_bytes()[..2]);
    // SAFETY: the descriptor is open, and the request is a `struct ifreq`, or longer.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, request.as_mut_ptr()) };
    if made < 0 { Err(io::Error::last_os_error()) } else { Ok(file) }
}
