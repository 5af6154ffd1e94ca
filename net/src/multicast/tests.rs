use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::BytesMut;
use racksum_proto::time::Span;

use super::*;
use crate::interface::{interface_of, interfaces};
use crate::udp::{RECV_CAPACITY, RecvRing, SendRing, Transmit, UdpConfig, UdpSocket, wait};

/// Returns group number `n` of this process, so that concurrent test runs use different groups.
fn group_v4(n: u8) -> SocketAddr {
    let [.., high, low] = std::process::id().to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(239, n, high, low), 40_771))
}

fn sender_on(ip: IpAddr, interface: &Interface) -> UdpSocket {
    let socket = UdpSocket::open(&UdpConfig::new(SocketAddr::new(ip, 0))).unwrap();
    // A TTL of 0 reaches the members on this host, but not the network.
    socket.set_multicast_sender(interface, 0).unwrap();
    socket
}

/// Receives until `want` bytes have arrived, and returns all bytes received.
fn receive(socket: &UdpSocket, want: usize) -> Vec<u8> {
    let mut ring = RecvRing::new();
    let mut buffers = [BytesMut::with_capacity(RECV_CAPACITY)];
    let mut got = Vec::new();
    while got.len() < want {
        let ready = wait(&[socket.as_fd()], Some(Span::from_secs(5))).unwrap();
        assert_eq!(ready, 1, "a datagram arrives in time");
        for _ in 0..socket.recv(&mut ring, &mut buffers).unwrap() {
            got.extend_from_slice(&buffers[0]);
        }
    }
    got
}

/// Checks that two members on one host each receive a window's worth of data.
fn check_two_members(sender_ip: IpAddr, group: SocketAddr) {
    let interface = interface_of(sender_ip).expect("the sender's address belongs to an interface");
    let group = Multicast { group, interface };
    let members = [
        UdpSocket::open_member(&group, 1 << 20).unwrap(),
        UdpSocket::open_member(&group, 1 << 20).unwrap(),
    ];
    let sender = sender_on(sender_ip, &group.interface);
    let contents: Vec<u8> = (0..20 * 1200).map(|i| u8::try_from(i % 253).unwrap()).collect();
    let transmit = Transmit::new(group.destination(), &contents, 1200);
    assert_eq!(sender.send(&mut SendRing::new(), &[transmit]).sent, 1);
    for member in &members {
        assert_eq!(receive(member, contents.len()), contents);
    }
}

#[test]
fn each_member_on_this_host_gets_a_copy() {
    check_two_members(Ipv4Addr::LOCALHOST.into(), group_v4(1));
}

#[test]
fn each_member_on_this_host_gets_a_copy_over_ipv6() {
    // Loopback does not work here: Linux does not route IPv6 multicast to it, and does not deliver
    // such datagrams even if a socket selects loopback.
    let found = interfaces().unwrap().into_iter().find_map(|interface| {
        let fits = interface.is_up && interface.is_multicast && !interface.is_loopback;
        let global = |ip: &&IpAddr| matches!(ip, IpAddr::V6(v6) if !v6.is_unicast_link_local());
        interface.addrs.iter().find(global).copied().filter(|_| fits)
    });
    let Some(sender_ip) = found else {
        racksum_test_report::skip(
            "no interface of this host has both multicast and a global IPv6 address",
        );
        return;
    };
    let [.., high, low] = std::process::id().to_be_bytes();
    let id = u16::from_be_bytes([high, low]);
    let group = SocketAddr::from((Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0x77, id), 40_771));
    check_two_members(sender_ip, group);
}

#[test]
fn a_member_gets_nothing_of_another_group() {
    let interface = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
    let [mine, other] =
        [2, 3].map(|n| Multicast { group: group_v4(n), interface: interface.clone() });
    let (member, stranger) =
        (UdpSocket::open_member(&mine, 0).unwrap(), UdpSocket::open_member(&other, 0).unwrap());
    let sender = sender_on(Ipv4Addr::LOCALHOST.into(), &interface);
    let to_other = Transmit::new(other.destination(), b"other", 5);
    let to_mine = Transmit::new(mine.destination(), b"mine", 4);
    assert_eq!(sender.send(&mut SendRing::new(), &[to_other, to_mine]).sent, 2);
    assert_eq!(receive(&member, 1), b"mine");
    assert_eq!(receive(&stranger, 1), b"other");
}

#[test]
fn what_is_no_group_is_refused_with_a_reason() {
    let interface = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
    let unicast = Multicast { group: "10.1.2.3:7000".parse().unwrap(), interface };
    let error = UdpSocket::open_member(&unicast, 0).unwrap_err();
    let NetError::NotMulticast { group } = error else { panic!("{error}") };
    assert_eq!(group, unicast.group);
    let group = Multicast { group: "239.1.2.3:7000".parse().unwrap(), ..unicast };
    let config = UdpConfig { bind: "127.0.0.1:7000".parse().unwrap(), ..UdpConfig::member(group) };
    let error = UdpSocket::open(&config).unwrap_err();
    assert!(matches!(error, NetError::MemberBind { .. }), "{error}");
}

#[test]
fn an_interface_that_is_gone_is_an_error_that_names_it() {
    let interface = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
    let gone = Interface { name: "gone0".to_owned(), index: 2_000_000, ..interface };
    let group = Multicast { group: group_v4(4), interface: gone.clone() };
    let error = UdpSocket::open_member(&group, 0).unwrap_err().to_string();
    assert!(error.starts_with("cannot use gone0 for multicast: "), "{error}");
    let sender = UdpSocket::open(&UdpConfig::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let error = sender.set_multicast_sender(&gone, 1).unwrap_err();
    let NetError::Multicast { interface, cause } = error else { panic!("{error}") };
    assert_eq!((interface.as_str(), cause.kind()), ("gone0", io::ErrorKind::AddrNotAvailable));
}

#[test]
fn an_interface_that_does_not_multicast_is_refused_and_loopback_does_for_ipv4() {
    let loopback = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
    assert!(loopback.carries_multicast(false) && !loopback.carries_multicast(true));
    let plain = Interface { is_loopback: false, is_multicast: false, ..loopback.clone() };
    for (bind, interface) in [("127.0.0.1:0", &plain), ("[::1]:0", &loopback)] {
        let sender = UdpSocket::open(&UdpConfig::new(bind.parse().unwrap())).unwrap();
        let error = sender.set_multicast_sender(interface, 1).unwrap_err();
        let NetError::Multicast { interface, cause } = error else { panic!("{error}") };
        assert_eq!((interface.as_str(), cause.kind()), ("lo", io::ErrorKind::Unsupported));
    }
}

#[test]
fn an_ipv6_group_gets_its_interface_as_scope() {
    let interface = interface_of(Ipv4Addr::LOCALHOST.into()).unwrap();
    let index = interface.index;
    let group = Multicast { group: "[ff12::1]:7000".parse().unwrap(), interface };
    assert!(matches!(group.destination(), SocketAddr::V6(v6) if v6.scope_id() == index));
}
