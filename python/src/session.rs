//! A session: one rank's membership in a job.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use racksum_proto::call;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::SubmitError;
use racksum_worker::{
    Blocks, Client, ConnectError, Connecting, Error, LentMemory, Operand, StatsQuery,
};

use crate::connected::Connected;
use crate::errors::{of_connect, of_op, raise, read};
use crate::memory::{read_from, region_of};
use crate::op::Op;
use crate::options::Options;
use crate::patience::{wait_in_checked_slices, wait_in_slices};
use crate::turn::{CallTurn, PartOf, Unreported};

/// A session of one rank in a job.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct Session {
    client: Connected,
    /// The calls that were refused before their ops began. Ranks pair ops by call order, so this
    /// rank reports these calls to the other ranks before the next op.
    unreported: Arc<Unreported>,
}

/// The parameters of an op, as Python passes them.
#[derive(Debug, FromPyObject)]
pub(crate) struct OpArgs {
    elements: u64,
    dtype: String,
    wire: String,
    op: String,
    block: usize,
    lane: u8,
    tag: u64,
}

impl OpArgs {
    fn descriptor(&self, py: Python<'_>, part_of: call::Call) -> PyResult<Descriptor> {
        let descriptor = Descriptor {
            call: part_of,
            tag: self.tag,
            wire: read(py, "wire", &self.wire)?,
            reduction: read(py, "op", &self.op)?,
            lane: self.lane,
            ..Descriptor::sum(self.elements, read(py, "dtype", &self.dtype)?)
        };
        let cut = descriptor.with_block(self.block);
        cut.map_err(|error| raise(py, "BadArgument", error.to_string()))
    }
}

impl Session {
    /// Starts an op as soon as no earlier op uses its memory, and fewer ops are in flight than the
    /// job allows.
    fn start<T: Into<Operand> + Send>(
        &self,
        py: Python<'_>,
        part_of: call::Call,
        call: &OpArgs,
        operand: impl Fn(Python<'_>) -> T,
    ) -> PyResult<Op> {
        let client = self.client.get(py)?;
        let descriptor = match call.descriptor(py, part_of) {
            Ok(descriptor) => descriptor,
            Err(error) => return Err(self.refuse(py, part_of, error)),
        };
        self.begin(py, call.lane, part_of, || {
            let operand = operand(py).into();
            let memory = operand.extent();
            // `submit` also waits for memory that earlier ops use, but signals cannot interrupt
            // that wait. So wait here first.
            let is_free = |slice| client.is_free_within(&memory, slice).then_some(());
            wait_in_slices(py, None, is_free)?;
            Ok(py.detach(|| client.submit(operand, descriptor)))
        })
        .map(|handle| Op::new(self.client.clone(), handle))
    }

    /// Begins an op of a call once there is room for it. First reports the refused calls that are
    /// due.
    fn begin<T>(
        &self,
        py: Python<'_>,
        lane: u8,
        call: call::Call,
        begin: impl Fn() -> PyResult<Result<T, Error>>,
    ) -> PyResult<T> {
        let client = self.client.get(py)?;
        let begun = self.report_refused(py, client);
        match begun.and_then(|()| once_there_is_room(py, client, lane, begin)) {
            Ok(begun) => begun.map_err(|error| of_op(py, &error)),
            Err(raised) => {
                self.unreported.add_next(call);
                Err(raised)
            }
        }
    }

    /// Tells the other ranks that this rank refuses a call. Returns `why`, or the exception that
    /// interrupted this method.
    fn refuse(&self, py: Python<'_>, call: call::Call, why: PyErr) -> PyErr {
        self.unreported.add_next(call);
        self.tell(py).err().unwrap_or(why)
    }

    /// Sends the other ranks a notice of each refused call that is due.
    fn report_refused(&self, py: Python<'_>, client: &Client) -> PyResult<()> {
        while let Some(call) = self.unreported.take_next() {
            // A session that is over has no ops to keep in step, so ignore its errors.
            let refused =
                once_there_is_room(py, client, 0, || Ok(py.detach(|| client.refuse(call))));
            if let Err(raised) = refused.map(drop) {
                self.unreported.put_back(call);
                return Err(raised);
            }
        }
        Ok(())
    }
}

/// Calls `start` until it returns anything but `TooManyOps`, and waits for room between the calls.
///
/// # Errors
/// Returns the exception that `start` or a signal handler raised. In this case, no op has begun and
/// no refusal has been sent.
fn once_there_is_room<T>(
    py: Python<'_>,
    client: &Client,
    lane: u8,
    start: impl Fn() -> PyResult<Result<T, Error>>,
) -> PyResult<Result<T, Error>> {
    loop {
        match start()? {
            Err(Error::Submit(SubmitError::TooManyOps { .. })) => {
                let has_room = |slice| client.has_room_within(lane, slice).then_some(());
                wait_in_slices(py, None, has_room)?;
            }
            started => return Ok(started),
        }
    }
}

#[pymethods]
impl Session {
    /// Joins a job, and returns once all its ranks have joined. Calls `check`, if given, repeatedly
    /// during the wait, and cancels the attempt if `check` raises an exception.
    #[staticmethod]
    #[pyo3(signature = (options, check=None))]
    fn connect(py: Python<'_>, options: Options, check: Option<Py<PyAny>>) -> PyResult<Self> {
        let check = |py: Python<'_>| check.as_ref().map_or(Ok(()), |it| it.call0(py).map(drop));
        let options = options.into_connect_options(py)?;
        let connecting = Connecting::new();
        let cancel = connecting.cancel_handle();
        let (sender, receiver) = channel();
        let attempt = std::thread::Builder::new()
            .name("racksum-connect".into())
            .spawn(move || drop(sender.send(connecting.run(&options))))?;
        // If the attempt panics, the panic hook prints the message. Treat the panic as a cancelled
        // attempt.
        let received = move |slice| match receiver.recv_timeout(slice) {
            Ok(connected) => Some(connected),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(ConnectError::GivenUp)),
        };
        let connected = wait_in_checked_slices(py, None, check, received);
        if connected.is_err() {
            cancel.cancel();
        }
        drop(py.detach(|| attempt.join()));
        match connected? {
            Some(Ok(client)) => {
                Ok(Self { client: Connected::new(client), unreported: Arc::default() })
            }
            Some(Err(error)) => Err(of_connect(py, &error)),
            None => Err(of_connect(py, &ConnectError::GivenUp)),
        }
    }

    /// Returns the [`CallTurn`] in which a call's op begins or is refused. `begins_next` means that
    /// no other thread still has to begin ops of earlier calls.
    fn turn(
        &self,
        py: Python<'_>,
        part_of: &Bound<'_, PyAny>,
        begins_next: bool,
    ) -> PyResult<CallTurn> {
        let call = part_of.extract::<PartOf>()?.call(py)?;
        Ok(CallTurn::new(Arc::clone(&self.unreported), call, begins_next))
    }

    /// Makes all refused calls due. Call this once the ops of all earlier calls have begun.
    fn settle(&self) {
        self.unreported.settle();
    }

    /// Returns whether any refused call must wait until another thread has begun the ops of earlier
    /// calls.
    #[getter]
    fn owes(&self) -> bool {
        self.unreported.owes()
    }

    /// Sends the other ranks a notice of each refused call that is due. A notice is an empty op.
    fn tell(&self, py: Python<'_>) -> PyResult<()> {
        self.report_refused(py, self.client.get(py)?)
    }

    /// Starts an in-place reduction of the bytes at `address`. Keeps `owner` alive until the op has
    /// ended.
    fn submit(
        &self,
        py: Python<'_>,
        turn: &Bound<'_, CallTurn>,
        call: OpArgs,
        address: usize,
        nbytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<Op> {
        let region = |py: Python<'_>| region_of(address, nbytes, owner.clone_ref(py));
        self.start(py, turn.get().begin(), &call, region)
    }

    /// Starts reducing some blocks of a tensor. Copies their indices from the address `indices`,
    /// which holds `count` 64-bit integers, and their values from the address `values`, which holds
    /// `nbytes` bytes.
    #[expect(clippy::too_many_arguments, reason = "Python passes each value separately")]
    fn submit_blocks(
        &self,
        py: Python<'_>,
        turn: &Bound<'_, CallTurn>,
        call: OpArgs,
        indices: usize,
        count: usize,
        values: usize,
        nbytes: usize,
    ) -> PyResult<Op> {
        let part_of = turn.get().begin();
        let places = py.detach(|| {
            let places = read_from(indices, count * size_of::<i64>());
            let place = |bytes: &[u8; 8]| {
                let index = i64::from_ne_bytes(*bytes);
                u32::try_from(index).map_err(|_| index)
            };
            places.as_chunks().0.iter().map(place).collect::<Result<Vec<u32>, i64>>()
        });
        let places = match places {
            Ok(places) => places,
            Err(index) => {
                let why =
                    format!("there is no block {index}; blocks are numbered from 0 to 2**32 - 1");
                return Err(self.refuse(py, part_of, raise(py, "BadArgument", why)));
            }
        };
        let blocks = |py: Python<'_>| {
            py.detach(|| Blocks { indices: places.clone(), values: read_from(values, nbytes) })
        };
        self.start(py, part_of, &call, blocks)
    }

    /// Returns whether `ops` ops of lane 0 would begin without waiting for earlier ops to end or
    /// for all ranks to agree on exponents. Also returns true for a session that is over, because
    /// it refuses ops immediately.
    #[pyo3(signature = (ops, wire=None))]
    fn would_begin(&self, py: Python<'_>, ops: usize, wire: Option<&str>) -> PyResult<bool> {
        let Ok(client) = self.client.get(py) else { return Ok(true) };
        let wire = wire.map(|wire| read(py, "wire", wire)).transpose()?;
        if wire.is_some_and(|wire| client.must_agree(wire)) {
            return Ok(false);
        }
        // The empty ops that report refused calls begin first.
        let ops = ops.saturating_add(self.unreported.len());
        Ok(py.detach(|| client.has_room_for(0, ops)))
    }

    /// Returns `nbytes` bytes of memory that is shared with the sidecar, or `None` without a
    /// sidecar.
    fn lend(&self, py: Python<'_>, nbytes: usize) -> PyResult<Option<Lent>> {
        let client = self.client.get(py)?;
        let refused = |error: io::Error| of_op(py, &Error::Memory(error.to_string()));
        let memory = py.detach(|| client.offer(nbytes)).map_err(refused)?;
        let Some(memory) = memory else { return Ok(None) };
        let lent = Lent { memory: Some(memory), pid: std::process::id() };
        let is_taken = |slice| client.is_taken_within(&**lent.memory.as_ref()?, slice);
        let taken = wait_in_slices(py, Some(Client::SIDECAR_TIMEOUT), is_taken)?;
        taken.unwrap_or_else(|| Err(Client::unanswered())).map_err(refused)?;
        Ok(Some(lent))
    }

    /// Waits until the rank may leave the job, and begins to leave it. Ops in flight fail. With a
    /// sidecar, however, ops that all of the job's ranks on this host have called continue.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(client) = self.client.get(py) else { return Ok(()) };
        let may_leave = |slice| client.may_leave_within(slice).then_some(());
        let waited = wait_in_slices(py, Some(client.linger()), may_leave);
        py.detach(|| client.leave());
        waited.map(drop)
    }

    /// Waits until the aggregators, or the sidecar, know that the rank has left, or until they have
    /// had a second to answer. Gives up after [`Client::LEAVE_TIMEOUT`].
    fn wait_until_left(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(client) = self.client.get(py) else { return Ok(()) };
        let has_left = |slice| client.has_left_within(slice).then_some(());
        wait_in_slices(py, Some(Client::LEAVE_TIMEOUT), has_left).map(drop)
    }

    /// Returns counters of the traffic so far.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.client.get(py)?;
        refresh_stats(py, client)?;
        let (stats, sidecar) = py.detach(|| (client.stats(), client.sidecar_stats()));
        let dict = PyDict::new(py);
        for (name, value) in stats.named() {
            dict.set_item(name, value)?;
        }
        for (name, value) in sidecar.named() {
            dict.set_item(format!("sidecar_{name}"), value)?;
        }
        Ok(dict)
    }

    /// Returns how many ops may be in flight.
    #[getter]
    fn max_ops(&self, py: Python<'_>) -> PyResult<u16> {
        Ok(self.client.get(py)?.grant().max_ops)
    }

    /// Returns whether results arrive by multicast.
    #[getter]
    fn multicast(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.client.get(py)?.grant().multicast)
    }

    /// Returns whether this process was forked from the one that connected the session.
    #[getter]
    fn is_forked(&self) -> bool {
        self.client.is_forked()
    }

    /// Returns whether the session accepts no more ops, because it was closed or the job is over.
    #[getter]
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let client = self.client.get(py)?;
        Ok(py.detach(|| client.is_over()))
    }
}

/// Asks the sidecar, if there is one, for its traffic counters. If the sidecar does not answer in
/// time, the counters of its last answer remain in use.
fn refresh_stats(py: Python<'_>, client: &Client) -> PyResult<()> {
    let mut query = StatsQuery::default();
    let is_fresh = |slice| client.refreshes_stats_within(&mut query, slice).then_some(());
    if wait_in_slices(py, Some(Client::SIDECAR_TIMEOUT), is_fresh)?.is_none() {
        tracing::warn!(
            "the sidecar did not answer in time; stats() returns the counters of its last answer"
        );
    }
    Ok(())
}

/// Memory that is shared with the sidecar for as long as this object lives.
#[pyclass(frozen, module = "racksum._racksum")]
#[derive(Debug)]
pub(crate) struct Lent {
    /// The memory; `None` only while this object is being dropped.
    memory: Option<Arc<dyn LentMemory>>,
    /// The id of the process that lent the memory to the sidecar.
    pid: u32,
}

#[pymethods]
impl Lent {
    /// Returns the address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.start().as_ptr() as usize)
    }
}

impl Drop for Lent {
    #[expect(clippy::mem_forget, reason = "a forked child must not take back the parent's memory")]
    fn drop(&mut self) {
        let memory = self.memory.take();
        if std::process::id() == self.pid {
            // Dropping the memory sends the sidecar a message. The send may block, so release the
            // GIL.
            Python::attach(|py| py.detach(|| drop(memory)));
        } else {
            std::mem::forget(memory);
        }
    }
}
