//! Tests with ranks and callers that violate the protocol, exceed limits, get stuck or disconnect.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use racksum_net::local::{Line, Peer, SharedMemory};
use racksum_proto::schedule::Turn;

use super::*;
use crate::blocks::Blocks;
use crate::sidecar::ask;
use crate::sidecar::budget::Budget;
use crate::sidecar::fold::{Handed, LentRange, List, Memory};
use crate::sidecar::job::HostJob;
use crate::sidecar::message::{FromSidecar, Join, ListAt, Outcome, VERSION};
use crate::sidecar::status::write_status;
use crate::transport::StatsQuery;

/// A rank that sends arbitrary messages.
pub(super) struct Rogue {
    pub(super) line: Line,
}

impl Rogue {
    pub(super) fn join(rig: &Rig, rank: u16, world: u16) -> Self {
        let line = Line::connect(&rig.path).unwrap();
        line.send(&FromRank::Join(wish(rank, world)), None).unwrap();
        Self { line }
    }

    fn send(&self, message: &FromRank, descriptor: Option<&OwnedFd>) {
        // Ignore a failed send, because the sidecar may have closed the line.
        drop(self.line.send(message, descriptor.map(AsFd::as_fd)));
    }

    /// Lends memory. Returns the reason if the sidecar refuses it.
    pub(super) fn lend(&self, memory: u32, descriptor: Option<&OwnedFd>) -> Option<String> {
        self.send(&FromRank::Lend { memory }, descriptor);
        loop {
            match self.line.recv().unwrap().expect("the sidecar keeps the line open").0 {
                FromSidecar::Lent { refused, .. } => return refused,
                FromSidecar::Ready | FromSidecar::Waiting { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn wish(rank: u16, world: u16) -> Join {
    Join {
        version: VERSION,
        job: "job".into(),
        generation: Generation(0),
        secret: None,
        rank,
        world,
        local_world: world,
        lanes: 1,
        join_timeout: 60_000,
        op_timeout: 60_000,
    }
}

/// Writes to the start of shared memory, as any process that has a descriptor of the memory can.
fn write(descriptor: &OwnedFd, bytes: &[u8]) {
    std::fs::File::from(descriptor.try_clone().unwrap()).write_all_at(bytes, 0).unwrap();
}

fn encoded(descriptor: &Descriptor) -> [u8; Descriptor::LEN] {
    let mut bytes = [0; Descriptor::LEN];
    descriptor.encode(&mut bytes);
    bytes
}

#[test]
fn no_list_of_a_rogue_does_more_than_end_its_job() {
    let list = |indices: &[u32]| -> Vec<u8> {
        indices.iter().flat_map(|index| index.to_ne_bytes()).collect()
    };
    let at = |blocks, values| Some(ListAt { blocks, values });
    // The memory has 4096 bytes; the tensor has four blocks of 1024 bytes.
    for (indices, at, list) in [
        (list(&[4]), 0, at(1, 1024)),
        (list(&[u32::MAX, 0]), 0, at(2, 1024)),
        (list(&[1, 0]), 0, at(2, 1024)),
        (list(&[1, 1]), 0, at(2, 1024)),
        (list(&[0, 1, 2, 3, 4]), 0, at(5, 0)),
        (list(&[0]), 0, at(u32::MAX, 1024)),
        (list(&[0]), 2, at(1, 1024)),
        (list(&[0]), 4096, at(1, 1024)),
        (list(&[0]), u64::MAX - 3, at(1, 1024)),
        (list(&[0]), 0, at(1, 4095)),
        (list(&[0]), 0, at(1, u64::MAX)),
        (list(&[0, 1, 2, 3]), 0, at(4, 1)),
    ] {
        let rig = Rig::start();
        let rogue = Rogue::join(&rig, 1, 2);
        let honest = rig.call("job", 0, 2);
        assert!(honest.is_ready_within(PATIENCE).unwrap());
        let (_memory, descriptor) = SharedMemory::new(4096).unwrap();
        write(&descriptor, &indices);
        assert_eq!(rogue.lend(9, Some(&descriptor)), None);
        let descriptor = encoded(&sum_of(1024));
        rogue.send(&FromRank::Submit { descriptor, memory: 9, at, list }, None);
        let own = Blocks { indices: vec![0], values: floats(1.0, 256) };
        let error = failure(&honest, own, sum_of(1024));
        assert!(error.contains("lost rank 1: it dropped the connection"), "{error}");
        drop((rogue, honest));
        rig.await_peace();
    }
}

/// Returns both ends of a line: the sidecar's and the rank's.
fn ends() -> (Arc<Line>, Line) {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let name = format!("racksum-ends-{}-{}", std::process::id(), MADE.fetch_add(1, Relaxed));
    let path = std::env::temp_dir().join(name);
    let listener = Listener::bind(&path, 0o600).unwrap();
    let rank = Line::connect(&path).unwrap();
    (Arc::new(listener.accept().unwrap().unwrap()), rank)
}

/// Returns the first message that a rank receives, apart from `Ready` and `Waiting`.
fn final_message(rank: &Line) -> FromSidecar {
    let messages = std::iter::from_fn(|| rank.recv::<FromSidecar>().unwrap());
    let is_last = |message: &FromSidecar| {
        !matches!(message, FromSidecar::Ready | FromSidecar::Waiting { .. })
    };
    messages.map(|(message, _)| message).find(is_last).unwrap()
}

#[test]
fn a_bad_list_of_a_rank_that_is_gone_leaves_nobody_waiting() {
    let peer = Peer { pid: 1, uid: 0 };
    let lines = [(); 2].map(|()| ends());
    let job = HostJob::new(&wish(0, 2), peer);
    for (rank, (line, _)) in (0..).zip(&lines) {
        assert!(!job.join(&wish(rank, 2), line, peer).unwrap());
    }
    let (_memory, descriptor) = SharedMemory::new(4096).unwrap();
    write(&descriptor, &7_u32.to_ne_bytes());
    let memory = Memory::of(&descriptor, &Arc::new(Budget::new(4096))).unwrap();
    let list = ListAt { blocks: 1, values: 1024 };
    let list = Handed::List(List::new(&memory, 0, list, &sum_of(1024)).unwrap());
    assert!(job.submit(0, sum_of(1024), list.clone(), &memory).is_none());
    let (op, fold) = job.submit(1, sum_of(1024), list, &memory).unwrap();
    job.part(0, Loss::Died);
    assert!(fold.work(&mut Turn::new((), usize::MAX), &mut Vec::new(), || {}));
    job.folded(op, &Arc::new(fold));
    let FromSidecar::Lost { ranks, .. } = final_message(&lines[1].1) else {
        panic!("expected `Lost`")
    };
    assert_eq!(ranks, [0]);
}

#[test]
fn nobody_takes_the_place_of_a_rank_that_goes_while_the_aggregator_is_called() {
    let peer = Peer { pid: 1, uid: 0 };
    let lines = [(); 3].map(|()| ends());
    let wish = |rank| Join { world: 4, local_world: 2, ..wish(rank, 4) };
    let job = Arc::new(HostJob::new(&wish(0), peer));
    assert!(!job.join(&wish(0), &lines[0].0, peer).unwrap());
    assert!(job.join(&wish(1), &lines[1].0, peer).unwrap());
    job.part(1, Loss::Died);
    let FromSidecar::Refused { reason } = final_message(&lines[0].1) else {
        panic!("expected `Refused`")
    };
    assert_eq!(reason, "rank 1 was lost before the job started");
    assert_eq!(job.join(&wish(2), &lines[2].0, peer).unwrap_err(), reason);
    assert!(job.is_refused());
    // A refused job does not call the aggregator.
    job.call(&ConnectOptions::new("192.0.2.1:1", ""));
}

#[test]
fn a_rank_that_leaves_waits_for_folds_of_its_memory_however_long_they_take() {
    let peer = Peer { pid: 1, uid: 0 };
    let lines = [(); 2].map(|()| ends());
    let job = Arc::new(HostJob::new(&wish(0, 2), peer));
    let (_memory, descriptor) = SharedMemory::new(4096).unwrap();
    let memory = Memory::of(&descriptor, &Arc::new(Budget::new(4096))).unwrap();
    for (rank, (line, _)) in (0..).zip(&lines) {
        job.join(&wish(rank, 2), line, peer).unwrap();
    }
    let place = |at| Handed::Tensor(LentRange::new(&memory, at, 4).unwrap());
    assert!(job.submit(0, sum_of(1), place(0), &memory).is_none());
    let (op, fold) = job.submit(1, sum_of(1), place(4), &memory).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let waits = Arc::clone(&job);
    let waits = std::thread::spawn(move || {
        waits.leave(0, Duration::ZERO);
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_millis(200)).unwrap_err();
    assert!(fold.work(&mut Turn::new((), usize::MAX), &mut Vec::new(), || {}));
    job.folded(op, &Arc::new(fold));
    receiver.recv_timeout(PATIENCE).unwrap();
    waits.join().unwrap();
    let reduced = FromSidecar::Ended { op, outcome: Outcome::Reduced };
    assert_eq!(final_message(&lines[0].1), reduced);
}

#[test]
fn a_rank_of_another_version_is_told_so_whatever_else_it_says() {
    let rig = Rig::start();
    let line = Line::connect(&rig.path).unwrap();
    let wish = serde_json::json!({ "join": { "version": VERSION + 1, "of_old": ["another"] } });
    line.send(&wish, None).unwrap();
    let message = line.recv::<FromSidecar>().unwrap().unwrap().0;
    assert_eq!(message, FromSidecar::WrongVersion { speaks: VERSION });
}

#[test]
fn a_list_that_changes_while_it_is_read_spoils_its_job_and_nothing_else() {
    let rig = Rig::start();
    let rogue = Rogue::join(&rig, 1, 2);
    let honest = rig.call("job", 0, 2);
    assert!(honest.is_ready_within(PATIENCE).unwrap());
    let (_memory, memory) = SharedMemory::new(1 << 20).unwrap();
    assert_eq!(rogue.lend(1, Some(&memory)), None);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let scribbler = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            for round in 0_u32.. {
                let indices: Vec<u8> =
                    (0..600).flat_map(|i: u32| (i ^ (round % 3)).to_ne_bytes()).collect();
                write(&memory, &indices);
                if stop.load(Relaxed) {
                    break;
                }
            }
        }
    });
    let descriptor = encoded(&sum_of(256 * 600));
    let list = Some(ListAt { blocks: 600, values: 4096 });
    let mut ended = 0;
    for _ in 0..200 {
        rogue.send(&FromRank::Submit { descriptor, memory: 1, at: 0, list }, None);
        let own = Blocks { indices: vec![7], values: floats(1.0, 256) };
        let Ok(handle) = honest.submit(own, sum_of(256 * 600)) else { break };
        let Ok(sums) = sums_of(handle) else { break };
        assert!(sums.indices.is_sorted_by(|a, b| a < b) && sums.indices.len() == 600);
        assert_eq!(sums.values.len(), 600 * 1024);
        ended += 1;
    }
    stop.store(true, Relaxed);
    scribbler.join().unwrap();
    println!("{ended} of 200 ops ended with sums");
    drop((rogue, honest));
    rig.await_peace();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn no_words_of_a_rogue_stop_the_sidecar(
        messages in
            prop::collection::vec((0..8_u8, any::<u64>(), any::<u64>(), any::<u32>()), 1..40),
    ) {
        let rig = Rig::start();
        let rogue = Rogue::join(&rig, 0, 1);
        let (_memory, memory) = SharedMemory::new(8192).unwrap();
        for (kind, one, two, three) in messages {
            let (descriptor, id) = (encoded(&Descriptor::sum(one % 3000, DType::F32)), three % 3);
            // About half of the offsets are within the memory.
            let near = |offset: u64| if offset.is_multiple_of(2) { offset % 8192 } else { offset };
            let list = Some(ListAt { blocks: three % 40, values: near(two) });
            match kind {
                0 => rogue.send(&FromRank::Lend { memory: id }, Some(&memory)),
                1 => rogue.send(&FromRank::TakeBack { memory: id }, None),
                2 => rogue.send(&FromRank::AskStats, Some(&memory)),
                3 | 4 => rogue.send(
                    &FromRank::Submit { descriptor, memory: id, at: near(one), list: None },
                    None,
                ),
                5 | 6 => rogue.send(
                    &FromRank::Submit { descriptor, memory: id, at: near(one), list },
                    None,
                ),
                _ => drop(rogue.line.send(&("nonsense", one), None)),
            }
        }
        drop(rogue);
        rig.await_peace();
        reduce(&rig.job("next", 2), sum_of(4), vec![floats(1.0, 4); 2]);
    }
}

#[test]
fn memory_that_there_is_no_room_for_is_refused_and_the_session_goes_on() {
    let rig = Rig::with(Limits { jobs: 1, ranks: 1, memory: 1 << 20 });
    let ranks = rig.job("job", 1);
    let error = ranks[0].lend(2 << 20).unwrap_err().to_string();
    assert!(error.contains("2097152 bytes exceed the 1048576"), "{error}");
    let error = ranks[0].submit(own(floats(1.0, 1 << 20)), sum_of(1 << 20)).unwrap_err();
    assert!(matches!(error, Error::Memory(_)), "{error}");
    let lent = ranks[0].lend(1 << 20).unwrap();
    let memory = ask(&rig.path).unwrap().memory;
    assert_eq!((memory.used, memory.limit), (1 << 20, 1 << 20));
    drop(lent);
    reduce(&ranks, sum_of(4), vec![floats(1.0, 4)]);
    drop(ranks);
    rig.await_peace();
}

#[test]
fn memory_that_is_none_is_refused() {
    let rig = Rig::start();
    let rogue = Rogue::join(&rig, 0, 1);
    let why = rogue.lend(0, None).unwrap();
    assert!(why.contains("the memory's file descriptor did not arrive"), "{why}");
    let file = std::fs::File::open("/proc/self/exe").unwrap().into();
    let why = rogue.lend(0, Some(&file)).unwrap();
    assert!(why.contains("a memfd of plain pages"), "{why}");
}

#[test]
fn more_jobs_and_ranks_than_may_be_are_refused() {
    let rig = Rig::with(Limits { jobs: 2, ranks: 3, memory: 1 << 20 });
    let _two = rig.job("two", 2);
    let refused = |client: Rank| client.is_ready_within(PATIENCE).unwrap_err().to_string();
    let why = refused(rig.call("three", 0, 2));
    assert!(why.contains("on this host (2) and the ranks of other jobs (2) exceed"), "{why}");
    let _one = rig.job("one", 1);
    let why = refused(rig.call("more", 0, 1));
    assert!(why.contains("maximum number of jobs, 2;"), "{why}");
}

#[test]
fn another_user_is_no_rank_of_a_job_nor_begins_its_next_life() {
    let rig = Rig::start();
    let first = rig.call("job", 0, 2);
    while first.missing().is_empty() {
        std::thread::yield_now();
    }
    let line = Arc::new(Line::connect(&rig.path).unwrap());
    for generation in [0, 1].map(Generation) {
        let join = Join { generation, ..wish(1, 2) };
        let stranger = Peer { pid: 1, uid: u32::MAX };
        let why = rig.sidecar.shared.join(&join, &line, stranger).unwrap_err();
        assert!(why.contains("belongs to another user"), "{why}");
    }
    assert!(!first.is_ready_within(Duration::from_millis(20)).unwrap());
}

#[test]
fn a_sidecar_that_does_not_run_ends_the_session_of_its_rank() {
    let path = std::env::temp_dir().join(format!("racksum-stopped-{}", std::process::id()));
    let listener = Listener::bind(&path, 0o600).unwrap();
    let mut options = ConnectOptions::new("", "job");
    (options.world, options.op_timeout) = (1, Duration::from_millis(100));
    let rank = Rank::call(&path, &options).unwrap();
    let stopped = listener.accept().unwrap().unwrap();
    stopped.recv::<FromRank>().unwrap();
    stopped.send(&FromSidecar::Ready, None).unwrap();
    stopped.send(&FromSidecar::Lent { memory: 0, refused: None }, None).unwrap();
    let lent = rank.lend(4).unwrap();
    // Submit more ops than the line can queue while its other end does not read.
    let submit = || rank.submit(lent.region(0), sum_of(0));
    let first = submit().unwrap();
    while submit().is_ok() {}
    let error = sums_of(first).unwrap_err();
    assert!(matches!(error, Error::Op(OpError::NoAggregator { .. })), "{error}");
    let why = "has left an op unfinished for 5100 ms; its process may be suspended";
    assert!(error.to_string().contains(why), "{error}");
    while !matches!(submit(), Err(Error::Op(_))) {}
}

#[test]
fn a_rank_leaves_a_sidecar_that_has_too_much_to_read_once_it_reads() {
    let path = std::env::temp_dir().join(format!("racksum-full-{}", std::process::id()));
    let listener = Listener::bind(&path, 0o600).unwrap();
    let client = Rank::call(&path, &ConnectOptions::new("", "job")).unwrap();
    while client.line.offer(&FromRank::AskStats).unwrap() {}
    assert!(!client.may_leave_within(Duration::from_millis(50)));
    let sidecar = listener.accept().unwrap().unwrap();
    sidecar.set_patience(Some(PATIENCE)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Some((message, _)) = sidecar.recv::<FromRank>().unwrap() {
                if matches!(message, FromRank::Leave) {
                    return sidecar.hang_up();
                }
            }
            panic!("the rank closed the line without a `Leave` message");
        });
        assert!(client.may_leave_within(PATIENCE));
    });
}

#[test]
fn tensors_that_grow_keep_no_memory_that_is_too_small_for_them() {
    let rig = Rig::with(Limits { jobs: 1, ranks: 1, memory: 1 << 20 });
    let ranks = rig.job("job", 1);
    for count in (1..100).map(|step| step * 2000) {
        let handle = ranks[0].submit(own(floats(1.0, count)), sum_of(count)).unwrap();
        sums_of(handle).unwrap();
    }
}

#[test]
fn a_job_that_drains_before_it_begins_is_gone_although_its_ranks_are_stuck() {
    let rig = Rig::start();
    let stuck = Rogue::join(&rig, 0, 2);
    let waits: FromSidecar = stuck.line.recv().unwrap().unwrap().0;
    assert_eq!(waits, FromSidecar::Waiting { missing: vec![1] });
    rig.sidecar.drain();
    let why = rig.call("job", 1, 2).is_ready_within(PATIENCE).unwrap_err().to_string();
    assert!(why.contains("takes no more jobs"), "{why}");
    rig.await_peace();
    let message: FromSidecar = stuck.line.recv().unwrap().unwrap().0;
    assert!(matches!(message, FromSidecar::Refused { .. }));
}

#[test]
fn a_status_that_is_long_comes_in_parts() {
    let path = std::env::temp_dir().join(format!("racksum-long-{}", std::process::id()));
    let listener = Listener::bind(&path, 0o600).unwrap();
    let rig = Rig::start();
    let ranks = rig.job("job", 1);
    let mut long = ask(&rig.path).unwrap();
    long.jobs = vec![long.jobs[0].clone(); 1000];
    // Include characters that JSON escapes, and characters of several bytes.
    long.jobs[500].job = "\"\\\u{1f980}".repeat(600);
    let received = std::thread::scope(|scope| {
        let asks = scope.spawn(|| ask(&path).unwrap());
        let line = listener.accept().unwrap().unwrap();
        line.recv::<FromRank>().unwrap();
        write_status(&long, &line).unwrap();
        asks.join().unwrap()
    });
    assert!(received == long);
    drop(ranks);
}

#[test]
fn callers_that_say_nothing_keep_nobody_out() {
    let rig = Rig::with(Limits { jobs: 1, ranks: 1, memory: 1 << 20 });
    let silent: Vec<_> = (0..100).map(|_| Line::connect(&rig.path).unwrap()).collect();
    let ranks = rig.job("job", 1);
    reduce(&ranks, sum_of(4), vec![floats(1.0, 4)]);
    drop(silent);
}

#[test]
fn a_rank_that_is_gone_in_the_middle_of_a_fold_frees_its_memory_after_it() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let count = 1 << 20;
    let start = |rank: &Rank| {
        let lent = rank.lend(4 * count).unwrap();
        rank.submit(lent.region(4 * count), sum_of(count)).unwrap()
    };
    let handles: Vec<_> = (0..20).flat_map(|_| ranks.iter().map(start)).collect();
    ranks[1].line.hang_up();
    drop((handles, ranks));
    rig.await_peace();
}

#[test]
fn a_sidecar_that_drains_serves_its_jobs_and_takes_no_others() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let gathering = rig.call("other", 0, 2);
    while gathering.missing().is_empty() {
        std::thread::yield_now();
    }
    rig.sidecar.drain();
    for refused in [gathering, rig.call("next", 0, 1)] {
        let why = refused.is_ready_within(PATIENCE).unwrap_err().to_string();
        assert!(why.contains("is draining and takes no more jobs"), "{why}");
    }
    reduce(&ranks, sum_of(4), vec![floats(1.0, 4); 2]);
    assert!(ask(&rig.path).unwrap().draining);
    drop(ranks);
    rig.await_peace();
}

#[test]
fn what_a_sidecar_does_is_told() {
    let rig = Rig::start();
    let first = rig.call("gathers", 0, 3);
    while first.missing().is_empty() {
        std::thread::yield_now();
    }
    let ranks = rig.job("runs", 2);
    let lent = ranks[0].lend(1000).unwrap();
    let handle = ranks[0].submit(lent.region(40), sum_of(10)).unwrap();
    let status = loop {
        let status = ask(&rig.path).unwrap();
        if status.jobs[1].awaited_ops == 1 {
            break status;
        }
    };
    assert_eq!((status.ranks, status.memory.used, status.draining), (3, 1000, false));
    let [gathers, runs] = &status.jobs[..] else { panic!("{status:?}") };
    assert_eq!(
        (&gathers.job[..], &gathers.state[..], gathers.awaited),
        ("gathers", "gathering", 2)
    );
    assert_eq!((&runs.job[..], &runs.state[..], runs.awaited), ("runs", "running", 0));
    assert!(runs.stalled_ms.is_some());
    let behind: Vec<_> = runs.ranks.iter().map(|rank| (rank.behind, rank.next_op)).collect();
    assert_eq!(behind, [(false, 1), (true, 0)]);
    assert_eq!(
        (runs.ranks[0].lent_bytes, runs.ranks[0].pid),
        (1000, std::process::id().cast_signed())
    );
    drop(handle);
}

#[test]
fn a_rank_that_hands_memory_twice_at_a_time_is_let_go() {
    let list = |at, values| (at, Some(ListAt { blocks: 1, values }));
    // The memory has 4096 bytes. The first op uses the last 1024 of them, for a tensor or for the
    // values of a list.
    for (first, second) in [
        ((3072, None), (3072, None)),
        ((3072, None), (2052, None)),
        ((3072, None), list(0, 3068)),
        ((3072, None), list(3072, 0)),
        (list(0, 3072), (2052, None)),
        (list(0, 3072), list(2048, 2052)),
    ] {
        let rig = Rig::start();
        let rogue = Rogue::join(&rig, 1, 2);
        let honest = rig.call("job", 0, 2);
        assert!(honest.is_ready_within(PATIENCE).unwrap());
        let (_memory, memory) = SharedMemory::new(4096).unwrap();
        assert_eq!(rogue.lend(5, Some(&memory)), None);
        let descriptor = encoded(&sum_of(256));
        for (at, list) in [first, second] {
            rogue.send(&FromRank::Submit { descriptor, memory: 5, at, list }, None);
        }
        // The first op is still in flight, because the other rank has not called it.
        let FromSidecar::Lost { .. } = final_message(&rogue.line) else {
            panic!("expected `Lost`")
        };
        let error = failure(&honest, own(floats(1.0, 256)), sum_of(256));
        assert!(error.contains("lost rank 1: it dropped the connection"), "{error}");
        drop((rogue, honest));
        rig.await_peace();
    }
}

#[test]
fn calls_of_a_job_that_is_over_cost_nothing() {
    let rig = Rig::start();
    let mut ranks = rig.job("job", 2);
    let lent = ranks[0].lend(1 << 20).unwrap();
    let handle = ranks[0].submit(lent.region(4), sum_of(1)).unwrap();
    drop(ranks.pop());
    assert!(sums_of(handle).is_err());
    let other = ranks[0].lend(4).unwrap();
    let descriptor = encoded(&sum_of(0));
    for _ in 0..3 * MAX_OPS {
        let submit = FromRank::Submit { descriptor, memory: other.id(), at: 0, list: None };
        ranks[0].line.send(&submit, None).unwrap();
    }
    drop((lent, other));
    // The sidecar answers this query only after it has read all calls.
    assert!(ranks[0].refreshes_stats_within(&mut StatsQuery::default(), PATIENCE));
    let status = ask(&rig.path).unwrap();
    assert!(status.jobs[0].ranks[0].next_op <= 1, "calls after the job's end must not be numbered");
    assert_eq!(status.memory.used, 0);
}
