//! Multicast: the sender sends one datagram, and each member of the group receives a copy.
//!
//! All calls select the interface by its index. A member joins on one interface only, and a sender
//! sends through one interface only, regardless of the routing table.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use socket2::{InterfaceIndexOrAddress, Socket};

use crate::interface::Interface;
use crate::{NetError, options};

/// A multicast group on one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Multicast {
    /// The group's address and port.
    pub group: SocketAddr,
    /// The interface to join on.
    pub interface: Interface,
}

impl Multicast {
    /// Returns the address to send to. An IPv6 group gets the interface as its scope, because
    /// groups of link-local scope mean nothing without one.
    #[must_use]
    pub fn destination(&self) -> SocketAddr {
        let mut to = self.group;
        if let SocketAddr::V6(v6) = &mut to {
            v6.set_scope_id(self.interface.index);
        }
        to
    }

    /// Checks whether a socket bound to `bind` can be a member.
    pub(crate) fn check(&self, bind: SocketAddr) -> Result<(), NetError> {
        if !self.group.ip().is_multicast() {
            return Err(NetError::NotMulticast { group: self.group });
        }
        if (bind.ip(), bind.port()) != (self.group.ip(), self.group.port()) {
            return Err(NetError::MemberBind { group: self.group, bind });
        }
        Ok(())
    }
}

/// Makes a bound socket a member of a group.
pub(crate) fn join(socket: &Socket, group: &Multicast) -> Result<(), NetError> {
    let index = group.interface.index;
    let joined = match group.group {
        SocketAddr::V4(v4) => {
            let interface = InterfaceIndexOrAddress::Index(index);
            // Turn off Linux's default, which gives a socket the datagrams of every group joined on
            // the host.
            socket
                .set_multicast_all_v4(false)
                .and_then(|()| socket.join_multicast_v4_n(v4.ip(), &interface))
        }
        SocketAddr::V6(v6) => socket
            .set_multicast_all_v6(false)
            .and_then(|()| socket.join_multicast_v6(v6.ip(), index)),
    };
    let name = &group.interface.name;
    joined.map_err(|cause| NetError::Multicast { interface: name.clone(), cause })
}

/// Makes a socket send multicast through `interface`, with copies to members on this host.
pub(crate) fn prepare_sender(
    socket: &Socket,
    is_ipv6: bool,
    interface: &Interface,
    ttl: u8,
) -> io::Result<()> {
    // Check this first: the kernel accepts the options below for an interface without multicast,
    // but then no datagram arrives.
    if !interface.carries_multicast(is_ipv6) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the interface does not support multicast",
        ));
    }
    if is_ipv6 {
        socket.set_multicast_if_v6(interface.index)?;
        socket.set_multicast_hops_v6(ttl.into())?;
        socket.set_multicast_loop_v6(true)
    } else {
        options::set_multicast_interface_v4(socket.as_fd(), interface.index)?;
        socket.set_multicast_ttl_v4(ttl.into())?;
        socket.set_multicast_loop_v4(true)
    }
}

#[cfg(test)]
mod tests;
