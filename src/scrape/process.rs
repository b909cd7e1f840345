//! What the system knows of this process, under the names that all exporters use.

use std::time::Duration;

use procfs::WithCurrentSystemInfo as _;
use procfs::process::Process;

use super::{gauge, level_of};
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};

/// Reads it; what can not be read is left out.
pub(super) fn read(each: &mut dyn FnMut(Family)) {
    let Ok(process) = Process::myself() else { return };
    if let Ok(stat) = process.stat() {
        let ticks = procfs::ticks_per_second().max(1);
        let seconds = |of: u64| Duration::from_millis(of.saturating_mul(1000) / ticks).as_secs_f64();
        let number =
            |name, kind, help, value| Family::new(name, kind, help).with(Series::of(MetricValue::Gauge(value)));
        let cpu = seconds(stat.utime.saturating_add(stat.stime));
        each(number("process_cpu_seconds_total", MetricKind::Counter, "Processor time used, in seconds.", cpu));
        let resident = stat.rss_bytes().get();
        each(gauge("process_resident_memory_bytes", "Memory in use, in bytes.", resident));
        each(gauge("process_virtual_memory_bytes", "Memory mapped, in bytes.", stat.vsize));
        each(gauge("process_threads", "Threads.", stat.num_threads));
        if let Ok(boot) = procfs::boot_time_secs() {
            let start = level_of(boot.saturating_add(stat.starttime / ticks));
            let help = "When the process began, in seconds since 1970.";
            each(Family::new("process_start_time_seconds", MetricKind::Gauge, help).with(Series::of(start)));
        }
    }
    if let Ok(count) = process.fd_count() {
        each(gauge("process_open_fds", "Open files and connections.", count));
    }
    if let Ok(limits) = process.limits()
        && let procfs::process::LimitValue::Value(most) = limits.max_open_files.soft_limit
    {
        each(gauge("process_max_fds", "How many there may be.", most));
    }
}
