//! One line to one server: commands go out in their order, and replies come back in the same.
//!
//! Whoever calls appends its command to what is to be written and waits for its own reply. One task reads and writes:
//! what has gathered goes out as one write, and while replies are due the task waits for a lull first, so that a busy
//! server is sent hundreds of commands at a time and reads them so. The task also keeps the time for all who wait; a
//! reply that comes after its time is read and dropped.
//!
//! A line is never mended: once anything goes wrong it is closed, and all who wait hear that it broke. Commands are
//! sent once. The protocol is RESP2, which every server speaks and which has all that is used here.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, BytesMut};
use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Sleep, sleep_until};

use super::deadline::GRACE_YIELDS;
use super::error::RedisError;
use super::reply::{self, Reply};
use crate::coalesce::YieldBarrier;

/// What became of a command.
type Outcome = Result<Reply, RedisError>;

/// The most commands that may wait on one line: a frozen server must not take our memory.
const MOST_CALLS: usize = 16_384;
/// Nor may what it does not read, in bytes.
const MOST_UNSENT: usize = 64 << 20;
/// The longest reply; those of scripts have some kilobytes at most.
const MOST_REPLY: usize = 16 << 20;
/// What is read at once, in bytes.
const READ: usize = 16 << 10;
/// What an idle line may keep for writing, in bytes.
const KEPT: usize = 64 << 10;
/// Where a line has no time to keep.
const FAR: Duration = Duration::from_secs(3600);

/// Tells why a line ended, when it has.
pub(crate) type Closed = oneshot::Receiver<io::Error>;

/// Bytes to a server and back.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// A line in use. Dropping the last handle closes it.
pub(crate) struct Connection {
    queue: Arc<SendQueue>,
    task: JoinHandle<()>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Where callers leave commands.
struct SendQueue {
    queue: Mutex<Queue>,
    /// The line's task.
    task: AtomicWaker,
}

#[derive(Default)]
struct Queue {
    closed: bool,
    unsent: BytesMut,
    waiting: VecDeque<Waiting>,
    /// No reply is due before; `None`: none has a time.
    earliest: Option<Instant>,
}

/// Whoever waits for a reply.
struct Waiting {
    /// `None`: nobody does any more.
    answer: Option<oneshot::Sender<Outcome>>,
    until: Option<Instant>,
}

impl Connection {
    /// A line over `stream`, and what tells of its end.
    pub(crate) fn open(stream: impl Stream) -> (Self, Closed) {
        let queue = Arc::new(SendQueue { queue: Mutex::default(), task: AtomicWaker::new() });
        let mut traffic = ConnectionDriver {
            queue: Arc::clone(&queue),
            stream: Box::new(stream),
            input: BytesMut::new(),
            output: BytesMut::new(),
            replies: Vec::new(),
            lull: YieldBarrier::default(),
            alarm: DeadlineTimer {
                sleep: Box::pin(sleep_until((Instant::now() + FAR).into())),
                at: None,
                patience: None,
            },
        };
        let (ended, end) = oneshot::channel();
        let task = tokio::spawn(async move {
            let why = poll_fn(|context| traffic.poll(context)).await;
            // Closed before anybody hears of it.
            drop(traffic);
            let _nobody_asks = ended.send(why);
        });
        (Self { queue, task }, end)
    }

    /// Sends one command, and waits for its reply, not longer than `until`. `asking` sends ASKING before it.
    pub(crate) async fn call(&self, words: &[&[u8]], asking: bool, until: Option<Instant>) -> Outcome {
        let answer = {
            let mut queue = self.queue.queue();
            if queue.closed {
                return Err(RedisError::Broken);
            }
            if queue.waiting.len() >= MOST_CALLS || queue.unsent.len() >= MOST_UNSENT {
                return Err(RedisError::Overloaded);
            }
            let mut news = queue.unsent.is_empty();
            if asking {
                write_command(&mut queue.unsent, &[b"ASKING"]);
                queue.waiting.push_back(Waiting { answer: None, until: None });
            }
            write_command(&mut queue.unsent, words);
            let (answer, receiver) = oneshot::channel();
            queue.waiting.push_back(Waiting { answer: Some(answer), until });
            if let Some(until) = until
                && queue.earliest.is_none_or(|earliest| until < earliest)
            {
                queue.earliest = Some(until);
                news = true;
            }
            drop(queue);
            if news {
                self.queue.task.wake();
            }
            receiver
        };
        answer.await.unwrap_or(Err(RedisError::Broken))
    }
}

impl SendQueue {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Tells those whose time is up at `now`, and finds out whose time is up next.
    fn expire(&mut self, now: Instant) {
        self.earliest = None;
        for Waiting { answer, until: due } in &mut self.waiting {
            let Some(until) = *due else { continue };
            if until <= now {
                *due = None;
                if let Some(answer) = answer.take() {
                    let _gone = answer.send(Err(RedisError::Timeout));
                }
            } else if self.earliest.is_none_or(|earliest| until < earliest) {
                self.earliest = Some(until);
            }
        }
    }
}

/// A command as a list of words.
fn write_command(out: &mut BytesMut, words: &[&[u8]]) {
    write_head(out, b'*', words.len());
    for word in words {
        write_head(out, b'$', word.len());
        out.put_slice(word);
        out.put_slice(b"\r\n");
    }
}

fn write_head(out: &mut BytesMut, mark: u8, count: usize) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    let mut rest = count;
    loop {
        start -= 1;
        digits[start] = b"0123456789"[rest % 10];
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.put_u8(mark);
    out.put_slice(&digits[start..]);
    out.put_slice(b"\r\n");
}

/// What the line's task does.
struct ConnectionDriver {
    queue: Arc<SendQueue>,
    stream: Box<dyn Stream>,
    input: BytesMut,
    output: BytesMut,
    replies: Vec<Reply>,
    lull: YieldBarrier,
    alarm: DeadlineTimer,
}

/// When the first of those who wait is to be told that its time is up.
struct DeadlineTimer {
    sleep: Pin<Box<Sleep>>,
    at: Option<Instant>,
    /// It has rung, and so often others are let run first: a process that was not let run for a while finds the clock
    /// and the replies at once.
    patience: Option<usize>,
}

impl Drop for ConnectionDriver {
    fn drop(&mut self) {
        let mut queue = self.queue.queue();
        let waiting = std::mem::take(&mut *queue).waiting;
        queue.closed = true;
        drop(queue);
        // They hear that it broke.
        drop(waiting);
    }
}

impl ConnectionDriver {
    /// Goes on until the line ends; why it does.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        self.queue.task.register(context.waker());
        let end = self.read(context).and_then(|()| {
            self.poll_deadlines(context);
            self.write(context)
        });
        match end {
            Ok(()) => Poll::Pending,
            Err(why) => Poll::Ready(why),
        }
    }

    /// Reads what has come, and hands it out.
    fn read(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            self.input.reserve(READ);
            let Poll::Ready(read) = pin!(self.stream.read_buf(&mut self.input)).poll(context) else { return Ok(()) };
            let read = read?;
            while let Some(reply) = reply::next(&mut self.input)? {
                self.replies.push(reply);
            }
            self.dispatch_replies()?;
            if read == 0 {
                return Err(io::Error::other("closed by the server"));
            }
            if self.input.len() > MOST_REPLY {
                return Err(io::Error::other(format!("a reply of more than {MOST_REPLY} bytes")));
            }
        }
    }

    fn dispatch_replies(&mut self) -> io::Result<()> {
        if self.replies.is_empty() {
            return Ok(());
        }
        let mut queue = self.queue.queue();
        let known = self.replies.len().min(queue.waiting.len());
        let waiting: Vec<Waiting> = queue.waiting.drain(..known).collect();
        drop(queue);
        let mut replies = self.replies.drain(..);
        for (Waiting { answer, .. }, reply) in waiting.into_iter().zip(replies.by_ref()) {
            if let Some(answer) = answer {
                let _gone = answer.send(Ok(reply));
            }
        }
        match replies.next() {
            None => Ok(()),
            Some(Reply::Error(text)) => Err(io::Error::other(text.to_string())),
            Some(_) => Err(io::Error::other("a reply to nothing")),
        }
    }

    /// Tells those whose time is up.
    fn poll_deadlines(&mut self, context: &mut Context<'_>) {
        let alarm = &mut self.alarm;
        let earliest = self.queue.queue().earliest;
        match (earliest, alarm.at) {
            (Some(earliest), at) if at.is_none_or(|at| earliest < at) => {
                alarm.at = Some(earliest);
                alarm.sleep.as_mut().reset(earliest.into());
            }
            _ => {}
        }
        if alarm.at.is_none() {
            return;
        }
        if alarm.patience.is_none() && alarm.sleep.as_mut().poll(context).is_ready() {
            alarm.patience = Some(GRACE_YIELDS);
        }
        match alarm.patience {
            None => {}
            Some(0) => {
                let mut queue = self.queue.queue();
                queue.expire(Instant::now());
                alarm.patience = None;
                alarm.at = queue.earliest;
                drop(queue);
                if let Some(at) = alarm.at {
                    alarm.sleep.as_mut().reset(at.into());
                    if alarm.sleep.as_mut().poll(context).is_ready() {
                        context.waker().wake_by_ref();
                    }
                }
            }
            Some(left) => {
                alarm.patience = Some(left - 1);
                let _pending = pin!(tokio::task::yield_now()).poll(context);
            }
        }
    }

    /// Writes what there is to write.
    fn write(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            if self.output.is_empty() && !self.take_unsent(context) {
                break;
            }
            match Pin::new(&mut self.stream).poll_write(context, &self.output) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(written)) => self.output.advance(written),
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => return Ok(()),
            }
        }
        match Pin::new(&mut self.stream).poll_flush(context) {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => Ok(()),
        }
    }

    /// Takes what callers have left, if it is time; whether there is anything to write now.
    fn take_unsent(&mut self, context: &mut Context<'_>) -> bool {
        if self.queue.queue().unsent.is_empty() {
            return false;
        }
        if self.lull.poll(context).is_pending() {
            return false;
        }
        if self.output.capacity() > KEPT {
            self.output = BytesMut::new();
        }
        self.output.clear();
        std::mem::swap(&mut self.output, &mut self.queue.queue().unsent);
        true
    }
}

/// An error of the system, without its number.
pub(crate) fn in_words(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::runtime::Builder;

    use super::{Connection, Reply};
    use crate::redis::error::RedisError;

    const PING: &[u8] = b"*1\r\n$4\r\nPING\r\n";

    fn on_a_line<F: Future>(work: impl FnOnce(Connection, DuplexStream) -> F) -> F::Output {
        let runtime = Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let (ours, theirs) = duplex(1 << 20);
            work(Connection::open(ours).0, theirs).await
        })
    }

    async fn hear(server: &mut DuplexStream, pings: usize) {
        let mut heard = vec![0; PING.len() * pings];
        server.read_exact(&mut heard).await.expect("the commands come");
        assert_eq!(heard, PING.repeat(pings));
    }

    #[test]
    fn a_late_reply_is_nobody_elses() {
        on_a_line(|line, mut server| async move {
            let soon = Some(Instant::now() + Duration::from_millis(5));
            let (late, next) = (line.call(&[b"PING"], false, soon), line.call(&[b"PING"], false, None));
            let answer = async {
                hear(&mut server, 2).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                server.write_all(b":1\r\n:2\r\n").await.expect("it is read");
            };
            let (late, next, ()) = tokio::join!(biased; late, next, answer);
            assert_eq!(late, Err(RedisError::Timeout));
            assert_eq!(next, Ok(Reply::Integer(2)));
        });
    }

    #[test]
    fn replies_in_pieces_reach_those_who_asked_in_order() {
        on_a_line(|line, mut server| async move {
            let calls = futures_util::future::join_all((0..100).map(|_| line.call(&[b"PING"], false, None)));
            let answer = async {
                hear(&mut server, 100).await;
                for byte in (0..100).flat_map(|number| format!("$2\r\n{number:02}\r\n").into_bytes()) {
                    server.write_all(&[byte]).await.expect("it is read");
                }
            };
            for (number, reply) in tokio::join!(biased; calls, answer).0.into_iter().enumerate() {
                assert_eq!(reply, Ok(Reply::BulkString(format!("{number:02}").into())));
            }
        });
    }

    #[test]
    fn a_line_that_breaks_fails_who_waits_and_who_comes() {
        for nonsense in [&b""[..], b"HTTP/1.1 400 Bad Request\r\n", b":1\r\n:2\r\n:3\r\n"] {
            on_a_line(|line, mut server| async move {
                let break_it = async {
                    hear(&mut server, 1).await;
                    server.write_all(nonsense).await.expect("it is read");
                    drop(server);
                };
                let (reply, ()) = tokio::join!(biased; line.call(&[b"PING"], false, None), break_it);
                assert!(matches!(reply, Err(RedisError::Broken) | Ok(Reply::Integer(1))), "{reply:?}");
                assert_eq!(line.call(&[b"PING"], false, None).await, Err(RedisError::Broken));
            });
        }
    }
}
