//! Finds header blocks in the frames of HTTP/2 (RFC 9113, 4.1 and 6.2) and filters them; limits SETTINGS and GOAWAY.
//!
//! Frames that need no change pass in place. A header block that is changed, or that was not read in one piece, goes
//! through a buffer: at most one frame that is not complete, and the part of a filtered block that does not fill one.
//! Malformed frames pass unchanged, for h2 to report.
//!
//! h2 visits each open stream for a SETTINGS or GOAWAY frame and does not bound these frames. A few are allowed here,
//! and more in proportion to the requests.
//!
//! Decides: how many SETTINGS and GOAWAY frames a client may send (`FrameCounts`).

use std::sync::atomic::Ordering;

use bytes::{Buf as _, BufMut as _, BytesMut};
use tokio::io::ReadBuf;

use super::hpack_filter::{HeaderBlockFilter, needs_filtering};
use crate::telemetry::listener_stats::RESET_STREAMS;

/// Length of the connection preface in bytes, before the first frame.
const PREFACE_BYTES: usize = 24;
const FRAME_HEAD_BYTES: usize = 9;
/// Maximum length of a payload: HTTP/2's default, which the server does not raise.
const MAX_FRAME_PAYLOAD_BYTES: usize = 16_384;

const CONTINUATION_FRAME_TYPE: u8 = 9;
/// Flags of a HEADERS or CONTINUATION frame (RFC 9113, section 6).
const END_HEADERS_FLAG: u8 = 0x4;
const PADDED_FLAG: u8 = 0x8;
const PRIORITY_FLAG: u8 = 0x20;
/// Length of the fields that [`PRIORITY_FLAG`] announces, in bytes.
const PRIORITY_BYTES: usize = 5;

/// Filter of a stream of bytes that arrives in pieces of any length.
#[derive(Debug)]
pub struct FrameFilter {
    /// Bytes that pass unchanged until the next frame head.
    passing: usize,
    /// Start of a frame that is not complete.
    held: BytesMut,
    /// Filtered bytes that were not given out.
    output: BytesMut,
    /// Header block that continues in the next frame.
    block: Option<OpenHeaderBlock>,
    /// Frames that passed or were filtered.
    pub counts: FrameCounts,
}

/// Header block of which some frames are still to come.
#[derive(Debug)]
struct OpenHeaderBlock {
    /// Head of the next frame to write, without its length.
    head: Http2FrameHead,
    filter: HeaderBlockFilter,
    /// Filtered bytes that are in no frame.
    unsent: Vec<u8>,
}

/// Head of a frame.
#[derive(Clone, Copy, Debug)]
pub struct Http2FrameHead {
    /// Length of the payload in bytes.
    pub length: usize,
    /// Type of the frame.
    pub kind: u8,
    flags: u8,
    stream: [u8; 4],
}

impl Http2FrameHead {
    /// Parses the first 9 bytes; `None` of fewer.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, s, t, u, v] = *bytes.first_chunk::<FRAME_HEAD_BYTES>()?;
        let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        Some(Self { length, kind, flags, stream: [s, t, u, v] })
    }

    /// True for frames whose payload is filtered; h2 refuses those that are too long.
    pub const fn has_filtered_payload(self) -> bool {
        matches!(self.kind, HEADERS_FRAME_TYPE | CONTINUATION_FRAME_TYPE) && self.length <= MAX_FRAME_PAYLOAD_BYTES
    }

    const fn ends_block(self) -> bool {
        self.flags & END_HEADERS_FLAG != 0
    }
}

impl Default for FrameFilter {
    /// A filter that expects the connection preface.
    fn default() -> Self {
        Self {
            passing: PREFACE_BYTES,
            held: BytesMut::new(),
            output: BytesMut::new(),
            block: None,
            counts: FrameCounts::default(),
        }
    }
}

impl FrameFilter {
    /// True if the client sent more frames of a kind than allowed.
    pub(super) const fn exceeds_frame_limit(&self) -> bool {
        self.counts.exceeds_limit()
    }

    /// Moves filtered bytes into `buffer`; false if there are none.
    pub fn write_output_to(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        if self.output.is_empty() {
            return false;
        }
        let length = self.output.len().min(buffer.remaining());
        buffer.put_slice(&self.output[..length]);
        self.output.advance(length);
        if self.output.is_empty() {
            // An idle connection keeps no buffer.
            self.output = BytesMut::new();
        }
        true
    }

    /// Takes bytes that were read; returns how many of the first ones pass unchanged, before all later output.
    pub fn filter_read_bytes(&mut self, read: &[u8]) -> usize {
        let passed = if self.held.is_empty() && self.block.is_none() { self.pass_unchanged_frames(read) } else { 0 };
        if passed < read.len() {
            self.held.extend_from_slice(&read[passed..]);
            self.filter_held_frames();
        }
        passed
    }

    /// Returns the length of the complete frames, and of a passing part, that need no change.
    fn pass_unchanged_frames(&mut self, read: &[u8]) -> usize {
        let mut at = 0;
        loop {
            let passed = self.passing.min(read.len() - at);
            self.passing -= passed;
            at += passed;
            let Some(head) = Http2FrameHead::parse(&read[at..]) else { return at };
            let payload = &read[at + FRAME_HEAD_BYTES..];
            if head.has_filtered_payload() {
                let is_whole = head.kind == HEADERS_FRAME_TYPE && head.ends_block() && payload.len() >= head.length;
                let Some(fragment) =
                    is_whole.then(|| HeaderBlockFragment::parse(head, &payload[..head.length])).flatten()
                else {
                    return at;
                };
                if needs_filtering(fragment.block) {
                    return at;
                }
            }
            self.counts.count_frame(head.kind);
            self.passing = FRAME_HEAD_BYTES + head.length;
        }
    }

    /// Moves the complete frames that are held to the output.
    fn filter_held_frames(&mut self) {
        loop {
            let passed = self.passing.min(self.held.len());
            self.passing -= passed;
            self.output.unsplit(self.held.split_to(passed));
            match Http2FrameHead::parse(&self.held) {
                Some(head) if !head.has_filtered_payload() => {
                    self.output_incomplete_block();
                    self.counts.count_frame(head.kind);
                    self.passing = FRAME_HEAD_BYTES + head.length;
                }
                Some(head) if self.held.len() >= FRAME_HEAD_BYTES + head.length => {
                    let frame = self.held.split_to(FRAME_HEAD_BYTES + head.length);
                    self.filter_header_frame(head, &frame);
                }
                _ => break,
            }
        }
        if self.held.is_empty() {
            self.held = BytesMut::new();
        }
    }

    /// Filters a HEADERS or CONTINUATION frame.
    fn filter_header_frame(&mut self, head: Http2FrameHead, frame: &[u8]) {
        self.counts.count_frame(head.kind);
        let is_continued =
            |block: &mut OpenHeaderBlock| head.kind == CONTINUATION_FRAME_TYPE && head.stream == block.head.stream;
        let open = self.block.take_if(is_continued);
        self.output_incomplete_block();
        let fragment = HeaderBlockFragment::parse(head, &frame[FRAME_HEAD_BYTES..]);
        let (Some(mut block), Some(fragment)) = (open.or_else(|| OpenHeaderBlock::new(head)), fragment) else {
            // h2 reports the malformed frame.
            self.output.extend_from_slice(frame);
            return;
        };
        block.unsent.extend_from_slice(fragment.priority);
        block.filter.filter_fragment(fragment.block, head.ends_block(), &mut block.unsent);
        if head.ends_block() {
            block.put_remaining_frames(END_HEADERS_FLAG, &mut self.output);
        } else if fragment.block.is_empty() {
            // h2 bounds the number of such frames.
            block.put_remaining_frames(0, &mut self.output);
            self.block = Some(block);
        } else {
            block.put_full_frames(&mut self.output);
            self.block = Some(block);
        }
    }

    /// Moves the incomplete header block to the output, so that h2 reports the frame that interrupts it.
    fn output_incomplete_block(&mut self) {
        if let Some(mut block) = self.block.take() {
            block.put_remaining_frames(0, &mut self.output);
        }
    }

    /// Moves an incomplete frame to the output.
    pub fn output_incomplete_frame(&mut self) {
        self.output_incomplete_block();
        self.output.unsplit(self.held.split());
    }
}

impl OpenHeaderBlock {
    /// Begins a block; `None` for a CONTINUATION frame.
    fn new(head: Http2FrameHead) -> Option<Self> {
        let head = Http2FrameHead { flags: head.flags & !(END_HEADERS_FLAG | PADDED_FLAG), ..head };
        (head.kind == HEADERS_FRAME_TYPE).then(|| Self {
            head,
            filter: HeaderBlockFilter::default(),
            unsent: Vec::new(),
        })
    }

    /// Writes as much as fills frames, so that there are no more frames than the client sent.
    fn put_full_frames(&mut self, output: &mut BytesMut) {
        while self.unsent.len() >= MAX_FRAME_PAYLOAD_BYTES {
            self.put_frame(MAX_FRAME_PAYLOAD_BYTES, 0, output);
        }
    }

    /// Writes all that is left; `flags` are those of the last frame.
    fn put_remaining_frames(&mut self, flags: u8, output: &mut BytesMut) {
        while self.unsent.len() > MAX_FRAME_PAYLOAD_BYTES {
            self.put_frame(MAX_FRAME_PAYLOAD_BYTES, 0, output);
        }
        self.put_frame(self.unsent.len(), flags, output);
    }

    fn put_frame(&mut self, length: usize, flags: u8, output: &mut BytesMut) {
        output.put_uint(length as u64, 3);
        output.put_slice(&[self.head.kind, self.head.flags | flags]);
        output.put_slice(&self.head.stream);
        output.extend(self.unsent.drain(..length));
        // All other flags belong to the first frame.
        self.head = Http2FrameHead { kind: CONTINUATION_FRAME_TYPE, flags: 0, ..self.head };
    }
}

/// Payload of a HEADERS or CONTINUATION frame, without padding.
struct HeaderBlockFragment<'p> {
    priority: &'p [u8],
    block: &'p [u8],
}

impl<'p> HeaderBlockFragment<'p> {
    /// Parses a payload; `None` if it is malformed, which h2 reports.
    fn parse(head: Http2FrameHead, mut payload: &'p [u8]) -> Option<Self> {
        if head.kind != HEADERS_FRAME_TYPE {
            return Some(Self { priority: &[], block: payload });
        }
        if head.flags & PADDED_FLAG != 0 {
            let (padding_length, rest) = payload.split_first()?;
            payload = &rest[..rest.len().checked_sub(usize::from(*padding_length))?];
        }
        let priority_length = if head.flags & PRIORITY_FLAG == 0 { 0 } else { PRIORITY_BYTES };
        let (priority, block) = payload.split_at_checked(priority_length)?;
        Some(Self { priority, block })
    }
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
