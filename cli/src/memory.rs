//! Memory for tensors: where a limit leaves none, a sentence and not the end of the process.

use crate::exit::Failure;

/// As many bytes of zeros.
pub(crate) fn zeros(len: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = reserved(len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// A copy of bytes.
pub(crate) fn copy(bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut copied = reserved(bytes.len())?;
    copied.extend_from_slice(bytes);
    Ok(copied)
}

fn reserved(len: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len).map_err(|_| {
        Failure::usage(format!(
            "no memory for a tensor of {len} bytes; use smaller tensors, or raise the limit on \
             this process's memory (ulimit -v)"
        ))
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_to_be_had_is_a_sentence() {
        assert_eq!(zeros(3).unwrap(), [0; 3]);
        assert_eq!(copy(&[7, 8]).unwrap(), [7, 8]);
        let why = zeros(usize::MAX >> 1).unwrap_err().to_string();
        assert!(why.starts_with("no memory for a tensor of "), "{why}");
    }
}
