//! How a worker ends its ops.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::loss::Loss;
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Disagreement, MissingRanks, NackEntry};
use racksum_proto::worker::{Config, Worker};

use crate::rank::{Machine, Sent, disagreement, fail, nack, result, sum, wait};
use crate::support::{TIMEOUT, window, worker};

#[test]
fn silence_is_probed_until_the_op_times_out() {
    // wire: W-39
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.sent();
    let mut last = Time(0);
    let mut longest = Span::ZERO;
    while rank.machine.poll_timeout() < Time(0) + TIMEOUT {
        rank.now = rank.machine.poll_timeout();
        rank.machine.handle_timeout(rank.now, &mut rank.events);
        let (header, entries) = rank.nacks();
        assert_eq!(header.window, window(0, 0));
        assert_eq!(entries, [NackEntry { window: window(0, 0), fragments: 0 }]);
        assert!(rank.now.since(last) >= longest, "the pause before a probe never shrinks");
        longest = rank.now.since(last);
        last = rank.now;
    }
    assert!(rank.events.probes > 3);
    rank.now = rank.machine.poll_timeout();
    rank.machine.handle_timeout(rank.now, &mut rank.events);
    let outcome = rank.machine.poll_outcome().unwrap();
    let Err(OpError::Timeout { op, after, .. }) = outcome.result else { panic!("{outcome:?}") };
    assert_eq!((op, after), (OpId(0), TIMEOUT));
}

#[test]
fn a_timeout_names_the_ranks_that_are_waited_for_and_no_others() {
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.sent();
    rank.take(&wait(window(0, 0), &[(Rank(1), Span::from_millis(9))]));
    // The result arrives, so rank 1's data is not missing after all.
    rank.deliver(&result(window(0, 0), None));
    rank.expire_ops();
    let missing = |rank: &mut Machine| match rank.machine.poll_outcome().unwrap().result {
        Err(OpError::Timeout { missing, .. }) => missing,
        result => panic!("{result:?}"),
    };
    assert_eq!(missing(&mut rank), []);

    // Results are lost on the way to this rank, so no other rank is to blame.
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.sent();
    rank.take(&wait(window(0, 2), &[(Rank(1), Span::from_millis(9))]));
    rank.expire_ops();
    assert_eq!(missing(&mut rank), []);

    for (delay, expected) in [(Span::from_secs(8), 0), (Span::from_millis(9_900), 1)] {
        let mut rank = Machine::new();
        rank.start(&[true; 2]);
        rank.sent();
        rank.now = rank.now + delay;
        rank.take(&wait(window(0, 0), &[(Rank(1), Span::from_millis(9))]));
        rank.expire_ops();
        assert_eq!(
            missing(&mut rank).len(),
            expected,
            "only a report from the last second names ranks"
        );
    }
}

#[test]
fn ranks_that_disagree_are_told_a_lane_and_a_tag_only_where_they_differ() {
    let one = Descriptor::sum(5, DType::F32);
    let text = |other: Descriptor| {
        let (one, other) = ((Rank(0), one), (Rank(1), other));
        OpError::Mismatch { op: OpId(3), one, other }.to_string()
    };
    assert_eq!(
        text(Descriptor::sum(6, DType::F32)),
        "op 3: the ranks disagree: rank 0 has sum of 5 x f32, wire f32, block 256; rank 1 has sum \
         of 6 x f32, wire f32, block 256"
    );
    let tagged = text(Descriptor { tag: 1, ..one });
    assert!(tagged.contains("256, tag 0x0; ") && tagged.ends_with("256, tag 0x1"), "{tagged}");
    let other_lane = text(Descriptor { lane: 1, ..one });
    assert!(other_lane.ends_with("256, lane 1"), "{other_lane}");
    let dropped = OpError::Dropped { op: OpId(3) }.to_string();
    assert!(dropped.starts_with("op 3: the ranks disagree; "), "{dropped}");
}

#[test]
fn a_timeout_says_whether_results_still_came() {
    let seconds = Span::from_secs;
    let millis = Span::from_millis;
    for (after, idle, expected) in [
        (seconds(60), seconds(60), "check that the aggregator (and its parent, if any)"),
        (seconds(60), millis(1_001), "check that the aggregator (and its parent, if any)"),
        (seconds(60), millis(999), "results still arrive"),
        // The last result that arrived belonged to an earlier op.
        (millis(500), millis(500), "check that the aggregator (and its parent, if any)"),
        (millis(500), millis(499), "results still arrive"),
    ] {
        let late = OpError::Timeout { op: OpId(3), after, missing: vec![], idle };
        let text = late.to_string();
        assert!(text.starts_with("op 3: ") && text.contains(expected), "{text}");
    }
}

#[test]
fn every_op_that_is_late_says_so_and_the_others_say_why_they_ended() {
    let mut rank = Machine::new();
    let ops = [(); 2].map(|()| rank.start(&[true]));
    rank.now = rank.now + Span::from_secs(5);
    let young = rank.start(&[true]);
    rank.sent();
    rank.take(&wait(window(0, 0), &[(Rank(1), Span::from_secs(5))]));
    rank.now = Time(0) + TIMEOUT;
    rank.take(&wait(window(0, 0), &[(Rank(1), TIMEOUT)]));
    rank.machine.handle_timeout(rank.now, &mut rank.events);
    for id in ops {
        let outcome = rank.machine.poll_outcome().unwrap();
        let missing = vec![(Rank(1), TIMEOUT)];
        let late = OpError::Timeout { op: id, after: TIMEOUT, missing, idle: TIMEOUT };
        assert_eq!((outcome.op, outcome.result), (id, Err(late)));
    }
    let outcome = rank.machine.poll_outcome().unwrap();
    assert_eq!(outcome.op, young);
    assert!(matches!(outcome.result, Err(OpError::Ended { .. })), "{outcome:?}");
    assert!(rank.machine.poll_outcome().is_none() && rank.machine.is_idle());
    let why = "an earlier op timed out";
    let next = rank.machine.submit(rank.now, sum(1), TIMEOUT);
    assert_eq!(next, Err(SubmitError::Ended { why: why.into() }));
}

#[test]
fn an_op_whose_outcome_is_not_polled_counts_as_in_flight() {
    // wire: W-43
    let mut rank = Machine::new();
    for op in 0..4 {
        rank.start(&[true]);
        rank.sent();
        rank.deliver(&result(window(op, 0), None));
    }
    let fifth = rank.machine.submit(rank.now, sum(1), TIMEOUT);
    assert_eq!(fifth, Err(SubmitError::TooManyOps { max: 4 }));
    assert!(rank.machine.has_room_for(0, 0) && !rank.machine.has_room_for(0, 1));
    assert!(rank.machine.poll_outcome().is_some());
    assert!(rank.machine.has_room_for(0, 1) && !rank.machine.has_room_for(0, 2));
    rank.start(&[true]);
}

#[test]
fn an_op_that_failed_is_in_flight_no_more() {
    // wire: W-37, W-41, W-42
    let mut rank = Machine::new();
    for _ in 0..3 {
        rank.start(&[true]);
    }
    rank.sent();
    rank.take(&nack(&[0, 1, 2].map(|op| NackEntry { window: window(op, 0), fragments: 1 })));
    rank.take(&fail(window(1, 0)));
    assert_eq!(rank.reject(&result(window(1, 0), None)), Reject::Stale);
    let sent = rank.sent();
    let again = sent.iter().map(|sent| match sent {
        Sent::Data(header, _) => header.window.op.0,
        sent @ Sent::Datagram(..) => panic!("{sent:?}"),
    });
    assert_eq!(again.collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn ops_that_fail_leave_nothing_behind_a_credit_that_stands_still() {
    // wire: W-41
    // One slot and one op in flight leave no spare capacity.
    let config = Config { pool_slots: 1, max_ops: 1, ..*worker(0).config() };
    let mut rank = Machine::of(Worker::new(config, Time(0)));
    rank.start(&[true]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    rank.machine.poll_outcome().unwrap();
    // Another rank never acknowledges op 0, so the credit never passes that op's window.
    let started = format!("{:?}", rank.machine).len();
    for op in 1..1000 {
        rank.start(&[true]);
        rank.sent();
        rank.take(&fail(window(op, 0)));
        assert!(rank.machine.poll_outcome().is_some());
    }
    let grown = format!("{:?}", rank.machine).len() - started;
    assert!(grown < 20_000, "{grown}");
}

#[test]
fn a_fail_ends_its_op_and_the_next_goes_on() {
    // wire: W-41
    let mut rank = Machine::new();
    rank.start(&[true; 4]);
    rank.start(&[true]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    assert_eq!(rank.take(&fail(window(0, 0))), Verdict::Control);
    let outcome = rank.machine.poll_outcome().unwrap();
    let Disagreement { one, other } = disagreement();
    assert_eq!(outcome.op, OpId(0));
    assert_eq!(outcome.result, Err(OpError::Mismatch { op: OpId(0), one, other }));
    assert_eq!(rank.reject(&result(window(0, 1), Some(0))), Reject::Stale);
    rank.deliver(&result(window(1, 0), None));
    let outcome = rank.machine.poll_outcome().unwrap();
    assert_eq!((outcome.op, outcome.result), (OpId(1), Ok(())));
}

#[test]
fn no_more_ops_are_started_than_were_granted() {
    // wire: W-43
    let mut rank = Machine::new();
    let ops = [(); 4].map(|()| rank.start(&[true]));
    assert_eq!(ops, [0, 1, 2, 3].map(OpId));
    let fifth = rank.machine.submit(rank.now, sum(1), TIMEOUT);
    assert_eq!(fifth, Err(SubmitError::TooManyOps { max: 4 }));
}

#[test]
fn an_op_ends_when_what_it_lacks_waits_for_a_rank_that_has_left() {
    // wire: W-61
    let left = [(Rank(1), MissingRanks::LEFT)];
    let mut rank = Machine::new();
    let op = rank.start(&[true; 2]);
    rank.sent();
    // This wait shows only that results are lost here. The rank requests them; the op continues.
    rank.take(&wait(window(0, 1), &left));
    assert!(
        rank.machine.poll_outcome().is_none(),
        "the op must not fail: its result was lost, so it is not waiting for another rank"
    );
    rank.deliver(&result(window(0, 0), None));
    rank.take(&wait(window(0, 1), &[(Rank(1), Span::from_secs(1))]));
    assert!(rank.machine.poll_outcome().is_none(), "the rank is silent, but has not left");
    rank.take(&wait(window(0, 1), &left));
    let outcome = rank.machine.poll_outcome().unwrap();
    let (ranks, why) = (vec![Rank(1)], Loss::Left);
    assert_eq!((outcome.op, outcome.result), (op, Err(OpError::PeerLost { ranks, why })));
}

#[test]
fn an_op_that_has_all_it_needs_ends_well_although_a_rank_has_left() {
    // wire: W-61
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.sent();
    rank.deliver(&result(window(0, 0), None));
    rank.deliver(&result(window(0, 1), Some(0)));
    assert_eq!(rank.machine.poll_outcome().unwrap().result, Ok(()));
    // A wait that arrives late says nothing new, so the rank may start more ops.
    rank.take(&wait(window(1, 0), &[(Rank(1), MissingRanks::LEFT)]));
    rank.start(&[true]);
}
