//! An aggregator and the ranks of jobs, in threads of one test.

use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use racksum_aggregator::{Aggregator, Config, Fanout, ShardStats};
use racksum_proto::reject::Rejects;
use racksum_worker::{Client, ConnectOptions};

use crate::oracle::Place;
use crate::waits::{BUSY, await_that};

/// A running aggregator.
pub(crate) struct Rig {
    pub(crate) aggregator: Aggregator,
}

impl Rig {
    /// Starts a small aggregator that unicasts. `change` may change its settings.
    pub(crate) fn start(change: impl FnOnce(&mut Config)) -> Self {
        let mut config =
            Config { port: 0, pool_mib: 64, fanout: Fanout::Unicast, ..Config::default() };
        change(&mut config);
        Self { aggregator: Aggregator::start(config).unwrap() }
    }

    /// Returns a rank's options for this aggregator. Joins and ops have long but finite timeouts.
    pub(crate) fn options(&self, job: &str, rank: u16, world: u16) -> ConnectOptions {
        ConnectOptions {
            rank,
            world,
            join_timeout: Duration::from_secs(120),
            op_timeout: Duration::from_secs(120),
            ..ConnectOptions::new(self.aggregator.addr().to_string(), job)
        }
    }

    /// Runs all ranks of a job, each in a thread; returns their results by rank.
    pub(crate) fn ranks<T: Send>(
        &self,
        job: &str,
        world: u16,
        change: impl Fn(&mut ConnectOptions) + Sync,
        body: impl Fn(&Client, u16) -> T + Sync,
    ) -> Vec<T> {
        run_all(world, |rank| {
            let mut options = self.options(job, rank, world);
            change(&mut options);
            let client = Client::connect(&options).unwrap();
            body(&client, rank)
        })
    }

    /// Returns the rejects of all shards by reason, as last published.
    pub(crate) fn rejects(&self) -> Rejects {
        let mut all = Rejects::default();
        for shard in self.aggregator.stats() {
            all.add(&shard.events.rejects);
        }
        all
    }

    /// Waits until the statistics of the shards satisfy `done`.
    pub(crate) fn await_stats(&self, what: &str, done: impl Fn(&[ShardStats]) -> bool) {
        await_that(what, || done(&self.aggregator.stats()));
    }

    /// Waits until no job is left and every shard has all its buffers back.
    pub(crate) fn await_peace(&self) {
        await_that("the jobs end", || self.aggregator.jobs() == 0);
        self.await_stats("the buffers are back", |shards| {
            shards
                .iter()
                .all(|shard| shard.buffers.total > 0 && shard.buffers.total == shard.buffers.free)
        });
    }
}

/// A tree of aggregators.
pub(crate) struct Tree {
    /// The aggregators, the root first.
    pub(crate) rigs: Vec<Rig>,
    shape: Shape,
}

/// The shape of a tree.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    /// Index of the parent of each aggregator except the root, which is aggregator 0.
    pub(crate) parents: Vec<usize>,
    /// Index of each rank's aggregator.
    pub(crate) at: Vec<usize>,
}

impl Shape {
    pub(crate) fn new(parents: &[usize], at: &[usize]) -> Self {
        Self { parents: parents.to_vec(), at: at.to_vec() }
    }

    /// Returns a shape with one aggregator for all ranks.
    pub(crate) fn flat(world: u16) -> Self {
        Self::new(&[], &vec![0; world.into()])
    }

    /// Returns the tree in which the aggregators sum the ranks' contributions.
    pub(crate) fn place(&self) -> Place {
        self.place_of(0).unwrap()
    }

    /// Returns the tree at one aggregator and below, or `None` if no rank joins there.
    fn place_of(&self, aggregator: usize) -> Option<Place> {
        let ranks = (0..).zip(&self.at).filter(|(_, at)| **at == aggregator);
        let below = (1..).zip(&self.parents).filter(|(_, parent)| **parent == aggregator);
        let mut places: Vec<_> = ranks.map(|(rank, _)| Place::Rank(rank)).collect();
        places.extend(below.filter_map(|(below, _)| self.place_of(below)));
        places.sort_by_key(Place::first);
        (!places.is_empty()).then_some(Place::Rack(places))
    }
}

impl Tree {
    /// Starts the aggregators as [`Rig::start`] does.
    pub(crate) fn start(shape: &Shape, change: impl Fn(&mut Config)) -> Self {
        let mut rigs = vec![Rig::start(&change)];
        for parent in &shape.parents {
            let parent = rigs[*parent].aggregator.addr().to_string();
            rigs.push(Rig::start(|config| {
                change(config);
                config.parent = Some(parent);
            }));
        }
        Self { rigs, shape: shape.clone() }
    }

    /// Returns the options of a rank.
    pub(crate) fn options(&self, job: &str, rank: u16) -> ConnectOptions {
        let world = u16::try_from(self.shape.at.len()).unwrap();
        self.rigs[self.shape.at[usize::from(rank)]].options(job, rank, world)
    }

    /// Runs all ranks of a job, each in a thread; returns their results by rank.
    pub(crate) fn ranks<T: Send>(
        &self,
        job: &str,
        change: impl Fn(&mut ConnectOptions) + Sync,
        body: impl Fn(&Client, u16) -> T + Sync,
    ) -> Vec<T> {
        run_all(u16::try_from(self.shape.at.len()).unwrap(), |rank| {
            let mut options = self.options(job, rank);
            change(&mut options);
            let client = Client::connect(&options).unwrap();
            body(&client, rank)
        })
    }

    pub(crate) fn await_peace(&self) {
        self.rigs.iter().for_each(Rig::await_peace);
    }
}

/// Runs all ranks of a job, each in a thread; returns their results by rank.
fn run_all<T: Send>(world: u16, run: impl Fn(u16) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|p| resume_unwind(p))).collect()
    })
}

/// Runs a test alone in another process, which may open as many files as the system permits. An
/// environment variable marks the process.
pub(crate) fn in_a_process_of_its_own(name: &str, test: impl FnOnce() + Send + 'static) {
    const ALONE: &str = "RACKSUM_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return bounded(120, test);
    }
    let program = std::env::current_exe().unwrap();
    let mut alone = std::process::Command::new("sh");
    alone.args(["-c", "ulimit -S -n $(ulimit -H -n) && exec \"$@\"", "sh"]).arg(program);
    let ended = alone
        .args([name, "--exact", "--nocapture"])
        .env(ALONE, "1")
        .env(racksum_test_report::TEST, name)
        .output()
        .unwrap();
    let [out, err] = [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).unwrap());
    println!("{out}{err}");
    assert!(ended.status.success() && out.contains("1 passed"), "{}", ended.status);
}

/// Repeats an attempt with time limits that double from the first, as long as the attempt reports
/// that its limit was too short. On a busy machine, a short limit may pass before the threads run.
pub(crate) fn with_limits<T>(
    first: Duration,
    mut attempt: impl FnMut(Duration) -> Result<T, String>,
) -> T {
    let mut limit = first;
    loop {
        match attempt(limit) {
            Ok(done) => return done,
            Err(why) => assert!(limit < first * 64, "gave up at a limit of {limit:?}: {why}"),
        }
        limit *= 2;
    }
}

/// Repeats an attempt, at most four times, as long as it reports that the machine gave some threads
/// no time. Prints each reason.
pub(crate) fn with_retries<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    for _ in 0..4 {
        match attempt() {
            Ok(done) => return done,
            Err(why) => eprintln!("trying again: {why}"),
        }
    }
    attempt().unwrap()
}

/// Runs a test, and panics if it takes much longer than `seconds`, the limit on a quiet machine.
pub(crate) fn bounded(seconds: u64, test: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    let named = std::thread::Builder::new().name(racksum_test_report::test_name());
    let run = move || {
        test();
        // The receiver may have given up after a timeout.
        done.send(()).unwrap_or(());
    };
    let body = named.spawn(run).unwrap();
    let seconds = seconds * BUSY;
    match wait.recv_timeout(Duration::from_secs(seconds)) {
        Err(RecvTimeoutError::Timeout) => panic!("the test has hung for {seconds} s"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => {
            body.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    }
}
