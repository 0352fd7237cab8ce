//! What the tests of a user's day stand on: the `dsync` command run as a user runs it, servers and guests that are
//! always reaped, a small NBD client of our own, images and their differences, and seeded randomness.
//!
//! Helpers panic when the world is not as it should be: they are the tests' assertions.
//!
//! Environment:
//! - `DSYNC_BIN`: the binary to test; without it `cargo build -p dsync` makes one.
//! - `DSYNC_SOAK=1`: the long campaigns run their full counts.
//! - `DSYNC_SEED`: the seed of a run to repeat; every test prints its own.
//! - `DSYNC_STRICT=1`: a missing tool fails a test instead of skipping it.
//! - `DSYNC_TEST_DIR`: where images lie; by default in cargo's target folder.

pub mod carry;
pub mod far;
pub mod guest;
pub mod host;
pub mod image;
pub mod libvirt;
pub mod listener;
pub mod load;
pub mod machine;
pub mod mount;
pub use nbd::client as nbd;
pub mod postgres;
mod promtool;
pub mod qemu;
pub mod records;
pub mod run;
pub mod scene;
pub mod site;
pub mod tracked;

pub use promtool::{promtool, sample};
pub use run::{Background, Output, Run};
pub use scene::Scene;
pub use site::{Server, Site};
pub use testing::{
    Random, beyond, find, got, left_out, need, need_root, on_disk, profile_dir, rounds, say, search_path,
    skipped, soak,
};

use std::path::Path;
use std::time::{Duration, Instant};

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the repository")
}

/// Waits until that is so; fails the test after five minutes.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(300);
    loop {
        let began = Instant::now();
        if is_so() {
            return;
        }
        assert!(began < limit, "waited for five minutes: {what}");
        // Looking may cost more than what is waited for: it takes a quarter of the time at most.
        std::thread::sleep((3 * began.elapsed()).max(Duration::from_millis(5)));
    }
}
