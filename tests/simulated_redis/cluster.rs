//! Slots of a cluster, as one of its nodes knows them, and redirections to other nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;

use crate::keyspace::Keyspace;
use crate::refusals::Refusal;
use crate::reply::{Failure, Reply};

/// Number of slots.
pub const HASH_SLOTS: u16 = 16384;

/// Address of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// Host name or IP address.
    pub host: String,
    /// Port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Slots in a row, and the node that owns them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotRange {
    /// First slot.
    pub first: u16,
    /// Last slot.
    pub last: u16,
    /// Address of the owner.
    pub owner: Address,
}

/// Slots as one node knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotMap {
    /// Address of this node.
    pub own: Address,
    /// Slots with an owner.
    pub ranges: Vec<SlotRange>,
    /// Own slots that migrate, with the node that gets them: keys that are not here are asked there.
    pub migrating: BTreeMap<u16, Address>,
    /// Slots that this node gets: it serves a client that sends ASKING.
    pub importing: BTreeSet<u16>,
}

/// State of a node that decides about a command beside its slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeState {
    /// The command follows ASKING.
    pub(crate) is_asking: bool,
    /// Too many nodes of the cluster are down.
    pub(crate) is_down: bool,
}

/// Returns the slot of a key: that of the text in its first braces, if there is any.
pub fn slot_of_key(key: &[u8]) -> u16 {
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    // CRC16/XMODEM.
    let crc = tag.unwrap_or(key).iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    });
    crc % HASH_SLOTS
}

impl SlotMap {
    /// Creates the map of a node in a cluster whose slots do not migrate.
    pub const fn new(own: Address, ranges: Vec<SlotRange>) -> Self {
        Self { own, ranges, migrating: BTreeMap::new(), importing: BTreeSet::new() }
    }

    fn owner(&self, slot: u16) -> Option<&Address> {
        self.ranges.iter().find(|range| (range.first..=range.last).contains(&slot)).map(|range| &range.owner)
    }

    /// Checks that this node serves the keys of a command.
    ///
    /// # Errors
    /// The keys are in several slots, or another node serves them.
    pub(crate) fn check(&self, keys: &[Bytes], state: NodeState, keyspace: &mut Keyspace) -> Result<(), Failure> {
        let Some(first) = keys.first() else { return Ok(()) };
        let slot = slot_of_key(first);
        let owner = self.owner(slot).ok_or(Failure::fixed("CLUSTERDOWN Hash slot not served"))?;
        if keys.iter().any(|key| slot_of_key(key) != slot) {
            return Err(Failure::fixed("CROSSSLOT Keys in request don't hash to the same slot"));
        }
        if state.is_down {
            return Err(Refusal::ClusterDown.failure());
        }
        let missing = keys.iter().filter(|key| keyspace.find(key).is_none()).count();
        let try_again = Failure::fixed("TRYAGAIN Multiple keys request during rehashing of slot");
        if *owner == self.own {
            return match self.migrating.get(&slot) {
                Some(_) if missing > 0 && missing < keys.len() => Err(try_again),
                Some(next) if missing > 0 => Err(Failure::new(format!("ASK {slot} {next}"))),
                _ => Ok(()),
            };
        }
        match self.importing.contains(&slot) && state.is_asking {
            true if keys.len() > 1 && missing > 0 => Err(try_again),
            true => Ok(()),
            false => Err(Failure::new(format!("MOVED {slot} {owner}"))),
        }
    }

    /// Returns the reply to CLUSTER SLOTS.
    pub(crate) fn slots_reply(&self) -> Reply {
        let range = |range: &SlotRange| {
            let node = vec![
                Reply::Bulk(range.owner.host.clone().into()),
                Reply::Integer(range.owner.port.into()),
                Reply::Bulk(node_id(&range.owner).into()),
                Reply::Array(Vec::new()),
            ];
            Reply::Array(vec![
                Reply::Integer(range.first.into()),
                Reply::Integer(range.last.into()),
                Reply::Array(node),
            ])
        };
        Reply::Array(self.ranges.iter().map(range).collect())
    }
}

/// Returns an id of 40 digits for the node at an address.
fn node_id(address: &Address) -> String {
    let digits: String = address.to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits:0<40.40}")
}
