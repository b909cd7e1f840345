//! Threads that send metrics: to statsd, and to an OpenTelemetry collector.
//!
//! They have a lower priority than decisions, and nothing waits for them. A server that is unreachable costs a log line
//! per minute. The thread of statsd opens its socket (TCP or UDP) when it is first used and again after an error; it
//! also removes metrics that are no longer used. `telemetry::metrics::statsd` builds its packets, `limit_registry` says
//! which metrics are unused.
//!
//! Decides: intervals and failures of statsd and OTLP metrics.
//! Decides: how long the end waits for them (`LAST_WORK_TIMEOUT`); sweeps of unused series.

use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use regex::Regex;
use tokio::sync::oneshot;

use crate::base::clock::Clock;
use crate::base::threads;
use crate::serve::metrics_collector::MetricsCollector;
use crate::settings::metrics::{MetricsSettings, Mogrifier, StatsdProtocol, StatsdServer, StatsdTransport};
use crate::settings::otlp_metrics::OtlpMetricsSettings;
use crate::settings::problem::UnusableSetting;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::metrics::statsd::{NameRewrite, StatsdEncoder, StatsdFormat};
use crate::telemetry::otlp_metrics::{BlockingMetricExporter, OtlpMetricsOptions};

/// Handle to a thread of low priority that works once in each interval.
#[derive(Debug)]
pub(super) struct PeriodicThread {
    stop: mpsc::Sender<oneshot::Sender<()>>,
    _thread: JoinHandle<()>,
}

/// Maximum time of the work at the end.
const LAST_WORK_TIMEOUT: Duration = Duration::from_secs(1);

impl PeriodicThread {
    fn start(name: &str, interval: Duration, mut work: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel::<oneshot::Sender<()>>();
        let run = move || {
            threads::lower_thread_priority();
            loop {
                let stopping = match stopped.recv_timeout(interval) {
                    Ok(done) => Some(done),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                work();
                if let Some(done) = stopping {
                    // The receiver is gone if the timeout has expired.
                    let _ = done.send(());
                    return;
                }
            }
        };
        Ok(Self { stop, _thread: thread::Builder::new().name(name.to_owned()).spawn(run)? })
    }

    /// Sends metrics to `receiver` a last time, for at most a second, and stops the thread.
    pub(super) async fn send_last_metrics(self, receiver: &'static str) {
        let (done, finished) = oneshot::channel();
        if self.stop.send(done).is_ok() && tokio::time::timeout(LAST_WORK_TIMEOUT, finished).await.is_err() {
            tracing::warn!("last metrics not sent: the {receiver} takes longer than 1 s");
        }
    }
}

/// Encoder and socket for one statsd server.
struct StatsdClient {
    encoder: StatsdEncoder,
    socket: StatsdSocket,
}

/// Interval at which statistics of limits that are no longer used are removed.
const UNUSED_METRICS_SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Starts the thread that reports to statsd, also if no server is configured: it removes unused metrics.
///
/// # Errors
/// The system has no thread.
pub(super) fn start_statsd_thread(
    settings: &MetricsSettings,
    collector: MetricsCollector,
) -> io::Result<PeriodicThread> {
    let mut servers: Vec<_> = settings.statsd.iter().map(|server| StatsdClient::new(server, &settings.tags)).collect();
    let interval = if servers.is_empty() { UNUSED_METRICS_SWEEP_INTERVAL } else { settings.flush_interval };
    let mut since_sweep = Duration::ZERO;
    PeriodicThread::start("statsd", interval, move || {
        send_report(&collector, &mut servers);
        since_sweep += interval;
        if since_sweep >= UNUSED_METRICS_SWEEP_INTERVAL {
            since_sweep = Duration::ZERO;
            collector.service.decider.metrics.limits.remove_unused_stats();
        }
    })
}

fn send_report(collector: &MetricsCollector, servers: &mut [StatsdClient]) {
    static SEND_FAILURE_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    if servers.is_empty() {
        return;
    }
    collector.collect(&mut |family| servers.iter_mut().for_each(|server| server.encoder.add_family(&family)));
    for StatsdClient { encoder, socket } in servers {
        if let Err(error) = encoder.send_report(|packet| socket.send_packet(packet))
            && let Some(suppressed) = SEND_FAILURE_LOG_THROTTLE.allow(Clock::System.now())
        {
            let server = socket.format_address();
            tracing::warn!(server, suppressed, "metrics not sent: {error} (check STATSD_HOST and STATSD_PORT)");
        }
    }
}

impl StatsdClient {
    fn new(server: &StatsdServer, tags: &[(String, String)]) -> Self {
        let (transport, format) = match &server.protocol {
            StatsdProtocol::Tcp => (StatsdTransport::Tcp, StatsdFormat::Statsd),
            StatsdProtocol::Udp => (StatsdTransport::Udp, StatsdFormat::Statsd),
            StatsdProtocol::DogStatsd(mogrifiers) => {
                let rewrites = mogrifiers.iter().filter_map(compile_name_rewrite).collect();
                (StatsdTransport::Udp, StatsdFormat::DogStatsd(rewrites))
            }
        };
        Self {
            encoder: StatsdEncoder::new(format, tags.to_vec()),
            socket: StatsdSocket::new(server.host.clone(), server.port, transport),
        }
    }
}

/// Compiles a mogrifier. The settings have already checked its pattern.
fn compile_name_rewrite(mogrifier: &Mogrifier) -> Option<NameRewrite> {
    let Mogrifier { pattern, name, tags } = mogrifier;
    Some(NameRewrite { pattern: Regex::new(pattern).ok()?, name: name.clone(), tags: tags.clone() })
}

/// Socket to one statsd server, opened when it is first used. Blocks for at most [`IO_TIMEOUT`] per call.
#[derive(Debug)]
struct StatsdSocket {
    host: String,
    port: u16,
    transport: StatsdTransport,
    open: Option<OpenStatsdSocket>,
}

#[derive(Debug)]
enum OpenStatsdSocket {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// Maximum time to connect, and to write a packet.
const IO_TIMEOUT: Duration = Duration::from_secs(1);

impl StatsdSocket {
    /// Socket to `host:port`; resolves and opens nothing yet.
    fn new(host: String, port: u16, transport: StatsdTransport) -> Self {
        Self { host, port, transport, open: None }
    }

    /// Address of the server: `host:port`.
    fn format_address(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// Sends a packet of lines.
    ///
    /// # Errors
    /// Errors of the system, after which the next call opens a new socket.
    fn send_packet(&mut self, packet: &str) -> io::Result<()> {
        let sent = match self.ensure_connected()? {
            OpenStatsdSocket::Tcp(stream) => stream.write_all(packet.as_bytes()),
            // In a datagram, line ends separate lines; the last line has none.
            OpenStatsdSocket::Udp(socket) => socket.send(packet.trim_end_matches('\n').as_bytes()).map(drop),
        };
        if sent.is_err() {
            self.open = None;
        }
        sent
    }

    fn ensure_connected(&mut self) -> io::Result<&mut OpenStatsdSocket> {
        let socket = match self.open.take() {
            Some(socket) => socket,
            None => self.connect()?,
        };
        Ok(self.open.insert(socket))
    }

    fn connect(&self) -> io::Result<OpenStatsdSocket> {
        let no_address = || io::Error::new(io::ErrorKind::NotFound, "the host resolves to no address");
        let address: SocketAddr = (self.host.as_str(), self.port).to_socket_addrs()?.next().ok_or_else(no_address)?;
        match self.transport {
            StatsdTransport::Tcp => {
                let stream = TcpStream::connect_timeout(&address, IO_TIMEOUT)?;
                stream.set_write_timeout(Some(IO_TIMEOUT))?;
                Ok(OpenStatsdSocket::Tcp(stream))
            }
            StatsdTransport::Udp => {
                let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
                let socket = UdpSocket::bind(any)?;
                socket.set_write_timeout(Some(IO_TIMEOUT))?;
                socket.connect(address)?;
                Ok(OpenStatsdSocket::Udp(socket))
            }
        }
    }
}

/// Builds the exporter. Its certificates are read only now, not again when they change.
///
/// # Errors
/// Names the setting and the problem.
pub(super) fn build_metric_exporter(
    settings: &OtlpMetricsSettings,
    tags: &[(String, String)],
) -> Result<BlockingMetricExporter, UnusableSetting> {
    let collector = &settings.collector;
    let headers = settings.headers.iter().map(|(name, value)| (name.clone(), value.reveal().to_owned()));
    let options = OtlpMetricsOptions {
        collector: collector.build_otlp_options(threads::lower_thread_priority)?,
        headers: headers.collect(),
        is_compressed: settings.collector.is_compressed,
        temporality: settings.temporality,
        tags: tags.to_vec(),
        resource: collector.resource.clone(),
    };
    BlockingMetricExporter::new(&options, Clock::System.now()).map_err(|error| UnusableSetting {
        setting: collector.setting,
        shown: collector.endpoint.clone(),
        what: error.to_string(),
    })
}

/// Starts the thread that exports metrics over OTLP.
///
/// # Errors
/// The system has no thread.
pub(super) fn start_otlp_metrics_thread(
    mut exporter: BlockingMetricExporter,
    interval: Duration,
    collector: MetricsCollector,
) -> io::Result<PeriodicThread> {
    static EXPORT_FAILURE_LOG_THROTTLE: LogThrottle = LogThrottle::every(Duration::from_secs(60));
    PeriodicThread::start("otlp-metrics", interval, move || {
        let exported = exporter.export(Clock::System.now(), |emit| collector.collect(emit));
        if let Err(error) = exported
            && let Some(suppressed) = EXPORT_FAILURE_LOG_THROTTLE.allow(Clock::System.now())
        {
            let fix = "check OTEL_EXPORTER_OTLP_METRICS_ENDPOINT and the collector";
            tracing::warn!(error, suppressed, fix, "metrics not sent over OTLP: they are sent again");
        }
    })
}
