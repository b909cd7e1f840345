//! What this process may decide by itself, and what it leases for that on the way of its calls.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use super::call::Place;
use super::combine::{Drawings, Turn};
use super::eventual::{Admission, Id, Lending, Moment, Terms};
use super::lead::{Busy, lead};
use super::script::{Counted, Drawing};
use super::{Group, Shared};
use crate::clock::Time;
use crate::counter::Draw;
use crate::store::Drawn;

impl Shared {
    /// What may be leased on the counters of a group; `None`: they are strict.
    pub(super) fn lending(&self, group: &Group) -> Option<Lending> {
        let drawing = group.drawings.first()?;
        let terms = Terms::of(&drawing.counters, self.heart.replicas().slots()).filter(|_| !self.gives_time)?;
        // Limits too: what was charged under one must not be given out under another.
        let tags = drawing.counters.iter().fold(0_u128, |tags, Counted { limit, tag, .. }| {
            let amounts = u128::from(limit.requests_per_unit()) << 32 | u128::from(limit.capacity());
            tags.rotate_left(1) ^ tag ^ amounts.wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)
        });
        Some(Lending { id: Id { path: group.path, tags }, terms, counters: drawing.counters.clone() })
    }

    /// What a draw finds that this process may decide by itself.
    pub(super) fn answer_here(
        self: &Arc<Self>,
        group: &Group,
        draw: &Draw<'_>,
        lending: &Lending,
        now: Time,
    ) -> Option<Drawn> {
        let [drawing @ Drawing { trial: false, .. }] = &*group.drawings else { return None };
        let moment = self.moment(lending, now);
        match self.eventual.admit(lending, drawing, moment) {
            Admission::Here { found, ahead } => {
                if ahead {
                    self.lease_ahead(group, draw, lending, (now, moment.at));
                }
                Some(found)
            }
            Admission::Ask => None,
        }
    }

    fn moment(&self, lending: &Lending, now: Time) -> Moment {
        let (at, replicas) = (Instant::now(), self.heart.replicas());
        let may_share = lending.terms.share > 0 && replicas.usable(lending.terms.period_us, at);
        Moment { at, now: replicas.redis_time(at).unwrap_or(now), may_share, again: false }
    }

    /// Leases before it is needed, unless a call is in flight, which sees to that itself.
    fn lease_ahead(self: &Arc<Self>, group: &Group, draw: &Draw<'_>, lending: &Lending, (now, at): (Time, Instant)) {
        if let Turn::Lead(none) = self.combiner.enter(group.id, Drawings::new(), (now, at).into()) {
            let place = self.place(draw, (group.id, group.path), Some(lending.clone()), now);
            let busy = Busy::new(Arc::clone(self), group.id);
            tokio::spawn(lead(busy, place, none, at + self.timeout));
        }
    }

    /// How many hits to lease with a call that is about to be sent.
    pub(super) fn lease(&self, lending: &Lending, at: Instant) -> u64 {
        if !self.settle.has_room() {
            return 0;
        }
        let live = self.heart.replicas().live().map_or(1, NonZeroU32::get);
        self.eventual.lease(lending, at, u64::from(live))
    }

    /// Decides a draw that has waited for a call, if that has brought what it takes.
    pub(super) fn admit_again(&self, place: &Place, drawing: &Drawing) -> Option<Drawn> {
        // It may bring another limit than the draw that leads.
        let alike = |lending: &&Lending| !drawing.trial && drawing.counters == lending.counters;
        let lending = place.lending.as_ref().filter(alike)?;
        let moment = Moment { again: true, ..self.moment(lending, place.now) };
        match self.eventual.admit(lending, drawing, moment) {
            Admission::Here { found, .. } => Some(found),
            Admission::Ask => None,
        }
    }
}
