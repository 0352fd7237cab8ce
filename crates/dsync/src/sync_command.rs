//! `dsync sync`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use link::Link;
use source::{FreezeMode, StateDir};
use sync::{Commit, Extents, LiveOptions, Method, Summary, SyncError, SyncOptions, Unreadable};

use crate::args::{self, CommitArg, CyclesArg, FarArgs, FreezeArg, HashArg, MethodArg};
use crate::effect;
use crate::failure::{self, FAILED, Failure};
use crate::output::Output;
use crate::units;

/// Where a replica lives, as the user wrote it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    /// `None` for this host.
    pub host: Option<String>,
    /// Where dsync listens there; `None` if ssh leads there.
    pub port: Option<u16>,
    /// The path there.
    pub path: PathBuf,
}

impl Destination {
    /// Reads `[[USER@]HOST:]DST` and `tls://HOST[:PORT]/DST`. A path with a slash before its colon is local.
    pub(crate) fn parse(text: &str) -> Result<Destination, Failure> {
        if let Some(rest) = text.strip_prefix("tls://") {
            return Destination::parse_tls(rest).ok_or_else(|| {
                Failure::usage(format!(
                    "invalid destination \"{text}\": use tls://HOST/PATH or tls://HOST:PORT/PATH, where PATH is relative to the \
                     --into folder there"
                ))
            });
        }
        let local = |path: &str| Destination { host: None, port: None, path: path.into() };
        let destination = match text.split_once(':') {
            Some((host, path)) if !host.contains('/') => {
                if host.is_empty() || path.is_empty() {
                    return Err(Failure::usage(format!(
                        "the {} is missing in \"{text}\": use HOST:/path, or ./{text} for a local file of that name",
                        if host.is_empty() { "host" } else { "path" }
                    )));
                }
                Destination { host: Some(host.to_owned()), port: None, path: path.into() }
            }
            _ => local(text),
        };
        if text.is_empty() {
            return Err(Failure::usage("the destination is empty"));
        }
        Ok(destination)
    }

    /// The path there, and what to call it.
    pub(crate) fn place(&self, name: &str) -> Result<(PathBuf, String)> {
        if self.host.is_some() {
            return Ok((self.path.clone(), name.to_owned()));
        }
        let path = std::path::absolute(&self.path)
            .with_context(|| format!("cannot find {}", self.path.display()))?;
        let name = path.display().to_string();
        Ok((path, name))
    }

    /// Reads `HOST[:PORT]/PATH`, where an IPv6 address stands in brackets.
    fn parse_tls(text: &str) -> Option<Destination> {
        let (place, path) = text.split_once('/')?;
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok().filter(|port| *port > 0)?),
            _ => (place, link::PORT),
        };
        let plain = host.strip_prefix('[').map_or(Some(host), |host| host.strip_suffix(']'))?;
        let whole = !plain.is_empty() && !path.is_empty() && !host.contains(char::is_whitespace);
        let named = !plain.contains(['[', ']', '@']) && (host != plain || !plain.contains(':'));
        let port = Some(port);
        (whole && named).then(|| Destination { host: Some(host.to_owned()), port, path: path.into() })
    }
}

pub(crate) fn commit(arg: CommitArg) -> Commit {
    match arg {
        CommitArg::Journal => Commit::Journal,
        CommitArg::InPlace => Commit::InPlace,
        CommitArg::Reflink => Commit::Reflink,
    }
}

pub(crate) fn hash(arg: HashArg) -> compare::Hash {
    match arg {
        HashArg::Blake3 => compare::Hash::Blake3,
        HashArg::Xxh3 => compare::Hash::Xxh3,
    }
}

/// Reaches the replica's side, which lives in a thread of its own or on another host, and talks to it: with the link, the
/// destination's path there, and its name as the user wrote it.
pub(crate) fn converse<T>(
    destination: &Destination,
    name: &str,
    far: &FarArgs,
    state: &StateDir,
    talk: impl FnOnce(Link, &Path, &str) -> Result<T>,
) -> Result<T> {
    let (path, name) = destination.place(name)?;
    let (link, receiving) = connect(destination, far, state)?;
    let result = talk(link, &path, &name);
    if let Some(receiving) = receiving {
        let _ = receiving.join();
    }
    result
}

/// A link to the replica's side, and the thread that it is, if it is one.
pub(crate) fn connect(
    destination: &Destination,
    far: &FarArgs,
    state: &StateDir,
) -> Result<(Link, Option<std::thread::JoinHandle<()>>)> {
    let Some(host) = &destination.host else {
        let (here, there) = Link::pair();
        let state = state.clone();
        let receiving = std::thread::Builder::new().name("receive".into()).spawn(move || {
            // Its errors travel over the link, as those of a far host do.
            let _ = sync::receive(there, &state);
        });
        let receiving = receiving.context("cannot start a thread")?;
        return Ok((here, Some(receiving)));
    };
    Ok((crate::far::call(host, destination.port, far, state)?, None))
}

/// Runs the command; its exit code.
pub(crate) fn run(args: &args::Sync, state: &StateDir, output: &Output) -> Result<u8> {
    let destination = Destination::parse(&args.destination)?;
    units::check_rates(&[("--bwlimit", args.far.bwlimit)])?;
    if args.adopt && !matches!(args.method, MethodArg::Auto | MethodArg::Compare | MethodArg::Rolling) {
        return Err(
            Failure::usage("--adopt compares the copy: omit --method, or use compare or rolling").into()
        );
    }
    let options = SyncOptions {
        method: match args.method {
            MethodArg::Auto => None,
            MethodArg::Tracked => Some(Method::Tracked),
            MethodArg::Compare => Some(Method::Compare),
            MethodArg::Rolling => Some(Method::Rolling),
            MethodArg::Copy => Some(Method::Copy),
        },
        hash: hash(args.hash.unwrap_or(HashArg::Blake3)),
        in_place: compare::rolling::InPlace {
            cycles: match args.cycles {
                CyclesArg::Trim => compare::rolling::Cycles::Trim,
                CyclesArg::Delete => compare::rolling::Cycles::Delete,
            },
            ..Default::default()
        },
        commit: commit(args.commit),
        digests: args.digests.as_ref().map(|file| (!file.is_empty()).then(|| PathBuf::from(file))),
        unreadable: if args.keep_going { Unreadable::SendAnew } else { Unreadable::Fail },
        dry_run: args.dry_run,
        adopt: args.adopt,
        create: args.create,
        at_view: args.at_view,
        compress: args.compress,
        bwlimit: args.far.bwlimit,
        journal_dir: args.far.journal_dir.clone().map(PathBuf::from),
        may_be_cut: destination.host.is_some(),
        live: LiveOptions {
            passes: args.passes.unwrap_or(args::PASSES),
            cut: source::CutOptions {
                freeze: match args.freeze.unwrap_or(FreezeArg::Auto) {
                    FreezeArg::Auto => FreezeMode::Auto,
                    FreezeArg::Never => FreezeMode::Never,
                    FreezeArg::Require => FreezeMode::Require,
                },
                limit: std::time::Duration::from_secs(args.freeze_limit.unwrap_or(args::FREEZE_LIMIT)),
            },
        },
    };
    effect::on_destination(&destination, &args.far, output);
    effect::on_method(args, output);
    let handle = crate::attach(state, &args.source, &args.open)?;
    let tracked_only = [
        ("--passes", args.passes.is_some()),
        ("--freeze", args.freeze.is_some()),
        ("--freeze-limit", args.freeze_limit.is_some()),
    ];
    effect::on_source(&handle, &args.open, &tracked_only, output);
    if args.freeze == Some(FreezeArg::Require) && handle.live().is_none() {
        let why = "is not a tracked disk, so no file system on it can be frozen: omit --freeze require";
        let path = handle.about().path.display().to_string();
        handle.close()?;
        return Err(Failure::refused(format!("{path} {why}")).into());
    }
    let progress = |done, total| output.progress(done, total);
    let attempt = |options: &SyncOptions| {
        converse(&destination, &args.destination, &args.far, state, |link, path, name| {
            Ok(sync::push(&handle, link, path, name, options, &progress)?)
        })
    };
    let mut summary = attempt(&options);
    output.finish();
    // What will be lacking has to be known before the replica takes the first byte.
    let unreadable = |e: &anyhow::Error| e.downcast_ref::<SyncError>().is_some_and(SyncError::is_unreadable);
    if let Some(error) = summary.as_ref().err().filter(|e| args.keep_going && unreadable(e)) {
        output.warn(&failure::text(error));
        summary = attempt(&SyncOptions { unreadable: Unreadable::LeaveOut, ..options });
        output.finish();
    }
    output.more(&format!("source {} in {}", handle.about().uuid, state.path().display()));
    // The source is let go even if the sync failed; the sync's own error comes first.
    let closed = handle.close();
    let summary = summary?;
    closed?;
    if let Some(recovered) = &summary.recovered {
        output.warn(recovered);
    }
    list("unreadable at the source", &summary.unreadable, output);
    list("unreadable at the replica, and sent again", &summary.unreadable_there, output);
    say(&summary, output);
    output.summary(&summary);
    let unread = summary.unreadable.extents + summary.unreadable_there.extents;
    Ok(if unread > 0 { FAILED } else { 0 })
}

/// Extents that are shown to people who did not ask for more.
const SHOWN: usize = 20;

/// Lists extents, as many as people read.
pub(crate) fn list(what: &str, extents: &Extents, output: &Output) {
    let shown = if output.is_verbose() { Extents::LISTED } else { SHOWN };
    for extent in extents.list.iter().take(shown) {
        output.say(&format!("{what}: {} at byte {}", device::exact_size(extent.bytes), extent.offset));
    }
    let rest = extents.extents.saturating_sub(shown.min(extents.list.len()) as u64);
    if rest > 0 {
        output.say(&format!("{what}: {} more", units::many(rest, "extent")));
    }
}

/// Says what a sync did.
pub(crate) fn say(summary: &Summary, output: &Output) {
    let found = format!(
        "{} in {}, {}",
        units::many(summary.blocks_changed, "block"),
        units::many(summary.extents, "extent"),
        units::size(summary.bytes_changed)
    );
    let found = match summary.bytes_copied {
        0 => found,
        copied => format!("{found} ({} of that copied at the destination)", units::size(copied)),
    };
    let of = format!("of {}", units::size(summary.disk_size));
    if summary.dry_run {
        output.say(&match summary.method {
            delta::Method::Compare | delta::Method::Rolling => format!(
                "would compare all of {} with {} ({}): at most {} read on each side, and sent",
                summary.source.display(),
                summary.destination,
                summary.trust,
                units::size(summary.bytes_sent)
            ),
            _ if summary.bytes_sent < summary.bytes_changed => format!(
                "would send {found} {of} to {} ({}): {} of data, the rest as holes",
                summary.destination,
                summary.trust,
                units::size(summary.bytes_sent)
            ),
            _ => format!("would send {found} {of} to {} ({})", summary.destination, summary.trust),
        });
        return;
    }
    let epoch = match summary.epoch {
        Some(epoch) => format!(" at epoch {epoch}"),
        None => " incomplete".to_owned(),
    };
    if let Some(digests) = &summary.digests {
        output.say(&format!("digests of the replica: {digests}"));
    }
    if summary.blocks_changed == 0 && summary.epoch.is_some() {
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
        match summary.freeze_ms {
            Some(ms) => format!(", frozen for {ms} ms"),
            None if summary.resumed => ", resuming an interrupted transfer".to_owned(),
            None => String::new(),
        }
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read_as_ssh_users_write_them() {
        let far =
            |host: &str, path: &str| Destination { host: Some(host.into()), port: None, path: path.into() };
        let here = |path: &str| Destination { host: None, port: None, path: path.into() };
        assert_eq!(Destination::parse("backup:/srv/vm.raw").unwrap(), far("backup", "/srv/vm.raw"));
        assert_eq!(Destination::parse("me@backup:vm.raw").unwrap(), far("me@backup", "vm.raw"));
        assert_eq!(Destination::parse("/srv/a:b.raw").unwrap(), here("/srv/a:b.raw"));
        assert_eq!(Destination::parse("./a:b.raw").unwrap(), here("./a:b.raw"));
        assert_eq!(Destination::parse("vm.raw").unwrap(), here("vm.raw"));
        for wrong in ["", ":/srv", "host:"] {
            assert!(Destination::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn destinations_over_tls_are_read_as_urls() {
        for (text, host, port, path) in [
            ("tls://backup/vm.raw", "backup", 10873, "vm.raw"),
            ("tls://backup:7000/a/vm.raw", "backup", 7000, "a/vm.raw"),
            ("tls://192.0.2.7//dev/vg0/vm", "192.0.2.7", 10873, "/dev/vg0/vm"),
            ("tls://[2001:db8::7]/vm.raw", "[2001:db8::7]", 10873, "vm.raw"),
            ("tls://[2001:db8::7]:7000/vm.raw", "[2001:db8::7]", 7000, "vm.raw"),
        ] {
            let destination = Destination { host: Some(host.into()), port: Some(port), path: path.into() };
            assert_eq!(Destination::parse(text).unwrap(), destination, "{text}");
        }
        for wrong in [
            "tls://",
            "tls:///vm.raw",
            "tls://backup",
            "tls://backup/",
            "tls://backup:/x",
            "tls://backup:0/x",
            "tls://backup:99999/x",
            "tls://2001:db8::7/x",
            "tls://me@backup/x",
            "tls://[::1/x",
        ] {
            assert!(Destination::parse(wrong).is_err(), "{wrong}");
        }
    }
}
