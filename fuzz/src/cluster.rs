//! A small job: both state machines of the protocol, without the tensor data that their drivers
//! hold, and the datagrams between them. The cluster checks every output of a machine.

use std::collections::{BTreeMap, VecDeque};

use racksum_proto::aggregator::{
    self, Aggregation, CompleteWindow, Failed, FragmentPlace, Recipient,
};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::geometry::{Fragmentation, Geometry, MAX_FRAGMENTS, WINDOW_BYTES};
use racksum_proto::ids::{OpId, Rank, WindowId};
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{self, Header};
use racksum_proto::worker::{self, Delivery, Scan, Worker};

use super::script::{GENERATION, JOB};

/// The size of a job.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Number of ranks.
    pub world: u16,
    /// Number of lanes.
    pub lanes: u8,
    /// Number of shards.
    pub shards: u8,
    /// Number of slots of each stream.
    pub pool_slots: u32,
    /// The maximum number of ops in flight.
    pub max_ops: u16,
    /// How windows are cut into fragments.
    pub cut: Fragmentation,
}

/// A destination of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// A rank.
    Worker(usize),
    /// A shard.
    Shard(usize),
}

/// The machines and the datagrams in flight between them.
#[derive(Debug)]
pub struct Cluster {
    /// The size of the job.
    pub shape: Shape,
    /// The ranks of the job.
    pub workers: Vec<Worker>,
    shards: Vec<Aggregation>,
    now: Time,
    /// Datagrams in flight, oldest first. Datagrams beyond `MAX_WIRE` are lost.
    pub wire: VecDeque<(End, Vec<u8>)>,
    /// Copies of earlier datagrams, which scripts change and send again.
    pub seen: Vec<Vec<u8>>,
    next_seen: usize,
    /// The last window that each stream folded.
    folded: BTreeMap<(usize, u8), WindowId>,
    buffer: Box<[u8]>,
}

impl Cluster {
    /// Creates a job that has just started.
    pub fn new(shape: Shape) -> Self {
        let Shape { world, lanes, shards, pool_slots, max_ops, cut } = shape;
        let worker = |rank| worker::Config {
            job: JOB,
            generation: GENERATION,
            rank: Rank(rank),
            lanes,
            shards,
            pool_slots,
            max_ops,
            cut,
            in_flight: 1 << 18,
            first_op: OpId(0),
            may_move: false,
            acks_at_rest: false,
            child: None,
        };
        let shard = |shard| aggregator::Config {
            job: JOB,
            generation: GENERATION,
            world,
            lanes,
            shard,
            shards,
            pool_slots,
            max_ops,
            cut,
            results_in_flight: 1 << 18,
            moved_at: None,
            weight: None,
            has_parent: false,
        };
        Self {
            shape,
            workers: (0..world).map(|rank| Worker::new(worker(rank), Time(0))).collect(),
            shards: (0..shards).map(|i| Aggregation::new(shard(i), Time(0))).collect(),
            now: Time(0),
            wire: VecDeque::new(),
            seen: Vec::new(),
            next_seen: 0,
            folded: BTreeMap::new(),
            buffer: vec![0xa5; SMALLEST_DATAGRAM].into(),
        }
    }

    /// Starts an op at a rank, unless the rank refuses it.
    pub fn submit(&mut self, rank: usize, descriptor: Descriptor) {
        let timeout = Span::from_secs(20);
        // A refusal changes nothing, so its error is ignored.
        let _refused = self.workers[rank].submit(self.now, descriptor, timeout).is_err();
    }

    /// Advances the time and handles expired timeouts.
    pub fn wait(&mut self, span: Span) {
        self.now = self.now + span;
        for worker in &mut self.workers {
            if worker.poll_timeout() <= self.now {
                worker.handle_timeout(self.now, &mut ());
            }
        }
    }

    /// Advances the time to the next deadline, by one second at most.
    pub fn wait_for_deadline(&mut self) {
        let due = self.workers.iter().map(Worker::poll_timeout).min().unwrap_or(Time::NEVER);
        self.wait(due.since(self.now).min(Span::from_secs(1)));
    }

    /// Delivers the valid messages of a datagram to a machine, and checks the outcome.
    pub fn deliver(&mut self, to: End, bytes: &[u8], congested: bool) {
        for (header, body) in wire::messages(bytes).flatten() {
            match to {
                End::Worker(rank) => self.deliver_to_worker(rank, &header, body, congested),
                End::Shard(shard) => self.deliver_to_shard(shard, &header, body, congested),
            }
        }
    }

    fn deliver_to_shard(&mut self, shard: usize, header: &Header, body: &[u8], congested: bool) {
        let machine = &mut self.shards[shard];
        let verdict = machine.handle_decoded(self.now, header, body, congested, &mut ());
        if let Verdict::Store(place) = verdict {
            self.check_place(&place);
        }
    }

    fn deliver_to_worker(&mut self, rank: usize, header: &Header, body: &[u8], congested: bool) {
        let machine = &mut self.workers[rank];
        let verdict = machine.handle_decoded(self.now, header, body, congested, &mut ());
        let Verdict::Store(delivery) = verdict else { return };
        check_delivery(&delivery, body.len());
        if delivery.complete {
            machine.handle_delivered(self.now, &delivery, &mut ());
        }
    }

    fn check_place(&self, place: &FragmentPlace) {
        let Shape { world, lanes, pool_slots, .. } = self.shape;
        assert!(place.lane < lanes && place.slot < pool_slots && place.rank.0 < world);
        assert!(place.fragment < place.fragments);
        assert!(usize::from(place.fragments) <= MAX_FRAGMENTS);
    }

    /// Runs every machine until it has no more work or output.
    pub fn drive(&mut self) {
        for rank in 0..self.workers.len() {
            self.drive_worker(rank);
        }
        loop {
            for shard in 0..self.shards.len() {
                self.drive_shard(shard);
            }
            if !self.pass_failures() {
                break;
            }
        }
    }

    /// Reports the ops that have failed at a shard to the other shards. Returns whether there were
    /// any.
    fn pass_failures(&mut self) -> bool {
        let mut any = false;
        for shard in 0..self.shards.len() {
            while let Some(Failed { op, why, .. }) = self.shards[shard].poll_failed() {
                any = true;
                let (before, after) = self.shards.split_at_mut(shard);
                for other in before.iter_mut().chain(&mut after[1..]) {
                    other.handle_failed_beside(op, why, &mut ());
                }
            }
        }
        any
    }

    fn drive_worker(&mut self, rank: usize) {
        for polls in 0.. {
            assert!(polls < MAX_POLLS, "rank {rank} has work left after {MAX_POLLS} polls");
            let machine = &mut self.workers[rank];
            if let Some(transmit) = machine.poll_transmit(self.now, &mut self.buffer, &mut ()) {
                match transmit {
                    worker::Transmit::Datagram { shard, len } => {
                        let bytes = self.buffer[..len].to_vec();
                        self.post(End::Shard(usize::from(shard)), bytes);
                    }
                    worker::Transmit::Data(data) => {
                        let to = [End::Shard(usize::from(data.shard))];
                        self.post_fragments(
                            &to,
                            &data.header,
                            data.fragments,
                            (data.len, data.cut),
                        );
                    }
                }
            } else if let Some(scan) = machine.poll_scan() {
                let mask = mask_of(machine, rank, scan);
                machine.handle_scanned(scan, mask);
            } else {
                break;
            }
        }
        while self.workers[rank].poll_outcome().is_some() {}
    }

    fn drive_shard(&mut self, shard: usize) {
        let mut folded_all = false;
        for polls in 0.. {
            assert!(polls < MAX_POLLS, "shard {shard} has work left after {MAX_POLLS} polls");
            let machine = &mut self.shards[shard];
            if let Some(transmit) = machine.poll_transmit(self.now, &mut self.buffer, &mut ()) {
                self.send(&transmit);
            } else if folded_all {
                break;
            } else if let Some(fold) = machine.poll_fold() {
                self.fold(shard, &fold);
            } else {
                // Poll for output once more: even a poll that returns no fold may make a credit
                // due.
                folded_all = true;
            }
        }
    }

    fn send(&mut self, transmit: &aggregator::Transmit) {
        match transmit {
            aggregator::Transmit::Datagram { to, len } => {
                let bytes = self.buffer[..*len].to_vec();
                for end in self.ends(*to) {
                    self.post(end, bytes.clone());
                }
            }
            aggregator::Transmit::Result { to, result } => {
                assert!(result.slot < self.shape.pool_slots);
                let ends = self.ends(*to);
                self.post_fragments(
                    &ends,
                    &result.header,
                    result.fragments,
                    (result.len, result.cut),
                );
            }
        }
    }

    fn ends(&self, to: Recipient) -> Vec<End> {
        match to {
            Recipient::All => (0..self.workers.len()).map(End::Worker).collect(),
            Recipient::Rank(rank) => vec![End::Worker(rank.index())],
        }
    }

    /// Folds a window. Checks that windows are folded in order and that the contributions make up
    /// the union.
    fn fold(&mut self, shard: usize, fold: &CompleteWindow) {
        let machine = &mut self.shards[shard];
        assert!(fold.slot < self.shape.pool_slots);
        assert!(fold.len <= WINDOW_BYTES);
        let index = fold.window.index;
        assert_eq!(fold.union & !fold.geometry.full_mask(index), 0);
        assert_eq!(fold.len, fold.geometry.payload_len(index, fold.union));
        let union = (0..self.shape.world)
            .fold(0, |union, rank| union | machine.contribution(fold, Rank(rank)));
        assert_eq!(union, fold.union, "a fold's union must be the union of its contributions");
        machine.handle_folded(fold, &mut ());
        let before = self.folded.insert((shard, fold.lane), fold.window);
        assert!(
            before < Some(fold.window),
            "shard {shard} folded {:?} after {before:?}",
            fold.window
        );
    }

    fn post_fragments(
        &mut self,
        to: &[End],
        header: &Header,
        fragments: u64,
        (len, cut): (usize, Fragmentation),
    ) {
        assert!(cut.payload() <= self.shape.cut.payload());
        assert!(len <= WINDOW_BYTES);
        assert_eq!(fragments & !cut.all(len), 0, "every fragment lies within the payload");
        for fragment in (0..cut.count(len)).filter(|i| fragments >> i & 1 == 1) {
            let body = cut.range(len, fragment).len();
            let mut bytes = vec![0; Header::LEN + body];
            let head = bytes.first_chunk_mut().expect("the buffer has room for a header");
            header.of_fragment(fragment, body).encode(head);
            for end in to {
                self.post(*end, bytes.clone());
            }
        }
    }

    /// Puts a datagram onto the wire, after checking that it decodes.
    fn post(&mut self, to: End, bytes: Vec<u8>) {
        let decoded = Header::decode(&bytes);
        assert!(decoded.is_ok(), "a datagram to {to:?} does not decode: {decoded:?}");
        if self.seen.len() < MAX_SEEN {
            self.seen.push(bytes.clone());
        } else {
            self.seen[self.next_seen % MAX_SEEN].clone_from(&bytes);
            self.next_seen += 1;
        }
        if self.wire.len() < MAX_WIRE {
            self.wire.push_back((to, bytes));
        }
    }

    /// Returns the size of the machines' debug output, which stands in for their memory use, so
    /// that no counting allocator is needed.
    pub fn footprint(&self) -> usize {
        format!("{:?}{:?}", self.workers, self.shards).len()
    }
}

/// Returns the blocks of a window that a rank contributes: none, some or all.
fn mask_of(machine: &Worker, rank: usize, scan: Scan) -> u64 {
    let OpId(op) = scan.op;
    let Some(descriptor) = machine.descriptor(scan.op) else { return 0 };
    let draw = (u64::from(op) << 40 | u64::from(scan.index) << 8 | rank as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mask = match draw >> 62 {
        0 => 0,
        1 => 1,
        2 => draw,
        _ => u64::MAX,
    };
    mask & Geometry::new(&descriptor).full_mask(scan.index)
}

/// Checks that a driver can write a delivery without bounds checks of its own.
fn check_delivery(delivery: &Delivery, body_len: usize) {
    let Delivery { geometry, window, mask, len, cut, fragment, descriptor, .. } = delivery;
    assert!(window.index < geometry.windows());
    assert_eq!(mask & !geometry.full_mask(window.index), 0);
    assert_eq!(*len, geometry.payload_len(window.index, *mask));
    let range = cut.range(*len, usize::from(*fragment));
    assert_eq!(range.len(), body_len);
    if !descriptor.wire.is_scaled() {
        for stretch in geometry.stretches(window.index, *mask, range) {
            assert!(stretch.element + stretch.elements as u64 <= descriptor.elements);
            assert!(stretch.offset + stretch.elements * descriptor.wire.element_size() <= body_len);
        }
    }
}

/// The size of the buffer for datagrams without tensor data: the minimum MTU of IPv6, 1280, minus
/// the IPv6 and UDP headers.
const SMALLEST_DATAGRAM: usize = 1280 - 48;
/// The maximum number of consecutive polls of one machine. More polls indicate an endless loop.
const MAX_POLLS: usize = 100_000;
/// The maximum number of datagrams in flight.
const MAX_WIRE: usize = 512;
/// The maximum number of copies of earlier datagrams.
const MAX_SEEN: usize = 64;
