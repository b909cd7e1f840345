//! The console's files, its live events, and what keeps other sites and clients out of the debug listener.

#[path = "console/alarms.rs"]
mod alarms;
#[path = "console/browser.rs"]
mod browser;
#[path = "console/inspection.rs"]
mod inspection;
#[path = "console/live.rs"]
mod live;
#[path = "console/problems.rs"]
mod problems;
#[path = "console/quotas.rs"]
mod quotas;
#[path = "console/sites.rs"]
mod sites;

use std::collections::HashMap;

use kit::tollkeeper::{Setup, with_rules};
use kit::{http, read, repository};

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
        "/unmatched",
        "/quota",
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
        "/alarms",
        "/history",
        "/rule_text",
        "/console/dom.js",
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
    let mut scripts = vec![http::get(server.debug_port(), "/console.js").send().text()];
    for module in page.split("href=\"").filter_map(|rest| rest.split_once(".js\"")).map(|(path, _)| path) {
        let script = http::get(server.debug_port(), &format!("/{module}.js")).send();
        assert_eq!(script.header("content-type").as_deref(), Some("text/javascript; charset=utf-8"), "{module}");
        scripts.push(script.text());
    }
    // Each module that another imports is loaded with the page.
    for import in scripts.iter().flat_map(|script| script.split(" from './").skip(1)) {
        let name = import.split_once('\'').unwrap().0.trim_start_matches("console/");
        assert!(page.contains(&format!("href=\"console/{name}\"")), "{name}");
    }
    assert_eq!(http::get(server.debug_port(), "/console/none.js").send().status, 404);
    let size = page.len() + style.len() + scripts.iter().map(String::len).sum::<usize>();
    assert!(size < 100 * 1024, "{size} bytes");
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

/// Colours of a theme by name, from the `light-dark()` values of the stylesheet.
fn colours(is_dark: bool) -> HashMap<String, [f64; 3]> {
    let css = read(&repository("src/serve/http/console/console.css"));
    let names = css.lines().filter_map(|line| line.trim().strip_prefix("--")?.split_once(": light-dark("));
    let channel = |colour: &str, at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap());
    names
        .map(|(name, rest)| {
            let (light, dark) = rest.trim_end_matches(");").split_once(", ").unwrap();
            let colour = if is_dark { dark } else { light };
            (name.to_owned(), [1, 3, 5].map(|at| channel(colour, at)))
        })
        .collect()
}

/// Contrast of two colours, from 1 to 21, as WCAG 2.2 defines it.
fn contrast([one, other]: [[f64; 3]; 2]) -> f64 {
    let luminance = |colour: [f64; 3]| {
        let linear = colour
            .map(|channel| channel / 255.0)
            .map(|channel| if channel <= 0.04045 { channel / 12.92 } else { ((channel + 0.055) / 1.055).powf(2.4) });
        0.2126f64.mul_add(linear[0], 0.7152f64.mul_add(linear[1], 0.0722 * linear[2]))
    };
    let (one, other) = (luminance(one), luminance(other));
    (one.max(other) + 0.05) / (one.min(other) + 0.05)
}

/// WCAG 2.2: 4.5 for text (1.4.3), 3 for the marks of controls and of what has the focus (1.4.11).
#[test]
fn colours_of_both_themes_have_enough_contrast() {
    for is_dark in [false, true] {
        let colours = colours(is_dark);
        let assert_contrast = |name: &str, ground: &str, least: f64| {
            let ratio = contrast([colours[name], colours[ground]]);
            assert!(ratio >= least, "{name} on {ground}, dark: {is_dark}: {ratio:.2} of {least}");
        };
        for text in ["ink", "soft", "accent", "good", "warn", "bad"] {
            ["paper", "card"].into_iter().for_each(|ground| assert_contrast(text, ground, 4.5));
        }
        assert_contrast("ink", "bar", 4.5);
        for mark in ["control", "accent", "good", "warn", "bad", "deny"] {
            ["paper", "card"].into_iter().for_each(|ground| assert_contrast(mark, ground, 3.0));
        }
    }
    let grays = [[0.0; 3], [255.0; 3]];
    assert!((contrast(grays) - 21.0).abs() < 0.01);
}
