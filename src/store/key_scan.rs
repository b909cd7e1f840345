//! Result of a scan for the counters of a domain.

/// Path of counters: a domain and its entries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CounterPath {
    /// The domain.
    pub domain: Vec<u8>,
    /// Key and value of each entry.
    pub entries: Vec<[Vec<u8>; 2]>,
    /// Indices of the entries whose value is a pattern that several values share.
    pub shared: Vec<usize>,
}

/// Result of a scan.
#[derive(Debug, Default)]
pub struct KeyScan {
    /// Paths that have counters, each once.
    pub paths: Vec<CounterPath>,
    /// True if all keys were visited.
    pub complete: bool,
    /// Number of keys of the domain whose path is truncated.
    pub truncated: usize,
}
