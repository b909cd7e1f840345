//! How the store is, told by the store and asked by the health pages.
//!
//! The store notes only what changes; whoever reports to others that watch is woken for each change. Memory is always
//! well: nobody tells it otherwise.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use tokio::sync::Notify;

/// How the store is; well until somebody says otherwise.
#[derive(Debug, Default)]
pub struct StoreHealth {
    lost: AtomicBool,
    misconfigured: ArcSwapOption<String>,
    changed: Notify,
}

impl StoreHealth {
    /// Notes whether the store can not be reached now.
    pub fn set_lost(&self, lost: bool) {
        if self.lost.swap(lost, Ordering::Relaxed) != lost {
            self.changed.notify_one();
        }
    }

    /// Whether the store can not be reached now.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Notes what is wrong with how the store is set up, free of secrets; `None`: nothing is.
    pub fn set_misconfigured(&self, what: Option<&str>) {
        let old = self.misconfigured.swap(what.map(|what| Arc::new(what.to_owned())));
        if old.as_ref().map(|old| old.as_str()) != what {
            self.changed.notify_one();
        }
    }

    /// What is wrong with how the store is set up, if anything is.
    pub fn misconfigured(&self) -> Option<Arc<String>> {
        self.misconfigured.load_full()
    }

    /// Waits for a change since the last time it was asked. One task may wait; changes that come at once are one.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }
}
