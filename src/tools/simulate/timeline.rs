//! Counts over time, in a bounded number of equal spans.
//!
//! Spans are one second long at first. Each time that the traffic reaches beyond the last one, neighbours are joined,
//! so the length is a power of two in seconds.

use crate::base::clock::Time;

/// Maximum number of spans.
pub const MAX_SPANS: usize = 120;
/// Length of the first spans, in microseconds.
const INITIAL_SPAN_US: u64 = 1_000_000;

/// Counts over time.
#[derive(Clone, Debug)]
pub struct Timeline {
    start: Time,
    span_us: u64,
    spans: Vec<SpanCounts>,
}

/// Counts of one span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Requests.
    pub requests: u64,
    /// Rejected requests.
    pub rejected: u64,
}

impl Timeline {
    /// Creates an empty timeline that begins at `start`.
    pub const fn new(start: Time) -> Self {
        Self { start, span_us: INITIAL_SPAN_US, spans: Vec::new() }
    }

    /// Counts a request at `at`; one before the start counts in the first span.
    pub fn add_request(&mut self, at: Time, rejected: bool) {
        let since_us = at.since_us(self.start);
        let mut index = since_us / self.span_us;
        while index >= MAX_SPANS as u64 {
            self.join_neighbouring_spans();
            index = since_us / self.span_us;
        }
        let index = usize::try_from(index).unwrap_or(MAX_SPANS - 1);
        if index >= self.spans.len() {
            self.spans.resize(index + 1, SpanCounts::default());
        }
        let span = &mut self.spans[index];
        span.requests += 1;
        span.rejected += u64::from(rejected);
    }

    fn join_neighbouring_spans(&mut self) {
        let joined = self.spans.chunks(2).map(|pair| {
            pair.iter().fold(SpanCounts::default(), |sum, span| SpanCounts {
                requests: sum.requests + span.requests,
                rejected: sum.rejected + span.rejected,
            })
        });
        self.spans = joined.collect();
        self.span_us *= 2;
    }

    /// Joins spans until each is `span_us` long or longer, to compare with another timeline.
    pub fn widen_spans(&mut self, span_us: u64) {
        while self.span_us < span_us {
            self.join_neighbouring_spans();
        }
    }

    /// Start of the first span.
    pub const fn start_time(&self) -> Time {
        self.start
    }

    /// Length of a span, in microseconds.
    pub const fn span_length_us(&self) -> u64 {
        self.span_us
    }

    /// Counts of each span, up to the last one with a request.
    pub fn spans(&self) -> &[SpanCounts] {
        &self.spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_joined_and_no_request_is_lost() {
        let mut timeline = Timeline::new(Time::from_secs(1000));
        for second in 0..1000 {
            timeline.add_request(Time::from_secs(1000 + second), second % 4 == 0);
        }
        timeline.add_request(Time::from_secs(1), true);
        assert_eq!(timeline.span_length_us(), 16_000_000);
        assert_eq!(timeline.spans().len(), 63);
        assert_eq!(timeline.spans()[0], SpanCounts { requests: 17, rejected: 5 });
        assert_eq!(timeline.spans()[62], SpanCounts { requests: 8, rejected: 2 });
        assert_eq!(timeline.spans().iter().map(|span| span.requests).sum::<u64>(), 1001);
    }

    #[test]
    fn times_far_apart_stay_within_the_bound() {
        let mut timeline = Timeline::new(Time::from_secs(0));
        timeline.add_request(Time::from_secs(0), false);
        timeline.add_request(Time::from_micros(u64::MAX), true);
        assert!(timeline.spans().len() <= MAX_SPANS);
        assert_eq!(timeline.spans().iter().map(|span| span.requests).sum::<u64>(), 2);
    }
}
