//! Room for buckets: how many there may be, how many bytes their ids may have, and how much of that one client gets.
//!
//! A client may have several times what is still free, so each leaves room for others, and one that is alone may have
//! most. The address of the connection tells clients apart: a stranger can invent everything else.
//!
//! Decides: how many buckets and bytes of ids proxies may have (`TOLLKEEPER_RLQS_MAX_BUCKETS`, `..._MAX_ID_BYTES`).
//! Decides: how much of what is bounded one stream, and one client address, may have.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;

use crate::base::sharded::lock_ignoring_poison;
use crate::settings::grpc::QuotaSettings;

/// How many times what is free a stream may have: four fifths of all if it is alone.
const STREAM_TIMES_FREE: usize = 4;
/// How many times what is free the streams of a client address may have: nine tenths of all if it is alone.
const CLIENT_TIMES_FREE: usize = 9;

/// Buckets, and the bytes of their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct BucketAmount {
    pub(super) buckets: usize,
    pub(super) id_bytes: usize,
}

/// A bound that leaves no room for a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// Of the number of buckets.
    Buckets,
    /// Of the bytes of ids.
    IdBytes,
}

/// Buckets of all streams.
#[derive(Debug)]
pub(super) struct BucketRoom {
    most: BucketAmount,
    used: Mutex<UsedRoom>,
}

#[derive(Debug, Default)]
struct UsedRoom {
    all: BucketAmount,
    by_client: HashMap<IpAddr, BucketAmount>,
}

/// True if one who has `own` of the `used` leaves room for others when it takes one more.
pub(super) const fn leaves_room(own: usize, used: usize, most: usize, times_free: usize) -> bool {
    used < most && own < (most - used).saturating_mul(times_free)
}

/// The same for the holders of a key, of one client address.
pub(super) const fn leaves_room_for_other_clients(own: usize, used: usize, most: usize) -> bool {
    leaves_room(own, used, most, CLIENT_TIMES_FREE)
}

impl BucketAmount {
    fn add(&mut self, id_bytes: usize) {
        self.buckets += 1;
        self.id_bytes += id_bytes;
    }

    fn remove(&mut self, id_bytes: usize) {
        self.buckets -= 1;
        self.id_bytes -= id_bytes;
    }
}

impl BucketRoom {
    /// Room of an empty service.
    pub(super) fn new(bounds: QuotaSettings) -> Self {
        let most = BucketAmount { buckets: bounds.buckets, id_bytes: bounds.id_bytes };
        Self { most, used: Mutex::default() }
    }

    /// Takes room for a bucket of a stream that has `of_stream`.
    ///
    /// # Errors
    /// The bound that leaves none.
    pub(super) fn take(&self, client: IpAddr, of_stream: BucketAmount, id_bytes: usize) -> Result<(), NoRoom> {
        let (used, most) = (&mut *lock_ignoring_poison(&self.used), self.most);
        let of_client = used.by_client.get(&client).copied().unwrap_or_default();
        for (own, times_free) in [(of_stream, STREAM_TIMES_FREE), (of_client, CLIENT_TIMES_FREE)] {
            if !leaves_room(own.buckets, used.all.buckets, most.buckets, times_free) {
                return Err(NoRoom::Buckets);
            }
            let used_bytes = used.all.id_bytes + id_bytes;
            if used_bytes > most.id_bytes || !leaves_room(own.id_bytes, used.all.id_bytes, most.id_bytes, times_free) {
                return Err(NoRoom::IdBytes);
            }
        }
        used.all.add(id_bytes);
        used.by_client.entry(client).or_default().add(id_bytes);
        Ok(())
    }

    /// Gives the room of a bucket back.
    pub(super) fn give_back(&self, client: IpAddr, id_bytes: usize) {
        let used = &mut *lock_ignoring_poison(&self.used);
        used.all.remove(id_bytes);
        if let Some(of_client) = used.by_client.get_mut(&client) {
            of_client.remove(id_bytes);
            if of_client.buckets == 0 {
                used.by_client.remove(&client);
            }
        }
    }

    /// Number of buckets.
    pub(super) fn bucket_count(&self) -> usize {
        lock_ignoring_poison(&self.used).all.buckets
    }
}
