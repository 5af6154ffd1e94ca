//! The folds that are to be done, and the threads that do them.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::fold::Fold;
use super::job::Job;

/// A fold, and whom to tell of it.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) fold: Arc<Fold>,
    pub(super) job: Arc<Job>,
    pub(super) op: u32,
}

/// Folds that are to be done, those of lower lanes first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// By lane, and in the order they came.
    tasks: BTreeMap<(u8, u64), Arc<Task>>,
    came: u64,
    closed: bool,
}

impl Queue {
    /// Has threads do it.
    pub(super) fn push(&self, lane: u8, task: Task) {
        let mut state = self.lock();
        state.came += 1;
        let came = state.came;
        state.tasks.insert((lane, came), Arc::new(task));
        drop(state);
        self.work.notify_all();
    }

    /// Ends the threads, once they have done what they do.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// Folds until the queue is closed: what a thread does.
    pub(super) fn fold(&self) {
        let mut sum = Vec::new();
        while let Some(task) = self.next() {
            if task.fold.work(&mut sum) {
                task.job.folded(task.op, &task.fold);
            }
        }
    }

    /// The fold that is most urgent of those that need more threads; none once it is closed.
    fn next(&self) -> Option<Arc<Task>> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            state.tasks.retain(|_, task| !task.fold.is_taken());
            if let Some((_, task)) = state.tasks.first_key_value() {
                return Some(Arc::clone(task));
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
