//! How a worker sends data, and handles results and nacks.

use racksum_proto::ids::{Generation, JobId, OpId, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::time::Time;
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Flags, Header, Kind, NackEntry, OpenDecoder};
use racksum_proto::worker::{Config, Worker};

use crate::rank::{Machine, Sent, credit, everything_from, fail, nack, result, sum};
use crate::support::{TIMEOUT, datagram, header, window, worker};

#[test]
fn what_is_not_of_the_job_is_rejected_by_the_reason() {
    // wire: W-7, W-8, W-9, W-10
    let mut rank = Machine::new();
    let good = header(Kind::Credit, Rank::AGGREGATOR);
    assert_eq!(rank.take(&datagram(good, &[])), Verdict::Control);
    for (bad, reject) in [
        (Header { job: JobId(8), ..good }, Reject::Job),
        (Header { generation: Generation(2), ..good }, Reject::Generation),
        (Header { sender: Rank(1), ..good }, Reject::Sender),
        (Header { lane: 1, ..good }, Reject::Stream),
        (Header { shard: 1, ..good }, Reject::Stream),
    ] {
        assert_eq!(rank.reject(&datagram(bad, &[])), reject);
    }
    assert_eq!(rank.events.rejects.total(), 5);
}

#[test]
fn a_kind_that_aggregators_do_not_send_is_rejected() {
    // wire: W-25, W-26
    let mut rank = Machine::new();
    for kind in [Kind::Open, Kind::Data, Kind::Ack] {
        assert_eq!(rank.reject(&datagram(header(kind, Rank::AGGREGATOR), &[])), Reject::Kind);
    }
    for kind in [Kind::Credit, Kind::Ping] {
        assert_eq!(rank.reject(&datagram(header(kind, Rank::AGGREGATOR), &[0])), Reject::Body);
        assert_eq!(rank.take(&datagram(header(kind, Rank::AGGREGATOR), &[])), Verdict::Control);
    }
}

#[test]
fn results_of_another_shape_than_their_window_are_rejected() {
    // wire: W-11, W-21, W-23, W-29
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    assert_eq!(rank.reject(&result(window(0, 1), None)), Reject::Unopened);
    rank.sent();
    let header = header(Kind::Result, Rank::AGGREGATOR);
    let good = Header { window: window(0, 1), mask: 0b11, previous: 0, ..header };
    let first = [0; 1024];
    for (bad, body, reject) in [
        (Header { window: window(0, 3), ..good }, &first[..], Reject::Unopened),
        (Header { mask: 1 << 60, ..good }, &first[..1024], Reject::Shape),
        (Header { fragment: 2, ..good }, &[], Reject::Shape),
        (good, &first[..1023], Reject::Shape),
        (Header { previous: 1, ..good }, &first, Reject::Shape),
        (Header { previous: 2, ..good }, &first, Reject::Shape),
        (Header { previous: 7, ..good }, &first, Reject::Shape),
    ] {
        assert_eq!(rank.reject(&datagram(bad, body)), reject);
    }
    rank.deliver(&datagram(good, &first));
    let other_mask = Header { mask: 0b01, ..good };
    assert_eq!(rank.reject(&datagram(other_mask, &[0; 1024])), Reject::Shape);
    rank.deliver(&datagram(Header { fragment: 1, ..good }, &[0; 1024]));
}

#[test]
fn windows_are_sent_as_far_as_the_pool_reaches() {
    // wire: W-28, W-33
    let mut rank = Machine::new();
    rank.start(&[true; 20]);
    assert_eq!(rank.sends(), (0..8).collect::<Vec<_>>());
    for index in 0..4 {
        rank.deliver(&result(window(0, index), index.checked_sub(1)));
    }
    assert_eq!(rank.sends(), [0; 0]);
    rank.take(&credit(window(0, 3)));
    assert_eq!(rank.sends(), [8, 9, 10]);
    // An older credit that arrives late has no effect.
    rank.take(&credit(window(0, 1)));
    rank.take(&credit(window(0, 4)));
    assert_eq!(rank.sends(), [11]);
}

#[test]
fn opens_reach_no_further_than_they_may() {
    // wire: W-35
    let mut rank = Machine::new();
    rank.start(&[false; 40_000]);
    let opened = |rank: &mut Machine| {
        let sent = rank.sent();
        let ends = sent.iter().map(|sent| match sent {
            Sent::Datagram(header, body) if header.kind == Kind::Open => {
                header.window.index + OpenDecoder::new().decode(body, false).unwrap().windows
            }
            sent => panic!("{sent:?}"),
        });
        ends.max()
    };
    assert_eq!(opened(&mut rank), Some(16_384));
    rank.take(&credit(window(0, 100)));
    assert_eq!(opened(&mut rank), Some(16_484));
}

#[test]
fn opens_that_are_asked_for_are_sent_again() {
    // wire: W-36
    let mut rank = Machine::new();
    rank.start(&[true; 6]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    rank.deliver(&result(window(0, 1), Some(0)));
    rank.sent();
    for (from, expected) in [(window(0, 3), 3), (window(0, 0), 2)] {
        rank.take(&nack(&[NackEntry { window: from, fragments: 0 }]));
        let sent = rank.sent();
        let [Sent::Datagram(header, body)] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((header.kind, header.window.index), (Kind::Open, expected));
        assert_eq!(expected + OpenDecoder::new().decode(body, false).unwrap().windows, 6);
    }
}

#[test]
fn fragments_that_are_asked_for_are_sent_again_and_no_others() {
    // wire: W-37
    let mut rank = Machine::new();
    let masks = vec![0b111, 0b1, 0];
    rank.machine.submit_scanned(rank.now, sum(3), masks, TIMEOUT).unwrap();
    rank.sent();
    rank.take(&nack(&[
        NackEntry { window: window(0, 0), fragments: 0b100 },
        NackEntry { window: window(0, 1), fragments: u64::MAX },
        NackEntry { window: window(0, 2), fragments: 1 },
        NackEntry { window: window(7, 0), fragments: 1 },
    ]));
    let again: Vec<_> = rank
        .sent()
        .into_iter()
        .map(|sent| match sent {
            Sent::Data(header, fragments) => {
                assert!(header.flags.has(Flags::AGAIN));
                (header.window, fragments)
            }
            sent => panic!("{sent:?}"),
        })
        .collect();
    assert_eq!(again, [(window(0, 0), 0b100), (window(0, 1), 0b1)]);
    // The result has arrived, so the window's data is no longer needed.
    rank.deliver(&result(window(0, 0), None));
    rank.take(&nack(&[NackEntry { window: window(0, 0), fragments: 1 }]));
    assert_eq!(rank.sends(), [0; 0]);
}

#[test]
fn what_has_its_sum_is_not_sent_again_although_an_earlier_one_is_awaited() {
    // wire: W-37
    let lacks = nack(&[NackEntry { window: window(0, 1), fragments: 1 }]);
    for late in [false, true] {
        let mut rank = Machine::new();
        rank.start(&[true; 2]);
        rank.sent();
        let sum = result(window(0, 1), Some(0));
        for datagram in if late { [&sum, &lacks] } else { [&lacks, &sum] } {
            rank.take(datagram);
        }
        assert_eq!(
            rank.sends(),
            [0; 0],
            "the fragment was requested after the sum arrived: {late}"
        );
    }
}

#[test]
fn what_was_sent_after_a_probe_is_not_sent_again_for_its_answer() {
    // wire: W-37
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.sent();
    rank.expire();
    rank.nacks();
    rank.start(&[true]);
    assert_eq!(rank.sends(), [0]);
    rank.expire();
    rank.nacks();
    let lacks = [window(0, 1), window(1, 0)].map(|window| NackEntry { window, fragments: 1 });
    rank.take(&nack(&lacks));
    assert_eq!(rank.sends(), [1], "the answer says nothing about data sent after the probe");
    rank.take(&nack(&lacks[1..]));
    assert_eq!(rank.sends(), [0], "a later nack shows that the data is lost");
}

#[test]
fn what_is_asked_for_of_an_op_that_fails_hides_nothing_behind_it() {
    // wire: W-37
    let mut rank = Machine::new();
    for _ in 0..3 {
        rank.start(&[true]);
    }
    rank.sent();
    let lacks = [1, 2].map(|op| NackEntry { window: window(op, 0), fragments: 1 });
    rank.take(&nack(&lacks));
    rank.take(&fail(window(1, 0)));
    let windows: Vec<_> = rank
        .sent()
        .iter()
        .filter_map(|sent| match sent {
            Sent::Data(header, 1) => Some(header.window),
            _ => None,
        })
        .collect();
    assert_eq!(windows, [window(2, 0)]);
}

#[test]
fn results_before_a_whole_one_are_asked_for_at_once() {
    // wire: W-38
    let mut rank = Machine::new();
    rank.start(&[true; 8]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    rank.deliver(&result(window(0, 5), Some(4)));
    let (header, entries) = rank.nacks();
    assert_eq!(header.window, window(0, 1));
    let lacks = [(1, 0), (4, u64::MAX)];
    let lacks = lacks.map(|(index, fragments)| NackEntry { window: window(0, index), fragments });
    assert_eq!(entries, lacks);
    // The answer may still be on its way.
    rank.deliver(&result(window(0, 6), Some(5)));
    assert!(rank.sent().is_empty());
}

#[test]
fn a_probe_asks_what_there_is_and_for_nothing_yet() {
    // wire: W-38, W-39
    let mut rank = Machine::new();
    rank.start(&[true; 8]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    rank.sent();
    rank.expire();
    let (header, entries) = rank.nacks();
    assert_eq!(header.window, window(0, 1));
    assert_eq!(entries, everything_from(window(0, 1)));
}

#[test]
fn what_came_before_changes_nothing() {
    // wire: W-42
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    rank.sent();
    rank.deliver(&result(window(0, 1), Some(0)));
    assert_eq!(rank.take(&result(window(0, 1), Some(0))), Verdict::Duplicate);
    rank.deliver(&result(window(0, 0), None));
    assert_eq!(rank.reject(&result(window(0, 1), Some(0))), Reject::Stale);
    rank.deliver(&result(window(0, 2), Some(1)));
    assert!(rank.machine.poll_outcome().is_some());
    rank.take(&credit(window(1, 0)));
    assert_eq!(rank.reject(&result(window(0, 2), Some(1))), Reject::Stale);
    assert!(rank.machine.poll_outcome().is_none());
}

#[test]
fn a_result_acknowledges_itself_in_the_next_datagram() {
    // wire: W-32
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    rank.sent();
    rank.deliver(&result(window(0, 1), Some(0)));
    let (header, _) = rank.nacks();
    assert_eq!(header.ack, window(0, 0));
    rank.deliver(&result(window(0, 0), None));
    let sent = rank.sent();
    let [Sent::Datagram(header, _)] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((header.kind, header.ack), (Kind::Ack, window(0, 2)));
    rank.deliver(&result(window(0, 2), Some(1)));
    rank.start(&[true]);
    assert!(rank.sent().iter().all(|sent| match sent {
        Sent::Datagram(header, _) | Sent::Data(header, _) => header.ack == window(1, 0),
    }));
}

#[test]
fn an_op_is_opened_wherever_it_has_a_window() {
    // wire: W-45
    let config = *worker(0).config();
    let mut machine = Worker::new(Config { shards: 3, ..config }, Time(0));
    for (windows, masks) in [(7, vec![0; 7]), (2, vec![0; 2])] {
        machine.submit_scanned(Time(0), sum(windows), masks, TIMEOUT).unwrap();
    }
    let mut rank = Machine::of(machine);
    let mut opened: Vec<_> = rank
        .sent()
        .iter()
        .map(|sent| match sent {
            Sent::Datagram(header, body) => {
                let open = OpenDecoder::new().decode(body, false).unwrap();
                (header.window.op.0, header.shard, header.window.index, open.windows, open.after)
            }
            sent => panic!("{sent:?}"),
        })
        .collect();
    opened.sort_unstable();
    assert_eq!(
        opened,
        [
            (0, 0, 0, 3, None),
            (0, 1, 1, 2, None),
            (0, 2, 2, 2, None),
            (1, 1, 0, 1, Some(OpId(0))),
            (1, 2, 1, 1, Some(OpId(0)))
        ]
    );
}
