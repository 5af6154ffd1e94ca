//! Tests that every checker fires on a run that breaks its invariant.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::WindowId;
use racksum_proto::reject::Reject;
use racksum_proto::time::Span;
use racksum_proto::wire::{Flags, Header, Kind};

use racksum_proto::ids::Rank;

use super::*;
use crate::cluster::Cluster;
use crate::inputs::Inputs;
use crate::plan::{JobPlan, Missing, Network};
use crate::run::Run;

const RANK: Machine = Machine::Worker { job: 0, rank: Rank(0) };
const OTHER: Machine = Machine::Worker { job: 0, rank: Rank(1) };
const SHARD: Machine = Machine::Shard { job: 0, shard: 0 };
const OP: OpId = OpId(0);
/// The number of elements in a window.
const WINDOW: u64 = 60 * 256;

/// Returns a plan of two ranks, four slots, and one dense op of three windows.
fn plan() -> Plan {
    let network = Network::ideal(1_000_000_000, Picos::from_micros(10));
    let job = JobPlan { pool_slots: 4, ..JobPlan::new(2, Fragmentation::new(1424).unwrap()) };
    let descriptor = Descriptor::sum(3 * WINDOW, DType::F32);
    Plan::new(1, network, vec![job.with(descriptor, Inputs::dense(5), Picos::ZERO)])
}

fn oracle() -> Rc<Oracle> {
    Rc::new(Oracle::new(&plan()))
}

/// Returns the result of the plan's op.
fn result() -> Vec<u8> {
    let oracle = oracle();
    let oracle::Expected::Result(tensor) = &oracle.truth(0, OP).unwrap().expected else {
        panic!("the plan's op must have a result")
    };
    tensor.clone()
}

fn folded(index: u32, contributors: u32) -> Event<'static> {
    let union = (1 << 60) - 1;
    Event::Folded { window: WindowId::new(OP, index), union, contributors }
}

fn see(checker: &mut impl Checker, machine: Machine, sight: &Sight<'_>) -> Result<(), Violation> {
    checker.see(Picos::from_millis(1), machine, sight)
}

fn fold(checker: &mut ExactlyOnce, index: u32) -> Result<(), Violation> {
    see(checker, SHARD, &Sight::Event(&folded(index, 2)))
}

/// Returns whether a checker found `invariant` broken.
fn breaks(result: Result<(), Violation>, invariant: Invariant) -> bool {
    result.is_err_and(|violation| violation.invariant == invariant)
}

#[test]
fn exactly_once_fires_when_a_window_is_folded_twice() {
    let mut checker = ExactlyOnce::new(oracle(), false);
    assert!(fold(&mut checker, 1).is_ok());
    assert!(breaks(fold(&mut checker, 1), Invariant::I1));
}

#[test]
fn exactly_once_fires_when_a_contribution_is_missing_from_a_fold() {
    let mut checker = ExactlyOnce::new(oracle(), false);
    let sight = folded(0, 1);
    assert!(breaks(see(&mut checker, SHARD, &Sight::Event(&sight)), Invariant::I1));
}

#[test]
fn exactly_once_fires_when_a_window_was_never_folded() {
    let mut checker = ExactlyOnce::new(oracle(), false);
    fold(&mut checker, 0).unwrap();
    fold(&mut checker, 2).unwrap();
    let ended = Ok(result());
    assert!(breaks(see(&mut checker, RANK, &Sight::Ended(OP, &ended)), Invariant::I1));
}

#[test]
fn exactly_once_fires_when_a_result_is_wrong_in_one_bit() {
    let mut checker = ExactlyOnce::new(oracle(), false);
    (0..3).for_each(|index| fold(&mut checker, index).unwrap());
    let mut tensor = result();
    assert!(see(&mut checker, RANK, &Sight::Ended(OP, &Ok(tensor.clone()))).is_ok());
    tensor[777] ^= 1;
    assert!(breaks(see(&mut checker, RANK, &Sight::Ended(OP, &Ok(tensor))), Invariant::I1));
}

#[test]
fn same_bits_fires_when_two_ranks_differ() {
    let mut checker = SameBits::default();
    assert!(see(&mut checker, RANK, &Sight::Ended(OP, &Ok(vec![1, 2]))).is_ok());
    let other = Ok(vec![1, 3]);
    assert!(breaks(see(&mut checker, OTHER, &Sight::Ended(OP, &other)), Invariant::I2));
}

#[test]
fn same_bits_fires_when_two_runs_differ() {
    let run = run();
    assert!(SameBits::compare(&run, &run).is_ok());
    let mut other = run.clone();
    other.ended.get_mut(&(OTHER, OP)).unwrap().result = Ok(0);
    assert!(breaks(SameBits::compare(&run, &other), Invariant::I2));
    other.ended.clear();
    assert!(breaks(SameBits::compare(&run, &other), Invariant::I2));
}

#[test]
fn few_bytes_fires_when_a_rank_sends_or_receives_too_many() {
    // The limit is three windows of 60 KiB, 6 % overhead and one datagram.
    let most = 3 * 61_440 * 106 / 100 + 1_472;
    let bytes = vec![0; most];
    for (all, one_more) in [
        (Sight::Sent(&bytes), Sight::Sent(&bytes[..1])),
        (Sight::Received(&bytes), Sight::Received(&bytes[..1])),
    ] {
        let mut checker = FewBytes::new(&plan(), oracle());
        see(&mut checker, RANK, &all).unwrap();
        assert!(checker.conclude().is_ok());
        see(&mut checker, RANK, &one_more).unwrap();
        assert!(breaks(checker.conclude(), Invariant::I3));
    }
}

/// Returns a datagram about window `index`, with an empty body.
fn datagram(kind: Kind, index: u32, ack: u32) -> Vec<u8> {
    let header = Header {
        kind,
        job: plan().job_id(0, 0, crate::plan::Life::FIRST),
        generation: Plan::GENERATION,
        sender: Rank(0),
        lane: 0,
        shard: 0,
        window: WindowId::new(OP, index),
        ack: WindowId::new(OP, ack),
        mask: u64::from(kind == Kind::Data),
        previous: 0,
        length: 0,
        fragment: 0,
        flags: Flags::NONE,
    };
    let mut bytes = [0; Header::LEN];
    header.encode(&mut bytes);
    bytes.to_vec()
}

#[test]
fn bounded_fires_when_a_rank_sends_past_the_pool() {
    let mut checker = Bounded::new(&plan());
    for index in 0..4 {
        let data = datagram(Kind::Data, index, 0);
        assert!(see(&mut checker, RANK, &Sight::Sent(&data)).is_ok());
    }
    // An acknowledgement makes room for one more window.
    let ack = datagram(Kind::Ack, 0, 1);
    assert!(see(&mut checker, RANK, &Sight::Sent(&ack)).is_ok());
    let data = [4, 5].map(|index| datagram(Kind::Data, index, 1));
    assert!(see(&mut checker, RANK, &Sight::Sent(&data[0])).is_ok());
    assert!(breaks(see(&mut checker, RANK, &Sight::Sent(&data[1])), Invariant::I4));
}

#[test]
fn bounded_fires_when_a_shard_holds_more_results_than_slots() {
    let mut checker = Bounded::new(&plan());
    for index in 0..4 {
        assert!(see(&mut checker, SHARD, &Sight::Event(&folded(index, 2))).is_ok());
    }
    let fifth = folded(4, 2);
    assert!(breaks(see(&mut checker, SHARD, &Sight::Event(&fifth)), Invariant::I4));
}

#[test]
fn bounded_fires_when_a_slot_is_given_back_twice_or_too_much_is_held() {
    let mut checker = Bounded::new(&plan());
    let retired = Event::Retired { window: WindowId::new(OP, 0) };
    assert!(breaks(see(&mut checker, SHARD, &Sight::Event(&retired)), Invariant::I4));
    let most = 4 * 2 * 64;
    assert!(see(&mut checker, SHARD, &Sight::Driven { held: most }).is_ok());
    let more = Sight::Driven { held: most + 1 };
    assert!(breaks(see(&mut checker, SHARD, &more), Invariant::I4));
}

/// Returns an `Ends` checker that has seen rank 0 call the op.
fn called(plan: &Plan) -> Ends {
    let mut checker = Ends::new(plan, Rc::new(Oracle::new(plan)));
    checker.see(Picos::ZERO, RANK, &Sight::Called(OP)).unwrap();
    checker
}

fn timeout(missing: u16) -> Result<Vec<u8>, OpError> {
    let missing = vec![(Rank(missing), Span::from_millis(9))];
    let (after, idle) = (Span::from_secs(60), Span::from_secs(50));
    Err(OpError::Timeout { op: OP, after, missing, idle })
}

#[test]
fn ends_fires_when_an_op_is_open_past_its_deadline() {
    let mut checker = called(&plan());
    let on_time = Picos::from_millis(60_000);
    assert!(checker.see(on_time, SHARD, &Sight::Driven { held: 0 }).is_ok());
    let late = Picos::from_millis(60_002);
    let sight = Sight::Driven { held: 0 };
    assert!(breaks(checker.see(late, SHARD, &sight), Invariant::I5));
}

#[test]
fn ends_fires_when_an_op_never_ends_or_was_never_called() {
    assert!(breaks(called(&plan()).conclude(), Invariant::I5));
    let mut checker = called(&plan());
    see(&mut checker, RANK, &Sight::Ended(OP, &Ok(result()))).unwrap();
    assert!(breaks(checker.conclude(), Invariant::I5), "rank 1 never called the op");
    let again = Ok(result());
    assert!(breaks(see(&mut checker, RANK, &Sight::Ended(OP, &again)), Invariant::I5));
}

#[test]
fn ends_fires_at_an_error_without_a_cause() {
    let ended = Err(OpError::Ended { why: "no reason".into() });
    for error in [timeout(1), ended] {
        let mut checker = called(&plan());
        let sight = Sight::Ended(OP, &error);
        assert!(breaks(see(&mut checker, RANK, &sight), Invariant::I5));
    }
}

#[test]
fn ends_fires_when_a_timeout_names_the_wrong_rank() {
    let mut plan = plan();
    let absence = crate::plan::Absence::Calls(0);
    plan.jobs[0].missing = Some(Missing { rank: Rank(1), absence });
    assert!(see(&mut called(&plan), RANK, &Sight::Ended(OP, &timeout(1))).is_ok());
    let wrong = timeout(0);
    let sight = Sight::Ended(OP, &wrong);
    assert!(breaks(see(&mut called(&plan), RANK, &sight), Invariant::I5));
}

#[test]
fn ends_fires_when_a_disagreement_is_missed_or_misquoted() {
    let mut plan = plan();
    let descriptor = plan.jobs[0].ops[0].descriptor;
    let odd = Descriptor { tag: 7, ..descriptor };
    plan.jobs[0].ops[0].odd = Some((Rank(1), odd));
    let mismatch = |other| {
        Err(OpError::Mismatch { op: OP, one: (Rank(0), descriptor), other: (Rank(1), other) })
    };
    let good = mismatch(odd);
    assert!(see(&mut called(&plan), RANK, &Sight::Ended(OP, &good)).is_ok());
    let dropped = Err(OpError::Dropped { op: OP });
    for bad in [mismatch(Descriptor { tag: 8, ..odd }), dropped, Ok(result())] {
        let sight = Sight::Ended(OP, &bad);
        assert!(breaks(see(&mut called(&plan), RANK, &sight), Invariant::I5));
    }
}

#[test]
fn foreign_fires_when_a_stranger_changes_something() {
    let mut checker = Foreign::new(&plan());
    let rejected = Event::Rejected(Reject::Job);
    assert!(see(&mut checker, SHARD, &Sight::Foreign(&rejected)).is_ok());
    let fold = folded(0, 2);
    assert!(breaks(see(&mut checker, SHARD, &Sight::Foreign(&fold)), Invariant::I6));
}

#[test]
fn foreign_fires_when_a_rank_is_taken_for_a_stranger() {
    let mut checker = Foreign::new(&plan());
    let stale = Event::Rejected(Reject::Stale);
    assert!(see(&mut checker, SHARD, &Sight::Event(&stale)).is_ok());
    for reject in [Reject::Generation, Reject::BeyondPool] {
        let rejected = Event::Rejected(reject);
        assert!(breaks(see(&mut checker, SHARD, &Sight::Event(&rejected)), Invariant::I6));
    }
}

#[test]
fn foreign_fires_when_strangers_change_the_trace() {
    let run = run();
    assert!(Foreign::compare(&run, &run).is_ok());
    let other = Run { trace: run.trace + 1, ..run.clone() };
    assert!(breaks(Foreign::compare(&run, &other), Invariant::I6));
}

/// Runs the plan, which breaks no invariant.
fn run() -> Run {
    Cluster::check(&plan()).unwrap()
}
