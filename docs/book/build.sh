#!/usr/bin/env bash
# build.sh OUTPUT: builds the site of the documentation into OUTPUT/html. A missing mdBook is built first, which takes
# minutes, below ${XDG_CACHE_HOME:-~/.cache}/tollkeeper, where the next call finds it. MDBOOK names one to use instead.
#
# The site has the layout of the repository, so links that work on a forge work there: pages in SUMMARY.md become
# HTML, and every other file that they link is copied beside them.
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: docs/book/build.sh OUTPUT" >&2; exit 2; }
mkdir -p "$1"
output=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."

# The version decides how pages look, so a program on the PATH is not used.
version=0.5.4
root=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/mdbook-$version
mdbook=${MDBOOK:-$root/bin/mdbook}
command -v "$mdbook" >/dev/null || cargo install --quiet --locked --no-default-features --features search \
    --root "$root" "mdbook@$version" >&2

rm -rf "$output/src" "$output/html"
mkdir -p "$output/src"
cp docs/book/book.toml docs/book/wide.css "$output/"
cp docs/book/SUMMARY.md "$output/src/"
cp --parents README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md LICENSE tests/README.md fuzz/README.md \
    tests/bench/load/README.md tests/bench/redis_clients/README.md tests/clients/java/pom.xml "$output/src/"
cp --parents --recursive --dereference config deploy docs envoy "$output/src/"
rm -r "$output/src/docs/book"
"$mdbook" build "$output"
