//! What stands around a decision: from the frame of a request to the request, from a decision to the frame of an
//! answer, and all of it from frame to frame.

use std::hint::black_box;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tollkeeper::config::live::Loaded;
use tollkeeper::decision::Decision;
use tollkeeper::grpc::service::{DEFAULT_DEADLINE, Service};
use tollkeeper::grpc::{decode, encode};
use tollkeeper::pb::codec::{self, FRAME_HEAD_BYTES};
use tollkeeper::pb::rate_limit_descriptor::Entry;
use tollkeeper::pb::{RateLimitDescriptor, RateLimitRequest};
use tollkeeper::store::Store;

use super::deciding::{Scene, USERS, key};
use super::{DOMAIN, Situation, Walk};

/// The frame of a request whose values are as long as that.
fn frame(user: usize, descriptors: usize, value_bytes: usize) -> Bytes {
    let value = Bytes::from(format!("user-{user:0width$}", width = value_bytes - "user-".len()));
    let entry = |place| Entry { key: key(place).into(), value: value.clone() };
    let descriptor = |place| RateLimitDescriptor { entries: vec![entry(place)], ..RateLimitDescriptor::default() };
    let descriptors = (0..descriptors).map(descriptor).collect();
    codec::frame(&RateLimitRequest { domain: DOMAIN.to_owned(), descriptors, hits_addend: 0 })
}

fn message(frame: &Bytes) -> RateLimitRequest {
    codec::decode(frame.slice(FRAME_HEAD_BYTES..)).expect("it is a message")
}

/// Reads frames.
pub(crate) struct Decoding {
    frames: Vec<Bytes>,
    walk: Walk,
}

impl Decoding {
    /// Of so many descriptors, with values of so many bytes.
    pub(crate) fn new(descriptors: usize, value_bytes: usize) -> Self {
        let frames = (0..USERS).map(|user| frame(user, descriptors, value_bytes)).collect();
        Self { frames, walk: Walk::through(USERS) }.warmed()
    }
}

impl Situation for Decoding {
    fn step(&mut self) {
        let message = message(black_box(&self.frames[self.walk.next()]));
        black_box(decode::request(black_box(&message)));
    }

    fn inputs(&self) -> usize {
        USERS
    }
}

/// Writes frames.
pub(crate) struct Encoding {
    decision: Decision<'static>,
}

impl Encoding {
    /// Of the decision of this scene. The service that decided is never given back: its rules are borrowed.
    pub(crate) fn new(scene: Scene) -> Self {
        let service: &'static Service = Box::leak(Box::new(scene.service()));
        let rules: &'static Loaded = Box::leak(Box::new(service.rules.load_full().expect("there are rules")));
        let Store::Memory(memory) = &service.decider.store else { unreachable!("the counters are here") };
        let message = message(&frame(1, scene.descriptors, 13));
        let decide = || {
            let edge = service.edge(Some(rules), DEFAULT_DEADLINE);
            service.decider.decide(memory, edge, &decode::request(&message)).expect("it is decided")
        };
        // The first hit of the day is never refused.
        decide();
        let decision = decide();
        assert_eq!((decision.over_limit, decision.headers.is_empty()), (scene.refused, !scene.headers));
        Self { decision }.warmed()
    }
}

impl Situation for Encoding {
    fn step(&mut self) {
        let response = encode::response(black_box(&self.decision));
        black_box(codec::frame(black_box(&response)));
    }

    fn inputs(&self) -> usize {
        USERS
    }
}

/// From frame to frame, all that is not the connection's.
pub(crate) struct Answering {
    service: Service,
    frames: Vec<Bytes>,
    walk: Walk,
}

impl Answering {
    pub(crate) fn new(scene: Scene) -> Self {
        let frames = (0..USERS).map(|user| frame(user, scene.descriptors, 13)).collect();
        Self { service: scene.service(), frames, walk: Walk::through(USERS) }.warmed()
    }
}

impl Situation for Answering {
    fn step(&mut self) {
        let service = &self.service;
        service.clock.set(service.clock.now().plus_us(1));
        let message = message(black_box(&self.frames[self.walk.next()]));
        let answer = service.answer(&message, DEFAULT_DEADLINE, None).now_or_never();
        let response = answer.expect("memory answers at once").expect("it is answered");
        black_box(codec::frame(&response));
    }

    fn inputs(&self) -> usize {
        USERS
    }
}
