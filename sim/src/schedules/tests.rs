use racksum_proto::schedule::{Demand, Schedule};

use super::*;

fn demand(left: u64, bytes: u64, ports: &[u32]) -> Demand {
    Demand { left, bytes, ports: ports.to_vec(), ..Demand::default() }
}

/// Takes all turns that may begin, and returns their jobs.
fn begun(schedule: &mut impl Schedule<char>) -> (String, Vec<racksum_proto::schedule::Turn<char>>) {
    let mut turns = vec![];
    while let Some(turn) = schedule.next() {
        turns.push(turn);
    }
    (turns.iter().map(|turn| turn.job).collect(), turns)
}

#[test]
fn all_jobs_begin_at_once() {
    let mut schedule = AllAtOnce::new(100);
    for job in ['a', 'b'] {
        schedule.add(job, 1.0);
    }
    for job in ['b', 'a', 'b', 'z'] {
        schedule.enqueue(job);
    }
    assert_eq!((schedule.waiting(), begun(&mut schedule).0), (2, "ba".into()));
    assert_eq!(begun(&mut schedule).0, "");
}

#[test]
fn turns_with_a_port_in_common_exclude_each_other() {
    for (rule, first, second) in [(Rule::Fifo, "a", "bc"), (Rule::LeastServed, "ac", "b")] {
        let mut schedule = Exclusive::new(rule, 100);
        for (job, ports) in [('a', &[1, 2][..]), ('b', &[2]), ('c', &[3])] {
            schedule.add(job, 1.0);
            schedule.demand(job, demand(1, 1, ports));
            schedule.enqueue(job);
        }
        let (jobs, turns) = begun(&mut schedule);
        assert_eq!(jobs, first, "{rule:?}");
        turns.into_iter().for_each(|turn| schedule.finish(turn));
        assert_eq!(begun(&mut schedule).0, second, "{rule:?}");
    }
}

#[test]
fn the_job_that_was_served_least_is_next() {
    let mut schedule = Exclusive::new(Rule::LeastServed, 100);
    let mut order = String::new();
    for job in ['a', 'b'] {
        schedule.add(job, 1.0);
        schedule.demand(job, demand(1, 1, &[1]));
        schedule.enqueue(job);
    }
    for _ in 0..8 {
        let mut turn = schedule.next().unwrap();
        assert_eq!(schedule.next(), None);
        order.push(turn.job);
        // The turns of `a` are three times as large.
        turn.spend(if turn.job == 'a' { 300 } else { 100 });
        schedule.enqueue(turn.job);
        schedule.finish(turn);
    }
    assert_eq!(order, "abbbabbb");
    // A removed job frees its ports.
    let turn = schedule.next().unwrap();
    schedule.remove(turn.job);
    assert!(schedule.next().is_some());
    schedule.finish(turn);
}

#[test]
fn bssi_gives_the_priorities() {
    // The hand vector of the study's code: jobs on workers {0, 1}, {1, 2} and {2, 3}.
    for d0 in [0, 1] {
        let mut schedule = Sincronia::new(Weight::None, 100, d0);
        for (job, size, ports) in [('1', 4, [0, 1]), ('2', 6, [1, 2]), ('3', 2, [2, 3])] {
            schedule.add(job, 1.0);
            schedule.demand(job, demand(size, size, &ports));
            schedule.enqueue(job);
        }
        assert_eq!(begun(&mut schedule).0, "312");
        assert_eq!(['1', '2', '3', 'z'].map(|job| schedule.priority(job)), [2, 3, 1, 0]);
    }
}

#[test]
fn weights_say_which_tensors_go_first() {
    let whole = |layer, left, waited| Demand {
        layer,
        layers: 4,
        left,
        bytes: 100,
        waited: racksum_proto::time::Span(waited),
        ports: vec![0],
    };
    // Of `a`, most is left; `b` is at the front; the workers of `c` have waited longest.
    let demands =
        [('a', whole(2, 90, 1_000)), ('b', whole(0, 80, 2_000)), ('c', whole(3, 85, 9_000))];
    for (weight, order) in [
        (Weight::None, "bca"),
        (Weight::LeftLess, "bca"),
        (Weight::Layer, "bac"),
        (Weight::Idle, "cba"),
    ] {
        let mut schedule = Sincronia::new(weight, 100, 0);
        for (job, demand) in &demands {
            schedule.add(*job, 1.0);
            schedule.demand(*job, demand.clone());
            schedule.enqueue(*job);
        }
        assert_eq!(begun(&mut schedule).0, order, "{weight:?}");
    }
    // On one port, the share that is left over what is left is the same for equal sizes.
    let mut schedule = Sincronia::new(Weight::LeftMore, 100, 0);
    for (job, bytes) in [('a', 400), ('b', 100)] {
        schedule.add(job, 1.0);
        schedule.demand(job, demand(50, bytes, &[0]));
        schedule.enqueue(job);
    }
    assert_eq!(begun(&mut schedule).0, "ba");
}
