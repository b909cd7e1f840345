#!/usr/bin/env bash
# Runs a program as Kubernetes runs a restricted container: image.sh [-v SOURCE:TARGET]... PROGRAM NAME [ARGUMENT]...
#
# NAME is the path of the program in the container, such as /bin/ratelimit. It is process 1, with uid and gid 65534, no
# capabilities, and a read-only root that holds the program, its libraries, the system's CA bundle and the volumes. A
# volume with `:rw` at the end is writable. Environment, network and exit status are those of this script.
#
# Needs util-linux, and root or user namespaces.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "image.sh: $*" >&2
    exit 125
}

# The outer process namespace ends with this process, and the container with the namespace.
if [ "${TOLLKEEPER_IMAGE_STAGE:-}" != inside ]; then
    outer=(unshare --mount --pid --fork --kill-child)
    [ "$(id -u)" -eq 0 ] || outer+=(--map-root-user)
    "${outer[@]}" true ||
        fail "needs root or user namespaces (Ubuntu: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)"
    TOLLKEEPER_IMAGE_STAGE=inside exec "${outer[@]}" "$0" "$@"
fi
unset TOLLKEEPER_IMAGE_STAGE

volumes=()
while [ "${1:-}" = -v ]; do
    volumes+=("$2")
    shift 2
done
program=$1 name=$2
shift 2

# A directory that is everywhere; only the processes below see what it becomes.
root=/mnt
mount -t tmpfs -o mode=0755 image "$root"

# attach SOURCE TARGET: makes a file or a directory visible at a path of the container.
attach() {
    if [ -d "$1" ]; then
        mkdir -p "$root$2"
    else
        mkdir -p "$(dirname "$root$2")"
        touch "$root$2"
    fi
    mount --bind "$1" "$root$2"
}

# A mount keeps its other flags, which a user namespace may not clear.
write_protect() {
    local flags
    flags=$(findmnt --noheadings --first-only --output VFS-OPTIONS --mountpoint "$root$1" | sed 's/^r[wo],\{0,1\}//')
    mount -o "remount,bind,ro${flags:+,$flags}" "$root$1"
}

mkdir -p "$root/proc"
for device in /dev/null /dev/zero /dev/urandom; do attach "$device" "$device"; done
libraries=$(ldd "$program" | grep -o '/[^ ]*')
for library in $libraries; do
    mkdir -p "$root$(dirname "$library")"
    cp --dereference "$library" "$root$library"
done
bundle=/etc/ssl/certs/ca-certificates.crt
if [ -e "$bundle" ]; then attach "$bundle" "$bundle" && write_protect "$bundle"; fi
attach "$program" "$name"
write_protect "$name"
for volume in "${volumes[@]}"; do
    IFS=: read -r source target mode <<<"$volume"
    attach "$source" "$target"
    [ "$mode" = rw ] || write_protect "$target"
done
mount -o remount,bind,ro "$root"

container=(unshare --pid --fork --mount-proc=/proc --root "$root" --wd /)
if awk '$1 <= 65534 && 65534 < $1 + $3 { found = 1 } END { exit !found }' /proc/self/uid_map; then
    container=(setpriv --no-new-privs --clear-groups "${container[@]}" --setgid 65534 --setuid 65534)
else
    # This namespace has one user only, which the next one calls 65534.
    container=(setpriv --no-new-privs "${container[@]}" --user --map-user 65534 --map-group 65534)
fi
status=0
"${container[@]}" "$name" "$@" || status=$?
exit "$status"
