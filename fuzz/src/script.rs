//! Reads bytes as a script of numbers, descriptors and datagrams. A script reads as zeros after its
//! end.

use racksum_proto::call::Call;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction, WireType};
use racksum_proto::geometry::{Fragmentation, Geometry};
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::time::Span;
use racksum_proto::wire::{
    Disagreement, Flags, Header, Kind, MissingRanks, NackEntries, NackEntry, Open, OpenEncoder,
    Opening,
};

/// The job of every script.
pub const JOB: JobId = JobId(7);
/// The generation of the job.
pub const GENERATION: Generation = Generation(3);

/// The unread rest of a script.
#[derive(Debug)]
pub struct Script<'a>(pub &'a [u8]);

impl Script<'_> {
    /// Returns whether the whole script has been read.
    pub const fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next byte.
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number below `end`; `end` must not be 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    fn u64(&mut self) -> u64 {
        (0..8).fold(0, |word, _| (word << 8) | u64::from(self.byte()))
    }

    /// Reads a length byte, and returns that many bytes, or all that are left if those are fewer.
    pub fn bytes(&mut self) -> Vec<u8> {
        let len = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(len);
        self.0 = rest;
        bytes.to_vec()
    }

    /// Returns a valid descriptor of a tensor with fewer than `1 << most_log2` elements.
    pub fn descriptor(&mut self, most_log2: usize) -> Descriptor {
        let (dtype, wire) = TYPES[self.below(TYPES.len())];
        let reduction = Reduction::ALL[self.below(4)];
        let elements = u64::from(self.byte()) << self.below(most_log2.saturating_sub(7).max(1));
        let block = 32 << self.below(6);
        let lane = u8::try_from(self.below(2)).unwrap_or(0);
        let descriptor = Descriptor { wire, reduction, lane, ..Descriptor::sum(elements, dtype) };
        // Two values of the next byte stand for a refused call and for a different call.
        let call = Call { number: u32::from(lane), ..Call::NONE };
        let descriptor = match self.byte() {
            255 => return Descriptor::refused(call),
            254 => Descriptor { call, ..descriptor },
            _ => descriptor,
        };
        descriptor.with_block(block).expect("the block size is a power of two from 32 to 1024")
    }

    fn window(&mut self) -> WindowId {
        let small = u32::from(self.byte());
        let index = u32::from(self.byte());
        match small {
            255 => WindowId::new(OpId(u32::MAX), u32::MAX),
            254 => WindowId::new(OpId(u32::MAX - 1), index),
            253 => WindowId::new(OpId(index), u32::MAX),
            small => WindowId::new(OpId(small % 8), index),
        }
    }

    /// Returns a mask of blocks or fragments: all, none or some.
    fn mask(&mut self) -> u64 {
        match self.byte() {
            0 => u64::MAX,
            1 => 0,
            2 => self.u64(),
            few => 1 << (few % 64),
        }
    }

    /// Returns a datagram of the job, usually with a body that fits its kind. `known` returns an
    /// op's descriptor, if any machine knows it.
    pub fn datagram(
        &mut self,
        cut: Fragmentation,
        known: impl Fn(OpId) -> Option<Descriptor>,
    ) -> Vec<u8> {
        let kind = KINDS[self.below(KINDS.len())];
        let mut header = Header { kind, ..Header::ping(JOB, GENERATION, 0) };
        header.shard = u8::try_from(self.below(2)).unwrap_or(0);
        header.lane = u8::try_from(self.below(2)).unwrap_or(0);
        header.window = self.window();
        header.ack = self.window();
        header.flags = [Flags::NONE, Flags::AGAIN, Flags::CONGESTED][self.below(3)];
        let from_worker = matches!(kind, Kind::Open | Kind::Data | Kind::Ack);
        if from_worker || (kind == Kind::Nack && self.below(2) == 1) {
            header.sender = Rank(u16::try_from(self.below(3)).unwrap_or(0));
        }
        let body = match kind {
            Kind::Open => self.open(),
            Kind::Nack => self.nack(),
            Kind::Wait => self.wait(),
            Kind::Fail => self.fail(),
            Kind::Data | Kind::Result => {
                let descriptor = known(header.window.op).unwrap_or_else(|| self.descriptor(20));
                self.fragment(&mut header, &Geometry::new(&descriptor), cut)
            }
            Kind::Ack | Kind::Credit | Kind::Ping => Vec::new(),
        };
        header.length = u16::try_from(body.len()).unwrap_or(u16::MAX);
        let mut bytes = [0; Header::LEN];
        header.encode(&mut bytes);
        [&bytes[..], &body].concat()
    }

    fn open(&mut self) -> Vec<u8> {
        let descriptor = self.descriptor(36);
        let after = match self.byte() {
            255 => None,
            op => Some(OpId(u32::from(op % 8))),
        };
        let windows = self.below(255) + 1;
        let windows = if windows > 250 { Open::MAX_WINDOWS } else { windows };
        let bits = self.u64();
        let windows = (0..windows).map(|i| Opening::of(bits >> (i % 64) & 1 == 1));
        let mut out = [0; 1200];
        let (len, _) = OpenEncoder::new().encode(&descriptor, after, windows, false, &mut out);
        out[..len].to_vec()
    }

    fn nack(&mut self) -> Vec<u8> {
        let count = self.below(NackEntries::MAX + 1);
        let entries: Vec<_> = (0..count)
            .map(|_| NackEntry { window: self.window(), fragments: self.mask() })
            .collect();
        let mut out = [0; 1200];
        let len = NackEntries::encode(entries.into_iter(), &mut out);
        out[..len].to_vec()
    }

    fn wait(&mut self) -> Vec<u8> {
        let count = self.below(MissingRanks::MAX + 1);
        let ranks = (0..count).map(|rank| (Rank(u16::try_from(rank).unwrap_or(0)), Span::ZERO));
        let mut out = [0; 1200];
        let len = MissingRanks::encode(ranks, &mut out);
        out[..len].to_vec()
    }

    fn fail(&mut self) -> Vec<u8> {
        let one = (Rank(0), self.descriptor(20));
        let other = (Rank(1), self.descriptor(20));
        let mut out = [0; Disagreement::LEN];
        Disagreement { one, other }.encode(&mut out);
        out.to_vec()
    }

    /// Returns a fragment whose mask, number and length usually fit its window.
    fn fragment(
        &mut self,
        header: &mut Header,
        geometry: &Geometry,
        cut: Fragmentation,
    ) -> Vec<u8> {
        header.mask = self.mask() & geometry.full_mask(header.window.index);
        let len = geometry.payload_len(header.window.index, header.mask);
        let cut = geometry.cut(cut, len);
        let fragment = self.below(cut.count(len));
        header.fragment = u8::try_from(fragment).unwrap_or(u8::MAX);
        if header.kind == Kind::Result {
            let back = u32::from(self.byte());
            let before = header.window.index.checked_sub(back);
            header.previous = before.filter(|_| back > 0).unwrap_or(Header::NO_PREVIOUS);
        }
        let short = usize::from(self.byte() == 255);
        vec![0; cut.range(len, fragment).len().saturating_sub(short)]
    }
}

/// Pairs of a dtype and a wire type that carries it.
const TYPES: [(DType, WireType); 8] = [
    (DType::F32, WireType::F32),
    (DType::F32, WireType::Int8),
    (DType::F32, WireType::Fixed32),
    (DType::Bf16, WireType::Bf16),
    (DType::F64, WireType::F64),
    (DType::F64, WireType::F16),
    (DType::I32, WireType::I32),
    (DType::I64, WireType::I64),
];

/// The kinds of made-up datagrams. A kind that is listed several times is drawn more often.
const KINDS: [Kind; 15] = [
    Kind::Open,
    Kind::Open,
    Kind::Open,
    Kind::Data,
    Kind::Data,
    Kind::Data,
    Kind::Nack,
    Kind::Nack,
    Kind::Ack,
    Kind::Result,
    Kind::Result,
    Kind::Credit,
    Kind::Wait,
    Kind::Fail,
    Kind::Ping,
];
