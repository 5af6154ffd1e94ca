//! Joins that an aggregator in a tree refuses, and joins that its parent refuses.

use super::*;

#[test]
fn what_cannot_be_in_a_tree_is_refused_with_what_to_do() {
    let mut leaf = leaf();
    let wishes = |wish: Join| {
        [
            (Join { may_move: true, ..wish.clone() }, "move to a standby"),
            (
                Join { on_rank_loss: OnRankLoss::Continue, ..wish.clone() },
                "continue without a rank",
            ),
            (Join { stripe: (0, 2), ..wish }, "use several aggregators at once"),
        ]
    };
    for (wish, why) in wishes(wish("job", 0, 2)) {
        let error = join(&mut leaf, wish).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let mut root = registry(Fanout::Unicast, 0);
    // The root cannot tell a child aggregator from a sidecar with several ranks, which may move to
    // a standby.
    for (wish, why) in wishes(relayed("job", 0, 2)).into_iter().skip(1) {
        let error = join(&mut root, wish).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let error = join(&mut root, Join { data_ports: vec![1, 2], ..relayed("job", 0, 2) });
    assert!(error.unwrap_err().contains("start both with the same --shards"));
    assert_eq!((leaf.jobs(), root.jobs()), (0, 0));
    // A rank with standbys and a rack cannot share a job, whichever joins first.
    let (_, _, _rank) = join(&mut root, Join { may_move: true, ..wish("job", 0, 2) }).unwrap();
    let error = join(&mut root, relayed("job", 1, 2)).unwrap_err();
    assert!(error.contains("set one aggregator"), "{error}");
    let (_, _, _rack) = join(&mut root, relayed("other", 0, 2)).unwrap();
    let error = join(&mut root, Join { may_move: true, ..wish("other", 1, 2) }).unwrap_err();
    assert!(error.contains("set one aggregator"), "{error}");
}

#[test]
fn a_rank_that_has_joined_elsewhere_is_refused_with_the_aggregator_that_brings_it() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (_, _, _direct) = join(&mut registry, wish("job", 0, 4)).unwrap();
    let (rack, _, mut inbox) = join(&mut registry, relayed("job", 2, 4)).unwrap();
    also(&mut registry, &rack, wish("job", 1, 4));
    let error = join(&mut registry, wish("job", 1, 4)).unwrap_err();
    assert!(error.contains("through the aggregator at 127.0.0.1"), "{error}");
    assert_eq!(last_message(&mut inbox), None);
    // The rank that the rack adds has already joined, so the rack must call again for the others.
    also(&mut registry, &rack, wish("job", 0, 4));
    let Some(FromAggregator::RefusedRank { rank: 0, reason }) = last_message(&mut inbox) else {
        panic!()
    };
    assert!(reason.contains("rank 0 of job \"job\" has already joined from"), "{reason}");
    assert_eq!(registry.jobs[&"job".into()].missing(), [1, 2, 3]);
    let (rack, _, mut inbox) = join(&mut registry, relayed("job", 2, 4)).unwrap();
    also(&mut registry, &rack, Join { generation: Generation(9), ..wish("secret", 1, 4) });
    let Some(FromAggregator::RefusedRank { rank: 1, reason }) = last_message(&mut inbox) else {
        panic!()
    };
    assert!(reason.contains("its aggregator has joined job \"job\" in generation 0"), "{reason}");
    registry.leave(&rack, Loss::Broke, Instant::now());
    // Only an aggregator may add other ranks. Any other member that tries is lost, and its place
    // becomes free.
    let (direct, ..) = join(&mut registry, wish("other", 3, 4)).unwrap();
    assert_eq!(also(&mut registry, &direct, wish("other", 1, 4)), None);
    registry.leave(&direct, Loss::Broke, Instant::now());
    assert_eq!(registry.jobs.keys().collect::<Vec<_>>(), [&"job".into()]);
}

#[test]
fn a_rank_that_the_parent_refuses_costs_no_other_its_place() {
    let mut registry = leaf();
    let (_call, [(seat, mut three), (_, mut one)]) = rack(&mut registry);
    let reason = "it is there already".to_owned();
    registry.handle_parent_message(
        &seat,
        parent(),
        FromAggregator::RefusedRank { rank: 1, reason },
    );
    let why = format!("its parent at {PARENT} refused: it is there already");
    assert_eq!(last_message(&mut one), Some(FromAggregator::Refused { reason: why }));
    assert_eq!(last_message(&mut three), None);
    assert!(registry.handle_parent_disconnect(&seat, PARENT, "closed"));
    let mut call = registry.call(&seat).unwrap();
    assert_eq!((call.join.rank, sent(&mut call).len()), (3, 0));
    let last = FromAggregator::RefusedRank { rank: 3, reason: "no".into() };
    registry.handle_parent_message(&seat, parent(), last);
    assert!(matches!(last_message(&mut three), Some(FromAggregator::Refused { .. })));
    assert!(!registry.handle_parent_disconnect(&seat, PARENT, "closed"));
    assert_eq!(registry.jobs(), 0);
}

#[test]
fn a_job_that_the_parent_refuses_is_refused_to_all_at_once() {
    let mut leaf = leaf();
    let (mut call, [(seat, mut three), (_, mut one)]) = rack(&mut leaf);
    leaf.handle_parent_message(&seat, parent(), FromAggregator::Refused { reason: "no".into() });
    let reason = format!("its parent at {PARENT} refused: no");
    for inbox in [&mut three, &mut one] {
        assert_eq!(last_message(inbox), Some(FromAggregator::Refused { reason: reason.clone() }));
    }
    assert_eq!((sent(&mut call), leaf.jobs()), (vec!["Stop".to_owned()], 0));
    assert!(
        !leaf.handle_parent_disconnect(&seat, PARENT, "closed"),
        "the parent is not called again"
    );
    // The rank that completes the world learns why the job cannot be served, as the others do.
    let mut root = registry(Fanout::Unicast, 0);
    root.config.max_jobs = 1024;
    let (rack, _, mut inbox) = join(&mut root, relayed("job", 0, 2)).unwrap();
    assert_eq!(also(&mut root, &rack, wish("job", 1, 2)), Some(Joined::Ready));
    let Some(FromAggregator::Refused { reason }) = last_message(&mut inbox) else { panic!() };
    assert!(reason.contains("more packet buffers than the job's share"), "{reason}");
}

#[test]
fn a_parent_that_only_multicasts_gives_an_aggregator_no_place() {
    let mut root = registry(Fanout::Multicast, 0);
    let (_, _, mut inbox) = join(&mut root, wish("job", 0, 2)).unwrap();
    let reason = join(&mut root, relayed("job", 1, 2)).unwrap_err();
    assert!(reason.contains("with --fanout auto or unicast"), "{reason}");
    assert_eq!(last_message(&mut inbox), None);
}

#[test]
fn a_parent_that_does_not_keep_to_the_protocol_is_refused_and_not_called_again() {
    let bad = [
        Welcome { rack: Vec::new(), ..welcome() },
        Welcome { data_ports: vec![0], ..welcome() },
        Welcome { pool_slots: u32::MAX, ..welcome() },
        Welcome { pool_slots: 1, ..welcome() },
        Welcome { max_ops: 0, ..welcome() },
        Welcome { max_ops: u16::MAX, ..welcome() },
        Welcome { fragment_payload: 0, ..welcome() },
        Welcome { in_flight: 0, ..welcome() },
        Welcome { data_auth: DataAuth::Mac, ..welcome() },
        Welcome { keys: keys(), ..welcome() },
    ];
    let bad = bad.into_iter().map(FromAggregator::Welcome);
    let nobody = FromAggregator::RefusedRank { rank: 2, reason: "no".into() };
    for message in bad.chain([nobody]) {
        let mut registry = leaf();
        let (mut call, [(seat, mut three), _]) = rack(&mut registry);
        registry.handle_parent_message(&seat, parent(), message.clone());
        let reason = format!(
            "its parent at {PARENT} violated the protocol; install the same release on both"
        );
        assert_eq!(
            last_message(&mut three),
            Some(FromAggregator::Refused { reason }),
            "{message:?}"
        );
        assert_eq!((sent(&mut call), registry.jobs()), (vec!["Stop".to_owned()], 0));
    }
}

#[test]
fn a_parent_with_another_number_of_shards_is_refused_with_what_to_do() {
    let mut registry = leaf();
    let (mut call, [(seat, mut three), _]) = rack(&mut registry);
    let granted = Welcome { data_ports: vec![5001, 5002], ..welcome() };
    registry.handle_parent_message(&seat, parent(), FromAggregator::Welcome(granted));
    let reason = format!(
        "its parent at {PARENT} does not match: the parent has 2 shards, but the aggregator that \
         calls it has 1; start both with the same --shards"
    );
    assert_eq!(last_message(&mut three), Some(FromAggregator::Refused { reason }));
    assert_eq!((sent(&mut call), registry.jobs()), (vec!["Stop".to_owned()], 0));
}

#[test]
fn a_rank_that_is_refused_at_the_second_of_three_levels_is_known_to_none() {
    let mut registry = leaf();
    let (below, _, mut inbox) = join(&mut registry, relayed("job", 0, 4)).unwrap();
    let mut call = registry.call(&below).unwrap();
    let (own, _, mut direct) = join(&mut registry, wish("job", 3, 4)).unwrap();
    assert_eq!(sent(&mut call), ["add_rank 3"]);
    also(&mut registry, &below, wish("job", 3, 4));
    assert!(matches!(last_message(&mut inbox), Some(FromAggregator::RefusedRank { rank: 3, .. })));
    // The call to the parent was made for rank 0, which has since left. So this call ends, and the
    // next one is for rank 3.
    assert_eq!(sent(&mut call), ["rank_lost 0 Aggregator"]);
    assert!(registry.handle_parent_disconnect(&own, PARENT, "closed"));
    assert_eq!(registry.call(&own).unwrap().join.rank, 3);
    assert_eq!(last_message(&mut direct), None);
}

#[test]
fn what_a_rack_says_before_it_hears_that_it_is_refused_does_not_hide_the_refusal() {
    let mut registry = registry(Fanout::Unicast, 0);
    let (_, _, _direct) = join(&mut registry, wish("job", 0, 4)).unwrap();
    let (rack, _, mut inbox) = join(&mut registry, relayed("job", 2, 4)).unwrap();
    also(&mut registry, &rack, wish("job", 0, 4));
    // This message arrives right after the refusal. `None` would mean a protocol violation.
    assert_eq!(also(&mut registry, &rack, wish("job", 3, 4)), Some(Joined::Ready));
    let refused = last_message(&mut inbox);
    assert!(matches!(refused, Some(FromAggregator::RefusedRank { rank: 0, .. })), "{refused:?}");
}
