//! Decoding of replies: any bytes decode to a reply of bounded size, or to an error.

use bytes::BytesMut;
use tollkeeper::store::client::redis::resp::{MAX_DEPTH, MAX_REPLY_ELEMENTS, Reply, decode_reply};

/// Decodes all replies in `bytes`, and returns them with the error that followed.
fn replies(bytes: &[u8]) -> (Vec<Reply>, Option<String>) {
    let mut input = BytesMut::from(bytes);
    let mut replies = Vec::new();
    loop {
        match decode_reply(&mut input) {
            Ok(Some(reply)) => replies.push(reply),
            Ok(None) => return (replies, None),
            Err(error) => return (replies, Some(error.to_string())),
        }
    }
}

#[test]
fn replies_of_every_kind_are_decoded_in_order() {
    let (found, error) =
        replies(b"+OK\r\n-ERR no\r\n:-5\r\n$2\r\n\r\n\r\n$-1\r\n*-1\r\n*0\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n:7");
    assert_eq!((found.len(), error), (8, None));
    let inner = Reply::Array(vec![Reply::BulkString("".into())]);
    assert_eq!(found[7], Reply::Array(vec![Reply::Integer(1), inner]));
}

#[test]
fn nested_arrays_are_bounded() {
    // Also after a prefix that looks like the end of the first array.
    for before in
        ["", "*2\r\n:1\r\n", "*3\r\n$-0\r\n\r\n*0\r\n", "*2\r\n$2\r\n\r\n\r\n", "*2\r\n*-1\r\n", "*2\r\n$-1\r\n"]
    {
        let nested = |depth| format!("{before}{}:1\r\n", "*1\r\n".repeat(depth));
        let fits = MAX_DEPTH - usize::from(!before.is_empty());
        let (found, error) = replies(nested(fits).as_bytes());
        assert_eq!((found.len(), error), (1, None), "{before:?}");
        for depth in [fits + 1, 4_000_000] {
            let (found, error) = replies(nested(depth).as_bytes());
            assert_eq!(found, [], "{before:?}, {depth}");
            assert!(error.is_some_and(|error| error.contains("nested arrays")), "{before:?}, {depth}");
        }
    }
}

#[test]
fn elements_are_bounded_before_allocation() {
    let many = |count: u64, sent| replies(format!("*{count}\r\n{}", ":1\r\n".repeat(sent)).as_bytes());
    assert_eq!(many(MAX_REPLY_ELEMENTS, 10), (Vec::new(), None));
    for count in [MAX_REPLY_ELEMENTS + 1, 1 << 40, i64::MAX as u64] {
        assert!(many(count, 0).1.is_some(), "{count}");
    }
    let within = format!("*2\r\n*{MAX_REPLY_ELEMENTS}\r\n{}", "*0\r\n".repeat(1000));
    assert!(replies(within.as_bytes()).1.is_some());
}
