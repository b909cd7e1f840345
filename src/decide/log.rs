//! Decision log: one record of each decision, which the server writes and every tool reads.
//!
//! [`record`] and [`header`] are the format, [`reader`] reads it. [`DecisionLog`] selects and encodes, a [`queue`] per
//! sink decouples decisions from I/O, and a `writer` per sink writes.
//!
//! A decision is logged if, for one of its descriptors, the rule or else the settings ask for its verdict, and the
//! sample contains the descriptor's key. The sample is a share of all keys, by a hash that all processes compute alike,
//! so that the log has all of a sampled key's decisions or none.
//!
//! A record is encoded once, in the thread of its decision, into a buffer that the thread reuses, and copied to the
//! queue of each sink. Sinks never hold up a decision: a full queue drops the record.
//!
//! Decides: which decisions are written to the decision log, of which keys (sample).
//! Decides: that a dropped record has a number (`seq`); the random `process` of a record.
//! Decides: when a header is written again after a reload.

pub mod record_field;
pub mod header;
pub mod record;
pub mod reader;
pub mod redis_stream;
pub mod value_form;
pub mod queue;
mod sink;
mod writer;

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use self::header::{HeaderReason, HeaderRecord, RuleSetRecord, SettingsRecord};
use self::record::DecisionRecord;
use self::value_form::ValueForm;
use self::writer::SinkWriterHandle;
use crate::base::clock::Clock;
use crate::base::random::random_u64;
use crate::limit::counter_path::CounterPath;
use crate::rules::rule::RuleLogging;
use crate::settings::Settings;
use crate::settings::decision_log::{DecisionLogSettings, LoggedDecisionKinds, SinkSettings};
use crate::settings::problem::UnusableSetting;
use crate::settings::store::StoreSettings;

/// Capacity of a thread's buffer that is kept, in bytes.
const MAX_KEPT_BUFFER_BYTES: usize = 64 * 1024;

thread_local! {
    static LINE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Decision log of a process.
#[derive(Debug)]
pub struct DecisionLog {
    /// Decisions that are logged.
    pub when: LoggedDecisionKinds,
    /// Keys whose decisions are logged.
    pub sample: KeySample,
    /// Form of values.
    pub values: ValueForm,
    process: String,
    zone: String,
    clock: Clock,
    store: &'static str,
    settings: SettingsRecord,
    last_seq: AtomicU64,
    has_written_header: AtomicBool,
    sinks: Vec<SinkWriterHandle>,
}

/// Store, settings and clock of the process, for the headers and times of its decision log.
#[derive(Clone, Debug)]
pub struct LogHeaderContext {
    /// Store of the counters: `memory`, `redis` or `memcache`.
    pub store: &'static str,
    /// Settings that change answers.
    pub settings: SettingsRecord,
    /// Source of the time.
    pub clock: Clock,
}

impl LogHeaderContext {
    /// Takes the store and the recorded settings from `settings`.
    pub fn new(settings: &Settings, clock: Clock) -> Self {
        let (decisions, log) = (&settings.decisions, settings.decision_log.as_ref());
        let recorded = SettingsRecord {
            shadow_mode: decisions.shadow_mode,
            quota_mode: decisions.quota_mode,
            stop_cache_key_increment_when_overlimit: decisions.stop_cache_key_increment_when_overlimit,
            merge_domains: settings.rules.merge_domains,
            calendar_months: decisions.calendar_months,
            log_max: decisions.log_max,
            on_store_error: settings.rules.on_store_error,
            max_replicas: settings.rules.max_replicas,
            regions: settings.store.number_of_regions(),
            when: log.iter().flat_map(|log| log.when.selector_words()).map(str::to_owned).collect(),
            sample: log.map_or(0.0, |log| log.sample),
            values: log.map(|log| log.values.name()).unwrap_or_default().to_owned(),
        };
        let store = match &settings.store {
            StoreSettings::Memory => "memory",
            StoreSettings::Redis(_) => "redis",
            StoreSettings::Memcache(_) => "memcache",
        };
        Self { store, settings: recorded, clock }
    }
}

/// Fields that the log adds to each record.
#[derive(Clone, Copy, Debug)]
pub struct RecordStamp<'l> {
    /// Id of the process.
    pub process: &'l str,
    /// Zone of the replica; empty if it has none.
    pub zone: &'l str,
    /// Number of the record.
    pub seq: u64,
    /// Current time in microseconds since the Unix epoch.
    pub now_us: u64,
}

/// Number of records of one sink since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordCounts {
    /// Name of the sink.
    pub sink: &'static str,
    /// Written.
    pub written: u64,
    /// Dropped because the queue was full.
    pub dropped: u64,
    /// Lost because the sink returned an error.
    pub failed: u64,
}

impl DecisionLog {
    /// Starts the writers of all sinks.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(settings: &DecisionLogSettings, values: ValueForm, facts: LogHeaderContext) -> io::Result<Self> {
        let process = format!("{:016x}", random_u64());
        let start = |sink: &SinkSettings| SinkWriterHandle::start(sink, settings, &process);
        let sinks = settings.sinks.iter().map(start).collect::<io::Result<_>>()?;
        let LogHeaderContext { store, settings: recorded, clock } = facts;
        Ok(Self {
            when: settings.when,
            sample: KeySample { share: settings.sample },
            values,
            process,
            zone: settings.zone.clone(),
            clock,
            store,
            settings: recorded,
            last_seq: AtomicU64::new(0),
            has_written_header: AtomicBool::new(false),
            sinks,
        })
    }

    /// Writes the record that `record` makes.
    pub fn write_decision<'a>(&'a self, record: impl FnOnce(RecordStamp<'a>) -> DecisionRecord<'a>) {
        let mut line = LINE_BUFFER.take();
        line.clear();
        let seq = self.last_seq.fetch_add(1, Ordering::Relaxed) + 1;
        let (process, zone) = (&*self.process, &*self.zone);
        let stamp = RecordStamp { process, zone, seq, now_us: self.clock.now().as_micros() };
        record(stamp).append_line(&mut line);
        for sink in &self.sinks {
            sink.queue.push_line(&line);
        }
        if line.capacity() <= MAX_KEPT_BUFFER_BYTES {
            LINE_BUFFER.set(line);
        }
    }

    /// Writes a line that is no decision; it has no number.
    pub fn write_line(&self, line: &[u8]) {
        self.sinks.iter().for_each(|sink| sink.queue.push_line(line));
    }

    /// Id of the process, and zone of the replica, as records have them.
    pub fn process_and_zone(&self) -> (&str, &str) {
        (&self.process, &self.zone)
    }

    /// Writes a header: that of the start, and later of a reload. It precedes the decisions by these rules.
    pub fn write_header(&self, rules: Option<RuleSetRecord>) {
        let event = if self.has_written_header.swap(true, Ordering::Relaxed) {
            HeaderReason::Reload
        } else {
            HeaderReason::Start
        };
        let header = Arc::new(HeaderRecord {
            event,
            process: self.process.clone(),
            seq: self.last_seq.load(Ordering::Relaxed),
            time_us: self.clock.now().as_micros(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            store: self.store.to_owned(),
            settings: self.settings.clone(),
            rules,
        });
        for sink in &self.sinks {
            sink.queue.push_header(Arc::clone(&header));
        }
    }

    /// Returns true if a header was written.
    pub fn has_written_header(&self) -> bool {
        self.has_written_header.load(Ordering::Relaxed)
    }

    /// Number of records by sink.
    pub fn counts_by_sink(&self) -> impl Iterator<Item = RecordCounts> {
        self.sinks.iter().map(|sink| {
            let counters = sink.queue.counters();
            let [written, dropped, failed] =
                [&counters.written, &counters.dropped, &counters.failed].map(|count| count.load(Ordering::Relaxed));
            RecordCounts { sink: sink.name, written, dropped, failed }
        })
    }

    /// Writes what waits, for at most `timeout`, and ends the log. Returns false if a sink takes longer.
    pub fn flush_and_end(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        self.sinks.iter().for_each(|sink| sink.queue.close());
        self.sinks.iter().filter(|sink| !sink.wait_until_written(deadline)).count() == 0
    }
}

/// Validates the key of hashed values and the destinations. Returns the form of values.
///
/// # Errors
/// Every problem.
pub fn check_sinks_and_build_value_form(settings: &DecisionLogSettings) -> Result<ValueForm, Vec<UnusableSetting>> {
    let problems: Vec<_> = settings.sinks.iter().flat_map(sink::find_sink_problems).collect();
    match ValueForm::new(settings) {
        Ok(values) if problems.is_empty() => Ok(values),
        Ok(_) => Err(problems),
        Err(problem) => Err(problems.into_iter().chain([problem]).collect()),
    }
}

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
