//! Runs arbitrary bytes through every decoder, and checks that no decoder panics. Accepted input
//! must be valid, and must decode to the same value after re-encoding.

use racksum_proto::geometry::{Geometry, MAX_WINDOW_BLOCKS, WINDOW_BYTES};
use racksum_proto::wire::{
    self, Disagreement, Flags, Header, Kind, MissingRanks, NackEntries, Open, OpenDecoder,
    OpenEncoder, Opening,
};

/// Decodes `bytes` as a datagram, and as each kind of body.
pub fn run(bytes: &[u8]) {
    let mut at = 0;
    for message in wire::messages(bytes) {
        let Ok((header, body)) = message else { break };
        let mut again = [0xa5; Header::LEN];
        header.encode(&mut again);
        assert_eq!(again, bytes[at..at + Header::LEN], "a header re-encodes to the same bytes");
        at += Header::LEN;
        assert_eq!(body, &bytes[at..at + body.len()], "the body follows the header");
        at += body.len();
        match header.kind {
            Kind::Open => open(body, header.flags.has(Flags::RESUMED)),
            Kind::Nack => nacks(body),
            Kind::Wait => waits(body),
            Kind::Fail => fails(body),
            Kind::Data | Kind::Ack | Kind::Result | Kind::Credit | Kind::Ping => {}
        }
    }
    if let Ok((_, body)) = Header::decode(bytes) {
        assert_eq!(Header::LEN + body.len(), bytes.len(), "a single message fills its datagram");
    }
    open(bytes, false);
    open(bytes, true);
    nacks(bytes);
    waits(bytes);
    fails(bytes);
}

fn open(body: &[u8], resumed: bool) {
    let Ok(open) = OpenDecoder::new().decode(body, resumed) else { return };
    open.descriptor.validate().expect("a decoded descriptor is valid");
    let geometry = Geometry::new(&open.descriptor);
    let last = geometry.windows() - 1;
    for index in [0, last] {
        let mask = geometry.full_mask(index);
        assert!(geometry.blocks_of(index) <= MAX_WINDOW_BLOCKS);
        assert!(geometry.payload_len(index, mask) <= WINDOW_BYTES);
    }
    assert_eq!(geometry.elements_of(last).end, open.descriptor.elements);

    let bits = open.occupancy().iter().by_vals().zip(open.held().iter().by_vals());
    let windows = bits.map(|(owed, held)| Opening { owed, held });
    assert_eq!(open.occupancy().len(), open.windows as usize);
    let mut again = [0xa5; Open::LEN + Open::MAX_WINDOWS / 8];
    let (len, windows) =
        OpenEncoder::new().encode(&open.descriptor, open.after, windows, resumed, &mut again);
    assert_eq!(windows, open.windows);
    let again = OpenDecoder::new().decode(&again[..len], resumed);
    assert_eq!(again, Ok(open), "an open decodes to the same value after re-encoding");
}

fn nacks(body: &[u8]) {
    let Ok(entries) = NackEntries::decode(body) else { return };
    let mut again = [0xa5; 2 + 16 * NackEntries::MAX];
    let len = NackEntries::encode(entries.iter(), &mut again);
    assert_eq!(&again[..len], body, "a nack re-encodes to the same bytes");
}

fn waits(body: &[u8]) {
    let Ok(ranks) = MissingRanks::decode(body) else { return };
    let mut again = [0xa5; 2 + 6 * MissingRanks::MAX];
    let len = MissingRanks::encode(ranks.iter(), &mut again);
    assert_eq!(&again[..len], body, "a wait re-encodes to the same bytes");
}

fn fails(body: &[u8]) {
    let Ok(disagreement) = Disagreement::decode(body) else { return };
    let mut again = [0xa5; Disagreement::LEN];
    disagreement.encode(&mut again);
    assert_eq!(again, body, "a fail re-encodes to the same bytes");
}
