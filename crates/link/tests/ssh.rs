//! The link through a real sshd on loopback. Called with `far`, this program is the far side itself.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use link::{Error, Link, Message};

/// Sends everything back, and its own arguments first.
fn far() -> link::Result<()> {
    let (tx, rx) = Link::stdio()?.split();
    println!("this goes to standard error");
    tx.send_json(1, &std::env::args().skip(2).collect::<Vec<_>>())?;
    while let Some(message) = rx.recv()? {
        tx.send(message)?;
    }
    tx.finish()
}

const TIMEOUT: Duration = Duration::from_secs(30);

/// An sshd with its own keys and configuration, stopped when dropped.
struct Sshd {
    process: Child,
    folder: tempfile::TempDir,
    port: u16,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(program)).find(|file| file.is_file())
}

fn keygen(file: &Path) {
    let args = ["-q", "-t", "ed25519", "-N", "", "-f"];
    assert!(Command::new("ssh-keygen").args(args).arg(file).status().unwrap().success());
}

impl Sshd {
    /// `None` if this machine has no sshd, or none that starts.
    fn start() -> Option<Sshd> {
        let program = find("sshd")?;
        find("ssh")?;
        find("ssh-keygen")?;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        keygen(&at("host_key"));
        keygen(&at("key"));
        fs::copy(at("key.pub"), at("authorized_keys")).unwrap();
        fs::set_permissions(at("authorized_keys"), fs::Permissions::from_mode(0o600)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let here = folder.path().display();
        let config = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {here}/host_key\nAuthorizedKeysFile {here}/authorized_keys\n\
             PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPubkeyAuthentication yes\n"
        );
        fs::write(at("sshd_config"), config).unwrap();
        let user = String::from_utf8(Command::new("id").arg("-un").output().unwrap().stdout).unwrap();
        let config = format!(
            "Host backup absent\n  HostName 127.0.0.1\n  Port {port}\n  User {}\n  IdentityFile {here}/key\n  IdentitiesOnly yes\n\
             \x20 UserKnownHostsFile {here}/known_hosts\n  StrictHostKeyChecking accept-new\n  BatchMode yes\n  LogLevel ERROR\n\
             Host stranger\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile /nonexistent\n  IdentityAgent none\n  IdentitiesOnly yes\n\
             \x20 UserKnownHostsFile {here}/known_hosts\n  StrictHostKeyChecking accept-new\n  BatchMode yes\n  LogLevel ERROR\n\
             Host down\n  HostName 127.0.0.1\n  Port 1\n",
            user.trim()
        );
        fs::write(at("ssh_config"), config).unwrap();
        if rustix::process::geteuid().is_root() {
            // Where sshd keeps its unprivileged half; a fresh machine may lack it.
            let _ = fs::create_dir_all("/run/sshd");
        }
        let log = fs::File::create(at("log")).unwrap();
        let mut process = Command::new(program);
        process.args(["-D", "-e", "-f"]).arg(at("sshd_config")).stdin(Stdio::null()).stderr(log);
        let mut sshd = Sshd { process: process.spawn().unwrap(), folder, port };
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", sshd.port)).is_err() {
            if sshd.process.try_wait().unwrap().is_some() || Instant::now() > until {
                eprintln!("{}", fs::read_to_string(sshd.folder.path().join("log")).unwrap_or_default());
                return None;
            }
            thread::sleep(Duration::from_millis(20));
        }
        Some(sshd)
    }

    fn rsh(&self) -> Vec<String> {
        let config = self.folder.path().join("ssh_config").to_str().unwrap().to_string();
        ["ssh".into(), "-F".into(), config].into()
    }

    fn connect(&self, host: &str, words: &[&str]) -> link::Result<Link> {
        let mut command = vec![std::env::current_exe().unwrap().to_str().unwrap().to_string(), "far".into()];
        command.extend(words.iter().map(|word| word.to_string()));
        Link::ssh(&self.rsh(), host, &command, TIMEOUT, None)
    }
}

fn a_conversation_through_ssh(sshd: &Sshd) {
    let words = ["/srv/it's here/vm $1.raw", "", "*"];
    let (tx, rx) = sshd.connect("backup", &words).unwrap().split();
    assert_eq!(rx.recv().unwrap().unwrap().json::<Vec<String>>().unwrap(), words);
    let started = Instant::now();
    let sender = thread::spawn(move || {
        for i in 0..64u8 {
            let mut message = Message { kind: i, head: vec![i; 100], body: device::Buf::new(1 << 20) };
            message.body.fill(i);
            tx.send(message).unwrap();
        }
        tx.finish().unwrap();
    });
    for i in 0..64u8 {
        let got = rx.recv().unwrap().unwrap();
        assert!(got.kind == i && got.head == [i; 100] && got.body.len() == 1 << 20);
        assert!(got.body.iter().all(|&byte| byte == i));
    }
    assert!(rx.recv().unwrap().is_none());
    sender.join().unwrap();
    println!("  there and back: {:.0} MiB/s", 64.0 / started.elapsed().as_secs_f64());
}

fn failures_are_told_apart(sshd: &Sshd) {
    let Err(error) = sshd.connect("stranger", &[]) else { panic!("without a key") };
    assert!(matches!(&error, Error::Rsh { status, .. } if status == "exit 255"), "{error}");
    assert!(error.to_string().contains("Permission denied"), "{error}");
    let Err(error) = sshd.connect("down", &[]) else { panic!("nobody listens there") };
    assert!(error.to_string().contains(" to down failed (exit 255)"), "{error}");
    assert!(error.to_string().contains("Connection refused"), "{error}");
    let Err(error) = Link::ssh(&sshd.rsh(), "backup", &["/no/such/dsync".into()], TIMEOUT, None) else {
        panic!("not there")
    };
    assert!(matches!(&error, Error::Absent { .. }), "{error}");
    let Err(error) = Link::ssh(&sshd.rsh(), "backup", &["echo".into(), "hello world".into()], TIMEOUT, None)
    else {
        panic!("echo is no dsync")
    };
    assert!(matches!(&error, Error::NotDsync { said, .. } if said == "hello world"), "{error}");
}

fn a_dead_far_side_is_a_cut(sshd: &Sshd) {
    let command = ["sh", "-c", "head -c 16; sleep 0.2; kill -9 $PPID $$"].map(String::from);
    let (tx, rx) = Link::ssh(&sshd.rsh(), "backup", &command, TIMEOUT, None).unwrap().split();
    let error = rx.recv().unwrap_err();
    assert!(error.is_cut(), "{error}");
    assert!(tx.send(Message::default()).unwrap_err().is_cut());
    println!("  {error}");
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("far") {
        if let Err(error) = far() {
            eprintln!("far side: {error}");
            std::process::exit(1);
        }
        return;
    }
    let Some(sshd) = Sshd::start() else {
        println!("skipped: there is no sshd that starts here, so the link through ssh is not tested");
        return;
    };
    type Test = fn(&Sshd);
    let tests: [(&str, Test); 3] = [
        ("a conversation through ssh", a_conversation_through_ssh),
        ("failures are told apart", failures_are_told_apart),
        ("a dead far side is a cut", a_dead_far_side_is_a_cut),
    ];
    for (name, test) in tests {
        test(&sshd);
        println!("{name}: ok");
    }
}
