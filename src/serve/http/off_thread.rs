//! Renders large pages on a low-priority thread.

use std::thread;

use tokio::sync::{Semaphore, oneshot};

use crate::base::threads;

/// Renders a page on a thread of its own, one page at a time; `None` if no thread could be started.
///
/// A page about ten thousand rules takes tens of milliseconds, which must not delay decisions.
pub(super) async fn render_off_thread<T: Send + 'static>(render: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    static ONE_AT_A_TIME: Semaphore = Semaphore::const_new(1);
    let _permit = ONE_AT_A_TIME.acquire().await.ok()?;
    let (sender, page) = oneshot::channel();
    let work = move || {
        threads::lower_priority();
        let _ = sender.send(render());
    };
    thread::Builder::new().name("metrics".to_owned()).spawn(work).ok()?;
    page.await.ok()
}
