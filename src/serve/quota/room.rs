//! Room for buckets: how many there may be, and how much of that one client gets.
//!
//! A client may have at most a fixed multiple of what is free: some places always stay free, and one that is alone may
//! still have most. The address of the connection tells clients apart: everything else can be forged.
//!
//! Decides: how many buckets proxies may have (`TOLLKEEPER_RLQS_MAX_BUCKETS`); one with a long id counts several times.
//! Decides: the part of the places that one stream, and one client address, may have.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;

use crate::base::sharded::lock_ignoring_poison;

/// A stream may have fewer places than this many times those that are free: four fifths of all if it is alone.
const STREAM_TIMES_FREE: usize = 4;
/// The same for the streams of a client address: nine tenths of all if it is alone.
const CLIENT_TIMES_FREE: usize = 9;
/// Bytes of an id for which a bucket takes one place: 64 MB of ids with the default of 100 000 places.
const ID_BYTES_OF_PLACE: usize = 640;

/// Places that a bucket with this id takes.
pub(super) fn count_places_of_id(id: &[u8]) -> usize {
    id.len().div_ceil(ID_BYTES_OF_PLACE).max(1)
}

/// Places of the buckets of all streams.
#[derive(Debug)]
pub(super) struct BucketRoom {
    most: usize,
    used: Mutex<UsedRoom>,
}

#[derive(Debug, Default)]
struct UsedRoom {
    buckets: usize,
    places: usize,
    places_by_client: HashMap<IpAddr, usize>,
}

/// True if one that has `own` of the `used` places may take one more.
pub(super) const fn leaves_room(own: usize, used: usize, most: usize, times_free: usize) -> bool {
    used < most && own < (most - used).saturating_mul(times_free)
}

/// The same for the holders of a key; `own` counts those of one client address.
pub(super) const fn leaves_room_for_other_clients(own: usize, used: usize, most: usize) -> bool {
    leaves_room(own, used, most, CLIENT_TIMES_FREE)
}

impl BucketRoom {
    /// Room of an empty service with `most` places.
    pub(super) fn new(most: usize) -> Self {
        Self { most, used: Mutex::default() }
    }

    /// Takes these places for a bucket of a stream that has `of_stream`; returns false if that leaves no room for others.
    pub(super) fn take(&self, client: IpAddr, of_stream: usize, places: usize) -> bool {
        let (used, most) = (&mut *lock_ignoring_poison(&self.used), self.most);
        let of_client = used.places_by_client.get(&client).copied().unwrap_or_default();
        // Whether there is room for the last of the places, as if the others were taken.
        let used_before = used.places + places - 1;
        let has_room = [(of_stream, STREAM_TIMES_FREE), (of_client, CLIENT_TIMES_FREE)]
            .iter()
            .all(|(own, times_free)| leaves_room(own + places - 1, used_before, most, *times_free));
        if has_room {
            used.buckets += 1;
            used.places += places;
            *used.places_by_client.entry(client).or_default() += places;
        }
        has_room
    }

    /// Gives the places of a bucket back.
    pub(super) fn give_back(&self, client: IpAddr, places: usize) {
        let used = &mut *lock_ignoring_poison(&self.used);
        used.buckets -= 1;
        used.places -= places;
        if let Some(of_client) = used.places_by_client.get_mut(&client) {
            *of_client -= places;
            if *of_client == 0 {
                used.places_by_client.remove(&client);
            }
        }
    }

    /// Number of buckets.
    pub(super) fn bucket_count(&self) -> usize {
        lock_ignoring_poison(&self.used).buckets
    }
}
