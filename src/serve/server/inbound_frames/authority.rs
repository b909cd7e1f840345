//! Overwrites the value of `:authority` in an HPACK header block (RFC 7541), in place.
//!
//! h2 refuses a value that is no authority of a URI. No answer depends on it, so it becomes a name of a host that has the
//! same length, as encoded and as decoded. Then no other byte changes, and the header tables of both ends, in which a
//! position depends on the lengths of the fields, stay equal. Later blocks that refer to the value get the valid one.
//!
//! Pseudo-headers come before all other fields (RFC 9113, 8.3), so the search ends at the first other field. A value
//! passes unchanged, for h2 to judge, if the block is malformed, the value is named by an entry of the dynamic table or
//! continues in another frame, or its Huffman code is longer than its text.

use std::ops::RangeInclusive;

/// Position of `:authority` in the static table.
const AUTHORITY_TABLE_INDEX: usize = 1;
/// Positions of other fields than pseudo-headers in the static table.
const REGULAR_TABLE_INDEXES: RangeInclusive<usize> = 15..=61;
const AUTHORITY_NAME: &[u8] = b":authority";
/// `:authority` in the Huffman code.
const HUFFMAN_AUTHORITY_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// Overwrites the value of `:authority` in the first fragment of a header block, if it is found.
pub fn overwrite_authority(block: &mut [u8]) {
    let Some(value) = find_authority(block) else { return };
    let Some(bytes) = block.get_mut(value.start..value.end) else { return };
    if !value.is_huffman {
        bytes.fill(b'0');
    } else if let Some(count) = count_huffman_decoded_bytes(bytes).filter(|count| *count >= bytes.len()) {
        fill_with_huffman_letters(bytes, count);
    }
}

/// Finds the value of `:authority`.
fn find_authority(block: &[u8]) -> Option<HpackString> {
    let mut at = 0;
    loop {
        let first = *block.get(at)?;
        let (prefix_bits, is_literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            // A new size of the table.
            0x20.. => (5, false),
            _ => (4, true),
        };
        let index;
        (index, at) = decode_integer(block, at, prefix_bits)?;
        if !is_literal {
            // An entry of the dynamic table can be a pseudo-header, too.
            if first >= 0x80 && REGULAR_TABLE_INDEXES.contains(&index) {
                return None;
            }
            continue;
        }
        let mut is_authority = index == AUTHORITY_TABLE_INDEX;
        if index == 0 {
            let name = HpackString::parse(block, at)?;
            is_authority = name.is_authority_name(block.get(name.start..name.end)?)?;
            at = name.end;
        } else if REGULAR_TABLE_INDEXES.contains(&index) {
            return None;
        }
        let value = HpackString::parse(block, at)?;
        if is_authority {
            return Some(value);
        }
        at = value.end;
    }
}

/// Place of a string in a block.
struct HpackString {
    is_huffman: bool,
    start: usize,
    end: usize,
}

impl HpackString {
    /// Parses the length of the string at `at`; its end can be beyond the block.
    fn parse(block: &[u8], at: usize) -> Option<Self> {
        let first = block.get(at)?;
        let (length, start) = decode_integer(block, at, 7)?;
        Some(Self { is_huffman: first & 0x80 != 0, start, end: start + length })
    }

    /// True if `name`, the bytes of this string, is `:authority`; `None` if it is no pseudo-header.
    fn is_authority_name(&self, name: &[u8]) -> Option<bool> {
        let first = *name.first()?;
        // The code of the colon has 7 bits.
        let is_pseudo = if self.is_huffman { first & 0xfe == HUFFMAN_AUTHORITY_NAME[0] } else { first == b':' };
        is_pseudo.then_some(name == if self.is_huffman { HUFFMAN_AUTHORITY_NAME } else { AUTHORITY_NAME })
    }
}

/// Decodes the integer at `at`, which begins in the last `prefix_bits` of a byte; returns it and the place after it.
fn decode_integer(block: &[u8], at: usize, prefix_bits: u32) -> Option<(usize, usize)> {
    let max_prefix = (1 << prefix_bits) - 1;
    let first = usize::from(*block.get(at)?) & max_prefix;
    if first < max_prefix {
        return Some((first, at + 1));
    }
    let mut value = max_prefix;
    // Four bytes hold lengths up to 256 MiB.
    for (place, shift) in (at + 1..).zip([0, 7, 14, 21]) {
        let byte = usize::from(*block.get(place)?);
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((value, place + 1));
        }
    }
    None
}

/// Fills `bytes` with the Huffman codes of `count` letters, at least as many as bytes, without padding.
///
/// Letters with codes of 5 to 8 bits reach each number of bits from 5 to 8 times `count`. A Huffman code takes at least
/// 5 bits a letter, so the bytes that are overwritten were at least as many.
fn fill_with_huffman_letters(bytes: &mut [u8], count: usize) {
    /// Huffman codes of `0`, `3`, `j` and `X`, which have 5, 6, 7 and 8 bits.
    const LETTER_CODES: [u32; 4] = [0b0_0000, 0b01_1001, 0b111_0100, 0b1111_1100];

    let bits = bytes.len() * 8;
    let (mut code, mut code_bits, mut letters) = (0, 0, 0);
    for byte in bytes {
        while code_bits < 8 {
            // The first letters take a bit more, so that all fill the bytes.
            let length = bits / count + usize::from(letters < bits % count);
            code = code << length | LETTER_CODES[length - 5];
            code_bits += length;
            letters += 1;
        }
        code_bits -= 8;
        [.., *byte] = (code >> code_bits).to_be_bytes();
    }
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
