//! The replica in a world whose power can be cut at every step, and in the real one.

mod batches;
mod crash;
mod fit;
mod group;
mod lives;
mod lost;
mod past;
mod promoted;
mod readers;
mod real;
mod rolling;
mod times;
mod unread;
pub(crate) mod world;
