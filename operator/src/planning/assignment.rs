//! The assignment of workers to the nodes of a plan.

use std::collections::VecDeque;

use k8s_openapi::api::core::v1::Node;

use crate::affinity::accepts;
use crate::members::Member;

/// Returns a host for each worker, such that each accepts its host: slots in their order, unless a
/// worker does not accept its slot.
///
/// # Errors
/// The name of a worker that accepts none of the free slots.
pub fn assigned<'a>(workers: &[Member<'a>], slots: &[&'a Node]) -> Result<Vec<&'a Node>, String> {
    let takes = |worker: usize, slot: usize| {
        workers[worker].pod.spec.as_ref().is_some_and(|spec| accepts(spec, slots[slot]))
    };
    let mut holder: Vec<Option<usize>> = vec![None; slots.len()];
    for worker in 0..workers.len() {
        let is_free = worker < slots.len() && holder[worker].is_none();
        if is_free && takes(worker, worker) {
            holder[worker] = Some(worker);
            continue;
        }
        if !seat(worker, &takes, &mut holder) {
            return Err(workers[worker].name().into());
        }
    }
    let mut hosts: Vec<_> =
        holder.iter().zip(slots).filter_map(|(holder, slot)| Some(((*holder)?, *slot))).collect();
    hosts.sort_by_key(|(worker, _)| *worker);
    Ok(hosts.into_iter().map(|(_, slot)| slot).collect())
}

/// Finds a slot for a worker, moving earlier workers to other slots if necessary: the shortest
/// augmenting path of a bipartite graph. A path may pass through all workers, so a recursion could
/// exhaust the stack.
fn seat(
    worker: usize,
    takes: &impl Fn(usize, usize) -> bool,
    holder: &mut [Option<usize>],
) -> bool {
    // The worker that would move to each slot.
    let mut comes: Vec<Option<usize>> = vec![None; holder.len()];
    let mut queue = VecDeque::from([worker]);
    while let Some(next) = queue.pop_front() {
        for slot in 0..holder.len() {
            if comes[slot].is_some() || !takes(next, slot) {
                continue;
            }
            comes[slot] = Some(next);
            match holder[slot] {
                Some(other) => queue.push_back(other),
                None => {
                    shift(worker, slot, &comes, holder);
                    return true;
                }
            }
        }
    }
    false
}

/// Moves each worker of a path to its new slot, from the free slot at its end to the first worker.
fn shift(first: usize, free: usize, comes: &[Option<usize>], holder: &mut [Option<usize>]) {
    let mut slot = free;
    while let Some(worker) = comes[slot] {
        let left = holder.iter().position(|one| *one == Some(worker));
        holder[slot] = Some(worker);
        match left.filter(|_| worker != first) {
            Some(left) => slot = left,
            None => return,
        }
    }
}
