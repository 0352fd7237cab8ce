//! A replica that becomes a source, and a source that becomes a replica.

pub(crate) mod demoted;
pub(crate) mod promoted;
