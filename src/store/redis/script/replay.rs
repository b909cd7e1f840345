//! Results of a call, computed from the states that its script returned.
//!
//! A script decides charges and changes states, but does not compute results. It returns its time and the states as it
//! found them. The same charges are repeated here on those states by the algorithms of
//! [`algorithm`](crate::algorithm), so that each result is computed in one place for all stores.

use smallvec::SmallVec;

use crate::algorithm::reply_reader::{MalformedReply, ReplyReader};
use crate::algorithm::state::{State, charge_together};
use crate::algorithm::{ChargeRequest, ChargeResult, EnforcedLimit};
use crate::clock::Time;
use crate::store::command::ChargeCommand;

/// Outcome of a call.
#[derive(Clone, Debug)]
pub struct ScriptOutcome {
    /// Results of each charge, one for each of its counters.
    pub results: Vec<SmallVec<[ChargeResult; 1]>>,
    /// States after all charges. Records of a log that no charge of the call can distinguish are merged.
    pub states: SmallVec<[State; 1]>,
    /// Time at which the charges were made.
    pub now: Time,
}

/// Repeats the charges of a call on the states in its script's reply, which tells the lent hits if the call concerns
/// leases.
///
/// # Errors
/// The script cannot have returned this reply.
pub fn replay(commands: &[ChargeCommand], reply: &[u8], has_leases: bool) -> Result<ScriptOutcome, MalformedReply> {
    let mut reader = ReplyReader::new(reply);
    let now = reader.time()?;
    let counters = commands.first().map_or(&[][..], |command| &command.counters);
    let mut states: SmallVec<[State; 1]> = SmallVec::with_capacity(counters.len());
    for counter in counters {
        let last = reader.time()?;
        states.push(State::read(counter.limit.counting(), &mut reader, last)?);
    }
    let lent = if has_leases { reader.number()? } else { 0 };
    if !reader.is_empty() {
        return Err(MalformedReply);
    }
    let results = commands.iter().map(|command| replay_one(command, &mut states, ReplyHead { now, lent })).collect();
    Ok(ScriptOutcome { results, states, now })
}

/// Time of a call, and the hits that are lent at it.
#[derive(Clone, Copy)]
struct ReplyHead {
    now: Time,
    lent: u64,
}

fn replay_one(command: &ChargeCommand, states: &mut [State], head: ReplyHead) -> SmallVec<[ChargeResult; 1]> {
    let ReplyHead { now, lent } = head;
    let limits = command.limits();
    let request = ChargeRequest { max_delay_us: command.max_delay_us(), lent, ..command.request };
    if command.dry_run {
        charge_together(&limits, &mut states.to_vec(), now, request)
    } else if let Some(void_from) = command.void_from {
        // A refund always passes, and each counter decides for itself whether the refund is void.
        let refund = |(limit, state): (&EnforcedLimit<'_>, &mut State)| {
            if state.time(limit.limit, now) >= void_from {
                state.clone().charge(limit.limit, now, request)
            } else {
                state.charge(limit.limit, now, request)
            }
        };
        limits.iter().zip(states.iter_mut()).map(refund).collect()
    } else {
        charge_together(&limits, states, now, request)
    }
}
