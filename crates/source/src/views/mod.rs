//! Readers beside a writer: what shows one moment, and at what pace it is read.

pub(crate) mod attended;
pub(crate) mod courtesy;
pub(crate) mod memory_view;
pub(crate) mod pace;
pub(crate) mod shared;
