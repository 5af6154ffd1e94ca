//! The training loop of one worker of one job.
//!
//! A worker computes one thing at a time: the forward passes of all tensors in ascending order,
//! then the backward passes in descending order. The end of a backward pass asks for the
//! all-reduce of its tensor. Once that is done, the tensor is updated, beside whatever else the
//! worker computes. The next forward pass of a tensor waits for its update.

/// The next thing that a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Compute, and tell the process when that has ended.
    Compute(Step),
    /// Ask for the all-reduce of a tensor.
    Reduce {
        /// The tensor's number in the order of the forward pass.
        tensor: usize,
    },
    /// All iterations have ended.
    Finish,
}

/// A computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The forward pass of a tensor's layers.
    Forward(usize),
    /// The backward pass of a tensor's layers.
    Backward(usize),
    /// The update of a tensor.
    Update(usize),
}

/// The state of a worker's training loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    iterations: u64,
    /// The iteration that computes, from zero.
    iteration: u64,
    /// Per tensor: updates that have ended.
    updates: Vec<u64>,
    /// The tensor whose forward pass waits for an update.
    waits_for: Option<usize>,
}

impl Process {
    /// Creates the loop of a model with some tensors, at least one, and returns it with its first
    /// action.
    #[must_use]
    pub fn new(tensors: usize, iterations: u64) -> (Self, Action) {
        let updates = vec![0; tensors];
        let process = Self { iterations, iteration: 0, updates, waits_for: None };
        let is_over = iterations == 0 || tensors == 0;
        (process, if is_over { Action::Finish } else { Action::Compute(Step::Forward(0)) })
    }

    /// Returns the number of tensors whose updates have ended in all iterations.
    fn is_finished(&self) -> bool {
        self.updates.iter().all(|updates| *updates == self.iterations)
    }

    /// Handles the end of a computation. At most two actions follow.
    pub fn handle_end(&mut self, step: Step) -> [Option<Action>; 2] {
        let last = self.updates.len() - 1;
        match step {
            Step::Forward(tensor) if tensor < last => [self.forward(tensor + 1), None],
            Step::Forward(tensor) => [Some(Action::Compute(Step::Backward(tensor))), None],
            Step::Backward(tensor) => {
                let reduce = Some(Action::Reduce { tensor });
                let next = if tensor > 0 {
                    Some(Action::Compute(Step::Backward(tensor - 1)))
                } else {
                    self.iteration += 1;
                    if self.iteration < self.iterations { self.forward(0) } else { None }
                };
                [reduce, next]
            }
            Step::Update(tensor) => {
                self.updates[tensor] += 1;
                if self.waits_for == Some(tensor) {
                    self.waits_for = None;
                    return [Some(Action::Compute(Step::Forward(tensor))), None];
                }
                [self.is_finished().then_some(Action::Finish), None]
            }
        }
    }

    /// Returns the forward pass of a tensor, unless its update is still due.
    fn forward(&mut self, tensor: usize) -> Option<Action> {
        if self.updates[tensor] < self.iteration {
            self.waits_for = Some(tensor);
            return None;
        }
        Some(Action::Compute(Step::Forward(tensor)))
    }
}
