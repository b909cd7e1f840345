//! JSON Schema, judged by the Python under TOLLKEEPER_TEST_SCHEMAS: one process for all values that a test binary has.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use serde_json::{Value, json};

use super::repository;

struct Judge {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Ends when its input does.
    _process: Child,
}

static JUDGE: LazyLock<Mutex<Judge>> = LazyLock::new(|| {
    let python = env::var_os("TOLLKEEPER_TEST_SCHEMAS")
        .expect("TOLLKEEPER_TEST_SCHEMAS is not set: run tests/run.sh, or set what deploy/install-tools.sh prints");
    let mut command = Command::new(python);
    command.arg(repository("tests/deploy/schemas.py")).arg("values").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("the Python under TOLLKEEPER_TEST_SCHEMAS can be started");
    let input = process.stdin.take().expect("it is piped");
    let output = BufReader::new(process.stdout.take().expect("it is piped"));
    Mutex::new(Judge { input, output, _process: process })
});

/// What a schema finds wrong with a value, each as `path: message`.
pub fn schema_errors(schema: &Value, value: &Value) -> Vec<String> {
    let mut judge = JUDGE.lock().unwrap_or_else(PoisonError::into_inner);
    writeln!(judge.input, "{}", json!([schema, value])).expect("the judge of schemas reads");
    let mut line = String::new();
    judge.output.read_line(&mut line).expect("the judge of schemas answers");
    serde_json::from_str(&line).expect("the judge of schemas answers; what it printed on standard error says why not")
}
