//! Jobs that an operator moves while they run, to aggregators that no rank knew.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use racksum_net::quic::{CallOptions, Credentials, ask_to_move};
use racksum_net::runtime::single_threaded;
use racksum_proto::control::{CONTROL_VERSION, FromAggregator, FromWorker, Join};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::job_name::JobName;
use racksum_proto::move_target::MoveTarget;
use racksum_proto::time::Span;
use racksum_worker::{Client, ConnectOptions, Faults};

use crate::failover::{Case, WORLD, cases, run};
use crate::impostor::Impostor;
use crate::inputs::seed;
use crate::ports::own_port;
use crate::rig::{Rig, Shape, Tree, bounded};
use crate::sidecars::Host;
use crate::waits::await_that;

/// Asks an aggregator to move a job, as `racksum move` does.
fn move_job(from: &Rig, job: &str, to: &[&Rig]) -> Result<u16, String> {
    let hosts = to.iter().map(|rig| rig.aggregator.addr().to_string()).collect();
    move_to(from, job, MoveTarget { hosts })
}

fn move_to(from: &Rig, job: &str, to: MoveTarget) -> Result<u16, String> {
    ask(from.aggregator.addr(), job, to)
}

/// Asks the aggregator at an address, which may be gone by then, to move a job.
fn ask(from: SocketAddr, job: &str, to: MoveTarget) -> Result<u16, String> {
    let credentials = Credentials::read_blocking(None, false).unwrap();
    let caller = CallOptions { from: None, credentials, patience: Span::from_secs(5) };
    let request = FromWorker::MoveJob { version: CONTROL_VERSION, job: job.into(), to };
    let asked = ask_to_move(from, request, &caller, Span::from_secs(200));
    single_threaded().unwrap().block_on(asked).map_err(|why| why.to_string())
}

/// Sums integers, whose sum has the same bits in every order.
fn sum_integers(client: &Client, _rank: u16) {
    const ELEMENTS: u16 = 60 * 256 * 4;
    let values = || (0..ELEMENTS).map(i32::from);
    let mut tensor: Vec<u8> = values().flat_map(i32::to_le_bytes).collect();
    client.reduce(&mut tensor, Descriptor::sum(ELEMENTS.into(), DType::I32)).unwrap();
    let sums = tensor.chunks_exact(4).map(|sum| i32::from_le_bytes(sum.try_into().unwrap()));
    assert!(sums.eq(values().map(|value| value * i32::from(WORLD))));
}

/// Runs rounds of ops again and again, until all ranks learn that `stop` is set.
fn run_until(client: &Client, rank: u16, round: &dyn Fn(&Client, u16), stop: &AtomicBool) {
    loop {
        round(client, rank);
        let mut stops = i32::from(rank == 0 && stop.load(SeqCst)).to_le_bytes();
        client.reduce(&mut stops, Descriptor::sum(1, DType::I32)).unwrap();
        if stops != [0; 4] {
            return;
        }
    }
}

/// Returns a round that reduces all cases.
fn all_of(cases: &[Case]) -> impl Fn(&Client, u16) + Sync + '_ {
    |client, rank| run(client, rank, cases, 1)
}

/// Runs the ranks of a job, each with its own options, while `body` moves it.
fn while_running(
    options: Vec<ConnectOptions>,
    round: &(dyn Fn(&Client, u16) + Sync),
    body: impl FnOnce(),
) {
    let (stop, joined) = (&AtomicBool::new(false), &Mutex::new(0));
    std::thread::scope(|scope| {
        for options in &options {
            scope.spawn(move || {
                let client = Client::connect(options).unwrap();
                *joined.lock().unwrap() += 1;
                run_until(&client, options.rank, round, stop);
            });
        }
        await_that("all ranks have joined", || *joined.lock().unwrap() == options.len());
        // A panic must not leave the ranks running forever.
        let done = catch_unwind(AssertUnwindSafe(body));
        stop.store(true, SeqCst);
        done.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

fn each(rig: &Rig, job: &str, change: impl Fn(&mut ConnectOptions)) -> Vec<ConnectOptions> {
    let options = |rank| {
        let mut options = rig.options(job, rank, WORLD);
        change(&mut options);
        options
    };
    (0..WORLD).map(options).collect()
}

#[test]
fn ops_of_every_kind_keep_their_bits_wherever_their_job_moves() {
    bounded(180, || {
        let seed = seed(91);
        let cases = cases(seed);
        for (attempt, rate) in [0.0, 0.02, 0.05].into_iter().enumerate() {
            let faults = Faults { drop: rate, duplicate: rate, reorder: rate, seed };
            let mtu = (attempt != 1).then_some(1500);
            let rigs = [1, 2, 3].map(|shards| Rig::start(|config| config.shards = shards));
            let options = each(&rigs[0], "kinds", |it| (it.faults, it.mtu) = (faults, mtu));
            while_running(options, &all_of(&cases), || {
                for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 2)] {
                    assert_eq!(move_job(&rigs[from], "kinds", &[&rigs[to]]), Ok(1));
                    assert_eq!((rigs[from].aggregator.jobs(), rigs[to].aggregator.jobs()), (0, 1));
                }
            });
            rigs.iter().for_each(Rig::await_peace);
        }
    });
}

#[test]
fn a_job_moves_from_two_aggregators_to_two_others_and_to_one() {
    bounded(120, || {
        let cases = cases(seed(92));
        let rigs = [(); 5].map(|()| Rig::start(|_| {}));
        let [one, two, three, four, five] = &rigs;
        let options = each(one, "spread", |options| {
            options.aggregators.push(two.aggregator.addr().to_string());
        });
        while_running(options, &all_of(&cases), || {
            // Any aggregator of a set can move the job.
            assert_eq!(move_job(two, "spread", &[three, four]), Ok(1));
            assert_eq!(move_job(three, "spread", &[five]), Ok(1));
            assert_eq!(five.aggregator.jobs(), 1);
        });
        rigs.iter().for_each(Rig::await_peace);
    });
}

#[test]
fn a_job_with_a_sidecar_moves_with_the_ranks_that_have_none() {
    bounded(120, || {
        let [one, other] = [(); 2].map(|()| Rig::start(|_| {}));
        let host = Host::start("moves", one.options("", 0, 1));
        let options = each(&one, "hosts", |_| {}).into_iter();
        let options = options.map(|options| match options.rank {
            0 | 1 => host.options(options, 2),
            _ => options,
        });
        while_running(options.collect(), &sum_integers, || {
            assert_eq!(move_job(&one, "hosts", &[&other]), Ok(1));
            assert_eq!(move_job(&other, "hosts", &[&one]), Ok(1));
        });
        [one, other].iter().for_each(Rig::await_peace);
    });
}

#[test]
fn a_job_of_a_tree_stays_and_the_reason_is_named() {
    bounded(60, || {
        let tree = Tree::start(&Shape::new(&[0], &[1, 1, 0]), |_| {});
        let other = Rig::start(|_| {});
        let options = (0..WORLD).map(|rank| tree.options("tree", rank)).collect();
        while_running(options, &sum_integers, || {
            let refusals = tree.rigs.iter().map(|rig| move_job(rig, "tree", &[&other]));
            let refusals: Vec<_> = refusals.map(Result::unwrap_err).collect();
            assert!(refusals[0].contains("has this parent, and cannot change it"), "{refusals:?}");
            assert!(refusals[1].contains("sends its sums to a parent"), "{refusals:?}");
        });
        tree.await_peace();
    });
}

#[test]
fn a_target_that_dies_at_any_time_costs_no_op_and_splits_no_job() {
    bounded(180, || {
        let cases = cases(seed(94));
        let (home, port) = (Rig::start(|_| {}), own_port());
        let start = || Rig::start(|config| config.port = port);
        while_running(each(&home, "target", |_| {}), &all_of(&cases), || {
            for nth in 0..8u64 {
                let target = start();
                let to = MoveTarget { hosts: vec![target.aggregator.addr().to_string()] };
                std::thread::scope(|scope| {
                    let home = &home;
                    scope.spawn(move || drop(move_to(home, "target", to)));
                    std::thread::sleep(Duration::from_millis(nth * 13));
                    drop(target);
                    // Wherever the job was, it is at the first aggregator again.
                    await_that("the job is back", || home.aggregator.jobs() == 1);
                });
            }
        });
        home.await_peace();
    });
}

#[test]
fn an_aggregator_that_dies_while_it_moves_a_job_costs_no_op_and_splits_no_job() {
    bounded(180, || {
        let cases = cases(seed(97));
        let [standby, target] = [(); 2].map(|()| Rig::start(|_| {}));
        let port = own_port();
        let start = || Rig::start(|config| config.port = port);
        let mut home = Some(start());
        let addr = |rig: &Rig| rig.aggregator.addr().to_string();
        let options =
            each(home.as_ref().unwrap(), "old", |it| it.standbys = vec![vec![addr(&standby)]]);
        let to = || MoveTarget { hosts: vec![addr(&target)] };
        while_running(options, &all_of(&cases), || {
            for nth in 0..8u64 {
                let from = home.as_ref().unwrap().aggregator.addr();
                std::thread::scope(|scope| {
                    scope.spawn(|| drop(ask(from, "old", to())));
                    std::thread::sleep(Duration::from_millis(nth * 13));
                    home = None;
                });
                let home = home.insert(start());
                // The ranks meet at the standby or at the target, and go on from there.
                await_that("the job is back", || {
                    home.aggregator.jobs() == 1
                        || [&standby, &target].iter().any(|rig| {
                            rig.aggregator.jobs() == 1 && move_job(rig, "old", &[home]).is_ok()
                        })
                });
            }
        });
        [standby, target].iter().chain(&home).for_each(Rig::await_peace);
    });
}

#[test]
fn a_target_that_fills_up_at_any_time_costs_no_op_and_splits_no_job() {
    bounded(180, || {
        let cases = cases(seed(96));
        let (home, target) = (Rig::start(|_| {}), Rig::start(|config| config.max_jobs = 1));
        while_running(each(&home, "full", |_| {}), &all_of(&cases), || {
            for nth in 0..8u64 {
                let moved = std::thread::scope(|scope| {
                    let (home, target) = (&home, &target);
                    let moved = scope.spawn(move || move_job(home, "full", &[target]));
                    std::thread::sleep(Duration::from_millis(nth * 7));
                    // The other job is refused if the room is taken.
                    let options = ConnectOptions { wait: false, ..target.options("other", 0, 1) };
                    let other = Client::connect(&options);
                    let moved = moved.join().unwrap();
                    drop(other);
                    moved
                });
                await_that("the other job has ended", || {
                    target.aggregator.jobs() == usize::from(moved.is_ok())
                });
                await_that("the job is at one place", || {
                    home.aggregator.jobs() == usize::from(moved.is_err())
                });
                if moved.is_ok() {
                    assert_eq!(move_job(&target, "full", &[&home]), Ok(1));
                }
            }
        });
        home.await_peace();
    });
}

#[test]
fn a_job_stays_at_an_aggregator_that_drains_until_another_answers() {
    bounded(180, || {
        let (next, port) = (Rig::start(|_| {}), own_port());
        let start = || Rig::start(|config| config.port = port);
        let (home, rounds) = (start(), &AtomicUsize::new(0));
        let mut restarted = None;
        let round = |client: &Client, rank| {
            sum_integers(client, rank);
            rounds.fetch_add(1, SeqCst);
        };
        let goes_on = || {
            let before = rounds.load(SeqCst);
            let enough = before + 10 * usize::from(WORLD);
            await_that("the job goes on", || rounds.load(SeqCst) > enough);
        };
        while_running(each(&home, "stays", |_| {}), &round, || {
            assert_eq!(move_job(&home, "stays", &[&next]), Ok(1));
            // The ranks know the first aggregator, but it has stopped.
            drop(home);
            next.aggregator.drain();
            goes_on();
            assert_eq!(next.aggregator.jobs(), 1);
            let home = restarted.insert(start());
            await_that("the job is back", || {
                (home.aggregator.jobs(), next.aggregator.jobs()) == (1, 0)
            });
            goes_on();
        });
    });
}

#[test]
fn if_one_group_of_a_job_cannot_move_the_others_stay_too() {
    bounded(60, || {
        let [rig, other] = [(); 2].map(|()| Rig::start(|_| {}));
        let mut impostor = Impostor::connect(&rig);
        let job = JobName::new("groups", "second");
        let wish = Join { job, ..impostor.wish("groups", 0, 1) };
        impostor.join(wish);
        let options = ConnectOptions { group: "first".into(), ..rig.options("groups", 0, 1) };
        let client = Client::connect(&options).unwrap();
        let moved = std::thread::scope(|scope| {
            let moved = scope.spawn(|| move_job(&rig, "groups", &[&other]));
            let Some(FromAggregator::PrepareMove { number, .. }) = impostor.recv_message() else {
                panic!("the rank is not asked to prepare")
            };
            let reason = "rank 0: it has work to do".to_owned();
            impostor.send_message(&FromWorker::CannotMove { number, reason });
            moved.join().unwrap()
        });
        let why = moved.unwrap_err();
        assert!(why.ends_with("stays at this aggregator: rank 0: it has work to do"), "{why}");
        assert_eq!((rig.aggregator.jobs(), other.aggregator.jobs()), (2, 0));
        drop(client);
    });
}

#[test]
fn of_two_moves_at_once_one_is_refused() {
    bounded(60, || {
        let cases = cases(seed(95));
        let [one, two, three] = [(); 3].map(|()| Rig::start(|_| {}));
        while_running(each(&one, "twice", |_| {}), &all_of(&cases), || {
            let moved = std::thread::scope(|scope| {
                let moves = [&two, &three].map(|to| {
                    let one = &one;
                    scope.spawn(move || move_job(one, "twice", &[to]))
                });
                moves.map(|moved| moved.join().unwrap())
            });
            assert_eq!(moved.iter().filter(|moved| moved.is_ok()).count(), 1, "{moved:?}");
            let at = [&two, &three].map(|rig| rig.aggregator.jobs());
            assert_eq!(at, moved.map(|moved| usize::from(moved.is_ok())));
        });
    });
}

#[test]
fn a_target_and_an_operator_of_another_version_are_told_which_is_spoken() {
    bounded(30, || {
        let rig = Rig::start(|_| {});
        let wish = Impostor::connect(&rig).wish("job", 0, 1);
        let (version, job) = (CONTROL_VERSION + 1, wish.job.clone());
        let to = MoveTarget { hosts: vec!["127.0.0.1:9".into()] };
        for request in [
            FromWorker::AskRoom(Join { version, ..wish }),
            FromWorker::MoveJob { version, job, to: to.clone() },
            FromWorker::DrainTo { version, to },
        ] {
            let mut caller = Impostor::connect(&rig);
            caller.send_message(&request);
            let answer = caller.recv_message();
            assert_eq!(answer, Some(FromAggregator::WrongVersion { speaks: CONTROL_VERSION }));
        }
    });
}

#[test]
fn a_rank_that_cannot_move_keeps_its_job_and_one_that_says_it_can_moves_nobody() {
    bounded(60, || {
        let [rig, other] = [(); 2].map(|()| Rig::start(|_| {}));
        let mut impostor = Impostor::connect(&rig);
        let client = std::thread::scope(|scope| {
            let joined = scope.spawn(|| Client::connect(&rig.options("job", 1, 2)).unwrap());
            let wish = impostor.wish("job", 0, 2);
            impostor.join(wish);
            joined.join().unwrap()
        });
        // An answer that nobody asked for changes nothing.
        impostor.send_message(&FromWorker::MovePrepared { number: 1 });
        let moved = std::thread::scope(|scope| {
            let moved = scope.spawn(|| move_job(&rig, "job", &[&other]));
            let Some(FromAggregator::PrepareMove { number, .. }) = impostor.recv_message() else {
                panic!("the rank is not asked to prepare")
            };
            let reason = "rank 0: it has work to do\n\u{1b}[31m".to_owned();
            impostor.send_message(&FromWorker::CannotMove { number, reason });
            impostor.send_message(&FromWorker::MovePrepared { number });
            moved.join().unwrap()
        });
        let why = moved.unwrap_err();
        assert!(why.contains("stays at this aggregator: rank 0: it has work to do\\n\\u"), "{why}");
        assert_eq!(impostor.recv_message(), Some(FromAggregator::CancelMove { number: 1 }));
        assert_eq!((rig.aggregator.jobs(), other.aggregator.jobs()), (1, 0));
        drop(client);
    });
}
