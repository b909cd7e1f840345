//! Every answer is that of the reference model, field by field.

use proptest::prelude::*;
use tollkeeper::algorithm::State;

use super::model::Model;
use super::scenario::{WILD, config, scenario};

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_answer_is_that_of_the_reference(scenario in scenario(WILD), elsewhere in 0..4_usize) {
        let mut state = State::empty(scenario.limits[0].algorithm());
        let mut model = Model::new();
        let mut draws = 0;
        scenario.live(|limit, now, ask| {
            draws += 1;
            // With one in four histories some draws are refused by another limit.
            let ask = tollkeeper::algorithm::Ask { refused_elsewhere: elsewhere == 0 && draws % 3 == 0, ..ask };
            let level = state.draw(limit, now, ask);
            prop_assert_eq!(level, model.draw(limit, now, ask), "{:?} at {:?} under {:?}", ask, now, limit);
            Ok(level)
        })?;
    }
}
