//! Detection of senders that flood a shard. The kernel drops what they send, so that the receive
//! buffer has room for all other senders.
//!
//! All jobs share one receive buffer. When it overflows, a sender of many datagrams crowds out
//! senders of few, however fairly the shard serves the datagrams that it has received. While the
//! buffer overflows, the shard therefore looks for a sender of useless messages, such as repeated
//! nacks, duplicates and messages of unknown jobs. If one sender's useless messages are more than
//! half of all messages, the kernel drops what that sender sends, for longer each time. Strangers,
//! which are neither ranks nor parents, are counted together. The stranger with the most useless
//! messages is refused first, so a flood from several ports is refused port by port. Ranks are
//! counted one by one, since after losses many of them send nacks at once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use racksum_net::log_limit::LogLimit;
use racksum_proto::time::{Span, Time};

/// The messages received since the last check, and the refused senders.
#[derive(Debug, Default)]
pub(super) struct Floods {
    /// The time of the last check.
    checked_at: Time,
    /// The number of messages that the kernel had dropped by the last check.
    drops: u64,
    /// Whether the last check found that the receive buffer had overflowed. Messages are counted
    /// only after such a check.
    overflows: bool,
    messages: u32,
    /// The useless messages, by sender.
    useless: BTreeMap<SocketAddr, Useless>,
    /// The number of useless messages from senders that are not counted one by one.
    of_others: u32,
    refused: BTreeMap<SocketAddr, Refusal>,
}

/// The useless messages of one sender.
#[derive(Debug, Clone, Copy, Default)]
struct Useless {
    /// Messages that count as the sender's own; see [`Floods::note_useless`].
    proven: u32,
    /// Messages that anyone may have sent with this source address.
    unproven: u32,
}

#[derive(Debug, Clone, Copy)]
struct Refusal {
    until: Time,
    lasts: Span,
    is_on: bool,
    /// Whether the messages that led to the refusal count as the sender's own.
    proven: bool,
}

impl Floods {
    /// Counts a received message, or a datagram without messages.
    pub(super) const fn note_arrived(&mut self) {
        if self.overflows {
            self.messages = self.messages.saturating_add(1);
        }
    }

    /// Counts a useless message. The message must be proven to come from `from`, unless the job is
    /// not authenticated. If the job is beyond its maximum debt, a rank's address is enough,
    /// although it may be forged.
    pub(super) fn note_useless(&mut self, from: SocketAddr) {
        if let Some(useless) = self.of(from) {
            useless.proven += 1;
        }
    }

    /// Counts a useless message that anyone may have sent with this source address.
    pub(super) fn note_unproven(&mut self, from: SocketAddr) {
        if let Some(useless) = self.of(from) {
            useless.unproven += 1;
        } else if self.overflows {
            self.of_others = self.of_others.saturating_add(1);
        }
    }

    fn of(&mut self, from: SocketAddr) -> Option<&mut Useless> {
        let counts = self.overflows
            && (self.useless.len() < MOST_SENDERS || self.useless.contains_key(&from));
        counts.then(|| self.useless.entry(from).or_default())
    }

    /// Returns the time at which the first active refusal ends, or `Time::NEVER` if there is none.
    pub(super) fn timeout(&self) -> Time {
        let on = self.refused.values().filter(|refusal| refusal.is_on);
        on.map(|refusal| refusal.until).min().unwrap_or(Time::NEVER)
    }

    /// Checks at intervals whether a sender floods the shard. `drops` counts the messages that the
    /// kernel has dropped, and `is_full` returns whether the buffer is full. `is_peer` returns
    /// whether an address belongs to a rank or a parent; a peer is not refused for messages that
    /// others may have forged. Returns the senders to refuse, if they have changed.
    pub(super) fn check(
        &mut self,
        now: Time,
        drops: u64,
        is_full: impl Fn() -> bool,
        is_peer: impl Fn(SocketAddr) -> bool,
    ) -> Option<Vec<SocketAddr>> {
        if now.since(self.checked_at) < INTERVAL {
            return None;
        }
        let flooder = self.flooder(&is_peer);
        self.checked_at = now;
        // Datagrams of refused senders also count as dropped, even if the buffer has room.
        let is_refusing = self.refused.values().any(|refusal| refusal.is_on);
        self.overflows = drops > self.drops && (!is_refusing || is_full());
        self.drops = drops;
        self.messages = 0;
        self.useless.clear();
        self.of_others = 0;
        let changed = self.let_back(now, is_peer)
            | flooder.is_some_and(|(from, proven)| self.refuse(now, from, proven));
        let on = self.refused.iter().filter(|(_, refusal)| refusal.is_on);
        changed.then(|| on.map(|(from, _)| *from).collect())
    }

    /// Returns the sender to refuse, and whether its useless messages count as its own.
    fn flooder(&self, is_peer: impl Fn(SocketAddr) -> bool) -> Option<(SocketAddr, bool)> {
        // Senders that are already refused do not count, because their messages were in the buffer
        // before the refusal.
        let is_on = |from| self.refused.get(from).is_some_and(|refusal| refusal.is_on);
        let (before, senders): (Vec<_>, Vec<_>) =
            self.useless.iter().partition(|(from, _)| is_on(from));
        let before: u32 = before.iter().map(|(_, it)| it.proven + it.unproven).sum();
        let messages = self.messages.saturating_sub(before);
        let is_most = |count: u32| count >= LEAST && count > messages / 2;
        let of_one = senders.iter().find(|(_, it)| is_most(it.proven));
        let of_strangers = || {
            let strangers = senders.iter().filter(|(from, _)| !is_peer(**from));
            let strangers = strangers.map(|(from, it)| (it.proven + it.unproven, **from));
            let all = strangers.clone().map(|(count, _)| count).sum::<u32>() + self.of_others;
            strangers.max().filter(|(most, _)| *most >= LEAST_OF_ONE && is_most(all))
        };
        of_one.map(|(from, _)| (**from, true)).or_else(|| Some((of_strangers()?.1, false)))
    }

    /// Ends refusals whose time is over. Also ends the refusal of a sender that has become a peer,
    /// if the messages that led to it may have been forged. Returns whether any refusal ended.
    fn let_back(&mut self, now: Time, is_peer: impl Fn(SocketAddr) -> bool) -> bool {
        let mut any = false;
        for (from, refusal) in self.refused.iter_mut().filter(|(_, it)| it.is_on) {
            if refusal.until <= now || !refusal.proven && is_peer(*from) {
                (refusal.is_on, any) = (false, true);
            }
        }
        // After a long time without a refusal, the next one is as short as the first.
        self.refused.retain(|_, it| it.is_on || now.since(it.until) < FORGOTTEN);
        any
    }

    /// Starts to refuse a sender. Returns false if too many senders are refused already.
    fn refuse(&mut self, now: Time, from: SocketAddr, proven: bool) -> bool {
        let lasts = self.refused.get(&from).map_or(FIRST, |it| Span(it.lasts.0 * 4).min(LONGEST));
        if self.refused.len() >= MOST_SENDERS && !self.refused.contains_key(&from) {
            let let_back = self.refused.iter().filter(|(_, refusal)| !refusal.is_on);
            let oldest = let_back.min_by_key(|(_, refusal)| refusal.until).map(|(from, _)| *from);
            let Some(oldest) = oldest else { return false };
            self.refused.remove(&oldest);
        }
        let refusal = Refusal { until: now + lasts, lasts, is_on: true, proven };
        self.refused.insert(from, refusal);
        REFUSED.note(|left_out| {
            tracing::warn!(
                %from,
                ms = lasts.0 / 1_000_000,
                left_out,
                "a sender floods the receive buffer with useless messages; the kernel drops its \
                 datagrams for a while"
            );
        });
        true
    }
}

/// The interval between checks.
const INTERVAL: Span = Span::from_millis(5);
/// The smallest number of useless messages per interval that counts as a flood. Small ops never
/// cause so many.
const LEAST: u32 = 250;
/// The smallest number of useless messages per interval for which a stranger is refused, if
/// strangers together flood the shard. A path proof sends fewer.
const LEAST_OF_ONE: u32 = 16;
/// How long a sender is refused the first time. Each refusal lasts four times as long as the one
/// before, up to `LONGEST`.
const FIRST: Span = Span::from_millis(100);
const LONGEST: Span = Span::from_secs(60);
/// How long a sender is remembered after its refusal ends.
const FORGOTTEN: Span = Span::from_secs(600);
/// The maximum number of senders that are counted one by one, and the maximum number of refusals
/// that are remembered.
const MOST_SENDERS: usize = 64;
static REFUSED: LogLimit = LogLimit::new(4);

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    fn at(ms: u64) -> Time {
        Time(0) + Span::from_millis(ms)
    }

    /// Returns the flood state of a shard whose check at `ms` has found an overflow.
    fn overflowing(ms: u64) -> Floods {
        let mut floods = Floods::default();
        assert_eq!(floods.check(at(ms), 1, || true, |_| false), None);
        floods
    }

    fn flood(floods: &mut Floods, from: u16, messages: u32) {
        for _ in 0..messages {
            floods.note_arrived();
            floods.note_useless(addr(from));
        }
    }

    #[test]
    fn nobody_is_refused_while_there_is_room_for_all() {
        let mut floods = Floods::default();
        for ms in (10..100).step_by(10) {
            flood(&mut floods, 1, 10 * LEAST);
            assert_eq!(floods.check(at(ms), 0, || true, |_| false), None);
        }
    }

    #[test]
    fn who_floods_is_refused_for_a_while_and_for_longer_when_it_does_so_again() {
        let mut floods = overflowing(10);
        for (from, until) in [(20, 120), (130, 530), (540, 2140)] {
            flood(&mut floods, 1, LEAST);
            assert_eq!(floods.check(at(from), 1 + from, || true, |_| true), Some(vec![addr(1)]));
            assert_eq!(floods.timeout(), at(until));
            assert_eq!(floods.check(at(until - 1), 2 + from, || true, |_| true), None);
            assert_eq!(floods.check(at(until + 5), 3 + from, || true, |_| true), Some(vec![]));
            assert_eq!(floods.timeout(), Time::NEVER);
        }
    }

    #[test]
    fn a_sender_is_refused_only_if_most_of_what_arrives_is_its_own_and_useless() {
        let mut floods = overflowing(10);
        flood(&mut floods, 1, LEAST);
        (0..LEAST).for_each(|_| floods.note_arrived());
        assert_eq!(floods.check(at(20), 2, || true, |_| true), None);
        flood(&mut floods, 1, LEAST - 1);
        assert_eq!(
            floods.check(at(30), 3, || true, |_| true),
            None,
            "so few messages are not a flood"
        );
    }

    #[test]
    fn a_flood_from_several_ports_is_refused_port_by_port() {
        let mut floods = overflowing(10);
        let ports = [(1, 2 * LEAST), (2, 3 * LEAST), (3, LEAST)];
        for (ms, refused) in [(20, vec![2]), (30, vec![1, 2]), (40, vec![1, 2, 3])] {
            for (port, messages) in ports {
                flood(&mut floods, port, messages);
            }
            let refused = refused.into_iter().map(addr).collect();
            assert_eq!(floods.check(at(ms), ms, || true, |_| false), Some(refused));
        }
    }

    #[test]
    fn a_flood_from_more_ports_than_are_counted_is_refused_port_by_port_and_no_one_else() {
        for (of_each, is_refused) in [(LEAST_OF_ONE, true), (1, false)] {
            let mut floods = overflowing(10);
            // The first sender proves a path.
            for (port, messages) in (0..300).map(|port| (port, if port == 0 { 3 } else { of_each }))
            {
                for _ in 0..messages {
                    floods.note_arrived();
                    floods.note_unproven(addr(port));
                }
            }
            let refused = floods.check(at(20), 2, || true, |_| false);
            assert_eq!(refused.is_some(), is_refused, "{of_each} messages from each sender");
            assert!(refused.is_none_or(|senders| senders != [addr(0)]));
        }
    }

    #[test]
    fn ranks_that_all_ask_again_are_no_flood() {
        let mut floods = overflowing(10);
        (1..4).for_each(|rank| flood(&mut floods, rank, 2 * LEAST));
        assert_eq!(floods.check(at(20), 2, || true, |_| true), None);
    }

    #[test]
    fn a_peer_is_not_refused_for_what_others_may_have_sent_in_its_name() {
        for (is_peer, refused) in [(true, None), (false, Some(vec![addr(1)]))] {
            let mut floods = overflowing(10);
            for _ in 0..LEAST {
                floods.note_arrived();
                floods.note_unproven(addr(1));
            }
            assert_eq!(floods.check(at(20), 2, || true, |_| is_peer), refused);
        }
    }

    #[test]
    fn who_was_refused_as_a_stranger_is_let_back_as_a_rank() {
        for (proven, refused) in [(false, Some(vec![])), (true, None)] {
            let mut floods = overflowing(10);
            for _ in 0..LEAST {
                floods.note_arrived();
                if proven { floods.note_useless(addr(1)) } else { floods.note_unproven(addr(1)) }
            }
            assert_eq!(floods.check(at(20), 2, || true, |_| false), Some(vec![addr(1)]));
            assert_eq!(floods.check(at(30), 3, || true, |_| true), refused);
        }
    }

    #[test]
    fn what_the_kernel_drops_of_who_is_refused_is_no_overflow() {
        for (is_full, refused) in [(false, None), (true, Some(vec![addr(1), addr(2)]))] {
            let mut floods = overflowing(10);
            flood(&mut floods, 1, LEAST);
            assert_eq!(floods.check(at(20), 2, || true, |_| true), Some(vec![addr(1)]));
            assert_eq!(floods.check(at(30), 3, || is_full, |_| true), None);
            flood(&mut floods, 2, LEAST);
            assert_eq!(floods.check(at(40), 4, || is_full, |_| true), refused);
        }
    }

    #[test]
    fn a_flood_from_ever_new_ports_finds_each_refused() {
        let mut floods = overflowing(0);
        for (port, ms) in (1..200).zip((200..).step_by(200)) {
            // The refusals of the earlier senders have ended, but are still remembered.
            assert_ne!(floods.check(at(ms), ms, || true, |_| true), Some(vec![addr(port)]));
            flood(&mut floods, port, LEAST);
            let refused = floods.check(at(ms + 10), ms + 1, || true, |_| true);
            assert_eq!(refused, Some(vec![addr(port)]));
            assert!(floods.refused.len() <= MOST_SENDERS);
        }
    }

    #[test]
    fn senders_that_are_many_take_no_more_memory() {
        let mut floods = overflowing(10);
        (0..10_000).for_each(|port| floods.note_unproven(addr(port)));
        assert_eq!(floods.useless.len(), MOST_SENDERS);
    }
}
