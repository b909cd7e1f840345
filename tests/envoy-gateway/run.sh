#!/usr/bin/env bash
# Runs a real Envoy Gateway with tollkeeper in the place of its rate limit service, and checks what its users rely on.
#
#     sudo tests/envoy-gateway/run.sh        # root is not needed where users may have namespaces
#
# Each check prints PASS or FAIL; the exit status is 1 if one failed. Needs cargo, go 1.26, redis-server, curl, python3
# with venv, iproute2 and util-linux, and the registries of crates.io, Go and PyPI. TOLLKEEPER names a binary to use
# instead of a release build, ENVOY_GATEWAY an envoy-gateway of the version below. Nothing outside of the build
# directories changes: all runs in namespaces of its own, so no port can be taken.
#
# Envoy Gateway runs without Kubernetes, with policies/*.yaml as its resources. tollkeeper runs as its Deployment says,
# which is read from the module: /bin/ratelimit as process 1, user 65534, read-only root, the same environment, files
# and ports. REDIS_URL is the user's, and TOLLKEEPER_STORE_TIMEOUT lets a busy machine be slow. Envoy is not started by Envoy Gateway, which would end it with itself, but here,
# with the arguments that Envoy Gateway wanted.
# shellcheck disable=SC2317 # Some functions are called by their names.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

version=v1.9.1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

fail() {
    echo "tests/envoy-gateway/run.sh: $*" >&2
    exit 1
}

# --- outside of the namespaces: programs

if [ "${1:-}" != inside ]; then
    for program in go redis-server curl python3 ip unshare; do
        command -v "$program" >/dev/null || fail "$program is missing"
    done
    if [ -z "${TOLLKEEPER:-}" ]; then
        command -v cargo >/dev/null || fail "cargo is missing: install Rust, or name a binary in TOLLKEEPER"
        target=${CARGO_TARGET_DIR:-$root/target}
        cargo build --locked --release --quiet --manifest-path "$root/Cargo.toml" --target-dir "$target"
        TOLLKEEPER=$target/release/tollkeeper
    fi
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/envoy-gateway-$version
    if [ -z "${ENVOY_GATEWAY:-}" ]; then
        ENVOY_GATEWAY=$cache/envoy-gateway
        [ -x "$ENVOY_GATEWAY" ] || (cd / && GOFLAGS='' GOBIN=$cache CGO_ENABLED=0 \
            go install -ldflags "-s -w" "github.com/envoyproxy/gateway/cmd/envoy-gateway@$version")
    fi
    module=$(cd / && GOFLAGS=-mod=mod go mod download -json "github.com/envoyproxy/gateway@$version" |
        sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    envoy=$("$root/envoy/install.sh")
    work=$(mktemp -d "${TMPDIR:-/tmp}/tollkeeper-gateway.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    chmod 0755 "$work"
    namespaces=(unshare --mount --net --pid --fork --kill-child --mount-proc)
    [ "$(id -u)" -eq 0 ] || namespaces+=(--map-root-user)
    TOLLKEEPER=$(realpath "$TOLLKEEPER") ENVOY_GATEWAY=$(realpath "$ENVOY_GATEWAY") \
        ENVOY=$envoy MODULE=$module WORK=$work "${namespaces[@]}" "$0" inside
    exit
fi

: "${WORK:?}" "${MODULE:?}" "${ENVOY:?}" "${ENVOY_GATEWAY:?}" "${TOLLKEEPER:?}"

# --- the network: the gateway, Envoy, Redis and clients here, the service in a namespace like that of a pod

cd "$WORK"
ip link set lo up
mkdir -p /run/netns 2>/dev/null || true
mount -t tmpfs netns /run
mkdir -p /run/netns
ip netns add service
ip link add gateway type veth peer name pod netns service
ip address add 10.48.0.1/24 dev gateway
ip link set gateway up
ip -netns service link set lo up
ip -netns service address add 10.48.0.2/24 dev pod
ip -netns service link set pod up
for client in 10.48.1.10 10.48.1.11 10.48.2.10 10.48.2.11; do ip address add "$client/32" dev lo; done
cat >hosts <<HOSTS
127.0.0.1 localhost
10.48.0.1 envoy-gateway redis
10.48.0.2 envoy-ratelimit.envoy-gateway-system.svc.cluster.local
HOSTS
mount --bind hosts /etc/hosts

in_pod() { nsenter --net=/run/netns/service "$@"; }

# --- helpers

failed=0
# check NAME EXPECTED ACTUAL
check() {
    if [ "$2" = "$3" ]; then
        echo "PASS $1: $3"
    else
        echo "FAIL $1: expected $2, got $3"
        failed=1
    fi
}

milliseconds() { date +%s%3N; }

# wait_for SECONDS NAME COMMAND...
wait_for() {
    local deadline=$(($(milliseconds) + $1 * 1000)) name=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ "$(milliseconds)" -gt "$deadline" ]; then
            echo "FAIL no $name"
            tail -n 20 ./*.log | cut -c 1-400 >&2
            exit 1
        fi
        sleep 0.05
    done
}

# status HOST CURL_ARGUMENT...: status of one request to a route.
status() {
    local host=$1
    shift
    curl -s --max-time 5 -o /dev/null -w '%{http_code}' -H "Host: $host.example" \
        "$@" --url "http://127.0.0.1:8888${path:-/}" || true
}

# statuses COUNT HOST CURL_ARGUMENT...
statuses() {
    local count=$1 all=()
    shift
    for ((; count > 0; count--)); do all+=("$(status "$@")"); done
    echo "${all[*]}"
}

answers() { [ "$(status "$2")" = "$1" ]; }

# check_change NAME STATUS HOST SINCE: the time since Envoy Gateway had translated the change must be short; its file
# provider itself takes seconds.
check_change() {
    local whole published
    wait_for 120 "$2 from $3" answers "$2" "$3"
    whole=$(($(milliseconds) - $4))
    published=$(grep 'global-ratelimit.*received a notification' gateway.log | tail -n 1 | cut -f 1)
    check_soon "$1: $whole ms in all, of the new rules in the gateway" $((whole + $4 - $(date -d "$published" +%s%3N))) 5000
}

# check_soon NAME MILLISECONDS MAXIMUM
check_soon() {
    if [ "$2" -le "$3" ]; then echo "PASS $1: after $2 ms"; else
        echo "FAIL $1: after $2 ms, more than $3"
        failed=1
    fi
}

page() { in_pod curl -s --max-time 5 "http://127.0.0.1:6070$1"; }

# rules FIELD: a field of /rlconfig/status, such as xds.stream; `None` if it is absent.
rules() {
    page /rlconfig/status | python3 -c '
import functools, json, sys
print(functools.reduce(lambda value, name: value.get(name), sys.argv[1].split("."), json.load(sys.stdin)))
' "$1" 2>/dev/null || echo none
}

stream() { rules "xds.$1"; }

stream_is() { [ "$(stream stream)" = "$1" ]; }

# sum_of SERIES: sum of the samples with this prefix on the metrics page, which is asked for as Prometheus does.
sum_of() {
    curl -s http://10.48.0.2:19001/metrics | awk -v start="$1" 'index($0, start) == 1 { sum += $NF } END { print sum + 0 }'
}

# --- processes

# Envoy Gateway reads its files at each event; a file appears whole.
put() {
    cat >"$WORK/.next" && mv "$WORK/.next" "$WORK/resources/$1"
}

# limit NAME REQUESTS: sets the limit of a policy that has one rule.
limit() { sed "s/requests: .*/requests: $2/" "$here/policies/$1.yaml" | put "$1.yaml"; }

start_gateway() {
    # A simple command, so that its process is the last one started here.
    ENVOY_GATEWAY_NAMESPACE=envoy-gateway-system "$ENVOY_GATEWAY" server --config-path "$WORK/gateway.conf" >>gateway.log 2>&1 &
    gateway=$!
}

# Envoy Gateway names files in /certs, so Envoy runs in a container too.
start_envoy() {
    mapfile -d '' arguments <envoy.arguments
    "$root/tests/kit/image.sh" -v "$WORK/home/certs/envoy:/certs" -v "$WORK/home:$WORK/home" -v "$WORK/hosts:/etc/hosts" \
        "$ENVOY" /usr/local/bin/envoy --disable-hot-restart "${arguments[@]}" >>envoy.log 2>&1 &
    envoy=$!
}

kill_gateway() {
    kill -KILL "$gateway"
    wait "$gateway" 2>/dev/null || true
}

gateway_listens() { (exec 3<>/dev/tcp/10.48.0.1/18001) 2>/dev/null; }

# start_service [IMAGE_ARGUMENT...] -- [NAME=VALUE...]
start_service() {
    local volumes=()
    while [ "$1" != -- ]; do
        volumes+=("$1")
        shift
    done
    shift
    nsenter --net=/run/netns/service env -i PATH="$PATH" "${deployment[@]}" REDIS_URL=redis:6379 \
        TOLLKEEPER_STORE_TIMEOUT=2s "$@" "$root/tests/kit/image.sh" \
        -v "$WORK/home/certs/envoy-rate-limit:/certs" -v "$WORK/statsd-exporter:/etc/statsd-exporter" \
        -v "$WORK/hosts:/etc/hosts" "${volumes[@]}" "$TOLLKEEPER" /bin/ratelimit >>service.log 2>&1 &
    service=$!
}

kill_service() {
    kill -KILL "$service"
    wait "$service" 2>/dev/null || true
    wait_for 10 "end of the service" is_down
}

# The probe of the Deployment, from the node.
is_ready() { [ "$(curl -s --max-time 1 -o /dev/null -w '%{http_code}' http://10.48.0.2:8080/healthcheck)" = 200 ]; }

is_down() { ! is_ready; }

testdata=$MODULE/internal/infrastructure/kubernetes/ratelimit/testdata
mapfile -t deployment < <(awk '
    $1 == "-" && $2 == "name:" && $3 ~ /^[A-Z_]+$/ { name = $3 }
    $1 == "value:" && name != "REDIS_URL" && name != "" { gsub("\"", "", $2); print name "=" $2; name = "" }
' "$testdata/deployments/default.yaml")
[ ${#deployment[@]} -gt 20 ] || fail "the Deployment has ${#deployment[@]} variables"
mkdir -p statsd-exporter resources
cp "$MODULE/internal/infrastructure/kubernetes/ratelimit/statsd_conf.yaml" statsd-exporter/conf.yaml

# Envoy Gateway starts this program as Envoy.
envoy_version=$("$ENVOY" --version | sed -n 's|.*/\([0-9.]*\)/[A-Z].*|\1|p')
mkdir -p "data/envoy-versions/$envoy_version/bin"
cat >"data/envoy-versions/$envoy_version/bin/envoy" <<PROGRAM
#!/bin/sh
printf '%s\\0' "\$@" >$WORK/arguments.new
mv $WORK/arguments.new $WORK/envoy.arguments
exec sleep infinity
PROGRAM
chmod +x "data/envoy-versions/$envoy_version/bin/envoy"

sed "s|WORK|$WORK|" "$here/envoy-gateway.yaml" >gateway.conf
sed "s|ENVOY_VERSION|$envoy_version|" "$here/gateway.yaml" >resources/gateway.yaml
cp "$here"/policies/*.yaml resources/
for host in header headers rules network shared-a shared-b shadow zero changed deleted cost override \
    second minute hour day week month year; do
    cat <<ROUTE
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: $host
  namespace: default
spec:
  parentRefs:
  - name: eg
  hostnames: [$host.example]
  rules:
  - backendRefs:
    - group: gateway.envoyproxy.io
      kind: Backend
      name: upstream
---
ROUTE
done >resources/routes.yaml

"$ENVOY_GATEWAY" certgen --local --config-home "$WORK/home" >gateway.log 2>&1
mkdir upstream upstream/api
redis-server --bind 10.48.0.1 --protected-mode no --save '' >redis.log 2>&1 &
python3 -m http.server --bind 127.0.0.1 --directory upstream 3000 >upstream.log 2>&1 &

echo "== the service starts before the gateway; $("$TOLLKEEPER" --version), Envoy Gateway $version, Envoy $envoy_version"
start_service --
wait_for 30 "ready service" is_ready
check "ready without rules, by the probe on 8080" "down 0" "$(stream stream) $(rules domains)"
started=$(milliseconds)
start_gateway
wait_for 60 "Envoy from the gateway" test -e envoy.arguments
start_envoy
wait_for 60 "rules" stream_is up
check_soon "rules from the gateway" $(($(milliseconds) - started)) 60000
wait_for 60 "routes in Envoy" answers 429 zero

echo "== policies limit"
# The windows are those of the clock.
while [ "$(($(date +%s) % 60))" -gt 40 ]; do sleep 1; done
limited="200 200 429"
check "one header, distinct: ann" "$limited" "$(statuses 3 header -H 'x-user: ann')"
check "one header, distinct: bob" "$limited" "$(statuses 3 header -H 'x-user: bob')"
check "one header, absent" "200 200 200" "$(statuses 3 header)"
all=(-H 'x-plan: free' -H 'x-user: ann')
check "headers, method, path and query" "$limited" "$(path='/api/?page=1' statuses 3 headers "${all[@]}")"
check "the same with another query" "$limited" "$(path='/api/?page=2' statuses 3 headers "${all[@]}")"
check "the same with the inverted header" "200 200 200" "$(path='/api/?page=1' statuses 3 headers "${all[@]}" -H 'x-staff: true')"
check "the same without one header" "200 200 200" "$(path='/api/?page=1' statuses 3 headers -H 'x-user: ann')"
check "the same on another path" "200 200 200" "$(path='/?page=1' statuses 3 headers "${all[@]}")"
check "two rules: one user of a team" "$limited" "$(statuses 3 rules -H 'x-user: ann' -H 'x-team: a')"
check "two rules: another user of the team" "200 429 429" "$(statuses 3 rules -H 'x-user: bob' -H 'x-team: a')"
check "network, each address: 10.48.1.10" "$limited" "$(statuses 3 network --interface 10.48.1.10)"
check "network, each address: 10.48.1.11" "$limited" "$(statuses 3 network --interface 10.48.1.11)"
check "network, all addresses: 10.48.2.10" "200 200" "$(statuses 2 network --interface 10.48.2.10)"
check "network, all addresses: 10.48.2.11" "200 429" "$(statuses 2 network --interface 10.48.2.11)"
check "another network" "200 200 200 200" "$(statuses 4 network)"
check "shared by two routes: first" "200 200" "$(statuses 2 shared-a -H 'x-user: ann')"
check "shared by two routes: second" "200 429" "$(statuses 2 shared-b -H 'x-user: ann')"
check "shared by two routes: first again" "429" "$(statuses 1 shared-a -H 'x-user: ann')"
check "shadow mode" "200 200 200" "$(statuses 3 shadow)"
check "zero requests" "429" "$(statuses 1 zero)"
# A response is charged after its end, so the next request waits.
costs=()
for _ in {1..4}; do
    costs+=("$(status cost)")
    sleep 0.3
done
check "cost 0 of requests, 5 of responses, 10 allowed" "200 200 200 429" "${costs[*]}"
check "limit from metadata" "200 429" "$(statuses 2 override)"
check "unit second" "2, 2;w=1" "$(curl -s -o /dev/null -D - -H 'Host: second.example' http://127.0.0.1:8888/ | sed -n 's/\r$//; s/^x-ratelimit-limit: //ip')"
burst=()
for _ in {1..12}; do burst+=(--next -s -o /dev/null -w '%{http_code} ' -H 'Host: second.example' http://127.0.0.1:8888/); done
check "unit second rejects in a burst" 429 "$(curl "${burst[@]:1}" | tr ' ' '\n' | sort | uniq | grep -o 429)"
for unit in minute:60 hour:3600 day:86400 week:604800 month:2592000 year:31536000; do
    name=${unit%:*}
    check "unit $name" "$limited" "$(statuses 3 "$name")"
    headers=$(curl -s -o /dev/null -D - -H "Host: $name.example" http://127.0.0.1:8888/ | sed -n 's/\r$//; s/^x-ratelimit-limit: //ip')
    check "unit $name in the headers" "2, 2;w=${unit#*:}" "$headers"
done

echo "== pages of the pod"
check "/rlconfig, which egctl prints, has all limits" "$(cat resources/*.yaml | grep -c requests:)" \
    "$(page /rlconfig | grep -c requests_per_unit)"
series=ratelimit_service_rate_limit
route=httproute/default/zero/rule/0/match/0/zero_example
zero="{domain=\"default/eg/http\",key1=\"${route}_$route\",key2=\"rule-0-match--1_rule-0-match--1\"}"
for name in total_hits over_limit near_limit; do
    check "/metrics has ${series}_$name of all domains" yes "$([ "$(sum_of "${series}_$name{domain=")" -gt 0 ] && echo yes)"
done
check "the dashboard's labels of a rejected route" yes "$([ "$(sum_of "${series}_over_limit$zero")" -gt 0 ] && echo yes)"
check "mapper file of the tests is that of Envoy Gateway" "" \
    "$(diff statsd-exporter/conf.yaml "$root/tests/suite/rules/xds/statsd_exporter.yaml")"

echo "== changes without restart"
since=$(milliseconds)
limit changed 100000
check_change "a changed policy applies" 200 changed "$since"
since=$(milliseconds)
limit changed 0
check_change "and the change back" 429 changed "$since"
since=$(milliseconds)
rm resources/deleted.yaml
check_change "a deleted policy frees" 200 deleted "$since"

echo "== the gateway is killed and started again; it numbers its snapshots from 1"
kill_gateway
wait_for 10 "lost stream" stream_is down
check "limits stay while it is away" "429 429 200" "$(status zero) $(status header -H 'x-user: ann') $(status header -H 'x-user: new')"
check "the service stays ready" 0 "$(is_ready; echo $?)"
start_gateway
wait_for 60 "rules" stream_is up
check "counters stay" "429" "$(status header -H 'x-user: bob')"
requests=0 gaps=0 count=0
for away in 1 3 5 9 14; do
    kill_gateway
    before=$(stream version) requests=$((100000 - requests)) count=$((count + 1))
    limit changed "$requests"
    sleep "$away"
    start_gateway
    wait_for 60 "gateway" gateway_listens
    since=$(milliseconds) asked=
    expected=$([ "$requests" = 0 ] && echo 429 || echo 200)
    until answers "$expected" changed; do
        if [ -z "$asked" ] && [ "$(stream stream)" = unanswered ]; then asked=$(($(milliseconds) - since)); fi
        [ "$(milliseconds)" -lt $((since + 60000)) ] || break
    done
    [ -z "$asked" ] || gaps=$((gaps + 1))
    echo "     try $count, $away s away: asked ${asked:-less than 0} ms after the gateway listened, version $before before and $(stream version) after"
    check_change "what changed meanwhile applies" "$expected" changed "$since"
done
echo "     $gaps of $count tries met a gateway that had no snapshot yet"

echo "== certificates are rotated"
"$ENVOY_GATEWAY" certgen --local --overwrite --config-home "$WORK/home" >>gateway.log 2>&1
old=$(stream stream_since)
kill_gateway
since=$(milliseconds)
start_gateway
is_another_stream() { [ "$(stream stream)" = up ] && [ "$(stream stream_since)" != "$old" ]; }
wait_for 60 "stream with the new certificates" is_another_stream
check_soon "the stream is up with the new authority" $(($(milliseconds) - since)) 60000
since=$(milliseconds)
limit changed 0
check_change "a changed policy applies" 429 changed "$since"
# Envoy reads the authority of the service's certificate once.
kill -KILL "$envoy"
wait "$envoy" 2>/dev/null || true
start_envoy
wait_for 60 "routes in Envoy" answers 429 zero
check "a new Envoy trusts the service" 429 "$(status changed)"

echo "== the last good rules survive a restart while the gateway is away"
kill_service
mkdir -p cache
chown 65534:65534 cache 2>/dev/null || true
start_service -v "$WORK/cache:/cache:rw" -- TOLLKEEPER_XDS_CACHE=/cache/rules
wait_for 60 "rules" stream_is up
check "the cache is private" 600 "$(stat -c %a cache/rules)"
kill_gateway
kill_service
start_service -v "$WORK/cache:/cache:rw" -- TOLLKEEPER_XDS_CACHE=/cache/rules
wait_for 30 "ready service" is_ready
wait_for 30 "connection of Envoy" answers 429 zero
check "limits apply without the gateway" "down 429 429" "$(stream stream) $(status changed) $(status day)"
check "the status says that they are cached" yes "$([ "$(stream cached_since)" != None ] && echo yes)"
limit changed 100000
start_gateway
wait_for 60 "gateway" gateway_listens
check_change "what changed meanwhile applies" 200 changed "$(milliseconds)"
check "the status says that they are no longer cached" None "$(stream cached_since)"

echo "== defaults for the rules of the gateway"
echo 'defaults: { "*": { by_unit: { day: { algorithm: sliding_window_counter } } } }' >defaults.yaml
kill_service
start_service -v "$WORK/defaults.yaml:/defaults.yaml" -- TOLLKEEPER_RULE_DEFAULTS=/defaults.yaml
wait_for 60 "rules" stream_is up
wait_for 30 "connection of Envoy" answers 429 zero
check "limits per day have the algorithm" "$(cat resources/*.yaml | grep -c 'unit: Day')" \
    "$(page /rlconfig | grep -c 'algorithm: sliding_window_counter')"
check "and reject" "200 200 429" "$(statuses 3 header -H 'x-user: eve')"

echo "== log of the service"
grep -v level=info service.log | cut -c 1-300 || true
[ $failed = 0 ] && echo "all checks passed"
exit $failed
