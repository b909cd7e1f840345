//! Quotas in the console: which proxies hold how much of a key until when, for a replica and for the fleet.

use serde_json::json;

use super::browser::{HOSTILE, assert_quiet, find_violations, open};
use crate::serve::quota::proxy::{Assigned, Proxy};
use kit::chromium::Chromium;
use kit::tollkeeper::{Tollkeeper, with_rules};

const RULES: &str = "\
domain: shop
descriptors:
- {key: user, rate_limit: {unit: day, requests_per_unit: 4000}}
- {key: api, rate_limit: {unit: second, requests_per_unit: 50, algorithm: token_bucket}}
";
const TEXT: &str = "document.getElementById('main').textContent";
const BUCKETS: [[(&str, &str); 1]; 3] = [[("user", "ann")], [("user", HOSTILE[0])], [("api", "x")]];

/// A server with two proxies, and a browser that shows its console.
fn console() -> (Tollkeeper, Chromium, [Proxy; 2]) {
    let server = with_rules(RULES).env("TOLLKEEPER_RLQS", "true").env("TOLLKEEPER_DRAIN_PERIOD", "0s").start();
    let mut proxies = [(); 2].map(|()| Proxy::connect(server.grpc_port(), "shop"));
    report_one_hit(&mut proxies);
    for proxy in &mut proxies {
        BUCKETS.iter().for_each(|bucket| assert_ne!(proxy.next(bucket), Assigned::Allow));
    }
    let mut browser = Chromium::start();
    browser.set_view(1280, "light");
    browser.call("Page.navigate", &json!({"url": format!("http://127.0.0.1:{}/", server.debug_port())}));
    browser.wait_until("document.getElementById('connection')?.dataset.state === 'live'");
    (server, browser, proxies)
}

/// Reports a hit of each bucket, as buckets without requests are abandoned after a minute.
fn report_one_hit(proxies: &mut [Proxy]) {
    for proxy in proxies {
        proxy.report(&BUCKETS.each_ref().map(|bucket| (&bucket[..], 1, 0)));
    }
}

/// Views that show quotas, with what is in their texts.
const VIEWS: [(&str, &[&str]); 4] = [
    ("quota", &["2 of 2 streams", "2 of 2 proxies of user=ann", "held for", "per period held for"]),
    ("key?domain=shop&k=user&v=ann", &["Held by proxies", "2 of 2 proxies", "stream 1", "stream 2", "tokens"]),
    ("fleet", &["Hits held for proxies over quota streams"]),
    ("rules/shop.user", &["2 keys in 4 parts at proxies"]),
];

#[test]
fn console_shows_who_holds_what_of_a_key_until_when() {
    let (server, mut browser, mut proxies) = console();
    for (theme, width) in [("light", 1280), ("dark", 400)] {
        browser.set_view(width, theme);
        for (view, texts) in VIEWS {
            report_one_hit(&mut proxies);
            let contents: Vec<String> = texts.iter().map(|text| format!("{TEXT}.includes('{text}')")).collect();
            open(&mut browser, view, &contents.join(" && "));
            let overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
            assert_eq!(browser.evaluate(overflow), 0, "{view} at {width}");
            assert_eq!(find_violations(&mut browser), "[]", "{view} at {width}, {theme}");
        }
    }
    // The row of a proxy has its hits, and the time that they end in.
    report_one_hit(&mut proxies);
    open(&mut browser, "key?domain=shop&k=user&v=ann", &format!("{TEXT}.includes('stream 1')"));
    let row = "[...document.querySelectorAll('#main tr')].find((row) => row.textContent.includes('stream 1'))";
    for (cell, pattern) in [(1, "^[1-9][0-9,]*$"), (2, "^[0-9]+ s$"), (3, "tokens")] {
        let text = browser.evaluate(&format!("{row}.cells[{cell}].textContent"));
        assert_eq!(browser.evaluate(&format!("/{pattern}/.test({text})")), true, "{cell}: {text}");
    }
    let injected = browser.evaluate("document.querySelectorAll('#main img').length");
    assert_eq!((injected, browser.evaluate("window.hacked === undefined")), (0.into(), true.into()));
    assert_quiet(&browser, server.debug_port());
}

#[test]
fn key_of_a_quota_opens_and_one_rule_is_shown_alone() {
    let (_server, mut browser, mut proxies) = console();
    let links = "[...document.querySelectorAll('#main h2 a.mono')]";
    open(&mut browser, "quota", &format!("{links}.length === 3"));
    browser.evaluate(&format!("void {links}.find((link) => link.textContent.includes('img')).click()"));
    browser.wait_until(&format!("location.hash.startsWith('#/key?') && {TEXT}.includes('Held by proxies')"));
    report_one_hit(&mut proxies);
    open(&mut browser, "quota", &format!("{links}.length === 3"));
    browser.evaluate(
        "{ const rule = document.getElementById('rule'); rule.value = 'shop.api'; \
         rule.dispatchEvent(new Event('input')); }",
    );
    browser.wait_until(&format!("location.hash.endsWith('?rule=shop.api') && {links}.length === 1"));
    assert_eq!(browser.evaluate(&format!("{links}[0].textContent")), "api=x");
}
