//! The value of `--metrics`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MetricsAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl MetricsAddress {
    /// Reads `PORT` (on loopback), `HOST:PORT` or `unix:PATH`.
    pub(crate) fn parse(text: &str) -> Result<MetricsAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path.is_empty() {
                true => {
                    Err("the path is missing in \"unix:\": use a form like unix:/run/dsync/metrics.sock"
                        .into())
                }
                false => Ok(MetricsAddress::Unix(path.into())),
            };
        }
        let port = || Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), text.parse().ok()?));
        text.parse().ok().or_else(port).map(MetricsAddress::Tcp).ok_or_else(|| {
            "use a form like 9750 (on 127.0.0.1), 192.0.2.7:9750 or unix:/run/dsync/metrics.sock".to_owned()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_on_loopback_unless_one_is_given() {
        let tcp = |text: &str| Ok(MetricsAddress::Tcp(text.parse().unwrap()));
        assert_eq!(MetricsAddress::parse("9750"), tcp("127.0.0.1:9750"));
        assert_eq!(MetricsAddress::parse("0.0.0.0:9750"), tcp("0.0.0.0:9750"));
        assert_eq!(MetricsAddress::parse("[::1]:9750"), tcp("[::1]:9750"));
        assert_eq!(MetricsAddress::parse("unix:/run/m.sock"), Ok(MetricsAddress::Unix("/run/m.sock".into())));
        for wrong in ["", "unix:", "localhost", "127.0.0.1", "99999", ":9750"] {
            assert!(MetricsAddress::parse(wrong).is_err(), "{wrong}");
        }
    }
}
