//! A connection to Redis: order, deadlines, merged calls.

use std::pin::Pin;
use std::sync::LazyLock;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::runtime::Builder;
use tokio::time::Instant;
use tollkeeper::store::client::redis::connection::{Connection, MergeableScriptCall, Script};
use tollkeeper::store::client::redis::error::RedisError;
use tollkeeper::store::client::redis::resp::Reply;

const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

fn with_connection<F: Future>(work: impl FnOnce(Connection, DuplexStream) -> F) -> F::Output {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        let (ours, theirs) = duplex(1 << 20);
        work(Connection::from_stream(ours).0, theirs).await
    })
}

async fn expect_pings(server: &mut DuplexStream, pings: usize) {
    let mut received = vec![0; PING.len() * pings];
    server.read_exact(&mut received).await.expect("the commands arrive");
    assert_eq!(received, PING.repeat(pings));
}

#[test]
fn late_reply_is_dropped() {
    with_connection(|connection, mut server| async move {
        let soon = Some(Instant::now() + Duration::from_millis(5));
        let (late, next) = (connection.call(&[b"PING"], false, soon), connection.call(&[b"PING"], false, None));
        let answer = async {
            expect_pings(&mut server, 2).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            server.write_all(b":1\r\n:2\r\n").await.expect("the client reads");
        };
        let (late, next, ()) = tokio::join!(biased; late, next, answer);
        assert_eq!(late, Err(RedisError::Timeout));
        assert_eq!(next, Ok(Reply::Integer(2)));
    });
}

#[test]
fn fragmented_replies_reach_callers_in_order() {
    with_connection(|connection, mut server| async move {
        let calls = futures_util::future::join_all((0..100).map(|_| connection.call(&[b"PING"], false, None)));
        let answer = async {
            expect_pings(&mut server, 100).await;
            for byte in (0..100).flat_map(|number| format!("$2\r\n{number:02}\r\n").into_bytes()) {
                server.write_all(&[byte]).await.expect("the client reads");
            }
        };
        for (number, reply) in tokio::join!(biased; calls, answer).0.into_iter().enumerate() {
            assert_eq!(reply, Ok(Reply::BulkString(format!("{number:02}").into())));
        }
    });
}

#[test]
fn closed_connection_fails_pending_and_later_commands() {
    for garbage in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n", b":1\r\n:2\r\n:3\r\n"] {
        with_connection(|connection, mut server| async move {
            let close = async {
                expect_pings(&mut server, 1).await;
                server.write_all(garbage).await.expect("the client reads");
                drop(server);
            };
            let (reply, ()) = tokio::join!(biased; connection.call(&[b"PING"], false, None), close);
            assert!(matches!(reply, Err(RedisError::Broken) | Ok(Reply::Integer(1))), "{reply:?}");
            assert_eq!(connection.call(&[b"PING"], false, None).await, Err(RedisError::Broken));
        });
    }
}

/// Reads what the client has sent in one write.
async fn sent(server: &mut DuplexStream) -> String {
    let mut bytes = vec![0; 1 << 10];
    let length = server.read(&mut bytes).await.expect("commands arrive");
    String::from_utf8(bytes[..length].to_vec()).expect("commands are text here")
}

#[test]
fn command_of_a_dropped_caller_is_not_sent() {
    with_connection(|connection, mut server| async move {
        for asking in [false, true] {
            let mut dropped = Box::pin(connection.call(&[b"DROPPED"], asking, None));
            assert!(futures_util::poll!(dropped.as_mut()).is_pending());
            let mut kept = Box::pin(connection.call(&[b"PING"], asking, None));
            assert!(futures_util::poll!(kept.as_mut()).is_pending());
            drop(dropped);
            let before = if asking { "*1\r\n$6\r\nASKING\r\n" } else { "" };
            assert_eq!(sent(&mut server).await, format!("{before}*1\r\n$4\r\nPING\r\n"));
            server.write_all(if asking { b"+OK\r\n:1\r\n" } else { b":1\r\n" }).await.expect("the client reads");
            assert_eq!(kept.await, Ok(Reply::Integer(1)));
        }
    });
}

type PendingReply<'c> = Pin<Box<dyn Future<Output = Result<Reply, RedisError>> + 'c>>;

/// Calls on `count` keys with one of two arguments.
fn key_calls(connection: &Connection, count: usize) -> Vec<PendingReply<'_>> {
    static SCRIPT: LazyLock<Script> = LazyLock::new(|| {
        let merged = Some(Box::new(Script::new("merged".to_owned())));
        Script { merged, ..Script::new("one".to_owned()) }
    });
    let call = |number: usize| MergeableScriptCall {
        script: &SCRIPT,
        key: format!("k{number}").into(),
        argument: if number.is_multiple_of(3) { "third" } else { "other" }.into(),
        sends_text: true,
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    (0..count).map(|number| Box::pin(connection.call_mergeable(call(number), deadline)) as Pin<Box<_>>).collect()
}

#[test]
fn calls_queued_together_share_a_command() {
    with_connection(|connection, mut server| async move {
        let mut calls = key_calls(&connection, 5);
        for call in &mut calls {
            assert!(futures_util::poll!(call.as_mut()).is_pending());
        }
        // A call without a caller is not sent.
        drop(calls.remove(1));
        let words = ["EVAL", "merged", "4", "k2", "k4", "k0", "k3", "2", "other", "2", "third"];
        let lines: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        assert_eq!(sent(&mut server).await, format!("*11\r\n{lines}"));
        server
            .write_all(b"*5\r\n$1\r\n@\r\n$1\r\n2\r\n-ERR 4\r\n$1\r\n0\r\n$1\r\n3\r\n")
            .await
            .expect("the client reads");
        let replies = futures_util::future::join_all(calls).await;
        let text = |text: &'static str| Ok(Reply::BulkString(text.into()));
        assert_eq!(replies, [text("@0"), text("@2"), text("@3"), Ok(Reply::Error("ERR 4".into()))]);
    });
}

#[test]
fn at_most_16_calls_share_a_command_and_all_get_its_error() {
    with_connection(|connection, mut server| async move {
        let mut calls = key_calls(&connection, 33);
        for call in &mut calls {
            assert!(futures_util::poll!(call.as_mut()).is_pending());
        }
        let text = sent(&mut server).await;
        assert_eq!(text.matches("EVAL").count(), 3, "{text}");
        assert_eq!(text.matches("\r\nmerged\r\n$2\r\n16\r\n").count(), 2);
        assert_eq!(text.matches("\r\none\r\n$1\r\n1\r\n").count(), 1);
        server.write_all(b"-BUSY\r\n:1\r\n$1\r\nx\r\n").await.expect("the client reads");
        let replies = futures_util::future::join_all(calls).await;
        let count = |wanted: &Reply| replies.iter().filter(|reply| reply.as_ref() == Ok(wanted)).count();
        assert_eq!(count(&Reply::Error("BUSY".into())), 16);
        assert_eq!((count(&Reply::Null), count(&Reply::BulkString("x".into()))), (16, 1));
    });
}

#[test]
fn call_of_a_dropped_caller_is_not_merged() {
    with_connection(|connection, mut server| async move {
        let mut waiting = Box::pin(connection.call(&[b"PING"], false, None));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        expect_pings(&mut server, 1).await;
        let mut calls = key_calls(&connection, 2);
        for call in &mut calls {
            assert!(futures_util::poll!(call.as_mut()).is_pending());
        }
        drop(calls);
        server.write_all(b"+PONG\r\n").await.expect("the client reads");
        waiting.await.expect("a reply");
        let ping = connection.call(&[b"PING"], false, None);
        let answer = async {
            expect_pings(&mut server, 1).await;
            server.write_all(b"+PONG\r\n").await.expect("the client reads");
        };
        assert!(tokio::join!(biased; ping, answer).0.is_ok());
    });
}

#[test]
fn reply_to_an_unsent_command_closes_the_connection() {
    with_connection(|connection, mut server| async move {
        server.write_all(b":1\r\n").await.expect("the client reads");
        assert_eq!(connection.call(&[b"PING"], false, None).await, Err(RedisError::Broken));
    });
}

#[test]
fn expired_command_is_not_sent() {
    let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        // The server reads nothing at first, so that the driver cannot write the second command.
        let (ours, mut server) = duplex(4);
        let connection = Connection::from_stream(ours).0;
        let mut first = Box::pin(connection.call(&[b"PING"], false, None));
        assert!(futures_util::poll!(first.as_mut()).is_pending());
        tokio::time::sleep(Duration::from_millis(5)).await;
        let soon = Some(Instant::now() + Duration::from_millis(5));
        assert_eq!(connection.call(&[b"EXPIRED"], false, soon).await, Err(RedisError::Timeout));
        let last = connection.call(&[b"PING"], false, None);
        let answer = async {
            expect_pings(&mut server, 2).await;
            server.write_all(b":1\r\n:2\r\n").await.expect("the client reads");
        };
        let (first, last, ()) = tokio::join!(biased; first, last, answer);
        assert_eq!((first, last), (Ok(Reply::Integer(1)), Ok(Reply::Integer(2))));
    });
}
