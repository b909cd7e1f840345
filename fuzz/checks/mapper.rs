//! Mapping files of arbitrary bytes, and metric names: results are valid for Prometheus, and of bounded size.
//!
//! Input: the name as the last line, the file before it.

use tollkeeper::telemetry::metrics::MetricKind;
use tollkeeper::telemetry::metrics::mapper::Mapper;

pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (file, name) = text.rsplit_once('\n').unwrap_or((text, "ratelimit.service.rate_limit.a.b.total_hits"));
    let mapper = match Mapper::parse(file) {
        Ok(mapper) => mapper,
        Err(error) => return assert!(!error.to_string().contains('\n'), "{error}"),
    };
    let kinds = [MetricKind::Counter, MetricKind::Gauge, MetricKind::Histogram];
    let mapped = kinds.map(|kind| mapper.map_name(name, kind));
    // In another order, and from a new parse, results are the same.
    let again = Mapper::parse(file).expect("it was accepted before");
    for (kind, mapped) in kinds.into_iter().zip(&mapped).rev() {
        let (first, second) = (again.map_name(name, kind), again.map_name(name, kind));
        assert_eq!((format!("{first:?}"), format!("{second:?}")), (format!("{mapped:?}"), format!("{mapped:?}")));
    }
    for mapped in mapped.iter().flatten() {
        assert!(is_name(&mapped.name), "{:?}", mapped.name);
        assert!(mapped.labels.iter().all(|(label, _)| is_name(label)), "{:?}", mapped.labels);
        // A template has 1024 bytes, and 16 references at most.
        let max_bytes = 1025 + 16 * name.len();
        let values = mapped.labels.iter().map(|(_, value)| value);
        assert!(mapped.labels.len() <= 32 && values.chain([&mapped.name]).all(|text| text.len() <= max_bytes));
        assert!(mapped.scale.is_finite());
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !text.is_empty() && text.chars().all(is_part) && !text.starts_with(|c: char| c.is_ascii_digit())
}
