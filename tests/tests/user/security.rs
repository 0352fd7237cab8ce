//! SECURITY.md names the tests of what it says.

use std::collections::BTreeSet;
use std::path::Path;

fn tests(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in folder.read_dir().expect("a folder") {
        let path = entry.expect("a folder").path();
        if path.is_dir() {
            tests(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            let after = text.split("#[test]").skip(1).filter_map(|test| test.split_once("fn "));
            found.extend(after.filter_map(|(_, name)| Some(name.split_once('(')?.0.to_owned())));
        }
    }
}

#[test]
fn each_line_of_the_page_names_tests_that_exist() {
    let repository = dsync_tests::repository();
    let mut known = BTreeSet::new();
    ["crates", "tests"].iter().for_each(|folder| tests(&repository.join(folder), &mut known));
    let page = std::fs::read_to_string(repository.join("SECURITY.md")).expect("the page");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).skip(2).collect();
    assert!(rows.len() > 20, "{} lines", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.split(" | ").collect();
        let named: Vec<&str> = cells.last().expect("a cell").split('`').skip(1).step_by(2).collect();
        assert!(cells.len() == 4 && ["can", "cannot"].contains(&cells[1]) && !named.is_empty(), "{row}");
        let missing: Vec<&&str> = named.iter().filter(|name| !known.contains(**name)).collect();
        assert!(missing.is_empty(), "no such tests: {missing:?}");
    }
}
