//! The disk of a source in whichever form it is read: an image in use, a clone, a moment that another program shows.

pub(crate) mod backing;
pub(crate) mod clones;
pub(crate) mod discard;
pub(crate) mod export;
pub(crate) mod moments;
pub(crate) mod outside;
pub(crate) mod recorded;
pub(crate) mod rests;
pub(crate) mod tend;
