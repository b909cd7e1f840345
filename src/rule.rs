//! The rules: which limits a descriptor meets.
//!
//! A `RuleSet` is the compiled form of all rule files: valid by construction, immutable, replaced as a whole. Matching
//! walks one level an entry: exact value, then the first wildcard in file order, then the bare key; never back.
//! Each step is a hash probe, however many rules there are.
//!
//! `RuleNode` and `Domain` are what a rule file says once it was checked; `RuleSet::new` compiles them and can not fail.

pub mod matching;
pub mod naming;
pub mod render;
pub mod set;
pub mod trace;
pub(crate) mod wildcard;

use std::fmt;
use std::sync::Arc;

use crate::limit::algorithm::Algorithm;
use crate::limit::{Consistency, Limit, StorePolicy};

/// A node's place in the compiled tree.
type NodeId = u32;

/// Where in the rule files something was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// The file's name as messages give it.
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub column: u32,
}

/// Writes `file:line:column`.
impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// A domain as the rule files describe it, merged where several files add to it.
#[derive(Clone, Debug)]
pub struct Domain {
    /// Its name, never empty.
    pub name: String,
    /// What applies to limits that travel with a request.
    pub defaults: OverrideDefaults,
    /// The outermost descriptors, in file order; no two of one composite key.
    pub descriptors: Vec<RuleNode>,
}

/// What a domain says for limits that come with a request instead of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverrideDefaults {
    /// How hits are counted.
    pub algorithm: Algorithm,
    /// leaky_bucket: requests in the bucket at once.
    pub queue_size: Option<u32>,
    /// leaky_bucket and token_bucket: the longest hold, in microseconds.
    pub max_wait_us: Option<u64>,
    /// Whether refused hits count.
    pub count_rejected: Option<bool>,
    /// What replicas may disagree about.
    pub consistency: Option<Consistency>,
    /// What is answered when the counter can not be asked.
    pub on_store_error: Option<StorePolicy>,
    /// Part of every counter's key.
    pub epoch: u64,
    /// What a over_limit_body says.
    pub over_limit_body: OverLimitBody,
}

/// What a over_limit_body says beside its code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverLimitBody {
    /// The body, if any.
    pub body: Option<Arc<str>>,
    /// Its content type, if any; free of control characters.
    pub content_type: Option<Arc<str>>,
}

/// A descriptor of a rule file.
#[derive(Clone, Debug)]
pub struct RuleNode {
    /// The key, never empty.
    pub key: String,
    /// The value; empty matches any value of the key. A `*` anywhere matches any run of bytes.
    pub value: String,
    /// What holds for a request that ends here, if anything.
    pub rule: Option<Rule>,
    /// All values that the wildcard matches share one counter.
    pub share_threshold: bool,
    /// The value goes into the metric's name.
    pub value_to_metric: bool,
    /// The next level, in file order; no two of one composite key.
    pub descriptors: Vec<RuleNode>,
    /// Where its key stands.
    pub location: SourceLocation,
}

impl RuleNode {
    /// `key`, or `key_value` if it has a value: what identifies it among its siblings.
    pub fn composite(&self) -> String {
        if self.value.is_empty() { self.key.clone() } else { format!("{}_{}", self.key, self.value) }
    }
}

/// What holds at one place of the tree.
#[derive(Clone, Debug)]
pub struct Rule {
    /// `domain.composite.composite`: its name in `/rlconfig` and metrics.
    pub path: String,
    /// Where its `rate_limit` stands.
    pub location: SourceLocation,
    /// Its limits.
    pub allowance: Allowance,
    /// The names of the limits that this rule switches off in the same request.
    pub replaces: Vec<String>,
    /// Returned as dynamic metadata when the descriptor passes.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// What a over_limit_body says.
    pub over_limit_body: OverLimitBody,
    /// The whole path with the request's values goes into the metric's name.
    pub detailed_metric: bool,
}

impl Rule {
    /// The name of one of its limits in `/rlconfig` and metrics: the first has the rule's own, a later one adds its
    /// name, or its period and algorithm.
    pub fn limit_path(&self, place: usize) -> String {
        match self.limit_suffix(place) {
            Some(suffix) => format!("{}.{suffix}", self.path),
            None => self.path.clone(),
        }
    }

    /// What a later limit adds to the path of the rule: its name, or its period and algorithm.
    pub fn limit_suffix(&self, place: usize) -> Option<String> {
        let Allowance::Limits(limits) = &self.allowance else { return None };
        let RuleLimit { limit, name, .. } = limits.get(place).filter(|_| place > 0)?;
        Some(match name.is_empty() {
            true => format!("{}_{}", limit.period(), limit.algorithm()),
            false => name.clone(),
        })
    }
}

/// What a rule allows.
#[derive(Clone, Debug)]
pub enum Allowance {
    /// Everything, uncounted.
    Unlimited {
        /// Its name, for `replaces`; empty if it has none.
        name: String,
        /// As written; without effect, but `/rlconfig` prints it.
        requests_per_unit: u32,
        /// `shadow_mode` as written, likewise.
        shadow: bool,
        /// `quota_mode` as written, likewise.
        quota: bool,
    },
    /// What passes each of these, at least one.
    Limits(Vec<RuleLimit>),
}

/// One limit of a rule.
#[derive(Clone, Debug)]
pub struct RuleLimit {
    /// The limit.
    pub limit: Limit,
    /// Its name, for `replaces` and for the client; empty if it has none.
    pub name: String,
    /// A trial: it is counted and reported, and refuses nothing.
    pub shadow: bool,
    /// It refuses the request only together with all other quotas of it.
    pub quota: bool,
    /// Part of its counter's key: raising it resets the counter.
    pub epoch: u64,
}
