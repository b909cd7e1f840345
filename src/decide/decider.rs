//! What decisions are made with: the counters, the settings, and what decisions are recorded in.

use std::sync::Arc;

use super::blocks::Blocks;
use super::log::DecisionLog;
use super::log::value_form::ValueForm;
use super::reached_levels::ReachedLevelSender;
use super::store_failures::FailedChargeCounters;
use super::table_rows::PlanRowReader;
use super::tap::DecisionTap;
use crate::limit::StoreFailurePolicy;
use crate::settings::decisions::DecisionSettings;
use crate::settings::redis::TableLookupSettings;
use crate::store::Store;
use crate::store::error::ChargeError;
use crate::telemetry::service_metrics::ServiceMetrics;

/// Decides requests.
#[derive(Debug)]
pub struct Decider {
    /// The counters.
    pub store: Store,
    /// Settings of decisions.
    pub behaviour: DecisionSettings,
    /// Metrics of decisions and limits.
    pub metrics: Arc<ServiceMetrics>,
    /// Decision log; `None` if it is off.
    pub log: Option<Arc<DecisionLog>>,
    /// Blocked values.
    pub blocks: Blocks,
    /// Operators that listen to decisions.
    pub tap: Arc<DecisionTap>,
    /// Way of the levels of `notify` that keys reach; `None` if nobody tells them.
    pub reached_levels: Option<ReachedLevelSender>,
    /// Form of the values in rejected keys.
    pub key_values: ValueForm,
    pub(super) failures: FailedChargeCounters,
    pub(super) row_reader: PlanRowReader,
}

impl Decider {
    /// Creates a decider that has not seen a failure.
    pub fn new(store: Store, behaviour: DecisionSettings, metrics: Arc<ServiceMetrics>) -> Self {
        Self {
            store,
            behaviour,
            metrics,
            log: None,
            blocks: Blocks::default(),
            tap: Arc::default(),
            reached_levels: None,
            key_values: ValueForm::Plain,
            failures: FailedChargeCounters::default(),
            row_reader: PlanRowReader::new(TableLookupSettings::default().unknown_reads_per_s),
        }
    }

    /// Sets the maximum number of reads of unknown values of a table in Redis, per second.
    pub fn set_max_unknown_row_reads_per_s(&mut self, per_s: u32) {
        self.row_reader = PlanRowReader::new(per_s);
    }

    /// Number of charges that the store failed to decide since the start, by kind of failure.
    pub fn failed_charge_counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ChargeError::all_kinds().map(|error| (error.name(), self.failures.count_of_kind(error)))
    }

    /// Number of charges since the start that the store failed to decide and this policy decided.
    pub fn policy_decided_charge_count(&self, policy: StoreFailurePolicy) -> u64 {
        self.failures.count_decided_by(policy)
    }
}
