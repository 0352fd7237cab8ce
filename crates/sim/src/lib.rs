//! Both ends of a conversation in one process, over disks, folders and links that fail as a seed says. For tests.
//!
//! The product's own code runs, from [`sync::push`] to the commit of the replica; what is beneath it is simulated: machines
//! ([`host::Host`]) with a file system in memory, devices, trackers of live disks and a power supply, and lines between them. At
//! each step the seed may let a call fail once or for a while, cut the line, kill the process, or cut the power, which loses any of
//! what was not flushed. The list of moments that the source went through tells what a replica may hold.
//!
//! ```
//! # let scratch = tempfile::tempdir().unwrap();
//! // What the seed means, and a run of it; a failure says how to repeat it.
//! println!("{}", sim::campaign::cell(1));
//! assert!(sim::campaign::run(1, scratch.path()).is_ok());
//! ```

#![forbid(unsafe_code)]

pub mod backing;
pub mod campaign;
pub mod cell;
pub mod destination;
pub mod failure;
pub mod file_system;
pub mod files;
pub mod foreign;
pub mod host;
pub mod inode;
pub mod kernel;
mod mirror;
pub mod pipe;
mod roles;
mod roles_group;
mod roles_judge;
mod roles_lineage;
mod roles_model;
mod roles_steps;
mod site;
pub mod tracker;
pub mod world;
mod write;
