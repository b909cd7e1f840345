//! How near the verdicts of a limiter came to an exact log's.
//!
//! Two questions, asked of one counter at a time. Did more pass in any period than the limit allows? And had an exact
//! sliding window log stood in its place and seen the same requests, which verdicts would have been others? The second
//! is how Cloudflare judged its sliding counter (0.003 % of requests wrongly allowed or limited). The log goes by its
//! own verdicts, so one that differs early may differ for a period; a fixed window and a bucket promise something else
//! than a log, and differ from it without being wrong.

use std::collections::VecDeque;
use std::ops::AddAssign;

/// A request that a limiter gave its verdict on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// When, in microseconds of any clock that does not go back.
    pub at_us: u64,
    /// What it asked for.
    pub hits: u64,
    /// Whether it passed.
    pub admitted: bool,
}

/// What became of a counter's requests, in hits unless it says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// All that was asked for.
    pub asked: u64,
    /// What passed.
    pub admitted: u64,
    /// The most that passed in any period, wherever it begins.
    pub most_in_a_period: u64,
    /// The most that passed in a period that begins at a multiple of it.
    pub most_in_a_window: u64,
    /// What passed, and would not have by the log.
    pub wrongly_admitted: u64,
    /// What was refused, and would have passed by the log.
    pub wrongly_refused: u64,
}

/// Of two counters of one limit: sums, and the greater of what is the most.
impl AddAssign for Judgement {
    fn add_assign(&mut self, other: Self) {
        self.asked += other.asked;
        self.admitted += other.admitted;
        self.most_in_a_period = self.most_in_a_period.max(other.most_in_a_period);
        self.most_in_a_window = self.most_in_a_window.max(other.most_in_a_window);
        self.wrongly_admitted += other.wrongly_admitted;
        self.wrongly_refused += other.wrongly_refused;
    }
}

/// Judges the verdicts on one counter, in the order of their time. `period_us` is not 0. Windows are aligned to 0 of
/// the clock of the verdicts.
pub fn judge(verdicts: &[Verdict], limit: u64, period_us: u64) -> Judgement {
    let mut judgement = Judgement::default();
    let (mut passed, mut log) = (Window::default(), Window::default());
    let (mut window, mut in_window) = (None, 0);
    for verdict in verdicts {
        let horizon = verdict.at_us.checked_sub(period_us);
        passed.forget(horizon);
        log.forget(horizon);
        judgement.asked += verdict.hits;
        if verdict.admitted {
            judgement.admitted += verdict.hits;
            passed.add(verdict);
            judgement.most_in_a_period = judgement.most_in_a_period.max(passed.hits);
            if window.replace(verdict.at_us / period_us) != Some(verdict.at_us / period_us) {
                in_window = 0;
            }
            in_window += verdict.hits;
            judgement.most_in_a_window = judgement.most_in_a_window.max(in_window);
        }
        let by_log = log.hits + verdict.hits <= limit;
        if by_log {
            log.add(verdict);
        }
        match (verdict.admitted, by_log) {
            (true, false) => judgement.wrongly_admitted += verdict.hits,
            (false, true) => judgement.wrongly_refused += verdict.hits,
            _ => {}
        }
    }
    judgement
}

/// What passed in the last period.
#[derive(Default)]
struct Window {
    entries: VecDeque<(u64, u64)>,
    hits: u64,
}

impl Window {
    /// Lets go of what is as old as `horizon`.
    fn forget(&mut self, horizon: Option<u64>) {
        while let (Some(horizon), Some((at, hits))) = (horizon, self.entries.front().copied())
            && at <= horizon
        {
            self.entries.pop_front();
            self.hits -= hits;
        }
    }

    fn add(&mut self, verdict: &Verdict) {
        self.entries.push_back((verdict.at_us, verdict.hits));
        self.hits += verdict.hits;
    }
}
