//! What an environment means, variable by variable: the data behind `check --env`.
//!
//! It says what a start with the same environment would do, by the same judgement, and leaves how it looks to others.

use std::ffi::OsString;

use serde::Serialize;

use super::assemble::{self, Assembled};
use super::environment::{Environment, Verdict};
use super::setting::Status;
use super::table::{self, TABLE};

/// One variable of the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Its value, masked if it holds a secret; `None` for a name that is not known.
    pub value: Option<String>,
    /// What a start would make of it.
    pub fate: Fate,
}

/// What a start makes of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is done as envoyproxy/ratelimit does, or as this program's own settings say.
    Honoured,
    /// It is done, but not quite as envoyproxy/ratelimit does.
    Differs {
        /// How it differs.
        why: &'static str,
    },
    /// Nothing comes of it, and no verdict changes.
    NoEffect {
        /// Why.
        why: &'static str,
    },
    /// It stops the start: what it asks for does not exist here.
    Refused {
        /// What is missing.
        why: &'static str,
        /// What to do about it.
        instead: &'static str,
    },
    /// It stops the start: its value is wrong.
    Invalid {
        /// What is wrong.
        what: String,
        /// What to write instead.
        fix: String,
    },
    /// It looks meant for this program and is not known.
    Unknown {
        /// The known name that was perhaps meant.
        nearest: Option<&'static str>,
    },
}

impl Fate {
    /// Whether a start with this variable fails.
    pub const fn stops_the_start(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Invalid { .. })
    }
}

/// A setting, and what it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Effective {
    /// Its variable; of a family, the one that is set.
    pub name: String,
    /// What it is set to, or its default; masked if it is a secret.
    pub value: String,
    /// Whether the environment sets it, rather than its default holding.
    pub set: bool,
    /// Nothing comes of it, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<&'static str>,
}

/// What each setting is, in the order of the documentation, in a process that was started with this environment.
pub fn effective(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<Effective> {
    let lines = report(vars);
    let mut all = Vec::with_capacity(TABLE.len());
    for setting in TABLE {
        let set = lines.iter().filter(|line| table::find(&line.name).is_some_and(|of| of.name == setting.name));
        let before = all.len();
        all.extend(set.map(|line| Effective {
            name: line.name.clone(),
            value: line.value.clone().unwrap_or_default(),
            set: true,
            idle: if let Fate::NoEffect { why } = line.fate { Some(why) } else { None },
        }));
        if all.len() == before && !setting.name.ends_with('*') {
            let (name, value) = (setting.name.to_owned(), setting.default.to_owned());
            all.push(Effective { name, value, set: false, idle: None });
        }
    }
    all
}

/// A line for each variable that is known, in the order of the documentation, then one for each that is not and looks
/// as if it should be: those that begin with `TOLLKEEPER_`, and misspelled ones.
pub fn report(vars: impl Iterator<Item = (OsString, OsString)>) -> Vec<Line> {
    let environment = Environment::read(vars);
    let Assembled { problems, idle, .. } = assemble::assemble(&environment);
    let known = environment.known.iter().map(|variable| {
        let fate = match (variable.judge(), variable.setting.status) {
            (Verdict::NoEffect(why), _) => Fate::NoEffect { why },
            (Verdict::Refused(refusal), _) => Fate::Refused { why: refusal.why, instead: refusal.instead },
            (Verdict::Invalid(fault), _) => Fate::Invalid { what: fault.what, fix: fault.fix },
            (Verdict::Used(_), status) => {
                // What is wrong, or without effect, only together with other settings.
                let problem = problems.iter().find(|problem| problem.name == variable.name);
                let idle = idle.iter().find(|(name, _)| *name == variable.name);
                match (problem, idle, status) {
                    (Some(problem), _, _) => Fate::Invalid { what: problem.what.clone(), fix: problem.fix.clone() },
                    (None, Some((_, why)), _) => Fate::NoEffect { why },
                    (None, None, Status::Differs(why)) => Fate::Differs { why },
                    (None, None, _) => Fate::Honoured,
                }
            }
        };
        Line { name: variable.name.clone(), value: Some(variable.shown()), fate }
    });
    let unknown = environment.unknown.iter().map(|stranger| Line {
        name: stranger.name.clone(),
        value: None,
        fate: Fate::Unknown { nearest: stranger.nearest },
    });
    known.chain(unknown).collect()
}
