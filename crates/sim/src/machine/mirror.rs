//! A mirror for a while, between two simulated processes.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use link::Link;
use source::Handle;
use sync::{
    Batching, Mirror, MirrorEvent, MirrorOptions, MirrorSummary, Stages, SyncError, SyncOptions, Turns,
};

use crate::machine::host::Process;

/// The two ends of a mirror.
pub(crate) struct Ends<'a> {
    pub near: &'a Process,
    pub far: &'a Process,
    /// Makes a line between them.
    pub line: &'a mut dyn FnMut() -> (Link, Link),
    /// Reaches the source.
    pub attach: &'a mut dyn FnMut() -> Result<Handle, SyncError>,
    /// Serves the replica's end of a line.
    pub receive: &'a (dyn Fn(Link) -> Result<(), SyncError> + Sync),
    /// The replica, as its side names it, and as the user does.
    pub destination: &'a Path,
    pub name: &'a str,
}

/// Options for small batches in quick succession.
pub(crate) fn options(sync: SyncOptions, epoch_every: Duration) -> MirrorOptions {
    MirrorOptions {
        sync,
        batching: Batching {
            alpha: 0.5,
            beta: 1.0,
            first: Duration::from_micros(200),
            least: Duration::from_micros(100),
            rpo: Duration::from_millis(1),
            rate: None,
            adaptive: true,
        },
        here: Stages::SERIAL,
        there: Stages::SERIAL,
        epoch_every,
        busy_for: Duration::ZERO,
    }
}

/// A mirror, while `write` writes to its source. Ends when that has returned, or at the first trouble.
pub(crate) fn run(
    ends: Ends<'_>,
    options: &MirrorOptions,
    write: impl FnOnce(&dyn Fn() -> bool) + Send,
) -> Result<MirrorSummary, SyncError> {
    let Ends { near, far, line, attach, receive, destination, name } = ends;
    let (stop, working) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (stop, working) = (&stop, &working);
        scope.spawn(move || {
            // Batches begin after the first sync.
            let patience = Instant::now() + Duration::from_secs(5);
            while !working.load(SeqCst) && !stop.load(SeqCst) && Instant::now() < patience {
                std::thread::sleep(Duration::from_micros(100));
            }
            write(&|| stop.load(SeqCst));
            stop.store(true, SeqCst);
        });
        let tell = |event: MirrorEvent<'_>| match event {
            MirrorEvent::Mirroring => working.store(true, SeqCst),
            MirrorEvent::Broken(..) => stop.store(true, SeqCst),
            _ => {}
        };
        let mut connect = || {
            if !far.is_alive() || !near.is_alive() {
                stop.store(true, SeqCst);
                return Err(SyncError::Stopped);
            }
            let (here, there) = line();
            scope.spawn(move || receive(there));
            Ok(here)
        };
        let mirror = Mirror {
            attach: &mut *attach,
            connect: &mut connect,
            destination,
            name,
            options,
            stop,
            pause: &AtomicBool::new(false),
            tell: &tell,
            progress: &|_, _| {},
            turns: &Turns::default(),
        };
        let result = mirror.run();
        stop.store(true, SeqCst);
        result
    })
}
