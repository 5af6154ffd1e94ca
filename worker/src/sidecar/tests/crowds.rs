//! Tests with ranks that stay connected after their generation is over, and with as many lines as a
//! sidecar allows.

use racksum_net::local::{Line, SharedMemory};

use super::hostile::Rogue;
use super::*;
use crate::sidecar::message::FromSidecar;

#[test]
fn a_life_that_is_over_keeps_nothing_although_its_ranks_are_stuck() {
    let rig = Rig::start();
    let stuck = Rogue::join(&rig, 0, 1);
    let (_memory, descriptor) = SharedMemory::new(4096).unwrap();
    assert_eq!(stuck.lend(0, Some(&descriptor)), None);
    let next = |options: &mut ConnectOptions| options.generation = Generation(1);
    let next = rig.call_with("job", 0, 1, next);
    assert!(next.is_ready_within(PATIENCE).unwrap());
    while ask(&rig.path).unwrap().memory.used > 0 {
        std::thread::yield_now();
    }
    let message: FromSidecar = stuck.line.recv().unwrap().unwrap().0;
    let FromSidecar::Superseded { why } = message else { panic!("{message:?}") };
    let own = std::process::id();
    let lives = format!(
        "a greater generation of the job has begun: generation 1 of job \"job\", begun by process \
         {own}, replaced generation 0, begun by process {own}"
    );
    assert_eq!(why, lives);
    assert!(stuck.line.recv::<FromSidecar>().unwrap().is_none());
}

#[test]
fn ranks_that_stay_after_they_were_told_of_the_end_take_no_place_of_later_lives() {
    let rig = Rig::with(Limits { jobs: 1, ranks: 2, memory: 1 << 20 });
    let most = rig.sidecar.shared.most_lines();
    let stay: Vec<_> = (0..most)
        .map(|life| {
            let of_life = |options: &mut ConnectOptions| {
                options.generation = Generation(u32::try_from(life).unwrap());
            };
            let [stays, dies] = [0, 1].map(|rank| rig.call_with("job", rank, 2, of_life));
            assert!(
                stays.is_ready_within(PATIENCE).unwrap() && dies.is_ready_within(PATIENCE).unwrap()
            );
            dies.line.hang_up();
            while !stays.is_over() {
                std::thread::yield_now();
            }
            stays
        })
        .collect();
    let last = |options: &mut ConnectOptions| options.generation = Generation(u32::MAX);
    assert!(rig.call_with("job", 0, 1, last).is_ready_within(PATIENCE).unwrap());
    ask(&rig.path).unwrap();
    for rank in &stay {
        let error = failure(rank, own(floats(1.0, 1)), sum_of(1));
        assert!(error.contains("lost rank 1"), "expected the first reason: {error}");
    }
}

#[test]
fn callers_are_hung_up_where_the_lines_before_them_do_not_end() {
    let rig = Rig::with(Limits { jobs: 1, ranks: 1, memory: 1 << 20 });
    let caller = Line::connect(&rig.path).unwrap();
    let shared = &rig.sidecar.shared;
    while shared.lines().is_empty() {
        std::thread::yield_now();
    }
    let line = Arc::clone(&shared.lines()[0]);
    shared.lines().resize(shared.most_lines(), line);
    ask(&rig.path).unwrap_err();
    // Every entry is the caller's line, so the end of that line removes all entries.
    drop(caller);
    while !shared.lines().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(ask(&rig.path).unwrap().ranks, 0);
}
