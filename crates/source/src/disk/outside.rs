//! Who says, other than the record, what was written to a source before it was opened.

use std::ops::Range;
use std::time::Duration;

use delta::Epoch;

use crate::disk::backing::Backing;
use crate::disk::clones::NewClone;
use crate::disk::moments::NewMoment;
use crate::record::stamp::StampVerdict;
use crate::{Gap, SourceError};

/// What tells, other than the record, what was written to a source before it was opened; until that is in an epoch.
pub(crate) enum Outside {
    /// The file system, by a clone of its image.
    Clone(NewClone),
    /// Whoever named the moment that is read.
    Moment(NewMoment),
}

impl Outside {
    /// What was written since the last epoch; or why that is not known.
    pub(crate) fn since(&self) -> Result<&[Range<u64>], &Gap> {
        match self {
            Outside::Clone(clone) => clone.since.as_deref(),
            Outside::Moment(moment) => moment.since.as_deref(),
        }
    }

    /// What is known of the disk, by what its record says.
    ///
    /// # Errors
    /// `Refused` if what was said of it cannot be.
    pub(crate) fn verdict(&self, recorded: StampVerdict) -> Result<StampVerdict, SourceError> {
        match self {
            Outside::Clone(clone) => Ok(clone.verdict(recorded)),
            Outside::Moment(moment) => moment.verdict(recorded),
        }
    }

    /// What it said is to be doubted if no epoch comes of it: nobody has to say it again.
    pub(crate) fn unrecorded(&self) -> Option<Gap> {
        match self {
            Outside::Clone(_) => None,
            Outside::Moment(_) => Some("a list of changes was taken, and no epoch came of it".into()),
        }
    }

    /// True if it has to be kept with an epoch that is in the history already, since which nothing was written.
    pub(crate) fn joins(&self) -> bool {
        match self {
            Outside::Clone(clone) => clone.since.is_err(),
            Outside::Moment(_) => true,
        }
    }

    /// Keeps what was said with an epoch which is about to be written to the history, or is the last one there. Durable on return.
    ///
    /// # Errors
    /// If that cannot be written.
    pub(crate) fn keep(&mut self, epoch: Epoch, backing: &dyn Backing) -> Result<(), SourceError> {
        match self {
            Outside::Clone(clone) => clone.keep(epoch, backing),
            Outside::Moment(moment) => moment.keep(epoch),
        }
    }

    /// Forgets those of other epochs.
    pub(crate) fn drop_others(&self) {
        match self {
            Outside::Clone(clone) => clone.drop_others(),
            Outside::Moment(moment) => moment.drop_others(),
        }
    }

    /// How long the writers of the disk had to wait for it.
    pub(crate) fn waited(&self) -> Duration {
        match self {
            Outside::Clone(clone) => clone.waited,
            Outside::Moment(_) => Duration::ZERO,
        }
    }
}
