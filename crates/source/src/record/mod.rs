//! What a source keeps of itself from one cut to the next.

pub(crate) mod bookmarks;
pub(crate) mod history;
pub(crate) mod job_record;
pub(crate) mod json;
pub(crate) mod lives;
pub(crate) mod overwritten;
pub(crate) mod process;
pub(crate) mod stamp;
pub(crate) mod state;
pub(crate) mod tally;
