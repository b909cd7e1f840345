//! `PROMETHEUS_MAPPER_YAML` is untrusted input: any file is rejected or maps within bounds.

use std::time::{Duration, Instant};

use tollkeeper::telemetry::metrics::MetricKind;
use tollkeeper::telemetry::metrics::mapper::Mapper;

/// First line of the error for an invalid file.
fn first_error_line(file: &str) -> String {
    Mapper::parse(file).map(|_| ()).unwrap_err().to_string()
}

fn mapping(lines: &str) -> String {
    format!("mappings:\n- {}\n", lines.replace('\n', "\n  "))
}

#[test]
fn mapping_follows_the_metric_type_in_any_order() {
    let file = mapping("match: a.*\nname: counted\nmatch_metric_type: counter");
    for first in [MetricKind::Counter, MetricKind::Gauge] {
        let mapper = Mapper::parse(&file).unwrap();
        mapper.map_name("a.b", first);
        assert_eq!(mapper.map_name("a.b", MetricKind::Counter).unwrap().name, "counted");
        assert_eq!(mapper.map_name("a.b", MetricKind::Gauge).unwrap().name, "a_b");
    }
}

#[test]
fn regex_is_validated_by_itself() {
    // Inside a group the pattern would be valid: `(?:a)|(?:b)`.
    for pattern in ["a)|(?:b", "a)(b", "("] {
        let error = first_error_line(&mapping(&format!("match: '{pattern}'\nmatch_type: regex\nname: n")));
        assert!(error.contains("is not a regular expression"), "{error}");
    }
}

#[test]
fn templates_are_bounded() {
    let references = "$1".repeat(17);
    let long = "x".repeat(1025);
    for template in [&references, &long] {
        let error = first_error_line(&mapping(&format!("match: '*'\nname: '{template}'")));
        assert!(error.contains("name is too long"), "{error}");
        let error = first_error_line(&mapping(&format!("match: '*'\nname: n\nlabels: {{ l: '{template}' }}")));
        assert!(error.contains("`l` is too long"), "{error}");
    }
    let labels: String = (0..33).map(|number| format!("l{number}: x, ")).collect();
    assert!(first_error_line(&mapping(&format!("match: '*'\nname: n\nlabels: {{ {labels} }}"))).contains("labels"));
    let template = "$1".repeat(16);
    let mapper = Mapper::parse(&mapping(&format!("match: '*'\nname: 'n{template}'"))).unwrap();
    assert_eq!(mapper.map_name("x", MetricKind::Counter).unwrap().name, format!("n{}", "x".repeat(16)));
}

#[test]
fn file_of_large_regexes_is_rejected_quickly() {
    const LONGEST: Duration = Duration::from_secs(60);
    let began = Instant::now();
    let error = first_error_line(&mapping("match: '(?:a{1000}){100}'\nmatch_type: regex\nname: n"));
    assert!(error.contains("too large"), "{error}");
    // Each regex is small enough, but there are too many of them.
    let one = "- match: '(?:a{100}){9}'\n  match_type: regex\n  name: n\n";
    let error = first_error_line(&format!("mappings:\n{}", one.repeat(15_000)));
    assert!(error.contains("mappings"), "{error}");
    assert!(began.elapsed() < LONGEST, "{:?}", began.elapsed());
}

#[test]
fn invalid_or_deeply_nested_yaml_is_rejected() {
    let nested = format!("mappings: {}", "[".repeat(500_000));
    let named = format!("mappings:\n- match: a\n  name: {}", "{a: ".repeat(100_000));
    let bomb: String = (1..40).fold("a0: &a0 [x]\n".to_owned(), |text, level| {
        format!("{text}a{level}: &a{level} [*a{0}, *a{0}, *a{0}, *a{0}]\n", level - 1)
    });
    for file in [&*nested, &named, &format!("{bomb}mappings: *a39\n"), "\u{0}", "mappings: 1", "- a", "&a [*a]"] {
        let error = first_error_line(file);
        assert!(!error.is_empty() && error.len() < 2000 && !error.contains('\n'), "{error}");
    }
}
