//! What the tests of all crates share. Product crates have it as a dev-dependency, and nothing of it is in the command.
//!
//! - [`Random`]: numbers that a seed determines, and where a test gets its seed;
//! - [`faulty`]: disks and folders that fail, and a power supply that is cut;
//! - [`contract()`]: the tests that every disk passes;
//! - [`in_memory`], [`on_disk`], [`Loop`], [`Mount`]: scratch places; [`leftovers`]: what killed tests have left of these;
//! - [`need`], [`skipped`], [`rounds`]: what a test needs of the machine, and how long it may take;
//! - [`stalled`]: a write that every freeze waits for.
//!
//! Environment:
//! - `DSYNC_SEED`: the seed of a run to repeat; every test prints its own.
//! - `DSYNC_SOAK=1`: the long campaigns run their full counts.
//! - `DSYNC_STRICT=1`: a missing tool fails a test instead of skipping it.
//! - `DSYNC_TEST_TIMES`: a file to which each test adds its time.
//! - `DSYNC_TEST_DIR`: where images lie; by default in cargo's target folder.

mod contract;
pub mod faulty;
pub mod leftovers;
mod needs;
mod random;
mod scratch;
pub mod stalled;
mod stopwatch;

pub use contract::contract;
pub use needs::{
    beyond, find, got, guests_in_full, left_out, need, need_root, rounds, run, say, search_path, skipped,
    soak,
};
pub use random::{Random, Sample, number, seed};
pub use scratch::{Loop, Mount, in_memory, on_disk, profile_dir, temporary};
