//! Connections: requests in progress, and what is written.

mod in_flight_requests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Poll;

    use tokio::sync::oneshot;
    use tollkeeper::base::threads;
    use tollkeeper::serve::server::http2::in_flight::InFlightRequests;

    #[tokio::test]
    async fn eager_request_completes_at_start() {
        for poll_eagerly in [true, false] {
            let done = Cell::new(false);
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.start_request(async { done.set(true) });
            assert_eq!(done.get(), poll_eagerly);
            let has_completed = poll_fn(|context| Poll::Ready(requests.poll_pending(context))).await;
            assert_eq!((done.get(), has_completed), (true, !poll_eagerly));
        }
    }

    #[tokio::test]
    async fn pending_request_completes_after_wake_up() {
        for poll_eagerly in [true, false] {
            let (sender, receiver) = oneshot::channel();
            let mut requests = InFlightRequests::new(poll_eagerly);
            requests.start_request(async { receiver.await.expect("the sender sends") });
            let mut completed =
                pin!(poll_fn(|context| if requests.poll_pending(context) { Poll::Ready(()) } else { Poll::Pending }));
            assert!(futures_util::poll!(completed.as_mut()).is_pending());
            sender.send(()).expect("the request waits");
            completed.await;
        }
    }

    #[tokio::test]
    async fn busy_connection_yields_to_other_tasks() {
        // Only tasks have a budget.
        let connection = tokio::spawn(async {
            let mut requests = InFlightRequests::new(true);
            let started = poll_fn(|context| {
                let mut started = 0_u32;
                while requests.poll_task_budget(context).is_ready() {
                    requests.start_request(async {});
                    started += 1;
                }
                Poll::Ready(started)
            });
            let started = started.await;
            // The task is woken again with a new budget.
            poll_fn(|context| requests.poll_task_budget(context)).await;
            started
        });
        let started = connection.await.expect("the task completes");
        assert!((1..1000).contains(&started), "{started} requests without a yield");
    }

    #[tokio::test]
    async fn long_request_makes_its_connection_yield() {
        let completed = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&completed);
        let connection = tokio::spawn(async move {
            let mut requests = InFlightRequests::new(false);
            for _ in 0..3 {
                let count = Arc::clone(&count);
                requests.start_request(async move {
                    threads::consume_task_budget(1000);
                    count.fetch_add(1, Ordering::Relaxed);
                });
            }
            poll_fn(|context| Poll::Ready((requests.poll_pending(context), count.load(Ordering::Relaxed)))).await
        });
        assert_eq!(connection.await.expect("the task completes"), (true, 1));
    }
}

mod coalesced_writer {
    use std::pin::pin;

    use futures_util::{join, poll};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
    use tokio::task::yield_now;
    use tollkeeper::serve::server::coalesced_writer::CoalescedWriter;

    #[tokio::test]
    async fn client_that_does_not_read_is_not_read_from() {
        let (mut client, server) = duplex(16);
        let mut server = CoalescedWriter::new(server);
        client.write_all(b"request").await.expect("the request fits");
        server.write_all(&[7; 100]).await.expect("the response is buffered");
        for _ in 0..10 {
            assert!(poll!(pin!(server.flush())).is_pending());
            yield_now().await;
        }
        let (mut request, mut response) = ([0; 7], [0; 100]);
        assert!(poll!(pin!(server.read_exact(&mut request))).is_pending());
        let (read, taken) = join!(server.read_exact(&mut request), client.read_exact(&mut response));
        assert!(read.is_ok() && taken.is_ok());
        assert_eq!((&request, response), (b"request", [7; 100]));
    }
}
