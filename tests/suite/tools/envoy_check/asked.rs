//! What is asked on a route: tables of small configurations, each with the findings that must appear, and almost the same
//! one without them. Envoy accepts all of them.

use kit::envoy::validate;
use serde_json::Value;

use super::check;
use tollkeeper::tools::envoy_check::finding::EnvoyCheck;

const TEMPLATE: &str = r#"
LAYERS
static_resources:
  listeners:
    - name: clients
      address: { socket_address: { address: 127.0.0.1, port_value: 10000 } }
      filter_chains:
        - filters:
            - name: hcm
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                MANAGER
                http_filters:
                  BEFORE
                  - name: limit
                    LISTED
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
                      domain: edge
                      timeout: 0.05s
                      FILTER
                      rate_limit_service: { transport_api_version: V3, grpc_service: { envoy_grpc: { cluster_name: tollkeeper } SERVICE } }
                  BEHIND
                  - name: router
                    typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }
                route_config:
                  virtual_hosts:
                    - name: clients
                      domains: ["*"]
                      HOST
                      routes:
                        - match: { prefix: /here }
                          ROUTE
                          route: { cluster: upstream ACTION }
                        ROUTES
  clusters:
    - name: upstream
    - name: tollkeeper
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: { http2_protocol_options: { connection_keepalive: { interval: 5s, timeout: 1s } } }
      circuit_breakers: { thresholds: [{ max_requests: 100000, max_pending_requests: 100000, max_retries: 100000 }] }
"#;

/// Short words of the tables, and what they stand for.
const WORDS: [(&str, &str); 27] = [
    (
        "LIMIT2",
        r#"- { name: second, typed_config: { "@type": RL, domain: edge, timeout: 1s, rate_limit_service: { transport_api_version: V3, grpc_service: { envoy_grpc: { cluster_name: tollkeeper } } } } }"#,
    ),
    (
        "LUA",
        r#"- { name: lua, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua, default_source_code: { inline_string: "" } } }"#,
    ),
    (
        "MUTATION",
        r#"- { name: mutation, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation, mutations: { request_mutations: [{ append: { header: { key: x-forwarded-for, value: "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%" }, append_action: OVERWRITE_IF_EXISTS_OR_ADD } }, { append: { header: { key: x-made, value: v } } }] } } }"#,
    ),
    (
        "TO_METADATA",
        r#"- { name: to-metadata, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config, request_rules: [{ header: x-team, on_header_present: { metadata_namespace: shop, key: team, type: STRING } }] } }"#,
    ),
    (
        "COMPRESSOR",
        r#"- { name: compressor, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor, compressor_library: { name: gzip, typed_config: { "@type": type.googleapis.com/envoy.extensions.compression.gzip.compressor.v3.Gzip } } } }"#,
    ),
    (
        "UNZIP",
        r#"- { name: unzip, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.decompressor.v3.Decompressor, decompressor_library: { name: gzip, typed_config: { "@type": type.googleapis.com/envoy.extensions.compression.gzip.decompressor.v3.Gzip } } } }"#,
    ),
    (
        "PLAIN",
        r#"- { name: plain, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation, mutations: { request_mutations: [{ remove: Accept-Encoding }] } } }"#,
    ),
    // Open to further fields.
    (
        "EARLY",
        r#"early_header_mutation_extensions: [{ name: early, typed_config: { "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation, mutations: [{ append: { header: { key: x-team, value: "%REQ(x-team)%" }"#,
    ),
    (
        "MESSAGES",
        r#"- { name: messages, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.mcp.v3.Mcp, max_request_body_size: 65536"#,
    ),
    (
        "TOKENS",
        r#"- { name: tokens, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.ai_protocol_manager.v3.AiProtocolManager, response_handling: { token_usage: { metadata_namespace: usage"#,
    ),
    (
        "DECLARED",
        r#"typed_per_filter_config: { tokens: { "@type": type.googleapis.com/envoy.extensions.filters.http.ai_protocol_manager.v3.AiProtocolManagerPerRoute, response: { llm_protocol: ANTHROPIC_MESSAGES } } }"#,
    ),
    (
        "TOOL",
        "{ actions: [{ metadata: { descriptor_key: tool, metadata_key: { key: envoy.filters.http.mcp, path: [{ key: params }, { key: name }] } } }] }",
    ),
    // A peek, and a charge that is open to its `hits_addend`.
    (
        "CHARGE",
        "{ actions: [{ generic_key: { descriptor_value: all } }], hits_addend: { number: 0 } }, { actions: [{ generic_key: { descriptor_value: all } }], apply_on_stream_done: true, hits_addend",
    ),
    ("BARE", r#"{ format: "%TYPED_CEL(metadata.typed_filter_metadata['usage'].total_tokens)%" }"#),
    (
        "ELSE_600",
        r#"{ format: "%TYPED_CEL('usage' in metadata.typed_filter_metadata ? metadata.typed_filter_metadata['usage'].total_tokens : 600u)%" }"#,
    ),
    ("ADDS", "request_headers_to_add: [{ header: { key: x-made, value: v } }]"),
    ("MADE", "{ actions: [{ request_headers: { header_name: X-Made, descriptor_key: made } }] }"),
    (
        "TEAM",
        "{ actions: [{ metadata: { descriptor_key: team, metadata_key: { key: shop, path: [{ key: team }] } } }] }",
    ),
    (
        "ENTRY",
        "{ actions: [{ metadata: { descriptor_key: team, source: ROUTE_ENTRY, metadata_key: { key: shop, path: [{ key: team }] } } }] }",
    ),
    (
        "EXPRESSION",
        r#"extension: { name: e, typed_config: { "@type": type.googleapis.com/envoy.extensions.rate_limit_descriptors.expr.v3.Descriptor, descriptor_key: path, text: request.url_path } }"#,
    ),
    (
        "CLAIM",
        r#"extension: { name: c, typed_config: { "@type": type.googleapis.com/envoy.extensions.rate_limit_descriptors.jwt_claim.v3.Descriptor, descriptor_key: subject, header_name: authorization, value_prefix: "Bearer ", claim_name: sub } }"#,
    ),
    ("PER_ROUTE", r#""@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute"#),
    ("CONFIG", r#""@type": type.googleapis.com/envoy.config.route.v3.FilterConfig"#),
    ("ALL", "{ actions: [{ generic_key: { descriptor_value: all } }] }"),
    ("ONE", "{ actions: [{ generic_key: { descriptor_value: one } }] }"),
    ("OTHER", "- { match: { prefix: / }, route: { cluster: upstream } }"),
    ("RL,", "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit,"),
];

/// The template with texts at its places; ` && ` separates fields.
fn fill(parts: &[(&str, &str)]) -> String {
    let mut text = TEMPLATE.to_owned();
    for (place, part) in parts {
        let mut part = (*part).to_owned();
        for (word, meaning) in WORDS {
            part = part.replace(word, meaning);
        }
        let (line, indent) = {
            let line = text.lines().find(|line| line.trim().ends_with(place) || line.contains(&format!(" {place} }}")));
            let line = line.unwrap_or_else(|| panic!("no place {place}"));
            (line.to_owned(), line.len() - line.trim_start().len())
        };
        let new = match line.trim() == *place {
            true => part.split(" && ").map(|part| format!("{:indent$}{part}", "")).collect::<Vec<_>>().join("\n"),
            false => line.replace(&format!(" {place} }}"), &format!(", {part} }}")),
        };
        text = text.replacen(&line, &new, 1);
    }
    for place in ["LAYERS", "MANAGER", "BEFORE", "LISTED", "FILTER", "BEHIND", "HOST", "ROUTE", "ROUTES"] {
        text = text.lines().filter(|line| line.trim() != place).map(|line| format!("{line}\n")).collect();
    }
    text.replace(" SERVICE }", " }").replace(" ACTION }", " }")
}

type Parts = &'static [(&'static str, &'static str)];

/// Parts, and the checks that find something, sorted; a hint about a header that may lack is left out.
const TABLE: &[(Parts, &[&str])] = &[
    (&[("FILTER", "rate_limits: [ALL]")], &[]),
    // Virtual host beside routes with their own.
    (&[("HOST", "rate_limits: [ALL]"), ("ACTION", "rate_limits: [ONE]")], &["route-limits-ignored"]),
    (&[("HOST", "rate_limits: [ALL]"), ("ACTION", "rate_limits: [ONE], include_vh_rate_limits: true")], &[]),
    (
        &[("HOST", "rate_limits: [ALL]"), ("ACTION", "rate_limits: [ONE]"), ("ROUTES", "OTHER")],
        &["host-limits-replaced"],
    ),
    (
        &[
            ("HOST", "rate_limits: [ALL]"),
            ("ACTION", "rate_limits: [ONE], include_vh_rate_limits: false"),
            ("ROUTES", "OTHER"),
        ],
        &[],
    ),
    (
        &[
            ("HOST", "rate_limits: [ALL]"),
            ("ACTION", "rate_limits: [ONE]"),
            ("ROUTE", "typed_per_filter_config: { limit: { PER_ROUTE, vh_rate_limits: INCLUDE } }"),
        ],
        &[],
    ),
    (
        &[
            ("HOST", "rate_limits: [ALL]"),
            ("ROUTE", "typed_per_filter_config: { limit: { PER_ROUTE, vh_rate_limits: IGNORE } }"),
        ],
        &["filter-never-asks", "route-limits-ignored"],
    ),
    // A list of another stage replaces that of the host too.
    (
        &[
            ("HOST", "rate_limits: [ALL]"),
            ("ACTION", "rate_limits: [{ stage: 1, actions: [{ generic_key: { descriptor_value: one } }] }]"),
        ],
        &["filter-never-asks", "route-limits-ignored", "stage-without-filter"],
    ),
    // Filters that are switched off.
    (&[("LISTED", "disabled: true"), ("FILTER", "rate_limits: [ALL]")], &["filter-not-asked"]),
    (
        &[
            ("LISTED", "disabled: true"),
            ("FILTER", "rate_limits: [ALL]"),
            ("ROUTE", "typed_per_filter_config: { limit: { PER_ROUTE } }"),
        ],
        &[],
    ),
    (
        &[
            ("LISTED", "disabled: true"),
            ("HOST", "rate_limits: [ALL] && typed_per_filter_config: { limit: { CONFIG, config: {} } }"),
        ],
        &[],
    ),
    (
        &[
            ("ACTION", "rate_limits: [ONE]"),
            ("ROUTE", "typed_per_filter_config: { limit: { CONFIG, disabled: true } }"),
        ],
        &["filter-never-asks", "route-limits-ignored"],
    ),
    (&[("FILTER", "filter_enabled: { default_value: { numerator: 0 } } && rate_limits: [ALL]")], &["filter-not-asked"]),
    (
        &[("FILTER", "filter_enabled: { default_value: { numerator: 50 } } && rate_limits: [ALL]")],
        &["filter-not-asked"],
    ),
    (
        &[(
            "FILTER",
            "filter_enabled: { default_value: { numerator: 1000000, denominator: MILLION } } && rate_limits: [ALL]",
        )],
        &[],
    ),
    (
        &[("FILTER", "filter_enabled: { default_value: { numerator: 0 }, runtime_key: a.b } && rate_limits: [ALL]")],
        &["filter-not-asked"],
    ),
    (
        &[
            ("LAYERS", "layered_runtime: { layers: [{ name: x, static_layer: { a.b: 100 } }] }"),
            ("FILTER", "filter_enabled: { default_value: { numerator: 0 }, runtime_key: a.b } && rate_limits: [ALL]"),
        ],
        &[],
    ),
    (
        &[("FILTER", "filter_enforced: { default_value: { numerator: 0 } } && rate_limits: [ALL]")],
        &["filter-not-enforced"],
    ),
    (&[("FILTER", "request_type: internal && rate_limits: [ALL]")], &["filter-not-asked"]),
    (&[("FILTER", "request_type: external && rate_limits: [ALL]")], &[]),
    // Counted twice, or afterwards only.
    (&[("BEHIND", "LIMIT2"), ("HOST", "rate_limits: [ALL]")], &["counted-twice"]),
    (&[("BEHIND", "LIMIT2"), ("HOST", "rate_limits: [ALL]"), ("FILTER", "rate_limits: [ONE]")], &[]),
    (
        &[("BEHIND", "LIMIT2"), ("HOST", "rate_limits: [ALL]"), ("FILTER", "stage: 1 && rate_limits: [ALL]")],
        &["counted-twice"],
    ),
    (
        &[
            ("BEHIND", "LIMIT2"),
            ("HOST", "rate_limits: [ALL] && typed_per_filter_config: { limit: { PER_ROUTE, domain: other } }"),
        ],
        &[],
    ),
    (&[("HOST", "rate_limits: [ALL, ALL]")], &["counted-twice"]),
    (
        &[(
            "FILTER",
            "rate_limits: [{ apply_on_stream_done: true, actions: [{ generic_key: { descriptor_value: all } }] }]",
        )],
        &["charged-but-never-checked"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ apply_on_stream_done: true, actions: [{ generic_key: { descriptor_value: all } }] }, { hits_addend: { number: 0 }, actions: [{ generic_key: { descriptor_value: all } }] }]",
        )],
        &[],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ apply_on_stream_done: true, hits_addend: { number: 1, is_negative_hits: true }, actions: [{ generic_key: { descriptor_value: all } }] }, ALL]",
        )],
        &["refund-as-slot"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ apply_on_stream_done: true, hits_addend: { number: 1, is_negative_hits: true }, actions: [{ generic_key: { descriptor_value: all } }] }, { hits_addend: { number: 0 }, actions: [{ generic_key: { descriptor_value: all } }] }]",
        )],
        &[],
    ),
    // Values that are not there.
    (&[("ROUTE", "ADDS"), ("FILTER", "rate_limits: [MADE]")], &["value-never-set"]),
    (&[("HOST", "ADDS && rate_limits: [MADE]")], &["value-never-set"]),
    (&[("ROUTE", "ADDS"), ("FILTER", "rate_limits: [MADE]"), ("BEFORE", "MUTATION")], &[]),
    (&[("ROUTE", "ADDS"), ("FILTER", "rate_limits: [MADE]"), ("BEFORE", "LUA")], &[]),
    (&[("FILTER", "rate_limits: [MADE]"), ("BEHIND", "MUTATION")], &["value-never-set"]),
    (&[("FILTER", "rate_limits: [MADE]")], &[]),
    (&[("FILTER", "rate_limits: [TEAM]"), ("BEHIND", "TO_METADATA")], &["value-never-set"]),
    (&[("FILTER", "rate_limits: [TEAM]"), ("BEFORE", "TO_METADATA")], &["client-chosen-spelling"]),
    (&[("FILTER", "rate_limits: [TEAM]")], &["value-never-set"]),
    (&[("FILTER", "rate_limits: [TEAM]"), ("BEFORE", "LUA")], &[]),
    (&[("FILTER", "rate_limits: [ENTRY]")], &["value-never-set"]),
    (&[("FILTER", "rate_limits: [ENTRY]"), ("ROUTE", "metadata: { filter_metadata: { shop: { team: blue } } }")], &[]),
    (
        &[("FILTER", "rate_limits: [ENTRY]"), ("ROUTE", "metadata: { filter_metadata: { shop: { team: 5 } } }")],
        &["value-never-set"],
    ),
    // Calls of tools.
    (&[("FILTER", "rate_limits: [TOOL]"), ("BEFORE", "MESSAGES } }")], &["mcp-calls-unread"]),
    (
        &[("FILTER", "rate_limits: [TOOL]"), ("BEFORE", "MESSAGES, traffic_mode: REJECT_NO_MCP } }")],
        &["mcp-calls-unread"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [TOOL]"),
            ("BEFORE", "MESSAGES, traffic_mode: REJECT_NO_MCP, reject_duplicate_keys: true } }"),
        ],
        &[],
    ),
    (&[("FILTER", "rate_limits: [ALL]"), ("BEFORE", "MESSAGES } }")], &[]),
    (
        &[
            ("FILTER", "rate_limits: [TOOL]"),
            ("BEFORE", "MESSAGES } }"),
            (
                "ROUTE",
                "typed_per_filter_config: { messages: { \"@type\": type.googleapis.com/envoy.extensions.filters.http.mcp.v3.McpOverride, traffic_mode: REJECT_NO_MCP } }",
            ),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [TOOL]"),
            ("BEHIND", "MESSAGES, traffic_mode: REJECT_NO_MCP, reject_duplicate_keys: true } }"),
        ],
        &["value-never-set"],
    ),
    // Tokens of models.
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: BARE }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["usage-may-be-missing"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: { format: '%DYNAMIC_METADATA(usage:total_tokens)%' } }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["typed-metadata-not-read"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: { format: '%DYNAMIC_METADATA(other:usage)%' } }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: { format: '%DYNAMIC_METADATA(usages:total_tokens)%' } }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &[],
    ),
    (
        &[
            (
                "FILTER",
                "rate_limits: [CHARGE: { format: '%TYPED_CEL(metadata.filter_metadata[\"usage\"].total_tokens)%' } }]",
            ),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["typed-metadata-not-read"],
    ),
    (
        &[
            (
                "FILTER",
                "rate_limits: [{ actions: [{ metadata: { descriptor_key: model, metadata_key: { key: usage, path: [{ key: model }] } } }] }]",
            ),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["typed-metadata-not-read"],
    ),
    (
        &[
            (
                "FILTER",
                "rate_limits: [{ actions: [{ generic_key: { descriptor_value: '%DYNAMIC_METADATA(usage:model)%' } }] }]",
            ),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
            (
                "LAYERS",
                "layered_runtime: { layers: [{ name: x, static_layer: { envoy.reloadable_features.enable_formatter_for_ratelimit_action_descriptor_value: true } }] }",
            ),
        ],
        &["typed-metadata-not-read"],
    ),
    (&[("FILTER", "rate_limits: [ALL]"), ("BEHIND", "TOKENS, include_unconfigured_routes: true } } } }")], &[]),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            ("BEHIND", "TOKENS, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }"),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["usage-not-read"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            ("BEHIND", "TOKENS, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }"),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
            ("ROUTE", "DECLARED"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            ("BEHIND", "TOKENS, include_unconfigured_routes: true } } } }"),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["llm-protocol-missing"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            ("BEHIND", "TOKENS, include_unconfigured_routes: true } } } }"),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
            ("ROUTE", "DECLARED"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
        ],
        &["usage-compressed"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("ROUTE", "request_headers_to_remove: [Accept-Encoding]"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("ROUTE", "request_headers_to_remove: [accept-encoding]"),
            ("ROUTES", "OTHER"),
        ],
        &["usage-compressed"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            (
                "ROUTE",
                "request_headers_to_add: [{ header: { key: accept-encoding, value: identity }, append_action: OVERWRITE_IF_EXISTS_OR_ADD }]",
            ),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("BEFORE", "PLAIN"),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } } && UNZIP",
            ),
        ],
        &[],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } } && COMPRESSOR",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
        ],
        &["usage-compressed"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            (
                "BEHIND",
                "TOKENS, include_unconfigured_routes: true, default_llm_protocol: OPENAI_CHAT_COMPLETIONS } } } }",
            ),
            ("HOST", "request_headers_to_remove: [accept-encoding]"),
            ("BEFORE", "COMPRESSOR"),
        ],
        &[],
    ),
    (
        &[("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"), ("BEHIND", "TOKENS } } } }"), ("ROUTE", "DECLARED")],
        &["usage-compressed"],
    ),
    (
        &[
            ("FILTER", "rate_limits: [CHARGE: ELSE_600 }]"),
            ("BEHIND", "TOKENS } } } }"),
            ("ROUTE", "request_headers_to_remove: [accept-encoding] && DECLARED"),
            ("ROUTES", "OTHER"),
        ],
        &[],
    ),
    // Values that the client spells.
    (
        &[
            ("MANAGER", "use_remote_address: true"),
            (
                "FILTER",
                "rate_limits: [{ actions: [{ request_headers: { header_name: X-Forwarded-For, descriptor_key: ip } }] }]",
            ),
        ],
        &["address-forgeable"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: x-real-ip, descriptor_key: ip } }] }]",
        )],
        &["address-forgeable"],
    ),
    (
        &[
            (
                "FILTER",
                "rate_limits: [{ actions: [{ request_headers: { header_name: x-forwarded-for, descriptor_key: ip } }] }]",
            ),
            ("BEFORE", "MUTATION"),
        ],
        &[],
    ),
    (&[("FILTER", "rate_limits: [{ actions: [{ remote_address: {} }] }]")], &["address-forgeable"]),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: \":path\", descriptor_key: path } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (&[("FILTER", "rate_limits: [{ actions: [{ EXPRESSION }] }]")], &["client-chosen-spelling"]),
    (
        &[
            ("MANAGER", "normalize_path: true && merge_slashes: true"),
            ("FILTER", "rate_limits: [{ actions: [{ EXPRESSION }] }]"),
        ],
        &[],
    ),
    (
        &[("FILTER", "rate_limits: [{ actions: [{ request_headers: { header_name: host, descriptor_key: host } }] }]")],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: \":authority\", descriptor_key: host } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: user-agent, descriptor_key: ua } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: cookie, descriptor_key: session } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ query_parameters: { query_parameter_name: user, descriptor_key: user } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ request_headers: { header_name: x-user, descriptor_key: user } }] }]",
        )],
        &[],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ header_value_match: { descriptor_value: login, headers: [{ name: \":path\", string_match: { exact: /login } }] } }] }]",
        )],
        &["client-chosen-spelling"],
    ),
    (
        &[(
            "FILTER",
            "rate_limits: [{ actions: [{ header_value_match: { descriptor_value: login, headers: [{ name: \":path\", string_match: { prefix: /login } }] } }] }]",
        )],
        &[],
    ),
    (&[("FILTER", "rate_limits: [{ actions: [{ CLAIM }] }]")], &["client-chosen-spelling"]),
    (&[("FILTER", "rate_limits: [{ actions: [{ CLAIM }] }]"), ("BEFORE", "LUA")], &[]),
    // A header that is sent twice, in metadata.
    (
        &[
            ("BEFORE", "TO_METADATA"),
            ("FILTER", "rate_limits: [TEAM]"),
            ("MANAGER", "EARLY, append_action: OVERWRITE_IF_EXISTS } }] } }]"),
        ],
        &[],
    ),
    (
        &[("BEFORE", "TO_METADATA"), ("FILTER", "rate_limits: [TEAM]"), ("MANAGER", "EARLY } }] } }]")],
        &["client-chosen-spelling"],
    ),
    // Which timeout holds.
    (&[("SERVICE", "timeout: 2s"), ("FILTER", "rate_limits: [ALL]")], &["timeout-not-used"]),
];

fn found(text: &str, rules: Option<&str>) -> Vec<&'static str> {
    let found = check(text, rules);
    let mut names: Vec<_> = found.kept().iter().map(|finding| finding.check.name()).collect();
    names.retain(|name| *name != "descriptor-may-be-dropped");
    names.sort_unstable();
    names.dedup();
    names
}

#[test]
fn what_is_asked_is_judged_by_route() {
    for (parts, expected) in TABLE {
        assert_eq!(found(&fill(parts), None), *expected, "{parts:#?}");
    }
}

#[test]
fn cost_in_a_header_that_a_request_may_lack_is_a_warning() {
    let cost = (
        "FILTER",
        "rate_limits: [{ actions: [{ generic_key: { descriptor_value: all } }], hits_addend: { format: \"%REQ(x-cost)%\" } }]",
    );
    let always = ("BEFORE", "MUTATION");
    let guard = (
        "ROUTES",
        "- { match: { prefix: /, headers: [{ name: x-cost, present_match: false }] }, direct_response: { status: 400 } }",
    );
    for (parts, is_warned) in [(vec![cost], true), (vec![cost, always], true), (vec![cost, guard], false)] {
        let found = check(&fill(&parts), None);
        let warned = found.kept().iter().any(|finding| finding.message.contains("the cost is `x-cost`"));
        assert_eq!(warned, is_warned, "{parts:?}");
    }
    let made = (cost.0, cost.1.replace("x-cost", "x-made"));
    let found = check(&fill(&[(made.0, &made.1), always]), None);
    assert!(found.kept().iter().all(|finding| !finding.message.contains("the cost is")), "the filter adds it");
}

#[test]
fn each_check_without_a_sample_is_in_a_table() {
    let of_tables: Vec<&str> =
        TABLE.iter().flat_map(|(_, found)| *found).copied().chain(super::OF_OTHER_TABLES).collect();
    for check in EnvoyCheck::ALL {
        let is_sample = super::samples("bad").iter().any(|(name, _)| name == check.name());
        assert!(is_sample || of_tables.contains(&check.name()), "{}", check.name());
    }
}

#[test]
fn envoy_accepts_the_table() {
    // All in one file, so that Envoy starts once.
    let mut all: Value = serde_saphyr::from_str(&fill(&[])).unwrap();
    let listeners = TABLE.iter().enumerate().map(|(at, (parts, _))| {
        let mut one: Value = serde_saphyr::from_str(&fill(parts)).unwrap();
        let mut listener = one["static_resources"]["listeners"][0].take();
        listener["name"] = format!("{at}").into();
        listener["address"]["socket_address"]["port_value"] = (10_000 + at).into();
        listener
    });
    all["static_resources"]["listeners"] = listeners.collect();
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), all.to_string()).unwrap();
    let output = validate(file.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn rules_tell_whether_a_spelling_matters() {
    let item = "{ actions: [{ request_headers: { header_name: \":path\", descriptor_key: path } }] }";
    let text = fill(&[
        ("MANAGER", "normalize_path: true && merge_slashes: true"),
        ("FILTER", &format!("rate_limits: [{item}]")),
    ]);
    let limit = "rate_limit: { unit: minute, requests_per_unit: 5 }";
    for (rule, expected) in [
        ("key: path, value: /login", &["client-chosen-spelling"][..]),
        ("key: path", &["client-chosen-spelling"]),
        ("key: path, value: /login*", &["client-chosen-spelling"]),
        ("key: path, value: /login*, share_threshold: true", &[]),
        ("key: path, match: { regex: '/login(\\?.*)?' }, share_threshold: true", &[]),
        ("key: other", &["descriptor-unmatched"]),
    ] {
        let rules = format!("domain: edge\ndescriptors: [{{ {rule}, {limit} }}]\n");
        assert_eq!(found(&text, Some(&rules)), expected, "{rule}");
    }
    // Without normalization a prefix is spelled otherwise too.
    let text = fill(&[("FILTER", &format!("rate_limits: [{item}]"))]);
    let rules =
        format!("domain: edge\ndescriptors: [{{ key: path, value: /login*, share_threshold: true, {limit} }}]\n");
    assert_eq!(found(&text, Some(&rules)), ["client-chosen-spelling"]);
}
