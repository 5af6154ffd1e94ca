//! Memory for tensors. If memory is short, the user gets a message instead of a killed process.

use racksum_aggregator::host_mib;
use racksum_proto::counted::counted;

use crate::exit::Failure;

/// Refuses tensors that do not fit in this host's memory when each of `ranks` ranks needs `each`
/// bytes. Without this check, the kernel would kill a rank without a message. In the error, `what`
/// names the tensors, and `advice` says what to do.
pub(crate) fn check_host(what: &str, each: u64, ranks: u16, advice: &str) -> Result<(), Failure> {
    // If the system does not report its memory, accept any tensors.
    host_mib().map_or(Ok(()), |host_mib| check(host_mib, what, each, ranks, advice))
}

fn check(host_mib: u64, what: &str, each: u64, ranks: u16, advice: &str) -> Result<(), Failure> {
    let need_mib = each.saturating_mul(ranks.into()) >> 20;
    if need_mib <= host_mib {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{what} need {need_mib} MiB for {} on this host, which has {host_mib} MiB; {advice}",
        counted(ranks, "rank")
    )))
}

/// Allocates `len` zero bytes.
pub(crate) fn zeros(len: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = reserved(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// Copies bytes into a new allocation.
pub(crate) fn copy(bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut copied = reserved(bytes.len())?;
    copied.extend_from_slice(bytes);
    Ok(copied)
}

fn reserved(len: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| {
        Failure::usage(format!(
            "cannot allocate a tensor of {len} bytes; use smaller tensors, or raise the limit on \
             this process's memory (ulimit -v)"
        ))
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_has_no_memory_for_is_refused_with_what_it_needs() {
        let of = |each: u64, ranks: u16| check(100, "tensors", each, ranks, "use less");
        of(50 << 20, 2).unwrap();
        let failure = of(51 << 20, 2).unwrap_err();
        let why = "tensors need 102 MiB for 2 ranks on this host, which has 100 MiB; use less";
        assert_eq!((&failure.why[..], failure.exit), (why, crate::exit::Exit::USAGE));
        assert!(of(u64::MAX, 2).is_err());
    }

    #[test]
    fn memory_that_is_not_to_be_had_is_a_sentence() {
        assert_eq!(zeros(3).unwrap(), [0; 3]);
        assert_eq!(copy(&[7, 8]).unwrap(), [7, 8]);
        let why = zeros(usize::MAX >> 1).unwrap_err().to_string();
        assert!(why.starts_with("cannot allocate a tensor of "), "{why}");
    }
}
