//! Flows: the datagrams of one direction between two agents, and what arrived of them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use racksum_proto::auth::Key;
use racksum_proto::time::{Span, Time};

use crate::datagram::{Header, Kind, PING_LEN, TRAIN_LEN, TagKey};
use crate::message::{Arrived, Pinged, RATES_MBIT};

/// The flows that an agent sends or expects.
#[derive(Debug, Default)]
pub(crate) struct Flows(Mutex<BTreeMap<u64, Flow>>);

/// One flow at one of its two agents.
#[derive(Debug)]
pub(crate) struct Flow {
    key: TagKey,
    /// The data socket of the other agent.
    peer: SocketAddr,
    /// A number that this agent drew, and that echoes of its pings return.
    nonce: u64,
    pings: Seen,
    echoes: Seen,
    /// The times at which pings were sent, by their numbers.
    sent_at: Vec<Time>,
    rtts_ns: Vec<u64>,
    train: Seen,
    /// The times at which the train's datagrams arrived.
    arrivals: Vec<Time>,
}

/// The answer to a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reaction {
    None,
    /// Send an echo with this header.
    Echo(Header),
}

impl Flows {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Flow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a flow. Returns false if its number is taken or there are too many flows.
    pub(crate) fn add(&self, number: u64, key: &Key, peer: SocketAddr, nonce: u64) -> bool {
        let mut flows = self.all();
        if flows.len() >= MOST_FLOWS || flows.contains_key(&number) {
            return false;
        }
        flows.insert(number, Flow::new(key, peer, nonce));
        true
    }

    pub(crate) fn remove(&self, number: u64) -> Option<Flow> {
        self.all().remove(&number)
    }

    /// Calls `act` with a flow, if it exists.
    pub(crate) fn with<T>(&self, number: u64, act: impl FnOnce(&mut Flow) -> T) -> Option<T> {
        self.all().get_mut(&number).map(act)
    }

    pub(crate) fn key_of(&self, number: u64) -> Option<TagKey> {
        self.with(number, |flow| flow.key.clone())
    }

    /// Counts a datagram that arrived at a time. Other datagrams than those of a flow and of its
    /// other agent are ignored.
    pub(crate) fn receive(&self, datagram: &[u8], from: SocketAddr, at: Time) -> Reaction {
        let Some(header) = Header::read(datagram, |flow| self.key_of(flow)) else {
            return Reaction::None;
        };
        let react = |flow: &mut Flow| match flow.peer == from {
            true => flow.receive(header, datagram.len(), at),
            false => Reaction::None,
        };
        self.with(header.flow, react).unwrap_or(Reaction::None)
    }
}

impl Flow {
    fn new(key: &Key, peer: SocketAddr, nonce: u64) -> Self {
        Self {
            key: TagKey::new(key),
            peer,
            nonce,
            pings: Seen::new(MOST_PINGS),
            echoes: Seen::new(MOST_PINGS),
            sent_at: vec![],
            rtts_ns: vec![],
            train: Seen::new(MOST_TRAIN),
            arrivals: vec![],
        }
    }

    fn receive(&mut self, header: Header, len: usize, at: Time) -> Reaction {
        match header.kind {
            // An echo is sent once per ping and is not longer, so it amplifies nothing.
            Kind::Ping if len == PING_LEN && self.pings.add(header.number) => {
                Reaction::Echo(Header { kind: Kind::Echo, ..header })
            }
            Kind::Echo if len == PING_LEN && header.nonce == self.nonce => {
                self.receive_echo(header, at);
                Reaction::None
            }
            Kind::Train if len == TRAIN_LEN && self.train.add(header.number) => {
                self.arrivals.push(at);
                Reaction::None
            }
            _ => Reaction::None,
        }
    }

    fn receive_echo(&mut self, header: Header, at: Time) {
        let sent_at = usize::try_from(header.number).ok().and_then(|n| self.sent_at.get(n));
        let Some(&sent_at) = sent_at else { return };
        if self.echoes.add(header.number) {
            self.rtts_ns.push(at.since(sent_at).0.saturating_sub(header.held_ns.into()));
        }
    }

    /// Returns the header of the next ping, which is sent at a time. `None` if the flow has no more
    /// numbers, or if the other agent has not echoed any of the first pings: a host without an
    /// agent gets no more than these.
    pub(crate) fn next_ping(&mut self, flow: u64, at: Time) -> Option<Header> {
        let most = if self.is_proven() { MOST_PINGS } else { MOST_UNPROVEN };
        let number = u32::try_from(self.sent_at.len()).ok().filter(|n| *n < most)?;
        self.sent_at.push(at);
        Some(Header::new(Kind::Ping, flow, number, self.nonce))
    }

    /// Returns the address of the other agent.
    pub(crate) const fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns whether the other agent has echoed a ping, and so agrees to receive.
    pub(crate) const fn is_proven(&self) -> bool {
        self.echoes.count > 0
    }

    /// Returns the number of echoes that are still missing.
    pub(crate) fn missing(&self) -> usize {
        self.sent_at.len() - self.echoes.count as usize
    }

    pub(crate) const fn pings(&self) -> u32 {
        self.pings.count
    }

    /// Returns the number of the train's datagrams that have arrived.
    pub(crate) const fn train_arrived(&self) -> u32 {
        self.train.count
    }

    /// Summarizes the pings that were sent, and their echoes.
    pub(crate) fn pinged(&self) -> Pinged {
        let mut rtts_ns = self.rtts_ns.clone();
        rtts_ns.sort_unstable();
        let quantile_us = |permille: usize| {
            let last = rtts_ns.len().saturating_sub(1);
            let rtt_ns = rtts_ns.get((last * permille).div_ceil(1000)).copied().unwrap_or(0);
            as_f64(rtt_ns) / 1e3
        };
        Pinged {
            sent: u32::try_from(self.sent_at.len()).unwrap_or(u32::MAX),
            echoes: self.echoes.count,
            rtt_p50_us: quantile_us(500),
            rtt_p99_us: quantile_us(990),
        }
    }

    /// Summarizes the train that arrived: its rate is that between 40 % and 85 % of its time.
    ///
    /// Token buckets on the path pass the first datagrams at a higher rate than the others. Trains
    /// that share a link do not start and end at exactly the same time, so one may have the link
    /// for itself at first or in the end. The rate is bytes over time at the receiver: single gaps
    /// between datagrams say little, because interfaces deliver interrupts late.
    pub(crate) fn arrived(&self) -> Option<Arrived> {
        let mut arrivals = self.arrivals.clone();
        arrivals.sort_unstable();
        let (&first, &last) = (arrivals.first()?, arrivals.last()?);
        let at_percent = |percent: u64| first + Span(last.since(first).0 / 100 * percent);
        let [from, to] = WINDOW_PERCENT.map(|percent| {
            let place = arrivals.partition_point(|at| *at < at_percent(percent));
            arrivals[place.min(arrivals.len() - 1)]
        });
        // A short train may arrive in so few batches that its middle has a single time.
        let mbit = rate(&arrivals, from, to).or_else(|| rate(&arrivals, first, last));
        Some(Arrived { datagrams: self.train.count, mbit })
    }
}

/// Returns the rate in Mbit/s of the datagrams that arrived after `from` and until `to`. `None` if
/// that time is too short to show one.
fn rate(arrivals: &[Time], from: Time, to: Time) -> Option<f64> {
    // Datagrams with the time of the first one came before the window.
    let count = arrivals.iter().filter(|at| from < **at && **at <= to).count();
    let span = Some(to.since(from)).filter(|span| *span >= LEAST_SPAN)?;
    let bits = 8.0 * as_f64((count * TRAIN_LEN) as u64);
    Some(bits * 1e3 / as_f64(span.0)).filter(|mbit| RATES_MBIT.contains(mbit))
}

#[expect(clippy::cast_precision_loss, reason = "times and sizes are far below 2^53")]
const fn as_f64(number: u64) -> f64 {
    number as f64
}

/// The numbers that have arrived, each counted once.
#[derive(Debug)]
struct Seen {
    bits: Vec<u64>,
    most: u32,
    count: u32,
}

impl Seen {
    const fn new(most: u32) -> Self {
        Self { bits: vec![], most, count: 0 }
    }

    /// Counts a number. Returns false if it was counted before or is too large.
    fn add(&mut self, number: u32) -> bool {
        if number >= self.most {
            return false;
        }
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        let is_new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        self.count += u32::from(is_new);
        is_new
    }
}

/// The part of a train's time at the receiver in which its rate is measured.
const WINDOW_PERCENT: [u64; 2] = [40, 85];
/// The shortest time that shows a rate: a fraction of the middle of a train of 4 MB at 400 Gbit/s.
const LEAST_SPAN: Span = Span(10_000);
/// The greatest number of flows that an agent serves at once.
const MOST_FLOWS: usize = 256;
/// The greatest number of pings of a flow before the first echo.
pub(crate) const MOST_UNPROVEN: u32 = 20;
/// The greatest number of pings of a flow.
pub(crate) const MOST_PINGS: u32 = 10_000;
/// The greatest number of datagrams of a train: 19 MB.
pub(crate) const MOST_TRAIN: u32 = 16_384;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::node::{Sent, is_plausible, is_possible};

    const FLOW: u64 = 3;

    fn flows() -> (Flows, TagKey) {
        let (flows, key) = (Flows::default(), Key([9; Key::LEN]));
        assert!(flows.add(FLOW, &key, peer(), NONCE));
        (flows, TagKey::new(&key))
    }

    const NONCE: u64 = 77;

    fn peer() -> SocketAddr {
        "10.0.0.1:9".parse().unwrap()
    }

    fn datagram(key: &TagKey, kind: Kind, number: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Header::new(kind, FLOW, number, NONCE).write(key, &mut bytes);
        bytes
    }

    #[test]
    fn a_ping_is_echoed_once() {
        let (flows, key) = flows();
        let ping = datagram(&key, Kind::Ping, 4, PING_LEN);
        let echo = Header::new(Kind::Echo, FLOW, 4, NONCE);
        assert_eq!(flows.receive(&ping, peer(), Time(0)), Reaction::Echo(echo));
        assert_eq!(flows.receive(&ping, peer(), Time(0)), Reaction::None);
        let long = datagram(&key, Kind::Ping, 5, 1200);
        assert_eq!(flows.receive(&long, peer(), Time(0)), Reaction::None);
        let many = datagram(&key, Kind::Ping, MOST_PINGS, PING_LEN);
        assert_eq!(flows.receive(&many, peer(), Time(0)), Reaction::None);
        assert_eq!(flows.remove(FLOW).unwrap().pings(), 1);
        assert_eq!(
            flows.receive(&datagram(&key, Kind::Ping, 6, PING_LEN), peer(), Time(0)),
            Reaction::None
        );
    }

    #[test]
    fn only_echoes_of_pings_that_were_sent_count() {
        let (flows, key) = flows();
        let at = |number: u32| Time(u64::from(number) * 1_000_000);
        let send = |number: u32| {
            let at = at(number);
            flows.with(FLOW, |flow| flow.next_ping(FLOW, at)).unwrap()
        };
        for number in 0..MOST_UNPROVEN {
            assert!(send(number).is_some());
        }
        assert_eq!(send(MOST_UNPROVEN), None, "no agent has answered yet");
        let echo = |number: u32, rtt_ns: u64| {
            let mut bytes = vec![0; PING_LEN];
            let header = Header { held_ns: 500, ..Header::new(Kind::Echo, FLOW, number, NONCE) };
            header.write(&key, &mut bytes);
            flows.receive(&bytes, peer(), at(number) + Span(rtt_ns + 500))
        };
        echo(0, 50_000);
        for number in MOST_UNPROVEN..100 {
            assert!(send(number).is_some());
        }
        assert_eq!(echo(100, 1), Reaction::None);
        for number in 0..98 {
            echo(number, 50_000);
        }
        echo(0, 50_000);
        echo(98, 900_000);
        let flow = flows.remove(FLOW).unwrap();
        assert_eq!(flow.missing(), 1);
        let pinged = flow.pinged();
        assert_eq!((pinged.sent, pinged.echoes), (100, 99));
        assert_eq!((pinged.rtt_p50_us, pinged.rtt_p99_us), (50.0, 900.0));
    }

    #[test]
    fn the_rate_of_a_train_is_that_after_its_burst() {
        let (flows, key) = flows();
        // 40 datagrams at once, then one each 100 us: 96 Mbit/s.
        for number in 0..200 {
            let at = Time(u64::from(number.max(40_u32) - 40) * 100_000);
            flows.receive(&datagram(&key, Kind::Train, number, TRAIN_LEN), peer(), at);
        }
        let arrived = flows.remove(FLOW).unwrap().arrived().unwrap();
        assert_eq!(arrived.datagrams, 200);
        assert!((arrived.mbit.unwrap() - 96.0).abs() < 1e-9, "{arrived:?}");
    }

    /// Returns what arrived of a train whose datagrams came at these times in nanoseconds.
    fn arrived(times: &[u64]) -> Option<Arrived> {
        let (flows, key) = flows();
        for (number, at) in (0..).zip(times) {
            flows.receive(&datagram(&key, Kind::Train, number, TRAIN_LEN), peer(), Time(*at));
        }
        flows.remove(FLOW).unwrap().arrived()
    }

    #[test]
    fn a_train_that_takes_no_time_has_no_rate() {
        assert_eq!(arrived(&[]), None);
        for times in [&[5][..], &[5; 100], &[5, 6, 7], &[0, u64::MAX]] {
            let datagrams = u32::try_from(times.len()).unwrap();
            assert_eq!(arrived(times), Some(Arrived { datagrams, mbit: None }), "{times:?}");
        }
    }

    #[test]
    fn a_train_of_two_batches_has_the_rate_of_its_whole_time() {
        let times = [[0; 50], [480_000; 50]].concat();
        let mbit = arrived(&times).unwrap().mbit.unwrap();
        assert!((mbit - 1000.0).abs() < 1e-9, "{mbit}");
    }

    proptest! {
        /// Whatever an agent with the key sends, the summaries are such as a coordinator accepts.
        #[test]
        fn no_datagrams_of_a_flow_spoil_its_summary(
            sent in 0..100_u32,
            datagrams in prop::collection::vec(
                (1..4_u8, any::<u32>(), 0..120_u32, any::<u32>(), 0..1_000_000_000_u64), 0..200),
        ) {
            let (flows, key) = flows();
            for number in 0..sent {
                flows.with(FLOW, |flow| flow.next_ping(FLOW, Time(u64::from(number) * 1_000)));
            }
            for (kind, large, small, held_ns, at) in datagrams {
                let (kind, len) = match kind {
                    1 => (Kind::Ping, PING_LEN),
                    2 => (Kind::Echo, PING_LEN),
                    _ => (Kind::Train, TRAIN_LEN),
                };
                let number = if large % 2 == 0 { small } else { large };
                let mut bytes = vec![0; len];
                let header = Header { held_ns, ..Header::new(kind, FLOW, number, NONCE) };
                header.write(&key, &mut bytes);
                let reaction = flows.receive(&bytes, peer(), Time(at));
                prop_assert!(reaction == Reaction::None || kind == Kind::Ping);
            }
            let flow = flows.remove(FLOW).unwrap();
            prop_assert!(is_plausible(&flow.pinged(), 0..=sent));
            let most = Sent { pings: MOST_PINGS, train: MOST_TRAIN };
            prop_assert!(is_possible(flow.pings(), flow.arrived(), most));
        }
    }

    #[test]
    fn the_number_of_flows_is_bounded() {
        let (flows, _) = flows();
        assert!(!flows.add(FLOW, &Key([0; Key::LEN]), peer(), 0));
        let added =
            (100..2000).filter(|number| flows.add(*number, &Key([0; Key::LEN]), peer(), 0)).count();
        assert_eq!(added, MOST_FLOWS - 1);
    }
}
