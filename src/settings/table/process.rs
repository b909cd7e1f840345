//! Shutdown and threads.

use std::time::Duration;

use crate::settings::condition::Condition;
use crate::settings::setting::settings;
use crate::settings::value::number::{DurationRange, IntRange};

const UP_TO_AN_HOUR: DurationRange = DurationRange::new(Duration::ZERO, Duration::from_secs(3600));

settings! { "Process";
    TOLLKEEPER_DRAIN_PERIOD: Duration = Duration::from_secs(5),
        "time after SIGTERM that requests are still served while health checks fail"
        .allowed(UP_TO_AN_HOUR);
    TOLLKEEPER_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25),
        "time after SIGTERM until the process exits at the latest; includes TOLLKEEPER_DRAIN_PERIOD"
        .allowed(UP_TO_AN_HOUR);
    TOLLKEEPER_WORKER_THREADS: usize = 0, "number of worker threads; 0 means one per core" .allowed(IntRange::new(0, 1024));
    GOMAXPROCS: String = "", "threads of a Go program"
        .no_effect(Condition::Set, "it is for Go programs; see TOLLKEEPER_WORKER_THREADS");
    GOMEMLIMIT: String = "", "memory of a Go program"
        .no_effect(Condition::Set, "it is for Go programs; see TOLLKEEPER_MEMORY_BYTES");
}
