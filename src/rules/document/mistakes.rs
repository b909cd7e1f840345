//! Hints for what people write in rule files by mistake: keys of other rate limiters, and files of another kind.

use crate::rules::key_table::Section;
use crate::rules::yaml::{YamlContent, YamlNode};

/// A key of other rate limiters, with the hint for it.
struct MistakenKey {
    names: &'static [&'static str],
    sections: &'static [Section],
    hint: &'static str,
}

const LIMIT_SECTIONS: &[Section] = &[Section::RateLimit, Section::Limit];

const MISTAKEN_KEYS: &[MistakenKey] = &[
    MistakenKey {
        names: &["burst", "burst_size", "max_burst", "capacity", "max_tokens"],
        sections: LIMIT_SECTIONS,
        hint: "a burst is `bucket_size: N` with `algorithm: token_bucket`",
    },
    MistakenKey {
        names: &["limit", "requests", "max_requests", "max", "rate", "hits", "average"],
        sections: LIMIT_SECTIONS,
        hint: "write `requests_per_unit: N` with a `unit`",
    },
    MistakenKey {
        names: &["period", "interval", "per", "duration", "seconds", "window_size"],
        sections: LIMIT_SECTIONS,
        hint: "write `unit`, and `unit_multiplier` for several: 30 s are `unit: second, unit_multiplier: 30`",
    },
    MistakenKey {
        names: &["values", "one_of"],
        sections: &[Section::Descriptor],
        hint: "write a list of values as `match: {in: [GET, HEAD]}`",
    },
];

/// Keys of Envoy's bootstrap that no rule file has.
const ENVOY_BOOTSTRAP_KEYS: [&str; 6] =
    ["static_resources", "staticResources", "dynamic_resources", "dynamicResources", "layered_runtime", "bootstrap"];

/// Returns the hint for a key of another rate limiter.
pub(super) fn hint_for_mistaken_key(name: &str, section: Option<Section>) -> Option<&'static str> {
    let section = section?;
    let known = MISTAKEN_KEYS.iter().find(|known| known.names.contains(&name) && known.sections.contains(&section));
    known.map(|known| known.hint)
}

/// File of another kind in place of rules.
pub(super) struct NonRuleFile<'n, 'a> {
    /// The key that tells.
    pub(super) key: &'n YamlNode<'a>,
    /// What the file is, and what to do.
    pub(super) hint: String,
}

/// Finds out whether a document is of another kind.
pub(super) fn detect_non_rule_file<'n, 'a>(root: &'n YamlNode<'a>) -> Option<NonRuleFile<'n, 'a>> {
    let YamlContent::Map(map) = &root.content else { return None };
    let find = |name: &str| map.iter().find(|(key, _)| key.as_scalar().is_some_and(|key| key.text() == name));
    if let (Some((key, _)), Some((_, kind))) = (find("apiVersion"), find("kind")) {
        let kind = kind.as_scalar().map_or("", |kind| kind.text());
        let hint = match kind {
            "ConfigMap" => "this is a ConfigMap; give the text below its `data`, as `kubectl get configmap NAME -o \
                 jsonpath='{.data.rules\\.yaml}' | tollkeeper check -` does"
                .to_owned(),
            _ => "this is an object of Kubernetes, not a file of rules".to_owned(),
        };
        return Some(NonRuleFile { key, hint });
    }
    let (key, _) = ENVOY_BOOTSTRAP_KEYS.iter().find_map(|name| find(name))?;
    let hint = "this is a bootstrap of Envoy; `tollkeeper check --envoy FILE` checks it".to_owned();
    Some(NonRuleFile { key, hint })
}
