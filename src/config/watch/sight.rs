//! Where the file system is watched, and which of its events matter.
//!
//! Only directories are watched, never files: a file that is replaced has a new inode, and its directory says so. For
//! every path that decides what is read, each directory on the way is watched for the next name, through symbolic
//! links, so that a swapped link, a renamed parent and a file that appears later are all seen. Directories are kept
//! by their real paths; watches follow inodes and are placed anew after every event that matters.
//!
//! Without events (no inotify, its limits reached) everything works, later.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{ErrorKind, Event, RecommendedWatcher, RecursiveMode, Watcher as _};

use super::{Bell, lock};
use crate::config::source::Trace;

/// The watches that are placed.
pub(super) struct Sight {
    watcher: RecommendedWatcher,
    /// What is watched, shared with the thread that receives the events.
    scene: Arc<Mutex<Scene>>,
    /// How soon changes are noticed without events, for the log.
    poll_interval: Duration,
    /// Trouble is logged once.
    told: bool,
}

impl Sight {
    /// Asks the system for events, which ring `bell`. `None`, and a line in the log, if it has none to give.
    pub(super) fn new(bell: Arc<Bell>, poll_interval: Duration) -> Option<Self> {
        let scene = Arc::new(Mutex::new(Scene::default()));
        let seen = Arc::clone(&scene);
        let ring_if_it_matters = move |event: notify::Result<Event>| {
            if event.map_or(true, |event| lock(&seen).contains(&event)) {
                bell.ring(|rung| rung.changed = true);
            }
        };
        match notify::recommended_watcher(ring_if_it_matters) {
            Ok(watcher) => Some(Self { watcher, scene, poll_interval, told: false }),
            Err(error) => {
                tracing::warn!(
                    error = %error,
                    "the system gives no file events; rule files are compared every {poll_interval:?} only"
                );
                None
            }
        }
    }

    /// Watches what decides `trail`. `renew` places every watch anew even if the paths are the same, because a path
    /// may lead to another inode. Returns whether watches were placed, so that what was read before may be stale.
    pub(super) fn aim(&mut self, trail: &[Trace], renew: bool) -> bool {
        let scene = Scene::of(trail);
        let old = lock(&self.scene).clone();
        if scene == old && !renew {
            return false;
        }
        lock(&self.scene).clone_from(&scene);
        for directory in old.directories.keys() {
            // It may be gone, and its watch with it.
            let _ = self.watcher.unwatch(directory);
        }
        for directory in scene.directories.keys() {
            let placed = self.watcher.watch(directory, RecursiveMode::NonRecursive);
            if let Err(error) = placed {
                self.tell(directory, &error);
            }
        }
        true
    }

    fn tell(&mut self, directory: &Path, error: &notify::Error) {
        // Gone since the survey; the next one sees that.
        let gone = matches!(error.kind, ErrorKind::PathNotFound);
        if !gone && !self.told {
            self.told = true;
            tracing::warn!(
                directory = %directory.display(), error = %error,
                "can not watch a directory; changes there are noticed every {:?} only", self.poll_interval
            );
        }
    }
}

/// The directories that matter, by their real paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Scene {
    directories: BTreeMap<PathBuf, View>,
}

/// What matters in a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct View {
    /// Device and inode: a directory that was replaced needs a new watch.
    id: (u64, u64),
    /// Every entry matters.
    all: bool,
    /// The entries that matter.
    names: BTreeSet<OsString>,
}

impl Scene {
    fn of(trail: &[Trace]) -> Self {
        let mut scene = Self::default();
        for trace in trail {
            match trace {
                Trace::Followed(path) => {
                    scene.follow(path);
                }
                Trace::Listed(path) => {
                    if let Some(directory) = scene.follow(path) {
                        scene.view(&directory).all = true;
                    }
                }
            }
        }
        scene
    }

    /// Walks `path` name by name, through links, and keeps each directory and the name looked up in it. Returns the
    /// real path, or nothing if it does not exist.
    fn follow(&mut self, path: &Path) -> Option<PathBuf> {
        let mut at = PathBuf::from("/");
        let mut rest: VecDeque<OsString> = names(&std::path::absolute(path).ok()?).collect();
        let mut links_left = MAX_LINKS;
        while let Some(name) = rest.pop_front() {
            if name == OsStr::new("..") {
                at.pop();
                continue;
            }
            let next = at.join(&name);
            self.view(&at).names.insert(name);
            if !fs::symlink_metadata(&next).ok()?.is_symlink() {
                at = next;
                continue;
            }
            links_left = usize::checked_sub(links_left, 1)?;
            let target = fs::read_link(&next).ok()?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
                rest.push_front(name);
            }
        }
        Some(at)
    }

    fn view(&mut self, directory: &Path) -> &mut View {
        self.directories.entry(directory.to_owned()).or_insert_with(|| View {
            id: fs::metadata(directory).map(|it| (it.dev(), it.ino())).unwrap_or_default(),
            ..View::default()
        })
    }

    /// Whether `event` may change what is read. Reading itself opens files, so opening must not matter.
    fn contains(&self, event: &Event) -> bool {
        match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => {}
            EventKind::Access(_) => return false,
            _ => {}
        }
        event.need_rescan() || event.paths.iter().any(|path| self.matters(path))
    }

    fn matters(&self, path: &Path) -> bool {
        let as_entry = path.parent().zip(path.file_name()).is_some_and(|(parent, name)| {
            self.directories.get(parent).is_some_and(|view| view.all || view.names.contains(name))
        });
        as_entry || self.directories.contains_key(path)
    }
}

/// Symbolic links followed in one path, as many as Linux does.
const MAX_LINKS: usize = 40;

fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}
