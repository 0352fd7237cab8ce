//! `dsync serve REPLICA@MOMENT`: a replica at one moment, for NBD clients, while syncs and mirrors go on beneath.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use device::{Disk, Overlay};
use replica::{Options, View};
use source::StateDir;

use crate::output::Output;
use crate::rewind::choose;
use crate::{Failure, args, units};

/// How often it is looked whether a moment can still be read.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// The present moment.
const NOW: &str = "now";

/// The replica and the moment of `REPLICA@MOMENT`; `None` for the path of an image.
pub(crate) fn parts(image: &Path) -> Option<(PathBuf, String)> {
    let (replica, moment) = image.to_str()?.rsplit_once('@')?;
    (!replica.is_empty() && !moment.is_empty() && !image.exists())
        .then(|| (PathBuf::from(replica), moment.to_owned()))
}

/// A replica at a moment.
#[derive(Clone)]
pub(crate) struct Rehearsal {
    view: Arc<View>,
    /// Where clients write to.
    overlay: Option<Arc<Overlay>>,
    /// What was last said of the bytes that this takes.
    told: Arc<AtomicU64>,
}

impl Rehearsal {
    /// Opens a moment of the replica at a path.
    pub(crate) fn open(path: &Path, moment: &str, args: &args::Serve, state: &StateDir) -> Result<Rehearsal> {
        let path = std::path::absolute(path)?;
        let mut options = Options { devices: state.replicas_folder(), ..Options::default() };
        if replica::inspect(&path, &options)?.is_none() {
            options.folder = sync::known_replicas(state).folder_of(&path).unwrap_or_default();
        }
        let to = match moment {
            NOW => None,
            moment => choose(&replica::history(&path, &options)?, moment)?.map(|moment| moment.state),
        };
        let view = Arc::new(View::open(&path, &options, to)?);
        let overlay = match (args.writable, &args.overlay) {
            (false, _) => None,
            (true, folder) => Some(Arc::new(overlay(&view, folder.as_deref())?)),
        };
        Ok(Rehearsal { view, overlay, told: Arc::default() })
    }

    /// What clients read and write.
    pub(crate) fn disk(&self) -> Arc<dyn Disk> {
        match &self.overlay {
            Some(overlay) => overlay.clone(),
            None => self.view.clone(),
        }
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.overlay.is_some()
    }

    /// Which moment it is.
    pub(crate) fn moment(&self) -> String {
        let view = &self.view;
        let after = if view.is_ahead() { "after epoch" } else { "epoch" };
        let of = view.at().map_or(String::new(), |at| format!(" ({})", device::moment(at)));
        let fuzzy = if view.is_fuzzy() { ", fuzzy" } else { "" };
        format!("{after} {}{of}{fuzzy} of {}", view.epoch().number, view.path().display())
    }

    /// What is said when it is served.
    pub(crate) fn about(&self) -> String {
        let writes = match self.overlay {
            Some(_) => "writable: what is written is thrown away at the end",
            None => "read-only",
        };
        format!("{}, {}, {writes}", units::size(self.view.len()), self.moment())
    }

    /// Says what it takes, for "dsync status".
    fn tell(&self) {
        let taken = self.overlay.as_ref().and_then(|overlay| overlay.taken().ok()).unwrap_or(0);
        if self.told.swap(taken, SeqCst) != taken {
            self.view.tell(taken);
        }
    }

    /// Why it can be read no more. All that it takes is then given back.
    fn lost(&self) -> Option<String> {
        let why = self.view.lost()?;
        let _ = self.overlay.as_ref().map(|overlay| overlay.give_up());
        self.view.let_go();
        Some(format!(
            "{} can no longer be served: {why}. Its clients get I/O errors; the replica itself is not affected",
            self.moment()
        ))
    }
}

fn overlay(view: &Arc<View>, folder: Option<&Path>) -> Result<Overlay> {
    let folder = folder.unwrap_or(view.folder());
    let made = Overlay::new(view.clone(), folder);
    made.with_context(|| {
        format!("cannot make a scratch file in {}: name another folder with --overlay", folder.display())
    })
}

/// Looks now and then whether what is served can still be read, and says so if not.
pub(crate) struct Watch {
    stop: Sender<()>,
    lost: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(rehearsals: Vec<Rehearsal>, output: &Output) -> Result<Watch> {
        let (stop, stopped) = channel();
        let lost = Arc::<AtomicBool>::default();
        if rehearsals.is_empty() {
            return Ok(Watch { stop, lost, thread: None });
        }
        let (mut left, output, noted) = (rehearsals, output.alike(), lost.clone());
        let watch = move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(LOOK_EVERY) {
                left.retain(|rehearsal| {
                    let why = rehearsal.lost();
                    if let Some(why) = &why {
                        noted.store(true, SeqCst);
                        output.warn(why);
                    } else {
                        rehearsal.tell();
                    }
                    why.is_none()
                });
            }
        };
        let thread = std::thread::Builder::new().name("watch".into()).spawn(watch)?;
        Ok(Watch { stop, lost, thread: Some(thread) })
    }

    /// Ends, and fails if something was lost.
    pub(crate) fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
        match self.lost.load(SeqCst) {
            true => Err(Failure::failed("a moment of a replica could not be served to the end").into()),
            false => Ok(()),
        }
    }
}
