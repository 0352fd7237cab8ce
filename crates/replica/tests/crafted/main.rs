//! State of a replica that its owner has crafted. A bounded run belongs to the tests: `DSYNC_SEED` repeats one, `DSYNC_FUZZ_RUNS` sets its
//! length. `fuzz/` runs the same function without end.
#![allow(missing_docs)]

mod folder;

use testing::{Random, number, rounds};

#[test]
fn whatever_the_state_is_there_is_an_answer() {
    let mut random = Random::new("crafted state of a replica");
    folder::fuzz_state(&[]);
    let runs = number("DSYNC_FUZZ_RUNS").unwrap_or(rounds(600, 20_000) as u64);
    for _ in 0..runs {
        let parts = 1 + random.index(3);
        folder::fuzz_state(&random.bytes(4 * parts));
    }
}
