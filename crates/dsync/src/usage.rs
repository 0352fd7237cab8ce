//! What is said of a command line that cannot be read, where the parser does not know what was meant.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure;

/// Options whose value may be omitted, so that it must follow a `=`.
const OPTIONAL_VALUES: [&str; 4] = ["--compress", "--digests", "--wait", "--watch"];

/// Words of other tools, and what does that here.
const ELSEWHERE: [(&[&str], &str); 11] = [
    (
        &["backup", "copy", "clone", "replicate", "push", "send-receive", "update"],
        "\"dsync sync SRC DST\" makes a replica, and brings it up to date",
    ),
    (&["pull", "fetch"], "\"dsync sync HOST:SRC DST\" fetches, on the host that has the replica"),
    (
        &["check", "scrub", "fsck"],
        "\"dsync verify SRC DST\" compares a replica with its source, and \"dsync status --check\" says what needs attention",
    ),
    (
        &["restore"],
        "\"dsync sync --adopt REPLICA DISK\" restores a disk from its replica, \"dsync rewind REPLICA\" brings a replica back to an earlier moment, and \
         \"dsync promote REPLICA\" makes it the source",
    ),
    (
        &["init", "create", "add", "setup"],
        "nothing is to be set up: \"dsync sync SRC DST\" makes the first copy, and \"dsync serve\" or \"dsync track add\" record changes",
    ),
    (
        &["list", "ls", "show", "info", "snapshots", "stats"],
        "\"dsync status\" lists sources and replicas, and \"dsync rewind REPLICA\" the moments that are kept",
    ),
    (
        &["snapshot", "tag"],
        "\"dsync sync --keep 24h/1h SRC DST\" keeps moments of a replica, and \"dsync checkpoint SRC NAME\" names one of a source",
    ),
    (
        &["prune", "delete", "remove", "rm"],
        "\"dsync forget\" forgets a source or a replica; \"--keep\" of \"dsync sync\" says which moments stay",
    ),
    (
        &["mount", "attach"],
        "\"dsync serve REPLICA@now --socket PATH\" shows a replica at a moment, for NBD clients",
    ),
    (
        &["diff"],
        "\"dsync changes SRC --since NAME\" lists what changed, and \"dsync verify SRC DST\" what differs",
    ),
    (
        &["failover", "failback", "switch"],
        "\"dsync demote SRC DST\" and \"dsync promote REPLICA\" do it: see docs/failover.md",
    ),
];

/// What leads from a command of another tool to ours.
fn elsewhere(word: &str) -> Option<&'static str> {
    ELSEWHERE.iter().find(|(words, _)| words.contains(&word)).map(|(_, way)| *way)
}

/// Ends the program with the parser's message. A value that was meant for an option, and was taken for a path, is named.
pub(crate) fn bad(error: clap::Error, words: &[OsString]) -> ! {
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    {
        if let Some(way) = elsewhere(word) {
            eprintln!("error: there is no command \"{word}\": {way}");
            std::process::exit(failure::USAGE.into());
        }
    }
    let mut pairs = words.windows(2).filter_map(|pair| Some((pair[0].to_str()?, pair[1].to_str()?)));
    let meant = pairs.find(|(option, value)| OPTIONAL_VALUES.contains(option) && !value.starts_with('-'));
    if let (ErrorKind::UnknownArgument, Some((option, value))) = (error.kind(), meant) {
        eprintln!("error: the value of {option} follows a \"=\": {option}={value}");
        std::process::exit(failure::USAGE.into());
    }
    error.exit()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn words_of_other_tools_lead_to_commands_that_exist() {
        let program = Cli::command();
        for (words, way) in ELSEWHERE {
            assert!(words.iter().all(|word| program.find_subcommand(word).is_none()), "{words:?}");
            let commands = way.split("\"dsync ").skip(1).map(|rest| rest.split([' ', '"']).next().unwrap());
            for command in commands {
                assert!(program.find_subcommand(command).is_some(), "{command}");
            }
        }
        for word in ["backup", "check", "restore", "init", "list"] {
            assert!(elsewhere(word).is_some(), "{word}");
        }
    }
}
