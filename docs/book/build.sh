#!/usr/bin/env bash
# build.sh OUTPUT: builds the site of the documentation into OUTPUT/html. TOLLKEEPER_TEST_MDBOOK names mdBook, which
# deploy/install-tools.sh installs; without it, mdbook on the PATH.
#
# The site has the layout of the repository, so links that work on a forge work there: pages in SUMMARY.md become
# HTML, and every other file that they link is copied beside them.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: docs/book/build.sh OUTPUT" >&2; exit 2; }
mkdir -p "$1"
output=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
mdbook=${TOLLKEEPER_TEST_MDBOOK:-mdbook}

rm -rf "$output/src" "$output/html"
mkdir -p "$output/src"
cp docs/book/book.toml docs/book/wide.css "$output/"
cp docs/book/SUMMARY.md "$output/src/"
cp --parents README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md LICENSE tests/README.md fuzz/README.md \
    tests/bench/redis_clients/README.md tests/clients/java/pom.xml "$output/src/"
cp --parents --recursive --dereference config deploy docs envoy "$output/src/"
rm -r "$output/src/docs/book"
"$mdbook" build "$output"
