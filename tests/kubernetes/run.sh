#!/usr/bin/env bash
# Starts a Kubernetes of two nodes on this machine, installs tollkeeper in it as docs/operations.md and deploy/ say, and
# counts the calls that fail while it is updated, drained and killed. Prints a table; exits with 1 if an expectation fails.
#
#     tests/kubernetes/run.sh                  # all checks: half an hour, after build.sh has built the cluster once
#     tests/kubernetes/run.sh restart drain    # only these (see checks.py)
#
# Needs root, Linux with cgroups, overlayfs and nftables, and: go, apt-get, python3, openssl, nft. Nothing stays: processes,
# mounts and networks are in namespaces of their own.
#
#   TOLLKEEPER_TEST_PROGRAM  program to install; without it `cargo build --release` makes one
#   TOLLKEEPER_BENCH         load generator of `limits` (tests/bench/load); the same
#   KEEP=1                   keep the logs of a run that passes, too
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
cgroup=tollkeeper-tests-$$

fail() {
    echo "tests/kubernetes/run.sh: $*" >&2
    exit 1
}

[ "$(id -u)" -eq 0 ] || fail "this needs root, for namespaces and cgroups: sudo -E $0"
for tool in openssl nft python3 ip nsenter; do type -P "$tool" >/dev/null || fail "there is no $tool on the PATH"; done
programs=$("$here/build.sh")
eval "$("$repository/deploy/install-tools.sh" | sed 's/^/export /')"
TOLLKEEPER_TEST_ENVOY=$("$repository/envoy/install.sh")
export TOLLKEEPER_TEST_ENVOY
if [ -z "${TOLLKEEPER_TEST_PROGRAM:-}" ]; then
    (cd "$repository" && nice cargo build --release --locked >&2)
    export TOLLKEEPER_TEST_PROGRAM=${CARGO_TARGET_DIR:-$repository/target}/release/tollkeeper
fi
if [ -z "${TOLLKEEPER_BENCH:-}" ]; then
    TOLLKEEPER_BENCH=$(nice "$repository/tests/bench/load_program.py")
    export TOLLKEEPER_BENCH
fi

# The kubelets' cgroups: one per hierarchy on version 1.
hierarchies() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
        echo /sys/fs/cgroup
    else
        find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d ! -name unified
    fi
}

remove() {
    local hierarchy directory
    for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
        # The last processes may still be ending.
        for _ in 1 2 3 4 5; do
            [ -d "$hierarchy/$cgroup" ] || break
            find "$hierarchy/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 1
        done
    done
    for directory in "$scratch"/node?; do
        [ -n "${KEEP:-}" ] || rm -rf "$directory"
    done
    if [ "${status:-1}" -eq 0 ] && [ -z "${KEEP:-}" ]; then rm -rf "$scratch"; else echo "logs: $scratch/logs" >&2; fi
}

# Calls between pods of one node must come back through kube-proxy.
modprobe br_netfilter 2>/dev/null || true
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/tollkeeper-kubernetes.XXXXXX")
trap remove EXIT
for hierarchy in $(hierarchies); do
    mkdir "$hierarchy/$cgroup"
    [ ! -e "$hierarchy/cgroup.subtree_control" ] ||
        for controller in $(cat "$hierarchy/cgroup.controllers"); do
            for parent in "$hierarchy" "$hierarchy/$cgroup"; do
                echo "+$controller" >"$parent/cgroup.subtree_control" 2>/dev/null || true
            done
        done
    for file in cpuset.cpus cpuset.mems; do
        [ ! -e "$hierarchy/$file" ] || cat "$hierarchy/$file" >"$hierarchy/$cgroup/$file"
    done
    for node in node1 node2; do
        mkdir "$hierarchy/$cgroup/$node"
        for file in cpuset.cpus cpuset.mems; do
            [ ! -e "$hierarchy/$file" ] || cat "$hierarchy/$file" >"$hierarchy/$cgroup/$node/$file"
        done
    done
done

status=0
# In the background, because bash would keep a signal until a program in the foreground ends, and unshare ignores it.
unshare --fork --kill-child --pid --mount-proc --mount --net --propagation private bash -c '
    mkdir -p /run/netns /var/lib/cni /var/log/containers
    for directory in /run/netns /var/lib/cni /var/log/containers; do mount -t tmpfs tmpfs "$directory"; done
    exec nice -n "${NICE:-0}" python3 "$@"' run "$here/checks.py" "$programs" "$scratch" "/$cgroup" "$@" &
cluster=$!
trap 'kill -KILL "$cluster" 2>/dev/null' INT TERM HUP
wait "$cluster" || status=$?
exit "$status"
