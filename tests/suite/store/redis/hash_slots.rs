//! Hash slots of keys, and their owners as nodes announce them.

mod owners {
    use bytes::BytesMut;
    use tollkeeper::settings::address::Endpoint;
    use tollkeeper::store::client::redis::discovery::{AnnouncedSlots, parse_slot_ranges};
    use tollkeeper::store::client::redis::resp::decode_reply;

    /// Slots that the node `a:1` announces in these entries; each begins with the slots, then has host and port.
    fn announced(entries: &[&str]) -> AnnouncedSlots {
        let reply = format!("*{}\r\n{}", entries.len(), entries.concat());
        let reply = decode_reply(&mut BytesMut::from(reply.as_bytes())).expect("a reply").expect("all of it");
        parse_slot_ranges(&reply, &Endpoint::Tcp { host: "a".to_owned(), port: 1 }).expect("a list")
    }

    fn entry(first: u16, last: u16, node: &str) -> String {
        format!("*3\r\n:{first}\r\n:{last}\r\n{node}")
    }

    #[test]
    fn node_without_a_name_is_the_one_that_answers_or_has_its_address_beside() {
        let ip = "$2\r\nid\r\n*2\r\n$2\r\nip\r\n$3\r\n::1\r\n";
        for (node, owner) in [
            ("*2\r\n$1\r\n?\r\n:7\r\n".to_owned(), "a:7"),
            ("*2\r\n$0\r\n\r\n:7\r\n".to_owned(), "a:7"),
            ("*2\r\n$-1\r\n:7\r\n".to_owned(), "a:7"),
            ("*2\r\n$3\r\n::1\r\n:7\r\n".to_owned(), "[::1]:7"),
            ("*2\r\n$5\r\n[::1]\r\n:7\r\n".to_owned(), "[::1]:7"),
            ("*2\r\n$1\r\nb\r\n$1\r\n7\r\n".to_owned(), "b:7"),
            (format!("*4\r\n$1\r\n?\r\n:7\r\n{ip}"), "[::1]:7"),
            // An unknown endpoint is the one that answers, whatever the address.
            (format!("*4\r\n$-1\r\n:7\r\n{ip}"), "a:7"),
            ("*4\r\n$1\r\n?\r\n:7\r\n$2\r\nid\r\n*1\r\n$2\r\nip\r\n".to_owned(), "a:7"),
        ] {
            let found = announced(&[&entry(0, 16_383, &node)]);
            assert_eq!(found.ranges.iter().map(|range| range.owner.to_string()).collect::<Vec<_>>(), [owner], "{node}");
            assert_eq!(found.unusable, None, "{node}");
        }
    }

    #[test]
    fn unusable_entry_concerns_its_own_slots_only() {
        let good = entry(0, 99, "*2\r\n$1\r\nb\r\n:7\r\n");
        for (odd, why) in [
            (
                entry(100, 199, "*2\r\n$1\r\nc\r\n:0\r\n"),
                "slots 100 to 199 as host `c` and port 0 (set cluster-announce-ip",
            ),
            (entry(100, 199, "*2\r\n$1\r\nc\r\n:65536\r\n"), "port 65536"),
            (entry(100, 199, "*2\r\n:1\r\n:7\r\n"), "slots 100 to 199"),
            (entry(100, 199, "*2\r\n$2\r\n\x1bc\r\n:0\r\n"), "`\\u{1b}c`"),
            (entry(100, 199, "*0\r\n"), "no node for slots 100 to 199"),
            (entry(100, 16_384, "*2\r\n$1\r\nc\r\n:7\r\n"), "no numbers in order"),
            (entry(199, 100, "*2\r\n$1\r\nc\r\n:7\r\n"), "no numbers in order"),
            (entry(99, 199, "*2\r\n$1\r\nc\r\n:7\r\n"), "slot 99 with two owners, b:7 and c:7"),
            ("$-1\r\n".to_owned(), "without slots or node"),
            ("*1\r\n:5\r\n".to_owned(), "without slots or node"),
        ] {
            for entries in [[&*good, &*odd], [&*odd, &*good]] {
                let found = announced(&entries);
                assert_eq!(found.slot_count(), 100, "{odd}");
                let unusable = found.unusable.expect("it is told");
                assert!(unusable.starts_with("a:1 announces ") && unusable.contains(why), "{unusable}");
            }
        }
        let twice = announced(&[&good, &good]);
        assert_eq!((twice.slot_count(), twice.unusable), (100, None));
        assert_eq!(announced(&[]), AnnouncedSlots::default());
    }
}

mod tags {
    use tollkeeper::store::client::redis::hash_slot::{HASH_SLOTS, TAGS_OF_FIRST_AND_LAST_SLOT, hash_slot};

    #[test]
    fn tags_of_the_first_and_last_slot_fall_into_them() {
        let slots = TAGS_OF_FIRST_AND_LAST_SLOT.map(|tag| hash_slot(tag.to_string().as_bytes()));
        assert_eq!(slots, [0, HASH_SLOTS - 1]);
    }
}
