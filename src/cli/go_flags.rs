//! Command lines as Go's flag package takes them, for the tools that come from there.
//!
//! `-name value`, `-name=value`, with one dash or two; a switch takes a value only behind `=`. Flags end at `--` or at
//! the first argument that is none; what follows was ignored there and is named here.

use std::ffi::OsString;

use super::Outcome;
use super::print::{complain, ended, print};
use crate::go_syntax::parse_bool;
use crate::report::text::plain;

/// A flag that a tool takes.
pub(super) struct Flag {
    /// Its name without dashes.
    pub(super) name: &'static str,
    /// Whether it is a switch.
    pub(super) is_switch: bool,
    /// What it is for.
    pub(super) help: &'static str,
}

/// The flags that were given, in their order.
#[derive(Debug, Default)]
pub(super) struct Given(Vec<(&'static str, String)>);

impl Given {
    /// The last value of a flag.
    pub(super) fn last(&self, name: &str) -> Option<&str> {
        self.all(name).last()
    }

    /// All values of a flag.
    pub(super) fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(given, _)| *given == name).map(|(_, value)| value.as_str())
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&self, name: &str) -> bool {
        self.last(name).and_then(parse_bool).unwrap_or_default()
    }
}

/// Reads `arguments`, the program's name first. `Err` is how the program ends at once: well after `-help`, misused
/// after a mistake, which was told.
pub(super) fn read(flags: &[Flag], arguments: &[OsString]) -> Result<Given, Outcome> {
    let mut given = Given::default();
    let mut rest = arguments.iter().skip(1).map(|argument| argument.to_string_lossy());
    while let Some(argument) = rest.next() {
        let Some(body) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
            complain(format_args!("{}: argument without effect", plain(&argument)));
            break;
        };
        if body.is_empty() {
            break;
        }
        let (name, value) = body.split_once('=').map_or((body, None), |(name, value)| (name, Some(value)));
        let Some(flag) = flags.iter().find(|flag| flag.name == name) else {
            if matches!(name, "h" | "help") {
                return Err(ended(print(usage(flags)), Outcome::Done));
            }
            return Err(misused(flags, &format!("flag provided but not defined: -{name}")));
        };
        let value = match (value, flag.is_switch) {
            (Some(value), true) if parse_bool(value).is_none() => {
                return Err(misused(flags, &format!("-{name}={value}: not a bool; give true or false")));
            }
            (Some(value), _) => value.to_owned(),
            (None, true) => "true".to_owned(),
            (None, false) => match rest.next() {
                Some(value) => value.into_owned(),
                None => return Err(misused(flags, &format!("flag needs an argument: -{name}"))),
            },
        };
        given.0.push((flag.name, value));
    }
    Ok(given)
}

fn misused(flags: &[Flag], what: &str) -> Outcome {
    complain(format_args!("{}\n{}", plain(what), usage(flags).trim_end()));
    Outcome::Misused
}

fn usage(flags: &[Flag]) -> String {
    let line =
        |flag: &Flag| format!("  -{}{}\n    \t{}\n", flag.name, if flag.is_switch { "" } else { " string" }, flag.help);
    "Usage:\n".to_owned() + &flags.iter().map(line).collect::<String>()
}
