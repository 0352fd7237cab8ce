//! Why it is not known what was written to a source.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why it is not known what was written to a source. Where dsync decides by the reason, that is a variant of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gap {
    /// The history begins with this epoch: what came before was written to the disk that the promoted replica followed.
    Begins,
    /// Entries of the history before this one cannot be read, or are gone.
    Damaged,
    /// The tracker's record is of another size than the disk.
    Resized,
    /// The content of a disk in use is not what its record ends with, by its times, which this describes. Most likely a backup was put in its
    /// place, or its file system was rolled back: its replicas may be newer.
    OtherContent(String),
    /// It was a replica meanwhile, to which dsync has written.
    AsReplica,
    /// Any other reason, in words.
    Told(String),
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Gap::Begins => f.write_str("the history begins here, with the replica that was promoted"),
            Gap::Damaged => f.write_str("a part of the history is damaged"),
            Gap::Resized => f.write_str("the disk was resized"),
            Gap::OtherContent(times) => write!(f, "its content is not what was recorded last: {times}"),
            Gap::AsReplica => f.write_str("dsync wrote to it as a replica"),
            Gap::Told(why) => f.write_str(why),
        }
    }
}

impl From<String> for Gap {
    fn from(why: String) -> Gap {
        Gap::Told(why)
    }
}

impl From<&str> for Gap {
    fn from(why: &str) -> Gap {
        Gap::Told(why.into())
    }
}
