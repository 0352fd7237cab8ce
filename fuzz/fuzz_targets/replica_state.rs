//! The state of a replica as any owner of its folder may have left it.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/replica/tests/crafted/folder.rs"]
mod folder;

fuzz_target!(|bytes: &[u8]| {
    folder::fuzz_state(bytes);
});
