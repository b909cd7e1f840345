//! IP networks, and the addresses that values are.
//!
//! An IPv4-mapped IPv6 address or network (`::ffff:10.0.0.0/104`) is the IPv4 one. A value is an address if it is the
//! whole text of one, without a port, brackets or a zone.
//!
//! Decides: how `cidr` matches, host bits, IPv4-mapped addresses (`::ffff:10.1.2.3`); the longest address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Number of leading bits that an IPv4-mapped address has before its IPv4 address.
const IPV4_MAPPED_PREFIX_BITS: u8 = 96;

/// A network: all addresses that begin with these bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Network {
    /// Addresses of IPv4.
    V4 {
        /// First address.
        first: u32,
        /// Number of leading bits, 0 to 32.
        length: u8,
    },
    /// Addresses of IPv6.
    V6 {
        /// First address.
        first: u128,
        /// Number of leading bits, 0 to 128.
        length: u8,
    },
}

/// Reason why a text is not a network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkError {
    /// It is not an address with an optional length.
    NotANetwork,
    /// The address has bits beyond the length; the network that it is in.
    HostBits(Network),
}

impl Network {
    /// Parses `10.0.0.0/8`, `2001:db8::/32`, or an address alone.
    ///
    /// # Errors
    /// The text is not a network, or its address has bits beyond the length.
    pub fn parse(text: &str) -> Result<Self, NetworkError> {
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(length)),
            None => (text, None),
        };
        let length = match length {
            // `parse` would accept a sign.
            Some(digits) if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                Some(digits.parse::<u8>().map_err(|_| NetworkError::NotANetwork)?)
            }
            Some(_) => return Err(NetworkError::NotANetwork),
            None => None,
        };
        let address: IpAddr = address.parse().map_err(|_| NetworkError::NotANetwork)?;
        let written = match address {
            IpAddr::V4(address) => Self::V4 { first: address.to_bits(), length: length.unwrap_or(32) },
            IpAddr::V6(address) => Self::V6 { first: address.to_bits(), length: length.unwrap_or(128) }.unmap_ipv4(),
        };
        written.check_length_and_host_bits()
    }

    /// First address of the network.
    pub const fn first_address(self) -> NumericIpAddress {
        match self {
            Self::V4 { first, .. } => NumericIpAddress::V4(first),
            Self::V6 { first, .. } => NumericIpAddress::V6(first),
        }
    }

    /// Converts an IPv4-mapped network to the IPv4 one.
    fn unmap_ipv4(self) -> Self {
        match self {
            Self::V6 { first, length: length @ IPV4_MAPPED_PREFIX_BITS..=128 } => {
                match Ipv6Addr::from_bits(first).to_ipv4_mapped() {
                    Some(address) => Self::V4 { first: address.to_bits(), length: length - IPV4_MAPPED_PREFIX_BITS },
                    None => self,
                }
            }
            Self::V4 { .. } | Self::V6 { .. } => self,
        }
    }

    fn check_length_and_host_bits(self) -> Result<Self, NetworkError> {
        let network = match self {
            Self::V4 { length: 33.., .. } | Self::V6 { length: 129.., .. } => return Err(NetworkError::NotANetwork),
            Self::V4 { first, length } => Self::V4 { first: first & !host_mask_v4(length), length },
            Self::V6 { first, length } => Self::V6 { first: first & !host_mask_v6(length), length },
        };
        if network == self { Ok(self) } else { Err(NetworkError::HostBits(network)) }
    }
}

/// Mask of the bits of an IPv4 address beyond the first `length`.
pub fn host_mask_v4(length: u8) -> u32 {
    u32::MAX.checked_shr(length.into()).unwrap_or(0)
}

/// Mask of the bits of an IPv6 address beyond the first `length`.
pub fn host_mask_v6(length: u8) -> u128 {
    u128::MAX.checked_shr(length.into()).unwrap_or(0)
}

/// Writes `10.0.0.0/8`; an address alone without its length.
impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::V4 { first, length: 32 } => Ipv4Addr::from_bits(first).fmt(f),
            Self::V4 { first, length } => write!(f, "{}/{length}", Ipv4Addr::from_bits(first)),
            Self::V6 { first, length: 128 } => Ipv6Addr::from_bits(first).fmt(f),
            Self::V6 { first, length } => write!(f, "{}/{length}", Ipv6Addr::from_bits(first)),
        }
    }
}

/// An address as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumericIpAddress {
    /// Of IPv4.
    V4(u32),
    /// Of IPv6.
    V6(u128),
}

/// Length of the longest text of an address, in bytes.
const MAX_ADDRESS_TEXT_BYTES: usize = 45;

impl NumericIpAddress {
    /// Parses a value that is the text of an address; `None` if it is not.
    pub fn from_value(value: &[u8]) -> Option<Self> {
        if value.len() > MAX_ADDRESS_TEXT_BYTES {
            return None;
        }
        let address: IpAddr = std::str::from_utf8(value).ok()?.parse().ok()?;
        Some(match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address.to_bits()),
            IpAddr::V6(address) => Self::V6(address.to_bits()),
        })
    }
}

/// First and last address of a range.
type AddressRange<T> = (T, T);

/// Set of networks, of any size: a look-up is one binary search.
#[derive(Debug, Default)]
pub struct NetworkSet {
    /// Ranges that do not touch, ascending.
    v4: Vec<AddressRange<u32>>,
    v6: Vec<AddressRange<u128>>,
}

impl FromIterator<Network> for NetworkSet {
    fn from_iter<I: IntoIterator<Item = Network>>(networks: I) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for network in networks {
            match network {
                Network::V4 { first, length } => v4.push((first, first | host_mask_v4(length))),
                Network::V6 { first, length } => v6.push((first, first | host_mask_v6(length))),
            }
        }
        Self { v4: merge_ranges(v4), v6: merge_ranges(v6) }
    }
}

impl NetworkSet {
    /// Returns `true` if a network contains the address.
    pub fn contains(&self, address: NumericIpAddress) -> bool {
        match address {
            NumericIpAddress::V4(address) => is_in_ranges(&self.v4, address),
            NumericIpAddress::V6(address) => is_in_ranges(&self.v6, address),
        }
    }
}

fn merge_ranges<T: Ord + Copy>(mut ranges: Vec<AddressRange<T>>) -> Vec<AddressRange<T>> {
    ranges.sort_unstable();
    // Two networks overlap only if one contains the other.
    ranges.dedup_by(|later, kept| {
        let overlap = later.0 <= kept.1;
        if overlap {
            kept.1 = kept.1.max(later.1);
        }
        overlap
    });
    ranges.shrink_to_fit();
    ranges
}

fn is_in_ranges<T: Ord + Copy>(ranges: &[AddressRange<T>], address: T) -> bool {
    let after = ranges.partition_point(|(first, _)| *first <= address);
    after.checked_sub(1).is_some_and(|at| ranges[at].1 >= address)
}

/// Networks of many patterns: which patterns contain an address.
///
/// The addresses are cut into intervals in which the same networks contain every address. So a look-up is one binary
/// search, and an address in no network costs as much as one in many.
#[derive(Debug)]
pub struct NetworkIndex<I> {
    v4: Intervals<u32>,
    v6: Intervals<u128>,
    nodes: Vec<NetworkNode<I>>,
}

/// A network, with the patterns that have it.
#[derive(Debug)]
struct NetworkNode<I> {
    /// Lowest of `patterns` and of those of all networks around it.
    lowest: I,
    /// Ascending.
    patterns: Vec<I>,
    /// Smallest network around it.
    parent: Option<u32>,
}

/// Where intervals begin, ascending, and the smallest network that contains each.
#[derive(Debug)]
struct Intervals<T> {
    starts: Vec<T>,
    nodes: Vec<Option<u32>>,
}

impl<T> Default for Intervals<T> {
    fn default() -> Self {
        Self { starts: Vec::new(), nodes: Vec::new() }
    }
}

impl<T: Ord + Copy> Intervals<T> {
    fn begin_interval(&mut self, start: T, node: Option<u32>) {
        if self.starts.last() == Some(&start) {
            if let Some(last) = self.nodes.last_mut() {
                *last = node;
            }
        } else {
            self.starts.push(start);
            self.nodes.push(node);
        }
    }

    fn find(&self, address: T) -> Option<u32> {
        let after = self.starts.partition_point(|start| *start <= address);
        self.nodes[after.checked_sub(1)?]
    }
}

impl<I: Ord + Copy> NetworkIndex<I> {
    /// Indexes networks, each with its pattern.
    pub fn new(mut networks: Vec<(Network, I)>) -> Self {
        // By first address, an outer network before those inside it.
        networks.sort_unstable();
        let mut index = Self { v4: Intervals::default(), v6: Intervals::default(), nodes: Vec::new() };
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for (network, pattern) in networks {
            match network {
                Network::V4 { first, length } => v4.push(((first, first | host_mask_v4(length)), pattern)),
                Network::V6 { first, length } => v6.push(((first, first | host_mask_v6(length)), pattern)),
            }
        }
        index.v4 = index.cut_into_intervals(&v4, |last| last.checked_add(1));
        index.v6 = index.cut_into_intervals(&v6, |last| last.checked_add(1));
        index
    }

    /// Cuts the addresses at the bounds of networks, which are sorted and nested.
    fn cut_into_intervals<T: Ord + Copy>(
        &mut self,
        networks: &[(AddressRange<T>, I)],
        after: impl Fn(T) -> Option<T>,
    ) -> Intervals<T> {
        let mut intervals = Intervals::default();
        let mut open: Vec<(AddressRange<T>, u32)> = Vec::new();
        for (range, pattern) in networks {
            if let Some((last, node)) = open.last()
                && last == range
            {
                let node = &mut self.nodes[*node as usize];
                node.patterns.push(*pattern);
                node.lowest = node.lowest.min(*pattern);
                continue;
            }
            self.end_networks_before(&mut open, &mut intervals, Some(range.0), &after);
            let parent = open.last().map(|(_, node)| *node);
            let around = parent.map(|node| self.nodes[node as usize].lowest);
            let lowest = around.map_or(*pattern, |around| around.min(*pattern));
            // Rule files are bounded far below 2^32 networks.
            let node = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
            self.nodes.push(NetworkNode { lowest, patterns: vec![*pattern], parent });
            intervals.begin_interval(range.0, Some(node));
            open.push((*range, node));
        }
        self.end_networks_before(&mut open, &mut intervals, None, &after);
        intervals
    }

    /// Ends the open networks that end before `start`; all of them if there is none.
    fn end_networks_before<T: Ord + Copy>(
        &self,
        open: &mut Vec<(AddressRange<T>, u32)>,
        intervals: &mut Intervals<T>,
        start: Option<T>,
        after: impl Fn(T) -> Option<T>,
    ) {
        while let Some(((_, last), node)) = open.last().copied()
            && start.is_none_or(|start| last < start)
        {
            open.pop();
            if let Some(next) = after(last) {
                intervals.begin_interval(next, self.nodes[node as usize].parent);
            }
        }
    }

    /// Returns the lowest pattern that contains the address.
    pub fn lowest_pattern(&self, address: NumericIpAddress) -> Option<I> {
        self.find(address).map(|node| self.nodes[node as usize].lowest)
    }

    /// Calls `each` with all patterns that contain the address; with some of them more than once.
    pub fn for_each_match(&self, address: NumericIpAddress, mut each: impl FnMut(I)) {
        let mut at = self.find(address);
        while let Some(node) = at {
            let node = &self.nodes[node as usize];
            node.patterns.iter().for_each(|pattern| each(*pattern));
            at = node.parent;
        }
    }

    /// Patterns that are the lowest for at least one address: those that no other pattern hides everywhere.
    pub(crate) fn reachable_patterns(&self) -> impl Iterator<Item = I> {
        let nodes = self.v4.nodes.iter().chain(&self.v6.nodes);
        nodes.filter_map(|node| node.map(|node| self.nodes[node as usize].lowest))
    }

    fn find(&self, address: NumericIpAddress) -> Option<u32> {
        match address {
            NumericIpAddress::V4(address) => self.v4.find(address),
            NumericIpAddress::V6(address) => self.v6.find(address),
        }
    }
}
