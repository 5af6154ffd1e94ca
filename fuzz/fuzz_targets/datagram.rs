//! Coverage-guided fuzz target of [`racksum_fuzz::datagram`].
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| racksum_fuzz::datagram::run(bytes));
