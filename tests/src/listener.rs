//! Another host behind TLS: a site with `dsync receive --listen` on loopback, which takes replicas into a folder.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::{Background, Run, Scene, Site};

/// The address that it listens on, and the name under which its key is pinned.
pub const HOST: &str = "127.0.0.1";

/// The far site.
pub struct Listening {
    /// Its state and images; replicas go to the folder `into`.
    pub site: Site,
    process: Option<Background>,
    port: u16,
}

impl Listening {
    /// Listens, and trusts nobody yet.
    pub fn new(options: &[&str]) -> Listening {
        let mut far = Listening { site: Site::new(), process: None, port: 0 };
        std::fs::create_dir(far.folder()).expect("a folder");
        far.start(options);
        far
    }

    /// One that trusts this near site as `near`, and is trusted by it.
    pub fn for_near(near: &Site) -> Listening {
        let far = Listening::new(&[]);
        trust(near, HOST, &far.site, &[]);
        trust(&far.site, "near", near, &[]);
        far
    }

    /// Listens, on the port that it had before.
    pub fn start(&mut self, options: &[&str]) {
        let listen = format!("{HOST}:{}", self.port);
        let process = self
            .site
            .dsync(["receive", "--listen", &listen, "--into"])
            .arg(self.folder())
            .args(options)
            .start();
        self.port = port(&process);
        self.process = Some(process);
    }

    /// The process that listens.
    pub fn process(&self) -> &Background {
        self.process.as_ref().expect("a listener")
    }

    /// The process that listens, to be ended.
    pub fn take(&mut self) -> Background {
        self.process.take().expect("a listener")
    }

    /// Kills it with all its sessions.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.killed();
        }
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder that replicas go to.
    pub fn folder(&self) -> PathBuf {
        self.site.path("into")
    }

    /// The replica `vm.raw` there.
    pub fn replica(&self) -> PathBuf {
        self.folder().join("vm.raw")
    }

    /// What a path there is called from the near site.
    pub fn destination(&self, path: &str) -> String {
        format!("tls://{HOST}:{}/{path}", self.port)
    }

    /// `dsync sync` of a scene's disk to `vm.raw` there.
    pub fn sync(&self, scene: &Scene, options: &[&str]) -> Run {
        self.sync_to(scene, &self.destination("vm.raw"), options)
    }

    /// `dsync sync` of a scene's disk to any destination.
    pub fn sync_to(&self, scene: &Scene, destination: &str, options: &[&str]) -> Run {
        scene.site.dsync(["sync", "--json"]).arg(&scene.image).arg(destination).args(options)
    }

    /// Waits until the log has a line with all these words.
    pub fn says(&self, words: &[&str]) {
        logs(self.process(), words);
    }
}

/// `dsync send --listen` at the site of sources.
pub struct Offering {
    /// The process that listens.
    pub process: Background,
    port: u16,
}

impl Offering {
    /// Offers images, folders of images, or devices.
    pub fn start(site: &Site, offers: &[&Path], options: &[&str]) -> Offering {
        let offers = offers.iter().flat_map(|offer| [Path::new("--offer"), offer]);
        let run = site.dsync(["send", "--listen", &format!("{HOST}:0")]);
        let process = run.args(offers).args(options).start();
        let port = port(&process);
        Offering { process, port }
    }

    /// What a path there is called from another site.
    pub fn source(&self, path: &str) -> String {
        format!("tls://{HOST}:{}/{path}", self.port)
    }

    /// Waits until the log has a line with all these words.
    pub fn says(&self, words: &[&str]) {
        logs(&self.process, words);
    }
}

/// Waits until it listens, and gives the port.
fn port(process: &Background) -> u16 {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let said = process.stdout_so_far();
        if let Some(address) = said.lines().find_map(|line| line.strip_prefix("listening on ")) {
            return address.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        }
        assert!(Instant::now() < until, "it does not listen: {said} {}", process.stderr_so_far());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn logs(process: &Background, words: &[&str]) {
    let until = Instant::now() + Duration::from_secs(20);
    while !process.stderr_so_far().lines().any(|line| words.iter().all(|word| line.contains(word))) {
        assert!(Instant::now() < until, "it does not say {words:?}: {}", process.stderr_so_far());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The line that `dsync key` prints at a site.
pub fn key(site: &Site) -> String {
    site.dsync(["key"]).ok().text().lines().next().expect("a key").to_owned()
}

/// Pins `whose` key at `site`, for everything unless the options say what for.
pub fn trust(site: &Site, name: &str, whose: &Site, options: &[&str]) {
    let roles = if options.contains(&"--for") { &[][..] } else { &["--for", "push,pull,serve"] };
    site.dsync(["key", "trust", name, &key(whose)]).args(options).args(roles).ok();
}
