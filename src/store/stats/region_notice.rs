//! Notices about what a region may do, for pages, metrics and the log.

use std::fmt;
use std::time::Duration;

use crate::base::go_syntax::DurationText;

/// Notice about what a region may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionNotice {
    /// Another Redis has the name of this region.
    SecondRedis {
        /// Time since its last report.
        silent: Duration,
        /// Time until this region may use its parts if the other Redis reports no more.
        pause: Duration,
    },
    /// The Redis of this region has its identity from another one, and both are used.
    CopiedRedis {
        /// Time until this region may use its parts if only one is used from now on.
        pause: Duration,
    },
    /// Regions have another list.
    OtherLists {
        /// Their names.
        regions: Vec<String>,
        /// Time until this region may use its parts if these regions report no more.
        pause: Duration,
    },
    /// A list changed, or a pause because of another Redis ended, within the last minute.
    ListChanged,
    /// The Redis of this region is new, and other regions have not told yet that no list changed.
    NewRedis,
    /// The global Redis does not answer.
    CutOff {
        /// Time for which the region still has its parts.
        parts_left: Option<Duration>,
    },
    /// The region has been cut off for longer than it may use its parts.
    LeaseEnded,
    /// These regions have never reported to this global Redis.
    NeverReported(Vec<String>),
    /// These regions have not reported for a minute.
    NotSeen(Vec<String>),
    /// The clock of the global Redis jumped.
    GlobalClockJumped {
        /// Time until the limit with the longest period is granted hits again.
        pause: Duration,
    },
    /// The clock of the region's Redis jumped.
    RegionClockJumped {
        /// Time until the region may use its parts of the limit with the longest period.
        pause: Duration,
    },
}

impl RegionNotice {
    /// Names of all notices in pages and metrics.
    pub const NAMES: [&'static str; 11] = [
        "second_redis",
        "copied_redis",
        "other_lists",
        "list_changed",
        "new_redis",
        "cut_off",
        "lease_ended",
        "never_reported",
        "not_seen",
        "global_clock_jumped",
        "region_clock_jumped",
    ];

    /// Name in pages and metrics.
    pub const fn name(&self) -> &'static str {
        let index = match self {
            Self::SecondRedis { .. } => 0,
            Self::CopiedRedis { .. } => 1,
            Self::OtherLists { .. } => 2,
            Self::ListChanged => 3,
            Self::NewRedis => 4,
            Self::CutOff { .. } => 5,
            Self::LeaseEnded => 6,
            Self::NeverReported(_) => 7,
            Self::NotSeen(_) => 8,
            Self::GlobalClockJumped { .. } => 9,
            Self::RegionClockJumped { .. } => 10,
        };
        Self::NAMES[index]
    }

    /// Returns true if the region has less than its part because of it.
    pub const fn restricts_region(&self) -> bool {
        !matches!(self, Self::CutOff { .. } | Self::NotSeen(_))
    }

    /// Returns true if both tell the same, perhaps at other times.
    pub fn has_same_subject(&self, other: &Self) -> bool {
        self.name() == other.name() && self.regions() == other.regions()
    }

    /// Names of regions that it tells of.
    fn regions(&self) -> &[String] {
        match self {
            Self::OtherLists { regions, .. } | Self::NeverReported(regions) | Self::NotSeen(regions) => regions,
            _ => &[],
        }
    }
}

/// Parts of limits that a region does not use.
const PARTS_UNUSED_TEXT: &str = "this region uses neither its reserve nor its share of max_overshoot";

impl fmt::Display for RegionNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SecondRedis { silent, pause } => write_second_redis_notice(f, *silent, *pause),
            Self::CopiedRedis { pause } => write_copied_redis_notice(f, *pause),
            Self::OtherLists { regions, pause } => write_other_lists_notice(f, regions, *pause),
            Self::ListChanged => write!(
                f,
                "the regions or the Redis of one changed: {PARTS_UNUSED_TEXT} for one period of the limit, 60 s at least"
            ),
            Self::NewRedis => write!(
                f,
                "the Redis of this region is new and may follow another TOLLKEEPER_REGIONS: {PARTS_UNUSED_TEXT} for one period \
                 of the limit, 60 s at least"
            ),
            Self::CutOff { parts_left } => write_cut_off_notice(f, *parts_left),
            Self::LeaseEnded => write!(
                f,
                "the global Redis has not confirmed this region for TOLLKEEPER_REGION_LEASE, or never: {PARTS_UNUSED_TEXT} until \
                 it answers (a longer lease, or on_region_loss: local, lets a region go on)"
            ),
            Self::NeverReported(names) => write!(
                f,
                "{} never reported to this global Redis: the part of each is kept back (start them, or give all regions \
                 the same TOLLKEEPER_GLOBAL_REDIS_URL and CACHE_KEY_PREFIX)",
                names.join(", ")
            ),
            Self::NotSeen(names) => {
                write!(f, "{} has not reported to the global Redis for a minute", names.join(", "))
            }
            Self::GlobalClockJumped { pause } => write!(
                f,
                "the clock of the global Redis, or of this machine, jumped: on_region_loss decides here for one period \
                 of each limit, at most {} from now ({CLOCK_JUMP_ADVICE})",
                format_rounded_up(*pause)
            ),
            Self::RegionClockJumped { pause } => write!(
                f,
                "the clock of the Redis of this region, or of this machine, jumped, or that Redis lost its data: \
                 {PARTS_UNUSED_TEXT} for one period of each limit, at most {} from now ({CLOCK_JUMP_ADVICE})",
                format_rounded_up(*pause)
            ),
        }
    }
}

/// Advice on a clock that jumped.
const CLOCK_JUMP_ADVICE: &str = "keep the clock of the server with NTP, without steps";

fn write_second_redis_notice(f: &mut fmt::Formatter<'_>, silent: Duration, pause: Duration) -> fmt::Result {
    write!(
        f,
        "another Redis has the name of this region and last reported {} ago: {PARTS_UNUSED_TEXT} until the other has been silent \
         for its lease, {} from now at the earliest (if it is no longer used, wait; otherwise give each region its own \
         TOLLKEEPER_REGION and REDIS_URL)",
        format_rounded_up(silent),
        format_rounded_up(pause)
    )
}

fn write_copied_redis_notice(f: &mut fmt::Formatter<'_>, pause: Duration) -> fmt::Result {
    write!(
        f,
        "the Redis of this region is a copy of another that is used too, or was restored: {PARTS_UNUSED_TEXT} for {} (let all \
         replicas of the region use one REDIS_URL)",
        format_rounded_up(pause)
    )
}

fn write_other_lists_notice(f: &mut fmt::Formatter<'_>, regions: &[String], pause: Duration) -> fmt::Result {
    write!(
        f,
        "TOLLKEEPER_REGIONS differs in {}: {PARTS_UNUSED_TEXT} until all have one list, or those have been silent for their \
         lease, {} from now at the earliest (give the same list to all regions)",
        regions.join(", "),
        format_rounded_up(pause)
    )
}

fn write_cut_off_notice(f: &mut fmt::Formatter<'_>, parts_left: Option<Duration>) -> fmt::Result {
    f.write_str(
        "the global Redis does not answer: this region spends its grants and its reserve, then on_region_loss decides",
    )?;
    if let Some(left) = parts_left {
        write!(f, "; reserve and share of max_overshoot end in {} (TOLLKEEPER_REGION_LEASE)", format_rounded_up(left))?;
    }
    f.write_str(" (see the preceding connection errors)")
}

/// Formats a time, rounded up to seconds, and from ten minutes on to minutes.
fn format_rounded_up(duration: Duration) -> String {
    let unit_s = if duration.as_secs() < 600 { 1 } else { 60 };
    DurationText(Duration::from_secs((duration.as_secs() + 1).next_multiple_of(unit_s))).to_string()
}
