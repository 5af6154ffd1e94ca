//! Ranks that refuse calls, skip calls, or make different calls than their peers.

use racksum_proto::call::{Call, Collective};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::OpError;
use racksum_proto::time::Time;

use super::{Cluster, Faults, Random, TIMEOUT, bytes};

/// The call that a rank intends to make. Most calls sum equally many elements, so that only
/// `Descriptor::call` tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Intent {
    number: u32,
    collective: Collective,
    root: u16,
    elements: usize,
}

impl Intent {
    fn descriptor(self) -> Descriptor {
        let Self { number, collective, root, elements } = self;
        let call = Call { number, collective, root };
        match collective {
            Collective::Refused => Descriptor::refused(call),
            _ => Descriptor { call, ..Descriptor::sum(elements as u64, DType::I32) },
        }
    }

    fn refused(self) -> Self {
        Self { collective: Collective::Refused, root: 0, elements: 0, ..self }
    }
}

fn draw(dice: &mut Random, number: u32) -> Intent {
    let kinds = [Collective::AllReduce, Collective::Broadcast, Collective::AllGather];
    let collective = kinds[usize::try_from(dice.below(3)).unwrap()];
    let root = if collective.has_root() { u16::try_from(dice.below(2)).unwrap() } else { 0 };
    let elements = if dice.below(4) == 0 { 60 * 256 * 3 } else { 8 };
    Intent { number, collective, root, elements }
}

/// Returns the calls that one rank makes when the job's calls are `calls`.
fn script(dice: &mut Random, calls: &[Intent], odds: u64) -> Vec<Intent> {
    let mut made = Vec::new();
    for call in calls {
        match dice.below(100 / odds) {
            0 => made.push(call.refused()),
            1 => made.push(draw(dice, call.number)),
            // The call fails in the rank's own code, so its backend never sees it.
            2 => {}
            _ => made.push(*call),
        }
    }
    let last = Intent { number: u32::MAX, ..calls[0] };
    made.resize(calls.len(), last.refused());
    made
}

#[test]
fn an_op_sums_one_and_the_same_call_or_is_a_mismatch_at_every_rank() {
    // wire: W-13, W-40, W-70
    let (mut summed, mut differed) = (0, 0);
    for seed in 0..150 {
        let world = 2 + u16::try_from(seed % 3).unwrap();
        let faults = Faults { drop: seed % 20, double: 5, delay: 5 };
        let mut cluster = Cluster::new(world, 2, 1, seed, faults);
        let mut dice = Random::new(seed ^ 0xca11);
        let calls: Vec<_> = (0..12).map(|number| draw(&mut dice, number)).collect();
        let odds = [1, 3, 10][usize::try_from(seed % 3).unwrap()];
        let scripts: Vec<_> = (0..world).map(|_| script(&mut dice, &calls, odds)).collect();
        for (worker, script) in cluster.workers.iter_mut().zip(&scripts) {
            for intent in script {
                let ones = bytes(&vec![1; intent.elements]);
                worker.submit(Time(0), intent.descriptor(), ones, TIMEOUT).unwrap();
            }
        }
        cluster.run(calls.len());
        for (rank, worker) in cluster.workers.iter_mut().enumerate() {
            worker.done.sort_by_key(|(op, _)| *op);
            for (nth, (_, result)) in worker.done.iter().enumerate() {
                let meant: Vec<_> = scripts.iter().map(|script| script[nth]).collect();
                let all_mean_one = meant.iter().all(|other| *other == meant[0]);
                let context = || format!("seed {seed}, rank {rank}, op {nth}: {meant:?}");
                match result {
                    Ok(sums) if all_mean_one => {
                        let all = vec![i32::from(world); meant[0].elements];
                        assert!(*sums == bytes(&all), "{}: a wrong sum", context());
                        summed += 1;
                    }
                    Err(OpError::Mismatch { one, other, .. }) if !all_mean_one => {
                        for (rank, descriptor) in [one, other] {
                            assert_eq!(*descriptor, meant[rank.index()].descriptor());
                        }
                        differed += 1;
                    }
                    other => panic!("{}: {:?}", context(), other.as_ref().map(Vec::len)),
                }
            }
        }
    }
    assert!(
        summed > 500 && differed > 500,
        "only {summed} results were sums and {differed} were mismatches: the scripts test too \
         little"
    );
}
