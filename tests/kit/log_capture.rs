//! Log lines that a test writes in this process.

use std::io;
use std::sync::{Arc, Mutex};

use tollkeeper::base::clock::Clock;
use tollkeeper::telemetry::logs::{Format, Level, build_subscriber};
use tracing::Dispatch;
use tracing::subscriber::{NoSubscriber, with_default};

/// Writer that keeps its output.
#[derive(Clone, Default)]
struct LogBuffer(Arc<Mutex<Vec<u8>>>);

impl io::Write for LogBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no test panics while it writes").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What `emit` logs, on this thread.
pub fn log_of(level: Level, format: Format, clock: Clock, emit: impl FnOnce()) -> String {
    // While a process has one subscriber only, tracing turns a log statement off for all threads if the first
    // thread to reach it has none. Other tests are such threads.
    let _second = Dispatch::new(NoSubscriber::new());
    let written = LogBuffer::default();
    let writer = written.clone();
    with_default(build_subscriber(level, format, clock, move || writer.clone()), emit);
    let bytes = written.0.lock().expect("no test panics while it writes").clone();
    String::from_utf8(bytes).expect("log lines are UTF-8")
}
