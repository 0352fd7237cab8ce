//! `dsync key`: this site's key, and the keys it trusts.

use anyhow::Result;
use link::{Key, Keys, Roles};
use serde::Serialize;
use source::StateDir;

use crate::args::{KeyAction, KeyArgs};
use crate::output::Output;
use crate::terms::units;

/// A key, for JSON.
#[derive(Serialize)]
struct Shown {
    name: String,
    key: Key,
    fingerprint: String,
    /// Seconds since 1970.
    expires: Option<u64>,
    expired: bool,
    /// Of a trusted key, what for.
    #[serde(rename = "for")]
    roles: Option<Roles>,
}

/// The trusted keys.
#[derive(Serialize)]
struct Pins {
    pins: Vec<Shown>,
}

impl Shown {
    fn new(name: &str, key: Key) -> Shown {
        Shown {
            name: name.to_owned(),
            key,
            fingerprint: key.fingerprint(),
            expires: None,
            expired: false,
            roles: None,
        }
    }
}

/// This site's keys.
pub(crate) fn keys(state: &StateDir) -> Keys {
    let keys = Keys::new(state.keys_folder());
    match state.option() {
        Some(option) => keys.with_option(&option),
        None => keys,
    }
}

/// Runs the command.
pub(crate) fn run(args: &KeyArgs, state: &StateDir, output: &Output) -> Result<()> {
    let keys = keys(state);
    match &args.action {
        None => {
            let shown = Shown::new(&link::host_name(), keys.own()?);
            // To be pasted after "dsync key trust NAME".
            output.say(&format!("{} {}", shown.key, shown.name));
            // Not on standard output, which has only the key, for: dsync key trust NAME "$(dsync key)".
            if !output.is_json() {
                output.note(&format!("fingerprint {}", shown.fingerprint));
            }
            output.summary(&shown);
        }
        Some(KeyAction::Trust { name, key, expires, roles }) => {
            let known = keys.pins()?.into_iter().find(|pin| pin.name == *name);
            let was = known.as_ref().map(|pin| pin.roles).filter(|was| !roles.has(*was));
            let pinned = known.filter(|_| key.is_empty());
            let expires = &expires.or_else(|| pinned.as_ref()?.expires);
            let key: Key = pinned.map_or_else(|| key.join(" ").parse(), |pin| Ok(pin.key))?;
            keys.trust(name, key, *expires, *roles)?;
            let until = expires.map_or(String::new(), |at| format!(" until {}", units::date(at)));
            let was = was.map_or(String::new(), |was| format!(" alone (until now for {was})"));
            output.say(&format!(
                "{name} is trusted with the key {}{until}, for {roles}{was}",
                key.fingerprint()
            ));
            let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
            if expires.is_some_and(|at| at <= now) {
                output.warn("this time has passed: the key is refused");
            }
            output.summary(&Shown { expires: *expires, roles: Some(*roles), ..Shown::new(name, key) });
        }
        Some(KeyAction::List) => {
            let pins = keys.pins()?;
            if pins.is_empty() {
                output.say("no trusted keys: pin one with \"dsync key trust NAME KEY --for ROLES\", where KEY is printed by \"dsync key\" on that host");
            }
            for pin in &pins {
                let until = match pin.expires {
                    None => String::new(),
                    Some(at) if pin.has_expired() => format!("  EXPIRED {}", units::date(at)),
                    Some(at) => format!("  until {}", units::date(at)),
                };
                output.say(&format!("{}  {}  for {}{until}", pin.name, pin.key.fingerprint(), pin.roles));
            }
            let shown = |pin: &link::Pin| {
                let expired = pin.has_expired();
                Shown {
                    expires: pin.expires,
                    expired,
                    roles: Some(pin.roles),
                    ..Shown::new(&pin.name, pin.key)
                }
            };
            output.summary(&Pins { pins: pins.iter().map(shown).collect() });
        }
        Some(KeyAction::Forget { name }) => {
            keys.forget(name)?;
            output.say(&format!("{name} is no longer trusted"));
        }
    }
    Ok(())
}
