//! Redirections of one call through a cluster.

use std::mem::replace;
use std::sync::Arc;
use std::time::Instant;

use super::deployment::Deployment;
use super::error::{RedisError, ReplyError};
use super::node::Node;

/// Maximum number of times a call is sent to another node.
const MAX_REDIRECTS: usize = 5;

/// Node to send a call to, updated from MOVED and ASK replies.
#[derive(Debug)]
pub(crate) struct Redirects<'d> {
    deployment: &'d Deployment,
    /// Node to send the call to.
    pub(crate) node: Arc<Node>,
    /// True to send ASKING before the call.
    pub(crate) asking: bool,
    /// Owner of the slot, while the node is one that an ASK reply named.
    owner: Option<Arc<Node>>,
    followed: usize,
}

impl<'d> Redirects<'d> {
    /// Starts at the owner of `slot`.
    ///
    /// # Errors
    /// No owner is known by `deadline`.
    pub(crate) async fn start(
        deployment: &'d Deployment,
        slot: impl FnOnce() -> u16,
        deadline: Instant,
    ) -> Result<Self, RedisError> {
        Ok(Self { deployment, node: deployment.owner(slot, deadline).await?, asking: false, owner: None, followed: 0 })
    }

    /// Returns to the owner of the slot after a command that an ASK reply redirected: other keys may still be there.
    pub(crate) fn end_asking(&mut self) {
        if let Some(owner) = self.owner.take() {
            (self.node, self.asking, self.followed) = (owner, false, 0);
        }
    }

    /// Follows a redirection, so that the call can be sent again.
    ///
    /// # Errors
    /// The reply is a failure, or the call was redirected too often.
    pub(crate) fn follow(&mut self, reply: ReplyError, slot: impl FnOnce() -> u16) -> Result<(), RedisError> {
        let (address, moved) = match reply {
            ReplyError::Failed(error) => {
                if error == RedisError::SlotDown {
                    self.deployment.request_refresh();
                }
                return Err(error);
            }
            ReplyError::NoScript => return Err(RedisError::BadReply),
            ReplyError::Moved(address) => (address, true),
            ReplyError::Ask(address) => (address, false),
        };
        let next = self.deployment.node_at(&address, &self.node).ok_or(RedisError::Misconfigured)?;
        if moved {
            self.deployment.set_slot_owner(slot(), &next);
        }
        let previous = replace(&mut self.node, next);
        self.asking = !moved;
        self.owner = if moved { None } else { Some(self.owner.take().unwrap_or(previous)) };
        self.followed += 1;
        if self.followed > MAX_REDIRECTS { Err(RedisError::SlotDown) } else { Ok(()) }
    }
}
