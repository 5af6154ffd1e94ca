//! What an aggregator has to do.

use racksum_proto::aggregator::{Aggregation, Fold, Recipient, Transmit, Verdict};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::Reject;
use racksum_proto::geometry::Geometry;
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{
    AskEntries, AskEntry, Disagreement, Flags, Header, Kind, MissingRanks, Open,
};

use crate::support::{aggregation, datagram, header, open, shard, window};

/// Elements of a window of f32.
const WINDOW: u64 = 60 * 256;

fn sum(windows: u64) -> Descriptor {
    Descriptor::sum(windows * WINDOW, DType::F32)
}

/// The fragments of one block of a window.
fn block(rank: u16, id: WindowId) -> Vec<u8> {
    let header = Header { window: id, mask: 1, ..header(Kind::Data, Rank(rank)) };
    datagram(header, &[0; 1024])
}

fn ack(rank: u16, ack: WindowId) -> Vec<u8> {
    datagram(Header { ack, ..header(Kind::Ack, Rank(rank)) }, &[])
}

/// A rank's ask, that has no result from `from` on.
fn ask(rank: u16, from: WindowId, entries: &[AskEntry]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = AskEntries::encode(entries.iter().copied(), &mut body);
    datagram(Header { window: from, ..header(Kind::Ask, Rank(rank)) }, &body[..len])
}

fn everything_from(from: WindowId) -> [AskEntry; 1] {
    [AskEntry { window: from, fragments: 0 }]
}

/// A machine, at one instant after the other.
struct Shard {
    machine: Aggregation,
    now: Time,
    unheard: Vec<Said>,
}

/// To whom, the header, and but for results the body.
type Said = (Recipient, Header, Vec<u8>);

impl Shard {
    fn new() -> Self {
        Self::of(aggregation())
    }

    fn of(machine: Aggregation) -> Self {
        Self { machine, now: Time(0), unheard: Vec::new() }
    }

    fn take(&mut self, bytes: &[u8]) -> Verdict {
        self.machine.handle_datagram(self.now, bytes, false, &mut ())
    }

    fn reject(&mut self, bytes: &[u8]) -> Reject {
        match self.take(bytes) {
            Verdict::Reject(reject) => reject,
            verdict => panic!("{verdict:?}"),
        }
    }

    fn store(&mut self, bytes: &[u8]) {
        let verdict = self.take(bytes);
        assert!(matches!(verdict, Verdict::Store(_)), "{verdict:?}");
    }

    /// Both ranks open an op of `occupied.len()` windows alike.
    fn open(&mut self, op: u32, after: Option<u32>, occupied: &[bool]) {
        for rank in [0, 1] {
            let open = open(rank, op, 0, &sum(occupied.len() as u64), after, occupied);
            assert_eq!(self.take(&open), Verdict::Control);
        }
    }

    fn fold(&mut self) -> Option<Fold> {
        let fold = self.machine.poll_fold()?;
        self.machine.handle_folded(&fold, &mut ());
        Some(fold)
    }

    /// All that is due.
    fn said(&mut self) -> Vec<Said> {
        let mut out = [0xa5; 2048];
        let mut said = Vec::new();
        while let Some(transmit) = self.machine.poll_transmit(self.now, &mut out, &mut ()) {
            said.push(match transmit {
                Transmit::Datagram { to, len } => {
                    let (header, body) =
                        Header::decode(&out[..len]).expect("machines write messages");
                    (to, header, body.to_vec())
                }
                Transmit::Result { to, result } => {
                    let fragments = result.fragments.to_be_bytes();
                    (to, result.header, fragments.to_vec())
                }
            });
        }
        said
    }

    /// The only thing that is due.
    fn says(&mut self) -> Said {
        let mut said = self.said();
        assert_eq!(said.len(), 1, "{said:?}");
        said.remove(0)
    }

    /// The only thing of a kind that is due to a rank alone. What else is due to anyone else is
    /// kept back for the next call.
    fn says_to(&mut self, rank: u16, kind: Kind) -> (Header, Vec<u8>) {
        let mut said = std::mem::take(&mut self.unheard);
        said.extend(self.said());
        let (mine, others) = said
            .into_iter()
            .partition(|(to, header, _)| (*to, header.kind) == (Recipient::Rank(Rank(rank)), kind));
        self.unheard = others;
        let mine: Vec<_> = mine;
        let [(_, header, body)] = &mine[..] else { panic!("{mine:?}") };
        (*header, body.clone())
    }

    /// The last rank contributes its block of a window, which is folded.
    fn complete(&mut self, rank: u16, id: WindowId) -> Fold {
        self.store(&block(rank, id));
        let fold = self.fold().expect("all have sent all they owe");
        assert_eq!(fold.window, id);
        fold
    }

    /// Both ranks contribute their block of a window, which is folded.
    fn finish(&mut self, id: WindowId) -> Fold {
        self.store(&block(0, id));
        self.complete(1, id)
    }
}

fn entries(body: &[u8]) -> Vec<AskEntry> {
    AskEntries::decode(body).expect("an ask").iter().collect()
}

#[test]
fn what_is_not_of_the_job_is_rejected_by_the_reason() {
    // wire: W-7, W-8, W-9, W-10
    let mut shard = Shard::new();
    let good = header(Kind::Ack, Rank(1));
    assert_eq!(shard.take(&datagram(good, &[])), Verdict::Control);
    for (bad, reject) in [
        (Header { job: JobId(8), ..good }, Reject::Job),
        (Header { generation: Generation(2), ..good }, Reject::Generation),
        (Header { generation: Generation(4), ..good }, Reject::Generation),
        (Header { sender: Rank(2), ..good }, Reject::Sender),
        (Header { sender: Rank::AGGREGATOR, ..good }, Reject::Sender),
        (Header { lane: 1, ..good }, Reject::Stream),
        (Header { shard: 1, ..good }, Reject::Stream),
    ] {
        assert_eq!(shard.reject(&datagram(bad, &[])), reject);
    }
    assert_eq!(shard.machine.counters().rejects.total(), 7);
    assert_eq!(shard.said(), []);
}

#[test]
fn a_kind_that_workers_do_not_send_is_rejected() {
    // wire: W-25, W-26
    let mut shard = Shard::new();
    for kind in [Kind::Result, Kind::Credit, Kind::Wait, Kind::Fail, Kind::Probe] {
        assert_eq!(shard.reject(&datagram(header(kind, Rank(0)), &[])), Reject::Kind);
    }
    assert_eq!(shard.reject(&datagram(header(Kind::Ack, Rank(0)), &[0])), Reject::Body);
}

#[test]
fn data_of_another_shape_than_its_window_is_rejected() {
    // wire: W-11, W-21, W-29
    let mut shard = Shard::new();
    let two_blocks = Descriptor::sum(512, DType::F32);
    for rank in [0, 1] {
        shard.take(&open(rank, 0, 0, &two_blocks, None, &[true]));
    }
    let good = Header { mask: 0b11, ..header(Kind::Data, Rank(0)) };
    let first = [0; 1408];
    for (bad, body) in [
        (Header { window: window(0, 1), ..good }, &first[..]),
        (Header { mask: 0, ..good }, &[]),
        (Header { mask: 0b111, ..good }, &first),
        (Header { fragment: 2, ..good }, &[]),
        (good, &first[..1407]),
        (Header { fragment: 1, ..good }, &first),
    ] {
        assert_eq!(shard.reject(&datagram(bad, body)), Reject::Shape);
    }
    shard.store(&datagram(good, &first));
    let other_mask = Header { mask: 0b01, ..good };
    assert_eq!(shard.reject(&datagram(other_mask, &[0; 1024])), Reject::Shape);
    shard.store(&datagram(Header { fragment: 1, ..good }, &[0; 640]));
}

#[test]
fn a_stretch_beyond_its_op_or_of_another_lane_is_rejected() {
    // wire: W-20, W-24
    let mut machine = Shard::of(Aggregation::new(shard(1, 2), Time(0)));
    let of = |bytes: Vec<u8>| {
        let (header, body) = Header::decode(&bytes).unwrap();
        datagram(Header { shard: 1, ..header }, body)
    };
    // Windows 1 and 3 of op 0 are the second shard's.
    for (index, occupied) in [(0, &[true][..]), (1, &[true; 3]), (3, &[true; 2]), (5, &[true])] {
        let open = of(open(0, 0, index, &sum(4), None, occupied));
        assert_eq!(machine.reject(&open), Reject::Shape, "{index}");
    }
    assert_eq!(machine.take(&of(open(0, 0, 1, &sum(4), None, &[true; 2]))), Verdict::Control);
    let other_lane = Descriptor { lane: 1, ..sum(4) };
    let open = of(open(0, 0, 1, &other_lane, None, &[true; 2]));
    assert_eq!(machine.reject(&open), Reject::Body);
}

#[test]
fn data_needs_an_open_that_says_it_comes() {
    // wire: W-27
    let mut shard = Shard::new();
    assert_eq!(shard.reject(&block(0, window(0, 0))), Reject::Unopened);
    let (to, header, body) = shard.says();
    assert_eq!((to, header.kind), (Recipient::Rank(Rank(0)), Kind::Ask));
    assert_eq!(entries(&body), everything_from(window(0, 0)));

    shard.take(&open(0, 0, 0, &sum(4), None, &[true, false]));
    assert_eq!(shard.reject(&block(0, window(0, 1))), Reject::Unowed);
    assert_eq!(shard.reject(&block(0, window(0, 2))), Reject::Unopened);
    shard.store(&block(0, window(0, 0)));
}

#[test]
fn data_beyond_the_pool_is_rejected() {
    // wire: W-28
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 20]);
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.store(&block(0, window(0, 7)));
    shard.finish(window(0, 0));
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.take(&ack(0, window(0, 1)));
    assert_eq!(shard.reject(&block(0, window(0, 8))), Reject::BeyondPool);
    shard.take(&ack(1, window(0, 1)));
    shard.store(&block(0, window(0, 8)));
}

#[test]
fn stretches_are_taken_in_order_only() {
    // wire: W-34
    let mut shard = Shard::new();
    // A later part of an op, and an op after one that is missing.
    for late in
        [open(0, 0, 2, &sum(4), None, &[true; 2]), open(0, 1, 0, &sum(4), Some(0), &[true; 4])]
    {
        shard.now = shard.now + Span::from_secs(1);
        assert_eq!(shard.take(&late), Verdict::Control);
        let (_, header, body) = shard.says();
        assert_eq!(header.kind, Kind::Ask);
        assert_eq!(entries(&body), everything_from(window(0, 0)));
    }
    shard.take(&open(0, 0, 0, &sum(4), None, &[true; 2]));
    assert_eq!(shard.reject(&block(0, window(0, 2))), Reject::Unopened);
    shard.take(&open(0, 0, 2, &sum(4), None, &[true; 2]));
    shard.store(&block(0, window(0, 2)));
}

#[test]
fn what_is_opened_too_far_ahead_is_not_taken() {
    // wire: W-35
    let mut shard = Shard::new();
    let large = sum(40_000);
    for start in [0, 8192, 16_384, 24_576] {
        for rank in [0, 1] {
            shard.take(&open(rank, 0, start, &large, None, &[false; Open::MAX_WINDOWS]));
        }
    }
    // Nobody owes any of them, so the fold moves on over what was taken, and no further.
    assert!(shard.fold().is_none());
    for rank in [0, 1] {
        let (header, body) = shard.says_to(rank, Kind::Ask);
        assert_eq!(header.ack, window(0, 16_384));
        assert_eq!(entries(&body), everything_from(window(0, 16_384)));
    }
}

#[test]
fn a_disagreement_is_told_to_every_rank_and_the_next_op_runs() {
    // wire: W-40
    let mut shard = Shard::new();
    shard.take(&open(0, 0, 0, &sum(4), None, &[true; 4]));
    shard.take(&open(1, 0, 0, &sum(3), None, &[true; 3]));
    let said = shard.said();
    let expected = Disagreement { one: (Rank(0), sum(4)), other: (Rank(1), sum(3)) };
    for (_, header, body) in &said {
        assert_eq!((header.kind, header.window.op), (Kind::Fail, OpId(0)));
        assert_eq!(Disagreement::decode(body), Ok(expected));
    }
    assert!(said.iter().any(|(to, ..)| *to == Recipient::All));
    shard.open(1, Some(0), &[true]);
    assert_eq!(shard.finish(window(1, 0)).window, window(1, 0));
}

#[test]
fn more_ops_than_granted_are_rejected() {
    // wire: W-43
    let mut shard = Shard::new();
    for op in 0u32..8 {
        let after = op.checked_sub(1);
        assert_eq!(shard.take(&open(0, op, 0, &sum(1), after, &[true])), Verdict::Control);
    }
    assert_eq!(shard.reject(&open(0, 8, 0, &sum(1), Some(7), &[true])), Reject::BeyondOps);
}

#[test]
fn windows_are_folded_in_order_and_whole() {
    // wire: W-30
    let mut shard = Shard::new();
    shard.take(&open(0, 0, 0, &sum(2), None, &[true, true]));
    shard.store(&block(0, window(0, 0)));
    assert!(shard.fold().is_none(), "the other rank may owe it");
    shard.take(&open(1, 0, 0, &sum(2), None, &[false, true]));
    shard.store(&block(1, window(0, 1)));
    assert_eq!(shard.fold().map(|fold| fold.window), Some(window(0, 0)));
    assert!(shard.fold().is_none(), "rank 0 owes the next");
    let two_blocks = Header { mask: 0b11, ..header(Kind::Data, Rank(0)) };
    let two_blocks = Header { window: window(0, 1), ..two_blocks };
    shard.store(&datagram(Header { fragment: 1, ..two_blocks }, &[0; 640]));
    assert!(shard.fold().is_none(), "half of it is missing");
    shard.store(&datagram(two_blocks, &[0; 1408]));
    let fold = shard.fold().unwrap();
    assert_eq!((fold.window, fold.union), (window(0, 1), 0b11));
    let masks = [0, 1].map(|rank| shard.machine.contribution(&fold, Rank(rank)));
    assert_eq!(masks, [0b11, 0b01]);
    assert!(shard.fold().is_none());
}

#[test]
fn results_are_of_windows_that_somebody_owes_and_of_the_last() {
    // wire: W-31, W-23
    let mut shard = Shard::new();
    shard.open(0, None, &[false, true, false, true, false]);
    shard.open(1, Some(0), &[true]);
    shard.finish(window(0, 1));
    shard.store(&block(1, window(1, 0)));
    shard.finish(window(0, 3));
    assert_eq!(shard.fold().map(|fold| (fold.window, fold.union)), Some((window(0, 4), 0)));
    shard.complete(0, window(1, 0));
    let links: Vec<_> = shard
        .said()
        .iter()
        .map(|(to, header, _)| {
            assert_eq!((*to, header.kind), (Recipient::All, Kind::Result));
            (header.window, header.mask, header.previous)
        })
        .collect();
    let first = Header::NO_PREVIOUS;
    assert_eq!(
        links,
        [
            (window(0, 1), 1, first),
            (window(0, 3), 1, 1),
            (window(0, 4), 0, 3),
            (window(1, 0), 1, first)
        ]
    );
}

#[test]
fn a_result_is_kept_until_every_rank_acknowledged_it() {
    // wire: W-32, W-33
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 20]);
    for index in 0..4 {
        shard.finish(window(0, index));
    }
    // A rank cannot have results that are not there.
    shard.take(&ack(0, window(9, 9)));
    shard.take(&ack(1, window(0, 3)));
    for index in 4..7 {
        shard.finish(window(0, index));
    }
    let lows: Vec<_> = shard.said().iter().map(|(_, header, _)| header.ack).collect();
    assert_eq!(lows, [window(0, 3); 7]);
    let lost = [AskEntry { window: window(0, 5), fragments: 1 }];
    shard.take(&ask(0, window(0, 3), &lost));
    let (to, header, fragments) = shard.says();
    assert_eq!((to, header.window), (Recipient::Rank(Rank(0)), window(0, 5)));
    assert!(header.flags.has(Flags::AGAIN));
    assert_eq!(fragments, 1u64.to_be_bytes());
    // An older acknowledgement that comes late takes nothing back.
    shard.take(&ack(0, window(0, 7)));
    shard.take(&ack(1, window(0, 7)));
    shard.take(&ack(1, window(0, 2)));
    let (to, header, _) = shard.says();
    assert_eq!((to, header.kind, header.ack), (Recipient::All, Kind::Credit, window(0, 7)));
    shard.take(&ask(0, window(0, 3), &lost));
    assert!(shard.said().iter().all(|(_, header, _)| header.kind != Kind::Result));
}

#[test]
fn what_came_before_changes_nothing() {
    // wire: W-42
    let mut shard = Shard::new();
    shard.open(0, None, &[true; 2]);
    shard.store(&block(0, window(0, 0)));
    assert_eq!(shard.take(&block(0, window(0, 0))), Verdict::Duplicate);
    shard.complete(1, window(0, 0));
    assert_eq!(shard.reject(&block(1, window(0, 0))), Reject::Stale);
    assert!(shard.fold().is_none());
    for rank in [0, 1] {
        shard.take(&ack(rank, window(0, 1)));
    }
    shard.finish(window(0, 1));
    for rank in [0, 1] {
        shard.take(&ack(rank, window(1, 0)));
    }
    assert_eq!(shard.reject(&block(0, window(0, 1))), Reject::Stale);
    assert_eq!(shard.reject(&open(0, 0, 0, &sum(2), None, &[true; 2])), Reject::Stale);
    assert_eq!(shard.machine.counters().folds, 2);
}

#[test]
fn an_ask_is_answered_with_what_it_takes() {
    // wire: W-22
    let mut shard = Shard::new();
    let start = window(0, 0);
    let probe = ask(0, start, &everything_from(start));

    // The rank's own open is missing.
    shard.take(&probe);
    let (_, body) = shard.says_to(0, Kind::Ask);
    assert_eq!(entries(&body), everything_from(start));

    // The other rank's is.
    shard.unheard.clear();
    shard.now = Time(2_000_000_000);
    shard.take(&open(0, 0, 0, &sum(2), None, &[true; 2]));
    shard.take(&probe);
    let (header, body) = shard.says_to(0, Kind::Wait);
    assert_eq!(header.window, start);
    let missing: Vec<_> = MissingRanks::decode(&body).unwrap().iter().collect();
    assert_eq!(missing, [(Rank(1), Span::from_secs(2))]);

    // Its own data is.
    shard.unheard.clear();
    shard.take(&open(1, 0, 0, &sum(2), None, &[true; 2]));
    shard.take(&probe);
    let (_, body) = shard.says_to(0, Kind::Ask);
    let all = u64::MAX;
    let lacks = [0, 1].map(|index| AskEntry { window: window(0, index), fragments: all });
    assert_eq!(entries(&body), lacks);

    // The result is there.
    shard.finish(start);
    shard.said();
    shard.take(&probe);
    let (_, header, fragments) = shard.says();
    assert_eq!((header.kind, header.window), (Kind::Result, start));
    assert_eq!(fragments, 1u64.to_be_bytes());

    // The op failed.
    shard.take(&open(1, 0, 0, &sum(3), None, &[true; 3]));
    shard.said();
    shard.take(&probe);
    assert!(
        shard.said().iter().any(|(to, header, _)| {
            (*to, header.kind) == (Recipient::Rank(Rank(0)), Kind::Fail)
        })
    );
}

#[test]
fn the_windows_of_an_op_are_on_one_shard_each() {
    // wire: W-44
    let geometry = Geometry::new(&sum(5));
    let mut taken = 0;
    for number in 0..3 {
        let mut machine = Shard::of(Aggregation::new(shard(number, 3), Time(0)));
        for index in 0..geometry.windows() {
            let bytes = open(0, 7, index, &sum(5), None, &[true]);
            let (header, body) = Header::decode(&bytes).unwrap();
            let verdict = machine.take(&datagram(Header { shard: number, ..header }, body));
            let expected = (index + 7) % 3 == u32::from(number);
            assert_eq!(verdict != Verdict::Reject(Reject::Shape), expected, "{index}");
            taken += u32::from(expected);
        }
    }
    assert_eq!(taken, 5);
}
