//! The end that has the replica: what it receives, fetches and allows.

pub(crate) mod allowed_paths;
pub(crate) mod far;
pub(crate) mod group_receiver;
pub(crate) mod host;
pub(crate) mod mirror_receiver;
pub(crate) mod pull;
pub(crate) mod receive;
