//! Cost of metrics: a decision with them on and off, and a scrape of ten thousand rules.
//!
//! Off is `DISABLE_STATS=true`, which counts nothing. On is the default, with a scrape every second, far more often
//! than in production.

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::load::{Pace, STREAMS, closed_loop, median, open_loop_latencies, percentile};
use crate::process::{self, MeasuredServer};
use crate::{ROUND, ROUNDS, request, rules, rules_with};
use kit::port::Port;
use kit::{http, scrape};

/// Load on both servers.
struct Situation {
    label: &'static str,
    limit: &'static str,
    keys: u64,
    scraped: bool,
}

const PASSES: &str = "{unit: day, requests_per_unit: 10, bucket_size: 4000000000, algorithm: token_bucket}";
const REJECTING_LIMIT: &str = "{unit: day, requests_per_unit: 1}";

/// CPU time per decision with metrics on, relative to metrics off; the goal is 1.05 or less.
pub(crate) async fn cost() {
    println!("{:<34} {:>10} {:>10} {:>7} {:>9}", "metrics", "us/call", "off", "ratio", "calls/s");
    for situation in [
        Situation { label: "one hot key", limit: PASSES, keys: 1, scraped: false },
        Situation { label: "100 000 keys", limit: PASSES, keys: 100_000, scraped: false },
        Situation { label: "100 000 keys, scraped each second", limit: PASSES, keys: 100_000, scraped: true },
        Situation { label: "one hot key, rejected", limit: REJECTING_LIMIT, keys: 1, scraped: false },
        Situation { label: "100 000 keys, rejected", limit: REJECTING_LIMIT, keys: 100_000, scraped: false },
    ] {
        compare(&situation).await;
    }
}

async fn compare(situation: &Situation) {
    let rules = rules_with(situation.limit, 10);
    let (on, page) = scraped_server(&rules);
    let off = MeasuredServer::start(process::tollkeeper(&rules).env("DISABLE_STATS", "true"));
    let warm = Duration::from_secs(1 + situation.keys / 100_000);
    for server in [&on, &off] {
        closed_loop(server, situation.keys, request, (STREAMS, warm)).await;
    }
    let scraper = situation.scraped.then(|| Scraper::start(page.number()));
    let (mut ratios, mut ons, mut offs, mut rates) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..2 * ROUNDS {
        // The second measurement finds a warmer machine, so the order alternates.
        let (with, without) = if round % 2 == 0 {
            let with = measure(&on, situation.keys).await;
            (with, measure(&off, situation.keys).await)
        } else {
            let without = measure(&off, situation.keys).await;
            (measure(&on, situation.keys).await, without)
        };
        ratios.push(with.0 / without.0);
        ons.push(with.0);
        offs.push(without.0);
        rates.push(with.1);
    }
    drop(scraper);
    println!(
        "{:<34} {:>10.2} {:>10.2} {:>7.3} {:>9.0}",
        situation.label,
        median(&mut ons),
        median(&mut offs),
        median(&mut ratios),
        median(&mut rates)
    );
}

async fn measure(server: &MeasuredServer, keys: u64) -> (f64, f64) {
    let cost = closed_loop(server, keys, request, (STREAMS, ROUND)).await;
    (cost.us_per_call, cost.calls_per_s)
}

/// Duration of a scrape of 10 000 rules (the goal is 100 ms or less), and its effect on the latency of calls.
pub(crate) async fn scrape() {
    let (server, page) = scraped_server(&rules(10_000));
    closed_loop(&server, 1000, request, (STREAMS, Duration::from_secs(1))).await;
    let size = fetch(page.number());
    let mut alone: Vec<f64> = (0..20).map(|_| timed_fetch(page.number())).collect();
    println!(
        "scrape of 10 000 rules: {:.1} ms, slowest of 20 {:.1} ms, {:.1} MB",
        median(&mut alone),
        alone.last().expect("there are 20"),
        size as f64 / 1e6
    );
    let (mut p99s, mut p999s) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut found = [Vec::new(), Vec::new()];
        for scraped in if round % 2 == 0 { [true, false] } else { [false, true] } {
            let scraper = scraped.then(|| Scraper::start(page.number()));
            found[usize::from(scraped)] =
                open_loop_latencies(&server, 2000, Duration::from_secs(10), Pace::Sleep, request).await;
            let slowest = scraper.map(Scraper::stop);
            let latencies = &found[usize::from(scraped)];
            println!(
                "2000 calls/s, {}: p50 {} us, p99 {} us, p99.9 {} us{}",
                if scraped { "scraped each second" } else { "not scraped" },
                percentile(latencies, 500),
                percentile(latencies, 990),
                percentile(latencies, 999),
                slowest.map_or_else(String::new, |ms| format!(", slowest scrape {ms:.1} ms"))
            );
        }
        let [without, with] = found;
        p99s.push(percentile(&with, 990) as f64 / percentile(&without, 990) as f64);
        p999s.push(percentile(&with, 999) as f64 / percentile(&without, 999) as f64);
    }
    println!("scraped to not scraped: p99 {:.3}, p99.9 {:.3}", median(&mut p99s), median(&mut p999s));
}

/// A server that Prometheus may scrape, and the port of its page.
fn scraped_server(rules: &str) -> (MeasuredServer, Port) {
    let (setup, page) = scrape::with_prometheus(process::tollkeeper(rules));
    (MeasuredServer::start(setup), page)
}

/// Fetches the page each second, until it is dropped.
struct Scraper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<f64>>,
}

impl Scraper {
    fn start(page: u16) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut slowest = 0.0_f64;
            while !stopped.load(Ordering::Relaxed) {
                slowest = slowest.max(timed_fetch(page));
                thread::sleep(Duration::from_secs(1));
            }
            slowest
        });
        Self { stop, thread: Some(thread) }
    }

    /// Stops scraping; returns the longest fetch, in milliseconds.
    fn stop(mut self) -> f64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0.0, |thread| thread.join().expect("scraping ends"))
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Duration of one fetch, in milliseconds.
fn timed_fetch(page: u16) -> f64 {
    let started = Instant::now();
    fetch(page);
    started.elapsed().as_secs_f64() * 1e3
}

/// The size of the page, in bytes.
fn fetch(page: u16) -> usize {
    let mut stream = http::connect(page, Ipv4Addr::LOCALHOST).expect("a connection");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("it is sent");
    let response = http::read_until_closed(&mut stream);
    assert!(response.starts_with(b"HTTP/1.1 200 "), "no page");
    response.len()
}
