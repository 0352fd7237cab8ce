//! What the two ends say to one another.

pub(crate) mod digests;
pub(crate) mod messages;
pub(crate) mod pipeline;
