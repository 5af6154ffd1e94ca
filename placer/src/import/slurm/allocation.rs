//! The variables in which Slurm describes a job's allocation: sbatch(1), "Output environment
//! variables".

use std::collections::BTreeMap;

/// The error for a variable that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// The text is no list of counts.
    #[error("{0:?} is not a list of counts such as 72(x2),36")]
    Counts(String),
    /// The list describes another number of hosts than there are.
    #[error("the list has counts for {listed} hosts, and the allocation has {hosts}")]
    Hosts {
        /// The number of hosts that the list describes.
        listed: usize,
        /// The number of hosts.
        hosts: usize,
    },
    /// The text is not a number of GPUs.
    #[error("{0:?} is not a number of GPUs; write N, or TYPE:N, with commas between types")]
    Gpus(String),
}

/// Returns the count of each of `hosts` hosts. `72(x2),36` stands for 72, 72 and 36.
///
/// # Errors
/// If the text is malformed or describes another number of hosts.
pub fn per_host(text: &str, hosts: usize) -> Result<Vec<u32>, AllocationError> {
    let mut counts = vec![];
    let mut listed = 0_usize;
    for item in text.split(',') {
        let wrong = || AllocationError::Counts(item.chars().take(MOST_SHOWN).collect());
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')').ok_or_else(wrong)?),
            None => (item, "1"),
        };
        let count: u32 = count.trim().parse().map_err(|_| wrong())?;
        let times: usize = times.parse().map_err(|_| wrong())?;
        listed = listed.saturating_add(times);
        if listed <= hosts {
            counts.extend(std::iter::repeat_n(count, times));
        }
    }
    if listed == hosts { Ok(counts) } else { Err(AllocationError::Hosts { listed, hosts }) }
}

/// The type of GPUs for which Slurm names none.
pub const UNTYPED: &str = "gpu";

/// Returns the GPUs of a host by type: `4`, or `h100:4,a100:2`. GPUs without a type have the type
/// [`UNTYPED`].
///
/// # Errors
/// If the text is malformed.
pub fn gpus(text: &str) -> Result<BTreeMap<String, u32>, AllocationError> {
    let wrong = || AllocationError::Gpus(text.chars().take(MOST_SHOWN).collect());
    let mut gpus = BTreeMap::new();
    for item in text.split(',') {
        let (kind, number) = item.trim().rsplit_once(':').unwrap_or_else(|| (UNTYPED, item.trim()));
        let number = number.parse().map_err(|_| wrong())?;
        if kind.is_empty() || gpus.insert(kind.to_owned(), number).is_some() {
            return Err(wrong());
        }
    }
    Ok(gpus)
}

/// The greatest number of characters of a variable that an error quotes.
const MOST_SHOWN: usize = 60;
