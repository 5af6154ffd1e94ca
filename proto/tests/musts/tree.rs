//! An aggregator that has a parent, or is one.

use racksum_proto::aggregator::{Aggregation, Config, Recipient, Verdict};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::error::{OpError, Reject};
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::time::Time;
use racksum_proto::wire::{Disagreement, Header, Kind};
use racksum_proto::worker::{self, Transmit, Worker};

use crate::shard::{Shard, ack, block, sum};
use crate::support::{TIMEOUT, datagram, header, open, shard, window, worker};

fn with_parent() -> Shard {
    Shard::of(Aggregation::new(Config { has_parent: true, ..shard(0, 1) }, Time(0)))
}

#[test]
fn a_window_is_known_to_the_parent_once_it_is_folded_and_within_the_pools_reach() {
    // wire: W-64
    let mut rack = with_parent();
    // Twelve windows, of which the first and the third are owed, and the pool has eight slots.
    let owed: Vec<_> = (0..12).map(|i| [0, 2].contains(&i)).collect();
    rack.open(0, None, &owed);
    assert_eq!(rack.machine.poll_begun(), Some((OpId(0), sum(12))));
    assert_eq!(rack.machine.poll_begun(), None);
    let known = |rack: &Shard| [0, 1, 2, 3, 7, 8].map(|i| rack.machine.summed(0, window(0, i)));
    assert_eq!(known(&rack), [None; 6]);
    rack.store(&block(0, window(0, 0)));
    assert!(rack.fold().is_none());
    rack.store(&block(1, window(0, 0)));
    let fold = rack.fold().unwrap();
    assert!(fold.for_parent && fold.window == window(0, 0));
    assert!(rack.said().iter().all(|(_, header, _)| header.kind != Kind::Result));
    assert_eq!(known(&rack), [Some(1), Some(0), None, None, None, None]);
    for rank in [0, 1] {
        rack.store(&block(rank, window(0, 2)));
    }
    assert!(rack.fold().is_some_and(|fold| fold.for_parent));
    assert!(rack.fold().is_none());
    // Nobody here owes the others, and there are slots for the results of some of them.
    assert_eq!(known(&rack), [Some(1), Some(0), Some(1), Some(0), Some(0), None]);
    // What all are known to have makes room.
    rack.machine.handle_parent_at(0, window(0, 4), window(0, 4));
    for rank in [0, 1] {
        rack.take(&ack(rank, window(0, 4)));
    }
    // The last is folded in any case, here from nothing.
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
    let said = root.said();
    let told = said.iter().filter(|(_, header, _)| header.kind == Kind::Fail);
    assert!(told.clone().any(|(to, ..)| *to == Recipient::All));
    for (_, _, body) in told {
        assert_eq!(Disagreement::decode(body), Ok(disagreement()));
    }
    // Told again, it answers again, and that is all.
    assert_eq!(root.take(&fail(1, 0)), Verdict::Control);
    let (_, body) = root.says_to(1, Kind::Fail);
    assert_eq!(Disagreement::decode(&body), Ok(disagreement()));
    assert!(root.machine.poll_failed().is_none());
    // Ranks that are no aggregators say no such thing.
    assert_eq!(Shard::new().reject(&fail(1, 0)), Reject::Kind);
}

#[test]
fn an_aggregator_says_that_an_op_failed_until_its_parent_does() {
    // wire: W-65
    let config = worker::Config { only_shard: Some(0), ..*worker(0).config() };
    let mut above = Worker::new(config, Time(0));
    above.submit_sum(Time(0), OpId(0), sum(1), TIMEOUT).unwrap();
    above.fail_sum(OpId(0), disagreement(), &mut ());
    let error = above.poll_outcome().unwrap().result.unwrap_err();
    assert!(matches!(error, OpError::Mismatch { op: OpId(0), .. }));
    let mut now = Time(0);
    let mut says = |above: &mut Worker| {
        let mut out = [0xa5; 2048];
        above.handle_timeout(now, &mut ());
        let transmit = above.poll_transmit(now, &mut out, &mut ());
        now = above.poll_timeout();
        let Some(Transmit::Datagram { len, .. }) = transmit else { return None };
        Some(Header::decode(&out[..len]).unwrap().0.kind)
    };
    for _ in 0..5 {
        assert_eq!(says(&mut above), Some(Kind::Fail));
    }
    let heard = {
        let mut body = [0; Disagreement::LEN];
        disagreement().encode(&mut body);
        datagram(Header { window: window(0, 0), ..header(Kind::Fail, Rank::AGGREGATOR) }, &body)
    };
    above.handle_datagram(Time(1), &heard, false, &mut ());
    assert_eq!(says(&mut above), None);
    // Whatever lane others say that they meant.
    let (rank, strange) = disagreement().one;
    let one = (rank, Descriptor { lane: 200, ..strange });
    above.fail_sum(OpId(1), Disagreement { one, ..disagreement() }, &mut ());
    assert_eq!(says(&mut above), Some(Kind::Fail));
}
