//! The far side in a process that a remote shell starts.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::flow::lock;
use crate::framed::pipe::widen;
use crate::framed::stream::{PipeStream, Wake};
use crate::framed::{FramedStream, StreamOptions, StreamOwner};
use crate::{Error, Link, Result, printable, printable_lines};

impl Link {
    /// Starts `command` on `host` through a remote shell (`["ssh"]`, perhaps with options), and waits for its hello. The
    /// command's words arrive unchanged, whatever is in them. What the far side writes to its standard error
    /// is shown once the link is open, and is part of the error if it fails. From then on a far side that sends nothing
    /// for `timeout` is given up; until then, after `greeting`, or if that is `None` whenever the remote shell does: it may
    /// wait for a password.
    ///
    /// # Errors
    /// [`Error::Start`], [`Error::Rsh`], [`Error::Absent`], [`Error::Command`], [`Error::NotDsync`], [`Error::Version`],
    /// each naming the host and a way out.
    pub fn ssh(
        rsh: &[String],
        host: &str,
        command: &[String],
        timeout: Duration,
        greeting: Option<Duration>,
    ) -> Result<Link> {
        let (remote, reader, writer) = start(rsh, host, command)?;
        widen(&reader);
        widen(&writer);
        let stream = FramedStream::open(host, reader, writer, StreamOptions::of(timeout), Some(remote));
        let link = Link::over(stream.clone());
        if let Some(patience) = greeting {
            stream.greeted_within(patience);
        }
        link.ready()?;
        Ok(link)
    }
}

/// A running remote shell, and its standard error.
struct Remote {
    host: String,
    rsh: String,
    command: Vec<String>,
    child: Mutex<Child>,
    /// The shell may have left processes behind that hold its streams.
    wake: Wake,
    said: Arc<Stderr>,
}

/// Starts `command` on `host`; its output and its input.
fn start(rsh: &[String], host: &str, command: &[String]) -> Result<(Arc<Remote>, PipeStream, PipeStream)> {
    // A host that begins with a dash would be an option to ssh, and options of ssh can run programs.
    if host.is_empty() || host.starts_with('-') || host.contains('\0') {
        return Err(Error::Host(host.to_string()));
    }
    let Some((program, options)) = rsh.split_first() else {
        return Err(Error::Start { program: String::new(), why: "no remote shell was given".into() });
    };
    let failed = |error: io::Error| Error::Start { program: program.clone(), why: error.to_string() };
    let mut line = Command::new(program);
    line.args(options);
    if Path::new(program).file_name().is_some_and(|name| name == "ssh") {
        // Until the far side's hello only ssh can notice that the network is down. The user's own -o comes
        // before this one, and ssh takes the first.
        line.args(["-o", "ServerAliveInterval=30"]);
    }
    line.arg(host).arg(quoted(command));
    line.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let wake = Wake::new().map_err(failed)?;
    let mut child = line.spawn().map_err(failed)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let said = Arc::new(Stderr::default());
    let remote = Arc::new(Remote {
        host: host.to_string(),
        rsh: quoted(rsh),
        command: command.to_vec(),
        child: Mutex::new(child),
        wake,
        said: Arc::clone(&said),
    });
    let (Some(stdin), Some(stdout), Some(stderr)) = (stdin, stdout, stderr) else {
        remote.reap(Duration::ZERO);
        return Err(failed(io::ErrorKind::BrokenPipe.into()));
    };
    let listener = thread::Builder::new().name("link stderr".into()).spawn(move || said.listen(stderr));
    if let Err(error) = listener {
        remote.reap(Duration::ZERO);
        return Err(failed(error));
    }
    let streams =
        remote.wake.stream(stdout.into()).and_then(|out| Ok((out, remote.wake.stream(stdin.into())?)));
    match streams {
        Ok((stdout, stdin)) => Ok((remote, stdout, stdin)),
        Err(error) => {
            remote.reap(Duration::ZERO);
            Err(failed(error))
        }
    }
}

/// One string that a POSIX shell splits into exactly these words.
fn quoted(words: &[String]) -> String {
    let quote = |word: &String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,@+%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.clone()
        } else {
            format!("'{}'", word.replace('\'', r"'\''"))
        }
    };
    words.iter().map(quote).collect::<Vec<_>>().join(" ")
}

impl Remote {
    /// Waits up to this long for the end, then kills.
    fn reap(&self, patience: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + patience;
        loop {
            // Not held while sleeping, so that a kill is possible.
            match lock(&self.child).try_wait() {
                Ok(None) if Instant::now() < until => {}
                Ok(Some(status)) => return Some(status),
                _ => break,
            }
            thread::sleep(Duration::from_millis(5));
        }
        let mut child = lock(&self.child);
        let _ = child.kill();
        child.wait().ok()
    }
}

impl StreamOwner for Remote {
    /// From now on what the far side writes to its standard error is shown as it comes.
    fn greeted(&self) {
        self.said.show();
    }

    fn kill(&self) {
        // An error means that it has ended.
        let _ = lock(&self.child).kill();
        self.wake.end();
    }

    fn settle(&self, patience: Duration) {
        self.reap(patience);
        self.wake.end();
    }

    fn why_it_ended(&self, greeted: bool, why: String) -> Error {
        // The stream has ended, so the process is about to.
        let status = self.reap(Duration::from_secs(5));
        let code = status.and_then(|status| status.code());
        let status = match status {
            Some(status) => match (status.code(), std::os::unix::process::ExitStatusExt::signal(&status)) {
                (Some(code), _) => format!("exit {code}"),
                (None, Some(signal)) => format!("killed by signal {signal}"),
                (None, None) => status.to_string(),
            },
            None => "its end is unknown".into(),
        };
        let said = self.said.last();
        let (host, rsh) = (self.host.clone(), self.rsh.clone());
        if greeted {
            let why = if said.is_empty() { why } else { said };
            let colon = if why.is_empty() { "" } else { ": " };
            return Error::Cut { peer: host, why: format!("{rsh} ended ({status}){colon}{why}") };
        }
        match code {
            Some(255) | None => Error::Rsh { rsh, host, status, said },
            Some(127) => {
                Error::Absent { program: self.command.first().cloned().unwrap_or_default(), host, said }
            }
            Some(_) => Error::Command { rsh, command: self.command.join(" "), host, status, said },
        }
    }
}

/// What the remote shell and the far side wrote to their standard error.
#[derive(Default)]
struct Stderr {
    state: Mutex<StderrState>,
    ended: Condvar,
}

#[derive(Default)]
struct StderrState {
    /// The last of it, in lines.
    lines: VecDeque<Vec<u8>>,
    /// Before the hello it is kept back: should the link fail, it is shown once, in the error.
    shown: bool,
    ended: bool,
}

/// Lines, and bytes of a line, that are kept.
const LINES: usize = 20;
const LINE: usize = 1000;

/// Another host's output, made safe to print.
fn shown(bytes: &[u8]) -> String {
    printable_lines(&String::from_utf8_lossy(bytes))
}

impl Stderr {
    fn listen(&self, mut stderr: ChildStderr) {
        let mut chunk = [0; 4096];
        loop {
            match stderr.read(&mut chunk) {
                Ok(0) => break,
                Ok(len) => self.hear(&chunk[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        lock(&self.state).ended = true;
        self.ended.notify_all();
    }

    fn hear(&self, bytes: &[u8]) {
        let mut state = lock(&self.state);
        if state.shown {
            let _ = io::stderr().write_all(shown(bytes).as_bytes());
        }
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            match state.lines.back_mut() {
                Some(line) if line.last() != Some(&b'\n') && line.len() < LINE => {
                    line.extend_from_slice(piece)
                }
                _ => state.lines.push_back(piece.to_vec()),
            }
            if state.lines.len() > LINES {
                state.lines.pop_front();
            }
        }
    }

    fn show(&self) {
        let mut state = lock(&self.state);
        state.shown = true;
        for line in &state.lines {
            let _ = io::stderr().write_all(shown(line).as_bytes());
        }
    }

    /// The last lines as one. A persistent connection of ssh can hold the stream open, so this does not wait for long.
    fn last(&self) -> String {
        let state = lock(&self.state);
        let (state, _) = self
            .ended
            .wait_timeout_while(state, Duration::from_millis(300), |state| !state.ended)
            .unwrap_or_else(PoisonError::into_inner);
        let lines =
            state.lines.iter().map(|line| printable(String::from_utf8_lossy(line).trim()).into_owned());
        let lines: Vec<String> = lines.filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(5)..].join("; ")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Message;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| word.to_string()).collect()
    }

    /// A remote shell that takes `HOST COMMAND` as ssh does, and runs the command here.
    fn local(script: &str) -> Vec<String> {
        words(&["sh", "-c", script, "rsh"])
    }

    fn fails(script: &str, command: &[&str]) -> Error {
        match Link::ssh(&local(script), "backup", &words(command), TIMEOUT, None) {
            Ok(_) => panic!("{script} should not work"),
            Err(error) => error,
        }
    }

    #[test]
    fn words_arrive_as_they_are() {
        let given = words(&[
            "a b",
            "",
            "it's",
            "$HOME",
            "`id`",
            "\"q\"",
            "*",
            "~",
            "new\nline",
            "\\",
            "plain-1",
            ";&|",
        ]);
        let line = format!("printf '%s\\0' {}", quoted(&given));
        let out = Command::new("sh").args(["-c", &line]).output().unwrap().stdout;
        let got: Vec<&[u8]> = out.split(|&byte| byte == 0).collect();
        assert_eq!(got.len(), given.len() + 1);
        for (given, got) in given.iter().zip(got) {
            assert_eq!(given.as_bytes(), got);
        }
        assert_eq!(quoted(&words(&["dsync", "receive", "/srv/vm.raw"])), "dsync receive /srv/vm.raw");
    }

    proptest! {
        #[test]
        fn any_word_arrives_as_it_is(word in "[^\0]{0,20}") {
            let line = format!("printf %s {}", quoted(std::slice::from_ref(&word)));
            let out = Command::new("sh").args(["-c", &line]).output().unwrap().stdout;
            prop_assert_eq!(word.as_bytes(), &out[..]);
        }
    }

    #[test]
    fn a_process_carries_a_conversation() {
        // `cat` answers like a dsync that echoes everything.
        let link = Link::ssh(&local("exec sh -c \"$2\""), "backup", &words(&["cat"]), TIMEOUT, None).unwrap();
        let (tx, rx) = link.split();
        for kind in 0..100 {
            tx.send(Message { kind, body: device::Buf::new(1 << 20), ..Message::default() }).unwrap();
            assert_eq!(rx.recv().unwrap().unwrap().kind, kind);
        }
        tx.finish().unwrap();
        assert!(rx.recv().unwrap().is_none());
    }

    #[test]
    fn failures_name_the_host_and_a_way_out() {
        let denied = "echo 'Permission denied (publickey).' >&2; exit 255";
        let shell = quoted(&local(denied));
        assert_eq!(
            fails(denied, &["dsync"]).to_string(),
            format!(
                "{shell} to backup failed (exit 255): Permission denied (publickey).: try \"{shell} backup true\" by hand"
            )
        );
        assert_eq!(
            fails("echo 'sh: 1: dsync: not found' >&2; exit 127", &["dsync", "receive"]).to_string(),
            "dsync is not installed on backup, or not in the PATH of its non-interactive shell: sh: 1: dsync: not found: install it there, or give its path with --remote-dsync"
        );
        assert_eq!(
            fails("echo no disk >&2; exit 1", &["dsync", "receive"]).to_string(),
            "\"dsync receive\" on backup failed (exit 1): no disk"
        );
        let silent = fails("exit 1", &["dsync", "receive"]).to_string();
        assert!(
            silent.starts_with("the remote shell \"sh -c 'exit 1' rsh\" ended (exit 1) without an answer"),
            "{silent}"
        );
        assert!(
            matches!(fails("echo Welcome; sleep 100", &["dsync"]), Error::NotDsync { said, .. } if said == "Welcome")
        );
        assert!(matches!(fails("kill -9 $$", &["dsync"]), Error::Rsh { .. }));
        let error = Link::ssh(&words(&["/no/such/ssh"]), "backup", &words(&["dsync"]), TIMEOUT, None)
            .map(drop)
            .unwrap_err();
        assert!(error.to_string().starts_with("cannot start \"/no/such/ssh\" (No such file"), "{error}");
        assert!(matches!(Link::ssh(&[], "backup", &[], TIMEOUT, None).map(drop), Err(Error::Start { .. })));
        for host in ["", "-oProxyCommand=id"] {
            let error =
                Link::ssh(&local("cat"), host, &words(&["dsync"]), TIMEOUT, None).map(drop).unwrap_err();
            assert_eq!(error, Error::Host(host.to_string()));
        }
    }

    #[test]
    fn a_process_that_dies_later_is_a_cut() {
        // The hello comes back, then nothing more.
        let shell = local("head -c 16; echo 'Connection reset' >&2; exit 255");
        let link = Link::ssh(&shell, "backup", &[], TIMEOUT, None).unwrap();
        let (tx, rx) = link.split();
        let error = rx.recv().unwrap_err();
        let why = format!("{} ended (exit 255): Connection reset", quoted(&shell));
        assert_eq!(error.to_string(), format!("the link to backup was cut: {why}"));
        assert_eq!(tx.send(Message::default()).unwrap_err(), error);
    }

    #[test]
    fn a_dropped_link_leaves_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pid");
        let script = format!("echo $$ > {}; exec cat", file.display());
        let link = Link::ssh(&local(&script), "backup", &[], TIMEOUT, None).unwrap();
        let pid = std::fs::read_to_string(&file).unwrap();
        let process = format!("/proc/{}", pid.trim());
        assert!(Path::new(&process).exists());
        drop(link);
        assert!(!Path::new(&process).exists());
    }

    /// A shell that connects, and whose dsync then says nothing.
    #[test]
    fn a_far_side_that_does_not_greet_is_given_up() {
        let (began, patience) = (Instant::now(), Duration::from_millis(300));
        let mute = Link::ssh(&local("exec sleep 600"), "backup", &[], TIMEOUT, Some(patience));
        let error = mute.map(drop).unwrap_err();
        assert!(error.to_string().contains("did not answer there within 0.3 s"), "{error}");
        assert!(error.is_cut() && began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    }
}
