//! Runs a job from a script. Ops start, time passes, and datagrams arrive, get lost, are repeated,
//! are changed or are made up. No machine may panic, send an invalid datagram or loop forever.

use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::Rank;
use racksum_proto::loss::Loss;
use racksum_proto::time::Span;

use super::cluster::{Cluster, End, Shape};
use super::script::Script;

/// Runs a script to its end.
pub fn run(script: &[u8]) {
    play(script);
}

/// Returns the sizes of the machines' debug output before the first step of a script and after the
/// last. The size stands in for the machines' memory use, so that no counting allocator is needed.
pub fn footprints(script: &[u8]) -> (usize, usize) {
    let fresh = Cluster::new(shape(&mut Script(script)));
    (fresh.footprint(), play(script).footprint())
}

fn play(script: &[u8]) -> Cluster {
    let mut script = Script(script);
    let mut cluster = Cluster::new(shape(&mut script));
    while !script.is_over() {
        step(&mut cluster, &mut script);
        cluster.drive();
    }
    cluster
}

/// Reads the job's size from the first two bytes of a script.
fn shape(script: &mut Script<'_>) -> Shape {
    let payload = [1408, 960, 8936, 61_440][script.below(4)];
    let size = script.byte();
    Shape {
        world: 1 + u16::from(size % 3),
        lanes: 1 + size / 3 % 2,
        shards: 1 + size / 6 % 2,
        pool_slots: 2 + u32::from(size / 12 % 7),
        max_ops: 1 + u16::from(size / 84) * 3,
        cut: Fragmentation::new(payload).expect("every payload is large enough"),
    }
}

/// Applies one event to the job.
fn step(cluster: &mut Cluster, script: &mut Script<'_>) {
    match script.byte() % 12 {
        0 | 1 => {
            for _ in 0..=script.below(16) {
                deliver_next(cluster, false);
            }
        }
        2 => drop(cluster.wire.pop_front()),
        3 => {
            // Deliver a copy of the next datagram: unchanged, marked as congested, or joined with
            // the datagram after it. The original stays in flight.
            let how = script.below(3);
            let Some((to, mut bytes)) = cluster.wire.front().cloned() else { return };
            if let Some((_, next)) = cluster.wire.get(1).filter(|next| how == 2 && next.0 == to) {
                bytes.extend_from_slice(next);
            }
            cluster.deliver(to, &bytes, how == 1);
        }
        4 => {
            let late = script.below(64).min(cluster.wire.len().saturating_sub(1));
            cluster.wire.rotate_left(late);
            deliver_next(cluster, false);
        }
        5 => cluster.wait(Span::from_micros(u64::from(script.byte()) * 100)),
        6 => cluster.wait_for_deadline(),
        7 => {
            let rank = script.below(cluster.workers.len());
            let descriptor = script.descriptor(24);
            cluster.submit(rank, descriptor);
        }
        8 => {
            let to = end(cluster, script);
            let bytes = script.bytes();
            cluster.deliver(to, &bytes, false);
        }
        9 => change_one(cluster, script),
        10 => make_one_up(cluster, script),
        _ => end_session(cluster, script),
    }
}

fn deliver_next(cluster: &mut Cluster, congested: bool) {
    if let Some((to, bytes)) = cluster.wire.pop_front() {
        cluster.deliver(to, &bytes, congested);
    }
}

fn end(cluster: &Cluster, script: &mut Script<'_>) -> End {
    let workers = cluster.workers.len();
    let shards = usize::from(cluster.shape.shards);
    match script.below(workers + shards) {
        rank if rank < workers => End::Worker(rank),
        end => End::Shard(end - workers),
    }
}

/// Delivers an earlier datagram with one byte or its length changed.
fn change_one(cluster: &mut Cluster, script: &mut Script<'_>) {
    let to = end(cluster, script);
    let Some(nth) = script.below(256).checked_rem(cluster.seen.len()) else { return };
    let mut bytes = cluster.seen[nth].clone();
    let (at, value) = (script.below(128), script.byte());
    match bytes.get_mut(at) {
        Some(byte) => *byte = value,
        None => bytes.truncate(usize::from(value)),
    }
    cluster.deliver(to, &bytes, false);
}

fn make_one_up(cluster: &mut Cluster, script: &mut Script<'_>) {
    let to = end(cluster, script);
    let known = |op| cluster.workers.iter().find_map(|worker| worker.descriptor(op));
    let bytes = script.datagram(cluster.shape.cut, known);
    cluster.deliver(to, &bytes, false);
}

/// Ends a rank's session if the next byte is 1 or 2.
fn end_session(cluster: &mut Cluster, script: &mut Script<'_>) {
    let rank = script.below(cluster.workers.len());
    match script.byte() {
        1 => cluster.workers[rank].end("the script says so", &mut ()),
        2 => cluster.workers[rank].handle_peers_lost(&[Rank(0)], Loss::Died, &mut ()),
        _ => {}
    }
}
