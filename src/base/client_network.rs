//! Which addresses count as one client: those that one client can have.
//!
//! Decides: which addresses are one (IPv6 /64, IPv4-mapped).

use std::net::{IpAddr, Ipv6Addr};

/// Returns the addresses that one client can have, by their first: an IPv4 address, or the /64 network of an IPv6 one.
pub fn client_network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        ip @ IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}
