//! The header at the start of every message.

use core::ops::Range;

use crate::ids::{Generation, JobId, OpId, Rank, WindowId};
use crate::reject::Reject;

/// The protocol version of this build.
pub const VERSION: u8 = 1;

/// "RS", the magic number of every header.
const MAGIC: [u8; 2] = *b"RS";

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// From a worker: an op's descriptor, and which windows of a stretch the worker will send.
    Open = 1,
    /// From a worker: a fragment of a window's packed non-zero blocks.
    Data = 2,
    /// From a worker: only the acknowledgement in the header.
    Ack = 3,
    /// From either side: the items that the sender lacks. From a worker, a probe also asks which
    /// results exist.
    Nack = 4,
    /// From the aggregator: a fragment of a window's packed sums.
    Result = 5,
    /// From the aggregator: no body. The header carries the credit and the first window with data
    /// that has not arrived.
    Credit = 6,
    /// From the aggregator, or from a child aggregator to its parent: the ranks that the next
    /// result waits for.
    Wait = 7,
    /// From the aggregator, or from a child aggregator to its parent: the op failed because the
    /// descriptors differ.
    Fail = 8,
    /// From the aggregator: a datagram to the multicast group, to find out which ranks receive from
    /// the group.
    Ping = 9,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Open,
        Self::Data,
        Self::Ack,
        Self::Nack,
        Self::Result,
        Self::Credit,
        Self::Wait,
        Self::Fail,
        Self::Ping,
    ];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Returns the flag bits that have a meaning for this kind.
    const fn flags(self) -> u8 {
        let any = Flags::AGAIN.0 | Flags::CONGESTED.0;
        match self {
            Self::Open => any | Flags::RESUMED.0,
            Self::Result => u8::MAX,
            _ => any,
        }
    }
}

/// The flag bits of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The message was requested: it repeats content that was sent before.
    pub const AGAIN: Self = Self(1);
    /// The sender has received a datagram with an ECN congestion mark since its last message with
    /// this flag.
    pub const CONGESTED: Self = Self(2);
    /// The open also says for each window whether the sender already has the window's sum.
    pub const RESUMED: Self = Self(4);
    /// The most ranks that a result may lack.
    pub const MAX_ABSENT: usize = 63;
    /// The bit position of the number of absent ranks.
    const ABSENT_SHIFT: u32 = 2;

    /// Returns the flags of a result that lacks the contributions of the first `ranks` lost ranks.
    #[must_use]
    pub fn absent(ranks: usize) -> Self {
        let ranks = ranks.min(Self::MAX_ABSENT);
        Self(u8::try_from(ranks << Self::ABSENT_SHIFT).unwrap_or(u8::MAX))
    }

    /// Returns how many ranks are absent from a result; these are the ranks that were lost first.
    #[must_use]
    pub fn absentees(self) -> usize {
        usize::from(self.0 >> Self::ABSENT_SHIFT)
    }

    /// Returns the union of both sets of flags.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns whether all flags of `other` are set.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The fixed header of a message. `docs/wire.md` lists the fields that each kind uses; the others
/// are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of the message.
    pub kind: Kind,
    /// The job.
    pub job: JobId,
    /// The job's generation.
    pub generation: Generation,
    /// The sending rank, or [`Rank::AGGREGATOR`].
    pub sender: Rank,
    /// The lane of the stream.
    pub lane: u8,
    /// The shard of the stream.
    pub shard: u8,
    /// The window that the message is about.
    pub window: WindowId,
    /// From a worker, the first window without a result; all windows before it are acknowledged.
    /// From the aggregator, the lowest window that some rank has not acknowledged.
    pub ack: WindowId,
    /// The mask of blocks in the window's payload.
    pub mask: u64,
    /// In a result, the index of the op's previous window with a result in this stream, or
    /// [`Header::NO_PREVIOUS`].
    pub previous: u32,
    /// The size of the body after the header, in bytes.
    pub length: u16,
    /// The fragment's number within the window.
    pub fragment: u8,
    /// The flag bits.
    pub flags: Flags,
}

impl Header {
    /// The size of an encoded header, in bytes.
    pub const LEN: usize = 48;
    /// The byte range of the generation, or of the number of a sealed datagram.
    const NUMBER: Range<usize> = 8..12;
    /// The value of `previous` in the first result of an op in a stream.
    pub const NO_PREVIOUS: u32 = u32::MAX;

    /// Writes the header in the wire layout.
    pub fn encode(&self, out: &mut [u8; Self::LEN]) {
        out[0..2].copy_from_slice(&MAGIC);
        out[2] = VERSION;
        out[3] = self.kind as u8;
        out[4..8].copy_from_slice(&self.job.0.to_be_bytes());
        out[8..12].copy_from_slice(&self.generation.0.to_be_bytes());
        out[12..14].copy_from_slice(&self.sender.0.to_be_bytes());
        out[14] = self.lane;
        out[15] = self.shard;
        out[16..20].copy_from_slice(&self.window.op.0.to_be_bytes());
        out[20..24].copy_from_slice(&self.window.index.to_be_bytes());
        out[24..28].copy_from_slice(&self.ack.op.0.to_be_bytes());
        out[28..32].copy_from_slice(&self.ack.index.to_be_bytes());
        out[32..40].copy_from_slice(&self.mask.to_be_bytes());
        out[40..44].copy_from_slice(&self.previous.to_be_bytes());
        out[44..46].copy_from_slice(&self.length.to_be_bytes());
        out[46] = self.fragment;
        out[47] = self.flags.0;
    }

    /// Returns the number of a sealed datagram. The number replaces the generation in the first
    /// header, since the key already determines the generation. Returns `None` if the datagram is
    /// too short.
    #[must_use]
    pub fn number(datagram: &[u8]) -> Option<u32> {
        datagram.get(Self::NUMBER)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// Writes the number that [`Header::number`] reads. Leaves a datagram that is too short
    /// unchanged.
    pub fn put_number(datagram: &mut [u8], number: u32) {
        if let Some(place) = datagram.get_mut(Self::NUMBER) {
            place.copy_from_slice(&number.to_be_bytes());
        }
    }

    /// Returns the job and the sender that a datagram claims to come from, without any check.
    /// Returns `None` if the datagram is too short.
    #[must_use]
    pub fn origin(datagram: &[u8]) -> Option<(JobId, Rank)> {
        let head: &[u8; Self::LEN] = datagram.first_chunk()?;
        let job = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        Some((JobId(job), Rank(u16::from_be_bytes([head[12], head[13]]))))
    }

    /// Returns whether the message belongs to `job` and comes from `sender`.
    #[must_use]
    pub fn is_of(&self, job: JobId, sender: Rank) -> bool {
        self.job == job && self.sender == sender
    }

    /// Returns the header of a ping, which the aggregator sends to a job's multicast group.
    #[must_use]
    pub const fn ping(job: JobId, generation: Generation, shard: u8) -> Self {
        let none = WindowId::new(OpId(0), 0);
        Self {
            kind: Kind::Ping,
            job,
            generation,
            sender: Rank::AGGREGATOR,
            lane: 0,
            shard,
            window: none,
            ack: none,
            mask: 0,
            previous: 0,
            length: 0,
            fragment: 0,
            flags: Flags::NONE,
        }
    }

    /// Returns a copy of this header for one fragment, whose body has `length` bytes.
    #[must_use]
    pub fn of_fragment(&self, fragment: usize, length: usize) -> Self {
        // Both values fit: a window has at most 64 fragments, and a datagram at most 64 KiB.
        let fragment = u8::try_from(fragment).unwrap_or(u8::MAX);
        Self { fragment, length: u16::try_from(length).unwrap_or(u16::MAX), ..*self }
    }

    /// Reads the header and the body of a datagram's only message.
    ///
    /// # Errors
    /// Returns the reason why the datagram is invalid. Returns [`Reject::Truncated`] if bytes
    /// follow the message.
    pub fn decode(datagram: &[u8]) -> Result<(Self, &[u8]), Reject> {
        match Self::decode_first(datagram)? {
            (header, body, []) => Ok((header, body)),
            _ => Err(Reject::Truncated),
        }
    }

    /// Reads a datagram's first message. Returns its header, its body and the bytes after it.
    ///
    /// # Errors
    /// Returns the reason why the bytes are not a valid message.
    pub fn decode_first(datagram: &[u8]) -> Result<(Self, &[u8], &[u8]), Reject> {
        // wire: W-1
        let (head, rest) = datagram.split_first_chunk().ok_or(Reject::Truncated)?;
        let header = Self::read(head)?;
        // wire: W-5
        let body = rest.split_at_checked(usize::from(header.length)).ok_or(Reject::Truncated)?;
        header.check_reserved()?;
        Ok((header, body.0, body.1))
    }

    /// Reads a header whose body has not been received yet.
    ///
    /// # Errors
    /// Returns the reason why the bytes are not a valid header.
    pub fn decode_alone(head: &[u8; Self::LEN]) -> Result<Self, Reject> {
        let header = Self::read(head)?;
        header.check_reserved()?;
        Ok(header)
    }

    fn read(bytes: &[u8; Self::LEN]) -> Result<Self, Reject> {
        // wire: W-2
        if bytes[0..2] != MAGIC {
            return Err(Reject::Magic);
        }
        // wire: W-3
        if bytes[2] != VERSION {
            return Err(Reject::Version);
        }
        // wire: W-4
        let kind = Kind::from_code(bytes[3]).ok_or(Reject::Kind)?;
        let u32_at = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok(Self {
            kind,
            job: JobId(u32_at(4)),
            generation: Generation(u32_at(8)),
            sender: Rank(u16::from_be_bytes([bytes[12], bytes[13]])),
            lane: bytes[14],
            shard: bytes[15],
            window: WindowId::new(OpId(u32_at(16)), u32_at(20)),
            ack: WindowId::new(OpId(u32_at(24)), u32_at(28)),
            mask: (u64::from(u32_at(32)) << 32) | u64::from(u32_at(36)),
            previous: u32_at(40),
            length: u16::from_be_bytes([bytes[44], bytes[45]]),
            fragment: bytes[46],
            flags: Flags(bytes[47]),
        })
    }

    /// Rejects a header in which an unused bit or field is not zero.
    fn check_reserved(&self) -> Result<(), Reject> {
        // wire: W-6
        let windowed = matches!(self.kind, Kind::Data | Kind::Result);
        let unused = (!windowed && (self.mask != 0 || self.fragment != 0))
            || (self.kind != Kind::Result && self.previous != 0)
            || self.flags.0 & !self.kind.flags() != 0;
        if unused { Err(Reject::Reserved) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn sample() -> Header {
        Header {
            kind: Kind::Result,
            job: JobId(0x0102_0304),
            generation: Generation(0x0506_0708),
            sender: Rank::AGGREGATOR,
            lane: 1,
            shard: 2,
            window: WindowId::new(OpId(0x1112_1314), 0x1516_1718),
            ack: WindowId::new(OpId(0x2122_2324), 0x2526_2728),
            mask: 0x3132_3334_3536_3738,
            previous: 0x4142_4344,
            length: 3,
            fragment: 5,
            flags: Flags::AGAIN,
        }
    }

    fn encoded(header: &Header, body: &[u8]) -> Vec<u8> {
        let mut out = [0xa5; Header::LEN];
        header.encode(&mut out);
        [&out[..], body].concat()
    }

    #[test]
    fn golden_bytes() {
        // wire: W-1, W-2, W-3, W-4
        let golden = [
            0x52, 0x53, 1, 5, 1, 2, 3, 4, 5, 6, 7, 8, 0xff, 0xff, 1, 2, // magic to shard
            0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, // window
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, // ack
            0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38, // mask
            0x41, 0x42, 0x43, 0x44, 0, 3, 5, 1, // previous, length, fragment, flags
            7, 8, 9,
        ];
        assert_eq!(encoded(&sample(), &[7, 8, 9]), golden);
        assert_eq!(Header::decode(&golden), Ok((sample(), &[7u8, 8, 9][..])));
        assert_eq!(Header::decode_alone(golden.first_chunk().unwrap()), Ok(sample()));
    }

    #[test]
    fn every_truncation_is_rejected() {
        // wire: W-1, W-5
        let bytes = encoded(&sample(), &[7, 8, 9]);
        for len in 0..bytes.len() {
            assert_eq!(Header::decode(&bytes[..len]), Err(Reject::Truncated), "{len}");
        }
        let longer = encoded(&sample(), &[7, 8, 9, 10]);
        assert_eq!(Header::decode(&longer), Err(Reject::Truncated));
    }

    #[test]
    fn each_reserved_bit_is_rejected() {
        // wire: W-6
        let ack = Header { kind: Kind::Ack, mask: 0, previous: 0, fragment: 0, ..sample() };
        assert!(Header::decode(&encoded(&ack, &[7, 8, 9])).is_ok());
        for at in (32..44).chain([46]) {
            let mut bytes = encoded(&ack, &[7, 8, 9]);
            bytes[at] = 1;
            assert_eq!(Header::decode(&bytes), Err(Reject::Reserved), "{at}");
            let head = bytes.first_chunk().unwrap();
            assert_eq!(Header::decode_alone(head), Err(Reject::Reserved), "{at}");
        }
        let mut bytes = encoded(&ack, &[7, 8, 9]);
        bytes[47] = 4;
        assert_eq!(Header::decode(&bytes), Err(Reject::Reserved));
        let open = Header { kind: Kind::Open, flags: Flags::RESUMED, ..ack };
        let mut bytes = encoded(&open, &[7, 8, 9]);
        assert!(Header::decode(&bytes).is_ok());
        bytes[47] = 8;
        assert_eq!(Header::decode(&bytes), Err(Reject::Reserved));
    }

    #[test]
    fn a_result_says_how_many_ranks_it_lacks() {
        // wire: W-62
        for absent in [0, 1, Flags::MAX_ABSENT] {
            let flags = Flags::AGAIN.with(Flags::absent(absent));
            let bytes = encoded(&Header { flags, ..sample() }, &[7, 8, 9]);
            assert_eq!(usize::from(bytes[47]), absent << 2 | 1);
            let (header, _) = Header::decode(&bytes).unwrap();
            assert_eq!((header.flags.absentees(), header.flags), (absent, flags));
        }
    }

    #[test]
    fn another_protocol_version_or_kind_is_rejected() {
        // wire: W-2, W-3, W-4
        for (at, value, reject) in [
            (0, b'X', Reject::Magic),
            (1, b'X', Reject::Magic),
            (2, 0, Reject::Version),
            (2, 2, Reject::Version),
            (3, 0, Reject::Kind),
            (3, 10, Reject::Kind),
        ] {
            let mut bytes = encoded(&sample(), &[7, 8, 9]);
            bytes[at] = value;
            assert_eq!(Header::decode(&bytes), Err(reject));
        }
    }
}
