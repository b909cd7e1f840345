"""What runs beside tollkeeper in the cluster: its images, CoreDNS, Redis and Envoy, as objects of the API."""

import json
import os

import cluster
from images import Image

TOLLKEEPER = "tollkeeper.test/tollkeeper"
VERSIONS = ("1", "2")
VALKEY = "docker.io/valkey/valkey:8.1-alpine"
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
PASSWORD = "sesame"
# Envoy answers from its own second listener, because its filter leaves direct responses alone.
LISTENERS = {"clients": 10000, "upstream": 10001, "admin": 9901}


def write_images(directory, programs, program):
    """Writes the archives of all images and returns their paths."""
    envoy = os.environ["TOLLKEEPER_TEST_ENVOY"]
    redis = os.path.realpath(os.path.join(programs, "debian/usr/bin/redis-check-rdb"))
    images = [
        Image(cluster.PAUSE).program("/pause", os.path.join(programs, "bin/pause")),
        Image("tollkeeper.test/coredns:1").program("/coredns", os.path.join(programs, "bin/coredns")),
        Image("tollkeeper.test/envoy:1").program("/bin/envoy", envoy),
        Image("tollkeeper.test/redis:1").program("/bin/redis-server", redis),
        # The plain manifests name this image.
        Image(VALKEY).program("/bin/valkey-server", redis)
        .program("/bin/valkey-cli", os.path.join(programs, "debian/usr/bin/redis-cli")),
    ]
    for version in VERSIONS:
        image = Image(f"{TOLLKEEPER}:{version}").program("/bin/tollkeeper", program)
        if os.path.exists(AUTHORITIES):
            image.files[AUTHORITIES] = AUTHORITIES
        images.append(image)
    paths = []
    for number, image in enumerate(images):
        paths.append(os.path.join(directory, f"image-{number}.tar"))
        image.write(paths[-1], 0 if "coredns" in image.name or "pause" in image.name else 65532)
    return paths


def namespace(name, level):
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {
        "name": name, "labels": {"pod-security.kubernetes.io/enforce": level}}}


def config_map(name, files):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files}


def secret(name, files):
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": files}


def service(name, ports, app=None, **spec):
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {
        "selector": {"app": app or name}, "ports": [{"name": f"port-{port}", "port": port} for port in ports], **spec}}


def deployment(name, container, volumes, **pod):
    # A pod without requests gets almost nothing of a busy machine.
    resources = {"requests": {"cpu": "200m", "memory": "64Mi"}}
    container = {"name": name, "imagePullPolicy": "Never", "resources": resources, **container}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": {
        "replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": {
            "metadata": {"labels": {"app": name}},
            "spec": {"enableServiceLinks": False, "terminationGracePeriodSeconds": 1, "containers": [container],
                     "volumes": volumes, **pod}}}}


def volume(kind, name):
    return {"name": name, kind: {"secretName" if kind == "secret" else "name": name}}


def coredns():
    """CoreDNS as kubeadm configured it before 1.31: answers are cached for 30 s."""
    name = "coredns"
    corefile = """.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa {
        ttl 30
    }
    cache 30
    loadbalance
}
"""
    rules = [{"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": ["list", "watch"]},
             {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}]
    account = {"kind": "ServiceAccount", "name": name, "namespace": "kube-system"}
    ports = [{"name": protocol.lower(), "port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
         "subjects": [account], "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}},
        config_map(name, {"Corefile": corefile}),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns"}, "spec": {
            "clusterIP": cluster.DNS, "selector": {"app": name}, "ports": ports}},
        deployment(name, {
            "image": "tollkeeper.test/coredns:1", "command": ["/coredns", "-conf", "/etc/coredns/Corefile"],
            "volumeMounts": [{"name": name, "mountPath": "/etc/coredns"}],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 2},
        }, [volume("configMap", name)], serviceAccountName=name),
    ]


def redis():
    """A Redis with a password and TLS. Its Secret `redis-tls` holds the certificate."""
    options = ["--port", "0", "--tls-port", "6379", "--tls-auth-clients", "no", "--tls-cert-file", "/tls/tls.crt",
               "--tls-key-file", "/tls/tls.key", "--tls-ca-cert-file", "/tls/ca.crt", "--requirepass", PASSWORD,
               "--save", "", "--appendonly", "no", "--dir", "/tmp", "--protected-mode", "no"]
    return [
        service("redis", [6379]),
        deployment("redis", {
            "image": "tollkeeper.test/redis:1", "command": ["/bin/redis-server", *options],
            "volumeMounts": [{"name": "redis-tls", "mountPath": "/tls"}],
            "readinessProbe": {"tcpSocket": {"port": 6379}, "periodSeconds": 2},
        }, [volume("secret", "redis-tls")]),
    ]


def envoy(name, address, timeout="1s", tollkeeper=None, grpc_service=None):
    """An Envoy that asks tollkeeper at `address` for each request, as envoy/replicas.yaml does."""
    files = {"envoy.json": json.dumps(envoy_config(address, timeout, tollkeeper or {}, grpc_service or {}))}
    return [
        config_map(name, files),
        deployment(name, {
            "image": "tollkeeper.test/envoy:1",
            "command": ["/bin/envoy", "-c", "/etc/envoy/envoy.json", "--disable-hot-restart", "--concurrency", "2",
                        "--log-level", "warning"],
            "volumeMounts": [{"name": name, "mountPath": "/etc/envoy"}],
            "readinessProbe": {"httpGet": {"path": "/ready", "port": LISTENERS["admin"]}, "periodSeconds": 2},
        }, [volume("configMap", name)]),
    ]


def envoy_config(address, timeout, tollkeeper, grpc_service):
    filters = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{filters}.http.router.v3.Router"}}
    ratelimit = {"name": "ratelimit", "typed_config": {
        "@type": f"{filters}.http.ratelimit.v3.RateLimit", "domain": "edge", "timeout": timeout,
        "failure_mode_deny": False, "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
        "rate_limit_service": {"transport_api_version": "V3", "grpc_service": {
            "envoy_grpc": {"cluster_name": "tollkeeper"}, **grpc_service}}}}
    user = {"actions": [{"request_headers": {"header_name": "x-user", "descriptor_key": "user"}}]}
    exact = {"actions": [{"request_headers": {"header_name": "x-exact", "descriptor_key": "exact"}}]}

    def listener(name, http_filters, host):
        return {
            "name": name, "address": {"socket_address": {"address": "0.0.0.0", "port_value": LISTENERS[name]}},
            "filter_chains": [{"filters": [{"name": "hcm", "typed_config": {
                "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": name,
                "http_filters": http_filters,
                "route_config": {"virtual_hosts": [{"name": name, "domains": ["*"], **host}]}}}]}]}

    def endpoints(name, host, port):
        endpoint = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}
        return {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}

    return {
        "admin": {"address": {"socket_address": {"address": "0.0.0.0", "port_value": LISTENERS["admin"]}}},
        "static_resources": {
            "listeners": [
                listener("clients", [ratelimit, router], {
                    "rate_limits": [user, exact], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}]}),
                listener("upstream", [router], {
                    "routes": [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]}),
            ],
            "clusters": [
                {"name": "upstream", "load_assignment": endpoints("upstream", "127.0.0.1", LISTENERS["upstream"])},
                {"name": "tollkeeper", "type": "STRICT_DNS", "connect_timeout": "0.25s",
                 "load_assignment": endpoints("tollkeeper", address, 8081),
                 "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                     "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                     "explicit_http_config": {"http2_protocol_options": {
                         "connection_keepalive": {"interval": "5s", "timeout": "1s"}}}}},
                 "health_checks": [{"timeout": "1s", "interval": "1s", "no_traffic_interval": "1s", "unhealthy_threshold": 1,
                                    "healthy_threshold": 1, "grpc_health_check": {"service_name": "ratelimit"}}],
                 **tollkeeper},
            ],
        },
    }
