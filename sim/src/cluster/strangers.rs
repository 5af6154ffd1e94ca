//! Strangers: senders of garbage and of datagrams with a wrong job, generation, sender or protocol.

use std::rc::Rc;

use racksum_proto::wire::{Header, Kind};

use crate::engine::Picos;
use crate::random::Random;

/// A sender of datagrams that no host should accept.
#[derive(Debug)]
pub(super) struct Strangers {
    left: u32,
    random: Random,
}

impl Strangers {
    pub(super) const fn new(datagrams: u32, random: Random) -> Self {
        Self { left: datagrams, random }
    }

    /// Returns the time until the next datagram, or `None` after the last.
    pub(super) fn next_pause(&mut self) -> Option<Picos> {
        self.left = self.left.checked_sub(1)?;
        Some(Picos(self.random.across(1_000..=MAX_PAUSE.0)))
    }

    /// Picks the index of the host that receives the datagram.
    pub(super) fn victim(&mut self, hosts: usize) -> usize {
        usize::try_from(self.random.below(hosts as u64)).expect("the remainder is below a length")
    }

    /// Makes a datagram for a host whose last genuine datagram is `genuine`.
    pub(super) fn imitate(&mut self, genuine: Option<&Rc<[u8]>>) -> Vec<u8> {
        let Some(genuine) = genuine.filter(|_| !self.random.once_in(8)) else {
            return self.garbage();
        };
        // Only the first message is copied, because the messages after it would stay genuine.
        let len = Header::decode_first(genuine)
            .map_or(genuine.len(), |(_, body, _)| Header::LEN + body.len());
        let mut bytes = genuine[..len].to_vec();
        let bit = 1 << self.random.below(7);
        let mut other = |at: usize| bytes[at] ^= bit;
        match self.random.below(9) {
            // A wrong magic number, version or kind.
            0 => other(0),
            1 => other(2),
            2 => bytes[3] = 10,
            // A wrong job or generation, or an unknown rank.
            3 => other(4),
            4 => other(11),
            5 => bytes[12..14].copy_from_slice(&[0x7f, 0xff]),
            // An unknown lane, or a bit that must be zero except in results.
            6 => bytes[14] = 0x80,
            7 if bytes[3] != Kind::Result as u8 => bytes[47] |= 0x80,
            _ => {
                let len = self.random.below(bytes.len() as u64);
                bytes.truncate(usize::try_from(len).expect("the remainder is below a length"));
            }
        }
        bytes
    }

    fn garbage(&mut self) -> Vec<u8> {
        let len = self.random.below(200);
        (0..len).map(|_| self.random.bits().to_le_bytes()[0]).collect()
    }
}

/// The longest pause between two datagrams of strangers.
const MAX_PAUSE: Picos = Picos::from_millis(2);

#[cfg(test)]
mod tests {
    use racksum_proto::descriptor::Descriptor;
    use racksum_proto::dtype::DType;

    use super::*;

    #[test]
    fn no_imitation_is_the_genuine_datagram() {
        let mut strangers = Strangers::new(1, Random::new(1));
        let mut body = [0; Descriptor::LEN];
        Descriptor::sum(1, DType::F32).encode(&mut body);
        let genuine: Rc<[u8]> = Rc::from([&[7; 48][..], &body].concat());
        for _ in 0..1000 {
            assert_ne!(strangers.imitate(Some(&genuine)), genuine.to_vec());
        }
    }
}
