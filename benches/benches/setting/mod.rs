//! Settings that the benches share.

use std::time::Duration;

use criterion::Criterion;

/// Returns a configuration with short rounds, which command-line arguments override.
pub(crate) fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}
