//! The turn of a call: either its op begins, or the other ranks learn that the call is refused.
//!
//! Ranks pair ops by their order. So if a call ends before its op begins, with an error or by
//! Ctrl-C, this rank owes the others a notice, which it sends before a later op begins. Python may
//! run a signal handler between any two of its instructions, so this module keeps the state in
//! Rust.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use racksum_proto::call::{self, Collective};

use crate::errors::raise;

/// A reference to the call of a collective that an op is part of.
#[derive(Debug, FromPyObject)]
pub(crate) struct PartOf {
    collective: String,
    root: u16,
    number: u32,
}

impl PartOf {
    pub(crate) fn call(&self, py: Python<'_>) -> PyResult<call::Call> {
        let Self { root, number, .. } = *self;
        let unknown =
            || raise(py, "BadArgument", format!("{} is not a collective", self.collective));
        let collective = Collective::from_name(&self.collective).ok_or_else(unknown)?;
        Ok(call::Call { number, collective, root })
    }
}

/// The refused calls that the other ranks do not know of yet.
#[derive(Debug, Default)]
pub(crate) struct Unsaid {
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    /// The calls to report before the next op of any kind.
    next: VecDeque<call::Call>,
    /// The calls to report only after another thread has begun ops of earlier calls.
    later: VecDeque<call::Call>,
}

impl Unsaid {
    /// Adds a refused call. The ops of all earlier calls have begun.
    pub(crate) fn add_next(&self, call: call::Call) {
        self.lock().next.push_back(call);
    }

    fn add_later(&self, call: call::Call) {
        self.lock().later.push_back(call);
    }

    /// Makes all refused calls due: the ops that were called before them have begun.
    pub(crate) fn settle(&self) {
        let mut calls = self.lock();
        let Calls { next, later } = &mut *calls;
        next.append(later);
    }

    pub(crate) fn owes(&self) -> bool {
        !self.lock().later.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        let calls = self.lock();
        calls.next.len() + calls.later.len()
    }

    pub(crate) fn take_next(&self) -> Option<call::Call> {
        self.lock().next.pop_front()
    }

    /// Puts back a call that was taken but not reported.
    pub(crate) fn put_back(&self, call: call::Call) {
        self.lock().next.push_front(call);
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The turn of a call. As a context manager, it reports the call as refused later if an exception
/// leaves the block.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct Turn {
    unsaid: Arc<Unsaid>,
    call: call::Call,
    begins_next: bool,
    is_open: AtomicBool,
}

impl Turn {
    pub(crate) fn new(unsaid: Arc<Unsaid>, call: call::Call, begins_next: bool) -> Self {
        Self { unsaid, call, begins_next, is_open: AtomicBool::new(true) }
    }

    /// Takes the turn for an op of the call. The caller then begins the op or refuses the call.
    pub(crate) fn begin(&self) -> call::Call {
        self.take();
        self.call
    }
}

#[pymethods]
impl Turn {
    /// Takes the turn; returns false if it was taken before. Only the first taker begins the op or
    /// refuses the call.
    fn take(&self) -> bool {
        self.is_open.swap(false, Ordering::Relaxed)
    }

    /// Adds the call to the refused calls, unless the turn was taken.
    fn owe(&self) {
        if !self.take() {
            return;
        }
        if self.begins_next {
            self.unsaid.add_next(self.call);
        } else {
            self.unsaid.add_later(self.call);
        }
    }

    const fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) {
        if !kind.is_none() {
            self.owe();
        }
    }
}
