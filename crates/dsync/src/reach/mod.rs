//! Where a name leads: a file here, a host over ssh or TLS, and the dsync that answers there.

pub(crate) mod effect;
pub(crate) mod far;
pub(crate) mod far_side;
pub(crate) mod key;
pub(crate) mod location;
pub(crate) mod source;
