//! Peers that lie: each side alone with one that says what no dsync would. No panic, a clear error, nothing committed.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use compare::{Claim, DIGEST, Scope};
use delta::{Encoder, Epoch, Frame, Header, Method, Record};
use device::Buf;
use link::{Link, Message, Receiver, Sender};
use source::{Handle, StateDir};
use uuid::Uuid;

use crate::messages::{
    CLAIM, COMMITTED, Committed, HEADER, OPEN, Open, PLAN, Part, Plan, STANDING, Standing, TRAILER, expect,
    of_claim, of_unit,
};
use crate::{Commit, How, Options, VerifyOptions, push, receive, verify};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 3 * MIB;

struct Place {
    folder: tempfile::TempDir,
    state: StateDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::find(Some(&folder.path().join("state")));
        Place { folder, state }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn source(&self) -> Handle {
        let path = self.path("disk");
        std::fs::write(&path, vec![7; SIZE as usize]).unwrap();
        Handle::attach(&self.state, &path.display().to_string(), &source::Options::default()).unwrap()
    }
}

fn standing(source: Uuid) -> Standing {
    let epoch = Epoch { number: 1, id: Uuid::from_u128(1) };
    Standing {
        path: "/replica".into(),
        source: Some(source),
        epoch: Some(epoch),
        positions: vec![Part { epoch: Some(epoch), upto: SIZE }],
        nonce: Uuid::from_u128(2),
        under_way: false,
        resumes: None,
        ahead: false,
        size: SIZE,
        recovered: None,
        changed: None,
        wrong_size: None,
        in_place: false,
    }
}

fn claim(claim: Claim, digests: usize) -> Message {
    of_claim(&claim, &vec![1; digests]).unwrap()
}

/// A replica's side that says these things instead of its digests, and takes whatever comes.
fn liar(link: Link, source: Uuid, says: Vec<Message>) {
    let (sender, receiver): (Sender, Receiver) = link.split();
    let Ok(_) = expect(&receiver, OPEN) else { return };
    let _ = sender.send_json(STANDING, &standing(source));
    let Ok(_) = expect(&receiver, PLAN) else { return };
    for message in says {
        if sender.send(message).is_err() {
            return;
        }
    }
    let _ = sender.finish();
    while let Ok(Some(_)) = receiver.recv() {}
}

#[test]
fn a_lying_replica_is_found_out() {
    let place = Place::new();
    let handle = place.source();
    let uuid = handle.about().uuid;
    let good = |n: u64| claim(Claim::Digests(n * MIB..(n + 1) * MIB), 256 * DIGEST);
    let json = |text: &str| Message { kind: CLAIM, head: text.into(), ..Message::default() };
    let committed = |kind| Message {
        kind,
        head: serde_json::to_vec(&Committed {
            epoch: Epoch { number: 9, id: Uuid::from_u128(9) },
            bytes_written: 0,
            bytes_read: 0,
            digests: None,
        })
        .unwrap(),
        ..Message::default()
    };
    type Lie = (&'static str, Box<dyn Fn() -> Vec<Message>>);
    let lies: Vec<Lie> = vec![
        ("nothing", Box::new(Vec::new)),
        ("too few digests", Box::new(move || vec![claim(Claim::Digests(0..MIB), 7)])),
        ("too many digests", Box::new(move || vec![claim(Claim::Digests(0..4096), 100 * DIGEST)])),
        ("too long a claim", Box::new(move || vec![claim(Claim::Digests(0..3 * MIB), 768 * DIGEST)])),
        ("an overlap", Box::new(move || vec![good(0), good(0)])),
        ("a gap", Box::new(move || vec![good(0), good(2)])),
        ("past the end", Box::new(move || vec![claim(Claim::Zero(0..SIZE + 4096), 0)])),
        ("far past the end", Box::new(move || vec![claim(Claim::Zero(0..u64::MAX), 0)])),
        ("backwards", Box::new(move || vec![claim(Claim::Zero(Range { start: MIB, end: 0 }), 0)])),
        ("an empty claim", Box::new(move || (0..100_000).map(|_| claim(Claim::Zero(0..0), 0)).collect())),
        ("no end", Box::new(move || [0, 1, 2, 3, 4, 5].map(good).into())),
        ("no claim", Box::new(move || vec![json("{\"Zero\":[1,2]}")])),
        ("no JSON", Box::new(move || vec![json("\u{1}")])),
        ("a commit instead", Box::new(move || vec![committed(COMMITTED)])),
        ("another message", Box::new(move || vec![committed(HEADER)])),
    ];
    for (what, lie) in lies {
        for verifying in [false, true] {
            let (here, there) = Link::pair();
            let says = lie();
            let far = std::thread::spawn(move || liar(there, uuid, says));
            let began = Instant::now();
            let path = PathBuf::from("/replica");
            let error = if verifying {
                let options = VerifyOptions { repair: true, ..VerifyOptions::default() };
                // The liar's epoch is none of ours; without it there is nothing to verify against.
                verify(&handle, here, &path, "/replica", &options, &|_, _| {}).map(drop)
            } else {
                let options = Options { how: How::Compare, ..Options::default() };
                push(&handle, here, &path, "/replica", &options, &|_, _| {}).map(drop)
            };
            far.join().unwrap();
            // More claims than there are bytes are ignored once all is accounted for: then it is the commit that is missing.
            let error = error.err().unwrap_or_else(|| panic!("{what}: believed"));
            assert!(!error.to_string().is_empty() && began.elapsed() < Duration::from_secs(20), "{what}");
            assert!(handle.bookmarks().unwrap().0.is_empty(), "{what}: it was taken for a replica");
        }
    }
}

/// A source's side that says these things; what the replica's side makes of it.
fn accuse(place: &Place, open: &Open, says: Vec<Message>) -> Result<(), crate::SyncError> {
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    let (sender, receiver) = here.split();
    sender.send_json(OPEN, open).unwrap();
    let _ = receiver.recv();
    for message in says {
        let _ = sender.send(message);
    }
    let _ = sender.finish();
    while let Ok(Some(_)) = receiver.recv() {}
    far.join().unwrap()
}

#[test]
fn a_lying_source_is_found_out() {
    let place = Place::new();
    let handle = place.source();
    // A sound replica.
    let replica = place.path("copy");
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    push(&handle, here, &replica, "copy", &Options::default(), &|_, _| {}).unwrap();
    let _ = far.join().unwrap();
    let before = std::fs::read(&replica).unwrap();

    let open = |verify| Open {
        path: replica.clone(),
        journal_dir: None,
        commit: Commit::Journal,
        adopt: false,
        create: false,
        verify,
        digests: None,
        source: None,
    };
    let plan = |scope: Scope, delta| Message {
        kind: PLAN,
        head: serde_json::to_vec(&Plan {
            bytes: u64::MAX / 2,
            compare: Some(scope),
            rolling: None,
            delta,
            pass: false,
            mirror: None,
        })
        .unwrap(),
        ..Message::default()
    };
    let whole = Scope::whole(SIZE, 4096);
    let scopes = [
        Scope { block_size: 0, ..whole.clone() },
        Scope { block_size: 3, ..whole.clone() },
        Scope { block_size: u32::MAX, ..whole.clone() },
        Scope { size: u64::MAX, ..whole.clone() },
        Scope { ranges: Some(0..u64::MAX).into_iter().collect(), ..whole.clone() },
        Scope { ranges: vec![4096..8192, 0..4096], ..whole.clone() },
        Scope { rate: Some(0), ..whole.clone() },
    ];
    for scope in scopes {
        let text = format!("{scope:?}");
        let error = accuse(&place, &open(true), vec![plan(scope, false)]).unwrap_err();
        assert!(error.to_string().contains("makes no sense"), "{text}: {error}");
    }
    // A delta that is bound to another state, one that is cut off, and one with a wrong end.
    let header = |nonce| Header {
        stream: Uuid::new_v4(),
        source: handle.about().uuid,
        chain: vec![Epoch { number: 7, id: Uuid::from_u128(7) }],
        size_before: SIZE,
        size_after: SIZE,
        block_size: 4096,
        method: Method::Compare,
        binds: Some(nonce),
        resumes: None,
        fuzzy: false,
        lacking: false,
        ahead: false,
    };
    let nonce = lineage_nonce(&replica);
    for (nonce, frames, end) in
        [(Uuid::from_u128(3), true, true), (nonce, true, false), (nonce, false, false), (nonce, true, true)]
    {
        let (mut encoder, unit) = Encoder::new(&header(nonce), None).unwrap();
        let mut says = vec![plan(whole.clone(), true), of_unit(unit)];
        if frames {
            let frame = Frame {
                records: vec![Record::Data { offset: 0, len: 4096 }],
                data: Buf::from(&[9; 4096][..]),
            };
            says.push(of_unit(encoder.frame(frame).unwrap()));
        }
        if end {
            let mut trailer = encoder.trailer();
            trailer.head[3] ^= 1;
            says.push(of_unit(trailer));
        } else {
            says.push(Message { kind: TRAILER, ..Message::default() });
        }
        accuse(&place, &open(false), says).unwrap_err();
        assert!(std::fs::read(&replica).unwrap() == before);
    }
    // Words that are none.
    for kind in [PLAN, HEADER, 77] {
        let nonsense = Message { kind, head: b"{\"bytes\":-1}".to_vec(), ..Message::default() };
        accuse(&place, &open(true), vec![nonsense]).unwrap_err();
    }
    // It is as good as ever.
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    let found = verify(&handle, here, &replica, "copy", &VerifyOptions::default(), &|_, _| {}).unwrap();
    let _ = far.join().unwrap();
    assert!(!found.differs() && found.trust == "exact", "{found:?}");
}

/// The nonce of a replica's state.
fn lineage_nonce(replica: &std::path::Path) -> Uuid {
    let options = replica::Options::default();
    replica::inspect(replica, &options).unwrap().unwrap().nonce
}
