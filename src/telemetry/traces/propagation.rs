//! Trace context of a request's headers: W3C `traceparent`, or B3 in one header or several.
//!
//! Headers come from untrusted clients. A header that violates its specification is ignored, parsing allocates nothing,
//! and the first format that has a value wins. This process has no traced downstream calls, so contexts are only read.
//!
//! Decides: which headers continue a trace (`traceparent`, B3).

use std::str::FromStr;

use opentelemetry::trace::{SpanId, TraceId, TraceState};

/// Header formats that are read, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PropagationFormats {
    /// `traceparent` and `tracestate`, <https://www.w3.org/TR/trace-context/>.
    pub tracecontext: bool,
    /// `b3`, <https://github.com/openzipkin/b3-propagation>.
    pub b3: bool,
    /// `x-b3-traceid` and the other headers of the same specification.
    pub b3_multi: bool,
}

/// Trace context that the caller sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteParent {
    /// Trace, and the caller's span in it.
    pub ids: Option<(TraceId, SpanId)>,
    /// The caller's sampling decision; `None` leaves it to this process.
    pub sampled: Option<bool>,
}

/// Maximum length of `tracestate` in bytes, the minimum that W3C requires to propagate.
const MAX_TRACE_STATE_BYTES: usize = 512;

impl PropagationFormats {
    /// Reads the trace context from the headers; the default if there is none.
    pub fn read_remote_parent<'h>(self, header: &impl Fn(&'static str) -> Option<&'h [u8]>) -> RemoteParent {
        let parse = || {
            let w3c = || parse_traceparent(header("traceparent")?);
            let single = || parse_b3_single(header("b3")?);
            None.or_else(|| if self.tracecontext { w3c() } else { None })
                .or_else(|| if self.b3 { single() } else { None })
                .or_else(|| if self.b3_multi { parse_b3_multi(header) } else { None })
        };
        parse().unwrap_or_default()
    }
}

/// Copies `tracestate`; empty if it is too long.
pub fn copy_trace_state<'h>(header: &impl Fn(&'static str) -> Option<&'h [u8]>) -> Box<[u8]> {
    header("tracestate").filter(|bytes| bytes.len() <= MAX_TRACE_STATE_BYTES).unwrap_or_default().into()
}

/// Parses `tracestate`; empty if it is invalid.
pub fn parse_trace_state(bytes: &[u8]) -> TraceState {
    let text = std::str::from_utf8(bytes).ok();
    text.and_then(|text| TraceState::from_str(text).ok()).unwrap_or_default()
}

/// Parses `00-<trace>-<span>-<flags>`; later versions may have more fields.
fn parse_traceparent(text: &[u8]) -> Option<RemoteParent> {
    const TRACEPARENT_LENGTH: usize = 55;
    let (head, rest) = text.split_at_checked(TRACEPARENT_LENGTH)?;
    let is_lower = head.iter().all(|byte| !byte.is_ascii_uppercase());
    if !is_lower || head[2] != b'-' || head[35] != b'-' || head[52] != b'-' {
        return None;
    }
    let version = parse_hex(&head[..2])?;
    let has_valid_length = if version == 0 { rest.is_empty() } else { rest.is_empty() || rest[0] == b'-' };
    if version == 0xff || !has_valid_length {
        return None;
    }
    let flags = parse_hex(&head[53..])?;
    Some(RemoteParent {
        ids: Some(parse_trace_and_span_ids(&head[3..35], &head[36..52])?),
        sampled: Some(flags & 1 == 1),
    })
}

/// Parses `<trace>-<span>[-<decision>[-<parent>]]`, or a decision alone.
fn parse_b3_single(text: &[u8]) -> Option<RemoteParent> {
    if let Some(sampled) = parse_b3_sampling_decision(text) {
        return Some(RemoteParent { ids: None, sampled: Some(sampled) });
    }
    let mut parts = text.split(|byte| *byte == b'-');
    let ids = parse_trace_and_span_ids(parts.next()?, parts.next()?)?;
    let sampled = match parts.next() {
        None => None,
        Some(text) => Some(parse_b3_sampling_decision(text)?),
    };
    let has_valid_parent = parts.next().is_none_or(|parent| parent.len() == 16 && parse_hex(parent).is_some());
    (has_valid_parent && parts.next().is_none()).then_some(RemoteParent { ids: Some(ids), sampled })
}

/// Parses `x-b3-traceid` and the other headers of a trace.
fn parse_b3_multi<'h>(header: &impl Fn(&'static str) -> Option<&'h [u8]>) -> Option<RemoteParent> {
    let trace = header("x-b3-traceid");
    let ids = trace.and_then(|trace| parse_trace_and_span_ids(trace, header("x-b3-spanid")?));
    let debug = header("x-b3-flags") == Some(b"1");
    let sampled = if debug { Some(true) } else { header("x-b3-sampled").and_then(parse_b3_sampling_decision) };
    (ids.is_some() || sampled.is_some()).then_some(RemoteParent { ids, sampled })
}

/// Parses a B3 sampling decision; early senders wrote `true` and `false`.
fn parse_b3_sampling_decision(text: &[u8]) -> Option<bool> {
    match text {
        b"1" | b"d" | b"true" => Some(true),
        b"0" | b"false" => Some(false),
        _ => None,
    }
}

/// Parses a trace id of 16 or 32 digits and a span id of 16; neither may be 0.
fn parse_trace_and_span_ids(trace: &[u8], span: &[u8]) -> Option<(TraceId, SpanId)> {
    if ![16, 32].contains(&trace.len()) || span.len() != 16 {
        return None;
    }
    let (trace, span) = (parse_hex(trace)?, u64::try_from(parse_hex(span)?).ok()?);
    (trace != 0 && span != 0).then(|| (TraceId::from(trace), SpanId::from(span)))
}

/// Parses at most 32 hexadecimal digits.
fn parse_hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(number << 4 | u128::from(digit))
    })
}
