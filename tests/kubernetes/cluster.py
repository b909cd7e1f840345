"""A Kubernetes of two nodes on one machine.

Each node is a network namespace with a containerd, a kubelet and a kube-proxy of its own; the control plane runs beside
them. All of it lives in the mount, network and process namespaces that run.sh made, and ends with them.

    10.213.0.1        API server        10.244.N.0/24   pods of node N
    10.213.0.1N       node N            10.96.0.0/16    Services
"""

import json
import os
import subprocess
import time

CONTROL = "10.213.0.1"
DNS = "10.96.0.10"
PAUSE = "tollkeeper.test/pause:1"
NODES = ("node1", "node2")


def run(*command, check=True, **options):
    """Runs a command to its end and returns its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what, condition, seconds=120):
    """Waits until a condition returns something true, and returns that. A command that fails is tried again."""
    end = time.monotonic() + seconds
    problem = ""
    while True:
        try:
            found = condition()
            if found:
                return found
        except RuntimeError as error:
            problem = f": {error}"
        if time.monotonic() > end:
            raise RuntimeError(f"no {what} within {seconds} s{problem}")
        time.sleep(0.5)


class Cluster:
    """The processes of a cluster, and its `kubectl`."""

    def __init__(self, programs, scratch, cgroup):
        self.bin = os.path.join(programs, "bin")
        self.debian = os.path.join(programs, "debian")
        self.scratch = scratch
        self.cgroup = cgroup
        self.kubeconfig = os.path.join(scratch, "admin.kubeconfig")
        os.makedirs(os.path.join(scratch, "logs"), exist_ok=True)
        os.environ["PATH"] = f"{self.bin}:{self.debian}/usr/bin:{self.debian}/usr/sbin:" + os.environ["PATH"]
        os.environ["KUBECONFIG"] = self.kubeconfig

    def start(self, images):
        """Starts everything and waits until both nodes are ready. `images` are OCI archives."""
        self._network()
        self._credentials()
        self._control_plane()
        for number, node in enumerate(NODES, 1):
            self._containerd(number, node, images)
        for number, node in enumerate(NODES, 1):
            self._node(number, node)
        wait_for("ready nodes", lambda: self._ready_nodes() == len(NODES), 180)

    def kubectl(self, *arguments, check=True, input=None):
        return run("kubectl", *arguments, check=check, input=input)

    def get(self, *arguments):
        """An object, or a list of objects, of the API."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def apply(self, *objects, namespace="default"):
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.kubectl("apply", "--namespace", namespace, "--filename=-", input=text)

    def _ready_nodes(self):
        try:
            nodes = self.get("nodes")["items"]
        except RuntimeError:
            return 0
        conditions = [it for node in nodes for it in node["status"].get("conditions", [])]
        return sum(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

    def daemon(self, name, *command, node=None):
        """Starts a process whose output goes to a log."""
        prefix = ["nsenter", f"--net=/run/netns/{node}"] if node else []
        log = open(os.path.join(self.scratch, "logs", name), "ab")
        return subprocess.Popen([*prefix, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def write(self, name, content):
        path = os.path.join(self.scratch, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content if isinstance(content, str) else json.dumps(content))
        return path

    def _network(self):
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "nodes", "type", "bridge")
        run("ip", "address", "add", f"{CONTROL}/24", "dev", "nodes")
        run("ip", "link", "set", "nodes", "up")
        for number, node in enumerate(NODES, 1):
            run("ip", "netns", "add", node)
            run("ip", "link", "add", f"to-{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
            run("ip", "link", "set", f"to-{node}", "master", "nodes", "up")
            inside = ["ip", "-n", node]
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "address", "add", f"10.213.0.1{number}/24", "dev", "eth0")
            run(*inside, "link", "set", "eth0", "up")
            run(*inside, "route", "add", "default", "via", CONTROL)
            run("ip", "route", "add", f"10.244.{number}.0/24", "via", f"10.213.0.1{number}")
            for other in range(1, len(NODES) + 1):
                if other != number:
                    run(*inside, "route", "add", f"10.244.{other}.0/24", "via", f"10.213.0.1{other}")
            for setting in ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1"):
                run("nsenter", f"--net=/run/netns/{node}", "sysctl", "-q", "-w", setting)
        run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")

    def _credentials(self):
        ca, key = (os.path.join(self.scratch, name) for name in ("ca.crt", "ca.key"))
        run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca",
            "-keyout", key, "-out", ca)
        names = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
        self.certificate("apiserver", f"{names},IP:{CONTROL}")
        run("openssl", "genrsa", "-out", os.path.join(self.scratch, "accounts.key"), "2048")
        # Tokens instead of client certificates: the namespaces let nobody else in.
        users = [("admin", "system:masters"), ("system:kube-controller-manager", ""), ("system:kube-scheduler", ""),
                 ("system:kube-proxy", "")]
        users += [(f"system:node:{node}", "system:nodes") for node in NODES]
        lines = [f'token-{user},{user},{user},"{groups}"' for user, groups in users]
        self.write("tokens.csv", "\n".join(lines) + "\n")
        for user, _ in users:
            self._kubeconfig(user)

    def certificate(self, name, names):
        """Makes NAME.crt and NAME.key, signed by the cluster's authority."""
        path = os.path.join(self.scratch, name)
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-addext",
            f"subjectAltName={names}", "-keyout", f"{path}.key", "-out", f"{path}.csr")
        run("openssl", "x509", "-req", "-in", f"{path}.csr", "-CA", f"{self.scratch}/ca.crt", "-CAkey",
            f"{self.scratch}/ca.key", "-CAcreateserial", "-days", "2", "-copy_extensions", "copy", "-out", f"{path}.crt")

    def _kubeconfig(self, user):
        return self.write(f"{user.rsplit(':', 1)[-1]}.kubeconfig", {
            "apiVersion": "v1", "kind": "Config", "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {
                "server": f"https://{CONTROL}:6443", "certificate-authority": f"{self.scratch}/ca.crt"}}],
            "users": [{"name": "user", "user": {"token": f"token-{user}"}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "user"}}],
        })

    def _control_plane(self):
        scratch = self.scratch
        # Nothing here outlives the run, so nothing waits for the disk.
        os.makedirs(f"{scratch}/etcd")
        run("mount", "-t", "tmpfs", "tmpfs", f"{scratch}/etcd")
        self.daemon("etcd", "etcd", "--data-dir", f"{scratch}/etcd/data")
        self.daemon(
            "kube-apiserver", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={CONTROL}",
            "--service-cluster-ip-range=10.96.0.0/16", "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", f"--token-auth-file={scratch}/tokens.csv",
            f"--tls-cert-file={scratch}/apiserver.crt", f"--tls-private-key-file={scratch}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={scratch}/accounts.key",
            f"--service-account-signing-key-file={scratch}/accounts.key")
        wait_for("API server", lambda: "ok" in self.kubectl("get", "--raw=/readyz", check=False), 180)
        self.daemon(
            "kube-controller-manager", "kube-controller-manager", f"--kubeconfig={scratch}/kube-controller-manager.kubeconfig",
            f"--service-account-private-key-file={scratch}/accounts.key", f"--root-ca-file={scratch}/ca.crt",
            "--use-service-account-credentials", "--leader-elect=false")
        self.daemon("kube-scheduler", "kube-scheduler", f"--kubeconfig={scratch}/kube-scheduler.kubeconfig", "--leader-elect=false")

    def socket(self, node):
        return f"{self.scratch}/{node}/containerd.sock"

    def _containerd(self, number, node, images):
        home = f"{self.scratch}/{node}"
        self.write(f"{node}/cni/10-pods.conflist", {"cniVersion": "0.4.0", "name": f"pods-{node}", "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipMasq": False,
            "ipam": {"type": "host-local", "dataDir": f"{home}/addresses", "routes": [{"dst": "0.0.0.0/0"}],
                     "ranges": [[{"subnet": f"10.244.{number}.0/24"}]]},
        }]})
        config = self.write(f"{node}/containerd.toml", f"""version = 2
root = "{home}/root"
state = "{home}/state"
[grpc]
address = "{self.socket(node)}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
# Some containers have no CAP_SYS_RESOURCE, and runc fails where it may not lower oom_score_adj.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{self.debian}/usr/lib/cni"
conf_dir = "{home}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = "{self.debian}/usr/sbin/runc"
""")
        self.daemon(f"containerd-{node}", "containerd", "--config", config, node=node)
        ctr = ["ctr", "--address", self.socket(node), "--namespace", "k8s.io"]
        wait_for("containerd", lambda: "Server" in run(*ctr, "version", check=False))
        for image in images:
            run(*ctr, "images", "import", image)

    def _node(self, number, node):
        home = f"{self.scratch}/{node}"
        config = self.write(f"{node}/kubelet.json", {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.socket(node)}", "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"{self.cgroup}/{node}", "failCgroupV1": False, "enforceNodeAllocatable": [],
            "clusterDNS": [DNS], "clusterDomain": "cluster.local", "resolvConf": "", "failSwapOn": False,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"}, "podLogsDir": f"{home}/pods",
            "volumePluginDir": f"{home}/plugins", "syncFrequency": "10s", "nodeStatusUpdateFrequency": "5s",
            # The machine's disk is not the cluster's business.
            "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        })
        self.daemon(
            f"kubelet-{node}", "kubelet", f"--config={config}", f"--kubeconfig={self.scratch}/{node}.kubeconfig",
            f"--hostname-override={node}", f"--node-ip=10.213.0.1{number}", f"--root-dir={home}/kubelet",
            f"--node-labels=topology.kubernetes.io/zone=zone{number}", node=node)
        config = self.write(f"{node}/proxy.json", {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "nftables",
            "clientConnection": {"kubeconfig": f"{self.scratch}/kube-proxy.kubeconfig"}, "hostnameOverride": node,
            "clusterCIDR": "10.244.0.0/16",
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        })
        self.daemon(f"kube-proxy-{node}", "kube-proxy", f"--config={config}", node=node)
