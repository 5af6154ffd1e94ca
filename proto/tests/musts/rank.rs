//! A rank of one small job, and the messages that the aggregator sends to it.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::ids::{OpId, Rank, WindowId};
use racksum_proto::observer::EventCounts;
use racksum_proto::reject::Reject;
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Disagreement, Header, Kind, MissingRanks, NackEntries, NackEntry};
use racksum_proto::worker::{Delivery, Transmit, Worker};

use crate::support::{TIMEOUT, datagram, header, worker};

pub(crate) fn sum(windows: u64) -> Descriptor {
    Descriptor::sum(windows * 60 * 256, DType::F32)
}

/// Returns a result of one block for a window.
pub(crate) fn result(id: WindowId, previous: Option<u32>) -> Vec<u8> {
    let previous = previous.unwrap_or(Header::NO_PREVIOUS);
    let header = header(Kind::Result, Rank::AGGREGATOR);
    datagram(Header { window: id, mask: 1, previous, ..header }, &[0; 1024])
}

/// Returns a nack from the aggregator with these entries.
pub(crate) fn nack(entries: &[NackEntry]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = NackEntries::encode(entries.iter().copied(), &mut body);
    datagram(header(Kind::Nack, Rank::AGGREGATOR), &body[..len])
}

pub(crate) fn everything_from(from: WindowId) -> [NackEntry; 1] {
    [NackEntry { window: from, fragments: 0 }]
}

pub(crate) fn wait(window: WindowId, ranks: &[(Rank, Span)]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = MissingRanks::encode(ranks.iter().copied(), &mut body);
    datagram(Header { window, ..header(Kind::Wait, Rank::AGGREGATOR) }, &body[..len])
}

pub(crate) fn disagreement() -> Disagreement {
    Disagreement { one: (Rank(0), sum(4)), other: (Rank(1), sum(3)) }
}

pub(crate) fn fail(window: WindowId) -> Vec<u8> {
    let mut body = [0; Disagreement::LEN];
    disagreement().encode(&mut body);
    datagram(Header { window, ..header(Kind::Fail, Rank::AGGREGATOR) }, &body)
}

pub(crate) fn credit(low: WindowId) -> Vec<u8> {
    datagram(Header { ack: low, ..header(Kind::Credit, Rank::AGGREGATOR) }, &[])
}

/// A rank's state machine, its events and its clock.
pub(crate) struct Machine {
    pub(crate) machine: Worker,
    pub(crate) events: EventCounts,
    pub(crate) now: Time,
}

/// A message that the rank sends. Data appears as its header and the mask of its fragments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Datagram(Header, Vec<u8>),
    Data(Header, u64),
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::of(worker(0))
    }

    pub(crate) fn of(machine: Worker) -> Self {
        Self { machine, events: EventCounts::default(), now: Time(0) }
    }

    /// Starts an op whose windows have one block each where `occupied` is true, and no block
    /// elsewhere.
    pub(crate) fn start(&mut self, occupied: &[bool]) -> OpId {
        let masks = occupied.iter().map(|is| u64::from(*is)).collect();
        let descriptor = sum(occupied.len() as u64);
        self.machine.submit_scanned(self.now, descriptor, masks, TIMEOUT).expect("the op is valid")
    }

    pub(crate) fn take(&mut self, bytes: &[u8]) -> Verdict<Delivery> {
        let verdict = self.machine.handle_datagram(self.now, bytes, false, &mut self.events);
        if let Verdict::Store(delivery) = verdict
            && delivery.complete
        {
            self.machine.handle_delivered(self.now, &delivery, &mut self.events);
        }
        verdict
    }

    pub(crate) fn reject(&mut self, bytes: &[u8]) -> Reject {
        match self.take(bytes) {
            Verdict::Reject(reject) => reject,
            verdict => panic!("{verdict:?}"),
        }
    }

    pub(crate) fn deliver(&mut self, bytes: &[u8]) {
        let verdict = self.take(bytes);
        assert!(matches!(verdict, Verdict::Store(_)), "{verdict:?}");
    }

    /// Advances the clock by 200 ms, longer than any answer takes, and handles timeouts.
    pub(crate) fn expire(&mut self) {
        self.now = self.now + Span::from_millis(200);
        self.machine.handle_timeout(self.now, &mut self.events);
    }

    /// Advances the clock to the timeout of ops that started at time zero, and handles timeouts.
    pub(crate) fn expire_ops(&mut self) {
        self.now = Time(0) + TIMEOUT;
        self.machine.handle_timeout(self.now, &mut self.events);
    }

    pub(crate) fn sent(&mut self) -> Vec<Sent> {
        let mut out = [0xa5; 2048];
        let mut sent = Vec::new();
        while let Some(transmit) = self.machine.poll_transmit(self.now, &mut out, &mut self.events)
        {
            sent.push(match transmit {
                Transmit::Datagram { len, .. } => {
                    let (header, body) =
                        Header::decode(&out[..len]).expect("a machine writes valid messages");
                    Sent::Datagram(header, body.to_vec())
                }
                Transmit::Data(data) => Sent::Data(data.header, data.fragments),
            });
        }
        sent
    }

    /// Returns the windows of the data that the rank sends now.
    pub(crate) fn sends(&mut self) -> Vec<u32> {
        let sent = self.sent();
        let data = sent.iter().filter_map(|sent| match sent {
            Sent::Data(header, _) => Some(header.window.index),
            Sent::Datagram(..) => None,
        });
        data.collect()
    }

    /// Returns the header and the entries of the only nack that the rank sends now.
    pub(crate) fn nacks(&mut self) -> (Header, Vec<NackEntry>) {
        let nacks: Vec<_> = self
            .sent()
            .into_iter()
            .filter_map(|sent| match sent {
                Sent::Datagram(header, body) if header.kind == Kind::Nack => Some((
                    header,
                    NackEntries::decode(&body).expect("the body is a nack").iter().collect(),
                )),
                _ => None,
            })
            .collect();
        assert_eq!(nacks.len(), 1, "{nacks:?}");
        nacks.into_iter().next().expect("there is one nack")
    }
}
