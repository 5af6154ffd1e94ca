//! The messages of the aggregator half, and their recipients.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;

use super::Aggregation;
use crate::geometry::Fragmentation;
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::{Event, Observer};
use crate::time::Time;
use crate::wire::{Disagreement, Flags, Header, Kind, MissingRanks, NackEntries, NackEntry};

/// The recipient of a [`Transmit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipient {
    /// Every rank, by multicast or with one copy to each.
    All,
    /// One rank.
    Rank(Rank),
}

/// A datagram or a set of fragments to send now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// A datagram, in the first `len` bytes of the buffer passed to [`Aggregation::poll_transmit`].
    Datagram {
        /// The recipient.
        to: Recipient,
        /// The datagram's length, in bytes.
        len: usize,
    },
    /// Fragments of a folded window.
    Result {
        /// The recipient.
        to: Recipient,
        /// The fragments.
        result: ResultFragments,
    },
}

/// Fragments of a folded window; the driver holds their payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResultFragments {
    /// The lane of the stream.
    pub lane: u8,
    /// The slot's number in the lane's pool.
    pub slot: u32,
    /// The length of the whole payload, in bytes.
    pub len: usize,
    /// How the payload is cut into fragments.
    pub cut: Fragmentation,
    /// The mask of the fragments to send.
    pub fragments: u64,
    /// The header of each fragment, except for length and fragment number.
    pub header: Header,
}

/// The messages due to one rank in one lane.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Due {
    /// Whether to request the rank's opens, starting with the first missing one.
    pub(super) open: bool,
    /// An op that the rank waits for and that the lane does not hold, although it has passed the
    /// op's number: ranks may disagree about the op's lane. The rank's opens are requested from
    /// there on.
    pub(super) passed: Option<OpId>,
    /// Whether to request fragments that must have been lost.
    pub(super) fragments: bool,
    /// Whether to send a wait that names the end of the results. The wait arrives behind all
    /// results on the path, so the rank then knows which results it lacks.
    pub(super) sign: bool,
    /// Whether the rank is stalled: it receives nothing. The answer requests all that the rank
    /// owes, or names the ranks that the next window waits for.
    pub(super) stalled: bool,
    /// Whether a datagram from the rank has arrived with a congestion mark that no nack has
    /// reported to the rank yet.
    pub(super) congested: bool,
    /// The failed op to report to the rank.
    pub(super) failed: Option<OpId>,
    queued: bool,
}

/// The fragments of one result that will be sent to a rank again.
#[derive(Debug, Clone, Copy)]
struct Resend {
    lane: u8,
    position: u64,
    fragments: u64,
}

/// The messages that are due. Failures go first, then resends (the ranks take turns), then all
/// others. The number of messages is bounded by the numbers of ranks and lanes.
#[derive(Debug)]
pub(super) struct Queue {
    due: Box<[Due]>,
    world: usize,
    order: VecDeque<(u8, Rank)>,
    /// Resends by rank, so that no rank uses up another rank's capacity.
    resends: Box<[VecDeque<Resend>]>,
    /// The ranks with resends queued, in the order of their turns.
    turns: VecDeque<Rank>,
    /// How many more resends the rank at the front gets before the next rank has its turn.
    turn_left: usize,
    failures: VecDeque<OpId>,
}

impl Queue {
    pub(super) fn new(world: usize, lanes: usize) -> Self {
        let resends = || VecDeque::with_capacity(Self::MAX_RESENDS);
        Self {
            due: vec![Due::default(); world * lanes].into(),
            world,
            order: VecDeque::with_capacity(world * lanes),
            resends: (0..world).map(|_| resends()).collect(),
            turns: VecDeque::with_capacity(world),
            turn_left: 0,
            failures: VecDeque::with_capacity(Self::MAX_FAILURES),
        }
    }

    /// Notes that a message to a rank is due.
    pub(super) fn note(&mut self, lane: u8, rank: Rank, note: impl FnOnce(&mut Due)) {
        let due = &mut self.due[usize::from(lane) * self.world + rank.index()];
        note(due);
        if !due.queued {
            due.queued = true;
            self.order.push_back((lane, rank));
        }
    }

    /// Queues fragments of a result to be sent to a rank again. Returns the mask of the fragments
    /// that this call has queued: at most `most`, and none that were queued before. If the rank's
    /// queue is full, the call queues none. Fragments that are not queued need another nack.
    pub(super) fn resend(
        &mut self,
        lane: u8,
        rank: Rank,
        position: u64,
        fragments: u64,
        most: usize,
    ) -> u64 {
        let resends = &mut self.resends[rank.index()];
        let mut noted = resends.iter_mut();
        if let Some(noted) = noted.find(|noted| (noted.lane, noted.position) == (lane, position)) {
            let more = lowest(fragments & !noted.fragments, most);
            noted.fragments |= more;
            return more;
        }
        let fragments = lowest(fragments, most);
        if fragments == 0 || resends.len() == Self::MAX_RESENDS {
            return 0;
        }
        if resends.is_empty() {
            self.turns.push_back(rank);
        }
        resends.push_back(Resend { lane, position, fragments });
        fragments
    }

    /// Returns the next fragments to send again. Ranks take turns of a few resends each, because
    /// consecutive datagrams to one rank are sent as one batch.
    fn pop_resend(&mut self) -> Option<(Rank, Resend)> {
        let rank = self.turns.pop_front()?;
        let resends = &mut self.resends[rank.index()];
        let resend = resends.pop_front()?;
        self.turn_left = self.turn_left.checked_sub(1).unwrap_or(Self::RESENDS_A_TURN - 1);
        if resends.is_empty() {
            self.turn_left = 0;
        } else if self.turn_left == 0 {
            self.turns.push_back(rank);
        } else {
            self.turns.push_front(rank);
        }
        Some((rank, resend))
    }

    /// Forgets all messages that are due to a rank.
    pub(super) fn forget(&mut self, rank: Rank) {
        for due in self.due.iter_mut().skip(rank.index()).step_by(self.world) {
            *due = Due { queued: due.queued, ..Due::default() };
        }
        self.resends[rank.index()].clear();
        if self.turns.front() == Some(&rank) {
            self.turn_left = 0;
        }
        self.turns.retain(|turn| *turn != rank);
    }

    /// Queues a failure for all ranks. A rank that misses the failure receives it in answer to its
    /// next nack for the op.
    pub(super) fn broadcast_failure(&mut self, op: OpId) {
        if self.failures.len() < Self::MAX_FAILURES {
            self.failures.push_back(op);
        }
    }

    /// Removes and returns the next lane and rank with due messages, and these messages.
    fn pop(&mut self) -> Option<(u8, Rank, Due)> {
        let (lane, rank) = self.order.pop_front()?;
        let due = &mut self.due[usize::from(lane) * self.world + rank.index()];
        Some((lane, rank, core::mem::take(due)))
    }

    const RESENDS_A_TURN: usize = 4;
    const MAX_FAILURES: usize = 64;
    /// The most windows whose results may be queued to be sent again to one rank.
    const MAX_RESENDS: usize = NackEntries::MAX;
}

impl Aggregation {
    /// Returns the next [`Transmit`]. Writes a [`Transmit::Datagram`] into `out`, which must have
    /// room for the job's largest datagram. The driver polls until this method returns `None`.
    pub fn poll_transmit(
        &mut self,
        now: Time,
        out: &mut [u8],
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        // `write_failure` returns `None` for an op that every rank has ended.
        while let Some(op) = self.queue.failures.pop_front() {
            if let Some(transmit) = self.write_failure(op, 0, Recipient::All, out) {
                return Some(transmit);
            }
        }
        if let Some((lane, position)) = self.unsent.pop_front() {
            let slot = self.streams[usize::from(lane)].pool.claim(position);
            slot.sent_at = now;
            self.budgets.note_result(slot.datagrams_len());
            return Some(self.result(lane, position, u64::MAX, Recipient::All));
        }
        while let Some((rank, resend)) = self.queue.pop_resend() {
            if let Some(transmit) = self.resend(now, rank, resend, observer) {
                return Some(transmit);
            }
        }
        while let Some((lane, rank, due)) = self.queue.pop() {
            if let Some(transmit) = self.write_due(now, lane, rank, due, out, observer) {
                return Some(transmit);
            }
        }
        self.write_credit(out)
    }

    /// Sends a result again, unless its slot was freed in the meantime.
    fn resend(
        &mut self,
        now: Time,
        rank: Rank,
        resend: Resend,
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        let Resend { lane, position, fragments } = resend;
        let stream = &mut self.streams[usize::from(lane)];
        stream.folded.binary_search(&position).ok()?;
        stream.note_again(now, rank, position, fragments);
        let window = stream.sequence.window(position);
        observer.on_event(&Event::Again { window, fragments });
        let transmit = self.result(lane, position, fragments, Recipient::Rank(rank));
        Some(transmit)
    }

    fn result(&mut self, lane: u8, position: u64, fragments: u64, to: Recipient) -> Transmit {
        let stream = &mut self.streams[usize::from(lane)];
        let window = stream.sequence.window(position);
        let ack = stream.announce();
        let slot = *stream.pool.claim(position);
        let flags = if to == Recipient::All { Flags::NONE } else { Flags::AGAIN };
        // wire: W-62
        let flags = flags.with(Flags::absent(slot.absent));
        let header = Header {
            mask: slot.union,
            previous: slot.previous,
            window,
            ack,
            flags,
            ..self.header(Kind::Result, lane)
        };
        let result = ResultFragments {
            lane,
            slot: self.streams[usize::from(lane)].pool.number(position),
            len: slot.result_len,
            cut: slot.cut,
            fragments: fragments & slot.cut.all(slot.result_len),
            header,
        };
        Transmit::Result { to, result }
    }

    /// Writes the most urgent message due to a rank, and queues the others again.
    fn write_due(
        &mut self,
        now: Time,
        lane: u8,
        rank: Rank,
        mut due: Due,
        out: &mut [u8],
        observer: &mut impl Observer,
    ) -> Option<Transmit> {
        if let Some(op) = due.failed.take() {
            self.put_off(lane, rank, due);
            return self.write_failure(op, lane, Recipient::Rank(rank), out);
        }
        // Only one nack reports the mark, so messages that are put off until after that nack must
        // not report it again.
        let congested = core::mem::take(&mut due.congested);
        let may_nack = due.open && self.streams[usize::from(lane)].may_nack_open(rank, now);
        due.open = false;
        let passed = due.passed.take().map(|op| WindowId::new(op, 0));
        if may_nack {
            self.put_off(lane, rank, due);
            let unopened = self.streams[usize::from(lane)].unopened(rank);
            let window = passed.map_or(unopened, |passed| passed.min(unopened));
            let entry = core::iter::once(NackEntry { window, fragments: 0 });
            return Some(self.write_nack(lane, rank, congested, entry, out));
        }
        if core::mem::take(&mut due.sign) {
            self.put_off(lane, rank, Due { congested, ..due });
            return Some(self.write_wait(now, lane, rank, out));
        }
        let stream = &self.streams[usize::from(lane)];
        // This stalled rank waits for other ranks. Its own missing data is requested only when the
        // next window waits for that data.
        if due.stalled && !stream.waits_for(rank) {
            self.put_off(lane, rank, Due { congested, ..Due::default() });
            return Some(self.write_wait(now, lane, rank, out));
        }
        let most = NackEntries::room_of(self.budgets.left(now, rank));
        let entries: NackBatch = stream.missing_of(now, rank, due.stalled).take(most).collect();
        self.streams[usize::from(lane)].note_all_nacked(rank);
        if let Some(first) = entries.first() {
            observer.on_event(&Event::Nacked { of: rank, from: first.window, probe: false });
            let stream = &mut self.streams[usize::from(lane)];
            entries.iter().for_each(|entry| stream.note_nacked(now, rank, entry));
        } else if due.stalled {
            self.put_off(lane, rank, Due { congested, ..Due::default() });
            return Some(self.write_wait(now, lane, rank, out));
        } else if !congested {
            return None;
        }
        Some(self.write_nack(lane, rank, congested, entries.iter(), out))
    }

    fn put_off(&mut self, lane: u8, rank: Rank, due: Due) {
        if due.fragments || due.sign || due.stalled || due.congested || due.open {
            self.queue.note(lane, rank, |later| *later = Due { queued: later.queued, ..due });
        }
    }

    fn write_nack(
        &mut self,
        lane: u8,
        rank: Rank,
        congested: bool,
        entries: impl Iterator<Item = NackEntry>,
        out: &mut [u8],
    ) -> Transmit {
        let len = NackEntries::encode(entries, &mut out[Header::LEN..]);
        let flags = if congested { Flags::CONGESTED } else { Flags::NONE };
        let header = Header { flags, ..self.header(Kind::Nack, lane) };
        self.finish(Recipient::Rank(rank), header, len, out)
    }

    /// Writes a wait that names the ranks that the next result waits for. If the result waits for
    /// the parent, these are the ranks that the parent waits for. Otherwise, the wait names its
    /// recipient only if the result waits for no other rank.
    fn write_wait(&mut self, now: Time, lane: u8, rank: Rank, out: &mut [u8]) -> Transmit {
        let most = MissingRanks::room_of(self.budgets.left(now, rank));
        let stream = &self.streams[usize::from(lane)];
        let alone = stream.awaited().all(|awaited| awaited == rank);
        // If the recipient waits for no window, the wait marks no rank as left, since the wait may
        // arrive after a rank that left has rejoined.
        let waits = stream.ranks[rank.index()].opened > stream.next;
        let awaited = stream.awaited().filter(|awaited| alone || *awaited != rank);
        let missing = awaited.flat_map(|awaited| self.awaited_of(now, lane, awaited, waits));
        let parent = stream.awaited_at_parent();
        let here = if parent.is_empty() { usize::MAX } else { 0 };
        let missing = parent.iter().copied().chain(missing.take(here));
        let len = MissingRanks::encode(missing.take(most), &mut out[Header::LEN..]);
        // The header names the end of the results, not the awaited window, since no results exist
        // for the windows in between.
        let window = stream.sequence.window(stream.results_end);
        let header = Header { window, ..self.header(Kind::Wait, lane) };
        self.finish(Recipient::Rank(rank), header, len, out)
    }

    fn write_failure(
        &mut self,
        op: OpId,
        lane: u8,
        to: Recipient,
        out: &mut [u8],
    ) -> Option<Transmit> {
        let disagreement = self.agreement.disagreement(op)?;
        let named = self.agreement.failed_elsewhere(op);
        let disagreement = if named { disagreement } else { self.named(disagreement) };
        disagreement.encode(out[Header::LEN..].first_chunk_mut()?);
        let header = Header { window: WindowId::new(op, 0), ..self.header(Kind::Fail, lane) };
        Some(self.finish(to, header, Disagreement::LEN, out))
    }

    /// Writes the next credit that is due and that no result can carry (wire: W-33, W-56).
    fn write_credit(&mut self, out: &mut [u8]) -> Option<Transmit> {
        let streams = (0..self.config.lanes).zip(&mut self.streams);
        let mut due = streams.filter_map(|(lane, stream)| Some((lane, stream.poll_credit()?)));
        let (lane, window) = due.next()?;
        let header = Header { window, ..self.header(Kind::Credit, lane) };
        Some(self.finish(Recipient::All, header, 0, out))
    }

    /// Writes the header in front of a body of `len` bytes. If the recipient is one rank, deducts
    /// the message from the rank's budget.
    fn finish(&mut self, to: Recipient, header: Header, len: usize, out: &mut [u8]) -> Transmit {
        let ack = self.streams[usize::from(header.lane)].announce();
        let length = u16::try_from(len).unwrap_or(u16::MAX);
        if let Some(place) = out.first_chunk_mut() {
            Header { ack, length, ..header }.encode(place);
        }
        if let Recipient::Rank(rank) = to {
            self.budgets.spend(rank, Header::LEN + len);
        }
        Transmit::Datagram { to, len: Header::LEN + len }
    }

    fn header(&self, kind: Kind, lane: u8) -> Header {
        Header {
            kind,
            job: self.config.job,
            generation: self.config.generation,
            sender: Rank::AGGREGATOR,
            lane,
            shard: self.config.shard,
            window: WindowId::new(OpId(0), 0),
            ack: WindowId::new(OpId(0), 0),
            mask: 0,
            previous: 0,
            length: 0,
            fragment: 0,
            flags: Flags::NONE,
        }
    }
}

/// Returns the lowest set bits of `fragments`, at most `most` of them.
fn lowest(fragments: u64, most: usize) -> u64 {
    let beyond = (0..most).try_fold(fragments, |left, _| (left != 0).then(|| left & (left - 1)));
    fragments & !beyond.unwrap_or(0)
}

/// The entries of one nack, gathered before the stream is changed.
struct NackBatch {
    entries: [NackEntry; NackEntries::MAX],
    len: usize,
}

impl NackBatch {
    fn first(&self) -> Option<NackEntry> {
        self.iter().next()
    }

    fn iter(&self) -> impl Iterator<Item = NackEntry> + '_ {
        self.entries[..self.len].iter().copied()
    }
}

impl FromIterator<NackEntry> for NackBatch {
    fn from_iter<T: IntoIterator<Item = NackEntry>>(iter: T) -> Self {
        let none = NackEntry { window: WindowId::new(OpId(0), 0), fragments: 0 };
        let mut batch = Self { entries: [none; NackEntries::MAX], len: 0 };
        for (place, entry) in batch.entries.iter_mut().zip(iter) {
            *place = entry;
            batch.len += 1;
        }
        batch
    }
}
