use racksum_proto::auth::Key;
use racksum_proto::ids::{Generation, OpId};
use racksum_proto::loss::Loss;
use tokio::time::Instant;

use super::*;
use crate::config::Fanout;
use crate::registry::tests::{Inbox, caller, last_message, registry, wish};

/// A generation of a job, and the job's secret if it has one.
#[derive(Clone, Copy)]
struct Life(u32, Option<u8>);

impl Life {
    fn join(self, rank: u16) -> Join {
        let secret = self.1.map(|secret| Key([secret; Key::LEN]));
        Join { generation: Generation(self.0), secret, ..wish("train", rank, 2) }
    }
}

fn enter(
    registry: &mut Registry,
    join: Join,
    identity: Option<&str>,
    ip: [u8; 4],
) -> Result<Inbox, String> {
    let (caller, inbox) = caller(identity, ip);
    let joined = registry.join(join, caller, Instant::now());
    joined.map(|_| inbox).map_err(crate::quotas::Refusal::why)
}

const A: [u8; 4] = [10, 0, 0, 1];
const B: [u8; 4] = [10, 0, 0, 2];
const ELSEWHERE: [u8; 4] = [10, 0, 0, 3];

#[test]
fn a_life_is_ended_by_one_of_the_same_job_and_by_no_other() {
    let none = Life(1, None);
    let (own, other) = (Life(1, Some(1)), Life(1, Some(2)));
    for (first, second, identities, from, ends) in [
        // The secret proves the job from any address.
        (own, own, [None, None], ELSEWHERE, true),
        (own, other, [None, None], A, false),
        (own, none, [None, None], A, false),
        (none, own, [None, None], A, false),
        // The identity of any rank of the previous generation proves the job.
        (none, none, [Some("node-1"), Some("node-1")], ELSEWHERE, true),
        (none, none, [Some("node-1"), Some("node-9")], A, false),
        (own, other, [Some("node-1"), Some("node-1")], A, true),
        (own, own, [Some("node-1"), Some("node-9")], A, true),
        // An address proves the job only without secrets and identities.
        (none, none, [None, None], A, true),
        (none, none, [None, None], B, true),
        (none, none, [None, None], ELSEWHERE, false),
    ] {
        let mut registry = registry(Fanout::Unicast, 0);
        let mut inbox = enter(&mut registry, first.join(0), identities[0], A).unwrap();
        let _second = enter(&mut registry, first.join(1), identities[0].map(|_| "node-2"), B);
        let next = Life(9, second.1).join(1);
        let joined = enter(&mut registry, next, identities[1], from);
        let case = format!("{:?} {:?} {identities:?} {from:?}", first.1, second.1);
        assert_eq!(joined.is_ok(), ends, "{case}");
        let is_superseded =
            matches!(last_message(&mut inbox), Some(FromAggregator::Superseded { .. }));
        assert_eq!(is_superseded, ends, "{case}");
    }
}

#[test]
fn who_ends_a_life_and_who_may_not_hear_of_both() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut first = enter(&mut registry, Life(3, Some(1)).join(0), Some("node-1"), A).unwrap();
    let why = enter(&mut registry, Life(5, Some(2)).join(0), Some("node-2"), B).unwrap_err();
    let expected = "job \"train\" is in generation 3, begun by identity \"node-1\", and identity \
                    \"node-2\" with generation 5 does not prove";
    assert!(why.starts_with(expected), "{why}");
    // Such a caller may not join the present generation either.
    let why = enter(&mut registry, Life(3, Some(2)).join(1), Some("node-2"), B).unwrap_err();
    assert!(why.contains("identity \"node-2\" with generation 3 does not prove"), "{why}");
    enter(&mut registry, Life(5, Some(1)).join(0), Some("node-2"), B).unwrap();
    let why = "generation 5 of job \"train\", begun by identity \"node-2\", replaced generation 3, \
               begun by identity \"node-1\"";
    let over = FromAggregator::Superseded { by: Generation(5), why: why.into() };
    assert_eq!(last_message(&mut first), Some(over));
}

fn by(name: &str) -> Option<CallerId> {
    Some(CallerId::Identity(name.into()))
}

fn relayed(life: u32, begun_by: Option<CallerId>) -> Join {
    Join { aggregates: true, multicast: false, begun_by, ..Life(life, None).join(0) }
}

#[test]
fn the_identity_of_an_aggregator_says_nothing_of_the_jobs_of_its_ranks() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut enter = |join| enter(&mut registry, join, Some("rack"), A);
    let _first = enter(relayed(0, by("node-1"))).unwrap();
    let why = enter(relayed(1, by("node-2"))).unwrap_err();
    assert!(why.contains("begun by identity \"node-1\", and identity \"node-2\""), "{why}");
    enter(relayed(1, by("node-1"))).unwrap();
}

#[test]
fn what_an_aggregator_says_is_an_identity_is_the_name_of_one_or_refused() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut enter = |name: &str| enter(&mut registry, relayed(0, by(name)), Some("rack"), A);
    let why = enter(&"x".repeat(60_000)).unwrap_err();
    assert!(why.ends_with("at most 256 bytes, not 60000"), "{why}");
    let why = enter("a\nb").unwrap_err();
    assert!(why.ends_with("\"a\\nb\" has unprintable characters"), "{why}");
    // Another authority may have issued an identity with such a name.
    enter("node 7 (spare)").unwrap();
    // A bad identity is also refused for a rank that joins later.
    let (caller, _inbox) = caller(Some("rack"), A);
    let wish = |rank, name: &str| Join { rank, ..relayed(1, by(name)) };
    let first = wish(0, "node 7 (spare)");
    let (seat, _) = registry.join(first, caller, Instant::now()).unwrap();
    registry.also(&seat, wish(1, &"x".repeat(300)), Instant::now());
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn a_life_remembers_those_that_are_there_and_of_those_that_are_gone_only_the_last() {
    let mut registry = registry(Fanout::Unicast, 0);
    let join = |rank, name: &str| Join { rank, world: 4, ..relayed(0, by(name)) };
    let enter = |registry: &mut Registry, rank, name: &str| {
        let (caller, inbox) = caller(Some("rack"), A);
        (registry.join(join(rank, name), caller, Instant::now()).unwrap().0, inbox)
    };
    let go = |registry: &mut Registry, seat| registry.leave(&seat, Loss::Left, Instant::now());
    let _opener = enter(&mut registry, 0, "opener");
    let (stays, _inbox) = enter(&mut registry, 1, "stays");
    for number in 0..100 {
        let (seat, _inbox) = enter(&mut registry, 2, &format!("comes-{number}"));
        go(&mut registry, seat);
    }
    go(&mut registry, stays);
    let job = &registry.jobs[&"train".into()];
    assert_eq!(job.callers.len(), 16);
    for (name, may) in [("opener", true), ("stays", true), ("comes-99", true), ("comes-0", false)] {
        assert_eq!(job.may_be_ended_by(&join(0, name)), may, "{name}");
    }
}

#[test]
fn a_rank_that_comes_back_is_of_the_same_job_and_no_other() {
    let (none, own, other) = (None, Some(1), Some(2));
    for (secret, shows, identities, from, comes) in [
        // The secret proves the job from any address.
        (own, own, [None, None], ELSEWHERE, true),
        (own, own, [Some("node-2"), Some("node-9")], ELSEWHERE, true),
        (own, other, [None, None], B, false),
        (own, none, [None, None], B, false),
        // The identity that left, or that of another rank, proves the job.
        (own, none, [Some("node-2"), Some("node-2")], ELSEWHERE, true),
        (own, none, [Some("node-2"), Some("node-1")], ELSEWHERE, true),
        (own, none, [Some("node-2"), Some("node-9")], B, false),
        (none, none, [Some("node-2"), Some("node-9")], B, false),
        // An address proves the job only without secrets and identities.
        (none, none, [None, None], B, true),
        (none, none, [None, None], ELSEWHERE, false),
    ] {
        let mut registry = registry(Fanout::Unicast, 0);
        let life = Life(1, secret);
        let first = identities[0].map(|_| "node-1");
        let _first = enter(&mut registry, life.join(0), first, A).unwrap();
        let (leaves, _second) = caller(identities[0], B);
        let (seat, _) = registry.join(life.join(1), leaves, Instant::now()).unwrap();
        registry.part(&seat, Some(OpId(0)), Instant::now());
        let back = Join { rejoin: true, ..Life(1, shows).join(1) };
        let (caller, _inbox) = caller(identities[1], from);
        let back = registry.rejoin(back, caller, vec![0], Instant::now());
        assert_eq!(back.is_ok(), comes, "{secret:?} {shows:?} {identities:?} {from:?}: {back:?}");
    }
}

#[test]
fn a_rank_that_has_come_back_is_of_the_present_life_as_if_it_had_always_been() {
    let mut registry = registry(Fanout::Unicast, 0);
    let life = Life(1, Some(1));
    let _first = enter(&mut registry, life.join(0), Some("node-1"), A).unwrap();
    let (leaves, _second) = caller(Some("node-2"), B);
    let (seat, _) = registry.join(life.join(1), leaves, Instant::now()).unwrap();
    registry.part(&seat, Some(OpId(0)), Instant::now());
    let again =
        |registry: &mut Registry| enter(registry, Life(2, None).join(0), Some("node-9"), ELSEWHERE);
    assert!(again(&mut registry).is_err(), "the identity has never joined");
    let back = Join { rejoin: true, ..life.join(1) };
    let (caller, _inbox) = caller(Some("node-9"), ELSEWHERE);
    registry.rejoin(back, caller, vec![0], Instant::now()).unwrap();
    again(&mut registry).unwrap();
}

#[test]
fn a_rank_without_the_secret_of_a_life_is_not_of_it() {
    let mut registry = registry(Fanout::Unicast, 0);
    let _first = enter(&mut registry, Life(1, Some(1)).join(0), Some("node-1"), A).unwrap();
    let why = enter(&mut registry, Life(1, None).join(1), Some("node-2"), B).unwrap_err();
    assert!(why.contains("does not prove that it belongs to the same job"), "{why}");
    enter(&mut registry, Life(1, Some(1)).join(1), Some("node-2"), B).unwrap();
}
