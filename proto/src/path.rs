//! Proof of a data path: before a rank joins, full-size datagrams travel to every shard and back.
//!
//! [`Datagram`] is the layout of a ping and its answer. [`Prover`] decides when to send which ping,
//! and evaluates the answers. The caller of an aggregator drives a prover; the caller is a worker,
//! or an aggregator that calls its parent. The driver owns addresses and sockets.

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::auth::Key;
use crate::time::{Span, Time};

/// The magic number "RP" of pings and answers, which are not messages of a job.
const MAGIC: [u8; 2] = *b"RP";
const VERSION: u8 = 1;

/// A ping of a data path, or its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// The token that the aggregator gave the caller.
    pub token: Key,
    /// In an answer, the address that the ping came from, as the shard sees it.
    pub seen: Option<SocketAddr>,
    /// The size of the whole datagram, in bytes.
    pub size: u16,
}

impl Datagram {
    /// The least size of a ping, in bytes: an answer of this size has room for all its fields.
    pub const LEN: usize = 40;

    /// Returns whether a datagram starts like a ping or an answer.
    #[must_use]
    pub fn is_one(datagram: &[u8]) -> bool {
        datagram.starts_with(&MAGIC)
    }

    /// Writes the datagram, padded with zeros, and resizes `out` to its length.
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

    /// Reads a datagram; returns `None` unless the datagram is complete and of this version.
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

/// The result of the pings to one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Passed {
    /// The size of the largest ping that was answered, in bytes; 0 if none was.
    pub size: u16,
    /// The caller's address, as the shard sees it.
    pub seen: Option<SocketAddr>,
}

/// Finds the largest datagrams that pass to each shard and back.
///
/// The prover first tries the wanted size alone, which proves most paths in one round trip. Then it
/// tries a ladder of sizes in rounds with doubling pauses. The driver sends each ping that
/// [`Prover::poll_transmit`] returns until that method returns `None`, waits for answers until
/// [`Prover::poll_timeout`], and stops once [`Prover::is_over`] returns true.
#[derive(Debug)]
pub struct Prover {
    /// The sizes to try, in bytes and in descending order; the first is the wanted size.
    sizes: Vec<u16>,
    /// The smallest size, in bytes, that is large enough for data.
    least: u16,
    shards: Vec<Passed>,
    due: VecDeque<(usize, u16)>,
    began: Time,
    round: u32,
    next: Time,
}

impl Prover {
    /// Creates a prover for the paths to `shards` shards. The prover tries datagrams of `wanted`
    /// bytes and the smaller sizes of `ladder`. Sizes below `least` are too small for data and only
    /// show that some datagrams pass.
    #[must_use]
    pub fn new(now: Time, shards: usize, wanted: u16, least: u16, ladder: &[u16]) -> Self {
        let mut sizes: Vec<u16> = ladder.iter().copied().filter(|size| *size < wanted).collect();
        sizes.push(wanted);
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes.dedup();
        let shards = alloc::vec![Passed::default(); shards];
        Self { sizes, least, shards, due: VecDeque::new(), began: now, round: 0, next: now }
    }

    /// Returns the next ping to send: its shard and its size in bytes.
    pub fn poll_transmit(&mut self, now: Time) -> Option<(usize, u16)> {
        if self.due.is_empty() && now >= self.next && !self.is_over(now) {
            let tried = if self.round == 0 { 1 } else { self.sizes.len() };
            for (shard, passed) in self.shards.iter().enumerate() {
                // A ping that is not larger than an answered one gives no information.
                let larger = self.sizes[..tried].iter().filter(|size| **size > passed.size);
                self.due.extend(larger.map(|size| (shard, *size)));
            }
            self.next = now + Span(FIRST_PAUSE.0 << self.round.min(MOST_DOUBLED));
            self.round += 1;
        }
        self.due.pop_front()
    }

    /// Records an answer from a shard.
    pub fn handle_answer(&mut self, shard: usize, size: u16, seen: SocketAddr) {
        if let Some(passed) = self.shards.get_mut(shard).filter(|passed| passed.size < size)
            && self.sizes.contains(&size)
        {
            *passed = Passed { size, seen: Some(seen) };
        }
    }

    /// Returns the time at which the prover must act if no answer arrives.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        self.next.min(self.began + self.patience())
    }

    /// Returns whether the proof is over: datagrams of the wanted size pass to all shards and back,
    /// or the prover's time has run out.
    #[must_use]
    pub fn is_over(&self, now: Time) -> bool {
        let all = |size: u16| self.shards.iter().all(|passed| passed.size >= size);
        all(self.sizes[0]) || now.since(self.began) >= self.patience()
    }

    /// Returns how long the prover tries. The time is longer while some shard has no useful size
    /// yet.
    fn patience(&self) -> Span {
        let is_useful = self.shards.iter().all(|passed| passed.size >= self.least);
        if is_useful { NARROW_PATIENCE } else { BLOCKED_PATIENCE }
    }

    /// Returns the results so far, indexed by shard.
    #[must_use]
    pub fn passed(&self) -> &[Passed] {
        &self.shards
    }
}

/// A blocked data path. Its `Display` text is for the operator of the caller's host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocked {
    /// The shard's address.
    pub shard: SocketAddr,
    /// The caller's expected address: the IP address that it calls from, and its data port.
    pub caller: SocketAddr,
    /// The obstacle on the path.
    pub what: Obstacle,
}

/// The obstacle that blocks a data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// No ping arrives at the shard.
    Up,
    /// Pings of up to `arrived` bytes arrive at the shard, but no answer comes back.
    Down {
        /// The size of the largest ping that arrived, in bytes.
        arrived: u16,
    },
    /// Datagrams of the needed `size` do not pass to the shard and back. `passed` is the largest
    /// size that does.
    Size {
        /// The needed size, in bytes.
        size: u16,
        /// The largest size that passes both ways, in bytes.
        passed: u16,
        /// Whether datagrams of the needed size arrive at the shard. If so, only the answers do not
        /// pass.
        arrives: bool,
    },
    /// The shard sees the caller at an address or port other than the expected one.
    Translated {
        /// The address that the shard sees.
        seen: SocketAddr,
    },
}

impl Blocked {
    /// Returns the obstacle on the path to a shard, or `None` if datagrams of `least` bytes pass
    /// and no address is translated. `passed` is the result of the pings. `arrived` is the size of
    /// the largest ping that arrived at the shard. `caller` is the caller's expected address: its
    /// IP address, as the aggregator sees it, and the port from which its data must come.
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

/// Returns whether two addresses are the same. An IPv4 address may be written as IPv6
/// (`::ffff:a.b.c.d`).
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
                 although its control port answers; open the data port in the firewall of the \
                 aggregator's host and in any firewall on the path"
            ),
            Obstacle::Down { arrived } => write!(
                f,
                "no datagram from the aggregator's data port {shard} reaches UDP port {port} of \
                 this host, although datagrams of up to {arrived} bytes from this host arrive at \
                 the aggregator; allow UDP from {shard} in the firewall of this host and in any \
                 firewall on the path"
            ),
            Obstacle::Size { size, passed, arrives } => {
                let way: String = if *arrives {
                    alloc::format!("come back from the aggregator's data port {shard} (UDP)")
                } else {
                    alloc::format!("arrive at the aggregator's data port {shard} (UDP)")
                };
                write!(
                    f,
                    "datagrams of {size} bytes do not {way}, but those of {passed} bytes do; raise \
                     the MTU of the path, or lower `mtu` if you set it"
                )
            }
            Obstacle::Translated { seen } => write!(
                f,
                "the aggregator expects datagrams from {caller}, but they come from {seen}: a \
                 device on the path translates addresses or ports (NAT); connect this host to \
                 {shard} without NAT, or configure the NAT to preserve UDP ports"
            ),
        }
    }
}

/// The MTUs of common links and tunnels, from which a ladder of sizes is built.
pub const COMMON_MTUS: [usize; 13] =
    [9000, 8900, 4000, 1500, 1492, 1476, 1450, 1440, 1420, 1400, 1380, 1340, 1280];
/// The size, in bytes, of a ping that passes any network. If only such pings pass, the obstacle is
/// [`Obstacle::Size`].
pub const SMALL: u16 = 200;

/// The pause before the second round; later pauses double.
const FIRST_PAUSE: Span = Span::from_millis(100);
/// The number of times that the pause doubles.
const MOST_DOUBLED: u32 = 3;
/// The time after which a path counts as narrow if no ping of the wanted size was answered.
const NARROW_PATIENCE: Span = Span::from_millis(2_300);
/// The time after which a path counts as blocked. It is short enough that a failed proof, including
/// the call and the request for the reason, takes less than five seconds.
const BLOCKED_PATIENCE: Span = Span::from_millis(3_000);

#[cfg(test)]
mod tests;
