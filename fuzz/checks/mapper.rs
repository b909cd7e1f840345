//! Mapping files of any bytes, and names of metrics: what comes out is what Prometheus takes, and not much of it.
//!
//! Input: the name as the last line, the file before it.

use tollkeeper::telemetry::metrics::family::Kind;
use tollkeeper::telemetry::metrics::mapper::Mapper;

/// The most bytes that a name, or all labels with their values, may become.
const MOST_BYTES: usize = 64 << 10;

pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (file, name) = text.rsplit_once('\n').unwrap_or((text, "ratelimit.service.rate_limit.a.b.total_hits"));
    let mapper = match Mapper::parse(file) {
        Ok(mapper) => mapper,
        Err(error) => return assert!(!error.to_string().contains('\n'), "{error}"),
    };
    let kinds = [Kind::Counter, Kind::Gauge, Kind::Histogram];
    let mapped = kinds.map(|kind| mapper.map(name, kind));
    // Asked in another order, and anew, it says the same.
    let again = Mapper::parse(file).expect("it was accepted before");
    for (kind, mapped) in kinds.into_iter().zip(&mapped).rev() {
        let (first, second) = (again.map(name, kind), again.map(name, kind));
        assert_eq!((format!("{first:?}"), format!("{second:?}")), (format!("{mapped:?}"), format!("{mapped:?}")));
    }
    for mapped in mapped.iter().flatten() {
        assert!(is_name(&mapped.name), "{:?}", mapped.name);
        assert!(mapped.labels.iter().all(|(label, _)| is_name(label)), "{:?}", mapped.labels);
        let bytes = mapped.labels.iter().map(|(label, value)| label.len() + value.len()).sum::<usize>();
        assert!(mapped.name.len() <= MOST_BYTES && bytes <= MOST_BYTES, "{} and {bytes} bytes", mapped.name.len());
        assert!(mapped.scale.is_finite());
    }
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !text.is_empty() && text.chars().all(is_part) && !text.starts_with(|c: char| c.is_ascii_digit())
}
