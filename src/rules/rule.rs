//! Rules: the limits that apply to a descriptor.
//!
//! A [`set::RuleSet`] is the compiled form of all rules: valid by construction, immutable, replaced as a whole.
//! Matching takes one step for each entry: exact value, then the first wildcard or `match` in file order, then the bare
//! key; it backtracks only in domains that ask for it. Each step is a hash probe, whatever the number of rules.
//!
//! The types of this file are checked rules in tree form; `RuleSet::new` compiles them and cannot fail.
//!
//! Decides: names of a second limit and of a plan's limits (`limit_suffix`).

pub mod network;
pub mod notify_levels;
pub mod rejection_body;
pub mod value_set;
pub mod expression;
pub mod value_pattern;
pub mod patterns;
pub mod backtracking_bound;
pub mod entry_order;
pub mod matching;
pub mod metric_names;
pub mod rlconfig;
pub mod set;
pub mod trace;
pub mod near_miss;
pub mod decompile;
pub mod changes;
pub mod wildcard;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use self::notify_levels::NotifyLevels;
use self::rejection_body::RejectionBody;
use self::value_pattern::{MatchKind, ValuePattern};
use crate::base::named_enum::named_enum;
use crate::limit::active::ActiveTimes;
use crate::limit::algorithm::Algorithm;
use crate::limit::counter_path::KeyShare;
use crate::limit::period::Unit;
use crate::limit::window::WindowSpec;
use crate::limit::{Consistency, Limit, StoreFailurePolicy};

/// Index of a node in the compiled tree.
pub type NodeId = u32;

/// Nodes that match an entry.
pub type MatchingNodes = SmallVec<[NodeId; 8]>;

/// Location in the rule files, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLocation {
    /// Name of the file in messages.
    pub file: Arc<str>,
    /// Line, from 1; 0 if the rules were not text.
    pub line: u32,
    /// Column in characters, from 1; 0 if the rules were not text.
    pub column: u32,
}

/// Writes `file:line:column`, or the name alone if there is no line.
impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.file),
            line => write!(f, "{}:{line}:{}", self.file, self.column),
        }
    }
}

/// A domain with its rules, merged if several files add to it.
#[derive(Clone, Debug)]
pub struct Domain {
    /// Name, never empty.
    pub name: String,
    /// Defaults for limits that are sent with a request.
    pub defaults: OverrideDefaults,
    /// Those for limits of a unit, instead.
    pub defaults_by_unit: Vec<UnitOverrideDefaults>,
    /// `matching`: how descriptors are matched.
    pub matching: MatchingOptions,
    /// Names of its plans, in file order.
    pub plans: Vec<Arc<str>>,
    /// Its tables, in file order.
    pub tables: Vec<TableDeclaration>,
    /// Outermost descriptors, in file order, with distinct composite keys.
    pub descriptors: Vec<RuleNode>,
}

/// How the descriptors of a domain are matched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchingOptions {
    /// `order`: order of entries.
    pub order: EntryOrder,
    /// If a better match has no rule for the entries after it, the next one is tried.
    pub backtrack: bool,
}

named_enum! {
    /// Order of entries in a descriptor.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum EntryOrder {
        /// As the rules have it.
        #[default]
        AsWritten = "as_written",
        /// Any: entries are sorted by key, those of rules and those of requests.
        Any = "any",
    }
}

impl Domain {
    /// Returns `true` if a rule, under any of its plans, has a limit that follows streams.
    pub fn follows_streams(&self) -> bool {
        let mut waiting = vec![self.descriptors.as_slice()];
        while let Some(nodes) = waiting.pop() {
            if nodes.iter().filter_map(|node| node.rule.as_ref()).any(Rule::follows_streams) {
                return true;
            }
            waiting.extend(nodes.iter().map(|node| node.descriptors.as_slice()).filter(|below| !below.is_empty()));
        }
        false
    }
}

/// Table of a domain, as its rules declare it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableDeclaration {
    /// Name.
    pub name: Arc<str>,
    /// Source of its rows.
    pub source: TableSource,
    /// Location of its name.
    pub location: SourceLocation,
}

/// Source of the rows of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableSource {
    /// File, by its path below the directory of the rule file.
    File(String),
    /// Hash in the Redis of the counters.
    Redis {
        /// Name of the table in Redis.
        table: Arc<str>,
        /// Lifetime of a row in this process; `None`: that of the settings.
        keep: Option<Duration>,
    },
}

/// Defaults of a domain for limits that are sent with a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverrideDefaults {
    /// Algorithm that counts hits.
    pub algorithm: Algorithm,
    /// Calendar that fixed windows follow.
    pub window: Option<WindowSpec>,
    /// leaky_bucket: requests in the bucket at once.
    pub queue_size: Option<u32>,
    /// leaky_bucket and token_bucket: maximum delay, in microseconds.
    pub max_wait_us: Option<u64>,
    /// Rejected hits count too.
    pub count_rejected: Option<bool>,
    /// Consistency between replicas.
    pub consistency: Option<Consistency>,
    /// Answer while the store fails.
    pub on_store_error: Option<StoreFailurePolicy>,
    /// Part of every counter's key.
    pub epoch: u64,
    /// Response to a rejected request.
    pub rejection: RejectionResponse,
}

/// Defaults of a domain for limits of one unit that are sent with a request.
#[derive(Clone, Debug)]
pub struct UnitOverrideDefaults {
    /// The unit.
    pub unit: Unit,
    /// The defaults.
    pub defaults: OverrideDefaults,
}

/// Names and values of headers.
pub type RejectionHeaders = Vec<(String, String)>;

/// What a rejected request is told beside its code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RejectionResponse {
    /// Body, if any.
    pub body: Option<RejectionBody>,
    /// Content type, if any; free of control characters.
    pub content_type: Option<Arc<str>>,
    /// Further headers, if any.
    pub headers: Option<Arc<RejectionHeaders>>,
    /// Maximum random addition to `Retry-After`, in thousandths of a percent of the wait.
    pub jitter_milli_percent: Option<u32>,
}

impl RejectionResponse {
    /// Returns this response, completed by another: the body with its content type, the headers, and the jitter.
    pub fn with_fallback(&self, other: &Self) -> Self {
        let text = if self.body.is_some() { self } else { other };
        let headers = self.headers.as_ref().or(other.headers.as_ref()).cloned();
        let jitter_milli_percent = self.jitter_milli_percent.or(other.jitter_milli_percent);
        Self { headers, jitter_milli_percent, ..text.clone() }
    }
}

/// A descriptor of a rule file, as a node of the rule tree.
#[derive(Clone, Debug)]
pub struct RuleNode {
    /// Key, never empty.
    pub key: String,
    /// Values of the key that it matches.
    pub value: ValuePattern,
    /// Rule for a path that ends here, if any.
    pub rule: Option<Rule>,
    /// All values that the pattern matches share one counter.
    pub share_threshold: bool,
    /// Metric names contain the value.
    pub value_to_metric: bool,
    /// A path that ends here has no limit on purpose: the node is written without `rate_limit` and `descriptors`.
    pub exempt: bool,
    /// Next level, in file order, with distinct composite keys.
    pub descriptors: Vec<RuleNode>,
    /// Location of its key.
    pub location: SourceLocation,
}

impl RuleNode {
    /// Composite key, which identifies the node among its siblings: `key`, or `key_value` if it has a value.
    pub fn composite_key(&self) -> String {
        match self.value.pattern_text() {
            "" => self.key.clone(),
            value => format!("{}_{value}", self.key),
        }
    }

    /// Kind of match that the node gives.
    pub fn match_kind(&self) -> MatchKind {
        self.value.match_kind(&self.key)
    }
}

/// A rule: the limits of one node.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Name in `/rlconfig` and metrics: `domain.composite.composite`.
    pub path: String,
    /// Location of its `rate_limit`.
    pub location: SourceLocation,
    /// Limits, or none.
    pub allowance: RuleAllowance,
    /// Names of the limits that this rule disables in the same request.
    pub replaces: Vec<String>,
    /// Dynamic metadata to return when the descriptor passes.
    pub metadata: Option<serde_json::Map<String, serde_json::Value>>,
    /// Share of the keys for which the limits reject; for the others they are in shadow mode. `None`: all keys.
    pub enforced_share: Option<KeyShare>,
    /// Response to a rejected request.
    pub rejection: RejectionResponse,
    /// Metric names contain the whole path with the request's values.
    pub detailed_metric: bool,
    /// `decision_log`: decisions that are logged, in place of the settings.
    pub logging: Option<RuleLogging>,
    /// The plan that the limits are; `None` for limits of the rule itself.
    pub plan: Option<Box<RulePlan>>,
}

/// The plan whose limits a rule has.
#[derive(Clone, Debug)]
pub struct RulePlan {
    /// Name of the plan; [`OWN_LIMIT_NAME`] for limits of rows.
    pub name: Arc<str>,
    /// Index of the table among those of the domain.
    pub table: usize,
    /// Other plans that the table may choose; only in the rule of the default plan, which stands for all.
    pub choices: Option<PlanChoices>,
}

/// Plans that a table chooses from for one rule.
#[derive(Clone, Debug)]
pub struct PlanChoices {
    /// Index of the entry whose value is looked up, from 0.
    pub entry: usize,
    /// The rule under each plan of the domain, by its index; `None` for the default plan.
    pub plans: Vec<Option<Rule>>,
    /// Limits of rows are in shadow mode.
    pub shadow: bool,
    /// Limits of rows are quotas.
    pub quota: bool,
}

/// Name of the limits of rows in metrics, which no plan can have.
pub const OWN_LIMIT_NAME: &str = "own";

impl Rule {
    /// Returns `true` if the rule, under any of its plans, has a limit that follows streams.
    fn follows_streams(&self) -> bool {
        let has = |rule: &Self| match &rule.allowance {
            RuleAllowance::Unlimited { .. } => false,
            RuleAllowance::Limits(limits) => limits.iter().any(|of_rule| of_rule.limit.follows_streams()),
        };
        has(self) || self.plan_rules().any(has)
    }

    /// The rule under each plan but its default one.
    pub fn plan_rules(&self) -> impl Iterator<Item = &Self> {
        let choices = self.plan.as_ref().and_then(|plan| plan.choices.as_ref());
        choices.into_iter().flat_map(|choices| choices.plans.iter().flatten())
    }

    /// As [`Rule::plan_rules`], to change them.
    pub fn plan_rules_mut(&mut self) -> impl Iterator<Item = &mut Self> {
        let choices = self.plan.as_mut().and_then(|plan| plan.choices.as_mut());
        choices.into_iter().flat_map(|choices| choices.plans.iter_mut().flatten())
    }

    /// Name of the limit at `index` in `/rlconfig` and metrics.
    ///
    /// The first limit has the rule's own name; a later one adds its suffix.
    pub fn limit_path(&self, index: usize) -> String {
        match self.limit_suffix(index) {
            Some(suffix) => format!("{}.{suffix}", self.path),
            None => self.path.clone(),
        }
    }

    /// Suffix of a limit: its plan, if it is of one, and of a later limit its name, or its period and algorithm. `None`
    /// for the first limit of the rule itself.
    pub fn limit_suffix(&self, index: usize) -> Option<String> {
        let later = self.later_limit_suffix(index);
        match (&self.plan, later) {
            (None, later) => later,
            (Some(plan), None) => Some(plan.name.to_string()),
            (Some(plan), Some(later)) => Some(format!("{}.{later}", plan.name)),
        }
    }

    /// Suffix of a limit after the first.
    fn later_limit_suffix(&self, index: usize) -> Option<String> {
        let RuleAllowance::Limits(limits) = &self.allowance else { return None };
        let RuleLimit { limit, name, .. } = limits.get(index).filter(|one| index > 0 || one.candidate)?;
        Some(match name.is_empty() {
            true if limit.is_concurrent() => limit.algorithm().name().to_owned(),
            true => format!("{}_{}", limit.period(), limit.algorithm()),
            false => name.clone(),
        })
    }
}

/// Traffic that a rule allows.
#[derive(Clone, Debug)]
pub enum RuleAllowance {
    /// Everything, uncounted.
    Unlimited {
        /// Name, for `replaces`; empty if it has none.
        name: String,
        /// `requests_per_unit` as written; without effect, but `/rlconfig` prints it.
        requests_per_unit: u64,
        /// `shadow_mode` as written; without effect, but `/rlconfig` prints it.
        shadow: bool,
        /// `quota_mode` as written; without effect, but `/rlconfig` prints it.
        quota: bool,
    },
    /// Traffic within all of these limits, at least one; candidates are the last ones.
    Limits(Vec<RuleLimit>),
}

impl RuleAllowance {
    /// Names of the limits that have one.
    pub fn limit_names(&self) -> Vec<&str> {
        let names = match self {
            Self::Unlimited { name, .. } => vec![&**name],
            Self::Limits(limits) => limits.iter().map(|limit| &*limit.name).collect(),
        };
        names.into_iter().filter(|name| !name.is_empty()).collect()
    }
}

/// One limit of a rule.
#[derive(Clone, Debug)]
pub struct RuleLimit {
    /// The limit.
    pub limit: Limit,
    /// Name, for `replaces` and for the client; empty if it has none.
    pub name: String,
    /// Names of limits that this one replaces while it is active; those of the rule have them too.
    pub replaces: Vec<String>,
    /// Times at which the limit is active; `None`: always.
    pub active: Option<ActiveTimes>,
    /// Shadow mode: counted and reported, but never rejects.
    pub shadow: bool,
    /// Quota mode: rejects the request only together with all its other quotas. Candidates are no quotas.
    pub quota: bool,
    /// Candidate: in shadow mode, and charged as if it were the only limit of the rule.
    pub candidate: bool,
    /// Name of the next limit, which takes the hits that this one has no room for.
    pub overflow_to: Option<String>,
    /// Levels at which `notify` tells that the limit is used up to there.
    pub notify: Option<NotifyLevels>,
    /// Part of the counter's key: raising it resets the counter.
    pub epoch: u64,
    /// Defaults of `TOLLKEEPER_RULE_DEFAULTS` that the limit cannot have, each with the reason.
    pub left_out_defaults: Vec<String>,
}

impl RuleLimit {
    /// Returns `true` if two limits of a rule would count in one counter if it had the same key: candidates have their
    /// own, and limits that are never active together keep out of each other's way.
    pub fn can_share_counter(&self, other: &Self) -> bool {
        let overlaps = match (self.active, other.active) {
            (Some(one), Some(other)) => one.spec().overlaps(&other.spec()),
            _ => true,
        };
        overlaps && !self.candidate && !other.candidate
    }
}

/// A limit without anything else.
impl From<Limit> for RuleLimit {
    fn from(limit: Limit) -> Self {
        Self {
            limit,
            name: String::new(),
            replaces: Vec::new(),
            active: None,
            shadow: false,
            quota: false,
            candidate: false,
            overflow_to: None,
            notify: None,
            epoch: 0,
            left_out_defaults: Vec::new(),
        }
    }
}

named_enum! {
    /// A rule's own choice of the decisions that are logged.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RuleLogging {
        /// All decisions.
        All = "all",
        /// Rejected requests.
        Rejected = "rejected",
        /// None; the values of its descriptors are never logged.
        None = "none",
    }
}
