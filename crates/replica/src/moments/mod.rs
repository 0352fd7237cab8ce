//! Earlier moments of a replica, for a reader and for a rewind.

pub(crate) mod rewind;
pub(crate) mod view;
pub(crate) mod viewed;
