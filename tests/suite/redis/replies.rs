//! What a server may answer at all: whatever it sends is a reply of bounded size, or an error.

use bytes::BytesMut;
use tollkeeper::redis::reply::{DEEPEST, MOST_ELEMENTS, Reply, next};

/// What becomes of all of these bytes: the replies, and the error that followed.
fn replies(bytes: &[u8]) -> (Vec<Reply>, Option<String>) {
    let mut input = BytesMut::from(bytes);
    let mut replies = Vec::new();
    loop {
        match next(&mut input) {
            Ok(Some(reply)) => replies.push(reply),
            Ok(None) => return (replies, None),
            Err(error) => return (replies, Some(error.to_string())),
        }
    }
}

#[test]
fn replies_of_every_kind_are_read_one_after_the_other() {
    let (found, error) =
        replies(b"+OK\r\n-ERR no\r\n:-5\r\n$2\r\n\r\n\r\n$-1\r\n*-1\r\n*0\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n:7");
    assert_eq!((found.len(), error), (8, None));
    let inner = Reply::Array(vec![Reply::BulkString("".into())]);
    assert_eq!(found[7], Reply::Array(vec![Reply::Integer(1), inner]));
}

#[test]
fn lists_inside_one_another_are_bounded_however_they_begin() {
    // After what looks like the end of the first list, too.
    for before in
        ["", "*2\r\n:1\r\n", "*3\r\n$-0\r\n\r\n*0\r\n", "*2\r\n$2\r\n\r\n\r\n", "*2\r\n*-1\r\n", "*2\r\n$-1\r\n"]
    {
        let nested = |depth| format!("{before}{}:1\r\n", "*1\r\n".repeat(depth));
        let fits = DEEPEST - usize::from(!before.is_empty());
        let (found, error) = replies(nested(fits).as_bytes());
        assert_eq!((found.len(), error), (1, None), "{before:?}");
        for depth in [fits + 1, 4_000_000] {
            let (found, error) = replies(nested(depth).as_bytes());
            assert_eq!(found, [], "{before:?}, {depth}");
            assert!(error.is_some_and(|error| error.contains("lists inside one another")), "{before:?}, {depth}");
        }
    }
}

#[test]
fn elements_are_bounded_before_they_take_room() {
    let many = |count: u64, sent| replies(format!("*{count}\r\n{}", ":1\r\n".repeat(sent)).as_bytes());
    assert_eq!(many(MOST_ELEMENTS, 10), (Vec::new(), None));
    for count in [MOST_ELEMENTS + 1, 1 << 40, i64::MAX as u64] {
        assert!(many(count, 0).1.is_some(), "{count}");
    }
    let within = format!("*2\r\n*{MOST_ELEMENTS}\r\n{}", "*0\r\n".repeat(1000));
    assert!(replies(within.as_bytes()).1.is_some());
}
