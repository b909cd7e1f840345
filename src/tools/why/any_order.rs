//! Rule sets under which the asked domain takes entries in any order, by the rules in the headers of the logs.
//!
//! The service sorts such entries before it decides and logs them, so the log never has the order of the request.

use std::collections::HashMap;
use std::sync::Arc;

use crate::decide::log::header::{HeaderRecord, build_compile_options, decode_recorded_rules};
use crate::rules::compile::options::CompileOptions;
use crate::rules::rule::EntryOrder;

/// Maximum number of rule sets that are compiled; under others entries have the order of the rules.
const MAX_RULE_SETS: usize = 1000;

/// Order of entries in the asked domain, by the id of the rule set.
#[derive(Debug, Default)]
pub(super) struct EntryOrderByRuleSet(HashMap<String, EntryOrder>);

impl EntryOrderByRuleSet {
    /// Takes note of the rules of a header. Rules that cannot be compiled here count as those with one order.
    pub(super) fn add_header(&mut self, header: &HeaderRecord, domain: &str) {
        let Some(rules) = &header.rules else { return };
        if self.0.contains_key(&rules.id) || self.0.len() == MAX_RULE_SETS {
            return;
        }
        let order = decode_recorded_rules(rules.clone()).ok().and_then(|recorded| {
            let rule_defaults = Arc::new(recorded.defaults);
            let options = CompileOptions { rule_defaults, ..build_compile_options(&header.settings) };
            let compiled = recorded.rules.compile(&options).ok()?;
            Some(compiled.domains.iter().find(|known| *known.name == *domain)?.matching.order)
        });
        self.0.insert(rules.id.clone(), order.unwrap_or_default());
    }

    /// Order of entries under a rule set.
    pub(super) fn entry_order_under(&self, rules: &str) -> EntryOrder {
        self.0.get(rules).copied().unwrap_or_default()
    }
}
