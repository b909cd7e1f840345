//! Cost of the decision log: a decision with it, relative to one without, in the same run.
//!
//! The cost is CPU time of the whole process, so that of the writer is included.

use crate::load::{STREAMS, closed_loop, median};
use crate::process::{self, MeasuredServer};
use crate::{ROUND, ROUNDS, request, rules};

/// Number of keys; a sample of 1 % has a thousand of them.
const KEYS: u64 = 100_000;

/// CPU time per decision with the log. The goals: a sample of 1 % costs 3 % at most, all decisions 1.5 us each.
pub(crate) async fn cost() {
    println!("{:<34} {:>10} {:>10} {:>7} {:>9}", "decision log", "us/call", "off", "ratio", "calls/s");
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    for (label, name, sample) in [
        ("1 % of the keys, to a file", "sample", "0.01"),
        ("all decisions, to a file", "all", "1"),
        ("all decisions, compressed", "all.gz", "1"),
    ] {
        let sink = format!("file:{}", directory.path().join(name).display());
        let logging = process::tollkeeper(&rules(10))
            .env("TOLLKEEPER_DECISION_LOG", sink)
            .env("TOLLKEEPER_DECISION_LOG_WHEN", "all")
            .env("TOLLKEEPER_DECISION_LOG_SAMPLE", sample)
            .env("TOLLKEEPER_DECISION_LOG_FILES", "2");
        compare(label, &MeasuredServer::start(logging), &MeasuredServer::start(process::tollkeeper(&rules(10)))).await;
    }
}

async fn compare(label: &str, logging: &MeasuredServer, off: &MeasuredServer) {
    for server in [logging, off] {
        closed_loop(server, KEYS, request, (STREAMS, ROUND)).await;
    }
    let (mut ratios, mut ons, mut offs, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // Around each measurement, so that drift of the machine affects both.
        let before = closed_loop(off, KEYS, request, (STREAMS, ROUND)).await.us_per_call;
        let on = closed_loop(logging, KEYS, request, (STREAMS, ROUND)).await;
        let after = closed_loop(off, KEYS, request, (STREAMS, ROUND)).await.us_per_call;
        let without = f64::midpoint(before, after);
        ratios.push(on.us_per_call / without);
        ons.push(on.us_per_call);
        offs.push(without);
        rates.push(on.calls_per_s);
    }
    println!(
        "{label:<34} {:>10.2} {:>10.2} {:>7.3} {:>9.0}",
        median(&mut ons),
        median(&mut offs),
        median(&mut ratios),
        median(&mut rates)
    );
}
