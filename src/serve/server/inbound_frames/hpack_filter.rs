//! Changes values in an HPACK header block (RFC 7541) without decoding it.
//!
//! Later blocks refer to values of earlier ones by their position in a table of 4096 bytes, which both ends derive
//! from the same fields. A position depends on the lengths of the fields only, so two changes need no table:
//!
//! - Each `:authority` becomes one of the same length, `000...`, which is a valid name of a host. Blocks that refer
//!   to it by its position then get the valid one too.
//! - A value of more than `MAX_VALUE_BYTES` becomes a short one, or one that just exceeds the table if it enters
//!   the table. Such an entry empties the table, whatever its length.
//!
//! A block that is malformed, or names `:authority` by an entry of the table, passes unchanged, for h2 to judge.
//!
//! Decides: headers that are too long or not valid for h2: which are replaced, what gets 431.

/// Maximum length of a value, as it is encoded. A Huffman code has at most 30 bits for one byte, so each longer value
/// exceeds the table when it is decoded.
///
/// Shorter values are bounded later: by `remove_long_header_values` in `server/http2.rs`, and `tracestate` in
/// `telemetry/traces/propagation.rs`.
const MAX_VALUE_BYTES: usize = 16 * 1024;
/// Maximum length of a name that is inspected, as it is encoded.
const MAX_HEADER_NAME_BYTES: usize = 1024;
/// Maximum length of a value that is removed: more than Envoy's highest `max_request_headers_kb`.
const MAX_REMOVED_VALUE_BYTES: usize = 16 << 20;
/// Length of the table that HTTP/2 begins with, which the server does not change, in bytes.
const DYNAMIC_TABLE_BYTES: usize = 4096;

/// Position of `:authority` in the static table.
const AUTHORITY_TABLE_INDEX: usize = 1;
const AUTHORITY_NAME: &[u8] = b":authority";
/// `:authority` in the Huffman code.
const HUFFMAN_AUTHORITY_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// Filter of one header block that arrives in fragments.
#[derive(Debug, Default)]
pub(super) struct HeaderBlockFilter {
    /// Start of a field that is not complete.
    incomplete: Vec<u8>,
    /// Value of which some bytes are still to come.
    removal: Option<LongValueRemoval>,
    /// True once the block proved to be malformed; the rest passes unchanged.
    is_malformed: bool,
}

/// Removal of a long value, which is replaced once it is complete.
#[derive(Debug)]
struct LongValueRemoval {
    bytes_left: usize,
    /// Start of the field, up to the value.
    name: Vec<u8>,
    replacement: ZeroDigitsValue,
}

/// Reference to position 0 of the table, which is an error.
const INVALID_FIELD: u8 = 0x80;

/// True if [`HeaderBlockFilter`] would change this complete block.
pub(super) fn needs_filtering(mut block: &[u8]) -> bool {
    while !block.is_empty() {
        match parse_first_field(block) {
            ParsedField::Unchanged { length } => block = &block[length..],
            ParsedField::Changed { .. } => return true,
            ParsedField::Incomplete | ParsedField::Malformed => return false,
        }
    }
    false
}

impl HeaderBlockFilter {
    /// Appends the filtered fragment to `output`; `is_last` ends the block.
    pub(super) fn filter_fragment(&mut self, fragment: &[u8], is_last: bool, output: &mut Vec<u8>) {
        let fragment = self.remove_long_value(fragment, output);
        if self.incomplete.is_empty() {
            let filtered = self.filter_fields(fragment, output);
            self.incomplete.extend_from_slice(&fragment[filtered..]);
        } else {
            let mut held = std::mem::take(&mut self.incomplete);
            held.extend_from_slice(fragment);
            let filtered = self.filter_fields(&held, output);
            held.drain(..filtered);
            self.incomplete = held;
        }
        if is_last || self.is_malformed {
            output.append(&mut self.incomplete);
        }
        if is_last && self.removal.take().is_some() {
            output.push(INVALID_FIELD);
        }
    }

    /// Removes the rest of a long value, as far as it has come; returns what follows it.
    fn remove_long_value<'f>(&mut self, fragment: &'f [u8], output: &mut Vec<u8>) -> &'f [u8] {
        let Some(removal) = &mut self.removal else { return fragment };
        let removed = removal.bytes_left.min(fragment.len());
        removal.bytes_left -= removed;
        if removal.bytes_left == 0 {
            output.extend_from_slice(&removal.name);
            removal.replacement.append_to(output);
            self.removal = None;
        }
        &fragment[removed..]
    }

    /// Appends the filtered fields of `bytes` to `output`; returns the length of all that are complete.
    fn filter_fields(&mut self, bytes: &[u8], output: &mut Vec<u8>) -> usize {
        let mut at = 0;
        while at < bytes.len() && !self.is_malformed {
            let rest = &bytes[at..];
            match parse_first_field(rest) {
                ParsedField::Unchanged { length } => {
                    output.extend_from_slice(&rest[..length]);
                    at += length;
                }
                ParsedField::Changed { name_length, replacement, length } => {
                    let name = rest[..name_length].to_vec();
                    let value = &rest[name_length..length.min(rest.len())];
                    self.removal = Some(LongValueRemoval { bytes_left: length - name_length, name, replacement });
                    self.remove_long_value(value, output);
                    at += name_length + value.len();
                }
                ParsedField::Incomplete => break,
                ParsedField::Malformed => self.is_malformed = true,
            }
        }
        at
    }
}

/// First field of the rest of a block.
enum ParsedField {
    Unchanged {
        /// Length of the field in bytes.
        length: usize,
    },
    Changed {
        /// Length of all that precedes the value.
        name_length: usize,
        replacement: ZeroDigitsValue,
        /// Length of the field, which can exceed the rest of the fragment.
        length: usize,
    },
    Incomplete,
    Malformed,
}

/// Parses the first field of `block`, which is not empty.
fn parse_first_field(block: &[u8]) -> ParsedField {
    try_parse_field(block).unwrap_or_else(|stop| stop)
}

fn try_parse_field(block: &[u8]) -> Result<ParsedField, ParsedField> {
    let first = block[0];
    let (prefix_bits, is_literal, enters_table) = match first {
        0x80.. => (7, false, false),
        0x40.. => (6, true, true),
        // A new size of the table.
        0x20.. => (5, false, false),
        _ => (4, true, false),
    };
    let (index, mut at) = decode_integer(block, 0, prefix_bits)?;
    if !is_literal {
        return Ok(ParsedField::Unchanged { length: at });
    }
    let mut is_authority = index == AUTHORITY_TABLE_INDEX;
    if index == 0 {
        let name = HpackStringRange::parse(block, at)?;
        if name.end - name.start > MAX_HEADER_NAME_BYTES {
            return Err(ParsedField::Malformed);
        }
        let bytes = block.get(name.start..name.end).ok_or(ParsedField::Incomplete)?;
        is_authority = bytes == if name.is_huffman { HUFFMAN_AUTHORITY_NAME } else { AUTHORITY_NAME };
        at = name.end;
    }
    let value = HpackStringRange::parse(block, at)?;
    let value_length = value.end - value.start;
    if value_length > MAX_VALUE_BYTES {
        if value_length > MAX_REMOVED_VALUE_BYTES {
            return Err(ParsedField::Malformed);
        }
        // An entry is 32 bytes longer than its name and value.
        let count = if enters_table { DYNAMIC_TABLE_BYTES } else { 1 };
        let replacement = ZeroDigitsValue { count, is_huffman: true };
        return Ok(ParsedField::Changed { name_length: at, replacement, length: value.end });
    }
    let bytes = block.get(value.start..value.end).ok_or(ParsedField::Incomplete)?;
    if !is_authority {
        return Ok(ParsedField::Unchanged { length: value.end });
    }
    let is_huffman = value.is_huffman;
    let count =
        if is_huffman { count_huffman_decoded_bytes(bytes).ok_or(ParsedField::Malformed)? } else { bytes.len() };
    let replacement = ZeroDigitsValue { count, is_huffman };
    Ok(ParsedField::Changed { name_length: at, replacement, length: value.end })
}

/// Place of a string in a block.
struct HpackStringRange {
    is_huffman: bool,
    start: usize,
    end: usize,
}

impl HpackStringRange {
    /// Parses the length of the string at `at`; its end can be beyond the block.
    fn parse(block: &[u8], at: usize) -> Result<Self, ParsedField> {
        let first = block.get(at).ok_or(ParsedField::Incomplete)?;
        let (length, start) = decode_integer(block, at, 7)?;
        Ok(Self { is_huffman: first & 0x80 != 0, start, end: start + length })
    }
}

/// Decodes the integer at `at`, which begins in the last `prefix_bits` of a byte; returns it and the place after it.
fn decode_integer(block: &[u8], at: usize, prefix_bits: u32) -> Result<(usize, usize), ParsedField> {
    let max_prefix = (1 << prefix_bits) - 1;
    let first = usize::from(*block.get(at).ok_or(ParsedField::Incomplete)?) & max_prefix;
    if first < max_prefix {
        return Ok((first, at + 1));
    }
    let mut value = max_prefix;
    // Four bytes hold lengths up to 256 MiB.
    for (place, shift) in (at + 1..).zip([0, 7, 14, 21]) {
        let byte = usize::from(*block.get(place).ok_or(ParsedField::Incomplete)?);
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok((value, place + 1));
        }
    }
    Err(ParsedField::Malformed)
}

/// Replacement for a header value: a string of `count` digits `0`.
#[derive(Debug)]
pub struct ZeroDigitsValue {
    /// Number of digits.
    pub count: usize,
    /// Whether the string has the Huffman code.
    pub is_huffman: bool,
}

impl ZeroDigitsValue {
    /// Appends the string with its length.
    pub fn append_to(&self, output: &mut Vec<u8>) {
        if !self.is_huffman {
            append_string_length(output, 0, self.count);
            output.resize(output.len() + self.count, b'0');
            return;
        }
        // The Huffman code of `0` is five bits 0, and the last byte is filled with bits 1.
        let bits = self.count * 5;
        let length = bits.div_ceil(8);
        append_string_length(output, 0x80, length);
        output.resize(output.len() + length, 0);
        if let Some(last) = output.last_mut().filter(|_| !bits.is_multiple_of(8)) {
            *last = 0xff >> (bits % 8);
        }
    }
}

/// Appends the length of a string, with the flag of the Huffman code.
fn append_string_length(output: &mut Vec<u8>, flag: u8, length: usize) {
    let low = |number: usize| u8::try_from(number & 0x7f).unwrap_or_default();
    if length < 0x7f {
        return output.push(flag | low(length));
    }
    output.push(flag | 0x7f);
    let mut rest = length - 0x7f;
    while rest > 0x7f {
        output.push(low(rest) | 0x80);
        rest >>= 7;
    }
    output.push(low(rest));
}

/// Number of bytes that a Huffman-coded string decodes to; `None` if it is malformed.
pub fn count_huffman_decoded_bytes(bytes: &[u8]) -> Option<usize> {
    /// Number of Huffman codes of each length in bits. The code is canonical: these numbers define its ranges.
    const HUFFMAN_CODE_COUNTS_BY_LENGTH: [u32; 31] = {
        let mut codes = [0; 31];
        let lengths = [5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30];
        let counts = [10, 26, 32, 6, 5, 3, 2, 6, 2, 3, 3, 8, 13, 26, 29, 12, 4, 15, 19, 29, 4];
        let mut at = 0;
        while at < lengths.len() {
            codes[lengths[at]] = counts[at];
            at += 1;
        }
        codes
    };
    /// Huffman code of the end of a string (EOS), which must not occur.
    const HUFFMAN_END_OF_STRING: u32 = 0x3fff_ffff;

    let mut count = 0;
    let (mut code, mut first, mut length) = (0_u32, 0_u32, 0_usize);
    for byte in bytes {
        for bit in (0..8).rev() {
            code = code << 1 | u32::from(byte >> bit & 1);
            first = (first + HUFFMAN_CODE_COUNTS_BY_LENGTH[length]) << 1;
            length += 1;
            if code < first + HUFFMAN_CODE_COUNTS_BY_LENGTH[length] {
                if code == HUFFMAN_END_OF_STRING {
                    return None;
                }
                count += 1;
                (code, first, length) = (0, 0, 0);
            }
        }
    }
    // The rest is padding: fewer than eight bits 1.
    (length < 8 && code == (1 << length) - 1).then_some(count)
}
