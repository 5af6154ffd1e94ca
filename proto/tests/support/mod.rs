//! The small job that the wire tests share: its parameters, machines and datagrams.

use racksum_proto::aggregator::{self, Aggregation};
use racksum_proto::auth::DataAuth;
use racksum_proto::descriptor::Descriptor;
use racksum_proto::geometry::Fragmentation;
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{Flags, Header, Kind, OpenEncoder, Opening};
use racksum_proto::worker::{self, Worker};

pub(crate) const JOB: JobId = JobId(7);
pub(crate) const GENERATION: Generation = Generation(3);
pub(crate) const TIMEOUT: Span = Span::from_secs(10);

/// Returns the cut for an MTU of 1500 over IPv4, with room for an authentication trailer.
pub(crate) fn cut() -> Fragmentation {
    Fragmentation::new(1500 - 28 - Header::LEN - DataAuth::MAX_TRAILER)
        .expect("1408 bytes are a valid payload")
}

/// Returns the aggregator half of the job at its only shard: two ranks, one lane, eight slots.
pub(crate) fn aggregation() -> Aggregation {
    Aggregation::new(shard(0, 1), Time(0))
}

pub(crate) fn shard(shard: u8, shards: u8) -> aggregator::Config {
    aggregator::Config {
        job: JOB,
        generation: GENERATION,
        world: 2,
        lanes: 1,
        shard,
        shards,
        pool_slots: 8,
        max_ops: 4,
        cut: cut(),
        results_in_flight: 1 << 20,
        moved_at: None,
        weight: None,
        has_parent: false,
    }
}

/// Returns the worker half of `rank`.
pub(crate) fn worker(rank: u16) -> Worker {
    let config = worker::Config {
        job: JOB,
        generation: GENERATION,
        rank: Rank(rank),
        lanes: 1,
        shards: 1,
        pool_slots: 8,
        max_ops: 4,
        cut: cut(),
        in_flight: 1 << 20,
        first_op: OpId(0),
        may_move: false,
        acks_at_rest: false,
        child: None,
    };
    Worker::new(config, Time(0))
}

pub(crate) const fn window(op: u32, index: u32) -> WindowId {
    WindowId::new(OpId(op), index)
}

/// Returns a header of the job that sets only the fields that every kind of message sets.
pub(crate) fn header(kind: Kind, sender: Rank) -> Header {
    Header { kind, sender, flags: Flags::NONE, ..Header::ping(JOB, GENERATION, 0) }
}

/// Encodes a header and a body as a datagram, and sets the header's length.
pub(crate) fn datagram(header: Header, body: &[u8]) -> Vec<u8> {
    let mut bytes = [0xa5; Header::LEN];
    Header {
        length: u16::try_from(body.len()).expect("the length of a body fits a u16"),
        ..header
    }
    .encode(&mut bytes);
    [&bytes[..], body].concat()
}

/// Returns a rank's open of consecutive windows, starting with window `index`. `occupied` says
/// which of them the rank will send.
pub(crate) fn open(
    rank: u16,
    op: u32,
    index: u32,
    descriptor: &Descriptor,
    after: Option<u32>,
    occupied: &[bool],
) -> Vec<u8> {
    let mut body = [0xa5; 1200];
    let windows = occupied.iter().map(|owed| Opening::of(*owed));
    let (len, windows) =
        OpenEncoder::new().encode(descriptor, after.map(OpId), windows, false, &mut body);
    assert_eq!(windows as usize, occupied.len());
    let header = Header { window: window(op, index), ..header(Kind::Open, Rank(rank)) };
    datagram(header, &body[..len])
}
