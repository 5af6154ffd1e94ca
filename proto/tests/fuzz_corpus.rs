//! Runs the fuzz targets on stable Rust, with the committed corpus and random mutations of it. Each
//! run prints its seed; setting `SEED` to it repeats the run.

use std::fs;
use std::path::PathBuf;

#[path = "../../fuzz/src/lib.rs"]
#[expect(
    unreachable_pub,
    reason = "the file is also the root of a crate, where these items are public"
)]
mod fuzz;

/// A SplitMix64 random number generator (Steele, Lea, Flood 2014).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.roll() % end.max(1) as u64).expect("the remainder fits in a usize")
    }

    fn byte(&mut self) -> u8 {
        self.roll().to_le_bytes()[0]
    }
}

/// Returns the seed in `SEED`, or 1, and prints it.
fn seed() -> u64 {
    let seed = std::env::var("SEED").map_or(1, |seed| seed.parse().expect("SEED must be a number"));
    println!("SEED={seed}");
    seed
}

/// Returns the committed inputs of a target, sorted by file name.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut paths: Vec<_> =
        entries.map(|entry| entry.expect("the folder can be listed").path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", dir.display());
    paths.iter().map(|path| fs::read(path).expect("a file of the corpus can be read")).collect()
}

/// Changes some bytes of an input, and sometimes truncates or extends it.
fn mutate(dice: &mut Dice, input: &[u8], longest: usize) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 + dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(8) {
            0 => bytes.truncate(at),
            1 => bytes.extend_from_slice(&input[dice.below(input.len())..]),
            2 => bytes.extend((0..32).map(|_| dice.byte())),
            3 => bytes.insert(at, dice.byte()),
            4 if at < bytes.len() => drop(bytes.remove(at)),
            5 if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            _ if at < bytes.len() => bytes[at] = dice.byte(),
            _ => {}
        }
    }
    bytes.truncate(longest);
    bytes
}

#[test]
fn the_corpus_of_datagrams_and_its_mutations_break_no_decoder() {
    let corpus = corpus("datagram");
    corpus.iter().for_each(|input| fuzz::datagram::run(input));
    let mut dice = Dice(seed());
    for _ in 0..60_000 {
        let input = &corpus[dice.below(corpus.len())];
        fuzz::datagram::run(&mutate(&mut dice, input, 2048));
    }
}

#[test]
fn the_corpus_of_scripts_and_its_mutations_break_no_machine() {
    let corpus = corpus("machines");
    corpus.iter().for_each(|input| fuzz::machines::run(input));
    let mut dice = Dice(seed());
    for _ in 0..5_000 {
        let input = &corpus[dice.below(corpus.len())];
        fuzz::machines::run(&mutate(&mut dice, input, 4096));
    }
}

#[test]
fn random_scripts_break_no_machine_and_fill_no_memory() {
    let mut dice = Dice(seed() ^ 0xb0b);
    for _ in 0..120 {
        let script: Vec<u8> = (0..8192).map(|_| dice.byte()).collect();
        let (fresh, after) = fuzz::machines::footprints(&script);
        assert!(
            after < fresh + MOST_GROWTH,
            "the debug output grew from {fresh} to {after} characters"
        );
    }
}

/// Limit on the growth of the machines' debug output, in characters. Machines may fill the buffers
/// that they allocated, and hold the masks of ops in flight.
const MOST_GROWTH: usize = 1 << 20;
