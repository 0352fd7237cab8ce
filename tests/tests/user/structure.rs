//! The source keeps its shape: the files of a crate import one another in one direction and lie in folders by subject, each begins
//! with what it is for, a function fits on a screen, a struct has few fields, a type's name stands once, a doc comment can be read
//! alone, and every file of state is in the table of docs/architecture.md. The code is read as rustfmt leaves it. Tests in it are
//! passed over.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

/// Lines of a function, from its name to its closing brace.
const SCREEN: usize = 80;
const FIELDS: usize = 15;
/// Files at the top of a crate, beside its root.
const FILES: usize = 12;
/// Begins a line of the doc comment of a function or a struct that is larger for a reason.
const LONG: &str = "/// Longer than a screen: ";
const WIDE: &str = "/// More than fifteen fields: ";

#[test]
fn files_import_one_another_in_one_direction() {
    let circles: Vec<String> = crates().iter().filter_map(|sources| Imports::of(sources).circle()).collect();
    let way = "move what both need into a file below both";
    assert!(circles.is_empty(), "files import one another in a circle: {way}\n{}", circles.join("\n\n"));
}

#[test]
fn a_crate_has_few_files_at_its_top() {
    for sources in crates() {
        let top = sources.iter().filter(|source| source.path.parent().is_some_and(|at| at.ends_with("src")));
        let files: Vec<_> =
            top.filter(|source| !source.module.is_empty()).map(|source| &source.path).collect();
        // What tests share is looked up by its name.
        let few = files.len() <= FILES || files[0].starts_with("tests");
        assert!(few, "over {FILES} files at the top of a crate: give subjects a folder\n{files:#?}");
    }
}

#[test]
fn every_file_begins_with_what_it_is_for() {
    let sources = crates().into_iter().flatten();
    let silent =
        sources.filter(|source| !source.code.starts_with("//! ") && !source.code.starts_with("#![doc"));
    let silent: Vec<PathBuf> = silent.map(|source| source.path).collect();
    assert!(silent.is_empty(), "without a first sentence, \"//! ...\": {silent:#?}");
}

#[test]
fn no_function_is_longer_than_a_screen() {
    no_larger("fn ", SCREEN, "lines: split it where its subject splits", LONG, |item| item.len());
}

#[test]
fn no_struct_has_more_than_fifteen_fields() {
    no_larger("struct ", FIELDS, "fields: group those that belong together", WIDE, |item| {
        let is_field = |line: &&&str| {
            let field = without_words(line);
            indent(line) == indent(item[0]) + 4 && field[word(field).len()..].starts_with(": ")
        };
        item[1..].iter().filter(is_field).count()
    });
}

/// Crates that tests alone use: their names are in nobody's way.
const TESTING: [&str; 2] = ["crates/testing", "crates/sim"];
/// Names that stand twice, and why they may.
const TWICE: [(&str, &str); 6] = [
    ("Error", "each crate's own, as in Rust's libraries"),
    ("Result", "each crate's own, as in Rust's libraries"),
    ("Disk", "the trait; and, within dsync/src/machine, a disk of a VM's definition, in libvirt's word"),
    ("Image", "a qcow2 file; and, within dsync/src/machine, what a VM's disk is kept on"),
    ("Part", "within dsync/src/machine, a disk of a job; and in the log of lineage, which nothing uses yet"),
    ("Gap", "of a source's history; and in the log of lineage, which is to take its place"),
];

#[test]
fn a_name_of_a_type_stands_once() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in product() {
        for (at, line) in source.code.lines().enumerate() {
            let item = without_words(line);
            let kinds = ["struct ", "enum ", "trait ", "type ", "union "];
            let name = kinds.iter().find_map(|kind| item.strip_prefix(kind)).map(word);
            // What is private is told apart by its file.
            if let Some(name) = name.filter(|_| line.trim_start().starts_with("pub")) {
                let place = format!("{}:{}", source.path.display(), at + 1);
                places.entry(name.to_owned()).or_default().push(place);
            }
        }
    }
    let twice = places.iter().filter(|(_, places)| places.len() > 1);
    let (known, new): (Vec<_>, Vec<_>) =
        twice.partition(|(name, _)| TWICE.iter().any(|(may, _)| may == name));
    let way = "say in the name what it is, make it private to its file, or give a reason in TWICE";
    assert!(new.is_empty(), "types of one name that other files see: {way}\n{new:#?}");
    assert_eq!(known.len(), TWICE.len(), "a name of TWICE stands once by now: {known:#?}");
}

/// How a comment begins that sends its reader to the one above it, or elsewhere.
const LEANING: [&str; 6] = ["The same", "As for", "As there", "That of", "Those of", "As [`"];

#[test]
fn a_doc_comment_can_be_read_alone() {
    let mut leaning = Vec::new();
    for source in product() {
        let mut before = "";
        for (at, line) in source.code.lines().map(str::trim_start).enumerate() {
            let text =
                |line| ["///", "//!"].iter().find_map(|&mark| str::strip_prefix(line, mark)).map(str::trim);
            let above = text(before).unwrap_or_default();
            let begins = |text: &str| LEANING.iter().any(|&words| text.starts_with(words));
            // The errors may be those of another function, which a link names.
            let leans =
                text(line).filter(|text| begins(text) && (above.is_empty() || above.starts_with("# ")));
            let leans = leans.filter(|text| above.is_empty() || !text.starts_with("As [`"));
            if let Some(text) = leans {
                leaning.push(format!("{}:{}: {text}", source.path.display(), at + 1));
            }
            before = line;
        }
    }
    let way = "say what the item is";
    assert!(leaning.is_empty(), "comments that cannot be read alone: {way}\n{}", leaning.join("\n"));
}

/// The files of the crates that are shipped.
fn product() -> impl Iterator<Item = Source> {
    let is_product = |source: &Source| {
        source.path.starts_with("crates") && !TESTING.iter().any(|testing| source.path.starts_with(testing))
    };
    crates().into_iter().flatten().filter(is_product)
}

/// The crates that write into folders of state.
const STATEFUL: [&str; 6] = ["device", "trackers", "source", "replica", "sync", "link"];
/// What these name in the same way, and is no file of state: the folder in which the state directory is, a control group, a bookmark,
/// any name.
const NO_STATE: [&str; 4] = ["dsync", "dsync-thaw", "extract", "replica"];

#[test]
fn every_file_of_state_has_a_row_in_the_table_and_no_other_has_one() {
    let page =
        std::fs::read_to_string(dsync_tests::repository().join("docs/architecture.md")).expect("the page");
    let (_, table) = page.split_once("\n## Files of state\n").expect("the table");
    let table = table.split("\n## ").next().unwrap_or_default();
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let paths = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    // What is written large, or hidden, stands for names that are no constants.
    let rows = paths.flat_map(|path| path.split('/')).filter(|name| name.starts_with(char::is_lowercase));
    let rows: BTreeSet<&str> = rows.map(|name| name.trim_end_matches(".new")).collect();
    let sources = crates().into_iter().flatten();
    let names: BTreeSet<String> = sources.flat_map(|source| state_names(&source)).collect();
    let is = |row: &str, name: &str| row == name || name.ends_with('-') && row.starts_with(name);
    let missing: Vec<_> = names.iter().filter(|name| !rows.iter().any(|row| is(row, name))).collect();
    assert!(missing.is_empty(), "without a row in \"Files of state\" of docs/architecture.md: {missing:?}");
    let stale: Vec<_> = rows.iter().filter(|row| !names.iter().any(|name| is(row, name))).collect();
    assert!(
        stale.is_empty(),
        "in \"Files of state\" of docs/architecture.md, and nowhere in the code: {stale:?}"
    );
}

/// The names of files and folders in a source: constants, and what is joined to a path, opened, or followed by an id.
fn state_names(source: &Source) -> Vec<String> {
    let krate = source.path.iter().nth(1).and_then(|name| name.to_str()).unwrap_or_default();
    let mut found = Vec::new();
    if !STATEFUL.contains(&krate) {
        return found;
    }
    let lines = source.code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    // The others look into /sys and /proc.
    let joins = ["source", "sync", "link"].contains(&krate);
    // Devices are named so, not files.
    let ids = krate != "device";
    let ways = [
        (true, ": &str = \"", "\";"),
        (joins, ".join(\"", "\")"),
        (true, ".open(\"", "\","),
        (true, ".read(\"", "\")"),
        (true, ".write(\"", "\","),
        (true, ".remove(\"", "\")"),
        (ids, "format!(\"", "{"),
    ];
    for (_, before, behind) in ways.into_iter().filter(|(here, ..)| *here) {
        for (at, _) in code.match_indices(before) {
            let rest = &code[at + before.len()..];
            let name = rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or_default();
            let is_name = name.starts_with(char::is_lowercase) && (behind != "{" || name.ends_with('-'));
            if is_name && rest[name.len()..].starts_with(behind) && !NO_STATE.contains(&name) {
                found.push(name.to_owned());
            }
        }
    }
    found
}

/// Fails for every item of a kind whose size is over the bound without a reason, or within the bound with one.
fn no_larger(kind: &str, bound: usize, way: &str, reason: &str, size: fn(&[&str]) -> usize) {
    let mut wrong = Vec::new();
    for source in crates().iter().flatten() {
        let lines: Vec<&str> = source.code.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let Some(rest) = without_words(line).strip_prefix(kind) else { continue };
            let size = size(&lines[at..=end(&lines, at)]);
            let above = lines[..at].iter().rev().map(|line| line.trim());
            let has_reason =
                above.take_while(|line| line.starts_with(['/', '#'])).any(|line| line.starts_with(reason));
            if (size > bound) != has_reason {
                let stale = if has_reason { ", which needs no reason" } else { "" };
                wrong.push(format!("{}:{}: {}: {size}{stale}", source.path.display(), at + 1, word(rest)));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "over {bound} {way}, or say in its doc comment why not: \"{reason}...\"\n{}",
        wrong.join("\n")
    );
}

/// A file without its tests. The lines have the numbers that they have in the file.
struct Source {
    path: PathBuf,
    /// Its module, from the crate's root.
    module: Vec<String>,
    code: String,
}

/// The files of each crate.
fn crates() -> Vec<Vec<Source>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let crates =
        root.join("crates").read_dir().expect("the crates").map(|entry| entry.expect("a crate").path());
    let all = crates.chain([root.join("bench"), root.join("tests")]).map(|path| {
        let (mut sources, mut tests) = (Vec::new(), Vec::new());
        read(&path.join("src"), root, &[], &mut sources, &mut tests);
        sources.retain(|source| !tests.iter().any(|test| source.module.starts_with(test)));
        assert!(!sources.is_empty(), "{} has no source", path.display());
        sources
    });
    all.collect()
}

/// Reads the files below a folder; `tests` are modules that are compiled for tests alone.
fn read(folder: &Path, root: &Path, module: &[String], to: &mut Vec<Source>, tests: &mut Vec<Vec<String>>) {
    for entry in folder.read_dir().expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a name");
        let mut module = module.to_vec();
        if !["lib", "main", "mod"].contains(&stem) {
            module.push(stem.to_owned());
        }
        if path.is_dir() {
            read(&path, root, &module, to, tests);
            continue;
        }
        let (code, modules) = without_tests(&std::fs::read_to_string(&path).expect("a source"));
        tests.extend(modules.into_iter().map(|name| [module.clone(), vec![name]].concat()));
        to.push(Source { path: path.strip_prefix(root).expect("a path").into(), module, code });
    }
}

/// The text with blank lines in place of tests, and the names of test modules in files of their own.
fn without_tests(text: &str) -> (String, Vec<String>) {
    let lines: Vec<&str> = text.lines().collect();
    let (mut code, mut modules, mut at) = (String::new(), Vec::new(), 0);
    while at < lines.len() {
        let mut next = at + 1;
        if lines[at].trim() == "#[cfg(test)]" {
            let item = (next..).find(|&n| !lines[n].trim().starts_with("#[")).expect("an item");
            modules.extend(without_words(lines[item]).strip_prefix("mod ").map(|name| word(name).to_owned()));
            next = end(&lines, item) + 1;
        } else {
            code += lines[at];
        }
        code += &"\n".repeat(next - at);
        at = next;
    }
    (code, modules)
}

/// The last line of the item that begins at a line: the first of the same indent that closes it.
fn end(lines: &[&str], at: usize) -> usize {
    let closes = |&n: &usize| match n == at {
        true => lines[n].ends_with([';', '}']),
        false => {
            indent(lines[n]) == indent(lines[at]) && lines[n].trim().starts_with(['}', ')']) && {
                lines[n].ends_with([';', '}'])
            }
        }
    };
    (at..lines.len()).find(closes).unwrap_or_else(|| panic!("{} has no end", lines[at]))
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// A line without its indent and the words that may precede "fn", "struct" or a field.
fn without_words(line: &str) -> &str {
    const WORDS: [&str; 7] =
        ["pub ", "pub(crate) ", "pub(super) ", "const ", "async ", "unsafe ", "extern \"C\" "];
    let line = line.trim_start();
    WORDS.iter().find_map(|word| line.strip_prefix(word)).map_or(line, without_words)
}

fn word(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// Which file of a crate imports which others, and in which line.
struct Imports<'a> {
    files: BTreeMap<&'a [String], &'a Source>,
    /// What each file names in its own crate, by its path from the root.
    names: BTreeMap<&'a [String], Vec<(usize, Vec<String>)>>,
}

impl<'a> Imports<'a> {
    fn of(sources: &'a [Source]) -> Imports<'a> {
        let files: BTreeMap<_, _> = sources.iter().map(|source| (&source.module[..], source)).collect();
        let names = files.iter().map(|(module, source)| (*module, names(source, &files))).collect();
        Imports { files, names }
    }

    /// The file that defines what a path names; a name that a module only passes on is followed.
    fn file(&self, path: &[String], depth: usize) -> &'a [String] {
        let module = (0..=path.len()).rev().find_map(|n| self.files.get_key_value(&path[..n]));
        let (module, _) = module.expect("every crate has a root");
        let passed_on = path.get(module.len()).and_then(|name| {
            self.names[module].iter().find(|(_, from)| from.last() == Some(name) && from[..] != *path)
        });
        match passed_on {
            Some((_, from)) if depth < 8 => self.file(from, depth + 1),
            _ => module,
        }
    }

    /// The files that a file imports, and where. A parent and its children may import each other.
    fn imported(&self, module: &'a [String]) -> BTreeMap<&'a [String], usize> {
        let files = self.names[module].iter().map(|(line, path)| (self.file(path, 0), *line));
        files.filter(|(file, _)| !file.starts_with(module) && !module.starts_with(file)).collect()
    }

    /// The shortest circle, as the lines that make it.
    fn circle(&self) -> Option<String> {
        let circles = self.files.keys().filter_map(|&start| {
            let mut came_from: BTreeMap<&[String], (&[String], usize)> = BTreeMap::new();
            let mut waiting = VecDeque::from([start]);
            while let Some(module) = waiting.pop_front() {
                for (file, line) in self.imported(module) {
                    if let Entry::Vacant(entry) = came_from.entry(file) {
                        entry.insert((module, line));
                        waiting.push_back(file);
                    }
                }
            }
            let mut steps = Vec::new();
            let mut at = start;
            while let Some(&(from, line)) = came_from.get(at).filter(|_| steps.is_empty() || at != start) {
                steps.push(format!("{}:{line} imports {}", self.files[from].path.display(), at.join("::")));
                at = from;
            }
            (!steps.is_empty()).then_some(steps)
        });
        Some(circles.min_by_key(Vec::len)?.join("\n"))
    }
}

/// The paths into its own crate that a file names, from the root, with their lines.
fn names(source: &Source, files: &BTreeMap<&[String], &Source>) -> Vec<(usize, Vec<String>)> {
    let lines = source.code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let module = &source.module;
    let children = files.keys().filter_map(|file| match file.strip_prefix(&module[..]) {
        Some([child]) => Some(child.as_str()),
        _ => None,
    });
    let mut found = Vec::new();
    for start in ["crate", "super", "self"].into_iter().chain(children) {
        for (at, _) in code.match_indices(&format!("{start}::")) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let mut paths = Vec::new();
            tree(&code[at..], Vec::new(), &mut paths);
            let line = code[..at].matches('\n').count() + 1;
            found.extend(paths.iter().map(|path| (line, from_root(module, path))));
        }
    }
    found
}

/// The paths of a tree as "use" has them, "a::{b, c::d}"; returns what follows it.
fn tree<'t>(text: &'t str, mut path: Vec<String>, to: &mut Vec<Vec<String>>) -> &'t str {
    let mut rest = text.trim_start();
    loop {
        let name = word(rest);
        path.extend((!name.is_empty()).then(|| name.to_owned()));
        rest = &rest[name.len()..];
        match rest.strip_prefix("::") {
            Some(after) => rest = after,
            None => break,
        }
    }
    let Some(mut inner) = rest.strip_prefix('{') else {
        to.push(path);
        return rest;
    };
    loop {
        // An alias or a star ends a path, too.
        inner = tree(inner, path.clone(), to).trim_start_matches(|c| c != ',' && c != '}');
        match inner.strip_prefix(',').map(str::trim_start) {
            Some(next) if !next.starts_with('}') => inner = next,
            Some(next) => return &next[1..],
            None => return inner.strip_prefix('}').unwrap_or_default(),
        }
    }
}

/// A path as a module names it, from the root.
fn from_root(module: &[String], path: &[String]) -> Vec<String> {
    let supers = path.iter().take_while(|name| *name == "super").count();
    let (base, rest) = match path[0].as_str() {
        "crate" => (&module[..0], &path[1..]),
        "self" => (module, &path[1..]),
        _ => (&module[..module.len().saturating_sub(supers)], &path[supers..]),
    };
    [base, rest].concat()
}
