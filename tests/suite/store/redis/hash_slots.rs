//! Hash slots of keys.

mod tags {
    use tollkeeper::store::client::redis::hash_slot::{HASH_SLOTS, TAGS_OF_FIRST_AND_LAST_SLOT, hash_slot};

    #[test]
    fn tags_of_the_first_and_last_slot_fall_into_them() {
        let slots = TAGS_OF_FIRST_AND_LAST_SLOT.map(|tag| hash_slot(tag.to_string().as_bytes()));
        assert_eq!(slots, [0, HASH_SLOTS - 1]);
    }
}

mod window_keys {
    use bytes::Bytes;
    use tollkeeper::store::client::redis::hash_slot::hash_slot;
    use tollkeeper::store::window_key::EnvoyRatelimitKey;

    #[test]
    fn reserved_key_extends_the_key_within_its_slot() {
        for key in
            ["d_k_v_0", "{p}d_k_v_0", "d_k_{v}_0", "d_{}_v_0", "d_{_v_0", "d_}_v_0", "d_}{_0", "d_{}{v}_0", "{a}{b"]
        {
            let window = EnvoyRatelimitKey { key: Bytes::from_static(key.as_bytes()), lifetime_s: 1 };
            let reserved = window.reserved_refunds_key();
            assert_eq!(hash_slot(&reserved), hash_slot(key.as_bytes()), "{key}: {reserved:?}");
            let head = [key.to_owned(), key.replace(['{', '}'], "_")];
            assert!(head.iter().any(|head| reserved.starts_with(format!("{head}:refunds").as_bytes())), "{reserved:?}");
        }
        let plain = EnvoyRatelimitKey { key: Bytes::from_static(b"d_k_v_0"), lifetime_s: 1 };
        assert_eq!(plain.reserved_refunds_key(), &b"d_k_v_0:refunds{d_k_v_0}"[..]);
    }
}
