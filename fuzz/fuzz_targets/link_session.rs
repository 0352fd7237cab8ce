//! What is said on a lane before and around the link's own bytes, whoever says it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = link::read_lane(bytes);
});
