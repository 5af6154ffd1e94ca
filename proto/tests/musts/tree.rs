//! An aggregator that has a parent, and an aggregator that is a parent.

use racksum_proto::aggregator::{Aggregation, Config, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::error::OpError;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Disagreement, Header, Kind, MissingRanks};
use racksum_proto::worker::{self, Transmit, Worker};

use crate::shard::{Shard, ack, block, everything_from, nack, names, sum};
use crate::support::{TIMEOUT, datagram, header, open, shard, window, worker};

const CHILD: worker::ChildShard = worker::ChildShard { shard: 0, slots: 8 };

fn with_parent() -> Shard {
    Shard::of(Aggregation::new(Config { has_parent: true, ..shard(0, 1) }, Time(0)))
}

#[test]
fn a_window_is_known_to_the_parent_once_it_is_folded_and_within_the_pools_reach() {
    // wire: W-64
    let mut rack = with_parent();
    assert_eq!(rack.machine.poll_begun(|_| false), None);
    // The ranks owe the first and the third of twelve windows. The pool has eight slots.
    let owed: Vec<_> = (0..12).map(|i| [0, 2].contains(&i)).collect();
    rack.open(0, None, &owed);
    assert_eq!(rack.machine.poll_begun(|_| true), Some((OpId(0), sum(12))));
    assert_eq!(rack.machine.poll_begun(|_| true), None);
    let known = |rack: &Shard| [0, 1, 2, 3, 7, 8].map(|i| rack.machine.summed(0, window(0, i)));
    assert_eq!(known(&rack), [None; 6]);
    rack.store(&block(0, window(0, 0)));
    assert!(rack.fold().is_none());
    rack.store(&block(1, window(0, 0)));
    let fold = rack.fold().unwrap();
    assert!(fold.for_parent && fold.window == window(0, 0));
    assert!(rack.sent().iter().all(|(_, header, _)| header.kind != Kind::Result));
    assert_eq!(known(&rack), [Some(1), Some(0), None, None, None, None]);
    for rank in [0, 1] {
        rack.store(&block(rank, window(0, 2)));
    }
    assert!(rack.fold().is_some_and(|fold| fold.for_parent));
    assert!(rack.fold().is_none());
    // No rank of the rack owes the other windows. The pool has slots for the results of only the
    // first eight windows.
    assert_eq!(known(&rack), [Some(1), Some(0), Some(1), Some(0), Some(0), None]);
    // Slots become free once all ranks have acknowledged their windows.
    rack.machine.handle_parent_at(0, window(0, 4), window(0, 4));
    for rank in [0, 1] {
        rack.take(&ack(rank, window(0, 4)));
    }
    // The last window is always folded, even if no rank contributes to it.
    let last = rack.fold().unwrap();
    assert_eq!((last.window, last.union, last.for_parent), (window(0, 11), 0, true));
    assert_eq!(rack.machine.summed(0, window(0, 8)), Some(0));
}

fn disagreement() -> Disagreement {
    let one = sum(1);
    let other =
        Descriptor { reduction: Reduction::Max, ..Descriptor::sum(one.elements, DType::F32) };
    Disagreement { one: (Rank(4), one), other: (Rank(5), other) }
}

fn fail(rank: u16, op: u32) -> Vec<u8> {
    let mut body = [0; Disagreement::LEN];
    disagreement().encode(&mut body);
    datagram(Header { window: window(op, 0), ..header(Kind::Fail, Rank(rank)) }, &body)
}

#[test]
fn a_parent_takes_that_an_op_failed_below_and_tells_all() {
    // wire: W-65
    let mut root = Shard::of(Aggregation::new(Config { weight: Some(6), ..shard(0, 1) }, Time(0)));
    assert_eq!(root.take(&open(0, 0, 0, &sum(1), None, &[true])), Verdict::Control);
    assert_eq!(root.take(&fail(1, 0)), Verdict::Control);
    let failed = root.machine.poll_failed().unwrap();
    assert_eq!((failed.op, failed.why), (OpId(0), disagreement()));
    let sent = root.sent();
    let fails = sent.iter().filter(|(_, header, _)| header.kind == Kind::Fail);
    assert!(fails.clone().any(|(to, ..)| *to == Recipient::All));
    for (_, _, body) in fails {
        assert_eq!(Disagreement::decode(body), Ok(disagreement()));
    }
    // A repeated fail gets the same answer, and has no other effect.
    assert_eq!(root.take(&fail(1, 0)), Verdict::Control);
    let (_, body) = root.sent_to(1, Kind::Fail);
    assert_eq!(Disagreement::decode(&body), Ok(disagreement()));
    assert!(root.machine.poll_failed().is_none());
    // The shard rejects a fail from a rank that is not an aggregator.
    assert_eq!(Shard::new().reject(&fail(1, 0)), Reject::Kind);
}

#[test]
fn an_aggregator_says_that_an_op_failed_until_its_parent_does() {
    // wire: W-65
    let config = worker::Config { child: Some(CHILD), ..*worker(0).config() };
    let mut above = Worker::new(config, Time(0));
    above.submit_sum(Time(0), OpId(0), sum(1), TIMEOUT).unwrap();
    above.fail_sum(OpId(0), disagreement(), &mut ());
    let error = above.poll_outcome().unwrap().result.unwrap_err();
    assert!(matches!(error, OpError::Mismatch { op: OpId(0), .. }));
    let mut now = Time(0);
    let mut sent_kind = |above: &mut Worker| {
        let mut out = [0xa5; 2048];
        above.handle_timeout(now, &mut ());
        let transmit = above.poll_transmit(now, &mut out, &mut ());
        now = above.poll_timeout();
        let Some(Transmit::Datagram { len, .. }) = transmit else { return None };
        Some(Header::decode(&out[..len]).unwrap().0.kind)
    };
    for _ in 0..5 {
        assert_eq!(sent_kind(&mut above), Some(Kind::Fail));
    }
    let confirmed = {
        let mut body = [0; Disagreement::LEN];
        disagreement().encode(&mut body);
        datagram(Header { window: window(0, 0), ..header(Kind::Fail, Rank::AGGREGATOR) }, &body)
    };
    above.handle_datagram(Time(1), &confirmed, false, &mut ());
    assert_eq!(sent_kind(&mut above), None);
    // The fail goes out even if a descriptor names an unknown lane.
    let (rank, strange) = disagreement().one;
    let one = (rank, Descriptor { lane: 200, ..strange });
    above.fail_sum(OpId(1), Disagreement { one, ..disagreement() }, &mut ());
    assert_eq!(sent_kind(&mut above), Some(Kind::Fail));
}

#[test]
fn a_parent_names_those_whom_an_aggregator_waits_for_and_for_a_while_only() {
    // wire: W-66
    let config = Config { weight: Some(6), ..shard(0, 1) };
    let mut root = Shard::of(Aggregation::new(config, Time(0)));
    root.machine.set_name(Rank(1), Rank(3));
    root.open(0, None, &[true; 2]);
    root.store(&block(0, window(0, 0)));
    let named = |root: &mut Shard, reported: Option<&[(Rank, Span)]>| {
        if let Some(reported) = reported {
            let mut body = [0; 1200];
            let len = MissingRanks::encode(reported.iter().copied(), &mut body);
            let wait = datagram(header(Kind::Wait, Rank(1)), &body[..len]);
            assert_eq!(root.take(&wait), Verdict::Control);
        }
        root.take(&nack(0, window(0, 0), &everything_from(window(0, 0))));
        let (_, body) = root.sent_to(0, Kind::Wait);
        names(&body)
    };
    let (silent, left) = (Span::from_millis(700), MissingRanks::LEFT);
    assert_eq!(named(&mut root, None), [(Rank(3), Span::ZERO)]);
    let below = [(Rank(4), silent), (Rank(5), left)];
    assert_eq!(named(&mut root, Some(&below)), below);
    assert_eq!(named(&mut root, Some(&[])), [(Rank(3), Span::ZERO)]);
    named(&mut root, Some(&below));
    root.now = Time(0) + Span::from_millis(900);
    let later = Span::from_millis(1600);
    assert_eq!(named(&mut root, None), [(Rank(4), later), (Rank(5), left)]);
    root.now = Time(0) + Span::from_millis(1100);
    assert_eq!(named(&mut root, None), [(Rank(3), Span::from_millis(1100))]);
    // When a rank of an aggregator leaves, the wait reports that rank as left.
    root.machine.handle_left_below(Rank(1), Rank(4));
    assert_eq!(named(&mut root, None), [(Rank(4), left)]);
    // The shard rejects a wait from a rank that is not an aggregator.
    let wait = datagram(header(Kind::Wait, Rank(1)), &[0, 0]);
    assert_eq!(Shard::new().reject(&wait), Reject::Kind);
}

#[test]
fn an_aggregator_says_whom_it_waits_for_again_and_again_in_each_lane() {
    // wire: W-66
    let config = worker::Config { child: Some(CHILD), lanes: 2, ..*worker(0).config() };
    let mut above = Worker::new(config, Time(0));
    assert_eq!(above.poll_timeout(), Time::NEVER);
    above.submit_sum(Time(0), OpId(0), sum(1), TIMEOUT).unwrap();
    let waits = [(Rank(4), Span::from_millis(5))];
    let mut out = [0xa5; 2048];
    for _ in 0..3 {
        let now = above.poll_timeout();
        assert!(now <= Time(0) + Span::from_secs(1));
        above.handle_timeout(now, &mut ());
        for lane in [0, 1] {
            assert_eq!(above.poll_waits(), Some(lane));
            above.queue_waits(lane, waits.into_iter());
            let transmit = above.poll_transmit(now, &mut out, &mut ());
            let Some(Transmit::Datagram { len, .. }) = transmit else { panic!("{transmit:?}") };
            let (header, body) = Header::decode(&out[..len]).unwrap();
            assert_eq!((header.kind, header.lane), (Kind::Wait, lane));
            assert_eq!(names(body), waits);
        }
        assert_eq!(above.poll_waits(), None);
    }
    // A worker that is not waiting for any rank sends no wait.
    above.handle_timeout(above.poll_timeout(), &mut ());
    assert_eq!(above.poll_waits(), Some(0));
    above.queue_waits(0, std::iter::empty());
    assert_eq!(above.poll_transmit(Time(0), &mut out, &mut ()), None);
}
