//! Tests with several ranks in one process, each test with its own sidecar.

mod crowds;
mod hostile;
mod lists;
mod texts;

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use proptest::prelude::*;
use racksum_net::clock::Clock;
use racksum_net::local::Listener;
use racksum_proto::arith;
use racksum_proto::auth::Key;
use racksum_proto::call::{Call, Collective};
use racksum_proto::control::MAX_OPS;
use racksum_proto::dtype::{DType, Reduction};
use racksum_proto::ids::Generation;
use racksum_proto::loss::Loss;
use racksum_proto::stats::SidecarStats;
use racksum_proto::time::Span;

use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids;

use super::message::FromRank;
use super::thread::spawn;
use super::unix_transport::UnixTransport;
use super::{Limits, Sidecar, ask};
use crate::client::{Client, Handle};
use crate::error::{ConnectError, Error};
use crate::operand::Operand;
use crate::options::ConnectOptions;
use crate::tensor::Region;
use crate::tensor::tests::{region_of, regions_of};
use crate::transport::{LentMemory, Transport};

/// A timeout that is long enough even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(200);

/// A rank's client, and the transport under it.
#[derive(Debug)]
struct Rank {
    client: Client,
    transport: Arc<UnixTransport>,
}

impl Deref for Rank {
    type Target = UnixTransport;

    fn deref(&self) -> &UnixTransport {
        &self.transport
    }
}

impl Rank {
    /// Calls the sidecar and asks to join. Does not wait for the other ranks.
    fn call(path: &Path, options: &ConnectOptions) -> Result<Self, ConnectError> {
        let transport = Arc::new(UnixTransport::call(path, options)?);
        let client = Client::over(Arc::clone(&transport) as Arc<dyn Transport>);
        Ok(Self { client, transport })
    }

    fn submit<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
    ) -> Result<Handle<T>, Error> {
        self.client.submit(operand, descriptor)
    }
}

/// Waits for an op, and returns its sums.
fn sums_of<T: TryFrom<Operand>>(handle: Handle<T>) -> Result<T, Error> {
    Ok(handle.wait()?.tensor)
}

struct Rig {
    path: PathBuf,
    sidecar: Sidecar,
}

impl Rig {
    fn start() -> Self {
        Self::with(Limits { jobs: 8, ranks: 64, memory: 1 << 30 })
    }

    fn with(limits: Limits) -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let name = format!("racksum-{}-{}", std::process::id(), STARTED.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        let listener = Listener::bind(&path, 0o600).unwrap();
        Self { sidecar: Sidecar::start(listener, 2, None, limits).unwrap(), path }
    }

    /// Waits until the sidecar has no jobs and holds no memory of ranks.
    fn await_peace(&self) {
        while self.sidecar.jobs() > 0 || ask(&self.path).unwrap().memory.used > 0 {
            std::thread::yield_now();
        }
    }

    fn call(&self, job: &str, rank: u16, world: u16) -> Rank {
        self.call_with(job, rank, world, |_| {})
    }

    fn call_with(
        &self,
        job: &str,
        rank: u16,
        world: u16,
        set: impl FnOnce(&mut ConnectOptions),
    ) -> Rank {
        let mut options = ConnectOptions::new("", job);
        (options.rank, options.world) = (rank, world);
        set(&mut options);
        Rank::call(&self.path, &options).unwrap()
    }

    /// Joins all ranks of a job, and returns their clients.
    fn job(&self, job: &str, world: u16) -> Vec<Rank> {
        let ranks: Vec<_> = (0..world).map(|rank| self.call(job, rank, world)).collect();
        for rank in &ranks {
            assert!(rank.is_ready_within(PATIENCE).unwrap());
        }
        ranks
    }
}

/// Returns a tensor in private memory.
fn own(bytes: Vec<u8>) -> Region {
    region_of(bytes, ())
}

fn floats(value: f32, count: usize) -> Vec<u8> {
    value.to_le_bytes().repeat(count)
}

fn sum_of(count: usize) -> Descriptor {
    Descriptor::sum(count as u64, DType::F32)
}

/// Reduces one tensor of each rank. Checks that all results are equal, and returns the result.
fn reduce(ranks: &[Rank], descriptor: Descriptor, tensors: Vec<Vec<u8>>) -> Vec<u8> {
    let memory: Vec<_> = ranks.iter().map(|rank| rank.lend(tensors[0].len()).unwrap()).collect();
    // Put every second tensor, starting with the first, in shared memory.
    let mut handles = Vec::new();
    for (i, (rank, tensor)) in ranks.iter().zip(&tensors).enumerate() {
        let region = if i % 2 == 0 {
            memory[i].write(0, tensor);
            memory[i].region(tensor.len())
        } else {
            own(tensor.clone())
        };
        handles.push(rank.submit(region, descriptor).unwrap());
    }
    let mut reduced = Vec::new();
    for handle in handles {
        let region = sums_of(handle).unwrap();
        reduced.push(region.bytes(0..region.len()).to_vec());
    }
    for other in &reduced {
        assert_eq!(other, &reduced[0], "the ranks have different result bits");
    }
    reduced.remove(0)
}

/// Returns the error of an op that must fail.
fn failure<T>(rank: &Rank, operand: T, descriptor: Descriptor) -> String
where
    T: Into<Operand> + TryFrom<Operand> + std::fmt::Debug,
{
    match rank.submit(operand, descriptor) {
        Ok(handle) => sums_of(handle).unwrap_err().to_string(),
        Err(refused) => refused.to_string(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_is_folded_has_the_bits_of_the_definition(
        dtype in prop::sample::select(&DType::ALL),
        reduction in prop::sample::select(&Reduction::ALL),
        world in 1..5_u16,
        elements in prop_oneof![0..50_usize, 0..40_000_usize],
        seed in any::<u64>(),
    ) {
        let rig = Rig::start();
        let ranks = rig.job("job", world);
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let len = elements * dtype.size();
        let tensors: Vec<Vec<u8>> =
            (0..world).map(|_| (0..len).map(|_| byte()).collect()).collect();
        let descriptor = Descriptor { reduction, ..Descriptor::sum(elements as u64, dtype) };
        let inputs: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        let mut expected = vec![0; len];
        let terms = arith::FoldTerms { world: world.into(), absent: false };
        arith::fold_run(dtype.native_wire(), reduction, terms, &inputs, &mut expected).unwrap();
        prop_assert_eq!(reduce(&ranks, descriptor, tensors), expected);
    }
}

#[test]
fn ops_are_waited_for_in_any_order() {
    let rig = Rig::start();
    let ranks = rig.job("job", 3);
    let start =
        |rank: &Rank, i: u8| rank.submit(own(floats(f32::from(i), 5000)), sum_of(5000)).unwrap();
    let mut handles: Vec<Vec<_>> =
        ranks.iter().map(|rank| (0..20).map(|i| start(rank, i)).collect()).collect();
    for i in (0..20_u8).rev() {
        for handles in &mut handles {
            let region = sums_of(handles.pop().unwrap()).unwrap();
            assert_eq!(region.bytes(0..4).to_vec(), (3.0 * f32::from(i)).to_le_bytes());
        }
    }
}

#[test]
fn no_more_ops_are_taken_than_may_be_in_flight() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let start = |rank: &Rank| rank.submit(own(floats(1.0, 1)), sum_of(1));
    let handles: Vec<_> = (0..MAX_OPS).map(|_| start(&ranks[0]).unwrap()).collect();
    let max = usize::from(MAX_OPS);
    assert_eq!(start(&ranks[0]).unwrap_err(), Error::Submit(SubmitError::TooManyOps { max }));
    assert!(!ranks[0].has_room_within(0, Duration::from_millis(20)));
    assert!(!ranks[0].has_room_for(0, 1));
    assert!(ranks[1].has_room_for(0, max) && !ranks[1].has_room_for(0, max + 1));
    let others: Vec<_> = (0..MAX_OPS).map(|_| start(&ranks[1]).unwrap()).collect();
    assert!(ranks[0].has_room_within(0, PATIENCE));
    for (handle, other) in handles.into_iter().zip(others) {
        sums_of(handle).unwrap();
        sums_of(other).unwrap();
    }
}

#[test]
fn an_op_goes_on_without_its_handle_and_keeps_its_tensor() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let (kept, gone) = std::sync::mpsc::channel::<()>();
    drop(ranks[0].submit(region_of(floats(1.0, 10), kept), sum_of(10)).unwrap());
    assert_eq!(gone.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
    let other = ranks[1].submit(own(floats(2.0, 10)), sum_of(10)).unwrap();
    let region = sums_of(other).unwrap();
    assert_eq!(region.bytes(0..4).to_vec(), 3f32.to_le_bytes());
    assert_eq!(gone.recv_timeout(PATIENCE), Err(std::sync::mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_tensor_that_was_copied_is_reduced_although_nobody_waits_for_it() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    for ends_first in [false, true] {
        let [tensor, seen] = regions_of(floats(1.0, 2), [0..8, 0..8]);
        let handle = ranks[0].submit(tensor, sum_of(2)).unwrap();
        let mut handle = Some(handle).filter(|_| ends_first);
        let other = ranks[1].submit(own(floats(2.0, 2)), sum_of(2)).unwrap();
        sums_of(other).unwrap();
        if let Some(handle) = handle.take() {
            assert!(handle.ends_within(PATIENCE));
            drop(handle);
            assert_eq!(seen.bytes(0..8).to_vec(), floats(3.0, 2));
        }
        // Each round copies 8 bytes to shared memory and 8 bytes back.
        let copied = if ends_first { 32 } else { 16 };
        let (clock, began) = (Clock::start(), Clock::start().now());
        while ranks[0].sidecar_stats().copied_bytes != copied {
            assert!(
                clock.now().since(began) < Span::from_secs(200),
                "the sums were not copied back in time"
            );
            std::thread::yield_now();
        }
        assert_eq!(seen.bytes(0..8).to_vec(), floats(3.0, 2));
    }
}

#[test]
fn ops_are_awaited_by_tasks_as_by_threads() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        for round in 0..20 {
            let start = |rank: &Rank| rank.submit(vec![round as f32; 1000], sum_of(1000)).unwrap();
            let first = start(&ranks[0]);
            let second = start(&ranks[1]);
            for handle in [first, second] {
                assert_eq!(handle.await.unwrap().tensor, [2.0 * round as f32; 1000]);
            }
        }
    });
}

#[test]
fn ranks_that_disagree_are_told_and_go_on() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let one = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap();
    let other = ranks[1].submit(own(floats(1.0, 11)), sum_of(11)).unwrap();
    for handle in [one, other] {
        let error = sums_of(handle).unwrap_err().to_string();
        assert!(error.contains("the ranks disagree: rank 0 has sum of 10 x f32"), "{error}");
    }
    reduce(&ranks, sum_of(4), vec![floats(1.0, 4); 2]);
}

#[test]
fn a_rank_that_is_gone_is_named_to_the_others() {
    let rig = Rig::start();
    let mut ranks = rig.job("job", 3);
    let handle = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap();
    ranks[2].line.hang_up();
    let lost = OpError::PeerLost { ranks: vec![ids::Rank(2)], why: Loss::Died };
    assert_eq!(sums_of(handle).unwrap_err(), Error::Op(lost));
    let refused = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap_err();
    assert_eq!(
        refused,
        Error::Submit(SubmitError::PeerLost { ranks: vec![ids::Rank(2)], why: Loss::Died })
    );
    ranks.clear();
    // The job ended when its last rank disconnected, so its name is free.
    reduce(&rig.job("job", 2), sum_of(4), vec![floats(1.0, 4); 2]);
}

#[test]
fn a_rank_that_leaves_is_only_missed_by_ops() {
    let rig = Rig::start();
    let ranks = rig.job("job", 3);
    ranks[2].close();
    ranks[1].close();
    let error = failure(&ranks[0], own(floats(1.0, 10)), sum_of(10));
    assert!(error.contains("lost ranks 1, 2: they left the job"), "{error}");
}

#[test]
fn an_op_that_not_all_ranks_call_times_out() {
    let rig = Rig::start();
    // The job uses the shortest timeout that any rank asks for.
    let soon = |options: &mut ConnectOptions| options.op_timeout = Duration::from_millis(200);
    let ranks = [rig.call("job", 0, 2), rig.call_with("job", 1, 2, soon)];
    assert!(ranks[0].is_ready_within(PATIENCE).unwrap());
    let handle = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap();
    match sums_of(handle).unwrap_err() {
        Error::Op(OpError::Timeout { missing, .. }) => assert_eq!(missing[0].0, ids::Rank(1)),
        error => panic!("{error}"),
    }
}

#[test]
fn who_cannot_join_is_told_why() {
    let rig = Rig::start();
    let first = rig.call("job", 0, 2);
    // The sidecar serves callers concurrently, so wait until this rank has joined before the next
    // one calls.
    while first.missing().is_empty() {
        std::thread::yield_now();
    }
    let refused = |client: Rank| match client.is_ready_within(PATIENCE).unwrap_err() {
        ConnectError::SidecarRefused(reason) => reason,
        error => panic!("{error}"),
    };
    assert!(refused(rig.call("job", 0, 2)).starts_with("rank 0 has already joined as process"));
    assert_eq!(
        refused(rig.call("job", 1, 3)),
        "job \"job\": the number of ranks is 2, but rank 1 asks for 3"
    );
    assert_eq!(refused(rig.call("other", 3, 3)), "rank 3 must be below the number of ranks, 3");
    assert!(!first.is_ready_within(Duration::from_millis(20)).unwrap());
    assert_eq!(first.missing(), [1]);
    let older = |options: &mut ConnectOptions| options.generation = Generation(2);
    let restarted = rig.call_with("job", 0, 2, older);
    assert!(!restarted.is_ready_within(Duration::from_millis(20)).unwrap());
    let error = first.is_ready_within(PATIENCE).unwrap_err().to_string();
    assert!(error.contains("a greater generation of the job has begun"), "{error}");
    let late = "job \"job\" is in generation 2, and rank 1 has the earlier generation 0";
    let why = refused(rig.call("job", 1, 2));
    assert!(why.starts_with(late), "{why}");
}

#[test]
fn a_life_is_joined_and_ended_by_those_that_show_its_secret() {
    let rig = Rig::start();
    let call = |job, (rank, world), life, secret: Option<u8>| {
        rig.call_with(job, rank, world, |options| {
            options.generation = Generation(life);
            options.secret = secret.map(|secret| Key([secret; Key::LEN]));
        })
    };
    let refused = |client: Rank| {
        let why = client.is_ready_within(PATIENCE).unwrap_err().to_string();
        assert!(why.contains("does not prove that it belongs to the same job"), "{why}");
    };
    let first = call("job", (0, 2), 1, Some(1));
    while first.missing().is_empty() {
        std::thread::yield_now();
    }
    for (life, secret) in [(1, None), (1, Some(2)), (2, None), (2, Some(2))] {
        refused(call("job", (1, 2), life, secret));
    }
    assert!(!first.is_ready_within(Duration::from_millis(20)).unwrap());
    let _second = call("job", (1, 2), 1, Some(1));
    assert!(first.is_ready_within(PATIENCE).unwrap());
    let _next = call("job", (0, 2), 2, Some(1));
    let why = failure(&first, own(floats(1.0, 1)), sum_of(1));
    assert!(why.contains("a greater generation of the job has begun"), "{why}");
    // A rank with a secret cannot end a life that began without a secret.
    let without = call("other", (0, 1), 1, None);
    assert!(without.is_ready_within(PATIENCE).unwrap());
    refused(call("other", (0, 1), 2, Some(1)));
}

#[test]
fn a_rank_that_runs_ahead_of_what_it_may_is_let_go() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let lent = ranks[1].lend(4 * usize::from(MAX_OPS) + 4).unwrap();
    let mut descriptor = [0; Descriptor::LEN];
    sum_of(1).encode(&mut descriptor);
    for nth in 0..=MAX_OPS {
        let (memory, at) = (lent.id(), 4 * u64::from(nth));
        let submit = FromRank::Submit { descriptor, memory, at, list: None };
        ranks[1].line.send(&submit, None).unwrap();
    }
    let lost = |rank| failure(rank, own(floats(1.0, 1)), sum_of(1));
    // Once rank 1 has received its error, the sidecar has read all earlier messages of rank 1.
    lost(&ranks[1]);
    let error = lost(&ranks[0]);
    assert!(error.contains("lost rank 1: it dropped the connection"), "{error}");
}

#[test]
fn memory_may_be_lent_faster_than_the_sidecar_reads() {
    let rig = Rig::start();
    let ranks = rig.job("job", 1);
    let lent: Vec<_> = (0..2000).map(|_| ranks[0].lend(1).unwrap()).collect();
    let handle = ranks[0].submit(lent[1999].region(1), Descriptor::sum(0, DType::F32));
    assert!(handle.is_err(), "a region of one byte must not match an empty tensor");
    drop(lent);
    reduce(&ranks, sum_of(4), vec![floats(1.0, 4)]);
}

#[test]
fn a_sidecar_that_is_gone_is_an_error_of_ops() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let handle = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap();
    drop(rig.sidecar);
    let error = sums_of(handle).unwrap_err().to_string();
    assert!(error.contains("the sidecar at") && error.contains("told to stop"), "{error}");
    let options = ConnectOptions::new("", "job");
    let error = Rank::call(&rig.path, &options).unwrap_err().to_string();
    assert!(error.contains("start `racksum worker --socket` with that path"), "{error}");
}

#[test]
fn what_a_rank_says_out_of_turn_ends_that_rank() {
    let rig = Rig::start();
    for nonsense in [
        FromRank::Submit { descriptor: [0xff; Descriptor::LEN], memory: 0, at: 0, list: None },
        FromRank::Submit { descriptor: [0; Descriptor::LEN], memory: 7, at: u64::MAX, list: None },
        FromRank::AskStatus,
    ] {
        let ranks = rig.job("job", 2);
        let handle = ranks[0].submit(own(floats(1.0, 10)), sum_of(10)).unwrap();
        ranks[1].line.send(&nonsense, None).unwrap();
        match sums_of(handle).unwrap_err() {
            Error::Op(OpError::PeerLost { ranks, why }) => {
                assert_eq!((ranks, why), (vec![ids::Rank(1)], Loss::Broke));
            }
            error => panic!("{error}"),
        }
    }
    while rig.sidecar.jobs() > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn ops_on_the_same_memory_take_turns() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let memory = ranks[0].lend(16).unwrap();
    memory.write(0, &floats(1.0, 4));
    // Tensors of rank 1 are copied. The sums are written back when a thread waits for the op, or
    // when another op needs the memory.
    let tensors = regions_of(floats(2.0, 4), [0..16, 0..8, 4..16]);
    let shared = [16, 8, 16].map(|len| memory.region(len));
    let counts = [4, 2];
    std::thread::scope(|scope| {
        let start = |rank: &'static str, of: usize, regions: [Region; 3]| {
            let ranks = &ranks;
            scope.spawn(move || {
                let [whole, part, _] = regions;
                let handles: Vec<_> = [whole, part]
                    .into_iter()
                    .zip(counts)
                    .map(|(region, count)| ranks[of].submit(region, sum_of(count)).expect(rank))
                    .collect();
                // Wait for the later op first.
                handles.into_iter().rev().for_each(|handle| drop(sums_of(handle).unwrap()));
            })
        };
        start("rank 0", 0, shared);
        start("rank 1", 1, tensors);
    });
    let bytes = memory.region(16).bytes(0..16).to_vec();
    assert_eq!(bytes, [floats(6.0, 2), floats(3.0, 2)].concat());
}

#[test]
fn a_call_that_a_rank_refuses_pairs_with_no_other() {
    // wire: W-70
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let call = Call { number: 5, collective: Collective::AllReduce, root: 0 };
    let called = Descriptor { call, ..sum_of(2) };
    let refused = ranks[0].submit(own(floats(1.0, 3)), called).unwrap_err();
    assert!(matches!(refused, Error::Length { .. }), "{refused}");
    let error = failure(&ranks[1], own(floats(1.0, 2)), called);
    assert!(error.contains("rank 0 has a call that it rejected"), "{error}");
    // A call that all ranks refuse causes no further error, and the op after it is summed.
    ranks.iter().for_each(|rank| rank.refuse(call).unwrap());
    assert_eq!(reduce(&ranks, sum_of(2), vec![floats(1.0, 2), floats(2.0, 2)]), floats(3.0, 2));
}

#[test]
fn what_has_ended_a_job_is_said_before_what_is_wrong_with_an_op() {
    let rig = Rig::start();
    let ranks = rig.job("job", 2);
    let [tensor, again] = regions_of(floats(1.0, 2), [0..8, 0..8]);
    let first = ranks[0].submit(tensor, sum_of(2)).unwrap();
    ranks[1].close();
    assert!(first.ends_within(PATIENCE));
    let lost = SubmitError::PeerLost { ranks: vec![ids::Rank(1)], why: Loss::Left };
    assert_eq!(ranks[0].submit(again, sum_of(2)).unwrap_err(), lost.into());
}

#[test]
fn a_panic_of_a_thread_ends_the_process() {
    const DIES: &str = "RACKSUM_TEST_DIES";
    if std::env::var_os(DIES).is_some() {
        let thread = spawn("dies", || panic!("this panic is intended")).unwrap();
        return thread.join().unwrap();
    }
    let own = std::env::current_exe().unwrap();
    let test = "sidecar::tests::a_panic_of_a_thread_ends_the_process";
    let mut own = std::process::Command::new(own);
    let ended = own.args([test, "--exact", "--nocapture"]).env(DIES, "1").output().unwrap();
    // A test process exits with 101 if a test fails, and with 0 if all pass, so 1 shows that
    // `spawn` ended the process.
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
}
