use super::*;
use crate::admit_rule::Admit;

/// Returns a tenant with the rule that the configuration has for it.
fn of(config: &Config, job: &'static str, identity: &'static str, world: u16) -> Tenant<'static> {
    group_of(config, job, "", identity, world)
}

fn group_of(
    config: &Config,
    job: &str,
    group: &str,
    identity: &'static str,
    world: u16,
) -> Tenant<'static> {
    let name = Box::leak(Box::new(JobName::new(job, group)));
    Tenant::new(config, name, Some(identity), (world, 1))
}

fn rule(identity: &str, jobs: &str) -> Admit {
    Admit { identity: identity.into(), jobs: vec![jobs.into()], ..Admit::default() }
}

fn why(checked: Result<(), Refusal>) -> (bool, String) {
    match checked.unwrap_err() {
        Refusal::Never(why) => (false, why),
        refusal @ Refusal::NoRoom(_) => (true, refusal.why()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn jobs_and_ranks_are_counted_and_the_holders_named() {
    let config = Config { max_jobs: 2, max_ranks: 10, ..Config::default() };
    let tenant = |job, identity, world| of(&config, job, identity, world);
    let (one, two) = (tenant("one", "a", 4), tenant("two", "b", 4));
    assert_eq!(check_room(&config, &[one], &two), Ok(()));
    let (later, reason) = why(check_room(&config, &[one, two], &tenant("three", "c", 1)));
    let expected = "there are 2 jobs, and --max-jobs of the aggregator allows 2; room is held by \
                    \"one\" with 4 ranks, \"two\" with 4 ranks; try again later, set `wait`, \
                    or ask the operator of the aggregator for room";
    assert_eq!((later, &*reason), (true, expected));
    let (later, reason) = why(check_room(&config, &[one], &tenant("two", "b", 7)));
    assert!(
        later
            && reason.starts_with(
                "4 of 10 ranks are taken (--max-ranks of the aggregator), and the job needs 7"
            ),
        "{reason}"
    );
    let (later, reason) = why(check_room(&config, &[], &tenant("two", "b", 11)));
    assert!(!later && reason.starts_with("11 ranks exceed the 10 that --max-ranks"), "{reason}");
}

#[test]
fn only_who_is_refused_is_told_what_to_do_about_it() {
    let config = Config { max_jobs: 1, ..Config::default() };
    let there = of(&config, "one", "a", 4);
    let refusal = check_room(&config, &[there], &of(&config, "two", "b", 4)).unwrap_err();
    let why = "there is 1 job, and --max-jobs of the aggregator allows 1; \
               room is held by \"one\" with 4 ranks";
    // A rank that waits gets the reason without advice.
    assert_eq!(refusal, Refusal::NoRoom(why.into()));
    assert_eq!(refusal.why(), format!("{why}; try again later, set `wait`, or ask {OPERATOR}"));
    let full = Refusal::NoWait(format!("{why}; 1024 ranks wait")).why();
    assert!(
        full.ends_with(
            "ranks wait; try again later, or ask the operator of the aggregator for room"
        ),
        "{full}"
    );
}

#[test]
fn each_rule_has_limits_of_its_own_and_others_are_not_named() {
    let vision = Admit { max_jobs: Some(1), max_ranks: Some(8), ..rule("vision-*", "v-*") };
    let config = Config { admit: vec![vision, rule("speech-*", "s-*")], ..Config::default() };
    let tenant = |job, identity, world| of(&config, job, identity, world);
    let held = [tenant("s-1", "speech-1", 100), tenant("v-1", "vision-1", 4)];
    let (later, reason) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 4)));
    let expected = "there is 1 job, and max_jobs of your [[admit]] rule allows 1; room is held by \
                    \"v-1\" with 4 ranks; try again later, set `wait`, or ask the operator of \
                    the aggregator for room";
    assert_eq!((later, &*reason), (true, expected));
    let (later, reason) = why(check_room(&config, &held, &tenant("v-2", "vision-2", 9)));
    assert!(!later && reason.contains("max_ranks of your [[admit]] rule"), "{reason}");
    assert_eq!(check_room(&config, &held, &tenant("s-2", "speech-1", 100)), Ok(()));
    // The jobs of other identities are only counted.
    let full = Config { max_jobs: 2, ..config.clone() };
    let (_, reason) = why(check_room(&full, &held, &of(&full, "s-2", "speech-2", 1)));
    assert!(
        reason.contains("held by \"s-1\" with 100 ranks, 1 job of other identities;"),
        "{reason}"
    );
}

#[test]
fn shares_are_of_a_whole() {
    let half = Admit { share_percent: Some(50), pool_slots: Some(7), ..rule("*", "big*") };
    let config = Config { max_jobs: 4, admit: vec![half, rule("*", "*")], ..Config::default() };
    let [big, one, two, three] = ["big", "one", "two", "three"].map(|job| of(&config, job, "x", 1));
    let share = |tenant| Tally::default().share_of(&config, tenant);
    assert_eq!((share(&big), share(&one)), (37.5, 18.75));
    assert_eq!((big.pool_slots(&config), one.pool_slots(&config)), (7, 256));
    assert_eq!(check_room(&config, &[one, two], &big), Ok(()));
    let with_groups = Tenant { granted: Some(50.0), ..big };
    let (later, reason) = why(check_room(&config, &[one, with_groups, two], &three));
    assert!(
        later && reason.starts_with("88 % of the packet buffers are taken, and the job needs 19"),
        "{reason}"
    );
}

#[test]
fn a_share_that_was_granted_is_held_whatever_the_configuration_says_by_now() {
    let config = Config { max_jobs: 8, ..Config::default() };
    // These jobs were granted their shares when `max_jobs` was four.
    let held =
        ["a", "b", "c", "d"].map(|job| Tenant { granted: Some(25.0), ..of(&config, job, "x", 1) });
    let (later, reason) = why(check_room(&config, &held, &of(&config, "e", "x", 1)));
    assert!(
        later && reason.starts_with("100 % of the packet buffers are taken, and the job needs 12"),
        "{reason}"
    );
    assert_eq!(check_room(&config, &held[..3], &of(&config, "e", "x", 1)), Ok(()));
}

#[test]
fn groups_of_one_job_are_one_job_and_have_what_is_left_of_the_buffers() {
    let config = Config::default();
    let mut held: Vec<Tenant<'static>> = Vec::new();
    for group in ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"] {
        let wanted = group_of(&config, "train", group, "x", 8);
        assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
        let share = Tally::of(&config, &held).share_of(&config, &wanted);
        held.push(Tenant { granted: Some(share), ..wanted });
    }
    // The ranks of each group count.
    let few = Config { max_ranks: 100, ..config.clone() };
    let (_, reason) = why(check_room(&few, &held, &group_of(&few, "train", "12", "x", 8)));
    assert!(reason.starts_with("96 of 100 ranks are taken (--max-ranks of"), "{reason}");
    // Another job still gets its equal share, and counts as the second job.
    assert_eq!(check_room(&config, &held, &of(&config, "other", "y", 8)), Ok(()));
    let one = Config { max_jobs: 1, ..config };
    let (_, reason) = why(check_room(&one, &held, &of(&one, "other", "y", 8)));
    assert!(
        reason.starts_with("there is 1 job, and --max-jobs of the aggregator allows 1; room is"),
        "{reason}"
    );
}

#[test]
fn the_limits_of_a_rule_are_those_of_a_job_with_all_its_groups() {
    let own = Admit { max_jobs: Some(1), share_percent: Some(40), ..rule("x", "train") };
    let config = Config { admit: vec![own], ..Config::default() };
    for (first, share) in [("0", 20.0), ("", 30.0)] {
        let mut held: Vec<Tenant<'static>> = Vec::new();
        for group in [first, "1", "2", "3", "4", "5", "6", "7", "8"] {
            let wanted = group_of(&config, "train", group, "x", 2);
            assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
            let share = Tally::of(&config, &held).share_of(&config, &wanted);
            held.push(Tenant { granted: Some(share), ..wanted });
        }
        let taken: f64 = held.iter().filter_map(|it| it.granted).sum();
        assert!(held[0].granted == Some(share) && taken < 40.0, "{taken}");
    }
}

#[test]
fn groups_do_not_get_around_the_most_jobs_of_a_rule() {
    let vision = Admit { max_jobs: Some(1), ..rule("vision-*", "v-*") };
    let admit = vec![vision, rule("speech-*", "s-*")];
    let config = Config { max_jobs: 4, admit, ..Config::default() };
    let mut held: Vec<Tenant<'static>> = Vec::new();
    for group in 0..40 {
        let wanted = group_of(&config, "v-x", &group.to_string(), "vision-1", 1);
        assert_eq!(check_room(&config, &held, &wanted), Ok(()), "group {group}");
        let share = Tally::of(&config, &held).share_of(&config, &wanted);
        held.push(Tenant { granted: Some(share), ..wanted });
    }
    for job in ["s-1", "s-2", "s-3"] {
        let wanted = of(&config, job, "speech-1", 1);
        assert_eq!(check_room(&config, &held, &wanted), Ok(()), "{job}");
        held.push(Tenant { granted: Some(25.0), ..wanted });
    }
    // The refusal counts forty groups as one job.
    let (_, reason) = why(check_room(&config, &held[..43], &of(&config, "s-4", "speech-2", 1)));
    assert!(reason.contains("\"s-3\" with 1 rank, 1 job of other identities;"), "{reason}");
    let of_vision = Tenant { granted: None, ..held[0] };
    let (_, reason) = why(check_room(&config, &held[..40], &of(&config, "v-y", "vision-2", 1)));
    assert!(reason.contains(", 24 more jobs or groups;"), "{reason}");
    // If a job holds its full share, the refusal of a further group says so.
    let all = Tenant { granted: Some(25.0), ..held[1] };
    let (later, reason) = why(check_room(&config, &[all], &of_vision));
    let expected = "this job has 1 group, and too little of its share (25 % of the packet buffers) \
                    is left for one more group; destroy groups, or raise --pool-mib at the \
                    aggregator or share_percent of the job's [[admit]] rule; try again later, set \
                    `wait`, or ask the operator of the aggregator for room";
    assert_eq!((later, &*reason), (true, expected));
}

/// Opens groups of a job until there is no room. Returns the groups and the refusal.
fn open_groups(config: &Config, world: u16) -> (Vec<Tenant<'static>>, String) {
    let mut held: Vec<Tenant<'static>> = Vec::new();
    loop {
        let wanted = group_of(config, "train", &held.len().to_string(), "x", world);
        if let Err(refusal) = check_room(config, &held, &wanted) {
            return (held, why(Err(refusal)).1);
        }
        let share = Tally::of(config, &held).share_of(config, &wanted);
        held.push(Tenant { granted: Some(share), ..wanted });
    }
}

#[test]
fn a_job_has_as_many_groups_as_there_is_memory_for_and_each_works() {
    let config = Config::default();
    let rule = Config { admit: vec![rule("x", "train")], ..config.clone() };
    // A mesh with three dimensions of 8 ranks each has 192 groups of 8 ranks.
    for (config, most, fewest, world) in
        [(&config, 100.0, 192, 8), (&config, 100.0, 300, 2), (&rule, 12.5, 30, 8)]
    {
        let (held, reason) = open_groups(config, world);
        assert!(held.len() >= fewest, "{} groups of {world}", held.len());
        let shares: Vec<f64> = held.iter().filter_map(|it| it.granted).collect();
        assert!(shares.iter().sum::<f64>() <= most + ROUNDING);
        let least = least_share(config, world, 1);
        assert!(shares.iter().all(|share| *share >= least), "{shares:?}");
        let expected = format!("has {} groups", held.len());
        assert!(reason.contains(&expected) && reason.contains("raise --pool-mib"), "{reason}");
        // A group that ends frees its place.
        let wanted = group_of(config, "train", "another", "x", world);
        assert_eq!(check_room(config, &held[1..], &wanted), Ok(()));
    }
}

#[test]
fn a_group_has_the_fewest_slots_of_each_lane_or_waits() {
    let config = Config::default();
    let first = group_of(&config, "train", "0", "x", 8);
    let wanted = |lanes| Tenant { lanes, ..group_of(&config, "train", "1", "x", 8) };
    let held = [Tenant { granted: Some(98.0), ..first }];
    let tally = Tally::of(&config, &held);
    let least = least_share(&config, 8, 8);
    assert_eq!(tally.share_of(&config, &wanted(8)), least);
    assert!(tally.share_of(&config, &wanted(1)) < least);
    // The remaining share is half of what the group of eight lanes needs.
    let held = [Tenant { granted: Some(100.0 - least / 2.0), ..first }];
    assert_eq!(check_room(&config, &held, &wanted(1)), Ok(()));
    let (later, reason) = why(check_room(&config, &held, &wanted(8)));
    assert!(later && reason.contains("has 1 group"), "{reason}");
}
