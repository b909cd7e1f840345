//! ReservationPolicy: estimates that requests charge, and that the ends of their streams settle, in every store.

mod agreement;
mod bounds;
mod eviction;
mod model;
mod protocol;
mod redis_keys;
mod steps;
