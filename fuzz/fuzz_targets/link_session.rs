//! What any client may send on a connection of a session: the hello, and chunks.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = link::read_connection(bytes);
});
