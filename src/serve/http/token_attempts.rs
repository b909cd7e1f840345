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
pub(super) struct TokenAttempt {
    /// Address of the client; `None` if it has none.
    pub(super) peer: Option<IpAddr>,
    /// True if the token is the right one.
    pub(super) is_right: bool,
    /// Time of the attempt.
    pub(super) now: Instant,
}

/// Result of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenAttemptResult {
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
    pub(super) fn check_and_record_attempt(&self, attempt: TokenAttempt) -> TokenAttemptResult {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(attempts: &TokenAttempts, peer: &str, is_right: bool, now: Instant) -> TokenAttemptResult {
        attempts.check_and_record_attempt(TokenAttempt { peer: peer.parse().ok(), is_right, now })
    }

    #[test]
    fn right_token_is_refused_after_ten_wrong_ones_of_an_address_for_a_minute() {
        let (attempts, start) = (TokenAttempts::default(), Instant::now());
        let later = |seconds| start + Duration::from_secs(seconds);
        for second in 0..10 {
            assert_eq!(check(&attempts, "10.0.0.1", true, later(second)), TokenAttemptResult::Accepted);
            assert_eq!(check(&attempts, "10.0.0.1", false, later(second)), TokenAttemptResult::Wrong);
        }
        let refused = TokenAttemptResult::Refused(Duration::from_secs(30));
        assert_eq!(check(&attempts, "10.0.0.1", true, later(30)), refused);
        assert_eq!(check(&attempts, "10.0.0.1", false, later(30)), refused);
        assert_eq!(check(&attempts, "10.0.0.2", true, later(30)), TokenAttemptResult::Accepted);
        assert_eq!(check(&attempts, "10.0.0.1", true, later(60)), TokenAttemptResult::Accepted);
    }

    #[test]
    fn many_addresses_share_a_bound_that_leaves_this_machine_out() {
        let (attempts, now) = (TokenAttempts::default(), Instant::now());
        let mut wrong = 0;
        for address in 0..200 {
            wrong += u32::from(check(&attempts, &format!("10.0.0.{address}"), false, now) == TokenAttemptResult::Wrong);
        }
        assert_eq!(wrong, MAX_WRONG_TOKENS);
        assert!(attempts.0.lock().unwrap().by_address.len() <= MAX_WRONG_TOKENS as usize);
        assert!(matches!(check(&attempts, "10.0.1.1", true, now), TokenAttemptResult::Refused(_)));
        assert_eq!(check(&attempts, "127.0.0.1", true, now), TokenAttemptResult::Accepted);
        for last in 0..10 {
            assert_eq!(check(&attempts, &format!("127.0.0.{last}"), false, now), TokenAttemptResult::Wrong);
        }
        assert!(matches!(check(&attempts, "127.0.0.99", false, now), TokenAttemptResult::Refused(_)));
        assert!(matches!(check(&attempts, "::1", true, now), TokenAttemptResult::Refused(_)));
    }

    #[test]
    fn addresses_of_one_ipv6_network_are_bounded_as_one() {
        let (attempts, now) = (TokenAttempts::default(), Instant::now());
        for host in 0..10 {
            assert_eq!(check(&attempts, &format!("2001:db8::{host:x}"), false, now), TokenAttemptResult::Wrong);
        }
        assert!(matches!(check(&attempts, "2001:db8::ffff", true, now), TokenAttemptResult::Refused(_)));
        assert_eq!(check(&attempts, "2001:db8:0:1::1", true, now), TokenAttemptResult::Accepted);
    }
}
