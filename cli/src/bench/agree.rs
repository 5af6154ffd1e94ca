//! Checks that all ranks of a benchmark have the same flags before they start to measure.
//!
//! Ranks with different flags would call different ops or a different number of them, and some
//! ranks would continue after others had ended. The error of an op names no flag, so the ranks
//! compare their flags first.

use racksum_proto::descriptor::Descriptor;
use racksum_proto::dtype::{DType, Reduction};

use super::Args;
use crate::exit::Failure;

/// Returns the flags that determine a rank's ops and data, each as a number. Leaves out the flags
/// for types, reduction and blocks, because the aggregator compares these in the ops' descriptors.
fn shared(args: &Args) -> [(&'static str, u64); 10] {
    [
        ("-b", args.min_bytes),
        ("-e", args.max_bytes),
        ("-f", args.step_factor),
        // The command line refuses a step of 0, so 0 means no step.
        ("-i", args.step_bytes.unwrap_or(0)),
        ("-n", args.iters.into()),
        ("-w", args.warmup_iters.into()),
        ("--ops-in-flight", args.ops_in_flight.into()),
        ("--density", args.density.unwrap_or(f64::NAN).to_bits()),
        ("--overlap", args.overlap as u64),
        ("--seed", args.seed),
    ]
}

/// Returns the descriptor of the op that compares the flags.
pub(super) fn descriptor(args: &Args) -> Descriptor {
    let elements = 2 * shared(args).len() as u64;
    Descriptor { reduction: Reduction::Max, ..Descriptor::sum(elements, DType::I64) }
}

/// Returns a rank's contribution to the op: the value of each flag, and the bitwise complement of
/// the value. The maximum over all ranks contains the greatest value of each flag and the
/// complement of the least value.
pub(super) fn encode(args: &Args) -> Vec<u8> {
    let numbers = shared(args).map(|(_, number)| number.cast_signed());
    numbers.iter().flat_map(|number| [*number, !number]).flat_map(i64::to_le_bytes).collect()
}

/// Checks in the op's result that no flag differs between ranks.
///
/// # Errors
/// A message that names the flags that differ.
pub(super) fn check(args: &Args, result: &[u8]) -> Result<(), Failure> {
    let (words, _) = result.as_chunks();
    let words: Vec<_> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
    let (pairs, _) = words.as_chunks();
    let flags = shared(args).into_iter().zip(pairs);
    let other = flags.filter(|(_, [most, least])| *most != !*least).map(|((flag, _), _)| flag);
    let other: Vec<_> = other.collect();
    if other.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!(
        "the ranks have different {}; give all ranks of a benchmark the same flags",
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

    /// Computes the op's result for ranks with these flags.
    fn result(ranks: &[&Args]) -> Vec<u8> {
        let encoded = ranks.iter().map(|args| {
            let encoded = encode(args);
            encoded.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect::<Vec<_>>()
        });
        let most = encoded.reduce(|one, other| {
            one.iter().zip(other).map(|(one, other)| *one.max(&other)).collect()
        });
        most.unwrap().into_iter().flat_map(i64::to_le_bytes).collect()
    }

    #[test]
    fn each_flag_that_differs_is_named_at_every_rank_and_no_other() {
        let usual = args(&[]);
        assert_eq!(descriptor(&usual).elements * 8, encode(&usual).len() as u64);
        assert!(check(&usual, &result(&[&usual, &usual])).is_ok());
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
            let result = result(&[&usual, &other, &usual]);
            for rank in [&usual, &other] {
                let why = check(rank, &result).unwrap_err().to_string();
                assert!(why.starts_with(&format!("the ranks have different {named};")));
            }
        }
    }
}
