//! The payloads of a job at a shard: what its ranks contributed, and the sums that came of it.
//!
//! A contribution lies in its buffer as it came: fragment after fragment, each with its header.
//! A buffer that holds a whole window is swapped in; fragments that come alone are copied to the
//! place they would have had. Results are laid out the same way, so that a buffer is sent as one
//! segmented message.

use std::collections::VecDeque;

use bytes::BytesMut;
use racksum_kernels::fold;
use racksum_proto::aggregator::{Aggregation, Config, Fold, Place, ResultFragments};
use racksum_proto::arith::Fold as Terms;
use racksum_proto::dtype::WireType;
use racksum_proto::fold::{FoldPlan, Run};
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::Rank;
use racksum_proto::wire::Header;

use crate::arena::Arena;
use crate::turn::fold_cost;

/// Most ranks of a job.
pub const MAX_WORLD: u16 = 256;

/// Why there is a buffer for each result and contribution, whatever the other jobs hold.
const ADMITTED: &str = "admission leaves a buffer for every slot and rank";

/// Why there is a result: only those are sent that some rank has not acknowledged.
const FOLDED: &str = "what is sent is folded and held";

/// Most bytes of a scaled block.
const MAX_SCALED: usize = WireType::Fixed32.block_len(1024);

/// The buffers of one job's slots.
#[derive(Debug)]
pub(crate) struct Slots {
    /// How many contribute: the ranks, and the parent if there is one.
    senders: usize,
    pool: usize,
    /// By lane, slot and rank.
    contributions: Box<[Option<BytesMut>]>,
    /// By lane and slot.
    results: Box<[Option<BytesMut>]>,
    /// The slots that have results, by lane, in the order in which they were folded.
    held: Box<[VecDeque<u32>]>,
    /// Buffers that held results. They keep their length, since to lengthen one is to fill it.
    spare: Vec<BytesMut>,
    /// Of the contributions to the window that is being folded, by rank.
    layouts: Vec<Layout>,
    plan: FoldPlan,
    /// Room to put a scaled contribution together in, and its result.
    linear: Box<[u8]>,
}

/// How a window's payload lies in a buffer: as datagrams, each with room for what authenticates it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    cut: Fragmentation,
}

impl Layout {
    pub(crate) const fn new(cut: Fragmentation) -> Self {
        Self { cut }
    }

    /// Bytes from one datagram to the next.
    pub(crate) const fn stride(&self) -> usize {
        self.cut.stride()
    }

    /// The stretch of the buffer that holds payload byte `offset`, and how many bytes of the
    /// payload from there on lie in one piece.
    fn locate(&self, offset: usize) -> (usize, usize) {
        let fragment = offset / self.cut.payload();
        let within = offset % self.cut.payload();
        (fragment * self.stride() + Header::LEN + within, self.cut.payload() - within)
    }

    /// Visits the pieces of `len` payload bytes from `offset` on: where each lies in a buffer,
    /// and which of the bytes it is.
    fn each_piece(
        &self,
        offset: usize,
        len: usize,
        mut caller_session: impl FnMut(usize, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let (at, piece) = self.locate(offset + done);
            let piece = piece.min(len - done);
            caller_session(at, done..done + piece);
            done += piece;
        }
    }

    /// Bytes of the datagrams of a payload of `len` bytes.
    pub(crate) const fn total(&self, len: usize) -> usize {
        self.cut.count(len) * (self.stride() - self.cut.payload()) + len
    }
}

impl Slots {
    /// Without buffers: each is taken when it is needed and used again at once, so that few go
    /// around, and these stay in the processor's cache.
    pub(crate) fn new(config: &Config) -> Self {
        let world = usize::from(config.world);
        let senders = world + usize::from(config.has_parent);
        let pool = config.pool_slots as usize;
        let slots = pool * usize::from(config.lanes);
        Self {
            senders,
            pool,
            contributions: (0..slots * senders).map(|_| None).collect(),
            results: (0..slots).map(|_| None).collect(),
            held: (0..config.lanes).map(|_| VecDeque::with_capacity(pool)).collect(),
            spare: Vec::with_capacity(slots),
            layouts: Vec::with_capacity(world),
            plan: FoldPlan::new(world),
            linear: vec![0; MAX_SCALED * (world + 1)].into(),
        }
    }

    /// Gives every buffer back.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        let Self { contributions, results, spare, .. } = self;
        let held = contributions.iter_mut().chain(results).filter_map(Option::take);
        held.chain(spare.drain(..)).for_each(|buffer| arena.give(buffer));
    }

    /// Lets go of the results that every rank of `lane` has acknowledged.
    fn release_results(&mut self, lane: u8, machine: &Aggregation) {
        let held = &mut self.held[usize::from(lane)];
        while held.len() > machine.results_held(lane)
            && let Some(slot) = held.pop_front()
        {
            let slot = usize::from(lane) * self.pool + slot as usize;
            self.spare.extend(self.results[slot].take());
        }
    }

    fn contribution(&mut self, lane: u8, slot: u32, rank: Rank) -> &mut Option<BytesMut> {
        let slot = usize::from(lane) * self.pool + slot as usize;
        &mut self.contributions[slot * self.senders + rank.index()]
    }

    /// Whether a buffer of datagrams `stride` apart can serve as the contribution it holds whole.
    pub(crate) const fn fits(place: &Place, stride: usize) -> bool {
        place.fragments == 1 || stride == Layout::new(place.cut).stride()
    }

    /// Keeps a buffer that holds a whole contribution; returns the one it replaces.
    pub(crate) fn keep(&mut self, place: Place, buffer: BytesMut) -> Option<BytesMut> {
        self.contribution(place.lane, place.slot, place.rank).replace(buffer)
    }

    /// Copies the body of one fragment to its place.
    pub(crate) fn copy(&mut self, place: Place, body: &[u8], arena: &mut Arena) {
        let start = usize::from(place.fragment) * Layout::new(place.cut).stride() + Header::LEN;
        let held = self.contribution(place.lane, place.slot, place.rank);
        let buffer = held.get_or_insert_with(|| arena.take().expect(ADMITTED));
        if buffer.len() < start {
            buffer.resize(start, 0);
        }
        // What the buffer is longer by is not filled with zeros first.
        let over = body.len().min(buffer.len() - start);
        buffer[start..start + over].copy_from_slice(&body[..over]);
        buffer.extend_from_slice(&body[over..]);
    }

    /// Folds a window into its result, and gives the contributions back. Returns what it
    /// costs.
    pub(crate) fn fold(&mut self, fold: &Fold, machine: &Aggregation, arena: &mut Arena) -> usize {
        // With a parent a slot's buffer has the sum first, and then the result.
        if !machine.config().has_parent {
            self.release_results(fold.lane, machine);
            self.held[usize::from(fold.lane)].push_back(fold.slot);
        }
        let slot = usize::from(fold.lane) * self.pool + fold.slot as usize;
        let Self { layouts, plan, contributions, results, spare, senders, linear, .. } = self;
        let contributions = &mut contributions[slot * *senders..][..*senders];
        let buffer = || spare.pop().or_else(|| arena.take()).expect(ADMITTED);
        let result = results[slot].get_or_insert_with(buffer);
        let layout = Layout::new(fold.cut);
        let total = layout.total(fold.len);
        if result.len() < total {
            result.resize(total, 0);
        }
        if let Some(sum) = fold.whole.and_then(|rank| contributions[rank.index()].as_ref()) {
            // It has the same layout: what is of one length is cut alike.
            let len = total.min(sum.len());
            result[..len].copy_from_slice(&sum[..len]);
            give_back(contributions, arena);
            return 2 * len;
        }
        let masks = (0..machine.config().world).map(|r| machine.contribution(fold, Rank(r)));
        let scaled = fold.descriptor.wire.is_scaled();
        let Fold { geometry, window, .. } = fold;
        layouts.clear();
        layouts.extend(masks.clone().map(|mask| {
            let len = geometry.payload_len(window.index, mask);
            Layout::new(geometry.cut(machine.config().cut, len))
        }));
        let pieces = Pieces { layout, layouts, fold, contributions };
        plan.runs(&fold.geometry, fold.window.index, masks, fold.ranks, |run| {
            if scaled {
                pieces.fold_block(&run, result, linear);
            } else {
                pieces.fold_run(&run, result);
            }
        });
        give_back(contributions, arena);
        fold_cost(fold.descriptor.wire, fold.len * (1 + fold.contributors()))
    }

    /// Puts a result of zeros into a slot, as a fold would.
    #[cfg(test)]
    pub(crate) fn put_result(&mut self, slot: usize, len: usize, cut: Fragmentation) {
        self.results[slot] = Some(BytesMut::zeroed(Layout::new(cut).total(len)));
    }

    /// Writes the headers of a result's datagrams.
    pub(crate) fn write_headers(&mut self, result: &ResultFragments) {
        let ResultFragments { lane, slot, len, cut, header, .. } = *result;
        let layout = Layout::new(cut);
        let result = self.results[usize::from(lane) * self.pool + slot as usize].as_mut();
        let result = result.expect(FOLDED);
        for fragment in 0..cut.count(len) {
            let body = cut.range(len, fragment).len();
            let place = result[fragment * layout.stride()..].first_chunk_mut();
            header.of_fragment(fragment, body).encode(place.expect(FOLDED));
        }
    }

    /// The datagrams of a result, each with room for what authenticates it, and how far they are
    /// apart.
    pub(crate) fn datagrams(&mut self, result: &ResultFragments) -> (&mut [u8], usize) {
        let layout = Layout::new(result.cut);
        let slot = usize::from(result.lane) * self.pool + result.slot as usize;
        let contents = self.results[slot].as_mut().expect(FOLDED);
        (&mut contents[..layout.total(result.len)], layout.stride())
    }
}

/// Gives the buffers of a window's contributions back, also of those that were not wanted.
fn give_back(contributions: &mut [Option<BytesMut>], arena: &mut Arena) {
    contributions.iter_mut().filter_map(Option::take).for_each(|buffer| arena.give(buffer));
}

/// The buffers of one fold.
struct Pieces<'a> {
    /// Of the result.
    layout: Layout,
    layouts: &'a [Layout],
    fold: &'a Fold,
    contributions: &'a [Option<BytesMut>],
}

impl Pieces<'_> {
    /// Folds a run piece by piece: as far as it lies in one fragment of the result and of each
    /// contribution.
    fn fold_run(&self, run: &Run<'_>, result: &mut BytesMut) {
        let mut inputs: [&[u8]; MAX_WORLD as usize] = [&[]; MAX_WORLD as usize];
        let mut done = 0;
        while done < run.out.len() {
            let (out, mut len) = self.layout.locate(run.out.start + done);
            len = len.min(run.out.len() - done);
            for input in run.inputs {
                len = len.min(self.layouts[input.rank.index()].locate(input.offset + done).1);
            }
            for (slice, input) in inputs.iter_mut().zip(run.inputs) {
                let (at, _) = self.layouts[input.rank.index()].locate(input.offset + done);
                *slice = &self.held(input.rank)[at..at + len];
            }
            let out = &mut result[out..out + len];
            self.apply(run, &inputs[..run.inputs.len()], out);
            done += len;
        }
    }

    /// Folds one scaled block, put together first: fragments may cut it anywhere.
    fn fold_block(&self, run: &Run<'_>, result: &mut BytesMut, linear: &mut [u8]) {
        let len = run.out.len();
        let (out, ins) = linear.split_at_mut(len);
        for (input, whole) in run.inputs.iter().zip(ins.chunks_exact_mut(len)) {
            let held = self.held(input.rank);
            self.layouts[input.rank.index()].each_piece(input.offset, len, |at, range| {
                whole[range.clone()].copy_from_slice(&held[at..at + range.len()]);
            });
        }
        let mut inputs: [&[u8]; MAX_WORLD as usize] = [&[]; MAX_WORLD as usize];
        for (slice, whole) in inputs.iter_mut().zip(ins.chunks_exact(len)).take(run.inputs.len()) {
            *slice = whole;
        }
        self.apply(run, &inputs[..run.inputs.len()], out);
        self.layout.each_piece(run.out.start, len, |at, range| {
            result[at..at + range.len()].copy_from_slice(&out[range]);
        });
    }

    fn apply(&self, run: &Run<'_>, inputs: &[&[u8]], out: &mut [u8]) {
        let terms = Terms { world: u32::from(self.fold.weight), absent: run.absent };
        let descriptor = &self.fold.descriptor;
        fold::fold_run(descriptor.wire, descriptor.reduction, terms, inputs, out)
            .expect("the plan gives runs of one length, of a descriptor that is valid");
    }

    fn held(&self, rank: Rank) -> &[u8] {
        self.contributions[rank.index()].as_ref().expect("a complete contribution is held")
    }
}
