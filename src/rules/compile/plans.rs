//! Plans and tables of a domain, and the rules whose plan a table chooses.
//!
//! The limits of a plan are compiled once for a domain, so an error in them is reported once; a rule with `plan` gets a
//! copy of the limits of every plan. Each name is defined once in a domain, in any of its files. The files of tables
//! are not read here.
//!
//! Decides: what a plan is (a number, a list, `unlimited`); which rules may name a plan or table.
//! Decides: how many plans and tables a domain may have; where the file of a table may be; how long `keep` may be.

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::limit::counter_path::KeyShare;
use crate::rules::diagnostic::{escape_for_message, find_similar_name};
use crate::rules::document::fields::{DocumentReader, FieldPath};
use crate::rules::document::{DescriptorSpec, PlanLookupSpec, PlanSpec, TableSpec};
use crate::rules::plan_table::{is_table_file, is_valid_plan_or_table_name};
use crate::rules::rule::{
    PlanChoices, RejectionResponse, Rule, RuleAllowance, RulePlan, SourceLocation, TableDeclaration, TableSource,
};
use crate::rules::yaml::{Position, Spanned};

/// Maximum number of plans of a domain: each rule with `plan` has the limits of all.
pub(super) const MAX_PLANS: usize = 256;
/// Maximum number of tables of a domain.
pub(super) const MAX_TABLES: usize = 64;

/// A plan as written, with its file.
pub(super) struct WrittenPlan {
    pub(super) file: Arc<str>,
    pub(super) plan: PlanSpec,
}

/// A plan whose limits are compiled.
pub(super) struct CompiledPlan {
    pub(super) name: Arc<str>,
    allowance: RuleAllowance,
    replaces: Vec<String>,
    rejection: RejectionResponse,
}

/// Key of one entry of the path to a descriptor, and how its values are counted.
pub(super) struct PathKey {
    pub(super) key: String,
    /// Its values share a counter.
    pub(super) shares: bool,
    /// Its values could share a counter by `share_threshold`, and have one each.
    pub(super) counts_each_value: bool,
}

/// Plans and tables that the rules of a domain can name.
#[derive(Clone, Copy)]
pub(super) struct PlansAndTables<'d> {
    pub(super) plans: &'d [CompiledPlan],
    pub(super) tables: &'d [TableDeclaration],
}

/// Durations that `keep` of a table may have.
const VALID_KEEP_DURATIONS: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60);

/// Returns the source of a table, or reports why there is none.
pub(super) fn compile_table_source(
    reader: &mut DocumentReader<'_>,
    table: &TableSpec,
    memcache: bool,
    field_path: &FieldPath<'_>,
) -> Option<TableSource> {
    match (&table.file, &table.redis) {
        (Some(_), Some(redis)) => {
            let message = "a table with `file` and `redis`";
            reader.report_error(redis.at, &field_path.with_key("redis"), message, "remove one of them");
            None
        }
        (Some(file), None) => {
            if let Some(keep) = table.keep_us {
                let message = "`keep` without `redis`: a file is read whole";
                reader.report_error(keep.at, &field_path.with_key("keep"), message, "remove it");
            }
            compile_file_source(reader, file, field_path)
        }
        (None, Some(redis)) if memcache => {
            let message = "a table in Redis is not possible with BACKEND_TYPE=memcache";
            reader.report_error(redis.at, &field_path.with_key("redis"), message, "use `file`, or count in Redis");
            None
        }
        (None, Some(redis)) => compile_redis_source(reader, redis, table.keep_us, field_path),
        (None, None) if table.unreadable => None,
        (None, None) => {
            let hint = "write `file: NAME.csv`, or `redis: NAME`";
            reader.report_error(table.name.at, field_path, "a table without rows", hint);
            None
        }
    }
}

fn compile_file_source(
    reader: &mut DocumentReader<'_>,
    file: &Spanned<String>,
    field_path: &FieldPath<'_>,
) -> Option<TableSource> {
    let Spanned { value: file, at } = file;
    let field_path = field_path.with_key("file");
    let quoted = escape_for_message(file);
    let is_outside = file.starts_with('/') || file.split('/').any(|part| part == "..");
    if is_outside {
        let message = format!("the file '{quoted}' is outside the directory of the rule file");
        let hint = "put it there or in a directory below, and name it relative to the rule file";
        reader.report_error(*at, &field_path, message, hint);
        None
    } else if !is_table_file(Path::new(file)) {
        let message = format!("the file '{quoted}' is neither .csv nor .jsonl");
        reader.report_error(*at, &field_path, message, "write CSV with a heading, or JSON lines");
        None
    } else {
        Some(TableSource::File(file.clone()))
    }
}

fn compile_redis_source(
    reader: &mut DocumentReader<'_>,
    redis: &Spanned<String>,
    keep_us: Option<Spanned<u64>>,
    field_path: &FieldPath<'_>,
) -> Option<TableSource> {
    let Spanned { value: table, at } = redis;
    let keep = keep_us.map(|keep| Duration::from_micros(keep.value));
    if let (Some(written), Some(keep)) = (keep_us, keep.filter(|keep| !VALID_KEEP_DURATIONS.contains(keep))) {
        reader.report_error(
            written.at,
            &field_path.with_key("keep"),
            format!("a `keep` of {keep:?}"),
            "write 1s to 24h",
        );
    }
    if is_valid_plan_or_table_name(table) {
        return Some(TableSource::Redis { table: table.as_str().into(), keep });
    }
    let message = format!("'{}' cannot be the name of a table in Redis", escape_for_message(table));
    let hint = "write up to 64 letters, digits, `_` and `-`: it is a part of a key";
    reader.report_error(*at, &field_path.with_key("redis"), message, hint);
    None
}

/// A compiled `rate_limit`: what a rule, or a plan, takes from it.
pub(super) struct CompiledRateLimit {
    pub(super) allowance: RuleAllowance,
    pub(super) replaces: Vec<String>,
    pub(super) rejection: RejectionResponse,
    /// Position of the limits.
    pub(super) at: Position,
}

impl CompiledPlan {
    /// Names of its limits.
    pub(super) fn limit_names(&self) -> Vec<&str> {
        self.allowance.limit_names()
    }

    /// A plan with these limits; `None`: they were reported.
    pub(super) fn new(name: &str, parts: Option<CompiledRateLimit>) -> Self {
        let name = name.into();
        let none = || (RuleAllowance::Limits(Vec::new()), Vec::new(), RejectionResponse::default());
        let (allowance, replaces, rejection) =
            parts.map_or_else(none, |parts| (parts.allowance, parts.replaces, parts.rejection));
        Self { name, allowance, replaces, rejection }
    }

    /// Limits of the plan for a descriptor.
    fn allowance_with_modes_of(&self, descriptor: &DescriptorSpec) -> RuleAllowance {
        let mut allowance = self.allowance.clone();
        match &mut allowance {
            RuleAllowance::Unlimited { shadow, quota, .. } => {
                *shadow |= descriptor.shadow_mode;
                *quota |= descriptor.quota_mode;
            }
            RuleAllowance::Limits(limits) => {
                for limit in limits {
                    limit.shadow |= descriptor.shadow_mode;
                    limit.quota |= !limit.candidate && descriptor.quota_mode;
                }
            }
        }
        allowance
    }
}

/// Name of a rule, and the location of its `plan`.
pub(super) struct RulePlace {
    /// Name of the rule.
    pub(super) path: String,
    /// Location of its `plan`.
    pub(super) location: SourceLocation,
}

/// Compiler of a rule whose plan a table chooses.
pub(super) struct PlanRuleCompiler<'l, 'f> {
    pub(super) reader: &'l mut DocumentReader<'f>,
    pub(super) scope: PlansAndTables<'l>,
    /// Keys from the outermost descriptor to that of the rule.
    pub(super) path_keys: &'l [PathKey],
}

impl PlanRuleCompiler<'_, '_> {
    /// Compiles the rule; reports names that are unknown.
    pub(super) fn compile_rule(
        &mut self,
        choice: &Spanned<PlanLookupSpec>,
        written: &mut DescriptorSpec,
        place: &RulePlace,
        field_path: &FieldPath<'_>,
    ) -> Option<Rule> {
        let Spanned { value: choice, at } = choice;
        let PlansAndTables { plans, tables } = self.scope;
        let table_names = || tables.iter().map(|table| &*table.name);
        let plan_names = || plans.iter().map(|plan| &*plan.name);
        let missing = (!choice.unreadable).then_some(*at);
        let table = NameReference { key: "from", what: "table", section: "tables", written: choice.from.as_ref() }
            .resolve(self.reader, missing, table_names(), field_path);
        let default =
            NameReference { key: "default", what: "plan", section: "plans", written: choice.default.as_ref() }.resolve(
                self.reader,
                missing,
                plan_names(),
                field_path,
            );
        let entry = self.find_looked_up_entry(choice, field_path)?;
        let (table, default) = (table?, default?);
        let own = written.rejection_keys().report_keys_beside_format(self.reader, field_path).build();
        let metadata = written.metadata.take().map(|metadata| metadata.value);
        let rule_under = |plan: &CompiledPlan, choices: Option<PlanChoices>| Rule {
            path: place.path.clone(),
            location: place.location.clone(),
            allowance: plan.allowance_with_modes_of(written),
            replaces: plan.replaces.clone(),
            metadata: metadata.clone(),
            enforced_share: written.enforced_share.map(|share| KeyShare { milli_percent: share.value }),
            rejection: own.with_fallback(&plan.rejection),
            detailed_metric: written.detailed_metric,
            logging: written.logging.map(|logging| logging.value),
            plan: Some(Box::new(RulePlan { name: Arc::clone(&plan.name), table, choices })),
        };
        let other = |(index, plan)| (index != default).then(|| rule_under(plan, None));
        let choices = PlanChoices {
            entry,
            plans: plans.iter().enumerate().map(other).collect(),
            shadow: written.shadow_mode,
            quota: written.quota_mode,
        };
        Some(rule_under(plans.get(default)?, Some(choices)))
    }

    /// Index of the entry whose value is looked up: the last, or that of `key`.
    fn find_looked_up_entry(&mut self, choice: &PlanLookupSpec, field_path: &FieldPath<'_>) -> Option<usize> {
        let last = self.path_keys.len().checked_sub(1)?;
        let (entry, at) = match &choice.key {
            None => (Some(last), choice.from.as_ref().map(|from| from.at).unwrap_or_default()),
            Some(key) => (self.path_keys.iter().rposition(|known| known.key == key.value), key.at),
        };
        let field_path = field_path.with_key("key");
        let Some(entry) = entry else {
            let keys: Vec<_> = self.path_keys.iter().map(|known| escape_for_message(&known.key).to_string()).collect();
            let key = choice.key.as_ref().map(|key| key.value.as_str()).unwrap_or_default();
            let message = format!("no entry of this path has the key '{}'", escape_for_message(key));
            self.reader.report_error(at, &field_path, message, format!("write one of {}", keys.join(", ")));
            return None;
        };
        if self.path_keys[entry].shares {
            let message = "values that share a counter (`share_threshold`) cannot have plans of their own";
            self.reader.report_error(at, &field_path, message, "remove `share_threshold` or `plan`");
            return None;
        }
        Some(entry)
    }
}

/// Reference by name to a plan or a table.
struct NameReference<'w> {
    key: &'static str,
    what: &'static str,
    section: &'static str,
    written: Option<&'w Spanned<String>>,
}

impl NameReference<'_> {
    /// Returns the index of the name; reports one that is unknown, or one that is missing, at `missing`.
    fn resolve<'n>(
        &self,
        reader: &mut DocumentReader<'_>,
        missing: Option<Position>,
        names: impl Iterator<Item = &'n str> + Clone,
        field_path: &FieldPath<'_>,
    ) -> Option<usize> {
        let Self { key, what, section, written } = self;
        let field_path = field_path.with_key(key);
        let Some(Spanned { value: name, at }) = written else {
            if let Some(at) = missing {
                reader.report_error(at, &field_path, format!("`plan` without `{key}`"), format!("name a {what}"));
            }
            return None;
        };
        let index = names.clone().position(|known| known == name);
        if index.is_none() {
            let hint = match find_similar_name(name, names) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => format!("define it under `{section}` of the domain"),
            };
            reader.report_error(*at, &field_path, format!("unknown {what} '{}'", escape_for_message(name)), hint);
        }
        index
    }
}
