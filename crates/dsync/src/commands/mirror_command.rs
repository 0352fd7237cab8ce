//! `dsync mirror`.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use source::StateDir;
use sync::{
    Batching, CutHook, Mirror, MirrorEvent, MirrorOptions, MirrorSummary, SyncError, SyncOptions, Turns, Way,
};

use crate::args::{self, LiveArgs};
use crate::commands::mirroring::{Mirroring, Receiving};
use crate::commands::sync_command;
use crate::failure::Failure;
use crate::jobs::hook::Hook;
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::reach::effect;
use crate::reach::location::Ends;
use crate::terms::{machine_name, units};

/// How often -v prints the state.
const TOLD_EVERY: Duration = Duration::from_secs(10);
/// How often --json prints the state, without -v.
pub(crate) const STATUS_EVERY: Duration = Duration::from_secs(1);

/// Options from the arguments; `is_far`: the replica is on another host.
pub(crate) fn options(args: &args::MirrorArgs, steering: &Steering, is_far: bool) -> Result<MirrorOptions> {
    Ok(MirrorOptions {
        sync: SyncOptions {
            adopt: args.begin.adopts(),
            overwrite: args.begin.overwrites(),
            accept_source: args.begin.accept_source,
            create: args.begin.create,
            format: args.begin.format.map(Into::into),
            compress: args.compress.level,
            bwlimit: steering.pace.clone(),
            polite: args.far.polite,
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
            adaptive: !args.batches.fixed_interval,
        },
        here: args.stages.into(),
        there: args.stages.into(),
        epoch_every: args.epoch.unwrap_or(Duration::from_secs(60)),
        busy_for: args.run.wait.wait.unwrap_or_default(),
    })
}

/// The options with a hook that is held around cuts.
pub(crate) fn held(options: MirrorOptions, hook: Option<Arc<Hook>>) -> MirrorOptions {
    let hook = hook.map(|hook| hook as Arc<dyn CutHook>);
    MirrorOptions { sync: SyncOptions { hook, ..options.sync }, ..options }
}

/// Runs the command until a signal ends it.
pub(crate) fn run(args: &args::MirrorArgs, state: &StateDir, output: &Output) -> Result<()> {
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
    machine_name::refuse_options(args.machine.any())?;
    let mirroring = Mirroring::begin(args, state, output, || ())?;
    effect::on_way(&ends, &args.far, output);
    let options = options(args, &mirroring.steering, destination.host.is_some())?;
    let (path, name) = destination.place()?;
    let hook = sync_command::hook(&args.hook, &args.source, named);
    let options = held(options, hook.clone());
    let (last, tell) = (Mutex::new(None), hook.as_ref());
    let teller = Teller { output, hook: tell, ends: &ends, name: &name, mirroring: &mirroring, last };
    let progress = |done, total| {
        output.progress(done, total);
        teller.progress(done, total);
    };
    let turns = Turns::default();
    let mut receiving = Receiving::default();
    let mut attached = false;
    let mirror = Mirror {
        attach: &mut || {
            let handle = sync::follow(state, &args.source)?;
            effect::on_size(&(&handle).into(), output);
            if !std::mem::replace(&mut attached, true) {
                effect::on_mirror(&handle, args, output);
            }
            Ok(handle)
        },
        connect: &mut || receiving.connect(destination, &args.far, state),
        destination: &path,
        name: &name,
        options: &options,
        stop: &mirroring.stop,
        pause: &mirroring.steering.pause,
        tell: &|event| teller.tell(event),
        progress: &progress,
        turns: &turns,
    };
    let summary = mirroring.manager.watched(|| turns.is_awake(), || mirror.run())?;
    // A refused command leaves nothing behind, if it may finish.
    receiving.end();
    output.finish();
    hook.inspect(|hook| hook.end(summary.is_ok(), output));
    let summary = summary.map_err(|error| ends.named(error))?;
    say(&summary, &name, output);
    output.summary(&summary);
    Ok(())
}

fn batches(number: u64) -> String {
    format!("{} {}", units::count(number), if number == 1 { "batch" } else { "batches" })
}

fn say(summary: &MirrorSummary, name: &str, output: &Output) {
    let epoch = summary.epoch.map_or_else(String::new, |epoch| format!(" at epoch {epoch}"));
    output.say(&format!(
        "{name} is{epoch}: {} with {} of changes, sent {}, in {}",
        batches(summary.batches),
        units::size(summary.bytes_changed),
        units::size(summary.bytes_sent),
        units::seconds(summary.seconds.round())
    ));
}

/// Reports events as text or JSON.
struct Teller<'a> {
    output: &'a Output,
    /// What is told of cuts.
    hook: Option<&'a Arc<Hook>>,
    ends: &'a Ends,
    name: &'a str,
    mirroring: &'a Mirroring,
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
        let manager = &self.mirroring.manager;
        if manager.is_due(STATUS_EVERY) {
            let percent = done.saturating_mul(100) / total.max(1);
            let (name, total) = (self.name, units::size(total));
            manager.ready(&format!("bringing {name} up to date: {percent} % of {total}"));
        }
    }

    /// Tells the service manager what happened.
    fn report(&self, event: &MirrorEvent<'_>) {
        let (manager, name) = (&self.mirroring.manager, self.name);
        match event {
            MirrorEvent::Synced(_) => manager.ready(&format!("{name} was brought up to date")),
            MirrorEvent::Mirroring => manager.ready(&format!("mirroring to {name}")),
            MirrorEvent::Batch(batch) if manager.is_due(TOLD_EVERY) => {
                manager.status(&format!("mirroring to {name}, {} behind", units::seconds(batch.lag)));
            }
            MirrorEvent::Paused => manager.ready(&format!("not mirroring to {name}: paused by --bwlimit")),
            MirrorEvent::Batch(_) | MirrorEvent::Epoch(_) | MirrorEvent::Warned(_) => {}
            // Said together with what people are told.
            MirrorEvent::Waiting(..) | MirrorEvent::Broken(..) => {}
        }
    }

    fn tell(&self, event: MirrorEvent<'_>) {
        let output = self.output;
        self.report(&event);
        let end = |done| self.hook.iter().for_each(|hook| hook.end_later(done, output));
        match event {
            MirrorEvent::Epoch(_) => end(true),
            MirrorEvent::Synced(summary) => {
                end(true);
                output.finish();
                sync_command::warn(summary, output);
                if self.mirroring.begun.swap(true, SeqCst) && summary.freeze_ms.is_some() {
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
                        "{}, the last of {} in {}; interval {}, {} behind, sent {}",
                        batches(batch.batch),
                        units::size(batch.bytes),
                        units::many(batch.blocks, "block"),
                        units::seconds(batch.interval),
                        units::seconds(batch.lag),
                        units::size(batch.sent)
                    ));
                }
            }
            MirrorEvent::Warned(warning) => output.warn(&format!("{}: {warning}", self.name)),
            MirrorEvent::Waiting(error, left) => self.mirroring.waiting(&self.text(error), left, output),
            MirrorEvent::Broken(error, pause) => {
                end(false);
                self.mirroring.broken(self.name, &self.text(error), pause, output);
            }
        }
    }
}
