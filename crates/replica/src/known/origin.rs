//! Where the source of a replica is, as that has said itself. For people alone: nothing decides by it, so it is written where it can be.

use std::path::Path;

use device::{Dir, Folder};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::replica::Replica;
use crate::state::locate::{inspect, state_folder};
use crate::state::options::ReplicaOptions;

/// The file's name in the replica's folder.
const NAME: &str = "origin";
/// Bytes of it that are read, and of a place that is kept.
const MOST: usize = 8 << 10;

#[derive(Debug, Serialize, Deserialize)]
struct Origin {
    source: Uuid,
    /// `HOST:PATH`.
    place: String,
}

/// Where this source of the replica with this folder is, `HOST:PATH`; `None` if it did not say so.
pub(crate) fn place(folder: &dyn Folder, source: Option<Uuid>) -> Option<String> {
    let file = folder.open(NAME, false).ok()?;
    let mut bytes = vec![0; file.len().ok()?.min(2 * MOST as u64) as usize];
    file.read_at(0, &mut bytes).ok()?;
    let origin: Origin = serde_json::from_slice(&bytes).ok()?;
    (Some(origin.source) == source).then_some(origin.place)
}

/// Where the source of the replica at `path` is, `HOST:PATH`; `None` if it did not say so. Takes no lock.
pub fn origin(path: &Path, options: &ReplicaOptions) -> Option<String> {
    let folder = Dir::existing(&state_folder(path, options).ok()?).ok()?;
    place(&folder, inspect(path, options).ok()??.source)
}

impl Replica {
    /// Notes where its source is, `HOST:PATH`.
    pub fn note_origin(&self, source: Uuid, place: &str) {
        let folder = self.state();
        if place.len() <= MOST && self::place(folder, Some(source)).as_deref() != Some(place) {
            let origin = Origin { source, place: place.to_owned() };
            let _ = serde_json::to_vec(&origin).map(|bytes| device::replace(folder, NAME, &bytes));
        }
    }

    /// Removes that note: nothing came of the first copy.
    pub(crate) fn drop_origin(&self) {
        let _ = self.state().remove(NAME);
    }
}
