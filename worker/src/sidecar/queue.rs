//! The queue of folds, and the loop of the threads that work on them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::fold::Fold;
use super::job::Job;

/// A fold, with the job and the op that it belongs to.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) fold: Arc<Fold>,
    pub(super) job: Arc<Job>,
    pub(super) op: u32,
}

/// Folds that are not finished. Jobs take turns of a few chunks each, so that no job starves
/// another. Within a job, lower lanes come first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The tasks of each job that has any. The job at the front has the next turn.
    jobs: VecDeque<Tasks>,
    came: u64,
    closed: bool,
}

/// The tasks of one job, by lane and then in order of arrival.
type Tasks = BTreeMap<(u8, u64), Arc<Task>>;

impl Queue {
    /// Queues a fold, and wakes the threads.
    pub(super) fn push(&self, lane: u8, task: Task) {
        let mut state = self.lock();
        state.came += 1;
        let came = state.came;
        let is_of_job = |tasks: &&mut Tasks| {
            tasks.values().next().is_some_and(|other| Arc::ptr_eq(&other.job, &task.job))
        };
        match state.jobs.iter_mut().find(is_of_job) {
            Some(tasks) => drop(tasks.insert((lane, came), Arc::new(task))),
            None => state.jobs.push_back(Tasks::from([((lane, came), Arc::new(task))])),
        }
        drop(state);
        self.work.notify_all();
    }

    /// Closes the queue, so that each thread ends after its current turn.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Folds until the queue is closed. Each fold thread runs this method.
    pub(super) fn fold(&self) {
        let mut sum = Vec::new();
        while let Some(task) = self.next() {
            let ended = task.fold.work(&mut sum, || {
                // Wakes threads that skipped this fold while it was prepared. Taking the lock first
                // ensures that none of them is between its search and its wait.
                drop(self.lock());
                self.work.notify_all();
            });
            if ended {
                task.job.folded(task.op, &task.fold);
            }
        }
    }

    /// Waits for a fold that needs another thread, and returns the most urgent one of the job whose
    /// turn it is. Returns `None` once the queue is closed.
    fn next(&self) -> Option<Arc<Task>> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(task) = state.next() {
                return Some(task);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn next(&mut self) -> Option<Arc<Task>> {
        let mut turn = 0;
        while let Some(tasks) = self.jobs.get_mut(turn) {
            tasks.retain(|_, task| !task.fold.is_taken());
            let found = tasks.values().find(|task| task.fold.admit()).cloned();
            if found.is_none() && !tasks.is_empty() {
                turn += 1;
                continue;
            }
            let tasks = self.jobs.remove(turn)?;
            if found.is_some() {
                // The next turn belongs to another job.
                self.jobs.push_back(tasks);
                return found;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use racksum_net::local::{Peer, SharedMemory};
    use racksum_proto::descriptor::Descriptor;
    use racksum_proto::dtype::DType;
    use racksum_proto::ids::Generation;

    use super::*;
    use crate::sidecar::budget::Budget;
    use crate::sidecar::fold::{Handed, Memory, Place, Share};
    use crate::sidecar::message::{Join, VERSION};

    fn job(name: &str) -> Arc<Job> {
        let join = Join {
            version: VERSION,
            job: name.into(),
            generation: Generation(0),
            secret: None,
            rank: 0,
            world: 1,
            local_world: 1,
            lanes: 4,
            join_timeout: 1000,
            op_timeout: 1000,
        };
        Arc::new(Job::new(&join, Peer { pid: 1, uid: 0 }))
    }

    #[test]
    fn jobs_take_turns_and_lanes_are_within_a_job() {
        let (_own, descriptor) = SharedMemory::new(4).unwrap();
        let memory = Memory::of(&descriptor, &Arc::new(Budget::new(4096))).unwrap();
        let (queue, jobs) = (Queue::default(), [job("busy"), job("other")]);
        let push = |lane, job: usize, op| {
            let handed = Handed::Tensor(Place::new(&memory, 0, 4).unwrap());
            let shares = vec![Share { rank: 0, handed }];
            let fold = Arc::new(Fold::new(Descriptor::sum(1, DType::F32), shares, 1));
            queue.push(lane, Task { fold, job: Arc::clone(&jobs[job]), op });
        };
        push(1, 0, 0);
        push(0, 0, 1);
        push(3, 1, 2);
        let turns: Vec<_> = (0..4).map(|_| queue.next().unwrap().op).collect();
        assert_eq!(turns, [1, 2, 1, 2]);
    }
}
