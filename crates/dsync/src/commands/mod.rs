//! One file for each command, beside those that have a room of their own.

pub(crate) mod checkpoint;
pub(crate) mod delta_files;
pub(crate) mod demo;
pub(crate) mod discover;
pub(crate) mod failover;
pub(crate) mod forget;
pub(crate) mod group_command;
pub(crate) mod group_failover;
pub(crate) mod group_rewind;
pub(crate) mod manual;
pub(crate) mod mirror_command;
pub(crate) mod mirroring;
pub(crate) mod pipes;
pub(crate) mod rehearsal;
pub(crate) mod rewind;
pub(crate) mod serve;
pub(crate) mod sync_command;
pub(crate) mod track;
pub(crate) mod verify_command;
