//! The queue of folds, and the loop of the threads that work on them.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use racksum_proto::schedule::{DeficitRoundRobin, Schedule, Turn};

use super::fold::Fold;
use super::job::HostJob;

/// Number of bytes that a job may read and write in one turn. A turn takes much longer than the
/// switch to the next turn, but not so long that other jobs notice.
const QUANTUM: usize = 8 << 20;

/// A fold, with the job and the op that it belongs to.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) fold: Arc<Fold>,
    pub(super) job: Arc<HostJob>,
    pub(super) op: u32,
}

/// The unfinished folds. Jobs take turns, so that no job starves another. Within a job, lower lanes
/// come first.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug)]
struct State {
    /// The tasks of each job that has any.
    jobs: BTreeMap<JobKey, Tasks>,
    /// The order in which the jobs with tasks take turns.
    schedule: DeficitRoundRobin<JobKey>,
    came: u64,
    closed: bool,
}

/// The address of a job, which is unique as long as the job's tasks keep the job alive.
type JobKey = usize;

/// The tasks of one job, by lane and then in order of arrival.
type Tasks = BTreeMap<(u8, u64), Arc<Task>>;

impl Default for Queue {
    fn default() -> Self {
        let schedule = DeficitRoundRobin::new(QUANTUM);
        let state = State { jobs: BTreeMap::new(), schedule, came: 0, closed: false };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }
}

impl Queue {
    /// Queues a fold, and wakes the threads.
    pub(super) fn push(&self, lane: u8, task: Task) {
        self.lock().push(lane, task);
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
        while let Some((task, mut turn)) = self.next() {
            let ended = task.fold.work(&mut turn, &mut sum, || {
                // Wake the threads that skipped this fold while it was being prepared. Taking the
                // lock first ensures that no thread is between its search and its wait.
                drop(self.lock());
                self.work.notify_all();
            });
            self.lock().schedule.finish(turn);
            if ended {
                task.job.folded(task.op, &task.fold);
            }
        }
    }

    /// Waits for a fold that needs another thread. Returns the most urgent fold of the job whose
    /// turn it is, with that turn. Returns `None` once the queue is closed.
    fn next(&self) -> Option<(Arc<Task>, Turn<JobKey>)> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(next) = state.next() {
                return Some(next);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, lane: u8, task: Task) {
        let job = Arc::as_ptr(&task.job).addr();
        self.came += 1;
        let tasks = self.jobs.entry(job).or_insert_with(|| {
            self.schedule.add(job, 1.0);
            self.schedule.enqueue(job);
            Tasks::new()
        });
        tasks.insert((lane, self.came), Arc::new(task));
    }

    fn next(&mut self) -> Option<(Arc<Task>, Turn<JobKey>)> {
        // The number of jobs skipped in a row because none of their folds admits another thread.
        // Once every waiting job has been skipped, there is no work.
        let mut skipped = 0;
        while skipped < self.schedule.waiting() {
            let turn = self.schedule.next()?;
            let job = turn.job;
            let tasks = self.jobs.get_mut(&job)?;
            tasks.retain(|_, task| !task.fold.is_taken());
            if tasks.is_empty() {
                self.jobs.remove(&job);
                self.schedule.remove(job);
                continue;
            }
            // Enqueue the job again now, because other threads may work for it during this turn.
            self.schedule.enqueue(job);
            if turn.is_over() {
                skipped = 0;
            } else if let Some(task) = tasks.values().find(|task| task.fold.admit()) {
                return Some((Arc::clone(task), turn));
            } else {
                skipped += 1;
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
    use crate::sidecar::fold::{Handed, LentRange, Memory, Share};
    use crate::sidecar::message::{Join, VERSION};

    fn job(name: &str) -> Arc<HostJob> {
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
        Arc::new(HostJob::new(&join, Peer { pid: 1, uid: 0 }))
    }

    #[test]
    fn jobs_take_turns_and_lanes_are_within_a_job() {
        let (_own, descriptor) = SharedMemory::new(4).unwrap();
        let memory = Memory::of(&descriptor, &Arc::new(Budget::new(4096))).unwrap();
        let (queue, jobs) = (Queue::default(), [job("busy"), job("other")]);
        let push = |lane, job: usize, op| {
            let handed = Handed::Tensor(LentRange::new(&memory, 0, 4).unwrap());
            let shares = vec![Share { rank: 0, handed }];
            let fold = Arc::new(Fold::new(Descriptor::sum(1, DType::F32), shares, 1));
            queue.push(lane, Task { fold, job: Arc::clone(&jobs[job]), op });
        };
        push(1, 0, 0);
        push(0, 0, 1);
        push(3, 1, 2);
        let turns: Vec<_> = (0..4).map(|_| queue.next().unwrap().0.op).collect();
        assert_eq!(turns, [1, 2, 1, 2]);
    }
}
