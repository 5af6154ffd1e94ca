//! An op in flight.

use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use racksum_worker::{Blocks, Error, Handle, Operand, Reduced};

use crate::connected::Connected;
use crate::errors::of_op;
use crate::memory::write_to;
use crate::patience::wait_in_slices;

/// An op in flight. The op continues after this object is dropped, because the other ranks need the
/// op.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct Op {
    session: Connected,
    /// The handle of the op; `None` once a thread has taken it to finish the op.
    handle: RwLock<Option<Handle<Operand>>>,
    outcome: OnceLock<Result<Ended, Error>>,
}

/// The outcome of an op: the ranks whose contributions the result lacks and, for an op on blocks,
/// its sums.
type Ended = (Vec<u16>, Option<Arc<Kept>>);

impl Op {
    pub(crate) const fn new(session: Connected, handle: Handle<Operand>) -> Self {
        Self { session, handle: RwLock::new(Some(handle)), outcome: OnceLock::new() }
    }

    /// Waits for the op to end, and returns its outcome.
    fn finish(&self) -> &Result<Ended, Error> {
        self.outcome.get_or_init(|| {
            let handle = self.handle.write().unwrap_or_else(PoisonError::into_inner).take();
            let Reduced { tensor, absent } =
                handle.expect("only the first call takes the handle").wait()?;
            let sums = match tensor {
                Operand::Blocks(blocks) => {
                    Some(Arc::new(Kept { session: self.session.clone(), blocks: Some(blocks) }))
                }
                Operand::Tensor(_) | Operand::Region(_) => None,
            };
            Ok((absent.iter().map(|rank| rank.0).collect(), sums))
        })
    }
}

#[pymethods]
impl Op {
    /// Waits until the op ends or, if `seconds` is given, until that many seconds have passed.
    /// Returns whether the op has ended.
    #[pyo3(signature = (seconds = None))]
    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        self.session.get(py)?;
        // A wait that is longer than `Duration` can hold never times out.
        let limit = seconds
            .map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        let ended = wait_in_slices(py, limit, |slice| {
            let handle = self.handle.read().unwrap_or_else(PoisonError::into_inner);
            handle.as_ref().is_none_or(|handle| handle.ends_within(slice)).then_some(())
        })?;
        if ended.is_none() {
            return Ok(false);
        }
        // Finish the op here, so that its sums are in the tensor when this method returns.
        py.detach(|| _ = self.finish());
        Ok(true)
    }

    /// Returns the outcome of an op that has ended: the ranks whose contributions the result lacks
    /// and, for an op on blocks, its sums. This method may be called again, because a signal may
    /// have discarded the first result.
    fn outcome<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Option<Sums>)> {
        self.session.get(py)?;
        let outcome = py.detach(|| self.finish());
        let (absent, sums) = outcome.as_ref().map_err(|error| of_op(py, error))?;
        Ok((PyTuple::new(py, absent)?, sums.as_ref().map(|kept| Sums(Arc::clone(kept)))))
    }
}

/// The sums of an op on blocks: the union of all ranks' blocks, sorted by index.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct Sums(Arc<Kept>);

/// Sums whose memory returns to the client when they are dropped.
#[derive(Debug)]
struct Kept {
    session: Connected,
    /// The sums; `None` only while this object is being dropped.
    blocks: Option<Blocks>,
}

#[pymethods]
impl Sums {
    /// Returns the number of blocks.
    #[getter]
    fn count(&self) -> usize {
        self.0.blocks.as_ref().map_or(0, |blocks| blocks.indices.len())
    }

    /// Returns the size of the blocks' values in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.blocks.as_ref().map_or(0, |blocks| blocks.values.len())
    }

    /// Writes the indices of the blocks to the address `indices`, as `count` 64-bit integers, and
    /// their values to the address `values`, as `nbytes` bytes.
    fn copy_to(&self, py: Python<'_>, indices: usize, values: usize) {
        let Some(blocks) = &self.0.blocks else { return };
        py.detach(|| {
            let places: Vec<u8> =
                blocks.indices.iter().flat_map(|index| i64::from(*index).to_ne_bytes()).collect();
            write_to(indices, &places);
            write_to(values, &blocks.values);
        });
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Recycle the memory: allocating new memory for the sums of later ops would cost more than
        // the summing.
        if let Some(blocks) = self.blocks.take() {
            Python::attach(|py| py.detach(|| self.session.recycle(blocks)));
        }
    }
}

impl Drop for Op {
    #[expect(clippy::mem_forget, reason = "a forked child cannot drop the parent's handle")]
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.session.is_forked() {
            std::mem::forget(handle);
        } else {
            // Dropping the handle notifies the engine, which may be busy, so release the GIL.
            Python::attach(|py| py.detach(|| drop(handle)));
        }
    }
}
