//! `dsync run`: a job is a file that has a command with its options, one per line. It is turned into the command line that it
//! stands for, which is then read like any other: there is no second definition of options.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, Command, CommandFactory, Parser};

use crate::args::{self, Cli};
use crate::failure::Failure;
use crate::terms::shell_word;

/// What a job may run.
const COMMANDS: [&str; 7] = ["serve", "sync", "mirror", "verify", "rehearse", "receive", "send"];

/// Where jobs are, unless the user says otherwise.
const FOLDER: &str = "/etc/dsync";

/// A job that this process runs.
#[derive(Debug)]
pub(crate) struct Running {
    folder: PathBuf,
    name: String,
    /// The options that replace those of the file.
    given: Vec<OsString>,
    /// The state directory that was given before its name.
    state: Option<PathBuf>,
}

static RUNNING: OnceLock<Running> = OnceLock::new();

/// The job that this process runs, if it was started by `dsync run`.
pub(crate) fn running() -> Option<&'static Running> {
    RUNNING.get()
}

impl Running {
    /// The name of the job.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The command line for which its file stands now.
    ///
    /// # Errors
    /// Bad usage, with the file and the line.
    pub(crate) fn read_again(&self) -> Result<Cli> {
        command_of(&self.folder, &self.name, &self.given)
    }

    /// True for a job that `dsync status --check` looks at: of the usual folder, with a file there.
    pub(crate) fn is_of_this_host(&self) -> bool {
        let whole = |folder: &Path| std::fs::canonicalize(folder).ok();
        let is_usual = whole(&self.folder) == whole(&usual_folder());
        is_usual && is_plain(&self.name) && file_of(&self.folder, &self.name).exists()
    }

    /// The state directory that it names, also where the rest of its file cannot be read.
    pub(crate) fn state_dir(&self) -> Option<PathBuf> {
        self.state.clone().or_else(|| named_state(&self.folder, &self.name))
    }
}

/// An error of what an option of the running job says, at its line of the file.
pub(crate) fn at_line(key: &str, error: Failure) -> Failure {
    let from_file = || {
        let running = running()?;
        let job = JobFile::read(&running.folder, &running.name).ok()?;
        let replaced = job.replaced(&running.given);
        let line = job.lines.iter().find(|line| line.key == key)?;
        let is_given = job.arg(line).is_ok_and(|arg| replaced.contains(&arg));
        (!is_given).then(|| job.wrong(line, &error.to_string()))
    };
    from_file().unwrap_or(error)
}

/// Replaces `dsync run` by the command of its job. `None` if the user wants to see it only: it was printed.
///
/// # Errors
/// Bad usage, with the file and the line.
pub(crate) fn resolve(cli: Cli) -> Result<Option<Cli>> {
    let args::Command::Run(run) = &cli.command else { return Ok(Some(cli)) };
    let (folder, state) = (folder(run), cli.state_dir.clone());
    let name = job_name(&folder, &run.job);
    let mut given = globals(&cli);
    // Behind the first option of the command, clap leaves it where it is.
    let print = |word: &OsString| word == "--print";
    given.extend(run.options.iter().filter(|word| !print(word)).cloned());
    if run.print || run.options.iter().any(print) {
        let words = JobFile::read(&folder, &name)?.words(&given)?;
        let words: Vec<String> = words.iter().map(|word| shell_word(&word.to_string_lossy())).collect();
        // A closed pipe is not an error.
        let _ = writeln!(std::io::stdout(), "{}", words.join(" "));
        return Ok(None);
    }
    let running = RUNNING.get_or_init(|| Running { folder, name, given, state });
    command_of(&running.folder, &running.name, &running.given).map(Some)
}

/// The name of a job, which may be given as that of its file.
fn job_name(folder: &Path, given: &str) -> String {
    let is_file = folder.join(format!("{given}.conf")).exists();
    given.strip_suffix(".conf").filter(|_| !is_file).unwrap_or(given).to_owned()
}

fn folder(run: &args::Run) -> PathBuf {
    run.config.clone().unwrap_or_else(usual_folder)
}

/// The folder that `DSYNC_CONF_DIR` names.
fn named_folder() -> Option<PathBuf> {
    std::env::var_os("DSYNC_CONF_DIR").filter(|folder| !folder.is_empty()).map(PathBuf::from)
}

/// True if `DSYNC_CONF_DIR` says where jobs are.
pub(crate) fn is_folder_named() -> bool {
    named_folder().is_some()
}

/// Where jobs are, without another word.
pub(crate) fn usual_folder() -> PathBuf {
    named_folder().unwrap_or_else(|| FOLDER.into())
}

/// The command line for which a job stands, with the options that are given in place of those of its file.
fn command_of(folder: &Path, name: &str, given: &[OsString]) -> Result<Cli> {
    let job = JobFile::read(folder, name)?;
    Ok(Cli::try_parse_from(job.words(given)?).map_err(|error| job.bad_value(&error, given))?)
}

/// A job of a folder.
pub(crate) struct NamedJob {
    pub name: String,
    /// The command line for which it stands, or why it is refused.
    pub cli: Result<Cli>,
    /// The state directory that it names.
    pub state: Option<PathBuf>,
}

/// The jobs in a folder by their names. What is hidden is none.
///
/// # Errors
/// If the folder is there and cannot be read.
pub(crate) fn all(folder: &Path) -> Result<Vec<NamedJob>> {
    if let Err(error) = std::fs::read_dir(folder).map(drop) {
        let is_there = error.kind() != std::io::ErrorKind::NotFound;
        return if is_there { Err(error).context("cannot read the jobs") } else { Ok(Vec::new()) };
    }
    let of = |name: String| {
        let (cli, state) = (command_of(folder, &name, &[]), named_state(folder, &name));
        NamedJob { name, cli, state }
    };
    Ok(known(folder).into_iter().filter(|name| !name.starts_with('.')).map(of).collect())
}

/// The state directory that the file of a job names, whatever else is in it.
fn named_state(folder: &Path, name: &str) -> Option<PathBuf> {
    let text = std::fs::read_to_string(file_of(folder, name)).ok()?;
    let named = text.lines().filter_map(|line| line.split_once('='));
    let mut named = named.filter(|(key, _)| key.trim().eq_ignore_ascii_case("state-dir"));
    named.next().map(|(_, value)| plain_value(value).into())
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.conf"))
}

/// True for the name of a job.
fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    name.chars().all(plain) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Reads a job's file, which may run commands as this user: only root and this user may be able to change it.
///
/// # Errors
/// `InvalidData` if others are.
fn own(folder: &Path, path: &Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;
    let check = |place: &Path, found: &std::fs::Metadata| {
        let why = if ![0, rustix::process::geteuid().as_raw()].contains(&found.uid()) {
            "it belongs to another user: run \"chown root\""
        } else if found.mode() & 0o022 != 0 {
            "others than its owner may write to it: run \"chmod go-w\""
        } else {
            return Ok(());
        };
        let why = format!(
            "jobs run commands, and {} is not safe, as {why} for it once its content is as it should be",
            place.display()
        );
        Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why))
    };
    let mut file = std::fs::File::open(path)?;
    check(folder, &std::fs::metadata(folder)?)?;
    check(path, &file.metadata()?)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The options before the job's name that every command has.
fn globals(cli: &Cli) -> Vec<OsString> {
    let mut words = Vec::new();
    if let Some(folder) = &cli.state_dir {
        words.extend(["--state-dir".into(), folder.into()]);
    }
    let flags =
        [("--json", u8::from(cli.json)), ("--quiet", u8::from(cli.quiet)), ("--verbose", cli.verbose)];
    words.extend(flags.iter().flat_map(|(flag, count)| (0..*count).map(move |_| OsString::from(flag))));
    words
}

/// A line of a job's file.
struct Line {
    number: usize,
    key: String,
    value: String,
}

/// A job's file.
pub(crate) struct JobFile {
    path: PathBuf,
    command: Command,
    lines: Vec<Line>,
}

/// What no job consents to.
const CONSENTS: [&str; 3] = ["save_there", "discard_there", "accept_source"];

impl JobFile {
    pub(crate) fn read(folder: &Path, name: &str) -> Result<JobFile> {
        if !is_plain(name) {
            return Err(Failure::usage(format!(
                "invalid job name \"{name}\": use letters, digits, dots, dashes and underscores; the file is {}/NAME.conf",
                folder.display()
            ))
            .into());
        }
        let path = file_of(folder, name);
        let text = match own(folder, &path) {
            Ok(bytes) => String::from_utf8(bytes)
                .map_err(|_| Failure::usage(format!("{}: not text in UTF-8", path.display())))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let known = known(folder);
                let known = if known.is_empty() { "no jobs".to_owned() } else { known.join(", ") };
                return Err(Failure::usage(format!(
                    "no job \"{name}\": {} does not exist (there: {known})",
                    path.display()
                ))
                .into());
            }
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                return Err(Failure::refused(error.to_string()).into());
            }
            other => {
                other.map(|_| String::new()).with_context(|| format!("cannot read {}", path.display()))?
            }
        };
        let mut lines = lines(&path, &text)?;
        let at = lines.iter().position(|line| line.key == "command").ok_or_else(|| {
            Failure::usage(format!("{}: the command is missing: add \"command = sync\"", path.display()))
        })?;
        let line = lines.remove(at);
        let mut program = Cli::command();
        // Passes global options on to the commands.
        program.build();
        let command =
            program.find_subcommand(&line.value).filter(|_| COMMANDS.contains(&line.value.as_str()));
        let command = command.cloned().ok_or_else(|| {
            let commands = COMMANDS.join(", ");
            let Line { number, value, .. } = &line;
            Failure::usage(format!(
                "{}:{number}: unknown command \"{value}\": use one of {commands}",
                path.display()
            ))
        })?;
        Ok(JobFile { path, command, lines })
    }

    /// The command line, with what was given after the job's name in place of the same options in the file.
    fn words(&self, given: &[OsString]) -> Result<Vec<OsString>, Failure> {
        let replaced = self.replaced(given);
        let mut options = Vec::new();
        // For each positional argument, as clap orders them, its values.
        let mut places: Vec<(&Arg, Vec<OsString>)> =
            self.command.get_positionals().map(|arg| (arg, Vec::new())).collect();
        for (at, line) in self.lines.iter().enumerate() {
            let arg = self.arg(line)?;
            let first = self.lines[..at].iter().find(|before| self.arg(before).is_ok_and(|a| a == arg));
            if let (Some(first), false) = (first, is_many(arg)) {
                let why = format!("{} is set twice, first in line {}", line.key, first.number);
                return Err(self.wrong(line, &why));
            }
            if let Some((_, values)) = places.iter_mut().find(|(place, _)| *place == arg) {
                values.push(self.filled(line)?.into());
            } else if !replaced.contains(&arg) {
                options.extend(self.option(line, arg)?);
            }
        }
        if let Some((arg, _)) =
            places.iter().find(|(arg, values)| self.needs(arg, given) && values.is_empty())
        {
            let (path, key, command) = (self.path.display(), key_of(arg), self.command.get_name());
            return Err(Failure::usage(format!(
                "{path}: the {key} is missing: {command} needs \"{key} = …\""
            )));
        }
        let mut words = vec![OsString::from("dsync"), self.command.get_name().into()];
        words.extend(places.into_iter().flat_map(|(_, values)| values));
        words.extend(options);
        words.extend_from_slice(given);
        Ok(words)
    }

    /// What it says of a key.
    pub(crate) fn value(&self, key: &str) -> Option<&str> {
        self.lines.iter().find(|line| line.key == key).map(|line| line.value.as_str())
    }

    /// Options of the job with these keys that `command` has too, and that were not `given` to it.
    pub(crate) fn options(
        &self,
        keys: &[&str],
        command: &str,
        given: &[OsString],
    ) -> Result<Vec<OsString>, Failure> {
        let mut program = Cli::command();
        program.build();
        let has = |key: &str| {
            let command = program.find_subcommand(command);
            keys.contains(&key)
                && command.is_some_and(|command| command.get_arguments().any(|arg| has_key(arg, key)))
        };
        let (mut options, replaced) = (Vec::new(), self.replaced(given));
        for line in &self.lines {
            let arg = self.arg(line)?;
            if has(key_of(arg)) && !replaced.contains(&arg) {
                options.extend(self.option(line, arg)?);
            }
        }
        Ok(options)
    }

    /// The error that the job cannot be used, and why.
    pub(crate) fn misfit(&self, why: &str) -> anyhow::Error {
        Failure::usage(format!("{}: {why}", self.path.display())).into()
    }

    /// True if a positional argument must be set. The members of a group are its sources.
    fn needs(&self, arg: &Arg, given: &[OsString]) -> bool {
        let is_group = |key: &str| key == "group";
        let mut grouped = self.lines.iter().any(|line| is_group(&line.key));
        grouped |= self.replaced(given).iter().any(|arg| is_group(key_of(arg)));
        match (self.command.get_name(), arg.get_id().as_str()) {
            ("sync" | "mirror", "source") => !grouped,
            (_, id) => arg.is_required_set() || id == "destination",
        }
    }

    /// The argument that a line sets.
    fn arg(&self, line: &Line) -> Result<&Arg, Failure> {
        let found = self.args().find(|arg| has_key(arg, &line.key));
        if found.is_some_and(|arg| CONSENTS.contains(&arg.get_id().as_str())) {
            let key = &line.key;
            return Err(self.wrong(line, &format!(
                "\"{key}\" gives up what only a destination has, which is said on a command line, once that is known: remove it"
            )));
        }
        found.ok_or_else(|| {
            let command = self.command.get_name();
            let keys = self.args().filter(|arg| !arg.is_hide_set()).map(key_of).chain(["command"]);
            let nearest = keys.map(|key| (strsim::jaro(key, &line.key), key)).max_by(|a, b| a.0.total_cmp(&b.0));
            self.wrong(line, &match nearest {
                Some((likeness, key)) if likeness > 0.7 => {
                    format!("unknown key \"{}\" of a job for {command}: did you mean \"{key}\"?", line.key)
                }
                _ => {
                    let key = &line.key;
                    format!("unknown key \"{key}\" of a job for {command}: \"dsync {command} --help\" lists the options")
                }
            })
        })
    }

    /// All arguments of the command that a job may set.
    fn args(&self) -> impl Iterator<Item = &Arg> {
        let is_help = |arg: &&Arg| matches!(arg.get_id().as_str(), "help" | "version" | "named");
        self.command.get_arguments().filter(move |arg| !is_help(arg))
    }

    /// The options that are among the words given by the user. A value never begins with a dash.
    fn replaced(&self, given: &[OsString]) -> Vec<&Arg> {
        let mut found = Vec::new();
        for word in given.iter().filter_map(|word| word.to_str()) {
            if let Some(long) = word.strip_prefix("--") {
                let key = long.split_once('=').map_or(long, |(key, _)| key);
                found.extend(self.args().find(|arg| !arg.is_positional() && has_key(arg, key)));
            } else if let Some(shorts) = word.strip_prefix('-') {
                for short in shorts.chars() {
                    let Some(arg) = self.args().find(|arg| arg.get_short() == Some(short)) else { break };
                    found.push(arg);
                    if !is_flag(arg) {
                        // Its value follows.
                        break;
                    }
                }
            }
        }
        found
    }

    /// The word for an option, if it is to be passed.
    fn option(&self, line: &Line, arg: &Arg) -> Result<Option<OsString>, Failure> {
        let long = arg.get_long().unwrap_or(&line.key);
        let switch = match line.value.as_str() {
            "yes" | "true" | "on" => Some(true),
            "no" | "false" | "off" => Some(false),
            _ => None,
        };
        match switch {
            Some(on) if is_flag(arg) || is_optional(arg) => Ok(on.then(|| format!("--{long}").into())),
            None if is_flag(arg) => Err(self
                .wrong(line, &format!("invalid value \"{}\" for {}: use yes or no", line.value, line.key))),
            _ => Ok(Some(format!("--{long}={}", self.filled(line)?).into())),
        }
    }

    /// The value of a line, which must not be empty.
    fn filled<'a>(&self, line: &'a Line) -> Result<&'a str, Failure> {
        match line.value.as_str() {
            "" => Err(self.wrong(line, &format!("{} has no value: give one, or remove the line", line.key))),
            value => Ok(value),
        }
    }

    fn wrong(&self, line: &Line, why: &str) -> Failure {
        Failure::usage(format!("{}:{}: {why}", self.path.display(), line.number))
    }

    /// The parser's error, at the line of the file that it is about.
    fn bad_value(&self, error: &clap::Error, given: &[OsString]) -> Failure {
        let text = error.to_string();
        let text: Vec<&str> = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
        let text = text.join(" ");
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let named = match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(named)) => named.strip_prefix("--").unwrap_or_default(),
            _ => "",
        };
        let long = named.split([' ', '=', '[']).next().unwrap_or_default();
        let replaced = self.replaced(given);
        let is_here = |arg: &Arg| arg.get_long() == Some(long) && !replaced.contains(&arg);
        let line = self.lines.iter().find(|line| self.arg(line).is_ok_and(is_here));
        line.map_or_else(
            || Failure::usage(format!("{}: {text}", self.path.display())),
            |line| self.wrong(line, text),
        )
    }
}

/// The lines `key = value`. Empty ones and those that begin with `#` are left out.
fn lines(path: &Path, text: &str) -> Result<Vec<Line>, Failure> {
    let mut lines = Vec::new();
    // Some editors begin a file with a byte order mark.
    for (number, line) in (1..).zip(text.trim_start_matches('\u{feff}').lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            return Err(Failure::usage(format!(
                "{}:{number}: \"{line}\" has no \"=\": write \"key = value\", and \"key = yes\" for an option without a value",
                path.display()
            )));
        };
        lines.push(Line {
            number,
            key: key.trim().to_ascii_lowercase(),
            value: plain_value(value).to_owned(),
        });
    }
    Ok(lines)
}

/// A value without a comment behind it, and without quotes around all of it. A `#` is a comment after a blank, outside of quotes.
fn plain_value(text: &str) -> &str {
    let (mut quote, mut blank) = (None, true);
    let comment = text.char_indices().find(|(_, c)| {
        match quote {
            Some(open) if open == *c => quote = None,
            None if matches!(c, '"' | '\'') => quote = Some(*c),
            _ => {}
        }
        let is_comment = *c == '#' && blank && quote.is_none();
        blank = c.is_whitespace();
        is_comment
    });
    let value = comment.map_or(text, |(at, _)| &text[..at]).trim();
    let within = ['"', '\''].into_iter().find_map(|quote| value.strip_prefix(quote)?.strip_suffix(quote));
    within.filter(|within| !within.contains(['"', '\''])).unwrap_or(value)
}

/// The names of the jobs in a folder.
pub(crate) fn known(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| Some(entry.file_name().to_string_lossy().strip_suffix(".conf")?.to_owned()))
        .collect();
    names.sort();
    names
}

/// What an argument is called in a file: its long option; "source" and "destination" for those without one.
fn key_of(arg: &Arg) -> &str {
    match arg.get_id().as_str() {
        "images" => "source",
        id => arg.get_long().unwrap_or(id),
    }
}

fn has_key(arg: &Arg, key: &str) -> bool {
    key_of(arg) == key || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&key))
}

fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::Count)
}

fn is_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

/// True if its value may be left out.
fn is_optional(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|count| count.min_values() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command line of a job with this text, as printed, or its error without the folder.
    fn line(text: &str, given: &[&str]) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("vm.conf"), text).unwrap();
        let given: Vec<OsString> = given.iter().map(OsString::from).collect();
        let words = JobFile::read(folder.path(), "vm").and_then(|job| {
            let words = job.words(&given)?;
            Cli::try_parse_from(&words).map_err(|error| job.bad_value(&error, &given))?;
            Ok(words)
        });
        match words {
            Ok(words) => {
                Ok(words.iter().map(|w| shell_word(&w.to_string_lossy())).collect::<Vec<_>>().join(" "))
            }
            Err(error) => Err(error.to_string().replace(&format!("{}/", folder.path().display()), "")),
        }
    }

    const MIRROR: &str =
        "# a comment\ncommand = mirror\nsource=vm\ndestination = backup:/srv/my vm.raw\n\n rpo = 30s\n";

    #[test]
    fn a_job_is_its_command_line() {
        let mirror = "dsync mirror vm 'backup:/srv/my vm.raw' --rpo=30s";
        assert_eq!(line(MIRROR, &[]).unwrap(), mirror);
        let more = format!("{MIRROR}compress = yes\nadopt = yes\ncreate = no\nverbose = yes\nlanes = 3\n");
        assert_eq!(
            line(&more, &[]).unwrap(),
            format!("{mirror} --compress --adopt --verbose --connections=3")
        );
        let adopt = format!("{MIRROR}adopt = overwrite\n");
        assert_eq!(line(&adopt, &[]).unwrap(), format!("{mirror} --adopt=overwrite"));
        let level = format!("{MIRROR}compress = 3\n");
        assert_eq!(line(&level, &[]).unwrap(), format!("{mirror} --compress=3"));
        let serve =
            "command = serve\nsource = a.raw\nsource = b.raw\nsocket = /run/vm.sock\nread-only = yes\n";
        assert_eq!(line(serve, &[]).unwrap(), "dsync serve a.raw b.raw --socket=/run/vm.sock --read-only");
        let receive = "command = receive\nlisten = 0.0.0.0\ninto = /a\ninto = /b=c\n";
        assert_eq!(line(receive, &[]).unwrap(), "dsync receive --listen=0.0.0.0 --into=/a --into=/b=c");
    }

    #[test]
    fn comments_quotes_and_a_byte_order_mark() {
        let file = "\u{feff}Command = sync # by night\nsource = \"/srv/a # b.raw\"   # the disk\ndestination = far:/srv/#1.raw\n\
                    rsh = ssh -o 'X=a # b'\t# quoted\nbwlimit = '1M'\n#adopt = yes\n";
        assert_eq!(
            line(file, &[]).unwrap(),
            "dsync sync '/srv/a # b.raw' 'far:/srv/#1.raw' '--rsh=ssh -o '\\''X=a # b'\\''' --bwlimit=1M"
        );
        assert_eq!(plain_value(" 'a' -F 'b'"), "'a' -F 'b'");
        assert_eq!(plain_value(" # only a comment"), "");
        assert_eq!(plain_value(" a#b"), "a#b");
    }

    #[test]
    fn options_that_are_given_replace_those_of_the_file() {
        let same = |given: &[&str], options: &str| {
            let words = line(&format!("{MIRROR}bwlimit = 1M\nrsh = ssh -4\nquiet = yes\n"), given).unwrap();
            assert_eq!(words, format!("dsync mirror vm 'backup:/srv/my vm.raw' {options}"), "{given:?}");
        };
        same(&[], "--rpo=30s --bwlimit=1M '--rsh=ssh -4' --quiet");
        same(&["--rpo", "1s"], "--bwlimit=1M '--rsh=ssh -4' --quiet --rpo 1s");
        same(&["--rpo=1s", "-e", "ssh"], "--bwlimit=1M --quiet --rpo=1s -e ssh");
        same(&["-qe--bwlimit"], "--rpo=30s --bwlimit=1M -qe--bwlimit");
    }

    #[test]
    fn a_wrong_line_is_named() {
        let wrong = |text: &str, message: &str| assert_eq!(line(text, &[]).unwrap_err(), message);
        wrong(
            &format!("{MIRROR}bwlimt = 1M\n"),
            "vm.conf:7: unknown key \"bwlimt\" of a job for mirror: did you mean \"bwlimit\"?",
        );
        wrong(
            &format!("{MIRROR}quibble = 1M\n"),
            "vm.conf:7: unknown key \"quibble\" of a job for mirror: \"dsync mirror --help\" lists the options",
        );
        wrong(
            &format!("{MIRROR}help = yes\n"),
            "vm.conf:7: unknown key \"help\" of a job for mirror: \"dsync mirror --help\" lists the options",
        );
        let sync = "command = sync\nsource = a\ndestination = b\n";
        for consent in ["accept-source", "discard-there", "save-there"] {
            let said = line(&format!("{sync}{consent} = yes\n"), &[]).unwrap_err();
            assert!(said.contains("which is said on a command line") && said.contains(consent), "{said}");
        }
        wrong(&format!("{MIRROR}rpo = 1s\n"), "vm.conf:7: rpo is set twice, first in line 6");
        wrong(
            &format!("{MIRROR}connections = 1\nlanes = 1\n"),
            "vm.conf:8: lanes is set twice, first in line 7",
        );
        wrong(&format!("{MIRROR}create = 1\n"), "vm.conf:7: invalid value \"1\" for create: use yes or no");
        wrong(
            "command = sync\nsource = vm\ndestination = far:/vm\ndiscard-there = yes\n",
            "vm.conf:4: \"discard-there\" gives up what only a destination has, which is said on a command line, once that is known: remove it",
        );
        wrong(
            &format!("{MIRROR}adopt\n"),
            "vm.conf:7: \"adopt\" has no \"=\": write \"key = value\", and \"key = yes\" for an option without a value",
        );
        wrong(
            &format!("{MIRROR}bwlimit =\n"),
            "vm.conf:7: bwlimit has no value: give one, or remove the line",
        );
        wrong("source = a\n", "vm.conf: the command is missing: add \"command = sync\"");
        wrong(
            "\ncommand = run\n",
            "vm.conf:2: unknown command \"run\": use one of serve, sync, mirror, verify, rehearse, receive, send",
        );
        wrong(
            "command = sync\nsource = a\n",
            "vm.conf: the destination is missing: sync needs \"destination = …\"",
        );
        let bad = line(&format!("{MIRROR}epoch = soon\n"), &[]).unwrap_err();
        assert!(
            bad.starts_with("vm.conf:7: invalid value 'soon' for '--epoch <TIME>': use a form like 30ms"),
            "{bad}"
        );
        // An option given after the name is not in the file.
        let bad = line(MIRROR, &["--rpo", "soon"]).unwrap_err();
        assert!(bad.starts_with("vm.conf: invalid value 'soon' for '--rpo <TIME>'"), "{bad}");
        let bad = line(&format!("{MIRROR}quiet = yes\n"), &["--verbose"]).unwrap_err();
        assert!(bad.contains("cannot be used with"), "{bad}");
    }

    #[test]
    fn every_command_of_a_job_has_the_keys_that_its_help_names() {
        let mut program = Cli::command();
        program.build();
        for name in COMMANDS {
            let command = program.find_subcommand(name).unwrap();
            for arg in command.get_arguments() {
                assert!(arg.is_positional() || arg.get_long().is_some(), "{name}: {arg}");
            }
            let places: Vec<&str> = command.get_positionals().map(key_of).collect();
            assert!(["source", "destination"].starts_with(&places), "{name}: {places:?}");
        }
    }

    #[test]
    fn random_text_is_never_a_panic() {
        let folder = tempfile::tempdir().unwrap();
        let words =
            ["command", "sync", "serve", "=", "\n", "source", " ", "#", "\u{fe0f}", "rpo", "\t", "--", "é"];
        let mut random = testing::Random::new("random text of a job");
        for _ in 0..300 {
            let mut text = String::from("command = sync\nsource = a\ndestination = b\n");
            for _ in 0..random.below(12) {
                text += words[random.below(words.len() as u64) as usize];
            }
            std::fs::write(folder.path().join("vm.conf"), text).unwrap();
            if let Ok(job) = JobFile::read(folder.path(), "vm") {
                let _ = job.words(&[]).map(Cli::try_parse_from);
            }
        }
    }
}
