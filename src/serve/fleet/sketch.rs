//! Text form of a sketch of distinct keys: the registers that are set, or all of them, in base64.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD_NO_PAD;

use crate::telemetry::hyperloglog::DistinctKeys;

/// Mark of the form that lists the set registers, three bytes each.
const SPARSE: char = 's';
/// Mark of the form with one byte for each register.
const DENSE: char = 'd';
/// Number of bytes of a set register in the sparse form.
const SPARSE_BYTES: usize = 3;

/// Encodes a sketch in the shorter form.
pub(super) fn encode(sketch: &DistinctKeys) -> String {
    let sparse: Vec<u8> = sketch
        .set_registers()
        .flat_map(|(index, value)| {
            let [low, high] = index.to_le_bytes();
            [low, high, value]
        })
        .collect();
    if sparse.len() < DistinctKeys::REGISTERS {
        return format!("{SPARSE}{}", BASE64_STANDARD_NO_PAD.encode(sparse));
    }
    let mut dense = [0; DistinctKeys::REGISTERS];
    sketch.set_registers().for_each(|(index, value)| dense[usize::from(index)] = value);
    format!("{DENSE}{}", BASE64_STANDARD_NO_PAD.encode(dense))
}

/// Decodes a sketch; `None` if the text is not one.
pub(super) fn decode(text: &str) -> Option<DistinctKeys> {
    let bytes = BASE64_STANDARD_NO_PAD.decode(text.get(1..)?).ok()?;
    match text.chars().next()? {
        SPARSE if bytes.len() % SPARSE_BYTES == 0 && bytes.len() <= DistinctKeys::REGISTERS * SPARSE_BYTES => {
            let set = bytes.chunks_exact(SPARSE_BYTES).map(|set| (u16::from_le_bytes([set[0], set[1]]), set[2]));
            DistinctKeys::from_set_registers(set)
        }
        DENSE if bytes.len() == DistinctKeys::REGISTERS => DistinctKeys::from_set_registers((0..).zip(bytes)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{decode, encode};
    use crate::telemetry::hyperloglog::DistinctKeys;

    proptest! {
        #[test]
        fn encoded_sketch_is_restored(set in prop::collection::vec((0_u16..512, 1_u8..56), 0..600)) {
            let sketch = DistinctKeys::from_set_registers(set).expect("all are in range");
            prop_assert_eq!(decode(&encode(&sketch)), Some(sketch));
        }

        #[test]
        fn any_text_is_decoded_or_refused(text in ".{0,900}") {
            let _ = decode(&text);
        }
    }
}
