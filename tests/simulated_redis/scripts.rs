//! Scripts: the Lua of Redis, with `redis`, `struct`, `KEYS` and `ARGV`.
//!
//! A thread has one Lua state and compiles each script once, because simulations make many servers. A script sees no
//! state of other scripts: its globals cannot be changed, and the keys are those of the server that runs it.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use mlua::{Error, Function, Lua, LuaOptions, LuaString, MultiValue, StdLib, Table, Value};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use crate::cluster::{NodeState, SlotMap};
use crate::commands::{self, Properties, WRITE};
use crate::data_commands::DATA_COMMANDS;
use crate::keyspace::Keyspace;
use crate::numbers::format_double;
use crate::refusals::{READ_ONLY, Refusal};
use crate::reply::{CommandResult, Failure, Reply};
use crate::statistics::Statistics;
use crate::struct_library;

/// Maximum number of compiled scripts of a thread.
const MAX_COMPILED_SCRIPTS: usize = 10_000;
/// Name of a script's code in errors.
const SCRIPT_SOURCE: &str = "@user_script";

/// Returns the SHA-1 of a script in lower-case hexadecimal digits.
pub(crate) fn sha1_hex(text: &[u8]) -> String {
    let hash = digest(&SHA1_FOR_LEGACY_USE_ONLY, text);
    hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Server as a running script sees it.
#[derive(Debug)]
pub(crate) struct ScriptHost {
    pub(crate) keyspace: Keyspace,
    pub(crate) statistics: Statistics,
    pub(crate) rules: ScriptRules,
    /// A command of the script may have changed a key.
    pub(crate) has_written: bool,
}

/// What a script may do.
#[derive(Clone, Debug)]
pub(crate) struct ScriptRules {
    pub(crate) refusal: Option<Refusal>,
    pub(crate) is_replica: bool,
    pub(crate) slots: Option<Arc<SlotMap>>,
    pub(crate) is_asking: bool,
    /// Returns true for commands that the server has and scripts may not call.
    pub(crate) is_forbidden: fn(&[u8]) -> bool,
}

impl ScriptHost {
    /// Runs a command of a script.
    fn call(&mut self, words: &[Bytes]) -> CommandResult {
        let Some(command) = commands::find(DATA_COMMANDS, &words[0]) else {
            return Err(Failure::fixed(match (self.rules.is_forbidden)(&words[0]) {
                true => "ERR This Redis command is not allowed from script",
                false => "ERR Unknown Redis command called from script",
            }));
        };
        if !command.properties.allows_words(words.len()) {
            return Err(Failure::fixed("ERR Wrong number of args calling Redis command from script"));
        }
        self.check(&command.properties, words)?;
        self.has_written |= command.properties.has(WRITE);
        self.statistics.count_command(command.properties.name);
        (command.run)(&mut self.keyspace, words)
    }

    /// Checks that the server accepts the command.
    fn check(&mut self, command: &Properties, words: &[Bytes]) -> Result<(), Failure> {
        if self.rules.is_replica && command.has(WRITE) {
            return Err(READ_ONLY);
        }
        let refused = self.rules.refusal.and_then(|refusal| refusal.of_script_command(command, self.has_written));
        if let Some(failure) = refused {
            return Err(failure);
        }
        let Some(slots) = &self.rules.slots else { return Ok(()) };
        let state = NodeState { is_asking: self.rules.is_asking, is_down: false };
        slots
            .check(command.keys(words), state, &mut self.keyspace)
            .map_err(|_| Failure::fixed("ERR Script attempted to access a non local key in a cluster node"))
    }
}

/// Lua state of a thread.
struct Engine {
    lua: Lua,
    /// Globals of scripts.
    globals: Table,
    /// Environment of scripts, which protects the globals.
    environment: Table,
    /// Calls a function, and describes its error.
    call_protected: Function,
    compiled: RefCell<HashMap<String, Function>>,
    host: Rc<RefCell<Option<ScriptHost>>>,
}

thread_local! {
    static ENGINE: OnceCell<Engine> = const { OnceCell::new() };
}

/// Call of a script.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScriptCall<'c> {
    pub(crate) sha1: &'c str,
    pub(crate) text: &'c [u8],
    pub(crate) keys: &'c [Bytes],
    pub(crate) arguments: &'c [Bytes],
}

/// Checks that a script compiles.
///
/// # Errors
/// It does not.
pub(crate) fn compile(sha1: &str, text: &[u8]) -> Result<(), Failure> {
    with_engine(|engine| engine.function(sha1, text).map(drop))
}

/// Runs a script; returns its result and the server after it.
pub(crate) fn run(call: ScriptCall<'_>, host: ScriptHost) -> (CommandResult, Option<ScriptHost>) {
    with_engine(|engine| {
        engine.host.replace(Some(host));
        let result = engine.run(call);
        (result, engine.host.take())
    })
}

fn with_engine<T>(use_engine: impl FnOnce(&Engine) -> T) -> T {
    ENGINE.with(|engine| use_engine(engine.get_or_init(|| Engine::new().expect("the libraries of Lua can be loaded"))))
}

/// Returns the function that calls scripts, and `pcall` for scripts, which returns errors as texts.
const PRELUDE: &str = "
local describe, as_text = ...
local pcall, xpcall = pcall, xpcall
local function convert(done, result, ...)
  if done then return done, result, ... end
  return done, as_text(result)
end
return function(script) return xpcall(script, describe) end, function(...) return convert(pcall(...)) end";

/// Makes a table of globals read-only, and unknown globals an error.
const PROTECTION: &str = "
local globals, environment = ...
local error, setmetatable, tostring = error, setmetatable, tostring
setmetatable(globals, {__index = function(_, name)
  error('Script attempted to access nonexistent global variable \\'' .. tostring(name) .. '\\'', 2)
end})
setmetatable(environment, {__index = globals, __newindex = function()
  error('Attempt to modify a readonly table', 2)
end})";

impl Engine {
    fn new() -> mlua::Result<Self> {
        let lua = Lua::new_with(StdLib::TABLE | StdLib::STRING | StdLib::MATH, LuaOptions::default())?;
        let host = Rc::new(RefCell::new(None));
        let (globals, environment) = (lua.globals(), lua.create_table()?);
        let (describe, as_text) = (lua.create_function(describe_error)?, lua.create_function(error_as_text)?);
        let prelude = lua.load(PRELUDE).set_name("=redis");
        let (call_protected, pcall): (Function, Function) = prelude.call((describe, as_text))?;
        globals.set("pcall", pcall)?;
        let redis = lua.create_table()?;
        let called = Rc::clone(&host);
        redis.set("call", lua.create_function(move |lua, words| call(lua, &words, &called))?)?;
        let called = Rc::clone(&host);
        redis.set("pcall", lua.create_function(move |lua, words| protected_call(lua, &words, &called))?)?;
        redis.set("sha1hex", lua.create_function(|_, text: LuaString| Ok(sha1_hex(&text.as_bytes())))?)?;
        redis.set("status_reply", lua.create_function(|lua, text: LuaString| table_with(lua, "ok", text))?)?;
        redis.set("error_reply", lua.create_function(|lua, text: LuaString| error_reply(lua, &text))?)?;
        globals.set("redis", redis)?;
        globals.set("struct", struct_library::create_library(&lua)?)?;
        let protection = lua.load(PROTECTION).set_name("=redis");
        protection.call::<()>((&globals, &environment))?;
        Ok(Self { lua, globals, environment, call_protected, compiled: RefCell::default(), host })
    }

    /// Returns the function of a script.
    fn function(&self, sha1: &str, text: &[u8]) -> Result<Function, Failure> {
        let mut compiled = self.compiled.borrow_mut();
        if let Some(function) = compiled.get(sha1) {
            return Ok(function.clone());
        }
        let chunk = self.lua.load(text).set_name(SCRIPT_SOURCE).set_environment(self.environment.clone());
        let function = chunk.into_function().map_err(|error| {
            let message = if let Error::SyntaxError { message, .. } = error { message } else { error.to_string() };
            Failure::new(format!("ERR Error compiling script (new function): {message}"))
        })?;
        if compiled.len() >= MAX_COMPILED_SCRIPTS {
            compiled.clear();
        }
        compiled.insert(sha1.to_owned(), function.clone());
        Ok(function)
    }

    fn run(&self, call: ScriptCall<'_>) -> CommandResult {
        let function = self.function(call.sha1, call.text)?;
        match self.call_function(&function, call) {
            Ok((true, value)) => Ok(value_to_reply(value, 0)),
            Ok((false, error)) => Err(raised_failure(&error, call.sha1)),
            Err(error) => Err(Failure::new(format!("ERR {error}"))),
        }
    }

    /// Calls a script; returns true and its result, or false and the description of its error.
    fn call_function(&self, function: &Function, call: ScriptCall<'_>) -> mlua::Result<(bool, Value)> {
        for (name, words) in [("KEYS", call.keys), ("ARGV", call.arguments)] {
            let strings = words.iter().map(|word| self.lua.create_string(word)).collect::<mlua::Result<Vec<_>>>()?;
            self.globals.raw_set(name, self.lua.create_sequence_from(strings)?)?;
        }
        self.call_protected.call(function)
    }
}

/// Error of a command, as `redis.call` raises it.
#[derive(Debug)]
struct CommandError(Failure);

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.0)
    }
}

impl std::error::Error for CommandError {}

/// `redis.call`: runs a command, and raises its error.
fn call(lua: &Lua, words: &MultiValue, host: &RefCell<Option<ScriptHost>>) -> mlua::Result<Value> {
    match execute(words, host) {
        Ok(reply) => reply_to_value(lua, reply),
        Err(failure) => Err(Error::external(CommandError(failure))),
    }
}

/// `redis.pcall`: runs a command, and returns its error as a table.
fn protected_call(lua: &Lua, words: &MultiValue, host: &RefCell<Option<ScriptHost>>) -> mlua::Result<Value> {
    match execute(words, host) {
        Ok(reply) => reply_to_value(lua, reply),
        Err(Failure(text)) => table_with(lua, "err", &*text).map(Value::Table),
    }
}

fn execute(words: &MultiValue, host: &RefCell<Option<ScriptHost>>) -> CommandResult {
    let words = command_words(words)?;
    match host.borrow_mut().as_mut() {
        Some(host) => host.call(&words),
        None => Err(Failure::fixed("ERR no server runs this script")),
    }
}

/// Returns the words of a command as Redis makes them: numbers are written with up to 17 digits.
fn command_words(values: &MultiValue) -> Result<Vec<Bytes>, Failure> {
    if values.is_empty() {
        return Err(Failure::fixed("ERR Please specify at least one argument for this redis lib call"));
    }
    let word = |value: &Value| match value {
        Value::String(text) => Ok(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Integer(number) if number.unsigned_abs() < 100_000_000_000_000_000 => Ok(number.to_string().into()),
        #[expect(clippy::cast_precision_loss, reason = "Lua's numbers are doubles")]
        Value::Integer(number) => Ok(format_double(*number as f64).into()),
        Value::Number(number) => Ok(format_double(*number).into()),
        _ => Err(Failure::fixed("ERR Lua redis lib command arguments must be strings or integers")),
    };
    values.iter().map(word).collect()
}

fn table_with(lua: &Lua, name: &str, value: impl mlua::IntoLua) -> mlua::Result<Table> {
    let table = lua.create_table_with_capacity(0, 1)?;
    table.raw_set(name, value)?;
    Ok(table)
}

/// Returns the value that a script gets for a reply.
fn reply_to_value(lua: &Lua, reply: Reply) -> mlua::Result<Value> {
    Ok(match reply {
        Reply::Status(text) => Value::Table(table_with(lua, "ok", lua.create_string(&text)?)?),
        Reply::Error(text) => Value::Table(table_with(lua, "err", text)?),
        Reply::Integer(number) => Value::Integer(number),
        Reply::Double(number) => Value::String(lua.create_string(format_double(number))?),
        Reply::Bulk(bytes) => Value::String(lua.create_string(&bytes)?),
        Reply::Null | Reply::NullArray => Value::Boolean(false),
        collection => {
            let elements = collection.into_flat_elements().unwrap_or_default();
            let values = elements.into_iter().map(|element| reply_to_value(lua, element));
            Value::Table(lua.create_sequence_from(values.collect::<mlua::Result<Vec<_>>>()?)?)
        }
    })
}

/// Maximum nesting of a script's result.
const MAX_RESULT_DEPTH: usize = 100;

/// Returns the reply of a script's result.
fn value_to_reply(value: Value, depth: usize) -> Reply {
    match value {
        Value::String(text) => Reply::Bulk(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Integer(number) => Reply::Integer(number),
        Value::Number(number) => Reply::Integer(truncate(number)),
        Value::Boolean(true) => Reply::Integer(1),
        Value::Table(_) if depth == MAX_RESULT_DEPTH => Reply::Error("ERR reached lua stack limit".to_owned()),
        Value::Table(table) => {
            if let Ok(Value::String(text)) = table.raw_get("err") {
                return Reply::Error(text.to_string_lossy());
            }
            if let Ok(Value::String(text)) = table.raw_get("ok") {
                return Reply::Status(Bytes::copy_from_slice(&text.as_bytes()));
            }
            let elements = (1..).map_while(|index: i64| match table.raw_get(index) {
                Ok(Value::Nil) | Err(_) => None,
                Ok(element) => Some(value_to_reply(element, depth + 1)),
            });
            Reply::Array(elements.collect())
        }
        _ => Reply::Null,
    }
}

/// Returns the integer that C's cast makes of a number, toward zero.
#[expect(clippy::cast_possible_truncation, reason = "the cast of Redis")]
fn truncate(number: f64) -> i64 {
    // 2^63; what is out of range becomes the smallest integer.
    if number.abs() < 9_223_372_036_854_775_808.0 { number as i64 } else { i64::MIN }
}

/// Returns the line at which a script is now.
fn current_line(lua: &Lua) -> Option<usize> {
    let mut level = 0;
    loop {
        let line = lua.inspect_stack(level, |frame| {
            let is_script = frame.source().source.is_some_and(|source| source == SCRIPT_SOURCE);
            is_script.then(|| frame.current_line()).flatten()
        })?;
        if line.is_some() {
            return line;
        }
        level += 1;
    }
}

/// Returns the table that describes an error: its text, and the line of the script.
fn describe_error(lua: &Lua, error: Value) -> mlua::Result<Table> {
    let line = current_line(lua);
    let described = match error {
        Value::Table(error) => error,
        Value::Error(error) => table_with(lua, "err", error_text(lua, &error))?,
        other => table_with(lua, "err", format!("ERR {}", other.to_string()?))?,
    };
    described.raw_set("line", line)?;
    Ok(described)
}

/// Returns an error as `pcall` of scripts does: the text of a table instead of the table.
fn error_as_text(lua: &Lua, error: Value) -> mlua::Result<Value> {
    match &error {
        Value::Table(table) => match table.raw_get("err")? {
            text @ Value::String(_) => Ok(text),
            _ => Ok(error),
        },
        Value::Error(raised) => Ok(Value::String(lua.create_string(error_text(lua, raised))?)),
        _ => Ok(error),
    }
}

/// Returns the text of an error that a function of this crate raised; with its place, if it is none of a command.
fn error_text(lua: &Lua, error: &Error) -> String {
    match error.downcast_ref::<CommandError>() {
        Some(CommandError(Failure(text))) => text.to_string(),
        None => {
            let place = current_line(lua).map(|line| format!("user_script:{line}: ")).unwrap_or_default();
            format!("ERR {place}{}", cause(error))
        }
    }
}

/// Returns the text of an error without its context.
fn cause(error: &Error) -> String {
    match error {
        Error::CallbackError { cause: inner, .. } => cause(inner),
        Error::RuntimeError(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Returns the error reply of a script that failed.
fn raised_failure(described: &Value, sha1: &str) -> Failure {
    let field = |name: &str| match described {
        Value::Table(table) => table.raw_get::<Option<String>>(name).ok().flatten(),
        _ => None,
    };
    let text = field("err").unwrap_or_else(|| "ERR unknown error".to_owned());
    Failure::new(match field("line") {
        Some(line) => format!("{text} script: {sha1}, on {SCRIPT_SOURCE}:{line}."),
        None => text,
    })
}

/// `redis.error_reply`: the text without a leading `-`; `ERR` is added to a single word with one.
fn error_reply(lua: &Lua, text: &LuaString) -> mlua::Result<Table> {
    let text = text.to_string_lossy();
    let text = text.strip_prefix('-').unwrap_or(&text);
    let text = text.trim_end_matches(['\r', '\n']);
    table_with(lua, "err", if text.contains(' ') { text.to_owned() } else { format!("ERR {text}") })
}
