//! Both ends of a conversation in one process, over disks, folders and links that fail as a seed says. For tests.
//!
//! The product's own code runs, from [`sync::push`] to the commit of the replica; what is beneath it is simulated: machines
//! ([`machine::host::Host`]) with a file system in memory, devices, trackers of live disks and a power supply, and lines between them. At
//! each step the seed may let a call fail once or for a while, cut the line, kill the process, or cut the power, which loses any of
//! what was not flushed. The list of moments that the source went through tells what a replica may hold.
//!
//! ```
//! # let scratch = tempfile::tempdir().unwrap();
//! // What the seed means, and a run of it; a failure says how to repeat it.
//! println!("{}", sim::campaign::cell(1));
//! assert!(sim::campaign::run(1, scratch.path()).is_ok());
//! ```
//!
//! After each round: a replica that claims to be exactly at an epoch holds what that epoch held; it never goes back; a refused command
//! has changed nothing; no foreign write is reported that did not happen; all are noticed, except for the documented exceptions; a
//! smaller source is refused until a user has agreed to it, and no longer. At the end faults stop, space is freed, and a few syncs must
//! bring every replica to the source's state.
//!
//! | | processes (`tests`) | simulated (`crates/sim`) |
//! | --- | --- | --- |
//! | source | served file (buffered, direct) and device, resting file, bpf, dm-track in guests | served or resting file (buffered, direct), served device, bpf and dm as models |
//! | destination | file, loop device | file, device |
//! | way | local; ssh and TLS, pushed and pulled | one process; two over a link that is cut |
//! | commit | journal, in place, reflink on XFS and Btrfs | journal, in place, reflink |
//! | verb | sync, mirror, extract and merge, verify | the same, promote, demote and rewind, and two syncs at once, of two replicas or one, with one state directory or two; no mirror of a live disk, whose batches are syncs |
//! | method | auto, compare, rolling, copy | the same |
//! | change | scattered, dense, grown | the same, moved, shrunk, trimmed, more epochs than a history keeps |
//! | faults | SIGKILL of either side and of the server, cut lines, file systems full for a while, writes that fail for a while, power cuts of guests | lasting and transient failures, no space for good or for a while, kills, power cuts, cut lines, foreign writes at any step, a damaged history |
//! | not covered | | freezes of mounted file systems, two first syncs that create a source, real kernels |
//!
//! `DSYNC_SEED=N cargo test -p sim` repeats run N, `DSYNC_ROUNDS` sets how many runs start there, `DSYNC_CELL="Bpf to File"` selects
//! cells whose names contain that text, `DSYNC_THREADS` sets the number of threads, and `DSYNC_KEEP_GOING=1` continues after a failure. A
//! failure prints its seed, its cell and its steps; the table of rounds by cell comes last. The seeds that three divides are runs in
//! which disks change roles (`DSYNC_CELL=Roles`). Threads of one run may be scheduled differently the next time: if a seed does not fail
//! again at once, repeat it.

#![forbid(unsafe_code)]

pub mod campaign;
pub mod cell;
pub mod failure;
pub mod foreign;
pub mod machine;
mod roles;
mod site;
pub mod world;
mod write;
