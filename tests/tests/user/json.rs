//! docs/json.md says what `--json` prints: every object that a command prints has the fields of its section, of the types given there,
//! and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dsync_tests::Scene;
use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use rustix::process::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// The page: for each section, its fields with their types.
struct Page {
    sections: BTreeMap<String, BTreeMap<String, String>>,
    seen: BTreeSet<String>,
}

impl Page {
    fn read() -> Page {
        let path = dsync_tests::repository().join("docs/json.md");
        let text = std::fs::read_to_string(path).expect("the page");
        let mut sections: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        let mut name = String::new();
        for line in text.lines() {
            if let Some(heading) = line.strip_prefix("## ") {
                name = heading.to_owned();
            } else if let Some(row) = line.strip_prefix("| `") {
                let (field, rest) = row.split_once("` | ").expect("a field");
                let kind = rest.split(" |").next().expect("a type");
                let section = sections.entry(name.clone()).or_default();
                assert!(section.insert(field.into(), kind.into()).is_none(), "{name} has {field} twice");
            }
        }
        assert!(sections.len() > 25, "the page was not read");
        Page { sections, seen: BTreeSet::new() }
    }

    /// Compares an object with its section.
    fn holds(&mut self, name: &str, object: &Value) {
        let section = self.sections.get(name).unwrap_or_else(|| panic!("no section {name}"));
        let fields = object.as_object().unwrap_or_else(|| panic!("{name} is no object: {object}"));
        let found: BTreeSet<&str> =
            fields.keys().map(String::as_str).filter(|field| *field != "message_type").collect();
        let told: BTreeSet<&str> = section.keys().map(String::as_str).collect();
        assert_eq!(found, told, "the fields of {name}: {object}");
        for (field, kind) in section {
            let value = &fields[field];
            let plain = kind.strip_suffix(" or null");
            let is = match plain.unwrap_or(kind) {
                "number" => value.is_number(),
                "text" => value.is_string(),
                "boolean" => value.is_boolean(),
                "list" => value.is_array(),
                "object" => value.is_object(),
                other => panic!("{name}.{field} is of a type \"{other}\""),
            };
            assert!(is || (plain.is_some() && value.is_null()), "{name}.{field} is no {kind}: {value}");
        }
        self.seen.insert(name.to_owned());
    }

    /// The parts of a source's status.
    fn source(&mut self, status: &Value) {
        self.holds("source", status);
        if !status["served"].is_null() {
            self.holds("server", &status["served"]);
        }
        for replica in status["replicas"].as_array().expect("replicas") {
            self.holds("replica of a source", replica);
            self.holds("tally", &replica["tally"]);
        }
        for checkpoint in status["checkpoints"].as_array().expect("checkpoints") {
            self.holds("checkpoint of a list", checkpoint);
        }
    }

    /// A status line of a command that works.
    fn line(&mut self, line: &Value) {
        let has = |field: &str| line.get(field).is_some();
        let name = match line["message_type"].as_str() {
            Some("error") => "error",
            _ if has("bytes_done") => "progress",
            _ if has("message") => "message",
            _ if has("warning") => "warning",
            _ if has("batch") => "batch",
            _ => "sync",
        };
        self.holds(name, line);
    }
}

#[test]
fn what_is_printed_is_what_the_page_says() {
    let (mut page, scene) = (Page::read(), Scene::new("the fields of JSON", 16 * MIB));
    let site = &scene.site;
    let run = |words: &[&str]| site.dsync(words.iter().copied()).arg("--json");
    let replica = scene.replica.to_str().expect("a path");
    let synced = run(&["sync", "vm", replica, "--keep", "1h", "--digests", "--block-size", "8K"]).ok();
    let lines = synced.json();
    let (summary, lines) = lines.split_last().expect("a summary");
    lines.iter().for_each(|line| page.line(line));
    page.holds("sync", summary);
    page.holds("extents", &summary["unreadable"]);
    page.holds("verify", &run(&["verify", "vm", replica]).ok().summary());
    page.holds("checkpoint", &run(&["checkpoint", "vm", "reader"]).ok().summary());
    page.holds("checkpoints", &run(&["checkpoint", "vm", "--list"]).ok().summary());
    page.holds("changes", &run(&["changes", "vm", "--since", "reader"]).ok().summary());
    page.holds("moments", &run(&["rewind", replica]).ok().summary());
    page.holds("key", &run(&["key"]).ok().summary());
    page.holds("keys", &run(&["key", "list"]).ok().summary());
    page.holds("forget", &run(&["forget", "-n", "vm", "reader"]).ok().summary());
    page.holds("disk", &run(&["discover", "replica"]).ok().summary());
    page.source(&run(&["status", "vm"]).ok().summary());
    page.holds("replica", &run(&["recover", replica]).ok().summary());
    let reading = site.serve(&[&std::path::PathBuf::from(format!("{replica}@now"))], &[]);
    page.holds("reader", &run(&["status", replica]).ok().summary()["readers"][0]);
    drop(reading);

    // Deltas.
    let extracted = run(&["extract", "vm", "--since", "0"]).ok();
    let told: Value =
        serde_json::from_str(extracted.stderr.lines().last().expect("a summary")).expect("JSON");
    page.holds("extract", &told);
    let delta = site.path("a.delta");
    std::fs::write(&delta, &extracted.stdout).expect("a file");
    page.holds("inspect", &run(&["inspect", "a.delta"]).ok().summary());
    page.holds("merge", &run(&["merge", "merged.raw"]).input(extracted.stdout).ok().summary());

    // A mirror, progress, and errors.
    let mut mirror = run(&["mirror", "vm", replica, "-v"]).start();
    mirror.wait_to_say("mirroring to");
    scene.client().write(0, &scene.random.clone().bytes(1 << 20)).expect("a write");
    mirror.wait_to_say("\"batch\"");
    mirror.signal(Signal::TERM);
    let lines = mirror.output(Duration::from_secs(30)).json();
    let (summary, lines) = lines.split_last().expect("a summary");
    lines.iter().for_each(|line| page.line(line));
    page.holds("mirror", summary);
    let mut client = scene.client();
    for at in 0..6 {
        client.write(at * MIB, &scene.random.clone().bytes(1 << 20)).expect("a write");
    }
    client.close().expect("the end");
    let slow = run(&["sync", "vm", replica, "--bwlimit", "3M"]).ok();
    slow.json().iter().filter(|line| line["message_type"] == "status").for_each(|line| page.line(line));
    page.line(run(&["sync", "nothing", replica]).code(1).json().last().expect("an error"));

    // What a monitor gets.
    page.holds("rewind", &run(&["rewind", replica, "--to", "1"]).ok().summary());
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.replica, MIB, BLOCK, &mut scene.random.clone());
    for line in run(&["status", "--check"]).code(1).json() {
        page.holds(if line["kind"] == "check" { "check" } else { "problem" }, &line);
    }
    for line in run(&["status", "-v"]).ok().json() {
        match line["kind"].as_str() {
            Some("source") => page.source(&line),
            Some("replica") => page.holds("local replica", &line),
            // Other tests track disks on this machine.
            _ => {}
        }
    }

    // Roles, and a failure in the tally.
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    far.sync(&scene, &[], Some(50)).output();
    page.source(&run(&["status", "vm"]).ok().summary());
    let copy = far.replica();
    page.holds("promote", &far.site.dsync(["promote", "--force", "--json"]).arg(&copy).ok().summary());
    page.holds("demote", &far.site.dsync(["demote", "--json"]).arg(&copy).ok().summary());

    let never: Vec<&String> = page.sections.keys().filter(|name| !page.seen.contains(*name)).collect();
    assert!(never.is_empty(), "described, and never printed: {never:?}");
}
