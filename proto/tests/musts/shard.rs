//! A shard of one small job, and the messages that ranks send to it.

use racksum_proto::aggregator::{Aggregation, CompleteWindow, FragmentPlace, Recipient, Transmit};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::observer::EventCounts;
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Header, Kind, MissingRanks, NackEntries, NackEntry};

use crate::support::{aggregation, datagram, header, open};

/// The number of f32 elements in a window.
pub(crate) const WINDOW: u64 = 60 * 256;

pub(crate) fn sum(windows: u64) -> Descriptor {
    Descriptor::sum(windows * WINDOW, DType::F32)
}

/// Returns a rank's data for a window in which it has one block.
pub(crate) fn block(rank: u16, id: WindowId) -> Vec<u8> {
    let header = Header { window: id, mask: 1, ..header(Kind::Data, Rank(rank)) };
    datagram(header, &[0; 1024])
}

pub(crate) fn ack(rank: u16, ack: WindowId) -> Vec<u8> {
    datagram(Header { ack, ..header(Kind::Ack, Rank(rank)) }, &[])
}

/// Returns a nack from a rank whose first missing result is that of window `from`.
pub(crate) fn nack(rank: u16, from: WindowId, entries: &[NackEntry]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = NackEntries::encode(entries.iter().copied(), &mut body);
    datagram(Header { window: from, ..header(Kind::Nack, Rank(rank)) }, &body[..len])
}

pub(crate) fn everything_from(from: WindowId) -> [NackEntry; 1] {
    [NackEntry { window: from, fragments: 0 }]
}

/// A shard's state machine, its events and its clock.
pub(crate) struct Shard {
    pub(crate) machine: Aggregation,
    pub(crate) events: EventCounts,
    pub(crate) now: Time,
    pub(crate) unread: Vec<Sent>,
}

/// A message's recipient, header and body. For a result, the mask of its fragments takes the place
/// of the body.
pub(crate) type Sent = (Recipient, Header, Vec<u8>);

impl Shard {
    pub(crate) fn new() -> Self {
        Self::of(aggregation())
    }

    pub(crate) fn of(machine: Aggregation) -> Self {
        Self { machine, events: EventCounts::default(), now: Time(0), unread: Vec::new() }
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Verdict<FragmentPlace> {
        self.machine.handle_datagram(self.now, bytes, false, &mut self.events)
    }

    pub(crate) fn reject(&mut self, bytes: &[u8]) -> Reject {
        match self.take(bytes) {
            Verdict::Reject(reject) => reject,
            verdict => panic!("{verdict:?}"),
        }
    }

    pub(crate) fn store(&mut self, bytes: &[u8]) {
        let verdict = self.take(bytes);
        assert!(matches!(verdict, Verdict::Store(_)), "{verdict:?}");
    }

    /// Makes both ranks open the same op of `occupied.len()` windows.
    pub(crate) fn open(&mut self, op: u32, after: Option<u32>, occupied: &[bool]) {
        for rank in [0, 1] {
            let open = open(rank, op, 0, &sum(occupied.len() as u64), after, occupied);
            assert_eq!(self.take(&open), Verdict::Control);
        }
    }

    pub(crate) fn fold(&mut self) -> Option<CompleteWindow> {
        let fold = self.machine.poll_fold()?;
        self.machine.handle_folded(&fold, &mut self.events);
        Some(fold)
    }

    /// Returns all messages that are due.
    pub(crate) fn sent(&mut self) -> Vec<Sent> {
        let mut out = [0xa5; 2048];
        let mut sent = Vec::new();
        while let Some(transmit) = self.machine.poll_transmit(self.now, &mut out, &mut self.events)
        {
            sent.push(match transmit {
                Transmit::Datagram { to, len } => {
                    let (header, body) =
                        Header::decode(&out[..len]).expect("a machine writes valid messages");
                    (to, header, body.to_vec())
                }
                Transmit::Result { to, result } => {
                    let fragments = result.fragments.to_be_bytes();
                    (to, result.header, fragments.to_vec())
                }
            });
        }
        sent
    }

    /// Returns the only message that is due.
    pub(crate) fn sent_one(&mut self) -> Sent {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent.remove(0)
    }

    /// Returns the only message of this kind that is due to one rank, and keeps all other messages
    /// for the next call.
    pub(crate) fn sent_to(&mut self, rank: u16, kind: Kind) -> (Header, Vec<u8>) {
        let mut sent = std::mem::take(&mut self.unread);
        sent.extend(self.sent());
        let (mine, others) = sent
            .into_iter()
            .partition(|(to, header, _)| (*to, header.kind) == (Recipient::Rank(Rank(rank)), kind));
        self.unread = others;
        let mine: Vec<_> = mine;
        let [(_, header, body)] = &mine[..] else { panic!("{mine:?}") };
        (*header, body.clone())
    }

    /// Delivers the block of `rank`, the last one that a window lacks, and folds the window.
    pub(crate) fn complete(&mut self, rank: u16, id: WindowId) -> CompleteWindow {
        self.store(&block(rank, id));
        let fold = self.fold().expect("both ranks have sent what they owe");
        assert_eq!(fold.window, id);
        fold
    }

    /// Delivers both ranks' blocks of a window, and folds the window.
    pub(crate) fn finish(&mut self, id: WindowId) -> CompleteWindow {
        self.store(&block(0, id));
        self.complete(1, id)
    }
}

pub(crate) fn entries(body: &[u8]) -> Vec<NackEntry> {
    NackEntries::decode(body).expect("the body is a nack").iter().collect()
}

pub(crate) fn names(body: &[u8]) -> Vec<(Rank, Span)> {
    MissingRanks::decode(body).expect("the body is a wait").iter().collect()
}
