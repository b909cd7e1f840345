//! CPU time and memory of a server, from its process on this machine or from its metrics.

use std::time::Duration;

use procfs::process::Process;

/// Source of the measurements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UsageSource {
    /// A process on this machine.
    Pid(i32),
    /// A page in Prometheus's text format with `process_cpu_seconds_total` and `process_resident_memory_bytes`.
    Metrics(String),
}

/// Resource usage of a server process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResourceUsage {
    /// CPU time of all threads since the process started, user and system.
    pub cpu: Duration,
    /// Resident memory, in bytes.
    pub resident_bytes: u64,
}

/// Time limit for reading the metrics page.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(5);

impl UsageSource {
    /// Measures the usage until now. Blocks on I/O, so it must not run in an async task.
    pub fn measure_usage(&self) -> Result<ResourceUsage, String> {
        match self {
            Self::Pid(pid) => read_process_usage(*pid).map_err(|error| format!("--pid {pid}: {error}")),
            Self::Metrics(url) => measure_from_metrics_page(url).map_err(|why| format!("--metrics {url}: {why}")),
        }
    }
}

/// Reads the scheduler's statistics in nanoseconds, if the kernel has them; those of the process count in 10 ms.
fn read_process_usage(pid: i32) -> procfs::ProcResult<ResourceUsage> {
    let process = Process::new(pid)?;
    let stat = process.stat()?;
    let precise: Option<u64> = process
        .tasks()?
        .map(|task| task.and_then(|task| task.schedstat()).map(|account| account.sum_exec_runtime).ok())
        .sum();
    let ticks = (stat.utime + stat.stime) * 1_000_000_000 / procfs::ticks_per_second();
    // Only the statistics of the process include threads that have exited.
    let cpu = Duration::from_nanos(precise.filter(|precise| *precise > 0).unwrap_or(ticks));
    Ok(ResourceUsage { cpu, resident_bytes: stat.rss * procfs::page_size() })
}

fn measure_from_metrics_page(url: &str) -> Result<ResourceUsage, String> {
    let agent =
        ureq::Agent::new_with_config(ureq::Agent::config_builder().timeout_global(Some(SCRAPE_TIMEOUT)).build());
    let page = agent.get(url).call().map_err(|error| error.to_string())?.body_mut().read_to_string();
    let page = page.map_err(|error| error.to_string())?;
    let value = |name: &str| {
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '{'])?.rsplit(' ').next());
        value.and_then(|value| value.parse::<f64>().ok()).filter(|value| value.is_finite() && *value >= 0.0)
    };
    let cpu = value("process_cpu_seconds_total").ok_or("the page has no process_cpu_seconds_total")?;
    let resident = value("process_resident_memory_bytes").ok_or("the page has no process_resident_memory_bytes")?;
    let cpu = Duration::try_from_secs_f64(cpu).map_err(|error| error.to_string())?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes, and not below 0")]
    Ok(ResourceUsage { cpu, resident_bytes: resident as u64 })
}
