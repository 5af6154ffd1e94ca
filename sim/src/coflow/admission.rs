//! The coflows that an epoch of online Sincronia promises to serve.
//!
//! Sincronia admits coflows by a linear program, which finds the fractions of at most 1 that have
//! the most weight together and fit each port. It keeps the coflows with a fraction of at least a
//! half, so these load no port with more than twice its room. The authors use Gurobi.
//!
//! This module fills the fractions greedily in BSSI's order instead. Greedy fractions fit the ports
//! too, so the bound of twice the room holds. On a single port BSSI's order is the order of weight
//! per byte, and the fractions are the program's optimum. On many ports they may have less weight;
//! what is not admitted is still served from the rates that are left over. In return, there is no
//! solver, the arithmetic is in integers, and the result does not depend on which of several
//! optima a solver finds.

/// Returns the coflows of `order` that fit `room`, in that order. `demands` holds the bytes of each
/// coflow on each port, `room` the bytes that each port has room for.
pub(super) fn admit(order: &[usize], demands: &[Vec<u64>], mut room: Vec<u64>) -> Vec<usize> {
    order.iter().copied().filter(|&coflow| fill(&demands[coflow], &mut room)).collect()
}

/// Takes the largest fraction of `demand` that fits from `room`; returns whether it is at least a
/// half.
fn fill(demand: &[u64], room: &mut [u64]) -> bool {
    // The fraction that fits is that of the tightest port.
    let (mut part, mut whole) = (1, 1);
    for (&bytes, &free) in demand.iter().zip(&*room) {
        if u128::from(free) * u128::from(whole) < u128::from(bytes) * u128::from(part) {
            (part, whole) = (free, bytes);
        }
    }
    for (&bytes, free) in demand.iter().zip(room) {
        let taken = (u128::from(bytes) * u128::from(part)).div_ceil(u128::from(whole));
        // Rounding up to whole bytes does not pass the room, which is whole as well.
        *free -= u64::try_from(taken).expect("a fraction of a demand is not larger");
    }
    part >= whole - part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_a_coflow_is_enough_and_its_part_is_taken() {
        let demands = [vec![6, 0], vec![8, 2], vec![1, 0], vec![0, 9]];
        // The second coflow fits to a half, and takes half of its demand from the second port too.
        assert_eq!(admit(&[0, 1, 2, 3], &demands, vec![10, 10]), [0, 1, 3]);
        // One byte less, and it does not count, though it still fills the port.
        assert_eq!(admit(&[0, 1, 2, 3], &demands, vec![9, 10]), [0, 3]);
    }

    #[test]
    fn a_part_takes_whole_bytes() {
        // Two thirds of the first coflow take 4/3 bytes, and so two, from the second port.
        assert_eq!(admit(&[0, 1], &[vec![3, 2], vec![0, 1]], vec![2, 2]), [0]);
    }

    #[test]
    fn a_coflow_without_demand_is_admitted() {
        assert_eq!(admit(&[0], &[vec![0, 0]], vec![0, 0]), [0]);
        assert_eq!(admit(&[0], &[vec![]], vec![]), [0]);
        assert_eq!(admit(&[0], &[vec![1]], vec![0]), [0; 0]);
    }
}
