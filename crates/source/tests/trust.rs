//! When a record is believed again, and when it is not: real files, real times.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use device::{Disk, Identity};
use extents::Bitmap;
use source::{
    Backing, Boot, Handle, KnownPosition, Source, SourceError, SourceMetadata, SourceOptions, StateDir,
};

const BLOCK: u64 = 4096;
const SIZE: u64 = 256 * BLOCK;

struct Scene {
    _temp: tempfile::TempDir,
    image: PathBuf,
    state: StateDir,
}

impl Scene {
    fn new() -> Scene {
        let temp = tempfile::tempdir().unwrap();
        let image = temp.path().join("vm.raw");
        std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
        let state = StateDir::find(Some(&temp.path().join("state")));
        Scene { _temp: temp, image, state }
    }

    fn open(&self) -> Source {
        Source::open(&self.state, &self.image, &SourceOptions::default()).unwrap()
    }

    fn foreign_write(&self) {
        let file = std::fs::File::options().write(true).open(&self.image).unwrap();
        file.write_all_at(b"not through the server", 77 * BLOCK).unwrap();
    }
}

fn since(source: &Source, position: KnownPosition) -> Result<Vec<u64>, SourceError> {
    let changes = Bitmap::new(SIZE / BLOCK);
    source.with_history(|h| h.changes_since(&[position], BLOCK as u32, &changes))?;
    Ok(changes.runs().flatten().collect())
}

fn first(source: &Source) -> KnownPosition {
    KnownPosition { epoch: source.checkpoint(false).unwrap().epoch, upto: SIZE }
}

/// Longer than a tick of the clock by which files are stamped.
fn some_ticks() {
    std::thread::sleep(Duration::from_millis(40));
}

#[test]
fn a_clean_stop_is_trusted() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
    source.close().unwrap();
    some_ticks();
    let source = scene.open();
    assert_eq!(source.lost(), None);
    source.disk().write_at(9 * BLOCK, &[1; 10]).unwrap();
    source.checkpoint(false).unwrap();
    assert_eq!(since(&source, at).unwrap(), [3, 9]);
}

#[test]
fn a_foreign_write_after_a_clean_stop_is_a_gap_even_at_once() {
    for round in 0..20 {
        let scene = Scene::new();
        let source = scene.open();
        let at = first(&source);
        source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
        source.close().unwrap();
        scene.foreign_write();
        let source = scene.open();
        assert!(source.lost().is_some_and(|why| why.to_string().contains("not served")), "round {round}");
        source.checkpoint(false).unwrap();
        assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
        // From the gap on, tracking goes on.
        let at = first(&source);
        source.disk().write_at(5 * BLOCK, &[1; 10]).unwrap();
        source.checkpoint(false).unwrap();
        assert_eq!(since(&source, at).unwrap(), [5]);
    }
}

#[test]
fn a_kill_is_trusted_and_a_foreign_write_after_it_is_not() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
    // Not closed: as after SIGKILL.
    drop(source);
    some_ticks();
    let source = scene.open();
    assert_eq!(source.lost(), None);
    source.checkpoint(false).unwrap();
    assert_eq!(since(&source, at).unwrap(), [3]);
    drop(source);
    some_ticks();
    scene.foreign_write();
    let source = scene.open();
    assert!(source.lost().is_some_and(|why| why.to_string().contains("killed")));
}

#[test]
fn lost_stays_lost_until_the_history_says_so() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    source.close().unwrap();
    some_ticks();
    scene.foreign_write();
    for _ in 0..3 {
        let source = scene.open();
        assert!(source.lost().is_some());
        source.close().unwrap();
    }
    let source = scene.open();
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
    source.close().unwrap();
    assert_eq!(scene.open().lost(), None);
}

#[test]
fn a_record_that_is_gone_is_a_gap() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
    let folder = source.folder().path().to_path_buf();
    source.close().unwrap();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().starts_with("record-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
    some_ticks();
    let source = scene.open();
    assert!(source.lost().unwrap().to_string().contains("record of changed blocks is missing"));
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
}

/// Whatever is left of its bits: all of them gone, or those of a page.
#[test]
fn a_record_that_has_lost_bits_is_a_gap() {
    for (kept, what) in [(4096, "all"), (4096 + 8, "some")] {
        let scene = Scene::new();
        let source = scene.open();
        let at = first(&source);
        for block in [3, 70, 200] {
            source.disk().write_at(block * BLOCK, &[1; 10]).unwrap();
        }
        let folder = source.folder().path().to_path_buf();
        source.close().unwrap();
        let records = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        for record in records.filter(|path| path.to_string_lossy().contains("/record-")) {
            let file = std::fs::File::options().write(true).open(record).unwrap();
            let zeroes = vec![0; (file.metadata().unwrap().len() - kept) as usize];
            file.write_all_at(&zeroes, kept).unwrap();
        }
        let source = scene.open();
        assert!(
            source.lost().is_some_and(|why| why.to_string().contains("of changed blocks, and now has")),
            "{what}"
        );
        source.close().unwrap();
        // Nor by a command that comes later.
        let source = scene.open();
        source.checkpoint(false).unwrap();
        assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })), "{what}");
    }
}

#[test]
fn another_file_in_its_place_and_another_size_are_gaps() {
    let scene = Scene::new();
    let source = scene.open();
    first(&source);
    source.close().unwrap();
    let copy = scene.image.with_extension("copy");
    std::fs::copy(&scene.image, &copy).unwrap();
    std::fs::rename(&copy, &scene.image).unwrap();
    let source = scene.open();
    assert!(source.lost().is_some());
    source.checkpoint(false).unwrap();
    source.close().unwrap();
    std::fs::File::options().write(true).open(&scene.image).unwrap().set_len(SIZE * 2).unwrap();
    assert!(scene.open().lost().is_some());
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => copy_folder(&entry.path(), &to),
            kind if kind.is_file() => drop(std::fs::copy(entry.path(), to).unwrap()),
            _ => {}
        }
    }
}

/// A source whose state was copied goes two ways under the same numbers; a replica of the one is not the other's.
#[test]
fn a_copied_source_is_found_out() {
    let scene = Scene::new();
    let source = scene.open();
    first(&source);
    source.close().unwrap();
    let copied = StateDir::find(Some(&scene.state.path().with_extension("copied")));
    copy_folder(scene.state.path(), copied.path());
    let source = scene.open();
    source.disk().write_at(0, &[1; 10]).unwrap();
    let at = first(&source);
    source.close().unwrap();
    let other = Source::open(&copied, &scene.image, &SourceOptions::default()).unwrap();
    // Served elsewhere meanwhile: what changed is not known, and then its epochs are its own.
    other.checkpoint(false).unwrap();
    other.disk().write_at(BLOCK, &[1; 10]).unwrap();
    other.checkpoint(false).unwrap();
    let answer = other.with_history(|h| h.reaches(&[at]));
    assert!(matches!(answer, Err(SourceError::Foreign(_))), "{answer:?}");
}

#[test]
fn a_source_has_one_holder() {
    let scene = Scene::new();
    let _source = scene.open();
    let Err(error) = Source::open(&scene.state, &scene.image, &SourceOptions::default()) else {
        panic!("opened twice");
    };
    assert!(matches!(&error, SourceError::Busy { holder, .. } if holder.contains("process")), "{error}");
    assert!(error.is_refusal());
}

/// What nobody serves can be read as it stands, and a writer in between is noticed.
#[test]
fn a_still_view_notices_a_writer() {
    let scene = Scene::new();
    let handle =
        Handle::attach(&scene.state, &scene.image.to_string_lossy(), &SourceOptions::default()).unwrap();
    let view = handle.view(false).unwrap();
    let mut block = [0; 4096];
    view.read_at(0, &mut block).unwrap();
    view.verify().unwrap();
    some_ticks();
    scene.foreign_write();
    let error = view.verify().unwrap_err().to_string();
    assert!(error.contains("another program wrote"), "{error}");
}

/// Waits until a write past the server is noticed by itself, and says whether it was.
fn notices(source: &Source) -> bool {
    (0..300).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        source.lost().is_some_and(|why| why.to_string().contains("had it open"))
    })
}

#[test]
fn a_foreign_write_to_a_served_image_is_a_gap() {
    let scene = Scene::new();
    let source = scene.open();
    // Noticed by a checkpoint at once.
    let at = first(&source);
    scene.foreign_write();
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
    assert_eq!(source.lost(), None);
    // Noticed soon after served writes, though served writes follow, and known to the next process after a kill.
    let at = first(&source);
    source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(source.lost(), None, "our own write was doubted");
    scene.foreign_write();
    assert!(notices(&source));
    source.disk().write_at(4 * BLOCK, &[1; 10]).unwrap();
    drop(source);
    let source = scene.open();
    assert!(source.lost().is_some());
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
    assert_eq!(source.lost(), None);
    // Noticed by a clean end.
    let at = first(&source);
    scene.foreign_write();
    source.close().unwrap();
    some_ticks();
    let source = scene.open();
    assert!(source.lost().is_some());
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
    source.close().unwrap();
    assert_eq!(scene.open().lost(), None);
}

/// Writes through the tracker are never taken for foreign ones, however looks and writes fall.
#[test]
fn served_writes_are_not_doubted() {
    let scene = Scene::new();
    let source = scene.open();
    first(&source);
    let began = std::time::Instant::now();
    for round in 0u64.. {
        source.disk().write_at(round % 200 * BLOCK, &[round as u8; 512]).unwrap();
        if round % 7 == 0 {
            source.checkpoint(false).unwrap();
        }
        if round % 50 == 0 {
            std::thread::sleep(Duration::from_millis(round % 13));
        }
        assert_eq!(source.lost(), None, "round {round}");
        if began.elapsed() > Duration::from_secs(2) {
            break;
        }
    }
    source.close().unwrap();
    assert_eq!(scene.open().lost(), None);
}

#[test]
fn a_change_behind_the_back_of_a_reader_is_a_gap() {
    let scene = Scene::new();
    let attach =
        || Handle::attach(&scene.state, &scene.image.to_string_lossy(), &SourceOptions::default()).unwrap();
    let handle = attach();
    let at = KnownPosition { epoch: handle.view(false).unwrap().epoch(), upto: SIZE };
    handle.close().unwrap();
    some_ticks();
    let handle = attach();
    handle.view(false).unwrap().verify().unwrap();
    // All is read, but the replica takes its time, and somebody begins to write.
    scene.foreign_write();
    handle.close().unwrap();
    some_ticks();
    let handle = attach();
    handle.view(false).unwrap();
    assert!(matches!(handle.reaches(&[at]), Err(SourceError::Lost { .. })));
}

#[test]
fn another_file_in_the_place_of_a_served_one_is_not_read() {
    let scene = Scene::new();
    let source = scene.open();
    first(&source);
    let copy = scene.image.with_extension("copy");
    std::fs::copy(&scene.image, &copy).unwrap();
    std::fs::rename(&copy, &scene.image).unwrap();
    source.disk().write_at(0, &[1; 10]).unwrap();
    let error = source.checkpoint(false).unwrap_err();
    assert!(matches!(error, SourceError::Replaced(_)), "{error}");
    assert!(source.shared_view("").is_err());
    source.close().unwrap();
    assert!(scene.open().lost().unwrap().to_string().contains("in its place"));
}

#[test]
fn a_history_without_its_end_is_a_gap() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    let history = source.folder().path().join("history");
    let short = std::fs::metadata(&history).unwrap().len();
    source.disk().write_at(3 * BLOCK, &[1; 10]).unwrap();
    source.checkpoint(false).unwrap();
    source.close().unwrap();
    // As after a part of the state was brought back from a backup, or a block went bad.
    std::fs::File::options().write(true).open(&history).unwrap().set_len(short).unwrap();
    let source = scene.open();
    source.disk().write_at(4 * BLOCK, &[1; 10]).unwrap();
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
}

#[test]
fn a_history_that_lost_its_end_while_its_server_ran_is_a_gap() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    let history = source.folder().path().join("history");
    let short = std::fs::metadata(&history).unwrap().len();
    source.disk().write_at(5 * BLOCK, &[1; BLOCK as usize]).unwrap();
    source.checkpoint(false).unwrap();
    source.disk().write_at(6 * BLOCK, &[1; BLOCK as usize]).unwrap();
    // As if it were killed: nothing is noted any more. The last entry is unreadable, and its record is gone.
    drop(source);
    let mut bytes = std::fs::read(&history).unwrap();
    bytes[short as usize + 20] ^= 1;
    std::fs::write(&history, bytes).unwrap();
    let source = scene.open();
    assert!(source.lost().is_some_and(|why| why.to_string().contains("history")), "{:?}", source.lost());
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
}

#[test]
fn an_image_that_is_moved_while_it_is_served_is_followed() {
    let scene = Scene::new();
    let source = scene.open();
    let at = first(&source);
    let web = scene.image.with_file_name("web.raw");
    std::fs::rename(&scene.image, &web).unwrap();
    source.disk().write_at(7 * BLOCK, &[7; BLOCK as usize]).unwrap();
    let epoch = source.checkpoint(false).unwrap().epoch;
    let mut buf = [0; BLOCK as usize];
    source.shared_view("").unwrap().view.read_at(7 * BLOCK, &mut buf).unwrap();
    assert_eq!(buf, [7; BLOCK as usize]);
    // A change of name looks like another program's write; nothing is missed for it.
    match since(&source, at) {
        Ok(changes) => assert!(changes.contains(&7), "{changes:?}"),
        Err(error) => assert!(matches!(error, SourceError::Lost { .. }), "{error}"),
    }
    let known = scene.state.source(web.to_str().unwrap()).unwrap().expect("it is known").1;
    assert_eq!((known.uuid, known.path), (source.about().uuid, web.clone()));
    source.close().unwrap();
    let source = Source::open(&scene.state, &web, &SourceOptions::default()).unwrap();
    assert_eq!((source.about().uuid, source.lost()), (known.uuid, None));
    assert_eq!(source.checkpoint(false).unwrap().epoch, epoch);
}

/// An image on a machine whose boots the test names, and which may be found as it was at an earlier time.
struct Machine {
    image: PathBuf,
    boot: &'static str,
    changed: Option<i64>,
    named: bool,
}

impl Machine {
    /// Opens the image on it as a source.
    fn open(self, folder: &Arc<dyn device::Folder>) -> Source {
        let about = SourceMetadata::new(uuid::Uuid::nil(), self.identity().unwrap(), BLOCK as u32);
        let options = device::DiskOptions { write: true, ..Default::default() };
        let disk = device::open(&self.image, &options).unwrap();
        Source::over(about, disk, folder.clone(), Box::new(self), &SourceOptions::default()).unwrap()
    }
}

impl Backing for Machine {
    fn identity(&self) -> Result<Identity, SourceError> {
        let now = device::identity(&self.image)?;
        Ok(Identity { ctime_ns: self.changed.unwrap_or(now.ctime_ns), ..now })
    }
    fn boot(&self) -> Boot {
        Boot { id: self.boot.into(), began: u64::MAX }
    }
    fn is_named(&self) -> bool {
        self.named
    }
    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        let now = self.identity()?;
        Ok((now.ctime_ns, now.mtime_ns))
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(device::open(&self.image, &device::DiskOptions::default())?)
    }
}

/// The file system of the images is rolled back, and that of the state is not. Without a power cut the memory of the last look tells.
#[test]
fn an_image_that_a_power_cut_set_back_behind_its_history_is_a_gap() {
    let scene = Scene::new();
    let folder: Arc<dyn device::Folder> =
        Arc::new(device::Dir::open(&scene.image.with_file_name("kept")).unwrap());
    let open =
        |boot, changed| Machine { image: scene.image.clone(), boot, changed, named: true }.open(&folder);
    let changed = || device::identity(&scene.image).unwrap().ctime_ns;
    let opened = changed();
    let source = open("first", None);
    let write = |block: u64| {
        some_ticks();
        source.disk().write_at(block * BLOCK, &[1; 10]).unwrap();
        changed()
    };
    let at = first(&source);
    let before = write(3);
    write(5);
    source.checkpoint(false).unwrap();
    let last = write(7);
    drop(source);
    // What was written after the last epoch may be missing.
    let kept = [changed(), last];
    for time in kept {
        let source = open("second", Some(time));
        assert_eq!(source.lost(), None);
        drop(source);
    }
    for time in [opened, before] {
        let source = open("third", Some(time));
        assert!(
            source.lost().is_some_and(|why| why.to_string().contains("not what was recorded last")),
            "{:?}",
            source.lost()
        );
        source.close().unwrap();
    }
    let source = open("fourth", None);
    source.checkpoint(false).unwrap();
    assert!(matches!(since(&source, at), Err(SourceError::Lost { .. })));
}

/// Two disks without identifiers may have exchanged their names.
#[test]
fn after_a_reboot_a_disk_without_an_identifier_is_not_known() {
    for named in [true, false] {
        let scene = Scene::new();
        let folder: Arc<dyn device::Folder> =
            Arc::new(device::Dir::open(&scene.image.with_file_name("kept")).unwrap());
        let open = |boot| Machine { image: scene.image.clone(), boot, changed: None, named }.open(&folder);
        let source = open("first");
        first(&source);
        source.close().unwrap();
        assert_eq!(open("first").lost(), None);
        let lost = open("second").lost();
        assert_eq!(lost.is_none(), named, "{lost:?}");
    }
}
