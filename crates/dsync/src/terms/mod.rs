//! The words of a command line: sizes, times, rates, addresses.

pub(crate) mod address;
pub(crate) mod bandwidth;
pub(crate) mod change_list;
pub(crate) mod machine_name;
pub(crate) mod units;

/// A word as a shell reads it.
pub(crate) fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}
