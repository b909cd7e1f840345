//! Selection of the decisions that are logged.
//!
//! A decision is logged if, for one of its descriptors, the rule or else the settings ask for its verdict, and the
//! sample contains the descriptor's key. The sample is a share of all keys, by a hash that all processes compute alike,
//! so that the log has all of a sampled key's decisions or none.

use crate::limit::counter_path::CounterPath;
use crate::rules::rule::RuleLogging;
use crate::settings::decision_log::LoggedDecisionKinds;

/// Facts about a decision by which it is selected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecisionFacts {
    /// The request was rejected.
    pub rejected: bool,
    /// The request was admitted, and a limit in shadow mode was exceeded.
    pub shadow: bool,
    /// A failure policy decided, or there is no decision.
    pub error: bool,
}

impl DecisionFacts {
    /// True if a descriptor asks for the decision: by its rule's choice, or by the settings if it has none.
    pub fn is_decision_selected(self, rule: Option<RuleLogging>, settings: LoggedDecisionKinds) -> bool {
        match rule {
            Some(RuleLogging::All) => true,
            Some(RuleLogging::Rejected) => self.rejected,
            Some(RuleLogging::None) => false,
            None => {
                settings.all
                    || settings.rejected && self.rejected
                    || settings.shadow && self.shadow
                    || settings.errors && self.error
            }
        }
    }
}

/// Sample of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeySample {
    /// Share of all keys, 0 to 1.
    pub share: f64,
}

impl KeySample {
    /// True if the sample contains the key of a descriptor. A larger share contains the keys of every smaller one.
    pub fn contains(self, path: &CounterPath<'_>) -> bool {
        const HASH_RANGE: f64 = (1_u64 << 53) as f64;
        if self.share >= 1.0 {
            return true;
        }
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        {
            self.share > 0.0 && ((path.hash_for_sampling() >> 11) as f64) < self.share * HASH_RANGE
        }
    }
}
