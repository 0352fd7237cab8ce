//! Commands with a time limit, and background processes that never outlive their test.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// A command to be run once.
#[derive(Debug)]
pub struct Run {
    command: Command,
    input: Option<Vec<u8>>,
    stdin: Option<OwnedFd>,
    limit: Duration,
}

/// How a command went.
pub struct Output {
    /// The command, for messages.
    pub command: String,
    /// Its exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error, as text.
    pub stderr: String,
    /// How long it took.
    pub time: Duration,
}

impl Run {
    /// A command by its name (looked up in root's PATH too) or path. The limit is three minutes unless said otherwise: disks stand still for one.
    pub fn new(program: impl AsRef<OsStr>) -> Run {
        let program = program.as_ref();
        let found = program.to_str().and_then(crate::find).unwrap_or_else(|| PathBuf::from(program));
        // It dies with the thread that starts it. Setting that before it is executed would need a fork, of all that the tests hold.
        let mut command = Command::new(crate::find("setpriv").expect("setpriv"));
        command.args(["--pdeathsig", "KILL", "--"]).arg(found);
        command.env("LC_ALL", "C");
        command.env("PATH", std::env::join_paths(crate::search_path()).expect("PATH"));
        Run { command, input: None, stdin: None, limit: Duration::from_secs(180) }
    }

    /// A line for `/bin/sh`.
    pub fn shell(line: &str) -> Run {
        Run::new("/bin/sh").args(["-c", line])
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Run {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Run {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Run {
        self.command.env(name, value);
        self
    }

    /// Runs in a folder.
    pub fn dir(mut self, dir: &Path) -> Run {
        self.command.current_dir(dir);
        self
    }

    /// What standard input holds; without it, nothing.
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Run {
        self.input = Some(bytes.into());
        self
    }

    /// What standard input is, such as a socket.
    pub fn stdin(mut self, file: impl Into<OwnedFd>) -> Run {
        self.stdin = Some(file.into());
        self
    }

    /// The time after which the command and its children are killed and the test fails.
    pub fn limit(mut self, limit: Duration) -> Run {
        self.limit = limit;
        self
    }

    fn text(&self) -> String {
        let words: Vec<&OsStr> = self.command.get_args().skip(3).collect();
        words.join(OsStr::new(" ")).to_string_lossy().into_owned()
    }

    /// Runs to the end, whatever the end is.
    pub fn output(self) -> Output {
        let limit = self.limit;
        let started = Instant::now();
        let command = self.text();
        let mut process = self.start();
        let status = process.wait_for(limit);
        let (stdout, stderr) = process.collect();
        let output =
            Output { command, status: status.unwrap_or_default(), stdout, stderr, time: started.elapsed() };
        assert!(status.is_some(), "still running after {limit:?}, killed: {output}");
        output
    }

    /// Runs, and fails the test if the command fails.
    pub fn ok(self) -> Output {
        let output = self.output();
        assert!(output.status.success(), "failed: {output}");
        output
    }

    /// Runs, and fails the test unless the command ends with this exit code.
    pub fn code(self, code: i32) -> Output {
        let output = self.output();
        assert_eq!(output.status.code(), Some(code), "exit code {code} was expected: {output}");
        output
    }

    /// Starts in the background, in a process group of its own. Call it from the test's own thread: the process dies
    /// with the thread that started it, so that nothing outlives a test that is itself killed.
    pub fn start(mut self) -> Background {
        let text = self.text();
        self.command.stdin(match self.stdin.take() {
            Some(file) => file.into(),
            None if self.input.is_some() => Stdio::piped(),
            None => Stdio::null(),
        });
        self.command.stdout(Stdio::piped()).stderr(Stdio::piped());
        spawn(self.command, text, self.input)
    }

    /// As [`Run::start`], with standard input and output in the test's hands: take them from [`Background::child`].
    pub fn start_talking(mut self) -> Background {
        let text = self.text();
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = spawn_bare(self.command, text);
        process.stderr = process.child.stderr.take().map(gather);
        process
    }
}

fn spawn_bare(mut command: Command, text: String) -> Background {
    let child = command.process_group(0).spawn().unwrap_or_else(|e| panic!("cannot start {text}: {e}"));
    Background { text, child, stdout: None, stderr: None, ended: None }
}

fn spawn(command: Command, text: String, input: Option<Vec<u8>>) -> Background {
    let mut process = spawn_bare(command, text);
    process.stdout = process.child.stdout.take().map(gather);
    process.stderr = process.child.stderr.take().map(gather);
    if let (Some(bytes), Some(mut pipe)) = (input, process.child.stdin.take()) {
        // A command may end before it has read everything.
        std::thread::spawn(move || drop(pipe.write_all(&bytes)));
    }
    process
}

/// What a pipe has yielded so far, and the thread that reads on.
#[derive(Debug)]
struct Gathered {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

fn gather(mut pipe: impl Read + Send + 'static) -> Gathered {
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let sink = bytes.clone();
    let reader = std::thread::spawn(move || {
        let mut chunk = [0; 1 << 16];
        while let Ok(len @ 1..) = pipe.read(&mut chunk) {
            sink.lock().expect("a reader").extend_from_slice(&chunk[..len]);
        }
    });
    Gathered { bytes, reader }
}

impl Gathered {
    /// Everything, once the pipe is closed. An orphan may hold it open: it is not waited for long.
    fn take(self) -> Vec<u8> {
        let until = Instant::now() + Duration::from_secs(5);
        while !self.reader.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::mem::take(&mut self.bytes.lock().expect("a reader"))
    }
}

/// A process in the background; killed with its children, and reaped, at the latest when this is dropped.
#[derive(Debug)]
pub struct Background {
    text: String,
    /// The process itself.
    pub child: Child,
    stdout: Option<Gathered>,
    stderr: Option<Gathered>,
    ended: Option<ExitStatus>,
}

impl Background {
    /// The process id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("waiting for a child");
        }
        self.ended
    }

    /// Waits for its end. After `limit` it is killed, and the answer is `None`.
    pub fn wait_for(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        let mut pause = Duration::from_millis(1);
        while Instant::now() < until {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(20));
        }
        self.kill();
        None
    }

    /// Sends a signal to the process alone.
    pub fn signal(&mut self, signal: Signal) {
        if self.ended().is_none() {
            let _ = rustix::process::kill_process(self.pid(), signal);
        }
    }

    /// Kills the whole process group with SIGKILL and reaps the process.
    pub fn kill(&mut self) {
        if self.ended().is_none() {
            let _ = rustix::process::kill_process_group(self.pid(), Signal::KILL);
            self.ended = Some(self.child.wait().expect("waiting for a child"));
        }
    }

    /// The processes that descend from it, with their command lines.
    pub fn descendants(&self) -> Vec<(Pid, String)> {
        let (mut found, mut parents) = (Vec::new(), vec![self.pid()]);
        while let Some(parent) = parents.pop() {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", parent.as_raw_nonzero()));
            for task in tasks.into_iter().flatten().flatten() {
                let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
                for child in children.split_whitespace().filter_map(|c| Pid::from_raw(c.parse().ok()?)) {
                    let line = std::fs::read_to_string(format!("/proc/{}/cmdline", child.as_raw_nonzero()));
                    found.push((child, line.unwrap_or_default().replace('\0', " ")));
                    parents.push(child);
                }
            }
        }
        found
    }

    /// Its descendant whose program's name ends with the first word and whose first argument is the second: not the shells
    /// that call it.
    pub fn descendant(&self, program: &str, argument: &str) -> Option<Pid> {
        let is = |line: &str| {
            let mut words = line.split(' ');
            words.next().is_some_and(|word| word.ends_with(program)) && words.next() == Some(argument)
        };
        self.descendants().into_iter().find(|(_, line)| is(line)).map(|(pid, _)| pid)
    }

    fn collect(&mut self) -> (Vec<u8>, String) {
        let take = |pipe: &mut Option<Gathered>| pipe.take().map(Gathered::take).unwrap_or_default();
        (take(&mut self.stdout), String::from_utf8_lossy(&take(&mut self.stderr)).into_owned())
    }

    /// Waits for the end, at most `limit`, and hands out what was written. A process that runs on is killed and fails
    /// the test.
    pub fn output(mut self, limit: Duration) -> Output {
        let started = Instant::now();
        let status = self.wait_for(limit);
        let (stdout, stderr) = self.collect();
        let (command, time) = (self.text.clone(), started.elapsed());
        let output = Output { command, status: status.unwrap_or_default(), stdout, stderr, time };
        assert!(status.is_some(), "still running after {limit:?}, killed: {output}");
        output
    }

    /// Waits, up to a minute, until it has written these words to standard output.
    pub fn wait_to_say(&mut self, words: &str) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let bytes = self.stdout.as_ref().map(|pipe| pipe.bytes.lock().expect("a reader").clone());
            if String::from_utf8_lossy(&bytes.unwrap_or_default()).contains(words) {
                return;
            }
            assert!(self.ended().is_none(), "it ended without '{words}': {}", self.stderr_so_far());
            assert!(Instant::now() < until, "it does not say '{words}': {}", self.stderr_so_far());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it has written to standard error so far.
    pub fn stderr_so_far(&self) -> String {
        so_far(&self.stderr)
    }

    /// What it has written to standard output so far.
    pub fn stdout_so_far(&self) -> String {
        so_far(&self.stdout)
    }

    /// Kills it with SIGKILL and hands out what it wrote until then.
    pub fn killed(mut self) -> Output {
        self.kill();
        self.output(Duration::from_secs(10))
    }
}

fn so_far(pipe: &Option<Gathered>) -> String {
    let bytes = pipe.as_ref().map(|pipe| pipe.bytes.lock().expect("a reader").clone());
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}

impl Drop for Background {
    fn drop(&mut self) {
        self.kill();
        // A test that fails shows what its servers had to say.
        if std::thread::panicking() {
            let (_, stderr) = self.collect();
            println!("--- standard error of {}:\n{stderr}", self.text);
        }
    }
}

impl Output {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// The JSON objects of standard output, one a line.
    pub fn json(&self) -> Vec<serde_json::Value> {
        let text = self.text();
        text.lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|e| panic!("not JSON ({e}): {line}\nof {self}"))
            })
            .collect()
    }

    /// The one line with `"message_type": "summary"`.
    pub fn summary(&self) -> serde_json::Value {
        let lines = self.json();
        let mut summaries = lines.into_iter().filter(|line| line["message_type"] == "summary");
        let summary = summaries.next().unwrap_or_else(|| panic!("no summary: {self}"));
        assert!(summaries.next().is_none(), "two summaries: {self}");
        summary
    }

    /// Fails the test unless standard error names every one of `words`.
    pub fn says(&self, words: &[&str]) -> &Output {
        for word in words {
            assert!(self.stderr.contains(word), "the message lacks '{word}': {self}");
        }
        assert!(!self.stderr.contains("panicked"), "a panic is no message: {self}");
        self
    }

    /// True if it was ended by a signal.
    pub fn was_killed(&self) -> bool {
        self.status.signal().is_some()
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = String::from_utf8_lossy(&self.stdout[..self.stdout.len().min(4000)]);
        writeln!(f, "{}\n{} after {:.1?}", self.command, self.status, self.time)?;
        write!(f, "--- standard output:\n{shown}\n--- standard error:\n{}", self.stderr)
    }
}

/// The words of a command line, for calls such as `words(["sync", source, replica])`.
pub fn words<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> Vec<OsString> {
    args.into_iter().map(Into::into).collect()
}
