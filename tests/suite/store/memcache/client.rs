//! The client of memcached: choice of a server, its protocol, SRV records.

mod servers {
    use tollkeeper::store::client::memcache::{server_index, sort_servers};

    /// The digests are those of Go's `crc32.ChecksumIEEE`, such as 0xcbf43926 for `123456789`.
    #[test]
    fn server_is_the_checksum_of_the_key_modulo_their_number() {
        assert_eq!(server_index(b"123456789", 1), 0);
        assert_eq!(server_index(b"123456789", 0), 0);
        for servers in [2, 3, 7] {
            assert_eq!(server_index(b"123456789", servers), 0xcbf4_3926 % servers);
        }
        assert_eq!(server_index(b"", 5), 0);
    }

    #[test]
    fn servers_are_sorted_as_text() {
        let mut servers = [("b.x.", 1), ("a.x.", 9), ("a.x.", 10), ("a.x.y.", 1)].map(|(h, p)| (h.to_owned(), p));
        sort_servers(&mut servers);
        let sorted: Vec<String> = servers.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        assert_eq!(sorted, ["a.x.:10", "a.x.:9", "a.x.y.:1", "b.x.:1"]);
    }
}

mod protocol {
    use bytes::{Bytes, BytesMut};
    use proptest::collection::vec;
    use proptest::prelude::*;
    use tollkeeper::store::client::memcache::protocol::{
        MAX_VALUE_BYTES, MemcacheError, MemcacheProtocol, MemcacheReply, decode_reply, parse_number,
    };
    use tollkeeper::store::client::pipeline::WireProtocol;

    const MAX_LINE_BYTES: usize = 1024;

    #[test]
    fn commands_are_lines_and_add_has_a_value() {
        let mut out = BytesMut::new();
        MemcacheProtocol::encode(&mut out, &[b"incr", b"k", b"2"]);
        MemcacheProtocol::encode(&mut out, &[b"add", b"k", b"0", b"60", b"2", b"12"]);
        MemcacheProtocol::encode(&mut out, &[b"version"]);
        assert_eq!(out, &b"incr k 2\r\nadd k 0 60 2\r\n12\r\nversion\r\n"[..]);
    }

    fn decode(text: &[u8]) -> Result<Option<MemcacheReply>, String> {
        decode_reply(&mut BytesMut::from(text)).map_err(|error| error.to_string())
    }

    #[test]
    fn replies_are_decoded() {
        for (text, reply) in [
            (&b"42\r\n"[..], MemcacheReply::Number(42)),
            (b"9 \r\n", MemcacheReply::Number(9)),
            (b"18446744073709551615\r\n", MemcacheReply::Number(u64::MAX)),
            (b"NOT_FOUND\r\n", MemcacheReply::Missing),
            (b"END\r\n", MemcacheReply::Missing),
            (b"STORED\r\n", MemcacheReply::Stored),
            (b"NOT_STORED\r\n", MemcacheReply::NotStored),
            (b"DELETED\r\n", MemcacheReply::Deleted),
            (b"VERSION 1.6.18\r\n", MemcacheReply::Version),
            (b"ERROR\r\n", MemcacheReply::Error("ERROR".to_owned())),
            (b"CLIENT_ERROR \xff\r\n", MemcacheReply::Error("CLIENT_ERROR \u{fffd}".to_owned())),
            (b"VALUE k 0 2\r\n42\r\nEND\r\n", MemcacheReply::Value(Bytes::from_static(b"42"))),
            (b"VALUE k 0 0 7\r\n\r\nEND\r\n", MemcacheReply::Value(Bytes::new())),
            (b"VALUE k 0 5\r\nEND\r\n\r\nEND\r\n", MemcacheReply::Value(Bytes::from_static(b"END\r\n"))),
        ] {
            assert_eq!(decode(text), Ok(Some(reply)), "{}", text.escape_ascii());
            // Cut anywhere, it is incomplete.
            for end in 0..text.len() {
                assert_eq!(decode(&text[..end]), Ok(None), "{}", text[..end].escape_ascii());
            }
        }
    }

    #[test]
    fn invalid_and_oversized_replies_are_errors() {
        let long_line = [b'1'; MAX_LINE_BYTES];
        let huge = format!("VALUE k 0 {}\r\n", MAX_VALUE_BYTES + 1);
        for text in [
            &b"HTTP/1.1 400 Bad Request\r\n"[..],
            b"\r\n",
            b"\n",
            b"-1\r\n",
            b"+1\r\n",
            b"18446744073709551616\r\n",
            b"VALUE k 0\r\n",
            b"VALUE k 0 -1\r\n",
            b"VALUE k 0 99999999999999999999\r\n",
            b"VALUE k 0 2\r\n422\r\nEND\r\n",
            b"VALUE k 0 1\r\n1\r\nVALUE",
            huge.as_bytes(),
            &long_line,
        ] {
            assert!(decode(text).is_err(), "{}", text.escape_ascii());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused_and_never_grow(bytes in vec(any::<u8>(), 0..200)) {
            let mut input = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = decode_reply(&mut input) {}
            prop_assert!(input.len() <= bytes.len());
        }

        #[test]
        fn numbers_are_parsed_with_spaces_behind(value: u64, spaces in 0..5_usize) {
            prop_assert_eq!(parse_number(format!("{value}{}", " ".repeat(spaces)).as_bytes()), Some(value));
        }
    }

    #[test]
    fn error_replies_have_kinds() {
        for (text, kind) in [
            ("CLIENT_ERROR cannot increment or decrement non-numeric value", MemcacheError::WrongType),
            ("SERVER_ERROR out of memory storing object", MemcacheError::NoWrites),
            ("SERVER_ERROR out of memory in incr", MemcacheError::NoWrites),
            ("CLIENT_ERROR unauthenticated", MemcacheError::Misconfigured),
            ("CLIENT_ERROR bad command line format", MemcacheError::BadReply),
            ("ERROR", MemcacheError::BadReply),
        ] {
            assert_eq!(MemcacheError::from_reply(text), kind, "{text}");
        }
    }
}

mod srv_records {
    use domain::base::{Message, Name};
    use tollkeeper::store::client::memcache::srv_records::{
        SrvTarget, build_srv_query, names_to_try, parse_srv_targets,
    };

    fn names(name: &str, conf: &str) -> Vec<String> {
        let conf = resolv_conf::Config::parse(conf).expect("the file is valid");
        names_to_try(name, &conf).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn name_is_tried_before_the_search_list_if_it_has_enough_dots() {
        let conf = "domain x\nsearch a.x b.x\n";
        assert_eq!(names("_m._tcp.s", conf), ["_m._tcp.s", "_m._tcp.s.x", "_m._tcp.s.a.x", "_m._tcp.s.b.x"]);
        let conf = format!("{conf}options ndots:5\n");
        assert_eq!(names("_m._tcp.s", &conf), ["_m._tcp.s.x", "_m._tcp.s.a.x", "_m._tcp.s.b.x", "_m._tcp.s"]);
        assert_eq!(names("_m._tcp.s.", &conf), ["_m._tcp.s"]);
    }

    /// Header of an answer, a question for `x` and one record of type SRV with this data.
    fn answer(data: &[u8]) -> Message<Vec<u8>> {
        let name = Name::vec_from_str("x").expect("it is a name");
        let mut bytes = build_srv_query(&name).expect("it is short").into_octets();
        bytes[2] |= 0x80;
        bytes[7] = 1;
        bytes.extend([0xc0, 12, 0, 33, 0, 1, 0, 0, 0, 0, 0, u8::try_from(data.len()).expect("it is short")]);
        bytes.extend(data);
        Message::from_octets(bytes).expect("it has a header")
    }

    #[test]
    fn answer_with_a_broken_target_is_an_error() {
        let good = answer(&[0, 1, 0, 1, 0x2b, 0xcb, 1, b'a', 0xc0, 12]);
        assert_eq!(parse_srv_targets(&good), Ok(vec![SrvTarget { host: "a.x.".to_owned(), port: 11211 }]));
        // The target is a pointer to itself, a pointer beyond the message, a label that is cut, and nothing.
        for broken in [&[0xc0, 37][..], &[0xc0, 200], &[9, b'a'], &[]] {
            assert!(parse_srv_targets(&answer(&[&[0, 1, 0, 1, 0x2b, 0xcb], broken].concat())).is_err(), "{broken:?}");
        }
    }
}
