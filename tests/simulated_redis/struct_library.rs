//! The Lua library `struct`, which Redis has, with the formats that the product's scripts use: little-endian integers
//! of 1 to 8 bytes (`b`, `B`, `i8`, `I8`), doubles (`d`) and bytes (`c16`; `c0`: as many as the number before says).

use mlua::{Error, Lua, LuaString, MultiValue, Result, Table, Value};

/// Item of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Signed(usize),
    Unsigned(usize),
    Double,
    /// Bytes; 0: as many as the number before says, or all of a string.
    Bytes(usize),
}

/// Items of a format.
struct Format<'f> {
    /// Function that reads the format, for errors.
    function: &'static str,
    rest: &'f [u8],
}

impl Iterator for Format<'_> {
    type Item = Result<Item>;

    fn next(&mut self) -> Option<Result<Item>> {
        let (letter, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(match letter {
            // The byte order of this machine, too.
            b'<' => return self.next(),
            b'b' => Ok(Item::Signed(1)),
            b'B' => Ok(Item::Unsigned(1)),
            b'i' => self.integer_size().map(Item::Signed),
            b'I' => self.integer_size().map(Item::Unsigned),
            b'd' => Ok(Item::Double),
            b'c' => Ok(Item::Bytes(self.number().unwrap_or(1))),
            letter => {
                let problem = format!("invalid format option '{}'", char::from(*letter));
                Err(argument_error(1, self.function, &problem))
            }
        })
    }
}

impl Format<'_> {
    fn integer_size(&mut self) -> Result<usize> {
        match self.number().unwrap_or(4) {
            size @ 1..=8 => Ok(size),
            size => Err(Error::runtime(format!("integral size {size} is larger than limit of 8"))),
        }
    }

    fn number(&mut self) -> Option<usize> {
        let digits = self.rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (number, rest) = self.rest.split_at(digits);
        self.rest = rest;
        std::str::from_utf8(number).ok()?.parse().ok()
    }
}

/// Creates the library.
pub(crate) fn create_library(lua: &Lua) -> Result<Table> {
    let library = lua.create_table()?;
    library.set("pack", lua.create_function(|lua, values: MultiValue| pack(lua, values))?)?;
    library.set("unpack", lua.create_function(|lua, arguments: UnpackArguments| unpack(lua, &arguments))?)?;
    Ok(library)
}

fn argument_error(index: usize, function: &str, problem: &str) -> Error {
    Error::runtime(format!("bad argument #{index} to '{function}' ({problem})"))
}

fn type_error(index: usize, expected: &str, value: Option<&Value>) -> Error {
    let found = match value {
        None => "nil",
        Some(Value::Integer(_)) => "number",
        Some(value) => value.type_name(),
    };
    argument_error(index, "pack", &format!("{expected} expected, got {found}"))
}

/// Returns a number, which may be written as a string.
fn as_number(value: &Value) -> Option<f64> {
    match value {
        #[expect(clippy::cast_precision_loss, reason = "the integer was a double")]
        Value::Integer(number) => Some(*number as f64),
        Value::Number(number) => Some(*number),
        Value::String(text) => text.to_str().ok()?.trim().parse().ok(),
        _ => None,
    }
}

fn pack(lua: &Lua, values: MultiValue) -> Result<LuaString> {
    let mut values = values.into_iter();
    let Some(Value::String(text)) = values.next() else { return Err(type_error(1, "string", None)) };
    let mut packed = Vec::with_capacity(64);
    for (item, index) in (Format { function: "pack", rest: &text.as_bytes() }).zip(2..) {
        let value = values.next();
        let number = || value.as_ref().and_then(as_number).ok_or_else(|| type_error(index, "number", value.as_ref()));
        match item? {
            Item::Signed(size) | Item::Unsigned(size) => {
                packed.extend_from_slice(&number_as_word(number()?).to_le_bytes()[..size]);
            }
            Item::Double => packed.extend_from_slice(&number()?.to_le_bytes()),
            Item::Bytes(size) => {
                let Some(Value::String(text)) = &value else { return Err(type_error(index, "string", value.as_ref())) };
                let bytes = text.as_bytes();
                let size = if size == 0 { bytes.len() } else { size };
                // The library has counted the argument already.
                let part = bytes.get(..size).ok_or_else(|| argument_error(index + 1, "pack", "string too short"))?;
                packed.extend_from_slice(part);
            }
        }
    }
    lua.create_string(&packed)
}

/// Returns the word that C's casts make of a number: negative ones as signed.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast of the library")]
fn number_as_word(number: f64) -> u64 {
    if number < 0.0 { (number as i64).cast_unsigned() } else { number as u64 }
}

/// Arguments of `unpack`: format, data, and the position of the first byte.
type UnpackArguments = (LuaString, LuaString, Option<usize>);

fn unpack(lua: &Lua, (text, data, position): &UnpackArguments) -> Result<MultiValue> {
    let data = data.as_bytes();
    let start = position.unwrap_or(1).checked_sub(1);
    let mut position = start.ok_or_else(|| argument_error(3, "unpack", "offset must be 1 or greater"))?;
    let mut values: Vec<Value> = Vec::with_capacity(20);
    for item in (Format { function: "unpack", rest: &text.as_bytes() }) {
        let mut take = |size: usize| {
            let taken = data.get(position..).and_then(|rest| rest.get(..size));
            position = position.saturating_add(size);
            taken.ok_or_else(|| argument_error(2, "unpack", "data string too short"))
        };
        #[expect(clippy::cast_precision_loss, reason = "Lua's numbers are doubles")]
        let value = match item? {
            Item::Signed(size) => Value::Number(read_signed(take(size)?) as f64),
            Item::Unsigned(size) => Value::Number(read_word(take(size)?) as f64),
            Item::Double => Value::Number(f64::from_bits(read_word(take(8)?))),
            Item::Bytes(size) => {
                let size = match size {
                    0 => {
                        let size = values.pop().as_ref().and_then(as_number).map(number_as_word);
                        let size = size.ok_or_else(|| Error::runtime("format 'c0' needs a previous size"))?;
                        usize::try_from(size).unwrap_or(usize::MAX)
                    }
                    size => size,
                };
                Value::String(lua.create_string(take(size)?)?)
            }
        };
        values.push(value);
    }
    values.push(Value::Integer(i64::try_from(position).unwrap_or(i64::MAX).saturating_add(1)));
    Ok(values.into_iter().collect())
}

fn read_word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn read_signed(bytes: &[u8]) -> i64 {
    let unused_bits = 64 - 8 * bytes.len();
    (read_word(bytes) << unused_bits).cast_signed() >> unused_bits
}
