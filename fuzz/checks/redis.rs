//! Replies of Redis: parsing of any bytes, cut anywhere by the network.

use std::num::NonZeroU16;

use bytes::BytesMut;
use smallvec::SmallVec;
use tollkeeper::limit::RegionConnection;
use tollkeeper::limit::algorithm::Algorithm;
use tollkeeper::limit::charge::ChargeRequest;
use tollkeeper::limit::period::{Period, Unit};
use tollkeeper::limit::request::Hits;
use tollkeeper::limit::{GlobalScope, Limit, LimitSpec, Scope};
use tollkeeper::settings::address::Endpoint;
use tollkeeper::store::charge::{OwnedCharge, OwnedCounter};
use tollkeeper::store::client::redis::discovery::parse_slot_ranges;
use tollkeeper::store::client::redis::error::ReplyError;
use tollkeeper::store::client::redis::hash_slot::HASH_SLOTS;
use tollkeeper::store::client::redis::resp::{self, Reply, decode_reply};
use tollkeeper::store::redis::key;
use tollkeeper::store::redis::script::replay_charges;

/// Maximum length of an input that is cut, since each piece is parsed from the beginning.
const MAX_CUT_BYTES: usize = 512;

pub(crate) fn check(data: &[u8]) {
    let mut input = BytesMut::from(data);
    let (replies, whole) = parse_all(&mut input);
    replies.iter().for_each(interpret);
    replay_all(data);
    if data.len() > MAX_CUT_BYTES {
        return;
    }
    let mut input = BytesMut::new();
    let (mut pieces, mut good) = (Vec::new(), true);
    for byte in data {
        input.extend_from_slice(&[*byte]);
        let (more, still_good) = parse_all(&mut input);
        pieces.extend(more);
        good = still_good;
        if !good {
            break;
        }
    }
    assert_eq!((pieces, good), (replies, whole));
}

/// Returns the replies, and `true` if no error ended the parse.
fn parse_all(input: &mut BytesMut) -> (Vec<Reply>, bool) {
    let mut replies = Vec::new();
    loop {
        match decode_reply(input) {
            Ok(Some(reply)) => replies.push(reply),
            Ok(None) => return (replies, true),
            Err(_) => return (replies, false),
        }
    }
}

fn interpret(reply: &Reply) {
    let seed = Endpoint::Tcp { host: "h".to_owned(), port: 1 };
    if let Some(announced) = parse_slot_ranges(reply, &seed) {
        let ranges = announced.ranges;
        assert!(ranges.iter().all(|range| range.first <= range.last && range.last < HASH_SLOTS), "{ranges:?}");
        let slots: usize = ranges.iter().map(|range| usize::from(range.last - range.first) + 1).sum();
        assert!(slots <= usize::from(HASH_SLOTS), "{ranges:?}");
    }
    if let Reply::Error(text) = reply {
        let _parsed = ReplyError::from_reply(text);
    }
    if let Some(bytes) = resp::reply_bytes(reply) {
        replay_all(bytes);
        let _path = key::parse_path("", bytes);
    }
    if let Reply::Array(parts) = reply {
        parts.iter().for_each(interpret);
    }
    let _number = resp::reply_integer(reply);
}

/// Parses the bytes as results of a script, for each algorithm and global limit, and for all together.
fn replay_all(bytes: &[u8]) {
    let counted = |(algorithm, scope)| {
        let plain = LimitSpec::new(algorithm, 100, Period::new(Unit::Minute, 1).expect("a minute"));
        let limit = Limit::new(&LimitSpec { scope, ..plain })
            .expect("a plain limit")
            .as_counted_in_region(RegionConnection::CutOff);
        OwnedCounter { limit, shadow: false, quota: false, tag: 0 }
    };
    let global = Some(Scope::Global(GlobalScope::new(NonZeroU16::MIN)));
    let kinds = [(Algorithm::FixedWindow, global), (Algorithm::TokenBucket, global)];
    let kinds = Algorithm::ALL.into_iter().map(|algorithm| (algorithm, None)).chain(kinds);
    let alone = kinds.clone().map(|kind| SmallVec::from_iter([counted(kind)]));
    let together = [kinds.map(counted).collect()];
    for counters in alone.chain(together) {
        let charge = |hits| OwnedCharge {
            counters: counters.clone(),
            request: ChargeRequest::new(hits, 1000),
            dry_run: false,
            void_from: None,
            slot: None,
        };
        let charges = [Hits::Charge(3), Hits::Peek, Hits::Refund(1), Hits::Charge(1 << 32)].map(charge);
        for replayed in [false, true].into_iter().flat_map(|has_leases| replay_charges(&charges, bytes, has_leases)) {
            assert_eq!((replayed.results.len(), replayed.states.len()), (charges.len(), counters.len()));
        }
    }
}
