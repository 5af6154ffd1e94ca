//! Senders that flood a shard: the kernel drops what they send, so that the receive buffer has room
//! for all others.
//!
//! All jobs share one receive buffer. When it overflows, a sender of many datagrams keeps out
//! senders of few, however fairly the shard then serves what it has received. So while the buffer
//! overflows, the shard looks for a sender whose messages it has no use for: repeated asks,
//! duplicates, messages of jobs that it does not have. If more than half of all messages are such
//! messages of one sender, the kernel drops what that sender sends, for longer each time. Strangers
//! count as one, and the one of them that sends most is refused first: a flood from several ports
//! is refused port by port. Ranks do not, since after losses many of them ask again at once.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use racksum_net::log_limit::LogLimit;
use racksum_proto::time::{Span, Time};

/// What the shard has received since it looked last, and whom it refuses.
#[derive(Debug, Default)]
pub(super) struct Floods {
    /// When it looked last.
    looked: Time,
    /// Datagrams that the kernel had dropped by then.
    drops: u64,
    /// Whether there were new ones: only then is it worth counting.
    overflows: bool,
    messages: u32,
    /// Messages of no use, by sender.
    useless: BTreeMap<SocketAddr, Useless>,
    /// And of senders beyond those that are counted one by one.
    of_others: u32,
    refused: BTreeMap<SocketAddr, Refusal>,
}

/// What a sender has sent of no use.
#[derive(Debug, Clone, Copy, Default)]
struct Useless {
    /// Surely its own.
    proven: u32,
    /// What anybody may have sent in its name.
    unproven: u32,
}

#[derive(Debug, Clone, Copy)]
struct Refusal {
    until: Time,
    lasts: Span,
    is_on: bool,
    /// Whether what it was refused for was surely its own.
    proven: bool,
}

impl Floods {
    /// A message has arrived, or a datagram of none.
    pub(super) const fn note_arrived(&mut self) {
        if self.overflows {
            self.messages = self.messages.saturating_add(1);
        }
    }

    /// One of them was of no use, and is the sender's own, or nobody can prove anything here.
    pub(super) fn note_useless(&mut self, from: SocketAddr) {
        if let Some(useless) = self.of(from) {
            useless.proven += 1;
        }
    }

    /// One of them was of no use, and anybody may have sent it.
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

    /// When somebody who is refused is to be let back.
    pub(super) fn timeout(&self) -> Time {
        let on = self.refused.values().filter(|refusal| refusal.is_on);
        on.map(|refusal| refusal.until).min().unwrap_or(Time::NEVER)
    }

    /// Looks whether somebody floods the shard, now and then, when the kernel has dropped so many
    /// datagrams; `is_full` says whether the buffer is. `is_peer` says whether a rank or a parent
    /// has an address: they are not refused for what others may have sent in their name. Returns
    /// who is to be refused, if that has changed.
    pub(super) fn look(
        &mut self,
        now: Time,
        drops: u64,
        is_full: impl Fn() -> bool,
        is_peer: impl Fn(SocketAddr) -> bool,
    ) -> Option<Vec<SocketAddr>> {
        if now.since(self.looked) < INTERVAL {
            return None;
        }
        let flooder = self.flooder(&is_peer);
        self.looked = now;
        // What is refused is dropped too, although there is room.
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

    /// Returns the sender to refuse, and whether its messages are surely its own.
    fn flooder(&self, is_peer: impl Fn(SocketAddr) -> bool) -> Option<(SocketAddr, bool)> {
        // What comes from who is refused lay in the buffer before.
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

    /// Refuses nobody any more whose time is over, or who has become a peer since anybody may have
    /// sent what it was refused for. Returns whether there was such a sender.
    fn let_back(&mut self, now: Time, is_peer: impl Fn(SocketAddr) -> bool) -> bool {
        let mut any = false;
        for (from, refusal) in self.refused.iter_mut().filter(|(_, it)| it.is_on) {
            if refusal.until <= now || !refusal.proven && is_peer(*from) {
                (refusal.is_on, any) = (false, true);
            }
        }
        // Who has long been good begins anew.
        self.refused.retain(|_, it| it.is_on || now.since(it.until) < FORGOTTEN);
        any
    }

    /// Refuses a sender from now on. Returns false if too many are refused already.
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
                "a sender fills the receive buffer with what is of no use; the kernel drops what \
                 it sends for this long"
            );
        });
        true
    }
}

/// How often a shard looks.
const INTERVAL: Span = Span::from_millis(5);
/// Useless messages in that time that may be a flood: more than small ops ever make.
const LEAST: u32 = 250;
/// Useless messages of the stranger that is refused for many: more than who proves a path sends.
const LEAST_OF_ONE: u32 = 16;
/// How long a sender is refused at first, and at most.
const FIRST: Span = Span::from_millis(100);
const LONGEST: Span = Span::from_secs(60);
/// How long a sender is known that is refused no more.
const FORGOTTEN: Span = Span::from_secs(600);
/// Senders that are counted, and that may be refused.
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

    /// Shards whose buffers have overflowed, and that have looked at a time.
    fn overflowing(ms: u64) -> Floods {
        let mut floods = Floods::default();
        assert_eq!(floods.look(at(ms), 1, || true, |_| false), None);
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
            assert_eq!(floods.look(at(ms), 0, || true, |_| false), None);
        }
    }

    #[test]
    fn who_floods_is_refused_for_a_while_and_for_longer_when_it_does_so_again() {
        let mut floods = overflowing(10);
        for (from, until) in [(20, 120), (130, 530), (540, 2140)] {
            flood(&mut floods, 1, LEAST);
            assert_eq!(floods.look(at(from), 1 + from, || true, |_| true), Some(vec![addr(1)]));
            assert_eq!(floods.timeout(), at(until));
            assert_eq!(floods.look(at(until - 1), 2 + from, || true, |_| true), None);
            assert_eq!(floods.look(at(until + 5), 3 + from, || true, |_| true), Some(vec![]));
            assert_eq!(floods.timeout(), Time::NEVER);
        }
    }

    #[test]
    fn a_sender_is_refused_only_if_most_of_what_arrives_is_its_own_and_useless() {
        let mut floods = overflowing(10);
        flood(&mut floods, 1, LEAST);
        (0..LEAST).for_each(|_| floods.note_arrived());
        assert_eq!(floods.look(at(20), 2, || true, |_| true), None);
        flood(&mut floods, 1, LEAST - 1);
        assert_eq!(floods.look(at(30), 3, || true, |_| true), None, "so little is no flood");
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
            assert_eq!(floods.look(at(ms), ms, || true, |_| false), Some(refused));
        }
    }

    #[test]
    fn a_flood_from_more_ports_than_are_counted_is_refused_port_by_port_and_no_one_else() {
        for (of_each, is_refused) in [(LEAST_OF_ONE, true), (1, false)] {
            let mut floods = overflowing(10);
            // The first proves a path.
            for (port, messages) in (0..300).map(|port| (port, if port == 0 { 3 } else { of_each }))
            {
                for _ in 0..messages {
                    floods.note_arrived();
                    floods.note_unproven(addr(port));
                }
            }
            let refused = floods.look(at(20), 2, || true, |_| false);
            assert_eq!(refused.is_some(), is_refused, "{of_each} of each");
            assert!(refused.is_none_or(|senders| senders != [addr(0)]));
        }
    }

    #[test]
    fn ranks_that_all_ask_again_are_no_flood() {
        let mut floods = overflowing(10);
        (1..4).for_each(|rank| flood(&mut floods, rank, 2 * LEAST));
        assert_eq!(floods.look(at(20), 2, || true, |_| true), None);
    }

    #[test]
    fn a_peer_is_not_refused_for_what_others_may_have_sent_in_its_name() {
        for (is_peer, refused) in [(true, None), (false, Some(vec![addr(1)]))] {
            let mut floods = overflowing(10);
            for _ in 0..LEAST {
                floods.note_arrived();
                floods.note_unproven(addr(1));
            }
            assert_eq!(floods.look(at(20), 2, || true, |_| is_peer), refused);
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
            assert_eq!(floods.look(at(20), 2, || true, |_| false), Some(vec![addr(1)]));
            assert_eq!(floods.look(at(30), 3, || true, |_| true), refused);
        }
    }

    #[test]
    fn what_the_kernel_drops_of_who_is_refused_is_no_overflow() {
        for (is_full, refused) in [(false, None), (true, Some(vec![addr(1), addr(2)]))] {
            let mut floods = overflowing(10);
            flood(&mut floods, 1, LEAST);
            assert_eq!(floods.look(at(20), 2, || true, |_| true), Some(vec![addr(1)]));
            assert_eq!(floods.look(at(30), 3, || is_full, |_| true), None);
            flood(&mut floods, 2, LEAST);
            assert_eq!(floods.look(at(40), 4, || is_full, |_| true), refused);
        }
    }

    #[test]
    fn a_flood_from_ever_new_ports_finds_each_refused() {
        let mut floods = overflowing(0);
        for (port, ms) in (1..200).zip((200..).step_by(200)) {
            // Those before have been let back by now, and are known still.
            assert_ne!(floods.look(at(ms), ms, || true, |_| true), Some(vec![addr(port)]));
            flood(&mut floods, port, LEAST);
            let refused = floods.look(at(ms + 10), ms + 1, || true, |_| true);
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
