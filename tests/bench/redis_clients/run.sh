#!/usr/bin/env bash
# Compares Redis clients by CPU time per call; see src/main.rs. Needs redis-server in the PATH. Arguments are passed on.
set -euo pipefail
cd "$(dirname "$0")"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/../../../target/redis_clients}"
exec cargo run --locked --release --quiet -- "$@"
