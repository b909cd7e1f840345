//! The environment as written: which known variables are set, and what becomes of each.
//!
//! `judge` is the one place that decides it, for the start and for `check --env` alike. Names that are not known are
//! nobody's business, unless they look meant for this program.

use std::ffi::OsString;

use super::parse::{self, Fault};
use super::setting::{Refusal, Setting, Status};
use super::table::{self, TABLE};
use super::value::{Value, shown};

/// The variables of an environment, by name; of two with one name the first counts.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    /// Known ones, in the order of the table, then of their names.
    pub(crate) known: Vec<Variable>,
    /// Those that look meant for this program and are not known, by name.
    pub(crate) unknown: Vec<Stranger>,
}

/// A known variable that is set.
#[derive(Clone)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) setting: &'static Setting,
    /// `None` if it is not UTF-8.
    pub(crate) text: Option<String>,
}

/// A variable that is not known.
#[derive(Clone)]
pub(crate) struct Stranger {
    pub(crate) name: String,
    /// The known name that was perhaps meant.
    pub(crate) nearest: Option<&'static str>,
}

/// What becomes of a variable.
pub(crate) enum Verdict {
    /// Its value is used.
    Used(Value),
    /// Nothing comes of it.
    NoEffect(&'static str),
    /// It stops the start.
    Refused(Refusal),
    /// It is no value of its kind, which stops the start too.
    Invalid(Fault),
}

impl Environment {
    /// Sorts out what concerns this program.
    pub(crate) fn read(vars: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let mut environment = Self::default();
        for (name, value) in vars {
            // So are all known names, and what is said of one that is not known must be a line.
            let Some(name) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_graphic())) else { continue };
            match table::find(name) {
                Some(setting) => {
                    if environment.known.iter().all(|other| other.name != name) {
                        let text = value.into_string().ok();
                        environment.known.push(Variable { name: name.to_owned(), setting, text });
                    }
                }
                None if is_service_link(name, &value) => {}
                None => environment.unknown.extend(Stranger::of(name)),
            }
        }
        let row = |variable: &Variable| TABLE.iter().position(|setting| setting.name == variable.setting.name);
        environment.known.sort_by(|a, b| row(a).cmp(&row(b)).then_with(|| a.name.cmp(&b.name)));
        environment.unknown.sort_by(|a, b| a.name.cmp(&b.name));
        environment
    }

    /// Whether counters are to live in Redis: something is said about it, be it without effect.
    pub(crate) fn asks_for_redis(&self) -> bool {
        self.known.iter().any(|variable| {
            let text = variable.text.as_deref().unwrap_or_default();
            (variable.name.starts_with("REDIS_") && !text.is_empty())
                || (variable.name == "BACKEND_TYPE" && text == "redis")
        })
    }
}

impl Variable {
    /// What becomes of it. A refusal comes before a value that does not parse: what is missing matters more.
    pub(crate) fn judge(&self) -> Verdict {
        let Some(text) = &self.text else {
            return Verdict::Invalid(Fault::new("not UTF-8", "give plain text"));
        };
        if let Status::Refused(refusals) = self.setting.status
            && let Some(refusal) = refusals.iter().find(|refusal| refusal.when.applies(text))
        {
            return Verdict::Refused(*refusal);
        }
        match (parse::value(self.setting.kind, text), self.setting.status) {
            (Err(fault), _) => Verdict::Invalid(fault),
            (Ok(_), Status::NoEffect { when, why }) if when.applies(text) => Verdict::NoEffect(why),
            (Ok(value), _) => Verdict::Used(value),
        }
    }

    /// Its value as it may be shown; one that is not UTF-8 is not.
    pub(crate) fn shown(&self) -> String {
        self.text.as_deref().map_or_else(|| "?".to_owned(), |text| shown(self.setting.kind, text))
    }
}

impl Stranger {
    /// `name`, if it looks meant for this program.
    fn of(name: &str) -> Option<Self> {
        let own = name.strip_prefix("TOLLKEEPER_");
        let nearest = own.and_then(|rest| table::find(rest).map(|setting| setting.name)).or_else(|| nearest(name));
        (own.is_some() || nearest.is_some()).then(|| Self { name: name.to_owned(), nearest })
    }
}

/// The known name that `name` is a misspelling of: one slip in a short name, two in a long one.
fn nearest(name: &str) -> Option<&'static str> {
    const SHORTEST: usize = 7;
    const LONG: usize = 12;
    const LONGEST: usize = 64;
    if !(SHORTEST..=LONGEST).contains(&name.len()) {
        return None;
    }
    let slips = if name.len() < LONG { 1 } else { 2 };
    let upper = name.to_ascii_uppercase();
    let singles = TABLE.iter().filter(|setting| !setting.name.ends_with('*') && setting.name.len() >= SHORTEST);
    let near = singles.map(|setting| (strsim::osa_distance(&upper, setting.name), setting.name));
    near.filter(|(distance, _)| *distance <= slips).min_by_key(|(distance, _)| *distance).map(|(_, name)| name)
}

/// Whether Kubernetes set it to tell where a service is: a service called `tollkeeper` gives every pod of its namespace
/// `TOLLKEEPER_PORT=tcp://...` and more of the kind.
fn is_service_link(name: &str, value: &OsString) -> bool {
    let is_url = value.to_str().is_some_and(|text| ["tcp://", "udp://", "sctp://"].iter().any(|s| text.starts_with(s)));
    let has_protocol = ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| {
        ["", "_PROTO", "_PORT", "_ADDR"].iter().any(|end| name.strip_suffix(end).is_some_and(|n| n.ends_with(protocol)))
    });
    is_url
        || name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.contains("_PORT_") && has_protocol)
}
