//! A rank that leaves between two ops and rejoins as another process.

use super::*;

#[test]
fn a_rank_may_leave_between_ops_and_come_back() {
    for seed in 0..120 {
        let faults = Faults { drop: seed % 4 * 7, double: seed % 5 * 3, delay: seed % 3 * 8 };
        let world = 3;
        let shards = 1 + u8::try_from(seed % 3).unwrap();
        let grant = Grant { world, shards, lanes: 2, pool_slots: 8, moved_at: None };
        let mut cluster = Cluster::new(world, shards, 2, seed, faults);
        let mut ended = 0;
        for life in 0..4 {
            for op in 0..3 {
                let elements = usize::try_from([7, 60 * 256 * 9, 60 * 256][op]).unwrap();
                let lane = u8::try_from((life + op) % 2).unwrap();
                let descriptor =
                    Descriptor { lane, ..Descriptor::sum(elements as u64, DType::I32) };
                let now = cluster.now;
                for worker in &mut cluster.workers {
                    worker.submit(now, descriptor, bytes(&vec![1; elements]), TIMEOUT).unwrap();
                }
                ended += 1;
                cluster.run_until(|cluster| cluster.workers.iter().all(|w| w.done.len() >= ended));
                for (rank, worker) in cluster.workers.iter().enumerate() {
                    let sum = worker.done.last().unwrap().1.as_ref();
                    let right = sum == Ok(&bytes(&vec![3; elements]));
                    assert!(right, "seed {seed}, life {life}, rank {rank}: {:?}", sum.err());
                }
            }
            let rank = u16::try_from(seed % 3).unwrap();
            for shard in &mut cluster.shards {
                shard.machine.handle_left(Rank(rank), &mut ());
            }
            // Datagrams from the rank, and those sent to it while it is away, may arrive late.
            let back = cluster.now + Span::from_millis(seed % 4 * 3);
            let away = cluster.workers.remove(usize::from(rank));
            cluster
                .workers
                .insert(usize::from(rank), WorkerNode::new(grant.worker(rank), world, back));
            cluster.workers[usize::from(rank)].done = away.done;
            cluster.run_until(|cluster| cluster.now >= back || cluster.wire.is_empty());
            let first_op = away.machine.next_op();
            let now = cluster.now;
            let node = &mut cluster.workers[usize::from(rank)];
            let config = worker::Config { first_op, ..grant.worker(rank) };
            let done = std::mem::take(&mut node.done);
            *node = WorkerNode::new(config, world, now);
            node.done = done;
            for shard in &mut cluster.shards {
                shard.machine.handle_rejoined(now, Rank(rank));
            }
        }
    }
}
