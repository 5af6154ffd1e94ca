//! A rank's membership in a job through the sidecar of its host.

mod flights;

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_net::local::{CallError, Line};
use racksum_proto::call::Call;
use racksum_proto::control::MAX_OPS;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::WireType;
use racksum_proto::error::SubmitError;
use racksum_proto::ids::OpId;
use racksum_proto::rank_list::named;
use racksum_proto::stats::{SidecarStats, Stats};

use self::flights::{CHECK_INTERVAL, Flight, Flights, Over, State};
use super::error_map::millis;
use super::lent::{Copier, Lent};
use super::message::{Called, FromRank, Join, ListAt, VERSION};
use super::sums::Sums;
use crate::blocks::Blocks;
use crate::control::Mailbox;
use crate::error::{ConnectError, Error};
use crate::join::check_name;
use crate::operand::{Operand, check_len};
use crate::options::ConnectOptions;
use crate::span::span;
use crate::tensor::Region;
use crate::transport::{GONE, Grant, LentMemory, Reduced, StatsQuery, Transport};

/// How long to wait before offering a message again after the sidecar's queue was full.
const FULL: Duration = Duration::from_millis(20);

/// How much longer than the op timeout a sidecar may take to end an op. The sidecar applies the op
/// timeout itself.
const MARGIN: Duration = Duration::from_secs(5);

/// How long to wait between calls to an unreachable sidecar, and between checks whether the attempt
/// to join was cancelled.
const SLICE: Duration = Duration::from_millis(50);

/// How long a sidecar may take to release a rank whose attempt to join has failed.
const PARTING: Duration = Duration::from_secs(1);

/// How long a sidecar may take to release a rank. This allows the sidecar to wait five seconds for
/// the rank's ops, to resend sums that ranks of other hosts may lack, and to send the last message.
const LINGER: Duration = Duration::from_secs(13);

/// The transport of a rank that shares memory with the sidecar of its host.
#[derive(Debug)]
pub(crate) struct UnixTransport {
    pub(super) line: Arc<Line>,
    lanes: u8,
    flights: Arc<Flights>,
    copier: Copier,
    /// Held while an op is numbered and sent, so that ops are sent in the order of their numbers.
    order: Mutex<()>,
    /// The thread that receives messages from the sidecar.
    receiver: Option<JoinHandle<()>>,
}

/// The location of an op's operand in lent memory.
struct Handed {
    /// The lent memory that holds a copy of the operand, if the operand lies in private memory.
    copy: Option<Arc<Lent>>,
    memory: u32,
    at: u64,
    list: Option<ListAt>,
    /// The number of bytes that the operand occupies.
    len: usize,
}

impl UnixTransport {
    /// Joins a job through the sidecar at `path`, and returns once all ranks have joined. While no
    /// sidecar listens there, retries until `join_timeout` expires, because the sidecar may be
    /// about to start.
    pub(crate) fn join(
        path: &Path,
        options: &ConnectOptions,
        mailbox: &mut Mailbox,
    ) -> Result<Self, ConnectError> {
        mailbox.awaited.set(format!("the sidecar at {}", path.display()));
        let clock = Clock::start();
        let deadline = clock.now() + span(options.join_timeout);
        let mut is_absent = false;
        let transport = loop {
            match Self::call(path, options) {
                Ok(transport) => break transport,
                Err(error) if error.may_pass() => {
                    if !is_absent {
                        tracing::warn!("{error}; retrying until join_timeout expires");
                    }
                    if clock.now() >= deadline {
                        return Err(error);
                    }
                    is_absent = true;
                }
                Err(error) => return Err(error),
            }
            mailbox.pause(SLICE);
            if mailbox.closed.is_some() {
                return Err(ConnectError::GivenUp);
            }
        };
        let failed = loop {
            match transport.is_ready_within(SLICE) {
                Ok(true) => return Ok(transport),
                Ok(false) => {}
                Err(error) => break error,
            }
            mailbox.recv(Some(Duration::ZERO));
            if mailbox.closed.is_some() {
                break ConnectError::GivenUp;
            }
            let missing = transport.missing();
            if clock.now() >= deadline {
                let (waited, elsewhere) = (options.join_timeout, String::new());
                break ConnectError::Incomplete { missing, waited, elsewhere };
            }
            if !missing.is_empty() {
                mailbox.awaited.set(named(missing));
            }
        };
        // A working sidecar frees the rank's place within this time. Do not wait longer for a stuck
        // sidecar.
        transport.may_leave_within(PARTING);
        transport.leave();
        Err(failed)
    }

    /// Calls the sidecar at `path`, and asks to join as a rank.
    pub(super) fn call(path: &Path, options: &ConnectOptions) -> Result<Self, ConnectError> {
        check_name(options)?;
        if path.as_os_str().is_empty() {
            let why = "unix: has no path; pass unix:PATH with the path of `racksum worker \
                       --socket`";
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
            local_world: options.local_world.unwrap_or(options.world),
            lanes: options.lanes,
            join_timeout: millis(options.join_timeout),
            op_timeout: millis(options.op_timeout),
        };
        let (flights, copier) = (Arc::new(Flights::default()), Copier::start()?);
        line.set_patience(Some(CHECK_INTERVAL))?;
        let limit = options.op_timeout.saturating_add(MARGIN);
        let (receives, from, at) = (Arc::clone(&flights), Arc::clone(&line), path.to_owned());
        let receive = move || receives.receive(&from, &at, limit);
        let name = "racksum-receive".into();
        let receiver = Some(std::thread::Builder::new().name(name).spawn(receive)?);
        let (lanes, order) = (options.lanes, Mutex::default());
        let transport = Self { line, lanes, flights, copier, order, receiver };
        let sent = transport.line.send(&FromRank::Join(join), None);
        sent.map_err(|error| ConnectError::NoSidecar {
            path: path.to_owned(),
            why: error.to_string(),
            absent: false,
        })?;
        Ok(transport)
    }

    /// Waits up to `limit` for all ranks to join, and returns whether they have joined.
    ///
    /// # Errors
    /// Returns the reason why the job cannot be joined.
    pub(super) fn is_ready_within(&self, limit: Duration) -> Result<bool, ConnectError> {
        let waits = |state: &mut State| !state.began && state.refused.is_none();
        let mut state = self.flights.wait(limit, waits);
        match state.refused.take() {
            Some(refused) => Err(refused),
            None => Ok(state.began),
        }
    }

    /// Returns the ranks that had not joined at the sidecar's last report.
    pub(super) fn missing(&self) -> Vec<u16> {
        self.flights.lock().waiting.clone()
    }

    fn refuse_in_order(&self, call: Call) -> Result<(), Error> {
        // wire: W-70
        let nothing = Flight::new(Operand::Tensor(Vec::new()), None);
        let op = self.flights.lock().take_off(nothing, 0)?;
        let Called { descriptor, .. } = Called::new(0, &Descriptor::refused(call));
        // Ignore a failed send: the receiving thread detects that the line has failed.
        drop(self.line.send(&FromRank::Refuse { descriptor }, None));
        self.flights.abandon(op);
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
        self.flights.lock().check()?;
        self.is_free_within(&operand.extent(), Duration::MAX);
        let handed = match &mut operand {
            Operand::Blocks(blocks) => self.hand_blocks(std::mem::take(blocks), descriptor)?,
            tensor => self.hand_tensor(tensor, descriptor)?,
        };
        self.start(operand, handed, descriptor)
    }

    /// Finds a tensor in lent memory, or copies it there.
    fn hand_tensor(&self, tensor: &Operand, descriptor: &Descriptor) -> Result<Handed, Error> {
        check_len(tensor.len(), descriptor)?;
        let (len, list) = (tensor.len(), None);
        let extent = tensor.region().map(Region::extent);
        if let Some((lent, at)) = extent.and_then(|extent| self.flights.lent.find(&extent)) {
            return Ok(Handed { copy: None, memory: lent.id(), at: at as u64, list, len });
        }
        let copy = self.spare(len)?;
        copy.fill(tensor.bytes(), &self.copier);
        Ok(Handed { memory: copy.id(), copy: Some(copy), at: 0, list, len })
    }

    /// Copies the non-zero blocks to lent memory. The indices follow the values. The space for the
    /// values is large enough for all listed blocks, including those that are zero.
    fn hand_blocks(&self, blocks: Blocks, descriptor: &Descriptor) -> Result<Handed, Error> {
        let mut blocks = blocks.sorted(descriptor)?;
        let at = blocks.values.len().next_multiple_of(size_of::<u32>());
        let room = at + blocks.indices.len() * size_of::<u32>();
        // Lists differ in size from op to op, so round up to make the memory reusable for later
        // lists.
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

    /// Returns lent memory for a copy of `len` bytes. Takes spare memory, or lends new memory if no
    /// spare memory is large enough.
    fn spare(&self, len: usize) -> Result<Arc<Lent>, Error> {
        let mut state = self.flights.lock();
        if let Some(spare) = state.take_spare(len) {
            return Ok(spare);
        }
        // All spare memory is too small, so take it back: if tensors grow, it would never be used
        // again.
        let small = std::mem::take(&mut state.spare);
        drop(state);
        drop(small);
        let lent = self.lend(len);
        lent.map_err(|why| Error::Memory(why.to_string()))
    }

    fn start(
        &self,
        operand: Operand,
        handed: Handed,
        descriptor: &Descriptor,
    ) -> Result<u32, Error> {
        let Handed { copy, memory, at, list, len } = handed;
        let op = self.flights.lock().take_off(Flight::new(operand, copy), len)?;
        let Called { descriptor, .. } = Called::new(0, descriptor);
        // Send without holding the lock of the state, because the send may wait for a sidecar that
        // does not read. Ignore a failed send: the receiving thread detects that the line has
        // failed.
        drop(self.line.send(&FromRank::Submit { descriptor, memory, at, list }, None));
        Ok(op)
    }

    /// Reads the sums of lists, into recycled memory if there is any.
    fn read(&self, sums: &Sums) -> Result<Blocks, Error> {
        let memory = self.flights.lock().recycled.take().unwrap_or_default();
        let blocks = sums.read(memory).map_err(|error| Error::Memory(error.to_string()))?;
        self.flights.lock().stats.copied_bytes += blocks.values.len() as u64;
        Ok(blocks)
    }

    /// Lends `len` bytes of new memory to the sidecar, and waits until the sidecar accepts it.
    pub(super) fn lend(&self, len: usize) -> io::Result<Arc<Lent>> {
        let lent = self.flights.lent.lend(len, &self.line)?;
        let taken = self.is_taken_within(&*lent, SIDECAR_TIMEOUT);
        taken.unwrap_or_else(|| Err(unanswered()))?;
        Ok(lent)
    }
}

impl Transport for UnixTransport {
    /// Returns the limits of the rank itself. The sidecar does not report the grant of the
    /// aggregator.
    fn grant(&self) -> Grant {
        let (max_ops, first_op, multicast) = (MAX_OPS, OpId(0), false);
        Grant { max_ops, first_op, shards: 0, multicast, pool_slots: 0, fragment_payload: 0 }
    }

    fn submit(&self, operand: Operand, descriptor: Descriptor) -> Result<OpId, Error> {
        let _order = self.take_order();
        match self.submit_in_order(operand, &descriptor) {
            Err(error) if error.is_refusal() => {
                self.refuse_in_order(descriptor.call)?;
                Err(error)
            }
            started => Ok(OpId(started?)),
        }
    }

    fn finish(&self, op: OpId) -> Result<Reduced<Operand>, Error> {
        let mut state = self.flights.wait(Duration::MAX, |state| !state.has_ended(op.0));
        // Keep the rest of the flight until the op is abandoned, so that no other op uses the
        // tensor.
        let landed = state.flights.get_mut(&op.0).and_then(Flight::unload);
        drop(state);
        let (mut operand, copy, outcome) = landed.ok_or(GONE)?;
        let sums = outcome?;
        match (&mut operand, &copy, sums) {
            (Operand::Blocks(blocks), _, Some(sums)) => *blocks = self.read(&sums)?,
            (Operand::Blocks(_), ..) => return Err(flights::strange().into()),
            (tensor, Some(copy), _) => {
                copy.read_with(&self.copier, tensor.bytes_mut());
                self.flights.lock().stats.copied_bytes += tensor.len() as u64;
            }
            (_, None, _) => {}
        }
        self.flights.lock().spare.extend(copy);
        Ok(Reduced { tensor: operand, absent: Vec::new() })
    }

    fn abandon(&self, op: OpId) {
        self.flights.abandon(op.0);
    }

    fn refuse(&self, call: Call) -> Result<(), Error> {
        let _order = self.take_order();
        self.refuse_in_order(call)
    }

    fn ends_within(&self, op: OpId, limit: Duration) -> bool {
        self.flights.wait(limit, |state| !state.has_ended(op.0)).has_ended(op.0)
    }

    fn poll_ended(&self, op: OpId, waker: &Waker) -> bool {
        self.flights.lock().poll_ended(op.0, waker)
    }

    fn is_free_within(&self, extent: &Range<usize>, limit: Duration) -> bool {
        let mut state = self.flights.wait(limit, |state| state.is_working_on(extent));
        // Sums that are still in copies must reach their tensors before the next op reads the
        // tensors.
        state.deliver_to(extent);
        !state.is_working_on(extent)
    }

    fn has_room_within(&self, _lane: u8, limit: Duration) -> bool {
        self.flights.wait(limit, |state| state.in_flight >= MAX_OPS).in_flight < MAX_OPS
    }

    fn has_room_for(&self, _lane: u8, ops: usize) -> bool {
        self.flights.lock().has_room_for(ops)
    }

    /// Returns false, because `submit` does not wait for the other ranks. Only the sidecar does.
    fn must_agree(&self, _wire: WireType) -> bool {
        false
    }

    fn recycle(&self, blocks: Blocks) {
        self.flights.lock().recycled = Some(blocks.values);
    }

    fn offer(&self, len: usize) -> io::Result<Option<Arc<dyn LentMemory>>> {
        Ok(Some(self.flights.lent.lend(len, &self.line)?))
    }

    fn is_taken_within(&self, lent: &dyn LentMemory, limit: Duration) -> Option<io::Result<()>> {
        let waits = |state: &mut State| !state.answered.contains_key(&lent.id()) && !state.gone;
        let mut state = self.flights.wait(limit, waits);
        match state.answered.remove(&lent.id()) {
            Some(Some(refused)) => Some(Err(io::Error::other(refused))),
            Some(None) => Some(Ok(())),
            // A sidecar that closed the line will not map the memory, so do not wait for its
            // answer.
            None => state.gone.then_some(Ok(())),
        }
    }

    fn stats(&self) -> Stats {
        self.flights.lock().network
    }

    fn refreshes_stats_within(&self, query: &mut StatsQuery, limit: Duration) -> bool {
        if query.number.is_none() {
            query.number = self.flights.ask_stats(&self.line);
        }
        let Some(number) = query.number else {
            // The sidecar's queue is full, so ask again later.
            std::thread::sleep(limit.min(FULL));
            return false;
        };
        let has_answer = |state: &State| state.stats_answered >= number || state.gone;
        has_answer(&self.flights.wait(limit, |state| !has_answer(state)))
    }

    fn sidecar_stats(&self) -> SidecarStats {
        self.flights.lock().stats
    }

    fn is_over(&self) -> bool {
        self.flights.lock().over.is_some()
    }

    fn linger(&self) -> Duration {
        LINGER
    }

    fn may_leave_within(&self, limit: Duration) -> bool {
        let clock = Clock::start();
        let began = clock.now();
        loop {
            let left = limit.saturating_sub(Duration::from_nanos(clock.now().since(began).0));
            let was_sent = self.flights.take_leave(&self.line);
            let slice = if was_sent { left } else { left.min(FULL) };
            let is_gone = self.flights.wait(slice, |state| !state.gone).gone;
            if is_gone || slice == left {
                return is_gone;
            }
        }
    }

    fn leave(&self) {
        self.flights.take_leave(&self.line);
        self.line.hang_up();
        // Unread messages no longer matter, so the ops in flight end here.
        self.flights.end(Over::because("the client was closed"));
    }

    /// Returns true, because the sidecar reads a queued message even after this process has ended.
    fn has_left_within(&self, _limit: Duration) -> bool {
        true
    }
}

impl Drop for UnixTransport {
    fn drop(&mut self) {
        self.close();
        if let Some(receiver) = self.receiver.take() {
            // If the thread panicked, the panic hook has already printed the message.
            drop(receiver.join());
        }
    }
}

/// How long a sidecar may take to answer.
pub(crate) const SIDECAR_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the error for a sidecar that has not answered in time.
pub(crate) fn unanswered() -> io::Error {
    let why = format!(
        "no answer from the sidecar within {} s; its process may be suspended",
        SIDECAR_TIMEOUT.as_secs()
    );
    io::Error::new(io::ErrorKind::TimedOut, why)
}

/// Returns the error for a failed call to the sidecar at `path`.
fn not_called(path: &Path, error: CallError) -> ConnectError {
    let (path, absent) = (path.to_owned(), error.is_absence());
    match error {
        CallError::Untrusted(why) => ConnectError::UntrustedSidecar { path, why },
        CallError::NoSocket => {
            let path = path.display();
            ConnectError::of_aggregators(format!(
                "unix:{path} is not a socket; pass unix:PATH with the path of `racksum worker \
                 --socket`"
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
        let error =
            UnixTransport::call(Path::new(""), &ConnectOptions::new("", "job")).unwrap_err();
        assert!(error.is_usage() && !error.may_pass(), "{error}");
        assert!(error.to_string().contains("unix: has no path"), "{error}");
    }

    #[test]
    fn a_path_that_is_no_socket_is_refused_at_once() {
        let call = UnixTransport::call(&std::env::temp_dir(), &ConnectOptions::new("", "job"));
        let error = call.unwrap_err();
        assert!(error.is_usage() && !error.may_pass(), "{error}");
        assert!(error.to_string().contains("is not a socket"), "{error}");
    }

    #[test]
    fn a_sidecar_that_is_not_believed_is_told_from_one_that_may_not_be_called() {
        let path = Path::new("/tmp/socket");
        let why = "a process of user 1234 listens there";
        let error = not_called(path, CallError::Untrusted(why.into()));
        assert_eq!(error.to_string(), format!("the sidecar at /tmp/socket is not trusted: {why}"));
        assert!(!error.may_pass());
        let of_kind = |kind| not_called(path, io::Error::from(kind).into());
        let closed = of_kind(io::ErrorKind::PermissionDenied);
        assert!(matches!(closed, ConnectError::NoSidecar { absent: false, .. }));
        assert!(of_kind(io::ErrorKind::ConnectionRefused).may_pass());
    }
}
