//! Properties of commands that the server checks before it runs them.

use bytes::Bytes;

use crate::arguments::{integer, option_name, shown};
use crate::reply::Failure;
use crate::stream_commands::ReadOptions;

/// Command: its properties and its function.
#[derive(Debug)]
pub(crate) struct Command<F> {
    pub(crate) properties: Properties,
    pub(crate) run: F,
}

/// Properties of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    /// Name in lower case.
    pub(crate) name: &'static str,
    /// Number of words; negative: the smallest number.
    pub(crate) arity: i32,
    /// Sum of the flags below.
    pub(crate) flags: u8,
    pub(crate) keys: KeyPositions,
}

/// Changes keys.
pub(crate) const WRITE: u8 = 1;
/// Is refused while memory is full.
pub(crate) const DENY_OOM: u8 = 2;
/// Scripts may not call it.
pub(crate) const NO_SCRIPT: u8 = 4;
/// Is served by a replica without its primary.
pub(crate) const STALE: u8 = 8;
/// Is served while data is loaded.
pub(crate) const LOADING: u8 = 16;
/// Needs no login.
pub(crate) const NO_AUTH: u8 = 32;
/// Is served while a script runs for too long.
pub(crate) const ALLOW_BUSY: u8 = 64;

/// Words of a command that are keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyPositions {
    /// None.
    None,
    /// The word after the name.
    First,
    /// All words after the name.
    All,
    /// Those of a script.
    Script,
    /// Those of XREAD.
    Streams,
}

impl Properties {
    /// Returns true if it has this flag.
    pub(crate) const fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Returns true if a command may have so many words.
    pub(crate) fn allows_words(&self, count: usize) -> bool {
        let bound = usize::try_from(self.arity.unsigned_abs()).unwrap_or(usize::MAX);
        if self.arity < 0 { count >= bound } else { count == bound }
    }

    /// Returns the keys of a command. A command whose words are wrong has none.
    pub(crate) fn keys<'w>(&self, words: &'w [Bytes]) -> &'w [Bytes] {
        match self.keys {
            KeyPositions::None => &[],
            KeyPositions::First => &words[1..2],
            KeyPositions::All => &words[1..],
            KeyPositions::Script => script_keys(words).unwrap_or_default(),
            KeyPositions::Streams => ReadOptions::parse(words).map_or(&[], |options| options.keys),
        }
    }
}

/// Returns the keys of EVAL or EVALSHA.
///
/// # Errors
/// Their number is wrong.
pub(crate) fn script_keys(words: &[Bytes]) -> Result<&[Bytes], Failure> {
    let count = integer(&words[2])?;
    let count = usize::try_from(count).map_err(|_| Failure::fixed("ERR Number of keys can't be negative"))?;
    words[3..].get(..count).ok_or(Failure::fixed("ERR Number of keys can't be greater than number of args"))
}

/// Finds a command by its name, in any case.
pub(crate) fn find<'c, F>(commands: &'c [Command<F>], name: &[u8]) -> Option<&'c Command<F>> {
    commands.iter().find(|command| command.properties.name.as_bytes().eq_ignore_ascii_case(name))
}

/// Returns the error of a command with a wrong number of words.
pub(crate) fn wrong_word_count(name: &str) -> Failure {
    Failure::new(format!("ERR wrong number of arguments for '{name}' command"))
}

/// Returns the error of an unknown subcommand.
pub(crate) fn unknown_subcommand(words: &[Bytes]) -> Failure {
    let (name, subcommand) = (shown(&option_name(&words[0]), 128), shown(&words[1], 128));
    Failure::new(format!("ERR unknown subcommand '{subcommand}'. Try {name} HELP."))
}
