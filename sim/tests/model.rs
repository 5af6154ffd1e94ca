//! A model of the protocol's core, checked in every reachable state. It covers credits, slots,
//! folds, and a failover from an aggregator that dies at any time.
//!
//! The model shares no code with the protocol, and is small: two ranks, and one stream of three
//! windows with a pool of two slots. Each message may arrive at any time after it is sent, in any
//! order, any number of times. A sum records how often it contains each rank's contribution.

use std::collections::BTreeSet;

use stateright::{Checker, Model, Property};

const RANKS: usize = 2;
const WINDOWS: usize = 3;
const POOL: u8 = 2;

/// How often a sum contains each rank's contribution.
type Sum = [u8; RANKS];
/// A set of windows.
type Windows = [bool; WINDOWS];
/// A set of ranks.
type Ranks = [bool; RANKS];

/// The correct sum of every window.
const WHOLE: Sum = [1; RANKS];

/// A message from a rank to the aggregator, or from the aggregator to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    /// A rank's own contribution to a window, or the window's sum if the rank had it before the
    /// move.
    Data { rank: usize, window: u8, sum: Sum },
    /// The sums that a rank holds when the job moves, and which of these it can still send.
    Open { rank: usize, held: Windows, lent: Windows },
    /// A rank's acknowledgement that it has all sums before this window.
    Ack { rank: usize, ack: u8 },
    /// A window's sum, sent to a rank.
    Result { rank: usize, window: u8, sum: Sum },
    /// A credit, sent to a rank: all ranks have acknowledged the windows before this one.
    Credit { rank: usize, low: u8 },
}

/// The state of an aggregator.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Aggregator {
    /// The first window that is not folded yet.
    next: u8,
    acked: [u8; RANKS],
    /// The window in each slot, and the data received from each rank.
    slots: [Option<(u8, [Option<Sum>; RANKS])>; POOL as usize],
    /// The contents of each rank's open: the windows whose sums the rank holds, and the windows
    /// whose sums it can still send.
    opened: [Option<(Windows, Windows)>; RANKS],
    /// Results that some rank has not acknowledged.
    results: [Option<Sum>; WINDOWS],
}

/// The state of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Rank {
    /// The credit: the highest `low` that the rank has received.
    low: u8,
    sums: [Option<Sum>; WINDOWS],
    /// The windows whose sums this rank held when the job moved.
    held: Windows,
    /// The windows that, by this rank's credit, all ranks had acknowledged when the job moved.
    /// Their memory may belong to the caller again.
    given_back: Windows,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct State {
    /// Whether the first aggregator has died and the job is at the second.
    moved: bool,
    aggregator: Aggregator,
    ranks: [Rank; RANKS],
    /// All messages sent in the life of the current aggregator.
    network: BTreeSet<Message>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Action {
    Deliver(Message),
    Fold,
    Die,
}

/// The protocol, or an unsound variant of it.
struct Protocol {
    /// Whether the aggregator reuses a slot before all ranks have acknowledged its window.
    forgets_slots: bool,
    /// Whether the aggregator folds all contributions even if some rank has the sum.
    ignores_sums: bool,
    /// Whether a rank drops an ended op that other ranks may need.
    forgets_ops: bool,
}

impl Rank {
    /// Returns the first window whose sum the rank lacks.
    fn cursor(&self) -> u8 {
        (0..)
            .zip(&self.sums)
            .take_while(|(_, sum)| sum.is_some())
            .map(|(at, _)| at + 1)
            .last()
            .unwrap_or(0)
    }

    /// Returns the data that the rank sends for a window, if it may send any.
    fn contribution(&self, rank: usize, window: u8) -> Option<Sum> {
        let at = usize::from(window);
        let own = std::array::from_fn(|other| u8::from(other == rank));
        match self.sums[at] {
            _ if window >= self.low + POOL || self.given_back[at] => None,
            Some(sum) => self.held[at].then_some(sum),
            None => Some(own),
        }
    }
}

impl Aggregator {
    /// Returns the lowest window whose slot some rank still needs.
    fn low(&self) -> u8 {
        let held = (0..).zip(&self.results).find(|(_, result)| result.is_some());
        held.map_or(self.next, |(at, _)| at)
    }

    /// Returns the ranks that owe a window, or `None` while an open is missing.
    fn owing(&self, window: u8, moved: bool, protocol: &Protocol) -> Option<Ranks> {
        if !moved {
            return Some([true; RANKS]);
        }
        let at = usize::from(window);
        let mut opened = [(false, false); RANKS];
        for (entry, open) in opened.iter_mut().zip(&self.opened) {
            let (held, lent) = open.as_ref()?;
            *entry = (held[at], lent[at]);
        }
        let holder = opened.iter().position(|(held, _)| *held);
        Some(match holder {
            _ if opened.iter().all(|(held, _)| *held) => [false; RANKS],
            Some(holder) if !protocol.ignores_sums => {
                std::array::from_fn(|rank| rank == holder && opened[rank].1)
            }
            _ => [true; RANKS],
        })
    }

    fn take_ack(&mut self, rank: usize, ack: u8) {
        self.acked[rank] = self.acked[rank].max(ack.min(self.next));
        let all = self.acked.iter().min().copied().unwrap_or(0);
        for (window, result) in (0..).zip(&mut self.results) {
            if window < all {
                *result = None;
            }
        }
    }

    fn take_data(&mut self, rank: usize, window: u8, sum: Sum, protocol: &Protocol) {
        let reach = if protocol.forgets_slots { u8::MAX } else { self.low() + POOL };
        if window < self.next || window >= reach {
            return;
        }
        let slot = &mut self.slots[usize::from(window % POOL)];
        match slot {
            Some((holds, shares)) if *holds == window || protocol.forgets_slots => {
                shares[rank].get_or_insert(sum);
            }
            _ => {
                let mut shares = [None; RANKS];
                shares[rank] = Some(sum);
                *slot = Some((window, shares));
            }
        }
    }

    /// Returns the sum of the next window, with an inner `None` if no rank owes the window. Returns
    /// an outer `None` while the window cannot be folded yet.
    fn ready(&self, moved: bool, protocol: &Protocol) -> Option<Option<Sum>> {
        if usize::from(self.next) == WINDOWS || self.next >= self.low() + POOL {
            return None;
        }
        let owing = self.owing(self.next, moved, protocol)?;
        if owing.iter().all(|owes| !owes) {
            return Some(None);
        }
        let (window, shares) = self.slots[usize::from(self.next % POOL)].as_ref()?;
        if *window != self.next && !protocol.forgets_slots {
            return None;
        }
        let mut sum = [0; RANKS];
        for (share, _) in shares.iter().zip(owing).filter(|(_, owes)| *owes) {
            let share = (*share)?;
            sum.iter_mut().zip(share).for_each(|(sum, share)| *sum += share);
        }
        Some(Some(sum))
    }
}

impl State {
    /// Adds to the network every message that may be sent now.
    fn send(mut self, protocol: &Protocol) -> Self {
        let (low, results) = (self.aggregator.low(), self.aggregator.results);
        for (rank, own) in self.ranks.iter().enumerate() {
            self.network.insert(Message::Ack { rank, ack: own.cursor() });
            self.network.insert(Message::Credit { rank, low });
            for window in 0..3 {
                let sum = own.contribution(rank, window);
                let ended = protocol.forgets_ops && usize::from(own.cursor()) == WINDOWS;
                if let Some(sum) = sum.filter(|_| !ended) {
                    self.network.insert(Message::Data { rank, window, sum });
                }
                if let Some(sum) = results[usize::from(window)] {
                    self.network.insert(Message::Result { rank, window, sum });
                }
            }
            if self.moved {
                let lent = std::array::from_fn(|at| own.held[at] && !own.given_back[at]);
                self.network.insert(Message::Open { rank, held: own.held, lent });
            }
        }
        self
    }

    fn deliver(&mut self, message: &Message, protocol: &Protocol) {
        match *message {
            Message::Data { rank, window, sum } => {
                self.aggregator.take_data(rank, window, sum, protocol);
            }
            Message::Open { rank, held, lent } => {
                self.aggregator.opened[rank].get_or_insert((held, lent));
            }
            Message::Ack { rank, ack } => self.aggregator.take_ack(rank, ack),
            Message::Result { rank, window, sum } => {
                self.ranks[rank].sums[usize::from(window)].get_or_insert(sum);
            }
            Message::Credit { rank, low } => {
                let own = &mut self.ranks[rank];
                own.low = own.low.max(low);
            }
        }
    }

    /// Kills the aggregator, drops all messages in flight and moves the ranks to another
    /// aggregator.
    fn die(&mut self) {
        self.moved = true;
        self.aggregator = Aggregator::default();
        self.network.clear();
        for rank in &mut self.ranks {
            rank.given_back = std::array::from_fn(|at| at < usize::from(rank.low));
            rank.held = std::array::from_fn(|at| rank.sums[at].is_some());
            rank.low = 0;
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::default().send(self)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.extend(state.network.iter().cloned().map(Action::Deliver));
        if state.aggregator.ready(state.moved, self).is_some() {
            actions.push(Action::Fold);
        }
        if !state.moved {
            actions.push(Action::Die);
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Deliver(message) => state.deliver(&message, self),
            Action::Fold => {
                let sum = state.aggregator.ready(state.moved, self)?;
                state.aggregator.results[usize::from(state.aggregator.next)] = sum;
                state.aggregator.next += 1;
            }
            Action::Die => state.die(),
        }
        // An action without effect is not a transition, so a path ends only when nothing more can
        // happen.
        (state != *before).then(|| state.send(self))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "I1: every contribution is in every sum exactly once",
                |_, state: &State| {
                    let sums = state.ranks.iter().flat_map(|rank| rank.sums).flatten();
                    sums.chain(state.aggregator.results.into_iter().flatten())
                        .all(|sum| sum == WHOLE)
                },
            ),
            Property::eventually("I5: every rank has every sum", |_, state: &State| {
                state.ranks.iter().all(|rank| rank.sums.iter().all(Option::is_some))
            }),
            Property::sometimes(
                "recovery: the only rank that held a sum passes it to the other rank",
                |_, state: &State| {
                    let given = |at: usize| {
                        let held = state.ranks.iter().filter(|rank| rank.held[at]).count();
                        let have =
                            state.ranks.iter().filter(|rank| rank.sums[at].is_some()).count();
                        held == 1 && have == RANKS
                    };
                    state.moved && (0..WINDOWS).any(given)
                },
            ),
        ]
    }
}

const SOUND: Protocol = Protocol { forgets_slots: false, ignores_sums: false, forgets_ops: false };

/// Returns the names of the properties that do not hold.
fn broken(protocol: Protocol) -> Vec<&'static str> {
    let checker = protocol.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    let names = ["I1", "I5"];
    let found: Vec<_> = checker.discoveries().into_keys().collect();
    names.into_iter().filter(|name| found.iter().any(|it| it.starts_with(name))).collect()
}

#[test]
fn no_state_that_can_be_reached_breaks_a_promise_and_every_way_leads_to_the_sums() {
    let checker = SOUND.checker().threads(2).spawn_bfs().join();
    println!("{} states", checker.unique_state_count());
    checker.assert_properties();
}

#[test]
fn a_protocol_that_takes_slots_too_early_is_found_out() {
    assert!(!broken(Protocol { forgets_slots: true, ..SOUND }).is_empty());
}

#[test]
fn a_protocol_that_folds_sums_once_more_is_found_out() {
    assert!(broken(Protocol { ignores_sums: true, ..SOUND }).contains(&"I1"));
}

#[test]
fn a_protocol_that_keeps_nothing_of_what_has_ended_is_found_out() {
    assert!(broken(Protocol { forgets_ops: true, ..SOUND }).contains(&"I5"));
}
