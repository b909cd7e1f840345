//! Command lines in the syntax of Go's flag package, for the drop-in tools.
//!
//! `-name value` or `-name=value`, with one dash or two; a switch has a value only after `=`. Flags end at `--` or at
//! the first other argument; arguments after it are ignored with a warning.
//!
//! Decides: how flags of `client_cmd` and `config_check_cmd` are written (`-name value`).

use std::ffi::OsString;

use super::print::{CommandOutcome, fail_if_unwritten, print_error, print_to_stdout};
use crate::base::go_syntax::parse_bool;
use crate::base::text::escape_unprintable;

/// A flag of a tool.
pub(super) struct Flag {
    /// Name without dashes.
    pub(super) name: &'static str,
    /// `true` if the flag needs no value.
    pub(super) is_switch: bool,
    /// Help text.
    pub(super) help: &'static str,
}

/// Flags on a command line, in their order.
#[derive(Debug, Default)]
pub(super) struct GivenFlags(Vec<(&'static str, String)>);

impl GivenFlags {
    /// Returns the last value of a flag.
    pub(super) fn last_value(&self, name: &str) -> Option<&str> {
        self.all_values(name).last()
    }

    /// Iterates over all values of a flag.
    pub(super) fn all_values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter(move |(given, _)| *given == name).map(|(_, value)| value.as_str())
    }

    /// Returns `true` if a switch is on.
    pub(super) fn is_on(&self, name: &str) -> bool {
        self.last_value(name).and_then(parse_bool).unwrap_or_default()
    }
}

/// Parses `arguments`, which begin with the program's name.
///
/// `Err` is the outcome of a program that must end at once, after `-help` or a usage error, both already printed.
pub(super) fn parse_flags(flags: &[Flag], arguments: &[OsString]) -> Result<GivenFlags, CommandOutcome> {
    let mut given = GivenFlags::default();
    let mut rest = arguments.iter().skip(1).map(|argument| argument.to_string_lossy());
    while let Some(argument) = rest.next() {
        let Some(body) = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-')) else {
            print_error(format_args!("{}: this argument has no effect", escape_unprintable(&argument)));
            break;
        };
        if body.is_empty() {
            break;
        }
        let (name, value) = body.split_once('=').map_or((body, None), |(name, value)| (name, Some(value)));
        let Some(flag) = flags.iter().find(|flag| flag.name == name) else {
            if matches!(name, "h" | "help") {
                return Err(fail_if_unwritten(print_to_stdout(format_usage(flags)), CommandOutcome::Success));
            }
            return Err(print_usage_error(flags, &format!("flag provided but not defined: -{name}")));
        };
        let value = match (value, flag.is_switch) {
            (Some(value), true) if parse_bool(value).is_none() => {
                return Err(print_usage_error(flags, &format!("-{name}={value}: not a bool; give true or false")));
            }
            (Some(value), _) => value.to_owned(),
            (None, true) => "true".to_owned(),
            (None, false) => match rest.next() {
                Some(value) => value.into_owned(),
                None => return Err(print_usage_error(flags, &format!("flag needs an argument: -{name}"))),
            },
        };
        given.0.push((flag.name, value));
    }
    Ok(given)
}

fn print_usage_error(flags: &[Flag], what: &str) -> CommandOutcome {
    print_error(format_args!("{}\n{}", escape_unprintable(what), format_usage(flags).trim_end()));
    CommandOutcome::UsageError
}

fn format_usage(flags: &[Flag]) -> String {
    let line =
        |flag: &Flag| format!("  -{}{}\n    \t{}\n", flag.name, if flag.is_switch { "" } else { " string" }, flag.help);
    "Usage:\n".to_owned() + &flags.iter().map(line).collect::<String>()
}
