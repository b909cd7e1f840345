//! Metrics of the process, under the names that all exporters use.

use std::time::Duration;

use procfs::WithCurrentSystemInfo as _;
use procfs::process::{LimitValue, Process};

use crate::serve::health::Health;
use crate::telemetry::metrics::family::{Family, MetricKind, MetricValue, Series};

/// Emits the version and the readiness.
pub(super) fn collect_build(health: &Health, emit: &mut dyn FnMut(Family)) {
    let version = Series::new(MetricValue::Gauge(1.0)).label("version", env!("CARGO_PKG_VERSION"));
    emit(Family::new("tollkeeper_build_info", MetricKind::Gauge, "Version of tollkeeper; always 1.").with(version));
    emit(Family::gauge("tollkeeper_ready", "1 if the process is ready, as /readyz says.", u8::from(health.is_ready())));
}

/// Emits what `/proc` has about the process; values that cannot be read are left out.
pub(super) fn collect(emit: &mut dyn FnMut(Family)) {
    let Ok(process) = Process::myself() else { return };
    if let Ok(stat) = process.stat() {
        let ticks_per_second = procfs::ticks_per_second().max(1);
        let cpu_ticks = stat.utime.saturating_add(stat.stime);
        let cpu = Duration::from_millis(cpu_ticks.saturating_mul(1000) / ticks_per_second).as_secs_f64();
        emit(
            Family::new(
                "process_cpu_seconds_total",
                MetricKind::Counter,
                "Total user and system CPU time spent in seconds.",
            )
            .with(Series::new(MetricValue::Gauge(cpu))),
        );
        emit(Family::gauge("process_resident_memory_bytes", "Resident memory size in bytes.", stat.rss_bytes().get()));
        emit(Family::gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", stat.vsize));
        emit(Family::gauge("process_threads", "Number of threads.", stat.num_threads));
        if let Ok(boot) = procfs::boot_time_secs() {
            let start = boot.saturating_add(stat.starttime / ticks_per_second);
            let help = "Start time of the process, in seconds since the Unix epoch.";
            emit(Family::gauge("process_start_time_seconds", help, start));
        }
    }
    if let Ok(count) = process.fd_count() {
        emit(Family::gauge("process_open_fds", "Number of open file descriptors.", count));
    }
    if let Ok(limits) = process.limits()
        && let LimitValue::Value(max) = limits.max_open_files.soft_limit
    {
        emit(Family::gauge("process_max_fds", "Maximum number of open file descriptors.", max));
    }
}
