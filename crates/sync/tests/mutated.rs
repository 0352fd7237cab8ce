//! Conversations on whose way some messages are changed, as a peer with a pinned key may send them: numbers and names that no dsync
//! says, bytes that are no message, messages twice or not at all. Both ends come to an end, without a panic; nothing but the
//! replica is written to; and the next sync brings that up to date, or is refused.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use device::Buf;
use link::{Link, Message, Received, Receiver, Sender};
use serde_json::{Value, json};
use source::{Handle, SourceOptions, StateDir};
use sync::{
    AllowedPaths, CommitMode, Method, Pull, PullClient, PullContext, SourceRequest, SyncError, SyncOptions,
    Task, VerifyOptions, push, receive_within, send, verify,
};
use testing::{Random, rounds};

const SIZE: usize = 300_000;
/// A line on which nothing moves for so long is cut: each end may wait for what was left out.
const STILL: Duration = Duration::from_millis(500);

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// One of the values that JSON can have, near the edges.
fn value(random: &mut Random) -> Value {
    let numbers = [0, 1, 511, 4096, 1 << 20, 1 << 32, 1 << 40, i64::MAX as u64, u64::MAX];
    let texts = ["", "copy", "../outside", "/etc/hostname", ".copy.dsync/lineage", "a\n\u{1b}[2J", "\0"];
    match random.below(8) {
        0 => Value::Null,
        1 => json!([]),
        2 => json!({}),
        3 => json!(random.coin()),
        4 => json!(-1),
        5 => json!(random.pick(&texts)),
        _ => json!(random.pick(&numbers)),
    }
}

/// Changes one place of it.
fn change(at: &mut Value, random: &mut Random) {
    match at {
        Value::Object(map) if !map.is_empty() && !random.one_in(8) => {
            let key = map.keys().nth(random.index(map.len())).cloned().expect("a key");
            match random.one_in(8) {
                true => drop(map.remove(&key)),
                false => change(&mut map[&key], random),
            }
        }
        Value::Array(list) if !list.is_empty() && !random.one_in(8) => {
            let which = random.index(list.len());
            match random.one_in(4) {
                true => list.push(list[which].clone()),
                false => change(&mut list[which], random),
            }
        }
        // Often only a little.
        Value::Number(number) if number.as_u64().is_some() && random.coin() => {
            let number = number.as_u64().unwrap_or(0);
            *at = json!(if random.coin() { number.wrapping_add(1) } else { number.saturating_sub(1) });
        }
        _ => *at = value(random),
    }
}

fn garble(bytes: &mut [u8], random: &mut Random) {
    if !bytes.is_empty() {
        let at = random.index(bytes.len());
        bytes[at] ^= 1 << random.below(8);
    }
}

/// The messages that arrive in place of one.
fn mutated(mut message: Message, random: &mut Random) -> Vec<Message> {
    let json = serde_json::from_slice::<Value>(&message.head).ok().filter(|value| !value.is_number());
    match (json, random.below(10)) {
        (_, 0) => return vec![],
        (_, 1) => {
            let (head, body) = (message.head.clone(), Buf::from(&message.body[..]));
            return vec![Message { kind: message.kind, head, body }, message];
        }
        (_, 2) => message.kind = random.below(32) as u8,
        (_, 3) => {
            let len = random.index(message.body.len() + 1);
            message.body.set_len(len);
        }
        (Some(mut value), 4..) => {
            change(&mut value, random);
            message.head = serde_json::to_vec(&value).expect("JSON");
        }
        (_, 4..=6) => garble(&mut message.head, random),
        _ => garble(&mut message.body, random),
    }
    vec![message]
}

/// Carries messages one way, and changes some.
fn carry(from: Receiver, to: Sender, mut random: Random) {
    let mut left = 2;
    loop {
        match from.recv_within(STILL) {
            Ok(Received::Message(message)) => {
                let changes = left > 0 && random.one_in(8);
                left -= u32::from(changes);
                let arrive = if changes { mutated(message, &mut random) } else { vec![message] };
                if arrive.into_iter().any(|message| to.send(message).is_err()) {
                    return;
                }
            }
            Ok(Received::Goodbye) => return drop(to.finish()),
            Ok(Received::Nothing) | Err(_) => return,
        }
    }
}

struct Place {
    folder: tempfile::TempDir,
    state: StateDir,
    allowed: AllowedPaths,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("into")).expect("a folder");
        std::fs::write(path("outside"), "precious").expect("a file");
        let (state, allowed) =
            (StateDir::find(Some(&path("state"))), AllowedPaths::replicas(&[path("into")]));
        Place { state, allowed: allowed.expect("a folder"), folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Does something with a receiving end.
    fn push<T>(&self, dice: Option<&mut Random>, act: impl FnOnce(&Handle, Link) -> T) -> T {
        let disk = self.path("disk").display().to_string();
        let handle = Handle::attach(&self.state, &disk, &SourceOptions::default()).expect("a source");
        let receive = |link| drop(receive_within(link, &self.state, &self.allowed));
        let result = converse(dice, receive, |link| act(&handle, link));
        drop(handle.close());
        result
    }

    /// Has the replica's side ask for it. True if it got it.
    fn pull(&self, dice: &mut Random, task: Task) -> bool {
        let offered = AllowedPaths::sources(&[self.path("disk")]).expect("a disk");
        let client = PullClient { name: "peer", freeze_limit: Duration::from_secs(1) };
        let (source, replica) = (self.path("disk").display().to_string(), self.path("into/copy"));
        let verifies = matches!(task, Task::Verify(_));
        let pull = Pull { source, open: SourceRequest::default(), replica, host: "here".into(), task };
        let offer = |link| drop(send(link, &self.state, &offered, Some(client)));
        converse(Some(dice), offer, |link| {
            let context = PullContext { state: &self.state, begun: &|_| Ok(()), progress: &|_, _| {} };
            match verifies {
                true => pull.verify(link, context).is_ok(),
                false => pull.sync(link, context).is_ok(),
            }
        })
    }
}

/// Both ends of a line that is changed by the dice, or is not.
fn converse<T>(dice: Option<&mut Random>, far: impl FnOnce(Link) + Send, near: impl FnOnce(Link) -> T) -> T {
    let (near_link, near_end) = Link::pair();
    std::thread::scope(|scope| {
        let Some(dice) = dice else {
            scope.spawn(|| far(near_end));
            return near(near_link);
        };
        let (far_end, far_link) = Link::pair();
        let ((near_tx, near_rx), (far_tx, far_rx)) = (near_end.split(), far_end.split());
        let (one, other) = (dice.fork(), dice.fork());
        scope.spawn(|| far(far_link));
        scope.spawn(|| carry(near_rx, far_tx, one));
        scope.spawn(|| carry(far_rx, near_tx, other));
        near(near_link)
    })
}

fn sync(place: &Place, dice: Option<&mut Random>, options: &SyncOptions) -> Result<(), SyncError> {
    place.push(dice, |handle, link| {
        push(handle, link, Path::new("copy"), "copy", options, &|_, _| {}).map(drop)
    })
}

#[test]
fn whatever_is_said_both_ends_come_to_an_end() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.lock().expect("a list").push(info.to_string());
        usual(info);
    }));
    let mut random = Random::new("changed conversations");
    let (mut done, mut broken, count) = (0, 0, rounds(8, 5_000));
    for round in 0..count {
        let place = Place::new();
        let mut disk = random.bytes(SIZE);
        std::fs::write(place.path("disk"), &disk).expect("a disk");
        if !random.one_in(4) {
            sync(&place, None, &SyncOptions::default()).expect("a first copy");
            for _ in 0..random.below(5) {
                let at = random.index(SIZE);
                disk[at] ^= 1;
            }
            std::fs::write(place.path("disk"), &disk).expect("a disk");
        }
        let method = [None, Some(Method::Copy), Some(Method::Compare), Some(Method::Rolling)];
        let commit = random.pick(&[CommitMode::Journal, CommitMode::InPlace]);
        let options = SyncOptions { method: random.pick(&method), commit, ..SyncOptions::default() };
        let repair = VerifyOptions { repair: random.coin(), commit, ..VerifyOptions::default() };
        broken += usize::from(!match random.below(6) {
            0 => place.push(Some(&mut random), |handle, link| {
                verify(handle, link, Path::new("copy"), "copy", &repair, &|_, _| {}).is_ok()
            }),
            1 => place.pull(&mut random, Task::Verify(repair)),
            2 | 3 => place.pull(&mut random, Task::Sync(options)),
            _ => sync(&place, Some(&mut random), &options).is_ok(),
        });
        let kept = std::fs::read(place.path("outside")).expect("a file");
        assert!(kept == b"precious" && std::fs::read(place.path("disk")).expect("a disk") == disk);
        if sync(&place, None, &SyncOptions::default()).is_ok() {
            done += 1;
            let copy = std::fs::read(place.path("into/copy")).expect("a replica");
            assert!(copy == disk, "round {round}: the replica is not its source");
        }
        let panics = std::mem::take(&mut *PANICS.lock().expect("a list"));
        assert!(panics.is_empty(), "round {round}: {panics:?}");
    }
    println!("{broken} of {count} failed, {done} were brought up to date next");
    assert!(broken > 0 && done > count / 2);
}
