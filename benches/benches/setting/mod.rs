//! How the benches measure.

use std::time::Duration;

use criterion::Criterion;

/// Short rounds, as the arguments of the command say otherwise.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}
