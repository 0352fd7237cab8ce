//! Peers that lie: each side alone with one that says what no dsync would. No panic, a clear error, nothing committed.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use compare::rolling::SumParams;
use compare::{DIGEST, DigestReport, Scope};
use delta::{Encoder, Epoch, Frame, Header, Method, Record};
use device::Buf;
use link::{Link, Message, Receiver, Sender};
use source::{Handle, StateDir};
use uuid::Uuid;

use crate::plan::Knowledge;
use crate::wire::messages::{
    CLAIM, COMMITTED, CommitReply, HEADER, MirrorPlan, OPEN, Open, Opening, PLAN, Plan, STATUS, StatusReply,
    TRAILER, expect, of_digest_report, of_unit,
};
use crate::{CommitMode, SyncOptions, VerifyOptions, push, receive, verify};

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
        Handle::attach(&self.state, &path.display().to_string(), &source::SourceOptions::default()).unwrap()
    }
}

fn status(source: Uuid) -> StatusReply {
    let epoch = Epoch { number: 1, id: Uuid::from_u128(1) };
    let replica = replica::Status { nonce: Uuid::from_u128(2), ..replica::Status::at(source, epoch, SIZE) };
    StatusReply { path: "/replica".into(), ..StatusReply::of(replica) }
}

fn report(report: DigestReport, digests: usize) -> Message {
    of_digest_report(&report, &vec![1; digests]).unwrap()
}

/// A replica's side that says these things instead of its digests, and takes whatever comes.
fn liar(link: Link, source: Uuid, says: Vec<Message>) {
    let (sender, receiver): (Sender, Receiver) = link.split();
    let Ok(_) = expect(&receiver, OPEN) else { return };
    let _ = sender.send_json(STATUS, &status(source));
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
    let good = |n: u64| report(DigestReport::Digests(n * MIB..(n + 1) * MIB), 256 * DIGEST);
    let json = |text: &str| Message { kind: CLAIM, head: text.into(), ..Message::default() };
    let committed = |kind| Message {
        kind,
        head: serde_json::to_vec(&CommitReply::nothing_written(Epoch { number: 9, id: Uuid::from_u128(9) }))
            .unwrap(),
        ..Message::default()
    };
    type Lie = (&'static str, Box<dyn Fn() -> Vec<Message>>);
    let lies: Vec<Lie> = vec![
        ("nothing", Box::new(Vec::new)),
        ("too few digests", Box::new(move || vec![report(DigestReport::Digests(0..MIB), 7)])),
        ("too many digests", Box::new(move || vec![report(DigestReport::Digests(0..4096), 100 * DIGEST)])),
        (
            "too long a report",
            Box::new(move || vec![report(DigestReport::Digests(0..3 * MIB), 768 * DIGEST)]),
        ),
        ("an overlap", Box::new(move || vec![good(0), good(0)])),
        ("a gap", Box::new(move || vec![good(0), good(2)])),
        ("past the end", Box::new(move || vec![report(DigestReport::Zero(0..SIZE + 4096), 0)])),
        ("far past the end", Box::new(move || vec![report(DigestReport::Zero(0..u64::MAX), 0)])),
        ("backwards", Box::new(move || vec![report(DigestReport::Zero(Range { start: MIB, end: 0 }), 0)])),
        (
            "an empty report",
            Box::new(move || (0..100_000).map(|_| report(DigestReport::Zero(0..0), 0)).collect()),
        ),
        ("no end", Box::new(move || [0, 1, 2, 3, 4, 5].map(good).into())),
        ("no report", Box::new(move || vec![json("{\"Zero\":[1,2]}")])),
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
                let options = SyncOptions { method: Some(Method::Compare), ..SyncOptions::default() };
                push(&handle, here, &path, "/replica", &options, &|_, _| {}).map(drop)
            };
            far.join().unwrap();
            // More reports than there are bytes are ignored once all is accounted for: then it is the commit that is missing.
            let error = error.err().unwrap_or_else(|| panic!("{what}: believed"));
            assert!(!error.to_string().is_empty() && began.elapsed() < Duration::from_secs(20), "{what}");
            assert!(handle.bookmarks().unwrap().0.is_empty(), "{what}: it was taken for a replica");
        }
    }
}

/// What a sync and a verification make of a far side that answers the greeting with this.
fn greeted(handle: &Handle, kind: u8, head: &serde_json::Value, method: Option<Method>) -> Vec<String> {
    let head = serde_json::to_vec(head).unwrap();
    let tries = [false, true].map(|verifying| {
        let (here, there) = Link::pair();
        let head = head.clone();
        let far = std::thread::spawn(move || {
            let (sender, receiver) = there.split();
            let Ok(_) = expect(&receiver, OPEN) else { return };
            let _ = sender.send(Message { kind, head, ..Message::default() });
            let _ = sender.finish();
            while let Ok(Some(_)) = receiver.recv() {}
        });
        let path = PathBuf::from("/replica");
        let result = if verifying {
            verify(handle, here, &path, "/replica", &VerifyOptions::default(), &|_, _| {}).map(drop)
        } else {
            let options = SyncOptions { method, ..SyncOptions::default() };
            push(handle, here, &path, "/replica", &options, &|_, _| {}).map(drop)
        };
        far.join().unwrap();
        result.unwrap_err().to_string()
    });
    tries.into()
}

#[test]
fn what_no_replica_says_of_itself_is_refused_where_it_is_heard() {
    let place = Place::new();
    let handle = place.source();
    let sound = serde_json::to_value(status(handle.about().uuid)).unwrap();
    let with = |field: &str, value: serde_json::Value| {
        let mut status = sound.clone();
        status[field] = value;
        status
    };
    let part = |upto: u64| serde_json::json!({"epoch": null, "upto": upto});
    let many: Vec<serde_json::Value> = (0..70_000).map(part).collect();
    for (what, lie) in [
        ("too large", with("size", u64::MAX.into())),
        ("a part past every end", with("positions", vec![part(u64::MAX)].into())),
        ("parts that go back", with("positions", vec![part(4096), part(0)].into())),
        ("parts of nothing", with("positions", vec![part(4096), part(4096)].into())),
        ("too many parts", with("positions", many.into())),
        ("too long a path", with("path", format!("/{}", "x".repeat(5000)).into())),
        ("no path", with("path", "/a\0b".into())),
    ] {
        for error in greeted(&handle, STATUS, &lie, None) {
            assert!(error.contains("invalid message"), "{what}: {error}");
        }
    }
}

#[test]
fn what_the_other_side_says_does_nothing_to_a_terminal() {
    let place = Place::new();
    let handle = place.source();
    let evil = format!("\u{1b}]0;owned\u{7}\u{1b}[2J\nforged: all is well\r\u{9b}31m{}", "x".repeat(1 << 20));
    let harmless = |text: &str| {
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(text.len() < 5000, "{} bytes", text.len());
        assert!(text.contains("owned"), "{text:?}");
    };
    let failed = serde_json::json!({"message": evil, "class": "failed"});
    // Its lines are kept, and indented where they are printed.
    let told = greeted(&handle, crate::wire::messages::FAILED, &failed, None);
    told.iter().for_each(|text| harmless(&text.replace('\n', " ")));
    let mut lie = status(handle.about().uuid);
    (lie.replica.recovered, lie.replica.changed) = (Some(evil.clone()), Some(evil));
    let (here, there) = Link::pair();
    let (sender, receiver) = there.split();
    sender.send_json(STATUS, &lie).unwrap();
    let (_here, hears) = here.split();
    let heard = StatusReply::hear(&hears).unwrap();
    harmless(&heard.replica.recovered.unwrap());
    harmless(&heard.replica.changed.unwrap());
    // What a parser quotes of it, too.
    let text = b"{\"path\":\"/\",\"\x1b[31mowned\n\":1,\"size\":\"\x1b[31mowned\n\"}".to_vec();
    sender.send(Message { kind: STATUS, head: text, ..Message::default() }).unwrap();
    let error = StatusReply::hear(&hears).map(drop).unwrap_err().to_string();
    assert!(!error.contains(char::is_control), "{error:?}");
    drop(receiver);
}

/// A step to an epoch of which the source knows nothing was left off: no record of the source has what it brought.
#[test]
fn what_an_unknown_epoch_brought_is_compared() {
    let place = Place::new();
    let handle = place.source();
    let epoch = handle.name_checkpoint("here", None).unwrap();
    let knowledge = |toward| {
        let replica = replica::Status { toward, ..replica::Status::at(handle.about().uuid, epoch, SIZE) };
        let status = StatusReply { replica, ..status(handle.about().uuid) };
        crate::plan::facts::facts(&handle, &status, "/replica", &SyncOptions::default()).unwrap().history
    };
    assert!(
        matches!(knowledge(None), Knowledge::Known) && matches!(knowledge(Some(epoch)), Knowledge::Known)
    );
    let unknown = Epoch { number: epoch.number + 1, id: Uuid::from_u128(9) };
    assert!(matches!(knowledge(Some(unknown)), Knowledge::Lost(_)));
}

#[test]
fn another_epoch_than_the_one_sent_is_not_taken_for_committed() {
    let place = Place::new();
    let handle = place.source();
    let uuid = handle.about().uuid;
    let (here, there) = Link::pair();
    let far = std::thread::spawn(move || {
        let (sender, receiver) = there.split();
        let Ok(_) = expect(&receiver, OPEN) else { return };
        let nothing = {
            let replica = replica::Status { source: Some(uuid), ..replica::Status::nothing() };
            StatusReply { replica, ..status(uuid) }
        };
        let _ = sender.send_json(STATUS, &nothing);
        while receiver.recv().is_ok_and(|message| message.is_some_and(|message| message.kind != TRAILER)) {}
        let epoch = Epoch { number: 9, id: Uuid::from_u128(9) };
        let _ = sender.send_json(COMMITTED, &CommitReply::nothing_written(epoch));
        let _ = sender.finish();
        while let Ok(Some(_)) = receiver.recv() {}
    });
    let pushed =
        push(&handle, here, &PathBuf::from("/replica"), "/replica", &SyncOptions::default(), &|_, _| {});
    far.join().unwrap();
    let error = pushed.unwrap_err().to_string();
    assert!(error.contains("committed epoch 9, which was not sent"), "{error}");
    assert!(handle.bookmarks().unwrap().0.is_empty());
}

#[test]
fn sums_of_more_than_the_source_could_use_are_refused() {
    let place = Place::new();
    let handle = place.source();
    let uuid = handle.about().uuid;
    let told = |told: compare::rolling::SumReport, bytes: usize| Message {
        kind: crate::wire::messages::SUMS,
        head: serde_json::to_vec(&told).unwrap(),
        body: Buf::new(bytes),
    };
    let (here, there) = Link::pair();
    let far = std::thread::spawn(move || {
        let (sender, receiver) = there.split();
        let Ok(_) = expect(&receiver, OPEN) else { return };
        let mut large = status(uuid);
        large.replica.size = i64::MAX as u64;
        let _ = sender.send_json(STATUS, &large);
        let Ok(_) = expect(&receiver, PLAN) else { return };
        // Few bytes said, and gigabytes to be kept of them.
        let _ = sender.send(told(compare::rolling::SumReport::Zero(0..1 << 44), 0));
        let _ = sender.send(told(
            compare::rolling::SumReport::Sums(1 << 44..(1 << 44) + (128 << 10)),
            compare::rolling::SUMS,
        ));
        let _ = sender.finish();
        while let Ok(Some(_)) = receiver.recv() {}
    });
    // What it holds is of no history that the source knows.
    let method = Some(Method::Rolling);
    let options = SyncOptions { method, adopt: true, overwrite: true, ..SyncOptions::default() };
    let pushed = push(&handle, here, &PathBuf::from("/replica"), "/replica", &options, &|_, _| {});
    far.join().unwrap();
    let error = pushed.unwrap_err().to_string();
    assert!(error.contains("sums of the peer are out of order at byte 0"), "{error}");
}

/// A source's side that says these things; what the replica's side makes of it.
fn accuse(place: &Place, open: Open, says: Vec<Message>) -> Result<(), crate::SyncError> {
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    let (sender, receiver) = here.split();
    sender.send_json(OPEN, &Opening { group: None, members: vec![open] }).unwrap();
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
    push(&handle, here, &replica, "copy", &SyncOptions::default(), &|_, _| {}).unwrap();
    let _ = far.join().unwrap();
    let before = std::fs::read(&replica).unwrap();

    let open = |verify| Open { verify, ..Open::new(&replica, &None, CommitMode::Journal) };
    let plan = |scope: Scope, delta| Message {
        kind: PLAN,
        head: serde_json::to_vec(&Plan {
            bytes: u64::MAX / 2,
            compare: Some(scope),
            delta,
            ..Plan::default()
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
        let error = accuse(&place, open(true), vec![plan(scope, false)]).unwrap_err();
        assert!(error.to_string().contains("invalid message"), "{text}: {error}");
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
        batch: false,
        partial: false,
        lives: lineage::Lives::default(),
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
        accuse(&place, open(false), says).unwrap_err();
        assert!(std::fs::read(&replica).unwrap() == before);
    }
    // Words that are none.
    for kind in [PLAN, HEADER, 77] {
        let nonsense = Message { kind, head: b"{\"bytes\":-1}".to_vec(), ..Message::default() };
        accuse(&place, open(true), vec![nonsense]).unwrap_err();
    }
    // It is as good as ever.
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    let found = verify(&handle, here, &replica, "copy", &VerifyOptions::default(), &|_, _| {}).unwrap();
    let _ = far.join().unwrap();
    assert!(!found.differs() && found.trust == "exact", "{found:?}");
}

#[test]
fn what_no_source_plans_is_refused_where_it_is_heard() {
    let place = Place::new();
    let handle = place.source();
    let replica = place.path("copy");
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    push(&handle, here, &replica, "copy", &SyncOptions::default(), &|_, _| {}).unwrap();
    far.join().unwrap().unwrap();
    let before = std::fs::read(&replica).unwrap();
    let message = |plan: &Plan| {
        vec![Message { kind: PLAN, head: serde_json::to_vec(plan).unwrap(), ..Message::default() }]
    };
    let open = |path: PathBuf| Open::new(&path, &None, CommitMode::Journal);
    let params = SumParams { size: SIZE, block: 2048, key: [1; 32], keep_going: false };
    let rolling = |params: SumParams| Plan { rolling: Some(params), delta: true, ..Plan::default() };
    let ranges = (0..100_000).map(|n| n * 8192..n * 8192 + 4096).collect();
    let compare = Scope { size: 1 << 40, ranges, ..Scope::whole(SIZE, 4096) };
    for plan in [
        Plan { bytes: u64::MAX, delta: true, ..Plan::default() },
        rolling(SumParams { block: 0, ..params.clone() }),
        rolling(SumParams { block: 3, ..params.clone() }),
        rolling(SumParams { block: 1 << 31, ..params.clone() }),
        rolling(SumParams { size: u64::MAX, ..params }),
        Plan { compare: Some(compare), delta: true, ..Plan::default() },
        Plan { compare: Some(Scope { rate: Some(1), ..Scope::whole(SIZE, 4096) }), ..Plan::default() },
        // Nobody has consented to that.
        Plan { give_up: Some(crate::wire::messages::Apart { since: Some(1) }), ..Plan::default() },
    ] {
        let text: String = format!("{plan:?}").chars().take(300).collect();
        let error = accuse(&place, open(replica.clone()), message(&plan)).unwrap_err().to_string();
        assert!(error.contains("invalid message"), "{text}: {error}");
    }
    for path in ["x".repeat(5000), "a\0b".into()] {
        let error = accuse(&place, open(path.into()), Vec::new()).unwrap_err().to_string();
        assert!(error.contains("is not a path"), "{error}");
    }
    assert!(std::fs::read(&replica).unwrap() == before);
}

#[test]
fn a_plan_for_more_threads_than_any_machine_has_is_carried_out_with_fewer() {
    let place = Place::new();
    let handle = place.source();
    let replica = place.path("copy");
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    push(&handle, here, &replica, "copy", &SyncOptions::default(), &|_, _| {}).unwrap();
    far.join().unwrap().unwrap();
    // Enough to tell, and few enough to do no harm where they are all begun.
    let stages = crate::Stages { workers: Some(1500), overlap: true };
    let plan = Plan { delta: true, mirror: Some(MirrorPlan { stages }), ..Plan::default() };
    let (here, there) = Link::pair();
    let state = place.state.clone();
    let far = std::thread::spawn(move || receive(there, &state));
    let (sender, receiver) = here.split();
    let members = vec![Open::new(&replica, &None, CommitMode::Journal)];
    sender.send_json(OPEN, &Opening { group: None, members }).unwrap();
    let _ = receiver.recv();
    sender.send_json(PLAN, &plan).unwrap();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let until = Instant::now() + Duration::from_secs(1);
    let mut most = 0;
    while Instant::now() < until {
        most = most.max(threads());
        std::thread::sleep(Duration::from_millis(10));
    }
    sender.finish().unwrap();
    while let Ok(Some(_)) = receiver.recv() {}
    far.join().unwrap().unwrap();
    assert!((2..1000).contains(&most), "{most} threads");
}

/// A peer that says that its disk is large has not sent anything yet.
#[test]
fn digests_take_room_for_what_was_sent_and_not_for_what_was_said() {
    use std::os::unix::fs::MetadataExt;
    let (place, size) = (Place::new(), 16 << 30);
    let replica = place.path("copy");
    let digests = Some(crate::wire::digests::Digests { file: None, hash: compare::Hash::Xxh3 });
    let open = || Open { digests: digests.clone(), ..Open::new(&replica, &None, CommitMode::Journal) };
    let epoch = Epoch { number: 1, id: Uuid::from_u128(1) };
    let header = Header::new(Uuid::from_u128(2), Method::Copy, vec![epoch], (0, size), 512);
    let says = || {
        let (mut encoder, first) = Encoder::new(&header, None).unwrap();
        let records = vec![Record::Data { offset: 8 << 30, len: 512 }];
        let data = Frame { records, data: Buf::from(&[7; 512][..]) };
        let plan = Plan { delta: true, ..Plan::default() };
        let plan = Message { kind: PLAN, head: serde_json::to_vec(&plan).unwrap(), ..Message::default() };
        let data = of_unit(encoder.frame(data).unwrap());
        vec![plan, of_unit(first), data, of_unit(encoder.trailer())]
    };
    let file = place.path(".copy.dsync/digests");
    // It goes away in the middle, and comes back.
    let gone = accuse(&place, open(), says().into_iter().take(2).collect()).unwrap_err().to_string();
    assert!(gone.contains("ended the transfer early"), "{gone}");
    let taken = || std::fs::metadata(&file).unwrap().blocks() * 512;
    assert!(taken() < MIB, "{} bytes", taken());
    accuse(&place, open(), says()).unwrap();
    assert!(taken() < MIB, "{} bytes", taken());
}

/// The nonce of a replica's state.
fn lineage_nonce(replica: &std::path::Path) -> Uuid {
    let options = replica::ReplicaOptions::default();
    replica::inspect(replica, &options).unwrap().unwrap().nonce
}
