//! Orders of coflows: Sincronia's and those that it is compared with.

use crate::coflow::bssi::{self, Jobs};
use crate::coflow::workload::{Coflow, Fabric, Workload};

/// A rule that orders coflows by what is known when all of them have arrived.
///
/// The simple rules sort; coflows with equal keys are served in the order of their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Sincronia's Bottleneck-Select-Scale-Iterate; see [`bssi`].
    Bssi,
    /// Smallest effective bottleneck first (Varys, SIGCOMM 2014): by the time of the busiest port.
    Sebf,
    /// Shortest coflow first: by the size of the largest flow.
    Scf,
    /// Smallest total first: by the size of all flows together.
    Tcf,
    /// Narrowest coflow first: by the number of sources or of destinations, whichever is smaller.
    Ncf,
}

impl Order {
    /// All orders.
    pub const ALL: [Self; 5] = [Self::Bssi, Self::Sebf, Self::Scf, Self::Tcf, Self::Ncf];

    /// Orders the coflows of `workload`; returns their indices, the first to be served first.
    #[must_use]
    pub fn of(self, workload: &Workload) -> Vec<usize> {
        let coflows = workload.coflows();
        let demands = |it: &Coflow| workload.fabric().demands(it.flows.iter().copied());
        match self {
            Self::Bssi => {
                by_bssi(workload.fabric(), coflows.iter().map(|it| (it.weight, demands(it))))
            }
            Self::Sebf => sorted(coflows, |it| workload.fabric().bottleneck(&demands(it))),
            Self::Scf => sorted(coflows, |it| it.flows.iter().map(|flow| flow.bytes).max()),
            Self::Tcf => sorted(coflows, |it| it.flows.iter().map(|flow| flow.bytes).sum::<u64>()),
            Self::Ncf => sorted(coflows, |it| it.width),
        }
    }
}

/// Orders coflows, each given by its weight and its demands on the ports of `fabric`, by BSSI.
pub(super) fn by_bssi(
    fabric: &Fabric,
    coflows: impl IntoIterator<Item = (u64, Vec<u64>)>,
) -> Vec<usize> {
    let (weights, demands): (Vec<u64>, Vec<Vec<u64>>) = coflows.into_iter().unzip();
    let rates = fabric.rates_bps();
    bssi::order(&Jobs { weights: &weights, demands: &demands.concat(), rates: &rates, d0: 0 })
}

fn sorted<K: Ord>(coflows: &[Coflow], key: impl Fn(&Coflow) -> K) -> Vec<usize> {
    let mut order: Vec<usize> = (0..coflows.len()).collect();
    order.sort_by_cached_key(|&it| (key(&coflows[it]), coflows[it].id));
    order
}
