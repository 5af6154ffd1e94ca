//! A rank's client of a sidecar.

mod shared;

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Line};
use racksum_proto::call::Call;
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::SubmitError;

use self::shared::{Flight, LOOK, Over, Shared, State};
use super::error_map::millis;
use super::lent::{Copier, Lent};
use super::message::{Called, FromRank, Join, ListAt, VERSION};
use super::sums::Sums;
use crate::blocks::Blocks;
use crate::engine::Stats;
use crate::error::{ConnectError, Error};
use crate::join::check_name;
use crate::operand::{Operand, check_len};
use crate::options::ConnectOptions;

/// How long to wait before offering a message again after the sidecar's queue was full.
const FULL: Duration = Duration::from_millis(20);

/// How much longer than the op timeout a sidecar may take to end an op. The sidecar applies the op
/// timeout itself.
const MARGIN: Duration = Duration::from_secs(5);

/// A rank of a job whose ranks use a sidecar. Ops end in any order; each rank must start the same
/// ops in the same order.
#[derive(Debug)]
pub struct Client {
    pub(super) line: Arc<Line>,
    lanes: u8,
    shared: Arc<Shared>,
    copier: Copier,
    /// Held while an op is numbered and sent, so that ops are sent in the order of their numbers.
    order: Mutex<()>,
    /// The thread that receives messages from the sidecar.
    ear: Option<JoinHandle<()>>,
}

/// Counts of the ops and bytes that a rank has exchanged with its sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Ops that the rank has started.
    pub ops: u64,
    /// Bytes of tensors that lie in shared memory, where they are reduced in place.
    pub shared_bytes: u64,
    /// Bytes copied to and from shared memory.
    pub copied_bytes: u64,
}

/// A request for statistics, by its number.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

/// An op in flight. If the handle is dropped, the op goes on, because other ranks need it. Its
/// tensor is still reduced.
#[derive(Debug)]
#[must_use = "an op's result is had by waiting for it"]
pub struct Handle<T> {
    op: u32,
    client: Weak<Shared>,
    result: PhantomData<fn() -> T>,
}

/// Where the operand of an op lies in lent memory.
struct Handed {
    /// The copy of an operand that does not lie in shared memory.
    copy: Option<Arc<Lent>>,
    memory: u32,
    at: u64,
    list: Option<ListAt>,
    /// Bytes that the operand occupies.
    len: usize,
}

impl Client {
    /// Calls the sidecar at `path`, and asks to join as a rank.
    ///
    /// # Errors
    /// Returns [`ConnectError::NoSidecar`], [`ConnectError::ImpostorBeside`], or
    /// [`ConnectError::Arguments`] about the path or the job's name.
    pub fn call(
        path: &Path,
        options: &ConnectOptions,
        local_world: u16,
    ) -> Result<Self, ConnectError> {
        check_name(options)?;
        if path.as_os_str().is_empty() {
            let why = "unix: names no sidecar; give unix:PATH, its --socket";
            return Err(ConnectError::of_aggregators(why));
        }
        let line = Line::connect(path).map_err(|error| not_called(path, error))?;
        let line = Arc::new(line);
        let join = Join {
            version: VERSION,
            job: options.job_name(),
            generation: options.generation,
            secret: options.secret,
            rank: options.rank,
            world: options.world,
            local_world,
            lanes: options.lanes,
            join_timeout: millis(options.join_timeout),
            op_timeout: millis(options.op_timeout),
        };
        let (shared, copier) = (Arc::new(Shared::default()), Copier::start()?);
        line.set_patience(Some(LOOK))?;
        let limit = options.op_timeout.saturating_add(MARGIN);
        let (hears, heard, at) = (Arc::clone(&shared), Arc::clone(&line), path.to_owned());
        let hear = move || hears.hear(&heard, &at, limit);
        let ear = Some(std::thread::Builder::new().name("racksum-ear".into()).spawn(hear)?);
        let (lanes, order) = (options.lanes, Mutex::default());
        let client = Self { line, lanes, shared, copier, order, ear };
        client.line.send(&FromRank::Join(join), None).map_err(|error| ConnectError::NoSidecar {
            path: path.to_owned(),
            why: error.to_string(),
            absent: false,
        })?;
        Ok(client)
    }

    /// Waits up to `limit` until all ranks have joined. Returns whether they have.
    ///
    /// # Errors
    /// Returns why the job cannot be joined.
    pub fn is_ready_within(&self, limit: Duration) -> Result<bool, ConnectError> {
        let waits = |state: &mut State| !state.began && state.refused.is_none();
        let mut state = self.shared.wait(limit, waits);
        match state.refused.take() {
            Some(refused) => Err(refused),
            None => Ok(state.began),
        }
    }

    /// Returns the ranks that had not joined at the sidecar's last report.
    #[must_use]
    pub fn missing(&self) -> Vec<u16> {
        self.shared.lock().waiting.clone()
    }

    /// Lends `len` bytes of new memory to the sidecar, and waits until the sidecar takes it.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory, the sidecar's reason if it refuses
    /// the memory, or a timeout if it does not answer.
    pub fn lend(&self, len: usize) -> io::Result<Arc<Lent>> {
        let lent = self.offer(len)?;
        self.is_taken_within(&lent, Self::PATIENCE).unwrap_or_else(|| Err(Self::unanswered()))?;
        Ok(lent)
    }

    /// Offers `len` bytes of new memory to the sidecar. The sidecar has the memory once it says so.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory.
    pub fn offer(&self, len: usize) -> io::Result<Arc<Lent>> {
        self.shared.lent.lend(len, &self.line)
    }

    /// Waits up to `limit` for the sidecar's answer to an offer of memory. Returns `None` on
    /// timeout.
    ///
    /// # Errors
    /// Returns the sidecar's reason if it refuses the memory.
    pub fn is_taken_within(&self, lent: &Lent, limit: Duration) -> Option<io::Result<()>> {
        let waits = |state: &mut State| !state.answered.contains_key(&lent.id()) && !state.gone;
        let mut state = self.shared.wait(limit, waits);
        match state.answered.remove(&lent.id()) {
            Some(Some(refused)) => Some(Err(io::Error::other(refused))),
            Some(None) => Some(Ok(())),
            // A sidecar that has hung up does not need the memory.
            None => state.gone.then_some(Ok(())),
        }
    }

    /// Returns the error for a sidecar that has not answered in time.
    #[must_use]
    pub fn unanswered() -> io::Error {
        let why = format!("it has not answered for {} s", Self::PATIENCE.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, why)
    }

    /// Starts an op that reduces a tensor in place with the tensors of all other ranks. The operand
    /// may also be a list of blocks of a tensor. Blocks that are not in the list count as zero, and
    /// blocks of zeros are left out. Operands outside [lent](Self::lend) memory are copied.
    ///
    /// Waits while ops in flight use any memory of the tensor, so that ops on the same memory run
    /// in call order. A call that this rank refuses still takes an op number. Ranks that did not
    /// refuse the call receive a mismatch.
    ///
    /// # Errors
    /// Returns why the op was not taken. After [`SubmitError::TooManyOps`], wait until
    /// [`has_room_within`](Self::has_room_within) returns true.
    pub fn submit<T: Into<Operand>>(
        &self,
        operand: T,
        descriptor: Descriptor,
    ) -> Result<Handle<T>, Error> {
        let _order = self.take_order();
        match self.submit_in_order(operand.into(), &descriptor) {
            Ok(op) => Ok(Handle { op, client: Arc::downgrade(&self.shared), result: PhantomData }),
            Err(error) if error.is_refusal() => {
                self.refuse_in_order(descriptor.call)?;
                Err(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Starts an empty op in place of a call that the caller refuses, so that the ops of all ranks
    /// stay in step. Ranks that made the call receive [`OpError::Mismatch`].
    ///
    /// [`OpError::Mismatch`]: racksum_proto::error::OpError::Mismatch
    ///
    /// # Errors
    /// Returns why the op was not taken, like [`submit`](Self::submit).
    pub fn refuse(&self, call: Call) -> Result<(), Error> {
        let _order = self.take_order();
        self.refuse_in_order(call)
    }

    fn refuse_in_order(&self, call: Call) -> Result<(), Error> {
        // wire: W-70
        let nothing = Flight::new(Operand::Tensor(Vec::new()), None);
        let op = self.shared.lock().take_off(nothing, 0)?;
        let Called { descriptor, .. } = Called::new(0, &Descriptor::refused(call));
        // The receiving thread notices a line that fails.
        drop(self.line.send(&FromRank::Refuse { descriptor }, None));
        self.shared.abandon(op);
        Ok(())
    }

    fn take_order(&self) -> MutexGuard<'_, ()> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit_in_order(&self, mut operand: Operand, descriptor: &Descriptor) -> Result<u32, Error> {
        descriptor.validate().map_err(SubmitError::from)?;
        if descriptor.lane >= self.lanes {
            let (lane, lanes) = (descriptor.lane, self.lanes);
            return Err(SubmitError::NoSuchLane { lane, lanes }.into());
        }
        self.shared.lock().check()?;
        self.is_free_within(&operand.extent(), Duration::MAX);
        let handed = match &mut operand {
            Operand::Blocks(blocks) => self.hand_blocks(std::mem::take(blocks), descriptor)?,
            tensor => self.hand_tensor(tensor.bytes(), descriptor)?,
        };
        self.start(operand, handed, descriptor)
    }

    /// Waits up to `limit` until no op in flight uses memory at these addresses. Returns whether
    /// none does.
    pub fn is_free_within(&self, extent: &Range<usize>, limit: Duration) -> bool {
        let mut state = self.shared.wait(limit, |state| state.is_working_on(extent));
        // Sums in copies must reach their tensors before the next op reads the tensors.
        state.deliver_to(extent);
        !state.is_working_on(extent)
    }

    /// Finds a tensor in lent memory, or copies it there.
    fn hand_tensor(&self, bytes: &[u8], descriptor: &Descriptor) -> Result<Handed, Error> {
        check_len(bytes.len(), descriptor)?;
        let (len, list) = (bytes.len(), None);
        if let Some((lent, at)) = self.shared.lent.find(bytes) {
            return Ok(Handed { copy: None, memory: lent.id(), at: at as u64, list, len });
        }
        let copy = self.spare(len)?;
        copy.fill(bytes, &self.copier);
        Ok(Handed { memory: copy.id(), copy: Some(copy), at: 0, list, len })
    }

    /// Copies the nonzero blocks to lent memory. The indices follow the space for the values, which
    /// has room for those of all blocks.
    fn hand_blocks(&self, blocks: Blocks, descriptor: &Descriptor) -> Result<Handed, Error> {
        let mut blocks = blocks.sorted(descriptor)?;
        let at = blocks.values.len().next_multiple_of(size_of::<u32>());
        let room = at + blocks.indices.len() * size_of::<u32>();
        // Lists differ in size from op to op. Rounding up makes memory reusable for later lists.
        let copy = self.spare(room.next_power_of_two())?;
        let (mut used, mut count) = (0, 0);
        for (index, values) in blocks.nonzero(descriptor) {
            copy.write(used, values);
            copy.write(at + count as usize * size_of::<u32>(), &index.to_ne_bytes());
            used += values.len();
            count += 1;
        }
        let list = Some(ListAt { blocks: count, values: 0 });
        let len = used + count as usize * size_of::<u32>();
        Ok(Handed { memory: copy.id(), copy: Some(copy), at: at as u64, list, len })
    }

    /// Returns lent memory for a copy of `len` bytes.
    fn spare(&self, len: usize) -> Result<Arc<Lent>, Error> {
        let mut state = self.shared.lock();
        if let Some(spare) = state.take_spare(len) {
            return Ok(spare);
        }
        // All spare memory is too small. If tensors grow, it would never be used again.
        let small = std::mem::take(&mut state.spare);
        drop(state);
        drop(small);
        self.lend(len).map_err(|why| Error::Memory(why.to_string()))
    }

    fn start(
        &self,
        operand: Operand,
        handed: Handed,
        descriptor: &Descriptor,
    ) -> Result<u32, Error> {
        let Handed { copy, memory, at, list, len } = handed;
        let op = self.shared.lock().take_off(Flight::new(operand, copy), len)?;
        let Called { descriptor, .. } = Called::new(0, descriptor);
        // The state is unlocked here, because the send may wait for a sidecar that does not read.
        // The receiving thread notices a line that fails.
        drop(self.line.send(&FromRank::Submit { descriptor, memory, at, list }, None));
        Ok(op)
    }

    /// Waits for an op to end. Returns the reduced tensor, or the sorted blocks of the union.
    ///
    /// # Errors
    /// Returns why the op failed. A tensor then holds sums in some places and not in others.
    pub fn wait<T: TryFrom<Operand>>(&self, handle: Handle<T>) -> Result<T, Error> {
        self.check_own(&handle)?;
        let op = handle.op;
        let mut state = self.shared.wait(Duration::MAX, |state| !state.has_ended(op));
        // The rest of the flight keeps other ops off the tensor until the handle is dropped.
        let landed = state.flights.get_mut(&op).and_then(Flight::unload);
        drop(state);
        let Some((mut operand, copy, outcome)) = landed else { return Err(Error::OtherClient) };
        let sums = outcome?;
        match (&mut operand, &copy, sums) {
            (Operand::Blocks(blocks), _, Some(sums)) => *blocks = self.read(&sums)?,
            (Operand::Blocks(_), ..) => return Err(shared::strange().into()),
            (tensor, Some(copy), _) => {
                copy.read_with(&self.copier, tensor.bytes_mut());
                self.shared.lock().traffic.copied_bytes += tensor.bytes().len() as u64;
            }
            (_, None, _) => {}
        }
        self.shared.lock().spare.extend(copy);
        operand.try_into().map_err(|_| Error::OtherClient)
    }

    /// Reads the sums of lists, into recycled memory if there is any.
    fn read(&self, sums: &Sums) -> Result<Blocks, Error> {
        let memory = self.shared.lock().recycled.take().unwrap_or_default();
        let blocks = sums.read(memory).map_err(|error| Error::Memory(error.to_string()))?;
        self.shared.lock().traffic.copied_bytes += blocks.values.len() as u64;
        Ok(blocks)
    }

    /// Hands back sums that are no longer needed, so that a later op reuses their memory.
    pub fn recycle(&self, blocks: Blocks) {
        self.shared.lock().recycled = Some(blocks.values);
    }

    /// Asks the sidecar for the job's network statistics. Returns `None` if its queue is full.
    pub fn ask_stats(&self) -> Option<Asked> {
        self.shared.ask_stats(&self.line)
    }

    /// Waits up to `limit` until the sidecar has answered or is gone. Returns false on timeout.
    pub fn has_told_within(&self, asked: &Asked, limit: Duration) -> bool {
        let waits = |state: &mut State| state.told < asked.0 && !state.gone;
        let state = self.shared.wait(limit, waits);
        state.told >= asked.0 || state.gone
    }

    /// Returns the counts of this client, and the job's network statistics from the sidecar's last
    /// answer to [`ask_stats`](Self::ask_stats).
    #[must_use]
    pub fn stats(&self) -> (Traffic, Stats) {
        let state = self.shared.lock();
        (state.traffic, state.stats)
    }

    /// Returns whether the client takes no more ops, because it was closed or the job is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.shared.lock().over.is_some()
    }

    /// Waits up to `limit` for an op to end. Returns whether it has.
    ///
    /// # Errors
    /// Returns [`Error::OtherClient`] if another client started the op.
    pub fn ends_within<T>(&self, handle: &Handle<T>, limit: Duration) -> Result<bool, Error> {
        self.check_own(handle)?;
        let state = self.shared.wait(limit, |state| !state.has_ended(handle.op));
        Ok(state.has_ended(handle.op))
    }

    /// Waits up to `limit` until one more op may be in flight. Returns whether it may.
    #[must_use]
    pub fn has_room_within(&self, limit: Duration) -> bool {
        self.shared.wait(limit, |state| state.in_flight >= MAX_OPS).in_flight < MAX_OPS
    }

    /// Returns at once whether this many more ops may be in flight. Also returns true if the client
    /// takes no more ops, because it refuses them at once.
    #[must_use]
    pub fn has_room_for(&self, ops: usize) -> bool {
        self.shared.lock().has_room_for(ops)
    }

    fn check_own<T>(&self, handle: &Handle<T>) -> Result<(), Error> {
        match std::ptr::eq(handle.client.as_ptr(), Arc::as_ptr(&self.shared)) {
            true => Ok(()),
            false => Err(Error::OtherClient),
        }
    }

    /// How long a sidecar may take to answer.
    pub const PATIENCE: Duration = Duration::from_secs(10);

    /// How long a sidecar may take to release a rank: five seconds for ops that the rank has
    /// called, plus the time that a client stays for ranks of other hosts that may lack its sums,
    /// plus its goodbye.
    pub const LINGER: Duration = Duration::from_secs(13);

    /// Leaves the job. Ops in flight end if all ranks have called them, and fail otherwise.
    ///
    /// When this returns, the sidecar no longer uses the rank's memory, with two exceptions. The
    /// sidecar may be stuck or need more than [`LINGER`](Self::LINGER) for its folds, or other
    /// hosts may delay it for more than five seconds.
    pub fn close(&self) {
        self.may_leave_within(Self::LINGER);
        self.leave();
    }

    /// Starts no more ops, and waits up to `limit` until the sidecar has released the rank. Returns
    /// whether it has.
    pub fn may_leave_within(&self, limit: Duration) -> bool {
        let clock = Clock::start();
        let began = clock.now();
        loop {
            let left = limit.saturating_sub(Duration::from_nanos(clock.now().since(began).0));
            let was_said = self.shared.take_leave(&self.line);
            let slice = if was_said { left } else { left.min(FULL) };
            let is_gone = self.shared.wait(slice, |state| !state.gone).gone;
            if is_gone || slice == left {
                return is_gone;
            }
        }
    }

    /// Leaves the job at once. Ops in flight fail, although the sidecar may still work on them.
    pub fn leave(&self) {
        self.shared.take_leave(&self.line);
        self.line.hang_up();
        // Unread messages no longer matter, so the ops in flight end here.
        self.shared.end(Over::because("the client was closed"));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        if let Some(ear) = self.ear.take() {
            // The thread has already printed its panic.
            drop(ear.join());
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(shared) = self.client.upgrade() {
            shared.abandon(self.op);
        }
    }
}

/// Returns why the call to the sidecar at `path` failed.
fn not_called(path: &Path, error: CallError) -> ConnectError {
    let (path, absent) = (path.to_owned(), error.is_absence());
    match error {
        CallError::NotBelieved(why) => ConnectError::ImpostorBeside { path, why },
        CallError::NoSocket => {
            let path = path.display();
            ConnectError::of_aggregators(format!(
                "unix:{path} names no sidecar: it is no socket; give unix:PATH, its --socket"
            ))
        }
        CallError::Io(error) => ConnectError::NoSidecar { path, why: error.to_string(), absent },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_empty_is_refused_at_once() {
        let error = Client::call(Path::new(""), &ConnectOptions::new("", "job"), 1).unwrap_err();
        assert!(error.is_usage() && !error.may_pass(), "{error}");
        assert!(error.to_string().contains("unix: names no sidecar"), "{error}");
    }

    #[test]
    fn a_path_that_is_no_socket_is_refused_at_once() {
        let call = Client::call(&std::env::temp_dir(), &ConnectOptions::new("", "job"), 1);
        let error = call.unwrap_err();
        assert!(error.is_usage() && !error.may_pass(), "{error}");
        assert!(error.to_string().contains("names no sidecar: it is no socket"), "{error}");
    }

    #[test]
    fn a_sidecar_that_is_not_believed_is_told_from_one_that_may_not_be_called() {
        let path = Path::new("/tmp/socket");
        let why = "a process of user 1234 listens there";
        let error = not_called(path, CallError::NotBelieved(why.into()));
        assert_eq!(error.to_string(), format!("the sidecar at /tmp/socket is not believed: {why}"));
        assert!(!error.may_pass());
        let of_kind = |kind| not_called(path, io::Error::from(kind).into());
        let closed = of_kind(io::ErrorKind::PermissionDenied);
        assert!(matches!(closed, ConnectError::NoSidecar { absent: false, .. }));
        assert!(of_kind(io::ErrorKind::ConnectionRefused).may_pass());
    }
}
