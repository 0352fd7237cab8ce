//! What is said and written down where a past that is asked for was given up: the commit that could not keep it is long gone when
//! somebody asks.

use std::path::Path;

use crate::past::{GivenUpPast, PastSettings};
use crate::replica::Replica;
use crate::state::locate::locate;
use crate::state::options::ReplicaOptions;

impl Replica {
    /// What was kept of the past leads nowhere from the next commit on: tells the user, and writes it down for who looks later.
    pub(crate) fn give_up_past(&mut self, why: &str) {
        self.warn(format!("its past is given up, because {why}"));
        let Some(settings) = self.settings() else { return };
        let given_up = Some(GivenUpPast { at: self.now(), why: why.into() });
        let settings = PastSettings { given_up, ..settings.clone() };
        // Where there is no room now there will be after the commit.
        let _ = settings.store(self.state());
        self.set_settings(Some(settings));
    }

    /// Notes whether moments were dropped of which the user was not told yet.
    pub(crate) fn note_dropped(&mut self, dropped: bool) {
        let Some(settings) = self.settings().filter(|settings| settings.dropped != dropped) else { return };
        let settings = PastSettings { dropped, ..settings.clone() };
        // It is told again where it cannot be written.
        let _ = settings.store(self.state());
        self.set_settings(Some(settings));
    }

    /// Writes it down where that has failed before.
    pub(crate) fn record_given_up(&self) {
        let Some(settings) = self.settings().filter(|settings| settings.given_up.is_some()) else { return };
        let written = PastSettings::load(self.state()).ok().flatten().and_then(|written| written.given_up);
        if written != settings.given_up {
            let _ = settings.store(self.state());
        }
    }
}

/// True if moments of the replica at `path` were dropped to make room, and nobody was told yet.
pub fn has_dropped(path: &Path, options: &ReplicaOptions) -> bool {
    let folder = locate(path, options).ok().and_then(|(_, _, folder)| device::Dir::existing(&folder).ok());
    let settings = folder.and_then(|folder| PastSettings::load(&folder).ok().flatten());
    settings.is_some_and(|settings| settings.dropped)
}
