//! The payloads of a job at a shard: the ranks' contributions, and the sums.
//!
//! A contribution stays in its buffer as it arrived: fragment after fragment, each with its header.
//! A buffer that holds a whole window is swapped into its slot. Fragments that arrive separately
//! are copied to the offsets that they would have in such a buffer. Results have the same layout,
//! so a result's buffer goes out with one segmented send.

use std::collections::VecDeque;

use bytes::BytesMut;
use racksum_kernels::fold;
use racksum_proto::aggregator::{
    Aggregation, CompleteWindow, Config, FragmentPlace, ResultFragments,
};
use racksum_proto::arith::FoldTerms;
use racksum_proto::dtype::WireType;
use racksum_proto::fold::{FoldPlan, Run};
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::Rank;
use racksum_proto::schedule::cost;
use racksum_proto::wire::Header;

use crate::arena::Arena;

/// The maximum number of ranks of a job.
pub const MAX_WORLD: u16 = 256;

/// The reason why every result and contribution finds a free buffer, whatever other jobs hold.
const ADMITTED: &str = "admission reserves a buffer for every slot and rank";

/// The reason why a result exists: results are sent only while some rank has not acknowledged them.
const FOLDED: &str = "a result that is sent has been folded and is still held";

/// The maximum size in bytes of a scaled block.
const MAX_SCALED: usize = WireType::Fixed32.block_len(1024);

/// The buffers of one job's slots.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The number of contributors: the ranks, and the parent if there is one.
    senders: usize,
    pool: usize,
    /// The contributions, by lane, slot and rank.
    contributions: Box<[Option<BytesMut>]>,
    /// The results, by lane and slot.
    results: Box<[Option<BytesMut>]>,
    /// The slots that hold results, by lane, in fold order.
    held: Box<[VecDeque<u32>]>,
    /// Buffers that held results. They keep their length, because growing a buffer again would fill
    /// it with zeros.
    spare: Vec<BytesMut>,
    /// The layouts of the contributions to the window that is being folded, by rank.
    layouts: Vec<Layout>,
    plan: FoldPlan,
    /// Scratch space for assembled scaled contributions and their result.
    linear: Box<[u8]>,
}

/// The layout of a window's payload in a buffer: datagrams with room for their authentication
/// trailers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    cut: Fragmentation,
}

impl Layout {
    pub(crate) const fn new(cut: Fragmentation) -> Self {
        Self { cut }
    }

    /// Returns the number of bytes from one datagram to the next.
    pub(crate) const fn stride(&self) -> usize {
        self.cut.stride()
    }

    /// Returns the place of payload byte `offset` in the buffer, in bytes, and how many payload
    /// bytes are contiguous from there.
    fn locate(&self, offset: usize) -> (usize, usize) {
        let fragment = offset / self.cut.payload();
        let within = offset % self.cut.payload();
        (fragment * self.stride() + Header::LEN + within, self.cut.payload() - within)
    }

    /// Visits the contiguous pieces of the `len` payload bytes that start at `offset`. The callback
    /// gets the place of each piece in the buffer, in bytes, and the range of payload bytes in the
    /// piece, counted from `offset`.
    fn each_piece(
        &self,
        offset: usize,
        len: usize,
        mut visit: impl FnMut(usize, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let (at, piece) = self.locate(offset + done);
            let piece = piece.min(len - done);
            visit(at, done..done + piece);
            done += piece;
        }
    }

    /// Returns the total size in bytes of the datagrams that carry `len` payload bytes.
    pub(crate) const fn total(&self, len: usize) -> usize {
        self.cut.count(len) * (self.stride() - self.cut.payload()) + len
    }
}

impl Slots {
    /// Creates slots without buffers. A slot takes a buffer only when it needs one, and gives it
    /// back soon, so that few buffers circulate and they stay in the processor's cache.
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

    /// Returns every buffer to the arena.
    pub(crate) fn release(&mut self, arena: &mut Arena) {
        let Self { contributions, results, spare, .. } = self;
        let held = contributions.iter_mut().chain(results).filter_map(Option::take);
        held.chain(spare.drain(..)).for_each(|buffer| arena.give(buffer));
    }

    /// Recycles the buffers of the results of `lane` that every rank has acknowledged.
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

    /// Returns whether a buffer whose datagrams lie `stride` bytes apart can be kept as a
    /// contribution.
    pub(crate) const fn fits(place: &FragmentPlace, stride: usize) -> bool {
        place.fragments == 1 || stride == Layout::new(place.cut).stride()
    }

    /// Stores a buffer that holds a whole contribution; returns the buffer it replaces.
    pub(crate) fn keep(&mut self, place: FragmentPlace, buffer: BytesMut) -> Option<BytesMut> {
        self.contribution(place.lane, place.slot, place.rank).replace(buffer)
    }

    /// Copies the body of a fragment to its place in the contribution's buffer.
    pub(crate) fn copy(&mut self, place: FragmentPlace, body: &[u8], arena: &mut Arena) {
        let start = usize::from(place.fragment) * Layout::new(place.cut).stride() + Header::LEN;
        let held = self.contribution(place.lane, place.slot, place.rank);
        let buffer = held.get_or_insert_with(|| arena.take().expect(ADMITTED));
        if buffer.len() < start {
            buffer.resize(start, 0);
        }
        // Bytes beyond the current length are appended, which avoids zeroing them first.
        let over = body.len().min(buffer.len() - start);
        buffer[start..start + over].copy_from_slice(&body[..over]);
        buffer.extend_from_slice(&body[over..]);
    }

    /// Folds a window into its result, gives the contributions' buffers back to the arena, and
    /// returns the cost of the fold.
    pub(crate) fn fold(
        &mut self,
        fold: &CompleteWindow,
        machine: &Aggregation,
        arena: &mut Arena,
    ) -> usize {
        // With a parent, a slot's buffer first holds the sum, and later the result.
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
            // The sum has the same layout, since windows of equal length are cut alike.
            let len = total.min(sum.len());
            result[..len].copy_from_slice(&sum[..len]);
            give_back(contributions, arena);
            return 2 * len;
        }
        let masks = (0..machine.config().world).map(|r| machine.contribution(fold, Rank(r)));
        let scaled = fold.descriptor.wire.is_scaled();
        let CompleteWindow { geometry, window, .. } = fold;
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
        cost::of_fold(fold.descriptor.wire, fold.len * (1 + fold.contributors()))
    }

    /// Puts a result of zeros into a slot, in place of a fold.
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

    /// Returns the datagrams of a result, with room for their authentication trailers, and their
    /// stride.
    pub(crate) fn datagrams(&mut self, result: &ResultFragments) -> (&mut [u8], usize) {
        let layout = Layout::new(result.cut);
        let slot = usize::from(result.lane) * self.pool + result.slot as usize;
        let contents = self.results[slot].as_mut().expect(FOLDED);
        (&mut contents[..layout.total(result.len)], layout.stride())
    }
}

/// Returns the buffers of a window's contributions, including unused ones, to the arena.
fn give_back(contributions: &mut [Option<BytesMut>], arena: &mut Arena) {
    contributions.iter_mut().filter_map(Option::take).for_each(|buffer| arena.give(buffer));
}

/// The buffers of one fold.
struct Pieces<'a> {
    /// The layout of the result.
    layout: Layout,
    layouts: &'a [Layout],
    fold: &'a CompleteWindow,
    contributions: &'a [Option<BytesMut>],
}

impl Pieces<'_> {
    /// Folds a run piece by piece. Each piece lies within one fragment of the result and of each
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

    /// Folds one scaled block. Each contribution is assembled first, since fragment boundaries may
    /// lie anywhere in a block.
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
        let terms = FoldTerms { world: u32::from(self.fold.weight), absent: run.absent };
        let descriptor = &self.fold.descriptor;
        fold::fold_run(descriptor.wire, descriptor.reduction, terms, inputs, out)
            .expect("the slices of a run have equal lengths, and the descriptor is valid");
    }

    fn held(&self, rank: Rank) -> &[u8] {
        self.contributions[rank.index()].as_ref().expect("a complete contribution is held")
    }
}
