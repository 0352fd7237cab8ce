//! Another host, behind a remote shell that needs no ssh and may be cut.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Run, Scene, Site};

/// A remote shell that needs no ssh, and another site for the far side.
pub struct Far {
    /// The far side.
    pub site: Site,
    rsh: &'static str,
    log: PathBuf,
}

impl Far {
    /// A far side behind the remote shell of the tests (`env!("CARGO_BIN_EXE_rsh")`).
    pub fn new(rsh: &'static str) -> Far {
        Far::at(Site::new(), rsh)
    }

    /// One whose files are in memory.
    pub fn in_memory(rsh: &'static str) -> Far {
        Far::at(Site::in_memory(), rsh)
    }

    fn at(site: Site, rsh: &'static str) -> Far {
        let log = site.path("log");
        Far { site, rsh, log }
    }

    /// Syncs a scene's source to the far side. The line is cut after `cut` bytes.
    pub fn sync(&self, scene: &Scene, options: &[&str], cut: Option<u64>) -> Run {
        self.run("sync", scene, options, cut)
    }

    /// The same for another command that takes a source and a destination.
    pub fn run(&self, command: &str, scene: &Scene, options: &[&str], cut: Option<u64>) -> Run {
        self.run_to(&self.name(), command, scene, options, cut)
    }

    /// How the replica there is named here.
    pub fn name(&self) -> String {
        format!("far:{}", self.replica().display())
    }

    /// The same as [`Far::run`] by another name of the replica.
    pub fn run_to(
        &self,
        destination: &str,
        command: &str,
        scene: &Scene,
        options: &[&str],
        cut: Option<u64>,
    ) -> Run {
        let run = scene
            .site
            .dsync([command])
            .arg(&scene.image)
            .arg(destination)
            .args(["--json", "--rsh", self.rsh])
            .args(options)
            .env("RSH_STATE", self.site.state())
            .env("RSH_LOG", &self.log);
        match cut {
            Some(bytes) => run.env("RSH_CUT", bytes.to_string()),
            None => run,
        }
    }

    /// The replica there.
    pub fn replica(&self) -> PathBuf {
        self.site.path("vm.raw")
    }

    /// Bytes that went to the far side since the last time this was asked, and how many calls they took.
    pub fn carried(&self) -> (u64, u32) {
        // The shell writes its line when its far side has ended.
        std::thread::sleep(Duration::from_millis(50));
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let _ = std::fs::remove_file(&self.log);
        let up = text.lines().map(|line| line.split(' ').next().expect("two numbers"));
        let ups: Vec<u64> = up.map(|number| number.parse().expect("a number")).collect();
        (ups.iter().sum(), ups.len() as u32)
    }
}
