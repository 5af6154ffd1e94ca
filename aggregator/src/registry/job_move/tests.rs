use racksum_proto::control::OnRankLoss;
use racksum_proto::ids::Generation;
use racksum_proto::loss::Loss;

use super::super::tests::{Inbox, caller, join, last_message, registry, wish};
use super::*;
use crate::admit_rule::Admit;
use crate::config::Fanout;
use crate::quotas::Refusal;

const HERE: std::net::IpAddr = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn target() -> MoveTarget {
    MoveTarget { hosts: vec!["agg-2:7177".into()] }
}

/// Returns the members of a running job of three ranks, which continues without lost ones if
/// `goes_on` is set.
fn running(registry: &mut Registry, goes_on: bool) -> Vec<(Seat, Inbox)> {
    let on_rank_loss = if goes_on { OnRankLoss::Continue } else { OnRankLoss::Abort };
    let joins = (0..3).map(|rank| Join { on_rank_loss, ..wish("job", rank, 3) });
    let joined = joins.map(|wish| join(registry, wish).unwrap());
    let mut ranks: Vec<_> = joined.map(|(seat, _, inbox)| (seat, inbox)).collect();
    ranks.iter_mut().for_each(|(_, inbox)| drop(last_message(inbox)));
    ranks
}

/// Reports that a member is prepared for the last move.
fn answer(registry: &mut Registry, seat: &Seat) {
    let number = registry.last_move;
    registry.handle_may_move(seat, true);
    registry.handle_move_prepared(seat, number);
}

/// Begins the last move.
fn begin(registry: &mut Registry) -> Result<oneshot::Receiver<()>, String> {
    begin_move(registry, registry.last_move)
}

/// Begins the move with this number.
fn begin_move(registry: &mut Registry, number: u32) -> Result<oneshot::Receiver<()>, String> {
    let begun = registry.begin_moves(&[(&"job".into(), number)]);
    begun.map(|mut departed| departed.pop().unwrap()).map_err(|(_, why)| why)
}

fn prepare(registry: &mut Registry, ranks: &[(Seat, Inbox)]) -> Prepared {
    registry.prepare_move(&"job".into(), ranks[0].0.id(), &target()).unwrap().1
}

#[test]
fn no_rank_is_told_to_move_before_all_are_prepared() {
    // wire: W-79
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = running(&mut registry, false);
    let (name, id) = ("job".into(), ranks[0].0.id());
    let mut prepared = prepare(&mut registry, &ranks);
    let shown = registry.status(([127, 0, 0, 1], 7177).into()).jobs.remove(0).moving_to;
    assert_eq!(shown.as_deref(), Some("agg-2:7177"));
    let again = registry.prepare_move(&name, id, &target()).unwrap_err();
    assert_eq!(again, "a move of job \"job\" to agg-2:7177 is in progress");
    // The end of an earlier move cancels no other, even if both go to the same target.
    registry.cancel_move(&name, 0);
    for (seat, inbox) in &mut ranks {
        let asked = Some(FromAggregator::PrepareMove { number: 1, to: target() });
        assert_eq!(last_message(inbox), asked);
        assert!(prepared.try_recv().is_err());
        assert_eq!(begin(&mut registry).unwrap_err(), "its ranks are not prepared");
        // An answer that comes twice counts once, and one to another move does not count.
        [0, 2, 1, 1].into_iter().for_each(|number| registry.handle_move_prepared(seat, number));
        registry.handle_cannot_move(seat, 0, "rank 0: no answer".into());
    }
    assert_eq!(prepared.try_recv(), Ok(Ok(())));
    ranks.iter().for_each(|(seat, _)| registry.handle_may_move(seat, true));
    let mut departed = begin(&mut registry).unwrap();
    assert_eq!(begin(&mut registry).unwrap_err(), "it is moving already");
    registry.cancel_move(&name, 1);
    for (seat, inbox) in &mut ranks {
        assert_eq!(last_message(inbox), Some(FromAggregator::MoveNow { number: 1 }));
        assert!(departed.try_recv().is_err());
        registry.depart(seat, Instant::now());
    }
    assert_eq!((departed.try_recv(), registry.jobs()), (Ok(()), 0));
    // Only the target can tell whether the job runs there.
    assert!(registry.moved_jobs().is_empty());
    registry.note_moved(name.clone(), target(), Instant::now());
    let moved: Vec<_> = registry.moved_jobs().into_iter().map(|it| (it.job, it.to)).collect();
    assert_eq!(moved, [(name.clone(), "agg-2:7177".to_owned())]);
    let why = registry.movable(&name).unwrap_err();
    assert_eq!(why, "job \"job\" is not here: it moved to agg-2:7177 0 s ago");
}

#[test]
fn the_end_of_a_move_leaves_a_later_one_alone() {
    // wire: W-79
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = running(&mut registry, false);
    let name = "job".into();
    let _first = prepare(&mut registry, &ranks);
    registry.cancel_move(&name, 1);
    let _second = prepare(&mut registry, &ranks);
    assert!(registry.unprepared(&name, 1).is_empty());
    ranks.iter().for_each(|(seat, _)| answer(&mut registry, seat));
    ranks.iter_mut().for_each(|(_, inbox)| drop(last_message(inbox)));
    let why = begin_move(&mut registry, 1).unwrap_err();
    assert_eq!(why, "the move was cancelled; try again");
    registry.cancel_move(&name, 1);
    assert!(registry.end_move(&name, 1).is_empty());
    let mut departed = begin_move(&mut registry, 2).unwrap();
    assert!(registry.end_move(&name, 1).is_empty());
    for (seat, inbox) in &mut ranks {
        assert_eq!(last_message(inbox), Some(FromAggregator::MoveNow { number: 2 }));
        registry.handle_may_move(seat, true);
        registry.depart(seat, Instant::now());
    }
    assert_eq!(departed.try_recv(), Ok(()));
}

#[test]
fn a_move_that_does_not_come_about_changes_nothing_for_a_rank_that_is_lost_later() {
    let now = Instant::now();
    // Whether the move began, and whether it has ended since.
    for (begins, ends) in [(false, true), (true, false), (true, true)] {
        let mut registry = registry(Fanout::Unicast, 0);
        let ranks = running(&mut registry, true);
        let (name, id) = ("job".into(), ranks[0].0.id());
        let _prepared = prepare(&mut registry, &ranks);
        ranks.iter().for_each(|(seat, _)| answer(&mut registry, seat));
        assert!(registry.unprepared(&name, 1).is_empty());
        let begun = begins.then(|| begin(&mut registry).unwrap());
        if ends {
            registry.cancel_move(&name, 1);
            let stayed = if begins { vec![0, 1, 2] } else { Vec::new() };
            assert_eq!(registry.end_move(&name, 1), stayed);
            assert_eq!(registry.movable(&name).map(|job| job.id), Ok(id));
            ranks.iter().for_each(|(seat, _)| registry.handle_may_move(seat, false));
        }
        drop(begun);
        // Two silent ranks may be together elsewhere only if the job may have moved.
        ranks[..2].iter().for_each(|(seat, _)| registry.leave(seat, Loss::Silent, now));
        assert_eq!(registry.jobs(), usize::from(ends), "begins: {begins}, ends: {ends}");
    }
}

#[test]
fn only_a_rank_that_knows_another_aggregator_leaves_for_it() {
    // Another aggregator of the job may have named the target to the rank.
    for knows in [false, true] {
        let mut registry = registry(Fanout::Unicast, 0);
        let ranks = running(&mut registry, false);
        ranks.iter().for_each(|(seat, _)| registry.handle_may_move(seat, knows));
        for (seat, _) in &ranks[..2] {
            registry.depart(seat, Instant::now());
            assert_eq!(registry.jobs(), usize::from(knows));
        }
    }
}

#[test]
fn of_several_groups_none_moves_before_all_are_prepared() {
    let mut registry = registry(Fanout::Unicast, 0);
    let names = ["dp", "tp"].map(|group| JobName::new("job", group));
    let mut ranks = names.clone().map(|job| {
        let (seat, _, inbox) = join(&mut registry, Join { job, ..wish("job", 0, 1) }).unwrap();
        (seat, inbox)
    });
    let each = [0, 1].map(|at| (&names[at], ranks[at].0.id()));
    let asked = each.map(|(name, id)| registry.prepare_move(name, id, &target()).unwrap());
    registry.handle_move_prepared(&ranks[0].0, 1);
    registry.handle_move_prepared(&ranks[1].0, 1);
    let moves = [(&names[0], 1), (&names[1], 2)];
    let (name, why) = registry.begin_moves(&moves).unwrap_err();
    assert_eq!((&name, &*why), (&names[1], "its ranks are not prepared"));
    registry.handle_move_prepared(&ranks[1].0, 2);
    assert_eq!(registry.begin_moves(&moves).map(|begun| begun.len()), Ok(2));
    drop(asked);
    for (number, (_, inbox)) in (1..).zip(&mut ranks) {
        assert_eq!(last_message(inbox), Some(FromAggregator::MoveNow { number }));
    }
}

#[test]
fn a_rank_does_not_rejoin_a_job_that_is_moving() {
    let mut registry = registry(Fanout::Unicast, 0);
    let ranks = running(&mut registry, false);
    let _prepared = prepare(&mut registry, &ranks);
    ranks.iter().for_each(|(seat, _)| answer(&mut registry, seat));
    let _departed = begin(&mut registry).unwrap();
    registry.part(&ranks[1].0, Some(OpId(3)), Instant::now());
    let (back, _inbox) = caller(None, [127, 0, 0, 1]);
    let rejoins = Join { rejoin: true, ..wish("job", 1, 3) };
    let why = registry.may_rejoin(&rejoins, &back).unwrap_err().why();
    assert_eq!(why, "job \"job\" is moving to agg-2:7177; join it there");
}

#[test]
fn an_aggregator_that_hands_its_jobs_over_admits_only_those_that_come_back() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.max_jobs = 4;
    let ranks = running(&mut registry, false);
    let (_, _, _gathers) = join(&mut registry, wish("gathers", 0, 2)).unwrap();
    let started = registry.begin_hand_over().unwrap();
    assert_eq!(started, BTreeSet::from(["job".into()]));
    let again = registry.begin_hand_over().unwrap_err();
    assert!(again.contains("are already being moved away; wait until"), "{again}");
    let resume = Some(Resume { first_op: OpId(0), absent: Vec::new() });
    let back = |job| Join { may_move: true, resume: resume.clone(), ..wish(job, 0, 3) };
    let (new, late) = (wish("new", 0, 1), wish("gathers", 1, 2));
    for refused in [new.clone(), late.clone(), back("other")] {
        assert_eq!(join(&mut registry, refused).unwrap_err(), "this aggregator is draining");
    }
    ranks.iter().for_each(|(seat, _)| registry.leave(seat, Loss::Died, Instant::now()));
    let (_, _, _back) = join(&mut registry, back("job")).unwrap();
    registry.end_hand_over();
    let _joined = [new, late].map(|join_again| join(&mut registry, join_again).unwrap());
}

#[test]
fn a_move_names_the_ranks_that_are_not_prepared() {
    let mut registry = registry(Fanout::Unicast, 0);
    let ranks = running(&mut registry, false);
    let _prepared = prepare(&mut registry, &ranks);
    answer(&mut registry, &ranks[1].0);
    assert_eq!(registry.unprepared(&"job".into(), 1), [0, 2]);
}

#[test]
fn a_move_is_cancelled_if_a_rank_refuses_leaves_or_moves_by_itself_or_if_the_aggregator_drains() {
    type Act = fn(&mut Registry, &Seat);
    let cases: [(&str, Act); 4] = [
        ("rank 1: no answer", |registry, seat| {
            let number = registry.last_move;
            registry.handle_cannot_move(seat, number, "rank 1: no answer".into());
        }),
        ("rank 1 has left the job", |registry, seat| {
            registry.part(seat, Some(OpId(3)), Instant::now());
        }),
        ("rank 1 has already moved to another aggregator", |registry, seat| {
            registry.depart(seat, Instant::now());
        }),
        ("the aggregator is draining", |registry, _| registry.drain()),
    ];
    // Whether the rank acts before or after all ranks are prepared.
    for (why, act) in cases {
        for is_late in [false, true] {
            let mut registry = registry(Fanout::Unicast, 0);
            let mut ranks = running(&mut registry, false);
            let name = "job".into();
            let mut prepared = prepare(&mut registry, &ranks);
            let all = if is_late { &ranks[..] } else { &ranks[..2] };
            all.iter().for_each(|(seat, _)| answer(&mut registry, seat));
            act(&mut registry, &ranks[1].0);
            let expected = if is_late { Ok(()) } else { Err(why.to_owned()) };
            assert_eq!(prepared.try_recv(), Ok(expected));
            answer(&mut registry, &ranks[2].0);
            let reason = begin(&mut registry).unwrap_err();
            let reasons = [why, "the move was cancelled; try again"];
            assert!(reasons.contains(&&*reason), "{why}, {is_late}: {reason}");
            registry.cancel_move(&name, 1);
            let received: Vec<_> =
                std::iter::from_fn(|| ranks[0].1.try_recv().ok()).skip(1).collect();
            let cancelled = FromAggregator::CancelMove { number: 1 };
            assert_eq!(received[0], cancelled, "{why}: {received:?}");
            assert_eq!(registry.jobs(), 1);
        }
    }
}

#[test]
fn moves_that_are_cancelled_leave_room_for_the_messages_of_the_job() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = running(&mut registry, false);
    let name = "job".into();
    let why = (1..).find_map(|number| {
        let prepared = registry.prepare_move(&name, ranks[0].0.id(), &target());
        registry.cancel_move(&name, number);
        // The other ranks read their messages.
        ranks[1..].iter_mut().for_each(|(_, inbox)| drop(last_message(inbox)));
        prepared.err()
    });
    let stuck = "rank 0 of job \"job\" did not read its earlier messages yet; try again later";
    assert_eq!(why.as_deref(), Some(stuck));
    registry.leave(&ranks[2].0, Loss::Died, Instant::now());
    let lost = FromAggregator::PeerLost { ranks: vec![2], why: Loss::Died };
    assert_eq!(last_message(&mut ranks[0].1), Some(lost));
}

#[test]
fn a_move_waits_for_no_rank_that_the_job_continues_without_and_for_no_job_that_ends() {
    let mut registry = registry(Fanout::Unicast, 0);
    let ranks = running(&mut registry, true);
    let mut prepared = prepare(&mut registry, &ranks);
    ranks[..2].iter().for_each(|(seat, _)| answer(&mut registry, seat));
    registry.leave(&ranks[2].0, Loss::Died, Instant::now());
    assert_eq!(prepared.try_recv(), Ok(Ok(())));
    // The join at the target names the lost rank.
    registry.cancel_move(&"job".into(), 1);
    let resume = registry.movable(&"job".into()).unwrap().join.resume.unwrap();
    assert_eq!(resume.absent.iter().map(|absent| absent.rank).collect::<Vec<_>>(), [2]);
    registry.refuse_all(&"job".into(), "for the test's sake");

    let ranks = running(&mut registry, false);
    let mut prepared = prepare(&mut registry, &ranks);
    registry.leave(&ranks[2].0, Loss::Died, Instant::now());
    assert_eq!(prepared.try_recv(), Err(oneshot::error::TryRecvError::Closed));
}

#[test]
fn a_job_that_gathers_or_that_a_rank_has_left_does_not_move() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (seat, _, _inbox) = join(&mut registry, wish("waits", 1, 3)).unwrap();
    let why = |registry: &Registry, job: &str| registry.movable(&job.into()).unwrap_err();
    let expected = "job \"waits\" has not started: it waits for ranks 0, 2; try again once it runs";
    assert_eq!(why(&registry, "waits"), expected);
    assert!(registry.prepare_move(&"waits".into(), seat.id(), &target()).is_err());
    let ranks = running(&mut registry, false);
    registry.part(&ranks[1].0, Some(OpId(3)), Instant::now());
    assert!(why(&registry, "job").starts_with("rank 1 left job \"job\", and the job would wait"));
    assert!(why(&registry, "none").starts_with("job \"none\" is not here: it has ended, or never"));
}

#[test]
fn a_name_without_a_group_means_all_groups_of_the_job() {
    let mut registry = registry(Fanout::Unicast, 0);
    for (name, group) in [("a", ""), ("a", "dp"), ("ab", ""), ("b", "dp")] {
        let job = JobName::new(name, group);
        join(&mut registry, Join { job, ..wish("a", 0, 2) }).unwrap();
    }
    let groups = |job: JobName| registry.groups_of(&job).len();
    assert_eq!(groups("a".into()), 2);
    assert_eq!(groups(JobName::new("a", "dp")), 1);
    assert_eq!(groups("c".into()), 0);
}

#[test]
fn a_job_is_told_whether_there_is_room_for_it_without_taking_any() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.max_jobs = 1;
    let moving = |rank| Join { may_move: true, ..wish("job", rank, 2) };
    let room = |registry: &Registry, join: &Join, identity: Option<&str>| {
        registry.check_space(join, identity, HERE).map_err(Refusal::why)
    };
    for _ in 0..3 {
        assert_eq!(room(&registry, &moving(0), None), Ok(()));
    }
    assert_eq!(registry.jobs(), 0);
    let (other, _) = caller(None, [127, 0, 0, 1]);
    let (seat, _) = registry.join(wish("other", 0, 2), other, Instant::now()).unwrap();
    let why = room(&registry, &moving(0), None).unwrap_err();
    assert!(why.starts_with("there is 1 job, and --max-jobs of the aggregator allows 1"), "{why}");
    registry.leave(&seat, Loss::Died, Instant::now());

    // A job of this name that already runs here is another one.
    let ranks = running(&mut registry, false);
    let why = room(&registry, &moving(0), None).unwrap_err();
    assert_eq!(why, "it already serves a job with the name \"job\"");
    drop(ranks);
    registry.refuse_all(&"job".into(), "for the test's sake");

    // A rank may follow others of its job that have moved here, and need not show the secret.
    let resume = Some(Resume { first_op: OpId(7), absent: Vec::new() });
    let secret = Some(racksum_proto::auth::Key([7; 16]));
    let came = Join { resume: resume.clone(), ..moving(0) };
    let (seat, _, _inbox) = join(&mut registry, Join { secret, ..came.clone() }).unwrap();
    let by = Some(racksum_proto::control::CallerId::Address(HERE));
    let follows = Join { rank: 1, ..came };
    assert_eq!(room(&registry, &follows, None), Ok(()));
    for other in [
        Join { begun_by: by, ..follows.clone() },
        Join { generation: Generation(1), ..follows.clone() },
        Join { world: 3, ..follows },
    ] {
        assert!(room(&registry, &other, None).unwrap_err().starts_with("it already serves"));
    }
    registry.leave(&seat, Loss::Died, Instant::now());

    registry.config.parent = Some("root:7177".into());
    let came = Join { resume, ..moving(0) };
    let why = room(&registry, &came, None).unwrap_err();
    assert_eq!(why, "it has a parent, so no running job can move to it");
    registry.config.parent = None;

    // The rank's own identity counts.
    let admit = Admit { identity: "vision-*".into(), jobs: vec!["*".into()], ..Admit::default() };
    registry.config.admit = vec![admit];
    assert_eq!(room(&registry, &moving(0), Some("vision-1")), Ok(()));
    assert!(room(&registry, &moving(0), Some("speech-1")).unwrap_err().contains("may not join"));
    registry.config.admit.clear();
    let many = Join { lanes: 8, world: 256, ..moving(0) };
    assert!(room(&registry, &many, None).unwrap_err().contains("too few packet buffers"));
    registry.drain();
    assert!(room(&registry, &moving(0), None).is_err());
}
