use racksum_proto::control::CONTROL_VERSION;
use racksum_proto::ids::{Generation, OpId};

use super::super::tests::{Inbox, join, join_at, last_message, registry, wish};
use super::*;
use crate::config::{Config, Fanout};

/// Returns the join of a rank whose job continues after losses and has moved here.
fn moved(rank: u16, world: u16, absent: &[LostRank]) -> Join {
    let resume = Resume { first_op: OpId(7), absent: absent.to_vec() };
    let on_rank_loss = OnRankLoss::Continue;
    Join { on_rank_loss, may_move: true, resume: Some(resume), ..wish("job", rank, world) }
}

fn gone(rank: u16, why: Loss) -> LostRank {
    LostRank { rank, why }
}

fn all(registry: &mut Registry, joins: impl IntoIterator<Item = Join>) -> Vec<(Seat, Inbox)> {
    let joined = joins.into_iter().map(|wish| join(registry, wish).unwrap());
    joined.map(|(seat, _, inbox)| (seat, inbox)).collect()
}

/// Returns all messages that a rank received, except its welcome.
fn messages(inbox: &mut Inbox) -> Vec<FromAggregator> {
    let all = std::iter::from_fn(|| inbox.try_recv().ok());
    all.filter(|message| !matches!(message, FromAggregator::Welcome(_))).collect()
}

#[test]
fn a_job_that_lost_a_rank_on_the_way_is_pinged_like_any_other() {
    let mut registry = registry(Fanout::Auto, 0);
    let mut ranks = all(&mut registry, [0, 1].map(|rank| moved(rank, 3, &[])));
    let now = Instant::now();
    assert_eq!(registry.check_timeouts(&ranks[0].0, now), Joined::Waiting(vec![2]));
    ranks.iter().for_each(|(seat, _)| registry.note_received(seat, now + PATIENCE));
    assert_eq!(registry.check_timeouts(&ranks[0].0, now + PATIENCE), Joined::Ping);
    assert_eq!(registry.check_timeouts(&ranks[1].0, now + PATIENCE), Joined::Ready);
    ranks.iter().for_each(|(seat, _)| registry.handle_ping_arrived(seat));
    let without = FromAggregator::ContinueWithout(gone(2, Loss::Silent));
    let ready = FromAggregator::Ready { multicast: true };
    for (_, inbox) in &mut ranks {
        assert_eq!(messages(inbox), [ready.clone(), without.clone()]);
    }
}

#[test]
fn a_rank_that_is_lost_while_the_group_is_pinged_is_gone_on_without() {
    let mut registry = registry(Fanout::Auto, 0);
    let on_rank_loss = OnRankLoss::Continue;
    let joins = [0, 1, 2].map(|rank| Join { on_rank_loss, ..wish("job", rank, 3) });
    let mut ranks = all(&mut registry, joins);
    registry.leave(&ranks[1].0, Loss::Died, Instant::now());
    registry.end_pings(&ranks[0].0);
    let without = FromAggregator::ContinueWithout(gone(1, Loss::Died));
    let ready = FromAggregator::Ready { multicast: false };
    assert_eq!(messages(&mut ranks[0].1), [ready, without]);
}

#[test]
fn ranks_that_may_be_together_elsewhere_are_not_gone_on_without_by_fewer() {
    let lost = |ranks: Vec<u16>| FromAggregator::PeerLost { ranks, why: Loss::Silent };
    // Half of the ranks that are not certainly lost are not a majority. Ranks that have died do not
    // count.
    for (world, absent, here, goes_on) in [
        (3, vec![], 1, false),
        (3, vec![], 2, true),
        (4, vec![], 2, false),
        (4, vec![gone(3, Loss::Died)], 2, true),
        (5, vec![gone(4, Loss::Silent)], 2, false),
        (5, vec![gone(4, Loss::Left)], 2, false),
        (5, vec![gone(4, Loss::Left)], 3, true),
    ] {
        let mut registry = registry(Fanout::Unicast, 0);
        registry.config.max_jobs = 1;
        let mut ranks = all(&mut registry, (0..here).map(|rank| moved(rank, world, &absent)));
        let later = Instant::now() + PATIENCE;
        ranks.iter().for_each(|(seat, _)| registry.note_received(seat, later));
        registry.check_timeouts(&ranks[0].0, later);
        let missing: Vec<u16> =
            (here..world).filter(|rank| absent.iter().all(|gone| gone.rank != *rank)).collect();
        assert_eq!(registry.jobs() == 1, goes_on, "{here} of {world} without {absent:?}");
        assert_eq!(last_message(&mut ranks[0].1) == Some(lost(missing)), !goes_on);
    }
    // The rule also holds for a running job if any of its ranks knows a standby.
    for (may_move, why, goes_on) in
        [(true, Loss::Silent, false), (true, Loss::Died, true), (false, Loss::Broke, true)]
    {
        let mut registry = registry(Fanout::Unicast, 0);
        let joins = [0, 1].map(|rank| Join { may_move, resume: None, ..moved(rank, 2, &[]) });
        let ranks = all(&mut registry, joins);
        let now = Instant::now();
        let ending = registry.ending_by_loss(&ranks[1].0, why, now);
        assert_eq!(ending.is_none(), goes_on, "{why:?}: results are resent before the job ends");
        registry.leave(&ranks[1].0, why, now);
        assert_eq!(registry.jobs() == 1, goes_on, "{why:?}");
    }
}

#[test]
fn a_rank_that_the_others_have_lost_is_none_of_the_job_any_more() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = all(&mut registry, [moved(2, 3, &[]), moved(0, 3, &[gone(2, Loss::Silent)])]);
    let Some(FromAggregator::Refused { reason }) = last_message(&mut ranks[0].1) else { panic!() };
    assert!(reason.contains("lost rank 2 and continues without it"), "{reason}");
    assert!(ranks[0].1.is_closed());
    assert_eq!(join(&mut registry, moved(2, 3, &[])).unwrap_err(), reason);
    let (_, joined, _) = join(&mut registry, moved(1, 3, &[])).unwrap();
    assert_eq!(joined, Joined::Ready);
}

#[test]
fn a_rank_that_says_of_a_job_what_cannot_be_is_refused() {
    let mut registry = registry(Fanout::Unicast, 0);
    let lost = |rank| gone(rank, Loss::Died);
    for absent in [vec![lost(0)], vec![lost(3)], vec![lost(1), lost(1)]] {
        let why = join(&mut registry, moved(0, 3, &absent)).unwrap_err();
        assert!(why.contains("which is impossible"), "{why}");
    }
    let aborts = Join { on_rank_loss: OnRankLoss::Abort, ..moved(0, 3, &[lost(1)]) };
    assert!(join(&mut registry, aborts).unwrap_err().contains("which is impossible"));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn ranks_of_which_some_never_heard_that_ops_may_start_come_together() {
    for first in [0, 1] {
        let mut registry = registry(Fanout::Unicast, 0);
        let resume = Resume { first_op: OpId(0), absent: Vec::new() };
        let of = |rank: u16| Join {
            resume: (rank == first).then(|| resume.clone()),
            ..moved(rank, 2, &[])
        };
        join(&mut registry, of(0)).unwrap();
        assert_eq!(join(&mut registry, of(1)).unwrap().1, Joined::Ready);
    }
    let mut registry = registry(Fanout::Unicast, 0);
    join(&mut registry, moved(0, 2, &[])).unwrap();
    let anew = Join { resume: None, ..moved(1, 2, &[]) };
    assert!(join(&mut registry, anew).unwrap_err().contains("starts from its first op"));
}

#[test]
fn a_rank_that_goes_on_elsewhere_alone_is_lost() {
    let mut registry = registry(Fanout::Unicast, 0);
    let joins = [0, 1].map(|rank| Join { may_move: true, ..wish("job", rank, 2) });
    let mut ranks = all(&mut registry, joins);
    let now = Instant::now();
    registry.depart(&ranks[1].0, now);
    registry.check_timeouts(&ranks[0].0, now + PATIENCE / 2);
    assert_eq!(last_message(&mut ranks[0].1), Some(FromAggregator::Ready { multicast: false }));
    registry.check_timeouts(&ranks[0].0, now + PATIENCE);
    let lost = FromAggregator::PeerLost { ranks: vec![1], why: Loss::Broke };
    assert_eq!(last_message(&mut ranks[0].1), Some(lost));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn ranks_of_which_nothing_is_heard_count_for_nothing_before_they_are_lost() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.max_jobs = 1;
    let joins = (0..5).map(|rank| Join { resume: None, ..moved(rank, 5, &[]) });
    let mut ranks = all(&mut registry, joins);
    // Three ranks are cut off at once, and reported as lost one after the other.
    let later = Instant::now() + PATIENCE;
    ranks[3..].iter().for_each(|(seat, _)| registry.note_received(seat, later));
    registry.leave(&ranks[0].0, Loss::Silent, later);
    let lost = FromAggregator::PeerLost { ranks: vec![0], why: Loss::Silent };
    assert_eq!(last_message(&mut ranks[3].1), Some(lost));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn ranks_that_only_tried_to_come_here_are_not_here() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.max_jobs = 1;
    let ranks = all(&mut registry, (0..4).map(|rank| moved(rank, 5, &[])));
    let now = Instant::now();
    for (seat, _) in &ranks[..3] {
        registry.depart(seat, now);
    }
    assert_eq!(registry.check_timeouts(&ranks[3].0, now + PATIENCE), Joined::Ready);
    assert_eq!(registry.jobs(), 0, "one of five ranks is not a majority");
}

#[test]
fn a_rank_that_lacks_too_many_others_opens_no_job_and_ends_none() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (_running, _, mut inbox) = join(&mut registry, wish("job", 0, 100)).unwrap();
    let many: Vec<_> = (1..=64).map(|rank| gone(rank, Loss::Died)).collect();
    let moved = Join { generation: Generation(5), ..moved(0, 100, &many) };
    for name in ["job", "another"] {
        let wish = Join { job: name.into(), ..moved.clone() };
        let why = join(&mut registry, wish).unwrap_err();
        assert_eq!(
            why.to_string(),
            "the job has lost more than 63 ranks, the most that a job can continue without; \
             restart all ranks with a greater `generation`"
        );
    }
    assert_eq!((registry.jobs(), last_message(&mut inbox)), (1, None));
}

#[test]
fn a_rank_that_goes_elsewhere_while_the_group_is_pinged_is_missed_in_the_end() {
    let mut registry = registry(Fanout::Auto, 0);
    let mut ranks = all(&mut registry, [0, 1, 2].map(|rank| moved(rank, 3, &[])));
    let now = Instant::now();
    registry.depart(&ranks[1].0, now);
    registry.end_pings(&ranks[0].0);
    let then = now + PATIENCE;
    for rank in [0, 2] {
        registry.note_received(&ranks[rank].0, then);
    }
    assert_eq!(registry.check_timeouts(&ranks[0].0, then), Joined::Ready);
    let without = FromAggregator::ContinueWithout(gone(1, Loss::Broke));
    assert!(messages(&mut ranks[0].1).contains(&without));
}

#[test]
fn a_job_does_not_begin_while_a_rank_would_rather_be_elsewhere() {
    // wire: W-67
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = all(&mut registry, [wish("job", 0, 2)]);
    assert!(registry.withdraw(&ranks[0].0));
    let (other, joined, mut inbox) = join(&mut registry, wish("job", 1, 2)).unwrap();
    assert_eq!(joined, Joined::Waiting(vec![0]));
    assert_eq!(registry.check_timeouts(&other, Instant::now()), Joined::Waiting(vec![0]));
    assert_eq!(registry.stay(&ranks[0].0), Joined::Ready);
    let ready = FromAggregator::Ready { multicast: false };
    for inbox in [&mut ranks[0].1, &mut inbox] {
        assert_eq!(messages(inbox), std::slice::from_ref(&ready));
    }
    // The job has started, so the other rank depends on this one.
    assert!(!registry.withdraw(&ranks[0].0));
    assert_eq!(registry.stay(&ranks[0].0), Joined::Ready);
    assert_eq!(registry.connections(), 2);
}

#[test]
fn a_rank_that_may_not_withdraw_is_told_what_became_of_its_job() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut ranks = all(&mut registry, [wish("job", 0, 2)]);
    join(&mut registry, Join { generation: Generation(1), ..wish("job", 1, 2) }).unwrap();
    assert!(!registry.withdraw(&ranks[0].0));
    let last_message = messages(&mut ranks[0].1);
    assert!(
        matches!(last_message[..], [FromAggregator::Superseded { by: Generation(1), .. }]),
        "{last_message:?}"
    );
}

#[test]
fn a_rank_that_would_rather_be_elsewhere_is_not_waited_for_when_the_time_is_over() {
    let mut registry = registry(Fanout::Unicast, 0);
    registry.config.max_jobs = 1;
    let mut ranks = all(&mut registry, [0, 1, 2].map(|rank| moved(rank, 4, &[])));
    assert!(registry.withdraw(&ranks[2].0));
    let later = Instant::now() + PATIENCE;
    ranks.iter().for_each(|(seat, _)| registry.note_received(seat, later));
    registry.check_timeouts(&ranks[0].0, later);
    // Two of four ranks are not a majority.
    let lost = FromAggregator::PeerLost { ranks: vec![2, 3], why: Loss::Silent };
    assert_eq!(last_message(&mut ranks[0].1), Some(lost.clone()));
    assert_eq!(last_message(&mut ranks[2].1), Some(lost));
    assert!(ranks[2].1.is_closed());
    // Three of four ranks are a majority.
    let mut ranks = all(&mut registry, [0, 1, 2, 3].map(|rank| moved(rank, 5, &[])));
    assert!(registry.withdraw(&ranks[3].0));
    let later = Instant::now() + PATIENCE;
    ranks.iter().for_each(|(seat, _)| registry.note_received(seat, later));
    registry.check_timeouts(&ranks[0].0, later);
    let first = messages(&mut ranks[0].1);
    assert!(matches!(first[0], FromAggregator::Ready { .. }), "{first:?}");
    let Some(FromAggregator::Refused { reason }) = last_message(&mut ranks[3].1) else { panic!() };
    assert!(reason.contains("lost rank 3 and continues without it"), "{reason}");
}

#[test]
fn who_asks_does_not_hear_of_a_rank_that_it_has_lost_and_does_not_inherit_its_time() {
    let mut registry = registry(Fanout::Unicast, 0);
    let mut lost = all(&mut registry, [moved(3, 5, &[])]);
    let asks = moved(0, 5, &[gone(3, Loss::Silent)]);
    let here = (None, IpAddr::from([127, 0, 0, 1]));
    let now = Instant::now();
    assert_eq!(registry.present(&moved(0, 5, &[]), here, now), [3]);
    assert!(registry.present(&asks, here, now).is_empty());
    // Rank 0 joins before rank 3's job times out, and gets the full time to wait.
    let later = now + PATIENCE * 3 / 4;
    let (seat, _, mut inbox) = join_at(&mut registry, asks, later).unwrap();
    assert!(matches!(last_message(&mut lost[0].1), Some(FromAggregator::Refused { .. })));
    let late = now + PATIENCE * 3 / 2;
    assert_eq!(registry.check_timeouts(&seat, late), Joined::Waiting(vec![1, 2, 4]));
    assert_eq!(last_message(&mut inbox), None);
}

#[test]
fn who_asks_hears_which_ranks_wait_where_it_could_join() {
    let mut registry = registry(Fanout::Unicast, 0);
    let asks = wish("job", 0, 3);
    let now = Instant::now();
    let here = (None, IpAddr::from([127, 0, 0, 1]));
    let present = |registry: &Registry| registry.present(&asks, here, now);
    assert!(present(&registry).is_empty());
    let ranks = all(&mut registry, [1, 2].map(|rank| wish("job", rank, 3)));
    assert_eq!(present(&registry), [1, 2]);
    for other in [
        Join { generation: Generation(1), ..asks.clone() },
        Join { stripe: (1, 2), ..asks.clone() },
        Join { world: 4, ..asks.clone() },
        Join { version: CONTROL_VERSION + 1, ..asks.clone() },
        // This rank resumes its job, but the job here starts from its first op.
        Join { on_rank_loss: OnRankLoss::Abort, ..moved(0, 3, &[]) },
    ] {
        assert!(registry.present(&other, here, now).is_empty(), "{other:?} could not join");
    }
    let later = Instant::now() + MAX_SILENCE;
    registry.note_received(&ranks[0].0, later);
    assert_eq!(registry.present(&asks, here, later), [1], "the other rank is silent");
    assert!(registry.withdraw(&ranks[0].0));
    assert_eq!(present(&registry), [2], "a rank that is about to leave does not wait");
    registry.stay(&ranks[0].0);
    let rule = "[[admit]]\nidentity = \"somebody\"\njobs = [\"job\"]";
    let Config { admit, .. } = toml::from_str(rule).unwrap();
    let admit = std::mem::replace(&mut registry.config.admit, admit);
    assert!(present(&registry).is_empty(), "a stranger could not join");
    registry.config.admit = admit;
    registry.config.parent = Some("127.0.0.1:7".into());
    assert_eq!(present(&registry), [1, 2]);
    let moves = Join { may_move: true, ..asks.clone() };
    assert!(registry.present(&moves, here, now).is_empty(), "a job cannot move away from a parent");
    registry.config.parent = None;
    all(&mut registry, [wish("job", 0, 3)]);
    assert!(present(&registry).is_empty(), "the job has begun");
}
