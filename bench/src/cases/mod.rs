//! One file for each subject that is measured.

pub(crate) mod clones;
pub(crate) mod compare;
pub(crate) mod compress;
pub(crate) mod far;
pub(crate) mod fec;
pub(crate) mod harm;
pub(crate) mod idle;
pub(crate) mod keep;
pub(crate) mod mirror;
pub(crate) mod record;
pub(crate) mod rolling;
pub(crate) mod serve;
pub(crate) mod sync;
pub(crate) mod track;
pub(crate) mod wan;
