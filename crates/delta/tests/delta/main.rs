//! What deltas promise: they return what was put in, refuse everything else, and fold into one another.

mod combined;
mod fuzzed;
mod golden;
mod model;
mod raw;
mod reader;
mod refused;
mod returned;
