//! Environments of arbitrary text: they fail with one line for each setting, or give the same settings each time.
//!
//! Input: a line for each variable, `NAME=value`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use tollkeeper::settings::Settings;
use tollkeeper::settings::report;

pub(crate) fn check(data: &[u8]) {
    let variables: Vec<(OsString, OsString)> = data
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let equals = line.iter().position(|byte| *byte == b'=')?;
            let (name, value) = (line[..equals].to_vec(), line[equals + 1..].to_vec());
            Some((OsString::from_vec(name), OsString::from_vec(value)))
        })
        .collect();
    let read = || Settings::from_env(variables.clone().into_iter());
    match (read(), read()) {
        (Ok(settings), Ok(again)) => {
            assert_eq!(format!("{settings:?}"), format!("{again:?}"));
            assert!(settings.1.iter().all(|notice| is_line(&notice.to_string())), "{:?}", settings.1);
        }
        (Err(error), Err(again)) => {
            assert_eq!(error, again);
            assert!(!error.problems.is_empty(), "rejected without a reason");
            for problem in &error.problems {
                assert!(is_line(&problem.to_string()), "{problem:?}");
                let named = variables.iter().any(|(name, _)| name.to_str() == Some(&problem.name));
                // These names end in a part that the value of another variable defines.
                let name = problem.name.strip_prefix("DOG_STATSD_MOGRIFIER_").map_or(&*problem.name, |_| "");
                assert!(named || name.bytes().all(|b| b.is_ascii_uppercase() || b"_0123456789".contains(&b)));
            }
        }
        (one, other) => panic!("{one:?} and then {other:?}"),
    }
    for line in report::report_variables(variables.clone().into_iter()) {
        assert!(line.value.is_none_or(|value| is_line(&value) || value.is_empty()));
    }
    let _shown = report::list_effective_settings(variables.into_iter());
}

fn is_line(text: &str) -> bool {
    !text.is_empty() && !text.contains(char::is_control)
}
