//! `ShouldRateLimit` without tonic's router, boxed futures and boxed bodies, which cost more than the decision.
//!
//! tonic's services answer the other methods.

use std::sync::Arc;

use axum::BoxError;
use bytes::Bytes;
use hyper::body::Body;
use tonic::Status;

use super::call_head::CallHead;
use super::decode;
use super::message::MessageReader;
use super::service::Service;
use crate::base::pb::codec::{self, frame};
use crate::base::pb::{METHOD_PATH, RateLimitRequest};
use crate::base::threads;

/// Bytes of a message that cost one of the 128 units of a task's budget, so that a connection yields after a long one.
const BYTES_PER_BUDGET_UNIT: usize = 512;
/// Descriptors of a request that cost one of these units.
const DESCRIPTORS_PER_BUDGET_UNIT: usize = 4;

/// Answers calls of `ShouldRateLimit`.
#[derive(Clone, Debug)]
pub struct RateLimitMethod {
    service: Arc<Service>,
    max_message_bytes: usize,
}

impl RateLimitMethod {
    /// Path of the method in HTTP/2 requests.
    pub const PATH: &'static str = METHOD_PATH;

    /// Creates the method of a service; messages are limited to `max_message_bytes`.
    pub const fn new(service: Arc<Service>, max_message_bytes: usize) -> Self {
        Self { service, max_message_bytes }
    }

    /// True if responses that no limit delays are ready on the first poll.
    pub fn is_immediate(&self) -> bool {
        self.service.decider.store.is_immediate()
    }

    /// Answers a call; returns the framed response or the status of the error.
    pub async fn answer<B>(&self, call: CallHead<'_>, body: B) -> Result<Bytes, Status>
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    {
        let message = MessageReader::new(call.headers, self.max_message_bytes)?.read(body).await?;
        let decoded: RateLimitRequest;
        let request = match decode::decode_borrowed(&message) {
            Some(request) => request,
            None => {
                decoded = codec::decode(message.clone())?;
                decode::request(&decoded)
            }
        };
        let response = self.service.call(call, &request).await;
        threads::consume_task_budget(
            message.len() / BYTES_PER_BUDGET_UNIT + request.descriptors.len() / DESCRIPTORS_PER_BUDGET_UNIT,
        );
        Ok(frame(&response?))
    }
}
