//! Rule files of arbitrary bytes: they fail with messages, or compile to the same rules each time.

use std::sync::Arc;

use tollkeeper::rules::compile::options::CompileOptions;
use tollkeeper::rules::compile::{RuleText, compile_texts};
use tollkeeper::rules::rule::rlconfig::format_rlconfig;
use tollkeeper::rules::rule::set::RuleSet;
use tollkeeper::rules::yaml::DocumentSelection;

pub(crate) fn check(data: &[u8]) {
    for documents in [DocumentSelection::All, DocumentSelection::FirstOnly] {
        let source = RuleText { name: Arc::from("f.yaml"), bytes: data.to_vec(), documents };
        let read = || compile_texts(std::slice::from_ref(&source), &CompileOptions::default());
        match read() {
            Ok(compiled) => {
                let again = read().expect("it was accepted before");
                assert_eq!(format!("{compiled:?}"), format!("{again:?}"));
                let names: Vec<_> = compiled.domains.iter().map(|domain| domain.name.clone()).collect();
                assert!(!names.is_empty(), "rules without a domain");
                let warnings = compiled.warnings.to_string();
                let rules = RuleSet::new(compiled.domains);
                assert!(names.iter().all(|name| rules.domain(name).is_some()), "{names:?}");
                assert_eq!(format_rlconfig(&rules), format_rlconfig(&RuleSet::new(again.domains)));
                assert!(warnings.len() < 1000 * (data.len() + 100), "{} bytes of warnings", warnings.len());
            }
            Err(problems) => {
                assert!(problems.errors().iter().next().is_some(), "rejected without a reason");
                let text = problems.to_string();
                assert!(!text.is_empty() && text.len() < 1000 * (data.len() + 100), "{} bytes of problems", text.len());
            }
        }
    }
}
