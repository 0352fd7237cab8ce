//! Commands of the user: `--hook` is held open around the cut of a sync, `--on-failure` is run after a command failed.
//!
//! ```text
//!     dsync                                   the hook
//!       starts it, says "begin"        ──▶      brings the application into a state that may be copied
//!                                      ◀──    says "ready"
//!       cuts (freezes, thaws)
//!       says "cut"                     ──▶      lets the application go on
//!       sends and commits
//!       says "end", or "failed"        ──▶      ends
//! ```

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use source::Around;
use sync::{CutHook, SyncError};

use crate::jobs::job;
use crate::output::Output;
use crate::terms::units;

/// What of a command's output is shown.
const OUTPUT_MAX: usize = 4 << 10;
/// How long the output of a command that has ended is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long the command of `--on-failure` may take.
const NOTICE_LIMIT: Duration = Duration::from_secs(60);

/// The command of `--hook`.
#[derive(Debug)]
pub(crate) struct Hook {
    command: String,
    limit: Duration,
    environment: [(&'static str, String); 2],
    running: Mutex<Option<UserCommand>>,
    /// Waits for the end of the command of the sync before.
    ending: Mutex<Option<JoinHandle<()>>>,
}

/// A command that runs, in a process group of its own.
#[derive(Debug)]
pub(crate) struct UserCommand {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Gets a word for each line "ready", and is closed with the command's output.
    ready: Receiver<()>,
    said: Arc<Mutex<Vec<u8>>>,
}

impl UserCommand {
    /// Starts it by the shell.
    pub(crate) fn start(
        command: &str,
        environment: &[(&'static str, String)],
    ) -> std::io::Result<UserCommand> {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", command]).envs(environment.iter().map(|(name, value)| (name, value)));
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = shell.spawn()?;
        let (tell, ready) = channel();
        let said: Arc<Mutex<Vec<u8>>> = Arc::default();
        for pipe in [child.stdout.take().map(boxed), child.stderr.take().map(boxed)].into_iter().flatten() {
            let (tell, said) = (tell.clone(), Arc::clone(&said));
            std::thread::Builder::new().name("hook".into()).spawn(move || gather(pipe, &tell, &said))?;
        }
        let stdin = child.stdin.take();
        Ok(UserCommand { child, stdin, ready, said })
    }

    /// Says a word. A command that reads no more is not an error here.
    fn say(&mut self, word: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = writeln!(stdin, "{word}").and_then(|()| stdin.flush());
        }
    }

    /// How it has ended, if it has.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok().flatten();
        // What it printed last may not have been read yet; what it left running may hold the pipes.
        status.inspect(|_| while self.ready.recv_timeout(LAST_WORDS).is_ok() {})
    }

    /// Waits for its end. `None` if it was killed, because it did not end in time.
    pub(crate) fn end(&mut self, limit: Duration) -> Option<ExitStatus> {
        self.stdin = None;
        let until = Instant::now() + limit;
        while Instant::now() < until {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
        None
    }

    /// What it has printed so far, after a colon.
    pub(crate) fn output(&self) -> String {
        let said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&said).trim().to_owned();
        if text.is_empty() { text } else { format!(": {text}") }
    }
}

fn boxed(pipe: impl Read + Send + 'static) -> Box<dyn Read + Send> {
    Box::new(pipe)
}

/// Keeps what a command prints, and tells of each line "ready".
fn gather(pipe: Box<dyn Read + Send>, tell: &Sender<()>, said: &Mutex<Vec<u8>>) {
    let mut lines = BufReader::new(pipe);
    let mut line = Vec::new();
    // A line without an end is bounded, too.
    while let Ok(1..) = lines.by_ref().take(OUTPUT_MAX as u64).read_until(b'\n', &mut line) {
        if line.trim_ascii() == b"ready" {
            let _ = tell.send(());
        } else {
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            let room = OUTPUT_MAX.saturating_sub(said.len());
            said.extend_from_slice(&line[..line.len().min(room)]);
        }
        line.clear();
    }
}

impl Hook {
    /// A hook for a sync of `source` to `replica`.
    pub(crate) fn new(command: &str, limit: Duration, source: &str, replica: &str) -> Hook {
        let environment = [("DSYNC_SOURCE", source.to_owned()), ("DSYNC_REPLICA", replica.to_owned())];
        Hook {
            command: command.to_owned(),
            limit,
            environment,
            running: Mutex::default(),
            ending: Mutex::default(),
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<UserCommand>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sync has ended. Warns if the hook has not ended well.
    pub(crate) fn end(&self, done: bool, output: &Output) {
        let running = self.running().take();
        running.into_iter().for_each(|running| self.dismiss(running, done, output));
        let ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner).take();
        ending.map(JoinHandle::join);
    }

    /// Tells the hook that the sync has ended and, unlike [`Hook::end`], does not wait for its exit: what is sent next goes on meanwhile.
    pub(crate) fn end_later(self: &Arc<Hook>, done: bool, output: &Output) {
        // One that gets ready is of the next cut.
        let Ok(Some(running)) = self.running.try_lock().map(|mut slot| slot.take()) else { return };
        let (hook, output) = (Arc::clone(self), output.alike());
        let dismiss = move || hook.dismiss(running, done, &output);
        // Without the thread the hook's standard input is closed.
        let ending = std::thread::Builder::new().name("hook".into()).spawn(dismiss);
        *self.ending.lock().unwrap_or_else(PoisonError::into_inner) = ending.ok();
    }

    fn dismiss(&self, mut running: UserCommand, done: bool, output: &Output) {
        running.say(if done { "end" } else { "failed" });
        let ended = running.end(self.limit);
        let why = match ended {
            Some(status) if status.success() => return,
            Some(status) => format!("failed after the cut ({status})"),
            None => {
                format!("did not end within {}, and was killed", units::seconds(self.limit.as_secs_f64()))
            }
        };
        output.warn(&format!("hook \"{}\" {why}{}", self.command, running.output()));
    }
}

/// The hook around the clone of an image that is tracked by clones.
impl Around for Hook {
    fn before(&self) -> Result<(), String> {
        CutHook::before(self).map_err(|error| error.to_string())
    }

    fn after(&self, made: bool) {
        CutHook::after(self, made);
    }
}

impl CutHook for Hook {
    fn before(&self) -> Result<(), SyncError> {
        let fail = |why: String| SyncError::Hook(format!("hook \"{}\" {why}", self.command));
        let mut slot = self.running();
        // Of an attempt that could not read all of the source.
        if let Some(mut before) = slot.take() {
            before.say("failed");
            before.end(self.limit);
        }
        let mut running = UserCommand::start(&self.command, &self.environment)
            .map_err(|error| fail(format!("cannot be started: {error}")))?;
        running.say("begin");
        match running.ready.recv_timeout(self.limit) {
            Ok(()) => {
                *slot = Some(running);
                Ok(())
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = running.end(self.limit);
                let status = status.map_or_else(|| "killed".to_owned(), |status| status.to_string());
                Err(fail(format!(
                    "ended ({status}) before it said \"ready\", so the sync ended before the cut{}",
                    running.output()
                )))
            }
            Err(RecvTimeoutError::Timeout) => {
                running.end(Duration::ZERO);
                let limit = units::seconds(self.limit.as_secs_f64());
                Err(fail(format!(
                    "did not say \"ready\" within {limit} and was killed, so the sync ended before the cut; --hook-limit allows more{}",
                    running.output()
                )))
            }
        }
    }

    fn after(&self, made: bool) {
        if let Some(running) = self.running().as_mut() {
            running.say(if made { "cut" } else { "failed" });
        }
    }
}

/// Runs the command of `--on-failure`, with the job, the exit code and the message in its environment.
pub(crate) fn on_failure(command: &str, code: u8, message: &str, output: &Output) {
    let job = job::running().map_or_else(String::new, |job| job.name().to_owned());
    let environment = [
        ("DSYNC_JOB", job),
        ("DSYNC_EXIT_CODE", code.to_string()),
        ("DSYNC_MESSAGE", link::printable(&message.replace('\n', ". ")).into_owned()),
    ];
    let why = match UserCommand::start(command, &environment) {
        Err(error) => format!("cannot be started: {error}"),
        Ok(mut running) => match running.end(NOTICE_LIMIT) {
            Some(status) if status.success() => return,
            Some(status) => format!("failed ({status}){}", running.output()),
            None => format!("did not end within a minute, and was killed{}", running.output()),
        },
    };
    output.warn(&format!("--on-failure \"{command}\" {why}"));
}
