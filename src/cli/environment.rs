//! What `check --env` shows: each variable that is set, and what a start makes of it.
//!
//! The judgement is that of the start; here it gets its words.

use serde::Serialize;

use super::print::{count, table};
use crate::report::text::plain;
use crate::settings::report::{self, Fate};

/// A variable of the environment.
#[derive(Serialize)]
pub(super) struct Variable {
    name: String,
    /// As it may be shown; nothing for a name that is not known.
    value: Option<String>,
    fate: &'static str,
    /// Whether a start fails because of it.
    pub(super) stops_the_start: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

/// The words for fates, as JSON has them and as people read them.
const FATES: [(&str, &str); 6] = [
    ("honoured", "honoured"),
    ("differs", "different"),
    ("no_effect", "without effect"),
    ("unknown", "unknown"),
    ("refused", "refused"),
    ("invalid", "invalid"),
];

/// The variables of this process that concern a start.
pub(super) fn variables() -> Vec<Variable> {
    report::report(std::env::vars_os()).into_iter().map(variable).collect()
}

fn variable(line: report::Line) -> Variable {
    let stops_the_start = line.fate.stops_the_start();
    let (fate, why, fix) = match line.fate {
        Fate::Honoured => ("honoured", None, None),
        Fate::Differs { why } => ("differs", Some(why.to_owned()), None),
        Fate::NoEffect { why } => ("no_effect", Some(why.to_owned()), None),
        Fate::Refused { why, instead } => ("refused", Some(why.to_owned()), Some(instead.to_owned())),
        Fate::Invalid { what, fix } => ("invalid", Some(what), Some(fix)),
        Fate::Unknown { nearest } => {
            ("unknown", Some("not known".to_owned()), nearest.map(|name| format!("did you mean {name}?")))
        }
    };
    Variable { name: line.name, value: line.value, fate, stops_the_start, why, fix }
}

/// A table, and how many there are of each fate.
pub(super) fn text(variables: &[Variable]) -> String {
    if variables.is_empty() {
        return "no variable is set that concerns tollkeeper, so the defaults hold\n".to_owned();
    }
    let rows = variables.iter().map(|variable| {
        let fate = FATES.iter().find(|(name, _)| *name == variable.fate).map_or(variable.fate, |(_, word)| word);
        let note = [variable.why.as_deref(), variable.fix.as_deref()].into_iter().flatten().collect::<Vec<_>>();
        [&variable.name, variable.value.as_deref().unwrap_or_default(), fate, &note.join("; ")].map(plain).into()
    });
    let page = table(&["VARIABLE", "VALUE", "FATE", "NOTE"], rows);
    let sums: Vec<String> = FATES
        .iter()
        .map(|(name, word)| (variables.iter().filter(|variable| variable.fate == *name).count(), word))
        .filter(|(sum, _)| *sum > 0)
        .map(|(sum, word)| format!("{sum} {word}"))
        .collect();
    let stop = if variables.iter().any(|variable| variable.stops_the_start) { "; it would not start" } else { "" };
    format!("{page}{}: {}{stop}\n", count(variables.len() as u64, "variable"), sums.join(", "))
}
