//! Lists of changes that other programs have made: a storage array, Ceph, a script, another dsync.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use extents::Extents;
use serde::Deserialize;
use serde::de::IgnoredAny;
use source::{ChangeList, ToldChanges};

use crate::failure::Failure;

/// What the name of a bitmap begins with, as NBD servers offer it. A file called so has a folder before it.
const BITMAP: &str = "qemu:dirty-bitmap:";

/// The most bytes of a list.
const LARGEST: u64 = 256 << 20;

/// The output of `dsync changes --json`.
#[derive(Deserialize)]
struct Changes {
    size: u64,
    ranges: Vec<(u64, u64)>,
}

/// A part of the output of `rbd diff --format json`. What is not there any more is read like the rest.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Extent {
    offset: u64,
    length: u64,
    #[serde(default, rename = "exists")]
    _exists: IgnoredAny,
}

/// How a list is called in messages.
pub(crate) fn name(file: &Path) -> String {
    if file == Path::new("-") { "standard input".into() } else { file.display().to_string() }
}

/// Reads a list of what changed since a moment; `-` is standard input. A bitmap is read from the moment itself.
///
/// # Errors
/// `Failure` if it cannot be read, or is not a list.
pub(crate) fn read(file: &Path, since: &str) -> Result<ToldChanges, Failure> {
    let name = name(file);
    if name.starts_with(BITMAP) {
        return Ok(ToldChanges::Bitmap { since: since.to_owned(), context: name });
    }
    let mut bytes = Vec::new();
    let read = match file == Path::new("-") {
        true => std::io::stdin().take(LARGEST + 1).read_to_end(&mut bytes),
        false => File::open(file).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes)),
    };
    read.map_err(|error| Failure::failed(format!("cannot read {name}: {error}")))?;
    if bytes.len() as u64 > LARGEST {
        let most = device::exact_size(LARGEST);
        return Err(Failure::refused(format!(
            "{name} has more than {most}: make one range of those that are close"
        )));
    }
    let (ranges, size) = parse(&bytes).map_err(|why| match why {
        Flaw::CutOff(line) => Failure::refused(format!(
            "{name} ends amid line {line}: it may have been cut off. Make it again, and see that what makes it succeeds; its last line ends with a \
             newline, too"
        )),
        Flaw::Other(why) => Failure::refused(format!(
            "{name} is not a list of changes ({}): give lines \"OFFSET LENGTH\" in bytes, or the output of \"dsync changes --json\" or \"rbd \
             diff --format json\"",
            link::printable(&why)
        )),
    })?;
    Ok(ToldChanges::List(ChangeList { since: since.to_owned(), ranges, size, one_size: false }))
}

/// Why something is not a list.
#[derive(Debug, PartialEq)]
enum Flaw {
    /// This line, the last one, has no end: a number in it may have lost digits, and there may have been more lines.
    CutOff(usize),
    Other(String),
}

impl From<String> for Flaw {
    fn from(why: String) -> Flaw {
        Flaw::Other(why)
    }
}

/// The ranges of a list, and the size of its disk, if it says that.
fn parse(bytes: &[u8]) -> Result<(Extents, Option<u64>), Flaw> {
    let json = |error: serde_json::Error| error.to_string();
    let (ranges, size) = match bytes.trim_ascii_start().first() {
        Some(b'{') => {
            let Changes { size, ranges } = serde_json::from_slice(bytes).map_err(json)?;
            (ranges, Some(size))
        }
        Some(b'[') => {
            let extents: Vec<Extent> = serde_json::from_slice(bytes).map_err(json)?;
            (extents.iter().map(|extent| (extent.offset, extent.length)).collect(), None)
        }
        _ => (lines(bytes)?, None),
    };
    let range = |(offset, length): (u64, u64)| -> Result<Range<u64>, String> {
        let end =
            offset.checked_add(length).ok_or_else(|| format!("{offset} and {length} bytes are too far"))?;
        Ok(offset..end)
    };
    Ok((ranges.into_iter().map(range).collect::<Result<_, _>>()?, size))
}

fn lines(bytes: &[u8]) -> Result<Vec<(u64, u64)>, Flaw> {
    let mut ranges = Vec::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let line = String::from_utf8_lossy(line);
        let words: Vec<&str> = line.split_whitespace().take(3).collect();
        let found = match words[..] {
            [] => continue,
            [offset, length] => bytes_in(offset).zip(bytes_in(length)),
            _ => None,
        };
        let shown = || line.chars().take(40).collect::<String>();
        ranges.push(found.ok_or_else(|| format!("line {} is \"{}\"", number + 1, shown()))?);
    }
    match bytes.last() {
        None | Some(b'\n') => Ok(ranges),
        Some(_) => Err(Flaw::CutOff(bytes.split(|byte| *byte == b'\n').count())),
    }
}

/// A number, decimal or 0x and hexadecimal.
fn bytes_in(word: &str) -> Option<u64> {
    let (digits, radix) = word.strip_prefix("0x").map_or((word, 10), |digits| (digits, 16));
    let plain = digits.starts_with(|c: char| c.is_digit(radix));
    plain.then(|| u64::from_str_radix(digits, radix).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(list: &str) -> Vec<Range<u64>> {
        parse(list.as_bytes()).unwrap_or_else(|why| panic!("{list}: {why:?}")).0.iter().collect()
    }

    #[test]
    fn lists_of_other_programs_are_read() {
        assert_eq!(ranges(""), []);
        assert_eq!(ranges("[]"), []);
        assert_eq!(ranges("0 4096\n\n0x10000   0x1000\r\n"), [0..4096, 65536..69632]);
        // In any order, and over one another.
        assert_eq!(ranges("8192 4096\n0 4096\n2048 4096\n100 0\n"), [0..6144, 8192..12288]);
        let rbd = r#"[{"offset":0,"length":4194304,"exists":"true"},{"offset":8388608,"length":4096,"exists":"false"}]"#;
        assert_eq!(ranges(rbd), [0..4194304, 8388608..8392704]);
        let own = r#"{"message_type":"summary","source":"/vm","since":1,"epoch":2,"size":16384,"block_size":4096,"bytes":4096,"ranges":[[4096,4096]]}"#;
        assert_eq!(ranges(own), [Range { start: 4096, end: 8192 }]);
        assert_eq!(parse(own.as_bytes()).unwrap().1, Some(16384));
    }

    #[test]
    fn what_is_not_a_list_is_refused_with_its_line() {
        for (list, why) in [
            ("0 4096\n4096\n", "line 2 is \"4096\""),
            ("0 4096\n\n8192 4K", "line 3 is \"8192 4K\""),
            ("-1 4096", "line 1"),
            ("+1 4096", "line 1"),
            ("0x+1 4096", "line 1"),
            ("Offset Length Type", "line 1"),
            ("0 4194304 data", "line 1"),
            ("\u{1}\u{2}", "line 1"),
            ("18446744073709551615 2\n", "too far"),
            ("18446744073709551616 2", "line 1"),
            // What is allocated is not what changed.
            (
                r#"[{"start":0,"length":4096,"depth":0,"present":true,"zero":false,"data":true,"offset":0}]"#,
                "start",
            ),
            (r#"{"ranges":[[0,4096]]}"#, "size"),
            ("[{\"offset\":0,\"length\":4096},", "EOF"),
            ("[[0,-1]]", "line 1"),
        ] {
            match parse(list.as_bytes()).expect_err(list) {
                Flaw::Other(said) => assert!(said.contains(why), "{list}: {said}"),
                said => panic!("{list}: {said:?}"),
            }
        }
    }

    #[test]
    fn lines_that_were_cut_off_are_refused() {
        for (list, line) in [("0 4096", 1), ("0 4096\n12288 40", 2), ("0 4096\n ", 2)] {
            assert_eq!(parse(list.as_bytes()).expect_err(list), Flaw::CutOff(line));
        }
    }
}
