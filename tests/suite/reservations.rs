//! ReservationPolicy: estimates that requests charge, and that the ends of their streams settle, in every store.

mod agreement;
mod eviction;
mod model;
mod protocol;
mod steps;
