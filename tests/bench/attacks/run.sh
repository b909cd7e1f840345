#!/usr/bin/env bash
# Attacks tollkeeper, and a server of grpc-go if `go` is installed, with raw HTTP/2 frames; see src/main.rs.
# TOLLKEEPER is the binary under attack; without it, a release build is made. Arguments are passed on.
set -euo pipefail
cd "$(dirname "$0")"
root="$PWD/../../.."
target="${CARGO_TARGET_DIR:-$root/target}"
if [[ -z "${TOLLKEEPER:-}" ]]; then
    cargo build --locked --release --manifest-path "$root/Cargo.toml" --target-dir "$target"
    TOLLKEEPER="$target/release/tollkeeper"
fi
export TOLLKEEPER
if command -v go >/dev/null; then
    (cd grpc_go && go build -o "$target/grpc_go_server" .)
    export GRPC_GO_SERVER="$target/grpc_go_server"
fi
CARGO_TARGET_DIR="$target/attacks" exec cargo run --locked --release --quiet -- "$@"
