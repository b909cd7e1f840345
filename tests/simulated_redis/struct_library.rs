//! The Lua library `struct`, which Redis has: packs and unpacks binary values without alignment.

use mlua::{Error, Lua, LuaString, MultiValue, Result, Table, Value};

/// Item of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item {
    Signed(usize),
    Unsigned(usize),
    Float,
    Double,
    /// Bytes; 0: as many as the number before says, or all of a string.
    Bytes(usize),
    /// String that ends with a zero byte.
    ZeroTerminated,
    Padding,
}

/// Formats of a string, with the byte order that applies to each.
struct Format<'f> {
    /// Function that reads the format, for errors.
    function: &'static str,
    rest: &'f [u8],
    is_big_endian: bool,
}

impl Iterator for Format<'_> {
    type Item = Result<(Item, bool)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let (letter, rest) = self.rest.split_first()?;
            self.rest = rest;
            match letter {
                b'<' => self.is_big_endian = false,
                b'>' => self.is_big_endian = true,
                b' ' => {}
                letter => return Some(self.parse_item(*letter).map(|item| (item, self.is_big_endian))),
            }
        }
    }
}

impl Format<'_> {
    fn parse_item(&mut self, letter: u8) -> Result<Item> {
        Ok(match letter {
            b'b' => Item::Signed(1),
            b'B' => Item::Unsigned(1),
            b'h' => Item::Signed(2),
            b'H' => Item::Unsigned(2),
            b'l' => Item::Signed(8),
            b'L' | b'T' => Item::Unsigned(8),
            b'i' => Item::Signed(self.integer_size()?),
            b'I' => Item::Unsigned(self.integer_size()?),
            b'f' => Item::Float,
            b'd' => Item::Double,
            b's' => Item::ZeroTerminated,
            b'x' => Item::Padding,
            b'c' => Item::Bytes(self.number().unwrap_or(1)),
            letter => {
                let problem = format!("invalid format option '{}'", char::from(letter));
                return Err(argument_error(1, self.function, &problem));
            }
        })
    }

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

fn format<'f>(function: &'static str, text: &'f [u8]) -> Format<'f> {
    Format { function, rest: text, is_big_endian: false }
}

/// Creates the library.
pub(crate) fn create_library(lua: &Lua) -> Result<Table> {
    let library = lua.create_table()?;
    library.set("pack", lua.create_function(|lua, values: MultiValue| pack(lua, values))?)?;
    library
        .set("unpack", lua.create_function(|lua, (format, data, position)| unpack(lua, (format, data, position)))?)?;
    library.set("size", lua.create_function(|_, format: LuaString| size(&format.as_bytes()))?)?;
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
    let mut values = values.into_iter().enumerate().map(|(index, value)| (index + 1, value));
    let Some((_, Value::String(text))) = values.next() else { return Err(type_error(1, "string", None)) };
    let mut packed = Vec::with_capacity(64);
    let mut next_index = 2;
    for item in format("pack", &text.as_bytes()) {
        let (item, is_big_endian) = item?;
        if item == Item::Padding {
            packed.push(0);
            continue;
        }
        let value = values.next();
        let (index, value) = (next_index, value.as_ref().map(|(_, value)| value));
        next_index += 1;
        let number = || value.and_then(as_number).ok_or_else(|| type_error(index, "number", value));
        match item {
            Item::Signed(size) | Item::Unsigned(size) => {
                let bytes = number_as_word(number()?).to_le_bytes();
                push_ordered(&mut packed, &bytes[..size], is_big_endian);
            }
            #[expect(clippy::cast_possible_truncation, reason = "the format is a float")]
            Item::Float => push_ordered(&mut packed, &(number()? as f32).to_le_bytes(), is_big_endian),
            Item::Double => push_ordered(&mut packed, &number()?.to_le_bytes(), is_big_endian),
            Item::Bytes(size) => {
                let bytes = string_bytes(value).ok_or_else(|| type_error(index, "string", value))?;
                let size = if size == 0 { bytes.len() } else { size };
                let part = bytes.get(..size).ok_or_else(|| argument_error(next_index, "pack", "string too short"))?;
                packed.extend_from_slice(part);
            }
            Item::ZeroTerminated => {
                packed.extend(string_bytes(value).ok_or_else(|| type_error(index, "string", value))?);
                packed.push(0);
            }
            Item::Padding => {}
        }
    }
    lua.create_string(&packed)
}

fn string_bytes(value: Option<&Value>) -> Option<Vec<u8>> {
    match value? {
        Value::String(text) => Some(text.as_bytes().to_vec()),
        Value::Integer(number) => Some(number.to_string().into_bytes()),
        _ => None,
    }
}

/// Returns the word that C's casts make of a number: negative ones as signed.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast of the library")]
fn number_as_word(number: f64) -> u64 {
    if number < 0.0 { (number as i64).cast_unsigned() } else { number as u64 }
}

fn push_ordered(packed: &mut Vec<u8>, little_endian: &[u8], is_big_endian: bool) {
    packed.extend_from_slice(little_endian);
    if is_big_endian {
        let start = packed.len() - little_endian.len();
        packed[start..].reverse();
    }
}

/// Arguments of `unpack`: format, data, and the position of the first byte.
type UnpackArguments = (LuaString, LuaString, Option<usize>);

fn unpack(lua: &Lua, (text, data, position): UnpackArguments) -> Result<MultiValue> {
    let (text, data) = (text.as_bytes(), data.as_bytes());
    let mut position = position.unwrap_or(1).checked_sub(1);
    let mut values: Vec<Value> = Vec::with_capacity(20);
    let too_short = || argument_error(2, "unpack", "data string too short");
    for item in format("unpack", &text) {
        let (item, is_big_endian) = item?;
        let start = position.ok_or_else(|| argument_error(3, "unpack", "offset must be 1 or greater"))?;
        let mut take = |size: usize| {
            position = start.checked_add(size);
            data.get(start..).and_then(|rest| rest.get(..size)).ok_or_else(too_short)
        };
        match item {
            Item::Signed(size) => values.push(number_value(read_signed(take(size)?, is_big_endian))),
            Item::Unsigned(size) => {
                let word = read_word(take(size)?, is_big_endian);
                #[expect(clippy::cast_precision_loss, reason = "Lua's numbers are doubles")]
                values.push(Value::Number(word as f64));
            }
            Item::Float => {
                let mut bytes = [0; 4];
                bytes.copy_from_slice(&read_word(take(4)?, is_big_endian).to_le_bytes()[..4]);
                values.push(Value::Number(f32::from_le_bytes(bytes).into()));
            }
            Item::Double => {
                values.push(Value::Number(f64::from_bits(read_word(take(8)?, is_big_endian))));
            }
            Item::Bytes(0) => {
                let size = values.pop().as_ref().and_then(as_number);
                let size = size.ok_or_else(|| Error::runtime("format 'c0' needs a previous size"))?;
                let size = usize::try_from(number_as_word(size)).unwrap_or(usize::MAX);
                values.push(Value::String(lua.create_string(take(size)?)?));
            }
            Item::Bytes(size) => values.push(Value::String(lua.create_string(take(size)?)?)),
            Item::ZeroTerminated => {
                let rest = data.get(start..).unwrap_or_default();
                let length = rest.iter().position(|byte| *byte == 0);
                let length = length.ok_or_else(|| argument_error(2, "unpack", "unfinished string in data"))?;
                values.push(Value::String(lua.create_string(&rest[..length])?));
                take(length + 1)?;
            }
            Item::Padding => {
                take(1)?;
            }
        }
    }
    values.push(number_value(i64::try_from(position.unwrap_or_default()).unwrap_or(i64::MAX) + 1));
    Ok(values.into_iter().collect())
}

/// Returns a number as Lua holds it.
#[expect(clippy::cast_precision_loss, reason = "Lua's numbers are doubles")]
fn number_value(number: i64) -> Value {
    Value::Number(number as f64)
}

fn read_word(bytes: &[u8], is_big_endian: bool) -> u64 {
    let append = |word: u64, byte: &u8| word << 8 | u64::from(*byte);
    if is_big_endian { bytes.iter().fold(0, append) } else { bytes.iter().rev().fold(0, append) }
}

fn read_signed(bytes: &[u8], is_big_endian: bool) -> i64 {
    let unused_bits = 64 - 8 * bytes.len();
    (read_word(bytes, is_big_endian) << unused_bits).cast_signed() >> unused_bits
}

fn size(text: &[u8]) -> Result<usize> {
    let item_size = |item: Result<(Item, bool)>| match item?.0 {
        Item::Signed(size) | Item::Unsigned(size) => Ok(size),
        Item::Float => Ok(4),
        Item::Double => Ok(8),
        Item::Padding => Ok(1),
        Item::Bytes(0) => Err(Error::runtime("variable-size format in sizeof")),
        Item::Bytes(size) => Ok(size),
        Item::ZeroTerminated => Err(Error::runtime("variable-size format in sizeof")),
    };
    format("size", text).map(item_size).sum()
}
