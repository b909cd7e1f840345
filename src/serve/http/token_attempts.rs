//! Bound on wrong admin tokens per minute, of one client address and of all.
//!
//! While the bound is reached, no token is accepted, not even the right one: otherwise a client could go on guessing.
//! Clients of this machine, such as `kubectl port-forward`, are bounded as one address and apart from the others, so
//! that no other machine can lock operators out. The bound on all addresses also bounds the memory.
//!
//! Decides: how many wrong admin tokens are allowed.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::base::sharded::lock_ignoring_poison;

/// Maximum number of wrong tokens of an address in a window.
const MAX_WRONG_TOKENS_PER_ADDRESS: u32 = 10;
/// Maximum number of wrong tokens of all addresses of other machines in a window.
const MAX_WRONG_TOKENS: u32 = 100;
/// Time for which wrong tokens are counted.
const ATTEMPT_WINDOW: Duration = Duration::from_secs(60);

/// Wrong tokens of the last minute.
#[derive(Debug, Default)]
pub struct TokenAttempts(Mutex<WrongTokenWindow>);

/// One attempt of a client to authenticate with a token.
#[derive(Clone, Copy, Debug)]
pub struct TokenAttempt {
    /// Address of the client; `None` if it has none.
    pub peer: Option<IpAddr>,
    /// True if the token is the right one.
    pub is_right: bool,
    /// Time of the attempt.
    pub now: Instant,
}

/// Result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenAttemptResult {
    /// The token is right.
    Accepted,
    /// The token is wrong.
    Wrong,
    /// Too many tokens were wrong; no token is accepted for this time.
    Refused(Duration),
}

/// Counts of wrong tokens in the current minute.
#[derive(Debug, Default)]
struct WrongTokenWindow {
    /// Time of the first wrong token in the window.
    began: Option<Instant>,
    of_other_machines: u32,
    by_address: HashMap<IpAddr, u32>,
}

impl TokenAttempts {
    /// Decides whether an attempt is accepted, and counts it if the token is wrong.
    pub fn check_and_record_attempt(&self, attempt: TokenAttempt) -> TokenAttemptResult {
        let TokenAttempt { peer, is_right, now } = attempt;
        let mut window = lock_ignoring_poison(&self.0);
        let left = window.began.and_then(|began| ATTEMPT_WINDOW.checked_sub(now.saturating_duration_since(began)));
        if left.is_none_or(|left| left.is_zero()) {
            *window = WrongTokenWindow::default();
        }
        let address = attempt_key_of_address(peer);
        let of_address = window.by_address.get(&address).copied().unwrap_or(0);
        let is_other_machine = !address.is_loopback();
        if of_address >= MAX_WRONG_TOKENS_PER_ADDRESS
            || is_other_machine && window.of_other_machines >= MAX_WRONG_TOKENS
        {
            return TokenAttemptResult::Refused(left.unwrap_or(ATTEMPT_WINDOW));
        }
        if is_right {
            return TokenAttemptResult::Accepted;
        }
        window.began.get_or_insert(now);
        window.of_other_machines += u32::from(is_other_machine);
        window.by_address.insert(address, of_address + 1);
        TokenAttemptResult::Wrong
    }
}

/// Key under which an address is bounded: those of this machine as one, others by [`client_network`].
fn attempt_key_of_address(peer: Option<IpAddr>) -> IpAddr {
    peer.filter(|ip| !ip.is_loopback()).map_or(Ipv4Addr::LOCALHOST.into(), client_network)
}

/// Returns the addresses that one client can have, by their first: an IPv4 address, or the /64 network of an IPv6 one.
pub(super) fn client_network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        ip @ IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}
