//! What every bench needs: processes and what they cost, places, content, limits, reports.

pub(crate) mod content;
pub(crate) mod dsync;
pub(crate) mod limit;
pub(crate) mod limit_commit;
pub(crate) mod packages;
pub(crate) mod pair;
pub(crate) mod paper;
pub(crate) mod places;
pub(crate) mod process;
pub(crate) mod report;
