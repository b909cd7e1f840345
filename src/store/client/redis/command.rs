//! RESP encoding of commands.

use bytes::BytesMut;

/// Maximum size of the head of an array or a bulk string: its kind, 20 digits and a line end.
const MAX_HEAD_BYTES: usize = 23;
const LINE_END: &[u8] = b"\r\n";

/// Appends a command, an array of bulk strings, to `out`.
pub(super) fn write_command(out: &mut BytesMut, words: &[&[u8]]) {
    // Many small writes to a slice are faster than to a buffer that may grow.
    let bound = |word: &&[u8]| MAX_HEAD_BYTES + word.len() + LINE_END.len();
    let (start, max_bytes) = (out.len(), MAX_HEAD_BYTES + words.iter().map(bound).sum::<usize>());
    out.resize(start + max_bytes, 0);
    let mut writer = SliceWriter { out: &mut out[start..], written: 0 };
    writer.write_head(b'*', words.len());
    for word in words {
        writer.write_head(b'$', word.len());
        writer.write(word);
        writer.write(LINE_END);
    }
    let end = start + writer.written;
    out.truncate(end);
}

/// Appends to a slice that is long enough.
struct SliceWriter<'o> {
    out: &'o mut [u8],
    written: usize,
}

impl SliceWriter<'_> {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        self.out[self.written..][..bytes.len()].copy_from_slice(bytes);
        self.written += bytes.len();
    }

    #[inline]
    fn write_head(&mut self, kind: u8, length: usize) {
        // Most lengths have one or two digits.
        match u8::try_from(length) {
            Ok(ones @ 0..10) => self.write(&[kind, b'0' + ones, b'\r', b'\n']),
            Ok(number @ 10..100) => self.write(&[kind, b'0' + number / 10, b'0' + number % 10, b'\r', b'\n']),
            _ => {
                self.write(&[kind]);
                self.write(itoa::Buffer::new().format(length).as_bytes());
                self.write(LINE_END);
            }
        }
    }
}
