//! Queue between callers and the connection driver: unsent bytes, and the commands that wait for a reply.

use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::BytesMut;
use futures_util::task::AtomicWaker;
use tokio::sync::oneshot;

use crate::store_client::wire_protocol::{PipelineError, WireProtocol};

/// Maximum number of commands that wait for a reply on one connection; bounds memory when a server is frozen.
const MAX_PENDING_COMMANDS: usize = 16_384;
/// Maximum size of unsent commands, in bytes.
const MAX_UNSENT_BYTES: usize = 64 << 20;

/// Reply to a command, or the reason why there is none.
pub(super) type CallResult<P> = Result<<P as WireProtocol>::Reply, PipelineError>;

/// Queue that callers and the driver of a connection share.
pub(super) struct SendQueue<P: WireProtocol> {
    state: Mutex<QueueState<P>>,
    /// Waker of the driver.
    pub(super) driver: AtomicWaker,
}

/// Contents of a [`SendQueue`].
pub(super) struct QueueState<P: WireProtocol> {
    closed: bool,
    unsent: BytesMut,
    /// Commands without a reply, in the order in which replies arrive.
    pending: VecDeque<PendingCommand<P>>,
    /// Number of commands at the end of `pending` whose bytes are in `unsent`.
    unsent_commands: usize,
    /// First deadline of all pending commands; `None` if no command has one.
    earliest: Option<Instant>,
}

/// A command without a reply.
pub(super) struct PendingCommand<P: WireProtocol> {
    /// Sender of the reply; `None` after the deadline, and for a prefix.
    caller: Option<oneshot::Sender<CallResult<P>>>,
    deadline: Option<Instant>,
    /// Size of the encoded command.
    bytes: usize,
    /// The command is a prefix, which belongs to the next command.
    is_prefix: bool,
}

impl<P: WireProtocol> Default for SendQueue<P> {
    fn default() -> Self {
        Self { state: Mutex::default(), driver: AtomicWaker::new() }
    }
}

impl<P: WireProtocol> Default for QueueState<P> {
    fn default() -> Self {
        let unsent = BytesMut::new();
        Self { closed: false, unsent, pending: VecDeque::new(), unsent_commands: 0, earliest: None }
    }
}

impl<P: WireProtocol> SendQueue<P> {
    /// Locks the queue.
    pub(super) fn lock(&self) -> MutexGuard<'_, QueueState<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a command, after a prefix if there is one, and wakes the driver if needed.
    ///
    /// # Errors
    /// The connection is closed, or the queue is full.
    pub(super) fn push(
        &self,
        words: &[&[u8]],
        prefix: Option<&[&[u8]]>,
        deadline: Option<Instant>,
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        let mut state = self.lock();
        if state.closed {
            return Err(PipelineError::Broken);
        }
        if state.pending.len() >= MAX_PENDING_COMMANDS || state.unsent.len() >= MAX_UNSENT_BYTES {
            return Err(PipelineError::Overloaded);
        }
        let mut wakes_driver = state.unsent.is_empty();
        if let Some(prefix) = prefix {
            state.append(prefix, None, None);
        }
        let (caller, reply) = oneshot::channel();
        state.append(words, Some(caller), deadline);
        if let Some(deadline) = deadline
            && state.earliest.is_none_or(|earliest| deadline < earliest)
        {
            state.earliest = Some(deadline);
            wakes_driver = true;
        }
        drop(state);
        if wakes_driver {
            self.driver.wake();
        }
        Ok(reply)
    }

    /// Closes the queue; all pending and later commands fail with [`PipelineError::Broken`].
    pub(super) fn close(&self) {
        let mut state = self.lock();
        let pending = std::mem::take(&mut *state).pending;
        state.closed = true;
        drop(state);
        // Callers learn of the closed connection when their senders are dropped.
        drop(pending);
    }
}

impl<P: WireProtocol> QueueState<P> {
    fn append(&mut self, words: &[&[u8]], caller: Option<oneshot::Sender<CallResult<P>>>, deadline: Option<Instant>) {
        let before = self.unsent.len();
        P::encode(&mut self.unsent, words);
        let (bytes, is_prefix) = (self.unsent.len() - before, caller.is_none());
        self.pending.push_back(PendingCommand { caller, deadline, bytes, is_prefix });
        self.unsent_commands += 1;
    }

    /// First deadline of all pending commands.
    pub(super) const fn earliest(&self) -> Option<Instant> {
        self.earliest
    }

    /// Returns true if there are commands to send.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Moves the unsent commands that a caller still waits for to `output`, which must be empty.
    pub(super) fn take_unsent(&mut self, output: &mut BytesMut) {
        self.discard_abandoned();
        std::mem::swap(output, &mut self.unsent);
        self.unsent_commands = 0;
    }

    /// Removes unsent commands whose caller was dropped or whose deadline has passed: they have not run and never will.
    fn discard_abandoned(&mut self) {
        let first = self.pending.len() - self.unsent_commands;
        if !self.pending.range(first..).any(PendingCommand::is_abandoned) {
            return;
        }
        let (mut kept, mut from, mut to) = (first, 0, 0);
        for index in first..self.pending.len() {
            let PendingCommand { bytes, is_prefix, .. } = self.pending[index];
            // The command behind a prefix decides for both.
            if !self.pending[index + usize::from(is_prefix)].is_abandoned() {
                self.unsent.copy_within(from..from + bytes, to);
                to += bytes;
                self.pending.swap(kept, index);
                kept += 1;
            }
            from += bytes;
        }
        self.unsent.truncate(to);
        self.pending.truncate(kept);
        self.unsent_commands = kept - first;
    }

    /// Removes up to `count` commands that got a reply; fewer if fewer were sent.
    pub(super) fn take_answered(&mut self, count: usize) -> Drain<'_, PendingCommand<P>> {
        let count = count.min(self.pending.len() - self.unsent_commands);
        self.pending.drain(..count)
    }

    /// Fails commands whose deadline is at or before `now`, drops those of them that are unsent, and finds the next
    /// deadline.
    pub(super) fn expire(&mut self, now: Instant) {
        self.earliest = None;
        for PendingCommand { caller, deadline, .. } in &mut self.pending {
            let Some(due) = *deadline else { continue };
            if due <= now {
                *deadline = None;
                if let Some(caller) = caller.take() {
                    let _gone = caller.send(Err(PipelineError::Timeout));
                }
            } else if self.earliest.is_none_or(|earliest| due < earliest) {
                self.earliest = Some(due);
            }
        }
        self.discard_abandoned();
    }
}

impl<P: WireProtocol> PendingCommand<P> {
    /// Returns true if no caller waits for the reply. A prefix has no caller and is never abandoned by itself.
    fn is_abandoned(&self) -> bool {
        !self.is_prefix && self.caller.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    /// Passes the reply to the caller, if the caller still waits.
    pub(super) fn answer(self, reply: P::Reply) {
        if let Some(caller) = self.caller {
            let _gone = caller.send(Ok(reply));
        }
    }
}
