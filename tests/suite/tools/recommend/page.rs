//! The HTML page: one file, without scripts, safe with hostile text, and shown by a browser.

use std::fs;
use std::process::Command;

use super::Files;
use crate::tools::simulate::Log;

/// Rules whose key breaks out of every context if it is not escaped.
const RULES: &str = "domain: shop\ndescriptors:\n- {key: '</pre><script>document.title=1</script>', rate_limit: {unit: minute, requests_per_unit: 5}}\n";
const KEY: &str = "</pre><script>document.title";
const VALUE: &str = "1</script>";

fn page() -> (Files, String) {
    let mut log = Log::new("p", RULES);
    for number in 0..100 {
        log = log.request(number * 1000, &["KEY=ann"]);
    }
    let text = log.text().replace("\"key\":\"KEY\"", &format!("\"key\":\"{KEY}={VALUE}\""));
    let files = Files::new().with("log", text);
    let rule = format!("shop.{KEY}={VALUE}");
    let mut program = Command::new(crate::kit::tollkeeper::PROGRAM);
    program
        .args(["recommend", "--rule", &rule, "--traffic", "log", "--report", "out.html"])
        .current_dir(files.0.path());
    let output = program.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let page = fs::read_to_string(files.path("out.html")).unwrap();
    (files, page)
}

#[test]
fn page_is_well_formed_and_refers_to_nothing() {
    let (files, page) = page();
    assert!(page.contains("shop.&#60;/pre&#62;&#60;script&#62;"), "the hostile key is not shown: {page}");
    let lower = page.to_lowercase();
    for forbidden in
        ["<script", "<img", "<iframe", "<link", "href=", "src=\"", "url(", "http:", "https:", "xmlns", "//"]
    {
        assert!(!lower.contains(forbidden), "{forbidden}: {page}");
    }
    // Rejected keys by limit, and use per minute and second.
    assert_eq!(page.matches("<svg ").count(), 3);
    let program = "import sys, xml.etree.ElementTree as e\n\
                   t = open(sys.argv[1], encoding='utf-8').read().split('\\n', 1)[1]\n\
                   assert e.fromstring(t).find('body') is not None";
    let output = Command::new("python3").args(["-c", program]).arg(files.path("out.html")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn browser_shows_the_page_and_runs_nothing() {
    let (files, _) = page();
    let chromium = std::env::var("TOLLKEEPER_TEST_CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
    let mut browser = Command::new(&chromium);
    browser.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]);
    browser.arg("--enable-logging=stderr").arg(format!("--user-data-dir={}", files.path("profile").display()));
    let output = browser.arg(format!("file://{}", files.path("out.html").display())).output();
    let output = output.unwrap_or_else(|error| panic!("{chromium}: {error}: install Chromium, see tests/run.sh"));
    assert!(output.status.success(), "{output:?}");
    let (dom, log) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(dom.contains("<title>tollkeeper recommend</title>"), "{dom}");
    assert!(dom.contains("shop.&lt;/pre&gt;&lt;script&gt;") && !dom.contains("<script"), "{dom}");
    assert_eq!(dom.matches("<svg ").count(), 3, "{dom}");
    let violations: Vec<_> =
        log.lines().filter(|line| line.contains("CONSOLE") || line.contains("Content Security")).collect();
    assert!(violations.is_empty(), "{violations:?}");
}
