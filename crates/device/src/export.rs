//! The URIs of exports of NBD servers, as the NBD project specifies them. A disk behind one is known by its URI alone, so each has one
//! spelling: wherever a path leads to a disk, such a URI may stand in its place, and [`absolute`] spells it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The port of NBD.
const PORT: u16 = 10809;

/// `nbd://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportUri {
    /// Where the server listens.
    pub server: NbdServer,
    /// The name of the export; empty for the server's default.
    pub export: String,
}

/// Where an NBD server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NbdServer {
    /// A host, without the brackets of an IPv6 address, and a port.
    Tcp(String, u16),
    /// A Unix socket, by an absolute path.
    Unix(PathBuf),
}

impl ExportUri {
    /// The URI that stands in the place of a path; `None` if that is a path.
    pub fn of(path: &Path) -> Option<Result<ExportUri, io::Error>> {
        let text = path.to_str().filter(|text| {
            text.split_once("://")
                .is_some_and(|(scheme, _)| scheme.starts_with("nbd") && !scheme.contains('/'))
        })?;
        let failed = |why| {
            let text = format!(
                "invalid NBD URI \"{text}\": {why}; use nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=/PATH"
            );
            io::Error::new(io::ErrorKind::InvalidInput, text)
        };
        Some(ExportUri::parse(text).map_err(failed))
    }

    /// Names the socket by a path without links, if that can be found: so one export has one name.
    pub fn without_links(self) -> ExportUri {
        match self {
            ExportUri { server: NbdServer::Unix(socket), export } => {
                let in_folder =
                    || Some(std::fs::canonicalize(socket.parent()?).ok()?.join(socket.file_name()?));
                // Its server may be away.
                let found = std::fs::canonicalize(&socket).ok().or_else(in_folder);
                ExportUri { server: NbdServer::Unix(found.unwrap_or(socket)), export }
            }
            other => other,
        }
    }

    fn parse(text: &str) -> Result<ExportUri, &'static str> {
        let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
        let (place, export) = rest.split_once('/').unwrap_or((rest, ""));
        let export = decoded(export)?;
        let server = match (scheme, query) {
            ("nbd+unix", Some(query)) if place.is_empty() => {
                let socket = query.strip_prefix("socket=").ok_or("only the parameter \"socket\" is known")?;
                let socket = PathBuf::from(decoded(socket)?);
                if !socket.is_absolute() {
                    return Err("the path of the socket does not begin with a slash");
                }
                NbdServer::Unix(socket)
            }
            ("nbd+unix", None) => return Err("it names no socket"),
            ("nbd+unix", Some(_)) => return Err("a socket has no host"),
            ("nbd", None) => tcp(place)?,
            ("nbd", Some(_)) => return Err("parameters are not known over TCP"),
            ("nbds" | "nbds+unix", _) => return Err("TLS to NBD servers is not supported"),
            _ => return Err("its scheme is not known"),
        };
        Ok(ExportUri { server, export })
    }
}

fn tcp(place: &str) -> Result<NbdServer, &'static str> {
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => {
            let port = port.parse().ok().filter(|port| *port > 0);
            (host, port.ok_or("its port is not a number from 1 to 65535")?)
        }
        _ => (place, PORT),
    };
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    if plain.is_none() && host.contains(':') {
        return Err("an IPv6 address must be in brackets");
    }
    let host = plain.unwrap_or(host);
    if host.is_empty() || host.contains(['@', '[', ']', '%']) || host.contains(char::is_whitespace) {
        return Err("its host is missing or malformed");
    }
    Ok(NbdServer::Tcp(host.to_ascii_lowercase(), port))
}

fn decoded(text: &str) -> Result<String, &'static str> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((byte, after)) = rest.split_first() {
        if *byte != b'%' {
            bytes.push(*byte);
            rest = after;
            continue;
        }
        let digits = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let number =
            digits.filter(|digits| !digits.starts_with('+')).and_then(|d| u8::from_str_radix(d, 16).ok());
        bytes.push(number.filter(|byte| *byte != 0).ok_or("a % is not followed by two hexadecimal digits")?);
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8")
}

fn encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z'
            | b'A'..=b'Z'
            | b'0'..=b'9'
            | b'-'
            | b'.'
            | b'_'
            | b'~'
            | b'/'
            | b'@'
            | b':'
            | b'+'
            | b',' => {
                encoded.push(byte.into());
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

impl fmt::Display for ExportUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let export = encoded(&self.export);
        match &self.server {
            NbdServer::Unix(socket) => {
                write!(f, "nbd+unix:///{export}?socket={}", encoded(&socket.to_string_lossy()))
            }
            NbdServer::Tcp(host, port) => {
                f.write_str("nbd://")?;
                if host.contains(':') {
                    write!(f, "[{host}]")?
                } else {
                    f.write_str(host)?
                }
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")
            }
        }
    }
}

/// True if an export of an NBD server stands in the place of a path.
pub fn is_export(path: &Path) -> bool {
    ExportUri::of(path).is_some_and(|uri| uri.is_ok())
}

/// The path from the root on, with its links; the one spelling of the URI of an export.
///
/// # Errors
/// If the URI is malformed, or the current directory is gone.
pub fn absolute(path: impl AsRef<Path>) -> io::Result<PathBuf> {
    match ExportUri::of(path.as_ref()) {
        Some(uri) => Ok(uri?.to_string().into()),
        None => std::path::absolute(path),
    }
}

/// True if something is at a path. An export counts as there: its server is asked only where it is used.
pub fn is_there(path: &Path) -> bool {
    is_export(path) || path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_export_has_one_spelling() {
        for (written, spelled) in [
            ("nbd://Backup/vm", "nbd://backup/vm"),
            ("nbd://backup:10809/vm", "nbd://backup/vm"),
            ("nbd://backup:10810", "nbd://backup:10810/"),
            ("nbd://[2001:DB8::7]:10810/a/b", "nbd://[2001:db8::7]:10810/a/b"),
            ("nbd://backup/a%20b%2fc?".trim_end_matches('?'), "nbd://backup/a%20b/c"),
            ("nbd+unix:///vm?socket=/run/x.sock", "nbd+unix:///vm?socket=/run/x.sock"),
            ("nbd+unix://?socket=%2Frun%2Fx%3f", "nbd+unix:///?socket=/run/x%3F"),
        ] {
            assert_eq!(absolute(written).unwrap(), Path::new(spelled), "{written}");
            assert_eq!(absolute(spelled).unwrap().to_str(), Some(spelled), "{written}");
        }
    }

    #[test]
    fn what_is_no_uri_is_a_path_and_a_malformed_one_is_refused() {
        for path in ["nbd", "nbd:/vm", "./nbd://x/y", "a/nbd://x", "/nbd://x", "nbd.raw"] {
            assert!(ExportUri::of(Path::new(path)).is_none(), "{path}");
        }
        for wrong in [
            "nbd:///vm",
            "nbd://a:0/vm",
            "nbd://a:x/vm",
            "nbd://::1/vm",
            "nbd://me@a/vm",
            "nbd://a/vm?tls-username=x",
            "nbd://a/%zz",
            "nbd://a/%4",
            "nbd://a/%00",
            "nbds://a/vm",
            "nbd+vsock://1/vm",
            "nbd+unix:///vm",
            "nbd+unix:///vm?socket=run/x",
            "nbd+unix:///vm?path=/run/x",
            "nbd+unix://a/vm?socket=/run/x",
        ] {
            let refused = absolute(wrong).unwrap_err();
            assert!(refused.to_string().contains(wrong), "{refused}");
            assert!(!is_export(Path::new(wrong)));
        }
    }
}
