//! The command.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod jobs;
mod machine;
mod output;
mod reach;
mod status;
mod terms;
mod unix_socket;
mod usage;
mod wait;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use clap::Parser;
use source::StateDir;

use args::{Cli, Command};
use commands::group_failover::{demote, promote};
use commands::{
    checkpoint, delta_files, demo, discover, forget, group_command, group_rewind, manual, mirror_command,
    pipes, serve, sync_command, track, verify_command,
};
use failure::Failure;
use jobs::steering::Steering;
use jobs::{attempt, hook, job, named_job};
use machine::rehearse;
use output::Output;
use reach::{far_side, key};
use status::{job_copies, monitor, table, watch};
use terms::machine_name::MachineWord;
use wait::until_free;

/// Memory that is refused is an error that is told.
#[global_allocator]
static MEMORY: extents::Memory = extents::Memory;

fn main() -> ExitCode {
    // A file beyond "ulimit -f" is an error that can be told then, and no sudden death. A handler, because a signal that is
    // ignored stays so for the programs that this one starts.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    failure::on_panic();
    let words = match paper_names(std::env::args_os().collect()) {
        Ok(words) => words,
        Err(usage) => {
            eprintln!("{usage}");
            return ExitCode::from(failure::USAGE);
        }
    };
    let words = match named_job::resolve(words) {
        Ok(words) => words,
        Err(error) => {
            eprintln!("dsync: {}", link::printable(&failure::text(&error)));
            return ExitCode::from(failure::code(&error));
        }
    };
    // Bad usage ends here, with clap's own message and code 2.
    let cli = Cli::try_parse_from(&words).unwrap_or_else(|error| usage::bad(error, &words));
    let output = Output::new(&cli);
    let (cli, output) = match job::resolve(cli) {
        Ok(Some(cli)) => {
            let output = Output::new(&cli);
            (cli, output)
        }
        Ok(None) => return ExitCode::SUCCESS,
        Err(error) => {
            attempt::begin(None);
            attempt::end(failure::code(&error), &failure::text(&error));
            return failed(&error, &output);
        }
    };
    attempt::begin(Some(&cli));
    let output = match cli.command {
        Command::Extract(_) | Command::Combine(_) => output.on_stderr(),
        _ => output,
    };
    let ended = run(&cli, &output).and_then(|code| output.end().map(|()| code));
    let (code, message) = match &ended {
        Ok(code) => (*code, String::new()),
        Err(error) => (failure::code(error), failure::text(error)),
    };
    if code == 0 {
        job_copies::fetched(&cli).into_iter().for_each(attempt::fetched);
    }
    attempt::end(code, &message);
    if ended.is_err() {
        output.error(&message, code);
    }
    if let Some(command) = cli.command.on_failure().filter(|_| code != 0) {
        hook::on_failure(command, code, &message, &output);
    }
    ExitCode::from(code)
}

/// Reports the error that ends the program.
fn failed(error: &anyhow::Error, output: &Output) -> ExitCode {
    let code = failure::code(error);
    output.error(&failure::text(error), code);
    ExitCode::from(code)
}

/// Called as `dmextract` or `dmmerge` the program takes the arguments that the paper gives them: one name.
fn paper_names(words: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let called =
        words.first().map(std::path::Path::new).and_then(|p| p.file_name()).unwrap_or_default().to_owned();
    let command = match called.to_str() {
        Some("dmextract") => "extract",
        Some("dmmerge") => "merge",
        _ => return Ok(words),
    };
    let asks_help = words.get(1).is_some_and(|w| w == "--help" || w == "-h" || w == "--version");
    if words.len() < 2 && !asks_help {
        let what = if command == "extract" { "NAME > DELTA" } else { "DEVICE < DELTA" };
        return Err(format!(
            "usage: {} {what}\n(the same as \"dsync {command}\", which takes options)",
            called.to_string_lossy()
        ));
    }
    let mut all = vec![OsString::from("dsync"), command.into()];
    all.extend(words.into_iter().skip(1));
    Ok(all)
}

fn run(cli: &Cli, output: &Output) -> Result<u8> {
    let state = StateDir::find(cli.state_dir.as_deref());
    let interrupted = match cli.command {
        Command::Serve(_) | Command::Demo(_) | Command::Mirror(_) | Command::Rehearse(_) => None,
        Command::Receive(ref args) if args.listens() => None,
        Command::Send(ref args) if args.listens() => None,
        // The near end says it.
        Command::Receive(_) | Command::Send(_) => Some(""),
        // It has no other end.
        Command::Status(ref args) if args.watch.is_some() => Some(""),
        Command::Sync(_) | Command::Merge(_) => Some(
            "interrupted: run the same command again; a copy or a tracked sync goes on where it was, and a comparison if what is written meanwhile is recorded",
        ),
        _ => Some("interrupted"),
    };
    if let Some(message) = interrupted {
        let output = output.alike();
        let cost = sync_command::cost_of_interrupt(&cli.command, &state);
        failure::on_interrupt(move || {
            attempt::end(failure::INTERRUPTED, message);
            if !message.is_empty() {
                eprintln!(); // Behind the terminal's own ^C.
                output.error(&format!("{message}{}", cost()), failure::INTERRUPTED);
            }
            machine::end_interrupted();
        })?;
    }
    match &cli.command {
        Command::Sync(args) => {
            let steering = Steering::begin(args.far.bwlimit.as_ref(), false, output)?;
            let told = args.told.read()?;
            return until_free(&args.run.wait, output, || {
                match (MachineWord::read(&args.source), &args.group) {
                    (Some(named), _) => machine::sync(named, args, &steering, &state, output),
                    (None, Some(group)) => group_command::sync(group, args, &steering, &state, output),
                    (None, None) => sync_command::run(args, &told, &steering, &state, output),
                }
            });
        }
        Command::Mirror(args) => match (MachineWord::read(&args.source), &args.group) {
            (_, Some(group)) => group_command::mirror(group, args, &state, output)?,
            (Some(named), None) => machine::mirror(named, args, &state, output)?,
            (None, None) => mirror_command::run(args, &state, output)?,
        },
        Command::Serve(args) => serve::run(args, &state, output)?,
        Command::Track(args) => track::run(args, &state, output)?,
        Command::Status(args) => return status(args, &state, output),
        Command::Extract(args) => until_free(&args.wait, output, || pipes::extract(args, &state, output))?,
        Command::Checkpoint(args) => checkpoint::run(args, &state, output)?,
        Command::Forget(args) => match MachineWord::read(&args.what) {
            Some(named) => machine::forget(&named.name(&state), args, &state, output)?,
            None => forget::run(args, &state, output)?,
        },
        Command::Changes(args) => {
            until_free(&args.wait, output, || checkpoint::changes(args, &state, output))?
        }
        Command::Merge(args) => pipes::merge(args, &state, output)?,
        Command::Inspect(args) => delta_files::inspect(args, output)?,
        Command::Combine(args) => delta_files::combine(args, output)?,
        Command::Verify(args) => return verify(args, &state, output),
        Command::Recover(args) => status::recover(args, &state, output)?,
        Command::Rewind(args) => until_free(&args.wait, output, || group_rewind::run(args, &state, output))?,
        Command::Rehearse(args) => until_free(&args.run.wait, output, || rehearse(args, &state, output))?,
        Command::Promote(args) => until_free(&args.wait, output, || promote(args, &state, output))?,
        Command::Demote(args) => {
            let steering = Steering::begin(args.far.bwlimit.as_ref(), false, output)?;
            until_free(&args.wait, output, || demote(args, &steering, &state, output))?;
        }
        Command::Discover(args) => discover::run(args, &state, output)?,
        Command::Demo(args) => demo::run(args, output)?,
        Command::Receive(args) => far_side::receive(args, &state, output)?,
        Command::Send(args) => far_side::send(args, &state, output)?,
        Command::Key(args) => key::run(args, &state, output)?,
        Command::Run(_) => return Err(Failure::usage("a job cannot run a job").into()),
        Command::Man { folder } => manual::pages(folder)?,
        Command::Completions { shell } => manual::completions(*shell),
        Command::Names { what } => manual::names(*what, &state)?,
    }
    Ok(0)
}

/// `dsync verify` of a disk or a machine.
fn verify(args: &args::Verify, state: &StateDir, output: &Output) -> Result<u8> {
    let steering = Steering::begin(args.far.bwlimit.as_ref(), false, output)?;
    until_free(&args.run.wait, output, || match MachineWord::read(&args.source) {
        Some(named) => machine::verify(named, args, &steering, state, output),
        None => verify_command::run(args, &steering, state, output),
    })
}

/// The forms of `dsync status`.
fn status(args: &args::StatusArgs, state: &StateDir, output: &Output) -> Result<u8> {
    match args.watch {
        _ if args.check => return monitor::check(args, state, output),
        None if args.max_age.is_some() => {
            return Err(Failure::usage("--max-age needs --check or --watch").into());
        }
        _ if args.prometheus => return monitor::prometheus(state, output),
        Some(every) => watch::run(args, every, state)?,
        None if status::is_long(args, output) => status::run(args, state, output)?,
        None => table::run(args, state, output)?,
    }
    Ok(0)
}
