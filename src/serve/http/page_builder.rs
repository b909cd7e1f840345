//! Builds pages away from the threads that decide: one at a time, on a thread of lower priority.
//!
//! A page about ten thousand rules takes tens of milliseconds, which must not delay decisions. A page that took long is
//! kept for a second, so that many who ask for it cost no more than one. Pages that take little are always new: they
//! cost less than the connection that they come over.
//!
//! Requests that wait are as few as the connections of operators (`serve::server::admission`).
//!
//! Decides: how many pages are built at once (`/metrics` too), and how old one may be.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::sleep;

use super::response::respond_internal_error;
use crate::base::sharded::lock_ignoring_poison;
use crate::base::threads;

/// CPU time that building a page must have taken for it to be cached.
const MIN_CPU_TIME_TO_CACHE_PAGE: Duration = Duration::from_millis(5);
/// Time for which a page stays cached.
const CACHED_PAGE_LIFETIME: Duration = Duration::from_secs(1);
/// Maximum number of cached pages. A page without room is built anew for each request.
const MAX_CACHED_PAGES: usize = 8;
/// Maximum length of path and query of a cached page, in bytes; a page with longer ones is never cached.
const MAX_CACHED_PATH_BYTES: usize = 512;

/// Body of a page, with its status, its media type and at most one further header.
#[derive(Clone, Debug)]
pub struct Page {
    /// Status; only pages with 200 are kept.
    pub(super) status: StatusCode,
    /// Media type.
    pub(super) content_type: &'static str,
    /// Body.
    pub(super) body: Bytes,
    /// A further header.
    pub(super) header: Option<(HeaderName, HeaderValue)>,
}

/// Builds pages, one at a time.
#[derive(Clone, Debug)]
pub struct PageBuilder {
    /// Held by the page that is built.
    one_at_a_time: Arc<Semaphore>,
    /// Pages that took long, by path and query.
    kept: Arc<Mutex<HashMap<String, Page>>>,
}

impl Default for PageBuilder {
    fn default() -> Self {
        Self { one_at_a_time: Arc::new(Semaphore::new(1)), kept: Arc::default() }
    }
}

impl Page {
    /// Page of plain text.
    pub(super) fn text(body: String) -> Self {
        Self::with_type("text/plain; charset=utf-8", body)
    }

    /// Page of JSON that is encoded already.
    pub(super) fn json(body: String) -> Self {
        Self::with_type("application/json", body)
    }

    /// Page that says in plain text why there is no other.
    pub fn error(status: StatusCode, reason: String) -> Self {
        Self { status, ..Self::text(reason) }
    }

    fn with_type(content_type: &'static str, body: String) -> Self {
        Self { status: StatusCode::OK, content_type, body: body.into(), header: None }
    }

    fn into_response(self) -> Response {
        let mut response = (self.status, [(header::CONTENT_TYPE, self.content_type)], self.body).into_response();
        response.headers_mut().extend(self.header);
        response
    }
}

impl PageBuilder {
    /// Responds with the page at `uri`, which is built unless it is kept. `None` of `build` is an internal error.
    pub async fn respond_with_page(
        &self,
        uri: &Uri,
        build: impl FnOnce() -> Option<Page> + Send + 'static,
    ) -> Response {
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let path = (path.len() <= MAX_CACHED_PATH_BYTES).then(|| path.to_owned());
        if let Some(page) = self.find_cached_page(path.as_deref()) {
            return page.into_response();
        }
        let Ok(permit) = Arc::clone(&self.one_at_a_time).acquire_owned().await else { return respond_internal_error() };
        // Another request for the same page may have waited before.
        if let Some(page) = self.find_cached_page(path.as_deref()) {
            return page.into_response();
        }
        let built = run_on_page_thread(permit, move || {
            let before = threads::thread_cpu_time();
            (build(), threads::thread_cpu_time().saturating_sub(before))
        });
        match built.await {
            Some((Some(page), cpu_time)) => {
                if let Some(path) =
                    path.filter(|_| page.status == StatusCode::OK && cpu_time >= MIN_CPU_TIME_TO_CACHE_PAGE)
                {
                    self.cache_page(path, page.clone());
                }
                page.into_response()
            }
            _ => respond_internal_error(),
        }
    }

    /// Runs `work` on the page thread, after earlier pages; `None` if no thread could be started, or `work` panicked.
    ///
    /// Callers do not give up their place, so only those of whom few wait at a time may call it.
    pub(super) async fn run_one_at_a_time<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let permit = Arc::clone(&self.one_at_a_time).acquire_owned().await.ok()?;
        run_on_page_thread(permit, work).await
    }

    fn find_cached_page(&self, path: Option<&str>) -> Option<Page> {
        lock_ignoring_poison(&self.kept).get(path?).cloned()
    }

    fn cache_page(&self, path: String, page: Page) {
        let mut kept = lock_ignoring_poison(&self.kept);
        if kept.len() < MAX_CACHED_PAGES {
            kept.insert(path.clone(), page);
            let all = Arc::clone(&self.kept);
            tokio::spawn(async move {
                sleep(CACHED_PAGE_LIFETIME).await;
                lock_ignoring_poison(&all).remove(&path);
            });
        }
    }
}

/// Runs `work` on a thread of its own, which holds `permit` even if the caller gives up.
async fn run_on_page_thread<T: Send + 'static>(
    permit: OwnedSemaphorePermit,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, result) = oneshot::channel();
    let work = move || {
        threads::lower_thread_priority();
        let _ = sender.send(work());
        drop(permit);
    };
    thread::Builder::new().name("pages".to_owned()).spawn(work).ok()?;
    result.await.ok()
}
