//! The environment as written: which known variables are set, and the effect of each.
//!
//! `Variable::effect` is the one place that decides about a single variable, for the start and for `check --env` alike.
//! Unknown names are ignored, unless they look meant for this program.

use std::ffi::OsString;

use super::choices::BackendType;
use super::invalid::InvalidSetting;
use super::setting::{AnySetting, Support};
use super::table;
use super::table::decision_log::TOLLKEEPER_DECISION_LOG_REDIS_URL;

/// The variables of an environment, by name; of two with one name the first counts.
#[derive(Clone, Default)]
pub(crate) struct Environment {
    /// Known variables, in the order of the table, then by name.
    pub(crate) known: Vec<Variable>,
    /// Unknown variables that look meant for this program, by name.
    pub(crate) unknown: Vec<UnknownVariable>,
}

/// A known variable that is set.
#[derive(Clone)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) setting: &'static dyn AnySetting,
    /// Its text; `None` if it is not UTF-8.
    pub(crate) text: Option<String>,
}

/// A variable that is not known.
#[derive(Clone)]
pub(crate) struct UnknownVariable {
    pub(crate) name: String,
    /// Similar known name, which may have been meant.
    pub(crate) nearest: Option<&'static str>,
}

/// The effect of a variable, taken by itself.
pub(crate) enum VariableEffect {
    /// Its value is used.
    Used,
    /// Its value is valid and has no effect.
    None(&'static str),
    /// Its value is invalid, which prevents the start.
    Invalid(InvalidSetting),
}

impl Environment {
    /// Selects the variables that concern this program.
    pub(crate) fn read(vars: impl Iterator<Item = (OsString, OsString)>) -> Self {
        let mut environment = Self::default();
        for (name, value) in vars {
            // Known names are printable ASCII, and a notice about an unknown one must fit on a line.
            let Some(name) = name.to_str().filter(|name| name.bytes().all(|b| b.is_ascii_graphic())) else { continue };
            match table::find(name) {
                Some(setting) => {
                    if environment.known.iter().all(|other| other.name != name) {
                        let text = value.into_string().ok();
                        environment.known.push(Variable { name: name.to_owned(), setting, text });
                    }
                }
                None if is_service_link(name, &value) => {}
                None => environment.unknown.extend(UnknownVariable::find(name)),
            }
        }
        environment.known.sort_by_cached_key(|variable| (table::position(&variable.name), variable.name.clone()));
        environment.unknown.sort_by(|a, b| a.name.cmp(&b.name));
        environment
    }

    /// Returns the store that the variables ask for; a variable without effect can ask for Redis too.
    pub(crate) fn backend(&self) -> Option<BackendType> {
        let text = |variable: &Variable| variable.text.clone().unwrap_or_default();
        let is_backend =
            |text: &str| self.known.iter().any(|v| v.name == "BACKEND_TYPE" && v.text.as_deref() == Some(text));
        if is_backend("memcache") {
            return Some(BackendType::Memcache);
        }
        // Certificates may be those of the decision log's stream alone.
        let is_url = |variable: &Variable| variable.name == TOLLKEEPER_DECISION_LOG_REDIS_URL.name();
        let has_stream = self.known.iter().any(|variable| is_url(variable) && !text(variable).is_empty());
        let is_of_stream = |name: &str| has_stream && name.starts_with("REDIS_TLS_");
        let is_redis = |variable: &Variable| {
            variable.name.starts_with("REDIS_") && !is_of_stream(&variable.name) && !text(variable).is_empty()
        };
        (is_backend("redis") || self.known.iter().any(is_redis)).then_some(BackendType::Redis)
    }
}

impl Variable {
    /// Returns its effect.
    pub(crate) fn effect(&self) -> VariableEffect {
        let Some(text) = &self.text else {
            return VariableEffect::Invalid(InvalidSetting::new("not UTF-8", "give plain text"));
        };
        match (self.setting.check(text), self.setting.info().support) {
            (Err(invalid), _) => VariableEffect::Invalid(invalid),
            (Ok(()), Support::NoEffect { when, why }) if when.applies(text) => VariableEffect::None(why),
            (Ok(()), _) => VariableEffect::Used,
        }
    }

    /// Formats its value for messages; `?` stands for one that is not UTF-8.
    pub(crate) fn shown(&self) -> String {
        self.text.as_deref().map_or_else(|| "?".to_owned(), |text| self.setting.shown(text))
    }
}

impl UnknownVariable {
    /// Returns the variable called `name` if it looks meant for this program.
    fn find(name: &str) -> Option<Self> {
        let own = name.strip_prefix("TOLLKEEPER_");
        let nearest = own.and_then(|rest| table::find(rest).map(AnySetting::name)).or_else(|| nearest(name));
        (own.is_some() || nearest.is_some()).then(|| Self { name: name.to_owned(), nearest })
    }
}

/// Finds the known name that `name` misspells: by one edit in a short name, by two in a long one.
fn nearest(name: &str) -> Option<&'static str> {
    const MIN_LENGTH: usize = 7;
    const LONG_LENGTH: usize = 12;
    const MAX_LENGTH: usize = 64;
    if !(MIN_LENGTH..=MAX_LENGTH).contains(&name.len()) {
        return None;
    }
    let max_edits = if name.len() < LONG_LENGTH { 1 } else { 2 };
    let upper = name.to_ascii_uppercase();
    let names = table::all().filter(|setting| !setting.info().is_family()).map(AnySetting::name);
    let candidates = names.filter(|name| name.len() >= MIN_LENGTH);
    let near = candidates.map(|name| (strsim::osa_distance(&upper, name), name));
    near.filter(|(edits, _)| *edits <= max_edits).min_by_key(|(edits, _)| *edits).map(|(_, name)| name)
}

/// Returns `true` for variables that Kubernetes sets to describe a service.
///
/// A service called `tollkeeper` adds `TOLLKEEPER_PORT=tcp://...` and more to every pod of its namespace.
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
