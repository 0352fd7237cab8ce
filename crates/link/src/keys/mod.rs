//! A site's own key, and the keys of the sites that it trusts, pinned like ssh's known hosts.
//!
//! The folder holds `own`, an Ed25519 key as PKCS#8, and `pinned`, the trusted keys as JSON. Only their owner may read them.

pub(crate) mod key;
pub(crate) mod roles;
pub(crate) mod text;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use device::Dir;
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustix::fs::{FlockOperation, OFlags};
use serde::{Deserialize, Serialize};

use crate::{Error, Key, Result, Roles};

/// The largest file of pins.
const MAX_FILE: u64 = 4 << 20;

/// A key that is trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// Its owner. On the side that connects this is the host, or `HOST:PORT`.
    pub name: String,
    /// The key.
    pub key: Key,
    /// Until when, in seconds since 1970; `None` forever.
    pub expires: Option<u64>,
    /// What it is trusted for.
    #[serde(rename = "for")]
    pub roles: Roles,
}

impl Pin {
    /// True after `expires`.
    pub fn has_expired(&self) -> bool {
        self.expires.is_some_and(|at| {
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs() >= at
        })
    }
}

/// A site's own key with its secret half.
pub(crate) struct Own {
    pub(crate) key: Key,
    /// PKCS#8.
    pub(crate) secret: Vec<u8>,
}

/// The keys of a site, in their own folder. Cheap to create and clone: each call reads the files.
#[derive(Debug, Clone)]
pub struct Keys {
    folder: PathBuf,
    command: Box<str>,
}

impl Keys {
    /// The keys in `folder`, which is created with the first key.
    pub fn new(folder: impl Into<PathBuf>) -> Keys {
        Keys { folder: folder.into(), command: "dsync key".into() }
    }

    /// For keys that are not in the usual state directory: messages name the command with this option.
    #[must_use]
    pub fn with_option(self, option: &str) -> Keys {
        Keys { command: format!("dsync {option} key").into(), ..self }
    }

    /// The command that changes them.
    pub(crate) fn command(&self) -> Box<str> {
        self.command.clone()
    }

    /// This site's public key. Created the first time.
    ///
    /// # Errors
    /// [`Error::Keys`] if it cannot be created or read, or other users may read or change it.
    pub fn own(&self) -> Result<Key> {
        self.own_with_secret().map(|own| own.key)
    }

    pub(crate) fn own_with_secret(&self) -> Result<Own> {
        let path = self.folder.join("own");
        let secret = match self.read("own")? {
            Some(secret) => secret,
            None => {
                let _lock = self.lock()?;
                match self.read("own")? {
                    Some(secret) => secret,
                    None => {
                        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
                        let made = made.map_err(|_| refused(&path, "the system has no random numbers"))?;
                        self.write("own", made.as_ref())?;
                        made.as_ref().to_vec()
                    }
                }
            }
        };
        let pair = Ed25519KeyPair::from_pkcs8(&secret).map_err(|error| {
            refused(&path, format!("not a key ({error}): remove it to have a new one made, which the other sites must then trust"))
        })?;
        let key = pair.public_key().as_ref().try_into().map(Key::from_bytes);
        Ok(Own { key: key.map_err(|_| refused(&path, "not an Ed25519 key"))?, secret })
    }

    /// The pinned keys, in the order of their names.
    ///
    /// # Errors
    /// [`Error::Keys`] if they cannot be read.
    pub fn pins(&self) -> Result<Vec<Pin>> {
        let Some(bytes) = self.read("pinned")? else { return Ok(Vec::new()) };
        let pins: Result<Vec<Pin>, _> = serde_json::from_slice(&bytes);
        pins.map_err(|error| refused(&self.folder.join("pinned"), format!("it is damaged: {error}")))
    }

    /// Trusts `key` under `name` for `roles`, forever or until `expires` (seconds since 1970). If the name has that key already, only the
    /// end and the roles change.
    ///
    /// # Errors
    /// [`Error::Pinned`] if the name has another key; [`Error::InvalidName`]; [`Error::Keys`].
    pub fn trust(&self, name: &str, key: Key, expires: Option<u64>, roles: Roles) -> Result<()> {
        let plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '/' && c != '\'' && c != '"';
        if name.is_empty() || name.len() > 255 || name.starts_with('-') || !name.chars().all(plain) {
            return Err(Error::InvalidName(name.to_string()));
        }
        let _lock = self.lock()?;
        let mut pins = self.pins()?;
        if let Some(other) = pins.iter().find(|pin| pin.name == name && pin.key != key) {
            return Err(Error::Pinned { name: name.to_string(), pinned: other.key.fingerprint() });
        }
        pins.retain(|pin| pin.name != name);
        pins.push(Pin { name: name.to_string(), key, expires, roles });
        pins.sort_by(|a, b| a.name.cmp(&b.name));
        self.write_pins(&pins)
    }

    /// Stops trusting the key under `name`. Open sessions with it end within about a second.
    ///
    /// # Errors
    /// [`Error::NoPin`] if there is none; [`Error::Keys`].
    pub fn forget(&self, name: &str) -> Result<()> {
        let _lock = self.lock()?;
        let mut pins = self.pins()?;
        let all = pins.len();
        pins.retain(|pin| pin.name != name);
        if pins.len() == all {
            return Err(Error::NoPin(name.to_string()));
        }
        self.write_pins(&pins)
    }

    fn write_pins(&self, pins: &[Pin]) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(pins)
            .map_err(|error| refused(&self.folder.join("pinned"), error.to_string()))?;
        self.write("pinned", &bytes)
    }

    /// Locks the folder for a change.
    fn lock(&self) -> Result<File> {
        let failed = |error: io::Error| refused(&self.folder, error.to_string());
        let folder = Dir::open(&self.folder).and_then(|folder| folder.held().try_clone()).map_err(failed)?;
        rustix::fs::flock(&folder, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
        Ok(folder)
    }

    /// Reads a file; `None` if it does not exist.
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.folder.join(name);
        let failed = |error: io::Error| refused(&path, error.to_string());
        // Its owner, if it is another user than this process, must not direct this elsewhere.
        let opened = Dir::existing(&self.folder)
            .and_then(|folder| Ok((folder.file(name, OFlags::RDONLY, 0)?, folder.held().metadata()?.uid())));
        let (file, folder_owner) = match opened {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let found = file.metadata().map_err(failed)?;
        if ![0, folder_owner, rustix::process::geteuid().as_raw()].contains(&found.uid()) {
            return Err(refused(&path, "it belongs to another user, who knows it: remove it"));
        }
        if found.mode() & 0o077 != 0 {
            let way_out = format!(
                "other users may read or change it: check that it was not misused, then run: chmod 600 {}",
                path.display()
            );
            return Err(refused(&path, way_out));
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed)?;
        Ok(Some(bytes))
    }

    /// Replaces a file atomically and durably. Requires the lock.
    fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        let path = self.folder.join(name);
        let fresh = self.folder.join(format!("{name}.new"));
        let written = (|| {
            // One that a crash left.
            let _ = fs::remove_file(&fresh);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
            device::give(&file, &File::open(&self.folder)?, fresh.file_name().unwrap_or_default())?;
            file.write_all(content)?;
            file.sync_all()?;
            fs::rename(&fresh, &path)?;
            File::open(&self.folder)?.sync_all()
        })();
        written.map_err(|error: io::Error| refused(&path, error.to_string()))
    }
}

fn refused(path: &Path, why: impl Into<String>) -> Error {
    Error::Keys { path: path.display().to_string(), why: why.into() }
}

/// This host's own name, as a suggestion for others.
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "host".into() } else { name }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn keys() -> (tempfile::TempDir, Keys) {
        let folder = tempfile::tempdir().unwrap();
        let keys = Keys::new(folder.path().join("state/keys"));
        (folder, keys)
    }

    #[test]
    fn a_key_is_made_once_and_kept_private() {
        let (_folder, keys) = keys();
        let made: Vec<Key> = std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8).map(|_| scope.spawn(|| keys.own().unwrap())).collect();
            makers.into_iter().map(|maker| maker.join().unwrap()).collect()
        });
        assert!(made.iter().all(|key| *key == made[0]), "eight at once make one key");
        let file = keys.folder.join("own");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&keys.folder).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let error = keys.own().unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&file, "nonsense").unwrap();
        assert!(matches!(keys.own(), Err(Error::Keys { .. })));
    }

    #[test]
    fn pins_are_kept_by_name() {
        let (_a, keys) = keys();
        let others: Vec<Key> = (0..2).map(|_| super::tests::keys().1.own().unwrap()).collect();
        assert_eq!(keys.pins().unwrap(), []);
        keys.trust("backup", others[0], None, Roles::ALL).unwrap();
        keys.trust("alpha:7", others[1], Some(5), Roles::ALL).unwrap();
        let names = |keys: &Keys| keys.pins().unwrap().into_iter().map(|pin| pin.name).collect::<Vec<_>>();
        assert_eq!(names(&keys), ["alpha:7", "backup"]);
        let pins = keys.pins().unwrap();
        assert!(pins[0].has_expired() && !pins[1].has_expired());
        let error = keys.trust("backup", others[1], None, Roles::ALL).unwrap_err();
        assert!(error.to_string().contains("dsync key forget backup"), "{error}");
        keys.trust("alpha:7", others[1], None, Roles::ALL).unwrap();
        assert!(!keys.pins().unwrap()[0].has_expired(), "the same key again gets a new end");
        keys.forget("backup").unwrap();
        assert_eq!(keys.forget("backup"), Err(Error::NoPin("backup".into())));
        assert_eq!(names(&keys), ["alpha:7"]);
        for wrong in ["", "-x", "a b", "a/b", "a'b"] {
            assert!(
                matches!(keys.trust(wrong, others[0], None, Roles::ALL), Err(Error::InvalidName(_))),
                "{wrong}"
            );
        }
    }
}
