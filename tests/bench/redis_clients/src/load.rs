//! Load of one client in one round, and its measurements.

use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use crate::clients::{Call, RedisClient};
use crate::server::Server;

/// Bytes of the script's argument.
const ARGUMENT_BYTES: usize = 100;
/// Keys of each caller, used in turn.
const KEYS_PER_CALLER: usize = 40;

/// Load to send.
#[derive(Clone, Copy)]
pub struct Load {
    /// Measured calls.
    pub calls: usize,
    /// Concurrent callers.
    pub callers: usize,
}

/// Measurements of one client in one round.
#[derive(Clone, Copy)]
pub struct Sample {
    /// CPU time of this process, user and system, in microseconds per call.
    pub cpu_us: f64,
    /// Calls per second.
    pub rate: f64,
    /// Calls without a reply before their deadline.
    pub failed: usize,
}

impl Load {
    /// Connects a client, warms it up with a tenth of the calls, and measures the calls.
    pub async fn run<C: RedisClient>(self, server: &Server) -> Sample {
        let client = C::connect(server).await;
        self.send(&client, self.calls / 10).await;
        let (cpu, start) = (cpu_time(), Instant::now());
        let failed = self.send(&client, self.calls).await;
        let (elapsed, cpu) = (start.elapsed(), cpu_time() - cpu);
        let calls = (self.calls / self.callers * self.callers) as f64;
        Sample { cpu_us: cpu.as_secs_f64() * 1e6 / calls, rate: calls / elapsed.as_secs_f64(), failed }
    }

    /// Sends calls from all callers; returns the number of failed calls.
    async fn send<C: RedisClient>(self, client: &C, calls: usize) -> usize {
        let callers: Vec<_> = (0..self.callers)
            .map(|caller| {
                let client = client.clone();
                let calls = calls / self.callers;
                tokio::spawn(async move {
                    let keys: Vec<Vec<u8>> = (0..KEYS_PER_CALLER)
                        .map(|key| format!("{{bench|user={caller}|path={key}}}:token_bucket:60s").into_bytes())
                        .collect();
                    let argument = [b'x'; ARGUMENT_BYTES];
                    let mut failed = 0;
                    for call in 0..calls {
                        let call = Call { key: &keys[call % KEYS_PER_CALLER], argument: &argument };
                        failed += usize::from(!client.call(call).await);
                    }
                    failed
                })
            })
            .collect();
        let mut failed = 0;
        for caller in callers {
            failed += caller.await.expect("no caller panics");
        }
        failed
    }
}

/// CPU time that this process has used, user and system.
fn cpu_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("the process may read its usage");
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.unsigned_abs())
}
