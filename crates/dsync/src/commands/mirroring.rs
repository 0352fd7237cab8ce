//! What the mirror of a disk and that of a group run with: the signals that end it, the service manager, the way to the replica's side.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use link::Link;
use source::StateDir;
use sync::SyncError;

use crate::args;
use crate::failure;
use crate::jobs::attempt;
use crate::jobs::service::{self, Manager};
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::reach::location::Location;
use crate::status::metrics;
use crate::terms::units;
use crate::wait;

/// Signals within this time count as one: a supervisor may signal a process and its group.
const ONE_WORD: Duration = Duration::from_millis(500);

/// A mirror as its surroundings see it.
pub(crate) struct Mirroring {
    pub steering: Steering,
    /// It is to bring the replica up to date, and end.
    pub stop: Arc<AtomicBool>,
    /// It has come so far that there is something to end.
    pub begun: Arc<AtomicBool>,
    pub manager: Arc<Manager>,
    _metrics: Option<metrics::Serving>,
}

impl Mirroring {
    /// Follows what steers a mirror from outside, from now on.
    /// `tidy` is called before a signal ends the program at once.
    pub(crate) fn begin(
        args: &args::MirrorArgs,
        state: &StateDir,
        output: &Output,
        tidy: fn(),
    ) -> Result<Mirroring> {
        let steering = Steering::begin(args.far.bwlimit.as_ref(), true, output)?;
        // A mirror runs in the background all the time: give priority to the disk's writers.
        let _ = rustix::process::nice(10);
        if !std::io::stdin().is_terminal() {
            service::outlive_terminal()?;
        }
        let metrics = metrics::serve(args.metrics.metrics.as_ref(), state, output)?;
        let mirroring = Mirroring {
            steering,
            stop: Arc::default(),
            begun: Arc::default(),
            manager: Arc::new(Manager::find(output)),
            _metrics: metrics,
        };
        mirroring.on_signals(output.alike(), tidy)?;
        Ok(mirroring)
    }

    /// The first signal requests an orderly end, the second ends at once. Before there is anything to end, the first
    /// one does.
    fn on_signals(&self, output: Output, tidy: fn()) -> Result<()> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        let (stop, begun, manager) = (self.stop.clone(), self.begun.clone(), self.manager.clone());
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            let mut first: Option<Instant> = None;
            for _ in signals.forever() {
                let begun = begun.load(SeqCst);
                if begun && first.get_or_insert_with(Instant::now).elapsed() < ONE_WORD {
                    stop.store(true, SeqCst);
                    manager.stopping();
                } else {
                    attempt::end(failure::INTERRUPTED, "interrupted");
                    eprintln!();
                    let replica =
                        if begun { "the replica is at its last batch" } else { "data copied so far is kept" };
                    output.error(
                        &format!("interrupted: {replica}, and the same command resumes from there"),
                        failure::INTERRUPTED,
                    );
                    tidy();
                    std::process::exit(failure::INTERRUPTED.into());
                }
            }
        })?;
        Ok(())
    }

    /// Says that something is in use, and for how long it is waited for.
    pub(crate) fn waiting(&self, text: &str, left: Duration, output: &Output) {
        self.manager.status(&format!("waiting: {text}"));
        output.note(&wait::waiting(text, left));
    }

    /// Says that an attempt failed, and when the next follows. `name` is the destination.
    pub(crate) fn broken(&self, name: &str, text: &str, pause: Duration, output: &Output) {
        self.manager.status(&format!("not mirroring to {name}: {text}"));
        output.warn(&format!("{text}; retrying in {}", units::seconds(pause.as_secs_f64())));
    }
}

/// The replica's side, which is reached again and again. One on this host is released by its own thread.
#[derive(Default)]
pub(crate) struct Receiving(Option<JoinHandle<()>>);

impl Receiving {
    /// Reaches it, once it has released what it had in the conversation before.
    pub(crate) fn connect(
        &mut self,
        destination: &Location,
        far: &args::FarArgs,
        state: &StateDir,
    ) -> Result<Link, SyncError> {
        self.end();
        let reached = destination.connect(far, state);
        let (link, next) = reached.map_err(|error| match error.downcast::<link::Error>() {
            Ok(error) => error.into(),
            Err(other) => SyncError::Refused(failure::text(&other)),
        })?;
        self.0 = next;
        Ok(link)
    }

    /// Waits until it has released all.
    pub(crate) fn end(&mut self) {
        if let Some(before) = self.0.take() {
            let _ = before.join();
        }
    }
}
