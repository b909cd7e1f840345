//! A domain while it is compiled.

use std::collections::HashMap;

use super::options::CompileOptions;
use super::{limit, memcache};
use crate::rules::diagnostic::escape_for_message;
use crate::rules::document::defaults::DefaultableKeys;
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::matching::MatchingSpec;
use crate::rules::rule::{Domain, Matching, OverrideDefaults, SourceLocation, UnitOverrideDefaults};
use crate::rules::yaml::Position;

/// A domain to which documents add descriptors.
pub(super) struct DomainBuilder {
    pub(super) domain: Domain,
    /// Indices of the outermost descriptors.
    pub(super) siblings: SiblingIndex,
    pub(super) location: SourceLocation,
    /// `defaults` of the first document that has them.
    pub(super) defaults: Option<LocatedDefaults>,
    /// `matching` of the first document that has it, with its location.
    pub(super) matching: Option<(MatchingSpec, SourceLocation)>,
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
        let domain = Domain {
            name,
            defaults,
            defaults_by_unit: Vec::new(),
            matching: Matching::default(),
            descriptors: Vec::new(),
        };
        Self { domain, siblings: SiblingIndex::new(), location, defaults: None, matching: None }
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

    /// Sets how the descriptors of a domain are matched, as `set_or_check_defaults` does.
    pub(super) fn set_matching(
        &mut self,
        reader: &mut DocumentReader<'_>,
        spec: MatchingSpec,
        location: SourceLocation,
    ) {
        match &self.matching {
            None => {
                self.domain.matching = Matching { order: spec.order, backtrack: spec.backtrack };
                self.matching = Some((spec, location));
            }
            Some((first, _)) if *first == spec => {}
            Some((_, first)) => {
                let at = Position { line: location.line, column: location.column };
                let message =
                    format!("domain '{}' has two different `matching`", escape_for_message(&self.domain.name));
                let hint = format!("make them the same as in {first}, or state them in one file only");
                reader.report_error(at, &FieldPath::ROOT.with_key("matching"), message, hint);
            }
        }
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
