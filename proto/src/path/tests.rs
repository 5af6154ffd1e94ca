use std::string::ToString;
use std::vec;

use super::*;

const HERE: &str = "10.0.0.2:40112";

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A path to a shard. It passes datagrams of up to `up` bytes to the shard and up to `down` bytes
/// back, and loses the first `lost` pings.
struct Link {
    up: u16,
    down: u16,
    lost: usize,
    arrived: u16,
    sent: usize,
}

/// Drives a prover over links until the proof is over. Returns the proven size of each path, and
/// the time that the proof took.
fn prove(links: &mut [Link], wanted: u16) -> (Vec<u16>, Span) {
    let mut now = Time(7);
    let mut prover = Prover::new(now, links.len(), wanted, 1252, &[1452, 1372, 1252, SMALL]);
    let began = now;
    for _ in 0..100 {
        while let Some((shard, size)) = prover.poll_transmit(now) {
            let link = &mut links[shard];
            link.sent += 1;
            if link.sent <= link.lost || size > link.up {
                continue;
            }
            link.arrived = link.arrived.max(size);
            if size <= link.down {
                prover.handle_answer(shard, size, addr(HERE));
            }
        }
        if prover.is_over(now) {
            let passed = prover.passed().iter().map(|passed| passed.size);
            return (passed.collect(), now.since(began));
        }
        assert!(prover.poll_timeout() > now, "the prover's timeout has already passed");
        now = prover.poll_timeout();
    }
    panic!("the proof has not ended after 100 rounds");
}

const fn link(up: u16, down: u16) -> Link {
    Link { up, down, lost: 0, arrived: 0, sent: 0 }
}

#[test]
fn a_path_of_full_size_is_proven_by_one_ping() {
    let mut links = [link(9000, 9000), link(1472, 9000)];
    assert_eq!(prove(&mut links, 1472), (vec![1472, 1472], Span::ZERO));
    assert!(links.iter().all(|link| link.sent == 1));
    assert_eq!(prove(&mut [], 1472), (vec![], Span::ZERO));
}

#[test]
fn the_largest_size_of_the_ladder_that_passes_both_ways_is_found() {
    for (up, down, passes) in
        [(1472, 1471, 1452), (1400, 9000, 1372), (9000, 1260, 1252), (300, 9000, SMALL), (9, 9, 0)]
    {
        let (passed, _) = prove(&mut [link(9000, 9000), link(up, down)], 1472);
        assert_eq!(passed, [1472, passes], "{up} up, {down} down");
    }
}

#[test]
fn a_blocked_path_ends_in_less_than_five_seconds_with_few_pings() {
    let mut links = [link(0, 0)];
    let (passed, took) = prove(&mut links, 1472);
    assert_eq!((passed, took), (vec![0], BLOCKED_PATIENCE));
    assert!(links[0].sent <= 32, "{}", links[0].sent);
}

#[test]
fn lost_pings_make_no_path_narrow() {
    let mut links = [Link { lost: 16, ..link(1472, 1472) }];
    assert_eq!(prove(&mut links, 1472).0, [1472]);
}

#[test]
fn answers_that_were_not_asked_for_change_nothing() {
    let mut prover = Prover::new(Time(0), 1, 1472, 1252, &[1252]);
    for (shard, size) in [(0, 1471), (0, 9000), (1, 1472)] {
        prover.handle_answer(shard, size, addr(HERE));
    }
    assert_eq!(prover.passed(), [Passed::default()]);
}

#[test]
fn what_is_in_the_way_is_named_with_port_direction_and_size() {
    let (shard, caller) = (addr("10.0.0.1:7178"), addr(HERE));
    let find = |size, seen: Option<&str>, arrived| {
        let seen = seen.map(addr);
        Blocked::find(shard, caller, Passed { size, seen }, 1252, arrived)
    };
    assert_eq!(find(1252, Some(HERE), 1252), None);
    assert_eq!(find(1472, Some("[::ffff:10.0.0.2]:40112"), 1472), None);
    for (found, parts) in [
        (
            find(0, None, 0),
            ["arrives at the aggregator's data port 10.0.0.1:7178 (UDP)", "firewall"],
        ),
        (find(0, None, 1472), ["reaches UDP port 40112 of this host", "up to 1472 bytes"]),
        (find(200, Some(HERE), 1472), ["1252 bytes do not come back from", "of 200 bytes do"]),
        (find(200, Some(HERE), 200), ["1252 bytes do not arrive at", "of 200 bytes do"]),
        (find(1472, Some("10.0.0.2:51023"), 1472), ["come from 10.0.0.2:51023", "NAT"]),
        (find(1472, Some("10.0.0.9:40112"), 1472), ["come from 10.0.0.9:40112", "NAT"]),
    ] {
        let text = found.unwrap().to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn a_ping_and_its_answer_are_read_as_written_and_no_other_way() {
    let token = Key([7; Key::LEN]);
    let mut bytes = Vec::new();
    for seen in [None, Some(addr("192.0.2.1:9")), Some(addr("[2001:db8::1]:65535"))] {
        let datagram = Datagram { token, seen, size: 99 };
        datagram.encode(&mut bytes);
        assert_eq!((bytes.len(), Datagram::decode(&bytes)), (99, Some(datagram)));
        assert!(Datagram::is_one(&bytes));
        for len in 0..bytes.len() {
            assert_eq!(Datagram::decode(&bytes[..len]), None, "{len}");
        }
        for (at, wrong) in [(0, 0), (1, b'S'), (2, 2), (3, 2), (39, 98)] {
            let mut changed = bytes.clone();
            changed[at] = wrong;
            assert_eq!(Datagram::decode(&changed), None, "byte {at}");
        }
    }
}
