//! RESP encoding of commands.

use bytes::{BufMut, BytesMut};

/// Appends a command, an array of bulk strings, to `out`.
pub(super) fn write_command(out: &mut BytesMut, words: &[&[u8]]) {
    write_length(out, b'*', words.len());
    for word in words {
        write_length(out, b'$', word.len());
        out.put_slice(word);
        out.put_slice(b"\r\n");
    }
}

fn write_length(out: &mut BytesMut, kind: u8, length: usize) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    let mut rest = length;
    loop {
        start -= 1;
        digits[start] = b"0123456789"[rest % 10];
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.put_u8(kind);
    out.put_slice(&digits[start..]);
    out.put_slice(b"\r\n");
}
