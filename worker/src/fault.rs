//! Fault injection: datagrams of this worker are lost, duplicated or held back at random, so that
//! recovery can be tested on real sockets. A seed makes the faults repeatable.

/// The probability of each fault, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// The probability that a datagram is lost.
    pub drop: f64,
    /// The probability that a datagram is duplicated.
    pub duplicate: f64,
    /// The probability that a datagram is held back until a later one has passed.
    pub reorder: f64,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Faults {
    /// Returns whether any fault can occur.
    #[must_use]
    pub fn any(&self) -> bool {
        self.drop > 0.0 || self.duplicate > 0.0 || self.reorder > 0.0
    }
}

/// The fate of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Pass,
    Drop,
    Double,
    Hold,
}

impl Fate {
    /// Returns how many copies of the datagram are passed on.
    pub(crate) const fn copies(self) -> usize {
        match self {
            Self::Drop => 0,
            Self::Pass | Self::Hold => 1,
            Self::Double => 2,
        }
    }
}

/// The random number generator of one direction.
#[derive(Debug)]
pub(crate) struct Dice {
    faults: Faults,
    state: u64,
}

impl Dice {
    /// Creates the generator for one direction of one rank, independent of all others.
    pub(crate) const fn new(faults: Faults, stream: u64) -> Self {
        Self { faults, state: faults.seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95) }
    }

    /// Chooses the fate of one datagram at random.
    pub(crate) fn roll(&mut self) -> Fate {
        let Faults { drop, duplicate, reorder, .. } = self.faults;
        let roll = self.uniform();
        if roll < drop {
            Fate::Drop
        } else if roll < drop + duplicate {
            Fate::Double
        } else if roll < drop + duplicate + reorder {
            Fate::Hold
        } else {
            Fate::Pass
        }
    }

    /// Returns a random number in `[0, 1)`, from the upper 53 bits of SplitMix64 (Steele, Lea,
    /// Flood 2014).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fates_come_as_often_as_asked_and_repeat_with_the_seed() {
        let faults = Faults { drop: 0.1, duplicate: 0.2, reorder: 0.3, seed: 7 };
        let rolls = |stream| {
            let mut dice = Dice::new(faults, stream);
            (0..10_000).map(|_| dice.roll()).collect::<Vec<_>>()
        };
        let count = |fate| rolls(1).iter().filter(|roll| **roll == fate).count();
        assert!((900..1100).contains(&count(Fate::Drop)));
        assert!((1850..2150).contains(&count(Fate::Double)));
        assert!((2850..3150).contains(&count(Fate::Hold)));
        assert_eq!(rolls(1), rolls(1));
        assert_ne!(rolls(1), rolls(2));
    }
}
