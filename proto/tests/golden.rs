//! The golden datagrams of `docs/wire.md`. The code must write and read the datagrams in the
//! document, so that code and document cannot drift apart.

mod support;

use racksum_proto::aggregator::{self, Aggregation, Recipient};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{OpId, Rank};
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{
    self, Disagreement, Header, Kind, MissingRanks, NackEntries, NackEntry, OpenDecoder,
};
use racksum_proto::worker::{self, Worker};
use support::{TIMEOUT, aggregation, datagram, header, open, window, worker};

const DOCUMENT: &str = include_str!("../../docs/wire.md");

/// Returns the document's datagrams by name, from the code blocks with the info string `hex NAME`.
fn documented() -> Vec<(&'static str, Vec<u8>)> {
    let mut found = Vec::new();
    let mut lines = DOCUMENT.lines();
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("```hex ") else { continue };
        let hex = lines.by_ref().take_while(|line| *line != "```").flat_map(str::split_whitespace);
        let bytes = hex
            .map(|byte| u8::from_str_radix(byte, 16).expect("a byte has two hexadecimal digits"));
        found.push((name, bytes.collect()));
    }
    found
}

fn golden(name: &str) -> Vec<u8> {
    let mut all = documented().into_iter();
    all.find(|(found, _)| *found == name).unwrap_or_else(|| panic!("docs/wire.md has no {name}")).1
}

/// Returns the descriptor of the op that most of the datagrams belong to: a sum of four elements.
fn four() -> Descriptor {
    Descriptor { tag: 0x6772_6164, ..Descriptor::sum(4, DType::F32) }
}

fn floats(values: [f32; 4]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the contribution of rank 1.
fn contribution() -> Vec<u8> {
    floats([1.0, 2.0, -3.5, 0.25])
}

fn data(rank: u16, body: &[u8]) -> Vec<u8> {
    datagram(Header { mask: 1, ..header(Kind::Data, Rank(rank)) }, body)
}

fn nack(sender: Rank) -> Vec<u8> {
    let entry = NackEntry { window: window(0, 0), fragments: 0 };
    let mut body = [0xa5; 64];
    let len = NackEntries::encode(std::iter::once(entry), &mut body);
    datagram(header(Kind::Nack, sender), &body[..len])
}

fn wait() -> Vec<u8> {
    let ranks = [(Rank(0), Span::from_millis(250))];
    let mut body = [0xa5; 64];
    let len = MissingRanks::encode(ranks.into_iter(), &mut body);
    datagram(header(Kind::Wait, Rank::AGGREGATOR), &body[..len])
}

fn fail() -> Vec<u8> {
    let five = Descriptor { elements: 5, ..four() };
    let mut body = [0xa5; Disagreement::LEN];
    Disagreement { one: (Rank(0), four()), other: (Rank(1), five) }.encode(&mut body);
    datagram(header(Kind::Fail, Rank::AGGREGATOR), &body)
}

fn result() -> Vec<u8> {
    let header =
        Header { mask: 1, previous: Header::NO_PREVIOUS, ..header(Kind::Result, Rank::AGGREGATOR) };
    datagram(header, &floats([1.5, 2.0, -3.5, 0.5]))
}

/// Returns the document's datagrams as the encoders write them.
fn encoded() -> Vec<(&'static str, Vec<u8>)> {
    let three_windows = Descriptor::sum(2 * 60 * 256 + 1, DType::F32);
    let after = |kind, sender| Header { ack: window(1, 0), ..header(kind, sender) };
    vec![
        ("open", open(1, 0, 0, &four(), None, &[true])),
        ("open-raw", open(1, 1, 0, &three_windows, Some(0), &[true, false, true])),
        ("data", data(1, &contribution())),
        ("nack-opens", nack(Rank::AGGREGATOR)),
        ("probe", nack(Rank(1))),
        ("wait", wait()),
        ("result", result()),
        ("ack", datagram(after(Kind::Ack, Rank(1)), &[])),
        ("credit", datagram(after(Kind::Credit, Rank::AGGREGATOR), &[])),
        ("fail", fail()),
        ("ping", datagram(header(Kind::Ping, Rank::AGGREGATOR), &[])),
    ]
}

fn hex(bytes: &[u8]) -> String {
    let lines = bytes
        .chunks(16)
        .map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" "));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn the_document_shows_what_the_encoders_write() {
    for (name, bytes) in encoded() {
        assert!(golden(name) == bytes, "the encoder writes {name} as\n{}", hex(&bytes));
    }
    // The output of zstd depends on its version, so the tests only read `open-zstd`.
    assert_eq!(documented().len(), encoded().len() + 1);
}

#[test]
fn the_document_shows_every_kind() {
    let mut kinds: Vec<u8> = documented()
        .iter()
        .map(|(name, bytes)| {
            let (header, _) = Header::decode(bytes).unwrap_or_else(|why| panic!("{name}: {why:?}"));
            header.kind as u8
        })
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds, (1..=9).collect::<Vec<_>>());
}

#[test]
fn an_occupancy_that_zstd_compressed_is_read() {
    // wire: W-15
    let bytes = golden("open-zstd");
    let (header, body) = Header::decode(&bytes).unwrap();
    assert_eq!(header.window, window(2, 0));
    let open = OpenDecoder::new().decode(body, false).unwrap();
    assert_eq!((open.windows, open.after), (512, Some(OpId(1))));
    let occupied: Vec<_> = open.occupancy().iter_ones().collect();
    assert_eq!(occupied, [0, 100, 511]);
}

/// Returns the datagram that a machine wrote to `out`.
fn polled(transmit: Option<worker::Transmit>, out: &[u8]) -> Vec<u8> {
    match transmit {
        Some(worker::Transmit::Datagram { len, .. }) => out[..len].to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_machines_say_what_the_document_shows() {
    // wire: W-47
    let mut out = [0xa5; 2048];
    let now = Time(0);
    let mut rank = worker(1);
    rank.submit_scanned(now, four(), vec![1], TIMEOUT).unwrap();
    let first = rank.poll_transmit(now, &mut out, &mut ());
    assert_eq!(polled(first, &out), golden("open"));
    let Some(worker::Transmit::Data(fragments)) = rank.poll_transmit(now, &mut out, &mut ()) else {
        panic!("no data follows the open")
    };
    assert_eq!((fragments.len, fragments.fragments), (16, 1));
    assert_eq!(datagram(fragments.header, &contribution()), golden("data"));

    let mut shard = aggregation();
    for bytes in [golden("open"), open(0, 0, 0, &four(), None, &[true])] {
        let verdict = shard.handle_datagram(now, &bytes, false, &mut ());
        assert_eq!(verdict, Verdict::Control);
    }
    for bytes in [golden("data"), data(0, &floats([0.5, 0.0, 0.0, 0.25]))] {
        let verdict = shard.handle_datagram(now, &bytes, false, &mut ());
        assert!(matches!(verdict, Verdict::Store(_)), "{verdict:?}");
    }
    let fold = shard.poll_fold().unwrap();
    shard.handle_folded(&fold, &mut ());
    let Some(aggregator::Transmit::Result { to: Recipient::All, result }) =
        shard.poll_transmit(now, &mut out, &mut ())
    else {
        panic!("no result goes to all ranks")
    };
    let sums = floats([1.5, 2.0, -3.5, 0.5]);
    assert_eq!(datagram(result.header, &sums), golden("result"));

    let verdict = rank.handle_datagram(now, &golden("result"), false, &mut ());
    let Verdict::Store(delivery) = verdict else { panic!("{verdict:?}") };
    rank.handle_delivered(now, &delivery, &mut ());
    assert_eq!(rank.poll_outcome().map(|outcome| outcome.result), Some(Ok(())));
}

#[test]
fn messages_share_a_datagram() {
    // wire: W-54
    let all: Vec<_> = documented().into_iter().map(|(_, bytes)| bytes).collect();
    let joined = all.concat();
    let read: Vec<_> = wire::messages(&joined).map(Result::unwrap).collect();
    assert_eq!(read.len(), all.len());
    for ((header, body), bytes) in read.into_iter().zip(&all) {
        assert_eq!(datagram(header, body), *bytes);
    }
    assert_eq!(
        Header::decode(&joined),
        Err(Reject::Truncated),
        "the datagram has several messages"
    );
    // After a broken message, the start of the next one is unknown.
    let broken = [&all[0][..], &[0; Header::LEN], &all[0]].concat();
    let read: Vec<_> = wire::messages(&broken).map(|message| message.err()).collect();
    assert_eq!(read, [None, Some(Reject::Magic)]);
}

#[test]
fn every_truncation_of_a_golden_datagram_is_rejected() {
    // wire: W-1, W-5
    for (name, bytes) in documented() {
        let (mut rank, mut shard) = mid_job();
        for len in 0..bytes.len() {
            let short = &bytes[..len];
            assert_eq!(Header::decode(short), Err(Reject::Truncated), "{name} of {len}");
            let verdict = rank.handle_datagram(Time(1), short, false, &mut ());
            assert_eq!(verdict, Verdict::Reject(Reject::Truncated));
            let verdict = shard.handle_datagram(Time(1), short, false, &mut ());
            assert_eq!(verdict, Verdict::Reject(Reject::Truncated));
        }
    }
}

#[test]
fn no_changed_byte_of_a_golden_datagram_panics_a_machine() {
    for (_, bytes) in documented() {
        for at in 0..bytes.len() {
            let (mut rank, mut shard) = mid_job();
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] = value;
                take(&mut rank, &mut shard, &changed);
            }
        }
    }
}

/// Returns rank 1 and the shard with two ops in flight. The first op lacks the other rank's data.
fn mid_job() -> (Worker, Aggregation) {
    let (mut rank, mut shard) = (worker(1), aggregation());
    let three_windows = Descriptor::sum(2 * 60 * 256 + 1, DType::F32);
    rank.submit_scanned(Time(0), four(), vec![1], TIMEOUT).expect("a valid op");
    rank.submit_scanned(Time(0), three_windows, vec![1, 0, 1], TIMEOUT).expect("a valid op");
    for bytes in [golden("open"), golden("open-raw"), golden("data")] {
        shard.handle_datagram(Time(0), &bytes, false, &mut ());
    }
    drain(&mut rank, &mut shard);
    (rank, shard)
}

fn take(rank: &mut Worker, shard: &mut Aggregation, bytes: &[u8]) {
    let verdict = rank.handle_datagram(Time(1), bytes, false, &mut ());
    if let Verdict::Store(delivery) = verdict
        && delivery.complete
    {
        rank.handle_delivered(Time(1), &delivery, &mut ());
    }
    shard.handle_datagram(Time(1), bytes, true, &mut ());
    drain(rank, shard);
}

/// Polls both machines until neither has anything to send, and panics if they never stop.
fn drain(rank: &mut Worker, shard: &mut Aggregation) {
    let mut out = [0xa5; 2048];
    for polls in 0.. {
        assert!(polls < 10_000, "the machines never stop sending");
        let fold = shard.poll_fold();
        if let Some(fold) = &fold {
            shard.handle_folded(fold, &mut ());
        }
        let silent = rank.poll_transmit(Time(1), &mut out, &mut ()).is_none()
            && shard.poll_transmit(Time(1), &mut out, &mut ()).is_none();
        if fold.is_none() && silent {
            break;
        }
    }
    while rank.poll_outcome().is_some() {}
}
