//! Where metrics go, and how they look there.
//!
//! Any number of the three ways may be on at once: Prometheus comes for them, statsd and DogStatsD get them sent.

use std::path::PathBuf;
use std::time::Duration;

use super::address::Address;

/// Where metrics go.
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics {
    /// Whether nothing is counted, served or sent.
    pub is_off: bool,
    /// Where Prometheus gets them, if it does.
    pub prometheus: Option<Prometheus>,
    /// Where they are sent.
    pub sinks: Vec<Sink>,
    /// How often they are sent.
    pub flush_interval: Duration,
    /// Tags on all of them, by name: at most one of each.
    pub tags: Vec<(String, String)>,
    /// Whether limits have a label with their whole path.
    pub path_label: bool,
    /// The most names that requests may make.
    pub most_requested: usize,
    /// About how many keys `/top` counts in a minute; 0: none.
    pub top_keys: usize,
}

/// What Prometheus gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prometheus {
    /// Where to listen.
    pub address: Address,
    /// The path of the page; begins with a slash.
    pub path: String,
    /// A file that maps names, if there is one.
    pub mapper: Option<PathBuf>,
    /// Whether response times are milliseconds rather than seconds.
    pub milliseconds: bool,
}

/// A server that metrics are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sink {
    /// Its host.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// How it is spoken to.
    pub protocol: Protocol,
}

/// How a server is spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// statsd over TCP.
    Tcp,
    /// statsd over UDP.
    Udp,
    /// DogStatsD over UDP, with names rewritten by the first of these that matches.
    Dog(Vec<Mogrifier>),
}

/// A rule that rewrites names for DogStatsD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mogrifier {
    /// Which names it is for: a regular expression that was found to be one.
    pub pattern: String,
    /// The new name, in which `$1` stands for what the first group matched.
    pub name: String,
    /// Tags, likewise.
    pub tags: Vec<(String, String)>,
}
