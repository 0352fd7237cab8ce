//! `dsync serve REPLICA@MOMENT`: a replica at one moment, for NBD clients, while syncs and mirrors go on beneath.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use device::{Disk, Overlay};
use replica::{GroupView, MomentView, ReplicaError, ReplicaOptions, WantedGroup};
use source::{SourceError, StateDir};

use crate::Failure;
use crate::args;
use crate::commands::group_rewind::choose_common;
use crate::commands::rewind::choose;
use crate::output::Output;
use crate::status;
use crate::terms::units;

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

/// The folder and the moment of `DIR@MOMENT`, which `--group` names; `None` for the name of a group.
pub(crate) fn group_parts(group: &str) -> Option<(PathBuf, String)> {
    let (dir, moment) = group.rsplit_once('@')?;
    (!dir.is_empty() && !moment.is_empty()).then(|| (PathBuf::from(dir), moment.to_owned()))
}

/// What clients of a rehearsal may write.
#[derive(Clone, Copy)]
pub(crate) enum Writes<'a> {
    Refused,
    /// To a scratch file in this folder, or else in that of the replica's state.
    Scratch(Option<&'a Path>),
}

impl args::Serve {
    pub(crate) fn writes(&self) -> Writes<'_> {
        if self.writable { Writes::Scratch(self.overlay.as_deref()) } else { Writes::Refused }
    }
}

/// Replicas that are shown, each with its path or argument.
type Shown = Vec<(PathBuf, Rehearsal)>;

/// Opens the replicas of a group at one moment, with the paths that they have in their folder. Says which had no part in that.
pub(crate) fn open_group(
    dir: &Path,
    moment: &str,
    writes: Writes<'_>,
    state: &StateDir,
    output: &Output,
) -> Result<Shown> {
    let options = opening(writes, state);
    let (dir, name) = replica::find_group(dir)?;
    let moment = match moment {
        NOW => None,
        // Also of the present moment: another may be committed meanwhile.
        other => {
            let history = replica::group_history(&dir, &name, &options)?;
            Some(choose_common(&history, other)?.unwrap_or(history.present))
        }
    };
    let wanted = WantedGroup { dir: &dir, name: &name, moment: moment.as_ref(), only: None };
    let (shown, without) = rehearsed(wanted, writes, &options)?;
    for path in without {
        output.say(&format!(
            "{} is left out: it had no part in that moment of the group {name}, or is gone",
            path.display()
        ));
    }
    Ok(shown)
}

/// How replicas are opened that are shown. What a reader needs goes to the folder of the scratch file where nothing can be written beside a
/// replica.
fn opening(writes: Writes<'_>, state: &StateDir) -> ReplicaOptions {
    let scratch = match writes {
        Writes::Scratch(Some(folder)) => folder,
        _ => state.path(),
    };
    ReplicaOptions { scratch: Some(scratch.to_path_buf()), ..sync::open_options(None, state) }
}

fn rehearsed(
    wanted: WantedGroup<'_>,
    writes: Writes<'_>,
    options: &ReplicaOptions,
) -> Result<(Shown, Vec<PathBuf>)> {
    let GroupView { views, without } = replica::view_together(wanted, options)?;
    let shown = views.into_iter().map(|(path, view)| Ok((path, Rehearsal::of(view, writes)?)));
    Ok((shown.collect::<Result<_>>()?, without))
}

/// Opens those of several replicas that are of one group, and are asked for at the present moment: all at one. Each with its name among
/// the arguments.
pub(crate) fn open_together(args: &args::Serve, state: &StateDir) -> Result<Shown> {
    let options = opening(args.writes(), state);
    let mut groups: BTreeMap<PathBuf, (String, Vec<(PathBuf, PathBuf)>)> = BTreeMap::new();
    for image in &args.images {
        let Some((path, _)) = parts(image).filter(|(_, moment)| moment == NOW) else { continue };
        // What cannot be looked at is reported when it is opened.
        let Some(lineage) = replica::inspect(&path, &options).unwrap_or(None) else { continue };
        let (Some(group), Ok(at)) = (lineage.group, std::fs::canonicalize(&path)) else { continue };
        let of_group = groups.entry(group.folder_for(&at)).or_default();
        of_group.0 = group.name;
        of_group.1.push((at, image.clone()));
    }
    let mut all = Vec::new();
    for (folder, (name, members)) in groups.iter().filter(|(_, (_, members))| members.len() > 1) {
        let only: Vec<PathBuf> = members.iter().map(|(at, _)| at.clone()).collect();
        let dir = folder.parent().unwrap_or(Path::new("/"));
        let wanted = WantedGroup { dir, name, moment: None, only: Some(&only) };
        for (path, rehearsal) in rehearsed(wanted, args.writes(), &options)?.0 {
            let at = std::fs::canonicalize(&path).unwrap_or(path);
            let image = members.iter().find(|(member, _)| *member == at).map(|(_, image)| image.clone());
            all.extend(image.map(|image| (image, rehearsal)));
        }
    }
    Ok(all)
}

/// A replica at a moment.
#[derive(Clone)]
pub(crate) struct Rehearsal {
    view: Arc<MomentView>,
    /// Where clients write to.
    overlay: Option<Arc<Overlay>>,
    /// What was last said of the bytes that this takes.
    told: Arc<AtomicU64>,
}

impl Rehearsal {
    /// Opens a moment of the replica at a path.
    pub(crate) fn open(path: &Path, moment: &str, args: &args::Serve, state: &StateDir) -> Result<Rehearsal> {
        let path = device::absolute(path)?;
        let mut options = opening(args.writes(), state);
        if replica::inspect(&path, &options)?.is_none() {
            options.folder = sync::known_replicas(state).folder_of(&path).unwrap_or_default();
            if options.folder.is_none() {
                return Err(no_replica(&path, state)?);
            }
        }
        let view = (|| {
            let to = match moment {
                NOW => None,
                // Also of the present state: another may be committed meanwhile.
                moment => {
                    let history = replica::history_at_work(&path, &options)?;
                    Some(choose(&path, &history, moment)?.map_or(history.state, |moment| moment.state))
                }
            };
            Ok(MomentView::open(&path, &options, to)?)
        })();
        Rehearsal::of(view.map_err(|error| of_a_source(error, &path))?, args.writes())
    }

    /// A rehearsal over a replica that was opened at a moment.
    fn of(view: MomentView, writes: Writes<'_>) -> Result<Rehearsal> {
        let view = Arc::new(view);
        let overlay = match writes {
            Writes::Refused => None,
            Writes::Scratch(folder) => Some(Arc::new(overlay(&view, folder)?)),
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
        let doubted = if view.is_doubted() { ", from before a repair," } else { "" };
        format!("{after} {}{of}{fuzzy}{doubted} of {}", view.epoch().number, view.path().display())
    }

    /// What is said when it is served.
    pub(crate) fn about(&self) -> String {
        let writes = match self.is_writable() {
            true => "writable: what is written is thrown away at the end",
            false => "read-only",
        };
        format!("{}, {}, {writes}", units::size(self.view.len()), self.moment())
    }

    /// When the replica came to this, in seconds since 1970.
    pub(crate) fn at(&self) -> Option<u64> {
        self.view.at()
    }

    /// Bytes that the scratch file takes.
    pub(crate) fn taken(&self) -> u64 {
        self.overlay.as_ref().and_then(|overlay| overlay.taken().ok()).unwrap_or(0)
    }

    /// Says what it takes, for "dsync status".
    fn tell(&self) {
        let taken = self.taken();
        if self.told.swap(taken, SeqCst) != taken {
            self.view.tell(taken);
        }
    }

    /// Why it can be read no more. All that it takes is then given back.
    fn lost(&self) -> Option<String> {
        let why = self.view.lost()?;
        self.overlay.iter().for_each(|overlay| drop(overlay.give_up()));
        self.view.let_go();
        Some(format!(
            "{} can no longer be served: {why}. Its clients get I/O errors; the replica itself is not affected",
            self.moment()
        ))
    }
}

/// An error of a view, where a disk that was promoted is asked for in it.
fn of_a_source(error: anyhow::Error, path: &Path) -> anyhow::Error {
    match error.downcast_ref() {
        Some(ReplicaError::Promoted { .. }) => Failure::refused(is_a_source(path)).into(),
        _ => error,
    }
}

fn is_a_source(path: &Path) -> String {
    let path = path.display();
    format!(
        "{path} is a source, and no replica: a rehearsal is of a replica. \"dsync status {path}\" lists those that it has"
    )
}

/// What a path is where no replica is.
fn no_replica(path: &Path, state: &StateDir) -> Result<anyhow::Error> {
    if !device::is_there(path) {
        let missing = status::no_replica(path, state)?;
        return Ok(
            SourceError::Unknown(format!("{missing} (\"dsync status\" lists sources and replicas)")).into()
        );
    }
    let shown = path.display();
    let identity = device::identity(path)?.path;
    let what = match state.source(&identity.to_string_lossy())? {
        Some(_) => is_a_source(path),
        None => format!(
            "{shown} is not a replica that dsync knows: \"dsync status\" lists those of this host; an image is served by its path alone"
        ),
    };
    Ok(Failure::refused(what).into())
}

fn overlay(view: &Arc<MomentView>, folder: Option<&Path>) -> Result<Overlay> {
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
