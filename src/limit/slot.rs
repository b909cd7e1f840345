//! Slots of a concurrent limit: how a request names the one that it takes, and later frees.
//!
//! A slot belongs to one stream of one Envoy. Its *id* is a hash of the holder (who the Envoy is) and of the values of
//! the trailing entries `slot`, which are the same when the stream ends. Each answer hands out a new *token*, which a
//! later entry `release` brings back: it says which answer the Envoy saw, so that a late release of an earlier attempt
//! frees nothing. `docs/concurrency.md` has the protocol.
//!
//! Nothing here knows a store: [`slot_table`](crate::limit::slot_table) has the slots of one counter.
//!
//! Decides: the token of a slot; the name of a stream without entries `slot`; the hash of a long value.
//! Decides: for how long (15 s) a released stream may not take a slot (`TOMBSTONE_US`).
//! Decides: Retry-After if no slot is free (`FULL_LIMIT_RETRY_AFTER_US`); the identity of an Envoy (`HolderId`).

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use crate::base::random::{random_id, random_u64_pair};

/// Key of the trailing entries that identify a stream.
pub const SLOT_KEY: &[u8] = b"slot";
/// Key of the trailing entry that frees a slot.
pub const RELEASE_KEY: &[u8] = b"release";
/// Value of `release`, and of the metadata of an answer, for a request that was rejected: it has no slot.
pub const TOKEN_OF_REJECTED_REQUEST: &str = "-";
/// Value of `release` for a request whose answer Envoy never saw, and of the metadata of a rejection whose slot the
/// store may have given out all the same.
pub const TOKEN_OF_UNANSWERED_REQUEST: &str = "?";

/// Time for which a release of an unknown slot keeps it from being taken, in microseconds: 15 s.
///
/// Longer than a store's timeout and the longest queueing together: by then the request that comes late is there.
pub const TOMBSTONE_US: u64 = 15_000_000;

/// Wait that a full limit advises, in microseconds: when a slot becomes free is not known.
pub const FULL_LIMIT_RETRY_AFTER_US: u64 = 1_000_000;

/// Identity of a slot among those of its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotId(pub u128);

/// Proof that an answer admitted a request to its slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SlotToken(pub u64);

/// Identity of the Envoy that holds slots: a hash of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u64);

impl HolderId {
    /// Identity of the holder with this name.
    pub fn from_name(name: &[u8]) -> Self {
        let digest = blake3::hash(name);
        let (first, _) = digest.as_bytes().split_first_chunk().unwrap_or((&[0; 8], &[]));
        Self(u64::from_le_bytes(*first))
    }
}

impl SlotId {
    /// Identity of the slot of `holder` that these values name.
    pub fn from_values<'v>(holder: HolderId, values: impl Iterator<Item = &'v [u8]>) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&holder.0.to_le_bytes());
        for value in values {
            hasher.update(&(value.len() as u64).to_le_bytes());
            hasher.update(value);
        }
        let digest = hasher.finalize();
        let (first, _) = digest.as_bytes().split_first_chunk().unwrap_or((&[0; 16], &[]));
        Self(u128::from_le_bytes(*first))
    }

    /// Identity of a slot that nothing names: only its token frees it.
    pub fn random() -> Self {
        Self(u128::from_be_bytes(random_id()))
    }
}

impl SlotToken {
    /// A token that no other answer has.
    pub fn random() -> Self {
        Self(random_u64_pair().0)
    }
}

/// What a call does with its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotAction {
    /// Takes it. The token is the new one.
    Acquire,
    /// Frees it if the token is its newest one.
    Release,
    /// Frees it whatever its token is, and keeps it from being taken later: Envoy saw no answer.
    ReleaseUnanswered,
    /// Does nothing: the request was rejected, so it has no slot.
    ReleaseRejected,
}

impl SlotAction {
    /// Returns true for all actions but [`SlotAction::Acquire`].
    pub const fn is_release(self) -> bool {
        match self {
            Self::Acquire => false,
            Self::Release | Self::ReleaseUnanswered | Self::ReleaseRejected => true,
        }
    }

    /// Name in the decision log.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::ReleaseUnanswered => "release_unanswered",
            Self::ReleaseRejected => "release_rejected",
        }
    }

    /// Returns the action of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        let all = [Self::Acquire, Self::Release, Self::ReleaseUnanswered, Self::ReleaseRejected];
        all.into_iter().find(|action| action.name() == name)
    }
}

/// Use of a slot by one descriptor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotUse {
    /// The slot.
    pub id: SlotId,
    /// Token that an acquire hands out, or that a release brings back.
    pub token: SlotToken,
    /// Envoy that holds the slot.
    pub holder: HolderId,
    /// What the call does with it.
    pub action: SlotAction,
}

impl SlotUse {
    /// A use of a new, free slot, for a descriptor that names none.
    pub fn unnamed() -> Self {
        let (id, token) = (SlotId::random(), SlotToken::random());
        Self { id, token, holder: HolderId(0), action: SlotAction::Acquire }
    }
}

/// Id of a slot and its token, as the text in metadata has them: in hexadecimal digits.
///
/// The id is in it so that a release without entries `slot` finds the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotIdWithToken {
    /// The slot.
    pub id: SlotId,
    /// Its token.
    pub token: SlotToken,
}

impl fmt::Display for SlotIdWithToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}{:016x}", self.id.0, self.token.0)
    }
}

impl SlotIdWithToken {
    fn parse(text: &[u8]) -> Option<Self> {
        let is_hex = text.len() == 48 && text.iter().all(u8::is_ascii_hexdigit);
        let (id, token) = std::str::from_utf8(text).ok().filter(|_| is_hex)?.split_at(32);
        let (id, token) = (u128::from_str_radix(id, 16).ok()?, u64::from_str_radix(token, 16).ok()?);
        Some(Self { id: SlotId(id), token: SlotToken(token) })
    }
}

/// Value of an entry `release`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseValue {
    /// The request was admitted, with this token.
    Admitted(SlotIdWithToken),
    /// The request was rejected. A value that no answer had counts as this: it can free nothing.
    Rejected,
    /// Envoy never saw an answer.
    Unanswered,
}

impl ReleaseValue {
    /// Reads the value of an entry.
    pub fn parse(value: &[u8]) -> Self {
        match value {
            value if value == TOKEN_OF_UNANSWERED_REQUEST.as_bytes() => Self::Unanswered,
            value => SlotIdWithToken::parse(value).map_or(Self::Rejected, Self::Admitted),
        }
    }
}

/// What became of the slot of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SlotChange {
    /// Nothing: the limit has no slots, is full, or only was asked.
    #[default]
    None,
    /// It was taken.
    Taken,
    /// It existed, and has a new token.
    Renewed,
    /// It was freed.
    Freed,
    /// It was unknown to a release, and cannot be taken for [`TOMBSTONE_US`].
    ReleasedEarly,
    /// It could not be taken, because its release came first.
    Late,
}

impl SlotChange {
    /// Name in the decision log; `None` for [`SlotChange::None`].
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Taken => Some("taken"),
            Self::Renewed => Some("renewed"),
            Self::Freed => Some("freed"),
            Self::ReleasedEarly => Some("released_early"),
            Self::Late => Some("late"),
        }
    }
}

/// Who makes a call, as far as slots are concerned.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotCaller<'r> {
    /// Envoy that makes the call.
    pub holder: CallingEnvoy<'r>,
    /// Uses of a recorded call, one for each descriptor, in place of entries `slot` and `release`: for a replay.
    pub recorded: &'r [SlotUse],
}

/// Envoy that makes a call.
#[derive(Clone, Copy, Debug, Default)]
pub enum CallingEnvoy<'r> {
    /// Nothing is known.
    #[default]
    Unknown,
    /// By the metadata `x-tollkeeper-holder`.
    Named(&'r [u8]),
    /// By its address: without a port, because both filters of an Envoy may have connections of their own.
    Address(IpAddr),
}

impl<'r> CallingEnvoy<'r> {
    /// Name of the holder; empty if nothing is known.
    pub fn name(self) -> Cow<'r, [u8]> {
        match self {
            Self::Unknown => Cow::Borrowed(b""),
            Self::Named(name) => Cow::Borrowed(name),
            Self::Address(address) => Cow::Owned(address.to_string().into_bytes()),
        }
    }
}
