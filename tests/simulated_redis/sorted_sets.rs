//! Sorted sets: members in the order of their scores.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

/// Members with their scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SortedSet {
    scores: BTreeMap<Bytes, f64>,
    order: BTreeSet<Ranked>,
}

/// Member with its score, in the order of ranks.
#[derive(Clone, Debug)]
struct Ranked {
    score: f64,
    member: Bytes,
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        // Scores are no NaN; 0 equals -0.
        self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal).then_with(|| self.member.cmp(&other.member))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ranked {}

/// Interval of scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreRange {
    pub(crate) min: ScoreBound,
    pub(crate) max: ScoreBound,
}

/// End of an interval of scores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScoreBound {
    pub(crate) score: f64,
    pub(crate) is_exclusive: bool,
}

impl ScoreRange {
    fn contains(&self, score: f64) -> bool {
        let is_above = if self.min.is_exclusive { score > self.min.score } else { score >= self.min.score };
        let is_below = if self.max.is_exclusive { score < self.max.score } else { score <= self.max.score };
        is_above && is_below
    }
}

impl SortedSet {
    /// Number of members.
    pub fn len(&self) -> usize {
        self.scores.len()
    }

    /// Returns true if there are no members.
    pub fn is_empty(&self) -> bool {
        self.scores.is_empty()
    }

    /// Score of a member.
    pub fn score(&self, member: &[u8]) -> Option<f64> {
        self.scores.get(member).copied()
    }

    /// Members with their scores, lowest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&Bytes, f64)> {
        self.order.iter().map(|ranked| (&ranked.member, ranked.score))
    }

    /// Sets the score of a member; returns true if it is new.
    pub(crate) fn insert(&mut self, member: Bytes, score: f64) -> bool {
        // Small sets store -0 as 0.
        let score = score + 0.0;
        let is_new = !self.remove(&member);
        self.order.insert(Ranked { score, member: member.clone() });
        self.scores.insert(member, score);
        is_new
    }

    /// Removes a member; returns true if it was there.
    pub(crate) fn remove(&mut self, member: &Bytes) -> bool {
        let Some(score) = self.scores.remove(member) else { return false };
        self.order.remove(&Ranked { score, member: member.clone() })
    }

    /// Members in a range of scores, lowest first.
    pub(crate) fn in_range(&self, range: ScoreRange) -> impl DoubleEndedIterator<Item = (&Bytes, f64)> {
        self.iter().filter(move |(_, score)| range.contains(*score))
    }

    /// Removes these members and returns their number.
    pub(crate) fn remove_all(&mut self, members: &[Bytes]) -> usize {
        members.iter().filter(|member| self.remove(member)).count()
    }
}
