//! PostgreSQL under pgbench, as the load of a disk: it listens on a socket in a folder only, and runs as `nobody`, in a pid namespace of its
//! own, so that all of it is gone when it is killed.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::hosts::Host;
use crate::measure::places::sockets;
use crate::measure::process::{Daemon, command, run};

const NOBODY: u32 = 65534;
const LIMIT: Duration = Duration::from_secs(300);
/// Accounts, tellers, branches and the history of pgbench: their sums are one as long as no transaction is torn.
const BOOKS: &str = "select concat_ws(' ', (select sum(abalance) from pgbench_accounts), \
                     (select sum(tbalance) from pgbench_tellers), (select sum(bbalance) from pgbench_branches), \
                     (select coalesce(sum(delta), 0) from pgbench_history), (select count(*) from pgbench_history))";

/// The programs of PostgreSQL, in their newest version.
#[derive(Clone)]
pub(crate) struct Programs(PathBuf);

impl Programs {
    /// Finds them where Debian has them.
    pub(crate) fn find() -> Result<Programs> {
        let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
        let folders = versions.map(|entry| entry.path()).filter_map(|path| Some((version(&path)?, path)));
        let whole = folders.filter(|(_, path)| {
            ["initdb", "postgres", "pgbench", "psql"].iter().all(|name| path.join("bin").join(name).is_file())
        });
        let (_, path) = whole.max().context("PostgreSQL's server is not installed")?;
        Ok(Programs(path.join("bin")))
    }

    /// What it is, as it says itself.
    pub(crate) fn version(&self) -> Result<String> {
        Ok(run(command(&self.path("postgres")).arg("--version"), LIMIT)?.stdout.trim().to_string())
    }

    fn path(&self, program: &str) -> String {
        self.0.join(program).display().to_string()
    }

    fn as_nobody(&self, program: &str) -> Command {
        let id = NOBODY.to_string();
        let mut line = command("unshare");
        line.args(["--pid", "--fork", "--kill-child", "--ipc", "setpriv", "--pdeathsig", "KILL"]);
        line.args(["--reuid", &id, "--regid", &id, "--clear-groups"]).arg(self.path(program));
        line.current_dir("/");
        line
    }
}

/// A database at work on a host. Dropped, it is killed.
pub(crate) struct Database<'a> {
    daemon: Daemon,
    programs: Programs,
    host: &'a Host,
    socket: TempDir,
}

impl<'a> Database<'a> {
    /// Makes a database in a folder, with the tables of pgbench, of 15 MB for each unit of `scale`.
    pub(crate) fn create(
        programs: &Programs,
        host: &'a Host,
        data: &Path,
        scale: u32,
    ) -> Result<Database<'a>> {
        std::fs::create_dir(data)?;
        chown(data, Some(NOBODY), Some(NOBODY))?;
        let mut make = programs.as_nobody("initdb");
        make.arg("-D").arg(data).args(["-A", "trust", "-U", "postgres", "--no-locale", "-E", "UTF8", "-k"]);
        run(&mut host.run(&make), LIMIT)?;
        let database = Database::start(programs, host, data)?;
        database.pgbench(&["-i", "-q", "-s", &scale.to_string()])?;
        Ok(database)
    }

    /// Starts the database of a folder. It first does what is to be done after a crash.
    pub(crate) fn start(programs: &Programs, host: &'a Host, data: &Path) -> Result<Database<'a>> {
        let socket = sockets()?;
        std::fs::set_permissions(socket.path(), PermissionsExt::from_mode(0o777))?;
        let mut start = programs.as_nobody("postgres");
        start.arg("-D").arg(data).arg("-k").arg(socket.path());
        for setting in ["listen_addresses=", "shared_buffers=64MB", "dynamic_shared_memory_type=mmap"] {
            start.args(["-c", setting]);
        }
        let daemon = Daemon::start_bare(&mut host.run(&start))?;
        let mut database = Database { daemon, programs: programs.clone(), host, socket };
        let until = Instant::now() + LIMIT;
        while let Err(error) = database.query("select 1") {
            database.daemon.check()?;
            ensure!(Instant::now() < until, "PostgreSQL does not answer: {error:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(database)
    }

    fn client(&self, program: &str) -> Command {
        let mut client = command(&self.programs.path(program));
        client.arg("-h").arg(self.socket.path()).args(["-U", "postgres"]).env("PGDATABASE", "postgres");
        client
    }

    fn pgbench(&self, options: &[&str]) -> Result<()> {
        run(&mut self.host.run(self.client("pgbench").args(options)), LIMIT).map(drop)
    }

    fn query(&self, text: &str) -> Result<String> {
        let mut psql = self.client("psql");
        psql.args(["-X", "-A", "-t", "-c", text]);
        Ok(run(&mut self.host.run(&psql), LIMIT)?.stdout.trim().to_string())
    }

    /// So many clients of pgbench for so long, or until it is dropped.
    pub(crate) fn clients(&self, count: u64, seconds: u64) -> Result<Daemon> {
        let mut pgbench = self.client("pgbench");
        pgbench.args(["-n", "-c", &count.to_string(), "-T", &seconds.to_string()]);
        Daemon::start_bare(&mut self.host.run(&pgbench))
    }

    /// Reads all of the books, which must balance; the transactions that are in them.
    pub(crate) fn books(&self) -> Result<u64> {
        let sums = self.query(BOOKS)?;
        let all: Vec<&str> = sums.split(' ').collect();
        ensure!(
            all.len() == 5 && all[..4].iter().all(|sum| *sum == all[0]),
            "the books do not balance: {sums}"
        );
        Ok(all[4].parse()?)
    }

    /// Ends it in good order.
    pub(crate) fn stop(self) -> Result<()> {
        self.daemon.interrupt()
    }
}
