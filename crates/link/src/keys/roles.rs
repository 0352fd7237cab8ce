//! What a pinned key is trusted for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What a key is trusted for, one or several of `push`, `pull` and `serve`. Written as these words, separated by commas; in JSON as a
/// list of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<String>", try_from = "Vec<String>")]
pub struct Roles(u8);

const NAMES: [(Roles, &str); 3] = [(Roles::PUSH, "push"), (Roles::PULL, "pull"), (Roles::SERVE, "serve")];

impl Roles {
    /// This site connects to the peer, and sends it sources.
    pub const PUSH: Roles = Roles(1);
    /// This site connects to the peer, and fetches sources from it.
    pub const PULL: Roles = Roles(2);
    /// The peer may connect to a listener of this site.
    pub const SERVE: Roles = Roles(4);
    /// Everything.
    pub const ALL: Roles = Roles(7);

    /// True if all of `others` are among these.
    pub fn has(self, others: Roles) -> bool {
        self.0 & others.0 == others.0
    }

    /// These and `others`.
    #[must_use]
    pub fn and(self, others: Roles) -> Roles {
        Roles(self.0 | others.0)
    }

    fn words(self) -> impl Iterator<Item = &'static str> {
        NAMES.into_iter().filter(move |(role, _)| self.has(*role)).map(|(_, name)| name)
    }

    fn of<'a>(words: impl Iterator<Item = &'a str>) -> Result<Roles, InvalidRoles> {
        let mut roles = Roles(0);
        for word in words {
            let known = NAMES.into_iter().find(|(_, name)| *name == word);
            roles = roles.and(known.ok_or_else(|| InvalidRoles(word.to_owned()))?.0);
        }
        Ok(roles)
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words().collect::<Vec<_>>().join(","))
    }
}

/// A word that names no role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid role \"{0}\": use push, pull or serve, or several of them, separated by commas")]
pub struct InvalidRoles(String);

impl FromStr for Roles {
    type Err = InvalidRoles;

    fn from_str(text: &str) -> Result<Roles, InvalidRoles> {
        Roles::of(text.split(','))
    }
}

impl From<Roles> for Vec<String> {
    fn from(roles: Roles) -> Vec<String> {
        roles.words().map(str::to_owned).collect()
    }
}

impl TryFrom<Vec<String>> for Roles {
    type Error = InvalidRoles;

    fn try_from(words: Vec<String>) -> Result<Roles, InvalidRoles> {
        Roles::of(words.iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_as_they_are_written() {
        let some = Roles::PUSH.and(Roles::SERVE);
        assert_eq!((some.to_string(), "serve,push".parse()), ("push,serve".into(), Ok(some)));
        assert!(some.has(Roles::SERVE) && !some.has(Roles::PULL) && !some.has(Roles::ALL));
        let json = serde_json::to_string(&some).unwrap();
        assert_eq!((json.as_str(), serde_json::from_str(&json).ok()), (r#"["push","serve"]"#, Some(some)));
        assert!("".parse::<Roles>().is_err() && "push,all".parse::<Roles>().is_err());
        assert!(serde_json::from_str::<Roles>(r#"["write"]"#).is_err(), "what is not known is refused");
    }
}
