//! Coverage-guided fuzz target of [`racksum_fuzz::machines`].
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|script: &[u8]| {
    racksum_fuzz::machines::run(script);
});
