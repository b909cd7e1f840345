//! The console in a real browser: every view, both widths and themes, hostile values, the keyboard, actions.
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use kit::chromium::Chromium;
use kit::grpc::{Client, rate_limit_request};
use kit::tollkeeper::{Tollkeeper, with_rules, with_runtime_files};
use kit::{http, repository};

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
pub(super) const HOSTILE: [&str; 3] = [
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
pub(super) fn open(browser: &mut Chromium, view: &str, contents: &str) {
    browser.evaluate(&format!("void (location.hash = '#/{view}')"));
    browser.wait_until(contents);
    assert_eq!(browser.evaluate("document.getElementById('load-error').textContent"), "", "{view}");
}

/// Each view, with an expression that is true once it is filled.
const VIEWS: [(&str, &str); 10] = [
    (
        "fleet",
        "document.querySelector('#main tbody tr')?.textContent.includes('this') && document.querySelector('.plot svg')",
    ),
    ("replica", "document.querySelectorAll('#main svg.spark').length === 3 && document.querySelector('.plot svg')"),
    ("rules", "document.querySelector('#main')?.textContent.includes('shop.user.lower')"),
    (
        "rules/shop.user",
        "document.querySelector('.plot svg') && document.querySelector('#main')?.textContent.includes('Copy YAML')",
    ),
    ("keys", "document.querySelectorAll('#main tbody tr').length >= 5"),
    ("key?domain=shop&k=user&v=ann", "document.querySelector('#main meter') && document.querySelector('#main pre')"),
    ("sandbox?text=shop: user=ann", "document.querySelector('#main meter') !== null"),
    ("failures", "document.querySelector('#main')?.textContent.includes('Failed charges')"),
    ("quota", "document.querySelector('#main')?.textContent.includes('TOLLKEEPER_RLQS')"),
    ("settings", "document.querySelectorAll('#main tbody tr').length > 100"),
];

/// Asserts that the page neither logged nor loaded anything that it should not.
pub(super) fn assert_quiet(browser: &Chromium, port: u16) {
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

/// Violations of accessibility rules that axe finds in the page, as JSON.
pub(super) fn find_violations(browser: &mut Chromium) -> String {
    let clients = std::env::var("TOLLKEEPER_TEST_CLIENTS").expect("tests/run.sh sets TOLLKEEPER_TEST_CLIENTS");
    let axe = std::fs::read_to_string(format!("{clients}/node/node_modules/axe-core/axe.min.js"))
        .expect("tests/clients/install.sh installs axe-core");
    browser.evaluate(&format!("(() => {{ {axe} }})()"));
    let run = "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => \
               JSON.stringify(violations.map(({id, nodes}) => [id, nodes[0].html, nodes[0].failureSummary])))";
    browser.evaluate(run).as_str().unwrap().to_owned()
}

#[test]
fn every_view_is_readable_at_both_widths_and_in_both_themes() {
    let (server, mut browser) = console();
    let mut backgrounds: Vec<Value> = Vec::new();
    for theme in ["light", "dark"] {
        for width in [1280, 400] {
            browser.set_view(width, theme);
            // The width changes neither roles nor colours: for a change, the two fullest views at the smaller one.
            let is_checked = |view: &str| width == 1280 || ["fleet", "keys"].contains(&view) || kit::is_nightly();
            for (view, contents) in VIEWS.into_iter().filter(|(view, _)| is_checked(view)) {
                open(&mut browser, view, &format!("Boolean({contents})"));
                let overflow =
                    browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth");
                assert_eq!(overflow, 0, "{view} at {width}");
                assert_eq!(browser.evaluate("document.querySelectorAll('#main h1').length"), 1, "{view}");
                assert_eq!(find_violations(&mut browser), "[]", "{view} at {width}, {theme}");
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
    open(&mut browser, "replica", "document.querySelectorAll('#main svg.spark').length === 3");
    let figure = "Number(document.querySelector('#main .figure').firstChild.textContent.replaceAll(',', ''))";
    kit::wait_for("a second with requests", || {
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
        "[...document.querySelectorAll('#main a.mono')].find((link) => link.textContent.includes('img')).click()",
    );
    browser.wait_until("location.hash.startsWith('#/key?') && document.querySelector('#main meter') !== null");
    let injected = browser.evaluate("document.querySelectorAll('#main img, #main script').length");
    assert_eq!((injected, browser.evaluate("window.hacked === undefined")), (0.into(), true.into()));
    assert_quiet(&browser, server.debug_port());
}

#[test]
fn keyboard_reaches_views_and_actions_need_the_token() {
    let (server, mut browser) = console();
    let focused = "document.activeElement.textContent";
    browser.press("Tab");
    assert_eq!(browser.evaluate(focused), "Skip to content");
    // A busy machine lets the process run late, which is an alarm.
    browser.wait_until("/no alarm|1 alarm/.test(document.getElementById('alarms').textContent)");
    browser.press("Tab");
    browser.wait_until("document.activeElement.id === 'alarms'");
    for view in ["Fleet", "This replica", "Rules"] {
        browser.press("Tab");
        assert_eq!(browser.evaluate(focused), view);
    }
    browser.press("Enter");
    browser.wait_until("document.querySelector('#main h1').textContent === 'Rules'");
    assert_eq!(browser.evaluate("document.querySelector('nav [aria-current]').textContent"), "Rules");

    // Resets a key in the sandbox: a wrong token is told, the right one works.
    open(&mut browser, "sandbox", "document.querySelector('#main form') !== null");
    browser.evaluate("document.getElementById('request').focus()");
    browser.write("shop: user=ann");
    browser.press("Tab");
    browser.press("Enter");
    browser.wait_until("document.querySelector('#main meter') !== null");
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
    open(&mut browser, "settings", "document.querySelectorAll('#main tbody tr').length > 100");
    browser.evaluate(
        "(document.getElementById('level').value = 'debug', document.querySelector('#main .tools button').click())",
    );
    browser.wait_until("document.getElementById('dialog').open");
    browser.evaluate("document.getElementById('dialog-ok').click()");
    kit::wait_for("the level", || {
        (http::get(server.debug_port(), "/log_level").send().text().trim() == "debug").then_some(())
    });
    assert_eq!(browser.evaluate("location.href.includes('token')"), false);
    assert_quiet(&browser, server.debug_port());
}

/// Writes the pictures of the documentation with `BLESS=1`.
#[test]
fn pictures_can_be_taken() {
    let (server, mut browser) = console_with(&["ann@example.com", "bob@example.com"]);
    for (name, view, theme) in [("fleet", 0, "light"), ("rule", 3, "light"), ("keys", 4, "dark")] {
        browser.set_view(1280, theme);
        for _ in 0..4 {
            charge(&server, "user", "ann", 40);
        }
        open(&mut browser, VIEWS[view].0, &format!("Boolean({})", VIEWS[view].1));
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
fn cells_change_in_place_and_keep_focus_selection_and_open_parts() {
    let (server, mut browser) = console_with(&["ann@example.com"]);
    open(&mut browser, "keys", "document.querySelectorAll('#main tbody tr').length >= 3");
    let steps = [
        ("document.querySelector('#main .scroll').focus()", "document.activeElement === kept.scroll"),
        ("document.querySelector('#main a.mono').focus()", "document.activeElement === kept.link"),
        (
            "getSelection().selectAllChildren(document.querySelector('#main a.mono'))",
            "getSelection().toString() === kept.link.textContent",
        ),
    ];
    for (step, holds) in steps {
        browser.evaluate(&format!(
            "void ({step}, window.kept = {{ scroll: document.querySelector('#main .scroll'), \
             link: document.querySelector('#main a.mono'), count: document.querySelector('#main tbody td.number') }})"
        ));
        let before = browser.evaluate(FIRST_COUNT);
        charge(&server, "user", "ann", 20);
        browser.wait_until(&format!("{FIRST_COUNT} !== {before}"));
        assert_eq!(browser.evaluate(holds), true, "{step}");
        assert_eq!(browser.evaluate("kept.count === document.querySelector('#main tbody td.number')"), true, "{step}");
    }
    open(&mut browser, "key?domain=shop&k=user&v=fay", "document.querySelector('#main details') !== null");
    browser.evaluate("void (document.querySelector('#main details').open = true)");
    charge(&server, "user", "fay", 2);
    browser.wait_until(&format!("{FIRST_COUNT} === '2'"));
    assert_eq!(browser.evaluate("document.querySelector('#main details').open"), true);
}

#[test]
fn clock_tells_the_age_and_what_is_old_is_grey_until_the_server_is_back() {
    let (server, mut browser) = console_with(&["ann@example.com"]);
    open(&mut browser, "keys", "document.querySelectorAll('#main tbody tr').length >= 3");
    let colour = "getComputedStyle(document.querySelector('#main td')).color";
    let fresh = browser.evaluate(colour);
    server.freeze();
    browser.wait_until("document.getElementById('connection').dataset.state === 'old'");
    let text = browser.evaluate("document.getElementById('connection').textContent");
    assert!(text.as_str().unwrap().contains("updated ") && text.as_str().unwrap().contains(" s ago"), "{text}");
    assert_ne!(browser.evaluate(colour), fresh);
    assert_eq!(browser.evaluate("document.getElementById('said').textContent"), "What is shown is old.");
    server.thaw();
    browser.wait_until("document.getElementById('connection').dataset.state === 'live'");
    assert_eq!(browser.evaluate(colour), fresh);
}

#[test]
fn view_of_rules_shows_what_the_last_load_changed() {
    let (server, mut browser) = console_with(&[]);
    open(&mut browser, "rules", "document.querySelector('#main code')?.textContent.length === 32");
    assert_eq!(browser.evaluate("document.querySelector('#main pre')"), Value::Null, "the first load changed nothing");
    std::fs::write(server.rules_path(), RULES.replace("requests_per_unit: 20", "requests_per_unit: 21")).unwrap();
    browser.wait_until("document.querySelector('#main pre')?.textContent.includes('20 -> 21 a day')");
    browser
        .wait_until("document.querySelector('#main').textContent.includes('; limits: 1 changed, 0 added, 0 removed')");
}

#[test]
fn state_is_in_the_link_and_a_reload_shows_the_same() {
    let (_server, mut browser) = console_with(&["ann@example.com"]);
    open(&mut browser, "rules", "document.querySelectorAll('#main tbody tr').length === 4");
    browser.evaluate(
        "for (const [id, value] of [['order', 'name'], ['search', 'user']]) { \
           const control = document.getElementById(id); control.value = value; control.dispatchEvent(new Event('input')); }",
    );
    browser.wait_until("location.hash.includes('order=name') && location.hash.includes('search=user')");
    browser.wait_until("document.querySelectorAll('#main tbody tr').length === 2");
    browser.evaluate("void location.reload()");
    browser.wait_until(
        "document.getElementById('search')?.value === 'user' && document.getElementById('order').value === 'name'",
    );
    browser.wait_until("document.querySelectorAll('#main tbody tr').length === 2");
    assert_eq!(browser.evaluate("document.querySelector('#main tbody tr').dataset.key"), "shop.user");
}

#[test]
fn what_is_pasted_into_the_sandbox_is_read() {
    let (_server, mut browser) = console_with(&[]);
    let asked =
        r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"ann"},{"key":"a","value":"x=,y"}]}]}"#;
    let cases = [
        asked.to_owned(),
        r"shop: user=ann,a=x=\,y".to_owned(),
        format!("10.0.0.7 GET /cart 429 {asked} upstream=1"),
        format!(r#"curl -s http://127.0.0.1:6070/explain -d '{asked}'"#),
        format!(r#"{{"v":1,"type":"decision","seq":3,{}"#, asked.trim_start_matches('{')),
        format!(r#"{{"path":"/cart","metadata":{asked}}}"#),
        r#"{"ratelimit":{"descriptors":[{"entries":["user=ann","a=x=,y"]}],"domain":"shop"},"status":429}"#.to_owned(),
        r#"time="x" level=debug msg="decision" domain=shop verdict=ok descriptors="user=ann,a=x\=\,y (2 hits) -> shop.user (r.yaml:1:1): 5 per day: ok""#
            .to_owned(),
    ];
    for pasted in cases {
        let pasted = Value::from(pasted);
        let read =
            format!("import('/console/keys.js').then(({{ parseRequest }}) => JSON.stringify(parseRequest({pasted})))");
        assert_eq!(browser.evaluate(&read), asked, "{pasted}");
    }
    let refused = [
        ("GET /cart 429", "This is no request."),
        (r#"{"descriptors":[]}"#, r#"no "domain""#),
        (
            r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value_hash":"ab"}]}]}"#,
            "is hashed in this line",
        ),
    ];
    for (pasted, expected) in refused {
        let pasted = Value::from(pasted);
        let read = format!(
            "import('/console/keys.js').then(({{ parseRequest }}) => parseRequest({pasted})).catch((error) => error.message)"
        );
        let message = browser.evaluate(&read);
        assert!(message.as_str().is_some_and(|message| message.contains(expected)), "{pasted}: {message}");
    }
}

#[test]
fn sandbox_shows_the_rule_and_charges_nothing() {
    let (server, mut browser) = console_with(&[]);
    open(&mut browser, "sandbox?text=shop: user=bob%0Ashop=1", "document.querySelector('#main pre') !== null");
    let text = browser.evaluate("document.querySelector('#main').textContent");
    for expected in ["rejects; passes in", "key: user", "requests_per_unit: 20", "matched nothing"] {
        assert!(text.as_str().unwrap().contains(expected), "{expected}: {text}");
    }
    let asked = r#"{"domain":"shop","descriptors":[{"entries":[{"key":"user","value":"fay"}]}]}"#;
    open(&mut browser, "sandbox?text=shop: user=fay", "document.querySelector('#main .good') !== null");
    assert_eq!(server.explain(asked)["descriptors"][0]["limits"][0]["counter"]["used"], 0);
}

#[test]
fn chart_has_the_counts_of_a_minute_and_arrow_keys_read_it() {
    let (server, mut browser) = console_with(&[]);
    open(&mut browser, "rules/shop.user", "document.querySelector('.plot svg') !== null");
    assert!(browser.evaluate("document.querySelector('.readout').textContent").as_str().unwrap().contains("passed "));
    charge(&server, "user", "gus", 3);
    browser.evaluate("document.querySelector('.plot').focus()");
    browser.evaluate(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true}))",
    );
    browser.wait_until(
        "/^[0-9]{2}:[0-9]{2}: passed [0-9]+ .*, rejected [0-9]+ /.test(document.querySelector('.readout').textContent)",
    );
    browser.wait_until(
        "document.querySelector('.plot .cursor') !== null && document.querySelector('.plot .mark') !== null",
    );
    browser.evaluate("void (document.querySelector('.plot').parentElement.querySelector('details').open = true)");
    browser.wait_until("document.querySelector('.plot').parentElement.querySelector('details tbody tr') !== null");
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
    let rejected = "document.querySelector('#main table').querySelectorAll('a.mono')";
    open(&mut browser, "keys", &format!("document.querySelector('#main table') && {rejected}.length === 1"));
    browser.evaluate(&format!("{rejected}[0].click()"));
    browser.wait_until("document.querySelector('#main meter') !== null");
    let shown = browser.evaluate("document.getElementById('main').textContent");
    assert!(shown.as_str().unwrap().contains("shop.eu.user"), "{shown}");
    let used = |domain: &str| {
        let entries = r#"[{"key":"user","value":"ann"}]"#;
        let body = format!(r#"{{"domain":"{domain}","descriptors":[{{"entries":{entries}}}]}}"#);
        server.explain(&body)["descriptors"][0]["limits"][0]["counter"]["used"].clone()
    };
    let reset =
        "[...document.querySelectorAll('#main button')].find((one) => one.textContent.startsWith('Reset')).click()";
    browser.evaluate(reset);
    browser.wait_until("document.getElementById('dialog-title').textContent === 'Reset counters?'");
    browser.evaluate("document.getElementById('dialog-cancel').click()");
    browser.wait_until("document.querySelector('#dialog[open]') === null");
    assert_eq!((used("shop"), used("shop.eu")), (2.into(), 5.into()));
    browser.evaluate(reset);
    browser.wait_until("document.querySelector('#dialog[open]') !== null");
    browser.evaluate("document.getElementById('dialog-ok').click()");
    browser.wait_until("document.getElementById('dialog-title').textContent === 'Reset'");
    assert_eq!((used("shop"), used("shop.eu")), (2.into(), 0.into()));
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
    open(&mut browser, "settings", "document.querySelectorAll('#main tbody tr').length > 100");
    assert_eq!(browser.evaluate("document.getElementById('level').value"), "warn");
}

/// Replaces `fetch` by one that handles paths as this JavaScript says, with `kept` for the real one.
fn replace_fetch(browser: &mut Chromium, handle: &str) {
    browser.evaluate(&format!(
        "void (window.kept = window.fetch, window.fetch = (path, options) => {{ {handle}; return kept(path, options); }})"
    ));
}

#[test]
fn alarms_that_are_not_known_are_no_absence_of_alarms() {
    let (_server, mut browser) = console_with(&[]);
    open(&mut browser, "fleet", "/No alarm.| s late /.test(document.querySelector('#main').textContent)");
    replace_fetch(&mut browser, "if (path === 'alarms') return Promise.reject(new Error('lost'))");
    browser.wait_until(
        "document.querySelector('#main').textContent.includes('Alarms are not known.') && \
         !document.querySelector('#main').textContent.includes('No alarm.') && \
         document.getElementById('alarms').textContent === 'alarms not known' && document.title === 'fleet · tollkeeper'",
    );
}

#[test]
fn live_figures_are_not_updated_by_other_answers() {
    let (_server, mut browser) = console_with(&[]);
    open(&mut browser, "replica", "document.querySelectorAll('#main svg.spark').length === 3");
    // The page is hidden and shown again, and then no event arrives.
    browser.evaluate(
        "for (const value of [true, false]) { \
           Object.defineProperty(document, 'hidden', { value, configurable: true }); \
           if (!value) window.EventSource = class { close() {} }; \
           document.dispatchEvent(new Event('visibilitychange')); }",
    );
    replace_fetch(&mut browser, "if (path === 'history') window.asked = true");
    browser.wait_until(
        "window.asked === true && document.querySelector('#main').textContent.includes('Waiting for the first figures.')",
    );
    let text = browser.evaluate("document.getElementById('connection').textContent");
    assert!(!text.as_str().unwrap().contains("updated"), "{text}");
}

#[test]
fn late_answer_does_not_replace_a_newer_one() {
    let (_server, mut browser) = console_with(&["ann@example.com"]);
    let rows = "[...document.querySelectorAll('#main table')].at(-1).querySelectorAll('tbody tr')";
    open(&mut browser, "rules", &format!("document.querySelector('#main table') && {rows}.length > 1"));
    replace_fetch(
        &mut browser,
        "if (path.includes('search=user')) { window.asked = true; \
         return new Promise((answer) => { window.answer = () => answer(kept(path, options)); }) }",
    );
    let search = |browser: &mut Chromium, text: &str| {
        browser.evaluate(&format!(
            "void (document.getElementById('search').value = '{text}', \
             document.getElementById('search').dispatchEvent(new Event('input')))"
        ))
    };
    search(&mut browser, "user");
    browser.wait_until("window.asked === true");
    search(&mut browser, "login");
    browser.wait_until(&format!("{rows}.length === 1"));
    browser.evaluate("void (window.answer(), setTimeout(() => { window.settled = true; }, 500))");
    browser.wait_until("window.settled === true");
    assert_eq!(browser.evaluate(&format!("{rows}.length")), 1);
}

#[test]
fn page_beyond_the_last_is_the_last() {
    let (_server, mut browser) = console_with(&[]);
    let contents = "document.querySelectorAll('#main tbody tr').length === 4 && !location.hash.includes('offset')";
    open(&mut browser, "rules?offset=500", contents);
}
