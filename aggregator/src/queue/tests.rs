use std::net::Ipv4Addr;

use racksum_proto::control::Resume;
use racksum_proto::ids::OpId;

use super::*;
use crate::admit_rule::Admit;
use crate::quotas::least_share;
use crate::registry::tests::wish;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn rule(identity: &str, jobs: &str) -> Admit {
    Admit { identity: identity.into(), jobs: vec![jobs.into()], ..Admit::default() }
}

/// Adds a job of one rank to the queue, for an identity if one is given.
fn enter(queue: &mut Queue, config: &Config, job: &str, identity: Option<&str>) -> Ticket {
    queue.enter(config, &wish(job, 0, 1), identity, HERE).unwrap()
}

fn moving_join(job: &str) -> Join {
    let resume = Resume { first_op: OpId(3), absent: Vec::new() };
    Join { resume: Some(resume), ..wish(job, 0, 1) }
}

fn held<'a>(config: &Config, names: &'a [JobName], identity: &'a str) -> Vec<Tenant<'a>> {
    names.iter().map(|name| Tenant::new(config, name, Some(identity), (1, 1))).collect()
}

fn names<const N: usize>(names: [&str; N]) -> [JobName; N] {
    names.map(JobName::from)
}

#[test]
fn jobs_that_wait_have_their_turn_one_after_the_other_as_there_is_room() {
    let config = Config { max_jobs: 2, ..Config::default() };
    let mut queue = Queue::default();
    let [a, again, b, c] =
        ["a", "a", "b", "c"].map(|job| enter(&mut queue, &config, job, Some("x")));
    let positions = |queue: &mut Queue, there: &[JobName]| {
        queue.call(&config, &held(&config, there, "x"));
        [&a, &b, &c].map(|ticket| queue.turn(ticket))
    };
    let full = names(["one", "two"]);
    assert_eq!(positions(&mut queue, &full), [(false, 0), (false, 1), (false, 2)]);
    assert_eq!(positions(&mut queue, &full[..1]), [(true, 0), (false, 1), (false, 2)]);
    assert_eq!(positions(&mut queue, &[]), [(true, 0), (true, 1), (false, 2)]);
    // Another rank of the same job still waits.
    queue.leave(&again);
    assert_eq!((&queue.names()[..], queue.ranks()), (&names(["a", "b", "c"])[..], 3));
    queue.leave(&a);
    assert_eq!((&queue.names()[..], queue.ranks()), (&names(["b", "c"])[..], 2));
    assert_eq!(positions(&mut queue, &full[..1])[1..], [(true, 0), (false, 1)]);
}

#[test]
fn a_job_that_runs_or_has_its_turn_calls_all_its_ranks() {
    let config = Config { max_jobs: 1, ..Config::default() };
    let mut queue = Queue::default();
    let ticket = enter(&mut queue, &config, "job", Some("x"));
    queue.call(&config, &held(&config, &names(["job"]), "x"));
    assert_eq!(queue.turn(&ticket), (true, 0), "the other ranks of the job may join");
}

#[test]
fn who_waits_for_room_of_a_rule_of_its_own_holds_up_nobody_else() {
    let small = Admit { max_jobs: Some(1), ..rule("vision", "v-*") };
    let config = Config { admit: vec![small, rule("speech", "s-*")], ..Config::default() };
    let mut queue = Queue::default();
    let vision = enter(&mut queue, &config, "v-2", Some("vision"));
    let speech = enter(&mut queue, &config, "s-1", Some("speech"));
    queue.call(&config, &held(&config, &names(["v-1"]), "vision"));
    assert_eq!([queue.turn(&vision), queue.turn(&speech)], [(false, 0), (true, 0)]);
    let new =
        |identity| queue.called_before(&config, &wish("s-2", 0, 1), Some(identity), HERE).count();
    assert_eq!(new("speech"), 1, "a new caller takes no room from the waiting job");
    // New rules also apply to jobs that already wait.
    let config = Config { admit: vec![rule("vision", "v-*")], ..Config::default() };
    queue.reconfigure(&config);
    queue.call(&config, &held(&config, &names(["v-1"]), "vision"));
    assert_eq!(queue.turn(&vision), (true, 0));
}

#[test]
fn a_job_that_fits_is_not_kept_out_by_one_that_does_not() {
    let config = Config { max_ranks: 10, ..Config::default() };
    let mut queue = Queue::default();
    let large = queue.enter(&config, &wish("large", 0, 10), None, HERE).unwrap();
    let small = queue.enter(&config, &wish("small", 0, 9), None, HERE).unwrap();
    queue.call(&config, &held(&config, &names(["there"]), "x"));
    assert_eq!([queue.turn(&large), queue.turn(&small)], [(false, 0), (true, 1)]);
    queue.call(&config, &[]);
    assert_eq!([queue.turn(&large), queue.turn(&small)], [(true, 0), (false, 1)]);
}

#[test]
fn a_name_that_two_rules_admit_waits_under_each() {
    // Two identities wait with jobs of the same name, and only one of their rules has room.
    let full = Admit { max_jobs: Some(1), ..rule("crowd", "*") };
    let config = Config { admit: vec![full, rule("team", "train")], ..Config::default() };
    let mut queue = Queue::default();
    let crowd = enter(&mut queue, &config, "train", Some("crowd"));
    let team = enter(&mut queue, &config, "train", Some("team"));
    queue.call(&config, &held(&config, &names(["crowds"]), "crowd"));
    assert_eq!([queue.turn(&crowd).0, queue.turn(&team).0], [false, true]);
}

#[test]
fn tenants_take_turns_and_a_job_that_moves_goes_first() {
    let config = Config { max_jobs: 1, ..Config::default() };
    let mut queue = Queue::default();
    for job in 0..100 {
        enter(&mut queue, &config, &format!("crowd-{job}"), Some("crowd"));
    }
    enter(&mut queue, &config, "small", Some("team"));
    let ticket = queue.enter(&config, &moving_join("moves"), Some("late"), HERE).unwrap();
    assert_eq!(queue.names()[..4], names(["moves", "crowd-0", "small", "crowd-1"]));
    queue.call(&config, &held(&config, &names(["there"]), "x"));
    assert_eq!(queue.turn(&ticket), (false, 0));
    queue.call(&config, &[]);
    assert_eq!(queue.turn(&ticket), (true, 0));
    // A new job comes after all jobs whose turn has come. A moving job comes only after other
    // moving jobs.
    let before = |join: &Join| queue.called_before(&config, join, Some("y"), HERE).count();
    assert_eq!((before(&wish("new", 0, 1)), before(&moving_join("other"))), (1, 1));
    // A later tenant does not go before jobs that have waited for many rounds.
    queue.leave(&ticket);
    queue.round = 50;
    enter(&mut queue, &config, "later", Some("newcomer"));
    let order = queue.names();
    let at = |name: &str| order.iter().position(|other| other.name == name).unwrap();
    assert!(at("crowd-49") < at("later") && at("later") < at("crowd-51"), "{order:?}");
}

/// Opens a job, after it has waited if `waits` is true.
fn serve(queue: &mut Queue, config: &Config, join: &Join, identity: &str, waits: bool) {
    let ticket = waits.then(|| queue.enter(config, join, Some(identity), HERE).unwrap());
    queue.note_served(config, join, Some(identity), HERE);
    ticket.iter().for_each(|ticket| queue.leave(ticket));
}

#[test]
fn a_tenant_whose_jobs_all_move_does_not_keep_out_others_for_ever() {
    for waits in [true, false] {
        let config = Config { max_jobs: 1, ..Config::default() };
        let mut queue = Queue::default();
        let others = ["one", "two"].map(|job| enter(&mut queue, &config, job, Some("patient")));
        let mut served = Vec::new();
        for nth in 0..100 {
            let join = moving_join(&format!("job-{nth}"));
            let ticket = waits.then(|| queue.enter(&config, &join, Some("greedy"), HERE).unwrap());
            queue.call(&config, &[]);
            let joins = match &ticket {
                Some(ticket) => queue.turn(ticket).0,
                None => queue.called_before(&config, &join, Some("greedy"), HERE).count() == 0,
            };
            if joins {
                queue.note_served(&config, &join, Some("greedy"), HERE);
            } else {
                served.extend(others.iter().position(|ticket| queue.turn(ticket).0));
            }
            ticket.iter().for_each(|ticket| queue.leave(ticket));
            if !joins {
                break;
            }
        }
        assert_eq!(served, [0], "waits: {waits}");
        // Moving jobs of a tenant that was served less often still go first, and count as jobs that
        // are served before the waiting ones.
        let late = queue.enter(&config, &moving_join("late"), Some("modest"), HERE).unwrap();
        queue.call(&config, &[]);
        assert_eq!([&late, &others[0]].map(|it| queue.turn(it)), [(true, 0), (false, 1)]);
        queue.leave(&late);
    }
}

#[test]
fn tenants_whose_jobs_move_take_turns_among_themselves() {
    let config = Config { max_jobs: 1, ..Config::default() };
    let mut queue = Queue::default();
    enter(&mut queue, &config, "begins", Some("patient"));
    for nth in 0..20 {
        let join = moving_join(&format!("many-{nth}"));
        queue.enter(&config, &join, Some("many"), HERE).unwrap();
    }
    for nth in 0..2 {
        queue.enter(&config, &moving_join(&format!("few-{nth}")), Some("few"), HERE).unwrap();
    }
    let order = queue.names();
    assert_eq!(order[..5], names(["many-0", "few-0", "many-1", "few-1", "many-2"]));
    // The first 16 moving jobs of a tenant go first, and its other moving jobs wait for their
    // rounds.
    assert_eq!(order[17..20], names(["many-15", "begins", "many-16"]));
}

#[test]
fn a_tenant_that_comes_with_one_job_after_the_other_takes_turns_as_well() {
    let config = Config { max_jobs: 1, ..Config::default() };
    let mut queue = Queue::default();
    for job in ["patient-0", "patient-1"] {
        enter(&mut queue, &config, job, Some("patient"));
    }
    for nth in 0..2 {
        serve(&mut queue, &config, &wish(&format!("busy-{nth}"), 0, 1), "busy", true);
    }
    enter(&mut queue, &config, "busy", Some("busy"));
    assert_eq!(queue.names(), names(["patient-0", "patient-1", "busy"]));
}

#[test]
fn a_job_that_fits_at_once_moves_nobody_behind_those_of_its_tenant_that_wait() {
    let config = Config { max_ranks: 2, ..Config::default() };
    let mut queue = Queue::default();
    for nth in 0..50 {
        let join = wish(&format!("large-{nth}"), 0, 2);
        queue.enter(&config, &join, Some("crowd"), HERE).unwrap();
    }
    serve(&mut queue, &config, &wish("small", 0, 1), "crowd", false);
    enter(&mut queue, &config, "first", Some("newcomer"));
    assert_eq!(queue.names()[..3], names(["large-0", "first", "large-1"]));
    // A job that waits in a late round and is served early does not change the order either.
    serve(&mut queue, &config, &wish("small", 0, 1), "crowd", true);
    enter(&mut queue, &config, "second", Some("other"));
    assert_eq!(queue.names()[..4], names(["large-0", "first", "second", "large-1"]));
    // A round ends only once all of its jobs have been served.
    serve(&mut queue, &config, &wish("large-0", 0, 2), "crowd", false);
    assert_eq!(queue.round, 0, "other jobs of this round still wait");
}

#[test]
fn a_group_of_several_lanes_waits_for_as_much_room_as_it_is_granted() {
    let config = Config::default();
    let there = JobName::new("train", "0");
    let there = Tenant::new(&config, &there, None, (8, 1));
    let held = [Tenant { granted: Some(100.0 - least_share(&config, 8, 4)), ..there }];
    let mut queue = Queue::default();
    let tickets = [1, 8].map(|lanes| {
        let join = Join { lanes, job: JobName::new("train", lanes.to_string()), ..wish("", 0, 8) };
        queue.enter(&config, &join, None, HERE).unwrap()
    });
    queue.call(&config, &held);
    assert_eq!(tickets.each_ref().map(|ticket| queue.turn(ticket).0), [true, false]);
}

#[test]
fn who_was_served_is_remembered_of_few_and_while_others_wait() {
    let (config, mut queue) = (Config::default(), Queue::default());
    serve(&mut queue, &config, &wish("alone", 0, 1), "alone", false);
    assert!(queue.served.is_empty());
    let ticket = enter(&mut queue, &config, "waits", Some("patient"));
    for nth in 0..=MAX_SERVED {
        serve(&mut queue, &config, &moving_join("job"), &format!("tenant-{nth}"), false);
        assert!(!queue.served.is_empty() || nth == MAX_SERVED);
    }
    assert!(queue.served.len() <= MAX_SERVED);
    serve(&mut queue, &config, &wish("job", 0, 1), "other", false);
    queue.leave(&ticket);
    assert!(queue.served.is_empty());
}

#[test]
fn ranks_that_wait_are_few_of_each_identity_rule_and_address() {
    let config = Config { admit: vec![rule("crowd-*", "*"), rule("*", "*")], ..Config::default() };
    let mut queue = Queue::default();
    let full = |queue: &mut Queue, identity: Option<&str>, ip: [u8; 4]| {
        let config = if identity.is_some() { &config } else { &Config::default() };
        let mut tickets = Vec::new();
        loop {
            let join = wish(&format!("job-{}", tickets.len()), 0, 1);
            match queue.enter(config, &join, identity, ip.into()) {
                Ok(ticket) => tickets.push(ticket),
                Err(why) => return (tickets, why),
            }
        }
    };
    let (first, why) = full(&mut queue, Some("crowd-1"), [10, 0, 0, 1]);
    assert_eq!(why, "1024 ranks of identity \"crowd-1\" are already waiting for room");
    let (_, why) = full(&mut queue, Some("crowd-2"), [10, 0, 0, 2]);
    assert_eq!(why, "1024 ranks of your [[admit]] rule are already waiting for room");
    let (other, why) = full(&mut queue, Some("team"), [10, 0, 0, 1]);
    assert_eq!((other.len(), &*why), (0, "1024 ranks from 10.0.0.1 are already waiting for room"));
    let (second, why) = full(&mut queue, Some("team"), [10, 0, 0, 3]);
    assert_eq!(why, "1024 ranks of identity \"team\" are already waiting for room");
    assert_eq!(queue.ranks(), 2048);
    for ip in [[10, 0, 1, 1], [10, 0, 1, 2]] {
        full(&mut queue, None, ip);
    }
    let (none, why) = full(&mut queue, None, [10, 0, 1, 3]);
    assert_eq!((none.len(), &*why), (0, "4096 ranks are already waiting for room"));
    for ticket in first.iter().chain(&second) {
        queue.leave(ticket);
    }
    assert_eq!(queue.ranks(), 2048);
    assert_eq!(full(&mut queue, Some("crowd-2"), [10, 0, 0, 2]).0.len(), 1024);
}

#[test]
fn ranks_that_wait_from_a_network_of_ipv6_count_as_one_address() {
    let (config, mut queue) = (Config::default(), Queue::default());
    let from = |network: u16, host: u16| IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, host]);
    for host in 0..1024 {
        let join = wish(&format!("job-{host}"), 0, 1);
        queue.enter(&config, &join, None, from(0, host)).unwrap();
    }
    let why = queue.enter(&config, &wish("job", 0, 1), None, from(0, 1024)).unwrap_err();
    assert_eq!(why, "1024 ranks from 2001:db8:: are already waiting for room");
    queue.enter(&config, &wish("job", 0, 1), None, from(1, 0)).unwrap();
}
