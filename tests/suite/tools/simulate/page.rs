//! The HTML page: one file, without scripts, safe with hostile values, and shown by a browser.

use std::fs;
use std::process::Command;

use super::{Files, Log, OLD_RULES};

/// Value that breaks out of every context if it is not escaped.
const HOSTILE: &str =
    "\"'><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"><!--]]>{{7*7}}";

fn page() -> (Files, String) {
    let mut log = Log::new("p", OLD_RULES).ten_of_ann_and_two_of_bob();
    for at_ms in 2000..2010 {
        log = log.decided(at_ms, HOSTILE, at_ms < 2005);
    }
    let files = Files::new().with("log.jsonl", log.text());
    let run = files.run(&[
        "--rules",
        "new.yaml",
        "--traffic",
        "log.jsonl",
        "--report",
        "out.html",
        "--fail-if",
        "rejected(*) > 100%",
    ]);
    assert_eq!(run.code(), 0, "{run:?}");
    let page = fs::read_to_string(files.path("out.html")).unwrap();
    (files, page)
}

#[test]
fn page_is_well_formed_and_refers_to_nothing() {
    let (files, page) = page();
    assert!(page.contains("login=&#34;&#39;&#62;&#60;script&#62;"), "the hostile key is not shown: {page}");
    let lower = page.to_lowercase();
    for forbidden in
        ["<script", "<img", "<iframe", "<link", "href=", "src=\"", "url(", "http:", "https:", "xmlns", "//"]
    {
        assert!(!lower.contains(forbidden), "{forbidden}: {page}");
    }
    assert!(
        page.contains("content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'\"")
    );
    assert_eq!(page.matches("<svg ").count(), 2);
    // The page is XML too, apart from its doctype, so every element is closed.
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
    assert!(dom.contains("<title>tollkeeper simulate</title>"), "{dom}");
    assert!(dom.contains("login=\"'&gt;&lt;script&gt;"), "{dom}");
    assert!(!dom.contains("<script") && !dom.contains("<img"), "{dom}");
    assert_eq!(dom.matches("<svg ").count(), 2, "{dom}");
    let violations: Vec<_> =
        log.lines().filter(|line| line.contains("CONSOLE") || line.contains("Content Security")).collect();
    assert!(violations.is_empty(), "{violations:?}");
}
