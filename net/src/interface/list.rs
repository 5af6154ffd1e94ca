//! List of the host's interfaces, as the kernel reports them.
#![expect(unsafe_code, reason = "getifaddrs returns a C list, and an ioctl reads the MTU")]

use std::ffi::{CStr, CString};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;

use libc::{c_int, c_uint};

use super::Interface;

/// Returns the interfaces in the network namespace of this process, in the order of their indices.
///
/// # Errors
///
/// The kernel's error if it provides no list, or no socket for reading the MTUs.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let list = AddressList::read()?;
    // The socket only reads MTUs, so its address does not matter.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .or_else(|_| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)))?;
    let mut found: Vec<Interface> = Vec::new();
    for entry in list.entries() {
        // An additional IPv4 address may have a label such as "eth0:1", but it still belongs to
        // eth0.
        let name = entry.name.split(':').next().unwrap_or_default();
        let known = found.iter_mut().find(|interface| interface.name == name);
        let interface = match known {
            Some(interface) => interface,
            None => match describe(socket.as_fd(), name, entry.flags) {
                Ok(interface) => found.push_mut(interface),
                // The interface has disappeared since it was listed.
                Err(_) => continue,
            },
        };
        interface.addrs.extend(entry.addr);
    }
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}

/// Returns the properties of an interface, without its addresses.
fn describe(socket: BorrowedFd<'_>, name: &str, flags: c_uint) -> io::Result<Interface> {
    let is = |flag: c_int| flags & flag.cast_unsigned() != 0;
    Ok(Interface {
        name: name.to_owned(),
        index: index_of(name)?,
        mtu: mtu_of(socket, name)?,
        addrs: Vec::new(),
        is_up: is(libc::IFF_UP),
        is_loopback: is(libc::IFF_LOOPBACK),
        is_multicast: is(libc::IFF_MULTICAST),
    })
}

fn index_of(name: &str) -> io::Result<u32> {
    let name = CString::new(name)?;
    // SAFETY: `name` is a terminated string that outlives the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 { Err(io::Error::last_os_error()) } else { Ok(index) }
}

/// Reads an MTU by ioctl, because `/sys` shows the namespace of the process that mounted it.
fn mtu_of(socket: BorrowedFd<'_>, name: &str) -> io::Result<usize> {
    // SAFETY: an ifreq is plain C data, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // Leave one byte for the terminator of the name.
    let room = request.ifr_name.len() - 1;
    if name.len() > room {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: `request` is a valid ifreq, from which SIOCGIFMTU reads the name and to which it
    // writes the MTU.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so `ifru_mtu` is the field of the union that was written.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    usize::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The list that `getifaddrs` allocated, freed when dropped.
struct AddressList {
    head: *mut libc::ifaddrs,
}

/// One address of an interface. An interface without addresses has an entry too.
struct Entry<'a> {
    name: &'a str,
    flags: c_uint,
    addr: Option<IpAddr>,
}

impl AddressList {
    fn read() -> io::Result<Self> {
        let mut head = ptr::null_mut();
        // SAFETY: `head` is valid for the write of one pointer.
        let rc = unsafe { libc::getifaddrs(&raw mut head) };
        if rc == 0 { Ok(Self { head }) } else { Err(io::Error::last_os_error()) }
    }

    /// Returns the entries whose names are UTF-8. The kernel allows other bytes, which cannot be
    /// printed.
    fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let mut next = self.head;
        std::iter::from_fn(move || {
            // SAFETY: `next` is null or a node of the list, which `self` keeps alive.
            let node = unsafe { next.as_ref() }?;
            next = node.ifa_next;
            Some(node)
        })
        .filter_map(|node| {
            // SAFETY: every node has a terminated name that lives as long as the list.
            let name = unsafe { CStr::from_ptr(node.ifa_name) }.to_str().ok()?;
            // SAFETY: `ifa_addr` is the node's own address, null or valid.
            let addr = unsafe { ip_of(node.ifa_addr) };
            Some(Entry { name, flags: node.ifa_flags, addr })
        })
    }
}

impl Drop for AddressList {
    fn drop(&mut self) {
        // SAFETY: `head` came from `getifaddrs` and is freed only here.
        unsafe { libc::freeifaddrs(self.head) };
    }
}

/// Returns the IP address in a C socket address; `None` for null and for other families.
///
/// # Safety
///
/// `addr` is null, or points to a socket address as large as its family requires.
unsafe fn ip_of(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: `addr` is not null, so the caller guarantees that it starts with a family.
    let family = unsafe { (*addr).sa_family };
    match c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: the family is AF_INET, so the caller guarantees a sockaddr_in.
            let v4 = unsafe { ptr::read_unaligned(addr.cast::<libc::sockaddr_in>()) };
            Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family is AF_INET6, so the caller guarantees a sockaddr_in6.
            let v6 = unsafe { ptr::read_unaligned(addr.cast::<libc::sockaddr_in6>()) };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}
