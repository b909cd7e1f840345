#!/usr/bin/env python3
"""The load generator `tollkeeper-bench` (load/README.md), for scripts. Called as a program, prints its path."""

import functools
import json
import os
import pathlib
import subprocess

MANIFEST = pathlib.Path(__file__).with_name("Cargo.toml")


@functools.cache
def load_program():
    """Path of the program: TOLLKEEPER_BENCH or, without it, a release build."""
    if program := os.environ.get("TOLLKEEPER_BENCH"):
        return program
    built = subprocess.run(
        ["cargo", "build", "--release", "--locked", "--manifest-path", MANIFEST, "--bin", "tollkeeper-bench",
         "--message-format", "json-render-diagnostics"], stdout=subprocess.PIPE, text=True, check=True)
    artifacts = [json.loads(line) for line in built.stdout.splitlines()]
    return next(artifact["executable"] for artifact in artifacts if artifact.get("executable"))


if __name__ == "__main__":
    print(load_program())
