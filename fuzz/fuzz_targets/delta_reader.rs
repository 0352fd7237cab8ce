//! The delta's reader against anything. Good inputs to begin with: `crates/delta/tests/golden`.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/delta/tests/delta/reader.rs"]
mod reader;

fuzz_target!(|bytes: &[u8]| {
    reader::fuzz_reader(bytes);
});
