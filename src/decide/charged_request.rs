//! A request whose charges are made: what the answer and the records of its decision follow from.

use super::candidates::CandidateCharges;
use super::outcome::{DescriptorOutcome, LimitVerdicts};
use super::selected_request::SelectedRequest;
use super::status::DescriptorStatus;

/// A request with the outcomes of its charges, and the verdicts and statuses that follow from them.
#[derive(Clone, Copy)]
pub(super) struct ChargedRequest<'a, 'r, 'm> {
    pub(super) selected: &'a SelectedRequest<'a, 'r, 'm>,
    /// One for each selection.
    pub(super) outcomes: &'a [DescriptorOutcome],
    /// One for each selection.
    pub(super) statuses: &'a [DescriptorStatus<'r>],
    /// Charges of candidates, if the rules have any.
    pub(super) candidates: Option<&'a CandidateCharges>,
}

impl<'a> ChargedRequest<'a, '_, '_> {
    /// Verdicts on the descriptors.
    pub(super) fn limit_verdicts(&self) -> impl Iterator<Item = LimitVerdicts> + Clone + use<'a> {
        self.statuses.iter().map(|status| status.limit_verdicts)
    }
}
