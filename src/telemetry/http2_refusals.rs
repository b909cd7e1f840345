//! Calls that h2 refuses before this program sees them.
//!
//! h2 answers a request with malformed or too large headers by itself; no function of its API reports that. Envoy then
//! lets the request through without a limit. h2 traces each refusal at the level `debug`, so `RefusalLayer` reads
//! those few events at any log level, counts them by reason, and logs each reason at most once a minute. An event
//! costs no allocation; all other events of h2 stay disabled.
//!
//! This is the only file that knows texts of h2. They are no promise of h2: a new version may change them, and then
//! refusals would no longer be counted. The test below provokes each refusal of `REFUSAL_MESSAGE_BEGINNINGS` on a
//! connection of the h2 that is linked, and fails if one is not recognised.
//!
//! Decides: which calls that h2 refused by itself are counted, and as what.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::base::clock::Clock;
use crate::base::named_enum::named_enum;
use crate::telemetry::log_throttle::LogThrottle;

named_enum! {
    /// Reason of a refusal, with its value of the label `reason`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum RefusalReason {
        /// The headers of a request exceed the bound; answered with status 431.
        HeadersTooLarge = "headers_too_large",
        /// The headers exceed the bound so far that the connection was closed, with all its calls.
        ConnectionHeadersTooLarge = "connection_headers_too_large",
        /// `:authority` is not an authority of a URI; the stream was reset.
        MalformedAuthority = "malformed_authority",
        /// Other headers are malformed; the stream was reset.
        MalformedHeaders = "malformed_headers",
    }
}

/// Targets of h2's events about refusals.
const H2_EVENT_TARGETS: [&str; 3] = ["h2::server", "h2::codec::framed_read", "h2::proto::streams::recv"];
/// Beginnings of h2's messages about refusals; the first match decides.
const REFUSAL_MESSAGE_BEGINNINGS: [(&str, RefusalReason); 7] = [
    ("malformed headers: malformed authority", RefusalReason::MalformedAuthority),
    ("malformed headers: ", RefusalReason::MalformedHeaders),
    ("stream error PROTOCOL_ERROR -- malformed header block", RefusalReason::MalformedHeaders),
    ("stream error REQUEST_HEADER_FIELDS_TOO_LARGE", RefusalReason::HeadersTooLarge),
    ("connection error PROTOCOL_ERROR -- decoded ", RefusalReason::ConnectionHeadersTooLarge),
    ("connection error PROTOCOL_ERROR -- CONTINUATION frame hea", RefusalReason::ConnectionHeadersTooLarge),
    ("too_many_continuations", RefusalReason::ConnectionHeadersTooLarge),
];

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
    /// Log line: what happened, why, and what to do.
    const fn explanation(self) -> &'static str {
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
    fn from_h2_message(text: &str) -> Option<Self> {
        REFUSAL_MESSAGE_BEGINNINGS.iter().find(|(beginning, _)| text.starts_with(beginning)).map(|(_, reason)| *reason)
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
    pub fn refusal_count(&self, reason: RefusalReason) -> u64 {
        self.0[reason as usize].count.load(Ordering::Relaxed)
    }

    /// Counts a refusal, and logs it unless another one was logged within a minute.
    fn record_refusal(&self, reason: RefusalReason) {
        let RefusalCounter { count, throttle } = &self.0[reason as usize];
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = throttle.allow(Clock::System.now()) {
            tracing::warn!(reason = reason.name(), suppressed, "{}", reason.explanation());
        }
    }
}

/// Builds the layer that records the refusals of h2.
pub fn build_refusal_layer<S>() -> impl Layer<S>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
{
    RefusalLayer.with_filter(FilterFn::new(RefusalLayer::can_be_refusal).with_max_level_hint(LevelFilter::DEBUG))
}

/// Layer that records the refusals of h2.
#[derive(Clone, Copy, Debug)]
struct RefusalLayer;

impl RefusalLayer {
    /// True for the few events of h2 that can be refusals; the frequent ones have further fields.
    fn can_be_refusal(metadata: &Metadata<'_>) -> bool {
        let mut fields = metadata.fields().iter();
        *metadata.level() == Level::DEBUG
            && metadata.is_event()
            && H2_EVENT_TARGETS.contains(&metadata.target())
            && fields.next().is_some_and(|field| field.name() == "message")
            && fields.next().is_none()
    }
}

impl<S: Subscriber> Layer<S> for RefusalLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut beginning = MessageBeginning { bytes: [0; _], length: 0 };
        event.record(&mut beginning);
        if let Some(reason) = RefusalReason::from_h2_message(beginning.as_str()) {
            HTTP2_REFUSALS.record_refusal(reason);
        }
    }
}

/// First bytes of the message of an event.
struct MessageBeginning {
    bytes: [u8; 64],
    length: usize,
}

impl MessageBeginning {
    fn as_str(&self) -> &str {
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
