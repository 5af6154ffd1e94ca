use racksum_net::auth::Sealer;
use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::ids::{Generation, JobId, OpId, WindowId};
use racksum_proto::peer_text::PeerText;
use racksum_proto::wire::Kind;
use racksum_test_report::lines_logged;
use tracing::Level;

use super::*;
use crate::route::tests::{addr, route};

/// Returns a grant that an aggregator might send.
pub(crate) fn welcome() -> Welcome {
    Welcome {
        job: JobId(7),
        rack: Vec::new(),
        data_ports: vec![5001, 5002],
        rank: Rank(0),
        pool_slots: 8,
        max_ops: 8,
        fragment_payload: 1408,
        in_flight: 1 << 20,
        group: None,
        data_auth: DataAuth::None,
        keys: None,
        sealed: Vec::new(),
        may_move: false,
        in_tree: false,
        first_op: OpId(0),
    }
}

#[test]
fn more_aggregators_than_can_be_waited_for_are_refused() {
    let options = ConnectOptions::new("", "job");
    let named = |count| (1..=count).map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>();
    check(&options, &named(MAX_AGGREGATORS)).unwrap();
    let error = check(&options, &named(MAX_AGGREGATORS + 1)).unwrap_err().to_string();
    assert_eq!(error, "63 aggregators are listed; a job can have at most 62");
}

#[test]
fn a_job_whose_name_others_would_read_otherwise_is_refused() {
    let named = |job: &str| check(&ConnectOptions::new("", job), &["127.0.0.1:1".into()]);
    named("träin \"7\"").unwrap();
    for job in ["a\nb", "a\x1b[31m", "a\u{202e}b", &"x".repeat(PeerText::MAX + 1)] {
        let error = named(job).unwrap_err().to_string();
        assert!(PeerText::is_plain(&error), "{error:?}");
    }
}

#[test]
fn only_a_ping_of_the_job_from_one_of_its_shards_is_one() {
    let options = ConnectOptions {
        generation: Generation(3),
        ..ConnectOptions::new("192.0.2.1:5000", "job")
    };
    let route = route("192.0.2.1:5000", "192.0.2.9:0");
    // The second aggregator's shards are numbers 2 and 3.
    let joining = Joining::new(&options, 1, &route);
    let right = Header::ping(JobId(7), Generation(3), 3);
    let is_ping = |header: &Header, after: &[u8], from: &str| {
        let mut bytes = [0; Header::LEN];
        header.encode(&mut bytes);
        joining.is_ping(&welcome(), &mut [&bytes[..], after].concat(), addr(from))
    };
    assert!(is_ping(&right, &[], "192.0.2.1:5002"));
    for from in ["192.0.2.1:5001", "192.0.2.1:5003", "192.0.2.2:5002"] {
        assert!(!is_ping(&right, &[], from), "{from}");
    }
    let none = WindowId::new(OpId(1), 0);
    for wrong in [
        Header { job: JobId(8), ..right },
        Header { generation: Generation(2), ..right },
        Header { shard: 2, ..right },
        Header { shard: 1, ..right },
        Header { kind: Kind::Credit, ..right },
        Header { lane: 1, ..right },
        Header { window: none, ..right },
        Header { ack: none, ..right },
    ] {
        assert!(!is_ping(&wrong, &[], "192.0.2.1:5002"), "{wrong:?}");
    }
    let body = Header { length: 1, ..right };
    assert!(!is_ping(&body, &[0], "192.0.2.1:5002"));
    assert!(!is_ping(&right, &[0], "192.0.2.1:5002"), "a byte after the message must be refused");
    assert!(!joining.is_ping(&welcome(), &mut b"noise".to_vec(), addr("192.0.2.1:5002")));
}

#[test]
fn where_datagrams_are_authenticated_a_ping_must_be_sealed() {
    // wire: W-57
    let options = ConnectOptions::new("192.0.2.1:5000", "job");
    let route = route("192.0.2.1:5000", "192.0.2.9:0");
    let joining = Joining::new(&options, 0, &route);
    let keys = Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) };
    let granted = Welcome { data_auth: DataAuth::Mac, keys: Some(keys), ..welcome() };
    let mut ping = [0; Header::LEN];
    Header::ping(JobId(7), Generation(0), 1).encode(&mut ping);
    let from = addr("192.0.2.1:5002");
    let bare = udp::Transmit::new(from, &ping, Header::LEN);
    let sealed = |key: &Key| {
        let mut out = Vec::new();
        Sealer::of_shard(DataAuth::Mac, key, 1).unwrap().seal(&bare, &mut out);
        out
    };
    assert!(joining.is_ping(&granted, &mut sealed(&keys.down), from));
    assert!(!joining.is_ping(&granted, &mut sealed(&keys.up), from));
    assert!(!joining.is_ping(&granted, &mut ping.to_vec(), from));
}

#[test]
fn what_is_granted_must_be_what_was_asked_for_and_make_sense() {
    let keys = Some(Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) });
    let granted = |data_auth, keys| Welcome { data_auth, keys, ..welcome() };
    check_auth(&granted(DataAuth::None, None), None).unwrap();
    check_auth(&granted(DataAuth::Aead, keys), Some(DataAuth::Aead)).unwrap();
    // An aggregator whose keys do not match its authentication mode must not be trusted.
    for (auth, keys) in [(DataAuth::Mac, None), (DataAuth::None, keys)] {
        let error = check_auth(&granted(auth, keys), None).unwrap_err();
        assert!(matches!(error, ConnectError::Protocol(_)), "{error}");
    }
    for wanted in [DataAuth::Mac, DataAuth::Aead] {
        let error = check_auth(&granted(DataAuth::None, None), Some(wanted)).unwrap_err();
        assert!(matches!(error, ConnectError::Protocol(_)), "{error}");
    }
}

#[test]
fn an_aggregator_that_says_something_else_each_time_does_not_fill_the_log() {
    const MESSAGES: usize = 20_000;
    let options = ConnectOptions { world: 3, ..ConnectOptions::new("192.0.2.1:5000", "job") };
    let route = route("192.0.2.1:5000", "192.0.2.9:0");
    let mut joining = Joining::new(&options, 0, &route);
    let (controls, early, groups, welcomes) = Default::default();
    let socket = UdpSocket::open(&UdpConfig::new(addr("127.0.0.1:0"))).unwrap();
    let mut session = Session { controls, early, socket, groups, welcomes };
    let written = lines_logged(Level::TRACE, || {
        for i in 0..MESSAGES {
            let queued = FromAggregator::Queued { before: 0, why: i.to_string() };
            joining.take(Event::Received(queued), &mut session).unwrap();
            let missing = vec![if i % 2 == 0 { 1 } else { 2 }];
            let waiting = FromAggregator::Waiting { missing, waited_ms: 0 };
            joining.take(Event::Received(waiting), &mut session).unwrap();
        }
    });
    // The limits allow a burst, which suffices for a well-behaved aggregator, and then a low rate
    // for each kind of line.
    assert!((2..MESSAGES / 20).contains(&written), "{written} lines");
}
