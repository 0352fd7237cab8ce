//! A PostgreSQL on a device: clients that know what was acknowledged to them, and books that must balance.
//!
//! It runs as `nobody`, in a pid namespace of its own: killed, all of it is gone at once, as in a power cut.

use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::mount::Mount;
use crate::{Background, Run};

const NOBODY: u32 = 65534;
/// How long anything may take that a database does.
const LONG: Duration = Duration::from_secs(120);
/// Accounts, tellers, branches and the history of pgbench: the four sums are one.
const BOOKS: &str = "select concat_ws(' ', (select sum(abalance) from pgbench_accounts), \
                     (select sum(tbalance) from pgbench_tellers), (select sum(bbalance) from pgbench_branches), \
                     (select coalesce(sum(delta), 0) from pgbench_history), (select count(*) from pgbench_history))";

/// The programs of PostgreSQL, in their newest version.
#[derive(Debug, Clone)]
pub struct Programs(PathBuf);

impl Programs {
    /// Finds them; or says why they cannot be run here.
    pub fn find() -> Result<Programs, String> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let version = |path: &PathBuf| path.file_name()?.to_str()?.parse::<u32>().ok();
        let folders = versions.map(|entry| entry.path()).filter_map(|path| Some((version(&path)?, path)));
        let whole = folders.map(|(number, path)| (number, path.join("bin"))).filter(|(_, bin)| {
            ["initdb", "postgres", "pgbench"].iter().all(|program| bin.join(program).is_file())
        });
        let (_, bin) = whole.max().ok_or("PostgreSQL's server is missing")?;
        let programs = Programs(bin);
        match programs.as_nobody("postgres").arg("--version").output() {
            output if output.status.success() => Ok(programs),
            output => Err(format!("PostgreSQL cannot be run in a namespace ({})", output.stderr.trim())),
        }
    }

    fn as_nobody(&self, program: &str) -> Run {
        let id = NOBODY.to_string();
        Run::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--ipc", "setpriv", "--pdeathsig", "KILL"])
            .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
            .arg(self.0.join(program))
            .dir(Path::new("/"))
    }
}

/// A database in the file system of a device: mounted, and running. Dropped, it is killed.
pub struct Database {
    process: Background,
    programs: Programs,
    mount: PathBuf,
    _mounted: Mount,
    place: TempDir,
}

impl Database {
    /// Makes a database with the tables of pgbench, and one of acknowledged transactions, in the new file system of a device.
    pub fn create(programs: &Programs, device: &Path) -> Database {
        Run::new("mkfs.ext4").args(["-q", "-F"]).arg(device).ok();
        let (place, mount, mounted) = mounted(device);
        let data = mount.join("data");
        std::fs::create_dir(&data).expect("a folder");
        chown(&data, Some(NOBODY), Some(NOBODY)).expect("the folder's owner");
        let made = programs.as_nobody("initdb").arg("-D").arg(&data).args(["-A", "trust", "-U", "postgres"]);
        made.args(["--no-locale", "-E", "UTF8", "-N", "-k", "--wal-segsize=1"]).limit(LONG).ok();
        let database = Database::run(programs, place, mount, mounted);
        database.pgbench().args(["-i", "-q", "-s", "1"]).limit(LONG).ok();
        database.sql().query("create table acked (id bigint primary key)").expect("a table");
        database
    }

    /// Starts the database of a device. It first does what is to be done after a crash.
    pub fn start(programs: &Programs, device: &Path) -> Database {
        let (place, mount, mounted) = mounted(device);
        Database::run(programs, place, mount, mounted)
    }

    fn run(programs: &Programs, place: TempDir, mount: PathBuf, mounted: Mount) -> Database {
        let run =
            programs.as_nobody("postgres").arg("-D").arg(mount.join("data")).arg("-k").arg(place.path());
        let settings = [
            "listen_addresses=",
            "shared_buffers=16MB",
            "max_wal_size=16MB",
            "min_wal_size=4MB",
            "dynamic_shared_memory_type=mmap",
        ];
        let process = run.args(settings.iter().flat_map(|setting| ["-c", setting])).start();
        let mut database = Database { process, programs: programs.clone(), mount, _mounted: mounted, place };
        let until = Instant::now() + LONG;
        while let Err(error) = Sql::connect(database.place.path()) {
            assert!(
                database.process.ended().is_none() && Instant::now() < until,
                "the database does not answer ({error}): {}",
                database.process.stderr_so_far()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        database
    }

    /// A connection.
    pub fn sql(&self) -> Sql {
        Sql::connect(self.place.path())
            .unwrap_or_else(|e| panic!("no connection ({e}): {}", self.process.stderr_so_far()))
    }

    fn pgbench(&self) -> Run {
        let run = Run::new(self.programs.0.join("pgbench")).arg("-h").arg(self.place.path());
        run.args(["-U", "postgres"]).env("PGDATABASE", "postgres")
    }

    /// Kills it, at once and altogether. The file system stays mounted.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Ends it in good order, or with `crash` by a kill, and unmounts its file system.
    pub fn stop(mut self, crash: bool) {
        if crash {
            self.kill();
        } else {
            let postmaster = self.process.descendant("postgres", "-D").expect("the database's first process");
            kill_process(postmaster, Signal::INT).expect("a signal");
            let ended = self.process.wait_for(LONG);
            assert!(ended.is_some_and(|status| status.success()), "{}", self.process.stderr_so_far());
        }
        // What was killed lets go of its files a moment later.
        let until = Instant::now() + LONG;
        while !Run::new("umount").arg(&self.mount).output().status.success() {
            assert!(Instant::now() < until, "{} stays in use", self.mount.display());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn mounted(device: &Path) -> (TempDir, PathBuf, Mount) {
    let place = testing::temporary();
    std::fs::set_permissions(place.path(), PermissionsExt::from_mode(0o777)).expect("its mode");
    let mount = place.path().join("disk");
    let mounted = Mount::new(&["-t", "ext4"], device, &mount);
    let mounted =
        mounted.unwrap_or_else(|| panic!("the file system of {} cannot be mounted", device.display()));
    (place, mount, mounted)
}

/// A connection: the few messages of the protocol that a query takes.
pub struct Sql(UnixStream);

impl Sql {
    fn connect(folder: &Path) -> io::Result<Sql> {
        let stream = UnixStream::connect(folder.join(".s.PGSQL.5432"))?;
        stream.set_read_timeout(Some(LONG))?;
        let mut sql = Sql(stream);
        sql.send(None, b"\0\x03\0\0user\0postgres\0database\0postgres\0\0")?;
        sql.answer()?;
        Ok(sql)
    }

    /// The first column of the rows of a query. Once it returns, its transaction is committed.
    pub fn query(&mut self, text: &str) -> io::Result<Vec<String>> {
        self.send(Some(b'Q'), &[text.as_bytes(), b"\0"].concat())?;
        self.answer()
    }

    fn send(&mut self, kind: Option<u8>, body: &[u8]) -> io::Result<()> {
        let mut message: Vec<u8> = kind.into_iter().collect();
        message.extend((body.len() as u32 + 4).to_be_bytes());
        message.extend(body);
        self.0.write_all(&message)
    }

    /// Reads until the server waits for the next query.
    fn answer(&mut self) -> io::Result<Vec<String>> {
        let mut rows = Vec::new();
        loop {
            let mut head = [0; 5];
            self.0.read_exact(&mut head)?;
            let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
            let mut body = vec![0; len.saturating_sub(4)];
            self.0.read_exact(&mut body)?;
            match head[0] {
                b'Z' => return Ok(rows),
                b'E' => return Err(io::Error::other(String::from_utf8_lossy(&body).replace('\0', " "))),
                // The number of columns, then the length of the first.
                b'D' => rows.push(String::from_utf8_lossy(body.get(6..).unwrap_or_default()).into_owned()),
                _ => {}
            }
        }
    }
}

/// What was acknowledged to clients: numbers of rows, ascending.
#[derive(Debug, Default)]
pub struct Acknowledged {
    ids: Vec<u64>,
    /// The next number. One before it that is not acknowledged may have been committed, or not.
    next: u64,
    /// Transactions of pgbench that were seen.
    seen: u64,
}

impl Acknowledged {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.ids.len()
    }

    /// Fails the test unless the books balance and everything is there. Returns how many rows there are.
    pub fn check(&mut self, database: &Database, what: &str) -> usize {
        let seen = self.seen;
        let lost = self.check_cut(database, what);
        let (lost, first) = (lost.len(), lost.first());
        assert!(lost == 0, "{what}: {lost} acknowledged transactions are lost, from {first:?} on");
        assert!(self.seen >= seen, "{what}: {} transactions, and there were {seen}", self.seen);
        self.ids.len()
    }

    /// The same for a database as it was at an earlier moment: what was acknowledged up to some moment is there, and nothing that came
    /// later. Returns what is lost, which is forgotten.
    pub fn check_cut(&mut self, database: &Database, what: &str) -> Vec<u64> {
        let (there, transactions) = books(database, what);
        let last = there.last().copied().unwrap_or(0);
        let kept = self.ids.partition_point(|id| *id <= last);
        for id in &self.ids[..kept] {
            assert!(there.binary_search(id).is_ok(), "{what}: {id} is not there, and {last} is");
        }
        let lost = self.ids.split_off(kept);
        self.seen = transactions;
        lost
    }

    /// The same, and nothing is forgotten: another database goes on.
    pub fn look(&self, database: &Database, what: &str) -> usize {
        let mut copy = Acknowledged { ids: self.ids.clone(), next: self.next, seen: 0 };
        copy.check_cut(database, what).len()
    }
}

/// Reads everything, so that damaged pages show. The rows that clients have made, and the transactions of pgbench.
fn books(database: &Database, what: &str) -> (Vec<u64>, u64) {
    let mut sql = database.sql();
    let fail = |e| panic!("{what}: {e}");
    let sums = sql.query(BOOKS).unwrap_or_else(fail);
    let sums: Vec<&str> = sums[0].split(' ').collect();
    assert!(sums.len() == 5 && sums[..4].iter().all(|sum| *sum == sums[0]), "{what}: the books are {sums:?}");
    let rows = sql.query("select id from acked order by id").unwrap_or_else(fail);
    let ids = rows.iter().map(|id| id.parse().expect("a number")).collect();
    (ids, sums[4].parse().expect("a number"))
}

/// Clients at work: pgbench, and one that keeps what was acknowledged.
pub struct Clients {
    _pgbench: Background,
    stop: Arc<AtomicBool>,
    writer: JoinHandle<(Vec<u64>, u64)>,
}

impl Clients {
    /// Starts them. Call it from the test's own thread.
    pub fn start(database: &Database, acked: &Acknowledged) -> Clients {
        let pgbench = database.pgbench().args(["-n", "-c", "3", "-T", "3600"]).start();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, mut sql, mut next) = (stop.clone(), database.sql(), acked.next.max(1));
        let writer = std::thread::spawn(move || {
            let mut ids = Vec::new();
            while !stopped.load(SeqCst) {
                let row = format!("insert into acked values ({next})");
                next += 1;
                match sql.query(&row) {
                    Ok(_) => ids.push(next - 1),
                    // The database is gone. It may have committed that one, or not.
                    Err(_) => break,
                }
            }
            (ids, next)
        });
        Clients { _pgbench: pgbench, stop, writer }
    }

    /// Ends them, whether the database answers or not.
    pub fn stop(self, acked: &mut Acknowledged) {
        self.stop.store(true, SeqCst);
        let (ids, next) = self.writer.join().expect("the client");
        acked.ids.extend(ids);
        acked.next = next;
    }
}
