//! Comparison of recorded answers with those of a replay under the recorded rules.

use serde::Serialize;
use smallvec::SmallVec;

use crate::decide::results::DescriptorResults;
use crate::tools::replay::recorded::RecordedRequest;
use crate::tools::replay::replayer::ReplayedAnswer;

/// Agreement of a replay with the record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verification {
    /// Decisions that counters made and that were compared.
    pub compared: u64,
    /// Compared decisions whose verdict is the recorded one, of the request and of every limit.
    pub agreed: u64,
    /// The first decision that differs: its process and number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<String>,
}

/// Admissions by the limits of a descriptor.
pub type Admissions = SmallVec<[bool; 8]>;

/// Returns the admissions by the limits of a replayed descriptor that decide.
pub fn admissions(descriptor: &DescriptorResults<'_, '_>) -> Admissions {
    descriptor.limits().filter(|limit| !limit.candidate).map(|limit| limit.result.admitted).collect()
}

impl Verification {
    /// Compares a replayed decision with its record.
    pub fn add(&mut self, recorded: &RecordedRequest, answer: ReplayedAnswer, replayed: &[Admissions]) {
        let Some(expected) = recorded.answer.filter(|expected| expected.repeatable) else { return };
        self.compared += 1;
        let of_limits = recorded.descriptors().iter().map(|descriptor| &descriptor.admitted);
        if !answer.failed && answer.over_limit == expected.rejected && of_limits.eq(replayed) {
            self.agreed += 1;
        } else if self.first_difference.is_none() {
            self.first_difference = Some(format!("process {}, decision {}", recorded.process, recorded.seq));
        }
    }
}
