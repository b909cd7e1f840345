//! The console's files, its live events, and what keeps other sites and clients out of the debug listener.

#[path = "console/browser.rs"]
mod browser;
#[path = "console/live.rs"]
mod live;
#[path = "console/problems.rs"]
mod problems;
#[path = "console/sites.rs"]
mod sites;

use crate::kit::http;
use crate::kit::tollkeeper::{Setup, with_rules};

const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: day, requests_per_unit: 3}}
";

fn server() -> Setup {
    with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s")
}

#[test]
fn browser_gets_the_console_and_other_clients_the_list_of_pages() {
    let server = server().start();
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let cases = [
        (Some(browser), true),
        (Some("TEXT/HTML"), true),
        (Some("*/*"), false),
        (None, false),
        (Some("text/plain, text/html;q=0.5"), false),
        (Some("text/html;q=0"), false),
        (Some("text/html;q=x"), false),
        (Some("application/json"), false),
    ];
    for (accept, is_console) in cases {
        let mut request = http::get(server.debug_port(), "/");
        if let Some(accept) = accept {
            request = request.header("accept", accept);
        }
        let response = request.send();
        assert_eq!(response.status, 200, "{accept:?}");
        let (content_type, text) = (response.header("content-type").unwrap(), response.text());
        let start = if is_console { "<!doctype html>" } else { "/" };
        assert!(text.to_lowercase().starts_with(start), "{accept:?}: {text}");
        let expected = if is_console { "text/html; charset=utf-8" } else { "text/plain; charset=utf-8" };
        assert_eq!(content_type, expected, "{accept:?}");
    }
    let style = http::get(server.debug_port(), "/console.css").send();
    assert_eq!((style.status, style.header("content-type").as_deref()), (200, Some("text/css; charset=utf-8")));
    let script = http::get(server.debug_port(), "/console.js").send();
    assert_eq!(
        (script.status, script.header("content-type").as_deref()),
        (200, Some("text/javascript; charset=utf-8"))
    );
}

#[test]
fn every_page_is_isolated_from_other_sites() {
    let server = server().start();
    let pages = [
        "/",
        "/console.css",
        "/console.js",
        "/rules",
        "/top",
        "/fleet",
        "/settings",
        "/store",
        "/rlconfig/status",
        "/rlconfig",
        "/stats",
        "/log_level",
        "/problems",
        "/counters",
        "/explain",
        "/nowhere",
        "/healthcheck",
    ];
    for page in pages {
        let response = http::get(server.debug_port(), page).header("accept", "text/html").send();
        let policy = response.header("content-security-policy").unwrap_or_else(|| panic!("{page}: {response:?}"));
        for directive in ["default-src 'none'", "script-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"] {
            assert!(policy.split("; ").any(|own| own == directive), "{page}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{policy}");
        let expected = [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("referrer-policy", "no-referrer"),
            ("cross-origin-resource-policy", "same-origin"),
        ];
        for (name, value) in expected {
            assert_eq!(response.header(name).as_deref(), Some(value), "{page}");
        }
        assert!(response.all("access-control-allow-origin").is_empty(), "{page}");
    }
}

#[test]
fn console_needs_no_inline_code_and_no_other_host() {
    let server = server().start();
    let page = http::get(server.debug_port(), "/").header("accept", "text/html").send().text();
    let style = http::get(server.debug_port(), "/console.css").send().text();
    let script = http::get(server.debug_port(), "/console.js").send().text();
    assert!(page.len() + style.len() + script.len() < 100 * 1024);
    let has_handler = page.split(" on").skip(1).any(|rest| {
        rest.split_once('=')
            .is_some_and(|(name, _)| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()))
    });
    assert!(!page.contains(" style=") && !page.contains("<style") && !has_handler, "{page}");
    for element in page.split("<script").skip(1) {
        assert!(element.split_once("</script>").unwrap().0.ends_with('>'), "an inline script: {element}");
    }
    for text in [page, style] {
        for start in ["src=\"http", "href=\"http", "=\"//", "url(http", "url(\"http", "@import"] {
            assert!(!text.contains(start), "another host: {text}");
        }
    }
}
