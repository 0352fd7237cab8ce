//! The common scene: a served disk with something on it, and a replica to be.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::image::{self, BLOCK};
use crate::mount::{self, Mount};
use crate::nbd::Client;
use crate::{Random, Run, Server, Site, need_root};

/// A site with a disk `vm.raw`, served as `vm`, and the path of a replica.
pub struct Scene {
    /// Seeded and printed.
    pub random: Random,
    /// The source's image.
    pub image: PathBuf,
    /// Where the replica is to be. Nothing is there yet.
    pub replica: PathBuf,
    /// The server; taken out while it is stopped.
    pub server: Option<Server>,
    /// The machine.
    pub site: Site,
}

/// Makes the state of a replica in a file named `vm.raw` believe that nothing has changed that since.
pub fn restamp(replica: &Path) {
    use std::os::unix::fs::MetadataExt;
    let name = replica.file_name().expect("a name").to_string_lossy();
    let path = replica.with_file_name(format!(".{name}.dsync/lineage"));
    let mut lineage: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).expect("the lineage")).expect("JSON");
    let file = std::fs::metadata(replica).expect("the replica");
    lineage["stamp"]["changed"] = (file.ctime() * 1_000_000_000 + file.ctime_nsec()).into();
    std::fs::write(&path, serde_json::to_vec(&lineage).expect("JSON")).expect("the lineage");
}

impl Scene {
    /// Makes the replica's lineage believe that nothing was done to the file: as with damage by the disk itself.
    pub fn restamp(&self) {
        restamp(&self.replica);
    }

    /// A sparse disk of `size` bytes with some data in its first half, served.
    pub fn new(what: &str, size: u64) -> Scene {
        Scene::at(Site::new(), what, size)
    }

    /// A new scene in memory, for tests in which disks play no part: it waits for none.
    pub fn in_memory(what: &str, size: u64) -> Scene {
        Scene::at(Site::in_memory(), what, size)
    }

    fn at(site: Site, what: &str, size: u64) -> Scene {
        let mut random = Random::new(what);
        let image = site.image("vm.raw", size);
        for _ in 0..8 {
            let at = random.below(size / 2 / BLOCK) * BLOCK;
            let len = (size / 64).max(BLOCK).min(size - at);
            image::scribble(&image, at, len, &mut random);
        }
        let replica = site.path("replica/vm.raw");
        std::fs::create_dir(site.path("replica")).expect("a folder");
        let mut scene = Scene { random, image, replica, server: None, site };
        scene.start();
        scene
    }

    /// A scene whose replica stands where the source does.
    pub fn synced(what: &str, size: u64) -> Scene {
        Scene::new(what, size).brought_up()
    }

    /// A synced scene in memory.
    pub fn synced_in_memory(what: &str, size: u64) -> Scene {
        Scene::in_memory(what, size).brought_up()
    }

    fn brought_up(self) -> Scene {
        self.sync(&[]).ok();
        image::assert_equal(&self.image, &self.replica);
        self
    }

    /// A scene whose replica is to be on a tmpfs of the size `room`, such as "12m". `None` where none can be mounted: then `what` is
    /// reported as skipped.
    pub fn with_small_replica(name: &str, size: u64, room: &str, what: &str) -> Option<(Scene, Mount)> {
        if !need_root(what) {
            return None;
        }
        let mut scene = Scene::new(name, size);
        let place = scene.site.path("small");
        let mounted = mount::small(&place, room, what)?;
        scene.replica = place.join("vm.raw");
        Some((scene, mounted))
    }

    /// Fills the disk, so that nothing of it is a hole.
    pub fn fill(&mut self) {
        self.stop();
        let size = std::fs::metadata(&self.image).expect("an image").len();
        std::fs::write(&self.image, self.random.bytes(size as usize)).expect("a content");
        self.start();
    }

    /// Serves the disk.
    pub fn start(&mut self) {
        self.server = Some(self.site.serve(&[&self.image], &[]));
    }

    /// Ends the server in good order.
    pub fn stop(&mut self) {
        self.server.take().expect("a server").stop();
    }

    /// The server.
    pub fn server(&self) -> &Server {
        self.server.as_ref().expect("a server")
    }

    /// A connection to the disk.
    pub fn client(&self) -> Client {
        self.server().client("vm")
    }

    /// `dsync sync IMAGE REPLICA --json` with more options.
    pub fn sync(&self, options: &[&str]) -> Run {
        self.site.sync(&self.image, &self.replica, options)
    }

    /// Writes random bytes to `count` different blocks through the server and names them.
    pub fn change(&mut self, count: usize) -> BTreeSet<u64> {
        let mut client = self.client();
        let mut blocks = BTreeSet::new();
        while blocks.len() < count {
            let block = self.random.below(client.size / BLOCK);
            if blocks.insert(block) {
                client.write(block * BLOCK, &self.random.bytes(BLOCK as usize)).expect("a write");
            }
        }
        client.close().expect("the end");
        blocks
    }

    /// The dirty bytes as the server tells them.
    pub fn dirty(&self) -> Vec<Range<u64>> {
        self.client().dirty().expect("a dirty bitmap")
    }

    /// Fails the test unless source and replica are equal.
    pub fn equal(&self) {
        image::assert_equal(&self.image, &self.replica);
    }
}

/// Runs of blocks as ranges of bytes.
pub fn ranges(blocks: &BTreeSet<u64>) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for block in blocks {
        let bytes = block * BLOCK..(block + 1) * BLOCK;
        match ranges.last_mut() {
            Some(last) if last.end == bytes.start => last.end = bytes.end,
            _ => ranges.push(bytes),
        }
    }
    ranges
}

/// A number of a summary.
pub fn number(summary: &Value, field: &str) -> u64 {
    summary[field].as_u64().unwrap_or_else(|| panic!("'{field}' is no number in {summary}"))
}

/// What a replica is, with the files beside it: to show that nothing touched it.
pub fn fingerprints(replica: &Path) -> Vec<(PathBuf, (u64, u64, i64, i64))> {
    let mut found = Vec::new();
    let mut folders = vec![replica.parent().expect("a folder").to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.expect("a folder").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.is_file()
                && path.file_name().is_some_and(|name| name != "lock" && name != "present")
            {
                // A lock may be made and taken, and readers told again what there is, without a change to anything.
                found.push((path.clone(), image::fingerprint(&path)));
            }
        }
    }
    found.sort();
    found
}
