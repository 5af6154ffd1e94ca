//! Recovery from loss: what each side requests, and when.

use racksum_proto::aggregator::{self, Aggregation};
use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::DType;
use racksum_proto::geometry::WINDOW_BYTES;
use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::time::{Span, Time};
use racksum_proto::verdict::Verdict;
use racksum_proto::wire::{Flags, Header, Kind, MissingRanks, NackEntries, NackEntry};
use racksum_proto::worker::{self, Worker};

use crate::support::{TIMEOUT, cut, datagram, header, open, shard, window, worker};

/// The mask of all blocks of a full f32 window.
const ALL: u64 = (1 << 60) - 1;

fn sum(windows: u64) -> Descriptor {
    Descriptor::sum(windows * 60 * 256, DType::F32)
}

/// Returns a fragment of a full window, either of a rank's data or of the result.
fn fragment(kind: Kind, sender: Rank, id: WindowId, number: u8, flags: Flags) -> Vec<u8> {
    let body = vec![0; cut().range(WINDOW_BYTES, usize::from(number)).len()];
    let previous = match kind {
        Kind::Result => id.index.checked_sub(1).unwrap_or(Header::NO_PREVIOUS),
        _ => 0,
    };
    let header =
        Header { window: id, mask: ALL, previous, fragment: number, flags, ..header(kind, sender) };
    datagram(header, &body)
}

fn fragments() -> u8 {
    u8::try_from(cut().count(WINDOW_BYTES)).expect("a window has at most 64 fragments")
}

fn nack(sender: Rank, from: WindowId, entries: &[NackEntry]) -> Vec<u8> {
    let mut body = [0; 1200];
    let len = NackEntries::encode(entries.iter().copied(), &mut body);
    datagram(Header { window: from, ..header(Kind::Nack, sender) }, &body[..len])
}

const fn entry(index: u32, fragments: u64) -> NackEntry {
    NackEntry { window: window(0, index), fragments }
}

fn entries_of(datagram: &[u8]) -> Vec<NackEntry> {
    match Header::decode(datagram).expect("a machine writes valid messages") {
        (header, body) if header.kind == Kind::Nack => {
            NackEntries::decode(body).expect("the body is a nack").iter().collect()
        }
        _ => Vec::new(),
    }
}

/// A shard at which both ranks have opened an op, and its clock.
struct Shard(Aggregation, Time);

impl Shard {
    fn new(windows: usize) -> Self {
        Self::of(shard(0, 1), windows)
    }

    fn of(config: aggregator::Config, windows: usize) -> Self {
        let mut machine = Aggregation::new(config, Time(0));
        for rank in [0, 1] {
            let open = open(rank, 0, 0, &sum(windows as u64), None, &vec![true; windows]);
            machine.handle_datagram(Time(0), &open, false, &mut ());
        }
        Self(machine, Time(0))
    }

    fn take(&mut self, bytes: &[u8]) {
        self.0.handle_datagram(self.1, bytes, false, &mut ());
    }

    /// Delivers a fragment of rank 0, and returns the entries of the nacks that the shard sends.
    fn nacks(&mut self, index: u32, number: u8, flags: Flags) -> Vec<NackEntry> {
        self.take(&fragment(Kind::Data, Rank(0), window(0, index), number, flags));
        let mut out = [0; 2048];
        let mut asked = Vec::new();
        while let Some(transmit) = self.0.poll_transmit(self.1, &mut out, &mut ()) {
            if let aggregator::Transmit::Datagram { len, .. } = transmit {
                asked.extend(entries_of(&out[..len]));
            }
        }
        asked
    }

    /// Returns, for each credit that the shard sends, the window before which all data has arrived.
    fn credits(&mut self) -> Vec<WindowId> {
        let mut out = [0; 2048];
        let mut credits = Vec::new();
        while let Some(transmit) = self.0.poll_transmit(self.1, &mut out, &mut ()) {
            if let aggregator::Transmit::Datagram { len, .. } = transmit {
                let (header, _) =
                    Header::decode(&out[..len]).expect("a machine writes valid messages");
                credits.extend((header.kind == Kind::Credit).then_some(header.window));
            }
        }
        credits
    }

    /// Returns the windows and the fragments of the results that the shard sends.
    fn results(&mut self) -> Vec<(u32, u64)> {
        self.sent().0
    }

    /// Returns the results that the shard sends, and the last datagram after them.
    fn sent(&mut self) -> (Vec<(u32, u64)>, Option<Vec<u8>>) {
        let mut out = [0; 2048];
        let (mut sent, mut last) = (Vec::new(), None);
        while let Some(transmit) = self.0.poll_transmit(self.1, &mut out, &mut ()) {
            match transmit {
                aggregator::Transmit::Result { result, .. } => {
                    sent.push((result.header.window.index, result.fragments));
                    last = None;
                }
                aggregator::Transmit::Datagram { len, .. } => last = Some(out[..len].to_vec()),
            }
        }
        (sent, last)
    }

    /// Delivers a window's complete data from both ranks.
    fn fill(&mut self, index: u32) {
        for rank in [0, 1] {
            for number in 0..fragments() {
                self.take(&fragment(Kind::Data, Rank(rank), window(0, index), number, Flags::NONE));
            }
        }
    }

    /// Folds every window that is ready, and returns how many there were.
    fn folds(&mut self) -> usize {
        let mut folds = 0;
        while let Some(fold) = self.0.poll_fold() {
            self.0.handle_folded(&fold, &mut ());
            folds += 1;
        }
        folds
    }
}

#[test]
fn a_fragment_that_three_have_overtaken_is_asked_for_once() {
    let mut shard = Shard::new(2);
    for number in [0, 1, 3, 4] {
        assert_eq!(shard.nacks(0, number, Flags::NONE), []);
    }
    assert_eq!(shard.nacks(0, 5, Flags::NONE), [entry(0, 1 << 2)]);
    assert_eq!(shard.nacks(0, 6, Flags::NONE), []);
    // Fragment 7 is lost. Fragments 8 and 9 may still arrive.
    assert_eq!(shard.nacks(0, 10, Flags::NONE), [entry(0, 1 << 7)]);
    (11..fragments()).for_each(|number| drop(shard.nacks(0, number, Flags::NONE)));
    assert_eq!(shard.nacks(0, 2, Flags::AGAIN), []);
}

#[test]
fn the_end_of_a_window_is_asked_for_as_the_next_one_comes() {
    let mut shard = Shard::new(2);
    (0..fragments() - 1).for_each(|number| assert_eq!(shard.nacks(0, number, Flags::NONE), []));
    assert_eq!(shard.nacks(1, 0, Flags::NONE), []);
    assert_eq!(shard.nacks(1, 1, Flags::NONE), []);
    assert_eq!(shard.nacks(1, 2, Flags::NONE), [entry(0, 1 << (fragments() - 1))]);
    assert_eq!(shard.nacks(1, 3, Flags::NONE), []);
}

#[test]
fn an_answer_that_a_later_one_has_overtaken_is_asked_for_again() {
    let mut shard = Shard::new(4);
    (1..fragments()).for_each(|number| drop(shard.nacks(0, number, Flags::NONE)));
    (1..fragments()).for_each(|number| drop(shard.nacks(1, number, Flags::NONE)));
    (0..fragments()).for_each(|number| drop(shard.nacks(2, number, Flags::NONE)));
    let asked = (0..3).map(|number| shard.nacks(3, number, Flags::NONE));
    assert_eq!(asked.collect::<Vec<_>>().concat(), [entry(1, 1)]);
    // The shard has requested the first fragments of windows 0 and 1. The answer for window 1
    // arrives, so the answer for window 0 must be lost.
    assert_eq!(shard.nacks(1, 0, Flags::AGAIN), [entry(0, 1)]);
}

#[test]
fn an_answer_that_is_late_is_asked_for_again() {
    let mut shard = Shard::new(3);
    (1..fragments()).for_each(|number| drop(shard.nacks(0, number, Flags::NONE)));
    shard.1 = Time(0) + Span::from_secs(1);
    assert_eq!(shard.nacks(1, 0, Flags::NONE), []);
    assert_eq!(shard.nacks(1, 1, Flags::NONE), []);
    assert_eq!(shard.nacks(1, 2, Flags::NONE), [entry(0, 1)]);
}

#[test]
fn an_answer_that_comes_twice_shows_that_answers_take_longer() {
    // Returns what the shard asks for again 3 ms after it asked, if an earlier answer came
    // `copies` times.
    let asked_again = |copies: usize| {
        let mut shard = Shard::new(4);
        (1..fragments()).for_each(|number| drop(shard.nacks(0, number, Flags::NONE)));
        (0..copies).for_each(|_| drop(shard.nacks(0, 0, Flags::AGAIN)));
        assert_eq!(shard.folds(), 0, "rank 1 has sent nothing");
        (1..fragments()).for_each(|number| drop(shard.nacks(1, number, Flags::NONE)));
        (0..fragments()).for_each(|number| drop(shard.nacks(2, number, Flags::NONE)));
        assert_eq!([0, 1].map(|number| shard.nacks(3, number, Flags::NONE)), [[]; 2]);
        assert_eq!(shard.nacks(3, 2, Flags::NONE), [entry(1, 1)]);
        shard.1 = shard.1 + Span::from_millis(3);
        (3..fragments())
            .map(|number| shard.nacks(3, number, Flags::NONE))
            .collect::<Vec<_>>()
            .concat()
    };
    assert_eq!(asked_again(1), [entry(1, 1)]);
    assert_eq!(asked_again(40), []);
}

#[test]
fn what_several_ranks_lack_of_results_is_not_added_up() {
    // The pool holds eight windows, and all of them may be in flight once slow start is over.
    let config = aggregator::Config { results_in_flight: 8 * WINDOW_BYTES, ..shard(0, 1) };
    let mut shard = Shard::of(config, 28);
    let acknowledge = |shard: &mut Shard, end| {
        for rank in [0, 1] {
            let ack = window(0, end);
            shard.take(&datagram(Header { ack, ..header(Kind::Ack, Rank(rank)) }, &[]));
        }
    };
    for (first, end) in [(0, 4), (4, 12)] {
        (first..end).for_each(|index| shard.fill(index));
        assert_eq!(shard.folds(), (end - first) as usize);
        acknowledge(&mut shard, end);
    }
    (12..20).for_each(|index| shard.fill(index));
    assert_eq!(shard.folds(), 8);
    // Each of the two ranks lost a twentieth of the results. Only a loss of more than a sixteenth
    // would reduce the congestion window.
    for rank in [0, 1] {
        shard.take(&nack(Rank(rank), window(0, 12), &[entry(12, (1 << 17) - 1)]));
    }
    acknowledge(&mut shard, 20);
    (20..28).for_each(|index| shard.fill(index));
    assert_eq!(shard.folds(), 8);
}

#[test]
fn results_in_flight_stay_within_what_the_ranks_can_buffer() {
    let config = aggregator::Config { results_in_flight: 3 * WINDOW_BYTES, ..shard(0, 1) };
    let mut shard = Shard::of(config, 9);
    for first in [0, 3, 6] {
        (first..first + 3).for_each(|index| shard.fill(index));
        if first < 6 {
            (first + 3..first + 6).for_each(|index| shard.fill(index));
        }
        assert_eq!(shard.folds(), 3);
        for rank in [0, 1] {
            let ack = window(0, first + 3);
            shard.take(&datagram(Header { ack, ..header(Kind::Ack, Rank(rank)) }, &[]));
        }
    }
}

/// A rank with an op of full windows, and its clock.
struct Machine(Worker, Time);

impl Machine {
    fn new(config: worker::Config, windows: usize) -> Self {
        let mut machine = Worker::new(config, Time(0));
        let masks = vec![ALL; windows];
        machine
            .submit_scanned(Time(0), sum(windows as u64), masks, TIMEOUT)
            .expect("the op is valid");
        Self(machine, Time(0))
    }

    fn take(&mut self, bytes: &[u8]) {
        let verdict = self.0.handle_datagram(self.1, bytes, false, &mut ());
        if let Verdict::Store(delivery) = verdict
            && delivery.complete
        {
            self.0.handle_delivered(self.1, &delivery, &mut ());
        }
    }

    /// Returns the shards and windows of the data that the rank sends now, and the entries of its
    /// nacks.
    fn sent(&mut self) -> (Vec<(u8, u32)>, Vec<NackEntry>) {
        let (mut sent, mut asked) = (Vec::new(), Vec::new());
        let mut out = [0; 2048];
        while let Some(transmit) = self.0.poll_transmit(self.1, &mut out, &mut ()) {
            match transmit {
                worker::Transmit::Data(data) => sent.push((data.shard, data.header.window.index)),
                worker::Transmit::Datagram { len, .. } => asked.extend(entries_of(&out[..len])),
            }
        }
        (sent, asked)
    }

    fn nacks(&mut self, index: u32, number: u8, flags: Flags) -> Vec<NackEntry> {
        let result = fragment(Kind::Result, Rank::AGGREGATOR, window(0, index), number, flags);
        self.take(&result);
        self.sent().1
    }

    /// Advances the clock to the next probe, and returns the entries of its nack.
    fn probes(&mut self) -> Vec<NackEntry> {
        self.1 = self.0.poll_timeout();
        self.0.handle_timeout(self.1, &mut ());
        self.sent().1
    }

    /// Returns how long the rank waits until it probes.
    fn patience(&mut self) -> Span {
        let before = self.1;
        assert_eq!(self.probes().len(), 1, "the rank sends one probe");
        self.1.since(before)
    }
}

#[test]
fn results_that_others_have_overtaken_are_asked_for_once() {
    // wire: W-38
    let mut rank = Machine::new(*worker(0).config(), 4);
    rank.sent();
    for number in [0, 1, 3, 4] {
        assert_eq!(rank.nacks(0, number, Flags::NONE), []);
    }
    assert_eq!(rank.nacks(0, 5, Flags::NONE), [entry(0, 1 << 2)]);
    for number in 6..fragments() - 1 {
        assert_eq!(rank.nacks(0, number, Flags::NONE), []);
    }
    // The third fragment of window 1 shows that all of window 0 was sent.
    assert_eq!(rank.nacks(1, 0, Flags::NONE), []);
    assert_eq!(rank.nacks(1, 1, Flags::NONE), []);
    assert_eq!(rank.nacks(1, 2, Flags::NONE), [entry(0, 1 << (fragments() - 1))]);
    // Window 1 holds up no other window yet, so the rank requests its lost fragment only once
    // fragments of window 3 arrive.
    rank.1 = Time(1_000);
    (4..fragments()).for_each(|number| assert_eq!(rank.nacks(1, number, Flags::NONE), []));
    (0..fragments()).for_each(|number| assert_eq!(rank.nacks(2, number, Flags::NONE), []));
    assert_eq!([0, 1].map(|number| rank.nacks(3, number, Flags::NONE)), [[]; 2]);
    assert_eq!(rank.nacks(3, 2, Flags::NONE), [entry(1, 1 << 3)]);
    // The answer to the last nack has overtaken the answers to the earlier nacks, so the rank
    // repeats the earlier requests.
    let lost = 1 << 2 | 1 << (fragments() - 1);
    assert_eq!(rank.nacks(1, 3, Flags::AGAIN), [entry(0, lost)]);
}

#[test]
fn a_probe_brings_a_sign_and_the_sign_shows_what_is_lost() {
    // wire: W-22, W-38, W-39
    let mut shard = Shard::new(3);
    (0..2).for_each(|index| shard.fill(index));
    assert_eq!(shard.folds(), 2);
    shard.results();
    let mut rank = Machine::new(*worker(0).config(), 3);
    rank.sent();
    // All but two fragments of the first window arrive, and none of the second.
    (0..fragments() - 2).for_each(|number| assert_eq!(rank.nacks(0, number, Flags::NONE), []));
    let asked = rank.probes();
    assert_eq!(asked, [entry(0, 0)]);
    shard.take(&nack(Rank(0), window(0, 0), &asked));
    let (again, sign) = shard.sent();
    assert_eq!(again, [], "a result that may still be in flight is not sent twice");
    rank.take(&sign.expect("the shard answers with a wait"));
    let lost = 0b11 << (fragments() - 2);
    let asked = rank.sent().1;
    assert_eq!(asked, [entry(0, lost), entry(1, u64::MAX)]);
    shard.take(&nack(Rank(0), window(0, 0), &asked));
    assert_eq!(shard.results(), [(0, lost), (1, (1 << fragments()) - 1)]);
}

/// Returns a rank that has requested two lost results, and the wait that showed the loss.
fn of_two_lost_results() -> (Machine, Vec<u8>) {
    let mut rank = Machine::new(*worker(0).config(), 4);
    rank.sent();
    rank.probes();
    let folded = Header { window: window(0, 2), ..header(Kind::Wait, Rank::AGGREGATOR) };
    let sign = datagram(folded, &[0, 0]);
    rank.take(&sign);
    assert_eq!(rank.sent().1, [entry(0, 0), entry(1, u64::MAX)]);
    (rank, sign)
}

#[test]
fn what_is_lost_behind_all_that_came_is_asked_for_once() {
    // wire: W-38
    let (mut rank, sign) = of_two_lost_results();
    rank.take(&sign);
    assert_eq!(rank.sent().1, [], "the answer may still be on its way");
    // One more result is lost. The earlier answers may still arrive.
    let folded = Header { window: window(0, 3), ..header(Kind::Wait, Rank::AGGREGATOR) };
    rank.take(&datagram(folded, &[0, 0]));
    assert_eq!(rank.sent().1, [entry(2, u64::MAX)]);
    // A result that is sent for the first time may overtake the answers.
    (0..fragments()).for_each(|number| assert_eq!(rank.nacks(3, number, Flags::NONE), []));
    (0..fragments()).for_each(|number| assert_eq!(rank.nacks(0, number, Flags::AGAIN), []));
    // The next answer is lost too, as the answer after it shows.
    let last = fragments() - 1;
    (0..last).for_each(|number| assert_eq!(rank.nacks(2, number, Flags::AGAIN), []));
    assert_eq!(rank.nacks(2, last, Flags::AGAIN), [entry(1, u64::MAX)]);
}

#[test]
fn what_is_lost_makes_less_patient_than_what_others_owe() {
    // wire: W-39
    let mut rank = Machine::new(*worker(0).config(), 4);
    rank.sent();
    let first = rank.patience();
    let wait = |at| {
        let folded = Header { window: window(0, at), ..header(Kind::Wait, Rank::AGGREGATOR) };
        datagram(folded, &[0, 0])
    };
    rank.take(&wait(0));
    rank.take(&wait(0));
    rank.take(&wait(0));
    assert!(rank.patience() > first, "the rank waits for other ranks");
    rank.take(&wait(2));
    rank.sent();
    let before = rank.1;
    rank.probes();
    assert!(rank.1.since(before) <= first, "the rank lacks results, so it is impatient");
}

#[test]
fn an_answer_behind_all_that_came_is_asked_for_again_once_it_is_late() {
    // wire: W-38
    let (mut rank, sign) = of_two_lost_results();
    rank.1 = rank.1 + Span::from_secs(1);
    rank.take(&sign);
    assert_eq!(rank.sent().1, [entry(0, 0), entry(1, u64::MAX)]);
}

#[test]
fn a_result_that_comes_again_twice_shows_that_answers_take_longer() {
    // Returns what the rank asks for again 3 ms after it asked, if an earlier answer came `copies`
    // times.
    let asked_again = |copies: usize| {
        let (mut rank, sign) = of_two_lost_results();
        let all = || 0..fragments();
        all().for_each(|number| drop(rank.nacks(0, number, Flags::AGAIN)));
        // The window is complete, so further copies are stale.
        (1..copies).for_each(|_| drop(rank.nacks(0, 0, Flags::AGAIN)));
        rank.1 = rank.1 + Span::from_millis(3);
        rank.take(&sign);
        rank.sent().1
    };
    assert_eq!(asked_again(1), [entry(1, u64::MAX)]);
    assert_eq!(asked_again(40), []);
}

#[test]
fn what_is_sent_again_shows_what_is_lost_even_if_it_has_come_before() {
    let mut rank = Machine::new(*worker(0).config(), 3);
    rank.sent();
    assert_eq!(rank.nacks(0, fragments() - 1, Flags::NONE).len(), 1);
    let lost = 0b11 << (fragments() - 3);
    assert_eq!(rank.nacks(0, fragments() - 1, Flags::AGAIN), [entry(0, lost)]);
}

#[test]
fn what_the_aggregator_asks_for_shows_what_has_left_the_path() {
    let config = *worker(0).config();
    let mut rank = Machine::new(worker::Config { in_flight: 2 * WINDOW_BYTES, ..config }, 4);
    assert_eq!(rank.sent().0, [(0, 0), (0, 1)]);
    // The rest of both windows has arrived, or will be requested later. So there is room for one
    // more window in addition to the repeated fragment.
    rank.take(&nack(Rank::AGGREGATOR, window(0, 0), &[entry(1, 1 << 9)]));
    assert_eq!(rank.sent().0, [(0, 1), (0, 2)]);
}

#[test]
fn a_credit_shows_what_has_left_the_path() {
    // wire: W-56
    let config = *worker(0).config();
    let mut rank = Machine::new(worker::Config { in_flight: 2 * WINDOW_BYTES, ..config }, 5);
    assert_eq!(rank.sent().0, [(0, 0), (0, 1)]);
    let credit = |arrived| {
        let header = header(Kind::Credit, Rank::AGGREGATOR);
        datagram(Header { window: window(0, arrived), ..header }, &[])
    };
    rank.take(&credit(0));
    assert_eq!(rank.sent().0, []);
    rank.take(&credit(1));
    assert_eq!(rank.sent().0, [(0, 2)]);
    // This credit covers only the windows that were sent before it arrived. Windows that are sent
    // later count as in flight.
    rank.take(&credit(4));
    assert_eq!(rank.sent().0, [(0, 3), (0, 4)]);
}

#[test]
fn ranks_are_told_what_has_arrived_while_a_fold_waits() {
    // wire: W-56
    let mut shard = Shard::new(5);
    // One fragment of rank 1's first window is missing, so the shard folds nothing.
    let send = |shard: &mut Shard, rank, index, from| {
        for number in from..fragments() {
            shard.take(&fragment(Kind::Data, Rank(rank), window(0, index), number, Flags::NONE));
        }
    };
    send(&mut shard, 1, 0, 1);
    (1..4).for_each(|index| send(&mut shard, 1, index, 0));
    assert_eq!(shard.credits(), []);
    (0..2).for_each(|index| send(&mut shard, 0, index, 0));
    assert_eq!(shard.credits(), [], "only one window of rank 0 is known to have arrived");
    send(&mut shard, 0, 2, 0);
    assert_eq!(shard.credits(), [window(0, 2)]);
    assert_eq!(shard.credits(), [], "the shard sends each credit once");
}

#[test]
fn a_result_that_can_be_sent_needs_no_credit() {
    let mut shard = Shard::new(5);
    (0..4).for_each(|index| shard.fill(index));
    assert_eq!(shard.credits(), [], "the results will show what has arrived");
    assert_eq!(shard.folds(), 4);
    assert_eq!(shard.results().len(), 4);
    assert_eq!(shard.credits(), [], "the results have shown what has arrived");
}

#[test]
fn ranks_are_told_what_has_arrived_while_results_wait_for_room() {
    // wire: W-56
    let config = aggregator::Config { results_in_flight: 3 * WINDOW_BYTES, ..shard(0, 1) };
    let mut shard = Shard::of(config, 8);
    (0..8).for_each(|index| shard.fill(index));
    let folded = shard.folds();
    assert!(folded < 6, "{folded} windows were folded, although no rank has acknowledged a result");
    let (results, last) = shard.sent();
    assert_eq!(results.len(), folded);
    let last = last.expect("a credit follows the results");
    let (header, _) = Header::decode(&last).expect("a machine writes valid messages");
    assert_eq!((header.kind, header.window), (Kind::Credit, window(0, 7)));
    assert_eq!(shard.folds(), 0);
}

#[test]
fn shards_are_sent_to_in_turn() {
    let config = worker::Config { shards: 2, ..*worker(0).config() };
    let mut rank = Machine::new(config, 4);
    assert_eq!(rank.sent().0, [(0, 0), (1, 1), (0, 2), (1, 3)]);
}

#[test]
fn a_probe_that_may_be_lost_makes_less_patient_than_one_that_is_answered() {
    // wire: W-39
    let mut rank = Machine::new(*worker(0).config(), 1);
    rank.sent();
    let first = rank.patience();
    assert_eq!([rank.patience(), rank.patience(), rank.patience()], [first; 3]);
    let mut rank = Machine::new(*worker(0).config(), 1);
    rank.sent();
    assert_eq!(rank.patience(), first);
    let mut body = [0; 1200];
    let len = MissingRanks::encode([(Rank(1), Span::ZERO)].into_iter(), &mut body);
    // The first answer also provides a sample of the round-trip time.
    rank.1 = rank.1 + Span::from_millis(1);
    rank.take(&datagram(header(Kind::Wait, Rank::AGGREGATOR), &body[..len]));
    let second = rank.patience();
    rank.take(&datagram(header(Kind::Wait, Rank::AGGREGATOR), &body[..len]));
    assert_eq!(rank.patience(), Span(2 * second.0));
}

#[test]
fn what_is_lost_whole_again_and_again_is_waited_for_longer_and_longer() {
    // wire: W-77
    let mut rank = Machine::new(*worker(0).config(), 1);
    rank.sent();
    let mut lose = |lacks: u64| {
        rank.take(&nack(Rank::AGGREGATOR, window(0, 0), &[entry(0, lacks)]));
        assert_eq!(rank.sent().0, [(0, 0)], "the window is sent again after every nack");
        let before = rank.1;
        rank.probes();
        rank.1.since(before)
    };
    let all = (1 << fragments()) - 1;
    let pauses: Vec<Span> = (0..12).map(|_| lose(all)).collect();
    assert!(pauses[..3].iter().all(|pause| *pause < Span::from_millis(32)), "{pauses:?}");
    assert!(pauses[3..].is_sorted() && pauses[11] >= Span::from_millis(1_000), "{pauses:?}");
    // Some fragments have arrived, so the path carries large datagrams.
    assert!(lose(all >> 1) < Span::from_millis(32));
}
