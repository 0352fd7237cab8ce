//! Places that must be given back: folders, loop devices, mounts, network namespaces. Dropping one gives it back.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::measure::process::{self, command};

/// Below so many bits a second a line is slow.
const SLOW: u64 = 50_000_000;
/// Bytes that wait for a slow line.
const QUEUE: u64 = 16 << 10;
const QUICK: Duration = Duration::from_secs(60);

/// A temporary folder.
pub(crate) fn scratch(parent: &Path) -> Result<TempDir> {
    std::fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    TempDir::with_prefix_in("dsync-bench-", parent).with_context(|| parent.display().to_string())
}

/// A folder for sockets, whose paths must be short.
pub(crate) fn sockets() -> Result<TempDir> {
    Ok(TempDir::with_prefix("dsync-bench-")?)
}

/// True for root.
pub(crate) fn root() -> bool {
    rustix::process::geteuid().is_root()
}

/// From now on mounts made by this thread and by what it runs are its own. A bpf file system is among them: what is pinned in it
/// goes with the program, however that ends.
pub(crate) fn own_mounts() -> Result<()> {
    // SAFETY: no other thread works with files by relative paths or mounts.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    let line = "mount --make-rprivate / && mount -t bpf bpf /sys/fs/bpf";
    process::run(&mut process::shell(line), QUICK).map(drop)
}

/// Bytes free where a folder lies.
pub(crate) fn free(folder: &Path) -> u64 {
    rustix::fs::statvfs(folder).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// An image whose space is all allocated.
pub(crate) fn filled(path: &Path, bytes: u64) -> Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
    let chunk = vec![0x5a; 1 << 20];
    for _ in 0..bytes >> 20 {
        process::go_on()?;
        file.write_all(&chunk)?;
    }
    Ok(file.sync_all()?)
}

/// A sparse file.
pub(crate) fn sparse(path: &Path, size: u64) -> Result<()> {
    let file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
    file.set_len(size).with_context(|| format!("{}: {size} bytes", path.display()))
}

/// A loop device over a file, and the file system on it if there is one.
pub(crate) struct Loop {
    device: String,
    mounted: Option<PathBuf>,
}

impl Loop {
    /// Makes a file system of this kind in a sparse file of `size` bytes and mounts it on a folder beside it.
    pub(crate) fn formatted(file: &Path, kind: &str, size: u64) -> Result<Loop> {
        sparse(file, size)?;
        process::run(command(&format!("mkfs.{kind}")).args(["-q"]).arg(file), QUICK)?;
        let mut made = Loop::over(file, true)?;
        made.mount(kind, &file.with_extension("mounted"))?;
        Ok(made)
    }

    /// Mounts its file system, of this kind, on a folder.
    pub(crate) fn mount(&mut self, kind: &str, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut mount = command("mount");
        mount.args(["-t", kind, "-o", "noatime", &self.device]).arg(folder);
        process::run(&mut mount, QUICK)?;
        self.mounted = Some(folder.to_path_buf());
        Ok(())
    }

    /// Unmounts it, and what is in no file any more is on the device.
    pub(crate) fn unmount(&mut self) -> Result<()> {
        let Some(folder) = &self.mounted else { return Ok(()) };
        // What was killed lets go of its files a moment later.
        let until = Instant::now() + QUICK;
        while let Err(error) = process::run(command("umount").arg(folder), QUICK) {
            ensure!(Instant::now() < until, "{} stays in use: {error:#}", folder.display());
            std::thread::sleep(Duration::from_millis(50));
        }
        self.mounted = None;
        Ok(())
    }

    /// A device over a file; a direct one bypasses the file's page cache.
    pub(crate) fn over(file: &Path, direct: bool) -> Result<Loop> {
        let mut attach = command("losetup");
        attach.args(["--find", "--show"]).args(direct.then_some("--direct-io=on")).arg(file);
        let attached = process::run(&mut attach, QUICK)?;
        Ok(Loop { device: attached.stdout.trim().to_string(), mounted: None })
    }

    /// The device.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.device)
    }

    /// Where it is mounted.
    pub(crate) fn folder(&self) -> &Path {
        self.mounted.as_deref().unwrap_or(Path::new("/nonexistent"))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Some(folder) = &self.mounted {
            if process::run_always(command("umount").arg(folder), QUICK).is_err() {
                let _ = process::run_always(command("umount").arg("--lazy").arg(folder), QUICK);
            }
        }
        if let Err(error) = process::run_always(command("losetup").args(["--detach", &self.device]), QUICK) {
            eprintln!("{} is left behind: {error:#}", self.device);
        }
    }
}

/// Two network namespaces with a link between them.
pub(crate) struct Network {
    near: String,
    far: String,
}

impl Network {
    /// The far side's address.
    pub(crate) const FAR: &str = "10.213.7.2";

    /// A link of so many bits a second each way, or of what the machine can carry. Needs root.
    pub(crate) fn new(bits_per_second: Option<u64>) -> Result<Network> {
        ensure!(root(), "network namespaces need root");
        static MADE: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let network = Network { near: format!("dsync-near-{id}"), far: format!("dsync-far-{id}") };
        let ip = |line: &str| process::run(command("ip").args(line.split_whitespace()), QUICK).map(drop);
        let (near, far) = (&network.near, &network.far);
        // Two names of at most 15 bytes that nobody else has.
        let (a, b) = (format!("dsa{id}"), format!("dsb{id}"));
        ip(&format!("netns add {near}"))?;
        ip(&format!("netns add {far}"))?;
        ip(&format!("link add {a} netns {near} type veth peer name {b} netns {far}"))?;
        for (space, device, address) in [(near, &a, "10.213.7.1"), (far, &b, Self::FAR)] {
            ip(&format!("-n {space} address add {address}/24 dev {device}"))?;
            ip(&format!("-n {space} link set {device} up"))?;
            ip(&format!("-n {space} link set lo up"))?;
            let Some(rate) = bits_per_second else { continue };
            // Enough for 4 ms, or a fast link would wait for the clock; a slow one would not be slow with as much.
            let burst = (rate / 8 / 250).max(if rate < SLOW { 3000 } else { 64 << 10 });
            // A queue as modems have them, which holds some packets.
            let latency = if rate < SLOW { (QUEUE * 8000 / rate).max(100) } else { 100 };
            let shape = format!(
                "-n {space} qdisc add dev {device} root tbf rate {rate}bit burst {burst} latency {latency}ms"
            );
            process::run(command("tc").args(shape.split_whitespace()), QUICK)?;
        }
        Ok(network)
    }

    /// The names of both sides.
    pub(crate) fn spaces(&self) -> [&str; 2] {
        [&self.near, &self.far]
    }

    /// The words before a command that runs it on the near side. Mounts stay as they are, and with them what is pinned in the bpf
    /// file system.
    pub(crate) fn near(&self) -> [String; 2] {
        Self::enter(&self.near)
    }

    /// The words before a command that runs it on the far side.
    pub(crate) fn far(&self) -> [String; 2] {
        Self::enter(&self.far)
    }

    fn enter(space: &str) -> [String; 2] {
        ["nsenter".into(), format!("--net=/run/netns/{space}")]
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for space in [&self.near, &self.far] {
            if Path::new("/run/netns").join(space).exists() {
                if let Err(error) = process::run_always(command("ip").args(["netns", "delete", space]), QUICK)
                {
                    eprintln!("network namespace {space} is left behind: {error:#}");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_carries_and_is_given_back() {
        let tools = ["ip", "tc", "nsenter", "bash"];
        if !root() || tools.iter().any(|tool| dsync_tests::find(tool).is_none()) {
            return println!("skipped: this needs root, ip, tc, nsenter and bash");
        }
        // A kernel may lack namespaces, veth or tbf.
        let network = match Network::new(Some(100_000_000)) {
            Ok(network) => network,
            Err(error) => return println!("skipped: {error:#}"),
        };
        let [enter, rest @ ..] = network.near();
        // A refusal is an answer too, and needs nobody who listens.
        let mut knock = command(&enter);
        knock.args(rest).args(["bash", "-c", &format!("exec 3<>/dev/tcp/{}/9", Network::FAR)]);
        let error = process::run(&mut knock, QUICK).unwrap_err().to_string();
        assert!(error.contains("refused"), "{error}");
        let space = Path::new("/run/netns").join(&network.near);
        assert!(space.exists());
        drop(network);
        assert!(!space.exists());
    }
}
