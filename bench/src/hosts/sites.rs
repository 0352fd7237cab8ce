//! dsync on both hosts, as two sites that trust each other: the far one takes what the near one sends over TLS.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use crate::hosts::Hosts;
use crate::hosts::link::{carry, listening};
use crate::measure::dsync::Dsync;
use crate::measure::places::Loop;
use crate::measure::process::{Daemon, quote, run, shell};

const LIMIT: Duration = Duration::from_secs(60);

/// Both sites. The far one listens as long as this lives.
pub(crate) struct Sites {
    pub near: Dsync,
    pub far: Dsync,
    address: String,
    into: PathBuf,
    _listener: Daemon,
}

impl Sites {
    /// Makes keys and a listener. States and copies lie in `folder`.
    pub(crate) fn new(hosts: &Hosts, binary: &Path, folder: &Path) -> Result<Sites> {
        let keys = folder.join("keys").display().to_string();
        run(&mut carry(&["keys", &keys, Hosts::FAR]), LIMIT)?;
        for site in ["near", "far"] {
            let state = folder.join(format!("{site}-state"));
            std::fs::create_dir_all(&state)?;
            let line = format!("cp -a {keys}/{site} {}/keys", quote(&state));
            run(&mut shell(&line), LIMIT)?;
        }
        let into = folder.join("into");
        std::fs::create_dir(&into)?;
        let near = Dsync::new(binary, folder.join("near-state"));
        let far = Dsync::new(binary, folder.join("far-state"));
        let mut listen = far.command("receive");
        listen.args(["--listen", &format!("{}:0", Hosts::FAR), "--into"]).arg(&into);
        let (listener, address) = listening(&mut hosts.far.run(&listen), "listening on ")?;
        Ok(Sites { near, far, address, into, _listener: listener })
    }

    /// A copy on the far host, as the near one names it.
    pub(crate) fn url(&self, file: &str) -> String {
        format!("tls://{}/{file}", self.address)
    }

    /// Where it lies.
    pub(crate) fn copy(&self, file: &str) -> PathBuf {
        self.into.join(file)
    }
}

/// A loop device that the bpf tracker follows until this is dropped.
pub(crate) struct Followed {
    device: Loop,
    dsync: Dsync,
}

impl Followed {
    /// Follows a device, mounted or not.
    pub(crate) fn new(device: Loop, dsync: &Dsync) -> Result<Followed> {
        let followed = Followed { device, dsync: dsync.clone() };
        run(dsync.command("track").args(["add", "--with", "bpf"]).arg(followed.path()), LIMIT)?;
        Ok(followed)
    }

    /// The device.
    pub(crate) fn path(&self) -> &Path {
        self.device.path()
    }

    /// Unmounts it; it is followed on.
    pub(crate) fn unmount(&mut self) -> Result<()> {
        self.device.unmount()
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _ = run(self.dsync.command("track").arg("remove").arg(self.device.path()), LIMIT);
    }
}
