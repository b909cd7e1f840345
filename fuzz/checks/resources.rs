//! Responses of a control plane with arbitrary bytes: they fail with messages, or compile to the same rules each time.

use prost::Message as _;
use tollkeeper::base::pb::xds::DiscoveryResponse;
use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::xds::refused_domains::compile_resources;
use tollkeeper::rules::xds::resource::parse_resources;

pub(crate) fn check(data: &[u8]) {
    let Ok(mut response) = DiscoveryResponse::decode(data) else { return };
    let compiled = |response: &DiscoveryResponse| {
        let resources = parse_resources(response.resources.clone()).map_err(|errors| errors.join("\n"))?;
        compile_resources(&resources, &CompileOptions::default()).map_err(|problems| problems.to_string())
    };
    match compiled(&response) {
        Ok(first) => {
            response.resources.reverse();
            let again = compiled(&response).expect("the order does not matter");
            let lines = |domains| format_rlconfig(&RuleSet::new(domains));
            assert_eq!(lines(first.domains), lines(again.domains));
        }
        Err(problems) => assert!(!problems.is_empty(), "rejected without a reason"),
    }
}
