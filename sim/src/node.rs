//! Nodes: the protocol's state machines together with the bytes that their drivers would hold.

use std::collections::BTreeMap;
use std::rc::Rc;

use racksum_proto::aggregator::{self, Aggregation, FragmentPlace, Recipient};
use racksum_proto::arith::{self, FoldTerms};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::error::{OpError, SubmitError};
use racksum_proto::fold::FoldPlan;
use racksum_proto::geometry::{Fragmentation, Geometry};
use racksum_proto::ids::{OpId, Rank, WindowId};
use racksum_proto::observer::{Event, Observer};
use racksum_proto::schedule::{Turn, cost};
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{self, Header};
use racksum_proto::worker::{self, Delivery, Worker};

/// A datagram in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagram {
    /// The recipient.
    pub to: Endpoint,
    /// The datagram's bytes.
    pub bytes: Rc<[u8]>,
}

/// A recipient of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Endpoint {
    /// A rank.
    Worker(u16),
    /// Every rank of the job, by multicast.
    Workers,
    /// A shard.
    Shard(u8),
}

/// A rank: its state machine and its tensors, which are reduced in place.
#[derive(Debug)]
pub struct WorkerNode {
    /// The protocol's state machine.
    pub machine: Worker,
    world: u32,
    tensors: BTreeMap<OpId, Vec<u8>>,
    /// The packed results that have arrived in part, by window. A fragment is kept here if the wire
    /// type is scaled or the job may move; otherwise it is written directly to the tensor.
    partial: BTreeMap<WindowId, Vec<u8>>,
    /// Packed results that other ranks may lack when the job moves.
    kept: BTreeMap<WindowId, Vec<u8>>,
    buffer: Box<[u8]>,
    /// For each ended op, the ranks whose contributions its result lacks.
    pub absent: BTreeMap<OpId, Vec<Rank>>,
    /// Ended ops, each with its tensor or error.
    pub done: Vec<(OpId, Result<Vec<u8>, OpError>)>,
}

impl WorkerNode {
    /// Creates a rank of a job of `world` ranks.
    #[must_use]
    pub fn new(config: worker::Config, world: u16, now: Time) -> Self {
        Self {
            buffer: buffer(config.cut),
            machine: Worker::new(config, now),
            world: u32::from(world),
            tensors: BTreeMap::new(),
            partial: BTreeMap::new(),
            kept: BTreeMap::new(),
            absent: BTreeMap::new(),
            done: Vec::new(),
        }
    }

    /// Starts an op on `tensor`.
    ///
    /// # Errors
    /// Returns the errors of [`Worker::submit`].
    pub fn submit(
        &mut self,
        now: Time,
        descriptor: Descriptor,
        tensor: Vec<u8>,
        timeout: Span,
    ) -> Result<OpId, SubmitError> {
        let op = self.machine.submit(now, descriptor, timeout)?;
        self.tensors.insert(op, tensor);
        Ok(op)
    }

    /// Continues the job at another aggregator.
    pub fn resume(&mut self, config: worker::Config, now: Time, observer: &mut impl Observer) {
        self.partial.clear();
        self.buffer = buffer(config.cut);
        self.machine.resume(config, now, observer);
        self.collect();
    }

    /// Handles a datagram.
    pub fn handle(
        &mut self,
        now: Time,
        bytes: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) {
        for message in wire::messages(bytes) {
            let (header, body) = match message {
                Ok(message) => message,
                Err(reject) => {
                    observer.on_event(&Event::Rejected(reject));
                    continue;
                }
            };
            let verdict = self.machine.handle_decoded(now, &header, body, congested, observer);
            if let Verdict::Store(delivery) = verdict {
                self.deliver(&delivery, body);
                if delivery.complete {
                    self.machine.handle_delivered(now, &delivery, observer);
                }
            }
        }
        self.collect();
    }

    /// Handles timeouts.
    pub fn handle_timeout(&mut self, now: Time, observer: &mut impl Observer) {
        self.machine.handle_timeout(now, observer);
        self.collect();
    }

    /// Scans windows and appends to `out` the datagrams that are due, until these hold at least
    /// `room` bytes. Returns false if it stopped for lack of room.
    pub fn drive(
        &mut self,
        now: Time,
        room: usize,
        out: &mut Vec<Datagram>,
        observer: &mut impl Observer,
    ) -> bool {
        let mut joined = Joined::new(self.machine.config().cut);
        let all = loop {
            if joined.len_bytes >= room {
                break false;
            }
            if let Some(transmit) = self.machine.poll_transmit(now, &mut self.buffer, observer) {
                self.send(&transmit, &mut joined);
            } else if let Some(scan) = self.machine.poll_scan() {
                self.scan(scan);
            } else {
                break true;
            }
        };
        out.extend(
            joined
                .datagrams
                .into_iter()
                .map(|(shard, bytes)| Datagram { to: Endpoint::Shard(shard), bytes: bytes.into() }),
        );
        self.collect();
        all
    }

    fn scan(&mut self, scan: worker::Scan) {
        let tensor = self.tensors.get_mut(&scan.op).expect("an op in flight has its tensor");
        let descriptor = self.machine.descriptor(scan.op).expect("the op is in flight");
        let geometry = Geometry::new(&descriptor);
        let window = bytes_of(&descriptor, geometry.elements_of(scan.index));
        let mask =
            arith::scan_window(descriptor.dtype, geometry.block_elements(), &mut tensor[window]);
        self.machine.handle_scanned(scan, mask);
    }

    fn send(&self, transmit: &worker::Transmit, joined: &mut Joined<u8>) {
        match transmit {
            worker::Transmit::Datagram { shard, len } => {
                joined.push(*shard, self.buffer[..*len].to_vec());
            }
            worker::Transmit::Data(data) => {
                let window = data.header.window;
                let payload = match data.held {
                    true => self.kept[&window].clone(),
                    false => self.pack(window, data.header.mask),
                };
                fragments(data.cut, &data.header, data.fragments, &payload, |bytes| {
                    joined.push(data.shard, bytes);
                });
            }
        }
    }

    /// Encodes the non-zero blocks of a window for the wire.
    fn pack(&self, window: WindowId, mask: u64) -> Vec<u8> {
        let tensor = &self.tensors[&window.op];
        let descriptor = self.machine.descriptor(window.op).expect("the op is in flight");
        let Descriptor { dtype, wire, .. } = descriptor;
        let geometry = Geometry::new(&descriptor);
        let mut payload = vec![0; geometry.payload_len(window.index, mask)];
        for packed in geometry.packed(window.index, mask) {
            let src = &tensor[bytes_of(&descriptor, elements(packed.element, packed.elements))];
            let out = &mut payload[packed.offset..][..wire.block_len(packed.elements)];
            let encoded = if wire.is_scaled() {
                arith::encode_block(dtype, wire, self.world, src, out)
            } else {
                arith::encode_run(dtype, wire, src, out)
            };
            encoded.expect("the blocks of a valid descriptor can be encoded");
        }
        payload
    }

    /// Writes a fragment of a result into the tensor, or keeps it until its window is complete.
    fn deliver(&mut self, delivery: &Delivery, body: &[u8]) {
        let descriptor = delivery.descriptor;
        let Some(tensor) = self.tensors.get_mut(&delivery.window.op) else { return };
        let range = delivery.cut.range(delivery.len, usize::from(delivery.fragment));
        let index = delivery.window.index;
        let may_move = self.machine.keeps_sums_of(delivery.window.op);
        let mut write_run = |range, body: &[u8]| {
            let size = descriptor.wire.element_size();
            for stretch in delivery.geometry.stretches(index, delivery.mask, range) {
                let dst =
                    &mut tensor[bytes_of(&descriptor, elements(stretch.element, stretch.elements))];
                let src = &body[stretch.offset..][..stretch.elements * size];
                arith::decode_run(descriptor.wire, descriptor.dtype, src, dst)
                    .expect("the blocks of a valid descriptor can be decoded");
            }
        };
        if !descriptor.wire.is_scaled() && !may_move {
            return write_run(range, body);
        }
        let payload = self.partial.entry(delivery.window).or_insert_with(|| vec![0; delivery.len]);
        payload[range].copy_from_slice(body);
        if !delivery.complete {
            return;
        }
        let payload = self.partial.remove(&delivery.window).unwrap_or_default();
        if may_move {
            self.kept.insert(delivery.window, payload.clone());
        }
        if !descriptor.wire.is_scaled() {
            return write_run(0..delivery.len, &payload);
        }
        for packed in delivery.geometry.packed(index, delivery.mask) {
            let len = descriptor.wire.block_len(packed.elements);
            let src = &payload[packed.offset..][..len];
            let dst = &mut tensor[bytes_of(&descriptor, elements(packed.element, packed.elements))];
            arith::decode_block(descriptor.wire, descriptor.dtype, src, dst)
                .expect("the blocks of a valid descriptor can be decoded");
            let fixed = descriptor.wire == racksum_proto::dtype::WireType::Fixed32;
            if fixed && arith::fixed32_overflowed(src) {
                self.machine.handle_overflow(delivery.window.op, packed.element);
            }
        }
    }

    /// Moves ended ops to `done`, and drops the payloads that no other rank can still lack.
    pub fn collect(&mut self) {
        while let Some(worker::Outcome { op, result, absent }) = self.machine.poll_outcome() {
            let tensor = self.tensors.remove(&op).unwrap_or_default();
            self.done.push((op, result.map(|()| tensor)));
            self.absent.insert(op, absent);
        }
        let first = self.machine.first_kept();
        self.kept.retain(|window, _| window.op >= first);
    }
}

/// A shard's part in one job: its state machine and the payloads in its slots.
#[derive(Debug)]
pub struct ShardNode {
    /// The protocol's state machine.
    pub machine: Aggregation,
    plan: FoldPlan,
    /// The fragments of contributions, by lane, slot, rank and fragment number.
    slots: BTreeMap<(u8, u32, u16, u8), Vec<u8>>,
    results: BTreeMap<(u8, u32), Vec<u8>>,
    multicast: bool,
    buffer: Box<[u8]>,
    /// Whether the last turn ended in the middle of sending.
    sending: bool,
}

impl ShardNode {
    /// Creates a shard of a job. Without multicast, it sends a separate copy to each rank.
    #[must_use]
    pub fn new(config: aggregator::Config, multicast: bool, now: Time) -> Self {
        Self {
            plan: FoldPlan::new(usize::from(config.world)),
            buffer: buffer(config.cut),
            machine: Aggregation::new(config, now),
            slots: BTreeMap::new(),
            results: BTreeMap::new(),
            multicast,
            sending: false,
        }
    }

    /// Returns how many fragments the slots hold.
    #[must_use]
    pub fn held(&self) -> usize {
        self.slots.len()
    }

    /// Handles a datagram.
    pub fn handle(
        &mut self,
        now: Time,
        bytes: &[u8],
        congested: bool,
        observer: &mut impl Observer,
    ) {
        for message in wire::messages(bytes) {
            let (header, body) = match message {
                Ok(message) => message,
                Err(reject) => {
                    observer.on_event(&Event::Rejected(reject));
                    continue;
                }
            };
            let verdict = self.machine.handle_decoded(now, &header, body, congested, observer);
            if let Verdict::Store(place) = verdict {
                self.store(place, body);
            }
        }
    }

    /// Stores a fragment of a contribution.
    pub(crate) fn store(&mut self, place: FragmentPlace, body: &[u8]) {
        let FragmentPlace { lane, slot, rank, fragment, .. } = place;
        self.slots.insert((lane, slot, rank.0, fragment), body.to_vec());
    }

    /// Returns the sum that a slot holds.
    pub(crate) fn result(&self, lane: u8, slot: u32) -> &[u8] {
        &self.results[&(lane, slot)]
    }

    /// Folds windows and appends to `out` the datagrams that are due.
    pub fn drive(&mut self, now: Time, out: &mut Vec<Datagram>, observer: &mut impl Observer) {
        self.serve(now, &mut Turn::new((), usize::MAX), out, observer);
    }

    /// Folds windows and appends to `out` the datagrams that are due, until the turn is over.
    /// Charges the turn as a real shard would.
    pub fn serve<J>(
        &mut self,
        now: Time,
        turn: &mut Turn<J>,
        out: &mut Vec<Datagram>,
        observer: &mut impl Observer,
    ) {
        let mut joined = Joined::new(self.machine.config().cut);
        let mut any = true;
        while any && !turn.is_over() {
            if !std::mem::take(&mut self.sending) {
                let fold = self.machine.poll_fold();
                if let Some(fold) = &fold {
                    self.fold(fold);
                    let bytes = fold.len * (1 + fold.contributors());
                    turn.spend(cost::of_fold(fold.descriptor.wire, bytes));
                    self.machine.handle_folded(fold, observer);
                }
                any = fold.is_some();
            }
            // Send even if no window was folded, because the search for a fold may have made a
            // credit due.
            self.sending = self.transmit(now, turn, &mut joined, observer);
        }
        for (to, bytes) in joined.datagrams {
            out.extend(self.addressed(to, &bytes.into()));
        }
    }

    /// Collects in `joined` the messages that are due. Returns whether the turn ended before
    /// everything was collected.
    fn transmit<J>(
        &mut self,
        now: Time,
        turn: &mut Turn<J>,
        joined: &mut Joined<Recipient>,
        observer: &mut impl Observer,
    ) -> bool {
        while !turn.is_over() {
            let transmit = self.machine.poll_transmit(now, &mut self.buffer, observer);
            let Some(transmit) = transmit else { return false };
            let (to, len) = match &transmit {
                aggregator::Transmit::Datagram { to, len } => (*to, *len),
                aggregator::Transmit::Result { to, result } => (*to, result.len),
            };
            turn.spend((cost::SEND + len) * self.copies(to));
            self.send(&transmit, joined);
        }
        true
    }

    fn fold(&mut self, fold: &aggregator::CompleteWindow) {
        let config = self.machine.config();
        // The parent counts as one more contributor.
        let world = config.world + u16::from(config.has_parent);
        let index = fold.window.index;
        let masks: Vec<u64> =
            (0..world).map(|rank| self.machine.contribution(fold, Rank(rank))).collect();
        let contributions: Vec<Vec<u8>> = (0..world)
            .zip(&masks)
            .map(|(rank, mask)| {
                let len = fold.geometry.payload_len(index, *mask);
                self.take(fold.lane, fold.slot, rank, len)
            })
            .collect();
        if let Some(rank) = fold.whole {
            let sum = contributions[rank.index()].clone();
            self.results.insert((fold.lane, fold.slot), sum);
            return;
        }
        let world = usize::from(self.machine.config().world);
        let mut out = vec![0xa5; fold.len];
        let Descriptor { wire, reduction, .. } = fold.descriptor;
        let masks = masks.iter().take(world).copied();
        self.plan.runs(&fold.geometry, index, masks, fold.ranks, |run| {
            let inputs: Vec<&[u8]> = run
                .inputs
                .iter()
                .map(|input| &contributions[input.rank.index()][input.offset..][..run.out.len()])
                .collect();
            let of = FoldTerms { world: u32::from(fold.weight), absent: run.absent };
            arith::fold_run(wire, reduction, of, &inputs, &mut out[run.out])
                .expect("every input of a run is as long as the run");
        });
        self.results.insert((fold.lane, fold.slot), out);
    }

    /// Removes a rank's fragments from a slot, and so frees the slot for the next window. Returns
    /// only their first `len` bytes, because a failed op may have left more fragments in the slot.
    fn take(&mut self, lane: u8, slot: u32, rank: u16, len: usize) -> Vec<u8> {
        let range = (lane, slot, rank, 0)..=(lane, slot, rank, u8::MAX);
        let fragments: Vec<_> = self.slots.range(range).map(|(key, _)| *key).collect();
        let mut payload = Vec::with_capacity(len);
        for fragment in fragments.iter().filter_map(|key| self.slots.remove(key)) {
            payload.extend(fragment);
        }
        payload.truncate(len);
        payload
    }

    fn send(&self, transmit: &aggregator::Transmit, joined: &mut Joined<Recipient>) {
        match transmit {
            aggregator::Transmit::Datagram { to, len } => {
                joined.push(*to, self.buffer[..*len].to_vec());
            }
            aggregator::Transmit::Result { to, result } => {
                let payload = &self.results[&(result.lane, result.slot)];
                fragments(result.cut, &result.header, result.fragments, payload, |bytes| {
                    joined.push(*to, bytes);
                });
            }
        }
    }

    /// Returns the number of addresses that a message to this recipient goes to.
    fn copies(&self, to: Recipient) -> usize {
        match to {
            Recipient::All if !self.multicast => usize::from(self.machine.config().world),
            Recipient::All | Recipient::Rank(_) => 1,
        }
    }

    /// Returns the datagrams that carry `bytes` to a recipient.
    fn addressed(&self, to: Recipient, bytes: &Rc<[u8]>) -> impl Iterator<Item = Datagram> {
        let world = self.machine.config().world;
        let (group, ranks) = match to {
            Recipient::All if self.multicast => (Some(Endpoint::Workers), 0..0),
            Recipient::All => (None, 0..world),
            Recipient::Rank(rank) => (None, rank.0..rank.0 + 1),
        };
        let bytes = Rc::clone(bytes);
        group
            .into_iter()
            .chain(ranks.map(Endpoint::Worker))
            .map(move |to| Datagram { to, bytes: Rc::clone(&bytes) })
    }
}

/// Outgoing datagrams. Consecutive messages to one recipient share a datagram if they fit.
#[derive(Debug)]
pub(crate) struct Joined<T> {
    max: usize,
    len_bytes: usize,
    pub(crate) datagrams: Vec<(T, Vec<u8>)>,
}

impl<T: PartialEq> Joined<T> {
    pub(crate) const fn new(cut: Fragmentation) -> Self {
        Self { max: Header::LEN + cut.payload(), len_bytes: 0, datagrams: Vec::new() }
    }

    pub(crate) fn push(&mut self, to: T, message: Vec<u8>) {
        self.len_bytes += message.len();
        match self.datagrams.last_mut() {
            Some((last, bytes)) if *last == to && bytes.len() + message.len() <= self.max => {
                bytes.extend(message);
            }
            _ => self.datagrams.push((to, message)),
        }
    }
}

/// Returns a buffer for the longest datagram of a job.
pub(crate) fn buffer(cut: Fragmentation) -> Box<[u8]> {
    vec![0xa5; Header::LEN + cut.payload()].into()
}

/// Calls `send` with the message for each wanted fragment of a window.
pub(crate) fn fragments(
    cut: Fragmentation,
    header: &Header,
    wanted: u64,
    payload: &[u8],
    mut send: impl FnMut(Vec<u8>),
) {
    for fragment in (0..cut.count(payload.len())).filter(|i| wanted >> i & 1 == 1) {
        let range = cut.range(payload.len(), fragment);
        let mut bytes = vec![0xa5; Header::LEN + range.len()];
        let (head, body) = bytes.split_first_chunk_mut().expect("the buffer has room for a header");
        header.of_fragment(fragment, range.len()).encode(head);
        body.copy_from_slice(&payload[range]);
        send(bytes);
    }
}

fn elements(first: u64, count: usize) -> std::ops::Range<u64> {
    first..first + count as u64
}

/// Returns the byte range that `elements` occupy in a tensor.
fn bytes_of(descriptor: &Descriptor, elements: std::ops::Range<u64>) -> std::ops::Range<usize> {
    let at = |element: u64| {
        usize::try_from(element).expect("a tensor fits in memory") * descriptor.dtype.size()
    };
    at(elements.start)..at(elements.end)
}
