//! Hosts with one disk each, between which roles change.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::image::{self, BLOCK};
use crate::{Random, Run, Site};

/// A host with one disk.
pub struct Host {
    /// The host.
    pub site: Site,
    /// Its disk, a source or a replica.
    pub disk: PathBuf,
    /// Makes names of files.
    files: Cell<u32>,
}

impl Default for Host {
    fn default() -> Host {
        Host::new()
    }
}

impl Host {
    /// Without a disk as yet. In memory: what hosts tell each other depends on no disk.
    pub fn new() -> Host {
        let site = Site::in_memory();
        let disk = site.path("vm.raw");
        Host { site, disk, files: Cell::default() }
    }

    /// With a disk that has some content.
    pub fn with_disk(size: u64, random: &mut Random) -> Host {
        let host = Host::new();
        image::sparse(&host.disk, size);
        image::scribble(&host.disk, 0, size / 8, random);
        host
    }

    /// A command on this host's disk.
    pub fn run(&self, words: &[&str]) -> Run {
        self.site.dsync([words[0]]).arg(&self.disk).args(&words[1..])
    }

    /// The same, towards the disk of another host, through the remote shell of the tests.
    pub fn towards(&self, other: &Host, words: &[&str]) -> Run {
        let destination = format!("far:{}", other.disk.display());
        let run = self.site.dsync([words[0]]).arg(&self.disk).arg(destination).args(&words[1..]);
        run.arg("--rsh").arg(crate::profile_dir().join("rsh")).env("RSH_STATE", other.site.state())
    }

    /// `dsync sync --json` to the disk of another host.
    pub fn sync(&self, other: &Host, options: &[&str]) -> Run {
        self.towards(other, &[&["sync", "--json"][..], options].concat())
    }

    /// `dsync promote --force --json`, once the other end of a mirror that was killed has let go of the replica: what it says.
    pub fn force(&self) -> serde_json::Value {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let output = self.run(&["promote", "--force", "--json"]).output();
            if output.status.success() {
                return output.summary();
            }
            assert!(output.status.code() == Some(6) && Instant::now() < until, "{output}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The blocks that its source has written since an epoch.
    pub fn changed(&self, since: &str) -> BTreeSet<u64> {
        let text = self.run(&["changes", "--since", since]).ok().text();
        let range = |line: &str| {
            let mut numbers = line.split_whitespace().map(|number| number.parse::<u64>().expect("a number"));
            let (offset, len) = (numbers.next().expect("an offset"), numbers.next().expect("a length"));
            offset / BLOCK..(offset + len).div_ceil(BLOCK)
        };
        text.lines().flat_map(range).collect()
    }

    /// Writes random bytes to blocks through a server.
    pub fn write(&self, blocks: impl IntoIterator<Item = u64>, random: &mut Random) {
        let server = self.site.serve(&[&self.disk], &[]);
        let mut client = server.client("vm");
        for block in blocks {
            client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        }
        client.flush().and_then(|()| client.close()).expect("the end");
        server.stop();
    }

    /// A copy of the disk, beside it.
    pub fn copy(&self, name: &str) -> PathBuf {
        let copy = self.site.path(name);
        image::copy(&self.disk, &copy);
        copy
    }

    /// The path of a file that is not there yet.
    pub fn new_file(&self) -> PathBuf {
        self.files.set(self.files.get() + 1);
        self.site.path(&format!("saved-{}.delta", self.files.get()))
    }

    /// The file of this name in the state of its source.
    pub fn state_file(&self, name: &str) -> PathBuf {
        let folders = std::fs::read_dir(self.site.state().join("sources")).expect("sources").flatten();
        let mut found = folders.map(|folder| folder.path().join(name)).filter(|path| path.is_file());
        found.next().expect("a source")
    }
}
