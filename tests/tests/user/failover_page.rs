//! docs/failover.md, lived through: its commands are run as they stand there, in their order, on two hosts of mount namespaces, and say what
//! it shows. A guest writes numbered records meanwhile, and finds at each boot all that it must find. In `make test` a file system of this
//! machine stands for the guest; with `DSYNC_VM=1` (`make test-vm`) it is a Linux in QEMU, whose disk is the server.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dsync_tests::guest::{self, Guest};
use dsync_tests::mount::{Attached, Mount};
use dsync_tests::{
    Background, Output, Run, image, left_out, need, need_root, on_disk, repository, say, site, skipped, soak,
};
use rustix::process::Signal;
use tempfile::TempDir;

const SIZE: u64 = 64 << 20;
const LONG: Duration = Duration::from_secs(180);
const HOSTS: [&str; 2] = ["near", "far"];

/// What the guest does: it checks what it finds, writes records, each durable before it is told, and obeys.
const GUEST: &str = r#"set -e
mkdir -p $PLACE
mount -t ext4 $DEV $PLACE
cd $PLACE
if [ ! -e log ]; then
    : >log
    for i in 1 2 3 4 5 6 7 8; do seq $i 9000 >document$i; done
    sync document* .
fi
n=$(wc -l <log)
seq -f 'record %.0f' $n | cmp - log
for i in 1 2 3 4 5 6 7 8; do seq $i 9000 | cmp - document$i; done
mark found $n
rm -f $FLAG
work() {
    while [ ! -e $FLAG ]; do
        n=$((n + 1))
        echo "record $n" >>log
        sync log
        mark did $n
    done
}
work &
while read -r word; do
    touch $FLAG
    wait
    case $word in
    spoil) for i in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=document$i bs=4k count=10 conv=notrunc,fsync 2>/dev/null; done
        rm $FLAG
        n=$(wc -l <log)
        mark spoiled
        work & ;;
    stop) mark wrote $(wc -l <log)
        break ;;
    esac
done
cd /
umount $PLACE
"#;

/// The guest: a machine of its own, or its script on a device of this one.
enum Machine {
    Vm(Guest),
    Here(Box<Here>),
}

struct Here {
    process: Background,
    lines: Receiver<String>,
    _mounted: Mount,
    _device: Attached,
    _place: TempDir,
}

impl Machine {
    /// Boots from an export; `None` where that cannot be had.
    fn boot(vm: bool, uri: &str) -> Option<Machine> {
        let settings = |device: &str, place: &str, flag: &str| {
            format!("DEV={device}\nPLACE={place}\nFLAG={flag}\n{GUEST}")
        };
        if vm {
            let script = settings("/dev/vda", "/tmp/disk", "/tmp/stop");
            let options = guest::Options { script, disks: vec![uri.into()], ..Default::default() };
            return Some(Machine::Vm(Guest::boot(&options)));
        }
        let place = testing::temporary();
        let [fuse, disk, flag] = ["fuse", "disk", "stop"].map(|name| place.path().join(name));
        let device = Attached::new(uri, &fuse)?;
        let shown = |path: &Path| path.display().to_string();
        let script = settings(&shown(device.device()), &shown(&disk), &shown(&flag));
        let run = Run::shell(&format!("mark() {{ echo \"@$*\"; }}\n{script}"));
        let mut process = run.start_talking();
        let stdout = process.child.stdout.take().expect("a pipe");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let mounted = Mount::made(&disk);
        Some(Machine::Here(Box::new(Here {
            process,
            lines,
            _mounted: mounted,
            _device: device,
            _place: place,
        })))
    }

    /// Waits for a mark, and returns the number behind it.
    fn wait_for(&mut self, mark: &str) -> u64 {
        let text = match self {
            Machine::Vm(guest) => guest.wait_for(mark, LONG),
            Machine::Here(here) => loop {
                let Ok(line) = here.lines.recv_timeout(LONG) else {
                    panic!("the guest does not say {mark}: {}", here.process.stderr_so_far());
                };
                if let Some(rest) = line.strip_prefix('@').and_then(|line| line.strip_prefix(mark)) {
                    break rest.trim().to_owned();
                }
            },
        };
        text.parse().unwrap_or(0)
    }

    fn tell(&mut self, word: &str) {
        match self {
            Machine::Vm(guest) => guest.send(word),
            Machine::Here(here) => {
                let pipe = here.process.child.stdin.as_mut().expect("a pipe");
                writeln!(pipe, "{word}").and_then(|()| pipe.flush()).expect("talking to the guest");
            }
        }
    }

    /// Records that are durable by now, at least.
    fn works(&mut self) -> u64 {
        (0..4).map(|_| self.wait_for("did")).max().unwrap_or(0)
    }

    /// Ends in good order; how many records there are.
    fn shut_down(mut self) -> u64 {
        self.tell("stop");
        let wrote = self.wait_for("wrote");
        match self {
            Machine::Vm(guest) => drop(guest.finish(LONG)),
            Machine::Here(mut here) => {
                let ended = here.process.wait_for(LONG);
                assert!(ended.is_some_and(|status| status.success()), "{}", here.process.stderr_so_far());
            }
        }
        wrote
    }
}

/// A host: `/srv` and `/run` are its own.
struct Host {
    srv: PathBuf,
    run: TempDir,
    /// What its commands left running: servers and mirrors by the word that names them.
    running: BTreeMap<String, Background>,
    guest: Option<Machine>,
}

/// Two hosts that reach each other.
struct World {
    vm: bool,
    hosts: BTreeMap<&'static str, Host>,
    tools: TempDir,
    _disk: TempDir,
    /// Numbers of epochs, as the page has them and as they are.
    epochs: BTreeMap<String, String>,
    /// Records that a guest finds at least, and at most.
    least: u64,
    most: u64,
    /// The same of the last moment before the ransomware.
    sound: u64,
}

fn program(path: &Path, text: &str) {
    std::fs::write(path, text).expect("a script");
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("its mode");
}

impl World {
    fn new(vm: bool) -> World {
        let (disk, tools) = (on_disk(), testing::temporary());
        let mut hosts = BTreeMap::new();
        for name in HOSTS {
            let srv = disk.path().join(name);
            std::fs::create_dir(&srv).expect("a folder");
            let run = testing::temporary();
            program(
                &tools.path().join(name),
                &format!(
                    "#!/bin/sh\nexport DSYNC_STATE_DIR={0}/state DSYNC_RSH={1}/reach PATH={2}:$PATH\n\
                     exec unshare --mount --propagation private /bin/sh -c 'mount --bind {0} /srv && mount --bind {3} /run && \
                     cd /srv && exec /bin/sh -c \"$1\"' sh \"$1\"\n",
                    srv.display(),
                    tools.path().display(),
                    site::binary().parent().expect("a folder").display(),
                    run.path().display(),
                ),
            );
            hosts.insert(name, Host { srv, run, running: BTreeMap::new(), guest: None });
        }
        program(
            &tools.path().join("reach"),
            &format!("#!/bin/sh\nhost=$1\nshift\nexec {}/$host \"$*\"\n", tools.path().display()),
        );
        World { vm, hosts, tools, _disk: disk, epochs: BTreeMap::new(), least: 0, most: 0, sound: 0 }
    }

    fn host(&mut self, name: &str) -> &mut Host {
        self.hosts.get_mut(name).unwrap_or_else(|| panic!("no host {name}"))
    }

    fn shell(&self, host: &str, command: &str) -> Run {
        Run::new(self.tools.path().join(host)).arg(format!("exec {command}")).limit(LONG)
    }

    /// Runs a line of the page; what it says.
    fn line(&mut self, host: &str, line: &str) -> Option<Output> {
        if let Some(event) = line.strip_prefix("# ") {
            self.event(host, event);
            return None;
        }
        let Some((program, _)) = line.split_once(' ') else { panic!("not a command: {line}") };
        if program == "qemu-system-x86_64" {
            self.boot(host, line);
            return None;
        }
        let line = self.with_epochs(line);
        match line.split(' ').nth(1) {
            Some(word @ ("serve" | "mirror")) => {
                let mut process = self.shell(host, &line).start();
                process.wait_to_say(if word == "serve" { "serving vm" } else { "mirroring to" });
                let said = process.stdout_so_far();
                self.host(host).running.insert(word.into(), process);
                say(&format!("{host}$ {line}\n{said}"));
                None
            }
            _ => {
                let output = self.shell(host, &line).output();
                say(&format!("{host}$ {line}\n{}{}", output.text(), output.stderr));
                Some(output)
            }
        }
    }

    /// The guest of a host boots. It must find all that is durable, and nothing that was never written.
    fn boot(&mut self, host: &str, line: &str) {
        let uri = line.split('\'').nth(1).expect("a URI");
        let (export, socket) = uri.split_once("?socket=/run/").expect("a socket");
        let socket = self.host(host).run.path().join(socket);
        let machine = Machine::boot(self.vm, &format!("{export}?socket={}", socket.display()));
        let mut machine = machine.expect("a device over an export");
        let found = machine.wait_for("found");
        assert!((self.least..=self.most).contains(&found), "{found} records: {}..={}", self.least, self.most);
        say(&format!("{host}: the guest finds {found} records, {} of them certain", self.least));
        machine.works();
        self.host(host).guest = Some(machine);
    }

    /// The guest of a host has written so many for sure, and others perhaps.
    fn note(&mut self, host: &str) {
        if let Some(guest) = &mut self.host(host).guest {
            let certain = guest.works();
            (self.least, self.most) = (certain, u64::MAX);
        }
    }

    fn event(&mut self, host: &str, event: &str) {
        match event {
            "shut the guest down, then stop its server" => {
                let wrote = self.host(host).guest.take().expect("a guest").shut_down();
                let mut server = self.host(host).running.remove("serve").expect("a server");
                server.signal(Signal::TERM);
                assert!(server.output(LONG).status.success(), "the server did not end well");
                (self.least, self.most) = (wrote, wrote);
            }
            "what the rehearsal wrote is gone with it" => {
                drop(self.host(host).guest.take());
                drop(self.host(host).running.remove("serve"));
            }
            "the host loses its power" => {
                self.host(host).running.values_mut().for_each(Background::kill);
                self.host(host).running.clear();
                self.host(host).guest = None;
            }
            "the host is back, and its guest has run for a while" => {
                let (least, most) = (self.least, self.most);
                self.line(host, "dsync serve /srv/vm.raw --socket /run/vm.sock");
                self.boot(host, "qemu-system-x86_64 'nbd+unix:///vm?socket=/run/vm.sock'");
                self.event(host, "shut the guest down, then stop its server");
                (self.least, self.most) = (least, most);
            }
            "end the mirror" => {
                let mut mirror = self.host(host).running.remove("mirror").expect("a mirror");
                mirror.signal(Signal::TERM);
                assert!(mirror.output(LONG).status.success(), "the mirror did not end well");
            }
            "ransomware overwrites the documents" => {
                self.sound = self.least;
                let guest = self.host(host).guest.as_mut().expect("a guest");
                guest.tell("spoil");
                guest.wait_for("spoiled");
            }
            other => panic!("nobody knows how to do this: {other}"),
        }
    }

    /// A command with the epochs of this run.
    fn with_epochs(&self, line: &str) -> String {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        for at in 1..words.len() {
            if ["--since", "--to"].contains(&words[at - 1].as_str()) {
                let epoch = self.epochs.get(&words[at]);
                words[at] = epoch.unwrap_or_else(|| panic!("the page names no epoch {}", words[at])).clone();
            }
        }
        words.join(" ")
    }

    /// Compares what the page shows with what was said: what it leaves out may be anything.
    fn compare(&mut self, command: &str, shown: &str, output: &Output) {
        let said = format!("{}\n{}", output.text(), output.stderr);
        let mut words = said.split_whitespace();
        let mut before = "";
        for word in shown.split_whitespace() {
            let Some(found) = words.find(|said| plain(said) == plain(word)) else {
                panic!("the page shows \"{word}\" after \"{before}\" for {command}, and it says:\n{said}");
            };
            if before.ends_with("epoch") || before == "--since" {
                let number = |text: &str| text.trim_matches(|c: char| !c.is_ascii_digit()).to_owned();
                self.epochs.insert(number(word), number(found));
            }
            before = word;
        }
    }
}

/// A word without what is another one each time: numbers, ids, units of sizes.
fn plain(word: &str) -> &str {
    let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
    match bare {
        "B" | "KiB" | "MiB" | "GiB" => "size",
        _ if bare.contains(|c: char| c.is_ascii_digit()) && !bare.contains('/') => "number",
        "block" | "blocks" | "extent" | "extents" => "count",
        _ => bare,
    }
}

/// The lines of the page's code: a host, a command, and what it shows below.
fn commands(page: &str) -> Vec<(&'static str, String, String)> {
    let mut found: Vec<(&'static str, String, String)> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        let Some(code) = line.strip_prefix("    ") else {
            inside = false;
            continue;
        };
        let command =
            HOSTS.iter().find_map(|host| Some((*host, code.strip_prefix(host)?.strip_prefix("$ ")?)));
        if let Some((host, command)) = command {
            found.push((host, command.to_owned(), String::new()));
            inside = true;
        } else if inside {
            let (_, _, shown) = found.last_mut().expect("a command");
            shown.push_str(code);
            shown.push('\n');
        }
    }
    found
}

#[test]
fn the_page_is_lived_through() {
    let what = "the commands of docs/failover.md";
    let tools = ["mkfs.ext4", "nbdfuse", "losetup", "unshare", "seq", "cmp"];
    if !need_root(what) || !need(&tools, what) {
        return;
    }
    let vm = soak() || std::env::var_os("DSYNC_VM").is_some_and(|value| value == "1");
    if vm && !guest::possible(what) {
        return;
    }
    if !vm {
        left_out("a guest in QEMU that goes through docs/failover.md", "make test-vm");
    }
    let mut world = World::new(vm);
    let disk = world.host("near").srv.join("vm.raw");
    image::sparse(&disk, SIZE);
    Run::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk).ok();
    if world.shell("near", "true").output().status.code() != Some(0) {
        return skipped(what, "mount namespaces cannot be made here");
    }
    let page = std::fs::read_to_string(repository().join("docs/failover.md")).expect("the page");
    let commands = commands(&page);
    assert!(commands.len() > 30, "{} commands: the page was not read", commands.len());
    let began = Instant::now();
    for (host, command, shown) in commands {
        // What is durable before it is replicated is there after a disaster.
        if command.starts_with("dsync sync") || command.starts_with("dsync mirror") {
            world.note(host);
        }
        let Some(output) = world.line(host, &command) else { continue };
        assert_ne!(output.status.code(), Some(2), "{output}");
        let refused = shown.trim_start().starts_with("dsync: ");
        assert_eq!(output.status.success(), !refused, "the page shows something else: {output}");
        world.compare(&command, &shown, &output);
        if command.starts_with("dsync rewind") && command.contains("--to") {
            (world.least, world.most) = (world.sound, u64::MAX);
        }
    }
    say(&format!("docs/failover.md took {:.1} s", began.elapsed().as_secs_f64()));
}
