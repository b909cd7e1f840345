#!/usr/bin/env bash
# Calls tollkeeper with grpc-go, grpc-js and grpcio over TCP and a unix socket, then tests its HTTP/2 with h2spec.
# Every answer is checked. TOLLKEEPER is the binary; without it, a release build is made. CALLS is the number of calls
# of each client. Needs go, node, npm, java, mvn and python3, and their package registries.
set -euo pipefail
cd "$(dirname "$0")"
root="$(cd ../.. && pwd)"
target="${CARGO_TARGET_DIR:-$root/target}"
tools="$target/clients"
calls="${CALLS:-20000}"
if [[ -z "${TOLLKEEPER:-}" ]]; then
    cargo build --locked --release --manifest-path "$root/Cargo.toml" --target-dir "$target"
    TOLLKEEPER="$target/release/tollkeeper"
fi

mkdir -p "$tools"
(cd go && go build -o "$tools/go-client" .)
GOBIN="$tools" go install github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible
clients=$(./install.sh)
clients=${clients#*=}

# Starts a tollkeeper with the given settings; prints its log if it does not answer.
serve() {
    local http="$1" log="$tools/tollkeeper-$1.log"
    shift
    env HOST=127.0.0.1 PORT="$http" DEBUG_HOST=127.0.0.1 DEBUG_PORT="$((http + 1))" "$@" \
        "$TOLLKEEPER" serve --config rules.yaml 2>"$log" &
    servers+=("$!")
    for _ in {1..100}; do
        if curl --silent --fail --output /dev/null "http://127.0.0.1:$http/healthcheck"; then return; fi
        sleep 0.1
    done
    cat "$log"
    return 1
}
servers=()
directory="$(mktemp --directory)"
socket="$directory/grpc.sock"
trap 'kill "${servers[@]}"; rm -r "$directory"' EXIT
serve 28180 GRPC_HOST=127.0.0.1 GRPC_PORT=28182
serve 28190 GRPC_UDS="$socket"

for address in 127.0.0.1:28182 "unix:$socket"; do
    echo "== $address"
    "$tools/go-client" "$address" "$calls"
    NODE_PATH="$clients/node/node_modules" node node/client.js "$address" "$calls"
    "$clients/python/bin/python" python/client.py "$address" "$calls"
done

echo "== h2spec"
"$tools/h2spec" --strict --host 127.0.0.1 --port 28182 --timeout 3 >"$tools/h2spec.log" || true
sed --quiet '/^Failures/,$p' "$tools/h2spec.log"
# tests/README.md explains the failures.
grep --quiet "146 tests, 138 passed, 4 skipped, 4 failed" "$tools/h2spec.log"
echo "all clients got the right answers"
