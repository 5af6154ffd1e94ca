use std::sync::{Arc, Mutex};

use racksum_proto::auth::{DataAuth, Key, Keys};
use racksum_proto::control::Resume;
use racksum_proto::ids::{Generation, JobId};
use racksum_proto::status::JobState;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::time::Instant;

use super::*;
use crate::config::Fanout;
use crate::parent_session::call;
use crate::registry::parent_link::MOST_BEFORE;
use crate::registry::tests::{Inbox, join, last_message, registry, wish};
use crate::registry::{MEMBER_QUEUE, lock};

mod refusals;

const PARENT: &str = "127.0.0.1:7";

/// Returns a registry whose aggregator has a parent.
fn leaf() -> Registry {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.parent = Some(PARENT.into());
    registry
}

/// Returns the join that an aggregator sends to its parent for one of its ranks.
fn relayed(job: &str, rank: u16, world: u16) -> Join {
    Join { aggregates: true, multicast: false, ..wish(job, rank, world) }
}

fn also(registry: &mut Registry, seat: &Seat, join: Join) -> Option<Joined> {
    registry.also(seat, join, Instant::now())
}

fn welcome() -> Welcome {
    Welcome {
        job: JobId(70),
        rank: Rank(1),
        rack: vec![1, 3],
        data_ports: vec![5001],
        pool_slots: 4,
        max_ops: 64,
        fragment_payload: 1296,
        in_flight: 1 << 20,
        first_op: OpId(0),
        group: None,
        data_auth: DataAuth::None,
        keys: None,
        sealed: Vec::new(),
        may_move: false,
        in_tree: true,
    }
}

fn keys() -> Option<Keys> {
    Some(Keys { up: Key([1; Key::LEN]), down: Key([2; Key::LEN]) })
}

fn parent() -> SocketAddr {
    PARENT.parse().unwrap()
}

/// Returns a summary of all messages sent to the parent.
fn sent(call: &mut ParentCall) -> Vec<String> {
    let message = |message| match message {
        FromWorker::AddRank(join) => format!("add_rank {}", join.rank),
        FromWorker::RankLost(LostRank { rank, why }) => format!("rank_lost {rank} {why:?}"),
        message => format!("{message:?}"),
    };
    std::iter::from_fn(|| call.messages.try_recv().ok()).map(message).collect()
}

/// Sets up a rack of a job of four ranks. Ranks 3 and 1 have joined in this order and have been
/// announced to the parent.
fn rack(registry: &mut Registry) -> (ParentCall, [(Seat, Inbox); 2]) {
    let (first, joined, inbox) = join(registry, wish("job", 3, 4)).unwrap();
    assert_eq!(joined, Joined::CallParent);
    let mut call = registry.call(&first).unwrap();
    assert_eq!((call.join.rank, call.join.aggregates, call.join.data_ports.len()), (3, true, 1));
    let (second, joined, other) = join(registry, wish("job", 1, 4)).unwrap();
    assert_eq!(joined, Joined::Waiting(vec![0, 2]));
    assert_eq!(sent(&mut call), ["add_rank 1"]);
    (call, [(first, inbox), (second, other)])
}

#[test]
fn a_rack_is_granted_what_the_parent_grants_once_it_does() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), (_, mut one)]) = rack(&mut registry);
    // Only the parent knows which ranks are missing.
    let waiting = FromAggregator::Waiting { missing: vec![2], waited_ms: 9 };
    registry.handle_parent_message(&seat, parent(), waiting);
    assert_eq!(registry.check_timeouts(&seat, Instant::now()), Joined::Waiting(vec![2]));
    let message = FromAggregator::Welcome(welcome());
    assert_eq!(registry.handle_parent_message(&seat, parent(), message), Joined::Ready);
    for (rank, inbox) in [(Rank(0), &mut one), (Rank(1), &mut three)] {
        let FromAggregator::Welcome(granted) = inbox.try_recv().unwrap() else { panic!() };
        assert_eq!((granted.rank, granted.fragment_payload), (rank, 1296));
        assert_eq!(last_message(inbox), Some(FromAggregator::Ready { multicast: false }));
    }
    let job = &registry.jobs[&"job".into()];
    let parent = job.new_parent(&Config { shard: 0, ..config(job) }).unwrap();
    assert_eq!(parent.addr, "127.0.0.1:5001".parse().unwrap());
    let child = Some(worker::ChildShard { shard: 0, slots: 4 });
    assert_eq!((parent.config.rank, parent.config.child), (Rank(1), child));
    assert_eq!(job.names(), [Rank(1), Rank(3)]);
}

#[test]
fn lives_that_are_over_leave_no_task_that_calls_a_silent_parent() {
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut registry = leaf();
    registry.config.parent = Some(silent.local_addr().unwrap().to_string());
    let registry = Arc::new(Mutex::new(registry));
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let turns = || async {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    };
    let lives = async {
        let mut of_one = 0;
        for generation in (0..100).map(Generation) {
            let wish = Join { generation, ..wish("job", 0, 2) };
            let (seat, joined, _inbox) = join(&mut lock(&registry), wish).unwrap();
            assert_eq!(joined, Joined::CallParent);
            tokio::spawn(call(Arc::clone(&registry), seat));
            turns().await;
            of_one = if generation.0 == 0 { tasks() } else { of_one };
        }
        assert!(of_one > 1, "a call runs in tasks of its own");
        assert_eq!(tasks(), of_one);
        lock(&registry).stop();
        turns().await;
        assert_eq!(tasks(), 0);
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(lives);
}

#[test]
fn a_parent_that_ends_no_conversation_of_lives_before_has_only_the_last_few() {
    let mut registry = leaf();
    let lives = (0..10).map(Generation).map(|generation| {
        let wish = Join { generation, ..wish("job", 0, 2) };
        let (seat, _, _inbox) = join(&mut registry, wish).unwrap();
        registry.call(&seat).unwrap()
    });
    let mut lives: Vec<_> = lives.collect();
    let ended = |call: &mut ParentCall| call.messages.try_recv() == Err(TryRecvError::Disconnected);
    let ended: Vec<_> = lives.iter_mut().map(ended).collect();
    assert_eq!(ended, [vec![true; 10 - 1 - MOST_BEFORE], vec![false; 1 + MOST_BEFORE]].concat());
}

#[test]
fn ranks_that_do_not_read_miss_nothing_but_where_they_stand_in_the_queue() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), (_, mut one)]) = rack(&mut registry);
    for before in 0..10_000 {
        let queued = FromAggregator::Queued { before, why: "no room".into() };
        registry.handle_parent_message(&seat, parent(), queued);
    }
    for message in [FromAggregator::Welcome(welcome()), FromAggregator::Drain] {
        registry.handle_parent_message(&seat, parent(), message);
    }
    registry.drain();
    registry.drain();
    for inbox in [&mut one, &mut three] {
        assert!(inbox.len() < MEMBER_QUEUE, "{}", inbox.len());
        let received: Vec<_> = std::iter::from_fn(|| inbox.try_recv().ok()).collect();
        let [queued @ .., FromAggregator::Welcome(_), FromAggregator::Ready { .. }, drain] =
            &received[..]
        else {
            panic!("{received:?}")
        };
        assert_eq!(drain, &FromAggregator::Drain);
        assert!(!queued.is_empty());
    }
}

/// Returns the configuration that a shard gets for a job.
fn config(job: &Job) -> Config {
    let (welcome, _) = job.granted.as_ref().unwrap();
    let cut = racksum_proto::geometry::Fragmentation::new(welcome.fragment_payload.into());
    Config {
        job: job.id,
        generation: job.generation,
        world: 2,
        lanes: 1,
        shard: 0,
        shards: 1,
        pool_slots: 4,
        max_ops: 64,
        cut: cut.unwrap(),
        results_in_flight: 1 << 20,
        moved_at: None,
        weight: None,
        has_parent: true,
    }
}

#[test]
fn a_rank_that_goes_while_ranks_are_gathered_is_not_called_for_the_next_time() {
    let mut registry = leaf();
    let (mut call, [(first, _three), (second, _one)]) = rack(&mut registry);
    registry.leave(&first, Loss::Died, Instant::now());
    // The parent may already run the job, so it is told of the loss before the connection ends.
    assert_eq!(sent(&mut call), ["rank_lost 3 Died"]);
    assert!(call.messages.blocking_recv().is_none());
    let late = FromAggregator::Welcome(welcome());
    assert_eq!(registry.handle_parent_message(&first, parent(), late), Joined::Ready);
    assert_eq!(registry.jobs[&"job".into()].state, JobState::Gathering);
    assert!(registry.handle_parent_disconnect(&first, PARENT, "left"));
    let call = registry.call(&first).unwrap();
    assert_eq!(call.join.rank, 1);
    registry.leave(&second, Loss::Left, Instant::now());
    assert!(
        !registry.handle_parent_disconnect(&first, PARENT, "left"),
        "no rank is left, so the parent is not called again"
    );
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn what_becomes_of_a_rank_is_said_above_and_what_is_said_above_becomes_of_the_ranks() {
    let now = Instant::now();
    for why in [Loss::Died, Loss::Left] {
        let mut registry = leaf();
        let (mut call, [(seat, _three), (_, mut one)]) = rack(&mut registry);
        registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
        registry.leave(&seat, why, now);
        assert_eq!(sent(&mut call), [format!("rank_lost 3 {why:?}")]);
        let over = Some(FromAggregator::PeerLost { ranks: vec![3], why });
        assert_eq!(registry.jobs(), usize::from(why == Loss::Left));
        assert_eq!(last_message(&mut one) == over, why == Loss::Died);
    }
    let lost = FromAggregator::PeerLost { ranks: vec![0, 2], why: Loss::Aggregator };
    let over = FromAggregator::Superseded { by: Generation(4), why: "the next has begun".into() };
    for message in [lost, over] {
        let mut registry = leaf();
        let (_call, [(seat, mut three), _]) = rack(&mut registry);
        registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
        registry.handle_parent_message(&seat, parent(), message.clone());
        assert_eq!(last_message(&mut three), Some(message));
        assert_eq!(registry.jobs(), 0);
        assert!(!registry.handle_parent_disconnect(&seat, PARENT, "closed"));
    }
}

#[test]
fn of_the_ranks_that_a_parent_names_those_that_a_job_has_are_named_to_its_ranks() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), _]) = rack(&mut registry);
    let missing: Vec<_> = (0..10_000).rev().chain([2]).collect();
    let waits = FromAggregator::Waiting { missing: missing.clone(), waited_ms: 0 };
    registry.handle_parent_message(&seat, parent(), waits);
    let job = &registry.jobs[&seat.job];
    let known: Vec<_> = (0..job.world).collect();
    assert_eq!(job.missing(), known);
    let lost = FromAggregator::PeerLost { ranks: missing, why: Loss::Died };
    registry.handle_parent_message(&seat, parent(), lost);
    let over = FromAggregator::PeerLost { ranks: known, why: Loss::Died };
    assert_eq!(last_message(&mut three), Some(over));
}

#[test]
fn the_next_life_of_a_job_has_the_one_before_end_above_by_itself() {
    let mut registry = leaf();
    let (mut call, [(seat, mut three), _]) = rack(&mut registry);
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
    let next = Join { generation: Generation(1), ..wish("job", 1, 4) };
    let (seat, joined, _one) = join(&mut registry, next).unwrap();
    assert_eq!(joined, Joined::CallParent);
    assert!(matches!(last_message(&mut three), Some(FromAggregator::Superseded { .. })));
    let _next = registry.call(&seat).unwrap();
    // No message is sent, and the connection stays open.
    assert_eq!(call.messages.try_recv(), Err(TryRecvError::Empty));
    // A generation that ends before it runs sends no message either.
    let last = Join { generation: Generation(2), ..wish("job", 1, 4) };
    let (seat, _, _last) = join(&mut registry, last).unwrap();
    let _last = registry.call(&seat).unwrap();
    assert_eq!(call.messages.try_recv(), Err(TryRecvError::Empty));
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
    assert_eq!(call.messages.try_recv(), Err(TryRecvError::Disconnected));
}

#[test]
fn a_parent_that_cannot_be_had_is_named_to_every_rank() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), (_, mut one)]) = rack(&mut registry);
    assert!(!registry.handle_parent_disconnect(&seat, PARENT, "nobody answers"));
    let reason =
        format!("the aggregator has no connection to its parent at {PARENT}: nobody answers");
    for inbox in [&mut three, &mut one] {
        assert_eq!(last_message(inbox), Some(FromAggregator::Refused { reason: reason.clone() }));
    }
    // A running job ends when its parent is lost.
    let (_call, [(seat, mut three), _]) = rack(&mut registry);
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
    assert!(!registry.handle_parent_disconnect(&seat, PARENT, "nobody answers"));
    let reason = format!("the aggregator lost its parent at {PARENT}: nobody answers");
    assert_eq!(last_message(&mut three), Some(FromAggregator::ParentLost { reason }));
    // A parent that authenticates data differently is refused.
    let (mut call, [(seat, mut three), _]) = rack(&mut registry);
    let other = Welcome { data_auth: DataAuth::Mac, keys: keys(), ..welcome() };
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(other));
    let Some(FromAggregator::Refused { reason }) = last_message(&mut three) else { panic!() };
    assert!(reason.contains("the same `racksum aggregator --data-auth`"), "{reason}");
    // The other racks must not be told that a rank of this rack has left.
    assert_eq!(sent(&mut call), ["Stop"]);
}

/// Sets up a root with two aggregators. The first has joined for ranks 2 and 0 of four, and the
/// second for ranks 3 and 1.
fn root() -> (Registry, [(Seat, Inbox); 2]) {
    let mut registry = registry(Fanout::Unicast, 0);
    let (one, joined, first) = join(&mut registry, relayed("job", 2, 4)).unwrap();
    assert_eq!(joined, Joined::Waiting(vec![0, 1, 3]));
    assert_eq!(also(&mut registry, &one, wish("job", 0, 4)), Some(Joined::Waiting(vec![1, 3])));
    let (two, _, second) = join(&mut registry, relayed("job", 3, 4)).unwrap();
    assert_eq!(also(&mut registry, &two, wish("job", 1, 4)), Some(Joined::Ready));
    (registry, [(one, first), (two, second)])
}

#[test]
fn racks_are_numbered_by_their_first_ranks_and_called_by_them() {
    let (mut registry, members) = root();
    for ((_, mut inbox), rank) in members.into_iter().zip([Rank(0), Rank(1)]) {
        let FromAggregator::Welcome(granted) = inbox.try_recv().unwrap() else { panic!() };
        assert_eq!(granted.rank, rank);
        assert_eq!(last_message(&mut inbox), Some(FromAggregator::Ready { multicast: false }));
    }
    let job = &registry.jobs[&"job".into()];
    assert_eq!((job.names(), job.missing()), (vec![Rank(0), Rank(1)], vec![]));
    let job = registry.jobs.get_mut(&"job".into()).unwrap();
    let (_, configs) = job.grant(4, DataAuth::None, &registry.shards).unwrap();
    assert_eq!((configs[0].world, configs[0].weight, configs[0].has_parent), (2, Some(4), false));
}

#[test]
fn a_rank_that_is_no_aggregator_parts_from_nobody() {
    let mut registry = leaf();
    let (seat, ..) = join(&mut registry, wish("job", 0, 2)).unwrap();
    assert_eq!([0, 1, 60_000].map(|rank| registry.may_part(&seat, rank)), [false; 3]);
    let over = Seat { id: JobId(seat.id.0 + 1), ..seat };
    assert!(registry.may_part(&over, 0), "a job that is over accepts every report");
}

#[test]
fn a_rack_that_is_lost_is_lost_with_all_its_ranks_and_one_that_loses_a_rank_names_it() {
    let (mut registry, [(one, _), (_, mut inbox)]) = root();
    registry.leave(&one, Loss::Died, Instant::now());
    let lost = FromAggregator::PeerLost { ranks: vec![0, 2], why: Loss::Aggregator };
    assert_eq!(last_message(&mut inbox), Some(lost));
    assert_eq!(registry.jobs(), 0);
    let (mut registry, [(one, _), (_, mut inbox)]) = root();
    // An aggregator may report only its own ranks as lost.
    assert_eq!([0, 1, 60_000].map(|rank| registry.may_part(&one, rank)), [true, false, false]);
    registry.parted(&one, LostRank { rank: 1, why: Loss::Died });
    assert_eq!(registry.jobs(), 1);
    registry.parted(&one, LostRank { rank: 0, why: Loss::Left });
    assert_eq!(registry.jobs(), 1);
    registry.parted(&one, LostRank { rank: 0, why: Loss::Died });
    let lost = FromAggregator::PeerLost { ranks: vec![0], why: Loss::Died };
    assert_eq!(last_message(&mut inbox), Some(lost));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn sidecars_that_name_standbys_may_move_with_the_ranks_that_do() {
    let migration = |wish: Join| Join { may_move: true, ..wish };
    let resumed = |wish: Join| {
        let resume = Some(Resume { first_op: OpId(7), absent: Vec::new() });
        Join { resume, ..migration(wish) }
    };
    let wishes: [&dyn Fn(Join) -> Join; 2] = [&migration, &resumed];
    for change in wishes {
        let mut root = registry(Fanout::Unicast, 0);
        let (one, _, mut first) = join(&mut root, change(relayed("job", 0, 5))).unwrap();
        also(&mut root, &one, change(wish("job", 2, 5)));
        let (_, _, mut direct) = join(&mut root, change(wish("job", 4, 5))).unwrap();
        // An aggregator with a parent cannot move.
        let error = join(&mut root, relayed("job", 1, 5)).unwrap_err();
        let why = if error.contains("starts from its first op") {
            "continues from another"
        } else {
            "have standbys, but others joined without"
        };
        assert!(error.contains(why), "{error}");
        let (two, _, mut second) = join(&mut root, change(relayed("job", 1, 5))).unwrap();
        assert_eq!(also(&mut root, &two, change(wish("job", 3, 5))), Some(Joined::Ready));
        let first_op = change(wish("job", 0, 5)).resume.map_or(OpId(0), |it| it.first_op);
        let racks = [vec![0, 2], vec![1, 3], Vec::new()];
        let inboxes = [&mut first, &mut second, &mut direct];
        for (number, (inbox, rack)) in (0..).map(Rank).zip(inboxes.into_iter().zip(racks)) {
            let Ok(FromAggregator::Welcome(welcome)) = inbox.try_recv() else { panic!() };
            assert_eq!((welcome.rank, welcome.rack), (number, rack));
            assert_eq!((welcome.first_op, welcome.may_move), (first_op, true));
        }
    }
}

#[test]
fn an_aggregator_says_to_its_parent_how_it_authenticates_data() {
    let mut registry = leaf();
    registry.config.data_auth = Some(DataAuth::Aead);
    let (call, _) = rack(&mut registry);
    assert_eq!(call.join.data_auth, Some(DataAuth::Aead));
}

#[test]
fn an_aggregator_that_drains_stops_for_its_parent_and_no_rank_of_a_tree_moves() {
    let mut registry = leaf();
    let (mut call, [(_, mut three), _]) = rack(&mut registry);
    registry.drain();
    assert_eq!(last_message(&mut three), Some(FromAggregator::Drain));
    assert_eq!(sent(&mut call), ["Stop"], "no rank has left");
    for runs in [false, true] {
        let mut registry = leaf();
        let (mut call, [(seat, _three), _]) = rack(&mut registry);
        if runs {
            registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(welcome()));
        }
        registry.depart(&seat, Instant::now());
        assert_eq!(sent(&mut call), ["rank_lost 3 Broke"]);
        assert_eq!(registry.jobs(), usize::from(!runs), "a job that ran has ended");
    }
}

#[test]
fn a_rank_that_came_after_the_world_was_complete_is_none_of_it() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), (_, mut one)]) = rack(&mut registry);
    let counted = Welcome { rack: vec![3], ..welcome() };
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(counted.clone()));
    assert!(matches!(last_message(&mut one), Some(FromAggregator::Refused { .. })));
    assert_eq!(last_message(&mut three), Some(FromAggregator::Ready { multicast: false }));
    assert_eq!(registry.jobs[&"job".into()].names(), [Rank(3)]);
    // A second welcome has no effect.
    assert_eq!(
        registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(counted)),
        Joined::Ready
    );
    assert_eq!(last_message(&mut three), None);
    // A grant without any rank of this rack starts no job.
    let mut other = leaf();
    let (mut call, [(seat, _three), _]) = rack(&mut other);
    let nobody = Welcome { rack: vec![0, 2], ..welcome() };
    other.handle_parent_message(&seat, parent(), FromAggregator::Welcome(nobody));
    assert_eq!((sent(&mut call), other.jobs()), (vec!["Stop".to_owned()], 0));
    // At the root, a rank that is announced after the start is ignored.
    let (mut registry, [(first, mut inbox), _]) = root();
    last_message(&mut inbox);
    assert_eq!(also(&mut registry, &first, wish("job", 1, 4)), Some(Joined::Ready));
    assert_eq!((last_message(&mut inbox), registry.jobs()), (None, 1));
}
