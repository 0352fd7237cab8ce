//! The end that has the source: what it pushes, and what it verifies.

pub(crate) mod account;
pub(crate) mod apart;
pub(crate) mod live;
pub(crate) mod member;
pub(crate) mod push;
pub(crate) mod session;
pub(crate) mod verify;
