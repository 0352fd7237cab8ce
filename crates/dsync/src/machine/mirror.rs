//! `dsync mirror vm:NAME`: one sync of the machine after the other. Each asks libvirt anew what the machine is: it may be started, stopped, moved, or get
//! another disk in between.
//!
//! A pass begins half of `--rpo` after the one before, and when at least as long as that took has gone by since its end: so the replicas stay within it
//! as long as a pass takes a quarter of it. Of a machine that is off the disks are read once, and not before it was off for a minute: as long as they
//! are read, it does not start.

use std::cell::{Cell, RefCell};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser as _;
use source::{SourceError, StateDir};
use sync::{Attempts, Class, GroupMirrorSummary, GroupSummary, Interruption, Summary, SyncError};

use super::domain::Image;
use super::{Machine, Said, end_interrupted, hypervisor, refuse_option};
use crate::args::{self, Cli, Command};
use crate::commands::mirroring::Mirroring;
use crate::commands::{group_command, sync_command};
use crate::failure::{self, Failure};
use crate::output::Output;
use crate::reach::location::Location;
use crate::terms::machine_name::MachineWord;

/// The shortest time from one pass to the next.
const LEAST: Duration = Duration::from_secs(1);
/// How long a machine was off before its disks are locked and read.
const OFF_FOR: Duration = Duration::from_secs(60);

/// Runs the command until a signal ends it.
pub(crate) fn mirror(
    named: MachineWord<'_>,
    args: &args::MirrorArgs,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    check(args)?;
    hypervisor::wait_for(args.far.timeout);
    let folder = Location::folder(args.destination.as_deref().unwrap_or_default())?;
    let shown = folder.place()?.1;
    let mirroring = Mirroring::begin(args, state, output, end_interrupted)?;
    let mirror = Mirror {
        named,
        args,
        pass: RefCell::new(pass_of(args)?),
        state,
        output,
        mirroring: &mirroring,
        shown: &shown,
        said: Said::default(),
        trouble: RefCell::default(),
        off: Cell::new(None),
        rests: RefCell::default(),
    };
    // What may hang has a time limit of its own.
    let summary = mirroring.manager.watched(|| true, || mirror.run())??;
    group_command::say_end(&summary.group, &shown, &summary, output);
    output.summary(&summary);
    Ok(())
}

/// Refuses options that a machine does not take.
fn check(args: &args::MirrorArgs) -> Result<(), Failure> {
    let given = [
        ("--epoch", args.epoch.is_some()),
        ("--rate", args.rate.is_some()),
        ("--format", args.begin.format.is_some()),
        ("--journal-dir", args.far.journal_dir.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(refuse_option(option)),
        None => Ok(()),
    }
}

/// The sync that is each pass.
fn pass_of(args: &args::MirrorArgs) -> Result<args::Sync> {
    let destination = args.destination.as_deref().unwrap_or_default();
    let words = ["dsync", "sync", "--", &args.source, destination];
    let Command::Sync(sync) = Cli::try_parse_from(words)?.command else {
        return Err(Failure::failed("a mirror of a VM is none").into());
    };
    let live = args::LiveArgs { hook: args.hook.clone(), ..sync.live };
    Ok(args::Sync {
        begin: args.begin.clone(),
        far: args.far.clone(),
        compress: args.compress.clone(),
        machine: args.machine.clone(),
        live,
        ..sync
    })
}

/// The times of the images of a machine; `None` if one of them is no file, whose times would tell nothing.
fn times(machine: &Machine<'_>) -> Option<Vec<ImageTimes>> {
    let of = |(_, image): (&str, &Image)| {
        let file = image.path.metadata().ok().filter(Metadata::is_file)?;
        let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        Some((file.len(), nanos(file.mtime(), file.mtime_nsec()), nanos(file.ctime(), file.ctime_nsec())))
    };
    machine.disks().map(of).collect()
}

/// A mirror of a machine.
struct Mirror<'a> {
    named: MachineWord<'a>,
    args: &'a args::MirrorArgs,
    pass: RefCell<args::Sync>,
    state: &'a StateDir,
    output: &'a Output,
    mirroring: &'a Mirroring,
    /// The folder of the replicas.
    shown: &'a str,
    said: Said,
    /// The last trouble that was told, until a pass succeeds.
    trouble: RefCell<String>,
    /// Since when the machine is off.
    off: Cell<Option<Instant>>,
    /// What its images were as it was synced since. `None`: it was not, or that is not known of each.
    rests: RefCell<Option<Vec<ImageTimes>>>,
}

/// Size and times of an image's file, in nanoseconds.
type ImageTimes = (u64, i128, i128);

impl Mirror<'_> {
    fn run(&self) -> Result<GroupMirrorSummary> {
        let (began, mut summary) = (Instant::now(), GroupMirrorSummary::default());
        let busy_for = self.args.run.wait.wait.unwrap_or_default();
        let mut attempts = Attempts::new(&self.mirroring.stop, self.args.rpo, busy_for);
        while let Err(error) = self.passes(&mut attempts, &mut summary) {
            summary.broken += u64::from(attempts.failed(error, &|trouble| self.tell(&trouble))?);
        }
        summary.seconds = began.elapsed().as_secs_f64();
        Ok(summary)
    }

    /// One pass after the other, until stopped or an error.
    fn passes(&self, attempts: &mut Attempts<'_>, summary: &mut GroupMirrorSummary) -> Result<(), SyncError> {
        loop {
            // Asked first: what is written before the stop is in the last pass.
            let stops = self.mirroring.stop.load(SeqCst);
            let began = Instant::now();
            if stops || !self.mirroring.steering.pause.load(SeqCst) {
                if let Some((group, members)) = self.pass(stops).map_err(|error| self.of(error))? {
                    summary.commits += 1;
                    summary.bytes_changed += members.iter().map(|member| member.bytes_changed).sum::<u64>();
                    summary.bytes_sent += group.bytes_sent;
                    summary.epoch = group.epoch;
                    self.committed(&group, &members);
                    summary.group = group.group;
                }
                attempts.succeeded();
            }
            if stops {
                return Ok(());
            }
            attempts.rest_until(began + (self.args.rpo / 2).max(began.elapsed() * 2).max(LEAST));
        }
    }

    /// Syncs, unless the machine is off and nothing is to be done; `last`: there is no other pass.
    fn pass(&self, last: bool) -> Result<Option<(GroupSummary, Vec<Summary>)>> {
        let mut pass = self.pass.borrow_mut();
        let (machine, open) = (&self.args.machine, &pass.open);
        let machine = Machine::find(self.named, (machine, open), self.state, self.output)?;
        let machine = Machine { said: Some(&self.said), ..machine };
        if self.waits(&machine, last) {
            return Ok(None);
        }
        let times = machine.domain.id.is_none().then(|| times(&machine)).flatten();
        if !self.mirroring.begun.load(SeqCst) {
            // A first copy may take days.
            self.mirroring.manager.ready(&format!("bringing {} in {} up to date", self.named, self.shown));
        }
        let pushed = machine.pass(&pass, &self.mirroring.steering)?;
        self.rests.replace(times);
        // What was taken over or created is a replica like any other now.
        (pass.begin.adopt, pass.begin.accept_source, pass.begin.create) = (None, false, false);
        Ok(pushed)
    }

    /// True if the machine is off, and is to be waited for. Says so once.
    fn waits(&self, machine: &Machine<'_>, last: bool) -> bool {
        if machine.domain.id.is_some() {
            self.off.set(None);
            self.rests.replace(None);
            return false;
        }
        let is_seen = self.off.get().is_some();
        let since = self.off.get().unwrap_or_else(Instant::now);
        self.off.set(Some(since));
        let is_begun = self.mirroring.begun.load(SeqCst);
        let has_overlay = machine.disks().any(|(_, image)| !image.beneath.is_empty());
        // It may have run, and stopped again, between two looks.
        let rests = self.rests.borrow().is_some() && *self.rests.borrow() == times(machine);
        let waits = rests || (is_begun && (has_overlay || (!last && since.elapsed() < OFF_FOR)));
        if waits && !is_seen {
            let text = format!("{} is off: waiting until it runs", machine.domain.name);
            self.mirroring.manager.ready(&text);
            self.output.note(&text);
        }
        waits
    }

    /// Why a pass failed. What libvirt or the machine refuses now it may take later, once a pass has succeeded.
    fn of(&self, error: anyhow::Error) -> SyncError {
        let error = match error.downcast::<SyncError>() {
            Ok(error) => return error,
            Err(error) => error,
        };
        let error = match error.downcast::<link::Error>() {
            Ok(error) => return error.into(),
            Err(error) => error,
        };
        let error = match error.downcast::<SourceError>() {
            Ok(error) => return error.into(),
            Err(error) => error,
        };
        let class = match failure::code(&error) {
            failure::BUSY => Class::Busy,
            failure::REFUSED | failure::USAGE if !self.mirroring.begun.load(SeqCst) => Class::Refused,
            _ => Class::Failed,
        };
        SyncError::Far { message: failure::text(&error), class }
    }

    fn tell(&self, trouble: &Interruption<'_>) {
        let (Interruption::Waiting(error, _) | Interruption::Broken(error, _)) = trouble;
        let text = error.to_string();
        if *self.trouble.borrow() == text {
            return;
        }
        match trouble {
            Interruption::Waiting(_, left) => self.mirroring.waiting(&text, *left, self.output),
            Interruption::Broken(_, pause) => self.mirroring.broken(self.shown, &text, *pause, self.output),
        }
        self.trouble.replace(text);
    }

    fn committed(&self, group: &GroupSummary, members: &[Summary]) {
        let Mirror { named, output, mirroring, shown, .. } = *self;
        members.iter().for_each(|member| sync_command::warn(member, output));
        let epoch = group.epoch.unwrap_or_default();
        let was_troubled = !self.trouble.take().is_empty();
        if !mirroring.begun.swap(true, SeqCst) {
            members.iter().for_each(|member| sync_command::say(member, output));
            mirroring.manager.ready(&format!("mirroring {named} to {shown}"));
            output.ready(&format!("mirroring {named} to {shown}, at common epoch {epoch}"));
        } else if was_troubled {
            mirroring.manager.status(&format!("mirroring {named} to {shown}"));
            output.note(&format!("mirroring {named} to {shown} again, at common epoch {epoch}"));
        } else if output.is_verbose() {
            output.more(&format!("{named} is at common epoch {epoch}"));
        }
        output.status(group);
    }
}
