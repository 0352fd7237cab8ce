//! A site as a user has it: a folder of images, a state folder, the `dsync` command, and servers.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::nbd::{Address, Client};
use crate::{Background, Run};

/// The binary under test.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("DSYNC_BIN") {
            let path = PathBuf::from(path);
            assert!(path.is_file(), "DSYNC_BIN={} is no file", path.display());
            return std::path::absolute(path).expect("the current folder");
        }
        let profile = crate::profile_dir();
        let target = profile.parent().expect("target");
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.args(["build", "--quiet", "-p", "dsync", "--target-dir"]).arg(target);
        if profile.file_name() == Some(OsStr::new("release")) {
            build.arg("--release");
        }
        let status = build.current_dir(crate::repository()).status().expect("cargo");
        assert!(status.success(), "cargo build -p dsync failed");
        profile.join("dsync")
    })
}

/// One machine's worth of dsync: images, state, sockets. Two of them on one machine behave as two hosts.
pub struct Site {
    images: TempDir,
    sockets: TempDir,
    /// Where its trackers are pinned.
    pins: PathBuf,
}

impl Default for Site {
    fn default() -> Site {
        Site::new()
    }
}

impl Site {
    /// A fresh site.
    pub fn new() -> Site {
        Site::with(crate::on_disk())
    }

    /// A site in memory, where there is such a place: for tests of what needs no real disk, and no power cut.
    pub fn in_memory() -> Site {
        Site::with(testing::in_memory())
    }

    fn with(images: TempDir) -> Site {
        Site { images, sockets: testing::temporary(), pins: testing::leftovers::pins(next()) }
    }

    /// The folder of the images.
    pub fn dir(&self) -> &Path {
        self.images.path()
    }

    /// A path beside the images.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// The state folder.
    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// Where its trackers are pinned.
    pub fn pins(&self) -> &Path {
        &self.pins
    }

    /// A sparse image.
    pub fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        crate::image::sparse(&path, size);
        path
    }

    /// A place for a socket, with a short path.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.sockets.path().join(name)
    }

    /// The command, in this site's environment.
    pub fn dsync<A: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = A>) -> Run {
        self.run(binary()).args(args)
    }

    /// The command, with a listening socket passed to it as a service manager does.
    pub fn passed<A: AsRef<OsStr>>(
        &self,
        socket: impl Into<OwnedFd>,
        args: impl IntoIterator<Item = A>,
    ) -> Run {
        let script = "exec 3<&0 </dev/null; export LISTEN_FDS=${LISTEN_FDS-1} LISTEN_PID=${LISTEN_PID-$$}; exec \"$@\"";
        self.run("/bin/sh".as_ref()).stdin(socket).args(["-c", script, "sh"]).arg(binary()).args(args)
    }

    /// The command, under `strace`, which kills it at this rename of one of its threads, counted from 1.
    pub fn killed_at_rename<A: AsRef<OsStr>>(&self, rename: u64, args: impl IntoIterator<Item = A>) -> Run {
        let inject = format!("inject=rename,renameat,renameat2:signal=KILL:when={rename}");
        let strace = self.run(&crate::find("strace").expect("strace"));
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", &inject]).arg(binary()).args(args)
    }

    /// Another program, in this site's environment.
    pub fn run(&self, program: &Path) -> Run {
        let mut path = vec![binary().parent().expect("a folder").to_path_buf()];
        path.extend(crate::search_path());
        Run::new(program)
            .env("PATH", std::env::join_paths(path).expect("PATH"))
            .env("DSYNC_STATE_DIR", self.state())
            .env("DSYNC_CONF_DIR", self.path("conf"))
            .env("DSYNC_RUN_DIR", self.path("run"))
            .env("DSYNC_BPF_DIR", &self.pins)
            .env("HOME", self.dir())
            .dir(self.dir())
    }

    /// `dsync sync SOURCE REPLICA --json` with more options.
    pub fn sync(&self, source: &Path, replica: &Path, options: &[&str]) -> Run {
        self.dsync(["sync"]).arg(source).arg(replica).arg("--json").args(options)
    }

    /// Serves images on a socket of its own and waits until it answers.
    pub fn serve(&self, images: &[&Path], options: &[&str]) -> Server {
        self.serve_with(images, options, &[])
    }

    /// The same, with more in its environment.
    pub fn serve_with(&self, images: &[&Path], options: &[&str], environment: &[(&str, &str)]) -> Server {
        self.start(self.socket(&format!("nbd-{}", next())), images, options, environment)
    }

    /// The same on a socket that clients know already.
    pub fn serve_on(&self, socket: PathBuf, images: &[&Path], options: &[&str]) -> Server {
        self.start(socket, images, options, &[])
    }

    fn start(
        &self,
        socket: PathBuf,
        images: &[&Path],
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Server {
        let run = self.dsync(["serve"]).args(images).arg("--socket").arg(&socket).args(options);
        let process = environment.iter().fold(run, |run, (name, value)| run.env(name, value)).start();
        let mut server = Server { process: Some(process), socket };
        server.wait();
        server
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        testing::leftovers::unpin(&self.pins);
    }
}

fn next() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A `dsync serve` in the background; killed and reaped at the latest when dropped.
pub struct Server {
    process: Option<Background>,
    socket: PathBuf,
}

impl Server {
    /// Waits until the server answers.
    fn wait(&mut self) {
        let until = Instant::now() + Duration::from_secs(30);
        let address = self.address();
        while crate::nbd::list(&address).is_err() {
            let process = self.process.as_mut().expect("a server");
            if process.ended().is_some() || Instant::now() > until {
                let output = self.process.take().expect("a server").killed();
                panic!("the server does not answer: {output}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Where our own client connects to.
    pub fn address(&self) -> Address {
        Address::Unix(self.socket.clone())
    }

    /// An export's URI, for other clients.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// Connects to an export.
    pub fn client(&self, export: &str) -> Client {
        Client::connect(&self.address(), export).unwrap_or_else(|e| panic!("cannot connect to {export}: {e}"))
    }

    /// The id of its process.
    pub fn id(&self) -> i32 {
        self.process.as_ref().expect("a server").pid().as_raw_nonzero().get()
    }

    /// The process.
    pub fn process(&mut self) -> &mut Background {
        self.process.as_mut().expect("a server")
    }

    /// Ends the server as its user would, and fails the test if it minds.
    pub fn stop(mut self) -> crate::Output {
        let mut process = self.process.take().expect("a server");
        process.signal(Signal::TERM);
        let output = process.output(Duration::from_secs(60));
        assert!(output.status.success(), "the server did not end well: {output}");
        output
    }

    /// Kills the server with SIGKILL.
    pub fn kill(mut self) -> crate::Output {
        self.process.take().expect("a server").killed()
    }
}
