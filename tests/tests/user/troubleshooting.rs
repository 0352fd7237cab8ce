//! docs/troubleshooting.md has every message with which the program refuses something or fails, and no other: both are read from the
//! sources, so a message that is added, changed or removed is changed there too.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What a message begins with in the sources: the text of a kind of error, a refusal that is made where it arises, and a
/// reason that is put into a sentence.
const BEGINS: [&str; 20] = [
    "#[error(",
    "ReplicaError::Refused(",
    "ReplicaError::Away(",
    "SyncError::Refused(",
    "SyncError::Diverged(",
    "SyncError::Away(",
    "SyncError::Changed(",
    "SourceError::Refused(",
    "SourceError::Restless(",
    "SourceError::Unknown(",
    "SourceError::Foreign(",
    "TrackError::Refused(",
    "Failure::refused(",
    "Failure::usage(",
    "Failure::busy(",
    "refuse(",
    "cannot_promote(",
    "let why = ",
    "let how = ",
    "bail!(",
];
/// Crates whose errors do not reach a user as they are, or are no part of the program.
const OTHERS: [&str; 6] = ["sim", "testing", "nbd", "extents", "compare", "lineage"];
/// A message whose longest part between names and numbers is shorter is the frame of another one.
const LEAST: usize = 12;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in folder.read_dir().expect("a folder") {
        let path = entry.expect("a folder").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        if path.is_dir() && name != "tests" {
            files(&path, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

/// The string that a text begins with, after blanks and the beginning of a `format!`.
fn literal(text: &str) -> Option<String> {
    let text = text.trim_start();
    let text = text.strip_prefix("format!(").unwrap_or(text).trim_start();
    let mut chars = text.strip_prefix('"')?.chars().peekable();
    let mut found = String::new();
    loop {
        match chars.next()? {
            '"' => return Some(found),
            '\\' => match chars.next()? {
                '\n' => while chars.next_if(|c| c.is_whitespace()).is_some() {},
                escaped => found.push(escaped),
            },
            plain => found.push(plain),
        }
    }
}

/// A message as the page has it, with "…" for what is put in. `None` for a frame of others.
fn shown(message: &str) -> Option<String> {
    let (mut shown, mut rest, mut longest) = (String::new(), message, 0);
    while let Some((plain, more)) = rest.split_once('{') {
        let (_, after) = more.split_once('}')?;
        longest = longest.max(plain.trim().len());
        shown += plain;
        if !shown.ends_with('…') {
            shown.push('…');
        }
        rest = after;
    }
    longest = longest.max(rest.trim().len());
    (longest >= LEAST).then(|| shown + rest)
}

fn in_the_sources() -> BTreeSet<String> {
    let crates = dsync_tests::repository().join("crates");
    let mut sources = Vec::new();
    for entry in crates.read_dir().expect("the crates") {
        let path = entry.expect("a crate").path();
        if !OTHERS.iter().any(|other| path.ends_with(other)) {
            files(&path.join("src"), &mut sources);
        }
    }
    let mut messages = BTreeSet::new();
    for path in sources {
        let text = std::fs::read_to_string(&path).expect("a source");
        let code = text.split("#[cfg(test)]\nmod tests").next().expect("code");
        for begin in BEGINS {
            let places = code.match_indices(begin);
            let found = places.filter_map(|(at, _)| literal(&code[at + begin.len()..]));
            messages.extend(found.filter_map(|message| shown(&message)));
        }
    }
    messages
}

#[test]
fn every_message_is_on_the_page_and_no_other() {
    let messages = in_the_sources();
    assert!(messages.len() > 200, "{} messages: the sources were not read", messages.len());
    let page = dsync_tests::repository().join("docs/troubleshooting.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let listed: Vec<String> =
        page.lines().filter_map(|line| line.strip_prefix("- ")).map(str::to_owned).collect();
    let set: BTreeSet<String> = listed.iter().cloned().collect();
    assert_eq!(listed.len(), set.len(), "a message is listed twice");
    let missing: Vec<&String> = messages.difference(&set).collect();
    let stale: Vec<&String> = set.difference(&messages).collect();
    assert!(
        missing.is_empty(),
        "not in docs/troubleshooting.md: add a line \"- …\" for each of\n{missing:#?}"
    );
    assert!(stale.is_empty(), "in docs/troubleshooting.md, and no message of the program:\n{stale:#?}");
}

#[test]
fn messages_are_read_as_the_compiler_reads_them() {
    let read = |text: &str| literal(text).and_then(|message| shown(&message));
    assert_eq!(
        read("\n  format!(\"{} is \\\"in\\\" \\\n    the way\", x)"),
        Some("… is \"in\" the way".into())
    );
    assert_eq!(read("\"{error}\""), None);
    assert_eq!(read("path.display()"), None);
}
