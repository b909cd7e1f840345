//! Metrics sent to statsd or DogStatsD: what was counted since the last time, a line each.
//!
//! Counters go as differences, and those that have not moved are left out. A time goes as a line for each bucket in
//! which something fell, with the number of them as the rate at which it was sampled: that is what receivers multiply
//! by, so a million calls are twenty lines. What could not be sent over TCP is sent with the next; what is sent over
//! UDP may be lost. All of this happens on a thread of its own: a server that is away costs decisions nothing.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use regex::Regex;

use super::family::{Family, MetricValue, Series};
use super::histogram::{BOUNDS_US, HistogramSnapshot};

/// Sends to one server.
#[derive(Debug)]
pub struct Sender {
    to: (String, u16),
    dialect: Dialect,
    tags: Vec<(String, String)>,
    line: Option<Line>,
    sent: HashMap<String, Sent>,
    round: u64,
    lines: Vec<Pending>,
}

/// How lines look, and what they travel by.
#[derive(Debug)]
pub enum Dialect {
    /// statsd over TCP.
    Tcp,
    /// statsd over UDP.
    Udp,
    /// DogStatsD over UDP, names rewritten by the first of these that matches.
    Dog(Vec<Rewrite>),
}

/// Rewrites names.
#[derive(Debug)]
pub struct Rewrite {
    /// Which names.
    pub pattern: Regex,
    /// The new name; `$1` is what the first group matched.
    pub name: String,
    /// Tags, likewise.
    pub tags: Vec<(String, String)>,
}

#[derive(Debug)]
enum Line {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// What was sent of a series.
#[derive(Debug)]
struct Sent {
    value: MetricValue,
    /// When it was last read.
    round: u64,
}

/// A line that waits to be sent, and what is known to be sent once it is.
#[derive(Debug)]
struct Pending {
    text: String,
    then: Option<(String, MetricValue)>,
}

/// As much fits into a packet on any network.
const PACKET_BYTES: usize = 1432;
/// The longest that a server may keep the thread waiting.
const PATIENCE: Duration = Duration::from_secs(1);

impl Sender {
    /// Sends to this host and port; nothing is resolved or opened yet.
    pub fn new(to: (String, u16), dialect: Dialect, tags: Vec<(String, String)>) -> Self {
        Self { to, dialect, tags, line: None, sent: HashMap::new(), round: 0, lines: Vec::new() }
    }

    /// Makes lines of what a family has to say.
    pub fn add(&mut self, family: &Family) {
        for series in &family.series {
            let Some(stats) = &series.stats else { continue };
            let before = self.sent.get_mut(stats).map(|sent| {
                sent.round = self.round;
                sent.value.clone()
            });
            match (&series.value, before) {
                (MetricValue::Counter(count), before) => {
                    let known = if let Some(MetricValue::Counter(known)) = before { known } else { 0 };
                    // A rule that was gone and has come back counts from 0.
                    let more = if *count >= known { count - known } else { *count };
                    if more > 0 {
                        self.line(series, stats, &format!("{more}|c"), true);
                    }
                }
                (MetricValue::Gauge(level), _) => self.line(series, stats, &format!("{level}|g"), false),
                (MetricValue::Histogram(times), before) => {
                    let known = if let Some(MetricValue::Histogram(known)) = before { known } else { Box::default() };
                    self.times(series, stats, times, &known);
                }
            }
        }
    }

    /// Sends the lines.
    ///
    /// # Errors
    /// Those of the system; what was not sent is made again the next time.
    pub fn send(&mut self) -> io::Result<()> {
        let lines = std::mem::take(&mut self.lines);
        let mut packet = String::new();
        let mut thens: Vec<(String, MetricValue)> = Vec::new();
        for Pending { text, then } in lines {
            if !packet.is_empty() && packet.len() + text.len() > PACKET_BYTES {
                self.send_packet(&mut packet, &mut thens)?;
            }
            packet.push_str(&text);
            thens.extend(then);
        }
        self.send_packet(&mut packet, &mut thens)?;
        let round = self.round;
        self.sent.retain(|_, sent| sent.round == round);
        self.round += 1;
        Ok(())
    }

    /// Where it sends to.
    pub fn to(&self) -> String {
        format!("{}:{}", self.to.0, self.to.1)
    }

    fn send_packet(&mut self, packet: &mut String, thens: &mut Vec<(String, MetricValue)>) -> io::Result<()> {
        if packet.is_empty() {
            return Ok(());
        }
        let sent = match self.open()? {
            Line::Tcp(stream) => stream.write_all(packet.as_bytes()),
            // Lines of a packet are parted, not ended, by line ends.
            Line::Udp(socket) => socket.send(packet.trim_end_matches('\n').as_bytes()).map(drop),
        };
        if let Err(error) = sent {
            self.line = None;
            return Err(error);
        }
        packet.clear();
        let round = self.round;
        self.sent.extend(thens.drain(..).map(|(stats, value)| (stats, Sent { value, round })));
        Ok(())
    }

    fn open(&mut self) -> io::Result<&mut Line> {
        let line = match self.line.take() {
            Some(line) => line,
            None => {
                let none = || io::Error::new(io::ErrorKind::NotFound, "the host has no address");
                let address = (self.to.0.as_str(), self.to.1).to_socket_addrs()?.next().ok_or_else(none)?;
                self.connect(address)?
            }
        };
        Ok(self.line.insert(line))
    }

    fn connect(&self, address: SocketAddr) -> io::Result<Line> {
        if matches!(self.dialect, Dialect::Tcp) {
            let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
            stream.set_write_timeout(Some(PATIENCE))?;
            return Ok(Line::Tcp(stream));
        }
        let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(any)?;
        socket.set_write_timeout(Some(PATIENCE))?;
        socket.connect(address)?;
        Ok(Line::Udp(socket))
    }

    fn times(&mut self, series: &Series, stats: &str, times: &HistogramSnapshot, known: &HistogramSnapshot) {
        for (bucket, (count, known)) in times.counts.iter().zip(known.counts).enumerate() {
            let more = count.saturating_sub(known);
            if more == 0 {
                continue;
            }
            let bound = BOUNDS_US.get(bucket).unwrap_or(&BOUNDS_US[BOUNDS_US.len() - 1]);
            #[expect(clippy::cast_precision_loss, reason = "a rate near enough is what a rate is")]
            let (ms, rate) = (*bound as f64 / 1e3, 1.0 / more as f64);
            let value = if more == 1 { format!("{ms}|ms") } else { format!("{ms}|ms|@{rate}") };
            self.line(series, stats, &value, true);
        }
    }

    fn line(&mut self, series: &Series, stats: &str, value: &str, remembers: bool) {
        let mut text = String::with_capacity(stats.len() + value.len() + 16);
        match &self.dialect {
            Dialect::Tcp | Dialect::Udp => {
                text.push_str(stats);
                for (name, value) in &self.tags {
                    let _ = write!(text, ".__{name}={value}");
                }
                let _ = writeln!(text, ":{value}");
            }
            Dialect::Dog(rewrites) => {
                let (name, mut tags) = rewritten(rewrites, stats);
                tags.extend(self.tags.iter().cloned());
                let tags: Vec<String> = tags.iter().map(|(name, value)| format!("{name}:{value}")).collect();
                let _ = write!(text, "{name}:{value}");
                let _ = match tags.is_empty() {
                    true => writeln!(text),
                    false => writeln!(text, "|#{}", tags.join(",")),
                };
            }
        }
        let then = remembers.then(|| (stats.to_owned(), series.value.clone()));
        self.lines.push(Pending { text, then });
    }
}

/// A name as the first rule that matches has it, and tags.
fn rewritten(rewrites: &[Rewrite], stats: &str) -> (String, Vec<(String, String)>) {
    let found = rewrites.iter().find_map(|rewrite| rewrite.pattern.captures(stats).map(|groups| (rewrite, groups)));
    let Some((rewrite, groups)) = found else { return (stats.to_owned(), Vec::new()) };
    let expand = |text: &str| {
        let mut expanded = String::new();
        groups.expand(text, &mut expanded);
        expanded
    };
    let tags = rewrite.tags.iter().map(|(name, value)| (expand(name), expand(value))).collect();
    (expand(&rewrite.name), tags)
}
