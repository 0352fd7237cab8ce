//! `dsync serve REPLICA@MOMENT`: a replica at one moment, for NBD clients, while syncs and mirrors go on beneath.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use device::{Disk, Overlay};
use replica::{Options, View, Wanted};
use source::StateDir;

use crate::group_rewind::choose_common;
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

/// The folder and the moment of `DIR@MOMENT`, which `--group` names; `None` for the name of a group.
pub(crate) fn group_parts(group: &str) -> Option<(PathBuf, String)> {
    let (dir, moment) = group.rsplit_once('@')?;
    (!dir.is_empty() && !moment.is_empty()).then(|| (PathBuf::from(dir), moment.to_owned()))
}

/// Opens the replicas of a group at one moment, with the paths that they have in their folder.
pub(crate) fn open_group(
    dir: &Path,
    moment: &str,
    args: &args::Serve,
    state: &StateDir,
) -> Result<Vec<(PathBuf, Rehearsal)>> {
    let options = Options { devices: state.replicas_folder(), ..Options::default() };
    let (dir, name) = replica::find_group(dir)?;
    let moment = match moment {
        NOW => None,
        other => choose_common(&replica::group_history(&dir, &name, &options)?, other)?,
    };
    let wanted = Wanted { dir: &dir, name: &name, moment: moment.as_ref(), only: None };
    rehearsed(wanted, args, &options)
}

fn rehearsed(wanted: Wanted<'_>, args: &args::Serve, options: &Options) -> Result<Vec<(PathBuf, Rehearsal)>> {
    let views = replica::view_together(wanted, options)?;
    views.into_iter().map(|(path, view)| Ok((path, Rehearsal::of(view, args)?))).collect()
}

/// Opens those of several replicas that are of one group, and are asked for at the present moment: all at one. Each with its name among
/// the arguments.
pub(crate) fn open_together(args: &args::Serve, state: &StateDir) -> Result<Vec<(PathBuf, Rehearsal)>> {
    let options = Options { devices: state.replicas_folder(), ..Options::default() };
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
        let wanted = Wanted { dir, name, moment: None, only: Some(&only) };
        for (path, rehearsal) in rehearsed(wanted, args, &options)? {
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
    view: Arc<View>,
    /// Where clients write to.
    overlay: Option<Arc<Overlay>>,
    /// Where that is saved at the end.
    save: Option<PathBuf>,
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
            moment => choose(&path, &replica::history(&path, &options)?, moment)?.map(|moment| moment.state),
        };
        Rehearsal::of(View::open(&path, &options, to)?, args)
    }

    /// Of a replica that was opened at a moment.
    fn of(view: View, args: &args::Serve) -> Result<Rehearsal> {
        let view = Arc::new(view);
        let overlay = match (args.writable, &args.overlay) {
            (false, _) => None,
            (true, folder) => Some(Arc::new(overlay(&view, folder.as_deref())?)),
        };
        args.save.as_deref().map(begin_saving).transpose()?;
        Ok(Rehearsal { view, overlay, save: args.save.clone(), told: Arc::default() })
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
        let writes = match (&self.overlay, &self.save) {
            (Some(_), Some(file)) => {
                format!("writable: what is written is saved in {} at the end", file.display())
            }
            (Some(_), None) => "writable: what is written is thrown away at the end".into(),
            (None, _) => "read-only".into(),
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

impl Rehearsal {
    /// Saves what clients have written, if that is wanted: none of them writes any more.
    pub(crate) fn save(&self, output: &Output) -> Result<()> {
        let (Some(overlay), Some(file)) = (&self.overlay, &self.save) else { return Ok(()) };
        let partial = partial(file);
        let saved = (|| {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial)?);
            let bytes = self.view.save(overlay.clone(), &overlay.changed(), &mut out)?;
            out.flush()?;
            out.get_ref().sync_all()?;
            std::fs::rename(&partial, file)?;
            let folder = std::path::absolute(file)?;
            File::open(folder.parent().unwrap_or(Path::new("/")))?.sync_all()?;
            std::io::Result::Ok(bytes)
        })();
        let (name, path) = (file.display(), self.view.path().display());
        let bytes = saved.map_err(|error| {
            let _ = std::fs::remove_file(&partial);
            anyhow::Error::from(error).context(format!("cannot save what was written to {path} in {name}"))
        })?;
        output.note(&format!(
            "what was written to {path} is saved in {name} ({}): \"dsync promote {path} --with {name}\" makes it real; delete the \
             file to throw it away",
            units::size(bytes)
        ));
        Ok(())
    }
}

/// The name of a file that is being saved.
fn partial(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

/// Makes sure that a file can be made, before anything is written that is to be saved there.
fn begin_saving(file: &Path) -> Result<()> {
    if file.symlink_metadata().is_ok() {
        return Err(Failure::refused(format!(
            "{} exists: give --save the name of a new file",
            file.display()
        ))
        .into());
    }
    File::create(partial(file)).with_context(|| format!("cannot create {}", partial(file).display()))?;
    Ok(())
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
