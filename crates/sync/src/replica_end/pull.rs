//! A sync that the replica's side begins: it asks the source's side to push, and receives.
//!
//! ```text
//!     replica's side                          source's side
//!     pull, pull_verify: Pull ─▶              send: checks what is asked for, and opens the source
//!                             ◀─ SourceInfo
//!     ReplicaEnd              ◀─▶             push, verify: the conversation of every sync
//!                             ◀─ Result
//! ```
//!
//! Neither side lets the other choose a path: the source's side reads only what is allowed, and the replica's side opens the
//! replica that its user named, with that user's options, whatever the source's side requests.

use std::path::{Path, PathBuf};
use std::time::Duration;

use compare::Scope;
use link::{Link, Message, Receiver, Sender};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use source::{CutOptions, DeviceTrust, Handle, SourceOptions, StateDir};
use uuid::Uuid;

use crate::error::SyncError;
use crate::options::{SyncOptions, Way};
use crate::replica_end::allowed_paths::AllowedPaths;
use crate::replica_end::conversation::{ReplicaEnd, end_with};
use crate::replica_end::opening::open_here;
use crate::report::{Progress, Summary};
use crate::roles::attach::{attach, close};
use crate::source_end::push::push_over;
use crate::source_end::verify::{Verified, VerifyOptions, replica_for_verify, verify_over};
use crate::transfer::heard;
use crate::wire::messages::{
    MAX_SIZE, Open, Opening, PULL, RESULT, SOURCE, check_path, expect, nonsense, part, report, request,
};

/// The longest name of a source, in bytes.
const MAX_SOURCE: usize = 4096;
/// The longest name of a host, in bytes.
const MAX_HOST: usize = 255;
/// The most ranges of a verification.
const MAX_RANGES: usize = 1 << 16;
/// The longest freeze and the most passes that a command line accepts.
const LONGEST_FREEZE: Duration = Duration::from_secs(300);
const MOST_PASSES: u32 = 100;

/// What the replica's side asks of a source's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pull {
    /// The source: a path, an export name or an id, as commands on its own host take them.
    pub source: String,
    /// How it is opened.
    pub open: SourceRequest,
    /// The replica: an absolute path on the side that asks.
    pub replica: PathBuf,
    /// The name of the host that asks.
    pub host: String,
    /// What is to be done.
    pub task: Task,
}

/// What is to be done with a source and a replica.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Task {
    /// Bring the replica up to date.
    Sync(SyncOptions),
    /// Compare it.
    Verify(VerifyOptions),
}

/// How a source is opened where nothing serves or tracks it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceRequest {
    /// Block size of the record in bytes: a power of two from 4 KiB to 1 MiB.
    pub block_size: Option<u32>,
    /// Trust the record of a block device across a stop.
    pub trust_device: bool,
    /// Accept a source smaller than its record.
    pub allow_shrink: bool,
}

/// How a source was opened.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SourceInfo {
    /// Its path on its host.
    pub path: PathBuf,
    /// Its id.
    pub uuid: Uuid,
    /// Block size of its record, in bytes.
    pub block_size: u32,
    /// A server answers for it.
    pub served: bool,
    /// It is a disk tracked in the kernel.
    pub tracked: bool,
    /// Its bytes, and those that its server offers, which was started before it was resized.
    pub resized: Option<(u64, u64)>,
    /// Of an image at rest: the format in which it seems to contain a disk, which is copied as it is.
    pub container: Option<String>,
    /// No epoch is of it yet.
    pub is_new: bool,
}

impl From<&Handle> for SourceInfo {
    fn from(handle: &Handle) -> SourceInfo {
        let about = handle.about();
        SourceInfo {
            path: about.path.clone(),
            uuid: about.uuid,
            block_size: about.block_size,
            served: handle.is_served(),
            tracked: handle.live().is_some(),
            resized: handle.resized(),
            container: handle.container().map(str::to_owned),
            is_new: matches!(handle.last_epoch(), Ok(None)),
        }
    }
}

/// What the replica's side of a pull is given.
#[derive(Clone, Copy)]
pub struct PullContext<'a> {
    /// The state directory of this host.
    pub state: &'a StateDir,
    /// Called when the source is open; an error ends the conversation before anything is moved.
    pub begun: &'a dyn Fn(&SourceInfo) -> Result<(), SyncError>,
    /// Bytes done, bytes in total.
    pub progress: Progress<'a>,
}

/// The other end of a pull, where it is a peer of a listener.
#[derive(Debug, Clone, Copy)]
pub struct PullClient<'a> {
    /// The name under which its key is pinned.
    pub name: &'a str,
    /// The longest freeze of a live disk that it gets.
    pub freeze_limit: Duration,
}

impl Pull {
    /// Brings the replica up to date from the source at the other end of `link`.
    ///
    /// # Errors
    /// As [`push`](crate::push()) on the other side, as [`SyncError::Far`], and for [`receive`](crate::receive()) on this one.
    pub fn sync(&self, link: Link, context: PullContext<'_>) -> Result<Summary, SyncError> {
        self.ask(link, context)
    }

    /// Compares the replica with the source at the other end of `link`.
    ///
    /// # Errors
    /// As [`verify`](crate::verify()) on the other side, as [`SyncError::Far`].
    pub fn verify(&self, link: Link, context: PullContext<'_>) -> Result<Verified, SyncError> {
        self.ask(link, context)
    }

    fn ask<T: DeserializeOwned>(&self, link: Link, context: PullContext<'_>) -> Result<T, SyncError> {
        let (sender, receiver) = link.split();
        let told = heard(&receiver, self.converse(&sender, &receiver, context));
        Ok(end_with(sender, told)?.json()?)
    }

    /// The conversation, to the source's goodbye; its result.
    fn converse(
        &self,
        sender: &Sender,
        receiver: &Receiver,
        context: PullContext<'_>,
    ) -> Result<Message, SyncError> {
        let PullContext { state, begun, progress } = context;
        sender.send_json(PULL, self)?;
        let info: SourceInfo = expect(receiver, SOURCE)?.json()?;
        check_path("the source", Some(&info.path))?;
        begun(&info)?;
        let (own, writes) = match &self.task {
            Task::Sync(options) => (Open::for_sync(&self.replica, options), !options.dry_run),
            Task::Verify(options) => (replica_for_verify(&self.replica, options), options.repair),
        };
        // The source's side says what it is, and nothing else.
        let Ok([said]) = <[Open; 1]>::try_from(Opening::hear(receiver)?.members) else {
            return Err(nonsense("several replicas"));
        };
        let path = own.path.clone();
        let own = Open { source: said.source, origin: said.origin, container: said.container, ..own };
        let asked = Opening { group: None, members: vec![own] };
        let end = ReplicaEnd { sender, receiver, site: Some(state), progress, writes };
        let told =
            end.converse(asked, &|asked| open_here(asked, std::slice::from_ref(&path), state, true))?;
        told.ok_or_else(|| nonsense("no result"))
    }

    /// Receives a request.
    fn hear(receiver: &Receiver) -> Result<Pull, SyncError> {
        let pull: Pull = request(receiver, PULL)?.json()?;
        pull.check()?;
        Ok(pull)
    }

    /// Refuses an invalid request.
    fn check(&self) -> Result<(), SyncError> {
        let wrong = |what: &str| Err(nonsense(what));
        let word = |c: char| c.is_ascii_alphanumeric() || ".-_:[]%".contains(c);
        if self.source.is_empty() || self.source.len() > MAX_SOURCE || self.source.contains('\0') {
            return wrong("the source");
        }
        if self.host.is_empty() || self.host.len() > MAX_HOST || !self.host.chars().all(word) {
            return wrong("the host");
        }
        check_path("the replica", Some(&self.replica))?;
        let sound = |size: u32| size.is_power_of_two() && (4096..=1 << 20).contains(&size);
        if !self.open.block_size.is_none_or(sound) {
            return wrong("the block size");
        }
        match &self.task {
            Task::Sync(options) => {
                let CutOptions { limit, .. } = options.live.cut;
                if !options.compress.is_none_or(|level| (1..=19).contains(&level)) {
                    return wrong("the level of compression");
                }
                if options.live.passes > MOST_PASSES || limit.is_zero() || limit > LONGEST_FREEZE {
                    return wrong("the passes");
                }
            }
            Task::Verify(options) => {
                let sound = |range: &std::ops::Range<u64>| range.start <= range.end && range.end <= MAX_SIZE;
                if options.ranges.len() > MAX_RANGES || !options.ranges.iter().all(sound) {
                    return wrong("the ranges");
                }
                if options.rate.is_some_and(|rate| rate < Scope::LEAST_RATE) {
                    return wrong("the rate");
                }
            }
        }
        Ok(())
    }

    /// The source, if the other side may read it, and in this way.
    fn allowed(&self, allowed: &AllowedPaths) -> Result<String, SyncError> {
        if let AllowedPaths::Anything = allowed {
            return Ok(self.source.clone());
        }
        for (option, given) in [
            ("--block-size", self.open.block_size.is_some()),
            ("--trust-device", self.open.trust_device),
            ("--allow-shrink", self.open.allow_shrink),
        ] {
            if given {
                return Err(SyncError::Refused(format!(
                    "{option} is not allowed for remote clients: omit it"
                )));
            }
        }
        let path = allowed.find(Path::new(&self.source))?;
        path.into_os_string().into_string().map_err(|_| nonsense("the source"))
    }

    /// Does what is asked for, up to the result.
    fn serve(
        mut self,
        (sender, receiver): (&Sender, &Receiver),
        state: &StateDir,
        allowed: &AllowedPaths,
        client: Option<PullClient<'_>>,
    ) -> Result<(), SyncError> {
        let name = client.map_or(&*self.host, |client| client.name);
        let way = Way::Pulled(name.to_owned());
        let options = SourceOptions {
            block_size: self.open.block_size,
            device_trust: DeviceTrust::of(self.open.trust_device),
            allow_shrink: self.open.allow_shrink,
            for_peer: client.is_some(),
            ..SourceOptions::default()
        };
        let handle = attach(state, &self.allowed(allowed)?, &options)?;
        let (path, name) = (&self.replica, self.replica.display().to_string());
        let begun = sender.send_json(SOURCE, &SourceInfo::from(&handle)).map_err(SyncError::from);
        let ends = (sender, receiver);
        match &mut self.task {
            Task::Sync(options) => {
                options.way = way;
                if let Some(client) = client {
                    let cut = &mut options.live.cut;
                    *cut = CutOptions { limit: cut.limit.min(client.freeze_limit), for_peer: true, ..*cut };
                }
                let done = begun.and_then(|()| push_over(ends, &handle, path, &name, options, &|_, _| {}));
                sender.send_json(RESULT, &close(handle, done)?)?;
            }
            Task::Verify(options) => {
                options.way = way;
                let done = begun.and_then(|()| verify_over(ends, &handle, path, &name, options, &|_, _| {}));
                sender.send_json(RESULT, &close(handle, done)?)?;
            }
        }
        Ok(())
    }
}

/// Serves one pull as the source's end of `link`. Errors are reported to the other end too. `client` is the other end, if
/// it is known better than by its own word.
pub fn send(
    link: Link,
    state: &StateDir,
    allowed: &AllowedPaths,
    client: Option<PullClient<'_>>,
) -> Result<(), SyncError> {
    let (sender, receiver) = link.split();
    let pull = Pull::hear(&receiver);
    match pull.and_then(|pull| pull.serve((&sender, &receiver), state, allowed, client)) {
        Ok(()) => part(sender, &receiver, Ok(())),
        Err(error) => {
            report(sender, &receiver, &error);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::error::Class;
    use crate::options::LiveOptions;
    use crate::wire::messages::{Apart, PLAN, Plan, StatusReply};

    const SIZE: usize = 1 << 20;

    struct Place {
        folder: tempfile::TempDir,
        state: StateDir,
    }

    impl Place {
        fn new() -> Place {
            let folder = tempfile::tempdir().unwrap();
            let state = StateDir::find(Some(&folder.path().join("state")));
            std::fs::write(folder.path().join("disk"), vec![7; SIZE]).unwrap();
            Place { folder, state }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn pull(&self, task: Task) -> Pull {
            Pull {
                source: self.path("disk").display().to_string(),
                open: SourceRequest::default(),
                replica: self.path("copy"),
                host: "here".into(),
                task,
            }
        }

        /// Pulls from a source's side that does this.
        fn pull_from(
            &self,
            pull: &Pull,
            source: impl FnOnce(Link) + std::marker::Send + 'static,
        ) -> Result<Summary, SyncError> {
            let (here, there) = Link::pair();
            let far = std::thread::spawn(move || source(there));
            let context = PullContext { state: &self.state, begun: &|_| Ok(()), progress: &|_, _| {} };
            let pulled = pull.sync(here, context);
            far.join().unwrap();
            pulled
        }
    }

    fn sync(options: SyncOptions) -> Task {
        Task::Sync(options)
    }

    #[test]
    fn a_pull_is_a_push_that_the_replica_asks_for() {
        let place = Place::new();
        let state = place.state.clone();
        let summary = place
            .pull_from(&place.pull(sync(SyncOptions::default())), move |link| {
                send(link, &state, &AllowedPaths::Anything, None).unwrap();
            })
            .unwrap();
        assert_eq!((summary.bytes_changed, summary.epoch), (SIZE as u64, Some(1)));
        assert!(std::fs::read(place.path("disk")).unwrap() == std::fs::read(place.path("copy")).unwrap());
    }

    /// A source's side that opens another replica than was asked for, as none does, and then sends a plan.
    fn liar(link: Link, open: Open, plan: Option<Plan>) -> Result<(), SyncError> {
        let (sender, receiver) = link.split();
        expect(&receiver, PULL)?;
        let info = SourceInfo {
            path: "/disk".into(),
            uuid: Uuid::from_u128(1),
            block_size: 4096,
            served: false,
            tracked: false,
            resized: None,
            container: None,
            is_new: false,
        };
        sender.send_json(SOURCE, &info)?;
        let status = crate::wire::messages::open(&sender, &receiver, open, None)?;
        assert!(status.path.ends_with("copy"), "{status:?}");
        if let Some(plan) = plan {
            sender.send_json(PLAN, &plan)?;
            sender.finish()?;
            return StatusReply::hear(&receiver).map(drop);
        }
        sender.finish()?;
        while receiver.recv()?.is_some() {}
        Ok(())
    }

    #[test]
    fn a_source_chooses_neither_the_replica_nor_its_options() {
        let place = Place::new();
        std::fs::write(place.path("victim"), "precious").unwrap();
        let open = Open {
            adopt: true,
            create: true,
            ..Open::new(&place.path("victim"), &Some(place.path("elsewhere")), replica::CommitMode::InPlace)
        };
        let pulled = place.pull_from(&place.pull(sync(SyncOptions::default())), move |link| {
            liar(link, open, None).unwrap();
        });
        // It ended in order, and without a result.
        assert!(pulled.unwrap_err().to_string().contains("no result"));
        assert_eq!(std::fs::read(place.path("victim")).unwrap(), b"precious");
        assert!(!place.path("elsewhere").exists() && !place.path(".victim.dsync").exists());
    }

    #[test]
    fn a_source_writes_nothing_in_a_dry_run() {
        let place = Place::new();
        let compare = Some(Scope::whole(SIZE as u64, 4096));
        let epoch = delta::Epoch { number: 1, id: Uuid::from_u128(1) };
        // Digests are asked for in a dry run, and nothing beside them.
        for plan in [
            Plan { bytes: 1, delta: true, ..Plan::default() },
            Plan { compare: compare.clone(), accept: true, ..Plan::default() },
            Plan { compare: compare.clone(), give_up: Some(Apart { since: None }), ..Plan::default() },
            Plan { compare, release: Some(replica::Released { epoch, term: 1 }), ..Plan::default() },
        ] {
            let open = Open::new(&place.path("copy"), &None, replica::CommitMode::Journal);
            let dry = sync(SyncOptions { dry_run: true, ..SyncOptions::default() });
            let pulled = place.pull_from(&place.pull(dry), move |link| {
                let error = liar(link, open, Some(plan)).unwrap_err();
                assert!(error.to_string().contains("none were asked for"), "{error}");
            });
            assert!(pulled.unwrap_err().to_string().contains("none were asked for"));
        }
    }

    /// What a request gets from a source's side that offers a folder.
    fn asked(place: &Place, pull: &Pull, offer: &Path) -> SyncError {
        let (state, offer) = (place.state.clone(), AllowedPaths::sources(&[offer.to_path_buf()]).unwrap());
        let client = PullClient { name: "peer", freeze_limit: Duration::from_secs(10) };
        place.pull_from(pull, move |link| drop(send(link, &state, &offer, Some(client)))).unwrap_err()
    }

    #[test]
    fn a_request_reaches_what_is_offered_and_nothing_else() {
        let place = Place::new();
        std::fs::create_dir(place.path("offered")).unwrap();
        let of = |source: &str| Pull { source: source.into(), ..place.pull(sync(SyncOptions::default())) };
        let disk = place.path("disk").display().to_string();
        for source in [disk.as_str(), "../disk", "/etc/passwd", "."] {
            let error = asked(&place, &of(source), &place.path("offered"));
            assert!(error.to_string().contains("not allowed for remote clients"), "{source}: {error}");
            assert_eq!(error.class(), Class::Refused);
        }
        let open = |open: SourceRequest| Pull { open, ..of(&disk) };
        for pull in [
            open(SourceRequest { block_size: Some(8192), ..SourceRequest::default() }),
            open(SourceRequest { trust_device: true, ..SourceRequest::default() }),
            open(SourceRequest { allow_shrink: true, ..SourceRequest::default() }),
        ] {
            let error = asked(&place, &pull, &place.path("disk"));
            assert!(error.to_string().contains("not allowed for remote clients"), "{pull:?}: {error}");
        }
        assert!(!place.path("copy").exists());
    }

    #[test]
    fn a_request_that_no_command_makes_is_refused() {
        let place = Place::new();
        let usual = || place.pull(sync(SyncOptions::default()));
        let live = |passes, seconds| {
            let cut = CutOptions { limit: Duration::from_secs(seconds), ..CutOptions::default() };
            place.pull(sync(SyncOptions { live: LiveOptions { passes, cut }, ..SyncOptions::default() }))
        };
        let verify = |options| place.pull(Task::Verify(options));
        let ranges = |ranges| verify(VerifyOptions { ranges, ..VerifyOptions::default() });
        let block = |size| SourceRequest { block_size: Some(size), ..SourceRequest::default() };
        for pull in [
            Pull { source: String::new(), ..usual() },
            Pull { source: "a\0b".into(), ..usual() },
            Pull { source: "x".repeat(5000), ..usual() },
            Pull { host: String::new(), ..usual() },
            Pull { host: "a/b".into(), ..usual() },
            Pull { host: "a\nb".into(), ..usual() },
            Pull { replica: "x".repeat(5000).into(), ..usual() },
            Pull { open: block(0), ..usual() },
            Pull { open: block(5000), ..usual() },
            Pull { open: block(1 << 30), ..usual() },
            place.pull(sync(SyncOptions { compress: Some(99), ..SyncOptions::default() })),
            live(u32::MAX, 10),
            live(8, 0),
            live(8, 1 << 40),
            ranges(vec![Range { start: 8192, end: 4096 }]),
            ranges(std::iter::once(0..u64::MAX).collect()),
            ranges(vec![0..4096; 100_000]),
            verify(VerifyOptions { rate: Some(1), ..VerifyOptions::default() }),
        ] {
            let state = place.state.clone();
            let error = place
                .pull_from(&pull, move |link| drop(send(link, &state, &AllowedPaths::Anything, None)))
                .unwrap_err();
            let text: String = format!("{pull:?}").chars().take(300).collect();
            assert!(error.to_string().contains("invalid message"), "{text}: {error}");
        }
        assert!(!place.path("copy").exists() && !place.path("state/sources").exists());
    }
}
