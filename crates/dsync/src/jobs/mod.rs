//! Job files, and what they say of a run.

pub(crate) mod attempt;
pub(crate) mod hook;
pub(crate) mod job;
pub(crate) mod named_job;
pub(crate) mod service;
pub(crate) mod steering;
