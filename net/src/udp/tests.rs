use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::thread;

use bytes::BytesMut;
use racksum_proto::time::Span;
use racksum_test_report::skip;

use super::*;
use crate::NetError;

const PATIENCE: Span = Span::from_secs(100);

fn open(ip: impl Into<IpAddr>) -> UdpSocket {
    UdpSocket::open(&UdpConfig::new(SocketAddr::new(ip.into(), 0))).unwrap()
}

fn loopback() -> UdpSocket {
    open(Ipv4Addr::LOCALHOST)
}

fn buffers(count: usize) -> Vec<BytesMut> {
    (0..count).map(|_| BytesMut::with_capacity(RECV_CAPACITY)).collect()
}

/// Returns bytes that vary by position, so that a misplaced datagram is detected.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from(i * 7 % 251).unwrap()).collect()
}

/// Receives messages until `want` bytes have arrived; returns each with its metadata.
fn receive(socket: &UdpSocket, want: usize) -> Vec<(Received, Vec<u8>)> {
    let (mut ring, mut buffers) = (RecvRing::new(), buffers(4));
    let mut got = Vec::new();
    while got.iter().map(|(_, bytes): &(Received, Vec<u8>)| bytes.len()).sum::<usize>() < want {
        assert_eq!(
            wait(&[socket.as_fd()], Some(PATIENCE)).unwrap(),
            1,
            "a message arrives in time"
        );
        let count = socket.recv(&mut ring, &mut buffers).unwrap();
        got.extend((0..count).map(|i| (ring.meta(i), buffers[i].to_vec())));
    }
    got
}

fn send_all(socket: &UdpSocket, batch: &[Transmit<'_>]) {
    let outcome = socket.send(&mut SendRing::new(), batch);
    assert_eq!(outcome, SendOutcome { sent: batch.len(), ..SendOutcome::default() });
}

fn check_segments_come_back(sender: &UdpSocket, receiver: &UdpSocket, stride: usize) {
    let contents = pattern(19 * stride + 700);
    send_all(sender, &[Transmit::new(receiver.local_addr(), &contents, stride)]);
    let got = receive(receiver, contents.len());
    for (meta, bytes) in &got {
        assert_eq!(meta.from, sender.local_addr());
        assert_eq!(meta.len, bytes.len());
        assert!(meta.stride == stride || bytes.len() == meta.stride && meta.stride == 700);
        assert!(!meta.ce);
    }
    let whole: Vec<u8> = got.into_iter().flat_map(|(_, bytes)| bytes).collect();
    assert_eq!(whole, contents);
}

#[test]
fn a_segmented_message_comes_back_with_its_stride() {
    let (sender, receiver) = (loopback(), loopback());
    assert!(sender.gso_enabled() && receiver.gro_enabled(), "this test needs Linux 5.0 or newer");
    check_segments_come_back(&sender, &receiver, 1472);
    assert!(sender.gso_enabled());
}

#[test]
fn segments_come_back_over_ipv6() {
    if crate::interface::interface_of(Ipv6Addr::LOCALHOST.into()).is_none() {
        skip("this host has no ::1");
        return;
    }
    check_segments_come_back(&open(Ipv6Addr::LOCALHOST), &open(Ipv6Addr::LOCALHOST), 1452);
}

#[test]
fn without_gso_the_same_datagrams_go_singly() {
    let (sender, receiver) = (loopback(), loopback());
    sender.set_gso(false);
    assert_eq!(sender.max_gso_segments(), 1);
    check_segments_come_back(&sender, &receiver, 1472);
    // These datagrams exceed the batch of one system call.
    let contents = pattern(64 * 100);
    send_all(&sender, &[Transmit::new(receiver.local_addr(), &contents, 100)]);
    let got = receive(&receiver, contents.len());
    assert_eq!(got.len(), 64);
    assert!(got.iter().all(|(meta, _)| meta.stride == 100));
}

#[test]
fn a_socket_that_cannot_segment_turns_to_single_datagrams_for_good() {
    let (sender, receiver) = (loopback(), loopback());
    // Without checksums the kernel refuses to segment, as it does for drivers that cannot.
    crate::options::set_int(sender.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    assert!(sender.gso_enabled());
    check_segments_come_back(&sender, &receiver, 1472);
    assert!(!sender.gso_enabled());
    check_segments_come_back(&sender, &receiver, 1472);
}

#[test]
fn a_message_that_fails_singly_too_leaves_gso_on() {
    let (sender, receiver) = (loopback(), loopback());
    // The kernel refuses port 0 with the errno of a driver that cannot segment.
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let contents = pattern(3_000);
    let batch = [
        Transmit::new(nowhere, &contents, 1000),
        Transmit::new(receiver.local_addr(), &contents, 1000),
    ];
    let outcome = sender.send(&mut SendRing::new(), &batch);
    assert_eq!((outcome.sent, outcome.failed, outcome.blocked), (1, 1, false));
    assert_eq!(outcome.last_error, Some(SendError::Os(libc::EINVAL)));
    assert!(sender.gso_enabled());
    assert_eq!(receive(&receiver, 3_000)[0].0.stride, 1000);
}

#[test]
fn large_datagrams_pass_whole() {
    let (sender, receiver) = (loopback(), loopback());
    for len in [32 * 1024, MAX_DATAGRAM] {
        let contents = pattern(len);
        let transmit = Transmit::new(receiver.local_addr(), &contents, len);
        send_all(&sender, &[transmit, transmit]);
        let got = receive(&receiver, 2 * len);
        assert_eq!(got.len(), 2);
        for (meta, bytes) in got {
            assert_eq!((meta.len, meta.stride), (len, len));
            assert_eq!(bytes, contents);
        }
    }
}

#[test]
fn more_transmits_than_one_call_takes_arrive_in_order() {
    let (sender, receiver) = (loopback(), loopback());
    let contents = pattern(2 * SEND_BATCH + 5);
    let batch: Vec<Transmit<'_>> = contents
        .chunks(1)
        .map(|contents| Transmit::new(receiver.local_addr(), contents, 1))
        .collect();
    send_all(&sender, &batch);
    let got = receive(&receiver, contents.len());
    assert_eq!(got.into_iter().flat_map(|(_, bytes)| bytes).collect::<Vec<_>>(), contents);
}

#[test]
fn what_the_kernel_refuses_is_counted() {
    let (sender, receiver) = (loopback(), loopback());
    let good = Transmit::new(receiver.local_addr(), b"good", 4);
    let elsewhere = "[::1]:9".parse().unwrap();
    let bad = Transmit::new(elsewhere, b"bad", 3);
    sender.send_patiently(&mut SendRing::new(), &[good, bad, good, bad], 2);
    assert_eq!(receive(&receiver, 8).len(), 2);
    assert_eq!((sender.send_failures(), receiver.send_failures()), (2, 0));
}

#[test]
fn a_datagram_from_three_places_arrives_as_one() {
    let (sender, receiver) = (loopback(), loopback());
    let to = receiver.local_addr();
    let contents = pattern(60_000);
    let cuts = [(48, 59_940), (48, 59_952), (0, 60_000), (60_000, 0), (59_988, 0), (0, 0)];
    for ((head, tail), gso) in cuts.into_iter().zip([true, false].into_iter().cycle()) {
        sender.set_gso(gso);
        let (contents, rest) = contents.split_at(head);
        let (tail, trailer) = rest.split_at(tail);
        let before = Transmit::new(to, b"before", 6);
        send_all(
            &sender,
            &[before, Transmit::in_parts(to, contents, tail.into(), trailer), before],
        );
        let got: Vec<_> = receive(&receiver, 60_012).into_iter().map(|(_, bytes)| bytes).collect();
        assert_eq!(got, [b"before".to_vec(), pattern(60_000), b"before".to_vec()]);
    }
}

#[test]
fn a_transmit_that_breaks_a_bound_is_reported_and_passed_over() {
    let (sender, receiver) = (loopback(), loopback());
    let to = receiver.local_addr();
    let contents = pattern(MAX_DATAGRAM + 1);
    let good = Transmit::new(to, &contents[..10], 10);
    let bad = [
        Transmit::new(to, &[], 10),
        Transmit::new(to, &contents[..10], 0),
        Transmit::new(to, &contents[..65], 1),
        Transmit::new(to, &contents, MAX_DATAGRAM),
        Transmit {
            stride: 10,
            ..Transmit::in_parts(to, &contents[..10], contents[..10].into(), &[])
        },
        Transmit {
            stride: 10,
            ..Transmit::in_parts(to, &contents[..10], Tail::EMPTY, &contents[..10])
        },
        Transmit::in_parts(to, &contents[..1], contents[..].into(), &[]),
        Transmit::in_parts(to, &contents[..1], Tail::EMPTY, &contents),
    ];
    for bad in bad {
        assert_eq!(bad.datagrams(), None);
        let outcome = sender.send(&mut SendRing::new(), &[good, bad, good]);
        assert_eq!((outcome.sent, outcome.failed), (2, 1));
        assert_eq!(outcome.last_error, Some(SendError::Unsendable));
        assert_eq!(receive(&receiver, 20).len(), 2);
    }
    assert_eq!(good.datagrams(), Some(1));
}

#[test]
fn a_datagram_above_the_mtu_is_reported_as_such() {
    // Loopback over IPv6 carries packets of 65,536 bytes, 48 of them headers.
    if crate::interface::interface_of(Ipv6Addr::LOCALHOST.into()).is_none_or(|i| i.mtu != 65_536) {
        skip("this host has no ::1 with an MTU of 65536");
        return;
    }
    let (sender, receiver) = (open(Ipv6Addr::LOCALHOST), open(Ipv6Addr::LOCALHOST));
    let contents = pattern(MAX_DATAGRAM);
    let to = receiver.local_addr();
    let outcome = sender.send(&mut SendRing::new(), &[Transmit::new(to, &contents, MAX_DATAGRAM)]);
    assert_eq!(outcome.last_error, Some(SendError::TooLarge));
    assert!(outcome.last_error.unwrap().to_string().contains("MTU"));
}

#[test]
fn an_idle_socket_has_room_to_send() {
    let socket = loopback();
    assert!(wait_writable(socket.as_fd(), Some(PATIENCE)).unwrap());
    assert_eq!(wait(&[socket.as_fd()], Some(Span::ZERO)).unwrap(), 0);
}

#[test]
fn a_message_too_large_for_its_buffer_is_skipped_and_counted() {
    let (sender, receiver) = (loopback(), loopback());
    let contents = pattern(2000);
    let to = receiver.local_addr();
    send_all(&sender, &[Transmit::new(to, &contents, 2000)]);
    wait(&[receiver.as_fd()], Some(PATIENCE)).unwrap();
    let (mut ring, mut small) = (RecvRing::new(), [BytesMut::with_capacity(64)]);
    assert_eq!(receiver.recv(&mut ring, &mut small).unwrap(), 1);
    assert_eq!((ring.meta(0).len, small[0].len()), (0, 0));
    assert_eq!(receiver.truncated(), 1);
}

#[test]
fn large_messages_are_received_a_few_at_a_time() {
    let (sender, receiver) = (loopback(), loopback());
    let (mut ring, mut buffers) = (RecvRing::new(), buffers(RECV_BATCH));
    let mut arrive = |len: usize| {
        let contents = pattern(len);
        let message = Transmit::new(receiver.local_addr(), &contents, len);
        send_all(&sender, &[message; 3]);
        std::iter::from_fn(|| match receiver.recv(&mut ring, &mut buffers).unwrap() {
            0 => None,
            count => Some((count, ring.is_full())),
        })
        .collect::<Vec<_>>()
    };
    assert_eq!(arrive(61_440), [(3, false)], "no earlier batch limits this one");
    assert_eq!(arrive(61_440), [(2, true), (1, false)]);
    assert_eq!(arrive(100), [(2, true), (1, false)]);
    assert_eq!(arrive(100), [(3, false)]);
}

#[test]
fn as_many_messages_as_there_are_buffers_may_not_be_all() {
    let (sender, receiver) = (loopback(), loopback());
    let (mut ring, mut one) = (RecvRing::new(), buffers(1));
    assert!(!ring.is_full());
    send_all(&sender, &[Transmit::new(receiver.local_addr(), b"sum", 3); 2]);
    assert!(receiver.peek(&mut ring, &mut [0; 3]).unwrap().is_some());
    assert!(!ring.is_full(), "a peek takes nothing");
    assert_eq!(receiver.recv(&mut ring, &mut []).unwrap(), 0);
    assert!(!ring.is_full(), "the call requested no message");
    for full in [true, true, false] {
        assert_eq!(receiver.recv(&mut ring, &mut one).unwrap() == 1, full);
        assert_eq!(ring.is_full(), full);
    }
}

#[test]
fn receiving_fills_cleared_buffers_in_place_and_leaves_the_rest_alone() {
    let (sender, receiver) = (loopback(), loopback());
    let mut ring = RecvRing::new();
    assert_eq!(receiver.recv(&mut ring, &mut buffers(2)).unwrap(), 0, "no message is pending");
    assert_eq!(receiver.recv(&mut ring, &mut []).unwrap(), 0);
    send_all(&sender, &[Transmit::new(receiver.local_addr(), b"sum", 3)]);
    wait(&[receiver.as_fd()], Some(PATIENCE)).unwrap();
    let mut two = buffers(2);
    two[0].extend_from_slice(b"of an earlier use");
    let at = two[0].as_ptr();
    assert_eq!(receiver.recv(&mut ring, &mut two).unwrap(), 1);
    assert_eq!(&two[0][..], b"sum");
    assert_eq!(two[0].as_ptr(), at, "written in place");
    assert!(two[1].is_empty());
    assert_eq!(ring.received().len(), 1);
}

#[test]
fn a_message_that_was_peeked_at_is_taken_in_two_pieces() {
    let (sender, receiver) = (loopback(), loopback());
    let mut ring = RecvRing::new();
    let mut head = [0; 4];
    assert_eq!(receiver.peek(&mut ring, &mut head).unwrap(), None, "no message is pending");
    let none = receiver.take_peeked(&mut head, &mut []).unwrap_err();
    assert_eq!(none.kind(), std::io::ErrorKind::WouldBlock);
    let to = receiver.local_addr();
    let (one, two) = (pattern(1000), pattern(3000));
    send_all(&sender, &[Transmit::new(to, &one, 1000), Transmit::new(to, &two, 1000)]);
    wait(&[receiver.as_fd()], Some(PATIENCE)).unwrap();
    for _ in 0..2 {
        let seen = receiver.peek(&mut ring, &mut head).unwrap().unwrap();
        assert_eq!((seen.from, seen.len), (sender.local_addr(), 1000), "a peek takes nothing");
        assert_eq!(head, one[..4]);
    }
    let mut tail = [0; 996];
    assert_eq!(receiver.take_peeked(&mut head, &mut tail).unwrap(), 1000);
    assert_eq!([&head[..], &tail].concat(), one);
    let seen = receiver.peek(&mut ring, &mut head).unwrap().unwrap();
    assert_eq!(
        (seen.len, seen.stride),
        (3000, 1000),
        "the peek shows all datagrams that the kernel joined"
    );
    assert_eq!(receiver.take_peeked(&mut head, &mut tail).unwrap(), 1000, "the rest is lost");
    assert_eq!(receiver.peek(&mut ring, &mut head).unwrap(), None);
    assert_eq!(receiver.truncated(), 0, "a peek shows the length");
}

#[test]
fn a_message_shorter_than_the_head_is_shown_too() {
    let (sender, receiver) = (loopback(), loopback());
    send_all(&sender, &[Transmit::new(receiver.local_addr(), b"sum", 3)]);
    wait(&[receiver.as_fd()], Some(PATIENCE)).unwrap();
    let (mut ring, mut head) = (RecvRing::new(), [0; 4]);
    assert_eq!(receiver.peek(&mut ring, &mut head).unwrap().unwrap().len, 3);
    assert_eq!(&head, b"sum\0");
}

#[test]
fn a_queues_mark_is_seen_and_ecn_capable_is_not_one() {
    let (sender, receiver) = (loopback(), loopback());
    check_marks(&sender, &receiver);
    if crate::interface::interface_of(Ipv6Addr::LOCALHOST.into()).is_none() {
        skip("the IPv6 part of the test: this host has no ::1");
        return;
    }
    check_marks(&open(Ipv6Addr::LOCALHOST), &open(Ipv6Addr::LOCALHOST));
}

fn check_marks(sender: &UdpSocket, receiver: &UdpSocket) {
    let mut ring = SendRing::new();
    let one = Transmit::new(receiver.local_addr(), b"x", 1);
    for (tos, ce) in
        [(None, false), (Some(CE), true), (Some(tos_of_dscp(46)), false), (Some(0xb8 | CE), true)]
    {
        ring.set_tos(tos);
        assert_eq!(sender.send(&mut ring, &[one]).sent, 1);
        assert_eq!(receive(receiver, 1)[0].0.ce, ce, "{tos:?}");
    }
}

#[test]
fn a_datagram_arrives_with_the_mark_of_its_lane() {
    let (sender, receiver) = (loopback(), loopback());
    check_lanes(&sender, &receiver);
    if crate::interface::interface_of(Ipv6Addr::LOCALHOST.into()).is_none() {
        skip("the IPv6 part of the test: this host has no ::1");
        return;
    }
    check_lanes(&open(Ipv6Addr::LOCALHOST), &open(Ipv6Addr::LOCALHOST));
}

fn check_lanes(sender: &UdpSocket, receiver: &UdpSocket) {
    let mut ring = SendRing::new();
    let one = Transmit::new(receiver.local_addr(), &[7; 3000], 1000);
    // AF41, AF31, AF21, AF11 and best effort, each marked ECT(0) so that queues mark instead of
    // dropping.
    let dscps = [34, 26, 18, 10, 0, 0, 0, 0];
    for (lane, dscp) in (0..).zip(dscps) {
        ring.set_tos(tos_of_lane(lane, 8));
        assert_eq!(sender.send(&mut ring, &[one]).sent, 1);
        for (meta, _) in receive(receiver, 3000) {
            assert_eq!(meta.tos, dscp << 2 | ECT0, "lane {lane}");
        }
    }
    ring.set_tos(tos_of_lane(0, 1));
    assert_eq!(sender.send(&mut ring, &[one]).sent, 1);
    assert!(
        receive(receiver, 3000).iter().all(|(meta, _)| meta.tos == ECT0),
        "a single lane has no priority"
    );
}

#[test]
fn a_sockets_own_mark_is_on_what_it_sends() {
    let config = UdpConfig { tos: CE, ..UdpConfig::new("127.0.0.1:0".parse().unwrap()) };
    let (sender, receiver) = (UdpSocket::open(&config).unwrap(), loopback());
    send_all(&sender, &[Transmit::new(receiver.local_addr(), b"x", 1)]);
    assert!(receive(&receiver, 1)[0].0.ce);
}

#[test]
fn the_kernels_drops_are_counted() {
    let config = UdpConfig {
        receive_buffer: 4096,
        ..UdpConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let (sender, receiver) = (loopback(), UdpSocket::open(&config).unwrap());
    let contents = pattern(1000);
    let one = Transmit::new(receiver.local_addr(), &contents, 1000);
    send_all(&sender, &[one; 100]);
    let (mut ring, mut buffers) = (RecvRing::new(), buffers(RECV_BATCH));
    let mut kept = 0;
    loop {
        match receiver.recv(&mut ring, &mut buffers).unwrap() {
            0 => break,
            count => kept += count,
        }
    }
    assert!(kept < 100, "a tiny buffer cannot hold 100 messages");
    // The next message reports the kernel's counter.
    send_all(&sender, &[one]);
    receive(&receiver, 1000);
    assert_eq!(receiver.drops(), 100 - kept as u64);
}

#[test]
fn the_drop_counter_outlives_its_32_bits() {
    let socket = loopback();
    for (counter, known) in [
        (u32::MAX / 2, u64::from(u32::MAX / 2)),
        (u32::MAX - 1, u64::from(u32::MAX - 1)),
        (3, (1 << 32) + 3),
        (1, (1 << 32) + 3),
    ] {
        socket.note_drops(counter);
        assert_eq!(socket.drops(), known);
    }
}

#[test]
fn the_buffers_that_were_got_are_reported() {
    let config = UdpConfig {
        receive_buffer: 64 << 10,
        send_buffer: 0,
        ..UdpConfig::new(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    };
    let socket = UdpSocket::open(&config).unwrap();
    let report = socket.report();
    assert_eq!((report.asked_receive, report.got_receive), (64 << 10, 64 << 10));
    assert!(report.got_send > 0);
    assert_eq!(report.shortfall(), None);
}

#[test]
fn a_taken_port_is_an_error_that_names_it() {
    let holder = loopback();
    let addr = holder.local_addr();
    let error = UdpSocket::open(&UdpConfig::new(addr)).unwrap_err();
    assert!(matches!(error, NetError::PortTaken { addr: taken } if taken == addr), "{error}");
    let elsewhere = SocketAddr::from(([203, 0, 113, 77], 7000));
    let error = UdpSocket::open(&UdpConfig::new(elsewhere)).unwrap_err();
    assert!(matches!(error, NetError::AddressNotHere { addr } if addr == elsewhere), "{error}");
}

#[test]
fn a_waker_ends_a_wait_from_another_thread() {
    let (waker, socket) = (Waker::new().unwrap(), loopback());
    let fds = [socket.as_fd(), waker.as_fd()];
    assert_eq!(wait(&fds, Some(Span::from_micros(100))).unwrap(), 0, "nothing is ready");
    let other = waker.clone();
    let thread = thread::spawn(move || {
        other.wake();
        other.wake();
    });
    assert_eq!(wait(&fds, Some(PATIENCE)).unwrap(), 0b10);
    thread.join().unwrap();
    assert!(waker.drain());
    assert!(!waker.drain(), "a drained waker is not ready");
    assert_eq!(wait(&fds, Some(Span::ZERO)).unwrap(), 0);
}

#[test]
fn more_descriptors_than_bits_are_refused() {
    let waker = Waker::new().unwrap();
    let many = [waker.as_fd(); 65];
    assert!(wait(&many, Some(Span::ZERO)).is_err());
    waker.wake();
    assert_eq!(wait(&many[..64], None).unwrap(), u64::MAX);
}

#[test]
fn sockets_and_rings_go_to_other_threads() {
    fn check<T: Send>() {}
    fn check_shared<T: Sync>() {}
    check::<UdpSocket>();
    check_shared::<UdpSocket>();
    check_shared::<Waker>();
    check::<SendRing>();
    check::<RecvRing>();
}

#[test]
fn what_is_refused_is_dropped_and_all_else_arrives() {
    for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let (receiver, refused, other) = (open(ip), open(ip), open(ip));
        // The last refused sender differs from `other` only in its port. The rest share only parts
        // of their addresses with `other`.
        let mut senders: Vec<SocketAddr> =
            ["127.0.1.1:7", "[::1:0:1]:7", "[1::1]:7"].map(|it| it.parse().unwrap()).into();
        senders.push(refused.local_addr());
        receiver.refuse(&senders).unwrap();
        refused.send_one(receiver.local_addr(), b"refused").unwrap();
        other.send_one(receiver.local_addr(), b"taken").unwrap();
        let [(meta, bytes)] = &receive(&receiver, 5)[..] else { panic!("one message") };
        assert_eq!((meta.from, &bytes[..]), (other.local_addr(), &b"taken"[..]));
        for none in [&[][..], &[]] {
            receiver.refuse(none).unwrap();
        }
        refused.send_one(receiver.local_addr(), b"again").unwrap();
        assert_eq!(receive(&receiver, 5)[0].1, b"again");
    }
}

#[test]
fn as_many_senders_may_be_refused_as_a_program_holds() {
    let senders: Vec<SocketAddr> = (1..=64).map(|port| ([127, 0, 0, 1], port).into()).collect();
    let socket = loopback();
    socket.refuse(&senders).unwrap();
    socket.refuse(&senders.repeat(1000)).unwrap_err();
}

#[test]
fn a_buffer_is_full_until_it_is_read() {
    let (sender, receiver) = (loopback(), loopback());
    let contents = pattern(1000);
    let transmit = Transmit::new(receiver.local_addr(), &contents, 1000);
    while receiver.drops() == 0 && !receiver.is_full() {
        send_all(&sender, &[transmit]);
    }
    assert!(receiver.is_full());
    while receiver.is_full() {
        receive(&receiver, 1000);
    }
    assert!(!sender.is_full());
}
