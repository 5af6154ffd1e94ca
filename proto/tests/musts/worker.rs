//! What a worker has to do.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::error::{OpError, Reject, SubmitError};
use racksum_proto::ids::{Generation, JobId, OpId, Rank, WindowId};
use racksum_proto::time::{Span, Time};
use racksum_proto::wire::{AskEntries, AskEntry, Disagreement, Flags, Header, Kind, Open};
use racksum_proto::worker::{Config, Transmit, Verdict, Worker};

use crate::support::{TIMEOUT, datagram, header, window, worker};

fn sum(windows: u64) -> Descriptor {
    Descriptor::sum(windows * 60 * 256, DType::F32)
}

/// One block of a window's sums.
fn result(id: WindowId, previous: Option<u32>) -> Vec<u8> {
    let previous = previous.unwrap_or(Header::NO_PREVIOUS);
    let header = header(Kind::Result, Rank::AGGREGATOR);
    datagram(Header { window: id, mask: 1, previous, ..header }, &[0; 1024])
}

/// What the aggregator lacks.
fn ask(entries: &[AskEntry]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = AskEntries::encode(entries.iter().copied(), &mut body);
    datagram(header(Kind::Ask, Rank::AGGREGATOR), &body[..len])
}

fn credit(low: WindowId) -> Vec<u8> {
    datagram(Header { ack: low, ..header(Kind::Credit, Rank::AGGREGATOR) }, &[])
}

/// A rank's machine, at one instant after the other.
struct Machine {
    machine: Worker,
    now: Time,
}

/// What a machine says: of data, the header and which fragments.
#[derive(Debug, PartialEq, Eq)]
enum Said {
    Datagram(Header, Vec<u8>),
    Data(Header, u64),
}

impl Machine {
    fn new() -> Self {
        Self { machine: worker(0), now: Time(0) }
    }

    /// Starts an op, each window with one block or none.
    fn start(&mut self, occupied: &[bool]) -> OpId {
        let masks = occupied.iter().map(|is| u64::from(*is)).collect();
        let descriptor = sum(occupied.len() as u64);
        self.machine.submit_scanned(self.now, descriptor, masks, TIMEOUT).expect("a valid op")
    }

    fn take(&mut self, bytes: &[u8]) -> Verdict {
        let verdict = self.machine.handle_datagram(self.now, bytes, false, &mut ());
        if let Verdict::Deliver(delivery) = verdict
            && delivery.complete
        {
            self.machine.handle_delivered(self.now, &delivery, &mut ());
        }
        verdict
    }

    fn reject(&mut self, bytes: &[u8]) -> Reject {
        match self.take(bytes) {
            Verdict::Reject(reject) => reject,
            verdict => panic!("{verdict:?}"),
        }
    }

    fn deliver(&mut self, bytes: &[u8]) {
        let verdict = self.take(bytes);
        assert!(matches!(verdict, Verdict::Deliver(_)), "{verdict:?}");
    }

    fn said(&mut self) -> Vec<Said> {
        let mut out = [0xa5; 2048];
        let mut said = Vec::new();
        while let Some(transmit) = self.machine.poll_transmit(self.now, &mut out, &mut ()) {
            said.push(match transmit {
                Transmit::Datagram { len, .. } => {
                    let (header, body) =
                        Header::decode(&out[..len]).expect("machines write messages");
                    Said::Datagram(header, body.to_vec())
                }
                Transmit::Data(data) => Said::Data(data.header, data.fragments),
            });
        }
        said
    }

    /// The windows of which data is sent.
    fn sends(&mut self) -> Vec<u32> {
        let said = self.said();
        let data = said.iter().filter_map(|said| match said {
            Said::Data(header, _) => Some(header.window.index),
            Said::Datagram(..) => None,
        });
        data.collect()
    }

    /// The entries of the only ask that is sent, and its header.
    fn asks(&mut self) -> (Header, Vec<AskEntry>) {
        let asks: Vec<_> = self
            .said()
            .into_iter()
            .filter_map(|said| match said {
                Said::Datagram(header, body) if header.kind == Kind::Ask => {
                    Some((header, AskEntries::decode(&body).expect("an ask").iter().collect()))
                }
                _ => None,
            })
            .collect();
        assert_eq!(asks.len(), 1, "{asks:?}");
        asks.into_iter().next().expect("one ask")
    }
}

#[test]
fn what_is_not_of_the_job_is_rejected_by_the_reason() {
    // wire: W-7, W-8, W-9, W-10
    let mut rank = Machine::new();
    let good = header(Kind::Credit, Rank::AGGREGATOR);
    assert_eq!(rank.take(&datagram(good, &[])), Verdict::Control);
    for (bad, reject) in [
        (Header { job: JobId(8), ..good }, Reject::Job),
        (Header { generation: Generation(2), ..good }, Reject::Generation),
        (Header { sender: Rank(1), ..good }, Reject::Sender),
        (Header { lane: 1, ..good }, Reject::Stream),
        (Header { shard: 1, ..good }, Reject::Stream),
    ] {
        assert_eq!(rank.reject(&datagram(bad, &[])), reject);
    }
    assert_eq!(rank.machine.counters().rejects.total(), 5);
}

#[test]
fn a_kind_that_aggregators_do_not_send_is_rejected() {
    // wire: W-25, W-26
    let mut rank = Machine::new();
    for kind in [Kind::Open, Kind::Data, Kind::Ack] {
        assert_eq!(rank.reject(&datagram(header(kind, Rank::AGGREGATOR), &[])), Reject::Kind);
    }
    for kind in [Kind::Credit, Kind::Probe] {
        assert_eq!(rank.reject(&datagram(header(kind, Rank::AGGREGATOR), &[0])), Reject::Body);
        assert_eq!(rank.take(&datagram(header(kind, Rank::AGGREGATOR), &[])), Verdict::Control);
    }
}

#[test]
fn results_of_another_shape_than_their_window_are_rejected() {
    // wire: W-11, W-21, W-23, W-29
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    assert_eq!(rank.reject(&result(window(0, 1), None)), Reject::Unopened);
    rank.said();
    let header = header(Kind::Result, Rank::AGGREGATOR);
    let good = Header { window: window(0, 1), mask: 0b11, previous: 0, ..header };
    let first = [0; 1408];
    for (bad, body, reject) in [
        (Header { window: window(0, 3), ..good }, &first[..], Reject::Unopened),
        (Header { mask: 1 << 60, ..good }, &first[..1024], Reject::Shape),
        (Header { fragment: 2, ..good }, &[], Reject::Shape),
        (good, &first[..1407], Reject::Shape),
        (Header { previous: 1, ..good }, &first, Reject::Shape),
        (Header { previous: 2, ..good }, &first, Reject::Shape),
        (Header { previous: 7, ..good }, &first, Reject::Shape),
    ] {
        assert_eq!(rank.reject(&datagram(bad, body)), reject);
    }
    rank.deliver(&datagram(good, &first));
    let other_mask = Header { mask: 0b01, ..good };
    assert_eq!(rank.reject(&datagram(other_mask, &[0; 1024])), Reject::Shape);
    rank.deliver(&datagram(Header { fragment: 1, ..good }, &[0; 640]));
}

#[test]
fn windows_are_sent_as_far_as_the_pool_reaches() {
    // wire: W-28, W-33
    let mut rank = Machine::new();
    rank.start(&[true; 20]);
    assert_eq!(rank.sends(), (0..8).collect::<Vec<_>>());
    rank.take(&credit(window(0, 3)));
    assert_eq!(rank.sends(), [8, 9, 10]);
    // What comes late takes no credit back.
    rank.take(&credit(window(0, 1)));
    rank.take(&credit(window(0, 4)));
    assert_eq!(rank.sends(), [11]);
}

#[test]
fn opens_reach_no_further_than_they_may() {
    // wire: W-35
    let mut rank = Machine::new();
    rank.start(&[false; 40_000]);
    let opened = |rank: &mut Machine| {
        let said = rank.said();
        let ends = said.iter().map(|said| match said {
            Said::Datagram(header, body) if header.kind == Kind::Open => {
                header.window.index + Open::decode(body).unwrap().windows
            }
            said => panic!("{said:?}"),
        });
        ends.max()
    };
    assert_eq!(opened(&mut rank), Some(16_384));
    rank.take(&credit(window(0, 100)));
    assert_eq!(opened(&mut rank), Some(16_484));
}

#[test]
fn opens_that_are_asked_for_are_sent_again() {
    // wire: W-36
    let mut rank = Machine::new();
    rank.start(&[true; 6]);
    rank.said();
    rank.deliver(&result(window(0, 0), None));
    rank.deliver(&result(window(0, 1), Some(0)));
    rank.said();
    for (from, expected) in [(window(0, 3), 3), (window(0, 0), 2)] {
        rank.take(&ask(&[AskEntry { window: from, fragments: 0 }]));
        let said = rank.said();
        let [Said::Datagram(header, body)] = &said[..] else { panic!("{said:?}") };
        assert_eq!((header.kind, header.window.index), (Kind::Open, expected));
        assert_eq!(expected + Open::decode(body).unwrap().windows, 6);
    }
}

#[test]
fn fragments_that_are_asked_for_are_sent_again_and_no_others() {
    // wire: W-37
    let mut rank = Machine::new();
    let masks = vec![0b111, 0b1, 0];
    rank.machine.submit_scanned(rank.now, sum(3), masks, TIMEOUT).unwrap();
    rank.said();
    rank.take(&ask(&[
        AskEntry { window: window(0, 0), fragments: 0b100 },
        AskEntry { window: window(0, 1), fragments: u64::MAX },
        AskEntry { window: window(0, 2), fragments: 1 },
        AskEntry { window: window(7, 0), fragments: 1 },
    ]));
    let again: Vec<_> = rank
        .said()
        .into_iter()
        .map(|said| match said {
            Said::Data(header, fragments) => {
                assert!(header.flags.has(Flags::AGAIN));
                (header.window, fragments)
            }
            said => panic!("{said:?}"),
        })
        .collect();
    assert_eq!(again, [(window(0, 0), 0b100), (window(0, 1), 0b1)]);
    // With the result nothing of it is needed any more.
    rank.deliver(&result(window(0, 0), None));
    rank.take(&ask(&[AskEntry { window: window(0, 0), fragments: 1 }]));
    assert_eq!(rank.sends(), [0; 0]);
}

#[test]
fn results_before_a_whole_one_are_asked_for_at_once() {
    // wire: W-38
    let mut rank = Machine::new();
    rank.start(&[true; 8]);
    rank.said();
    rank.deliver(&result(window(0, 0), None));
    rank.deliver(&result(window(0, 5), Some(4)));
    let (header, entries) = rank.asks();
    assert_eq!(header.window, window(0, 1));
    let lacks = [(1, 0), (4, u64::MAX)];
    let lacks = lacks.map(|(index, fragments)| AskEntry { window: window(0, index), fragments });
    assert_eq!(entries, lacks);
    // The answer may be under way.
    rank.deliver(&result(window(0, 6), Some(5)));
    assert!(rank.said().is_empty());
}

#[test]
fn silence_is_probed_until_the_op_times_out() {
    // wire: W-39
    let mut rank = Machine::new();
    rank.start(&[true; 2]);
    rank.said();
    let mut last = Time(0);
    let mut longest = Span::ZERO;
    while rank.machine.poll_timeout() < Time(0) + TIMEOUT {
        rank.now = rank.machine.poll_timeout();
        rank.machine.handle_timeout(rank.now, &mut ());
        let (header, entries) = rank.asks();
        assert_eq!(header.window, window(0, 0));
        assert_eq!(entries, [AskEntry { window: window(0, 0), fragments: 0 }]);
        assert!(rank.now.since(last) >= longest, "patience grows");
        longest = rank.now.since(last);
        last = rank.now;
    }
    assert!(rank.machine.counters().probes > 3);
    rank.now = rank.machine.poll_timeout();
    rank.machine.handle_timeout(rank.now, &mut ());
    let outcome = rank.machine.poll_outcome().unwrap();
    let Err(OpError::Timeout { op, after, .. }) = outcome.result else { panic!("{outcome:?}") };
    assert_eq!((op, after), (OpId(0), TIMEOUT));
}

#[test]
fn a_fail_ends_its_op_and_the_next_goes_on() {
    // wire: W-41
    let mut rank = Machine::new();
    rank.start(&[true; 4]);
    rank.start(&[true]);
    rank.said();
    rank.deliver(&result(window(0, 0), None));
    let disagreement = Disagreement { one: (Rank(0), sum(4)), other: (Rank(1), sum(3)) };
    let mut body = [0; Disagreement::LEN];
    disagreement.encode(&mut body);
    let fail = datagram(header(Kind::Fail, Rank::AGGREGATOR), &body);
    assert_eq!(rank.take(&fail), Verdict::Control);
    let outcome = rank.machine.poll_outcome().unwrap();
    let Disagreement { one, other } = disagreement;
    assert_eq!(outcome.op, OpId(0));
    assert_eq!(outcome.result, Err(OpError::Mismatch { op: OpId(0), one, other }));
    assert_eq!(rank.reject(&result(window(0, 1), Some(0))), Reject::Stale);
    rank.deliver(&result(window(1, 0), None));
    let outcome = rank.machine.poll_outcome().unwrap();
    assert_eq!((outcome.op, outcome.result), (OpId(1), Ok(())));
}

#[test]
fn what_came_before_changes_nothing() {
    // wire: W-42
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    rank.said();
    rank.deliver(&result(window(0, 1), Some(0)));
    assert_eq!(rank.take(&result(window(0, 1), Some(0))), Verdict::Duplicate);
    rank.deliver(&result(window(0, 0), None));
    assert_eq!(rank.reject(&result(window(0, 1), Some(0))), Reject::Stale);
    rank.deliver(&result(window(0, 2), Some(1)));
    assert!(rank.machine.poll_outcome().is_some());
    rank.take(&credit(window(1, 0)));
    assert_eq!(rank.reject(&result(window(0, 2), Some(1))), Reject::Stale);
    assert!(rank.machine.poll_outcome().is_none());
}

#[test]
fn a_result_acknowledges_itself_in_the_next_datagram() {
    // wire: W-32
    let mut rank = Machine::new();
    rank.start(&[true; 3]);
    rank.said();
    rank.deliver(&result(window(0, 1), Some(0)));
    let (header, _) = rank.asks();
    assert_eq!(header.ack, window(0, 0));
    rank.deliver(&result(window(0, 0), None));
    let said = rank.said();
    let [Said::Datagram(header, _)] = &said[..] else { panic!("{said:?}") };
    assert_eq!((header.kind, header.ack), (Kind::Ack, window(0, 2)));
    rank.deliver(&result(window(0, 2), Some(1)));
    rank.start(&[true]);
    assert!(rank.said().iter().all(|said| match said {
        Said::Datagram(header, _) | Said::Data(header, _) => header.ack == window(1, 0),
    }));
}

#[test]
fn no_more_ops_are_started_than_were_granted() {
    // wire: W-43
    let mut rank = Machine::new();
    let ops = [(); 4].map(|()| rank.start(&[true]));
    assert_eq!(ops, [0, 1, 2, 3].map(OpId));
    let fifth = rank.machine.submit(rank.now, sum(1), TIMEOUT);
    assert_eq!(fifth, Err(SubmitError::TooManyOps { max: 4 }));
}

#[test]
fn an_op_is_opened_wherever_it_has_a_window() {
    // wire: W-45
    let config = *worker(0).config();
    let mut machine = Worker::new(Config { shards: 3, ..config }, Time(0));
    for (windows, masks) in [(7, vec![0; 7]), (2, vec![0; 2])] {
        machine.submit_scanned(Time(0), sum(windows), masks, TIMEOUT).unwrap();
    }
    let mut rank = Machine { machine, now: Time(0) };
    let mut opened: Vec<_> = rank
        .said()
        .iter()
        .map(|said| match said {
            Said::Datagram(header, body) => {
                let open = Open::decode(body).unwrap();
                (header.window.op.0, header.shard, header.window.index, open.windows, open.after)
            }
            said => panic!("{said:?}"),
        })
        .collect();
    opened.sort_unstable();
    assert_eq!(
        opened,
        [
            (0, 0, 0, 3, None),
            (0, 1, 1, 2, None),
            (0, 2, 2, 2, None),
            (1, 1, 0, 1, Some(OpId(0))),
            (1, 2, 1, 1, Some(OpId(0)))
        ]
    );
}
