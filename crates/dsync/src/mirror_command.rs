//! `dsync mirror`.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use source::{Handle, StateDir};
use sync::{Batching, Mirror, MirrorEvent, MirrorOptions, MirrorSummary, SyncError, SyncOptions, Turns, Way};

use crate::args::{self, LiveArgs};
use crate::effect;
use crate::failure::{self, Failure};
use crate::location::Ends;
use crate::output::Output;
use crate::service::Manager;
use crate::steering::Steering;
use crate::{metrics, sync_command, units, wait};

/// How often -v prints the state.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// How often --json prints the state, without -v.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// Signals within this time count as one: a supervisor may signal a process and its group.
const ONE_WORD: Duration = Duration::from_millis(500);

/// The first signal requests an orderly end, the second ends at once. Before there is anything to end, the first
/// one does.
pub(crate) fn on_signals(
    stop: Arc<AtomicBool>,
    mirroring: Arc<AtomicBool>,
    manager: Arc<Manager>,
    output: Output,
) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        let mut first: Option<Instant> = None;
        for _ in signals.forever() {
            let begun = mirroring.load(SeqCst);
            if begun && first.get_or_insert_with(Instant::now).elapsed() < ONE_WORD {
                stop.store(true, SeqCst);
                manager.stopping();
            } else {
                eprintln!();
                let replica =
                    if begun { "the replica is at its last batch" } else { "data copied so far is kept" };
                output.error(
                    &format!("interrupted: {replica}, and the same command resumes from there"),
                    failure::INTERRUPTED,
                );
                std::process::exit(failure::INTERRUPTED.into());
            }
        }
    })?;
    Ok(())
}

/// Options from the arguments; `is_far`: the replica is on another host.
pub(crate) fn options(args: &args::Mirror, steering: &Steering, is_far: bool) -> Result<MirrorOptions> {
    Ok(MirrorOptions {
        sync: SyncOptions {
            adopt: args.begin.adopt,
            create: args.begin.create,
            compress: args.compress.level,
            bwlimit: steering.pace.clone(),
            journal_dir: args.far.journal_dir.clone(),
            keep: args.begin.past.keep()?,
            way: Way::to(is_far),
            live: LiveArgs::default().options(),
            ..SyncOptions::default()
        },
        batching: Batching {
            alpha: args.batches.alpha.unwrap_or(0.5),
            beta: args.batches.beta.unwrap_or(0.5),
            first: args.batches.interval.unwrap_or(Duration::from_millis(30)),
            least: args.batches.min_interval.unwrap_or(Duration::from_millis(10)),
            rpo: args.rpo,
            rate: args.rate,
            adaptive: !args.fixed_interval,
        },
        here: args.stages.into(),
        there: args.stages.into(),
        epoch_every: args.epoch.unwrap_or(Duration::from_secs(60)),
        busy_for: args.run.wait.wait.unwrap_or_default(),
    })
}

/// Runs the command until a signal ends it.
pub(crate) fn run(args: &args::Mirror, state: &StateDir, output: &Output) -> Result<()> {
    let named = args.destination.as_deref().unwrap_or_default();
    let ends = Ends::parse(&args.source, named)?;
    if let Some(host) = &ends.source.host {
        return Err(Failure::usage(format!(
            "a mirror runs on the host of its source: run \"dsync mirror\" on {host}, or repeat \"dsync sync {} {}\" here with a timer",
            args.source, named
        ))
        .into());
    }
    let destination = &ends.destination;
    units::check_rates(&[("--rate", args.rate)])?;
    let steering = Steering::begin(args.far.bwlimit.as_ref(), true, output)?;
    // A mirror runs in the background all the time: give priority to the disk's writers.
    let _ = rustix::process::nice(10);
    effect::on_way(&ends, &args.far, output);
    let options = options(args, &steering, destination.host.is_some())?;
    let _metrics = metrics::serve(args.metrics.metrics.as_ref(), state, output)?;
    let (stop, mirroring) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let manager = Arc::new(Manager::find(output));
    on_signals(stop.clone(), mirroring.clone(), manager.clone(), output.alike())?;
    let (path, name) = destination.place()?;
    let teller = Teller {
        output,
        ends: &ends,
        name: &name,
        mirroring: &mirroring,
        manager: &manager,
        last: Mutex::new(None),
    };
    let progress = |done, total| {
        output.progress(done, total);
        teller.progress(done, total);
    };
    let turns = Turns::default();
    // A replica on this host is released by its own thread.
    let mut receiving: Option<std::thread::JoinHandle<()>> = None;
    let mut attached = false;
    let mirror = Mirror {
        attach: &mut || {
            let handle = Handle::attach_followed(state, &args.source)?;
            if !std::mem::replace(&mut attached, true) {
                effect::on_mirror(&handle, args, output);
            }
            Ok(handle)
        },
        connect: &mut || {
            if let Some(before) = receiving.take() {
                let _ = before.join();
            }
            let (link, next) = destination.connect(&args.far, state).map_err(|error| {
                match error.downcast::<link::Error>() {
                    Ok(error) => error.into(),
                    Err(other) => SyncError::Refused(failure::text(&other)),
                }
            })?;
            receiving = next;
            Ok(link)
        },
        destination: &path,
        name: &name,
        options: &options,
        stop: &stop,
        pause: &steering.pause,
        tell: &|event| teller.tell(event),
        progress: &progress,
        turns: &turns,
    };
    let summary = manager.watched(|| turns.is_awake(), || mirror.run())?;
    // A refused command leaves nothing behind, if it may finish.
    if let Some(last) = receiving.take() {
        let _ = last.join();
    }
    output.finish();
    let summary = summary.map_err(|error| ends.named(error))?;
    say(&summary, &name, output);
    output.summary(&summary);
    Ok(())
}

fn say(summary: &MirrorSummary, name: &str, output: &Output) {
    let epoch = summary.epoch.map_or_else(String::new, |epoch| format!(" at epoch {epoch}"));
    output.say(&format!(
        "{name} is{epoch}: {} batches with {} of changes, sent {}, in {}",
        units::count(summary.batches),
        units::size(summary.bytes_changed),
        units::size(summary.bytes_sent),
        units::seconds(summary.seconds.round())
    ));
}

/// Reports events as text or JSON.
struct Teller<'a> {
    output: &'a Output,
    ends: &'a Ends,
    name: &'a str,
    mirroring: &'a AtomicBool,
    manager: &'a Manager,
    last: Mutex<Option<Instant>>,
}

impl Teller<'_> {
    /// True if the last report was that long ago.
    fn is_due(&self, every: Duration) -> bool {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() >= every);
        if due {
            *last = Some(Instant::now());
        }
        due
    }

    /// An error, with the other host's name if it is from there.
    fn text(&self, error: &SyncError) -> String {
        match error {
            SyncError::Far { message, .. } => self.ends.told(message),
            own => own.to_string(),
        }
    }

    /// Tells the service manager how far a sync is: nothing is refused any more.
    fn progress(&self, done: u64, total: u64) {
        if self.manager.is_due(STATUS_EVERY) {
            let percent = done.saturating_mul(100) / total.max(1);
            let (name, total) = (self.name, units::size(total));
            self.manager.ready(&format!("bringing {name} up to date: {percent} % of {total}"));
        }
    }

    /// Tells the service manager what happened.
    fn report(&self, event: &MirrorEvent<'_>) {
        let (manager, name) = (self.manager, self.name);
        match event {
            MirrorEvent::Synced(_) => manager.ready(&format!("{name} was brought up to date")),
            MirrorEvent::Mirroring => manager.ready(&format!("mirroring to {name}")),
            MirrorEvent::Batch(batch) if manager.is_due(TOLD_EVERY) => {
                manager.status(&format!("mirroring to {name}, {} behind", units::seconds(batch.lag)));
            }
            MirrorEvent::Paused => manager.ready(&format!("not mirroring to {name}: paused by --bwlimit")),
            MirrorEvent::Batch(_) | MirrorEvent::Warned(_) => {}
            MirrorEvent::Waiting(error, _) => manager.status(&format!("waiting: {error}")),
            MirrorEvent::Broken(error, _) => manager.status(&format!("not mirroring to {name}: {error}")),
        }
    }

    fn tell(&self, event: MirrorEvent<'_>) {
        let output = self.output;
        self.report(&event);
        match event {
            MirrorEvent::Synced(summary) => {
                output.finish();
                summary.recovered.iter().chain(&summary.warnings).for_each(|warning| output.warn(warning));
                if self.mirroring.swap(true, SeqCst) && summary.freeze_ms.is_some() {
                    // Batches of a live disk: a line per second would be too many.
                    if !output.is_verbose() && !self.is_due(TOLD_EVERY) {
                        return;
                    }
                }
                sync_command::say(summary, output);
                output.status(summary);
            }
            // What changes the limit says so.
            MirrorEvent::Paused => {}
            MirrorEvent::Mirroring => output.ready(&format!("mirroring to {}", self.name)),
            MirrorEvent::Batch(batch) => {
                if output.is_json() && (output.is_verbose() || self.is_due(STATUS_EVERY)) {
                    output.status(batch);
                } else if !output.is_json() && output.is_verbose() && self.is_due(TOLD_EVERY) {
                    output.more(&format!(
                        "{} batches, the last of {} in {} blocks; interval {}, {} behind, sent {}",
                        units::count(batch.batch),
                        units::size(batch.bytes),
                        units::count(batch.blocks),
                        units::seconds(batch.interval),
                        units::seconds(batch.lag),
                        units::size(batch.sent)
                    ));
                }
            }
            MirrorEvent::Warned(warning) => output.warn(warning),
            MirrorEvent::Waiting(error, left) => output.note(&wait::waiting(&self.text(error), left)),
            MirrorEvent::Broken(error, wait) => {
                let (text, wait) = (self.text(error), units::seconds(wait.as_secs_f64()));
                output.warn(&format!("{text}; retrying in {wait}"))
            }
        }
    }
}
