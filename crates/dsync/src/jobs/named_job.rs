//! `--job NAME` of the commands of the worst day: what they are about is taken from the job that copies it, so that nobody types that from
//! memory.

use std::ffi::OsString;
use std::path::Path;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{Command, CommandFactory as _};

use crate::args::Cli;
use crate::failure::Failure;
use crate::jobs::job::{JobFile, usual_folder};
use crate::reach::location::Location;

/// What a job says that holds for other commands too, where they have it.
const SHARED: [&str; 8] =
    ["state-dir", "rsh", "remote-dsync", "connections", "timeout", "bwlimit", "compress", "journal-dir"];

/// The command line with what the job that it names says, in place of that name.
///
/// # Errors
/// Bad usage, with the job's file.
pub(crate) fn resolve(words: Vec<OsString>) -> Result<Vec<OsString>> {
    resolve_in(&usual_folder(), words)
}

fn resolve_in(folder: &Path, words: Vec<OsString>) -> Result<Vec<OsString>> {
    let is_job =
        |word: &OsString| word.to_str().is_some_and(|word| word == "--job" || word.starts_with("--job="));
    if !words.iter().any(is_job) {
        return Ok(words);
    }
    // The job gives what is missing. Other errors are reported by the parser.
    let Ok(matches) = lenient().try_get_matches_from(&words) else { return Ok(words) };
    let Some((command, own)) = matches.subcommand() else { return Ok(words) };
    let Ok(Some(name)) = own.try_get_one::<String>("named") else { return Ok(words) };
    let is_given = |id: &str| own.value_source(id) == Some(ValueSource::CommandLine);
    let target = Cli::command().find_subcommand(command).cloned().unwrap_or_default();
    if target.get_positionals().any(|arg| is_given(arg.get_id().as_str())) {
        let what = format!(
            "--job {name} says what \"dsync {command}\" is about: omit either that or the other arguments"
        );
        return Err(Failure::usage(what).into());
    }
    let job = JobFile::read(folder, name)?;
    let given = given(&words, command);
    let mut all: Vec<OsString> = vec!["dsync".into(), command.into()];
    all.extend(subjects(&job, command)?);
    all.extend(job.options(&SHARED, command, &given)?);
    all.extend(given);
    Ok(all)
}

/// The commands, none of which needs to be told what it is about.
fn lenient() -> Command {
    let names: Vec<String> =
        Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
    names.into_iter().fold(Cli::command(), |program, name| {
        program.mut_subcommand(name, |command| {
            command.mut_args(|arg| if arg.is_positional() { arg.required(false) } else { arg })
        })
    })
}

/// What is on the command line beside the program, its command and the job.
fn given(words: &[OsString], command: &str) -> Vec<OsString> {
    let mut given = Vec::new();
    let (mut rest, mut is_named) = (words.iter().skip(1), false);
    while let Some(word) = rest.next() {
        if !is_named && word == command {
            is_named = true;
        } else if word == "--job" {
            rest.next();
        } else if !word.to_str().is_some_and(|word| word.starts_with("--job=")) {
            given.push(word.clone());
        }
    }
    given
}

/// What a command is about.
fn subjects(job: &JobFile, command: &str) -> Result<Vec<OsString>> {
    let [source, destination, group] = ["source", "destination", "group"].map(|key| job.value(key));
    let Some(destination) = destination else {
        return Err(job.misfit(&format!("it has no destination, which \"dsync {command}\" is about")));
    };
    let words: Vec<&str> = match (command, group, source) {
        ("verify", Some(_), _) => {
            return Err(job.misfit("it is of a group: name one of its disks, and the replica of that"));
        }
        ("verify", None, Some(source)) => vec![source, destination],
        ("demote", Some(group), _) => vec!["--group", group, destination],
        ("demote", None, Some(source)) => vec![source, destination],
        ("promote" | "rewind", group, _) => {
            let there = Location::parse(destination)?;
            if let Some(host) = &there.host {
                let path = there.place()?.0;
                let path = path.display();
                let how = if group.is_some() { " --group" } else { "" };
                return Err(job.misfit(&format!(
                    "its replica is on {host}: run \"dsync {command}{how} {path}\" there"
                )));
            }
            if group.is_some() { vec!["--group", destination] } else { vec![destination] }
        }
        _ => return Err(job.misfit("it has no source")),
    };
    Ok(words.into_iter().map(OsString::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str, words: &[&str]) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("vm-far.conf"), text).unwrap();
        let all: Vec<OsString> =
            std::iter::once("dsync").chain(words.iter().copied()).map(OsString::from).collect();
        match resolve_in(folder.path(), all) {
            Ok(words) => Ok(words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")),
            Err(error) => Err(error.to_string().replace(&format!("{}/", folder.path().display()), "")),
        }
    }

    const MIRROR: &str = "command = mirror\nsource = vm\ndestination = far:/srv/vm.raw\nrsh = ssh -p 2222\nrpo = 30s\nbwlimit = 1M\n\
                          state-dir = /var/lib/other\nkeep = 7d\n";

    #[test]
    fn a_job_says_what_a_command_is_about() {
        let is =
            |words: &[&str], meant: &str| assert_eq!(resolved(MIRROR, words).unwrap(), meant, "{words:?}");
        let options = "--rsh=ssh -p 2222 --bwlimit=1M --state-dir=/var/lib/other";
        is(&["verify", "--job", "vm-far"], &format!("dsync verify vm far:/srv/vm.raw {options}"));
        is(
            &["--json", "demote", "--job=vm-far", "-n"],
            &format!("dsync demote vm far:/srv/vm.raw {options} --json -n"),
        );
        is(
            &["verify", "-e", "ssh", "--job", "vm-far", "--repair"],
            "dsync verify vm far:/srv/vm.raw --bwlimit=1M --state-dir=/var/lib/other -e ssh --repair",
        );
        // What has no job is as it was.
        is(&["verify", "a", "b"], "dsync verify a b");
        let both = resolved(MIRROR, &["verify", "--job", "vm-far", "a"]).unwrap_err();
        assert!(both.contains("omit either that or the other arguments"), "{both}");
    }

    #[test]
    fn what_a_job_does_not_say_is_not_guessed() {
        let wrong = resolved(MIRROR, &["promote", "--job", "vm-far"]).unwrap_err();
        assert_eq!(wrong, "vm-far.conf: its replica is on far: run \"dsync promote /srv/vm.raw\" there");
        let fetch =
            "command = sync\nsource = near:/srv/vm.raw\ndestination = /srv/vm.raw\njournal-dir = /var/j\n";
        let is =
            |words: &[&str], meant: &str| assert_eq!(resolved(fetch, words).unwrap(), meant, "{words:?}");
        is(
            &["promote", "--job", "vm-far", "--force"],
            "dsync promote /srv/vm.raw --journal-dir=/var/j --force",
        );
        is(&["rewind", "--job", "vm-far"], "dsync rewind /srv/vm.raw --journal-dir=/var/j");
        let group = "command = mirror\ngroup = db\ndestination = far:/srv/db\n";
        let of_group = |words: &[&str]| resolved(group, words);
        assert_eq!(of_group(&["demote", "--job", "vm-far"]).unwrap(), "dsync demote --group db far:/srv/db");
        assert!(of_group(&["verify", "--job", "vm-far"]).unwrap_err().contains("of a group"));
        let serve = "command = serve\nsource = /srv/vm.raw\n";
        assert!(resolved(serve, &["demote", "--job", "vm-far"]).unwrap_err().contains("no destination"));
        assert!(resolved(MIRROR, &["verify", "--job", "other"]).unwrap_err().contains("no job \"other\""));
    }
}
