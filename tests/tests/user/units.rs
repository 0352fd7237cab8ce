//! dsync as a service: sockets that a service manager has opened, what it is told, jobs, and the units.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use dsync_tests::listener::{HOST, Listening};
use dsync_tests::nbd::{Address, Client};
use dsync_tests::{Background, Output, Run, Scene, Site, beyond, image, need, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// A socket that listens, and a further descriptor of it for a service.
fn unix(site: &Site, name: &str) -> (UnixListener, PathBuf) {
    let path = site.socket(name);
    (UnixListener::bind(&path).expect("a socket"), path)
}

fn copy_of(socket: &impl std::os::fd::AsFd) -> OwnedFd {
    socket.as_fd().try_clone_to_owned().expect("a descriptor")
}

/// Ends a service as a service manager does; it must have ended well.
fn stop(mut service: Background) -> Output {
    service.signal(Signal::TERM);
    let output = service.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    output
}

#[test]
fn a_socket_that_is_passed_survives_the_server() {
    let site = Site::new();
    let image = site.image("vm.raw", 16 * MIB);
    let (socket, path) = unix(&site, "passed");
    for (round, byte) in [0x11, 0x22].into_iter().enumerate() {
        let server = site.passed(copy_of(&socket), ["serve"]).arg(&image).start();
        // No wait for the server: the socket listens already.
        let mut client = Client::connect(&Address::Unix(path.clone()), "vm").expect("a connection");
        client.write(round as u64 * MIB, &[byte; 4096]).expect("a write");
        client.close().expect("the end");
        stop(server);
        assert!(path.exists(), "the socket belongs to the service manager");
    }
    let content = std::fs::read(&image).expect("the image");
    assert!((content[0], content[MIB as usize]) == (0x11, 0x22));
    // The record has gone on: a stop and a start lose nothing.
    let status = site.dsync(["status", "--json"]).arg(&image).ok().text();
    assert!(!status.contains("\"gap\":true"), "{status}");
}

#[test]
fn a_loopback_port_is_served_and_another_is_refused() {
    let site = Site::new();
    let image = site.image("vm.raw", 4 * MIB);
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = socket.local_addr().expect("an address");
    let serve = |socket: OwnedFd| site.passed(socket, ["serve"]).arg(&image);
    serve(copy_of(&socket)).code(2).says(&["every user of this host", "--allow-local-users"]);
    let server = serve(copy_of(&socket)).arg("--allow-local-users").start();
    let client = Client::connect(&Address::Tcp(address.to_string()), "vm").expect("a connection");
    assert_eq!(client.size, 4 * MIB);
    drop(client);
    stop(server);
    let open = TcpListener::bind("0.0.0.0:0").expect("a port");
    site.passed(open, ["serve"]).arg(&image).code(2).says(&["reachable from other hosts", "ssh"]);
}

#[test]
fn a_socket_that_cannot_be_served_is_refused() {
    let site = Site::new();
    let image = site.image("vm.raw", 4 * MIB);
    let (socket, _) = unix(&site, "passed");
    let serve = |socket: OwnedFd| site.passed(socket, ["serve"]).arg(&image);
    serve(copy_of(&socket)).args(["--socket", "mine"]).code(2).says(&["LISTEN_FDS", "omit --socket"]);
    serve(copy_of(&socket)).env("LISTEN_FDS", "2").code(2).says(&["LISTEN_FDS is 2", "one socket"]);
    serve(copy_of(&socket)).env("LISTEN_FDS", "99999999999").code(2).says(&["one socket"]);
    // One that was meant for another process is none.
    serve(copy_of(&socket))
        .env("LISTEN_PID", "1")
        .code(2)
        .says(&["nothing to listen on", "--socket or --tcp"]);
    let datagrams = UnixDatagram::bind(site.socket("datagrams")).expect("a socket");
    serve(datagrams.into()).code(2).says(&["not a stream socket", "ListenStream="]);
    let port = TcpListener::bind("127.0.0.1:0").expect("a port");
    let connected = TcpStream::connect(port.local_addr().expect("an address")).expect("a connection");
    serve(connected.into()).code(2).says(&["connected, not listening", "Accept=no"]);
    let receive = |socket: OwnedFd| site.passed(socket, ["receive", "--into"]).arg(site.dir());
    receive(copy_of(&socket)).code(2).says(&["a Unix socket", "TCP"]);
    receive(copy_of(&port)).args(["--listen", "127.0.0.1"]).code(2).says(&["omit --listen"]);
    site.dsync(["receive", "--into"]).arg(site.dir()).code(2).says(&["pass --listen"]);
    assert!(!site.state().join("sources").exists(), "nothing was opened");
}

#[test]
fn libnbd_starts_a_server_for_itself() {
    if !need(&["nbdinfo", "nbdcopy"], "a server that libnbd starts") {
        return;
    }
    let site = Site::new();
    let image = site.image("vm.raw", 8 * MIB);
    image::scribble(&image, MIB, MIB, &mut dsync_tests::Random::new("libnbd"));
    let server = |run: Run| run.args(["[", "dsync", "serve"]).arg(&image).arg("]");
    let size = server(site.run("nbdinfo".as_ref()).arg("--size")).ok().text();
    assert_eq!(size.trim(), (8 * MIB).to_string(), "standard output is the client's");
    // The first server may still be closing its source.
    let until = Instant::now() + Duration::from_secs(20);
    while !site.dsync(["status", "--json"]).ok().text().contains("\"served\":null") && Instant::now() < until
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    let copy = site.path("copy.raw");
    server(site.run("nbdcopy".as_ref())).arg(&copy).ok();
    image::assert_equal(&image, &copy);
}

#[test]
fn systemds_own_launcher_starts_a_server() {
    if !need(&["systemd-socket-activate", "qemu-img"], "a server behind systemd-socket-activate") {
        return;
    }
    let site = Site::new();
    let image = site.image("vm.raw", 8 * MIB);
    let path = site.socket("activated");
    let launcher = site.run("systemd-socket-activate".as_ref()).arg("-l").arg(&path);
    let environment = ["DSYNC_STATE_DIR", "PATH"].map(|name| ["-E", name]).concat();
    let server = launcher.args(environment).arg(dsync_tests::site::binary()).arg("serve").arg(&image).start();
    let until = Instant::now() + Duration::from_secs(20);
    while !path.exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let uri = format!("nbd+unix:///vm?socket={}", path.display());
    let info = Run::new("qemu-img").args(["info", "--output=json", &uri]).ok().text();
    assert!(info.contains("\"virtual-size\": 8388608"), "{info}");
    stop(server);
}

#[test]
fn a_guests_disk_waits_while_its_server_is_restarted() {
    if !need(&["qemu-io"], "QEMU's reconnect to a server that is restarted") {
        return;
    }
    let site = Site::new();
    let image = site.image("vm.raw", 16 * MIB);
    let (socket, path) = unix(&site, "passed");
    let start = || Some(site.passed(copy_of(&socket), ["serve"]).arg(&image).start());
    let mut server = start();
    let disk =
        format!("driver=nbd,server.type=unix,server.path={},export=vm,reconnect-delay=60", path.display());
    let mut qemu = Run::new("qemu-io").args(["--image-opts", &disk]).start_talking();
    let mut input = qemu.child.stdin.take().expect("its input");
    let mut replies = std::io::BufReader::new(qemu.child.stdout.take().expect("its output"));
    let mut said = |words: &str| {
        use std::io::BufRead;
        let mut all = String::new();
        while !all.contains(words) {
            assert!(replies.read_line(&mut all).expect("a reply") > 0, "qemu-io ended: {all}");
            assert!(!all.contains("failed"), "{all}");
        }
    };
    for round in 0..4u64 {
        writeln!(input, "write -P {} {}M 64k", 0x41 + round, round).expect("a command");
        if round > 0 {
            // The write meets a socket that listens and has no server.
            std::thread::sleep(Duration::from_millis(300));
            server = start();
        }
        said("wrote 65536/65536");
        let server = server.take().expect("a server");
        match round % 2 {
            0 => drop(stop(server)),
            _ => drop(server.killed()),
        }
    }
    let content = std::fs::read(&image).expect("the image");
    for round in 0..4 {
        let at = round * MIB as usize;
        assert!(content[at..at + 65536].iter().all(|byte| *byte == 0x41 + round as u8), "round {round}");
    }
    qemu.kill();
}

#[test]
fn a_listener_for_replicas_leaves_its_socket_open() {
    let scene = Scene::new("a passed socket", 16 * MIB);
    let mut far = Listening::for_near(&scene.site);
    far.kill();
    // As systemd listens on a port: for both kinds of addresses, where there are both.
    let socket = TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind((HOST, 0))).expect("a port");
    let to = format!("tls://{HOST}:{}/vm.raw", socket.local_addr().expect("an address").port());
    for _ in 0..2 {
        let listener = far.site.passed(copy_of(&socket), ["receive", "--into"]).arg(far.folder()).start();
        far.sync_to(&scene, &to, &[]).ok();
        stop(listener).says(&[", from 127.0.0.1): session ended"]);
    }
    image::assert_equal(&scene.image, &far.replica());
}

/// The service manager's socket.
struct Manager {
    socket: UnixDatagram,
    name: String,
}

impl Manager {
    fn new(site: &Site) -> Manager {
        let path = site.socket("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        Manager { socket, name: path.to_str().expect("a path").to_owned() }
    }

    /// What comes within the time.
    fn hear(&self, within: Duration) -> Option<String> {
        let mut bytes = [0; 4096];
        self.socket.set_read_timeout(Some(within)).expect("a timeout");
        let len = self.socket.recv(&mut bytes).ok()?;
        Some(String::from_utf8(bytes[..len].to_vec()).expect("text"))
    }

    /// Waits for a message with these words.
    fn wait_for(&self, words: &str) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            match self.hear(Duration::from_secs(1)) {
                Some(message) if message.contains(words) => return message,
                _ => assert!(Instant::now() < until, "it does not say {words}"),
            }
        }
    }

    /// Waits until there was no sign of life for longer than two limits.
    fn wait_for_silence(&self) {
        let (until, mut last) = (Instant::now() + Duration::from_secs(60), Instant::now());
        while last.elapsed() < 2 * LIMIT {
            assert!(Instant::now() < until, "it goes on saying that it is well");
            if self.hear(LIMIT / 4).is_some_and(|message| message.contains("WATCHDOG=1")) {
                last = Instant::now();
            }
        }
    }
}

/// The time without a sign of life after which a manager would end a service.
const LIMIT: Duration = Duration::from_millis(500);

#[test]
fn a_manager_is_told_when_clients_can_connect_and_of_the_end() {
    let mut scene = Scene::new("a service manager", 16 * MIB);
    scene.stop();
    let manager = Manager::new(&scene.site);
    let socket = scene.site.socket("served");
    let serve = scene.site.dsync(["serve"]).arg(&scene.image).arg("--socket").arg(&socket);
    let server = serve.env("NOTIFY_SOCKET", &manager.name).start();
    let ready = manager.wait_for("READY=1");
    Client::connect(&Address::Unix(socket.clone()), "vm")
        .expect("a connection at once")
        .close()
        .expect("the end");
    assert!(ready.contains("\nSTATUS=serving vm on nbd+unix:///vm?socket="), "{ready}");

    let mirror = scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica);
    let mirror = mirror.env("NOTIFY_SOCKET", &manager.name).start();
    assert!(manager.wait_for("READY=1").contains("STATUS="));
    manager.wait_for("STATUS=mirroring to ");
    stop(mirror);
    manager.wait_for("STOPPING=1");
    stop(server);
    manager.wait_for("STOPPING=1");

    let listener = scene.site.dsync(["receive", "--listen", "127.0.0.1:0", "--into"]).arg(scene.site.dir());
    let listener = listener.env("NOTIFY_SOCKET", &manager.name).start();
    assert!(manager.wait_for("READY=1").contains("STATUS=listening on 127.0.0.1:"));
    stop(listener);
    manager.wait_for("STOPPING=1");

    // One that fails never says that it is ready.
    let missing = scene.site.path("missing.raw");
    let serve = scene.site.dsync(["serve"]).arg(missing).arg("--socket").arg(&socket);
    assert!(!serve.env("NOTIFY_SOCKET", &manager.name).output().status.success());
    assert_eq!(manager.hear(Duration::from_millis(10)), None);
}

#[test]
fn a_manager_may_have_an_abstract_name_or_be_gone() {
    let site = Site::new();
    let image = site.image("vm.raw", 4 * MIB);
    let serve = |name: &str, at: &str| {
        site.dsync(["serve"])
            .arg(&image)
            .arg("--socket")
            .arg(site.socket(name))
            .env("NOTIFY_SOCKET", at)
            .start()
    };
    let name = format!("dsync-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    let manager = Manager { socket, name: format!("@{name}") };
    let server = serve("abstract", &manager.name);
    manager.wait_for("READY=1");
    stop(server);
    let mut server = serve("gone", "/nowhere/notify");
    server.wait_to_say("serving vm");
    until("it says that it cannot report", || {
        server.stderr_so_far().contains("cannot report to the service manager at /nowhere/notify")
    });
    stop(server);
}

/// Threads of a process, stopped as a hang would stop them; they go on when this is dropped.
struct Stopped(Vec<libc::pid_t>);

impl Stopped {
    fn new(process: &Background, name: &str) -> Stopped {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", process.child.id())).expect("a process");
        let named = tasks.map(|task| task.expect("a thread").path()).filter(|task| {
            std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        });
        let id = |task: PathBuf| task.file_name()?.to_str()?.parse().ok();
        let ids: Vec<libc::pid_t> = named.map(|task| id(task).expect("a number")).collect();
        assert!(!ids.is_empty(), "no thread {name}");
        for id in &ids {
            let none = std::ptr::null_mut::<libc::c_void>();
            // SAFETY: the calls take no memory of this process.
            unsafe {
                assert_eq!(libc::ptrace(libc::PTRACE_SEIZE, *id, none, none), 0, "PTRACE_SEIZE");
                assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, *id, none, none), 0, "PTRACE_INTERRUPT");
                assert_eq!(libc::waitpid(*id, std::ptr::null_mut(), libc::__WALL), *id, "waitpid");
            }
        }
        Stopped(ids)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let none = std::ptr::null_mut::<libc::c_void>();
        for id in &self.0 {
            // SAFETY: as above.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, *id, none, none) };
        }
    }
}

/// A service says that it is well, does not while its loop hangs, and does again.
fn watched(run: Run, manager: &Manager, ready: &str, thread: &str) {
    let limit = LIMIT.as_micros().to_string();
    let service = run.env("NOTIFY_SOCKET", &manager.name).env("WATCHDOG_USEC", limit).start();
    manager.wait_for(ready);
    (0..5).for_each(|_| drop(manager.wait_for("WATCHDOG=1")));
    let stopped = Stopped::new(&service, thread);
    manager.wait_for_silence();
    drop(stopped);
    (0..5).for_each(|_| drop(manager.wait_for("WATCHDOG=1")));
    stop(service);
}

#[test]
fn a_watchdog_hears_nothing_from_a_mirror_that_hangs() {
    let scene = Scene::new("a watchdog of a mirror", 16 * MIB);
    let mirror = scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica);
    watched(mirror, &Manager::new(&scene.site), "STATUS=mirroring to ", "produce");
}

#[test]
fn a_watchdog_hears_nothing_from_a_server_that_hangs() {
    let site = Site::new();
    let serve = site.dsync(["serve"]).arg(site.image("vm.raw", 4 * MIB));
    watched(serve.arg("--socket").arg(site.socket("served")), &Manager::new(&site), "READY=1", "nbd-accept");
}

#[test]
fn a_watchdog_hears_nothing_from_a_listener_that_hangs() {
    let site = Site::new();
    let receive = site.dsync(["receive", "--listen", "127.0.0.1:0", "--into"]).arg(site.dir());
    watched(receive, &Manager::new(&site), "READY=1", "listener");
}

#[test]
fn a_watchdog_of_another_process_is_not_answered() {
    let site = Site::new();
    let image = site.image("vm.raw", 4 * MIB);
    let manager = Manager::new(&site);
    let serve = site.dsync(["serve"]).arg(&image).arg("--socket").arg(site.socket("served"));
    let serve =
        serve.env("NOTIFY_SOCKET", &manager.name).env("WATCHDOG_USEC", "100000").env("WATCHDOG_PID", "1");
    let server = serve.start();
    manager.wait_for("READY=1");
    assert_eq!(manager.hear(Duration::from_millis(300)), None);
    stop(server);
}

/// Writes a job.
fn job(site: &Site, name: &str, text: &str) {
    let folder = site.path("conf");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join(name).with_extension("conf"), text).expect("a job");
}

#[test]
fn a_job_runs_its_command() {
    let site = Site::new();
    let image = site.image("vm.raw", 8 * MIB);
    image::scribble(&image, MIB, MIB, &mut dsync_tests::Random::new("a job"));
    job(&site, "vm", "command = sync\nsource = vm.raw\ndestination = copy.raw\njson = yes\n");
    let printed = site.dsync(["run", "vm", "--print"]).ok().text();
    assert_eq!(site.dsync(["run", "vm.conf", "--print"]).ok().text(), printed);
    assert_eq!(printed, "dsync sync vm.raw copy.raw --json\n");
    let copy = site.path("copy.raw");
    let dry = site.dsync(["run", "vm", "--dry-run"]).ok().summary();
    assert!(dry["dry_run"] == true && !copy.exists(), "an option behind the name: {dry}");
    site.dsync(["run", "vm"]).ok().summary();
    image::assert_equal(&image, &copy);
    // A replica that is there is up to date; the method given here replaces that of the file.
    job(&site, "vm", "command = sync\nsource = vm.raw\ndestination = copy.raw\nmethod = copy\njson = yes\n");
    assert_eq!(site.dsync(["run", "vm"]).ok().summary()["method"], "copy");
    assert_eq!(site.dsync(["run", "vm", "--method", "compare"]).ok().summary()["method"], "compare");
    let elsewhere = site.dsync(["run", "--config"]).arg(site.path("conf")).args(["vm", "--print"]);
    assert!(elsewhere.env("DSYNC_CONF_DIR", "/nowhere").ok().text().contains("--method=copy"));
    // Exit codes are those of the command.
    job(&site, "check", "command = verify\nsource = vm.raw\ndestination = copy.raw\n");
    site.dsync(["run", "check"]).ok();
    image::scribble(&copy, 2 * MIB, 4096, &mut dsync_tests::Random::new("a difference"));
    site.dsync(["run", "check"]).code(5);
}

#[test]
fn a_job_that_is_wrong_is_refused_with_its_place() {
    let site = Site::new();
    site.image("vm.raw", 8 * MIB);
    let sync = "command = sync\nsource = vm.raw\ndestination = copy.raw\n";
    job(&site, "vm", &format!("{sync}bwlimt = 10M\n"));
    let refused = site.dsync(["run", "vm"]).code(2);
    refused.says(&["conf/vm.conf:4: unknown key \"bwlimt\"", "did you mean \"bwlimit\"?"]);
    job(&site, "vm", &format!("{sync}bwlimit = quick\n"));
    site.dsync(["run", "vm"]).code(2).says(&["conf/vm.conf:4: invalid value 'quick'", "2GiB"]);
    job(&site, "vm", &format!("{sync}bwlimit = 08:00-18:00=1M,else=pause\n"));
    site.dsync(["run", "vm"]).code(2).says(&["conf/vm.conf:4: only a mirror can pause"]);
    job(&site, "other", sync);
    site.dsync(["run", "wm"]).code(2).says(&["no job \"wm\"", "conf/wm.conf does not exist", "other, vm"]);
    site.dsync(["run", "../vm"]).code(2).says(&["invalid job name"]);
    std::fs::write(site.path("conf/bytes.conf"), [0xff, 0xfe]).expect("a job");
    site.dsync(["run", "bytes"]).code(2).says(&["conf/bytes.conf: not text"]);
    // With --json, as an object.
    let lines = site.dsync(["--json", "run", "wm"]).code(2).json();
    assert!(lines[0]["message_type"] == "error" && lines[0]["code"] == 2, "{lines:?}");
    assert!(!site.path("copy.raw").exists());
}

/// The units, in a folder of their own, with the program under test.
fn unit_files(site: &Site) -> Vec<PathBuf> {
    let folder = site.path("units");
    std::fs::create_dir(&folder).expect("a folder");
    let program = dsync_tests::site::binary().to_str().expect("a path");
    let mut files = Vec::new();
    for entry in dsync_tests::repository().join("systemd").read_dir().expect("the units") {
        let from = entry.expect("a unit").path();
        let kinds = ["service", "socket", "target", "timer"];
        let is_unit = from.extension().is_some_and(|e| kinds.iter().any(|kind| e == *kind));
        if is_unit {
            let to = folder.join(from.file_name().expect("a name"));
            let text = std::fs::read_to_string(&from).expect("a unit");
            std::fs::write(&to, text.replace("/usr/local/bin/dsync", program)).expect("a unit");
            files.push(to);
        }
    }
    files.sort();
    files
}

#[test]
fn systemd_accepts_the_units() {
    if !need(&["systemd-analyze"], "systemd's opinion of the units") {
        return;
    }
    let site = Site::new();
    let files = unit_files(&site);
    assert!(files.len() >= 10, "{files:?}");
    for file in &files {
        // A template is checked as an instance.
        let instance = file.to_str().expect("a path").replace("@.", "@vm.");
        let folder = format!("{}:", site.path("units").display());
        let verify = Run::new("systemd-analyze").env("SYSTEMD_UNIT_PATH", &folder);
        let output = verify.args(["--man=no", "--recursive-errors=no", "verify", &instance]).ok();
        assert_eq!(output.stderr, "", "{instance}");
    }
}

/// What a job has started is ended by the job, which knows what is under way: a `qemu-nbd` that systemd ended beside it would take acknowledged writes along.
#[test]
fn a_unit_ends_what_it_has_started_by_itself() {
    let site = Site::new();
    let mut seen = 0;
    for file in unit_files(&site) {
        let text = std::fs::read_to_string(&file).expect("a unit");
        if text.contains("Type=notify")
            || text.lines().any(|line| line.starts_with("ExecStart=") && line.contains(" run "))
        {
            // Of a server also once its own process is gone.
            let mode = if text.contains("Serves disks") { "process" } else { "mixed" };
            assert!(text.lines().any(|line| line == format!("KillMode={mode}")), "{}", file.display());
            seen += 1;
        }
    }
    assert!(seen >= 5, "{seen} units");
}

/// What the guide writes for a disk that is absent at times is understood by systemd, for the device that the unit waits for.
#[test]
fn the_guide_shortens_the_wait_for_an_absent_disk() {
    let what = "the time that systemd waits for a device";
    if !need(&["systemd-analyze", "systemd-escape"], what) {
        return;
    }
    let site = Site::new();
    unit_files(&site);
    let units = site.path("units");
    let guide = std::fs::read_to_string(dsync_tests::repository().join("docs/guide.md")).expect("the guide");
    let commands = guide.lines().filter(|line| line.contains("--suffix=device /dev/vdb"));
    let commands: Vec<&str> =
        commands.map(|line| line.trim().strip_prefix("near# ").expect("a command")).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for command in commands {
        Run::shell(&command.replace("/etc/systemd/system", &units.display().to_string())).ok();
    }
    let verify = |unit: &str| {
        let verify = Run::new("systemd-analyze").env("SYSTEMD_UNIT_PATH", format!("{}:", units.display()));
        verify.args(["--man=no", "--recursive-errors=yes", "verify"]).arg(units.join(unit)).output().stderr
    };
    let told = |text: &str| text.lines().filter(|line| line.contains("dev-vdb.device.d")).count();
    assert_eq!(told(&verify("dsync-track@dev-vdb.service")), 0, "{}", verify("dsync-track@dev-vdb.service"));
    // It is read: a mistake in it is named.
    let file = units.join("dev-vdb.device.d/timeout.conf");
    let text = std::fs::read_to_string(&file).expect("a drop-in");
    assert!(text.contains("JobRunningTimeoutSec=5s"), "{text}");
    std::fs::write(&file, text.replace("=5s", "=soon")).expect("a drop-in");
    assert_ne!(told(&verify("dsync-track@dev-vdb.service")), 0);
}

#[test]
fn the_guide_rates_the_units_as_systemd_does() {
    if !need(&["systemd-analyze"], "the rating of the units' hardening") {
        return;
    }
    let version = Run::new("systemd-analyze").arg("--version").ok().text();
    if !version.starts_with("systemd 252") {
        beyond("the rating of the units' hardening", "the guide has it for systemd 252");
        return;
    }
    let site = Site::new();
    let guide = dsync_tests::repository().join("docs/guide.md");
    let guide = std::fs::read_to_string(guide).expect("the guide");
    let services =
        unit_files(&site).into_iter().filter(|file| file.extension().is_some_and(|e| e == "service"));
    for file in services {
        let name = file.file_name().and_then(|name| name.to_str()).expect("a name");
        let row = guide.lines().find(|line| line.starts_with("| `dsync-") && line.contains(name));
        let row = row.unwrap_or_else(|| panic!("the guide does not rate {name}"));
        let rating = row.split('|').nth(3).expect("a rating").trim();
        let rated = Run::new("systemd-analyze").args(["--no-pager", "--offline=yes", "security"]).arg(&file);
        let rated = rated.ok().text();
        assert!(rated.contains(&format!(": {rating} ")), "{name} is not rated {rating}: {rated}");
    }
}

#[test]
fn mirrors_are_ordered_after_mounts_that_boot_does_not_wait_for() {
    if !need(&["systemd-escape"], "the order of mirrors and mounts") {
        return;
    }
    let site = Site::new();
    let (fstab, folder) = (site.path("fstab"), site.path("generated"));
    std::fs::create_dir(&folder).expect("a folder");
    let generate = |content: &str| {
        std::fs::write(&fstab, content).expect("an fstab");
        let generator = dsync_tests::repository().join("systemd/dsync-generator");
        Run::new(generator).arg(&folder).env("SYSTEMD_FSTAB", &fstab).ok();
    };
    // Those of local-fs.target, and those over the network.
    generate(
        "# a comment\n/dev/vda1 / ext4 defaults 0 1\nfar:/home /home nfs nofail 0 0\n/dev/vdc none swap nofail 0 0\n",
    );
    assert_eq!(folder.read_dir().expect("the folder").count(), 0);
    generate(
        "/dev/vdb\t/data ext4 noatime,nofail 0 2\nUUID=1 /a\\040disk-1 xfs x-systemd.automount\nLABEL=c /c ext4 nofail",
    );
    for unit in ["dsync-mirror@", "dsync-sync@"] {
        let made = std::fs::read_to_string(folder.join(format!("{unit}.service.d/50-mounts.conf")));
        let made = made.expect("what was generated");
        let expected = "[Unit]\nAfter=data.mount\nAfter=a\\x20disk\\x2d1.mount\nAfter=c.mount\n";
        assert!(made.ends_with(expected), "{made}");
    }
}
