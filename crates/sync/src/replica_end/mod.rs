//! The end that has the replica: what it receives, fetches and allows.

pub(crate) mod allowed_paths;
pub(crate) mod conversation;
pub(crate) mod host;
pub(crate) mod merge;
pub(crate) mod mirror_receiver;
pub(crate) mod opening;
pub(crate) mod pull;
pub(crate) mod receive;
