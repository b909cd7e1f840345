//! Compares Redis clients by the CPU time of the client per call, and by calls per second.
//!
//! All clients send the same EVALSHA calls over one connection to a redis-server that this program starts. Each of 256
//! callers sends its next call after the reply to its last one, and each call has a deadline. Clients take turns within
//! a round, in another order in each round; the table has the medians of all rounds. Ratios within one run are
//! comparable, absolute times depend on the machine.
//!
//! `tests/bench/redis_clients/run.sh [--rounds N] [--calls N] [--callers N] [--workers N]`

mod batch;
mod clients;
mod load;
mod report;
mod server;

use std::collections::HashMap;
use std::env;
use std::time::Duration;

use clients::{fred_client, own, redis_rs};
use load::{Load, Sample};
use report::print_table;
use server::Server;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Deadline of a call.
const DEADLINE: Duration = Duration::from_millis(500);

/// Names of the compared clients, in the order of the table.
const CLIENTS: [&str; 5] =
    ["tollkeeper", "redis, batched pipelines", "redis, unchanged", "fred, unchanged", "fred, batched pipelines"];

fn main() {
    let options = Options::parse();
    let server = Server::start();
    let load = Load { calls: options.number("--calls"), callers: options.number("--callers") };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(options.number("--workers"))
        .enable_all()
        .build()
        .expect("a runtime starts");
    let rounds = options.number("--rounds");
    let mut samples: Vec<Vec<Sample>> = CLIENTS.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for step in 0..CLIENTS.len() {
            let client = (round + step) % CLIENTS.len();
            let sample = runtime.block_on(async {
                match client {
                    0 => load.run::<own::Client>(&server).await,
                    1 => load.run::<batch::Batched<redis_rs::Client>>(&server).await,
                    2 => load.run::<redis_rs::Client>(&server).await,
                    3 => load.run::<fred_client::Client>(&server).await,
                    _ => load.run::<batch::Batched<fred_client::Client>>(&server).await,
                }
            });
            samples[client].push(sample);
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    print_table(&CLIENTS, &samples);
}

/// Options of the command line, all numbers.
struct Options(HashMap<String, usize>);

impl Options {
    fn parse() -> Self {
        let defaults = [("--rounds", 9), ("--calls", 100_000), ("--callers", 256), ("--workers", 2)];
        let mut values: HashMap<String, usize> = defaults.map(|(name, value)| (name.to_owned(), value)).into();
        let arguments: Vec<String> = env::args().skip(1).collect();
        for pair in arguments.chunks(2) {
            let value = pair.get(1).and_then(|value| value.parse().ok()).filter(|value| *value > 0);
            match (values.get_mut(&pair[0]), value) {
                (Some(known), Some(value)) => *known = value,
                _ => {
                    eprintln!("usage: run.sh [--rounds N] [--calls N] [--callers N] [--workers N], each at least 1");
                    std::process::exit(2);
                }
            }
        }
        Self(values)
    }

    fn number(&self, name: &str) -> usize {
        self.0[name]
    }
}
