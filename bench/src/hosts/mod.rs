//! Two hosts and a line between them on one machine: the scene in which the papers measured.
//!
//! Each host is a network namespace with control groups of its own and, where there are two processors, one of them. So what a
//! host spends can be told from what the other does, whichever programs it runs.

pub(crate) mod line;
pub(crate) mod link;
pub(crate) mod qemu;
pub(crate) mod relay;
pub(crate) mod rows;
pub(crate) mod scene;
pub(crate) mod sites;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::hosts::line::Sshd;
use crate::measure::places::{Network, root};
use crate::measure::process::{Daemon, command};

/// How often a host's counters are read.
const SAMPLE: Duration = Duration::from_millis(200);

/// What a host has used since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Used {
    /// Processor time, in seconds.
    pub processor: f64,
    /// Memory at this moment, page cache included, in bytes.
    pub memory: f64,
    /// Bytes over the line, with all headers.
    pub received: f64,
    pub sent: f64,
}

impl Used {
    /// What was used since `before`; memory as it is now.
    pub(crate) fn since(self, before: Used) -> Used {
        Used {
            processor: self.processor - before.processor,
            memory: self.memory,
            received: self.received - before.received,
            sent: self.sent - before.sent,
        }
    }
}

/// The control groups of a host: one, or one for each controller where the kernel has them apart. Dropping removes them.
struct Groups {
    folders: Vec<PathBuf>,
}

impl Groups {
    const ROOT: &str = "/sys/fs/cgroup";

    fn new(host: &str) -> Result<Groups> {
        let (root, name) = (Path::new(Self::ROOT), format!("dsync-bench-{host}-{}", std::process::id()));
        let mut groups = Groups { folders: Vec::new() };
        let parents = match root.join("cgroup.controllers").exists() {
            true => {
                // Refused where this very process is in the root group; then the counters are there already.
                let _ = std::fs::write(root.join("cgroup.subtree_control"), "+cpu +memory");
                vec![root.to_path_buf()]
            }
            false => ["cpuacct", "memory"].map(|controller| root.join(controller)).to_vec(),
        };
        for parent in parents {
            let folder = parent.join(&name);
            std::fs::create_dir(&folder).with_context(|| format!("control group {}", folder.display()))?;
            groups.folders.push(folder);
        }
        Ok(groups)
    }

    /// The content of a file that one of them has.
    fn text(&self, files: &[&str]) -> String {
        let candidates = self.folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file)));
        candidates.into_iter().find_map(|file| std::fs::read_to_string(file).ok()).unwrap_or_default()
    }

    /// Processor time in seconds, and memory.
    fn used(&self) -> Used {
        let field = |text: &str, name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|number| number.trim().parse().ok()).unwrap_or(0.0)
        };
        let nanoseconds: Option<f64> = self.text(&["cpuacct.usage"]).trim().parse().ok();
        let processor = nanoseconds
            .map_or_else(|| field(&self.text(&["cpu.stat"]), "usage_usec ") / 1e6, |spent| spent / 1e9);
        let memory = self.text(&["memory.usage_in_bytes", "memory.current"]).trim().parse().unwrap_or(0.0);
        Used { processor, memory, ..Used::default() }
    }
}

/// What the disk under a folder has carried so far, for both hosts together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Carried {
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
}

impl Carried {
    /// Reads the kernel's counters.
    pub(crate) fn by_the_disk_of(folder: &Path) -> Carried {
        use std::os::unix::fs::MetadataExt;
        let device = std::fs::metadata(folder).map_or(0, |meta| meta.dev());
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let stat =
            std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap_or_default();
        let sectors = |at: usize| stat.split_whitespace().nth(at).and_then(|n| n.parse::<f64>().ok());
        Carried { read: sectors(2).unwrap_or(0.0) * 512.0, written: sectors(6).unwrap_or(0.0) * 512.0 }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for folder in &self.folders {
            // What was killed a moment ago may still be there.
            let until = Instant::now() + Duration::from_secs(5);
            while let Err(error) = std::fs::remove_dir(folder) {
                if Instant::now() > until {
                    eprintln!("control group {} is left behind: {error}", folder.display());
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// One of the two.
pub(crate) struct Host {
    /// The words that lead into it.
    words: Vec<String>,
    /// A process that is always there, through which the counters of its network are read.
    anchor: Daemon,
    groups: Groups,
}

impl Host {
    fn new(name: &str, space: &[String], processor: Option<usize>) -> Result<Host> {
        let groups = Groups::new(name)?;
        let enter: Vec<String> =
            groups.folders.iter().map(|f| format!("echo $$ >{}/cgroup.procs", f.display())).collect();
        let mut words =
            vec!["sh".into(), "-c".into(), format!("{} && exec \"$@\"", enter.join(" && ")), "sh".into()];
        if let Some(number) = processor {
            words.extend(["taskset", "-c", &number.to_string()].map(String::from));
        }
        words.extend_from_slice(space);
        let anchor = Daemon::start_bare(&mut wrapped(&words, command("sleep").arg("infinity")))?;
        // Until the words have led it there, its counters are those of the machine's own network.
        let (comm, until) = (format!("/proc/{}/comm", anchor.id()), Instant::now() + Duration::from_secs(30));
        while !std::fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "sleep") {
            ensure!(Instant::now() < until, "host {name} does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(Host { words, anchor, groups })
    }

    /// The same command, run on this host.
    pub(crate) fn run(&self, program: &Command) -> Command {
        wrapped(&self.words, program)
    }

    /// What it has used so far.
    pub(crate) fn used(&self) -> Used {
        let net = std::fs::read_to_string(format!("/proc/{}/net/dev", self.anchor.id())).unwrap_or_default();
        let (received, sent) = carried(&net);
        Used { received, sent, ..self.groups.used() }
    }
}

/// A command behind other words; what it has in its environment stays, and where it begins.
fn wrapped(words: &[String], program: &Command) -> Command {
    let mut outer = command(&words[0]);
    outer.args(&words[1..]).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        value.map(|value| outer.env(name, value));
    }
    if let Some(folder) = program.get_current_dir() {
        outer.current_dir(folder);
    }
    outer
}

/// Bytes received and sent by all devices but the loopback, from /proc/net/dev.
fn carried(text: &str) -> (f64, f64) {
    let fields = |line: &str| -> Option<(f64, f64)> {
        let (name, rest) = line.split_once(':')?;
        let numbers: Vec<f64> = rest.split_whitespace().map_while(|field| field.parse().ok()).collect();
        (name.trim() != "lo").then_some((*numbers.first()?, *numbers.get(8)?))
    };
    text.lines().filter_map(fields).fold((0.0, 0.0), |(a, b), (received, sent)| (a + received, b + sent))
}

/// Both of them, and the line.
pub(crate) struct Hosts {
    /// The remote shell that leads from the near one to the far one, as the host `backup`.
    pub rsh: String,
    // In the order in which they end: the server runs in the far host's groups, both hosts in the network.
    _sshd: Sshd,
    pub near: Host,
    pub far: Host,
    _network: Network,
}

impl Hosts {
    /// The far host's address.
    pub(crate) const FAR: &str = Network::FAR;

    /// Hosts with a line of so many bits a second each way, or of what the machine can carry. What ssh needs lies in `folder`.
    pub(crate) fn new(rate: Option<u64>, folder: &Path) -> Result<Hosts> {
        ensure!(root(), "hosts need root");
        for tool in ["ip", "tc", "ssh", "sshd", "ssh-keygen", "taskset", "nsenter"] {
            ensure!(dsync_tests::find(tool).is_some(), "{tool} is not installed");
        }
        let network = Network::new(rate)?;
        let several = std::thread::available_parallelism().is_ok_and(|count| count.get() > 1);
        let near = Host::new("near", &network.near(), several.then_some(0))?;
        let far = Host::new("far", &network.far(), several.then_some(1))?;
        let words: Vec<&str> = far.words.iter().map(String::as_str).collect();
        let mut sshd = Sshd::start(&words, Network::FAR, folder)?;
        let within = network.near().join(" ");
        sshd.wait(&format!("{within} {}", sshd.rsh))?;
        Ok(Hosts { rsh: sshd.rsh.clone(), _sshd: sshd, near, far, _network: network })
    }

    /// From now on reads both hosts' counters, until it is asked for them.
    pub(crate) fn sample(self: &Arc<Self>) -> Sampling {
        let stop = Arc::new(AtomicBool::new(false));
        let nothing = Sample { at: 0.0, near: Used::default(), far: Used::default() };
        let samples = Arc::new(Mutex::new(vec![nothing]));
        let (hosts, ended, kept) = (self.clone(), stop.clone(), samples.clone());
        let before = (self.near.used(), self.far.used());
        let began = Instant::now();
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(SAMPLE);
                let (near, far) = (hosts.near.used().since(before.0), hosts.far.used().since(before.1));
                let sample = Sample { at: began.elapsed().as_secs_f64(), near, far };
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
            }
        });
        Sampling { stop, samples, thread: Some(thread) }
    }
}

/// What both hosts had used at a moment, since the sampling began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Seconds since then.
    pub at: f64,
    pub near: Used,
    pub far: Used,
}

/// Samples that are being taken.
pub(crate) struct Sampling {
    stop: Arc<AtomicBool>,
    samples: Arc<Mutex<Vec<Sample>>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampling {
    /// All of them; the last one was taken after the end.
    pub(crate) fn end(mut self) -> Vec<Sample> {
        self.stop();
        std::mem::take(&mut *self.samples.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread holds the hosts.
impl Drop for Sampling {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_as_kernels_print_them() {
        let net = "Inter-|   Receive\n face |bytes\n    lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n  eth0: 7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n";
        assert_eq!(carried(net), (7.0, 9.0));
    }

    #[test]
    fn hosts_count_what_they_spend() {
        let folder = tempfile::tempdir().unwrap();
        let hosts = match Hosts::new(Some(1_000_000_000), folder.path()) {
            Ok(hosts) => Arc::new(hosts),
            Err(error) => return println!("skipped: {error:#}"),
        };
        let sampling = hosts.sample();
        let line = format!("head -c 20000000 /dev/zero | {} backup 'cat >/dev/null'", hosts.rsh);
        let mut send = hosts.near.run(&crate::measure::process::shell(&line));
        crate::measure::process::run(&mut send, Duration::from_secs(60)).unwrap();
        let last = *sampling.end().last().unwrap();
        assert!(last.near.sent > 20e6 && last.far.received > 20e6, "{last:?}");
        assert!(last.near.processor > 0.0 && last.far.processor > 0.0, "{last:?}");
        assert!(last.at >= 0.16, "20 MB over 1 Gbit/s: {last:?}");
        let groups: Vec<PathBuf> =
            [&hosts.near, &hosts.far].iter().flat_map(|host| host.groups.folders.clone()).collect();
        drop(hosts);
        assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
    }
}
