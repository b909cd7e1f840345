//! Calls that h2 refuses before this program sees them.
//!
//! h2 answers a request with malformed or too large headers by itself; no function of its API reports that. Envoy then
//! lets the request through without a limit. h2 traces each refusal at the level `debug`, so `RefusalLayer` reads
//! those few events at any log level, counts them by reason, and logs each reason at most once a minute. An event
//! costs no allocation; all other events of h2 stay disabled.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::base::clock::Clock;
use crate::telemetry::log_throttle::LogThrottle;

/// Reason of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The headers of a request exceed the bound; answered with status 431.
    HeadersTooLarge,
    /// The headers exceed the bound so far that the connection was closed, with all its calls.
    ConnectionHeadersTooLarge,
    /// `:authority` is not an authority of a URI; the stream was reset.
    MalformedAuthority,
    /// Other headers are malformed; the stream was reset.
    MalformedHeaders,
}

/// Numbers of refusals by reason.
#[derive(Debug)]
pub struct Http2Refusals([RefusalCounter; RefusalReason::ALL.len()]);

#[derive(Debug)]
struct RefusalCounter {
    count: AtomicU64,
    throttle: LogThrottle,
}

/// Refusals of this process.
pub static HTTP2_REFUSALS: Http2Refusals = Http2Refusals::new();

impl RefusalReason {
    /// All reasons.
    pub const ALL: [Self; 4] =
        [Self::HeadersTooLarge, Self::ConnectionHeadersTooLarge, Self::MalformedAuthority, Self::MalformedHeaders];

    /// Value of the label `reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::HeadersTooLarge => "headers_too_large",
            Self::ConnectionHeadersTooLarge => "connection_headers_too_large",
            Self::MalformedAuthority => "malformed_authority",
            Self::MalformedHeaders => "malformed_headers",
        }
    }

    /// Log line: what happened, why, and what to do.
    const fn message(self) -> &'static str {
        match self {
            Self::HeadersTooLarge => {
                "call refused, Envoy lets the request through: headers exceed TOLLKEEPER_GRPC_MAX_HEADER_BYTES (raise it)"
            }
            Self::ConnectionHeadersTooLarge => {
                "connection closed with all its calls: headers exceed TOLLKEEPER_GRPC_MAX_HEADER_BYTES by far (raise it)"
            }
            Self::MalformedAuthority => {
                "call refused, Envoy lets the request through: malformed :authority (set `authority` in Envoy's grpc_service)"
            }
            Self::MalformedHeaders => {
                "call refused, Envoy lets the request through: malformed headers (check the client's HTTP/2 headers)"
            }
        }
    }

    /// Reason of an event of h2, by the beginning of its message.
    fn of_message(text: &str) -> Option<Self> {
        // The first match decides.
        const BEGINNINGS: [(&str, RefusalReason); 7] = [
            ("malformed headers: malformed authority", RefusalReason::MalformedAuthority),
            ("malformed headers: ", RefusalReason::MalformedHeaders),
            ("stream error PROTOCOL_ERROR -- malformed header block", RefusalReason::MalformedHeaders),
            ("stream error REQUEST_HEADER_FIELDS_TOO_LARGE", RefusalReason::HeadersTooLarge),
            ("connection error PROTOCOL_ERROR -- decoded ", RefusalReason::ConnectionHeadersTooLarge),
            ("connection error PROTOCOL_ERROR -- CONTINUATION frame hea", RefusalReason::ConnectionHeadersTooLarge),
            ("too_many_continuations", RefusalReason::ConnectionHeadersTooLarge),
        ];
        BEGINNINGS.iter().find(|(beginning, _)| text.starts_with(beginning)).map(|(_, reason)| *reason)
    }
}

impl Http2Refusals {
    const fn new() -> Self {
        Self(
            [const { RefusalCounter { count: AtomicU64::new(0), throttle: LogThrottle::every(Duration::from_secs(60)) } };
                RefusalReason::ALL.len()],
        )
    }

    /// Number of refusals for this reason.
    pub fn count(&self, reason: RefusalReason) -> u64 {
        self.0[reason as usize].count.load(Ordering::Relaxed)
    }

    /// Counts a refusal, and logs it unless another one was logged within a minute.
    fn record(&self, reason: RefusalReason) {
        let RefusalCounter { count, throttle } = &self.0[reason as usize];
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = throttle.allow(Clock::System.now()) {
            tracing::warn!(reason = reason.name(), suppressed, "{}", reason.message());
        }
    }
}

/// Layer that records the refusals of h2.
#[derive(Clone, Copy, Debug)]
pub(super) struct RefusalLayer;

impl RefusalLayer {
    /// True for the few events of h2 that can be refusals; the frequent ones have further fields.
    pub(super) fn reads(metadata: &Metadata<'_>) -> bool {
        let mut fields = metadata.fields().iter();
        *metadata.level() == Level::DEBUG
            && metadata.is_event()
            && ["h2::server", "h2::codec::framed_read", "h2::proto::streams::recv"].contains(&metadata.target())
            && fields.next().is_some_and(|field| field.name() == "message")
            && fields.next().is_none()
    }
}

impl<S: Subscriber> Layer<S> for RefusalLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut beginning = MessageBeginning { bytes: [0; _], length: 0 };
        event.record(&mut beginning);
        if let Some(reason) = RefusalReason::of_message(beginning.text()) {
            HTTP2_REFUSALS.record(reason);
        }
    }
}

/// First bytes of the message of an event.
struct MessageBeginning {
    bytes: [u8; 64],
    length: usize,
}

impl MessageBeginning {
    fn text(&self) -> &str {
        // A character that was cut ends the text.
        match str::from_utf8(&self.bytes[..self.length]) {
            Ok(text) => text,
            Err(error) => str::from_utf8(&self.bytes[..error.valid_up_to()]).unwrap_or_default(),
        }
    }
}

impl fmt::Write for MessageBeginning {
    /// Fails once the buffer is full, so that the rest of a long message is not formatted.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let free = &mut self.bytes[self.length..];
        let taken = text.len().min(free.len());
        free[..taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        if taken == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

impl Visit for MessageBeginning {
    fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
        // An error means that the buffer is full.
        let _ = write!(self, "{value:?}");
    }
}
