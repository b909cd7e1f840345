//! Agreement of every result with the reference model, field by field.

use proptest::prelude::*;
use tollkeeper::limit::algorithm::state::State;

use super::model::Model;
use super::scenario::{WILD, config, scenario};

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_result_matches_the_reference_model(scenario in scenario(WILD), elsewhere in 0..4_usize, leased in 0..12_u64) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        let mut model = Model::new();
        let mut charges = 0;
        scenario.run(|limit, now, request| {
            charges += 1;
            // In one of four histories, another limit rejects some charges, and some hits are leased at times.
            let (rejected_elsewhere, leased) = (elsewhere == 0 && charges % 3 == 0, if charges % 2 == 0 { leased } else { 0 });
            let request = tollkeeper::limit::charge::ChargeRequest { rejected_elsewhere, leased, ..request };
            let result = state.charge(limit, now, request);
            prop_assert_eq!(result, model.charge(limit, now, request), "{:?} at {:?} under {:?}", request, now, limit);
            Ok(result)
        })?;
    }
}
