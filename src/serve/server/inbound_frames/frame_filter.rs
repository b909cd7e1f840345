//! Finds the frames of HTTP/2 in the bytes of a client (RFC 9113, 4.1 and 6.2), and limits SETTINGS and GOAWAY.
//!
//! All bytes pass, and in their number; only `:authority` in a HEADERS frame is overwritten (`authority.rs`). Held back is
//! the head of a frame, or a HEADERS frame, in which a read ends: h2 would have to wait for the rest, too. Malformed
//! frames pass unchanged, for h2 to report.
//!
//! h2 visits each open stream for a SETTINGS or GOAWAY frame and does not bound these frames. A few are allowed here,
//! and more in proportion to the requests.
//!
//! Decides: how many SETTINGS and GOAWAY frames a client may send (`FrameCounts`).

use std::sync::atomic::Ordering;

use super::authority::overwrite_authority;
use crate::telemetry::listener_stats::RESET_STREAMS;

/// Length of the connection preface in bytes, before the first frame.
const PREFACE_BYTES: usize = 24;
const FRAME_HEAD_BYTES: usize = 9;
/// Maximum length of a payload: HTTP/2's default, which the server does not raise. h2 refuses longer ones.
const MAX_FRAME_PAYLOAD_BYTES: usize = 16_384;

/// Flags of a HEADERS frame (RFC 9113, section 6.2).
const PADDED_FLAG: u8 = 0x8;
const PRIORITY_FLAG: u8 = 0x20;
/// Length of the fields that [`PRIORITY_FLAG`] announces, in bytes.
const PRIORITY_BYTES: usize = 5;

/// Filter of a stream of bytes that arrives in pieces of any length.
#[derive(Debug)]
pub struct FrameFilter {
    /// Bytes that pass unchanged until the next frame head.
    passing: usize,
    /// Frames that passed.
    pub counts: FrameCounts,
}

/// Head of a frame, without its stream.
#[derive(Clone, Copy, Debug)]
struct Http2FrameHead {
    /// Length of the payload in bytes.
    length: usize,
    /// Type of the frame.
    kind: u8,
    flags: u8,
}

impl Http2FrameHead {
    /// Parses the first 9 bytes; `None` of fewer.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, ..] = *bytes.first_chunk::<FRAME_HEAD_BYTES>()?;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        Some(Self { length, kind, flags })
    }
}

impl Default for FrameFilter {
    /// A filter that expects the connection preface.
    fn default() -> Self {
        Self { passing: PREFACE_BYTES, counts: FrameCounts::default() }
    }
}

impl FrameFilter {
    /// Filters bytes in place; returns how many of the first ones may pass. The others must be passed again, with more.
    pub fn count_and_rewrite_frames(&mut self, bytes: &mut [u8]) -> usize {
        let mut at = 0;
        loop {
            let passed = self.passing.min(bytes.len() - at);
            self.passing -= passed;
            at += passed;
            let Some(head) = Http2FrameHead::parse(&bytes[at..]) else { return at };
            if head.kind == HEADERS_FRAME_TYPE && head.length <= MAX_FRAME_PAYLOAD_BYTES {
                let Some(payload) = bytes[at + FRAME_HEAD_BYTES..].get_mut(..head.length) else { return at };
                if let Some(block) = find_block(head.flags, payload) {
                    overwrite_authority(block);
                }
            }
            self.counts.count_frame(head.kind);
            self.passing = FRAME_HEAD_BYTES + head.length;
        }
    }
}

/// Fragment of a header block in the payload of a HEADERS frame; `None` if the payload is malformed.
fn find_block(flags: u8, payload: &mut [u8]) -> Option<&mut [u8]> {
    let (mut start, mut end) = (0, payload.len());
    if flags & PADDED_FLAG != 0 {
        (start, end) = (1, end.checked_sub(usize::from(*payload.first()?))?);
    }
    if flags & PRIORITY_FLAG != 0 {
        start += PRIORITY_BYTES;
    }
    payload.get_mut(start..end)
}

/// Maximum number of SETTINGS and GOAWAY frames of a connection without requests.
const MAX_SETTINGS_AND_GOAWAY_FRAMES: u64 = 64;
/// Number of requests that allow one more SETTINGS or GOAWAY frame.
const REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME: u64 = 64;

/// Kind of a frame that opens a request, or ends it with trailers.
const HEADERS_FRAME_TYPE: u8 = 1;
const RST_STREAM_FRAME_TYPE: u8 = 3;
const SETTINGS_FRAME_TYPE: u8 = 4;
const GOAWAY_FRAME_TYPE: u8 = 7;

/// Numbers of requests, and of SETTINGS and GOAWAY frames, on a connection.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct FrameCounts {
    requests: u64,
    all_stream_frames: u64,
}

impl FrameCounts {
    /// Counts a frame of this kind.
    pub fn count_frame(&mut self, kind: u8) {
        match kind {
            HEADERS_FRAME_TYPE => self.requests += 1,
            // h2 does not tell of those that come after the answer.
            RST_STREAM_FRAME_TYPE => _ = RESET_STREAMS.fetch_add(1, Ordering::Relaxed),
            SETTINGS_FRAME_TYPE | GOAWAY_FRAME_TYPE => self.all_stream_frames += 1,
            _ => {}
        }
    }

    /// True if there were more SETTINGS and GOAWAY frames than allowed.
    pub const fn exceeds_limit(&self) -> bool {
        self.all_stream_frames > MAX_SETTINGS_AND_GOAWAY_FRAMES + self.requests / REQUESTS_PER_SETTINGS_OR_GOAWAY_FRAME
    }
}
