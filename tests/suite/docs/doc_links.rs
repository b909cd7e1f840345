//! Links of the documentation: on a forge, where files have the paths of the repository, and in the site that mdBook
//! builds, which has every page and a way to each.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use regex::Regex;

use kit::{read, repository};

/// Chapters of the site.
const SUMMARY: &str = "docs/book/SUMMARY.md";

/// Pages by their path in the repository, without what git ignores.
fn pages() -> BTreeMap<PathBuf, String> {
    let root = repository("");
    let (mut pages, mut directories) = (BTreeMap::new(), vec![root.clone()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !path.is_symlink() {
                // Packages of other tools have pages of their own.
                if !name.starts_with('.') && !["target", "node_modules", "corpus"].contains(&name.as_str()) {
                    directories.push(path);
                }
            } else if name.ends_with(".md") && name != "SUMMARY.md" {
                pages.insert(path.strip_prefix(&root).unwrap().to_owned(), without_code(&read(&path)));
            }
        }
    }
    pages
}

/// The page without blocks and spans of code, in which nothing is a link or a heading.
fn without_code(page: &str) -> String {
    let mut is_code = false;
    let lines = page.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence && !line.starts_with("    ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Anchors of the headings, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    static LINK: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\[([^\]]*)\]\([^)]*\)").unwrap());
    let (mut anchors, mut seen) = (BTreeSet::new(), HashMap::new());
    let headings = page.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#'));
    for heading in headings.filter_map(|heading| heading.strip_prefix(' ')) {
        let text = LINK.replace_all(heading.trim(), "$1").to_lowercase();
        let is_kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let anchor = text.chars().filter(is_kept).collect::<String>().replace(' ', "-");
        let number = seen.entry(anchor.clone()).and_modify(|number| *number += 1).or_insert(0);
        anchors.insert(if *number == 0 { anchor } else { format!("{anchor}-{number}") });
    }
    anchors
}

/// The path without `.` and `..`.
fn normalize(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => assert!(normal.pop(), "{} leaves the repository", path.display()),
            Component::CurDir => {}
            Component::Prefix(_) | Component::RootDir | Component::Normal(_) => normal.push(component),
        }
    }
    normal
}

/// Target of a link from `page`, and its anchor; `None` if it leads elsewhere.
fn target(page: &Path, link: &str) -> Option<(PathBuf, Option<String>)> {
    if link.contains("://") || link.starts_with("mailto:") || link.starts_with("javascript:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor.to_owned())));
    let target = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    Some((normalize(&target), anchor))
}

/// Links of a page in Markdown.
fn links(page: &str) -> Vec<String> {
    static SPAN: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"`[^`\n]*`").unwrap());
    static LINK: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\]\(([^)\s]+)\)").unwrap());
    // A label may be code, so only what is left of the target counts.
    let text = SPAN.replace_all(page, "code");
    LINK.captures_iter(&text).map(|found| found[1].to_owned()).collect()
}

#[test]
fn links_of_pages_lead_to_files_and_headings() {
    let pages = pages();
    let anchors: BTreeMap<_, _> = pages.iter().map(|(path, text)| (path, anchors(text))).collect();
    let (mut broken, mut checked) = (Vec::new(), 0);
    for (path, text) in &pages {
        for link in links(text) {
            let Some((target, anchor)) = target(path, &link) else { continue };
            checked += 1;
            let exists = match (anchors.get(&target), &anchor) {
                (Some(headings), Some(anchor)) => headings.contains(anchor),
                // A site has no page for a directory.
                (_, _) => repository("").join(&target).is_file(),
            };
            if !exists {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere (a directory needs a page):\n{}", broken.join("\n"));
    assert!(checked > 300, "only {checked} links were found");
}

#[test]
fn every_page_is_a_chapter_of_the_site() {
    let chapters: BTreeSet<_> = links(&read(&repository(SUMMARY))).into_iter().map(PathBuf::from).collect();
    let pages: BTreeSet<_> = pages().into_keys().collect();
    let missing: Vec<_> = pages.difference(&chapters).collect();
    assert!(missing.is_empty(), "add to {SUMMARY}: {missing:?}");
    let unknown: Vec<_> = chapters.difference(&pages).collect();
    assert!(unknown.is_empty(), "in {SUMMARY}, but no pages: {unknown:?}");
}

/// Files below a directory, by their path in it.
fn files(root: &Path) -> Vec<PathBuf> {
    let (mut files, mut directories) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = directories.pop() {
        for path in fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() { directories.push(path) } else { files.push(path.strip_prefix(root).unwrap().to_owned()) }
        }
    }
    files
}

#[test]
#[ignore = "a missing mdBook takes minutes to build; .ci/nightly runs it"]
fn site_is_built_and_its_links_lead_somewhere() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(repository("docs/book/build.sh")).arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");

    let root = directory.path().join("html");
    let identifier = Regex::new(r#"\bid="([^"]*)""#).unwrap();
    let link = Regex::new(r#"<(?:a|img|script|link)\b[^>]*?\b(?:href|src)="([^"]*)""#).unwrap();
    let mut html = BTreeMap::new();
    for path in files(&root).into_iter().filter(|path| path.extension().is_some_and(|it| it == "html")) {
        // The page for a path that does not exist has links from the root of the site.
        if path.as_os_str() != "404.html" {
            html.insert(path.clone(), read(&root.join(path)));
        }
    }
    let identifiers: BTreeMap<_, BTreeSet<_>> = html
        .iter()
        .map(|(path, text)| (path, identifier.captures_iter(text).map(|found| found[1].to_owned()).collect()))
        .collect();
    let (mut broken, mut checked) = (Vec::new(), 0);
    for (path, text) in &html {
        for found in link.captures_iter(text) {
            let Some((target, anchor)) = target(path, &found[1]) else { continue };
            checked += 1;
            let exists = match (identifiers.get(&target), &anchor) {
                (Some(identifiers), Some(anchor)) => anchor.is_empty() || identifiers.contains(anchor),
                (_, _) => root.join(&target).is_file(),
            };
            if !exists {
                broken.push(format!("{}: {}", path.display(), &found[1]));
            }
        }
    }
    assert!(broken.is_empty(), "links of the site that lead nowhere:\n{}", broken.join("\n"));
    assert!(checked > 1000 && html.len() > 30, "{checked} links in {} pages", html.len());
    assert!(html[Path::new("docs/rules.html")].contains("rel=\"next"), "pages lead to the next one");
    assert!(files(&root).iter().any(|path| path.to_str().unwrap().contains("searchindex")), "pages can be searched");
}
