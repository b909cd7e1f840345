//! A domain while it is compiled.

use std::collections::HashMap;

use super::options::CompileOptions;
use super::{limit, memcache};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::defaults::DefaultableKeys;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::rule::{Domain, OverrideDefaults, SourceLocation, UnitOverrideDefaults};
use crate::rules::yaml::Position;

/// A domain to which documents add descriptors.
pub(super) struct DomainBuilder {
    pub(super) domain: Domain,
    /// Indices of the outermost descriptors.
    pub(super) siblings: SiblingIndex,
    pub(super) location: SourceLocation,
    /// `defaults` of the first document that has them.
    pub(super) defaults: Option<LocatedDefaults>,
}

/// `defaults` of a document, with their location.
pub(super) struct LocatedDefaults {
    pub(super) keys: DefaultableKeys,
    pub(super) location: SourceLocation,
}

/// Index of each descriptor of one level, by composite key.
pub(super) type SiblingIndex = HashMap<String, usize>;

impl DomainBuilder {
    /// A domain without descriptors.
    pub(super) fn new(name: String, location: SourceLocation) -> Self {
        let defaults = OverrideDefaults::default();
        let domain = Domain { name, defaults, defaults_by_unit: Vec::new(), descriptors: Vec::new() };
        Self { domain, siblings: SiblingIndex::new(), location, defaults: None }
    }

    /// Returns the domain, with the defaults for limits that are sent with a request.
    pub(super) fn build_domain(self, options: &CompileOptions) -> Domain {
        let Self { mut domain, defaults, .. } = self;
        let layers = options.rule_defaults.layers_for_domain(&domain.name);
        let own = defaults.map(|defaults| defaults.keys).unwrap_or_default();
        let merged = |unit| {
            let merged = layers.layers_for_unit(unit).fold(own.clone(), DefaultableKeys::with_fallback);
            if options.memcache { memcache::remove_unsupported_keys(merged) } else { merged }
        };
        let of_unit = |unit| UnitOverrideDefaults {
            unit,
            defaults: limit::convert_override_defaults(&merged(Some(unit)), options),
        };
        domain.defaults_by_unit = layers.units_with_defaults().map(of_unit).collect();
        domain.defaults = limit::convert_override_defaults(&merged(None), options);
        domain
    }

    /// Sets the defaults of a domain from the first document that has them; those of other documents must be the same.
    pub(super) fn set_or_check_defaults(&mut self, reader: &mut DocumentReader<'_>, defaults: LocatedDefaults) {
        match &self.defaults {
            None => self.defaults = Some(defaults),
            Some(first) if first.keys.has_same_values(&defaults.keys) => {}
            Some(LocatedDefaults { location: first, .. }) => {
                let at = Position { line: defaults.location.line, column: defaults.location.column };
                let message =
                    format!("domain '{}' has two different `defaults`", escape_for_message(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.report_error(at, &FieldPath::ROOT.with_key("defaults"), message, hint);
            }
        }
    }
}
