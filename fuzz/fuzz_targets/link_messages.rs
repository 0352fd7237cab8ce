//! What a peer that is let in may write on a link, from its hello on: messages, credit, and the end.

#![no_main]

use std::io::{Cursor, sink};

use libfuzzer_sys::fuzz_target;
use link::Link;

fuzz_target!(|bytes: &[u8]| {
    let (_sender, receiver) = Link::pipe(Cursor::new(bytes.to_vec()), sink()).split();
    while matches!(receiver.recv(), Ok(Some(_))) {}
});
