//! Queue between callers and the connection driver: unsent commands, and the callers that wait for a reply.
//!
//! Calls that can share a command wait unencoded until the driver takes them, and are merged then.

use std::collections::VecDeque;
use std::collections::vec_deque::Drain;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use bytes::BytesMut;
use futures_util::task::AtomicWaker;
use smallvec::{SmallVec, smallvec};
use tokio::sync::oneshot;

use crate::base::sharded::lock_ignoring_poison;
use crate::base::write_coalescing::wake_or_defer;
use crate::store::client::wire_protocol::{MergeableCall, PipelineError, WireProtocol};

/// Maximum number of calls that wait for a reply on one connection; bounds memory when a server is frozen.
const MAX_WAITING: usize = 16_384;
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
    /// Unsent calls that can share a command.
    mergeable: Vec<QueuedCall<P>>,
    /// Number of callers of all pending commands and mergeable calls.
    waiting: usize,
    /// First deadline of all of them; `None` if none has one.
    earliest: Option<Instant>,
}

/// A command without a reply.
pub(super) struct PendingCommand<P: WireProtocol> {
    /// Those that wait for the reply: one, none for a prefix, several if calls share the command.
    callers: SmallVec<[Caller<P>; 1]>,
    /// Size of the encoded command.
    bytes: usize,
}

/// An unsent call that can share a command.
struct QueuedCall<P: WireProtocol> {
    call: P::Mergeable,
    caller: Caller<P>,
}

/// Receiver of a reply.
struct Caller<P: WireProtocol> {
    /// Sender of the reply; `None` after the deadline.
    reply: Option<oneshot::Sender<CallResult<P>>>,
    deadline: Option<Instant>,
}

impl<P: WireProtocol> Default for SendQueue<P> {
    fn default() -> Self {
        Self { state: Mutex::default(), driver: AtomicWaker::new() }
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
    pub(super) fn lock(&self) -> MutexGuard<'_, QueueState<P>> {
        lock_ignoring_poison(&self.state)
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
        self.push_with(deadline, |state, caller| {
            if let Some(prefix) = prefix {
                state.append(SmallVec::new(), |out| P::encode(out, prefix));
            }
            state.append(smallvec![caller], |out| P::encode(out, words));
        })
    }

    /// Adds a call that can share a command, and wakes the driver if needed.
    ///
    /// # Errors
    /// The connection is closed, or the queue is full.
    pub(super) fn push_mergeable(
        &self,
        call: P::Mergeable,
        deadline: Instant,
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        self.push_with(Some(deadline), |state, caller| state.mergeable.push(QueuedCall { call, caller }))
    }

    fn push_with(
        &self,
        deadline: Option<Instant>,
        add: impl FnOnce(&mut QueueState<P>, Caller<P>),
    ) -> Result<oneshot::Receiver<CallResult<P>>, PipelineError> {
        let mut state = self.lock();
        if state.closed {
            return Err(PipelineError::Broken);
        }
        if state.waiting >= MAX_WAITING || state.unsent.len() >= MAX_UNSENT_BYTES {
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
        if wakes_driver && let Some(driver) = self.driver.take() {
            wake_or_defer(driver);
        }
        Ok(receiver)
    }

    /// Closes the queue; all pending and later commands fail with [`PipelineError::Broken`].
    pub(super) fn close(&self) {
        let closed = QueueState { closed: true, ..QueueState::default() };
        let state = std::mem::replace(&mut *self.lock(), closed);
        // Callers learn of the closed connection when their senders are dropped.
        drop(state);
    }
}

impl<P: WireProtocol> QueueState<P> {
    fn append(&mut self, callers: SmallVec<[Caller<P>; 1]>, encode: impl FnOnce(&mut BytesMut)) {
        let before = self.unsent.len();
        encode(&mut self.unsent);
        self.pending.push_back(PendingCommand { callers, bytes: self.unsent.len() - before });
        self.unsent_commands += 1;
    }

    /// First deadline of all callers.
    pub(super) const fn earliest(&self) -> Option<Instant> {
        self.earliest
    }

    /// Returns true if there are commands to send.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty() || !self.mergeable.is_empty()
    }

    /// Moves the unsent commands that a caller still waits for to `output`, which must be empty.
    pub(super) fn take_unsent(&mut self, output: &mut BytesMut) {
        self.discard_abandoned();
        self.merge();
        std::mem::swap(output, &mut self.unsent);
        self.unsent_commands = 0;
    }

    /// Encodes the mergeable calls, as many as possible in one command.
    fn merge(&mut self) {
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
            self.append(callers, |out| P::Mergeable::encode_merged(out, &merged));
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
    pub(super) fn take_answered(&mut self, count: usize) -> Drain<'_, PendingCommand<P>> {
        let count = count.min(self.pending.len() - self.unsent_commands);
        self.waiting -= self.pending.range(..count).map(|command| command.callers.len()).sum::<usize>();
        self.pending.drain(..count)
    }

    /// Fails callers whose deadline is at or before `now`, drops unsent commands without a caller, and
    /// finds the next deadline.
    pub(super) fn expire(&mut self, now: Instant) {
        self.earliest = None;
        let pending = self.pending.iter_mut().flat_map(|command| &mut command.callers);
        for caller in pending.chain(self.mergeable.iter_mut().map(|call| &mut call.caller)) {
            let Some(due) = caller.deadline else { continue };
            if due <= now {
                caller.deadline = None;
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

    /// Passes the reply to the callers that still wait.
    pub(super) fn answer(self, reply: P::Reply) {
        if self.callers.len() > 1 {
            let replies = P::Mergeable::split_reply(reply, self.callers.len());
            self.callers.into_iter().zip(replies).for_each(|(caller, reply)| caller.answer(reply));
        } else if let Some(caller) = self.callers.into_iter().next() {
            caller.answer(reply);
        }
    }
}

impl<P: WireProtocol> Caller<P> {
    fn is_gone(&self) -> bool {
        self.reply.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    fn answer(self, reply: P::Reply) {
        if let Some(caller) = self.reply {
            let _gone = caller.send(Ok(reply));
        }
    }
}
