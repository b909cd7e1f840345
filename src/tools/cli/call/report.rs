//! Results of `call` as a table and a summary.
//!
//! A bounded number of responses is shown; all are counted and timed. Text of the server is escaped.

use crate::base::clock::micros;
use crate::base::pb::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
use crate::base::pb::{HeaderValue, RateLimitRequest, RateLimitResponse};
use crate::base::table::{NumberAlignment, format_table};
use crate::serve::report::text::plain;
use crate::tools::cli::print::{micros_text, truncated};
use crate::tools::cli::request_args::descriptor_text;
use crate::tools::cli::rpc_client::TimedResponse;

/// Maximum number of responses in the table, without the last one.
const MAX_SHOWN: u32 = 20;

/// Responses so far.
pub(super) struct CallSummary {
    /// Descriptors of the request, in the order of statuses.
    descriptors: Vec<String>,
    /// Expected number of responses.
    count: u32,
    rows: Vec<Vec<String>>,
    shown: u32,
    /// Number of the response that was shown last.
    last_shown: u32,
    /// Codes of the last response.
    codes: Vec<i32>,
    last: Option<RateLimitResponse>,
    /// Number of responses with each overall code.
    sums: Vec<(i32, u32)>,
    /// Latencies in microseconds.
    latencies_us: Vec<u32>,
}

impl CallSummary {
    /// Starts a report on `count` responses.
    pub(super) fn new(request: &RateLimitRequest, count: u32) -> Self {
        Self {
            descriptors: request.descriptors.iter().map(|descriptor| truncated(&descriptor_text(descriptor))).collect(),
            count,
            rows: Vec::new(),
            shown: 0,
            last_shown: 0,
            codes: Vec::new(),
            last: None,
            sums: Vec::new(),
            latencies_us: Vec::new(),
        }
    }

    /// Adds the next response.
    pub(super) fn add(&mut self, response: TimedResponse) {
        let TimedResponse { response, latency } = response;
        self.latencies_us.push(u32::try_from(micros(latency)).unwrap_or(u32::MAX));
        match self.sums.iter_mut().find(|(code, _)| *code == response.overall_code) {
            Some((_, sum)) => *sum += 1,
            None => self.sums.push((response.overall_code, 1)),
        }
        let codes: Vec<i32> = response.statuses.iter().map(|status| status.code).collect();
        let is_new = self.count <= MAX_SHOWN || codes != self.codes || self.latencies_us.len() == 1;
        self.codes = codes;
        if is_new && self.shown < MAX_SHOWN {
            self.show(&response);
        }
        self.last = Some(response);
    }

    /// Formats the report; empty without a response.
    pub(super) fn text(mut self) -> String {
        let Some(last) = self.last.take() else { return String::new() };
        if self.last_shown < self.number() {
            self.show(&last);
        }
        let headings = ["#", "DESCRIPTOR", "CODE", "LIMIT", "REMAINING", "RESET"];
        let skipped = usize::from(self.count == 1);
        let mut page = match self.rows.is_empty() {
            true => String::new(),
            false => format_table(
                &headings[skipped..],
                self.rows.into_iter().map(|row| row[skipped..].to_vec()),
                NumberAlignment::Left,
            ),
        };
        page += &extras(&last);
        let sums: Vec<String> = self.sums.iter().map(|(code, sum)| format!("{sum} {}", code_text(*code))).collect();
        self.latencies_us.sort_unstable();
        let time =
            |share: usize| micros_text(self.latencies_us[(self.latencies_us.len() * share).div_ceil(100) - 1].into());
        page += &match self.count {
            1 => format!("{} in {}\n", code_text(last.overall_code), time(100)),
            _ => format!("{}; {} median, {} p99, {} longest\n", sums.join(", "), time(50), time(99), time(100)),
        };
        page
    }

    /// Returns the number of the last response, from 1.
    fn number(&self) -> u32 {
        // `count` bounds it.
        u32::try_from(self.latencies_us.len()).unwrap_or(u32::MAX)
    }

    fn show(&mut self, response: &RateLimitResponse) {
        let number = self.number();
        if number > self.last_shown + 1 {
            let gap = ["...", "", "", "", "", ""];
            self.rows.push(gap.map(str::to_owned).into());
        }
        for (index, status) in response.statuses.iter().enumerate() {
            let number = if index == 0 { number.to_string() } else { String::new() };
            let descriptor = self.descriptors.get(index).cloned().unwrap_or_default();
            self.rows.push([vec![number, descriptor], status_cells(status)].concat());
        }
        self.shown += 1;
        self.last_shown = number;
    }
}

fn status_cells(status: &DescriptorStatus) -> Vec<String> {
    let Some(limit) = &status.current_limit else {
        return vec![code_text(status.code), "none".to_owned(), String::new(), String::new()];
    };
    // Only a misbehaving server sends a duration that is negative or out of range.
    let reset = status.duration_until_reset.and_then(|span| span.try_into().ok()).unwrap_or_default();
    vec![code_text(status.code), limit_text(limit), status.limit_remaining.to_string(), micros_text(micros(reset))]
}

/// Formats a limit: `300 per 3 hours (name)`.
fn limit_text(limit: &RateLimit) -> String {
    let unit = Unit::try_from(limit.unit).map_or("?", |unit| unit.as_str_name()).to_ascii_lowercase();
    let period = period_in_words(&unit, limit.unit_multiplier.unwrap_or(1));
    let name = if limit.name.is_empty() { String::new() } else { format!(" ({})", truncated(&limit.name)) };
    format!("{} per {period}{name}", limit.requests_per_unit)
}

fn code_text(code: i32) -> String {
    Code::try_from(code).map_or_else(|_| format!("code {code}"), |code| code.as_str_name().to_owned())
}

/// Formats the headers and the body in a response, one per line.
fn extras(response: &RateLimitResponse) -> String {
    let line = |what: &str, header: &HeaderValue| {
        let raw = String::from_utf8_lossy(&header.raw_value);
        let value = if header.value.is_empty() { raw.as_ref() } else { &header.value };
        format!("{what} {}: {}\n", printable(&header.key), truncated(value))
    };
    let mut lines = String::new();
    lines.extend(response.response_headers_to_add.iter().map(|header| line("header", header)));
    lines.extend(response.request_headers_to_add.iter().map(|header| line("request header", header)));
    if !response.raw_body.is_empty() {
        lines += &format!("body {}\n", truncated(&String::from_utf8_lossy(&response.raw_body)));
    }
    lines
}
