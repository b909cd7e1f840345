"""Images without a registry: files of this machine, with the libraries they are linked to, as OCI archives for `ctr`."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile


def libraries(program):
    """Shared libraries of a program, with its loader, by the paths under which it looks for them."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True)
    paths = set()
    for line in listed.stdout.splitlines():
        words = line.split()
        path = words[2] if "=>" in words else words[0] if words else ""
        if path.startswith("/"):
            paths.add(path)
    return paths


class Image:
    """An image under construction: directories, files and programs in one layer."""

    def __init__(self, name):
        self.name = name
        self.files = {}
        self.command = None

    def program(self, path, source):
        """Adds a program and the libraries it needs. The first is what the image runs."""
        self.command = self.command or [path]
        self.files[path] = source
        for library in libraries(source):
            self.files[library] = os.path.realpath(library)
        return self

    def write(self, path, user):
        """Writes an archive that `ctr images import` reads."""
        layer = self._layer()
        packed = gzip.compress(layer, compresslevel=1, mtime=0)
        config = json.dumps({
            "architecture": "amd64",
            "os": "linux",
            "config": {"User": str(user), "Env": ["PATH=/bin"], "Cmd": self.command},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }).encode()
        manifest = json.dumps({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", packed)],
        }).encode()
        entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
        entry["annotations"] = {"io.containerd.image.name": self.name}
        index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
        with tarfile.open(path, "w") as archive:
            add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            add(archive, "index.json", index)
            for blob in (packed, config, manifest):
                add(archive, "blobs/sha256/" + digest(blob).removeprefix("sha256:"), blob)

    def _layer(self):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            directories = {"tmp"}
            for path in self.files:
                parts = path.strip("/").split("/")[:-1]
                directories.update("/".join(parts[:end]) for end in range(1, len(parts) + 1))
            for directory in sorted(directories):
                entry = tarfile.TarInfo(directory)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
                archive.addfile(entry)
            for path, source in sorted(self.files.items()):
                with open(source, "rb") as file:
                    add(archive, path.strip("/"), file.read(), 0o755)
        return buffer.getvalue()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def descriptor(kind, data):
    return {"mediaType": kind, "digest": digest(data), "size": len(data)}


def add(archive, name, data, mode=0o644):
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))
