//! A rank's end of a sidecar.

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

/// How long to wait for a sidecar to read before it is told again what there was no room for.
const FULL: Duration = Duration::from_millis(20);

/// How much longer than an op may take a sidecar may take to end it, since it sees to that itself.
const MARGIN: Duration = Duration::from_secs(5);

/// A rank of a job whose ranks have a sidecar. Ops end in any order; each rank must start the same
/// ops in the same order.
#[derive(Debug)]
pub struct Client {
    pub(super) line: Arc<Line>,
    lanes: u8,
    shared: Arc<Shared>,
    copier: Copier,
    /// Held while an op is numbered and sent, so that ops are sent in their order.
    order: Mutex<()>,
    /// Hears the sidecar.
    ear: Option<JoinHandle<()>>,
}

/// What a rank has handed its sidecar so far, and got from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Ops that it has started.
    pub ops: u64,
    /// Bytes of tensors that were reduced where they lie.
    pub shared_bytes: u64,
    /// Bytes that were copied to shared memory, and from it.
    pub copied_bytes: u64,
}

/// A question to a sidecar, by its number.
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

/// An op in flight. If it is dropped, the op goes on, since the other ranks need it, and its tensor
/// is reduced all the same.
#[derive(Debug)]
#[must_use = "an op's result is had by waiting for it"]
pub struct Handle<T> {
    op: u32,
    client: Weak<Shared>,
    result: PhantomData<fn() -> T>,
}

/// What an op has of a rank: where in memory that was lent.
struct Handed {
    /// What it was copied to, if it does not lie in shared memory.
    copy: Option<Arc<Lent>>,
    memory: u32,
    at: u64,
    list: Option<ListAt>,
    /// How many bytes of it are of use.
    len: usize,
}

impl Client {
    /// Calls the sidecar at a path, and asks to be a rank.
    ///
    /// # Errors
    /// [`ConnectError::NoSidecar`], [`ConnectError::ImpostorBeside`], or
    /// [`ConnectError::Arguments`] about the job's name.
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

    /// Waits until all ranks have joined, but not longer than this. Returns whether they have.
    ///
    /// # Errors
    /// Why the job cannot be joined.
    pub fn is_ready_within(&self, limit: Duration) -> Result<bool, ConnectError> {
        let waits = |state: &mut State| !state.began && state.refused.is_none();
        let mut state = self.shared.wait(limit, waits);
        match state.refused.take() {
            Some(refused) => Err(refused),
            None => Ok(state.began),
        }
    }

    /// The ranks that had not joined when the sidecar said so last.
    #[must_use]
    pub fn missing(&self) -> Vec<u16> {
        self.shared.lock().waiting.clone()
    }

    /// Memory that the sidecar has too.
    ///
    /// # Errors
    /// The kernel's, when there is not so much; the sidecar's reason, when it does not take it.
    pub fn lend(&self, len: usize) -> io::Result<Arc<Lent>> {
        let lent = self.offer(len)?;
        self.is_taken_within(&lent, Self::PATIENCE).unwrap_or_else(|| Err(Self::unanswered()))?;
        Ok(lent)
    }

    /// Offers the sidecar memory. It has it once it says so.
    ///
    /// # Errors
    /// The kernel's, when there is not so much.
    pub fn offer(&self, len: usize) -> io::Result<Arc<Lent>> {
        self.shared.lent.lend(len, &self.line)
    }

    /// Waits until the sidecar says whether it takes memory, but not longer than this.
    ///
    /// # Errors
    /// Its reason, when it does not.
    pub fn is_taken_within(&self, lent: &Lent, limit: Duration) -> Option<io::Result<()>> {
        let waits = |state: &mut State| !state.answered.contains_key(&lent.id()) && !state.gone;
        let mut state = self.shared.wait(limit, waits);
        match state.answered.remove(&lent.id()) {
            Some(Some(refused)) => Some(Err(io::Error::other(refused))),
            Some(None) => Some(Ok(())),
            // One that is gone will not miss it.
            None => state.gone.then_some(Ok(())),
        }
    }

    /// That a sidecar has not answered in time.
    #[must_use]
    pub fn unanswered() -> io::Error {
        let why = format!("it has not answered for {} s", Self::PATIENCE.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, why)
    }

    /// Starts reducing a tensor in place with the same tensors of all other ranks, or some blocks
    /// of one as if all others, and those of them that are zero, were zero in it. What does not lie
    /// in memory that was [lent](Self::lend) is copied.
    ///
    /// A tensor that ops in flight have some of is waited for, so that ops on the same memory take
    /// turns in the order of the calls. A call that this rank refuses has its number all the same,
    /// and the ranks that did not refuse it hear of a mismatch.
    ///
    /// # Errors
    /// Why the op was not taken: [`SubmitError::TooManyOps`] until
    /// [`has_room_within`](Self::has_room_within) says otherwise.
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

    /// Calls an op of nothing in the place of a call that the caller refuses, so that the ops of
    /// all ranks stay in step: ranks that made the call hear [`OpError::Mismatch`] of it.
    ///
    /// [`OpError::Mismatch`]: racksum_proto::error::OpError::Mismatch
    ///
    /// # Errors
    /// Why the op was not taken, as [`submit`](Self::submit).
    pub fn refuse(&self, call: Call) -> Result<(), Error> {
        let _order = self.take_order();
        self.refuse_in_order(call)
    }

    fn refuse_in_order(&self, call: Call) -> Result<(), Error> {
        // wire: W-70
        let nothing = Flight::new(Operand::Tensor(Vec::new()), None);
        let op = self.shared.lock().take_off(nothing, 0)?;
        let Called { descriptor, .. } = Called::new(0, &Descriptor::refused(call));
        // The ear hears of a line that fails.
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

    /// Waits until no op in flight has some of the memory at these addresses, but not longer than
    /// this. Returns whether none has.
    pub fn is_free_within(&self, extent: &Range<usize>, limit: Duration) -> bool {
        let mut state = self.shared.wait(limit, |state| state.is_working_on(extent));
        // The sums of what was copied lie where the next op does not read them.
        state.deliver_to(extent);
        !state.is_working_on(extent)
    }

    /// Finds where a tensor lies in memory that was lent, or copies it there.
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

    /// Copies the blocks that are not zero to memory that was lent: the values, and behind room for
    /// those of all blocks the indices.
    fn hand_blocks(&self, blocks: Blocks, descriptor: &Descriptor) -> Result<Handed, Error> {
        let mut blocks = blocks.sorted(descriptor)?;
        let at = blocks.values.len().next_multiple_of(size_of::<u32>());
        let room = at + blocks.indices.len() * size_of::<u32>();
        // Lists differ from op to op, and memory of one is to do for another.
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

    /// Memory for a copy of so many bytes.
    fn spare(&self, len: usize) -> Result<Arc<Lent>, Error> {
        let mut state = self.shared.lock();
        if let Some(spare) = state.take_spare(len) {
            return Ok(spare);
        }
        // All are too small, and of tensors that grow none would be of use again.
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
        // Others may go on while this waits for a sidecar that does not read. The ear hears of a
        // line that fails.
        drop(self.line.send(&FromRank::Submit { descriptor, memory, at, list }, None));
        Ok(op)
    }

    /// Waits for an op to end: its tensor is reduced then, and of blocks those of the union are
    /// there, sorted.
    ///
    /// # Errors
    /// Why it is not; a tensor then holds sums in some places and not in others.
    pub fn wait<T: TryFrom<Operand>>(&self, handle: Handle<T>) -> Result<T, Error> {
        self.check_own(&handle)?;
        let op = handle.op;
        let mut state = self.shared.wait(Duration::MAX, |state| !state.has_ended(op));
        // What is left of it, which keeps others from the tensor, goes with the handle.
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

    /// Reads the sums of lists.
    fn read(&self, sums: &Sums) -> Result<Blocks, Error> {
        let memory = self.shared.lock().recycled.take().unwrap_or_default();
        let blocks = sums.read(memory).map_err(|error| Error::Memory(error.to_string()))?;
        self.shared.lock().traffic.copied_bytes += blocks.values.len() as u64;
        Ok(blocks)
    }

    /// Hands back sums that are of no more use, so that those of a later op take their memory.
    pub fn recycle(&self, blocks: Blocks) {
        self.shared.lock().recycled = Some(blocks.values);
    }

    /// Asks the sidecar what has left the host; nothing while it has too much to read.
    pub fn ask_stats(&self) -> Option<Asked> {
        self.shared.ask_stats(&self.line)
    }

    /// Waits until the sidecar has answered, or is gone, but not longer than this. Returns whether
    /// either is so.
    pub fn has_told_within(&self, asked: &Asked, limit: Duration) -> bool {
        let waits = |state: &mut State| state.told < asked.0 && !state.gone;
        let state = self.shared.wait(limit, waits);
        state.told >= asked.0 || state.gone
    }

    /// What the rank has handed the sidecar, and what had left the host for the job, and come back,
    /// when the sidecar was [asked](Self::ask_stats) last.
    #[must_use]
    pub fn stats(&self) -> (Traffic, Stats) {
        let state = self.shared.lock();
        (state.traffic, state.stats)
    }

    /// Whether there are no more ops: the client was closed, or the job is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.shared.lock().over.is_some()
    }

    /// Waits for an op to end, but not longer than this. Returns whether it has.
    ///
    /// # Errors
    /// [`Error::OtherClient`] when another client started the op.
    pub fn ends_within<T>(&self, handle: &Handle<T>, limit: Duration) -> Result<bool, Error> {
        self.check_own(handle)?;
        let state = self.shared.wait(limit, |state| !state.has_ended(handle.op));
        Ok(state.has_ended(handle.op))
    }

    /// Waits until one more op may be in flight, but not longer than this. Returns whether it may.
    #[must_use]
    pub fn has_room_within(&self, limit: Duration) -> bool {
        self.shared.wait(limit, |state| state.in_flight >= MAX_OPS).in_flight < MAX_OPS
    }

    /// Returns at once whether so many more ops may be in flight. It is true of a client that takes
    /// no more ops: it refuses them at once.
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

    /// How long a sidecar may take to let a rank go: five seconds for ops that the rank has called,
    /// and as long as one that stays until no rank of another host can lack its sums, and its
    /// goodbye.
    pub const LINGER: Duration = Duration::from_secs(13);

    /// Leaves the job: what is in flight ends, if all ranks have called it, or fails. The sidecar
    /// has let the rank go when this returns, and works on none of its memory any more, unless it
    /// is stuck or has more to fold than it can in [`LINGER`](Self::LINGER), or other hosts let it
    /// wait for more than five seconds.
    pub fn close(&self) {
        self.may_leave_within(Self::LINGER);
        self.leave();
    }

    /// Starts no more ops, and waits until the sidecar has let the rank go, but not longer than
    /// this. Returns whether it has.
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

    /// Leaves the job at once: what is in flight fails, though the sidecar may work on it still.
    pub fn leave(&self) {
        self.shared.take_leave(&self.line);
        self.line.hang_up();
        // What has been said and not been heard is of no more use.
        self.shared.end(Over::because("the client was closed"));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
        if let Some(ear) = self.ear.take() {
            // A panic was printed where it happened.
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

/// Why the sidecar at a path was not called.
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
