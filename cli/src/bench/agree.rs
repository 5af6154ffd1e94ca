//! What the ranks of a benchmark agree on before they measure.
//!
//! Ranks that were given other flags call other ops, or other numbers of them, and one goes on when
//! another has ended. No op says which flag it was, so the ranks compare their flags first.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};

use super::Args;
use crate::exit::Failure;

/// The flags by which ranks call the same ops with the same data, each as a number. An op itself
/// says its type, its reduction and its blocks.
fn shared(args: &Args) -> [(&'static str, u64); 10] {
    [
        ("-b", args.min_bytes),
        ("-e", args.max_bytes),
        ("-f", args.step_factor),
        // A step of 0 is refused.
        ("-i", args.step_bytes.unwrap_or(0)),
        ("-n", args.iters.into()),
        ("-w", args.warmup_iters.into()),
        ("--ops-in-flight", args.ops_in_flight.into()),
        ("--density", args.density.unwrap_or(f64::NAN).to_bits()),
        ("--overlap", args.overlap as u64),
        ("--seed", args.seed),
    ]
}

/// The op that compares the flags.
pub(super) fn descriptor(args: &Args) -> Descriptor {
    let elements = 2 * shared(args).len() as u64;
    Descriptor { reduction: Reduction::Max, ..Descriptor::sum(elements, DType::I64) }
}

/// What a rank gives to the op: of each flag its number, and one that is less where that is
/// greater. The maximum of all ranks has the greatest and the least of each.
pub(super) fn say(args: &Args) -> Vec<u8> {
    let numbers = shared(args).map(|(_, number)| number.cast_signed());
    numbers.iter().flat_map(|number| [*number, !number]).flat_map(i64::to_le_bytes).collect()
}

/// Finds the flags that some rank was given otherwise, in what all ranks said.
///
/// # Errors
/// A sentence that names them.
pub(super) fn hear(args: &Args, heard: &[u8]) -> Result<(), Failure> {
    let (words, _) = heard.as_chunks();
    let words: Vec<_> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
    let (pairs, _) = words.as_chunks();
    let flags = shared(args).into_iter().zip(pairs);
    let other = flags.filter(|(_, [most, least])| *most != !*least).map(|((flag, _), _)| flag);
    let other: Vec<_> = other.collect();
    if other.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the ranks were given different {}; give all ranks of a benchmark the same flags",
        other.join(" and ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(flags: &[&str]) -> Args {
        let flags = [&["bench"], flags].concat();
        <Cli as clap::Parser>::parse_from(flags).args
    }

    /// What ranks with such flags hear.
    fn heard(ranks: &[&Args]) -> Vec<u8> {
        let said = ranks.iter().map(|args| {
            let said = say(args);
            said.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect::<Vec<_>>()
        });
        let most = said.reduce(|one, other| {
            one.iter().zip(other).map(|(one, other)| *one.max(&other)).collect()
        });
        most.unwrap().into_iter().flat_map(i64::to_le_bytes).collect()
    }

    #[test]
    fn each_flag_that_differs_is_named_at_every_rank_and_no_other() {
        let usual = args(&[]);
        assert_eq!(descriptor(&usual).elements * 8, say(&usual).len() as u64);
        assert!(hear(&usual, &heard(&[&usual, &usual])).is_ok());
        let largest = u64::MAX.to_string();
        for (flags, named) in [
            (&["-b", "8K"][..], "-b"),
            (&["-e", "1M"], "-e"),
            (&["-f", "2"], "-f"),
            (&["-i", "4K"], "-i"),
            (&["-n", "30"], "-n"),
            (&["-w", "0"], "-w"),
            (&["--ops-in-flight", "2"], "--ops-in-flight"),
            (&["--density", "1"], "--density"),
            (&["--overlap", "all"], "--overlap"),
            (&["--seed", &largest], "--seed"),
            (&["--seed", "7", "-n", "1"], "-n and --seed"),
        ] {
            let other = args(flags);
            let heard = heard(&[&usual, &other, &usual]);
            for rank in [&usual, &other] {
                let why = hear(rank, &heard).unwrap_err().to_string();
                assert!(why.starts_with(&format!("the ranks were given different {named};")));
            }
        }
    }
}
