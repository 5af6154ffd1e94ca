//! Safe functions for socket options that socket2 lacks.
#![expect(unsafe_code, reason = "getsockopt and setsockopt take raw pointers")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, c_void, socklen_t};

/// Sets an option whose value is an `int`.
pub(crate) fn set_int(
    fd: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    set(fd, level, name, &value)
}

/// Reads an option whose value is an `int`.
pub(crate) fn get_int(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of_option::<c_int>();
    // SAFETY: `value` and `len` are valid for writes, and `len` is the size of `value`.
    let rc = unsafe {
        let value = (&raw mut value).cast::<c_void>();
        libc::getsockopt(fd.as_raw_fd(), level, name, value, &raw mut len)
    };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// Makes this socket send IPv4 multicast through the interface with the index `index`.
///
/// The interface is given by its index, because several interfaces may share an address and an
/// interface may have no address.
pub(crate) fn set_multicast_interface_v4(fd: BorrowedFd<'_>, index: u32) -> io::Result<()> {
    let index = c_int::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
    let any = libc::in_addr { s_addr: 0 };
    let request = libc::ip_mreqn { imr_multiaddr: any, imr_address: any, imr_ifindex: index };
    set(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &request)
}

/// Sets an option to the bytes of `value`, a plain C value.
fn set<T: Copy>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> io::Result<()> {
    let len = size_of_option::<T>();
    // SAFETY: `value` points at `len` readable bytes, and the kernel copies them before it returns.
    let rc = unsafe {
        let value = (&raw const *value).cast::<c_void>();
        libc::setsockopt(fd.as_raw_fd(), level, name, value, len)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

const fn size_of_option<T>() -> socklen_t {
    assert!(size_of::<T>() <= 128, "an option value has at most 128 bytes");
    #[expect(clippy::cast_possible_truncation, reason = "at most 128, asserted just above")]
    let len = size_of::<T>() as socklen_t;
    len
}
