//! Kills and power cuts while a list of changes is taken: repeated as it was, it is taken once, and without it nothing is trusted.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use delta::Epoch;
use device::{Disk, Identity, RamDisk};
use extents::{Bitmap, Extents};
use source::{
    Backing, Boot, ChangeList, Handle, KnownPosition, Source, SourceError, SourceMetadata, SourceOptions,
    StateDir, Still, Told, ToldChanges,
};
use testing::faulty::{FaultyFolder, Keep, Outage, Power};
use uuid::Uuid;

const BLOCK: u64 = 4096;
const SIZE: u64 = 1 << 20;

/// A disk to which somebody wrote, which its times show.
struct Written {
    identity: Identity,
    boot: String,
    disk: Arc<dyn Disk>,
}

impl Backing for Written {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(self.identity.clone())
    }
    fn boot(&self) -> Boot {
        Boot { id: self.boot.clone(), began: u64::MAX }
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(self.disk.clone())
    }
}

struct Machine {
    temp: tempfile::TempDir,
    identity: Identity,
    uuid: Uuid,
    boots: u32,
    /// The moments are read elsewhere.
    place: Option<PathBuf>,
}

impl Machine {
    fn new(elsewhere: bool) -> Machine {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("image");
        std::fs::write(&file, b"").unwrap();
        std::fs::create_dir(temp.path().join("state")).unwrap();
        let identity = Identity { size: SIZE, ..device::identity(&file).unwrap() };
        let place = elsewhere.then(|| "/snapshot".into());
        let mut machine = Machine { temp, identity, uuid: Uuid::new_v4(), boots: 0, place };
        machine.write(-20);
        machine
    }

    fn write(&mut self, seconds: i64) {
        self.identity.mtime_ns += seconds * 1_000_000_000;
        self.identity.ctime_ns = self.identity.mtime_ns;
    }

    fn open(&self, power: &Power, told: Option<Told>) -> Result<Source, SourceError> {
        let folder = FaultyFolder::new(power, &self.temp.path().join("state"))
            .map_err(|error| SourceError::State { what: "open", path: self.temp.path().into(), error })?;
        let about = SourceMetadata::new(self.uuid, self.identity.clone(), BLOCK as u32);
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(SIZE));
        let boot = format!("boot {}", self.boots);
        let backing = Written { identity: self.identity.clone(), boot, disk: disk.clone() };
        let options = SourceOptions { read_only: true, told, ..SourceOptions::default() };
        Source::over(about, disk, Arc::new(folder), Box::new(backing), &options)
    }

    fn told(&self, name: &str, changes: ToldChanges) -> Option<Told> {
        Some(Told { place: self.place.clone(), name: Some(name.into()), changes, ..Told::default() })
    }

    /// Takes a moment and closes the source. The epoch.
    fn take(&self, power: &Power, told: Option<Told>) -> Result<Epoch, SourceError> {
        let source = self.open(power, told)?;
        let epoch = source.checkpoint(false)?.epoch;
        source.close()?;
        Ok(epoch)
    }

    /// Blocks that changed since an epoch; `None` if that is not known.
    fn changed(&self, since: Epoch) -> Option<Vec<u64>> {
        let power = Power::new(Outage::Kill);
        let folder = FaultyFolder::new(&power, &self.temp.path().join("state")).unwrap();
        let history = source::History::read(&folder).unwrap();
        let changes = Bitmap::new(SIZE / BLOCK);
        let position = KnownPosition { epoch: since, upto: SIZE };
        history.changes_since(&[position], BLOCK as u32, &changes).ok()?;
        Some(changes.runs().flatten().collect())
    }
}

fn list(since: &str, block: u64) -> ToldChanges {
    let ranges = Extents::from(block * BLOCK..(block + 1) * BLOCK);
    ToldChanges::List(ChangeList { since: since.into(), ranges, size: None, one_size: false })
}

/// A list is taken, and the power goes at a step. False if it did not.
fn crash(at: u64, outage: Outage, keep: Keep, elsewhere: bool, again: bool) -> bool {
    let mut machine = Machine::new(elsewhere);
    let calm = || Power::new(Outage::Kill);
    let first = machine.take(&calm(), machine.told("s0", ToldChanges::Unknown)).unwrap();
    machine.write(1);
    let power = Power::new(outage);
    power.cut_at(at);
    let _ = machine.take(&power, machine.told("s1", list("s0", 7)));
    let was_cut = power.is_cut();
    power.crash(Keep::KeepAll, keep, at).unwrap();
    machine.boots += u32::from(matches!(outage, Outage::PowerCut));
    let told = if again { machine.told("s1", list("s0", 7)) } else { None };
    let said = format!("cut at {at}, {outage:?}, {keep:?}, elsewhere: {elsewhere}, again: {again}");
    let taken = machine.take(&calm(), told).unwrap_or_else(|error| panic!("{said}: {error}"));
    match machine.changed(first) {
        Some(blocks) => assert_eq!(blocks, [7], "{said}"),
        // One that is read at its path may have been written to since.
        None => assert!(!again || !elsewhere, "{said}: not known"),
    }
    if again {
        machine.write(1);
        machine
            .take(&calm(), machine.told("s2", list("s1", 9)))
            .unwrap_or_else(|error| panic!("{said}: {error}"));
        assert_eq!(machine.changed(taken), Some(vec![9]), "{said}");
    }
    was_cut
}

#[test]
fn a_list_that_was_cut_off_is_taken_again_and_trusted_by_nobody_without_it() {
    let lose = Keep::LoseUnsynced;
    for (outage, keep, elsewhere, again) in [
        (Outage::Kill, Keep::KeepAll, true, true),
        (Outage::Kill, Keep::KeepAll, false, false),
        (Outage::PowerCut, lose, false, true),
        (Outage::PowerCut, lose, true, false),
    ] {
        let cuts = (1..).take_while(|at| crash(*at, outage, keep, elsewhere, again)).count();
        assert!(cuts > 5, "{cuts} steps");
    }
}

#[test]
fn of_a_group_what_does_not_fit_is_compared_and_never_refused() {
    let mut machine = Machine::new(true);
    let calm = || Power::new(Outage::Kill);
    let first = machine.take(&calm(), machine.told("s0", ToldChanges::Unknown)).unwrap();
    machine.write(1);
    let of_group = |told: Option<Told>| told.map(|told| Told { group: Some("g".into()), ..told });
    // A list from another moment.
    let wrong = machine.told("s1", list("s9", 7));
    assert!(matches!(machine.take(&calm(), wrong.clone()), Err(SourceError::Refused(_))));
    let second = machine.take(&calm(), of_group(wrong)).unwrap();
    assert_eq!(machine.changed(first), None);
    // Nobody knows, and says why.
    let lost = machine.told("s2", ToldChanges::Lost("it is raw".into()));
    let source = machine.open(&calm(), of_group(lost)).unwrap();
    assert_eq!(source.lost().map(|why| why.to_string()).as_deref(), Some("it is raw"));
    let third = source.checkpoint(false).unwrap().epoch;
    source.close().unwrap();
    assert_eq!(machine.changed(second), None);
    // One that fits.
    machine.take(&calm(), of_group(machine.told("s3", list("s2", 9)))).unwrap();
    assert_eq!(machine.changed(third), Some(vec![9]));
}

/// Who shows a moment may end that while it is read, and show the present.
#[test]
fn what_was_read_counts_only_while_its_moment_is_shown() {
    let temp = tempfile::tempdir().unwrap();
    let [image, moment] = ["vm.raw", "moment.raw"].map(|name| temp.path().join(name));
    for file in [&image, &moment] {
        std::fs::File::create(file).unwrap().set_len(1 << 20).unwrap();
    }
    let shown = Arc::new(AtomicBool::new(true));
    let asked = shown.clone();
    let ended = move || if asked.load(SeqCst) { Ok(()) } else { Err(std::io::Error::other("it has ended")) };
    let still = Some(Still(Arc::new(ended)));
    let told = Some(Told { place: Some(moment), name: Some("m".into()), still, ..Told::default() });
    let options = SourceOptions { told, ..SourceOptions::default() };
    let state = StateDir::find(Some(&temp.path().join("state")));
    let handle = Handle::attach(&state, &image.to_string_lossy(), &options).unwrap();
    let view = handle.view(false).unwrap();
    view.verify().unwrap();
    shown.store(false, SeqCst);
    assert_eq!(view.verify().unwrap_err().to_string(), "it has ended");
}
