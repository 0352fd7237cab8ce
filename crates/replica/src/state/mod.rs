//! What a replica keeps of itself: its lineage, the place and the stamp of its disk, the names and options it is opened with.

pub(crate) mod attributes;
pub(crate) mod destination;
pub(crate) mod fingerprint;
pub(crate) mod intent;
pub(crate) mod keep;
pub(crate) mod lineage;
pub(crate) mod locate;
pub(crate) mod note;
pub(crate) mod options;
pub(crate) mod role;
pub(crate) mod version;
