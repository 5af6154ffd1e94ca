//! Proof of a data path: before a rank joins, datagrams of full size go to every shard and back.
//!
//! [`Datagram`] is the layout of a probe and its answer, [`Prover`] decides what is sent when and
//! what came of it. The caller of an aggregator drives a prover: a worker, or an aggregator that
//! calls its parent. Addresses and sockets are the driver's.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::auth::Key;
use crate::time::{Span, Time};

/// "RP", which opens a probe and its answer: neither is a message of a job.
const MAGIC: [u8; 2] = *b"RP";
const VERSION: u8 = 1;

/// A probe of a data path, or its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// What the aggregator gave the caller to show.
    pub token: Key,
    /// In an answer the address that the probe came from, as the shard sees it.
    pub seen: Option<SocketAddr>,
    /// Bytes of the whole datagram.
    pub size: u16,
}

impl Datagram {
    /// The fewest bytes of a probe: all that an answer says has room in it.
    pub const LEN: usize = 40;

    /// Whether a datagram is a probe or an answer, by how it opens.
    #[must_use]
    pub fn is_one(datagram: &[u8]) -> bool {
        datagram.starts_with(&MAGIC)
    }

    /// Writes the datagram, filled up with zeros; `out` is as long as it afterwards.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.clear();
        out.resize(usize::from(self.size).max(Self::LEN), 0);
        out[..2].copy_from_slice(&MAGIC);
        out[2] = VERSION;
        out[3] = u8::from(self.seen.is_some());
        out[4..20].copy_from_slice(&self.token.0);
        if let Some(seen) = self.seen {
            let ip = match seen.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            out[20..36].copy_from_slice(&ip.octets());
            out[36..38].copy_from_slice(&seen.port().to_be_bytes());
        }
        out[38..40].copy_from_slice(&self.size.to_be_bytes());
    }

    /// Reads a datagram; none if it is not whole, or of another version.
    #[must_use]
    pub fn decode(datagram: &[u8]) -> Option<Self> {
        let head: &[u8; Self::LEN] = datagram.first_chunk()?;
        let token = Key(*head[4..].first_chunk()?);
        let ip = Ipv6Addr::from(*head[20..].first_chunk::<16>()?).to_canonical();
        let port = u16::from_be_bytes([head[36], head[37]]);
        let size = u16::from_be_bytes([head[38], head[39]]);
        let seen = match head[3] {
            0 => None,
            1 => Some(SocketAddr::new(ip, port)),
            _ => return None,
        };
        let is_whole = usize::from(size) == datagram.len();
        let is_ours = Self::is_one(head) && head[2] == VERSION;
        (is_ours && is_whole).then_some(Self { token, seen, size })
    }
}

/// What came of the probes of one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Passed {
    /// Bytes of the largest probe that was answered; 0 for none.
    pub size: u16,
    /// Where the shard saw the caller.
    pub seen: Option<SocketAddr>,
}

/// Finds the largest datagrams that pass to each shard and back.
///
/// It first tries the wanted size alone, which one round trip proves on most paths, and then a
/// ladder of sizes, in rounds whose pauses double. Drive it with [`Prover::poll_transmit`] until
/// there is nothing, wait until [`Prover::poll_timeout`] for answers, and stop once
/// [`Prover::is_over`].
#[derive(Debug)]
pub struct Prover {
    /// Descending; the first is wanted.
    sizes: Vec<u16>,
    /// The least size that is of use.
    least: u16,
    shards: Vec<Passed>,
    due: VecDeque<(usize, u16)>,
    began: Time,
    round: u32,
    next: Time,
}

impl Prover {
    /// A prover of the paths to so many shards. It tries datagrams of `wanted` bytes, and smaller
    /// ones of `ladder`, of which those of less than `least` only show that anything passes.
    #[must_use]
    pub fn new(now: Time, shards: usize, wanted: u16, least: u16, ladder: &[u16]) -> Self {
        let mut sizes: Vec<u16> = ladder.iter().copied().filter(|size| *size < wanted).collect();
        sizes.push(wanted);
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes.dedup();
        let shards = alloc::vec![Passed::default(); shards];
        Self { sizes, least, shards, due: VecDeque::new(), began: now, round: 0, next: now }
    }

    /// The next probe to send: to which shard, and of how many bytes.
    pub fn poll_transmit(&mut self, now: Time) -> Option<(usize, u16)> {
        if self.due.is_empty() && now >= self.next && !self.is_over(now) {
            let tried = if self.round == 0 { 1 } else { self.sizes.len() };
            for (shard, passed) in self.shards.iter().enumerate() {
                // A smaller one than has passed shows nothing.
                let larger = self.sizes[..tried].iter().filter(|size| **size > passed.size);
                self.due.extend(larger.map(|size| (shard, *size)));
            }
            self.next = now + Span(FIRST_PAUSE.0 << self.round.min(MOST_DOUBLED));
            self.round += 1;
        }
        self.due.pop_front()
    }

    /// Takes an answer of a shard.
    pub fn handle_answer(&mut self, shard: usize, size: u16, seen: SocketAddr) {
        if let Some(passed) = self.shards.get_mut(shard).filter(|passed| passed.size < size)
            && self.sizes.contains(&size)
        {
            *passed = Passed { size, seen: Some(seen) };
        }
    }

    /// When there is something to do if nothing arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        self.next.min(self.began + self.patience())
    }

    /// Whether there is no more to find out: the wanted size passes everywhere, or larger ones than
    /// do have had their time.
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        let all = |size: u16| self.shards.iter().all(|passed| passed.size >= size);
        all(self.sizes[0]) || now.since(self.began) >= self.patience()
    }

    /// How long it goes on: while nothing of use has passed there is more to hope for.
    fn patience(&self) -> Span {
        let is_useful = self.shards.iter().all(|passed| passed.size >= self.least);
        if is_useful { NARROW_PATIENCE } else { BLOCKED_PATIENCE }
    }

    /// What came of it, by shard.
    #[must_use]
    pub fn passed(&self) -> &[Passed] {
        &self.shards
    }
}

/// Why a data path is of no use. The sentences are for whoever runs the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The shard's address.
    pub shard: SocketAddr,
    /// The caller's, as it knows it.
    pub caller: SocketAddr,
    /// What does not pass.
    pub what: Obstacle,
}

/// What is in the way of a data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// Nothing arrives at the shard.
    Up,
    /// Probes of so many bytes arrive at the shard, and no answer comes back.
    Down {
        /// Of the largest.
        arrived: u16,
    },
    /// Datagrams of `size` bytes, which are needed, do not arrive at the shard, or their answers do
    /// not come back; the largest for which both is so have `passed` bytes.
    Size {
        /// Bytes that are needed.
        size: u16,
        /// Bytes of the largest that pass.
        passed: u16,
        /// They arrive at the shard: it is the answers that do not pass.
        arrives: bool,
    },
    /// The shard sees the caller elsewhere than where it is, or than it is called from.
    Translated {
        /// Where.
        seen: SocketAddr,
    },
}

impl Blocked {
    /// What is in the way to a shard, if anything is: of what `passed` to it and back, at least
    /// `least` bytes are needed; probes of `arrived` bytes arrived there at most. The aggregator
    /// sees calls of this caller come from `caller`'s IP address; data is to come from its port.
    #[must_use]
    pub fn find(
        shard: SocketAddr,
        caller: SocketAddr,
        passed: Passed,
        least: u16,
        arrived: u16,
    ) -> Option<Self> {
        let what = match passed {
            Passed { seen: Some(seen), .. } if !is_same(seen, caller) => {
                Obstacle::Translated { seen }
            }
            Passed { size, .. } if size >= least => return None,
            Passed { size: 0, .. } if arrived == 0 => Obstacle::Up,
            Passed { size: 0, .. } => Obstacle::Down { arrived },
            Passed { size: passed, .. } => {
                Obstacle::Size { size: least, passed, arrives: arrived >= least }
            }
        };
        Some(Self { shard, caller, what })
    }
}

/// Whether two addresses are the same; IPv4 may be written as IPv6 (`::ffff:a.b.c.d`).
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && one.ip().to_canonical() == other.ip().to_canonical()
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shard, caller, what } = self;
        let port = caller.port();
        match what {
            Obstacle::Up => write!(
                f,
                "no datagram from this host arrives at the aggregator's data port {shard} (UDP), \
                 although its control port answers; open that port in the firewall of the \
                 aggregator's host and on the way"
            ),
            Obstacle::Down { arrived } => write!(
                f,
                "no datagram from the aggregator's data port {shard} comes back to UDP port {port} \
                 of this host, although those of up to {arrived} bytes from here arrive there; let \
                 UDP from {shard} in at the firewall of this host and on the way"
            ),
            Obstacle::Size { size, passed, arrives } => {
                let way: String = if *arrives {
                    alloc::format!("come back from the aggregator's data port {shard} (UDP)")
                } else {
                    alloc::format!("arrive at the aggregator's data port {shard} (UDP)")
                };
                write!(
                    f,
                    "datagrams of {size} bytes do not {way}, and those of {passed} bytes do; raise \
                     the MTU of the path, or ask for a smaller one if you asked for one"
                )
            }
            Obstacle::Translated { seen } => write!(
                f,
                "the aggregator sees datagrams of {caller} come from {seen}: something on the way \
                 translates addresses or ports (NAT); connect this host to {shard} without it, or \
                 have it keep UDP ports"
            ),
        }
    }
}

/// MTUs of common links and tunnels, at which a ladder of sizes is tried.
pub const COMMON_MTUS: [usize; 13] =
    [9000, 8900, 4000, 1500, 1492, 1476, 1450, 1440, 1420, 1400, 1380, 1340, 1280];
/// A probe that any network passes: a sign that size alone is in the way.
pub const SMALL: u16 = 200;

/// Until the second round; the pause doubles from then on.
const FIRST_PAUSE: Span = Span::from_millis(100);
/// How often it doubles.
const MOST_DOUBLED: u32 = 3;
/// When a path is taken for narrow of which the wanted size was not answered.
const NARROW_PATIENCE: Span = Span::from_millis(2_300);
/// When a path is taken for blocked. With what it takes to call and to ask why, less than five
/// seconds.
const BLOCKED_PATIENCE: Span = Span::from_millis(3_000);

#[cfg(test)]
mod tests;
