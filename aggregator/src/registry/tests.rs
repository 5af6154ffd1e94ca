use std::net::Ipv4Addr;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::auth::DataAuth;
use racksum_proto::control::{CONTROL_VERSION, OnRankLoss, Resume};
use racksum_proto::ids::{Generation, OpId};
use racksum_proto::status::JobState;
use racksum_test_report::lines_logged;
use tokio::sync::mpsc::{Receiver, channel};
use tracing::Level;

use super::*;
use crate::admit_rule::Admit;
use crate::failure::Failure;

/// Returns a registry with one shard. Its next job gets the number after `last_id`.
pub(crate) fn registry(fanout: Fanout, last_id: u32) -> Registry {
    let config = Config { pool_mib: 4, fanout, ..Config::default() };
    let bind = "127.0.0.1:0".parse().unwrap();
    let shard =
        ShardHandle::start(bind, 0, config.buffers(), Clock::start(), &Failure::new()).unwrap();
    Registry::new(config, vec![shard], true, last_id)
}

pub(crate) fn wish(job: &str, rank: u16, world: u16) -> Join {
    Join {
        version: CONTROL_VERSION,
        job: job.into(),
        generation: Generation(0),
        secret: None,
        begun_by: None,
        rank,
        world,
        lanes: 1,
        data_ports: vec![1000 + rank],
        aggregates: false,
        receive_buffer: 1 << 20,
        max_datagram: 1472,
        multicast: true,
        data_auth: None,
        stripe: (0, 1),
        pool_slots: 2,
        wait: false,
        on_rank_loss: OnRankLoss::Abort,
        may_move: false,
        rejoin: false,
        resume: None,
    }
}

pub(super) type Inbox = Receiver<FromAggregator>;

pub(crate) fn join(registry: &mut Registry, wish: Join) -> Result<(Seat, Joined, Inbox), String> {
    join_at(registry, wish, Instant::now())
}

pub(super) fn join_at(
    registry: &mut Registry,
    wish: Join,
    now: Instant,
) -> Result<(Seat, Joined, Inbox), String> {
    let (caller, inbox) = caller(None, [127, 0, 0, 1]);
    let joined = registry.join(wish, caller, now);
    let (seat, joined) = joined.map_err(Refusal::why)?;
    Ok((seat, joined, inbox))
}

/// Returns a caller with this identity and address, and its inbox.
pub(super) fn caller(identity: Option<&str>, ip: [u8; 4]) -> (Caller, Inbox) {
    let (outbox, inbox) = channel(MEMBER_QUEUE);
    let (identity, addr) = (identity.map(str::to_owned), SocketAddr::from((ip, 9)));
    (Caller { identity, addr, outbox }, inbox)
}

pub(super) fn of_group(name: &str, group: &str) -> JobName {
    JobName::new(name, group)
}

/// Returns the last message that a rank received.
pub(super) fn last_message(inbox: &mut Inbox) -> Option<FromAggregator> {
    std::iter::from_fn(|| inbox.try_recv().ok()).last()
}

#[test]
fn no_two_jobs_have_one_number_even_when_the_numbers_begin_anew() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (first, ..) = join(&mut registry, wish("first", 0, 2)).unwrap();
    let (second, ..) = join(&mut registry, wish("second", 0, 2)).unwrap();
    assert_eq!([first.id, second.id], [JobId(1), JobId(2)]);
    registry.last_id = u32::MAX - 1;
    for (name, id) in [("third", u32::MAX), ("fourth", 3)] {
        let (seat, ..) = join(&mut registry, wish(name, 0, 2)).unwrap();
        assert_eq!(seat.id, JobId(id));
    }
}

#[test]
fn a_job_that_gathers_for_too_long_names_who_did_not_come_and_frees_its_place() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.join_timeout_s = 3;
    let (seat, joined, mut inbox) = join(&mut registry, wish("job", 1, 4)).unwrap();
    assert_eq!(joined, Joined::Waiting(vec![0, 2, 3]));
    let opened = Instant::now();
    assert_eq!(registry.check_timeouts(&seat, opened), Joined::Waiting(vec![0, 2, 3]));
    // Ranks that join and leave meanwhile do not restart the timeout.
    let (other, ..) = join(&mut registry, wish("job", 2, 4)).unwrap();
    let later = opened + Duration::from_secs(2);
    assert_eq!(registry.check_timeouts(&seat, later), Joined::Waiting(vec![0, 3]));
    registry.leave(&other, Loss::Left, Instant::now());
    registry.check_timeouts(&seat, opened + Duration::from_secs(4));
    let reason = "job \"job\" waited 3 s for ranks 0, 2, 3; start the missing ranks, or raise \
                  --join-timeout-s at the aggregator";
    assert_eq!(last_message(&mut inbox), Some(FromAggregator::Refused { reason: reason.into() }));
    assert!(inbox.is_closed());
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn a_job_that_runs_is_not_bounded_in_time() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (seat, joined, _inbox) = join(&mut registry, wish("job", 0, 1)).unwrap();
    assert_eq!(joined, Joined::Ready);
    let late = Instant::now() + Duration::from_secs(1 << 30);
    assert_eq!(registry.check_timeouts(&seat, late), Joined::Ready);
    assert_eq!(registry.jobs(), 1);
}

#[test]
fn a_seat_of_an_earlier_job_means_nothing_in_a_later_one_of_its_name() {
    let mut registry = registry(Fanout::Auto, 0);
    let lives: Vec<Vec<_>> = (0..2)
        .map(|_| {
            let ranks = (0..3).map(|rank| join(&mut registry, wish("job", rank, 3)).unwrap());
            let ranks: Vec<_> = ranks.collect();
            if registry.last_id == 1 {
                registry.refuse_all(&"job".into(), "for the test's sake");
            }
            ranks
        })
        .collect();
    for (seat, ..) in &lives[0] {
        registry.handle_ping_arrived(seat);
        registry.end_pings(seat);
        registry.leave(seat, Loss::Died, Instant::now());
        assert!(!registry.ping(seat));
    }
    let job = &registry.jobs[&"job".into()];
    assert_eq!((job.state, job.receives_multicast()), (JobState::Probing, vec![false; 3]));
    assert!(registry.ping(&lives[1][0].0));
}

#[test]
fn a_rank_that_leaves_while_the_group_is_pinged_does_not_pass_for_another() {
    let mut registry = registry(Fanout::Auto, 0);
    let mut ranks: Vec<_> =
        (0..3).map(|rank| join(&mut registry, wish("job", rank, 3)).unwrap()).collect();
    assert_eq!(ranks[2].1, Joined::Ping);
    registry.handle_ping_arrived(&ranks[1].0);
    registry.leave(&ranks[0].0, Loss::Left, Instant::now());
    registry.end_pings(&ranks[1].0);
    assert_eq!(registry.jobs[&"job".into()].receives_multicast(), [false, true, false]);
    for (rank, multicast) in [(1, true), (2, false)] {
        assert_eq!(last_message(&mut ranks[rank].2), Some(FromAggregator::Ready { multicast }));
    }
}

#[test]
fn a_rank_that_does_not_listen_is_not_pinged_for() {
    let unicast = |rank| Join { multicast: false, ..wish("job", rank, 3) };
    // The rank that does not listen gets copies, so only the others must receive a ping.
    let mut auto = registry(Fanout::Auto, 0);
    let (first, ..) = join(&mut auto, wish("job", 0, 3)).unwrap();
    let (second, ..) = join(&mut auto, wish("job", 1, 3)).unwrap();
    assert_eq!(join(&mut auto, unicast(2)).unwrap().1, Joined::Ping);
    auto.handle_ping_arrived(&first);
    auto.handle_ping_arrived(&second);
    assert_eq!(auto.jobs[&"job".into()].state, JobState::Running);
    // If no rank listens, there is nothing to ping.
    let mut none = registry(Fanout::Auto, 0);
    let joined = [0, 1, 2].map(|rank| join(&mut none, unicast(rank)).unwrap().1);
    assert_eq!(joined[2], Joined::Ready);
    // Where multicast is required, the rank is refused immediately, and the others keep waiting for
    // it.
    let mut demanded = registry(Fanout::Multicast, 0);
    let (_, _, mut inbox) = join(&mut demanded, wish("job", 0, 2)).unwrap();
    let reason = join(&mut demanded, Join { world: 2, ..unicast(1) }).unwrap_err();
    assert!(reason.starts_with("multicast does not reach rank 1 at 127.0.0.1; "), "{reason}");
    assert_eq!(last_message(&mut inbox), None);
    assert_eq!(join(&mut demanded, wish("job", 1, 2)).unwrap().1, Joined::Ping);
}

#[test]
fn a_rank_that_is_refused_has_never_had_a_place() {
    let mut registry = registry(Fanout::Unicast, 0);
    let right = wish("job", 1, 2);
    for (wrong, why) in [
        (
            Join { data_auth: Some(DataAuth::Aead), ..right.clone() },
            "this aggregator authenticates data with \"none\", but rank 1 asks for \"aead\"; ",
        ),
        (
            Join { data_auth: Some(DataAuth::Aead), aggregates: true, ..right.clone() },
            "\"none\", but the caller that joins for rank 1 uses \"aead\"; ",
        ),
        (
            Join { max_datagram: 1000, ..right.clone() },
            "rank 1 supports datagrams of at most 1000 bytes",
        ),
        (
            Join { stripe: (0, 2), ..right.clone() },
            "was opened with aggregator count 1, but rank 1 has 2; set the same aggregators",
        ),
        (Join { lanes: 2, ..right.clone() }, "was opened with lanes 1, but rank 1 has 2"),
        (Join { world: 3, ..right.clone() }, "was opened with world 2, but rank 1 has 3"),
        (Join { data_ports: vec![0], ..right.clone() }, "none of them 0"),
        (Join { pool_slots: 1, ..right.clone() }, "`pool_slots` must be at least 2"),
        (Join { on_rank_loss: OnRankLoss::Continue, ..right.clone() }, "`on_rank_loss` abort"),
    ] {
        let (first, _, mut inbox) = join(&mut registry, wish("job", 0, 2)).unwrap();
        let error = join(&mut registry, wrong).unwrap_err();
        assert!(error.contains(why), "{error}");
        assert_eq!(last_message(&mut inbox), None, "{why}");
        assert_eq!(join(&mut registry, right.clone()).unwrap().1, Joined::Ready, "{why}");
        registry.leave(&first, Loss::Died, Instant::now());
    }
}

#[test]
fn a_rank_that_has_not_heard_the_group_is_refused_only_where_multicast_is_demanded() {
    for fanout in [Fanout::Auto, Fanout::Multicast] {
        let mut registry = registry(fanout, 0);
        let mut ranks: Vec<_> =
            (0..3).map(|rank| join(&mut registry, wish("job", rank, 3)).unwrap()).collect();
        registry.handle_ping_arrived(&ranks[0].0);
        registry.end_pings(&ranks[0].0);
        let due = |rank| match fanout {
            Fanout::Multicast => FromAggregator::Refused {
                reason: "multicast does not reach rank 1 at 127.0.0.1; start the aggregator with \
                         --fanout auto or unicast"
                    .into(),
            },
            _ => FromAggregator::Ready { multicast: rank == 0 },
        };
        for (rank, (_, _, inbox)) in ranks.iter_mut().enumerate() {
            assert_eq!(last_message(inbox), Some(due(rank)));
        }
    }
}

#[test]
fn a_rank_that_no_data_could_reach_is_refused() {
    let mut registry = registry(Fanout::Unicast, 0);
    let port = Join { data_ports: vec![0], ..wish("job", 0, 1) };
    assert!(join(&mut registry, port).unwrap_err().contains("none of them 0"));
    let slots = Join { pool_slots: 1, ..wish("job", 0, 1) };
    assert!(join(&mut registry, slots).unwrap_err().contains("`pool_slots` must be at least 2"));
    let (outbox, _inbox) = channel(MEMBER_QUEUE);
    let mapped = (Ipv4Addr::LOCALHOST.to_ipv6_mapped(), 9).into();
    let refused = registry.join(
        wish("job", 0, 1),
        Caller { identity: None, addr: mapped, outbox },
        Instant::now(),
    );
    assert!(refused.unwrap_err().why().contains("the worker called it over IPv4"));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn a_rule_is_about_the_job_that_its_user_named_and_all_its_groups() {
    let mut registry = registry(Fanout::Unicast, 0);
    let rule = Admit { identity: "node".into(), jobs: vec!["vision-7".into()], ..Admit::default() };
    registry.reconfigure(Config { pool_mib: 64, admit: vec![rule], ..Config::default() });
    let mut join = |job| {
        let (caller, _inbox) = caller(Some("node"), [127, 0, 0, 1]);
        registry.join(Join { job, ..wish("", 0, 2) }, caller, Instant::now())
    };
    for group in ["", "0", "mesh/tp"] {
        let (seat, _) = join(of_group("vision-7", group)).unwrap();
        assert_eq!(seat.job, of_group("vision-7", group));
    }
    // A job name that looks like a group name is not treated as one.
    let why = join(of_group("vision-7/0", "")).unwrap_err().why();
    assert!(why.contains("may not join job \"vision-7/0\""), "{why}");
    let why = join(of_group("vision-7", &"x".repeat(129))).unwrap_err().why();
    assert!(why.ends_with("at most 128 bytes, not 129"), "{why}");
}

#[test]
fn two_thousand_ranks_that_wait_keep_out_nobody_for_whom_there_is_room() {
    let mut registry = registry(Fanout::Unicast, 0);
    let one = |identity: &str| Admit {
        identity: identity.into(),
        jobs: vec!["*".into()],
        max_jobs: Some(1),
        ..Admit::default()
    };
    let admit = vec![one("crowd-0"), one("crowd-1"), Admit { max_jobs: None, ..one("team") }];
    registry.reconfigure(Config { pool_mib: 4, admit, ..Config::default() });
    let now = Instant::now();
    let mut places = Vec::new();
    for nth in 0..2_002_u32 {
        let who = format!("crowd-{}", nth % 2);
        let wish = Join { wait: true, ..wish(&format!("crowd-{nth}"), 0, 2) };
        let (caller, _inbox) = caller(Some(&who), [10, 0, 0, u8::from(nth % 2 == 0)]);
        match registry.join(wish.clone(), caller.clone(), now) {
            Ok(_) => assert!(nth < 2),
            Err(Refusal::NoRoom(_)) => places.push(registry.enter_queue(&wish, &caller).unwrap()),
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!((places.len(), registry.connections()), (2_000, 2_002));
    let resume = Some(Resume { first_op: OpId(7), absent: Vec::new() });
    for wish in [wish("new", 0, 1), Join { resume, ..wish("moves", 0, 1) }] {
        let (caller, _inbox) = caller(Some("team"), [10, 0, 0, 9]);
        assert_eq!(registry.join(wish, caller, now).unwrap().1, Joined::Ready);
    }
    assert!(places.iter().all(|place| !registry.turn(place).0));
    // The turn of a waiting job comes once the running job of its rule has ended.
    let seat = Seat::of("crowd-0", 1, 0);
    registry.leave(&seat, Loss::Left, now);
    assert_eq!(places.iter().filter(|place| registry.turn(place).0).count(), 1);
    assert!(registry.turn(&places[0]).0);
}

#[test]
fn jobs_that_say_that_they_move_do_not_keep_out_one_that_waits() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.reconfigure(Config { max_jobs: 1, ..registry.config().clone() });
    let now = Instant::now();
    let (patient, _inbox) = caller(None, [10, 0, 0, 1]);
    let place = registry.enter_queue(&wish("waits", 0, 1), &patient).unwrap();
    let (greedy, _inbox) = caller(None, [10, 0, 0, 2]);
    let moves = (0..100).find(|nth| {
        let resume = Some(Resume { first_op: OpId(7), absent: Vec::new() });
        let wish = Join { resume, ..wish(&format!("moves-{nth}"), 0, 1) };
        let joined = registry.join(wish, greedy.clone(), now);
        let seat = joined.map(|(seat, _)| registry.leave(&seat, Loss::Left, now));
        matches!(seat, Err(Refusal::NoRoom(_)))
    });
    assert_eq!(moves, Some(16));
    assert_eq!(registry.turn(&place), (true, 0));
    registry.join(wish("waits", 0, 1), patient, now).unwrap();
}

#[test]
fn room_for_more_jobs_takes_nothing_from_those_that_run() {
    let mut registry = registry(Fanout::Unicast, 0);
    let limit = |max_jobs| Config { pool_mib: 4, max_jobs, ..Config::default() };
    registry.reconfigure(limit(2));
    let [one, _two] = ["one", "two"].map(|name| join(&mut registry, wish(name, 0, 1)).unwrap());
    // The running jobs keep their buffers, even though new shares are smaller.
    registry.reconfigure(limit(8));
    let error = join(&mut registry, wish("three", 0, 1)).unwrap_err();
    assert!(
        error.starts_with("100 % of the packet buffers are taken, and the job needs 12 %"),
        "{error}"
    );
    registry.leave(&one.0, Loss::Left, Instant::now());
    join(&mut registry, wish("three", 0, 1)).unwrap();
}

#[test]
fn only_a_place_that_was_left_while_the_job_ran_is_taken_by_one_that_comes_back() {
    let mut registry = registry(Fanout::Unicast, 0);
    let now = Instant::now();
    let movable = Join { may_move: true, ..wish("job", 0, 2) };
    let (_, _, _first) = join(&mut registry, movable).unwrap();
    // Another job, which still gathers ranks, must not affect this one.
    let (_, _, _other) = join(&mut registry, wish("other", 0, 2)).unwrap();
    let (seat, ..) = join(&mut registry, wish("job", 1, 2)).unwrap();
    let back = Join { rejoin: true, ..wish("job", 1, 2) };
    let caller = || {
        let (outbox, inbox) = channel(MEMBER_QUEUE);
        let addr = SocketAddr::from(([127, 0, 0, 1], 9));
        (Caller { identity: None, addr, outbox }, inbox)
    };
    // A rank that has no place to rejoin is refused before it waits.
    assert!(registry.may_rejoin(&back, &caller().0).is_err());
    registry.part(&seat, Some(OpId(0)), now);
    // The job may move, because one of its ranks knows a standby.
    assert_eq!(registry.may_rejoin(&back, &caller().0), Ok((seat.id, true)));
    let (first, _inbox) = caller();
    let (seat, _) = registry.rejoin(back.clone(), first, vec![0], now).unwrap();
    let (second, _inbox) = caller();
    let why = registry.rejoin(back.clone(), second, vec![0], now).unwrap_err().why();
    assert!(why.contains("rank 1 has not left job"), "{why}");
    // A rank that leaves again without having done anything may rejoin once more.
    registry.retreat(&seat, now);
    let (small, _inbox) = caller();
    let less = Join { receive_buffer: back.receive_buffer - 1, ..back.clone() };
    let why = registry.rejoin(less, small, vec![0], now).unwrap_err().why();
    assert!(why.contains("give the rank its former buffer"), "{why}");
    let (third, _inbox) = caller();
    registry.rejoin(back, third, vec![0], now).unwrap();
}

#[test]
fn a_tenant_that_loses_one_rank_after_another_does_not_fill_the_log() {
    const LOST: usize = 1000;
    let mut registry = registry(Fanout::Unicast, 0);
    let written = lines_logged(Level::WARN, || {
        for _ in 0..LOST {
            let (seat, ..) = join(&mut registry, wish("job", 0, 1)).unwrap();
            registry.leave(&seat, Loss::Broke, Instant::now());
        }
    });
    assert!(registry.jobs.is_empty());
    // The log holds an initial burst of 64 lines, and at most 64 more for each minute that the test
    // took.
    assert!(written < LOST / 2, "{written} lines for {LOST} lost ranks");
}
