//! The assignment of workers to the nodes of a plan.

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
        let mut seen = vec![false; slots.len()];
        if !seated(worker, &takes, &mut holder, &mut seen) {
            return Err(workers[worker].name().into());
        }
    }
    let mut hosts: Vec<_> =
        holder.iter().zip(slots).filter_map(|(holder, slot)| Some(((*holder)?, *slot))).collect();
    hosts.sort_by_key(|(worker, _)| *worker);
    Ok(hosts.into_iter().map(|(_, slot)| slot).collect())
}

/// Finds a slot for a worker, moving earlier workers to other slots if necessary (Kuhn's method).
fn seated(
    worker: usize,
    takes: &impl Fn(usize, usize) -> bool,
    holder: &mut [Option<usize>],
    seen: &mut [bool],
) -> bool {
    for slot in 0..holder.len() {
        if seen[slot] || !takes(worker, slot) {
            continue;
        }
        seen[slot] = true;
        let is_free = match holder[slot] {
            None => true,
            Some(other) => seated(other, takes, holder, seen),
        };
        if is_free {
            holder[slot] = Some(worker);
            return true;
        }
    }
    false
}
