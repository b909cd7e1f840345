//! One multiplexed connection to one server: commands are pipelined, and replies arrive in the same order.
//!
//! A caller encodes its command into a queue and waits; one task, the driver, writes all that was queued since its last
//! write, reads the replies, and fails the commands whose deadline has passed. Calls that can share a command wait
//! unencoded, and are merged when the driver takes them.
//!
//! A connection is never reused after an error: it closes, all pending commands fail, and its owner opens a new one. A
//! command is sent once, and not at all if its caller is gone before it is written. The protocol is a parameter.
//!
//! Decides: how many calls and bytes may wait for a connection.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use bytes::{Buf, BytesMut};
use futures_util::task::AtomicWaker;
use smallvec::{SmallVec, smallvec};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::deadline::DeadlineTimer;
use super::server_status::AnswerDuration;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::write_coalescing::{YieldBarrier, wake_or_defer};

/// Encoding of commands, and decoding of replies.
pub trait WireProtocol: 'static {
    /// Reply to one command.
    type Reply: Send + 'static;

    /// Call that can share a command with others; [`NoMergeableCall`] if the protocol has none.
    type Mergeable: MergeableCall<Self::Reply>;

    /// Maximum size of a reply, in bytes; a longer one closes the connection.
    const MAX_REPLY_BYTES: usize;

    /// Appends a command to `out`.
    fn encode(out: &mut BytesMut, words: &[&[u8]]);

    /// Removes the first reply from `input`; `None` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are no reply.
    fn decode(input: &mut BytesMut) -> io::Result<Option<Self::Reply>>;

    /// Returns the text of an error reply.
    fn error_text(reply: &Self::Reply) -> Option<&str>;
}

/// Call that can share a command with others that are queued at the same moment.
pub trait MergeableCall<Reply>: Sized + Send + 'static {
    /// Maximum number of calls in one command.
    const MAX_MERGED: usize;

    /// Order in which calls that can share a command are neighbours.
    fn merge_order(&self, other: &Self) -> Ordering;

    /// Returns true if both calls can share a command.
    fn can_merge(&self, other: &Self) -> bool;

    /// Appends the command for these calls, which can share one.
    fn encode_merged(out: &mut BytesMut, calls: &[Self]);

    /// Returns the reply to each of the calls that shared a command, more than one.
    fn split_reply(reply: Reply, calls: usize) -> Vec<Reply>;
}

/// Mergeable call of a protocol without any.
#[derive(Debug)]
pub enum NoMergeableCall {}

impl<Reply> MergeableCall<Reply> for NoMergeableCall {
    const MAX_MERGED: usize = 1;

    fn merge_order(&self, _: &Self) -> Ordering {
        match *self {}
    }

    fn can_merge(&self, _: &Self) -> bool {
        match *self {}
    }

    fn encode_merged(_: &mut BytesMut, _: &[Self]) {}

    fn split_reply(reply: Reply, _: usize) -> Vec<Reply> {
        vec![reply]
    }
}

/// Reason why a command got no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineError {
    /// The deadline passed; the command may have run.
    Timeout,
    /// The connection closed; the command may have run.
    Broken,
    /// Too many commands are queued.
    Overloaded,
}

/// Byte stream to a server.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> ByteStream for S {}

/// Receives the reason once the connection is closed.
pub type ClosedReceiver = oneshot::Receiver<io::Error>;

/// Open connection; dropping it closes it and fails its pending commands.
pub struct Pipeline<P: WireProtocol> {
    queue: Arc<SendQueue<P>>,
    driver: JoinHandle<()>,
}

impl<P: WireProtocol> fmt::Debug for Pipeline<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipeline").finish_non_exhaustive()
    }
}

impl<P: WireProtocol> Drop for Pipeline<P> {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl<P: WireProtocol> Pipeline<P> {
    /// Opens a connection on `stream`. Needs a tokio runtime.
    pub fn open(stream: Box<dyn ByteStream>) -> (Self, ClosedReceiver) {
        let queue = Arc::new(SendQueue::default());
        let mut driver = ConnectionDriver::new(Arc::clone(&queue), stream);
        let (closed, receiver) = oneshot::channel();
        let driver = tokio::spawn(async move {
            let reason = poll_fn(|context| driver.poll(context)).await;
            // The stream is closed before the owner learns of it.
            drop(driver);
            let _no_receiver = closed.send(reason);
        });
        (Self { queue, driver }, receiver)
    }

    /// Time by which the last late reply exceeded the deadline of its command, with its age in seconds.
    pub(crate) fn last_lateness(&self) -> Option<(u64, Duration)> {
        self.queue.lateness.read()
    }

    /// Sends a command, after `prefix` if there is one, and waits for its reply until `deadline`. The reply to a prefix
    /// is dropped.
    ///
    /// # Errors
    /// No reply arrived. An error reply is a reply.
    pub async fn call(
        &self,
        words: &[&[u8]],
        prefix: Option<&[&[u8]]>,
        deadline: Option<Instant>,
    ) -> Result<P::Reply, PipelineError> {
        let reply = self.queue.push_command(words, prefix, deadline)?;
        reply.await.unwrap_or(Err(PipelineError::Broken))
    }

    /// Sends a call, in one command with calls that are queued at the same moment and can share it, and waits for its
    /// reply until `deadline`.
    ///
    /// # Errors
    /// No reply arrived. An error reply is a reply.
    pub async fn call_mergeable(&self, call: P::Mergeable, deadline: Instant) -> Result<P::Reply, PipelineError> {
        let reply = self.queue.push_mergeable(call, deadline)?;
        reply.await.unwrap_or(Err(PipelineError::Broken))
    }
}

/// Maximum number of calls that wait for a reply on one connection; bounds memory when a server is frozen.
const MAX_WAITING_CALLS: usize = 16_384;
/// Maximum size of unsent commands, in bytes.
const MAX_UNSENT_BYTES: usize = 64 << 20;

/// Reply to a command, or the reason why there is none.
type CallResult<P> = Result<<P as WireProtocol>::Reply, PipelineError>;

/// Queue that callers and the driver of a connection share.
struct SendQueue<P: WireProtocol> {
    state: Mutex<QueueState<P>>,
    /// Waker of the driver.
    driver_waker: AtomicWaker,
    /// Time by which the last late reply exceeded the deadline of its command.
    lateness: AnswerDuration,
}

/// Contents of a [`SendQueue`].
struct QueueState<P: WireProtocol> {
    closed: bool,
    unsent: BytesMut,
    /// Commands without a reply, in the order in which replies arrive.
    pending: VecDeque<PendingCommand<P>>,
    /// Number of commands at the end of `pending` whose bytes are in `unsent`.
    unsent_commands: usize,
    /// Unsent calls that can share a command.
    mergeable: Vec<UnsentMergeableCall<P>>,
    /// Number of callers of all pending commands and mergeable calls.
    waiting: usize,
    /// First deadline of all of them; `None` if none has one.
    earliest: Option<Instant>,
}

/// A command without a reply.
struct PendingCommand<P: WireProtocol> {
    /// Those that wait for the reply: one, none for a prefix, several if calls share the command.
    callers: SmallVec<[Caller<P>; 1]>,
    /// Size of the encoded command.
    bytes: usize,
}

/// An unsent call that can share a command.
struct UnsentMergeableCall<P: WireProtocol> {
    call: P::Mergeable,
    caller: Caller<P>,
}

/// Caller that waits for a reply.
struct Caller<P: WireProtocol> {
    /// Sender to the caller; `None` after the deadline.
    reply: Option<oneshot::Sender<CallResult<P>>>,
    deadline: Option<Instant>,
}

impl<P: WireProtocol> Default for SendQueue<P> {
    fn default() -> Self {
        Self { state: Mutex::default(), driver_waker: AtomicWaker::new(), lateness: AnswerDuration::default() }
    }
}

impl<P: WireProtocol> Default for QueueState<P> {
    fn default() -> Self {
        Self {
            closed: false,
            unsent: BytesMut::new(),
            pending: VecDeque::new(),
            unsent_commands: 0,
            mergeable: Vec::new(),
            waiting: 0,
            earliest: None,
        }
    }
}

impl<P: WireProtocol> SendQueue<P> {
    /// Locks the queue.
    fn lock(&self) -> MutexGuard<'_, QueueState<P>> {
        lock_ignoring_poison(&self.state)
    }

    /// Appends a command, after a prefix if there is one, and wakes the driver if needed.
    ///
    /// # Errors
    /// The connection is closed, or the queue is full.
    fn push_command(
        &self,
        words: &[&[u8]],
        prefix: Option<&[&[u8]]>,
        deadline: Option<Instant>,
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        self.push_with_caller(deadline, |state, caller| {
            if let Some(prefix) = prefix {
                state.append_command(SmallVec::new(), |out| P::encode(out, prefix));
            }
            state.append_command(smallvec![caller], |out| P::encode(out, words));
        })
    }

    /// Adds a call that can share a command, and wakes the driver if needed.
    ///
    /// # Errors
    /// The connection is closed, or the queue is full.
    fn push_mergeable(
        &self,
        call: P::Mergeable,
        deadline: Instant,
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        self.push_with_caller(Some(deadline), |state, caller| {
            state.mergeable.push(UnsentMergeableCall { call, caller });
        })
    }

    fn push_with_caller(
        &self,
        deadline: Option<Instant>,
        add: impl FnOnce(&mut QueueState<P>, Caller<P>),
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        let mut state = self.lock();
        if state.closed {
            return Err(PipelineError::Broken);
        }
        if state.waiting >= MAX_WAITING_CALLS || state.unsent.len() >= MAX_UNSENT_BYTES {
            return Err(PipelineError::Overloaded);
        }
        let mut wakes_driver = !state.has_unsent();
        let (reply, receiver) = oneshot::channel();
        state.waiting += 1;
        add(&mut state, Caller { reply: Some(reply), deadline });
        if let Some(deadline) = deadline
            && state.earliest.is_none_or(|earliest| deadline < earliest)
        {
            state.earliest = Some(deadline);
            wakes_driver = true;
        }
        drop(state);
        if wakes_driver && let Some(driver) = self.driver_waker.take() {
            wake_or_defer(driver);
        }
        Ok(receiver)
    }

    /// Closes the queue; all pending and later commands fail with [`PipelineError::Broken`].
    fn close(&self) {
        let closed = QueueState { closed: true, ..QueueState::default() };
        let state = std::mem::replace(&mut *self.lock(), closed);
        // Callers learn of the closed connection when their senders are dropped.
        drop(state);
    }
}

impl<P: WireProtocol> QueueState<P> {
    fn append_command(&mut self, callers: SmallVec<[Caller<P>; 1]>, encode: impl FnOnce(&mut BytesMut)) {
        let before = self.unsent.len();
        encode(&mut self.unsent);
        self.pending.push_back(PendingCommand { callers, bytes: self.unsent.len() - before });
        self.unsent_commands += 1;
    }

    /// First deadline of all callers.
    const fn earliest_deadline(&self) -> Option<Instant> {
        self.earliest
    }

    /// Returns true if there are commands to send.
    fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || !self.mergeable.is_empty()
    }

    /// Moves the unsent commands that a caller still waits for to `output`, which must be empty.
    fn take_unsent(&mut self, output: &mut BytesMut) {
        self.discard_abandoned();
        self.encode_mergeable_calls();
        std::mem::swap(output, &mut self.unsent);
        self.unsent_commands = 0;
    }

    /// Encodes the mergeable calls, as many as possible in one command.
    fn encode_mergeable_calls(&mut self) {
        let mut calls = std::mem::take(&mut self.mergeable);
        // Stable: calls with equal arguments stay in order.
        calls.sort_by(|one, other| one.call.merge_order(&other.call));
        let mut rest = calls.drain(..).peekable();
        while let Some(first) = rest.next() {
            let (mut merged, mut callers) = (SmallVec::<[P::Mergeable; 1]>::new(), SmallVec::new());
            merged.push(first.call);
            callers.push(first.caller);
            while merged.len() < P::Mergeable::MAX_MERGED
                && let Some(next) = rest.next_if(|next| merged[0].can_merge(&next.call))
            {
                merged.push(next.call);
                callers.push(next.caller);
            }
            self.append_command(callers, |out| P::Mergeable::encode_merged(out, &merged));
        }
        drop(rest);
        // Keeps the capacity.
        self.mergeable = calls;
    }

    /// Removes unsent commands whose callers were dropped or have expired: they have not run and never will.
    fn discard_abandoned(&mut self) {
        let before = self.mergeable.len();
        self.mergeable.retain(|call| !call.caller.is_gone());
        self.waiting -= before - self.mergeable.len();
        let first = self.pending.len() - self.unsent_commands;
        if !self.pending.range(first..).any(PendingCommand::is_abandoned) {
            return;
        }
        let (mut kept, mut from, mut to) = (first, 0, 0);
        for index in first..self.pending.len() {
            let bytes = self.pending[index].bytes;
            // The command behind a prefix decides for both.
            if !self.pending[index + usize::from(self.pending[index].is_prefix())].is_abandoned() {
                self.unsent.copy_within(from..from + bytes, to);
                to += bytes;
                self.pending.swap(kept, index);
                kept += 1;
            }
            from += bytes;
        }
        self.unsent.truncate(to);
        self.waiting -= self.pending.range(kept..).map(|command| command.callers.len()).sum::<usize>();
        self.pending.truncate(kept);
        self.unsent_commands = kept - first;
    }

    /// Removes up to `count` commands that got a reply; fewer if fewer were sent.
    fn take_answered(&mut self, count: usize) -> Drain<'_, PendingCommand<P>> {
        let count = count.min(self.pending.len() - self.unsent_commands);
        self.waiting -= self.pending.range(..count).map(|command| command.callers.len()).sum::<usize>();
        self.pending.drain(..count)
    }

    /// Fails callers whose deadline is at or before `now`, drops unsent commands without a caller, and
    /// finds the next deadline.
    fn fail_expired(&mut self, now: Instant) {
        self.earliest = None;
        let pending = self.pending.iter_mut().flat_map(|command| &mut command.callers);
        for caller in pending.chain(self.mergeable.iter_mut().map(|call| &mut call.caller)) {
            let (Some(due), Some(_)) = (caller.deadline, &caller.reply) else { continue };
            if due <= now {
                if let Some(reply) = caller.reply.take() {
                    let _gone = reply.send(Err(PipelineError::Timeout));
                }
            } else if self.earliest.is_none_or(|earliest| due < earliest) {
                self.earliest = Some(due);
            }
        }
        self.discard_abandoned();
    }
}

impl<P: WireProtocol> PendingCommand<P> {
    fn is_prefix(&self) -> bool {
        self.callers.is_empty()
    }

    /// Returns true if no caller waits for the reply. A prefix is never abandoned by itself.
    fn is_abandoned(&self) -> bool {
        !self.is_prefix() && self.callers.iter().all(Caller::is_gone)
    }

    /// Deadline of the first caller, if it has expired.
    fn expired_at(&self) -> Option<Instant> {
        self.callers.first().filter(|caller| caller.reply.is_none()).and_then(|caller| caller.deadline)
    }

    /// Passes the reply to the callers that still wait.
    fn answer_callers(self, reply: P::Reply) {
        if self.callers.len() > 1 {
            let replies = P::Mergeable::split_reply(reply, self.callers.len());
            self.callers.into_iter().zip(replies).for_each(|(caller, reply)| caller.send_reply(reply));
        } else if let Some(caller) = self.callers.into_iter().next() {
            caller.send_reply(reply);
        }
    }
}

impl<P: WireProtocol> Caller<P> {
    fn is_gone(&self) -> bool {
        self.reply.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn send_reply(self, reply: P::Reply) {
        if let Some(caller) = self.reply {
            let _gone = caller.send(Ok(reply));
        }
    }
}

/// Free space in the input buffer before each read, in bytes.
const MIN_READ_SPACE_BYTES: usize = 16 << 10;
/// Maximum capacity that an unused output buffer keeps, in bytes.
const MAX_KEPT_OUTPUT_BYTES: usize = 64 << 10;

/// State of the driver task; dropping it closes the queue and the stream.
struct ConnectionDriver<P: WireProtocol> {
    queue: Arc<SendQueue<P>>,
    stream: Box<dyn ByteStream>,
    input: BytesMut,
    output: BytesMut,
    replies: Vec<P::Reply>,
    yield_barrier: YieldBarrier,
    timer: DeadlineTimer,
}

impl<P: WireProtocol> Drop for ConnectionDriver<P> {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl<P: WireProtocol> ConnectionDriver<P> {
    /// Creates the driver of `stream` for the commands in `queue`. Needs a tokio runtime.
    fn new(queue: Arc<SendQueue<P>>, stream: Box<dyn ByteStream>) -> Self {
        Self {
            queue,
            stream,
            input: BytesMut::new(),
            output: BytesMut::new(),
            replies: Vec::new(),
            yield_barrier: YieldBarrier::default(),
            timer: DeadlineTimer::new(),
        }
    }

    /// Drives the connection; ready with the reason once it is closed.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        self.queue.driver_waker.register(context.waker());
        let result = self.read_replies(context).and_then(|()| {
            self.poll_deadlines(context);
            self.write_commands(context)
        });
        match result {
            Ok(()) => Poll::Pending,
            Err(reason) => Poll::Ready(reason),
        }
    }

    /// Reads all available replies and passes them to their callers.
    fn read_replies(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        loop {
            self.input.reserve(MIN_READ_SPACE_BYTES);
            let Poll::Ready(read) = pin!(self.stream.read_buf(&mut self.input)).poll(context) else { return Ok(()) };
            let read = read?;
            while let Some(reply) = P::decode(&mut self.input)? {
                self.replies.push(reply);
            }
            self.dispatch_replies()?;
            if read == 0 {
                return Err(io::Error::other("closed by the server"));
            }
            if self.input.len() > P::MAX_REPLY_BYTES {
                let text = format!("a reply of more than {} bytes", P::MAX_REPLY_BYTES);
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
            }
        }
    }

    fn dispatch_replies(&mut self) -> io::Result<()> {
        if self.replies.is_empty() {
            return Ok(());
        }
        // Collected first, so that no caller is woken while the queue is locked.
        let answered: Vec<PendingCommand<P>> = self.queue.lock().take_answered(self.replies.len()).collect();
        let mut replies = self.replies.drain(..);
        let mut expired_at = None;
        for (command, reply) in answered.into_iter().zip(replies.by_ref()) {
            expired_at = command.expired_at().or(expired_at);
            command.answer_callers(reply);
        }
        if let Some(due) = expired_at {
            let now = Instant::now();
            self.queue.lateness.record_last(now, now.saturating_duration_since(due));
        }
        match replies.next() {
            None => Ok(()),
            Some(reply) => {
                let text = P::error_text(&reply).unwrap_or("a reply without a command");
                Err(io::Error::other(text.to_owned()))
            }
        }
    }

    /// Fails commands whose deadline has passed.
    fn poll_deadlines(&mut self, context: &mut Context<'_>) {
        let earliest = self.queue.lock().earliest_deadline();
        self.timer.set_if_earlier(earliest);
        if self.timer.poll_fired(context).is_ready() {
            let mut queue = self.queue.lock();
            queue.fail_expired(Instant::now());
            let next = queue.earliest_deadline();
            drop(queue);
            self.timer.rearm(next, context);
        }
    }

    /// Writes the queued commands.
    fn write_commands(&mut self, context: &mut Context<'_>) -> io::Result<()> {
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

    /// Takes queued commands once other tasks have run; returns true if there is something to write.
    fn take_unsent(&mut self, context: &mut Context<'_>) -> bool {
        if !self.queue.lock().has_unsent() {
            return false;
        }
        if self.yield_barrier.poll(context).is_pending() {
            return false;
        }
        if self.output.capacity() > MAX_KEPT_OUTPUT_BYTES {
            self.output = BytesMut::new();
        }
        self.output.clear();
        self.queue.lock().take_unsent(&mut self.output);
        !self.output.is_empty()
    }
}
