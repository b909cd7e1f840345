//! A headless Chromium, driven over the DevTools protocol through two pipes.
//!
//! Every message, warning and error of the page and every request is kept, so that a test can say that there were none.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{PATIENCE, signal, wait_for};

/// A browser with one tab.
#[derive(Debug)]
pub struct Chromium {
    child: Child,
    commands: File,
    messages: Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// Events so far.
    pub events: Vec<Value>,
    _files: TempDir,
}

impl Drop for Chromium {
    fn drop(&mut self) {
        signal::kill(&mut self.child);
    }
}

impl Chromium {
    /// Starts it with an empty tab.
    pub fn start() -> Self {
        let files = tempfile::tempdir().expect("a temporary directory can be made");
        let (commands, messages) = (files.path().join("commands"), files.path().join("messages"));
        let made = Command::new("mkfifo").args([&commands, &messages]).status();
        assert!(made.is_ok_and(|status| status.success()), "mkfifo fails");
        let program = std::env::var("TOLLKEEPER_TEST_CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        let profile = format!("--user-data-dir={}", files.path().join("profile").display());
        let options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"];
        // The browser reads commands from descriptor 3 and writes messages to descriptor 4.
        let mut shell = Command::new("sh");
        shell.args(["-c", "in=$1; out=$2; shift 2; exec \"$@\" 3<\"$in\" 4>\"$out\"", "sh"]);
        shell.args([commands.as_os_str(), messages.as_os_str(), OsStr::new(&program)]);
        shell.args(options).args(["--remote-debugging-pipe", &profile, "about:blank"]);
        shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = shell.spawn().expect("a shell can be started");
        let commands = fs::OpenOptions::new().write(true).open(commands).expect("the browser reads");
        let messages = File::open(messages).expect("the browser writes: install Chromium, see tests/run.sh");
        let (sender, received) = channel();
        thread::spawn(move || {
            for message in BufReader::new(messages).split(0).map_while(Result::ok) {
                if serde_json::from_slice(&message).is_ok_and(|message| sender.send(message).is_err()) {
                    return;
                }
            }
        });
        let mut browser =
            Self { child, commands, messages: received, session: None, last_id: 0, events: Vec::new(), _files: files };
        let tab = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let session = browser.call("Target.attachToTarget", &json!({"targetId": tab["targetId"], "flatten": true}));
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Sends a command and returns its result.
    pub fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let mut command = json!({"id": self.last_id, "method": method, "params": params});
        if let Some(session) = &self.session {
            command["sessionId"] = session.clone().into();
        }
        let command = [command.to_string().as_bytes(), b"\0"].concat();
        self.commands.write_all(&command).expect("the browser takes commands");
        loop {
            let message = self.messages.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer to {method}"));
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    /// Value of an expression in the page; a promise is awaited.
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let result = self.call("Runtime.evaluate", &params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait_until(&mut self, expression: &str) {
        wait_for(expression, || (self.evaluate(expression) == true).then_some(()));
    }

    /// Presses and releases a key, such as `Tab` or `Enter`.
    pub fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            other => panic!("the kit knows no key {other}"),
        };
        let text = if key == "Enter" { "\r" } else { "" };
        let event = |kind: &str, text: &str| json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
        self.call("Input.dispatchKeyEvent", &event("keyDown", text));
        self.call("Input.dispatchKeyEvent", &event("keyUp", ""));
    }

    /// Types text into the focused control.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", &json!({"text": text}));
    }

    /// Sets the width of the page in pixels, and the theme that the system prefers.
    pub fn set_view(&mut self, width: u32, theme: &str) {
        let metrics = json!({"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", &metrics);
        let features = json!([{"name": "prefers-color-scheme", "value": theme}]);
        self.call("Emulation.setEmulatedMedia", &json!({"features": features}));
    }

    /// A picture of the page as PNG in base64.
    pub fn picture(&mut self) -> String {
        let picture = self.call("Page.captureScreenshot", &json!({"format": "png"}));
        picture["data"].as_str().expect("a picture is text").to_owned()
    }
}
