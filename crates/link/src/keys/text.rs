//! Text from elsewhere, made safe to print.

use std::borrow::Cow;

/// A text as one line that cannot affect a terminal or a log: control characters, including line ends, and those that change
/// the direction of writing are escaped, as in Rust.
pub fn printable(text: &str) -> Cow<'_, str> {
    let harmful = |c: char| {
        let turns = |c| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        c.is_control() || turns(c)
    };
    if !text.contains(harmful) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if harmful(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// A text of several lines that cannot affect a terminal or a log: each line is made [`printable`].
pub fn printable_lines(text: &str) -> String {
    let line = |line: &str| {
        let end = if line.ends_with('\n') { "\n" } else { "" };
        format!("{}{end}", printable(line.trim_end_matches(['\n', '\r'])))
    };
    text.split_inclusive('\n').map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        assert_eq!(printable("größer … \u{1f600}"), "größer … \u{1f600}");
        assert_eq!(
            printable("a\u{1b}]0;x\u{7}b\r\nc\u{9b}2J\u{202e}\u{200f}d"),
            "a\\u{1b}]0;x\\u{7}b\\r\\nc\\u{9b}2J\\u{202e}\\u{200f}d"
        );
        assert_eq!(printable_lines("one\r\ntwo\u{1b}[2J\n\nend"), "one\ntwo\\u{1b}[2J\n\nend");
        let all: String = (0..0x2100).filter_map(char::from_u32).collect();
        assert!(!printable(&all).contains(char::is_control));
    }
}
