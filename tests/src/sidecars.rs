//! Hosts whose ranks use sidecars, and a job of several hosts that continues at a standby.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use racksum_net::local::Listener;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;
use racksum_worker::sidecar::{self, Limits, Sidecar};
use racksum_worker::{Blocks, Client, ConnectOptions, Error, Handle, Operand};

use crate::impostor::Impostor;
use crate::inputs::{Values, seed, tensor};
use crate::rig::{Rig, bounded};
use crate::waits::await_that;

/// Ranks 0 to 2 are on one host and 4 and 5 on another; rank 3 has no sidecar.
const WORLD: u16 = 6;
const HOSTS: [&[u16]; 2] = [&[0, 1, 2], &[4, 5]];

/// Number of blocks in a tensor whose values cancel.
const BLOCKS: u64 = 200;

/// A sidecar of a test and its socket path.
pub(crate) struct Host {
    path: PathBuf,
    _sidecar: Sidecar,
}

impl Host {
    pub(crate) fn start(name: &str, upstream: ConnectOptions) -> Self {
        Self::with_memory(name, upstream, 1 << 30)
    }

    fn with_memory(name: &str, upstream: ConnectOptions, memory: usize) -> Self {
        let path = std::env::temp_dir().join(format!("racksum-{name}-{}", std::process::id()));
        let listener = Listener::bind(&path, 0o600).unwrap();
        let limits = Limits { jobs: 4, ranks: 16, memory };
        let sidecar = Sidecar::start(listener, 2, Some(upstream), limits).unwrap();
        Self { path, _sidecar: sidecar }
    }
}

impl Host {
    /// Returns the options of a rank that joins through this host's sidecar, with `local` ranks of
    /// the job on the host.
    pub(crate) fn options(&self, options: ConnectOptions, local: usize) -> ConnectOptions {
        let aggregators = vec![format!("unix:{}", self.path.display())];
        let (standbys, local_world) = (Vec::new(), Some(u16::try_from(local).unwrap()));
        ConnectOptions { aggregators, standbys, local_world, ..options }
    }
}

/// Connects a rank of the job, with or without a sidecar.
fn connect(rank: u16, hosts: &[Host], options: &ConnectOptions) -> Client {
    let options = ConnectOptions { rank, world: WORLD, ..options.clone() };
    let options = match HOSTS.iter().zip(hosts).find(|(ranks, _)| ranks.contains(&rank)) {
        None => options,
        Some((ranks, host)) => host.options(options, ranks.len()),
    };
    Client::connect(&options).unwrap()
}

/// Reduces several operands at once.
fn reduce(client: &Client, all: Vec<(Operand, Descriptor)>) -> Result<Vec<Operand>, Error> {
    let start = |(operand, descriptor)| client.submit::<Operand>(operand, descriptor);
    let started: Vec<_> = all.into_iter().map(start).collect::<Result<_, _>>()?;
    started.into_iter().map(|handle| Ok(handle.wait()?.tensor)).collect()
}

fn descriptors() -> [Descriptor; 6] {
    let sum = |elements| Descriptor::sum(elements, DType::F32);
    let narrow = |elements, wire| Descriptor { wire, ..sum(elements) };
    [
        sum(60 * 256 * 40 + 9),
        Descriptor { reduction: Reduction::Avg, ..sum(60 * 256 * 20) },
        narrow(60 * 256 * 20, WireType::Int8),
        narrow(60 * 256 * 9, WireType::Fixed32),
        Descriptor { reduction: Reduction::Min, ..sum(60 * 512 * 7) },
        Descriptor::sum(3, DType::I64),
    ]
}

/// Returns the operands of a rank: for each descriptor a tensor, a list of some of its blocks, and
/// an operand that is a tensor at some ranks and a list at others.
fn operands(rank: u16, seed: u64) -> Vec<(Operand, Descriptor)> {
    let each = (0..).zip(descriptors()).flat_map(|(i, descriptor)| {
        let block = descriptor.block_elements();
        let values = Values::Ordinary;
        let tensor = tensor(descriptor.dtype, descriptor.elements, block, values, rank, seed + i);
        let list: Operand = list(&descriptor, &tensor, rank).into();
        let either = if rank.is_multiple_of(2) { list_of(&tensor) } else { tensor.clone().into() };
        [(tensor.into(), descriptor), (list, descriptor), (either, descriptor)]
    });
    each.collect()
}

/// Returns a tensor as a list of all its blocks, or unchanged if its elements are not four bytes
/// long.
fn list_of(tensor: &[u8]) -> Operand {
    let blocks = tensor.len().div_ceil(1024);
    // A tensor of 24 bytes stays a tensor, because its elements are not four bytes long.
    match tensor.len() {
        24 => tensor.to_vec().into(),
        _ => {
            let indices = (0..u32::try_from(blocks).unwrap()).collect();
            Blocks { indices, values: tensor.to_vec() }.into()
        }
    }
}

/// Returns every fifth block of a tensor, with a start that depends on the rank.
fn list(descriptor: &Descriptor, tensor: &[u8], rank: u16) -> Blocks {
    let len = descriptor.block_elements() * descriptor.dtype.size();
    let blocks = (0..).zip(tensor.chunks(len)).skip(usize::from(rank) % 3).step_by(5);
    let (indices, values): (Vec<u32>, Vec<&[u8]>) = blocks.unzip();
    Blocks { indices, values: values.concat() }
}

/// Returns the bytes of a result, with the indices of a list first.
fn bytes(operand: Operand) -> Vec<u8> {
    match operand {
        Operand::Tensor(tensor) => tensor,
        Operand::Blocks(Blocks { indices, values }) => {
            indices.into_iter().flat_map(u32::to_ne_bytes).chain(values).collect()
        }
        Operand::Region(_) => unreachable!("no operand is a region"),
    }
}

/// Runs all ranks of a job for some rounds, and checks that every round has the same bits as the
/// first. Returns the results of each rank.
fn run(
    options: &ConnectOptions,
    rounds: usize,
    meanwhile: impl FnOnce() + Send,
) -> Vec<Vec<Vec<u8>>> {
    let seed = seed(93);
    let hosts = ["one", "two"].map(|name| Host::start(name, options.clone()));
    std::thread::scope(|scope| {
        let rank = |rank| {
            let hosts = &hosts;
            scope.spawn(move || {
                let member = connect(rank, hosts, options);
                let mut first = Vec::new();
                for round in 0..rounds {
                    let reduced = reduce(&member, operands(rank, seed))
                        .unwrap_or_else(|error| panic!("rank {rank}, round {round}: {error}"));
                    let reduced: Vec<_> = reduced.into_iter().map(bytes).collect();
                    if first.is_empty() {
                        first = reduced;
                    } else {
                        assert!(reduced == first, "rank {rank}, round {round}: wrong bits");
                    }
                }
                first
            })
        };
        let ranks: Vec<_> = (0..WORLD).map(rank).collect();
        scope.spawn(meanwhile);
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_job_of_hosts_goes_on_at_standbys_with_the_same_bits() {
    bounded(120, || {
        let alone = Rig::start(|_| {});
        let undisturbed = run(&alone.options("hosts", 0, WORLD), 1, || {});
        alone.await_peace();
        for kind in 0..descriptors().len() {
            let of = |rank: usize, form: usize| &undisturbed[rank][3 * kind + form];
            assert!((1..6).all(|rank| of(rank, 0) == of(0, 0) && of(rank, 1) == of(0, 1)));
            assert!(
                (2..6).all(|rank| of(rank, 2) == of(rank % 2, 2)),
                "ranks of equal parity must agree"
            );
        }
        let rigs = [1, 2, 1, 3].map(|shards| Rig::start(|config| config.shards = shards));
        let addr = |rig: &Rig| vec![rig.aggregator.addr().to_string()];
        let standbys = rigs[1..].iter().map(addr).collect();
        let options = ConnectOptions { standbys, ..rigs[0].options("hosts", 0, WORLD) };
        let [first, second, third, last] = rigs;
        let moved = run(&options, 12, move || {
            for gone in [first, second, third] {
                std::thread::sleep(Duration::from_millis(700));
                drop(gone);
            }
        });
        assert!(moved == undisturbed);
        last.await_peace();
    });
}

/// Returns blocks with many zeroes of either sign, and with many values that cancel on one host or
/// between hosts.
fn cancelling(rank: u16, round: u64) -> Vec<u8> {
    let value = |block: u64, element: u64| {
        let mut state = seed(94) ^ round << 32 ^ block << 8 ^ u64::from(rank);
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 56
        };
        let sign = if rank.is_multiple_of(2) { 1.0 } else { -1.0 };
        match (next() % 4, (next() ^ element) % 3) {
            (0, _) => 0.0,
            (1, kind) => [0.0, -0.0, -0.0][usize::try_from(kind).unwrap()],
            (2, _) => 5.0 * sign,
            (_, kind) => [5.0 * sign, -0.0, 0.0][usize::try_from(kind).unwrap()],
        }
    };
    let values = (0..BLOCKS).flat_map(|block| (0..32).map(move |element| value(block, element)));
    values.flat_map(f32::to_le_bytes).collect()
}

/// Reduces cancelling blocks with every reduction, as tensors and as lists; returns the results of
/// each rank.
fn reduce_cancelling(hosts: &[Host], options: &ConnectOptions) -> Vec<Vec<Vec<u8>>> {
    let rank = |rank: u16| {
        let member = connect(rank, hosts, options);
        let rounds = (0..).zip([0, 0b11_1111, 0b10_1010, 0b01_0010, 0b11_1000, 0b00_0111]);
        let operand = |(round, lists): (u64, u16)| {
            let tensor = cancelling(rank, round);
            let indices = (0..u32::try_from(BLOCKS).unwrap()).collect();
            let operand: Operand = match lists >> rank & 1 {
                0 => tensor.into(),
                _ => Blocks { indices, values: tensor }.into(),
            };
            let descriptor = Descriptor::sum(32 * BLOCKS, DType::F32).with_block(32).unwrap();
            (operand, descriptor)
        };
        let reduced = Reduction::ALL.map(|reduction| {
            let operands = rounds.clone().map(operand);
            let set = |(operand, descriptor)| (operand, Descriptor { reduction, ..descriptor });
            reduce(&member, operands.map(set).collect()).unwrap()
        });
        reduced.into_iter().flatten().map(bytes).collect()
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..WORLD).map(|it| scope.spawn(move || rank(it))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn what_cancels_on_a_host_has_the_bits_that_it_has_without_sidecars() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let direct = reduce_cancelling(&[], &rig.options("direct", 0, WORLD));
        let options = rig.options("beside", 0, WORLD);
        let hosts = ["cancels-one", "cancels-two"].map(|name| Host::start(name, options.clone()));
        let beside = reduce_cancelling(&hosts, &options);
        for (rank, (direct, beside)) in direct.iter().zip(&beside).enumerate() {
            for (nth, (direct, beside)) in direct.iter().zip(beside).enumerate() {
                assert!(direct == beside, "rank {rank}, op {nth}: wrong bits");
            }
        }
    });
}

#[test]
fn a_call_that_a_rank_refuses_is_a_mismatch_on_every_host_and_the_job_goes_on() {
    // wire: W-70
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("refused", 0, WORLD);
        let hosts = ["refuses-one", "refuses-two"].map(|name| Host::start(name, options.clone()));
        let sum = Descriptor::sum(9, DType::F32);
        // Cases: one rank of a host, the rank without a sidecar, and all ranks of a host.
        let refusing: [&[u16]; 3] = [&[1], &[3], &[4, 5]];
        let rank = |rank: u16| {
            let member = connect(rank, &hosts, &options);
            for refusing in refusing {
                if refusing.contains(&rank) {
                    let refused = reduce(&member, vec![(vec![0u8; 3].into(), sum)]);
                    assert!(matches!(refused, Err(Error::Length { .. })), "{refused:?}");
                } else {
                    let failed = reduce(&member, vec![(vec![0u8; 36].into(), sum)]).unwrap_err();
                    let is_mismatch = matches!(failed, Error::Op(OpError::Mismatch { .. }));
                    assert!(is_mismatch, "rank {rank}: {failed}");
                    assert!(failed.to_string().contains("a call that it rejected"), "{failed}");
                }
                let ones = 1f32.to_le_bytes().repeat(9);
                let summed = reduce(&member, vec![(ones.into(), sum)]).unwrap();
                let summed = summed.into_iter().map(bytes).collect::<Vec<_>>().concat();
                assert_eq!(summed, f32::from(WORLD).to_le_bytes().repeat(9));
            }
        };
        std::thread::scope(|scope| {
            let rank = &rank;
            let ranks: Vec<_> = (0..WORLD).map(|it| scope.spawn(move || rank(it))).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    });
}

#[test]
fn whom_a_host_loses_after_a_move_is_named_on_the_other() {
    bounded(60, || {
        let rigs = [(); 2].map(|()| Rig::start(|_| {}));
        let standbys = vec![vec![rigs[1].aggregator.addr().to_string()]];
        let options = ConnectOptions { standbys, ..rigs[0].options("hosts", 0, WORLD) };
        let hosts = ["lost", "left"].map(|name| Host::start(name, options.clone()));
        let [first, second] = rigs;
        let (first, all) = (Mutex::new(Some(first)), Barrier::new(WORLD.into()));
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (hosts, options, first, all) = (&hosts, &options, &first, &all);
                scope.spawn(move || {
                    let member = connect(rank, hosts, options);
                    let one = || vec![(vec![1u8; 4].into(), Descriptor::sum(1, DType::I32))];
                    reduce(&member, one()).unwrap();
                    all.wait();
                    drop(first.lock().unwrap().take());
                    reduce(&member, one()).unwrap();
                    if rank == 1 {
                        return;
                    }
                    let error =
                        std::iter::repeat_with(|| reduce(&member, one())).find_map(Result::err);
                    let (Error::Op(OpError::PeerLost { ranks, why })
                    | Error::Submit(SubmitError::PeerLost { ranks, why })) = error.unwrap()
                    else {
                        panic!("rank {rank}")
                    };
                    assert_eq!((ranks, why), (vec![Rank(1)], Loss::Left), "rank {rank}");
                });
            };
            (0..WORLD).for_each(rank);
        });
        second.await_peace();
    });
}

#[test]
fn a_rank_that_calls_late_hears_of_the_first_loss_and_not_only_of_those_that_left_for_it() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("calls-late", 0, WORLD);
        let hosts = ["calls-late-one", "calls-late-two"].map(|it| Host::start(it, options.clone()));
        let lost = |rank: u16, member: &Client| {
            let one = vec![(vec![1u8; 4].into(), Descriptor::sum(1, DType::I32))];
            match reduce(member, one) {
                Err(
                    Error::Op(OpError::PeerLost { ranks, why })
                    | Error::Submit(SubmitError::PeerLost { ranks, why }),
                ) => (ranks, why),
                other => panic!("rank {rank}: {other:?}"),
            }
        };
        let mut members = std::thread::scope(|scope| {
            let (hosts, options) = (&hosts, &options);
            let connect = |rank| scope.spawn(move || connect(rank, hosts, options));
            let started: Vec<_> = (0..WORLD).map(connect).collect();
            let members = started.into_iter().map(|it| it.join().unwrap());
            (0..WORLD).zip(members).collect::<BTreeMap<_, _>>()
        });
        drop(members.remove(&4));
        let late = members.remove(&3).unwrap();
        std::thread::scope(|scope| {
            for (rank, member) in members {
                scope.spawn(move || {
                    assert_eq!(lost(rank, &member), (vec![Rank(4)], Loss::Left), "rank {rank}");
                });
            }
        });
        // Wait until the ranks of the first host have left because of the lost rank.
        await_that("the first host has left", || {
            !Impostor::connect(&rig).status().contains(r#""rank":0,"#)
        });
        let (ranks, why) = lost(3, &late);
        assert!(ranks.contains(&Rank(4)) && why == Loss::Left, "{ranks:?}: {}", why.name());
    });
}

#[test]
fn ranks_of_a_host_whose_aggregator_is_gone_are_told_so() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("gone", 0, WORLD);
        let hosts = ["gone-one", "gone-two"].map(|name| Host::start(name, options.clone()));
        let (rig, all) = (Mutex::new(Some(rig)), Barrier::new(WORLD.into()));
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (hosts, options, rig, all) = (&hosts, &options, &rig, &all);
                scope.spawn(move || {
                    let member = connect(rank, hosts, options);
                    let one = || vec![(vec![1u8; 4].into(), Descriptor::sum(1, DType::I32))];
                    reduce(&member, one()).unwrap();
                    all.wait();
                    drop(rig.lock().unwrap().take());
                    let mut errors = std::iter::repeat_with(|| reduce(&member, one()));
                    let error = errors.find_map(Result::err).unwrap();
                    let text = error.to_string();
                    let gone = format!("the aggregator {} is gone", options.aggregators[0]);
                    assert!(text.contains(&gone), "rank {rank}: {text}");
                    let typed = matches!(error, Error::Op(OpError::NoAggregator { .. }));
                    assert_eq!(typed, rank != 3, "rank {rank}: {error:?}");
                });
            };
            (0..WORLD).for_each(rank);
        });
    });
}

#[test]
fn the_time_that_ranks_of_a_host_are_waited_for_is_of_the_op() {
    const TIMEOUT: Duration = Duration::from_secs(12);
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = ConnectOptions { op_timeout: TIMEOUT, ..rig.options("late", 0, 3) };
        let host = Host::start("late", options.clone());
        // The third rank, on another host, calls no op.
        let (ranks, _third) = two_and_one(&host, &options);
        let first = one_of(&ranks[0]);
        std::thread::sleep(3 * TIMEOUT / 4);
        drop(one_of(&ranks[1]));
        assert!(first.ends_within(TIMEOUT / 2), "the op must end at its timeout");
        let error = first.wait().unwrap_err();
        let Error::Op(OpError::Timeout { missing, after, .. }) = error else { panic!("{error}") };
        assert_eq!(missing[0].0, Rank(2));
        assert!(after.as_millis() >= 12_000, "the op ended after {after:?}");
    });
}

/// Connects two ranks through a sidecar, and a third rank without one.
fn two_and_one(host: &Host, options: &ConnectOptions) -> ([Client; 2], Client) {
    let of = |rank| ConnectOptions { rank, ..options.clone() };
    let all = [host.options(of(0), 2), host.options(of(1), 2), of(2)];
    let [first, second, third] = all
        .map(|options| std::thread::spawn(move || Client::connect(&options).unwrap()))
        .map(|rank| rank.join().unwrap());
    ([first, second], third)
}

/// Submits an op of one element with the value 1.
fn one_of(rank: &Client) -> Handle<Vec<u8>> {
    rank.submit(1_i32.to_le_bytes().to_vec(), Descriptor::sum(1, DType::I32)).unwrap()
}

#[test]
fn an_op_that_a_host_cannot_fold_ends_those_after_it() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("spoilt", 0, 3);
        // The memory holds the lists of two ranks, but not their sum.
        let host = Host::with_memory("spoilt", options.clone(), 3 << 20);
        let (ranks, third) = two_and_one(&host, &options);
        let descriptor = Descriptor::sum(256 * 3000, DType::F32);
        let list = |from: u32| Blocks {
            indices: (from..from + 1000).collect(),
            values: 1_f32.to_le_bytes().repeat(256_000),
        };
        // The job may be over before the second submit.
        let start = |(list, rank): (Blocks, &Client)| {
            let list = rank.submit(list, descriptor).unwrap();
            (list, rank.submit(vec![1u8; 4], Descriptor::sum(1, DType::I32)))
        };
        let started: Vec<_> = [0, 1000].map(list).into_iter().zip(&ranks).map(start).collect();
        for (list, one) in started {
            let one = one.and_then(Handle::wait);
            for error in [list.wait().map(drop), one.map(drop)].map(Result::unwrap_err) {
                let Error::Op(OpError::NoAggregator { tried }) = error else { panic!("{error}") };
                assert!(tried.contains("cannot allocate memory for the sums"), "{tried}");
            }
        }
        drop(ranks);
        let error = third.submit(list(0), descriptor).and_then(Handle::wait).unwrap_err();
        assert!(error.to_string().contains("lost rank 0"), "{error}");
    });
}

#[test]
fn what_a_rank_that_has_closed_makes_of_its_memory_is_no_sum_of_others() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("closed", 0, 3);
        let host = Host::start("closed", options.clone());
        let ([first, second], third) = two_and_one(&host, &options);
        // The tensor is much larger than the part that is sent before the third rank calls the op.
        let descriptor = Descriptor::sum(8 << 20, DType::I32);
        let ones = 1_i32.to_le_bytes().repeat(8 << 20);
        let handles = [&first, &second].map(|rank| rank.submit(ones.clone(), descriptor).unwrap());
        while sidecar::ask(&host.path).unwrap().jobs[0].summed_ops == 0 {
            std::thread::yield_now();
        }
        first.close();
        // The third rank calls after the sidecar has stopped waiting for ranks that have not called
        // the op.
        let error = third.reduce(&mut ones.clone(), descriptor).unwrap_err();
        assert!(error.to_string().contains("lost rank 0"), "{error}");
        for handle in handles {
            let error = handle.wait().unwrap_err().to_string();
            assert!(error.contains("lost rank 0") || error.contains("was closed"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_closes_has_its_memory_to_itself() {
    bounded(60, || {
        let rig = Rig::start(|_| {});
        let options = rig.options("closes", 0, 3);
        let host = Host::start("closes", options.clone());
        let ([first, second], third) = two_and_one(&host, &options);
        let handles = [one_of(&first), one_of(&second)];
        while sidecar::ask(&host.path).unwrap().jobs[0].summed_ops == 0 {
            std::thread::yield_now();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(1));
                let mut one = 1_i32.to_le_bytes();
                third.reduce(&mut one, Descriptor::sum(1, DType::I32)).unwrap();
            });
            // `close` returns only after the op has ended, and the op waits for the third rank.
            first.close();
        });
        for handle in handles {
            assert_eq!(handle.wait().unwrap().tensor, 3_i32.to_le_bytes());
        }
    });
}
