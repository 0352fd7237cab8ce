//! Another host behind TLS: a site with `dsync receive --listen` on loopback that trusts the near site, and is trusted.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::{Background, Site};

const HOST: &str = "127.0.0.1";

/// The far site.
pub struct Listening {
    /// Its state and images; replicas go to the folder `into`.
    pub site: Site,
    process: Option<Background>,
    port: u16,
}

impl Listening {
    /// Listens, for this near site.
    pub fn for_near(near: &Site) -> Listening {
        let mut far = Listening { site: Site::new(), process: None, port: 0 };
        std::fs::create_dir(far.folder()).expect("a folder");
        far.start(&[]);
        trust(near, HOST, &far.site);
        trust(&far.site, "near", near);
        far
    }

    /// The folder that replicas go to.
    pub fn folder(&self) -> PathBuf {
        self.site.path("into")
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
        let until = Instant::now() + Duration::from_secs(30);
        self.port = loop {
            let said = process.stdout_so_far();
            if let Some(address) = said.lines().find_map(|line| line.strip_prefix("listening on ")) {
                break address.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
            }
            assert!(Instant::now() < until, "it does not listen: {said} {}", process.stderr_so_far());
            std::thread::sleep(Duration::from_millis(5));
        };
        self.process = Some(process);
    }

    /// Kills it with all its sessions.
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.killed();
        }
    }

    /// What a path there is called from the near site.
    pub fn destination(&self, path: &str) -> String {
        format!("tls://{HOST}:{}/{path}", self.port)
    }
}

/// Pins `whose` key at `site`.
fn trust(site: &Site, name: &str, whose: &Site) {
    let key = whose.dsync(["key"]).ok().text().lines().next().expect("a key").to_owned();
    site.dsync(["key", "trust", name, &key]).ok();
}
