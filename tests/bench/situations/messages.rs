//! Decoding a request frame, encoding a response frame, and a whole call from frame to frame.

use std::hint::black_box;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tollkeeper::base::pb::RateLimitRequest;
use tollkeeper::base::pb::codec::{self, GRPC_FRAME_HEAD_BYTES};
use tollkeeper::decide::decision::Decision;
use tollkeeper::rules::live::LoadedRules;
use tollkeeper::serve::grpc::service::{DEFAULT_CALLER_DEADLINE, RateLimitService};
use tollkeeper::serve::grpc::{decode, encode};

use super::deciding::{Options, request};
use super::{NAME_BYTES, Situation, USERS, Walk, frame};

/// Decodes request frames.
pub(crate) struct Decoding {
    frames: Vec<Bytes>,
    /// True if the request is decoded through a message, as unusual requests are.
    by_message: bool,
    walk: Walk,
}

impl Decoding {
    /// Frames for the borrowed decoder.
    pub(crate) fn in_place(descriptors: usize, value_bytes: usize) -> Self {
        let frames = (0..USERS).map(|user| frame(user, descriptors, value_bytes)).collect();
        Self { frames, by_message: false, walk: Walk::over(USERS) }.warmed()
    }

    /// The same frames, decoded through an owned message, as unusual requests are.
    pub(crate) fn by_message(descriptors: usize, value_bytes: usize) -> Self {
        Self { by_message: true, ..Self::in_place(descriptors, value_bytes) }.warmed()
    }
}

impl Situation for Decoding {
    fn step(&mut self) {
        let message = black_box(&self.frames[self.walk.next()]).slice(GRPC_FRAME_HEAD_BYTES..);
        if self.by_message {
            let message: RateLimitRequest = codec::decode_with_field_bound(message).expect("it is a message");
            black_box(decode::convert_request(black_box(&message)));
        } else {
            black_box(decode::decode_borrowed_request(&message));
        }
    }

    fn inputs(&self) -> usize {
        USERS
    }
}

/// Encodes response frames.
pub(crate) struct Encoding {
    decision: Decision<'static>,
}

impl Encoding {
    /// Encodes the decision for these options; leaks the service, because the decision borrows its rules.
    pub(crate) fn new(options: Options) -> Self {
        let service: &'static RateLimitService = Box::leak(Box::new(options.service()));
        let rules: &'static LoadedRules =
            Box::leak(Box::new(service.rules.current_rules_owned().expect("there are rules")));
        let request = request(1, options.descriptors);
        let decide = || {
            let context = service.build_decision_context(Some(rules), DEFAULT_CALLER_DEADLINE);
            service.decider.decide_synchronously(context, &request).expect("it is decided")
        };
        // The first hit of the day is never rejected.
        decide();
        let decision = decide();
        assert_eq!((decision.over_limit, decision.headers.is_empty()), (options.rejected, !options.headers));
        Self { decision }.warmed()
    }
}

impl Situation for Encoding {
    fn step(&mut self) {
        let response = encode::encode_response(black_box(&self.decision));
        black_box(codec::encode_grpc_frame(black_box(&response)));
    }

    fn inputs(&self) -> usize {
        USERS
    }
}

/// A whole call from frame to frame, without the connection.
pub(crate) struct Answering {
    service: RateLimitService,
    frames: Vec<Bytes>,
    walk: Walk,
}

impl Answering {
    pub(crate) fn new(options: Options) -> Self {
        let frames = (0..USERS).map(|user| frame(user, options.descriptors, NAME_BYTES)).collect();
        Self { service: options.service(), frames, walk: Walk::over(USERS) }.warmed()
    }
}

impl Situation for Answering {
    fn step(&mut self) {
        let service = &self.service;
        service.clock.set(service.clock.now().plus_us(1));
        let message = black_box(&self.frames[self.walk.next()]).slice(GRPC_FRAME_HEAD_BYTES..);
        let request = decode::decode_borrowed_request(&message).expect("nothing in it is unusual");
        let answer = service.answer_request(&request, DEFAULT_CALLER_DEADLINE, None).now_or_never();
        let response = answer.expect("memory answers at once").expect("it is answered");
        black_box(codec::encode_grpc_frame(&response));
    }

    fn inputs(&self) -> usize {
        USERS
    }
}
