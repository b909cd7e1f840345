//! Limit on the SETTINGS and GOAWAY frames of a connection, which make h2 visit each open stream.
//!
//! h2 does not bound SETTINGS and GOAWAY frames. A few are allowed, and more in proportion to the requests.

/// Maximum number of SETTINGS and GOAWAY frames of a connection without requests.
const MAX_SETTINGS_AND_GOAWAY_FRAMES: u64 = 64;
/// Number of requests that allow one more SETTINGS or GOAWAY frame.
const REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME: u64 = 64;

/// Kind of a frame that opens a request, or ends it with trailers.
pub(super) const HEADERS_FRAME_TYPE: u8 = 1;
const SETTINGS_FRAME_TYPE: u8 = 4;
const GOAWAY_FRAME_TYPE: u8 = 7;

/// Numbers of requests, and of SETTINGS and GOAWAY frames, on a connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FrameCounts {
    requests: u64,
    all_stream_frames: u64,
}

impl FrameCounts {
    pub(super) const fn new() -> Self {
        Self { requests: 0, all_stream_frames: 0 }
    }

    /// Counts a frame of this kind.
    pub(super) const fn count_frame(&mut self, kind: u8) {
        match kind {
            HEADERS_FRAME_TYPE => self.requests += 1,
            SETTINGS_FRAME_TYPE | GOAWAY_FRAME_TYPE => self.all_stream_frames += 1,
            _ => {}
        }
    }

    /// True if there were more SETTINGS and GOAWAY frames than allowed.
    pub(super) const fn exceeds_limit(&self) -> bool {
        self.all_stream_frames > MAX_SETTINGS_AND_GOAWAY_FRAMES + self.requests / REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_may_change_its_settings_now_and_then() {
        let mut counts = FrameCounts::new();
        for _ in 0..10_000 {
            (0..REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME).for_each(|_| counts.count_frame(HEADERS_FRAME_TYPE));
            counts.count_frame(SETTINGS_FRAME_TYPE);
            assert!(!counts.exceeds_limit());
        }
    }

    #[test]
    fn settings_and_goaway_frames_without_requests_are_bounded() {
        let mut counts = FrameCounts::new();
        for kind in [SETTINGS_FRAME_TYPE, GOAWAY_FRAME_TYPE].into_iter().cycle().take(64) {
            counts.count_frame(kind);
        }
        assert!(!counts.exceeds_limit());
        counts.count_frame(GOAWAY_FRAME_TYPE);
        assert!(counts.exceeds_limit());
    }
}
