//! The turn of a call: its op begins, or the other ranks hear that it does not.
//!
//! Ranks pair ops by their order. So a call that ends before its op has begun, with an error or by
//! Ctrl-C, is owed: the other ranks are told of it before a later op begins. Python runs a signal's
//! handler between any two of its own instructions, so what keeps count of this is here.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use racksum_proto::call::{self, Collective};

use crate::errors::raise;

/// Which call of a collective an op is part of.
#[derive(Debug, FromPyObject)]
pub(crate) struct PartOf {
    collective: String,
    root: u16,
    number: u32,
}

impl PartOf {
    pub(crate) fn call(&self, py: Python<'_>) -> PyResult<call::Call> {
        let Self { root, number, .. } = *self;
        let unknown = || raise(py, "BadArgument", format!("{} is no collective", self.collective));
        let collective = Collective::from_name(&self.collective).ok_or_else(unknown)?;
        Ok(call::Call { number, collective, root })
    }
}

/// Calls that the other ranks have yet to hear of.
#[derive(Debug, Default)]
pub(crate) struct Unsaid {
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    /// The ones they hear of before the next op, whatever it is.
    next: VecDeque<call::Call>,
    /// The ones that come after ops which another thread has yet to begin.
    later: VecDeque<call::Call>,
}

impl Unsaid {
    /// Adds a call that all ops have begun before that were called before it.
    pub(crate) fn add_next(&self, call: call::Call) {
        self.lock().next.push_back(call);
    }

    fn add_later(&self, call: call::Call) {
        self.lock().later.push_back(call);
    }

    /// Notes that the ops have begun that were called before those of `later`.
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

    /// Puts a call back that was taken and not told.
    pub(crate) fn put_back(&self, call: call::Call) {
        self.lock().next.push_front(call);
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The turn of a call. As a context manager it owes the call if an exception leaves it.
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

    /// Takes the turn for an op of the call: whoever begins it tells what becomes of it.
    pub(crate) fn begin(&self) -> call::Call {
        self.take();
        self.call
    }
}

#[pymethods]
impl Turn {
    /// Takes the turn; false if it was taken before. Only one of those begins the op, or owes it.
    fn take(&self) -> bool {
        self.is_open.swap(false, Ordering::Relaxed)
    }

    /// Owes the call, if nobody has taken the turn.
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
