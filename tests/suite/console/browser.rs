//! The console in a real browser: every view, both widths and themes, hostile values, the keyboard, actions.

use std::io::{Read as _, Write as _};
use std::net::Ipv4Addr;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use crate::kit::chromium::Chromium;
use crate::kit::grpc::{Client, rate_limit_request};
use crate::kit::tollkeeper::{Tollkeeper, with_rules, with_runtime_files};
use crate::kit::{http, repository};

const RULES: &str = "\
domain: shop
descriptors:
- {key: login, rate_limit: {unit: day, requests_per_unit: 5}}
- key: user
  rate_limit:
  - {unit: day, requests_per_unit: 20, algorithm: sliding_window_counter}
  - {unit: day, requests_per_unit: 10, algorithm: sliding_window_counter, name: lower, shadow_mode: true}
- {key: never, rate_limit: {unit: minute, requests_per_unit: 5}}
";
const TOKEN: &str = "a token of an operator";
/// Values that would do something if they were taken for HTML, and marks that turn the text around.
const HOSTILE: [&str; 3] = [
    "<img src=x onerror=\"window.hacked=1\">",
    "\"><script>window.hacked=1</script>",
    "\u{202e}gnirts\u{2066}\u{1b}[2J",
];

fn charge(server: &Tollkeeper, key: &str, value: &str, times: usize) {
    let client = Client::connect(server.grpc_port());
    for _ in 0..times {
        client.call(&rate_limit_request("shop", &[(key, value)])).unwrap();
    }
}

/// A server with traffic, hostile values among it, and a browser that shows its console.
fn console() -> (Tollkeeper, Chromium) {
    let (server, browser) = console_with(&HOSTILE);
    charge(&server, "login", &"long ".repeat(2000), 7);
    (server, browser)
}

/// A server with traffic of these logins and some users, and a browser that shows its console.
fn console_with(logins: &[&str]) -> (Tollkeeper, Chromium) {
    let server = with_rules(RULES)
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
        .env("DEBUG_HOST", "127.0.0.1")
        .start();
    for login in logins {
        charge(&server, "login", login, 9);
    }
    for (user, times) in [("ann", 60), ("bob", 25), ("eve", 12)] {
        charge(&server, "user", user, times);
    }
    let mut browser = Chromium::start();
    browser.set_view(1280, "light");
    browser.call("Page.navigate", &serde_json::json!({"url": format!("http://127.0.0.1:{}/", server.debug_port())}));
    browser.wait_until("document.getElementById('connection')?.dataset.state === 'live'");
    (server, browser)
}

/// Opens a view and waits until its contents are there.
fn open(browser: &mut Chromium, view: &str, contents: &str) {
    browser.evaluate(&format!("void (location.hash = '#/{view}')"));
    browser.wait_until(contents);
    assert_eq!(browser.evaluate("document.getElementById('load-error').textContent"), "", "{view}");
}

/// Each view, with an expression that is true once it is filled.
const VIEWS: [(&str, &str); 8] = [
    ("overview", "document.querySelectorAll('#main svg.spark').length === 3"),
    (
        "fleet",
        "document.querySelector('#main table')?.textContent.includes('(this)') || document.querySelectorAll('#main table').length >= 3",
    ),
    ("rules", "document.querySelector('#main')?.textContent.includes('shop.user.lower')"),
    ("rules/shop.user", "document.querySelector('#main svg.columns') !== null"),
    ("keys", "document.querySelectorAll('#main tbody tr').length >= 5"),
    ("explain", "document.querySelector('#main form') !== null"),
    ("failures", "document.querySelector('#main')?.textContent.includes('Failed charges')"),
    ("settings", "document.querySelectorAll('#main tbody tr').length > 100"),
];

/// Asserts that the page neither logged nor loaded anything that it should not.
fn assert_quiet(browser: &Chromium, port: u16) {
    let own = [format!("http://127.0.0.1:{port}/"), "data:".to_owned(), "about:blank".to_owned()];
    for event in &browser.events {
        let params = &event["params"];
        match event["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap();
                assert!(own.iter().any(|start| url.starts_with(start)), "{url}");
                assert!(!url.contains("token"), "{url}");
            }
            "Runtime.exceptionThrown" | "Runtime.consoleAPICalled" => panic!("{event}"),
            // The browser itself logs each refusal of a wrong token.
            "Log.entryAdded" => assert!(params["entry"]["text"].as_str().unwrap().contains("401"), "{event}"),
            _ => {}
        }
    }
}

#[test]
fn every_view_is_readable_at_both_widths_and_in_both_themes() {
    let (server, mut browser) = console();
    let mut backgrounds: Vec<Value> = Vec::new();
    for theme in ["light", "dark"] {
        for width in [1280, 400] {
            browser.set_view(width, theme);
            for (view, contents) in VIEWS {
                open(&mut browser, view, contents);
                let overflow =
                    browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth");
                assert_eq!(overflow, 0, "{view} at {width}");
                assert_eq!(browser.evaluate("document.querySelectorAll('#main h1').length"), 1, "{view}");
            }
        }
        backgrounds.push(browser.evaluate("getComputedStyle(document.body).backgroundColor"));
    }
    assert_ne!(backgrounds[0], backgrounds[1]);
    assert_quiet(&browser, server.debug_port());
}

#[test]
fn figures_arrive_live_and_hostile_values_stay_text() {
    let (server, mut browser) = console();
    open(&mut browser, "overview", "document.querySelectorAll('#main svg.spark').length === 3");
    let figure = "Number(document.querySelector('#main .figure').firstChild.textContent.replaceAll(',', ''))";
    crate::kit::wait_for("a second with requests", || {
        charge(&server, "user", "ann", 50);
        browser.evaluate(figure).as_f64().filter(|rate| *rate > 0.0)
    });
    open(&mut browser, "keys", "document.querySelectorAll('#main tbody tr').length >= 5");
    let text = browser.evaluate("document.querySelector('#main').textContent");
    // Marks that turn the text around are shown as what they are.
    assert!(text.as_str().unwrap().contains("\\u{202e}gnirts"), "{text}");
    for value in &HOSTILE[..2] {
        assert!(text.as_str().unwrap().contains(&value.replace('=', "\\=")), "{value} is not in {text}");
    }
    // A key opens with its counters.
    browser.evaluate(
        "[...document.querySelectorAll('#main button.link')].find((b) => b.textContent.includes('img')).click()",
    );
    browser.wait_until("document.querySelector('#dialog[open] meter') !== null");
    let injected =
        browser.evaluate("document.querySelectorAll('#main img, #main script, #dialog img, #dialog script').length");
    assert_eq!((injected, browser.evaluate("window.hacked === undefined")), (0.into(), true.into()));
    browser.press("Escape");
    browser.wait_until("!document.getElementById('dialog').open");
    assert_quiet(&browser, server.debug_port());
}

#[test]
fn keyboard_reaches_views_and_actions_need_the_token() {
    let (server, mut browser) = console();
    let focused = "document.activeElement.textContent";
    browser.press("Tab");
    assert_eq!(browser.evaluate(focused), "Skip to content");
    for view in ["Overview", "Fleet", "Rules"] {
        browser.press("Tab");
        assert_eq!(browser.evaluate(focused), view);
    }
    browser.press("Enter");
    browser.wait_until("document.querySelector('#main h1').textContent === 'Rules'");
    assert_eq!(browser.evaluate("document.querySelector('nav [aria-current]').textContent"), "Rules");

    // Resets a key in the form: a wrong token is told, the right one works.
    open(&mut browser, "explain", "document.querySelector('#main form') !== null");
    browser.evaluate("document.getElementById('domain').focus()");
    browser.write("shop");
    for text in ["user", "ann"] {
        browser.press("Tab");
        browser.write(text);
    }
    browser.press("Enter");
    browser.wait_until("document.querySelector('#main')?.textContent.includes('shop.user')");
    browser.evaluate("document.querySelector('#main button.danger').focus()");
    browser.press("Enter");
    browser.wait_until("document.getElementById('dialog-title').textContent === 'Reset counters?'");
    browser.evaluate("document.getElementById('dialog-ok').focus()");
    browser.press("Enter");
    for (token, then) in [
        ("a wrong token", "document.getElementById('dialog-error').textContent !== ''"),
        (TOKEN, "document.getElementById('dialog-title').textContent === 'Reset'"),
    ] {
        browser.wait_until("document.getElementById('token-input') !== null");
        browser.evaluate("document.getElementById('token-input').focus()");
        browser.write(token);
        browser.press("Enter");
        browser.wait_until(then);
    }
    let told = browser.evaluate("document.getElementById('dialog-body').textContent");
    assert!(told.as_str().unwrap().contains("counters of user=ann were deleted"), "{told}");
    browser.press("Escape");
    let explained = http::post(
        server.debug_port(),
        "/explain",
        r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"}]}]}"#,
    );
    let explained: Value = serde_json::from_slice(&explained.send().body).unwrap();
    assert_eq!(explained["descriptors"][0]["limits"][0]["counter"]["used"], 0, "{explained}");

    // The token stays in the tab: the log level changes without another question.
    open(&mut browser, "settings", "document.getElementById('level') !== null");
    browser.evaluate(
        "(document.getElementById('level').value = 'debug', document.querySelector('#main .tools button').click())",
    );
    browser.wait_until("document.getElementById('dialog').open");
    browser.evaluate("document.getElementById('dialog-ok').click()");
    crate::kit::wait_for("the level", || {
        (http::get(server.debug_port(), "/log_level").send().text().trim() == "debug").then_some(())
    });
    assert_eq!(browser.evaluate("location.href.includes('token')"), false);
    assert_quiet(&browser, server.debug_port());
}

/// Writes the pictures of the documentation with `BLESS=1`.
#[test]
fn pictures_can_be_taken() {
    let (server, mut browser) = console_with(&["ann@example.com", "bob@example.com"]);
    for (name, view, theme) in [("overview", 0, "light"), ("keys", 4, "dark")] {
        browser.set_view(1280, theme);
        for _ in 0..4 {
            charge(&server, "user", "ann", 40);
        }
        open(&mut browser, VIEWS[view].0, VIEWS[view].1);
        let picture = BASE64_STANDARD.decode(browser.picture()).unwrap();
        assert!(picture.starts_with(b"\x89PNG"));
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(repository(&format!("docs/pictures/console-{name}.png")), picture).unwrap();
        }
    }
}

/// Text of the first column of the first table, in which keys have their rejected hits.
const FIRST_COUNT: &str = "document.querySelector('#main tbody td.number')?.textContent";

#[test]
fn views_are_refreshed_after_a_click_and_a_closed_dialog() {
    let (server, mut browser) = console_with(&["ann@example.com"]);
    open(&mut browser, "keys", "document.querySelectorAll('#main tbody tr').length >= 3");
    let steps = [
        "document.querySelector('#main .scroll').focus()",
        "document.querySelector('#main button.link').focus()",
        "(document.querySelector('#main button.link').click(), document.getElementById('dialog').close())",
    ];
    for step in steps {
        browser.evaluate(&format!("void ({step})"));
        let before = browser.evaluate(FIRST_COUNT);
        let focused = browser.evaluate("document.activeElement.className");
        charge(&server, "user", "ann", 20);
        browser.wait_until(&format!("{FIRST_COUNT} !== {before}"));
        assert_eq!(browser.evaluate("document.activeElement.className"), focused, "{step}");
    }
    // The header tells that the refresh waits.
    browser.evaluate("getSelection().selectAllChildren(document.querySelector('#main table'))");
    browser.wait_until("document.getElementById('connection').textContent === 'paused while text is selected'");
    browser.evaluate("getSelection().removeAllRanges()");
    browser.wait_until("document.getElementById('connection').textContent === 'live'");
}

#[test]
fn key_is_shown_and_reset_in_its_own_domain() {
    let file = |domain: &str| {
        let rules = format!(
            "domain: {domain}\ndescriptors:\n- {{key: user, rate_limit: {{unit: day, requests_per_unit: 2}}}}\n"
        );
        (format!("{domain}.yaml"), rules)
    };
    let server = with_runtime_files(["shop", "shop.eu"].map(file).into())
        .env("TOLLKEEPER_DRAIN_PERIOD", "0s")
        .env("TOLLKEEPER_ADMIN_TOKEN", TOKEN)
        .start();
    let client = Client::connect(server.grpc_port());
    for (domain, times) in [("shop", 2), ("shop.eu", 5)] {
        (0..times).for_each(|_| drop(client.call(&rate_limit_request(domain, &[("user", "ann")])).unwrap()));
    }
    let mut browser = Chromium::start();
    browser.call("Page.navigate", &serde_json::json!({"url": format!("http://127.0.0.1:{}/", server.debug_port())}));
    browser.wait_until("document.getElementById('connection')?.dataset.state === 'live'");
    browser.evaluate(&format!("sessionStorage.setItem('tollkeeper-admin-token', '{TOKEN}')"));
    // The first table of keys has those that were rejected.
    let rejected = "document.querySelector('#main table').querySelectorAll('button.link')";
    open(&mut browser, "keys", &format!("document.querySelector('#main table') && {rejected}.length === 1"));
    browser.evaluate(&format!("{rejected}[0].click()"));
    browser.wait_until("document.querySelector('#dialog[open] meter') !== null");
    let shown = browser.evaluate("document.getElementById('dialog-body').textContent");
    assert!(shown.as_str().unwrap().contains("shop.eu.user"), "{shown}");
    let used = |domain: &str| {
        let entries = r#"[{"key":"user","value":"ann"}]"#;
        let body = format!(r#"{{"domain":"{domain}","descriptors":[{{"entries":{entries}}}]}}"#);
        server.explain(&body)["descriptors"][0]["limits"][0]["counter"]["used"].clone()
    };
    // The control that leaves the view is named so, and changes nothing.
    assert_eq!(browser.evaluate("document.getElementById('dialog-cancel').textContent"), "Close");
    browser.evaluate("document.getElementById('dialog-cancel').click()");
    browser.wait_until("document.querySelector('#dialog[open]') === null");
    assert_eq!((used("shop"), used("shop.eu")), (2.into(), 5.into()));
    browser.evaluate(&format!("{rejected}[0].click()"));
    browser.wait_until("document.querySelector('#dialog[open] meter') !== null");
    browser.evaluate("document.getElementById('dialog-ok').click()");
    browser.wait_until("document.getElementById('dialog-title').textContent === 'Reset'");
    assert_eq!((used("shop"), used("shop.eu")), (2.into(), 0.into()));
}

#[test]
fn ninth_console_of_an_address_says_why_it_has_no_live_figures() {
    let server = with_rules(RULES).env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let consoles = [(); 8].map(|()| {
        let mut stream = http::connect(server.debug_port(), Ipv4Addr::LOCALHOST).unwrap();
        stream.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(&status, b"HTTP/1.1 200");
        stream
    });
    let mut browser = Chromium::start();
    browser.call("Page.navigate", &serde_json::json!({"url": format!("http://127.0.0.1:{}/", server.debug_port())}));
    browser.wait_until("document.getElementById('connection')?.dataset.state === 'lost'");
    browser.wait_until(
        "document.getElementById('connection').textContent.includes('/live has 8 listeners of this address')",
    );
    drop(consoles);
}

#[test]
fn address_that_names_no_limit_says_so() {
    let (_server, mut browser) = console_with(&[]);
    for (address, text) in [
        ("rules/shop", "No limit of the loaded rules has this name."),
        ("rules/%E0%A4%A", "The address of this page is not the name of a limit."),
    ] {
        open(&mut browser, address, &format!("document.querySelector('#main')?.textContent.includes('{text}')"));
    }
}

#[test]
fn log_level_is_shown_as_it_is() {
    let (_server, mut browser) = console_with(&[]);
    open(&mut browser, "settings", "document.getElementById('level') !== null");
    assert_eq!(browser.evaluate("document.getElementById('level').value"), "warn");
}
