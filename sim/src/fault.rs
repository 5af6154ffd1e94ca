//! Rules that inject faults: which datagrams are lost, duplicated or delayed, and with what
//! probability.
//!
//! A rule has a match, a time range, a probability, an effect, and a limit on how often it takes
//! effect. All rules that apply to a datagram take effect in turn, until a rule drops it. The links
//! themselves model loss due to full queues.

use std::ops::Range;

use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::wire::{self, Kind};

use crate::engine::Picos;
use crate::host::Host;
use crate::random::Random;

/// A direction through the switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// From a host to the switch, where a multicast is still one datagram.
    Up,
    /// From the switch to a host.
    Down,
}

/// The datagrams that a rule applies to. A field that is `None` matches everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// The direction of the datagram.
    pub leg: Option<Leg>,
    /// The host that sends to the switch or receives from it.
    pub host: Option<Host>,
    /// The kind of one of the datagram's messages.
    pub kind: Option<Kind>,
    /// The sender in that message's header.
    pub sender: Option<Rank>,
    /// The window in that message's header.
    pub window: Option<WindowId>,
    /// The fragment number in that message's header.
    pub fragment: Option<u8>,
}

impl Match {
    fn applies(&self, leg: Leg, host: Host, datagram: &[u8]) -> bool {
        if self.leg.is_some_and(|wanted| wanted != leg)
            || self.host.is_some_and(|wanted| wanted != host)
        {
            return false;
        }
        let Self { kind, sender, window, fragment, .. } = *self;
        if (kind, sender, window, fragment) == (None, None, None, None) {
            return true;
        }
        wire::messages(datagram).flatten().any(|(header, _)| {
            kind.is_none_or(|kind| kind == header.kind)
                && sender.is_none_or(|sender| sender == header.sender)
                && window.is_none_or(|window| window == header.window)
                && fragment.is_none_or(|fragment| fragment == header.fragment)
        })
    }
}

/// The effect of a rule on a datagram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// The datagram is lost.
    Drop,
    /// A copy of the datagram arrives as well, delayed by a time in this range.
    Copy(Range<Picos>),
    /// The datagram is delayed by a time in this range, so that others may overtake it.
    Delay(Range<Picos>),
}

/// A fault and the datagrams it applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The datagrams that the rule applies to.
    pub to: Match,
    /// The time range in which the rule applies.
    pub during: Range<Picos>,
    /// The probability of the effect, in parts per million.
    pub chance_ppm: u32,
    /// The maximum number of times that the rule takes effect.
    pub times: u32,
    /// The effect of the rule.
    pub effect: Effect,
}

impl Rule {
    /// Creates a rule that always applies `effect` to the datagrams that `to` matches.
    #[must_use]
    pub const fn always(to: Match, effect: Effect) -> Self {
        let during = Picos::ZERO..Picos::NEVER;
        Self { to, during, chance_ppm: 1_000_000, times: u32::MAX, effect }
    }

    /// Creates a rule that applies `effect` in one direction with probability `chance_ppm`.
    #[must_use]
    pub const fn chance(leg: Leg, chance_ppm: u32, effect: Effect) -> Self {
        let to = Match {
            leg: Some(leg),
            host: None,
            kind: None,
            sender: None,
            window: None,
            fragment: None,
        };
        Self { chance_ppm, ..Self::always(to, effect) }
    }

    /// Lets the rule take effect at most `times` times.
    #[must_use]
    pub fn at_most(self, times: u32) -> Self {
        Self { times, ..self }
    }
}

/// The fate of a datagram that is not lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    /// The delay of the datagram.
    pub late: Picos,
    /// The delay of its copy, if it has one.
    pub copy: Option<Picos>,
}

/// The rules of a run and the random numbers that they draw.
#[derive(Debug)]
pub struct Faults {
    rules: Vec<Rule>,
    random: Random,
}

impl Faults {
    /// Creates faults from `rules`, which draw from `random`.
    #[must_use]
    pub const fn new(rules: Vec<Rule>, random: Random) -> Self {
        Self { rules, random }
    }

    /// Applies the rules to a datagram. Returns `None` if it is lost.
    pub fn judge(&mut self, now: Picos, leg: Leg, host: Host, datagram: &[u8]) -> Option<Fate> {
        let mut fate = Fate { late: Picos::ZERO, copy: None };
        for rule in &mut self.rules {
            let applies = rule.times > 0
                && rule.during.contains(&now)
                && rule.to.applies(leg, host, datagram)
                && self.random.chance(rule.chance_ppm);
            if !applies {
                continue;
            }
            rule.times -= 1;
            let mut draw =
                |range: &Range<Picos>| Picos(self.random.within(range.start.0..=range.end.0));
            match &rule.effect {
                Effect::Drop => return None,
                Effect::Copy(late) => fate.copy = Some(draw(late)),
                Effect::Delay(late) => fate.late = fate.late + draw(late),
            }
        }
        Some(fate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Host = Host::Shard(0);

    fn judge(faults: &mut Faults) -> Option<Fate> {
        faults.judge(Picos(5), Leg::Up, HOST, &[])
    }

    #[test]
    fn a_rule_applies_where_and_as_often_as_it_says() {
        let up = Rule::chance(Leg::Up, 1_000_000, Effect::Drop).at_most(2);
        let mut faults = Faults::new(vec![up], Random::new(1));
        assert!(faults.judge(Picos(5), Leg::Down, HOST, &[]).is_some());
        assert!(judge(&mut faults).is_none());
        assert!(judge(&mut faults).is_none());
        assert!(judge(&mut faults).is_some());
    }

    #[test]
    fn every_rule_that_applies_takes_its_turn() {
        let anything = Match::default();
        let late = Rule::always(anything, Effect::Delay(Picos(3)..Picos(3)));
        let copy = Rule::always(anything, Effect::Copy(Picos(7)..Picos(7)));
        let later = Rule { during: Picos(6)..Picos(9), ..late.clone() };
        let mut faults = Faults::new(vec![late.clone(), copy, late, later], Random::new(1));
        let fate = Fate { late: Picos(6), copy: Some(Picos(7)) };
        assert_eq!(judge(&mut faults), Some(fate));
    }

    #[test]
    fn a_rule_for_a_kind_leaves_what_is_no_datagram_alone() {
        let acks = Match { kind: Some(Kind::Ack), ..Match::default() };
        let mut faults = Faults::new(vec![Rule::always(acks, Effect::Drop)], Random::new(1));
        assert!(judge(&mut faults).is_some());
    }
}
