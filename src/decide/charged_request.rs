//! A request whose charges are made: what the answer and the records of its decision follow from.

use super::candidates::CandidateCharges;
use super::outcome::{DescriptorOutcome, LimitVerdicts};
use super::selected_request::SelectedRequest;

/// A request with the outcomes of its charges, and the verdicts that follow from them.
#[derive(Clone, Copy)]
pub(super) struct ChargedRequest<'a, 'r, 'm> {
    pub(super) selected: &'a SelectedRequest<'a, 'r, 'm>,
    /// One for each selection.
    pub(super) outcomes: &'a [DescriptorOutcome],
    /// One for each selection.
    pub(super) verdicts: &'a [LimitVerdicts],
    /// Charges of candidates, if the rules have any.
    pub(super) candidates: Option<&'a CandidateCharges>,
}
