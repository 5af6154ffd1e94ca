//! Faults as rules: which datagrams are lost, doubled or held up, and how likely.
//!
//! A rule says where it applies, when, to what, and what it does. Every rule that applies to a
//! datagram takes its turn. Loss by a full queue is not here: links do that by themselves.

use std::ops::Range;

use racksum_proto::ids::{Rank, WindowId};
use racksum_proto::wire::{self, Kind};

use crate::engine::Picos;
use crate::host::Host;
use crate::random::Random;

/// Which way a datagram goes through the switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leg {
    /// From a host to the switch; a multicast is still one datagram.
    Up,
    /// From the switch to a host.
    Down,
}

/// What a rule applies to. What is `None` does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Match {
    /// The way.
    pub leg: Option<Leg>,
    /// The host at the end of it.
    pub host: Option<Host>,
    /// What one of its messages is.
    pub kind: Option<Kind>,
    /// Who sent that, as its header says.
    pub sender: Option<Rank>,
    /// The window it is about.
    pub window: Option<WindowId>,
    /// The number of its fragment.
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

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// The datagram is lost.
    Drop,
    /// A copy of it arrives as well, that much later.
    Copy(Range<Picos>),
    /// It arrives that much later, behind others.
    Delay(Range<Picos>),
}

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// To what it applies.
    pub to: Match,
    /// When.
    pub during: Range<Picos>,
    /// How likely, in a million.
    pub chance_ppm: u32,
    /// How often at most.
    pub times: u32,
    /// What it does.
    pub effect: Effect,
}

impl Rule {
    /// A rule that always does `effect` to what `to` says.
    #[must_use]
    pub const fn always(to: Match, effect: Effect) -> Self {
        let during = Picos::ZERO..Picos::NEVER;
        Self { to, during, chance_ppm: 1_000_000, times: u32::MAX, effect }
    }

    /// A rule that does `effect` with `chance_ppm` chances in a million on a way.
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

    /// The same, but at most `times` times.
    #[must_use]
    pub fn at_most(self, times: u32) -> Self {
        Self { times, ..self }
    }
}

/// What becomes of a datagram: by how much it is late, and a copy of it that arrives besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    /// How late it is.
    pub late: Picos,
    /// How late its copy is, if there is one.
    pub copy: Option<Picos>,
}

/// The rules at work.
#[derive(Debug)]
pub struct Faults {
    rules: Vec<Rule>,
    random: Random,
}

impl Faults {
    /// Rules that draw from `random`.
    #[must_use]
    pub const fn new(rules: Vec<Rule>, random: Random) -> Self {
        Self { rules, random }
    }

    /// What becomes of a datagram; `None` when it is lost.
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
