//! A request with the limits that decide it: what the steps after the selection work on.

use super::blocks::BlockMatch;
use super::decider::Decider;
use super::decision::DecisionContext;
use super::selection::Selection;
use crate::limit::request::Request;

/// A request, and the limits selected for its descriptors.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectedRequest<'a, 'r, 'm> {
    pub(super) decider: &'r Decider,
    pub(super) context: &'a DecisionContext<'r>,
    pub(super) request: &'a Request<'m>,
    /// One for each descriptor; none if the request is refused before its limits are selected.
    pub(super) selections: &'a [Selection<'r>],
    /// Blocks that reject the request whatever its limits decide.
    pub(super) blocked: Option<&'a BlockMatch>,
}
