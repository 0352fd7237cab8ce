//! Sources and destinations, as users write them, and how to connect to them.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use link::Link;
use source::{Handle, StateDir};
use sync::{Pull, PullContext, SourceInfo, SourceRequest, SyncError, Task, Way};

use crate::args::{FarArgs, SourceArgs};
use crate::failure::{self, Failure};
use crate::output::Output;
use crate::reach::far::{self, Reach};
use crate::terms::machine_name;

/// The ends of a sync. At most one of them is on another host.
#[derive(Debug)]
pub(crate) struct Ends {
    pub source: Location,
    pub destination: Location,
}

/// The location of a source or a replica.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// As the user wrote it.
    pub name: String,
    /// `None` for this host.
    pub host: Option<String>,
    /// How that is reached.
    pub reach: Reach,
    /// The path there.
    path: PathBuf,
}

impl Location {
    /// Reads `[[USER@]HOST:]PATH`, `ssh://[USER@]HOST[:PORT]/PATH`, `tls://HOST[:PORT]/PATH` and the URI of an NBD export. A path with a slash before its colon is
    /// local. An IPv6 address is in brackets.
    pub(crate) fn parse(text: &str) -> Result<Location, Failure> {
        let invalid = |why: &str| {
            Failure::usage(format!(
                "invalid source or destination \"{text}\": {why}, or ./{text} for a local file of that name"
            ))
        };
        machine_name::refuse_name(text)?;
        if text.starts_with("tls://") {
            return Location::parse_tls(text).ok_or_else(|| {
                Failure::usage(format!(
                    "invalid source or destination \"{text}\": use tls://HOST/PATH or tls://HOST:PORT/PATH, where PATH is relative to the \
                     --into or --offer folder there"
                ))
            });
        }
        if text.starts_with(sync::PULLED) {
            return Err(Failure::usage(format!(
                "{text} is a replica that is brought up to date from its own host: run \"dsync sync HOST:SRC DST\" there, where \
                 HOST is this one"
            )));
        }
        if let Some(rest) = text.strip_prefix("ssh://") {
            return Location::parse_ssh_url(text, rest).ok_or_else(|| invalid(SSH_URL));
        }
        if let Some(uri) = device::ExportUri::of(Path::new(text)) {
            let name = uri.map_err(|error| Failure::usage(error.to_string()))?.to_string();
            let path = PathBuf::from(&name);
            return Ok(Location { name, host: None, reach: Reach::Ssh(None), path });
        }
        if let Ok(Some((host, path))) = split_host(text) {
            if let (false, Some(uri)) = (host.is_empty(), device::ExportUri::of(Path::new(path))) {
                let path = uri.map_err(|error| Failure::usage(error.to_string()))?.to_string();
                return Location::over_ssh(text, host, None, &path);
            }
        }
        if let Some((scheme, _)) = text.split_once("://").filter(|(scheme, _)| !scheme.contains('/')) {
            return Err(Failure::usage(format!(
                "\"{scheme}://\" is not known: use HOST:/path or ssh://HOST/path over ssh, tls://HOST/PATH over TLS, or ./{text} for a local \
                 file of that name"
            )));
        }
        if text.is_empty() {
            return Err(Failure::usage("a source or destination is empty"));
        }
        let Some((host, path)) = split_host(text).map_err(|place| invalid(&format!("use {place}")))? else {
            let (name, path) = (text.to_owned(), text.into());
            return Ok(Location { name, host: None, reach: Reach::Ssh(None), path });
        };
        if host.is_empty() || path.is_empty() {
            let what = if host.is_empty() { "host" } else { "path" };
            return Err(Failure::usage(format!(
                "the {what} is missing in \"{text}\": use HOST:/path, or ./{text} for a local file of that name"
            )));
        }
        if let Some((port, path)) = path.split_once(':').filter(|(port, _)| port.parse::<u16>().is_ok()) {
            let (shown, path) = (in_brackets(&host), path.trim_start_matches('/'));
            return Err(invalid(&format!("use ssh://{shown}:{port}/{path} for a port")));
        }
        Location::over_ssh(text, host, None, path)
    }

    /// A place on a host with a remote shell, whose home a relative path is in, as one that begins with `~/`.
    fn over_ssh(text: &str, host: String, port: Option<u16>, path: &str) -> Result<Location, Failure> {
        let path = match path.strip_prefix('~').map(|rest| rest.strip_prefix('/').ok_or(rest)) {
            None => path.into(),
            Some(Ok(within)) => Path::new(".").join(within.trim_start_matches('/')),
            Some(Err(_)) => {
                return Err(Failure::usage(format!(
                    "cannot expand \"{path}\" of \"{text}\": only ~/ is expanded; write the path in full, or ./{path} for a file of that name"
                )));
            }
        };
        Ok(Location { name: text.to_owned(), host: Some(host), reach: Reach::Ssh(port), path })
    }

    /// Reads what follows `ssh://`. The path is absolute, but after `/~/`.
    fn parse_ssh_url(text: &str, rest: &str) -> Option<Location> {
        let (place, path) = rest.split_at(rest.find('/')?);
        let (user, address) = place.rsplit_once('@').map_or((None, place), |(user, host)| (Some(user), host));
        let (host, port) = with_port(address)?;
        let whole = path.len() > 1 && user != Some("");
        let host = user.map_or(host.to_owned(), |user| format!("{user}@{host}"));
        let path = if path.starts_with("/~") { &path[1..] } else { path };
        Location::over_ssh(text, host, port, path).ok().filter(|_| whole)
    }

    /// Reads the folder in which the replicas of a group are.
    pub(crate) fn folder(text: &str) -> Result<Location, Failure> {
        let location = Location::parse(text)?;
        if device::is_export(&location.path) {
            return Err(Failure::usage(format!(
                "{text} is an export of an NBD server, and the replicas of a group are in a folder: sync each disk by itself"
            )));
        }
        // What is no place without its last slash is the root.
        Ok(Location::parse(text.trim_end_matches('/')).unwrap_or(location))
    }

    /// The path there, and what to call it.
    pub(crate) fn place(&self) -> Result<(PathBuf, String)> {
        if self.host.is_some() {
            return Ok((self.path.clone(), self.name.clone()));
        }
        let path =
            device::absolute(&self.path).with_context(|| format!("cannot find {}", self.path.display()))?;
        let name = path.display().to_string();
        Ok((path, name))
    }

    /// Reads `tls://HOST[:PORT]/PATH`, with an IPv6 address in brackets.
    fn parse_tls(text: &str) -> Option<Location> {
        let (place, path) = text.strip_prefix("tls://")?.split_once('/')?;
        let (host, port) = with_port(place)?;
        let whole = !path.is_empty() && !host.contains('@');
        whole.then(|| Location {
            name: text.to_owned(),
            host: Some(in_brackets(host)),
            reach: Reach::Tls(port.unwrap_or(link::PORT)),
            path: path.into(),
        })
    }

    /// A file in this folder.
    pub(crate) fn within(&self, file: &Path) -> Location {
        let name = format!("{}/{}", self.name.trim_end_matches('/'), file.display());
        Location { name, host: self.host.clone(), reach: self.reach, path: self.path.join(file) }
    }

    /// An error about the replicas of a group as it helps here; see [`Ends::named`].
    pub(crate) fn named(&self, error: SyncError) -> SyncError {
        let SyncError::Far { message, class } = error else { return error };
        let message = with_folder(&message, &self.name);
        let message = match self.host.as_deref() {
            Some(host) => format!("{host}: {message}"),
            None => message,
        };
        SyncError::Far { message, class }
    }

    /// A link to the replica's side, and its thread, if it is local.
    pub(crate) fn connect(&self, far: &FarArgs, state: &StateDir) -> Result<(Link, Option<JoinHandle<()>>)> {
        let Some(host) = &self.host else {
            let (here, there) = Link::pair();
            let state = state.clone();
            let receiving = std::thread::Builder::new().name("receive".into()).spawn(move || {
                // Its errors are sent over the link, like those of a far host.
                let _ = sync::receive(there, &state);
            });
            let receiving = receiving.context("cannot start a thread")?;
            return Ok((here, Some(receiving)));
        };
        Ok((far::call(host, self.reach, "receive", far, state)?, None))
    }
}

const SSH_URL: &str = "use ssh://HOST/PATH, ssh://USER@HOST:PORT/PATH, or ssh://HOST/~/PATH for a path in the home folder there";

/// Splits `[USER@]HOST:PATH`, with the brackets of an address taken off. `None` for a local path.
///
/// # Errors
/// How it is to be written, if an IPv6 address stands without brackets.
fn split_host(text: &str) -> Result<Option<(String, &str)>, String> {
    let place = text.split('/').next().unwrap_or_default();
    let (user, address) = match place.split_once('@') {
        Some((user, rest)) if !user.contains(':') => (format!("{user}@"), rest),
        _ => (String::new(), place),
    };
    let start = user.len();
    if let Some((host, rest)) = address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        if rest.starts_with(':') {
            let path = &text[start + host.len() + 3..];
            return Ok(Some((format!("{user}{host}"), path)));
        }
    }
    if let Some((host, _)) = address.rsplit_once(':').filter(|(host, _)| is_v6(host)) {
        return Err(format!("{user}[{host}]{}", &text[start + host.len()..]));
    }
    let split = address.split_once(':').map(|(host, _)| host);
    Ok(split.map(|host| (format!("{user}{host}"), &text[start + host.len() + 1..])))
}

fn is_v6(host: &str) -> bool {
    host.split('%').next().is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok())
}

/// Reads `HOST[:PORT]`, with the brackets of an address taken off.
fn with_port(place: &str) -> Option<(&str, Option<u16>)> {
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => {
            (host, Some(port.parse().ok().filter(|port| *port > 0)?))
        }
        _ => (place, None),
    };
    let plain = host.strip_prefix('[').map_or(Some(host), |host| host.strip_suffix(']'))?;
    let whole = !plain.is_empty() && !plain.contains(['[', ']']) && !plain.contains(char::is_whitespace);
    (whole && (host != plain || !plain.contains(':'))).then_some((plain, port))
}

/// A host as it is written in a URL.
fn in_brackets(host: &str) -> String {
    let (user, address) = host.rsplit_once('@').map_or(("", host), |(user, _)| host.split_at(user.len() + 1));
    if address.contains(':') { format!("{user}[{address}]") } else { host.to_owned() }
}

/// A message with the folder of the replicas of a group in the commands that it names.
fn with_folder(message: &str, folder: &str) -> String {
    message.replace(" DIR\"", &format!(" {folder}\""))
}

/// Refuses a path of another host, for a command that works on this one.
///
/// # Errors
/// That, with where to run it.
pub(crate) fn refuse_host(path: &Path, command: &str) -> Result<(), Failure> {
    let named = path.to_str().filter(|_| !device::is_there(path));
    let there = named.and_then(|named| Location::parse(named).ok());
    match there.as_ref().and_then(|there| Some((there, there.host.as_ref()?))) {
        Some((there, host)) => Err(Failure::usage(format!(
            "{} is on another host: run \"dsync {command} {}\" on {host}",
            there.name,
            there.path.display()
        ))),
        None => Ok(()),
    }
}

impl Ends {
    /// Reads a source and a destination.
    pub(crate) fn parse(source: &str, destination: &str) -> Result<Ends, Failure> {
        let ends = Ends { source: Location::parse(source)?, destination: Location::parse(destination)? };
        if destination.ends_with('/') && !device::is_export(Path::new(destination)) {
            return Err(Failure::usage(format!(
                "{destination} names a folder: give the path of the replica in it, such as {destination}vm.raw"
            )));
        }
        match (&ends.source.host, &ends.destination.host) {
            (Some(host), Some(_)) => Err(Failure::usage(format!(
                "{source} and {destination} are both on other hosts: run dsync on one of them, for example \"ssh {host} dsync sync {} \
                 {destination}\"",
                ends.source.path.display()
            ))),
            _ => Ok(ends),
        }
    }

    /// The end that is on another host.
    pub(crate) fn far(&self) -> Option<&Location> {
        [&self.source, &self.destination].into_iter().find(|end| end.host.is_some())
    }

    /// Connects to the replica's side, which runs in a thread or on another host, and calls a function with the link, the
    /// destination's path there, and its name as the user wrote it. That the replica's side is not reached counts as a failure
    /// of the source `counts`.
    pub(crate) fn converse<T>(
        &self,
        far: &FarArgs,
        state: &StateDir,
        counts: Option<&Handle>,
        talk: impl FnOnce(Link, &Path, &str) -> Result<T, SyncError>,
    ) -> Result<T> {
        let (path, name) = self.destination.place()?;
        let (link, receiving) = self.destination.connect(far, state).inspect_err(|error| {
            let way = Way::to(self.destination.host.is_some());
            counts.inspect(|handle| sync::count_failure(handle, &path, &name, &way, &failure::text(error)));
        })?;
        let result = talk(link, &path, &name);
        if let Some(receiving) = receiving {
            let _ = receiving.join();
        }
        Ok(result.map_err(|error| self.named(error))?)
    }

    /// An error as it helps here: what another host said is marked as its, and the commands that it names get both ends as
    /// the user wrote them, because paths there may mean something else here.
    pub(crate) fn named(&self, error: SyncError) -> SyncError {
        match error {
            SyncError::Far { message, class } => SyncError::Far { message: self.told(&message), class },
            own => {
                let message = own.to_string();
                match message.contains("SRC DST") || message.contains("DST SRC") {
                    true => SyncError::Far { message: self.with_ends(&message), class: own.class() },
                    false => own,
                }
            }
        }
    }

    /// The commands that a message names, with both ends.
    fn with_ends(&self, message: &str) -> String {
        sync::with_ends(message, &self.source.name, &self.destination.name)
    }

    /// What the other side said, in the same way.
    pub(crate) fn told(&self, message: &str) -> String {
        let there = &self.destination.name;
        let folder = match there.rsplit_once('/') {
            Some(("", _)) => "/",
            // The root of a host that a URL names.
            Some((folder, _)) if folder.rsplit_once("//").is_some_and(|(_, host)| !host.contains('/')) => {
                &there[..=folder.len()]
            }
            Some((folder, _)) => folder,
            None => there.rsplit_once(':').map_or(".", |(host, _)| &there[..=host.len()]),
        };
        let message = with_folder(&self.with_ends(message), folder);
        match self.far().and_then(|far| far.host.as_deref()) {
            Some(_) if self.is_of_own_replica(&message) => message,
            Some(host) => format!("{host}: {message}"),
            None => message,
        }
    }

    /// True for what the source's host says of the replica that this host has: with the other's name before it, a replica that is not
    /// here would be looked for there.
    fn is_of_own_replica(&self, message: &str) -> bool {
        let Ok((path, _)) = self.destination.place() else { return false };
        let names = |subject: &str| {
            let rest = message.strip_prefix(subject).and_then(|rest| rest.strip_prefix(path.to_str()?));
            rest.is_some_and(|rest| rest.starts_with([' ', ':', ',']))
        };
        let subjects = ["the replica at ", "replica ", "no replica at "];
        self.source.host.is_some()
            && (subjects.into_iter().any(names) || path != self.source.path && names(""))
    }

    /// Asks the source's host, which is another one, for a task, and receives at the destination on this one. `begun` gets what is known
    /// of the source before anything is moved.
    pub(crate) fn pull<T>(
        &self,
        (task, open, far): (Task, &SourceArgs, &FarArgs),
        state: &StateDir,
        output: &Output,
        begun: &dyn Fn(&SourceInfo) -> Result<(), SyncError>,
        run: impl FnOnce(&Pull, Link, PullContext<'_>) -> Result<T, SyncError>,
    ) -> Result<T> {
        let host = self.source.host.as_deref().unwrap_or_default();
        let open = SourceRequest {
            block_size: crate::reach::source::block_size(open.block_size)?,
            trust_device: open.trust_device,
            allow_shrink: open.allow_shrink,
        };
        let (replica, _) = self.destination.place()?;
        let source = self.source.path.to_string_lossy().into_owned();
        let pull = Pull { source, open, replica, host: host_name(), task };
        let link = far::call(host, self.source.reach, "send", far, state)?;
        let begun =
            |info: &SourceInfo| begun(&SourceInfo { path: (&self.source.name).into(), ..info.clone() });
        let progress = |done, total| output.progress(done, total);
        let done = run(&pull, link, PullContext { state, begun: &begun, progress: &progress });
        output.finish();
        Ok(done.map_err(|error| self.named(error))?)
    }
}

/// The name of this host, as sources on other hosts remember its replicas.
fn host_name() -> String {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy();
    let plain = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' };
    if name.is_empty() { "localhost".into() } else { name.chars().map(plain).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read_as_ssh_users_write_them() {
        for (text, host, path) in [
            ("backup:/srv/vm.raw", Some("backup"), "/srv/vm.raw"),
            ("me@backup:vm.raw", Some("me@backup"), "vm.raw"),
            ("/srv/a:b.raw", None, "/srv/a:b.raw"),
            ("./a:b.raw", None, "./a:b.raw"),
            ("vm.raw", None, "vm.raw"),
            ("[::1]:/srv/vm.raw", Some("::1"), "/srv/vm.raw"),
            ("[fe80::1%eth0]:vm.raw", Some("fe80::1%eth0"), "vm.raw"),
            ("me@[2001:db8::7]:/srv/a:b", Some("me@2001:db8::7"), "/srv/a:b"),
            ("[a]/b:c", None, "[a]/b:c"),
            ("backup:~/vm.raw", Some("backup"), "./vm.raw"),
            ("backup:a~/vm.raw", Some("backup"), "a~/vm.raw"),
            ("ssh://backup/srv/vm.raw", Some("backup"), "/srv/vm.raw"),
            ("ssh://me@[::1]/srv/vm.raw", Some("me@::1"), "/srv/vm.raw"),
            ("ssh://backup/~/vm.raw", Some("backup"), "./vm.raw"),
        ] {
            let (host, reach) = (host.map(str::to_owned), Reach::Ssh(None));
            let destination = Location { name: text.into(), host, reach, path: path.into() };
            assert_eq!(Location::parse(text).unwrap(), destination);
        }
        for (text, host, port) in [
            ("ssh://backup:2222/vm.raw", "backup", 2222),
            ("ssh://me@[2001:db8::7]:22/vm.raw", "me@2001:db8::7", 22),
        ] {
            let (host, reach) = (Some(host.to_owned()), Reach::Ssh(Some(port)));
            let destination = Location { name: text.into(), host, reach, path: "/vm.raw".into() };
            assert_eq!(Location::parse(text).unwrap(), destination);
        }
        for wrong in [
            "",
            ":/srv",
            "host:",
            "[::1]:",
            "ssh://",
            "ssh:///x",
            "ssh://host",
            "ssh://host/",
            "ssh://@host/x",
        ] {
            assert!(Location::parse(wrong).is_err(), "{wrong}");
        }
        for (wrong, meant) in [
            ("host:22:/x", "use ssh://host:22/x"),
            ("[::1]:22:/x", "use ssh://[::1]:22/x"),
            ("2001:db8::7:/x", "use [2001:db8::7]:/x"),
            ("me@::1:x", "use me@[::1]:x"),
            ("ssh://host:0/x", "use ssh://HOST/PATH"),
            ("ssh://::1/x", "use ssh://HOST/PATH"),
            ("backup:~me/vm.raw", "only ~/ is expanded"),
        ] {
            let said = Location::parse(wrong).unwrap_err().to_string();
            assert!(said.contains(meant), "{said}");
        }
        for (folder, path) in [("host:/", "/"), ("ssh://host/srv/", "/srv"), ("/", "/"), ("host:a/", "a")] {
            assert_eq!(Location::folder(folder).unwrap().path, Path::new(path));
        }
    }

    #[test]
    fn of_the_own_replica_the_other_host_is_not_named() {
        let pull = Ends::parse("far:/srv/vm.raw", "/near/vm.raw").unwrap();
        for own in [
            "the replica at /near/vm.raw is missing",
            "replica /near/vm.raw does not fit",
            "/near/vm.raw has 1",
        ] {
            assert_eq!(pull.told(own), own);
        }
        for far in ["/srv/vm.raw is served", "replica /near/vm.rawer is", "no room"] {
            assert_eq!(pull.told(far), format!("far: {far}"));
        }
        // Commands that the own side names get both ends, too.
        let own = pull.named(replica::ReplicaError::NotAReplica("/near/vm.raw".into()).into());
        assert!(own.to_string().contains("dsync sync --adopt far:/srv/vm.raw /near/vm.raw"), "{own}");
        assert_eq!(own.class(), sync::Class::Refused);
        let same = Ends::parse("far:/srv/vm.raw", "/srv/vm.raw").unwrap();
        assert_eq!(same.told("/srv/vm.raw has"), "far: /srv/vm.raw has");
        assert_eq!(
            same.told("the replica at /srv/vm.raw is missing"),
            "the replica at /srv/vm.raw is missing"
        );
        let push = Ends::parse("/srv/vm.raw", "far:/srv/vm.raw").unwrap();
        assert_eq!(push.told("replica /srv/vm.raw is"), "far: replica /srv/vm.raw is");
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
            let (host, reach) = (Some(host.into()), Reach::Tls(port));
            let destination = Location { name: text.into(), host, reach, path: path.into() };
            assert_eq!(Location::parse(text).unwrap(), destination);
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
            assert!(Location::parse(wrong).is_err(), "{wrong}");
        }
    }
}
