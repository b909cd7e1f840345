//! Sends metrics to statsd every so often, and at the end; forgets those that nobody counts any more.
//!
//! It has a thread of its own that decisions go before. A server that is away is said now and then, and costs nothing
//! else.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use regex::Regex;
use tokio::sync::oneshot;

use crate::clock::Clock;
use crate::scrape::MetricsCollector;
use crate::settings::metrics::{MetricsSettings, Mogrifier, StatsdProtocol, StatsdServer};
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::metrics::statsd::{Dialect, Rewrite, Sender};
use crate::thread_priority;

/// The thread that sends.
#[derive(Debug)]
pub(super) struct StatsdReporter {
    stop: mpsc::Sender<oneshot::Sender<()>>,
    _thread: JoinHandle<()>,
}

/// What was counted for names that nobody uses any more is looked after this often.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// The longest that the last sending may take.
const LAST: Duration = Duration::from_secs(1);

impl StatsdReporter {
    /// Begins.
    pub(super) fn start(settings: &MetricsSettings, collector: MetricsCollector) -> io::Result<Self> {
        let senders: Vec<Sender> = settings.statsd.iter().map(|sink| sender(sink, &settings.tags)).collect();
        let interval = if senders.is_empty() { SWEEP_INTERVAL } else { settings.flush_interval };
        let (stop, stopped) = mpsc::channel();
        let work = move || {
            thread_priority::lower();
            run(&collector, senders, interval, &stopped);
        };
        let thread = thread::Builder::new().name("statsd".to_owned()).spawn(work)?;
        Ok(Self { stop, _thread: thread })
    }

    /// Sends once more and ends; waits for that a second at most.
    pub(super) async fn finish(self) {
        let (done, ended) = oneshot::channel();
        if self.stop.send(done).is_ok() && tokio::time::timeout(LAST, ended).await.is_err() {
            tracing::warn!("the last metrics were not sent: statsd takes too long");
        }
    }
}

fn run(
    collector: &MetricsCollector,
    mut senders: Vec<Sender>,
    interval: Duration,
    stop: &mpsc::Receiver<oneshot::Sender<()>>,
) {
    let mut since_sweep = Duration::ZERO;
    loop {
        let asked = match stop.recv_timeout(interval) {
            Ok(done) => Some(done),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        flush(collector, &mut senders);
        since_sweep += interval;
        if since_sweep >= SWEEP_INTERVAL {
            since_sweep = Duration::ZERO;
            collector.service.decider.metrics.limits.sweep();
        }
        if let Some(done) = asked {
            // Nobody waits if the time was over.
            let _ = done.send(());
            return;
        }
    }
}

fn flush(collector: &MetricsCollector, senders: &mut [Sender]) {
    static THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if senders.is_empty() {
        return;
    }
    collector.read(&mut |family| senders.iter_mut().for_each(|sender| sender.add(&family)));
    for sender in senders {
        if let Err(error) = sender.send()
            && let Some(suppressed) = THROTTLE.allow(Clock::System.now())
        {
            let to = sender.to();
            tracing::warn!(to, suppressed, "STATSD_HOST, STATSD_PORT: metrics can not be sent: {error}");
        }
    }
}

fn sender(sink: &StatsdServer, tags: &[(String, String)]) -> Sender {
    let dialect = match &sink.protocol {
        StatsdProtocol::Tcp => Dialect::Tcp,
        StatsdProtocol::Udp => Dialect::Udp,
        StatsdProtocol::DogStatsd(mogrifiers) => Dialect::Dog(mogrifiers.iter().filter_map(rewrite).collect()),
    };
    Sender::new((sink.host.clone(), sink.port), dialect, tags.to_vec())
}

/// Its pattern was found to be one when the settings were read.
fn rewrite(mogrifier: &Mogrifier) -> Option<Rewrite> {
    let Mogrifier { pattern, name, tags } = mogrifier;
    Some(Rewrite { pattern: Regex::new(pattern).ok()?, name: name.clone(), tags: tags.clone() })
}
