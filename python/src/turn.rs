//! The turn of a call: either its op begins, or the other ranks learn that the call is refused.
//!
//! Ranks pair ops by call order. So if an error or Ctrl-C ends a call before its op begins, this
//! rank owes the other ranks a notice, which it sends before any later op begins. Python may run a
//! signal handler between any two of its instructions, so this module keeps the state in Rust.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use racksum_proto::call::{self, Collective};

use crate::errors::raise;

/// The collective call that an op is part of, as Python passes it.
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

/// The refused calls that this rank has not reported to the other ranks yet.
#[derive(Debug, Default)]
pub(crate) struct Unreported {
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    /// The calls to report before the next op.
    next: VecDeque<call::Call>,
    /// The calls to report only after another thread has begun the ops of earlier calls.
    later: VecDeque<call::Call>,
}

impl Unreported {
    /// Adds a refused call that is already due: the ops of all earlier calls have begun.
    pub(crate) fn add_next(&self, call: call::Call) {
        self.lock().next.push_back(call);
    }

    fn add_later(&self, call: call::Call) {
        self.lock().later.push_back(call);
    }

    /// Makes all refused calls due. Call this once the ops of all earlier calls have begun.
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

/// The turn of a call. Used in a `with` statement, the turn adds its call to the refused calls if
/// the block raises an exception before the turn is taken.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct CallTurn {
    unreported: Arc<Unreported>,
    call: call::Call,
    begins_next: bool,
    is_open: AtomicBool,
}

impl CallTurn {
    pub(crate) fn new(unreported: Arc<Unreported>, call: call::Call, begins_next: bool) -> Self {
        Self { unreported, call, begins_next, is_open: AtomicBool::new(true) }
    }

    /// Takes the turn for an op of the call. The caller then begins the op or refuses the call.
    pub(crate) fn begin(&self) -> call::Call {
        self.take();
        self.call
    }
}

#[pymethods]
impl CallTurn {
    /// Takes the turn; returns false if it was taken before. Only the first taker may begin the op
    /// or refuse the call.
    fn take(&self) -> bool {
        self.is_open.swap(false, Ordering::Relaxed)
    }

    /// Adds the call to the refused calls, unless the turn was taken.
    fn owe(&self) {
        if !self.take() {
            return;
        }
        if self.begins_next {
            self.unreported.add_next(self.call);
        } else {
            self.unreported.add_later(self.call);
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
