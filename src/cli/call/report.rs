//! What became of the questions, as a table and a line.
//!
//! A bounded number of answers is shown; all are counted and timed. What the server wrote is made plain.

use crate::cli::client::Answer;
use crate::cli::print::{short, span, table};
use crate::cli::question::descriptor_text;
use crate::clock::micros;
use crate::pb::rate_limit_response::{Code, DescriptorStatus, RateLimit, rate_limit::Unit};
use crate::pb::{HeaderValue, RateLimitRequest, RateLimitResponse};
use crate::report::text::plain;

/// The most answers shown, the last one aside.
const MOST_SHOWN: u32 = 20;

/// The answers so far.
pub(super) struct Report {
    /// What was asked about, one for each status.
    descriptors: Vec<String>,
    /// How many answers are expected.
    count: u32,
    rows: Vec<Vec<String>>,
    shown: u32,
    /// The number of the answer that was shown last.
    last_shown: u32,
    /// The codes of the last answer.
    codes: Vec<i32>,
    last: Option<RateLimitResponse>,
    /// How often each overall code came.
    sums: Vec<(i32, u32)>,
    /// In microseconds.
    times: Vec<u32>,
}

impl Report {
    /// No answers yet, of `count` to come.
    pub(super) fn new(request: &RateLimitRequest, count: u32) -> Self {
        Self {
            descriptors: request.descriptors.iter().map(|descriptor| short(&descriptor_text(descriptor))).collect(),
            count,
            rows: Vec::new(),
            shown: 0,
            last_shown: 0,
            codes: Vec::new(),
            last: None,
            sums: Vec::new(),
            times: Vec::new(),
        }
    }

    /// Takes the next answer.
    pub(super) fn add(&mut self, answer: Answer) {
        let Answer { response, took } = answer;
        self.times.push(u32::try_from(micros(took)).unwrap_or(u32::MAX));
        match self.sums.iter_mut().find(|(code, _)| *code == response.overall_code) {
            Some((_, sum)) => *sum += 1,
            None => self.sums.push((response.overall_code, 1)),
        }
        let codes: Vec<i32> = response.statuses.iter().map(|status| status.code).collect();
        let is_new = self.count <= MOST_SHOWN || codes != self.codes || self.times.len() == 1;
        self.codes = codes;
        if is_new && self.shown < MOST_SHOWN {
            self.show(&response);
        }
        self.last = Some(response);
    }

    /// All that was seen; empty without an answer.
    pub(super) fn text(mut self) -> String {
        let Some(last) = self.last.take() else { return String::new() };
        if self.last_shown < self.number() {
            self.show(&last);
        }
        let headings = ["#", "DESCRIPTOR", "CODE", "LIMIT", "REMAINING", "RESET"];
        let skipped = usize::from(self.count == 1);
        let mut page = match self.rows.is_empty() {
            true => String::new(),
            false => table(&headings[skipped..], self.rows.into_iter().map(|row| row[skipped..].to_vec())),
        };
        page += &extras(&last);
        let sums: Vec<String> = self.sums.iter().map(|(code, sum)| format!("{sum} {}", code_text(*code))).collect();
        self.times.sort_unstable();
        let time = |share: usize| span(self.times[(self.times.len() * share).div_ceil(100) - 1].into());
        page += &match self.count {
            1 => format!("{} in {}\n", code_text(last.overall_code), time(100)),
            _ => format!("{}; {} median, {} p99, {} longest\n", sums.join(", "), time(50), time(99), time(100)),
        };
        page
    }

    /// The number of the last answer, from 1.
    fn number(&self) -> u32 {
        // `count` bounds it.
        u32::try_from(self.times.len()).unwrap_or(u32::MAX)
    }

    fn show(&mut self, response: &RateLimitResponse) {
        let number = self.number();
        if number > self.last_shown + 1 {
            let gap = ["...", "", "", "", "", ""];
            self.rows.push(gap.map(str::to_owned).into());
        }
        for (place, status) in response.statuses.iter().enumerate() {
            let number = if place == 0 { number.to_string() } else { String::new() };
            let descriptor = self.descriptors.get(place).cloned().unwrap_or_default();
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
    // A span that is negative or beyond all bounds comes from a strange server only.
    let reset = status.duration_until_reset.and_then(|span| span.try_into().ok()).unwrap_or_default();
    vec![code_text(status.code), limit_text(limit), status.limit_remaining.to_string(), span(micros(reset))]
}

/// `300 per 3 hours (name)`.
fn limit_text(limit: &RateLimit) -> String {
    let unit = Unit::try_from(limit.unit).map_or("?", |unit| unit.as_str_name()).to_ascii_lowercase();
    let period = match limit.unit_multiplier {
        None | Some(1) => unit,
        Some(count) => format!("{count} {unit}s"),
    };
    let name = if limit.name.is_empty() { String::new() } else { format!(" ({})", short(&limit.name)) };
    format!("{} per {period}{name}", limit.requests_per_unit)
}

fn code_text(code: i32) -> String {
    Code::try_from(code).map_or_else(|_| format!("code {code}"), |code| code.as_str_name().to_owned())
}

/// What the answer adds to the response and the request, a line each.
fn extras(response: &RateLimitResponse) -> String {
    let line = |what: &str, header: &HeaderValue| {
        let raw = String::from_utf8_lossy(&header.raw_value);
        let value = if header.value.is_empty() { raw.as_ref() } else { &header.value };
        format!("{what} {}: {}\n", plain(&header.key), short(value))
    };
    let mut lines = String::new();
    lines.extend(response.response_headers_to_add.iter().map(|header| line("header", header)));
    lines.extend(response.request_headers_to_add.iter().map(|header| line("request header", header)));
    if !response.raw_body.is_empty() {
        lines += &format!("body {}\n", short(&String::from_utf8_lossy(&response.raw_body)));
    }
    lines
}
