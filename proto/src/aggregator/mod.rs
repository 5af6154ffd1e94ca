//! The aggregator half of the sliding-window sum: one [`Aggregation`] per job and shard.
//!
//! The machine decides; the driver owns the bytes. For each message, the driver calls
//! [`Aggregation::handle_decoded`] and stores the payload where the verdict says. Then it polls two
//! methods until both return `None`. For each window from [`Aggregation::poll_fold`], it folds the
//! window and calls [`Aggregation::handle_folded`]. For each transmit from
//! [`Aggregation::poll_transmit`], it sends the datagrams. It reports each failed op from
//! [`Aggregation::poll_failed`] to the aggregator's other shards. The machine has no timers: a
//! worker that receives nothing sends a nack. The answer requests missing data from that worker, or
//! names the ranks that the next result waits for.

mod agreement;
mod budget;
mod config;
mod failures;
mod nacks;
mod occupancy;
mod opens;
mod parent;
mod pool;
mod report;
mod stream;
mod transmit;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use agreement::Agreement;
use budget::Budgets;
pub use config::Config;
pub use failures::Failed;
use occupancy::Occupancy;
use pool::Pool;
pub use report::RankProgress;
use stream::{Ready, Stored, Stream};
use transmit::Queue;
pub use transmit::{Recipient, ResultFragments, Transmit};

use crate::congestion::Congestion;
use crate::descriptor::Descriptor;
use crate::geometry::{Fragmentation, Geometry, WINDOW_BYTES};
use crate::ids::{OpId, Rank, WindowId};
use crate::observer::{Event, Observer};
use crate::reject::Reject;
use crate::sequence::Sequence;
use crate::time::Time;
use crate::verdict::Verdict;
use crate::waited::Waited;
use crate::wire::{Flags, Header, Kind, OpenDecoder};

/// The place of a fragment in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentPlace {
    /// The lane of the stream.
    pub lane: u8,
    /// The slot's number in the lane's pool.
    pub slot: u32,
    /// The contributor: a rank, or the number that stands for the parent.
    pub rank: Rank,
    /// The fragment's number within the contribution, from 0.
    pub fragment: u8,
    /// The number of fragments in the whole contribution.
    pub fragments: u8,
    /// How the contribution is cut into fragments.
    pub cut: Fragmentation,
}

/// A window for which all owed contributions, or the parent's result, have arrived. The driver
/// folds contributions in rank order.
#[derive(Debug, Clone, Copy)]
pub struct CompleteWindow {
    /// The lane of the stream.
    pub lane: u8,
    /// The slot's number in the lane's pool.
    pub slot: u32,
    /// The window.
    pub window: WindowId,
    /// The op's geometry.
    pub geometry: Geometry,
    /// The descriptor that the ranks agreed on. If the window goes to the parent, an average is
    /// replaced by a sum, since only the root divides.
    pub descriptor: Descriptor,
    /// The mask of the blocks that at least one rank contributes.
    pub union: u64,
    /// The length of the result's payload, in bytes.
    pub len: usize,
    /// How the result's payload is cut into fragments.
    pub cut: Fragmentation,
    /// How many ranks take part: the world minus the lost ranks.
    pub ranks: u16,
    /// The divisor of an average: how many workers the sum covers.
    pub weight: u16,
    /// The contributor, if any, whose contribution is already the sum, byte for byte: a rank, or
    /// the number that stands for the parent.
    pub whole: Option<Rank>,
    /// Whether the sum goes to the parent and is not a result yet.
    pub for_parent: bool,
    ready: Ready,
}

impl CompleteWindow {
    /// Returns how many ranks contribute to the window.
    #[must_use]
    pub const fn contributors(&self) -> usize {
        self.ready.contributors as usize
    }
}

/// The minimum of the congestion window for results, in bytes. A large minimum is needed because,
/// with few results in flight, a rank would detect the loss of the newest result late. It is safe
/// because results are sent no faster than the data for them arrives, and ranks wait for each
/// other.
const LEAST_RESULTS: usize = 8 * WINDOW_BYTES;

/// The aggregator half of the protocol, for one job at one shard.
#[derive(Debug)]
pub struct Aggregation {
    config: Config,
    agreement: Agreement,
    opens: OpenDecoder,
    streams: Box<[Stream]>,
    /// The arrival time of the last datagram from each rank.
    last_received: Box<[Time]>,
    /// Whether each rank has left or, for a child aggregator, whether one of its workers has left.
    left: Box<[bool]>,
    /// The lost ranks, in the order in which the job lost them.
    gone: Vec<Rank>,
    queue: Queue,
    /// How many bytes of answers may be sent to each rank.
    budgets: Budgets,
    /// The number that identifies each rank in wait and fail messages; see [`Self::set_name`].
    names: Box<[Rank]>,
    /// The ranks that each child aggregator waits for, as last reported, by lane and child.
    below: Box<[Waited]>,
    /// Failed ops to report to the other shards and to the parent.
    failed: VecDeque<Failed>,
    /// The lane and the position of each window whose result [`Self::poll_transmit`] has not
    /// returned yet.
    unsent: VecDeque<(u8, u64)>,
}

impl Aggregation {
    /// Creates the aggregator half for a job that starts at `now`. Allocates all memory up front,
    /// with two exceptions: the list of failures to report and, in a tree of aggregators, the list
    /// of ranks that the parent waits for.
    #[must_use]
    pub fn new(config: Config, now: Time) -> Self {
        let world = usize::from(config.world);
        let first_op = config.moved_at.unwrap_or(OpId(0));
        let slots = config.pool_slots.max(1) as usize;
        // This number leaves room for the ops whose opens are accepted; for the folded ops, each of
        // which has a result in a slot; and for the last op, which stays even if it failed.
        let max_ops = Agreement::span(config.max_ops, config.shards) + slots + 1;
        // If more results were in flight than the ranks can buffer, the excess would be lost.
        let max_results = config.results_in_flight.min(slots * WINDOW_BYTES);
        let results = Congestion::new(LEAST_RESULTS, max_results);
        let stream = || {
            // The parent's results are stored like the contribution of one more rank.
            let pool = Pool::new(slots, world + usize::from(config.has_parent), config.cut);
            let occupancy = Occupancy::new(world, config.moved_at.is_some());
            Stream::new(pool, occupancy, Sequence::new(max_ops, first_op), results, config)
        };
        let has_racks = config.weight.is_some();
        let below = if has_racks { world * usize::from(config.lanes) } else { 0 };
        let streams: Vec<_> = (0..config.lanes).map(|_| stream()).collect();
        Self {
            agreement: Agreement::new(world, config.max_ops, config.shards, first_op),
            opens: OpenDecoder::new(),
            last_received: vec![now; world].into(),
            left: vec![false; world].into(),
            gone: Vec::with_capacity(Flags::MAX_ABSENT),
            names: (0..config.world).map(Rank).collect(),
            below: (0..below).map(|_| Waited::new()).collect(),
            failed: VecDeque::new(),
            queue: Queue::new(world, usize::from(config.lanes)),
            budgets: Budgets::new(world, usize::from(config.lanes) * max_results, now),
            unsent: VecDeque::with_capacity(streams.len() * slots),
            streams: streams.into(),
            config,
        }
    }

    /// Returns the configuration.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Sets the number that identifies a rank in wait and fail messages: its number in the whole
    /// job or, for a child aggregator, the smallest number of its ranks.
    pub fn set_name(&mut self, rank: Rank, name: Rank) {
        if let Some(place) = self.names.get_mut(rank.index()) {
            *place = name;
        }
    }

    /// Returns the largest backlog of any stream: the number of windows that some rank has opened
    /// and that are not folded yet.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        self.streams.iter().map(Stream::backlog).max().unwrap_or(0)
    }

    /// Estimates how many bytes of results are still to come in each stream, and returns the
    /// largest estimate.
    #[must_use]
    pub fn backlog_bytes(&self) -> u64 {
        self.streams.iter().map(Stream::backlog_bytes).max().unwrap_or(0)
    }

    /// Handles a datagram that holds one message. `congested` says whether the datagram carried an
    /// ECN congestion mark.
    pub fn handle_datagram(
        &mut self,
        now: Time,
        datagram: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict<FragmentPlace> {
        match Header::decode(datagram) {
            Ok((header, body)) => self.handle_decoded(now, &header, body, congested, observer),
            Err(reject) => rejected(reject, observer),
        }
    }

    /// Handles one message of a datagram. The driver has already decoded the header to find the
    /// job.
    pub fn handle_decoded(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict<FragmentPlace> {
        match self.handle(now, header, body, congested, observer) {
            Verdict::Reject(reject) => rejected(reject, observer),
            verdict @ (Verdict::Store(_) | Verdict::Duplicate | Verdict::Control) => verdict,
        }
    }

    /// Notes that a rank has left: it needs no more results and sends nothing more.
    pub fn handle_left(&mut self, rank: Rank, observer: &mut impl Observer) {
        if let Some(left) = self.left.get_mut(rank.index()) {
            *left = true;
        }
        for lane in 0..self.config.lanes {
            self.streams[usize::from(lane)].handle_left(rank);
            self.retire(lane, observer);
        }
    }

    /// Notes the return of a rank that had left between two ops.
    pub fn handle_rejoined(&mut self, now: Time, rank: Rank) {
        if let Some(left) = self.left.get_mut(rank.index()) {
            *left = false;
            self.last_received[rank.index()] = now;
            self.streams.iter_mut().for_each(|stream| stream.handle_rejoined(rank));
        }
    }

    /// Continues without a lost rank. Windows that are not folded yet are folded without the rank's
    /// contribution, and the rank's messages are rejected from now on. A job can lose at most
    /// [`Flags::MAX_ABSENT`] ranks.
    pub fn handle_gone(&mut self, rank: Rank, observer: &mut impl Observer) {
        let last = self.gone.len() + 1 >= usize::from(self.config.world);
        if rank.0 >= self.config.world || self.gone.contains(&rank) || last {
            // Ignore the loss of the last remaining rank: no other rank could use the results.
            return;
        }
        debug_assert!(
            self.gone.len() < Flags::MAX_ABSENT,
            "the driver must end a job that loses more than `Flags::MAX_ABSENT` ranks"
        );
        self.gone.push(rank);
        self.queue.forget(rank);
        self.note_reached(rank, OpId(u32::MAX));
        for lane in 0..self.config.lanes {
            self.streams[usize::from(lane)].handle_gone(rank);
            self.retire(lane, observer);
        }
    }

    fn handle(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) -> Verdict<FragmentPlace> {
        let has_racks = self.config.weight.is_some();
        let checked = self.check_identity(header);
        if let Err(reject) = checked.and_then(|()| check_kind(header, body, has_racks)) {
            return Verdict::Reject(reject);
        }
        let lane = header.lane;
        let rank = header.sender;
        self.last_received[rank.index()] = now;
        if congested {
            self.queue.note(lane, rank, |due| due.congested = true);
        }
        let stream = &mut self.streams[usize::from(lane)];
        if header.flags.has(Flags::CONGESTED) {
            stream.results.on_congested();
        }
        stream.handle_ack(now, rank, header.ack);
        if header.kind != Kind::Data {
            self.budgets.note_message(rank, Header::LEN + body.len());
        }
        self.retire(lane, observer);
        match header.kind {
            Kind::Data => self.handle_data(now, header, body, observer),
            Kind::Open => control_verdict(self.handle_open(header, body, observer)),
            Kind::Nack => control_verdict(self.handle_nack(now, header, body)),
            Kind::Fail => control_verdict(self.handle_failure(header, body, observer)),
            Kind::Wait => control_verdict(self.handle_waits_below(now, header, body)),
            _ => Verdict::Control,
        }
    }

    /// Checks that a message comes from one of this job's ranks and belongs to one of the job's
    /// streams.
    fn check_identity(&self, header: &Header) -> Result<(), Reject> {
        // wire: W-7
        if header.job != self.config.job {
            return Err(Reject::Job);
        }
        // wire: W-8
        if header.generation != self.config.generation {
            return Err(Reject::Generation);
        }
        // wire: W-9
        if header.sender.0 >= self.config.world || self.gone.contains(&header.sender) {
            return Err(Reject::Sender);
        }
        // wire: W-10
        if header.lane >= self.config.lanes || header.shard != self.config.shard {
            return Err(Reject::Stream);
        }
        Ok(())
    }

    /// Frees the slots and ops that every rank is done with.
    fn retire(&mut self, lane: u8, observer: &mut impl Observer) {
        let stream = &mut self.streams[usize::from(lane)];
        while let Some(window) = stream.retire() {
            observer.on_event(&Event::Retired { window });
        }
        while stream.settle() {}
    }

    fn handle_data(
        &mut self,
        now: Time,
        header: &Header,
        body: &[u8],
        observer: &mut impl Observer,
    ) -> Verdict<FragmentPlace> {
        let (lane, rank) = (header.lane, header.sender);
        let stream = &mut self.streams[usize::from(lane)];
        let op = header.window.op;
        let Some(entry) = stream.sequence.get(op).copied() else {
            let ended = stream.sequence.is_settled(op) || self.agreement.is_past(op);
            if ended || self.agreement.disagreement(op).is_some() {
                return Verdict::Reject(Reject::Stale);
            }
            self.queue.note(lane, rank, |due| due.open = true);
            return Verdict::Reject(Reject::Unopened);
        };
        if entry.failed {
            return Verdict::Reject(Reject::Stale);
        }
        let (len, cut) = match self.config.check_shape(header, body, &entry.geometry) {
            Ok(shape) => shape,
            Err(reject) => return Verdict::Reject(reject),
        };
        let Some(position) = stream.sequence.position(header.window) else {
            return Verdict::Reject(Reject::Stream);
        };
        let stored = stream.handle_fragment(now, rank, position, header, (len, cut.all(len)));
        let needless = matches!(stored, Ok(Stored::Duplicate) | Err(Reject::Stale));
        if needless && header.flags.has(Flags::AGAIN) {
            stream.note_needless(now, rank);
        }
        let place = |slot| {
            let fragment = header.fragment;
            let fragments = u8::try_from(cut.count(len)).unwrap_or(u8::MAX);
            Verdict::Store(FragmentPlace { lane, slot, rank, fragment, fragments, cut })
        };
        match stored {
            Ok(Stored::New(slot)) => place(slot),
            Ok(Stored::Gap(slot)) => {
                self.queue.note(lane, rank, |due| due.fragments = true);
                place(slot)
            }
            Ok(Stored::Duplicate) => {
                let (window, fragment) = (header.window, header.fragment);
                observer.on_event(&Event::Duplicate { from: rank, window, fragment });
                Verdict::Duplicate
            }
            Err(Reject::Unopened) => {
                self.queue.note(lane, rank, |due| due.open = true);
                Verdict::Reject(Reject::Unopened)
            }
            Err(reject) => Verdict::Reject(reject),
        }
    }

    /// Returns the next window to fold. Lanes are polled in priority order.
    pub fn poll_fold(&mut self) -> Option<CompleteWindow> {
        let gone = u16::try_from(self.gone.len()).unwrap_or(0);
        let (ranks, weight) = (self.config.world - gone, self.config.weight());
        (0..self.config.lanes).zip(&mut self.streams).find_map(|(lane, stream)| {
            let ready = stream.poll_ready()?;
            let window = ready.entry.window(ready.position);
            let geometry = ready.entry.geometry;
            let len = geometry.payload_len(window.index, ready.union);
            let for_parent = stream.at_parent.is_some() && ready.whole != Some(stream.parent());
            let descriptor = self.agreement.descriptor(window.op)?;
            Some(CompleteWindow {
                lane,
                slot: stream.pool.number(ready.position),
                window,
                geometry,
                descriptor: if for_parent { descriptor.of_partial_sum() } else { descriptor },
                union: ready.union,
                len,
                cut: geometry.cut(self.config.cut, len),
                ranks,
                weight: weight - gone,
                whole: ready.whole,
                for_parent,
                ready,
            })
        })
    }

    /// Returns the mask of the blocks that `rank` contributes to a fold; 0 means none.
    #[must_use]
    pub fn contribution(&self, fold: &CompleteWindow, rank: Rank) -> u64 {
        let pool = &self.streams[usize::from(fold.lane)].pool;
        pool.contributions(fold.ready.position)[rank.index()].mask
    }

    /// Returns the number of results of `lane` that some rank has not acknowledged. These are the
    /// newest results; older ones are never sent again.
    #[must_use]
    pub fn results_held(&self, lane: u8) -> usize {
        self.streams[usize::from(lane)].folded.len()
    }

    /// Notes that the driver has folded the window that [`Self::poll_fold`] returned.
    pub fn handle_folded(&mut self, fold: &CompleteWindow, observer: &mut impl Observer) {
        let stream = &mut self.streams[usize::from(fold.lane)];
        observer.on_event(&Event::Folded {
            window: fold.window,
            union: fold.union,
            contributors: fold.ready.contributors,
        });
        if stream.at_parent.is_none() || fold.for_parent {
            stream.handle_folded(&fold.ready);
        }
        if fold.for_parent {
            self.nack_lost(fold.lane);
            return;
        }
        stream.handle_resulted(&fold.ready, self.gone.len());
        self.unsent.push_back((fold.lane, fold.ready.position));
        self.nack_lost(fold.lane);
    }

    /// Moves the stream to its next window to fold, and queues the nacks for lost fragments that
    /// are now due.
    fn nack_lost(&mut self, lane: u8) {
        let stream = &mut self.streams[usize::from(lane)];
        stream.advance();
        for rank in stream.to_be_nacked() {
            self.queue.note(lane, rank, |due| due.fragments = true);
        }
    }
}

/// Checks whether a worker, or a child aggregator if the job has racks, may send this kind of
/// message.
fn check_kind(header: &Header, body: &[u8], has_racks: bool) -> Result<(), Reject> {
    match header.kind {
        Kind::Open | Kind::Data | Kind::Nack => Ok(()),
        Kind::Fail | Kind::Wait if has_racks => Ok(()),
        // wire: W-25, W-26
        Kind::Ack if body.is_empty() => Ok(()),
        Kind::Ack => Err(Reject::Body),
        _ => Err(Reject::Kind),
    }
}

/// Reports a rejected message to the observer, and returns the verdict.
fn rejected(reject: Reject, observer: &mut impl Observer) -> Verdict<FragmentPlace> {
    observer.on_event(&Event::Rejected(reject));
    Verdict::Reject(reject)
}

/// Converts the outcome of a message without payload to a verdict.
const fn control_verdict(taken: Result<(), Reject>) -> Verdict<FragmentPlace> {
    match taken {
        Ok(()) => Verdict::Control,
        Err(reject) => Verdict::Reject(reject),
    }
}
