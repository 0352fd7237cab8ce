//! `dsync sync`.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use link::Link;
use source::{Handle, StateDir};
use sync::{Commit, How, Options, Summary};

use crate::args::{self, CommitArg, HashArg, MethodArg};
use crate::failure::Failure;
use crate::output::Output;
use crate::units;

/// Where a replica lives, as the user wrote it.
#[derive(Debug, PartialEq, Eq)]
pub struct Destination {
    /// `None` for this host.
    pub host: Option<String>,
    /// The path there.
    pub path: PathBuf,
}

impl Destination {
    /// Reads `[[USER@]HOST:]DST`. A path with a slash before its colon is local.
    pub fn parse(text: &str) -> Result<Destination, Failure> {
        let local = |path: &str| Destination { host: None, path: path.into() };
        let destination = match text.split_once(':') {
            Some((host, path)) if !host.contains('/') => {
                if host.is_empty() || path.is_empty() {
                    return Err(Failure::usage(format!(
                        "\"{text}\" names no {}: write HOST:/path, or ./{text} for a file of that name here",
                        if host.is_empty() { "host" } else { "path" }
                    )));
                }
                Destination { host: Some(host.to_owned()), path: path.into() }
            }
            _ => local(text),
        };
        if text.is_empty() {
            return Err(Failure::usage("the destination is empty"));
        }
        Ok(destination)
    }
}

pub fn commit(arg: CommitArg) -> Commit {
    match arg {
        CommitArg::Journal => Commit::Journal,
        CommitArg::InPlace => Commit::InPlace,
        CommitArg::Reflink => Commit::Reflink,
    }
}

pub fn hash(arg: HashArg) -> compare::Hash {
    match arg {
        HashArg::Blake3 => compare::Hash::Blake3,
        HashArg::Xxh3 => compare::Hash::Xxh3,
    }
}

/// Runs the command.
pub fn run(args: &args::Sync, state: &StateDir, output: &Output) -> Result<()> {
    let destination = Destination::parse(&args.destination)?;
    if args.bwlimit == Some(0) {
        return Err(Failure::usage("--bwlimit takes a rate above zero, such as 10M").into());
    }
    if args.adopt && !matches!(args.method, MethodArg::Auto | MethodArg::Compare) {
        return Err(Failure::usage("--adopt proves a copy by comparing it: leave --method out").into());
    }
    let options = Options {
        how: match args.method {
            MethodArg::Auto => How::Auto,
            MethodArg::Tracked => How::Tracked,
            MethodArg::Compare => How::Compare,
            MethodArg::Copy => How::Copy,
        },
        hash: hash(args.hash),
        commit: commit(args.commit),
        dry_run: args.dry_run,
        adopt: args.adopt,
        at_view: args.at_view,
        compress: args.compress,
        bwlimit: args.bwlimit,
        journal_dir: args.journal_dir.clone().map(PathBuf::from),
        may_be_cut: destination.host.is_some(),
    };
    let handle = Handle::attach(state, &args.source, &crate::source_options(&args.open)?)?;
    let progress = |done, total| output.progress(done, total);
    let summary = match &destination.host {
        None => {
            let path = std::path::absolute(&destination.path)
                .with_context(|| format!("can't find {}", destination.path.display()))?;
            if std::fs::canonicalize(&path).is_ok_and(|p| p == handle.about().path) {
                return Err(Failure::refused(format!(
                    "{} is the source itself: give another destination",
                    path.display()
                ))
                .into());
            }
            let (here, there) = Link::pair();
            let state = state.clone();
            let far = std::thread::Builder::new()
                .name("receive".into())
                // Its errors travel over the link, as those of a far host do.
                .spawn(move || sync::receive(there, &state).is_ok())?;
            let result = sync::push(&handle, here, &path, &path.display().to_string(), &options, &progress);
            let _ = far.join();
            result
        }
        Some(host) => {
            let rsh: Vec<String> = args.rsh.split_whitespace().map(str::to_owned).collect();
            let mut command: Vec<String> = args.remote_dsync.split_whitespace().map(str::to_owned).collect();
            command.push("receive".into());
            let link = Link::ssh(&rsh, host, &command)?;
            sync::push(&handle, link, &destination.path, &args.destination, &options, &progress)
        }
    };
    output.finish();
    output.more(&format!("source {} in {}", handle.about().uuid, state.path().display()));
    // The source is let go even if the sync failed; the sync's own error comes first.
    let closed = handle.close();
    let summary = summary?;
    closed?;
    if let Some(recovered) = &summary.recovered {
        output.warn(recovered);
    }
    say(&summary, output);
    output.summary(&summary);
    Ok(())
}

fn say(summary: &Summary, output: &Output) {
    let found = format!(
        "{} blocks in {} extents, {}",
        units::count(summary.blocks_changed),
        units::count(summary.extents),
        units::size(summary.bytes_changed)
    );
    let of = format!("of {}", units::size(summary.disk_size));
    if summary.dry_run {
        output.say(&match summary.method {
            delta::Method::Compare => format!(
                "would compare all of {} with {} ({}), at most {} to send",
                summary.source.display(),
                summary.destination,
                summary.trust,
                units::size(summary.bytes_changed)
            ),
            _ => format!("would send {found} {of} to {} ({})", summary.destination, summary.trust),
        });
        return;
    }
    let epoch = summary.epoch.map_or_else(String::new, |e| format!(" at epoch {e}"));
    if summary.blocks_changed == 0 {
        output.say(&format!(
            "{} is up to date{epoch} ({}; {})",
            summary.destination,
            summary.trust,
            units::seconds(summary.seconds)
        ));
        return;
    }
    output.say(&format!("{} is{epoch}: {found} {of} ({})", summary.destination, summary.trust));
    output.say(&format!(
        "read {}, sent {}, wrote {}, in {}{}",
        units::size(summary.bytes_read),
        units::size(summary.bytes_sent),
        units::size(summary.bytes_written),
        units::seconds(summary.seconds),
        if summary.resumed { ", on from where the last transfer ended" } else { "" }
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read_as_ssh_users_write_them() {
        let far = |host: &str, path: &str| Destination { host: Some(host.into()), path: path.into() };
        let here = |path: &str| Destination { host: None, path: path.into() };
        assert_eq!(Destination::parse("backup:/srv/vm.raw").unwrap(), far("backup", "/srv/vm.raw"));
        assert_eq!(Destination::parse("me@backup:vm.raw").unwrap(), far("me@backup", "vm.raw"));
        assert_eq!(Destination::parse("/srv/a:b.raw").unwrap(), here("/srv/a:b.raw"));
        assert_eq!(Destination::parse("./a:b.raw").unwrap(), here("./a:b.raw"));
        assert_eq!(Destination::parse("vm.raw").unwrap(), here("vm.raw"));
        for wrong in ["", ":/srv", "host:"] {
            assert!(Destination::parse(wrong).is_err(), "{wrong}");
        }
    }
}
