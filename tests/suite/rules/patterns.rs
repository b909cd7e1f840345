//! Patterns of rules: each index finds what trying every pattern finds.

mod wildcard {
    use proptest::prelude::*;
    use tollkeeper::rules::rule::wildcard::{WildcardPattern, Wildcards, max_tried_patterns};

    proptest! {
        #[test]
        fn first_match_is_that_of_trying_all_in_file_order(
            patterns in prop::collection::vec("[ab/]{0,2}\\*[ab/]{0,3}(\\*[ab/]{0,2}){0,2}", 0..40),
            texts in prop::collection::vec("[ab/]{0,12}", 1..20),
        ) {
            let composites = (0..).zip(&patterns).map(|(node, text)| (node, text.as_bytes().into())).collect();
            let wildcards = Wildcards::new(composites);
            for text in &texts {
                let matches = |pattern: &String| WildcardPattern::new(pattern.as_bytes()).matches(text.as_bytes());
                let expected = patterns.iter().position(matches).map(|index| u32::try_from(index).unwrap_or(u32::MAX));
                prop_assert_eq!(wildcards.first_match(text.as_bytes()), expected, "{} among {:?}", text, patterns);
            }
        }
    }

    #[test]
    fn only_patterns_with_all_literals_in_common_are_tried_one_by_one() {
        let tried = |texts: &[String]| {
            let patterns: Vec<WildcardPattern> =
                texts.iter().map(|text| WildcardPattern::new(text.as_bytes())).collect();
            max_tried_patterns(patterns.iter())
        };
        let numbered = |text: &str| (0..100).map(|index| text.replace('#', &format!("{index:03}"))).collect::<Vec<_>>();
        assert_eq!(tried(&numbered("path_*/#/end")), 1);
        assert_eq!(tried(&numbered("path_*.#")), 1);
        assert_eq!(tried(&numbered("path_*common*/#*common")), 1);
        assert_eq!(tried(&numbered("path_#*")), 1);
        assert_eq!(tried(&numbered("path_*common")), 100);
    }
}

mod value_set {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use tollkeeper::rules::rule::value_set::ValueSet;

    proptest! {
        #[test]
        fn set_contains_its_values_only(
            values in prop::collection::vec("[ab]{0,4}", 0..40),
            asked in prop::collection::vec("[ab]{0,4}", 0..40),
        ) {
            let set: ValueSet = values.iter().map(String::as_bytes).collect();
            let expected: HashSet<&String> = values.iter().collect();
            for value in values.iter().chain(&asked) {
                prop_assert_eq!(set.contains(value.as_bytes()), expected.contains(value));
            }
        }
    }
}

mod network {
    use proptest::prelude::*;
    use tollkeeper::rules::rule::network::{
        Network, NetworkError, NetworkIndex, NetworkSet, NumericIpAddress, host_mask_v4, host_mask_v6,
    };

    fn network(text: &str) -> Network {
        Network::parse(text).expect("a network")
    }

    fn contains(network: Network, address: NumericIpAddress) -> bool {
        NetworkSet::from_iter([network]).contains(address)
    }

    #[test]
    fn networks_are_parsed_and_mapped_ones_are_ipv4() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("::/0", "::/0"),
            ("192.0.2.7", "192.0.2.7"),
            ("192.0.2.7/32", "192.0.2.7"),
            ("2001:DB8:0::/32", "2001:db8::/32"),
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:10.1.2.3", "10.1.2.3"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
        ] {
            assert_eq!(network(text).to_string(), shown, "{text}");
        }
        for text in
            ["", "10.0.0.0/", "10.0.0.0/33", "::/129", "10.0.0/8", "10.0.0.0/+8", "10.0.0.0/8/8", "x", "10.0.0.0/999"]
        {
            assert_eq!(Network::parse(text), Err(NetworkError::NotANetwork), "{text}");
        }
        assert_eq!(Network::parse("10.0.0.1/8"), Err(NetworkError::HostBits(network("10.0.0.0/8"))));
        assert_eq!(Network::parse("2001:db8::1/32"), Err(NetworkError::HostBits(network("2001:db8::/32"))));
    }

    #[test]
    fn only_the_whole_text_of_an_address_is_one() {
        let mapped = NumericIpAddress::from_value(b"::ffff:192.0.2.1");
        assert_eq!(mapped, NumericIpAddress::from_value(b"192.0.2.1"));
        assert!(mapped.is_some());
        for value in
            [&b""[..], b"192.0.2.1:80", b"[::1]", b" ::1", b"fe80::1%eth0", b"\xff", b"192.0.2.01", &[b'1'; 50]]
        {
            assert_eq!(NumericIpAddress::from_value(value), None, "{value:?}");
        }
    }

    /// Networks that often contain each other, of both families, with the ends of the number ranges.
    fn networks() -> impl Strategy<Value = Vec<Network>> {
        let v4 = (0..4_u32, 0..=32_u8).prop_map(|(top, length)| {
            let address = top.wrapping_mul(0x5555_5555);
            Network::V4 { first: address & !host_mask_v4(length), length }
        });
        let v6 = (0..4_u128, 0..=128_u8).prop_map(|(top, length)| {
            let address = top.wrapping_mul(u128::MAX / 3);
            Network::V6 { first: address & !host_mask_v6(length), length }
        });
        prop::collection::vec(prop_oneof![v4, v6], 0..20)
    }

    fn addresses() -> impl Strategy<Value = Vec<NumericIpAddress>> {
        let v4 = (0..4_u32, any::<u32>(), 0..=32_u32).prop_map(|(top, low, bits)| {
            NumericIpAddress::V4(top.wrapping_mul(0x5555_5555) ^ low.checked_shr(bits).unwrap_or(0))
        });
        let v6 = (0..4_u128, any::<u128>(), 0..=128_u32).prop_map(|(top, low, bits)| {
            NumericIpAddress::V6(top.wrapping_mul(u128::MAX / 3) ^ low.checked_shr(bits).unwrap_or(0))
        });
        prop::collection::vec(prop_oneof![v4, v6], 1..20)
    }

    proptest! {
        #[test]
        fn index_and_set_agree_with_trying_every_network(networks in networks(), addresses in addresses()) {
            let indexed = networks.iter().enumerate().map(|(at, network)| (*network, at)).collect();
            let index = NetworkIndex::new(indexed);
            let set: NetworkSet = networks.iter().copied().collect();
            for address in addresses {
                let expected: Vec<usize> =
                    (0..networks.len()).filter(|at| contains(networks[*at], address)).collect();
                prop_assert_eq!(index.lowest_pattern(address), expected.first().copied());
                let mut found = Vec::new();
                index.for_each_match(address, |at| found.push(at));
                found.sort_unstable();
                prop_assert_eq!(&found, &expected);
                prop_assert_eq!(set.contains(address), !expected.is_empty());
            }
        }
    }
}

mod expression {
    use proptest::prelude::*;
    use tollkeeper::rules::rule::expression::{ExpressionError, Expressions, MAX_EXPRESSION_STEPS, measure_expression};

    fn matched(expressions: &[&str], value: &[u8]) -> Vec<usize> {
        let numbered: Vec<_> = expressions.iter().copied().zip(0..).collect();
        let mut found = Vec::new();
        Expressions::new(&numbered).for_each_match(value, |at| found.push(at));
        found.sort_unstable();
        found
    }

    #[test]
    fn expressions_match_whole_values_of_bytes() {
        assert_eq!(matched(&["/v[0-9]+/login", "^/v.*$", "v1", ".*"], b"/v1/login"), [0, 1, 3]);
        assert_eq!(matched(&["", "a*", ".", "(?u:.)"], b""), [0, 1]);
        assert_eq!(matched(&["a.c", "a(?u:.)c", r"a[^x]c", r"(?i)A\xffC"], b"a\xffc"), [0, 2, 3]);
        assert_eq!(matched(&["a.b", r"a\nb", "(?-s)a.b"], b"a\nb"), [0, 1]);
        assert_eq!(matched(&["(?u:[é])", "..", "a|ab", "é"], "é".as_bytes()), [0, 1, 3]);
        assert_eq!(matched(&["a|ab", "(ab|a)"], b"ab"), [0, 1]);
    }

    #[test]
    fn bad_and_large_expressions_have_a_reason() {
        for (text, reason) in [
            ("(", "unclosed group"),
            ("[é]", "Unicode not allowed here"),
            ("a{1000}{1000}", "more than 256 KiB"),
            ("(a|b)*a(a|b){20}", "it takes too much work to compile"),
            (r"(?u:\bx\b)", "cannot build DFAs for regexes with Unicode word boundaries"),
        ] {
            let found = measure_expression(text).unwrap_err().to_string();
            assert!(found.contains(reason), "{text}: {found}");
        }
        assert!(measure_expression(&"a".repeat(5000)).is_err());
    }

    #[test]
    fn work_of_compiling_is_bounded_and_the_same_each_time() {
        let slow = format!("(?:{}a|b)", "|".repeat(500));
        let hostile = [
            r"(?u:\w{6})".to_owned(),
            "(.*a.{11}b|11)".to_owned(),
            // Few sets, each of which takes many steps.
            format!("{slow}*a{}x{{2000}}", slow.repeat(6)),
        ];
        for text in &hostile {
            let measured = measure_expression(text);
            assert_eq!(measured, Err(ExpressionError::TooCostly), "{text}");
            assert_eq!(measure_expression(text), measured);
        }
        for text in ["/v[0-9]+/login", r".*\.(png|jpe?g)", "[0-9a-f]{64}", ".*union.*select.*"] {
            let steps = measure_expression(text).unwrap();
            assert!(steps <= MAX_EXPRESSION_STEPS / 100, "{text}: {steps}");
            assert_eq!(measure_expression(text), Ok(steps));
        }
        // All of them as one would need 2^200 states.
        let texts: Vec<String> = (0..200).map(|at| format!(".*union.*select{at}.*")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert_eq!(matched(&texts, b"x union y select17 z"), [1, 17]);
        assert_eq!(matched(&texts, b"x union y select199 and select3"), [1, 3, 19, 199]);
    }

    #[test]
    fn a_thousand_ordinary_expressions_are_one_automaton() {
        let texts: Vec<String> = (0..1000).map(|at| format!("/v[0-9]+/service-{at}/items/[a-z]+")).collect();
        let numbered: Vec<_> = texts.iter().map(String::as_str).zip(0..).collect();
        let expressions = Expressions::new(&numbered);
        assert_eq!(expressions.automata_count(), 1);
        let mut found = Vec::new();
        expressions.for_each_match(b"/v2/service-717/items/shoes", |at| found.push(at));
        assert_eq!(found, [717]);
    }

    proptest! {
        #![proptest_config(kit::costly_property(24))]

        #[test]
        fn expressions_agree_with_the_regex_crate(
            texts in prop::collection::vec("(a|b|\\.|\\*|[ab.]\\+|\\(a\\|b\\)\\?|\\.\\*a){0,5}", 1..30),
            values in prop::collection::vec("[ab]{0,8}", 1..10),
        ) {
            let valid: Vec<&str> =
                texts.iter().map(String::as_str).filter(|text| measure_expression(text).is_ok()).collect();
            for value in &values {
                let expected: Vec<usize> = (0..valid.len())
                    .filter(|at| {
                        let anchored = format!("^(?:{})$", valid[*at]);
                        regex::bytes::Regex::new(&anchored).expect("it is valid").is_match(value.as_bytes())
                    })
                    .collect();
                prop_assert_eq!(matched(&valid, value.as_bytes()), expected);
            }
        }
    }
}

mod value_pattern {
    use std::sync::Arc;

    use tollkeeper::rules::rule::network::Network;
    use tollkeeper::rules::rule::value_pattern::{MatchPattern, Operator};

    fn list(values: &[&str]) -> String {
        MatchPattern::new(Operator::In(values.iter().map(|value| Box::from(*value)).collect()), false).text().to_owned()
    }

    #[test]
    fn texts_are_readable_distinct_and_bounded() {
        assert_eq!(list(&["GET", "HEAD"]), "in(GET, HEAD)");
        assert_eq!(list(&["GET, HEAD"]), "in(\"GET, HEAD\")");
        assert_eq!(list(&[""]), "in(\"\")");
        let many: Vec<String> = (0..1000).map(|at| format!("value-{at:04}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let (long, other) = (list(&many), list(&[&many[..999], &["x"]].concat()));
        assert!(long.starts_with("in(value-0000, ") && long.contains(", 1000 in all #") && long.len() < 150, "{long}");
        assert_ne!(long, other);
        let wide = list(&[&"x".repeat(500)]);
        assert!(wide.starts_with("in(1 in all #"), "{wide}");
        let regex = |text: &str| MatchPattern::new(Operator::Regex(text.into()), true).text().to_owned();
        assert_eq!(regex("/v[0-9]+"), "not_regex(/v[0-9]+)");
        assert!(regex(&"é".repeat(500)).len() < 150);
        let networks = ["10.0.0.0/8", "2001:db8::/32"].map(|text| Network::parse(text).expect("a network"));
        assert_eq!(
            MatchPattern::new(Operator::Cidr(Arc::new(networks)), false).text(),
            "cidr(10.0.0.0/8, 2001:db8::/32)"
        );
    }
}

mod operators {
    use std::sync::Arc;

    use proptest::prelude::*;
    use tollkeeper::rules::rule::network::Network;
    use tollkeeper::rules::rule::patterns::{OperatorNode, Operators};
    use tollkeeper::rules::rule::value_pattern::{MatchPattern, Operator, SetFile};
    use tollkeeper::rules::rule::{MatchingNodes, NodeId};

    fn operator() -> impl Strategy<Value = Operator> {
        let values = prop::collection::btree_set("[ab1:.]{0,3}|10\\.0\\.0\\.1|::1", 0..5);
        let networks = prop::collection::btree_set(
            prop::sample::select(vec![
                "10.0.0.0/8",
                "10.0.0.0/24",
                "10.0.0.1",
                "0.0.0.0/0",
                "::/0",
                "::1",
                "10.1.0.0/16",
            ]),
            1..4,
        );
        let networks = networks.prop_map(|texts| {
            let mut networks: Vec<Network> =
                texts.iter().map(|text| Network::parse(text).expect("a network")).collect();
            networks.sort();
            networks
        });
        let expression = prop::sample::select(vec!["a*", "[ab]+", "10\\..*", ".*1", "", "::1|b"]);
        let file = |name: &str| Arc::<str>::from(name);
        prop_oneof![
            values.clone().prop_map(|values| Operator::In(values.into_iter().map(String::into_boxed_str).collect())),
            values.prop_map(move |values| Operator::InFile(SetFile {
                name: file("a.txt"),
                set: Arc::new(values.iter().map(String::as_bytes).collect()),
            })),
            networks.clone().prop_map(|networks| Operator::Cidr(networks.into())),
            networks.prop_map(move |networks| Operator::CidrFile(SetFile {
                name: file("b.txt"),
                set: Arc::new(networks.into_iter().collect()),
            })),
            expression.prop_map(|text| Operator::Regex(text.into())),
        ]
    }

    proptest! {
        #![proptest_config(kit::costly_property(48))]

        #[test]
        fn first_match_is_that_of_trying_all_in_file_order(
            patterns in prop::collection::vec((operator(), any::<bool>(), prop::sample::select(vec!["k", "l"])), 0..12),
            values in prop::collection::vec("[ab]{0,3}|10\\.[01]\\.0\\.[01]|::1|::ffff:10\\.0\\.0\\.1|\\.", 1..12),
        ) {
            let patterns: Vec<(Arc<MatchPattern>, &str)> = patterns
                .into_iter()
                .map(|(operator, negated, key)| (Arc::new(MatchPattern::new(operator, negated)), key))
                .collect();
            let node = |(node, (pattern, key)): (NodeId, &(Arc<MatchPattern>, &str))| OperatorNode {
                node,
                key: key.as_bytes().into(),
                pattern: Arc::clone(pattern),
            };
            let operators = Operators::new((0..).zip(&patterns).map(node).collect());
            for value in values {
                let value = value.as_bytes();
                let expected: Vec<NodeId> = (0..)
                    .zip(&patterns)
                    .filter(|(_, (pattern, key))| *key == "k" && pattern.matches(value))
                    .map(|(node, _)| node)
                    .collect();
                prop_assert_eq!(operators.first_match(b"k", value), expected.first().copied());
                let mut all = MatchingNodes::new();
                operators.collect_matches(b"k", value, &mut all);
                all.sort_unstable();
                prop_assert_eq!(all.to_vec(), expected);
            }
        }
    }
}
