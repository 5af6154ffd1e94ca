//! Aggregators with a parent: racks, and a root.

use racksum_aggregator::Config;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};
use racksum_worker::{Client, ConnectOptions};

use crate::inputs::{Values, seed, tensor};
use crate::oracle::reduce;
use crate::rig::{Rig, bounded};

/// A tree of aggregators: what each is a child of, the root first.
struct Tree {
    rigs: Vec<Rig>,
}

impl Tree {
    fn start(parents: &[usize], change: impl Fn(&mut Config)) -> Self {
        let mut rigs = vec![Rig::start(&change)];
        for parent in parents {
            let parent = rigs[*parent].aggregator.addr().to_string();
            rigs.push(Rig::start(|config| {
                change(config);
                config.parent = Some(parent);
            }));
        }
        Self { rigs }
    }

    /// Runs the ranks of a job, each at one of the aggregators, and returns what each returned.
    fn ranks<T: Send>(
        &self,
        at: &[usize],
        job: &str,
        change: impl Fn(&mut ConnectOptions) + Sync,
        body: impl Fn(&Client, u16) -> T + Sync,
    ) -> Vec<T> {
        let world = u16::try_from(at.len()).unwrap();
        std::thread::scope(|scope| {
            let (body, change) = (&body, &change);
            let rank = |(rank, at): (u16, &usize)| {
                let mut options = self.rigs[*at].options(job, rank, world);
                change(&mut options);
                scope.spawn(move || body(&Client::connect(&options).unwrap(), rank))
            };
            let ranks: Vec<_> = (0..).zip(at).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn await_peace(&self) {
        self.rigs.iter().for_each(Rig::await_peace);
    }
}

#[test]
fn exact_sums_through_two_racks_are_those_of_one_aggregator() {
    bounded(60, || {
        let seed = seed(91);
        let tree = Tree::start(&[0, 0], |_| {});
        let sums = [DType::I32, DType::I64].map(|dtype| Descriptor::sum(60 * 256 * 7 + 9, dtype));
        let at = [1, 2, 1, 2];
        tree.ranks(
            &at,
            "sums",
            |_| {},
            |client, rank| {
                for (op, descriptor) in (0..).zip(sums) {
                    let input = |rank| {
                        let block = descriptor.block_elements();
                        let of = (descriptor.dtype, descriptor.elements);
                        tensor(of.0, of.1, block, Values::Ordinary, rank, seed + op)
                    };
                    let inputs: Vec<_> = (0..4).map(input).collect();
                    let handle =
                        client.submit(inputs[usize::from(rank)].clone(), descriptor).unwrap();
                    let sum = client.wait(handle).unwrap();
                    assert!(
                        sum.tensor == reduce(&descriptor, &inputs).tensor,
                        "op {op}, rank {rank}"
                    );
                }
            },
        );
        tree.await_peace();
        let _ = Reduction::Sum;
    });
}
