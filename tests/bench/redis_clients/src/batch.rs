//! Micro-batching: calls that are ready at the same time go out as one pipeline.

use tokio::sync::{mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::DEADLINE;
use crate::clients::{Call, OwnedCall, PipelineClient, RedisClient};
use crate::server::Server;

/// Maximum number of calls in a pipeline.
const MAX_BATCH: usize = 512;

/// Client that batches the calls of its callers.
pub struct Batched<C> {
    queue: mpsc::UnboundedSender<QueuedCall>,
    client: std::marker::PhantomData<fn() -> C>,
}

impl<C> Clone for Batched<C> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), client: std::marker::PhantomData }
    }
}

/// Call that waits for the next batch.
struct QueuedCall {
    call: OwnedCall,
    caller: oneshot::Sender<bool>,
}

impl<C: PipelineClient> RedisClient for Batched<C> {
    async fn connect(server: &Server) -> Self {
        let client = C::connect(server).await;
        let (queue, calls) = mpsc::unbounded_channel();
        tokio::spawn(send_batches(client, calls));
        Self { queue, client: std::marker::PhantomData }
    }

    async fn call(&self, call: Call<'_>) -> bool {
        let (caller, reply) = oneshot::channel();
        let call = OwnedCall { key: call.key.to_vec(), argument: call.argument.to_vec() };
        let queued = self.queue.send(QueuedCall { call, caller }).is_ok();
        queued && matches!(timeout(DEADLINE, reply).await, Ok(Ok(true)))
    }
}

async fn send_batches<C: PipelineClient>(client: C, mut calls: mpsc::UnboundedReceiver<QueuedCall>) {
    while let Some(first) = calls.recv().await {
        // Callers that are ready to run queue their calls first.
        yield_now().await;
        let mut batch = vec![first];
        while batch.len() < MAX_BATCH
            && let Ok(call) = calls.try_recv()
        {
            batch.push(call);
        }
        let client = client.clone();
        tokio::spawn(async move {
            let (calls, callers): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|queued| (queued.call, queued.caller)).unzip();
            let replies = client.call_all(&calls).await;
            for (caller, reply) in callers.into_iter().zip(replies) {
                let _gone = caller.send(reply);
            }
        });
    }
}
